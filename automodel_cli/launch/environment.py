"""Environment variables set for ranks, and the user's environment without them.

Ranks have variables that the user did not set: rendezvous, threads per process, settings of the CUDA allocator. A
program that a rank starts, such as a generation server, must not inherit them. vLLM's sleep mode and SGLang's memory
saver reject `expandable_segments`, and torch's rendezvous in a child would wait for the agent of its parent.
"""

from __future__ import annotations

import os

OWN = "AUTOMODEL_OWN_VARIABLES"
"""Names of the variables that this package has set, separated by commas. Ranks inherit it from their launcher."""
_OF_RANKS = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
    }
)
_OF_LAUNCHERS = ("TORCHELASTIC_", "AUTOMODEL_STATUS_")
_BESIDE_RANKS = frozenset({"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"})
"""Variables of torchrun and of the batch script, in addition to those of a rank."""


def set_default(name: str, value: str) -> None:
    """Set a variable that the user has not set, for this process and its ranks, but not for programs they start."""
    if name not in os.environ:
        set_own(name, value)


def set_own(name: str, value: str) -> None:
    """Set a variable for this process and its ranks, but not for programs they start."""
    os.environ[name] = value
    if name not in (names := _own_names()):
        os.environ[OWN] = ",".join([*names, name])


def of_user() -> dict[str, str]:
    """Return the environment of this process without variables set by automodel or a launcher."""
    removed = _OF_RANKS | {*_own_names(), OWN}
    if "RANK" in os.environ:
        removed |= _BESIDE_RANKS
    return {
        name: value for name, value in os.environ.items() if name not in removed and not name.startswith(_OF_LAUNCHERS)
    }


def _own_names() -> list[str]:
    return [name for name in os.environ.get(OWN, "").split(",") if name]
