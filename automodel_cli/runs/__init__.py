"""Run folders on disk: records, and finding, comparing and cleaning runs. Torch-free."""
