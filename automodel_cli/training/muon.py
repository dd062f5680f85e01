"""Muon for the hidden matrices and AdamW for the rest, as one torch optimizer with one state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from automodel_cli.training.param_groups import TrainableParam, decay_groups


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` on `muon_params`, `torch.optim.AdamW` on `adamw_params`.

    Muon orthogonalises a whole matrix, so a sharded one must be gathered first: momentum stays on the shard
    (elementwise), its update is gathered, orthogonalised by every rank alike and cut again. So every layout gives the
    numbers of one process; run as DTensor operations, the bfloat16 products would be rounded differently on each
    layout.

    Group options are those of the two torch classes; `muon=True` marks the groups of the first.
    """

    def __init__(
        self,
        muon_params: Sequence[TrainableParam],
        adamw_params: Sequence[TrainableParam],
        *,
        muon: dict[str, Any],
        adamw: dict[str, Any],
    ):
        groups: list[dict[str, Any]] = []
        if muon_params:
            groups.append({"params": [item.param for item in muon_params], "muon": True, **muon})
        rest = {key: value for key, value in adamw.items() if key != "weight_decay"}
        groups += [{**group, "muon": False, **rest} for group in decay_groups(adamw_params, adamw["weight_decay"])]
        super().__init__(groups, {})
        # The inner AdamW works on our groups and our state; constructing it fills in the options it expects in a group.
        adamw_groups = self._groups(muon=False)
        self._adamw = torch.optim.AdamW(adamw_groups) if adamw_groups else None

    def _groups(self, *, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"] is muon]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self._groups(muon=True):
            for param in group["params"]:
                if param.grad is not None:
                    _muon_step(param, self.state[param], group)
        if self._adamw is not None:
            # Again at every step: loading a state replaces both dictionaries of an optimizer.
            self._adamw.state, self._adamw.param_groups = self.state, self._groups(muon=False)
            self._adamw.step()
        return loss


def _muon_step(param: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One update of one matrix: momentum on the shard, `torch.optim.Muon` for orthogonalisation and step size."""
    grad = param.grad
    assert grad is not None
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(grad)
    momentum = state["momentum_buffer"]
    momentum.lerp_(grad, 1 - group["momentum"])
    update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    step = _orthogonal_step(update.full_tensor() if isinstance(update, DTensor) else update, group)
    param.mul_(1 - group["lr"] * group["weight_decay"])
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        whole = DTensor.from_local(step, mesh, [Replicate()] * mesh.ndim, run_check=False)
        param.add_(whole.redistribute(placements=param.placements))
    else:
        param.add_(step)


def _orthogonal_step(update: Tensor, group: dict[str, Any]) -> Tensor:
    """`-lr' * NewtonSchulz(update)`: torch's Muon without momentum or decay, applied to a matrix of zeros."""
    step = nn.Parameter(torch.zeros_like(update))
    step.grad = update
    torch.optim.Muon(
        [step],
        lr=group["lr"],
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        ns_steps=group["ns_steps"],
        adjust_lr_fn=group["adjust_lr"],
    ).step()
    return step.detach()
