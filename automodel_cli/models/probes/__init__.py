"""Probes: properties of a model measured on a tiny random copy of its config."""
