"""Orders of eviction, one file each."""
