"""Rows that are read, tokenized and packed while a run trains."""
