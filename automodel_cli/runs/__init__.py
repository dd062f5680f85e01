"""Run folders on disk: what a run writes about itself; finding, comparing and clearing runs. No torch."""
