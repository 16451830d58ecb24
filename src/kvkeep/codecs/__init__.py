"""Bytes of a chunk to bytes at rest and back."""
