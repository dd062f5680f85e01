"""Weight-gradient GEMMs that accumulate directly into the float32 main gradient."""
