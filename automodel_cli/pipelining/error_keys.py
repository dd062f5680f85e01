"""Translate the keys of pipeline errors into config keys or keywords of `AutoPipeline`. Torch-free.

Inside this package, messages, keys and fixes use the fields of `PipelineConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import map_keys
from automodel_cli.pipelining.config import PipelineConfig

_FIELDS = [field.name for field in fields(PipelineConfig)]
_YAML = {
    **{name: f"pipeline.{name}" for name in _FIELDS},
    "defer_fsdp_grad_sync": "parallelizer.defer_fsdp_grad_sync",
}
_KEYWORDS = {"schedule": "pp_schedule", "schedule_csv": "pp_schedule_csv"}
_SECTIONS = {"train.global_batch_size": "pp_batch_size", "train.microbatch_size": "pp_microbatch_size"}
_SWITCHES = [
    *("defer_fsdp_grad_sync", "patch_stage_backward_maybe_with_nosync", "pp_seq_len"),
    *("patch_inner_model", "patch_causal_lm_model", "scale_grads_in_schedule"),
]
_ASSIGNED = re.compile(rf"(?<![\w.-])({'|'.join([*_FIELDS, *_SWITCHES])})=([^\s,]+)")
_LITERALS = {"null": "None", "true": "True", "false": "False"}


@contextmanager
def as_yaml() -> Iterator[None]:
    """Raise errors with config keys, for example `pipeline.schedule`."""
    try:
        yield
    except ConfigError as error:
        error.keys = tuple(_YAML.get(key, key) for key in error.keys)
        error.message = respell(error.message, _YAML)
        error.fix = error.fix and map_keys(error.fix, lambda key: _YAML.get(key, key))
        raise


@contextmanager
def as_keywords() -> Iterator[None]:
    """Raise errors with keywords of `AutoPipeline`, for example `pp_schedule`, and fixes in Python syntax."""
    try:
        yield
    except ConfigError as error:
        error.keys = tuple(_KEYWORDS.get(key, _SECTIONS.get(key, key)) for key in error.keys)
        error.message = respell(error.message, _KEYWORDS)
        error.fix = error.fix and respell(_ASSIGNED.sub(_as_python, _of_the_mesh(error.fix)), _KEYWORDS)
        raise


def respell(text: str, names: Mapping[str, str]) -> str:
    """Replace keys in `key=value`. Keys inside dotted names (`layout` in `mesh.layout`) are not replaced."""
    return re.sub(r"(?<![\w.-])\w+(?==)", lambda key: names.get(key[0], key[0]), text)


def _as_python(assignment: re.Match[str]) -> str:
    name, value = assignment.groups()
    is_number = re.fullmatch(r"-?\d+", value)
    return f"{name}={_LITERALS.get(value) or (value if is_number else repr(value))}"


def _of_the_mesh(fix: str) -> str:
    """Replace sections that a library user does not have: the batch has keywords, the mesh is an object."""
    for section, keyword in _SECTIONS.items():
        fix = fix.replace(section, keyword)
    fix = fix.replace("mesh.pp_size=1", "SingleStage(part), which needs no pipeline")
    return re.sub(r"mesh\.pp_size=(\d+)", r"world_mesh with \1 ranks on its pipeline axis", fix)
