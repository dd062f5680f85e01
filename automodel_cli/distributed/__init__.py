"""One process among many: mesh, parallelizers, gradient sums."""
