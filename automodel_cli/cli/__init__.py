"""Commands of the CLI, one small file each. No module imports torch at module level."""
