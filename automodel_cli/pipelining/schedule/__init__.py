"""What runs when: schedules, their rules and programs. Torch-free."""
