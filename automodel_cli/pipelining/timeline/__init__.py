"""Duration and drawing of a schedule."""
