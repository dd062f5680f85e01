"""Recompute layers in backward instead of keeping their activations. Parameter names do not change."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from automodel_cli.config.errors import ConfigError

_aten = torch.ops.aten

# What selective checkpointing keeps: results that are expensive to make and small next to what is recomputed from them
# (norms, activations, rotary, residuals). Batched products stay out: in eager attention they are tokens x tokens.
# Grouped products of experts stay out too: the library adds the bias in place, and a kept tensor must not change.
KEPT_RESULTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._flash_attention_forward.default,
    }
)


def apply_activation_checkpointing(layers: Sequence[nn.Module], mode: bool | int | str) -> None:
    """Mark layers for recomputation: `False`, `True` or "full", "selective", or n for every n-th.

    Acts in train mode only, which is right: evaluation keeps nothing anyway. Raises ConfigError for layers that the
    library cannot checkpoint.
    """
    every = 1 if mode in ("full", "selective") else int(mode)
    if every == 0:
        return
    keywords: dict[str, Any] = {}
    if mode == "selective":
        keywords["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_or_recompute)
    recompute = functools.partial(checkpoint, use_reentrant=False, **keywords)
    for layer in layers[::every]:
        if not _can_checkpoint(layer):
            raise ConfigError(
                f"activation_checkpointing={mode}: the library does not support it for {type(layer).__name__}",
                keys=("activation_checkpointing",),
                fix="parallelizer.activation_checkpointing=false",
            )
        layer.gradient_checkpointing = True  # type: ignore[assignment]  # the library's own switch, read in its forward
        layer._gradient_checkpointing_func = recompute  # type: ignore[assignment]


def _can_checkpoint(layer: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(layer, GradientCheckpointingLayer)


def _keep_or_recompute(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_RESULTS else CheckpointPolicy.PREFER_RECOMPUTE
