"""What a mesh asks of a model is refused from the config's text, before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.mesh_config import MeshConfig
from tests import tiny
from tests.errors import raises


def _check(*overrides: str) -> None:
    check_config(compose("quickstart", overrides))


REFUSED = {
    "more stages than layers": (
        ["mesh.pp_size=4", "pipeline=1f1b"],
        "stage_count",
        ("mesh.pp_size=4", 2),
    ),
    "two stages a rank": (
        ["mesh.pp_size=2", "pipeline=interleaved_1f1b"],
        "stage_count",
        ("mesh.pp_size=2", 4, 2),
    ),
    "layout": (
        ["mesh.pp_size=2", "pipeline=1f1b", 'pipeline.layout="Ett|tL"'],
        "layer-count",
        (3, 2),
    ),
    "layers per stage": (
        ["mesh.pp_size=2", "pipeline=1f1b", "pipeline.layers_per_stage=2"],
        "not_divisible",
        ("pipeline.layers_per_stage=2", "pp_size=2"),
    ),
    "dense": (["mesh.ep_size=2"], "not_supported_by_model", ("mesh.ep_size=2", "qwen3")),
    "experts": (
        ["model.config.model_type=qwen3_moe", "model.config.num_experts=6", "mesh.ep_size=4"],
        "not_divisible",
        ("mesh.ep_size=4", "num_experts=6"),
    ),
    "key-value heads": (
        ["mesh.tp_size=2", "model.config.num_attention_heads=6", "model.config.num_key_value_heads=3"],
        "not_divisible",
        ("mesh.tp_size=2", "num_key_value_heads=3"),
    ),
    "heads": (
        ["mesh.tp_size=4", "model.config.num_attention_heads=6", "model.config.num_key_value_heads=6"],
        "not_divisible",
        ("mesh.tp_size=4", "num_key_value_heads=6"),
    ),
    "gguf": (
        ["model.config=null", "model.pretrained=./x/model.gguf"],
        "invalid_value",
        ("pretrained=./x/model.gguf",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_yaml_says_is_refused_by_check(case: str) -> None:
    overrides, code, values = REFUSED[case]
    with raises(ConfigError, code, values=values) as error:
        _check(*overrides)
    assert error.value.fix or case == "layout"
    assert "command line" in (error.value.origin or "")


def test_what_fits_passes() -> None:
    _check("mesh.pp_size=2", "pipeline=1f1b")
    _check("mesh.pp_size=2", "pipeline=interleaved_1f1b", "model.config.num_hidden_layers=4")
    _check("mesh.ep_size=2", "model.config.model_type=mixtral")  # has experts by default


def test_a_local_folder_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.tiny_fields("llama")))
    source = ["model.config=null", f"model.pretrained={tmp_path}"]
    values = (8, tiny.NUM_LAYERS, tmp_path / "config.json")
    with raises(ConfigError, "stage_count", keys=("mesh.pp_size",), values=values):
        _check(*source, "mesh.pp_size=8", "pipeline=1f1b")
    with raises(ConfigError, "not_supported_by_model", keys=("mesh.ep_size",), values=("llama",)):
        _check(*source, "mesh.ep_size=2")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_heads_are_refused_as_the_plan_of_the_model_has_them(family: str) -> None:
    """Against what tensor parallelism asks of the built model: the check knows no family that would run."""
    from transformers import AutoConfig

    from automodel_cli.models.config import ModelConfig
    from automodel_cli.run.checks.mesh_checks import check_mesh_sizes

    fields = tiny.tiny_fields(family)
    plan = getattr(AutoConfig.for_model(**fields).get_text_config(), "base_model_tp_plan", None) or {}
    sharded = {
        name: layer
        for name, layer in (("num_key_value_heads", "k_proj"), ("num_attention_heads", "q_proj"))
        if plan.get(f"layers.*.self_attn.{layer}") == "colwise" and isinstance(fields.get(name), int)
    }
    indivisible = [name for name in sharded if fields[name] % 3]
    try:
        check_mesh_sizes(ModelConfig(config=fields), MeshConfig(tp_size=3), None)
    except ConfigError as error:
        assert indivisible and error.keys[0] == "mesh.tp_size"
        fixed = int((error.fix or "").partition("=")[2])
        assert all(fields[name] % fixed == 0 for name in sharded)
        return
    check_mesh_sizes(ModelConfig(config=fields), MeshConfig(tp_size=3), None, has_own_plan=True)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dense_is_said_of_dense_families_only(family: str) -> None:
    """Against the library's own config object: does its class know a number of experts?"""
    from automodel_cli.run.checks import mesh_checks

    config = tiny.tiny_config(family).to_dict()
    has_experts = any(name in config for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    said = mesh_checks._is_dense({"model_type": family})
    assert said is not has_experts or (family == "gemma3_text" and not said), "its class lives in another's folder"
