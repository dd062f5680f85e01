"""Private names of `megatron-fsdp` and one correction. Works with version 0.6.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from automodel_cli.distributed.tensors import to_local

if TYPE_CHECKING:
    from megatron_fsdp import MegatronFSDP

_METHODS = ("__create_chunk_list__", "__create_write_items__")  # Methods that torch.distributed.checkpoint calls.


def state_chunks(wrapped: MegatronFSDP) -> None:
    """Let every sharded parameter report its rows to torch's distributed checkpoints, because shards are uneven.

    The package sets the methods on the tensors from which it creates parameters. The parameters lose them.
    """
    params: dict[str, Any] = dict(wrapped.module.named_parameters())
    for name, param in params.items():
        source = wrapped.param_and_grad_buffer.dist_main_weight[name]._local_tensor
        for method in _METHODS:
            if hasattr(source, method):  # Replicated parameters (no_shard) have neither.
                setattr(param._local_tensor, method, getattr(source, method))


def show_sharded_parameters(wrapped: MegatronFSDP) -> None:
    """Put the parameters of the optimizer back into the modules, after a gather that has replaced them."""
    wrapped._replace_param_with_distributed_if_needed()


def zero_gradient(wrapped: MegatronFSDP, name: str) -> DTensor:
    """Return a zero gradient of a parameter, on the mesh of all gradients.

    An operator on a DTensor may return one with an equal, cached mesh. Ranks would then reduce over groups of different
    meshes, and deadlock.
    """
    shard = wrapped.param_and_grad_buffer.dist_main_weight[name]
    return DTensor.from_local(
        shard.to_local().detach().clone().zero_(),
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )


def forget_gradients(wrapped: MegatronFSDP) -> None:
    """Make the package build the DTensors of its gradients again. A reused one has the shape that
    `correct_tensor_parallel_shards` corrects.
    """
    wrapped.param_and_grad_buffer.dist_main_grad.clear()


def align_gradients(wrapped: MegatronFSDP) -> None:
    """Redistribute every gradient over tp like its parameter, before the package copies the local part.

    Backward may leave a gradient replicated or partial.
    """
    for param in wrapped.raw_param.values():
        if isinstance(param, DTensor) and param.requires_grad:
            param.register_hook(lambda grad, placements=param.placements: grad.redistribute(placements=placements))


def held_tensors(wrapped: MegatronFSDP) -> Iterator[tuple[str, Tensor]]:
    """Yield (kind, tensor) of the flat buffers and of the parameters in use.

    Buffers are shards, or complete if the strategy does not shard them. Gathered parameters have their own buffers.
    """
    kinds = {"model_weight_buffer": "parameters", "main_weight_buffer": "parameters", "main_grad_buffer": "gradients"}
    for group in wrapped.param_and_grad_buffer.parameter_groups:
        for name, kind in kinds.items():
            buffer = getattr(group, name)
            if buffer is not None and buffer.data is not None:
                yield kind, buffer.data
    for param in wrapped.raw_param.values():
        yield "gathered parameters", param


def correct_tensor_parallel_shards() -> None:
    """Give shards of a tensor-parallel DTensor the width of the local part.

    Version 0.6.1 uses the width of the whole parameter. This is wrong for row-parallel layers, whose columns are
    sharded, and it rejects replicated parameters because they have too few elements.
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
    """Replacement of the package's function of this name, for parameters that are DTensors over tp or replicated."""
    from megatron_fsdp import param_and_grad_buffer as package
    from megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata

    del run_check, force_sync_tp_duplicated_param  # Checks, and a broadcast of values that are equal already.
    mesh, placements = package._get_fsdp_tensor_spec(
        param, dist_index, is_sharded_param=is_sharded_param, is_expert_param=is_expert_param
    )
    local_param, local_tensor = to_local(param), to_local(local_tensor)
    sharded = DTensor.from_local(
        local_tensor.view(-1, *local_param.shape[1:]),
        mesh,
        placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    if update_uneven_dtensor_chunk_meta:
        update_uneven_dtensor_chunk_metadata(sharded)
    return sharded
