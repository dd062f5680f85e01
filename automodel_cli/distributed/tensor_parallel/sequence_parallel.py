"""Sequence parallelism: shard the residual between the blocks of a layer over tokens, on the ranks of tp.

From the first to the last layer of the part, each rank has t = ceil(T / tp) tokens of each sequence. Norms run on these
tokens. Attention and MLP (also mixtures of experts) all-gather the tokens at their input and reduce-scatter their
output::

    [B, t, D] norm -> all-gather -> [B, T, D] attention -> reduce-scatter -> [B, t, D] + residual

The code before the first and after the last layer, other pipeline stages and the head use full sequences. The residual
is sharded at the input of the first layer and not at the embedding, because models derive masks and rotary tables from
the embedding output.

If all layers of a block follow the plan, the block gathers into a DTensor. Its column-parallel layers leave the
gradient partial, so that one reduce-scatter is enough for all of them. Any other block gathers a plain tensor, whose
gradient is complete on every rank. If the column-parallel layers of the block compute in float8, float8 values are
gathered where that is exact (`float8/token_gather.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.distributed.float8.linear import arithmetic_of
from automodel_cli.distributed.float8.quantization import Arithmetic
from automodel_cli.distributed.float8.token_gather import (
    can_gather_input,
    gather_input,
    output_gradient_of,
    scatter_output,
)
from automodel_cli.distributed.scatter_gather import gather_from_group, padding, scatter_to_group
from automodel_cli.distributed.tensor_parallel.styles import SumParameterGradients

_Args = tuple[Tensor, ...]
_Keywords = dict[str, Any]  # Hidden states, positions, rotary tables, masks, flags.
_TOKENS = 1  # Token dimension of hidden_BTD.


def shard_tokens(hidden_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the local tokens of a replicated tensor, [B, T, D] -> [B, t, D]. The last ranks may have zero padding.

    The backward all-gathers.
    """
    return scatter_to_group(hidden_BTD, mesh.get_group(), _TOKENS, padded=True)


def gather_tokens(hidden_BtD: Tensor, mesh: DeviceMesh, num_tokens: int) -> Tensor:
    """All-gather the tokens, [B, t, D] -> [B, T, D], for identical use on every rank. The backward takes the local
    tokens.
    """
    return gather_from_group(hidden_BtD, num_tokens, mesh.get_group(), _TOKENS)


class TokenShards:
    """The ranks of `mesh` with their shares of the tokens (`models/vision/shares.TokenShards`)."""

    def __init__(self, mesh: DeviceMesh):
        self._mesh = mesh

    def shard(self, x_BTD: Tensor) -> Tensor:
        return shard_tokens(x_BTD, self._mesh)


def apply_sequence_parallel(layers: list[nn.Module], mesh: DeviceMesh, uniform: set[nn.Module]) -> None:
    """Shard the residual of consecutive tensor-parallel layers over tokens, in place.

    Args:
        uniform: blocks in which every parameter follows the plan, and whose output layer is `scattering`.

    Raises ConfigError for a layer with parameters outside its submodules, because their use is unknown.
    """
    for layer in layers:
        for block in blocks(layer):
            _wrap(block, mesh, block in uniform)
        for norm in norms(layer):
            SumParameterGradients()._apply(norm, mesh)
    routes = any(experts_modules(layer) for layer in layers)

    def enter(layer: nn.Module, args: _Args, kwargs: _Keywords) -> tuple[_Args, _Keywords]:
        def shard(hidden_BTD: Tensor) -> Tensor:
            if routes and layer.training:
                _refuse_padding(hidden_BTD.shape[_TOKENS], mesh.size())
            return shard_tokens(hidden_BTD, mesh)

        return _with_hidden(args, kwargs, shard)

    def leave(layer: nn.Module, args: object, kwargs: _Keywords, output: Tensor) -> object:
        return _with_first(output, lambda own: gather_tokens(own, mesh, _num_tokens(kwargs, own, mesh)))

    if layers:
        layers[0].register_forward_pre_hook(enter, with_kwargs=True)
        layers[-1].register_forward_hook(leave, with_kwargs=True)


def share_input(block: nn.Module, mesh: DeviceMesh) -> None:
    """Pass the input of a uniform block as a DTensor, without sequence parallelism.

    The gradients of its column-parallel layers are then summed over tp once and not per layer.
    """

    def as_replicated(hidden_BTD: Tensor) -> DTensor:
        return DTensor.from_local(hidden_BTD, mesh, [Replicate()], run_check=False)

    block.register_forward_pre_hook(
        lambda block, args, kwargs: _with_hidden(args, kwargs, as_replicated), with_kwargs=True
    )


def scattering() -> RowwiseParallel:
    """Return the style of the row-parallel layer that ends a uniform block.

    Its output is reduce-scattered over tokens.
    """
    return _Scattering(output_layouts=Shard(_TOKENS))


class _Scattering(RowwiseParallel):
    """Scatters a batch of one sequence along its first dimension, which avoids a copy that interleaves the shards."""

    @staticmethod
    def _prepare_output_fn(layouts: object, use_local: bool, mod: object, outputs: Any, mesh: object) -> object:
        gradient = output_gradient_of(outputs)
        if gradient is not None and use_local and _gathers_in_float8(outputs, gradient.fp8):
            return scatter_output(outputs, gradient)
        if outputs.ndim != _TOKENS + 2 or len(outputs) > 1 or not use_local:
            return RowwiseParallel._prepare_output_fn(layouts, use_local, mod, outputs, mesh)
        own_tD = outputs.squeeze(0).redistribute(placements=[Shard(0)], async_op=True).to_local()
        return own_tD.unsqueeze(0)


def _gathers_in_float8(y_BTO: DTensor, fp8: Arithmetic) -> bool:
    num_ranks = y_BTO.device_mesh.size()
    is_even = y_BTO.ndim == _TOKENS + 2 and y_BTO.shape[_TOKENS] % num_ranks == 0
    # With scales per row, the two casts of a gradient have as many bytes as the gradient.
    return is_even and not fp8.recipe.by_row and can_gather_input(y_BTO[..., 0].numel() // num_ranks, fp8)


def blocks(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the children that need all tokens: attention and MLP."""
    yield from (child for child in layer.children() if not _is_norm(child) and any(True for _ in child.parameters()))


def norms(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the children that process each token independently, with replicated parameters. Raises ConfigError."""
    if next(layer.parameters(recurse=False), None) is not None:
        names = [name for name, _ in layer.named_parameters(recurse=False)]
        raise ConfigError(
            f"sequence_parallel=true is not supported because {type(layer).__name__} has parameters outside its "
            f"submodules: {', '.join(names)}",
            code="not_supported_by_model",
            keys=("parallelizer.sequence_parallel",),
            fix="parallelizer.sequence_parallel=false",
        )
    yield from (child for child in layer.children() if _is_norm(child))


def _is_norm(module: nn.Module) -> bool:
    params = list(module.parameters())
    # By shape and not by name: a module with vectors only applies them to each token alone.
    return bool(params) and all(param.ndim == 1 for param in params)


def _wrap(block: nn.Module, mesh: DeviceMesh, is_uniform: bool) -> None:
    readers = _column_parallel_layers(block) if is_uniform else []

    def gather(block: nn.Module, args: _Args, kwargs: _Keywords) -> tuple[_Args, _Keywords]:
        def gathered(own_BtD: Tensor) -> Tensor:
            num_tokens = _num_tokens(kwargs, own_BtD, mesh)
            fp8, has_padding = arithmetic_of(readers), own_BtD.shape[_TOKENS] * mesh.size() != num_tokens
            if fp8 is not None and not has_padding and can_gather_input(own_BtD[..., 0].numel(), fp8):
                return gather_input(own_BtD, fp8, mesh)
            return (_gather_partial if is_uniform else gather_tokens)(own_BtD, mesh, num_tokens)

        return _with_hidden(args, kwargs, gathered)

    def scatter(block: nn.Module, args: _Args, kwargs: _Keywords, output: Tensor) -> object:
        if not is_uniform:
            return _with_first(output, lambda whole_BTD: shard_tokens(whole_BTD, mesh))
        # 5 tokens on 2 ranks: shares of 3, the second padded by one token.
        share = -(-_hidden(args, kwargs).shape[_TOKENS] // mesh.size())
        return _with_first(output, lambda own_BtD: padding(own_BtD, share, _TOKENS))

    block.register_forward_pre_hook(gather, with_kwargs=True)
    block.register_forward_hook(scatter, with_kwargs=True)


def _column_parallel_layers(block: nn.Module) -> list[nn.Module]:
    """Return the layers of a uniform block that read its input."""
    weights = ((module, getattr(module, "weight", None)) for module in block.modules())
    return [m for m, weight in weights if isinstance(weight, DTensor) and weight.placements == (Shard(0),)]


def _gather_partial(own_BtD: Tensor, mesh: DeviceMesh, num_tokens: int) -> Tensor:
    """All-gather the tokens into a DTensor whose gradient may stay partial until it is scattered."""
    # One sequence is gathered along the first dimension, which needs no copy to reorder the shards.
    if len(own_BtD) == 1:
        rows_tD = DTensor.from_local(own_BtD[0], mesh, [Shard(0)], run_check=False)
        gathered = rows_tD.redistribute(placements=[Replicate()]).unsqueeze(0)
    else:
        own = DTensor.from_local(own_BtD, mesh, [Shard(_TOKENS)], run_check=False)
        gathered = own.redistribute(placements=[Replicate()])
    return gathered if gathered.shape[_TOKENS] == num_tokens else gathered.narrow(_TOKENS, 0, num_tokens)


def _num_tokens(kwargs: _Keywords, own_BtD: Tensor, mesh: DeviceMesh) -> int:
    """Return the tokens of a sequence, without padding if positions or rotary tables are given.

    Layers and attention receive them. An MLP does not, and also processes the padding.
    """
    positions_BT, tables = kwargs.get("position_ids"), kwargs.get("position_embeddings")
    if positions_BT is not None:
        return int(positions_BT.shape[-1])
    if isinstance(tables, tuple) and isinstance(tables[0], Tensor):
        return int(tables[0].shape[-2])
    return own_BtD.shape[_TOKENS] * mesh.size()


def _refuse_padding(num_tokens: int, tp_size: int) -> None:
    if num_tokens % tp_size:
        raise ConfigError(
            f"mesh.tp_size={tp_size} must divide the {num_tokens} tokens of a sequence. Otherwise routers count the "
            "padding that sequence parallelism adds",
            code="not_divisible",
            keys=("data.seq_len", "data.pad_to_multiple_of", "mesh.tp_size"),
            fix=f"data.pad_to_multiple_of={tp_size}, or parallelizer.sequence_parallel=false",
        )


def _hidden(args: _Args, kwargs: _Keywords) -> Tensor:
    """Return the hidden states among the inputs of a module: by keyword, or the first argument."""
    hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return hidden


def _with_hidden(args: _Args, kwargs: _Keywords, change: Callable[[Tensor], Tensor]) -> tuple[_Args, _Keywords]:
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
    return (change(args[0]), *args[1:]), kwargs


def _with_first(output: Tensor, change: Callable[[Tensor], Tensor]) -> object:
    """Change the hidden states in the output of a block or layer, which may be the first entry of a tuple."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
