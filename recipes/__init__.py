"""The readable story of each kind of run."""
