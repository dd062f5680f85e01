"""Cache entries on disk: memory-mapped tokens, checksums and fingerprints."""
