"""Pure functions of per-token log-probs. Sums and weights, never means."""
