"""Places that keep bytes by key, one file each."""
