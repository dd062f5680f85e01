"""What a config needs before anything runs: stages, memory, idle time, from the model's config alone."""
