"""The wrapper of the package `megatron-fsdp` as a module, and its handle for the training step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from automodel_cli.distributed.sharded_module import Sharded, register_handle
from automodel_cli.distributed.strategies.megatron_fsdp import compat

if TYPE_CHECKING:
    from megatron_fsdp import MegatronFSDP


class MegatronPart(nn.Module):
    """A part inside the wrapper of the package. Created by `parallelize`."""

    def __init__(self, wrapped: MegatronFSDP):
        super().__init__()
        self.wrapped = wrapped
        compat.state_chunks(wrapped)
        compat.align_gradients(wrapped)
        register_handle(MegatronSharded(self), self.part, self)

    @property
    def part(self) -> nn.Module:
        part: nn.Module = self.wrapped.module
        return part

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.wrapped(*args, **kwargs)


class MegatronSharded(Sharded):
    """Handle of the package's wrapper for the training step."""

    def __init__(self, module: MegatronPart):
        super().__init__(module.part)
        self._module = weakref.ref(module)
        index = module.wrapped.dist_index
        self._has_tensor_parallelism = index.get_submesh(index.tp_dim).size() > 1

    @property
    def _wrapped(self) -> MegatronFSDP:
        module = self._module()
        assert module is not None, "the wrapper runs, so somebody holds it"
        return module.wrapped

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Collective before the last microbatch too, with strategies that shard gradients."""
        wrapped = self._wrapped
        # Without overlap, backward must not reduce, because `finish_grad_sync` reduces and would do it twice.
        wrapped.is_last_microbatch = is_last and wrapped.ddp_config.overlap_grad_reduce
        yield
        if is_last:
            if self._has_tensor_parallelism:
                compat.forget_gradients(wrapped)
            wrapped.finish_grad_sync()
            for name, param in self.part.named_parameters():
                if param.requires_grad and param.grad is None:
                    # An unused parameter (an expert without tokens) needs a gradient, because other ranks reduce
                    # theirs.
                    param.grad = compat.zero_gradient(wrapped, name)

    def reshard(self) -> None:
        """Reshard. Collective."""
        self._wrapped.synchronize_param_gather()

    def weights_changed(self) -> None:
        wrapped = self._wrapped
        wrapped.install_optimized_model_weights()
        if not wrapped.ddp_config.overlap_param_gather:
            wrapped.start_param_sync(force_sync=True)
            compat.show_sharded_parameters(wrapped)

    def step_taken(self) -> None:
        """Copy the updated weights to the buffers of forward, and zero the gradient buffers."""
        self.weights_changed()
        self._wrapped.zero_grad_buffer()
