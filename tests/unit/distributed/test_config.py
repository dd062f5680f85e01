"""Parallelizer nodes: documented fields and defaults, what each refuses with a fix, torch-free import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import (
    CPUOffload,
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MixedPrecision,
)
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.megatron_fsdp.config import zero_strategy
from tests.errors import raises

COMMON = {
    "activation_checkpointing": False,
    "autocast_dtype": None,
    "backend": "nccl",
    "enable_compile": "auto",
    "compile_backend": "inductor",
}
FSDP2_FIELDS = COMMON | {
    "sequence_parallel": False,
    "tp_plan": None,
    "patch_is_packed_sequence": False,
    "mp_policy": None,
    "offload_policy": None,
    "defer_fsdp_grad_sync": True,
    "enable_async_tensor_parallel": False,
    "enable_fsdp2_prefetch": False,
    "fsdp2_backward_prefetch_depth": 2,
    "fsdp2_forward_prefetch_depth": 1,
    "expert_dispatch": "all_to_all",
    "keep_cast_experts": "auto",
    "context_parallel": "all_gather",
}
DDP_FIELDS = COMMON | {
    "broadcast_buffers": False,
    "find_unused_parameters": False,
    "static_graph": False,
    "bucket_cap_mb": None,
    "gradient_as_bucket_view": False,
}
MEGATRON_FIELDS = COMMON | {
    "sequence_parallel": False,
    "megatron_fsdp_unit_modules": None,
    "zero_dp_strategy": 3,
    "init_fsdp_with_meta_device": False,
    "grad_reduce_in_fp32": False,
    "preserve_fp32_weights": False,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "check_for_nan_in_grad": True,
    "average_in_collective": False,
    "disable_bucketing": False,
    "calculate_per_token_loss": False,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
}


def test_documented_fields_and_defaults():
    assert MegatronFSDPConfig().to_dict() == MEGATRON_FIELDS
    assert MegatronFSDPConfig(tp_plan={"a": "colwise"}).to_dict() == MEGATRON_FIELDS  # taken, not kept
    assert FSDP2Config().to_dict() == FSDP2_FIELDS
    assert DDPConfig().to_dict() == DDP_FIELDS


def test_to_dict_keeps_policies_as_objects():
    policy = MixedPrecision()
    assert FSDP2Config(mp_policy=policy).to_dict()["mp_policy"] is policy


@pytest.mark.parametrize("value", [False, True, "full", "selective", 1, 3])
def test_checkpointing_forms(value):
    assert FSDP2Config(activation_checkpointing=value).activation_checkpointing is value


REJECTED: dict[str, tuple[type, dict[str, Any], str]] = {
    "checkpointing 0": (FSDP2Config, {"activation_checkpointing": -1}, "invalid_choice"),
    "checkpointing word": (DDPConfig, {"activation_checkpointing": "some"}, "invalid_choice"),
    "backend": (FSDP2Config, {"backend": "mpi"}, "invalid_choice"),
    "autocast": (DDPConfig, {"autocast_dtype": "int8"}, "invalid_choice"),
    "zero strategy": (MegatronFSDPConfig, {"zero_dp_strategy": 4}, "invalid_choice"),
    "older zero name": (MegatronFSDPConfig, {"zero_dp_strategy": "grads_params"}, "invalid_choice"),
    "megatron sequence": (MegatronFSDPConfig, {"sequence_parallel": True}, "not_supported"),
    "megatron checkpointing": (MegatronFSDPConfig, {"activation_checkpointing": "full"}, "not_supported"),
    "megatron average": (MegatronFSDPConfig, {"average_in_collective": True}, "not_supported"),
    "megatron nan": (MegatronFSDPConfig, {"check_for_nan_in_grad": False}, "not_supported"),
    "megatron transpose": (MegatronFSDPConfig, {"keep_fp8_transpose_cache": True}, "not_supported"),
    "megatron compile": (MegatronFSDPConfig, {"enable_compile": True}, "not_supported"),
    "megatron reduce": (MegatronFSDPConfig, {"overlap_grad_reduce": False}, "unsupported_combination"),
    "megatron gather": (MegatronFSDPConfig, {"overlap_param_gather": False}, "unsupported_combination"),
    "megatron meta": (
        MegatronFSDPConfig,
        {"init_fsdp_with_meta_device": True, "zero_dp_strategy": "no_shard"},
        "no_effect",
    ),
    "megatron nccl": (MegatronFSDPConfig, {"nccl_ub": True, "backend": "gloo"}, "requires_setting"),
    "depth": (FSDP2Config, {"fsdp2_forward_prefetch_depth": -1}, "out_of_range"),
    "idle depth": (FSDP2Config, {"fsdp2_backward_prefetch_depth": 3}, "no_effect"),
    "idle compile backend": (DDPConfig, {"compile_backend": "eager", "enable_compile": False}, "no_effect"),
    "compile": (DDPConfig, {"enable_compile": "layers"}, "invalid_choice"),
    "policy": (FSDP2Config, {"mp_policy": "bf16"}, "wrong_type"),
    "offload": (FSDP2Config, {"offload_policy": True}, "wrong_type"),
    "dtype": (MixedPrecision, {"param_dtype": "bf16"}, "invalid_choice"),
    "bucket": (DDPConfig, {"bucket_cap_mb": 0}, "out_of_range"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_values_name_the_field_and_a_fix(name):
    node, fields, code = REJECTED[name]
    values = [
        str(value).lower() if isinstance(value, bool) and node is not FSDP2Config else value
        for value in fields.values()
    ]
    with raises(ConfigError, code, keys=tuple(fields), values=values) as caught:
        node(**fields)
    assert caught.value.fix.startswith("parallelizer.")


REJECTED_WITH_MESH: dict[str, tuple[Any, dict[str, int], str, tuple[str, ...]]] = {
    "sequence": (FSDP2Config(sequence_parallel=True), {}, "requires_setting", ("parallelizer.sequence_parallel",)),
    "async": (
        FSDP2Config(enable_async_tensor_parallel=True, enable_compile=True),
        {},
        "requires_setting",
        ("parallelizer.enable_async_tensor_parallel", "mesh.tp_size"),
    ),
    "plan": (
        FSDP2Config(tp_plan={"model.layers.*.q_proj": "colwise"}),
        {},
        "requires_setting",
        ("parallelizer.tp_plan", "mesh.tp_size"),
    ),
    "megatron pp2": (MegatronFSDPConfig(), {"pp_size": 2}, "unsupported_combination", ("mesh.pp_size",)),
    "megatron ep2": (MegatronFSDPConfig(), {"ep_size": 2}, "unsupported_combination", ("mesh.ep_size",)),
    "megatron rep2": (
        MegatronFSDPConfig(),
        {"dp_replicate_size": 2},
        "unsupported_combination",
        ("mesh.dp_replicate_size",),
    ),
    "megatron plan": (
        MegatronFSDPConfig(tp_plan={"a": "colwise"}),
        {},
        "requires_setting",
        ("parallelizer.tp_plan", "mesh.tp_size"),
    ),
    "megatron gloo": (MegatronFSDPConfig(backend="gloo"), {}, "unsupported_combination", ("parallelizer.backend",)),
    "ddp tp2": (DDPConfig(), {"tp_size": 2}, "unsupported_combination", ("mesh.tp_size",)),
    "ddp cp2": (DDPConfig(), {"cp_size": 2}, "unsupported_combination", ("mesh.cp_size",)),
    "ddp ep2": (DDPConfig(), {"ep_size": 2}, "unsupported_combination", ("mesh.ep_size",)),
    "ddp rep2": (DDPConfig(), {"dp_replicate_size": 2}, "unsupported_combination", ("mesh.dp_replicate_size",)),
}


@pytest.mark.parametrize("name", REJECTED_WITH_MESH)
def test_rejected_with_this_mesh(name):
    config, sizes, code, keys = REJECTED_WITH_MESH[name]
    with raises(ConfigError, code, keys=keys, values=[f"{key}={size}" for key, size in sizes.items()]) as caught:
        config.check_mesh(MeshConfig(**sizes))
    assert caught.value.fix
    assert all(key.startswith(("mesh.", "parallelizer.")) for key in caught.value.keys)  # relative to the recipe


def test_accepted_meshes():
    FSDP2Config().check_mesh(MeshConfig(dp_replicate_size=2, pp_size=2))
    DDPConfig().check_mesh(MeshConfig(dp_size=8))
    MegatronFSDPConfig(tp_plan={"a": "colwise"}).check_mesh(MeshConfig(tp_size=2, cp_size=2))


def test_zero_strategies_have_numbers_and_names():
    names = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
    assert [zero_strategy(number) for number in range(4)] == [zero_strategy(name) for name in names] == names


def test_policies_build_torchs_objects():
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    default = FSDP2Config().build_mp_policy()
    assert (default.param_dtype, default.reduce_dtype, default.output_dtype) == (torch.bfloat16, torch.float32, None)
    own = MixedPrecisionPolicy(param_dtype=torch.float16)
    assert FSDP2Config(mp_policy=own).build_mp_policy() is own
    assert FSDP2Config().build_offload_policy("cuda") is None
    assert FSDP2Config(offload_policy=CPUOffload()).build_offload_policy("cuda").pin_memory
    assert not FSDP2Config(offload_policy=CPUOffloadPolicy()).build_offload_policy("cpu").pin_memory
    assert FSDP2Config(offload_policy=CPUOffload()).parameter_device(torch.device("cuda")).type == "cpu"


def test_config_modules_do_not_import_torch():
    modules = "automodel_cli.distributed.config, automodel_cli.distributed.mesh_config, automodel_cli.objectives.sft"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("policy", [None, MixedPrecision(), MixedPrecision(param_dtype="float16")])
def test_autocast_over_parameters_that_it_does_not_cast_is_refused_with_what_does(policy):
    fix = "parallelizer.autocast_dtype=null parallelizer.mp_policy.param_dtype=float32"
    with raises(ConfigError, "no_effect", keys=("autocast_dtype", "mp_policy"), values=("float32",), fix=fix):
        FSDP2Config(autocast_dtype="float32", mp_policy=policy)
    for dtype in (None, "float32"):
        FSDP2Config(autocast_dtype="bfloat16", mp_policy=MixedPrecision(param_dtype=dtype))


def test_the_precision_is_a_section_without_a_target_and_its_keys_are_found_from_one_level_up():
    sft = ["model.pretrained=x", "data.path=x"]
    recipe = check_config(compose("sft", [*sft, "parallelizer.mp_policy.param_dtype=float32"]))
    assert recipe.parallelizer.mp_policy == MixedPrecision(param_dtype="float32")
    with raises(ConfigError, "unknown_key", fix="parallelizer.mp_policy.param_dtype=float32"):
        check_config(compose("sft", [*sft, "parallelizer.param_dtype=float32"]))


def test_unit_classes_that_the_model_lacks_are_answered_with_its_own():
    import torch

    from automodel_cli.distributed.strategies.megatron_fsdp.arguments import unit_modules
    from automodel_cli.models.transformers_compat import meta_model
    from tests.tiny import tiny_config

    model = meta_model(tiny_config("qwen3"), dtype=torch.float32)
    own = "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer"
    assert [kind.__name__ for kind in unit_modules(model, [own])] == ["Qwen3DecoderLayer"]
    fix = f"parallelizer.megatron_fsdp_unit_modules=[{own}]"
    with raises(
        ConfigError, "unknown_name", keys=("megatron_fsdp_unit_modules",), values=("LlamaDecoderLayer",), fix=fix
    ):
        unit_modules(model, [own, "transformers.models.llama.modeling_llama.LlamaDecoderLayer"])
