"""Names of `megatron-fsdp` that are not its public API, and the one correction it needs. Works for 0.6.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

_METHODS = ("__create_chunk_list__", "__create_write_items__")  # of torch.distributed.checkpoint


def state_chunks(wrapped: Any) -> None:
    """Let every sharded parameter say which rows it holds, as torch's distributed checkpoints ask (shards are no equal
    chunks). The package does so on the tensors from which it then makes parameters, which forget it."""
    params: dict[str, Any] = dict(wrapped.module.named_parameters())
    for name, param in params.items():
        source = wrapped.param_and_grad_buffer.dist_main_weight[name]._local_tensor
        for method in _METHODS:
            if hasattr(source, method):  # whole copies (no_shard) have neither
                setattr(param._local_tensor, method, getattr(source, method))


def show_sharded_parameters(wrapped: Any) -> None:
    """Put the optimizer's parameters back into the modules, after a gathering that put in the raw ones."""
    wrapped._replace_param_with_distributed_if_needed()


def zero_gradient(wrapped: Any, name: str) -> DTensor:
    """Zeros for a parameter, on the mesh of all gradients. (What torch derives from a DTensor may come from its cache
    with an equal mesh of earlier: then ranks would reduce over groups of different meshes, and wait for each other.)"""
    shard = wrapped.param_and_grad_buffer.dist_main_weight[name]
    return DTensor.from_local(
        shard.to_local().detach().clone().zero_(),
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )


def forget_gradients(wrapped: Any) -> None:
    """Make the package build its gradients' DTensors again: where it reuses one, it computes the shape that
    `correct_tensor_parallel_shards` corrects."""
    wrapped.param_and_grad_buffer.dist_main_grad.clear()


def align_gradients(wrapped: Any) -> None:
    """Lay out every gradient over tp like its parameter before the package copies its local part: backward may leave it
    whole, or as parts of a sum."""
    for param in wrapped.raw_param.values():
        if isinstance(param, DTensor) and param.requires_grad:
            param.register_hook(lambda grad, placements=param.placements: grad.redistribute(placements=placements))


def held_tensors(wrapped: Any) -> Iterator[tuple[str, Tensor]]:
    """(kind, tensor) of the flat buffers that it keeps: shards, or all where the strategy does not shard them; and of
    the parameters that it computes with, which live in buffers of their own while they are gathered."""
    kinds = {"model_weight_buffer": "parameters", "main_weight_buffer": "parameters", "main_grad_buffer": "gradients"}
    for group in wrapped.param_and_grad_buffer.parameter_groups:
        for name, kind in kinds.items():
            buffer = getattr(group, name)
            if buffer is not None and buffer.data is not None:
                yield kind, buffer.data
    for param in wrapped.raw_param.values():
        yield "gathered parameters", param


def correct_tensor_parallel_shards() -> None:
    """Under tensor parallelism, give shards of a DTensor the width of this rank's part.

    0.6.1 takes the width of the whole parameter, which is another one where tensor parallelism cuts columns
    (row-parallel layers), and refuses whole copies for having too few elements.
    """
    from megatron_fsdp import param_and_grad_buffer as package

    package.make_fsdp_dtensor = _make_fsdp_dtensor


def _make_fsdp_dtensor(
    local_tensor: Tensor,
    param: Tensor,
    dist_index: Any,
    is_sharded_param: bool = True,
    is_expert_param: bool = False,
    run_check: bool = False,
    update_uneven_dtensor_chunk_meta: bool = False,
    force_sync_tp_duplicated_param: bool = False,
) -> DTensor:
    """The package's function of this name, for parameters that are DTensors over tp or the same on all its ranks."""
    from megatron_fsdp import param_and_grad_buffer as package
    from megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata

    del run_check, force_sync_tp_duplicated_param  # checks, and copies that are equal by construction here
    mesh, placements = package._get_fsdp_tensor_spec(
        param, dist_index, is_sharded_param=is_sharded_param, is_expert_param=is_expert_param
    )
    mine, local_tensor = (x.to_local() if isinstance(x, DTensor) else x for x in (param, local_tensor))
    sharded = DTensor.from_local(
        local_tensor.view(-1, *mine.shape[1:]),
        mesh,
        placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    if update_uneven_dtensor_chunk_meta:
        update_uneven_dtensor_chunk_metadata(sharded)
    return sharded
