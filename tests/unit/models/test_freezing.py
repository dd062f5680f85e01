"""Which parameters of a model are trained, for patterns of names."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.parameter_patterns import EVERYTHING, Selection
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.freezing import freeze
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.split_check import check_split
from automodel_cli.training.checkpoint.state_dict import check_same_frozen
from automodel_cli.training.optimizers.nodes import AdamW
from tests import tiny


def _part(**extra: object) -> ModelPart:
    return build_part(ModelConfig(config=tiny.tiny_fields("llama", **extra)))


def _trained(part: ModelPart) -> set[str]:
    return {part.hub_name(name) for name, param in part.named_parameters() if param.requires_grad}


def test_freeze_and_trainable_select_by_name():
    everything = _trained(_part())
    for selection, wanted in [
        (Selection(("embed_tokens", "layers.0")), {n for n in everything if "embed" not in n and ".0." not in n}),
        (Selection((), ("layers.1.mlp",)), {n for n in everything if ".1.mlp." in n}),
        (Selection(("mlp.up_proj",), ("layers.1.mlp",)), {n for n in everything if ".1.mlp." in n and "up_" not in n}),
    ]:
        part = _part()
        freeze(part, selection)
        assert _trained(part) == wanted != everything


def test_a_tied_table_is_frozen_under_each_of_its_names():
    for name in ("lm_head", "embed_tokens"):
        part = _part(tie_word_embeddings=True)
        freeze(part, Selection((name,)))
        assert not any("embed" in name or "lm_head" in name for name in _trained(part))


@pytest.mark.parametrize(
    ("selection", "code", "fix"),
    [
        (Selection(("embed_tokns",)), "unknown_name", "'train.freeze=[embed_tokens]'"),
        (Selection((), ("mpl",)), "unknown_name", "'train.trainable=[mlp]'"),
        (Selection(("layers.0",), ("layers.1",)), "unknown_name", "'train.freeze=[layers.1]'"),
        (Selection(("*",)), "nothing_to_train", "train.freeze=[]"),
    ],
)
def test_what_selects_nothing_is_refused(selection, code, fix):
    with pytest.raises(ConfigError) as refusal:
        freeze(_part(), selection)
    assert (refusal.value.code, refusal.value.fix) == (code, fix)


@pytest.mark.parametrize(
    ("selection", "lora"), [(Selection((), ("layers.3",)), None), (EVERYTHING, LoRAConfig(layers_to_transform=[3]))]
)
def test_a_stage_without_trained_parameters_has_an_optimizer_and_a_whole_frozen_model_none(
    selection: Selection, lora: LoRAConfig | None
):
    part = build_part(ModelConfig(config=tiny.tiny_fields("llama", tie_word_embeddings=False), lora=lora))
    freeze(part, selection)
    stage = cut_stage(part, check_split(part.model), layers=range(2), is_first=True, is_last=False)
    optimizer = AdamW(lr=1e-3).build([stage])
    optimizer.step()
    assert not optimizer.state and [group["params"] for group in optimizer.param_groups] == [[]]
    with pytest.raises(ConfigError) as refusal:
        AdamW(lr=1e-3).build([_part().requires_grad_(False)])
    assert refusal.value.code == "nothing_to_train"


def test_a_parameter_that_a_checkpoint_has_trained_cannot_be_frozen_by_a_resume():
    part = _part()
    name = "model.model.model.layers.0.mlp.up_proj.weight"
    saved = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1]), [])
    check_same_frozen([part], Metadata({name: saved}))
    freeze(part, Selection(("layers.0",)))
    with pytest.raises(RunError) as refusal:
        check_same_frozen([part], Metadata({name: saved}))
    assert refusal.value.code == "checkpoint_mismatch" and "train.freeze" in refusal.value.keys
