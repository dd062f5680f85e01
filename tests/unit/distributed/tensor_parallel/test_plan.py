"""Every string of the library becomes a style, every plan is found, and what does not fit is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from transformers import Qwen3VLMoeTextConfig
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.parallelizer import import_classes_from_paths
from automodel_cli.distributed.tensor_parallel.checks import check_heads, use_async_collectives
from automodel_cli.distributed.tensor_parallel.plan import (
    PLAN_STRINGS,
    custom_plan,
    get_hf_tp_shard_plan,
    translate_to_torch_parallel_style,
)
from automodel_cli.distributed.tensor_parallel.styles import (
    ExpertsOverTP,
    LocalParameters,
    MLAKeyProjection,
    PackedColwise,
    SumOutput,
    SumParameterGradients,
)
from automodel_cli.models import transformers_compat
from tests import tiny
from tests.errors import raises

TORCH_STYLES = {
    "colwise": (ColwiseParallel, Replicate(), Shard(-1)),
    "colwise_gather_output": (ColwiseParallel, Replicate(), Replicate()),
    "colwise_rep": (ColwiseParallel, Replicate(), Replicate()),
    "embedding_colwise": (ColwiseParallel, Replicate(), Replicate()),
    "rowwise": (RowwiseParallel, Shard(-1), Replicate()),
    "rowwise_split_input": (RowwiseParallel, Replicate(), Replicate()),
    "rowwise_rep": (RowwiseParallel, Replicate(), Replicate()),
    "embedding_rowwise": (RowwiseParallel, Replicate(), Replicate()),
}
OWN_STYLES = {
    "sequence_parallel": SequenceParallel,
    "replicated_with_grad_allreduce": SumParameterGradients,
    "mla_kv_a_proj": MLAKeyProjection,
    "packed_colwise": PackedColwise,
    "moe_tp_experts": ExpertsOverTP,
    "all_reduce": SumOutput,
    "local_params": LocalParameters,
}
NOT_TENSOR_PARALLEL = ("replicate", "grouped_gemm", "ep_dispatch_experts", "ep_router", "local_colwise", "gather")


def meta(family, **extra):
    with transformers_compat.quiet():
        return transformers_compat.meta_model(tiny.tiny_config(family, **extra), dtype=torch.float32)


@pytest.mark.parametrize("string", TORCH_STYLES)
def test_strings_of_linear_layers_are_torchs_styles(string):
    kind, input_layout, output_layout = TORCH_STYLES[string]
    style = translate_to_torch_parallel_style(string)
    assert type(style) is kind
    assert style.input_layouts == (input_layout,) and style.output_layouts == (output_layout,)
    assert translate_to_torch_parallel_style(string) is not style  # torch writes into a style that it applies


def test_strings_without_a_torch_style():
    for string, kind in OWN_STYLES.items():
        assert type(translate_to_torch_parallel_style(string)) is kind
    for string in NOT_TENSOR_PARALLEL:
        assert translate_to_torch_parallel_style(string) is None


def test_every_string_of_this_library_is_known():
    for string in ALL_PARALLEL_STYLES:
        translate_to_torch_parallel_style(string)


def test_anything_else_is_an_error():
    with pytest.raises(ValueError, match="'colwize'") as error:
        translate_to_torch_parallel_style("colwize")
    assert all(string in str(error.value) for string in PLAN_STRINGS)
    with pytest.raises(TypeError, match="int"):
        translate_to_torch_parallel_style(3)


def test_a_published_plan_names_modules_of_the_whole_model():
    plan = get_hf_tp_shard_plan(meta("qwen3"))
    assert {name: type(style) for name, style in plan.items() if "self_attn" in name or "layers" not in name} == {
        "model.layers.*.self_attn.q_proj": ColwiseParallel,
        "model.layers.*.self_attn.k_proj": ColwiseParallel,
        "model.layers.*.self_attn.v_proj": ColwiseParallel,
        "model.layers.*.self_attn.q_norm": SumParameterGradients,
        "model.layers.*.self_attn.k_norm": SumParameterGradients,
        "model.layers.*.self_attn.o_proj": RowwiseParallel,
        "model.embed_tokens": RowwiseParallel,
        "lm_head": ColwiseParallel,
    }


def test_plans_found_by_structure():
    plan = get_hf_tp_shard_plan(meta("gpt_oss"))
    attention = "model.layers.*.self_attn"
    assert isinstance(plan[attention], LocalParameters) and isinstance(plan[f"{attention}.sinks"], ColwiseParallel)
    assert isinstance(plan[f"{attention}.o_proj"], RowwiseParallel)
    assert isinstance(plan["model.layers.*.mlp.experts"], ExpertsOverTP)

    for rank, projection in ((24, "q_b_proj"), (None, "q_proj")):
        plan = get_hf_tp_shard_plan(meta("deepseek_v3", q_lora_rank=rank))
        assert isinstance(plan[f"{attention}.kv_a_proj_with_mqa"], MLAKeyProjection)
        assert isinstance(plan[f"{attention}.{projection}"], ColwiseParallel)
        assert f"{attention}.q_a_proj" not in plan


def test_a_model_without_a_plan_is_refused_by_name():
    class Unplanned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head, self.table = nn.Linear(4, 4), nn.Linear(4, 8), nn.Embedding(8, 4)

        def get_input_embeddings(self):
            return self.table

        def get_output_embeddings(self):
            return self.head

    keys = ("parallelizer.tp_plan", "mesh.tp_size")
    with raises(ConfigError, "not_supported_by_model", keys=keys, values=("Unplanned",)) as error:
        get_hf_tp_shard_plan(Unplanned())
    assert "mesh.tp_size=1" in error.value.fix and "parallelizer.tp_plan=" in error.value.fix


MY_PLAN = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": RowwiseParallel()}


def my_plan(model):
    return {f"{model.base_model_prefix}.layers.*.mlp.up_proj": "colwise"}


def test_a_plan_of_ones_own_replaces_the_published_one():
    model = meta("llama")
    for given in (MY_PLAN, f"{__name__}.MY_PLAN"):
        plan = custom_plan(given, model)
        assert plan.keys() == MY_PLAN.keys() and isinstance(plan["model.layers.*.mlp.up_proj"], ColwiseParallel)
    for given in (my_plan, f"{__name__}.my_plan"):
        assert list(custom_plan(given, model)) == ["model.layers.*.mlp.up_proj"]


@pytest.mark.parametrize(
    ("given", "code", "value"),
    [
        ({"x": "colwize"}, "invalid_choice", "colwize"),
        ({"x": 3}, "invalid_choice", "int"),
        ({}, "wrong_type", "tp_plan={}"),
        (7, "wrong_type", 7),
        (f"{__name__}.NO_PLAN", "import_failed", "NO_PLAN"),
        ("never_heard_of.plan", "untrusted_code", "never_heard_of.plan"),
    ],
)
def test_invalid_plans_are_rejected(given, code, value):
    with raises(ConfigError, code, keys=("tp_plan",), values=(value,)):
        custom_plan(given, meta("llama"))


def test_heads_must_divide():
    model = meta("llama")  # 4 heads, 2 key-value heads
    plan = get_hf_tp_shard_plan(model)
    check_heads(model.config, plan, 2)
    values = ("mesh.tp_size=4", "num_key_value_heads=2")
    with raises(ConfigError, "not_divisible", keys=("mesh.tp_size",), values=values, fix="mesh.tp_size=2"):
        check_heads(model.config, plan, 4)
    with raises(ConfigError, "not_divisible", values=("mesh.tp_size=3", "1, 2")):
        check_heads(model.config, plan, 3)
    only_mlp = {name: style for name, style in plan.items() if "mlp" in name}
    check_heads(model.config, only_mlp, 4)


def test_asynchronous_tensor_parallelism_needs_the_compiler_and_cuda():
    with raises(ConfigError, "requires_setting", keys=("enable_async_tensor_parallel", "enable_compile")):
        FSDP2Config(enable_async_tensor_parallel=True)
    assert FSDP2Config(enable_async_tensor_parallel=True, enable_compile=True)
    with raises(ConfigError, "hardware_required", values=("cpu",)):
        use_async_collectives(SimpleNamespace(device_type="cpu"))


def test_classes_are_imported_by_path_or_refused_with_the_reason():
    assert import_classes_from_paths(["torch.optim.AdamW", "torch.nn.Linear"]) == [torch.optim.AdamW, nn.Linear]
    assert import_classes_from_paths([]) == []
    for path, code in (
        ("torch.optim.AdamX", "import_failed"),
        ("no_such_package.Class", "import_failed"),
        ("torch.nn.functional.linear", "wrong_type"),
        ("AdamW", "invalid_value"),
        ("", "invalid_value"),
    ):
        with raises(ConfigError, code, values=(path,)):
            import_classes_from_paths(["torch.optim.AdamW", path])


def test_norms_of_heads_behind_sharded_projections_sum_their_gradients():
    """The published plan of Qwen3-VL-MoE has no entry for them."""
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel

    config = Qwen3VLMoeTextConfig(num_hidden_layers=1, layer_types=["full_attention"])
    with torch.device("meta"):
        plan = get_hf_tp_shard_plan(Qwen3VLMoeTextModel(config))
    for norm in ("q_norm", "k_norm"):
        assert f"layers.*.self_attn.{norm}" not in config.base_model_tp_plan
        assert isinstance(plan[f"layers.*.self_attn.{norm}"], SumParameterGradients)
    assert not any("norm" in name for name in get_hf_tp_shard_plan(meta("llama")))
