"""Releases that the tests run with, and the verdict on an installed release.

`automodel doctor` and docs/compatibility.md read this table. The ranges are those of the package's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Literal

from automodel_cli.config.errors import ConfigError

DISTRIBUTION = "automodel-cli"

Verdict = Literal["tested", "in range, untested", "outside"]

TESTED: dict[str, tuple[str, ...]] = {
    "python": ("3.11", "3.12", "3.13", "3.14"),
    "torch": ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    "transformers": ("5.17.0", "5.24.0"),
    "hydra-core": ("1.3.8",),
    "omegaconf": ("2.3.1",),
    "datasets": ("5.2.0",),
    "safetensors": ("0.8.0",),
    "rich": ("15.0.0",),
    "click": ("8.5.1",),
    "numpy": ("2.4.6", "2.5.5"),
    "xxhash": ("4.1.0",),
    "peft": ("0.21.2",),
    "megatron-fsdp": ("0.6.1",),
    "gguf": ("0.19.0",),
    "math-verify": ("0.9.0",),
    "torchao": ("0.18.0",),
    "bitsandbytes": ("0.50.2",),
    "vllm": ("0.32.0",),
    "sglang": ("0.5.23",),
}
"""Package and its tested releases. A release with two numbers stands for all its patch releases."""

OTHER_RANGES = {"sglang": ">=0.5.21"}
"""Ranges of packages that no extra installs."""


def ranges() -> dict[str, str]:
    """Return the supported range of Python, of each dependency and of each package of an extra."""
    return {"python": _metadata()["Requires-Python"], **ranges_of(_metadata().get_all("Requires-Dist") or ())}


def ranges_of(requirements: Iterable[str]) -> dict[str, str]:
    """Return package -> range of lines such as `peft>=0.17` and `vllm>=0.31 ; extra == "vllm"`, with OTHER_RANGES."""
    supported = dict(OTHER_RANGES)
    for line in requirements:
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)", line)
        assert match is not None, line
        name, specifier = match.groups()
        supported[name] = specifier.strip() or supported.get(name, "")
    return supported


def dependencies() -> list[str]:
    """Return the names of the base dependencies."""
    lines = _metadata().get_all("Requires-Dist") or ()
    return [re.split(r"[^\w.-]", line)[0] for line in lines if ";" not in line]


def _metadata() -> metadata.PackageMetadata:
    """Return the metadata of the installed package. Raises ConfigError if it is only on the path."""
    try:
        return metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        message = f"{DISTRIBUTION} is not installed, so its supported releases are unknown"
        raise ConfigError(message, code="missing_package", fix=f"pip install {DISTRIBUTION}") from None


def verdict(name: str, version: str, specifier: str) -> Verdict:
    """Return the verdict on a release of a distribution, whose supported range is `specifier`.

    Local suffixes such as `+cpu` are ignored. A pre-release is never a tested release.
    """
    if not satisfies(version, specifier):
        return "outside"
    public = version.partition("+")[0]
    if public in TESTED.get(name, ()) or ".".join(public.split(".")[:2]) in TESTED.get(name, ()):
        return "tested"
    return "in range, untested"


def satisfies(version: str, specifier: str) -> bool:
    """Return whether a release is in a range such as `>=2.11,<2.14`. Local and pre-release suffixes are ignored."""

    def numbers(text: str) -> tuple[int, ...]:
        parts = [int(n) for n in re.findall(r"\d+", re.split(r"[+a-z]", text.strip())[0])]
        return tuple((parts + [0, 0, 0])[:3])

    compare: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
    }
    for clause in filter(None, specifier.split(",")):
        operator, bound = re.findall(r"^\s*([<>=!]+)(.*)", clause)[0]
        if not compare[operator](numbers(version), numbers(bound)):
            return False
    return True
