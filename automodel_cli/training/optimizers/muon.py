"""Muon for the hidden matrices and AdamW for the rest, as one torch optimizer with one state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from automodel_cli.training.optimizers.newton_schulz import measured_dtype, orthogonalise
from automodel_cli.training.optimizers.param_groups import TrainableParam, decay_groups
from automodel_cli.training.optimizers.stochastic_rounding_adamw import (
    MOMENTS,
    RoundedAdamW,
    load_moments,
    moment_dtype,
)

_FLOAT32 = "newton_schulz_float32"
"""State of a matrix whose first step took fp32 products: a run that goes on elsewhere keeps them (else bfloat16)."""


class MuonWithAdamW(torch.optim.Optimizer):
    """The algorithm of `torch.optim.Muon` on `muon_params`, `torch.optim.AdamW` on `adamw_params`.

    Muon orthogonalises a whole matrix, so a sharded one must be gathered first: momentum stays on the shard
    (elementwise), its update is gathered, orthogonalised by every rank alike and cut again. So every layout gives the
    numbers of one process; run as DTensor operations, the bfloat16 products would be rounded differently on each
    layout.

    Group options are those of the two torch classes; `muon=True` marks the groups of the first, whose `ns_dtype` is the
    dtype of the products, None to measure (collective over all ranks: every rank has one of these optimizers, if need
    be without matrices).
    """

    def __init__(
        self,
        muon_params: Sequence[TrainableParam],
        adamw_params: Sequence[TrainableParam],
        *,
        muon: dict[str, Any],
        adamw: dict[str, Any],
        decay_embeddings: bool = False,
    ):
        groups: list[dict[str, Any]] = []
        measured = None
        if muon["ns_dtype"] is None:
            measured = measured_dtype((muon_params or adamw_params)[0].param.device)
        muon = {**muon, "ns_measured": measured}
        if muon_params:
            groups.append({"params": [item.param for item in muon_params], "muon": True, **muon})
        rest = {key: value for key, value in adamw.items() if key != "weight_decay"}
        of_adamw = decay_groups(adamw_params, adamw["weight_decay"], embeddings=decay_embeddings)
        groups += [{**group, "muon": False, **rest} for group in of_adamw]
        super().__init__(groups, {})
        # The inner AdamW works on our groups and our state; constructing it fills in the options it expects in a group.
        adamw_groups = self._groups(muon=False)
        self._adamw = _adamw(adamw_groups) if adamw_groups else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments without a detour through the parameter's dtype, to which torch's own method rounds them."""
        super().load_state_dict(state_dict)
        load_moments(self, state_dict, ("momentum_buffer", *MOMENTS), lambda param: moment_dtype(param.dtype))

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


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return torch's AdamW, which keeps moments in the dtype of a parameter, or for float16 ours."""
    if not any(param.dtype == torch.float16 for group in groups for param in group["params"]):
        return torch.optim.AdamW(groups)
    lr, betas, eps = (groups[0][name] for name in ("lr", "betas", "eps"))
    return RoundedAdamW(groups, lr, betas, eps, state_dtype=None, stochastic_rounding=False)


def _muon_step(param: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One update of one matrix: momentum and decay on the shard, orthogonalisation on the whole."""
    grad = param.grad
    assert grad is not None
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(grad, dtype=moment_dtype(param.dtype))
        if torch.float32 in (group["ns_dtype"], group["ns_measured"]):
            state[_FLOAT32] = 1
    momentum_S, grad_S, param_S = (_local(tensor) for tensor in (state["momentum_buffer"], grad, param))
    grad_S = grad_S.to(momentum_S.dtype)
    momentum_S.lerp_(grad_S, 1 - group["momentum"])
    update_S = grad_S.lerp(momentum_S, group["momentum"]) if group["nesterov"] else momentum_S
    kept = torch.float32 if state.get(_FLOAT32) else torch.bfloat16
    whole = orthogonalise(_whole(update_S, param), group["ns_steps"], group["ns_dtype"] or kept)
    param_S.mul_(1 - group["lr"] * group["weight_decay"])
    param_S.add_(_shard(whole, param), alpha=-_adjusted_lr(group, param.shape))


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing its memory: the operations on it are elementwise, and those on DTensors cost more than
    they compute for all but large matrices.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(update_S: Tensor, param: nn.Parameter) -> Tensor:
    """The matrix of which `update_S` is this rank's shard. Collective over the ranks that share `param`."""
    if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
        return update_S
    shape, stride = param.shape, param.stride()
    sharded = DTensor.from_local(
        update_S, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
    )
    return sharded.full_tensor()


def _shard(whole: Tensor, param: nn.Parameter) -> Tensor:
    """This rank's shard of a matrix that all ranks hold."""
    if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
        return whole
    mesh = param.device_mesh
    replicated = DTensor.from_local(whole.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=param.placements).to_local()


def _adjusted_lr(group: dict[str, Any], shape: torch.Size) -> float:
    """The step size of a matrix, as `torch.optim.Muon` adjusts it."""
    rows, columns = shape
    if group["adjust_lr"] == "match_rms_adamw":
        return float(group["lr"] * 0.2 * math.sqrt(max(rows, columns)))
    return float(group["lr"] * math.sqrt(max(1, rows / columns)))
