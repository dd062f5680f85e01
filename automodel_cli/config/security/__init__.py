"""Which classes, files and secrets a config may reach."""
