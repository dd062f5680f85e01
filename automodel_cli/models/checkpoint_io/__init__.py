"""Loading weights into sharded parts, streaming full weights, and exporting models for transformers."""
