"""Private names of FSDP2 that pipeline stages and captured graphs need (torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from automodel_cli.distributed.strategies.fsdp2.torch_compat import fsdp_state, param_groups


def fsdp_roots(part: nn.Module) -> list[FSDPModule]:
    """Return the outermost FSDP modules of a part, or the part itself if FSDP wraps it."""
    if isinstance(part, FSDPModule):
        return [part]
    return [root for child in part.children() for root in fsdp_roots(child)]


def fsdp_dtype(part: nn.Module) -> torch.dtype | None:
    """Return the output dtype of a part under FSDP's mixed precision, or None without a policy."""
    if not isinstance(part, FSDPModule):
        return None
    policy = fsdp_state(part)._mp_policy
    dtype: torch.dtype | None = policy.output_dtype or policy.param_dtype
    return dtype


def reshards_after_forward(module: FSDPModule) -> bool:
    """Return whether this FSDP module frees its gathered parameters between forward and backward."""
    groups = param_groups(fsdp_state(module))
    # FSDP sets this mesh only if it reshards after forward.
    return any(group.post_forward_mesh_info is not None for group in groups)


@contextmanager
def forwards_of_gathered(roots: Sequence[FSDPModule]) -> Iterator[None]:
    """Skip the stream synchronization of FSDP roots in forwards inside this context, as in a nested forward.

    For modules whose parameters are all gathered. A forward then launches only the kernels of the model.
    """
    contexts = [fsdp_state(root)._state_ctx for root in roots]
    before = [context.iter_forward_root for context in contexts]
    for context in contexts:
        # Any value but None makes the roots behave as nested modules.
        context.iter_forward_root = context
    try:
        yield
    finally:
        for context, root in zip(contexts, before, strict=True):
            context.iter_forward_root = root


def set_sync(root: FSDPModule, enabled: bool) -> None:
    """Set whether the next backwards reduce gradients and free gathered parameters."""
    root.set_is_last_backward(enabled)
    root.set_reshard_after_backward(enabled)
    root.set_requires_gradient_sync(enabled)


def set_reduction_by_caller(root: FSDPModule, enabled: bool) -> None:
    """Set whether `reduce_gradients` ends the next backwards, and not a hook. Needed since torch 2.15."""
    if hasattr(root, "set_manual_backward_finalization"):
        root.set_manual_backward_finalization(enabled)


def sum_in_reduce_dtype(root: FSDPModule) -> None:
    """Add the weight gradients of a split backward to the sum over microbatches.

    torch 2.15 does so. Before, they are summed in the dtype of gradients until a hook runs in the next backward. Remove
    this function when torch >= 2.15 is the minimum.
    """
    if hasattr(root, "finalize_backward"):
        return
    for state in fsdp_state(root)._state_ctx.all_states:
        for param in (param for group in param_groups(state) for param in group.fsdp_params):
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce the gradients that the last backwards have accumulated, and free gathered parameters."""
    set_sync(root, True)
    if hasattr(root, "finalize_backward"):
        root.finalize_backward()
        return
    # Remove this branch when torch >= 2.15 is the minimum.
    state = fsdp_state(root)
    for nested in state._state_ctx.all_states:
        for param_group in param_groups(nested):
            param_group.post_backward()
    state._root_post_backward_final_callback()
