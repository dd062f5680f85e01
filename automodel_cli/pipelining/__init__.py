"""Pipeline parallelism: layout language, split, schedules, simulator, pictures."""
