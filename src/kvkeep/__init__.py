"""kvkeep: the KV cache that outlives the GPU."""

__version__ = "0.1.0"
