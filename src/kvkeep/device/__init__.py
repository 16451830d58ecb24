"""Copies between an engine's paged KV cache and the pool's slots."""
