"""Parity checks: one optimizer step on any layout must equal one process. Used by `automodel verify` and the tests."""
