"""Random numbers that depend on the run's seed and a name only: not on the rank, not on the order of modules."""

from __future__ import annotations

import hashlib

import torch


def seed_for(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


def generator_for(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(seed, name))
