"""Pipeline schedules, their rules and their programs. Torch-free."""
