"""Other rotary embeddings for a checkpoint, against the library's model with an edited config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub.source import hf_config
from tests.errors import raises
from tests.tiny import build_hf, token_row

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hub = tmp_path / "hub"
    build_hf("llama", max_position_embeddings=64).save_pretrained(hub)
    return hub


def test_a_longer_context_is_computed_and_exported_as_by_the_library(folder: Path, tmp_path: Path) -> None:
    config = ModelConfig(pretrained=str(folder), rope_scaling=YARN, attn_implementation="eager")
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    assert part.model.config.max_position_embeddings == 256
    export_hf([part], config, None, tmp_path / "out")

    fields = json.loads((folder / "config.json").read_text())
    fields["rope_parameters"] |= {**YARN, "original_max_position_embeddings": 64}
    fields["max_position_embeddings"] = 256
    plain = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    expected = AutoModelForCausalLM.from_pretrained(folder)
    ids = token_row(200)[None]
    with torch.no_grad():
        want = expected(ids).logits
        assert (part.model(input_ids=ids).logits - want).abs().max() < 1e-5
        assert (AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits - want).abs().max() < 1e-5
        assert (plain(ids).logits - want).abs().max() > 1e-2
    exported = AutoConfig.from_pretrained(tmp_path / "out")
    assert exported.rope_parameters == expected.config.rope_parameters
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]["factor"] == 4.0


@pytest.mark.parametrize(
    ("scaling", "code"),
    [({"factor": 4.0}, "missing_key"), ({"rope_type": "yarm"}, "invalid_choice"), ({"rope_type": "yarn"}, None)],
)
def test_wrong_fields_are_refused(folder: Path, scaling: dict[str, Any], code: str | None) -> None:
    with raises(ConfigError, code or "invalid_arguments", keys=("rope_scaling",)):
        hf_config(ModelConfig(pretrained=str(folder), rope_scaling=scaling))


def test_models_without_one_set_of_rotary_embeddings_are_refused(tmp_path: Path) -> None:
    build_hf("gemma3_text").save_pretrained(tmp_path)
    with raises(ConfigError, "not_supported_by_model", fix="model.rope_scaling=null"):
        hf_config(ModelConfig(pretrained=str(tmp_path), rope_scaling=YARN))
    with raises(ConfigError, "requires_setting"):
        ModelConfig(config={"model_type": "llama"}, rope_scaling=YARN)
