"""YAML files, overrides and Hydra groups to one tree."""
