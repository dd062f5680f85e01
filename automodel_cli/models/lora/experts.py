"""Low-rank adapters on the fused experts of mixtures, in the file format of `peft` (`target_parameters`).

The adapters of `experts.gate_up_proj` `[E, O, I]` (or `[E, I, O]`) are two parameters of the experts module: A
`[E, R, I]` and B `[E, O, R]`. The order of gate and up columns is that of the weight, interleaved or not.
`distributed/expert_parallel/low_rank.py` has the products. `peft` has the same update, formed in full.

In files, A is `[E R, I]` with experts outside, and B is `[O, R E]` with experts inside. `peft` nests its wrappers, so
`experts.base_layer.lora_A` belongs to `gate_up_proj` and `experts.lora_A` to `down_proj`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.name_patterns import NameList, check_entries, endings, ends_in
from automodel_cli.distributed.expert_parallel.apply import is_experts, num_experts_of, sorted_forward
from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts
from automodel_cli.distributed.expert_parallel.low_rank import (
    ADAPTERS,
    MATRICES,
    SCALING,
    WEIGHTS,
    has_adapters,
    scale_of,
)
from automodel_cli.distributed.typed_torch import disable, set_attributes
from automodel_cli.models import transformers_compat
from automodel_cli.models.rng import generator_for

if TYPE_CHECKING:
    import peft

Number = TypeVar("Number", int, float)
ALL_EXPERTS = "all-experts"
_PEFT_LAYERS = {"gate_up_proj": "base_layer.", "down_proj": ""}


def adapted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every experts module with adapters."""
    return [(name, module) for name, module in model.named_modules() if has_adapters(module)]


def scaling(experts: nn.Module) -> dict[str, float]:
    """Return the scale of an experts module with adapters, to change it in place."""
    return cast(dict[str, float], getattr(experts, SCALING))


def inject(model: nn.Module, targets: str | list[str] | None, settings: peft.LoraConfig) -> None:
    """Add adapters to the experts that `targets` selects. Works on the meta device.

    `settings` is a `peft.LoraConfig`, whose rank and alpha patterns apply to the names of the weights, as in peft.
    Raises ConfigError for entries that name no weight of experts, experts with an adapter on one weight only or with
    two ranks, and experts that are not measured to be gated MLPs.
    """
    if targets is None:
        return
    names = {f"{name}.{weight}": (name, weight) for name in _experts(model) for weight in WEIGHTS}
    if not names:
        raise _not_experts(model, targets)
    chosen = set(names)
    if isinstance(targets, list):
        listed = NameList("model.lora.target_parameters", targets, "no weight of experts ends in", empty=ALL_EXPERTS)
        check_entries(listed, lambda entry: any(ends_in(name, entry) for name in names), endings(names))
        chosen = {name for name in names if any(ends_in(name, entry) for entry in targets)}
    for name in dict.fromkeys(names[full][0] for full in names if full in chosen):
        if missing := [weight for weight in WEIGHTS if f"{name}.{weight}" not in chosen]:
            raise ConfigError(
                f"lora.target_parameters={targets} has no adapter on {name}.{missing[0]}, but readers of adapters on "
                "experts expect both weights",
                code="not_supported",
                keys=("lora.target_parameters",),
                fix=f"model.lora.target_parameters={ALL_EXPERTS}",
            )
        _add(name, model.get_submodule(name), *_rank_and_scale(name, settings))
    short = sorted({".".join(name.split(".")[-2:]) for name in chosen})
    settings.target_parameters = targets if isinstance(targets, list) else short


def _rank_and_scale(name: str, settings: peft.LoraConfig) -> tuple[int, float]:
    """Return rank and scale of the adapters of an experts module. Raises ConfigError if its weights differ in them."""
    ranks, alphas = (
        [_by_pattern(patterns, f"{name}.{weight}", usual) for weight in WEIGHTS]
        for patterns, usual in (
            (settings.rank_pattern or {}, settings.r),
            (settings.alpha_pattern or {}, settings.lora_alpha),
        )
    )
    for key, values in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if values[0] != values[1]:
            both = ", ".join(f"{weight} {value:g}" for weight, value in zip(WEIGHTS, values, strict=True))
            raise ConfigError(
                f"lora.{key} gives the weights of {name} different values ({both}), but the adapters of an expert have "
                "one rank and one alpha",
                code="not_supported",
                keys=(f"lora.{key}", "lora.target_parameters"),
                fix=f"model.lora.{key}={{}}",
            )
    return ranks[0], alphas[0] / (ranks[0] ** 0.5 if settings.use_rslora else ranks[0])


def _by_pattern(patterns: Mapping[str, Number], name: str, usual: Number) -> Number:
    """Return the value of the first pattern that matches a name, as `peft` matches it."""
    matched = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name))
    return next(matched, usual)


def full_names(experts: Iterable[str]) -> list[str]:
    """Return the names of the adapted weights of experts modules."""
    return sorted(f"{name}.{weight}" for name in experts for weight in WEIGHTS)


def _experts(model: nn.Module) -> list[str]:
    """Names of the experts modules, without wrappers, in model order."""
    return [
        name
        for name, module in model.named_modules()
        if is_experts(module) and all(weight in module._parameters for weight in WEIGHTS)
    ]


def _not_experts(model: nn.Module, targets: object) -> ConfigError:
    return ConfigError(
        f"lora.target_parameters={targets} is not supported because {type(model).__name__} has no fused experts",
        code="not_supported_by_model",
        keys=("lora.target_parameters",),
        fix="model.lora.target_parameters=null",
    )


def _add(name: str, experts: nn.Module, rank: int, scale: float) -> None:
    if GatedExperts.of(experts, num_experts_of(experts), None) is None:
        raise ConfigError(
            f"lora.target_parameters is not supported because {name} ({type(experts).__name__}) is not measured to be "
            "a gated MLP",
            code="not_supported_by_model",
            keys=("lora.target_parameters",),
            fix="model.lora.target_parameters=null",
        )
    for weight in WEIGHTS:
        parameter = experts.get_parameter(weight)
        count, *size = parameter.shape
        inputs, outputs = size if experts.is_transposed else size[::-1]
        for matrix, shape in zip(MATRICES, ((rank, inputs), (outputs, rank)), strict=True):
            value = torch.empty(count, *shape, dtype=parameter.dtype, device=parameter.device)
            experts.register_parameter(f"{weight}_{matrix}", nn.Parameter(value))
    setattr(experts, SCALING, {"default": scale})
    compute_grouped(experts)


def compute_grouped(experts: nn.Module) -> None:
    """Compute with the grouped GEMM path, which knows adapters and quantized weights, from now on."""
    experts.__class__ = _grouped_class(type(experts))


def _grouped_class(family: type[nn.Module]) -> type[nn.Module]:
    """Return the class of the family with the grouped forward, for any number of local experts."""

    @disable()
    def forward(self: nn.Module, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        arithmetic = self.__dict__.get("_arithmetic")
        if arithmetic is None or arithmetic.num_local != num_experts_of(self):
            arithmetic = self.__dict__["_arithmetic"] = GatedExperts(self, num_experts_of(self), None)
        return sorted_forward(arithmetic, self, hidden_TD, index_TK, weight_TK)

    # The loop that is measured.
    set_attributes(forward, __wrapped__=family.forward.__wrapped__)  # type: ignore[attr-defined]
    return type(family.__name__, (family,), {"forward": forward, "__module__": family.__module__})


def num_used_by_a_token(model: nn.Module, num_trained: int) -> int:
    """Return how many of `num_trained` parameters compute for one token, which reaches few experts."""
    used = sum(param.numel() for param in model.parameters() if param.requires_grad)
    everything, per_token = max(used, 1), float(used)
    chosen: int = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)  # type: ignore[operator, union-attr]
    for _, experts in adapted(model) if chosen else ():
        first = experts.get_parameter(ADAPTERS[0])
        size = sum(experts.get_parameter(name).numel() for name in ADAPTERS)
        per_token -= size * (1 - min(chosen / first.shape[0], 1.0))
    return round(num_trained * per_token / everything)


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """A is uniform as in a linear layer's default, B is zero, under any layout."""
    for name, experts in adapted(model):
        for weight in WEIGHTS:
            a, b = (experts.get_parameter(f"{weight}_{matrix}") for matrix in MATRICES)
            # The full tensor on every rank, then its shard: values do not depend on the layout.
            full = torch.empty(a.shape, dtype=torch.float32)
            generator = generator_for(seed, f"{name}.{weight}.lora_A")
            nn.init.kaiming_uniform_(full.view(-1, full.shape[-1]), a=math.sqrt(5), generator=generator)
            transformers_compat.local(a).copy_(transformers_compat.local_part(a, full))
            transformers_compat.local(b).zero_()


def take_out(model: nn.Module) -> list[tuple[nn.Module, dict[str, nn.Parameter | None]]]:
    """Remove the adapters from their modules, so that names are the hub's. `put_back` restores them."""
    return [(experts, {name: experts._parameters.pop(name) for name in ADAPTERS}) for _, experts in adapted(model)]


def put_back(removed: list[tuple[nn.Module, dict[str, nn.Parameter | None]]]) -> None:
    """Restore the adapters that `take_out` removed."""
    for experts, parameters in removed:
        experts._parameters.update(parameters)


def weights(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Adapted weight -> (experts module, leaf name)."""
    return {f"{name}.{weight}": (experts, weight) for name, experts in adapted(model) for weight in WEIGHTS}


def delta(experts: nn.Module, weight: str) -> Tensor:
    """Return the full fp32 update of a weight, as it is stored. Collective if adapters are sharded."""
    a, b = matrices(experts, weight)
    update: Tensor = (b.float() @ a.float()) * scale_of(experts)
    return update.transpose(-2, -1) if experts.is_transposed else update


def matrices(experts: nn.Module, weight: str) -> tuple[Tensor, Tensor]:
    """Return the full A `[E, R, I]` and B `[E, O, R]` of a weight. Collective if adapters are sharded."""
    a, b = (transformers_compat.full_tensor(experts.get_parameter(f"{weight}_{matrix}")) for matrix in MATRICES)
    return a, b


def parameters_in_files(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the adapters with their names in files of `peft`, whose matrices have other shapes (`from_file`)."""
    for name, experts in adapted(model):
        for weight in WEIGHTS:
            for matrix in MATRICES:
                yield f"{name}.{_PEFT_LAYERS[weight]}{matrix}.weight", experts.get_parameter(f"{weight}_{matrix}")


def from_file(name: str, stored: Tensor, num_experts: int) -> Tensor:
    """Return a matrix of a file as the parameter has it: A `[E, R, I]` or B `[E, O, R]`."""
    if name.endswith("lora_A.weight"):
        a: Tensor = stored.unflatten(0, (num_experts, -1))
        return a
    # Example: 2 experts, rank 1. B of expert 0 is (1, 2), of expert 1 (3, 4). The file has [[1, 3], [2, 4]], a column
    # per expert. [O, R E] -> [O, R, E] -> [E, O, R].
    b: Tensor = stored.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
    return b


def in_files(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of the adapters as `peft` stores them. Collective if adapters are sharded."""
    for name, experts in adapted(model):
        for weight in WEIGHTS:
            a, b = matrices(experts, weight)
            yield f"{name}.{_PEFT_LAYERS[weight]}lora_A.weight", a.flatten(0, 1)
            yield f"{name}.{_PEFT_LAYERS[weight]}lora_B.weight", b.permute(1, 2, 0).flatten(1)
