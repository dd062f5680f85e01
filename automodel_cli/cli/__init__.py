"""What a user types: one small file per command. Nothing here imports torch at module level."""
