"""YAML to checked objects. Nothing in this package imports torch."""
