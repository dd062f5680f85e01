"""GRPO on hybrids as a user runs it. The library's own `generate` on a replica says what must be sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import automodel, curve, kill_after_step, start
from tests.e2e.test_grpo import run, same_run, samples_of, write_config

DENSE = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": "[linear_attention,full_attention]",
}
MOE = DENSE | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def overrides(fields: dict[str, object], *more: str) -> list[str]:
    return [*(f"+model.config.{key}={value}" for key, value in fields.items()), "logging.report=false", *more]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "fields", "layout"),
    [
        ("qwen3_5_text", DENSE, ["mesh.pp_size=2", "pipeline=1f1b"]),
        pytest.param("qwen3_5_text", DENSE, ["mesh.dp_size=2"], marks=pytest.mark.nightly),
        pytest.param("qwen3_5_moe_text", MOE, ["mesh.dp_size=2", "mesh.ep_size=2"], marks=pytest.mark.nightly),
    ],
    ids=["pp2", "fsdp2", "ep2"],
)
def test_the_samplers_run_is_that_of_the_librarys_generate(
    tmp_path: Path, family: str, fields: dict[str, object], layout: list[str]
) -> None:
    """Samples, rewards, updates, and samples of the updated weights."""
    write_config(tmp_path, family)
    more = overrides(fields, "train.max_steps=2")
    run(tmp_path, "run_name=replica", "rollout=hf", *more)
    run(tmp_path, "run_name=sampler", *layout, *more)
    same_run(tmp_path / "runs" / "sampler", tmp_path / "runs" / "replica")


@pytest.mark.nightly
def test_a_killed_run_of_a_hybrid_goes_on_bitwise(tmp_path: Path) -> None:
    write_config(tmp_path, "qwen3_5_text")
    more = overrides(DENSE)
    run(tmp_path, "run_name=whole", *more)
    killed = start(tmp_path, "grpo", "llm", "-c", "tiny.yaml", "run_name=killed", *more)
    folder, whole = tmp_path / "runs" / "killed", tmp_path / "runs" / "whole"
    kill_after_step(killed, folder, 3)
    resumed = automodel(tmp_path, "resume", "runs/killed")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    for key in ("loss", "grad_norm", "reward", "val_reward"):
        assert curve(folder, key) == curve(whole, key), key
    assert samples_of(folder) == samples_of(whole)
    weights = [(path / "export" / "model.safetensors").read_bytes() for path in (folder, whole)]
    assert weights[0] == weights[1]
