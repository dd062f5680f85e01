"""Pictures in a run: answers before and after, and accuracy."""
