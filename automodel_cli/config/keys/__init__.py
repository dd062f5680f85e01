"""The reference of all keys, and suggestions for unknown ones."""
