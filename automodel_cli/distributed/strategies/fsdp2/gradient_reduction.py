"""When and how units of FSDP2 reduce gradients, and the handle of a sharded part for the training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from automodel_cli.distributed.sharded_module import Sharded, class_of
from automodel_cli.distributed.strategies.fsdp2 import torch_compat
from automodel_cli.distributed.wgrad_fusion import linear as wgrad_fusion_linear
from automodel_cli.distributed.wgrad_fusion.linear import single_backward

unsharded: WeakSet[object] = WeakSet()
"""Units on a mesh of size 1."""
deferred: WeakSet[object] = WeakSet()
"""Units of experts whose reduction the config defers."""


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return all FSDP units, the root first."""
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def unsharded_units(module: nn.Module) -> list[FSDPModule]:
    """Return FSDP units on a mesh of size 1 (typically experts).

    Their gradients need no reduction, so it is skipped until the last microbatch.
    """
    return [unit for unit in fsdp_modules(module) if unit in unsharded]


def late_units(module: nn.Module) -> list[FSDPModule]:
    """Return FSDP units that reduce at the last microbatch in any case: unsharded ones, and experts whose reduction the
    config defers.
    """
    return [unit for unit in fsdp_modules(module) if unit in unsharded or unit in deferred]


def reduce_in_backward(root: FSDPModule, late: Sequence[FSDPModule], *, is_last: bool, every_microbatch: bool) -> None:
    """Set whether the next backward of `root` reduces gradients over ranks, or accumulates them unreduced.

    Units in `late` reduce at the last microbatch only. A backward that reduces waits for the reduction and frees its
    buffers.
    """
    root.set_requires_gradient_sync(is_last or every_microbatch)
    if every_microbatch and not is_last:
        # `recurse=False`, because a layer contains its experts, which may reduce at another time.
        for unit in late:
            unit.set_requires_gradient_sync(False, recurse=False)
    root.set_is_last_backward(is_last or every_microbatch)


def sum_gradients(module: nn.Module) -> None:
    """Make FSDP2 sum gradients over ranks instead of averaging them, and skip the reduction on one rank.

    Call once, after wrapping.
    """
    by_itself = unsharded_units(module)
    for submodule in fsdp_modules(module):
        if submodule in by_itself:
            torch_compat.copy_once(submodule)
            continue  # The sum is the gradient itself. A factor would only copy it.
        # Neither setter is recursive. The second one selects a plain sum: without it torch uses a pre-multiplied sum,
        # which gloo does not support.
        submodule.set_gradient_divide_factor(1.0)
        submodule.set_force_sum_reduction_for_comms(True)


def enable_wgrad_fusion(module: nn.Module) -> None:
    """Accumulate weight gradients of linear layers and experts directly into the sum over microbatches."""
    from automodel_cli.distributed.expert_parallel.apply import is_experts

    of_owners: dict[nn.Module, dict[str, wgrad_fusion_linear.MainGrad]] = {}
    for unit in fsdp_modules(module):
        for owner, name, weight_sum in torch_compat.weight_sums(unit):
            of_owners.setdefault(owner, {})[name] = weight_sum
    for owner, sums in of_owners.items():
        # An exact type: a subclass (LoRA, 8-bit) may use its weight in another GEMM.
        if type(owner) is nn.Linear:
            wgrad_fusion_linear.fuse_wgrad(owner, sums.get("weight"))
        elif is_experts(owner) or class_of(owner) is nn.Linear:  # a head that is a unit, computed by `Head`
            wgrad_fusion_linear.set_main_grad(owner, sums)


class FSDP2Sharded(Sharded):
    """Handle of a part under FSDP2, which works in place."""

    def __init__(self, part: nn.Module, *, every_microbatch: bool, kept: Sequence[FSDPModule] = ()):
        """Create the handle of a sharded part.

        Args:
            every_microbatch: reduce gradients after each microbatch.
            kept: units that stay gathered from their first use to the end of the last microbatch.
        """
        super().__init__(part)
        self._every_microbatch, self._kept = every_microbatch, kept
        self._late = late_units(part)

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        module = cast(FSDPModule, self.part)
        reduce_in_backward(module, self._late, is_last=is_last, every_microbatch=self._every_microbatch)
        for unit in self._kept:
            unit.set_reshard_after_backward(is_last, recurse=False)
        try:
            with single_backward():
                yield
        finally:
            module.set_requires_gradient_sync(True)
            module.set_is_last_backward(True)

    @contextmanager
    def in_float32(self) -> Iterator[bool]:
        self.reshard()
        with torch_compat.computing_in(fsdp_modules(self.part), torch.float32):
            yield True
            self.reshard()

    def reshard(self) -> None:
        """Free gathered parameters.

        Until then, the module contains gathered plain tensors, but optimizer, checkpoint and export need shards.
        Gathered tensors are outdated after an update of the shards.
        """
        for module in fsdp_modules(self.part):
            module.reshard()
