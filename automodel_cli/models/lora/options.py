"""Choices of `model.lora` beyond rank and targets: which layers, other ranks, modules that are trained completely."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TypedDict

from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.name_patterns import NameList, check_entries, endings, ends_in
from automodel_cli.models.lora_config import LoRAConfig


class PeftOptions(TypedDict):
    """Arguments of `peft.LoraConfig` that select layers and their ranks."""

    exclude_modules: list[str] | None
    layers_to_transform: list[int] | None
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]


def peft_options(config: LoRAConfig) -> PeftOptions:
    """Return the arguments of `peft.LoraConfig` that select layers and their ranks."""
    return {
        "exclude_modules": config.exclude_modules or None,
        "layers_to_transform": config.layers_to_transform or None,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
    }


def check_excluded(config: LoRAConfig, targeted: list[str]) -> None:
    """Raise ConfigError for an entry of `exclude_modules` that no targeted layer's name ends in."""
    listed = NameList("model.lora.exclude_modules", config.exclude_modules, "is the ending of no targeted layer")
    check_entries(listed, lambda entry: any(ends_in(name, entry) for name in targeted), endings(targeted))


def check_layers(config: LoRAConfig, num_layers: int) -> None:
    """Raise ConfigError for a layer in `layers_to_transform` that the model does not have."""
    wrong = [layer for layer in config.layers_to_transform if layer >= num_layers]
    if wrong:
        kept = [str(layer) for layer in config.layers_to_transform if layer < num_layers]
        raise ConfigError(
            f"lora.layers_to_transform has layer {wrong[0]}, but the model has the layers 0 to {num_layers - 1}",
            code="out_of_range",
            keys=("lora.layers_to_transform",),
            fix=f"model.lora.layers_to_transform=[{','.join(kept)}]",
        )


def check_patterns(config: LoRAConfig, adapted: list[str]) -> None:
    """Raise ConfigError for a key of `rank_pattern` or `alpha_pattern` that matches no adapter, as peft matches it."""
    for key in ("rank_pattern", "alpha_pattern"):
        listed = NameList(f"model.lora.{key}", getattr(config, key), "matches no layer with an adapter", empty="{}")
        check_entries(listed, lambda p: any(re.match(rf"(.*\.)?({p})$", n) for n in adapted), endings(adapted))


def train_saved_modules(
    model: nn.Module, names: list[str], adapted: list[str], only: Collection[str] | None = None
) -> None:
    """Train the parameters of modules completely. `only`: the modules that names can select, None for all.

    Raises ConfigError for names that select none, a layer with an adapter, or one side of a tie.
    """
    if not names:
        return
    have = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    have = have if only is None else [name for name in have if name in only]
    listed = NameList("model.lora.modules_to_save", names, "is the ending of no module with parameters")
    known = {word for word in endings(n for n in have if ".lora_" not in n) - {"base_layer"} if not word.isdigit()}
    check_entries(listed, lambda entry: any(ends_in(name, entry) for name in have), known)
    chosen = {name for name in have if any(ends_in(name, entry) for entry in names)}
    inside = next((a for a in adapted if any(f"{a}.".startswith(f"{name}.") for name in chosen)), None)
    if inside is not None:
        raise ConfigError(
            f"lora.modules_to_save={names} contains {inside}, which has an adapter. A module is trained by one of them",
            code="unsupported_combination",
            keys=("lora.modules_to_save", "lora.target_modules"),
            fix="model.lora.modules_to_save=[]",
        )
    for name, param in model.named_parameters(remove_duplicate=False):
        if _is_saved(name, chosen):
            param.requires_grad_(True)
    _check_ties(model, names, chosen)


def _check_ties(model: nn.Module, names: list[str], chosen: set[str]) -> None:
    """A tied table is one parameter here, and peft would store and load only the module that is named."""
    owners: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(param), []).append(name)
    for shared in owners.values():
        other = next((name for name in shared if not _is_saved(name, chosen)), None)
        if other is not None and any(_is_saved(name, chosen) for name in shared):
            ending = other.rpartition(".")[0].rpartition(".")[2]
            raise ConfigError(
                f"lora.modules_to_save={names} requires {ending} too, which shares its weight",
                code="requires_setting",
                keys=("lora.modules_to_save",),
                fix=f"'model.lora.modules_to_save=[{','.join([*names, ending])}]'",
            )


def saved_parameters(model: nn.Module, names: list[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that `modules_to_save` trains on this rank, by each of their names."""
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad and any(ends_in(module, entry) for module in _prefixes(name) for entry in names):
            yield name, param


def saved_modules(files: Collection[str], entries: list[str]) -> list[str]:
    """Return the full names of the modules that `entries` select, from the names of a file's tensors."""
    found = set()
    for name in files:
        chosen = (module for module in _prefixes(name) if ends_in_any(module, entries))
        found.add(None if ".lora_" in name or ".token_adapter." in name else next(chosen, None))
    return sorted(module for module in found if module is not None)


def ends_in_any(name: str, entries: Collection[str]) -> bool:
    """Return whether the name of a module ends in one of the entries."""
    return any(ends_in(name, entry) for entry in entries)


def _is_saved(name: str, chosen: set[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in chosen)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
