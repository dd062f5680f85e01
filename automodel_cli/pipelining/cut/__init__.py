"""Split a model into pipeline stages: layout strings, placement, stage modules, and the check that a split is exact."""
