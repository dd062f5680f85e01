"""`automodel`: one YAML file in, one training run out."""

__version__ = "0.1.0"
