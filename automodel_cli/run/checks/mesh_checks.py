"""Check the mesh sizes against the layers, heads and experts in the model config. Torch-free.

The config is the YAML's `model.config` or the `config.json` of a local folder. Values in neither (a hub id, a family's
own default) is checked when the model is built.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.config import ModelConfig
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.layer_ranges import stage_count
from automodel_cli.pipelining.cut.layout_string import StageLayout, parse_layout, validate_layout
from automodel_cli.pipelining.error_keys import as_yaml
from automodel_cli.pipelining.schedule.schedules import find_schedule

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Written:
    """Fields of a model's config with their names in messages. `key` is the setting that they come from."""

    fields: Mapping[str, object]
    key: str
    folder: str | None

    def number(self, names: tuple[str, ...]) -> tuple[str, int] | None:
        """Return the first of the names that holds an integer."""
        for name in names:
            value = self.fields.get(name)
            if type(value) is int:  # not a bool
                return name, value
        return None

    def place(self, name: str) -> str:
        return f"{self.folder}/config.json" if self.folder else f"model.config.{name}"

    def key_of(self, name: str) -> str:
        return self.key if self.folder or name not in self.fields else f"{self.key}.{name}"


def check_mesh_sizes(
    model: ModelConfig, mesh: MeshConfig, pipeline: PipelineConfig | None, *, has_own_plan: bool = False
) -> None:
    """Compare layers with `pp_size`, experts with `ep_size`, and heads with `tp_size` unless a tensor-parallel plan of
    the user's may leave them whole. Raises ConfigError."""
    if all((size or 1) == 1 for size in (mesh.pp_size, mesh.ep_size, mesh.tp_size)):
        return
    written = written_config(model)
    if written is None:
        return
    if pipeline is not None and (mesh.pp_size or 1) > 1:
        _check_layers(written, mesh.pp_size or 1, pipeline, model)
    if (mesh.ep_size or 1) > 1:
        _check_experts(written, mesh.ep_size or 1)
    if (mesh.tp_size or 1) > 1 and not has_own_plan:
        _check_heads(written, mesh.tp_size or 1)


def written_config(model: ModelConfig) -> Written | None:
    """The model's config as far as it is at hand."""
    if model.config is not None:
        return Written(_text_fields(model.config), "model.config", None)
    if model.pretrained is None or model.gguf_file is not None:
        return None
    try:
        fields = json.loads((Path(model.pretrained) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # a hub id, or a folder that the loader rejects with its own message
    return Written(_text_fields(fields), "model.pretrained", model.pretrained) if isinstance(fields, dict) else None


def _text_fields(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Return the language-model section of a multimodal config."""
    text = fields.get("text_config")
    return text if isinstance(text, dict) else fields


def _check_layers(written: Written, pp_size: int, pipeline: PipelineConfig, model: ModelConfig) -> None:
    field = written.number(_LAYERS)
    if field is None or pipeline.schedule_csv is not None or pipeline.module_fqns_per_model_part is not None:
        return
    name, num_layers = field
    assert pipeline.schedule is not None
    keys = ("mesh.pp_size", written.key_of(name))
    if pipeline.layout is not None:
        try:
            layout = parse_layout(pipeline.layout)
            validate_layout(layout, pp_size, num_layers, _num_depths(model, layout))
        except ConfigError as error:
            raise ConfigError(error.message, code=error.code, keys=("pipeline.layout", *keys), fix=error.fix) from None
        return
    kind = find_schedule(pipeline.schedule).kind
    rounding = pipeline.round_virtual_stages_to_pp_multiple
    try:
        with as_yaml():
            count, per_rank = stage_count(num_layers, pipeline.layers_per_stage, pp_size, kind, rounding)
    except ConfigError as error:
        raise ConfigError(error.message, code=error.code, keys=(*error.keys, *keys), fix=error.fix) from None
    if count > num_layers:
        fits = max(1, num_layers // per_rank)
        fix = f"mesh.pp_size={fits}" if fits > 1 else "mesh.pp_size=1 pipeline=null"
        raise ConfigError(
            f"mesh.pp_size={pp_size} needs at least {count} layers, one per stage, but the model has {num_layers} "
            f"({written.place(name)})",
            code="stage_count",
            keys=keys,
            fix=fix,
        )


def _num_depths(model: ModelConfig, layout: StageLayout) -> int:
    """Check the number of multi-token prediction layers. A checkpoint must have as many as the layout places."""
    if model.mtp is not None:
        return model.mtp.depths or max(1, layout.count("m"))
    if layout.count("m"):
        raise ConfigError(
            f"pipeline.layout places {layout.count('m')} multi-token-prediction layers (m), but model.mtp is not set",
            code="requires_setting",
            fix="model.mtp={}",
        )
    return 0


def _check_experts(written: Written, ep_size: int) -> None:
    field = written.number(_EXPERTS)
    if field is None:
        if _is_dense(written.fields):
            family = written.fields.get("model_type")
            raise ConfigError(
                f"mesh.ep_size={ep_size} is not supported, because {family} models have no experts",
                code="not_supported_by_model",
                keys=("mesh.ep_size", written.key_of("model_type")),
                fix="mesh.ep_size=1",
            )
        return
    name, num_experts = field
    if num_experts % ep_size:
        raise ConfigError(
            f"mesh.ep_size={ep_size} does not divide {name}={num_experts} of the model ({written.place(name)})",
            code="not_divisible",
            keys=("mesh.ep_size", written.key_of(name)),
            fix=f"mesh.ep_size={math.gcd(num_experts, ep_size)}",
        )


def _check_heads(written: Written, tp_size: int) -> None:
    """Raise ConfigError if `tp_size` does not divide the heads, and the published plan shards them by columns."""
    source = _source_of_config(written.fields) or ""
    sharded = {"num_key_value_heads": "k_proj", "num_attention_heads": "q_proj"}
    plan = '"layers.*.self_attn.{}": "colwise"'
    counts = {name: written.fields.get(name) for name, layer in sharded.items() if plan.format(layer) in source}
    known = {name: count for name, count in counts.items() if isinstance(count, int) and count > 0}
    for name, count in known.items():
        if count % tp_size:
            sizes = [size for size in range(1, tp_size) if all(of % size == 0 for of in known.values())]
            raise ConfigError(
                f"mesh.tp_size={tp_size} does not divide {name}={count} of the model ({written.place(name)}), but "
                "tensor parallelism assigns whole heads to ranks",
                code="not_divisible",
                keys=("mesh.tp_size", written.key_of(name)),
                fix=f"mesh.tp_size={max(sizes)}",
            )


def _is_dense(fields: Mapping[str, object]) -> bool:
    """Return whether neither the config nor the source of its family's config class mentions experts.

    The source is read as text, because importing it imports torch. A family whose class is derived from another's
    stays undecided.
    """
    if any("expert" in name or "moe" in name for name in fields):
        return False
    source = _source_of_config(fields)
    if source is None:
        return False
    return "expert" not in source and "moe" not in source and not re.search(r"^from \.\.\w", source, re.M)


def _source_of_config(fields: Mapping[str, object]) -> str | None:
    """Return the source of the family's config class, or None if the library has no such class."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return None
    family = str(fields.get("model_type", "")).replace("-", "_")
    path = Path(spec.submodule_search_locations[0]) / "models" / family / f"configuration_{family}.py"
    if not family.isidentifier() or not path.is_file():
        return None
    return path.read_text(encoding="utf-8")
