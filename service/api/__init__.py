"""The HTTP contract."""
