"""`automodel`: one YAML file in, one training run out."""

__version__ = "0.2.0"
