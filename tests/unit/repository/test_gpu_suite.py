"""The suite for GPUs, as far as a machine without one can tell. CI also runs `scripts/gpu_suite.sh --fake`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from automodel_cli.cli.common import load_recipe
from automodel_cli.config.security.trust import NOTHING
from scripts import calibrate, gpu_suite, gpu_suite_runs

COMPARISONS = gpu_suite_runs.COMPARISONS


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARISONS)
def test_the_configs_of_comparisons_are_valid(name: str, tmp_path: Path):
    comparison = COMPARISONS[name]
    if comparison.package in ("torchao", "transformer_engine"):
        pytest.skip(f"the config needs {comparison.package}")
    conf = gpu_suite_runs.config_file(comparison, tmp_path)
    load_recipe(str(conf), comparison.settings, NOTHING)
    recipe = load_recipe(str(conf), (*comparison.settings, *comparison.layout), NOTHING)[1]
    recipe.mesh.resolve(comparison.gpus)


def test_the_configs_of_speed_pieces_are_valid(tmp_path: Path):
    for shape, config in gpu_suite.SHAPES.items():
        (tmp_path / f"{shape}.yaml").write_text(gpu_suite._ROWS % config)
        load_recipe(str(tmp_path / f"{shape}.yaml"), (), NOTHING)


def test_every_file_for_gpus_is_in_a_piece():
    words = {word for piece in gpu_suite.pieces() for word in piece.command}
    files = {str(path.relative_to(gpu_suite._root())) for path in gpu_suite._root().glob("tests/gpu/test_*.py")}
    assert files <= words
    names = [piece.name for piece in gpu_suite.pieces()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("          LM head   torch operators (Triton kernels cannot be compiled)", True),
        ("kernels   attention flash", False),
        ("warning [fusion_lost]: llama", True),
        ("SKIPPED [1] tests/gpu/test_flex_cuda.py:20: needs sm_90", True),
        ("step 1/5  loss 5.9 [not a code]", False),
    ],
)
def test_fall_backs_are_found_in_the_output_of_what_passed(line: str, is_one: bool):
    assert gpu_suite.fall_backs(f"first\n{line}\nlast") == ([line] if is_one else [])
    assert gpu_suite.fall_backs(line, expected=(".*",)) == []


def test_a_piece_that_passes_with_a_fall_back_is_not_ok():
    noisy = gpu_suite.Piece("noisy", ("python", "-c", "print('[fusion_lost] x')"))
    found = gpu_suite.run(noisy, 30)
    assert (found["status"], found["tail"]) == ("fell back", ["[fusion_lost] x"])
    expected = gpu_suite.Piece("noisy", noisy.command, expected=("fusion_lost",))
    assert gpu_suite.run(expected, 30)["status"] == "ok"


def test_what_a_machine_lacks_is_named():
    two = gpu_suite.Piece("two", ("true",), gpus=2, package="no_such_package")
    assert two.missing(1) == "needs 2 GPUs"
    assert two.missing(2) == "needs the package no_such_package"
    assert gpu_suite.Piece("one", ("true",)).missing(1) is None


@pytest.mark.parametrize(
    ("reserved", "status"), [(10.0, "ok"), (8.2, "ok"), (13.1, "ok"), (8.0, "failed"), (13.3, "failed")]
)
def test_memory_must_be_within_a_tenth_of_the_dry_run(reserved: float, status: str):
    results = {
        "speed: dense": {"status": "ok", "figures": {"memory_gib": reserved}},
        "memory by dry run: dense": {"status": "ok", "figures": {"reserved_gib": [9.0, 12.0]}},
    }
    gpu_suite._check_memory(results)
    assert results["speed: dense"]["status"] == status


def test_calibration_reads_the_speeds_of_the_suite(tmp_path: Path):
    counted = {"tokens": 4096, "seconds": {"gemm": 0.1}, "peak_gib": 8.0}
    pieces = {
        "speed: dense": {"status": "ok", "figures": {"tokens_per_second": 30_000.0, "memory_gib": 9.0}},
        "memory by dry run: dense": {"status": "ok", "figures": {"counted": counted}},
        "speed: experts": {"status": "failed"},
    }
    gpu = gpu_suite.gpu_type("NVIDIA H200")
    (tmp_path / "suite.json").write_text(json.dumps({"machine": ["NVIDIA H200"], "gpu": gpu, "pieces": pieces}))
    (row,) = calibrate._of_suite(tmp_path / "suite.json")
    assert (row.name, row.gpu, row.published) == ("suite-dense", "h200", 30_000.0)


def test_a_comparison_fails_if_steps_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two runs whose third loss differs by 1%."""

    def train(comparison: object, output: Path, settings: object, devices: str) -> None:
        output.mkdir()
        lines = [{"step": n, "loss": 4.0 - n / 10, "grad_norm": 1.0} for n in range(1, 6)]
        lines[2]["loss"] *= 1.01 if devices else 1.0
        (output / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))

    monkeypatch.setattr(gpu_suite_runs, "_train", train)
    with pytest.raises(SystemExit, match=r"differs from the CPU by 1\.0e-02"):
        gpu_suite_runs.main(["float32", str(tmp_path), str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["loss"]["error"] == pytest.approx(0.01)
