"""Vector search: an index of vectors on disk, and exact search over it."""
