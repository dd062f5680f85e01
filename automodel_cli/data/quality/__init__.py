"""Duplicates, overlap with evaluations, languages and lengths of training data."""
