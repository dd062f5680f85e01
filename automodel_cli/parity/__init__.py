"""The same numbers under every parallelism: what `automodel verify` and the test suite compare with one process."""
