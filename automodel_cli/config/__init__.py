"""Convert YAML to checked objects. No module of this package imports torch."""
