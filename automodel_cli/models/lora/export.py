"""Adapters in the files of `peft`: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.models import transformers_compat
from automodel_cli.models.lora import experts as expert_lora
from automodel_cli.models.lora import init as lora_init
from automodel_cli.models.lora import options as lora_options
from automodel_cli.models.lora.adapters import matrices_of, peft_config, wrappers
from automodel_cli.models.lora_config import LoRAConfig

if TYPE_CHECKING:
    from automodel_cli.models.model_part import ModelPart


def save_adapters(
    parts: Sequence[ModelPart],
    config: LoRAConfig,
    directory: str | Path,
    *,
    base_model: str,
    write: bool,
    pp_group: dist.ProcessGroup | None = None,
) -> None:
    """Write an adapter that `peft.PeftModel.from_pretrained` reads.

    Collective. Only the rank with `write` writes. `pp_group`: the ranks with the other stages.
    """
    from safetensors.torch import save_file

    within = parts[0].within
    in_whole = str if within is None else within.in_whole
    local: dict[str, Tensor] = {}
    for part in parts:
        local |= {in_whole(name): full for name, full in _in_file(part.model, config).items()}
        local |= {} if part.front is None else _in_file(part.front.composite, config)
    of_stages: list[dict[str, Tensor]] = [local]
    if pp_group is not None:
        of_stages = [{} for _ in range(dist.get_world_size(pp_group))]
        dist.all_gather_object(of_stages, local, group=pp_group)
    if not write:
        return
    state = {name: weight for stage in of_stages for name, weight in stage.items()}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    hub_names = {f"base_model.model.{name}": weight for name, weight in state.items()}
    save_file(hub_names, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = copy.deepcopy(peft_config(parts[0].model))
    if within is not None and within.modules:  # other parts of a composite have layers with the same names
        experts = {name.partition(".base_layer.lora_")[0] for name in state if ".base_layer.lora_" in name}
        layers = {
            name.partition(".lora_")[0].removesuffix(".base_layer") for name in state if ".lora_" in name
        } - experts
        settings.target_modules = sorted(layers)
        settings.target_parameters = expert_lora.full_names(experts) or None
        settings.exclude_modules = settings.layers_to_transform = None
    if entries := settings.modules_to_save:  # peft compares letters: `norm` would match `q_norm` too
        settings.modules_to_save = lora_options.saved_modules(state, entries)
    if config.starts_at_weights:
        lora_init.convert(settings)
    settings.base_model_name_or_path = base_model
    settings.inference_mode = True
    settings.save_pretrained(str(folder))


def _in_file(model: nn.Module, config: LoRAConfig) -> dict[str, Tensor]:
    """Return the full tensors of a model that the file has. Collective."""
    found = {}
    for name, layer in wrappers(model):
        for file_name, param in matrices_of(name, layer):
            found[file_name] = transformers_compat.full_tensor(param).cpu().contiguous()
        if config.starts_at_weights and layer.lora_A and lora_init.has_initial(layer):
            for matrix, full in zip(("lora_A", "lora_B"), lora_init.joined(layer), strict=True):
                found[f"{name}.{matrix}.weight"] = full.cpu().contiguous()
    found |= {name: weight.cpu().contiguous() for name, weight in expert_lora.in_files(model)}
    for name, param in lora_options.saved_parameters(model, peft_config(model).modules_to_save or []):
        found[name] = transformers_compat.full_tensor(param.detach()).cpu().contiguous().clone()
    return found
