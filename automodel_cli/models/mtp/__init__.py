"""Multi-token prediction layers: construction, checkpoint names and loss inputs."""
