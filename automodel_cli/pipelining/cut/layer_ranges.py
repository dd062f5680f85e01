"""Number of stages and their decoder layers. Torch-free: models are names and costs.

A split is a list of layer ranges in pipeline order. The first stage also has the embedding, the last one the final norm
and head. Every stage builds the rotary tables that it needs. A split is even, by `layers_per_stage`, by cost, or by
explicit names.

Example: 10 layers on 4 stages are 3, 3, 2 and 2 layers. With a head that costs as much as 3 layers, 16 layers on 4
stages are 4, 5, 5 and 2 layers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice, check_range
from automodel_cli.pipelining.schedule.stage_ranks import ScheduleKind


def stage_count(
    num_layers: int,
    layers_per_stage: int | None,
    pp_size: int,
    kind: ScheduleKind,
    rounding: Literal["up", "down"] | None = None,
) -> tuple[int, int]:
    """Return the number of stages and the stages per rank.

    Single-stage schedules need exactly one stage per rank, multi-stage schedules at least two. Raises ConfigError.

    Args:
        layers_per_stage: determines the number of stages.
        rounding: rounds the number to a multiple of `pp_size`.
    """
    key = "round_virtual_stages_to_pp_multiple"
    check_choice(key, rounding, ("up", "down", None), fix=f"{key}=up")
    if layers_per_stage is None:
        count = pp_size if kind == "single" else 2 * pp_size
    else:
        check_range("layers_per_stage", layers_per_stage, at_least=1, fix="layers_per_stage=null")
        # Example: 10 layers with 3 per stage are 4 stages, of which the even split makes 3, 3, 2 and 2.
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
    """Return layers per stage: `num_layers // num_stages`, and one more for the first stages. No stage is empty."""
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_stages} stages need at least one layer each, but the model has {num_layers} decoder layers",
            code="stage_count",
            fix="a smaller mesh.pp_size, or a layout with empty stages",
        )
    # The first stages get the extra layers, because the last stage also has the head.
    base, rest = divmod(num_layers, num_stages)
    return [base + (s < rest) for s in range(num_stages)]


def layer_ranges(sizes: Sequence[int]) -> list[range]:
    """Return consecutive layer ranges of these sizes."""
    starts = [sum(sizes[:s]) for s in range(len(sizes) + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def ranges_from_names(
    names_per_stage: Sequence[Sequence[str]],
    *,
    layers_prefix: str,
    num_layers: int,
    module_names: Collection[str],
    embedding: str,
    head: Sequence[str],
) -> list[range]:
    """Return the layer ranges of an explicit split, `module_fqns_per_model_part`.

    Raises ConfigError for unknown names, a module in two stages, a layer in none, layers out of order, and an embedding
    or head in another stage. Other modules (rotary tables) may be in any number of stages.

    Args:
        layers_prefix: the decoder list, for example `model.layers`.
        module_names: all modules of the model.
        embedding: the embedding table, which belongs to the first stage.
        head: the modules after the layers, which belong to the last stage.
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
    """Return layers per stage of the contiguous split with the smallest maximum stage cost, exactly.

    Stage 0 also has `embedding_cost`, the last stage `head_cost`. Ties are resolved by the smallest sum of squared
    stage costs, then by small early stages, which have the most activations. Dynamic programming over (stages, layers),
    O(num_stages * num_layers**2).
    """
    # Example: 4 layers of cost 1 on 2 stages, head of cost 2. 3 and 1 layers give the costs 3 and 3. 2 and 2 give 2 and
    # 4.
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

    # First pass: the smallest possible maximum. Second pass: among the splits with this maximum, the most even one. A
    # schedule waits for the slowest stage, and the others should not differ without need.
    worst = _best_split(num_layers, num_stages, min_layers, stage_cost, max)[0]
    slack = worst * (1 + 1e-12)  # Sums in another order differ by rounding.

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
    """Return (value, sizes) of the split that minimizes `combine` (max or +) over the stage costs.

    `best[end]` is the value of the best split of the first `end` layers into the stages so far. `cuts[stage][end]` is
    the start of the last stage in it.
    """
    best = [float("inf")] * (num_layers + 1)
    best[0] = 0.0
    cuts: list[list[int]] = []
    for stage in range(num_stages):
        now, cut = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(min_layers, num_layers + 1):
            # `<` keeps the first of equal values: the smallest start, so the last stage so far is as large as possible.
            for start in range(end - min_layers + 1):
                value = combine(best[start], cost(stage, start, end)) if best[start] < float("inf") else float("inf")
                if value < now[end]:
                    now[end], cut[end] = value, start
        best = now
        cuts.append(cut)
    # Walk back from the last stage: the cut of each stage is the end of the stage before.
    sizes, end = [], num_layers
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return best[num_layers], sizes[::-1]
