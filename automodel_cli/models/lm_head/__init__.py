"""LM heads: log-probs, entropies and top-k of tokens without `[B, T, V]` logits."""
