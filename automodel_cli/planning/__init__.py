"""Plan of a config without running it: stages, memory and pipeline idle time."""
