"""The table of tested releases agrees with the pins and the ranges, and `automodel doctor` reads it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from automodel_cli.cli import doctor, tested_versions
from automodel_cli.cli.tested_versions import TESTED
from automodel_cli.config.errors import ConfigError
from tests.errors import raises

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("version", "spec", "expected"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0a0+git", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11,<2.14", False),
        ("5.24.0", ">=5.17,<5.25", True),
        ("1.3", ">=1.3.2,<1.4", False),
        ("3", ">=3", True),
    ],
)
def test_version_ranges(version: str, spec: str, expected: bool) -> None:
    assert tested_versions.satisfies(version, spec) is expected


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("torch", "2.13.0+cpu", "tested"),
        ("torch", "2.13.0.dev20260101", "in range, untested"),
        ("torch", "2.13.5", "in range, untested"),
        ("torch", "2.10.0", "outside"),
        ("python", "3.13.9", "tested"),
        ("python", "3.1.1", "outside"),
        ("python", "3.113.0", "in range, untested"),
        ("gguf", "1.0.0", "in range, untested"),
    ],
)
def test_verdicts(name: str, version: str, expected: str) -> None:
    assert tested_versions.verdict(name, version, tested_versions.ranges()[name]) == expected


def test_pins_are_tested_releases() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^([\w.-]+)==([^\s;]+)", pins, re.M)
    assert {(name, version) for name, version in pinned if name in TESTED and version not in TESTED[name]} == set()


def test_tested_releases_are_in_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    for need in map(Requirement, [*project["dependencies"], *extras]):
        assert [version for version in TESTED.get(need.name, ()) if version not in need.specifier] == [], need
    assert {Requirement(line).name for line in project["dependencies"]} <= set(TESTED)
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert tuple(classifiers) == TESTED["python"]


def test_doctor_judges_each_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.10.0", "transformers": "5.17.9", "vllm": "0.1.0", "numpy": TESTED["numpy"][0]}
    monkeypatch.setattr(doctor, "_version", installed.get)
    found = {line.subject: line for line in (*doctor.dependencies(), *doctor.extras())}
    ranges = tested_versions.ranges()
    assert (found["torch"].status, found["torch"].fix) == ("fail", f'pip install "torch{ranges["torch"]}"')
    assert (found["rich"].status, found["vllm"].status) == ("fail", "warn")
    assert "outside" in found["torch"].text and "outside" in found["vllm"].text
    assert found["transformers"].text.endswith("in range, untested") and found["numpy"].text.endswith("  tested")


def test_a_checkout_on_the_path_is_not_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested_versions, "DISTRIBUTION", "automodel-cli-elsewhere")
    with raises(ConfigError, "missing_package"):
        tested_versions.ranges()
