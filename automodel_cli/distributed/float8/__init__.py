"""float8 GEMMs of linear layers and experts."""
