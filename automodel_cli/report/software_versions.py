"""Software versions and hardware of a run, for its report. Contains no user data."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("automodel-cli", "torch", "transformers", "datasets", "safetensors", "peft", "hydra-core", "numpy")


def environment(device_name: str, num_ranks: int) -> dict[str, str]:
    """Return label -> version. Packages that are not installed are skipped."""
    versions = {
        "device": f"{num_ranks} x {device_name}",
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
