"""How many stages, which decoder layers in each, where each stage lives. Torch-free: models enter as names and costs.

A split is a list of layer ranges in pipeline order. The first stage also owns the embedding and the last one the final
norm and head; every stage builds the rotary tables it needs. Four ways to choose it: evenly, by `layers_per_stage`, by
cost, by explicit names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.schedule.stage_ranks import ScheduleKind


def stage_count(
    num_layers: int,
    layers_per_stage: int | None,
    pp_size: int,
    kind: ScheduleKind,
    rounding: Literal["up", "down"] | None = None,
) -> tuple[int, int]:
    """(number of stages, stages per rank).

    `layers_per_stage` only fixes the count; `rounding` repairs one that `pp_size` does not divide.

    Raises ConfigError when the count does not fit the ranks or the schedule: single-stage schedules need exactly one
    stage per rank, multi-stage schedules at least two.
    """
    key = "round_virtual_stages_to_pp_multiple"
    if rounding not in (None, "up", "down"):
        raise ConfigError(
            f"{key}={rounding!r} must be one of: up, down, null", code="invalid_choice", keys=(key,), fix=f"{key}=up"
        )
    if layers_per_stage is None:
        count = pp_size if kind == "single" else 2 * pp_size
    else:
        if layers_per_stage < 1:
            raise ConfigError(
                f"layers_per_stage={layers_per_stage} must be at least 1",
                code="out_of_range",
                keys=("layers_per_stage",),
                fix="layers_per_stage=null",
            )
        count = -(-num_layers // layers_per_stage)
        if count % pp_size and rounding is None:
            more = _round_up(count, pp_size)
            works = more == pp_size if kind == "single" else more >= 2 * pp_size
            raise ConfigError(
                f"layers_per_stage={layers_per_stage} splits {num_layers} layers into {count} stages, which is not a "
                f"multiple of pp_size={pp_size} ({count} % {pp_size} = {count % pp_size})",
                code="not_divisible",
                keys=("layers_per_stage", key),
                fix=f"{key}=up   ({more} stages)" if works else "layers_per_stage=null",
            )
        count = _round_up(count, pp_size) if rounding == "up" else count - count % pp_size
    per_rank = count // pp_size
    wrong = per_rank != 1 if kind == "single" else per_rank < 2
    if wrong:
        need = "exactly 1" if kind == "single" else "at least 2"
        raise ConfigError(
            f"{count} stages on pp_size={pp_size} ranks are {per_rank} per rank, but a {kind}-stage schedule needs "
            f"{need}",
            code="stage_count",
            keys=("layers_per_stage",),
            fix="layers_per_stage=null",
        )
    return count, per_rank


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def even_sizes(num_stages: int, num_layers: int) -> list[int]:
    """Layers per stage: `num_layers // num_stages`, the first ones get one more; no stage gets none."""
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_stages} stages need at least one layer each, but the model has {num_layers} decoder layers",
            code="stage_count",
            fix="a smaller mesh.pp_size, or a layout with empty stages",
        )
    base, rest = divmod(num_layers, num_stages)
    return [base + (s < rest) for s in range(num_stages)]


def layer_ranges(sizes: Sequence[int]) -> list[range]:
    """Consecutive layer ids for stages of these sizes."""
    starts = [sum(sizes[:s]) for s in range(len(sizes) + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def stage_module_names(
    num_stages: int,
    num_layers: int,
    *,
    fqn_prefix: str = "model.",
    lm_head_fqn: str = "lm_head",
    include_embeddings: bool = True,
    include_lm_head: bool = True,
    include_rotary_emb: bool = True,
    multimodal_modules: Sequence[str] = (),
    extra_module_fqns: Sequence[str] = (),
) -> list[list[str]]:
    """Module names per stage for an even spread.

    Embedding, multimodal and extra modules on stage 0; layers; norm and head on the last; rotary table on all.
    """
    stages: list[list[str]] = []
    ranges = layer_ranges(even_sizes(num_stages, num_layers))
    for s, layers in enumerate(ranges):
        names: list[str] = []
        if s == 0:
            names += [f"{fqn_prefix}embed_tokens"] * include_embeddings + [*multimodal_modules, *extra_module_fqns]
        names += [f"{fqn_prefix}layers.{i}" for i in layers]
        if s == num_stages - 1:
            names += [f"{fqn_prefix}norm", *([lm_head_fqn] * include_lm_head)]
        stages.append(names + [f"{fqn_prefix}rotary_emb"] * include_rotary_emb)
    return stages


def ranges_from_names(
    names_per_stage: Sequence[Sequence[str]],
    *,
    layers_prefix: str,
    num_layers: int,
    module_names: Collection[str],
    embedding: str,
    head: Sequence[str],
) -> list[range]:
    """Layer ranges of an explicit split, `module_fqns_per_model_part`, or a refusal that names the module.

    `layers_prefix` is the decoder list (`model.layers`), `module_names` every module the model has, `embedding` the
    table (first stage) and `head` the modules after the layers (last stage). Refused: unknown names, a module in two
    stages, a layer in none, layers out of order, embedding or head elsewhere. Other modules (rotary tables) may be
    named on any number of stages.
    """
    key = "module_fqns_per_model_part"
    seen: dict[str, int] = {}
    per_stage: list[list[int]] = []
    once = {embedding, *head, *(f"{layers_prefix}.{i}" for i in range(num_layers))}
    layer = re.compile(re.escape(layers_prefix) + r"\.(\d+)")
    for s, names in enumerate(names_per_stage):
        layers = []
        for name in names:
            if name not in module_names:
                near = difflib.get_close_matches(name, module_names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"{key}[{s}]: the model has no module {name!r}{hint}",
                    code="unknown_name",
                    keys=(key,),
                    fix=near[0] if near else None,
                )
            if name in seen and name in once:
                raise ConfigError(
                    f"{key}: {name!r} is in two stages, {seen[name]} and {s}", code="invalid_value", keys=(key,)
                )
            seen[name] = s
            if match := layer.fullmatch(name):
                layers.append(int(match[1]))
        per_stage.append(layers)
    _check_order(per_stage, layers_prefix, num_layers, key)
    last = len(names_per_stage) - 1
    for name, stage in [(embedding, 0), *((name, last) for name in head)]:
        if seen.get(name) != stage:
            where = f"is in stage {seen[name]}" if name in seen else "is in no stage"
            raise ConfigError(
                f"{key}: {name!r} {where}, but must be in stage {stage}",
                code="invalid_value",
                keys=(key,),
                fix=f"list {name!r} in stage {stage}",
            )
    return layer_ranges([len(layers) for layers in per_stage])


def _check_order(per_stage: Sequence[Sequence[int]], prefix: str, num_layers: int, key: str) -> None:
    flat = [i for layers in per_stage for i in layers]
    missing = [f"{prefix}.{i}" for i in range(num_layers) if i not in set(flat)]
    if missing:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise ConfigError(
            f"{key} must contain every decoder layer. Missing: {shown}",
            code="stage_count",
            keys=(key,),
            fix="list every decoder layer in exactly one stage",
        )
    for a, b in pairwise(flat):
        if b < a:
            raise ConfigError(
                f"{key}: stages must contain consecutive layers in order, but {prefix}.{b} comes after {prefix}.{a}",
                code="invalid_value",
                keys=(key,),
            )


def balanced_sizes(
    layer_costs: Sequence[float],
    num_stages: int,
    *,
    embedding_cost: float = 0.0,
    head_cost: float = 0.0,
    min_layers: int = 1,
) -> list[int]:
    """Layers per stage for the contiguous split whose most expensive stage is as cheap as possible, exactly.

    Stage 0 also pays `embedding_cost`, the last stage `head_cost`. Among all such splits the one with the smallest sum
    of squared stage costs, so that the other stages are even too; of equals, the one with small early stages, which
    hold the most activations. Dynamic programming over (stages, layers): O(num_stages * num_layers**2).
    """
    num_layers = len(layer_costs)
    if num_stages < 1 or num_stages * min_layers > num_layers:
        raise ConfigError(
            f"{num_stages} stages of at least {min_layers} layers need more than the {num_layers} decoder layers",
            code="stage_count",
        )
    prefix = [0.0]
    for cost in layer_costs:
        prefix.append(prefix[-1] + cost)

    def stage_cost(stage: int, start: int, end: int) -> float:
        extra = (embedding_cost if stage == 0 else 0.0) + (head_cost if stage == num_stages - 1 else 0.0)
        return prefix[end] - prefix[start] + extra

    worst = _best_split(num_layers, num_stages, min_layers, stage_cost, max)[0]
    slack = worst * (1 + 1e-12)  # the same sums in another order differ in the last bit

    def squared(stage: int, start: int, end: int) -> float:
        cost = stage_cost(stage, start, end)
        return cost * cost if cost <= slack else float("inf")

    return _best_split(num_layers, num_stages, min_layers, squared, lambda a, b: a + b)[1]


def _best_split(
    num_layers: int,
    num_stages: int,
    min_layers: int,
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """(value, sizes) of the split that minimises `combine` over the stage costs; `combine` is max or +."""
    best = [float("inf")] * (num_layers + 1)
    best[0] = 0.0
    cuts: list[list[int]] = []
    for stage in range(num_stages):
        now, cut = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(min_layers, num_layers + 1):
            for start in range(end - min_layers + 1):
                value = combine(best[start], cost(stage, start, end)) if best[start] < float("inf") else float("inf")
                if value < now[end]:
                    now[end], cut[end] = value, start
        best = now
        cuts.append(cut)
    sizes, end = [], num_layers
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return best[num_layers], sizes[::-1]
