"""Cases for settings of a recipe other than its layout, or the reason why a setting is not covered. Torch-free."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.compile_modes import FUSED_OPS
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.parity.case_selection import MAX_RANKS, small_attention, small_pipeline
from automodel_cli.parity.cases import Case

_LOW = ("bfloat16", "float16")
_MAX_LAYERS = 128


@dataclass(frozen=True)
class Chosen:
    """All cases of a recipe, and `key=value: reason` of each setting without a case."""

    rows: list[Case]
    not_covered: list[str]


def with_settings(recipe: Any, rows: Sequence[Case], num_layers: int) -> Chosen:
    """Add cases for settings.

    Adapters: on every case. Lower precision and fp8: on one rank and the most ranks. Compilation: on one rank. Stages
    of the recipe: on a copy with `num_layers` layers.
    """
    every, missing = _adapted(recipe, list(rows))
    packed = recipe.data.packing != "none"
    matching = [row for row in every if row.packed == packed]
    more: list[Case] = []
    settings = (
        _precision(recipe, matching),
        _in_fp8(recipe, matching),
        _compiled(recipe, matching),
        _stages(recipe, matching, num_layers),
    )
    for extra, reasons in settings:
        more += extra
        missing += reasons
    attention = recipe.model.attn_implementation
    if small_attention(attention) != attention:
        missing.append(
            f"model.attn_implementation={attention}: a kernel of CUDA devices; the rows have packed attention"
        )
    if recipe.model.mtp is not None:
        missing.append("model.mtp: the copy has no layers for multi-token prediction")
    if recipe.model.qat is not None:
        missing.append("model.qat: the rows compute without fake quantization")
    if recipe.model.transformer_engine is not None:
        missing.append("model.transformer_engine: layers of CUDA devices; the rows have torch's")
    return Chosen([*every, *more], missing + _only_on_devices(recipe))


def _adapted(recipe: Any, rows: list[Case]) -> tuple[list[Case], list[str]]:
    lora = recipe.model.lora
    if lora is None:
        return rows, []
    missing = []
    if lora.quantization != "none":
        missing.append(f"model.lora.quantization={lora.quantization}: the rows have the base in float32")
    if lora.dropout:
        missing.append(f"model.lora.dropout={lora.dropout}: random, the rows have none")
    if lora.pretrained is not None:
        missing.append("model.lora.pretrained: the rows have new adapters on all linear layers")
    if lora.trainable_token_indices:
        missing.append("model.lora.trainable_token_indices: the copy has a small vocabulary")
    if lora.layers_to_transform:
        missing.append("model.lora.layers_to_transform: the copy has fewer layers, and adapters on all of them")
    return [replace(row, lora=exact_lora(lora)) for row in rows], missing


def exact_lora(lora: LoRAConfig) -> LoRAConfig:
    """Return adapters that fit a small copy in float32."""
    fitting = replace(lora, layers_to_transform=[], trainable_token_indices=[])
    return replace(fitting, dropout=0.0, quantization="none", pretrained=None)


def _precision(recipe: Any, rows: Sequence[Case]) -> tuple[list[Case], list[str]]:
    parallelizer = recipe.parallelizer
    dtype = str(parallelizer.compute_dtype()).removeprefix("torch.")
    missing = []
    if recipe.model.dtype != "float32":
        missing.append(f"model.dtype={recipe.model.dtype}: how parameters are stored; those of the copy are float32")
    if dtype not in _LOW:
        return [], missing
    chosen = _first_and_widest(rows)
    return [
        replace(row, parallelizer=parallelizer.exact(_axes(row.mesh), precision=True), compute_dtype=dtype)
        for row in chosen
    ], missing


def _in_fp8(recipe: Any, rows: Sequence[Case]) -> tuple[list[Case], list[str]]:
    """Return emulated fp8 cases on one rank and on the most ranks."""
    if recipe.model.fp8 is None:
        return [], []
    chosen = _first_and_widest(rows)
    return [replace(row, fp8=replace(recipe.model.fp8, emulate=True)) for row in chosen], []


def _first_and_widest(rows: Sequence[Case]) -> list[Case]:
    """Return the first case and the one with most ranks. Compared, not hashed, because target modules may be a list."""
    widest = max(rows, key=lambda row: row.world_size)
    return [rows[0]] if widest == rows[0] else [rows[0], widest]


def _compiled(recipe: Any, rows: Sequence[Case]) -> tuple[list[Case], list[str]]:
    parallelizer = recipe.parallelizer
    if parallelizer.enable_compile not in (True, FUSED_OPS):
        return [], []
    key = f"parallelizer.compile_backend={parallelizer.compile_backend}"
    if parallelizer.compile_backend == "inductor" and not (shutil.which("c++") or shutil.which("g++")):
        return [], [f"{key}: this machine has no C++ compiler"]
    missing = []
    plain = parallelizer.exact((), compiled=True)
    if plain.activation_checkpointing == "selective" and plain.enable_compile is True:
        missing.append("parallelizer.enable_compile=true with activation_checkpointing=selective: CUDA devices only")
        plain = replace(plain, activation_checkpointing=False)
    return [replace(rows[0], parallelizer=plain)], missing


def _stages(recipe: Any, rows: Sequence[Case], num_layers: int) -> tuple[list[Case], list[str]]:
    pipeline, size = recipe.pipeline, recipe.mesh.pp_size or 1
    small = small_pipeline(pipeline)
    if pipeline is None or size == 1 or (small == pipeline and size == 2):
        return [], []
    cut = [
        f"pipeline.{f.name}={getattr(pipeline, f.name)}"
        for f in fields(pipeline)
        if getattr(pipeline, f.name) != getattr(small, f.name)
    ]
    what = ", ".join([f"mesh.pp_size={size}", *cut])
    if size > MAX_RANKS or num_layers > _MAX_LAYERS:
        return [], [f"{what}: more than {MAX_RANKS} ranks or {_MAX_LAYERS} layers"]
    row = replace(rows[0], mesh=MeshConfig(dp_size=1, pp_size=size), pipeline=pipeline, own_layers=True)
    try:
        pipeline.check(size, row.num_microbatches)
    except ConfigError as error:
        return [], [f"{what}: not with the {row.num_microbatches} microbatches of a row ({error.message})"]
    return [row], []


def _only_on_devices(recipe: Any) -> list[str]:
    """Return the options of the parallelizer that no case has."""
    parallelizer = recipe.parallelizer
    covered = parallelizer.exact(("tp", "cp"), precision=True, compiled=True)
    return [
        f"parallelizer.{field.name}={getattr(parallelizer, field.name)}: CUDA devices only"
        for field in fields(parallelizer)
        if field.name != "backend" and getattr(parallelizer, field.name) != getattr(covered, field.name)
    ]


def _axes(mesh: MeshConfig) -> tuple[str, ...]:
    return tuple(axis for axis in ("tp", "cp") if (getattr(mesh, f"{axis}_size") or 1) > 1)
