"""Random number generators of a rank: seeded from (seed, rank), saved in checkpoints and restored bitwise."""

from __future__ import annotations

import json
import os
import random
from typing import cast

import numpy as np
import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.launch import environment

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPRODUCIBLE = (":4096:8", ":16:8")


def seed(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch on this rank. Ranks get independent streams, so that their dropout differs."""
    state = np.random.SeedSequence([seed, rank]).generate_state(3)
    random.seed(int(state[0]))
    np.random.seed(int(state[1]))
    torch.manual_seed(int(state[2]))


def make_deterministic() -> None:
    """Enable deterministic algorithms of torch. Operators without one raise. Call this before CUDA is initialized.

    cuBLAS is deterministic only with a workspace of fixed size, which it reads from an environment variable.

    Raises:
        ConfigError: the machine has a GPU and the variable has another value.
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
    """Return the state of all generators of this rank as JSON bytes in a uint8 tensor.

    JSON instead of pickle, so that loading a checkpoint cannot run code.
    """
    version, keys, gauss = random.getstate()
    legacy = cast("tuple[str, np.ndarray, int, int, float]", np.random.get_state(legacy=True))
    name, np_keys, position, has_gauss, cached = legacy
    state: dict[str, object] = {
        "python": [version, list(keys), gauss],
        "numpy": [name, np_keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [],
    }
    if torch.cuda.is_available():
        # One process uses one device, so only its generator is saved.
        state["cuda"] = [torch.cuda.get_rng_state().numpy().tobytes().hex()]
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def restore_rng(saved: Tensor) -> None:
    """Restore the generators from the result of `capture`.

    The state of a run without CUDA does not change the CUDA generator.
    """
    state = json.loads(saved.numpy().tobytes().decode())
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, np_keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(np_keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"][0]), dtype=torch.uint8))
