"""Muon for hidden matrices and AdamW for all other parameters, as one torch optimizer with one state.

Shape suffixes: `_S` is the shard of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from automodel_cli.training.optimizers.newton_schulz import measured_dtype, orthogonalize
from automodel_cli.training.optimizers.param_groups import TrainableParam, decay_groups
from automodel_cli.training.optimizers.stochastic_rounding_adamw import (
    MOMENTS,
    RoundedAdamW,
    load_moments,
    moment_dtype,
)

_FLOAT32 = "newton_schulz_float32"
"""State key of a matrix whose first step used fp32 GEMMs. A run that resumes on other hardware keeps using fp32."""


class MuonWithAdamW(torch.optim.Optimizer):
    """Apply the algorithm of `torch.optim.Muon` to `muon_params` and of `torch.optim.AdamW` to `adamw_params`.

    Muon orthogonalizes complete matrices. Steps for a sharded matrix:

    1. Momentum is updated on the shard (elementwise).
    2. The update is all-gathered, and every rank orthogonalizes the full matrix.
    3. Each rank applies its shard of the result.

    Every mesh therefore computes the numbers of one process. DTensor operations would round the bfloat16 GEMMs
    differently on each mesh.

    Args:
        muon_params: hidden matrices. May be empty on a pipeline rank.
        adamw_params: all other trainable parameters.
        muon: options of `torch.optim.Muon`, and `ns_dtype`, the dtype of the GEMMs. If it is None, the dtype is
            measured, which is collective over all ranks.
        adamw: options of `torch.optim.AdamW`.
        decay_embeddings: apply weight decay to embeddings.
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
        # The inner AdamW shares groups and state with this optimizer. Its constructor adds its defaults to the groups.
        adamw_groups = self._groups(muon=False)
        self._adamw = _adamw(adamw_groups) if adamw_groups else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state without rounding moments to the dtype of the parameter, as the method of torch does."""
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
            # Assigned at every step, because loading a state replaces both objects.
            self._adamw.state, self._adamw.param_groups = self.state, self._groups(muon=False)
            self._adamw.step()
        return loss


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return `torch.optim.AdamW`, or for float16 parameters an AdamW whose moments are not float16."""
    if not any(param.dtype == torch.float16 for group in groups for param in group["params"]):
        return torch.optim.AdamW(groups)
    lr, betas, eps = (groups[0][name] for name in ("lr", "betas", "eps"))
    return RoundedAdamW(groups, lr, betas, eps, state_dtype=None, stochastic_rounding=False)


def _muon_step(param: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Update one matrix: momentum and weight decay on the shard, orthogonalization on the full matrix.

    With momentum m, gradient g, learning rate lr and weight decay w::

        m <- mu m + (1 - mu) g
        u <- mu m + (1 - mu) g if nesterov else m
        p <- (1 - lr w) p - adjusted_lr(lr) orthogonalize(u)
    """
    grad = param.grad
    assert grad is not None
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(grad, dtype=moment_dtype(param.dtype))
        if torch.float32 in (group["ns_dtype"], group["ns_measured"]):
            state[_FLOAT32] = 1
    momentum_S, grad_S, param_S = (_local(tensor) for tensor in (state["momentum_buffer"], grad, param))
    grad_S = grad_S.to(momentum_S.dtype)
    # lerp(a, b, w) = a + w (b - a): momentum 0.95 keeps 95% of the old value.
    momentum_S.lerp_(grad_S, 1 - group["momentum"])
    update_S = grad_S.lerp(momentum_S, group["momentum"]) if group["nesterov"] else momentum_S
    # A resumed run keeps the dtype of its first step, even on other hardware.
    kept = torch.float32 if state.get(_FLOAT32) else torch.bfloat16
    whole = orthogonalize(_full_matrix(update_S, param), group["ns_steps"], group["ns_dtype"] or kept)
    param_S.mul_(1 - group["lr"] * group["weight_decay"])
    # Every rank orthogonalizes the full matrix and applies its shard of the result.
    param_S.add_(_shard(whole, param), alpha=-_adjusted_lr(group, param.shape))


def _local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, which shares memory with `tensor`.

    Elementwise operations on shards avoid the dispatch overhead of DTensor, which dominates for small matrices.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full_matrix(update_S: Tensor, param: nn.Parameter) -> Tensor:
    """Return the full matrix of the shard `update_S`. Collective over the mesh of `param`."""
    if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
        return update_S
    shape, stride = param.shape, param.stride()
    sharded = DTensor.from_local(
        update_S, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
    )
    return sharded.full_tensor()


def _shard(whole: Tensor, param: nn.Parameter) -> Tensor:
    """Return this rank's shard of a replicated matrix."""
    if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
        return whole
    mesh = param.device_mesh
    replicated = DTensor.from_local(whole.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=param.placements).to_local()


def _adjusted_lr(group: dict[str, Any], shape: torch.Size) -> float:
    """Return the learning rate adjusted to the shape of a matrix, as in `torch.optim.Muon`.

    `match_rms_adamw`: 0.2 sqrt(max(rows, columns)), so that the RMS of the update matches AdamW (Liu et al., 2025).
    `original`: sqrt(max(1, rows / columns)) (Jordan et al., 2024).
    """
    rows, columns = shape
    if group["adjust_lr"] == "match_rms_adamw":
        return float(group["lr"] * 0.2 * math.sqrt(max(rows, columns)))
    return float(group["lr"] * math.sqrt(max(1, rows / columns)))
