"""`automodel bench`: real runs that a stopwatch ends, and what is said of their times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from automodel_cli.run.commands.bench import BenchTimes, Config, compare_configs
from automodel_cli.run.commands.benchmark_callback import kind_of
from tests.e2e.command import automodel, write_config


def test_operators_and_kernels_are_sorted_by_what_they_are_for():
    named = {
        "aten::addmm": "matrix products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": "matrix products",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "communication",
        "aten::_foreach_mul_": "optimizer",
        "aten::_to_copy": "copies and casts",
        "aten::silu": "elementwise and the rest",
    }
    assert {name: kind_of(name) for name in named} == named


def _times(seconds: float, tokens: int = 100) -> BenchTimes:
    steps = [seconds, seconds * 1.1, seconds * 0.9]
    return BenchTimes(steps, steps, [tokens] * 3, [tokens] * 3, 1.0, 1, "one rank", "cpu", {"attention": seconds}, [])


def _compared(monkeypatch: pytest.MonkeyPatch, output: Path, runs: list[BenchTimes]) -> dict:
    order = iter(runs)
    asked: list[str] = []

    def measured(config: Config, **options: object) -> BenchTimes:
        asked.append(config.name)
        return next(order)

    monkeypatch.setattr("automodel_cli.run.commands.bench.measure_config", measured)
    compare_configs(Config("a", ()), Config("b", ()), warmup=1, steps=3, rounds=2, json_file=output)
    assert asked == ["a", "b", "b", "a"], "in turns"
    return json.loads(output.read_text())


def test_two_configs_take_turns_and_one_is_called_faster_only_where_every_round_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
):
    found = _compared(monkeypatch, tmp_path / "x.json", [_times(2.0), _times(1.0), _times(1.0), _times(3.0)])
    assert found["a_over_b"]["wall"] == [2.0, 3.0]
    assert found["same_rows"]
    assert "B is faster in every round" in capsys.readouterr().out
    _compared(monkeypatch, tmp_path / "y.json", [_times(2.0), _times(1.0), _times(2.0), _times(1.0, tokens=90)])
    said = capsys.readouterr().out
    assert "neither is faster in every round" in said
    assert "different numbers of tokens" in said


@pytest.mark.slow
def test_a_config_is_timed_by_the_steps_that_were_asked_for(tmp_path: Path):
    config = write_config(tmp_path)
    done = automodel(tmp_path, "bench", "-c", str(config), "--warmup", "2", "--steps", "4", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["seconds"]) == 4
    assert all(found["seconds"])
    assert found["tokens"] == [256] * 4  # 4 rows of 64
    assert sum(found["breakdown"].values()) > 0
    assert not (tmp_path / "runs").exists(), "nothing is kept"
    short = automodel(tmp_path, "bench", "-c", str(config), "--steps", "40")
    assert short.returncode == 1
    assert "fix   train.max_steps=46 train.epochs=null" in short.stdout + short.stderr
