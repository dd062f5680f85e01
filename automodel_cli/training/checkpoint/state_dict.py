"""Model and optimizer as one flat dictionary of tensors, keyed by parameter name: what a checkpoint holds.

    model.<name>              a trainable parameter or a persistent buffer
    reference.model.<name>    the same of a reference that follows the model
    optim.<name>#<key>        optimizer state of that parameter (`#<key>:int` where it is a Python number)

Names are those of the bare module, without the prefixes of DDP, recompute and compile wrappers; sharded tensors stay
DTensors, so the file holds global tensors and loads under any other layout or number of ranks. All parts of a rank
share one dictionary, and the dictionaries of pipeline ranks add up to that of the whole model.

Frozen parameters are not stored: they are what loading the model gives (LoRA checkpoints are as small as the adapter).
Hyper-parameters (learning rate, betas, decay) are not stored either: they are the config's. No optimizer step is
taken to create state for loading; the checkpoint's own metadata says what there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel_cli.config.errors import RunError
from automodel_cli.models.uneven_dtensor import cut_like, is_uneven

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
_NUMBERS: dict[str, type[int] | type[float]] = {"int": int, "float": float}


def _bare_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _bare(part: nn.Module) -> nn.Module:
    return part.module if isinstance(part, DistributedDataParallel) else part


def named_trainable(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters of all parts with their stored names; tied ones once."""
    for part in parts:
        for name, param in _bare(part).named_parameters():
            if param.requires_grad:
                yield _bare_name(name), param


def model_state(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """`model.<name>` -> trainable parameters and persistent buffers; the tensors are the live ones."""
    state: dict[str, Tensor] = {f"model.{name}": _cut(param.detach(), param) for name, param in named_trainable(parts)}
    return {**state, **_buffers(parts)}


def copy_state(copies: Sequence[nn.Module], parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """What `model_state(parts)` names, of frozen copies of these parts."""
    of_copy = {_bare_name(name): p for copy in copies for name, p in _bare(copy).named_parameters()}
    trained = {name: of_copy[name] for name, _ in named_trainable(parts)}
    return {**{f"model.{name}": _cut(param.detach(), param) for name, param in trained.items()}, **_buffers(copies)}


def _buffers(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for part in parts:
        bare = _bare(part)
        persistent = {_bare_name(name) for name in bare.state_dict()}
        for name, buffer in bare.named_buffers():
            if _bare_name(name) in persistent:
                state[f"model.{_bare_name(name)}"] = buffer.detach()
    return state


def optimizer_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`optim.<name>#<key>` -> the live state tensors. A parameter that never had a gradient has none."""
    state: dict[str, Tensor] = {}
    for name, param in named_trainable(parts):
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                state[f"optim.{name}#{key}"] = _cut(_dequantised(value), param)
            elif isinstance(value, (int, float)):
                state[f"optim.{name}#{key}:{type(value).__name__}"] = torch.tensor(value)
            else:
                raise RunError(
                    f"{type(optimizer).__name__} cannot be checkpointed: {key}={value!r} of {name} is not a tensor",
                    code="not_supported",
                    keys=("optimizer",),
                    fix="optimizer._target_=automodel_cli.training.optimizers.nodes.AdamW",
                )
    return state


def _cut(value: Tensor, param: nn.Parameter) -> Tensor:
    """`value`, which says what it holds of the whole if it is cut like a parameter with unequal shards."""
    if is_uneven(param) and isinstance(value, DTensor):
        cut_like(value, param)
    return value


def _dequantised(value: Tensor) -> Tensor:
    """A quantised state (torchao keeps it in a tensor subclass, whole or as a shard) as ordinary numbers; else
    `value`.
    """
    local = value.to_local() if isinstance(value, DTensor) else value
    if type(local) in (Tensor, nn.Parameter):
        return value
    plain = local.dequantize()
    if not isinstance(value, DTensor):
        return plain
    mesh, placements = value.device_mesh, value.placements
    return DTensor.from_local(
        plain,
        mesh,
        placements,
        run_check=False,
        shape=value.shape,
        stride=torch.empty(value.shape, device="meta").stride(),
    )


def check_same_model(state: Mapping[str, Tensor], metadata: Metadata) -> None:
    """Raise RunError unless the checkpoint has every tensor of the model, in its (global) shape."""
    wrong = []
    for key, tensor in state.items():
        saved = metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            wrong.append(f"{key} is missing")
        elif saved.size != tensor.shape:
            wrong.append(f"{key} has shape {list(saved.size)} in the checkpoint and {list(tensor.shape)} in this run")
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise RunError(
            f"the checkpoint has another model or other trainable parameters: {'; '.join(wrong[:3])}{more}",
            code="checkpoint_mismatch",
            keys=("checkpoint.resume", "model"),
            fix="use the model section of the config.yaml of the run that wrote it, or checkpoint.resume=null",
        )


def optimizer_template(parts: Sequence[nn.Module], metadata: Metadata) -> dict[str, Tensor]:
    """Empty tensors to load `optim.*` into: a state of its parameter's shape is laid out like the parameter."""
    saved: dict[str, list[tuple[str, TensorStorageMetadata]]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith("optim.") and isinstance(entry, TensorStorageMetadata):
            saved.setdefault(key.removeprefix("optim.").rpartition("#")[0], []).append((key, entry))
    template: dict[str, Tensor] = {}
    for name, param in named_trainable(parts):
        for key, entry in saved.get(name, []):
            dtype = entry.properties.dtype
            if entry.size == param.shape and param.ndim > 0:
                template[key] = _cut(torch.empty_like(param, dtype=dtype, requires_grad=False).detach(), param)
            else:
                template[key] = torch.empty(entry.size, dtype=dtype)
    return template


def load_optimizer_state(
    parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, loaded: Mapping[str, Tensor]
) -> None:
    """Hand `optim.*` tensors to the optimizer; each goes to the device and dtype that the optimizer itself wants."""
    by_name: dict[str, dict[str, Any]] = {}
    for full_key, tensor in loaded.items():
        name, _, key = full_key.removeprefix("optim.").rpartition("#")
        key, _, number = key.partition(":")
        by_name.setdefault(name, {})[key] = _NUMBERS[number](tensor.item()) if number else tensor
    names = {param: name for name, param in named_trainable(parts)}
    ordered = [param for group in optimizer.param_groups for param in group["params"]]
    state = {index: by_name[names[param]] for index, param in enumerate(ordered) if names[param] in by_name}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
