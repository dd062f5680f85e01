"""What is where: the layout language, the split of a model into stages, and the proof that the split is exact."""
