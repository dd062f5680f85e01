"""Settings that do not support pictures are refused with codes."""

from __future__ import annotations

from typing import Any

import pytest

from automodel_cli.config import fix_syntax
from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.distributed.strategies.fsdp2.config import FSDP2Config
from automodel_cli.distributed.strategies.megatron_fsdp.config import MegatronFSDPConfig
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.vision.config import VisionConfig
from automodel_cli.run.checks.vision_checks import check_vision, refuse_vision
from tests.errors import raises

MODEL = ModelConfig(pretrained="org/name", vision=VisionConfig())
DATA = DataConfig(path="rows.jsonl", truncation="drop")


@pytest.mark.parametrize(
    ("parallelizer", "key"),
    [
        (MegatronFSDPConfig(), "parallelizer"),
        (FSDP2Config(enable_compile=True), "parallelizer.enable_compile"),
    ],
)
def test_a_parallelizer_that_does_not_support_pictures_is_refused(parallelizer: Any, key: str):
    with raises(ConfigError, "unsupported_combination", keys=(key, "model.vision")):
        check_vision("vlm", MODEL, DATA, parallelizer)


@pytest.mark.parametrize(
    ("vision", "lora"), [(VisionConfig(tower="adapters"), None), (VisionConfig(tower="frozen"), LoRAConfig())]
)
def test_adapters_and_trained_parts_exclude_each_other(vision: VisionConfig, lora: LoRAConfig | None):
    model = ModelConfig(pretrained="org/name", vision=vision, lora=lora)
    key = "model.vision.tower" if lora is None else "model.vision.projector"
    with raises(ConfigError, "requires_setting", keys=(key, "model.lora")):
        check_vision("vlm", model, DATA, FSDP2Config())


def test_the_recommended_parallelizer_is_accepted():
    check_vision("vlm", MODEL, DATA, FSDP2Config(activation_checkpointing="full", enable_compile=False))


@pytest.mark.parametrize("kind", ["grpo", "kd", "rm"])
def test_recipes_of_text_refuse_pictures(kind: str):
    with raises(ConfigError, "unsupported_combination", keys=("model.vision",)):
        refuse_vision(kind, MODEL, DATA, may_read=False)
    with raises(ConfigError, "no_effect", keys=("data.media_dir",), fix="data.media_dir=null"):
        text = ModelConfig(pretrained="org/name")
        refuse_vision(kind, text, DataConfig(path="rows.jsonl", media_dir="pictures"), may_read=False)


@pytest.mark.parametrize(
    ("overrides", "number"),
    [
        ("data.packing=wrapped", 1),  # the second fix is for text
        ("data.packing=wrapped data.truncation=split", 1),
        ("data.packing=none data.truncation=split", 1),
        ("data.packing=wrapped data.cross_documents=true data.truncation=auto", 1),
        ("data.loss_mask=all", 1),
        ("data.max_image_pixels=0", 1),
        ("data.picture_memory_gib=-1", 1),
        ("model.vision=null", 1),
        ("model.vision.tower=adapters", 2),
        ("model.vision.tower=adapters model.vision.projector=adapters", 2),
        ("model.lora={}", 2),
        ("model.lora={} model.vision.tower=frozen", 2),
        ("model.vision.tower=frozen model.vision.projector=frozen model.vision.text=frozen", 1),
        ("model.vision.tower=frozen model.vision.projector=frozen model.vision.text=frozen model.lora={}", 1),
        ("model.attn_implementation=sdpa", 1),
        ("model.fp8={}", 1),
        ("parallelizer=ddp", 1),
        ("parallelizer=megatron_fsdp", 1),
        ("parallelizer.enable_compile=true", 1),
    ],
)
def test_the_config_with_a_pasted_fix_is_accepted(overrides: str, number: int):
    with pytest.raises(ConfigError) as error:
        check_config(compose("quickstart_vlm", overrides.split()))
    fixes = fix_syntax.alternatives(error.value.fix or "")
    for fix in fixes[:number]:
        check_config(compose("quickstart_vlm", [*overrides.split(), *fix_syntax.shell_words(fix)]))
    assert len(fixes) >= number


def test_recipes_of_text_read_no_mapped_pictures():
    sources = [SourceConfig("a.jsonl"), SourceConfig("b.jsonl", column_mapping={"images": "photo"})]
    key = "data.datasets.1.column_mapping.images"
    with raises(ConfigError, "no_effect", keys=(key,), fix=f"~{key}"):
        refuse_vision("sft", ModelConfig(pretrained="org/name"), DataConfig(datasets=sources), may_read=False)
