"""Rules between sections that no section can check alone. No torch here: `automodel check` asks them too."""

from __future__ import annotations

import re
from pathlib import Path

from automodel_cli.config.diagnostics import format_value
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.name_patterns import NameList, check_entries
from automodel_cli.data.config import DataConfig
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.base import Strategy
from automodel_cli.models.config import ModelConfig
from automodel_cli.run.remote.remote_storage import check_url, is_url
from automodel_cli.training.config import ProfileConfig, ValidationConfig
from automodel_cli.training.early_stopping import LOSS
from automodel_cli.training.optimizers.nodes import OptimizerNode, refuse_float16_moments


def check_run_name(name: str | None) -> None:
    """A run's name is the name of its folder: one component of a path, of characters that a terminal shows."""
    if name is None or re.fullmatch(r"[\w][\w .,+=@:~%()'\[\]-]{0,199}", name):
        return
    word = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:100]
    raise ConfigError(
        f"run_name={name!r} must be one component of a path: up to 200 letters, digits, blanks and .,+=@:~%()'[]-_, "
        "a letter, digit or _ first",
        keys=("run_name",),
        fix=f"run_name={word or 'my_run'}",
    )


def check_output_dir(folder: str) -> None:
    """A URL needs the package that writes to it. Whether it may be written to is tried when a run begins."""
    if is_url(folder):
        check_url(folder)


def check_validation(validation: ValidationConfig, data: DataConfig, kind: str = "sft") -> None:
    """When to validate is said in vain where there is nothing to validate on. A task brings rows of its own."""
    has_rows = data.generator is not None or data.validation_size or data.validation_path or data.validation_split
    times = () if validation.tasks else ("every", "at_start")  # tasks have questions of their own
    asked = [name for name in (*times, "num_batches") if getattr(validation, name)]
    if asked and not has_rows:
        raise ConfigError(
            f"validation.{asked[0]}={format_value(getattr(validation, asked[0]))} does nothing: no rows are held out",
            keys=(f"validation.{asked[0]}",),
            fix="data.validation_size=0.02",
        )
    if validation.patience is None or validation.metric != LOSS:
        return
    if kind == "grpo":
        raise ConfigError(
            "validation.patience waits for val_loss, which a run that learns from its samples does not measure",
            keys=("validation.patience", "validation.metric"),
            fix="validation.metric=val_reward validation.direction=max",
        )
    if not has_rows:
        raise ConfigError(
            "validation.patience waits for val_loss, but no rows are held out",
            keys=("validation.patience", "validation.metric"),
            fix="data.validation_size=0.02",
        )


def check_profile(profile: ProfileConfig | None, num_ranks: int) -> None:
    """Every rank that shall record is one of the run's."""
    if profile is None:
        return
    ranks = [str(rank) for rank in range(num_ranks)]
    listed = NameList("logging.profile.ranks", [str(rank) for rank in profile.ranks], "is no rank of this run", "[0]")
    check_entries(listed, lambda rank: rank in ranks, ranks)


def check_packed_probe(parallelizer: Strategy, model: ModelConfig, data: DataConfig) -> None:
    """Switching off the library's search for packed rows needs rows that are none, and attention that searches."""
    if not parallelizer.assumes_unpacked:
        return
    if data.packing != "none":
        raise ConfigError(
            f"patch_is_packed_sequence=true takes every row for one document, but data.packing={data.packing}",
            keys=("parallelizer.patch_is_packed_sequence", "data.packing"),
            fix="parallelizer.patch_is_packed_sequence=false",
        )
    if model.attn_implementation == "packed":
        raise ConfigError(
            "patch_is_packed_sequence=true does nothing with model.attn_implementation=packed, which is told "
            "where documents end",
            keys=("parallelizer.patch_is_packed_sequence", "model.attn_implementation"),
            fix="parallelizer.patch_is_packed_sequence=false",
        )


def check_transformer_engine(parallelizer: Strategy, model: ModelConfig, mesh: MeshConfig) -> None:
    """What Transformer Engine's layers cannot be combined with here."""
    engine = model.transformer_engine
    if engine is None:
        return
    tp_size, cp_size = mesh.tp_size or 1, mesh.cp_size or 1
    for name in ("linear", "norm"):
        if getattr(engine, name) and tp_size > 1:
            raise ConfigError(
                f"transformer_engine.{name}=true holds whole layers, but mesh.tp_size={tp_size} cuts torch's",
                keys=(f"model.transformer_engine.{name}", "mesh.tp_size"),
                fix=f"model.transformer_engine.{name}=false, or mesh.tp_size=1",
            )
    if engine.attention and cp_size > 1:
        raise ConfigError(
            f"transformer_engine.attention=true sees whole rows, but mesh.cp_size={cp_size} shares them over ranks",
            keys=("model.transformer_engine.attention", "mesh.cp_size"),
            fix="model.transformer_engine.attention=false, or mesh.cp_size=1",
        )
    if parallelizer.enable_compile is True:
        raise ConfigError(
            "enable_compile=true cannot look into Transformer Engine's layers",
            keys=("parallelizer.enable_compile", "model.transformer_engine"),
            fix="parallelizer.enable_compile=false",
        )


def check_fp8(parallelizer: Strategy, model: ModelConfig) -> None:
    """What products of 8-bit floats cannot be combined with."""
    if model.fp8 is None:
        return
    if "fp8" not in parallelizer.supports:
        raise ConfigError(
            f"model.fp8: casts of weights at every use are not measured under {parallelizer.name}",
            keys=("model.fp8", "parallelizer"),
            fix="parallelizer=fsdp2",
        )
    if parallelizer.enable_compile is True:
        raise ConfigError(
            "model.fp8: enable_compile=true is not tested with 8-bit products; as glue the casts compile",
            keys=("parallelizer.enable_compile", "model.fp8"),
            fix="parallelizer.enable_compile=auto",
        )
    if model.fp8.experts and parallelizer.axis_options().expert_dispatch == "deepep":
        raise ConfigError(
            "model.fp8.experts: rows that DeepEP has sorted are multiplied by the library's own code, which has no "
            "8-bit products",
            keys=("model.fp8.experts", "parallelizer.expert_dispatch"),
            fix="parallelizer.expert_dispatch=all_to_all, or model.fp8.experts=false",
        )


def check_float16(model: ModelConfig, optimizer: OptimizerNode) -> None:
    """Refuse float16 parameters under an optimizer whose moments would be float16 too."""
    if model.dtype == "float16":
        refuse_float16_moments(optimizer)


def check_4bit_base(parallelizer: Strategy, model: ModelConfig, mesh: MeshConfig) -> None:
    """What layers with 4-bit weights cannot be combined with."""
    if model.lora is None or model.lora.quantization == "none":
        return
    quantization = f"model.lora.quantization={model.lora.quantization}"
    if (mesh.tp_size or 1) > 1:
        raise ConfigError(
            f"{quantization} packs whole weights, but mesh.tp_size={mesh.tp_size} cuts them",
            keys=("model.lora.quantization", "mesh.tp_size"),
            fix="mesh.tp_size=1, or model.lora.quantization=none",
        )
    if "nf4" not in parallelizer.supports:
        raise ConfigError(
            f"{quantization} keeps weights that are no parameters, which this parallelizer knows nothing of",
            keys=("model.lora.quantization", "parallelizer"),
            fix="parallelizer=fsdp2",
        )
    if parallelizer.enable_compile is True:
        raise ConfigError(
            f"{quantization}: enable_compile=true is not tested with 4-bit layers",
            keys=("parallelizer.enable_compile", "model.lora.quantization"),
            fix="parallelizer.enable_compile=false",
        )


def check_multi_token(parallelizer: Strategy, model: ModelConfig, kind: str) -> None:
    """What training of layers for multi-token prediction cannot be combined with."""
    if model.mtp is None:
        return
    if kind != "sft":
        raise ConfigError(
            f"model.mtp trains on the labels further on in a text, which a recipe of kind {kind} does not have: its "
            "objective weighs whole responses",
            keys=("model.mtp",),
            fix="model.mtp=null",
        )
    if "mtp" not in parallelizer.supports:
        raise ConfigError(
            f"model.mtp: layers for multi-token prediction are not measured under {parallelizer.name}",
            keys=("model.mtp", "parallelizer"),
            fix="parallelizer=fsdp2",
        )
    if parallelizer.axis_options().sequence_parallel:
        raise ConfigError(
            "sequence_parallel=true cuts the tokens between the layers, of which model.mtp needs all with the tokens "
            "after them",
            keys=("parallelizer.sequence_parallel", "model.mtp"),
            fix="parallelizer.sequence_parallel=false",
        )


def check_exported(model: ModelConfig) -> None:
    """A recipe that starts from another one's export says which command makes it. Raises ConfigError."""
    path = Path(model.pretrained or "")
    if path.name != "export" or path.parent.parent.name != "runs" or path.is_dir():
        return
    raise ConfigError(
        f"model.pretrained={model.pretrained} does not exist: it is what the recipe {path.parent.name} exports",
        keys=("model.pretrained",),
        fix=f"automodel finetune llm -c {word(path.parent.name)}   (from the same folder)",
    )
