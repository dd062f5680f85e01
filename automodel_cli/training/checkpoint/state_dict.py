"""State dict of a checkpoint: model and optimizer as one flat dictionary of tensors, keyed by parameter name.

    model.<name>              a trainable parameter, a persistent buffer, or an initial matrix of an adapter (PiSSA)
    reference.model.<name>    the same tensor of an updated reference model
    optim.<name>#<key>        optimizer state of the parameter (`#<key>:int` for a Python number)

- Names do not contain the prefixes of DDP, activation-checkpointing and compile wrappers.
- Sharded tensors are DTensors, so files contain global tensors and load on any mesh.
- All parts of a rank share one dictionary. The union over pipeline ranks is the full model.
- Frozen parameters are not stored. A LoRA checkpoint is as small as the adapter.
- Hyperparameters (learning rate, betas, decay) are not stored. The config sets them.
- Loading does not run an optimizer step to allocate state. The metadata of the checkpoint lists the state tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel_cli.config.errors import RunError
from automodel_cli.distributed.tensors import to_local
from automodel_cli.models.uneven_dtensor import cut_like, is_uneven
from automodel_cli.training.optimizers.param_groups import bare_name

_NUMBERS: dict[str, type[int] | type[float]] = {"int": int, "float": float}


def _bare(part: nn.Module) -> nn.Module:
    return part.module if isinstance(part, DistributedDataParallel) else part


def named_trainable(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trainable parameters of all parts with their stored names. Tied parameters occur once."""
    for part in parts:
        for name, param in _bare(part).named_parameters():
            if param.requires_grad:
                yield bare_name(name), param


def model_state(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return `model.<name>`: the live tensors of trainable parameters and persistent buffers."""
    state: dict[str, Tensor] = {f"model.{name}": _cut(param.detach(), param) for name, param in named_trainable(parts)}
    return {**state, **_initial_matrices(parts), **_buffers(parts)}


def _initial_matrices(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Frozen matrices that depend on the processor that decomposed a weight (`models/lora/init.py`)."""
    named = ((bare_name(name), param) for part in parts for name, param in _bare(part).named_parameters())
    return {f"model.{name}": _cut(param.detach(), param) for name, param in named if _is_initial(name)}


def _is_initial(name: str) -> bool:
    return ".lora_A.initial." in name or ".lora_B.initial." in name


def copy_state(copies: Sequence[nn.Module], parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the entries of `model_state(parts)`, with the tensors of frozen copies of the parts."""
    of_copy = {bare_name(name): p for copy in copies for name, p in _bare(copy).named_parameters()}
    trained = {name: of_copy[name] for name, _ in named_trainable(parts)}
    state = {f"model.{name}": _cut(param.detach(), param) for name, param in trained.items()}
    return {**state, **_initial_matrices(copies), **_buffers(copies)}


def _buffers(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for part in parts:
        bare = _bare(part)
        persistent = {bare_name(name) for name in bare.state_dict()}
        for name, buffer in bare.named_buffers():
            if bare_name(name) in persistent:
                state[f"model.{bare_name(name)}"] = buffer.detach()
    return state


def optimizer_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return `optim.<name>#<key>`: the live state tensors. Parameters that never had a gradient have no state."""
    state: dict[str, Tensor] = {}
    for name, param in named_trainable(parts):
        for key, value in optimizer.state.get(param, {}).items():
            # Keys name parameters and not indices, so a resume may have other groups, stages or ranks. Example:
            # `optim.model.layers.0.mlp.up_proj.weight#exp_avg`. A number keeps its type: `...#step:int`.
            match value:
                case Tensor():
                    state[f"optim.{name}#{key}"] = _cut(_dequantized(value), param)
                case int() | float():
                    state[f"optim.{name}#{key}:{type(value).__name__}"] = torch.tensor(value)
                case _:
                    raise RunError(
                        f"{type(optimizer).__name__} cannot be checkpointed: {key}={value!r} of {name} is not a tensor",
                        code="not_supported",
                        keys=("optimizer",),
                        fix="optimizer._target_=automodel_cli.training.optimizers.nodes.AdamW",
                    )
    return state


def _cut(value: Tensor, param: nn.Parameter) -> Tensor:
    """Return `value` with the shard bounds of `param`, if the shards of the parameter have unequal sizes."""
    if is_uneven(param) and isinstance(value, DTensor):
        cut_like(value, param)
    return value


def _dequantized(value: Tensor) -> Tensor:
    """Return the dequantized tensor of a quantized state (torchao tensor subclass), else `value`."""
    local = to_local(value)
    if type(local) in (Tensor, nn.Parameter):
        return value
    # 8-bit states have one scale per block of the local shard. Stored in full precision, they can be loaded by another
    # number of ranks, whose blocks are others.
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
    """Raise RunError unless the checkpoint contains every tensor of the model with the same global shape."""
    wrong = []
    for key, tensor in state.items():
        saved = metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            wrong.append(f"{key} is missing")
        elif saved.size != tensor.shape:
            wrong.append(f"{key} has shape {list(saved.size)} in the checkpoint and {list(tensor.shape)} in this run")
    _refuse(wrong)


def check_same_frozen(parts: Sequence[nn.Module], metadata: Metadata) -> None:
    """Raise RunError if the checkpoint has trained a parameter that is frozen now: it would keep its first value."""
    params = [(name, param) for part in parts for name, param in _bare(part).named_parameters()]
    names = {bare_name(name) for name, param in params if not param.requires_grad}
    frozen = {f"model.{name}" for name in names if not _is_initial(name)}
    saved = sorted(frozen & metadata.state_dict_metadata.keys())
    _refuse([f"{key} is trained in the checkpoint and frozen in this run" for key in saved])


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise RunError(
            f"the checkpoint has another model or other trainable parameters: {'; '.join(wrong[:3])}{more}",
            code="checkpoint_mismatch",
            keys=("checkpoint.resume", "model", "train.freeze", "train.trainable"),
            fix="use model, train.freeze and train.trainable of the config.yaml of the run that wrote it, or "
            "checkpoint.resume=null",
        )


def optimizer_template(parts: Sequence[nn.Module], metadata: Metadata) -> dict[str, Tensor]:
    """Return empty tensors to load `optim.*` into. A state with the shape of its parameter is sharded like it."""
    saved: dict[str, list[tuple[str, TensorStorageMetadata]]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith("optim.") and isinstance(entry, TensorStorageMetadata):
            saved.setdefault(key.removeprefix("optim.").rpartition("#")[0], []).append((key, entry))
    template: dict[str, Tensor] = {}
    for name, param in named_trainable(parts):
        for key, entry in saved.get(name, []):
            dtype = entry.properties.dtype
            # Moments have the shape of their parameter and are read as shards. Counters are read in full by every rank.
            if entry.size == param.shape and param.ndim > 0:
                template[key] = _cut(torch.empty_like(param, dtype=dtype, requires_grad=False).detach(), param)
            else:
                template[key] = torch.empty(entry.size, dtype=dtype)
    return template


def load_optimizer_state(
    parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, loaded: Mapping[str, Tensor]
) -> None:
    """Load `optim.*` tensors into the optimizer, which moves them to its devices and dtypes."""
    by_name: dict[str, dict[str, object]] = {}
    for full_key, tensor in loaded.items():
        name, _, key = full_key.removeprefix("optim.").rpartition("#")
        key, _, number = key.partition(":")
        by_name.setdefault(name, {})[key] = _NUMBERS[number](tensor.item()) if number else tensor
    names = {param: name for name, param in named_trainable(parts)}
    ordered = [param for group in optimizer.param_groups for param in group["params"]]
    state = {index: by_name[names[param]] for index, param in enumerate(ordered) if names[param] in by_name}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
