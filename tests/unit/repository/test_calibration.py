"""The fitted constants of the dry run, against the published runs that they were fitted to."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from automodel_cli.planning.efficiency import FILE, efficiency
from automodel_cli.planning.hardware import GPUS
from scripts import calibrate

PUBLISHED: dict[str, Any] = yaml.safe_load(calibrate.RUNS.read_text(encoding="utf-8"))
ROWS = calibrate.rows_of(PUBLISHED, json.loads(calibrate.COUNTS.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def fitted() -> dict[str, float]:
    return calibrate.fit([row for row in ROWS if row.fits])


def test_a_fit_of_the_stored_counts_gives_the_constants_in_use(fitted: dict[str, float]) -> None:
    for gpu in GPUS:
        rates = efficiency(gpu)
        assert rates.gemm == pytest.approx(fitted.get(f"power {gpu}", fitted["power h100"]), abs=1e-3)
        assert rates.memory == pytest.approx(fitted["memory"], abs=1e-3)


def test_every_published_run_is_in_the_fit_or_has_a_reason() -> None:
    traced = {row.name: row for row in ROWS}
    for row in PUBLISHED["rows"]:
        assert row["source"] in PUBLISHED["sources"]
        assert row["id"] in traced or "set" in row or row["not_run"]
        assert row["id"] not in traced or traced[row["id"]].fits or row["left_out"]
        assert not row.keys() & {"more_gemm", "more_gib", "attention"} or row["why"], row["id"]


def test_estimates_of_all_rows_of_the_fit_are_within_15_percent(fitted: dict[str, float]) -> None:
    errors = {row.name: row.estimate(fitted) / row.published - 1 for row in ROWS if row.fits}
    assert len(errors) >= 10
    assert not {name: error for name, error in errors.items() if abs(error) > calibrate.GOAL}


def test_the_range_of_each_estimate_has_the_published_value(fitted: dict[str, float]) -> None:
    """Also of runs that are not in the fit."""
    for row in ROWS:
        rates, estimate = efficiency(row.gpu), row.estimate(fitted)
        assert rates.low * estimate <= row.published * 1.001, row.name
        assert rates.high * estimate >= row.published * 0.999, row.name


def test_there_are_fewer_constants_than_runs(fitted: dict[str, float]) -> None:
    assert len(fitted) <= len([row for row in ROWS if row.fits])


def test_a_fit_finds_the_constants_that_made_the_runs() -> None:
    """Of rows with the stored counts, whose times follow from chosen constants."""
    start = {name: min(0.9 * x.value, x.high) for name, x in calibrate.SHARED.items()}
    start |= {f"power {row.gpu}": 0.8 for row in ROWS}
    made = [replace(row, published=row.estimate(start)) for row in ROWS]
    found = calibrate.fit(made)
    for row in made:
        assert row.estimate(found) == pytest.approx(row.published, rel=0.05), row.name
    assert found["power h100"] == pytest.approx(0.8, rel=0.1)


def test_the_page_has_the_tables_of_these_constants(fitted: dict[str, float]) -> None:
    known = json.loads(FILE.read_text(encoding="utf-8"))
    text = calibrate.PAGE.read_text(encoding="utf-8")
    for line in calibrate._constants(known, fitted):
        assert line in text


def test_the_readme_has_the_estimate_of_these_constants(fitted: dict[str, float]) -> None:
    row = next(row for row in ROWS if row.name == "nemo-gpt-oss-20b")
    rates, estimate = efficiency(row.gpu), row.estimate(fitted)
    text = (calibrate.ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{round(rates.low * estimate, -2):,.0f} to {round(rates.high * estimate, -2):,.0f}, **estimated**" in text
