"""Random number generators of one rank: seeded from (seed, rank), saved with every checkpoint, restored bitwise."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.launch import environment

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPRODUCIBLE = (":4096:8", ":16:8")


def seed(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch (all devices) of this rank; ranks get unrelated streams (dropout must differ)."""
    state = np.random.SeedSequence([seed, rank]).generate_state(3)
    random.seed(int(state[0]))
    np.random.seed(int(state[1]))
    torch.manual_seed(int(state[2]))


def make_deterministic() -> None:
    """Make torch refuse operators without a reproducible result. Call it before CUDA starts.

    cuBLAS is reproducible with a workspace of a fixed size only, which it reads from the environment.
    Raises ConfigError for a GPU where the user has set another one.
    """
    environment.set_default(_WORKSPACE, _REPRODUCIBLE[0])
    given = os.environ[_WORKSPACE]
    if given not in _REPRODUCIBLE and torch.cuda.is_available():
        raise ConfigError(
            f"train.deterministic=true is not supported with {_WORKSPACE}={given}: the variable must be one of: "
            f"{', '.join(_REPRODUCIBLE)}",
            code="invalid_environment",
            keys=("train.deterministic",),
            fix=f"export {_WORKSPACE}={_REPRODUCIBLE[0]}, or train.deterministic=false",
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def capture() -> Tensor:
    """The state of every generator of this rank as JSON bytes in a uint8 tensor (so that a checkpoint needs no
    pickle).
    """
    version, keys, gauss = random.getstate()
    name, np_keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "python": [version, list(keys), gauss],
        "numpy": [name, np_keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [],
    }
    if torch.cuda.is_available():
        # One process drives one device; the others' generators are none of our business.
        state["cuda"] = [torch.cuda.get_rng_state().numpy().tobytes().hex()]
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def restore_rng(saved: Tensor) -> None:
    """Put every generator back to where `capture` saw it.

    A checkpoint made without CUDA leaves the CUDA generator alone.
    """
    state = json.loads(saved.numpy().tobytes().decode())
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, np_keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(np_keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"][0]), dtype=torch.uint8))
