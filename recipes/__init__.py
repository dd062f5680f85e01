"""Recipes: one readable training procedure for each kind of run."""
