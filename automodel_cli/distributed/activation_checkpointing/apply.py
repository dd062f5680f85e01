"""Activation checkpointing: recompute layers in backward instead of saving their activations.

Parameter names do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.activation_checkpointing.mode import is_recomputed
from automodel_cli.distributed.activation_checkpointing.saved_results import (
    SaveLevel,
    keeps,
    recomputed,
    save_or_replay,
)
from automodel_cli.distributed.adapter_layers import is_adapter
from automodel_cli.distributed.compile_modes import AUTO
from automodel_cli.distributed.tensors import tensors_in
from automodel_cli.distributed.torch_compat import OpOverload
from automodel_cli.distributed.typed_torch import TorchDispatchMode, disable, set_attributes

_Context = AbstractContextManager[object]
_aten = torch.ops.aten

# Operators whose results selective checkpointing saves: expensive to compute, and small compared with the recomputed
# ones (norms, activations, rotary embeddings, residuals). Batched GEMMs are excluded, because in eager attention they
# are tokens x tokens. Grouped GEMMs are excluded, because transformers adds biases in place and a saved tensor must not
# change. Distributed experts save their results themselves (`saved_results`).
KEPT_RESULTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_mm_v2.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._flash_attention_forward.default,
        _aten._cudnn_attention_forward.default,
    }
)


def apply_activation_checkpointing(
    layers: Sequence[nn.Module], mode: bool | int | str, compile_backend: Callable[..., object] | None = None
) -> None:
    """Enable recomputation of layers.

    Rows received by token dispatch are saved, except with "minimal", which sends them again along the saved routes.
    "selective" also saves `KEPT_RESULTS` and the first GEMMs of experts. No effect in eval mode, where nothing is
    saved.

    Args:
        mode: False, True or "full", "selective", "minimal", "full:k/n" for k of every n layers, or n for every n-th.
        compile_backend: compile the recomputed code, in as many graphs as needed.

    Raises ConfigError for layers without gradient checkpointing, and for "auto", which a run resolves earlier.
    """
    if mode == AUTO:
        raise ConfigError(
            "activation_checkpointing=auto is not supported here because it needs the data and GPUs of a run",
            code="not_supported",
            keys=("activation_checkpointing",),
            fix="parallelizer.activation_checkpointing=full",
        )
    for layer in (layer for place, layer in enumerate(layers) if is_recomputed(place, mode)):
        if not _can_checkpoint(layer):
            raise ConfigError(
                f"activation_checkpointing={mode} is not supported because {type(layer).__name__} has no gradient "
                "checkpointing",
                code="not_supported_by_model",
                keys=("activation_checkpointing",),
                fix="parallelizer.activation_checkpointing=false",
            )
        keywords: dict[str, Any] = {}
        contexts = _contexts(mode, keeps(layer))
        if contexts is not None:
            keywords["context_fn"] = contexts
        # Non-reentrant: recomputation stops at the last tensor that backward needs, and inputs without gradients are
        # allowed.
        recompute: Callable[..., object] = functools.partial(checkpoint, use_reentrant=False, **keywords)
        if compile_backend is not None:
            recompute = functools.partial(_compiled_inside, recompute, torch.compile(_call, backend=compile_backend))
        if mode == "selective":
            for adapter in (module for module in layer.modules() if is_adapter(module)):
                set_attributes(adapter, keeps_products=True)
        # The library's own switch, read in its forward.
        set_attributes(layer, gradient_checkpointing=True, _gradient_checkpointing_func=recompute)


@disable(recursive=False)
def _compiled_inside(
    recompute: Callable[..., object], compiled: Callable[..., object], run: functools.partial[object], *args: object
) -> object:
    """Keep the checkpoint outside graphs. A graph around it must not break, or nothing is compiled.

    `run` is a partial of transformers around the layer's forward. Its arguments are passed separately, so that all
    layers share graphs.
    """
    return recompute(compiled, run.func, *run.args, *args, **run.keywords)


def _call(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    return forward(*args, **kwargs)


def _contexts(mode: bool | int | str, exchanges: bool) -> Callable[[], tuple[_Context, _Context]] | None:
    """Return the contexts of the first run and the recomputation of a layer."""
    if not exchanges:
        selective = functools.partial(create_selective_checkpoint_contexts, _keep_or_recompute)
        return selective if mode == "selective" else None
    if mode == "selective":
        return _kept_products
    return functools.partial(recomputed, SaveLevel.ROUTES if mode == "minimal" else SaveLevel.EXCHANGES)


def _kept_products() -> tuple[_Context, _Context]:
    """Return contexts that save `KEPT_RESULTS`. torch's own need the same operators in both runs, and FSDP2 adds
    different ones around experts.
    """
    first, again = recomputed(SaveLevel.PRODUCTS)
    return _Both((first, _KeepListed())), _Both((again, _KeepListed()))


class _KeepListed(TorchDispatchMode):
    """Save the results of `KEPT_RESULTS`, whatever other operators run. Fused regions contain none of them."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # Otherwise nothing inside is compiled.

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        make = functools.partial(func, *args, **(kwargs or {}))
        if func not in KEPT_RESULTS:
            return make()
        result, versions = save_or_replay(lambda: _with_versions(make()))
        # `_version` counts changes in place. A changed result would be replayed with wrong values.
        assert versions == _versions(result), f"a kept result of {func} was changed in place"
        return tree_map_only(Tensor, Tensor.detach, result)  # A saved result must not keep the graph of its first use.


def _with_versions(result: object) -> tuple[object, list[int]]:
    return result, _versions(result)


def _versions(result: object) -> list[int]:
    return [tensor._version for tensor in tensors_in(result)]


class _Both(AbstractContextManager[None]):
    def __init__(self, contexts: tuple[_Context, ...]):
        self._contexts, self._entered = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._entered.enter_context(context)

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)


def _can_checkpoint(layer: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(layer, GradientCheckpointingLayer)


def _keep_or_recompute(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_RESULTS else CheckpointPolicy.PREFER_RECOMPUTE
