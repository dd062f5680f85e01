"""Wrap a part in DDP, with gradients summed instead of averaged."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed import torch_compat
from automodel_cli.distributed.layer_wrapping import materialize, prepare_layers
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.sharded_module import Sharded, register_handle
from automodel_cli.distributed.strategies.ddp.config import DDPConfig

logger = logging.getLogger(__name__)


class DDPSharded(Sharded):
    """Handle of a replicated part. The wrapper runs, and reduces gradients during backward."""

    def __init__(self, part: nn.Module, wrapped: DistributedDataParallel):
        super().__init__(part)
        self._wrapped = weakref.ref(wrapped)

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        wrapped = self._wrapped()
        assert wrapped is not None, "the wrapper runs, so somebody holds it"
        if not is_last and wrapped.static_graph:
            raise ConfigError(
                "static_graph=true supports one microbatch per step only, because torch's DDP fails if the first "
                "microbatches are not reduced",
                code="unsupported_combination",
                keys=("static_graph",),
                fix="parallelizer.static_graph=false",
            )
        with super().microbatch(is_last), nullcontext() if is_last else wrapped.no_sync():
            yield


def ddp_parallelize(part: nn.Module, mesh: Mesh, config: DDPConfig) -> nn.Module:
    """Wrap a part whose parameters are replicated.

    Parameters on the meta device are allocated without values first, because DDP builds its buckets around the tensors.
    They must be set to the same values on every rank afterwards. A part without trainable parameters is returned
    unwrapped.
    """
    layers = prepare_layers(part, config, mesh.device.type)
    if config.enable_compile is True:
        # Layers are separate graphs already, and a checkpointed layer cannot be split.
        torch_compat.compile_whole_layers()
    materialize(part, mesh.device)
    if not any(param.requires_grad for param in part.parameters()):
        return part
    wrapped = DistributedDataParallel(
        part,
        process_group=mesh.dp.get_group(),
        init_sync=False,
        broadcast_buffers=config.broadcast_buffers,
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        bucket_cap_mb=config.bucket_cap_mb,
    )
    # Losses are divided by the global weight already. A mean over ranks would divide once more.
    wrapped.register_comm_hook(wrapped.process_group, _all_reduce_sum)
    register_handle(DDPSharded(part, wrapped), part, wrapped)
    logger.info("ddp: %d layers on each of %d ranks", len(layers), mesh.dp_size)
    return wrapped


def prepare_ddp_stage(part: nn.Module, mesh: Mesh, config: DDPConfig) -> None:
    """Prepare one pipeline stage in place.

    The reducer of DDP cannot detect the last backward of a step. Therefore the stage is not wrapped, and the pipeline
    sums the gradients.
    """
    config.check_mesh(mesh.layout.to_config())
    prepare_layers(part, config, mesh.device.type)
    materialize(part, mesh.device)


def _all_reduce_sum(group, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
    """DDP communication hook that sums. torch's own hook divides by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
