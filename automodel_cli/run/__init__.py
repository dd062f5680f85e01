"""A run on one rank: recipe, trainer, model, run folder and results."""
