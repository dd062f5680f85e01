"""Pipeline parallelism: splitting a model into stages, schedules, and their execution."""
