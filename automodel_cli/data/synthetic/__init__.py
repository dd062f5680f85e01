"""Generated datasets with known answers, for examples and tests."""
