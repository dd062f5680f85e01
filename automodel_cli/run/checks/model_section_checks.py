"""Validation rules of optional keys of the `model` section: what strategies, meshes and recipes support. Torch-free."""

from __future__ import annotations

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.base import Strategy
from automodel_cli.models.config import ModelConfig
from automodel_cli.training.optimizers.build import OptimizerNode, refuse_float16_moments
from automodel_cli.training.train_config import TrainConfig


def check_freezing(train: TrainConfig, model: ModelConfig) -> None:
    """Raise ConfigError if parameters are frozen by name in a run with adapters, which freeze all others."""
    if model.lora is None or not train.selects:
        return
    key = "train.freeze" if train.freeze else "train.trainable"
    raise ConfigError(
        f"{key} is not supported with model.lora, which freezes everything except the adapters",
        code="unsupported_combination",
        keys=(key, "model.lora"),
        fix=f"{key}=[], or model.lora=null",
    )


def check_packed_probe(parallelizer: Strategy, model: ModelConfig, data: DataConfig) -> None:
    """Raise ConfigError if `patch_is_packed_sequence` is set with packed rows or with packed attention."""
    if not parallelizer.assumes_unpacked:
        return
    if data.packing != "none":
        raise ConfigError(
            f"patch_is_packed_sequence=true is not supported with data.packing={data.packing}, because it treats every "
            "row as one document",
            code="unsupported_combination",
            keys=("parallelizer.patch_is_packed_sequence", "data.packing"),
            fix="parallelizer.patch_is_packed_sequence=false",
        )
    if model.attn_implementation == "packed":
        raise ConfigError(
            "patch_is_packed_sequence=true has no effect with model.attn_implementation=packed, which receives the "
            "document boundaries",
            code="no_effect",
            keys=("parallelizer.patch_is_packed_sequence", "model.attn_implementation"),
            fix="parallelizer.patch_is_packed_sequence=false",
        )


def check_transformer_engine(parallelizer: Strategy, model: ModelConfig, mesh: MeshConfig) -> None:
    """Raise ConfigError for settings that Transformer Engine layers do not support."""
    engine = model.transformer_engine
    if engine is None:
        return
    tp_size, cp_size = mesh.tp_size or 1, mesh.cp_size or 1
    for name in ("linear", "norm"):
        if getattr(engine, name) and tp_size > 1:
            raise ConfigError(
                f"transformer_engine.{name}=true is not supported with mesh.tp_size={tp_size}, because tensor "
                "parallelism shards torch layers only",
                code="unsupported_combination",
                keys=(f"model.transformer_engine.{name}", "mesh.tp_size"),
                fix=f"model.transformer_engine.{name}=false, or mesh.tp_size=1",
            )
    if engine.attention and cp_size > 1:
        raise ConfigError(
            f"transformer_engine.attention=true is not supported with mesh.cp_size={cp_size}, because it needs "
            "unsharded sequences",
            code="unsupported_combination",
            keys=("model.transformer_engine.attention", "mesh.cp_size"),
            fix="model.transformer_engine.attention=false, or mesh.cp_size=1",
        )
    if parallelizer.enable_compile is True:
        raise ConfigError(
            "enable_compile=true is not supported with model.transformer_engine, whose layers do not compile",
            code="unsupported_combination",
            keys=("parallelizer.enable_compile", "model.transformer_engine"),
            fix="parallelizer.enable_compile=false",
        )


def check_fp8(parallelizer: Strategy, model: ModelConfig) -> None:
    """Raise ConfigError for settings that 8-bit GEMMs do not support."""
    if model.fp8 is None:
        return
    if "fp8" not in parallelizer.supports:
        raise ConfigError(
            f"model.fp8 is not supported with parallelizer={parallelizer.name}, because its casts of weights are "
            "untested there",
            code="unsupported_combination",
            keys=("model.fp8", "parallelizer"),
            fix="parallelizer=fsdp2",
        )
    if parallelizer.enable_compile is True:
        raise ConfigError(
            "enable_compile=true is not supported with model.fp8, because whole-layer compilation is untested with "
            "8-bit GEMMs; enable_compile=auto compiles the casts",
            code="unsupported_combination",
            keys=("parallelizer.enable_compile", "model.fp8"),
            fix="parallelizer.enable_compile=auto",
        )
    if model.fp8.experts and parallelizer.axis_options().expert_dispatch == "deepep":
        raise ConfigError(
            "model.fp8.experts=true is not supported with expert_dispatch=deepep, whose grouped GEMM has no 8-bit "
            "kernel",
            code="unsupported_combination",
            keys=("model.fp8.experts", "parallelizer.expert_dispatch"),
            fix="parallelizer.expert_dispatch=all_to_all, or model.fp8.experts=false",
        )


def check_qat(parallelizer: Strategy, model: ModelConfig, train: TrainConfig, kind: str) -> None:
    """Raise ConfigError for recipes, strategies and settings that fake quantization does not support."""
    qat = model.qat
    if qat is None:
        return
    if kind not in ("sft", "pretrain", "kd", "vlm"):
        raise ConfigError(
            f"model.qat is not supported with {kind} recipes. Recipes of kind sft, pretrain, kd and vlm train and "
            "export quantized weights",
            code="unsupported_combination",
            keys=("model.qat",),
            fix="model.qat=null",
        )
    if "qat" not in parallelizer.supports:
        raise ConfigError(
            f"model.qat is not supported with parallelizer={parallelizer.name}, because fake quantization is "
            "untested there",
            code="unsupported_combination",
            keys=("model.qat", "parallelizer"),
            fix="parallelizer=fsdp2",
        )
    if parallelizer.enable_compile is True:
        raise ConfigError(
            "enable_compile=true is not supported with model.qat, because whole-layer compilation is untested with "
            "fake quantization",
            code="unsupported_combination",
            keys=("parallelizer.enable_compile", "model.qat"),
            fix="parallelizer.enable_compile=auto",
        )
    steps, last = qat.fake_quant_after_n_steps, train.max_steps
    if last is not None and steps >= last:
        raise ConfigError(
            f"model.qat.fake_quant_after_n_steps={steps} must be below train.max_steps={last}, or no step is quantized",
            code="no_effect",
            keys=("model.qat.fake_quant_after_n_steps", "train.max_steps"),
            fix="model.qat.fake_quant_after_n_steps=0",
        )


def check_float16(model: ModelConfig, optimizer: OptimizerNode) -> None:
    """Raise ConfigError for float16 parameters with an optimizer that would keep its moments in float16."""
    if model.dtype == "float16":
        refuse_float16_moments(optimizer)


def check_4bit_base(parallelizer: Strategy, model: ModelConfig, mesh: MeshConfig) -> None:
    """Raise ConfigError for settings that layers with 4-bit weights do not support."""
    if model.lora is None or model.lora.quantization == "none":
        return
    quantization = f"model.lora.quantization={model.lora.quantization}"
    if (mesh.tp_size or 1) > 1:
        raise ConfigError(
            f"{quantization} is not supported with mesh.tp_size={mesh.tp_size}, because 4-bit weights are packed "
            "unsharded",
            code="unsupported_combination",
            keys=("model.lora.quantization", "mesh.tp_size"),
            fix="mesh.tp_size=1, or model.lora.quantization=none",
        )
    if "nf4" not in parallelizer.supports:
        raise ConfigError(
            f"{quantization} is not supported with parallelizer={parallelizer.name}, which handles nn.Parameter only",
            code="unsupported_combination",
            keys=("model.lora.quantization", "parallelizer"),
            fix="parallelizer=fsdp2",
        )
    if parallelizer.enable_compile is True:
        raise ConfigError(
            f"enable_compile=true is not supported with {quantization}, because it is untested with 4-bit layers",
            code="unsupported_combination",
            keys=("parallelizer.enable_compile", "model.lora.quantization"),
            fix="parallelizer.enable_compile=false",
        )


def check_multi_token(parallelizer: Strategy, model: ModelConfig, kind: str) -> None:
    """Raise ConfigError for settings that training of multi-token-prediction layers does not support."""
    if model.mtp is None:
        return
    if kind != "sft":
        raise ConfigError(
            f"model.mtp is not supported with {kind} recipes, whose loss has no labels for later tokens",
            code="unsupported_combination",
            keys=("model.mtp",),
            fix="model.mtp=null",
        )
    if "mtp" not in parallelizer.supports:
        raise ConfigError(
            f"model.mtp is not supported with parallelizer={parallelizer.name}, because multi-token-prediction layers "
            "are untested there",
            code="unsupported_combination",
            keys=("model.mtp", "parallelizer"),
            fix="parallelizer=fsdp2",
        )
    if parallelizer.axis_options().sequence_parallel:
        raise ConfigError(
            "sequence_parallel=true is not supported with model.mtp, which needs unsharded sequences between layers",
            code="unsupported_combination",
            keys=("parallelizer.sequence_parallel", "model.mtp"),
            fix="parallelizer.sequence_parallel=false",
        )
