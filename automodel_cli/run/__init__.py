"""One run on one rank: its recipe, session, model, folder and results."""
