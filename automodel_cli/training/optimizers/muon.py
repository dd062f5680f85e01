"""Muon for hidden matrices and AdamW for all other parameters, as one torch optimizer with one state.

Shape suffixes: `_S` is the shard of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from automodel_cli.distributed.tensors import to_local
from automodel_cli.training.optimizers.matrix_exchange import MatrixRound, is_distributed, rounds_of
from automodel_cli.training.optimizers.newton_schulz import measured_dtype, orthogonalize
from automodel_cli.training.optimizers.param_groups import TrainableParam, decay_groups, has_float16
from automodel_cli.training.optimizers.rate_groups import Rates
from automodel_cli.training.optimizers.stochastic_rounding_adamw import (
    MOMENTS,
    RoundedAdamW,
    load_moments,
    moment_dtype,
)

_FLOAT32 = "newton_schulz_float32"
"""State key of a matrix whose first step used fp32 GEMMs. A run that resumes on other hardware keeps using fp32."""


class MuonOptions(TypedDict):
    """Options of `torch.optim.Muon`, and `ns_dtype`, the dtype of the GEMMs. If it is None, the dtype is measured."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_steps: int
    adjust_lr: str
    ns_dtype: torch.dtype | None


class MuonGroup(MuonOptions):
    """A group of parameters that Muon updates, with the measured dtype of the GEMMs."""

    params: list[nn.Parameter]
    ns_measured: torch.dtype | None


class MuonWithAdamW(torch.optim.Optimizer):
    """Apply the algorithm of `torch.optim.Muon` to `muon_params` and of `torch.optim.AdamW` to `adamw_params`.

    Muon orthogonalizes complete matrices. Steps for a sharded matrix:

    1. Momentum is updated on the shard (elementwise).
    2. The update travels to one rank of the mesh, which orthogonalizes the full matrix.
    3. The result travels back to the shards, which apply it.

    `matrix_exchange` distributes the matrices of a mesh over its ranks by cost. Updates travel in the dtype of the
    GEMMs, to which they would be rounded anyway, beside the GEMMs of other matrices. Every mesh therefore computes the
    numbers of one process, bitwise for equal gradients. Parameters that are no DTensors (DDP) are orthogonalized on
    every rank.

    Args:
        muon_params: hidden matrices. May be empty on a pipeline rank.
        adamw_params: all other trainable parameters.
        muon: options of `torch.optim.Muon`. Measuring the dtype of the GEMMs is collective over all ranks.
        adamw: options of `torch.optim.AdamW`.
        decay_embeddings: apply weight decay to embeddings.
        rates: learning rate and weight decay of selected parameters.
        device: where to measure the dtype of the GEMMs. None: the device of the parameters.
    """

    def __init__(
        self,
        muon_params: Sequence[TrainableParam],
        adamw_params: Sequence[TrainableParam],
        *,
        muon: MuonOptions,
        adamw: dict[str, Any],
        decay_embeddings: bool = False,
        rates: Rates | None = None,
        device: torch.device | None = None,
    ):
        groups: list[dict[str, Any]] = []
        measured = None
        if muon["ns_dtype"] is None:
            measured = measured_dtype(device or (muon_params or adamw_params)[0].param.device)
        rates = rates or Rates()
        of_muon: dict[tuple[float, float], list[nn.Parameter]] = {}
        for item in muon_params:
            rate, decay = rates.lr(item, muon["lr"]), rates.weight_decay(item, muon["weight_decay"])
            of_muon.setdefault((rate, decay), []).append(item.param)
        for (rate, decay), params in of_muon.items():
            options = {**muon, "ns_measured": measured, "lr": rate, "weight_decay": decay}
            groups.append({"params": params, "muon": True, **options})
        rest = {key: value for key, value in adamw.items() if key != "weight_decay"}
        if adamw_params or not groups:
            decay = adamw["weight_decay"]
            of_adamw = decay_groups(adamw_params, decay, embeddings=decay_embeddings, rates=rates, lr=adamw["lr"])
            groups += [{"muon": False, **rest, **group} for group in of_adamw]
        super().__init__(groups, {})
        self._rounds: dict[tuple[int, ...], list[MatrixRound]] = {}
        # The inner AdamW shares groups and state with this optimizer. Its constructor adds its defaults to the groups.
        adamw_groups = self._groups(muon=False)
        self._adamw = _adamw(adamw_groups) if adamw_groups else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state without rounding moments to the dtype of the parameter, as the method of torch does."""
        super().load_state_dict(state_dict)
        load_moments(self, state_dict, ("momentum_buffer", *MOMENTS), lambda param: moment_dtype(param.dtype))

    def _muon_step(self, params: Sequence[nn.Parameter], group: MuonGroup) -> None:
        """Update the matrices of one group. Collective over their meshes."""
        together: dict[tuple[DeviceMesh, torch.dtype], list[DTensor]] = {}
        # Matrices of one mesh and dtype travel together. The others are complete on this rank.
        for param in params:
            state = self.state[param]
            if "momentum_buffer" not in state:
                _init_state(param, state, group)
            dtype = _ns_dtype(state, group)
            if is_distributed(param):
                together.setdefault((param.device_mesh, dtype), []).append(param)
            else:
                update = _update(param, state, group)
                _apply(param, orthogonalize(update, group["ns_steps"], dtype), group)
        for (_, dtype), members in together.items():
            self._distributed_step(self._rounds_of(members), group, dtype)

    def _rounds_of(self, params: Sequence[DTensor]) -> list[MatrixRound]:
        key = tuple(map(id, params))
        if key not in self._rounds:
            self._rounds[key] = rounds_of(params)
        return self._rounds[key]

    def _distributed_step(self, rounds: Sequence[MatrixRound], group: MuonGroup, dtype: torch.dtype) -> None:
        """While a round is orthogonalized, updates of the next one and results of the previous one travel."""

        def gather(round_: MatrixRound) -> Callable[[], Tensor | None]:
            return round_.gather([_update(param, self.state[param], group) for param in round_.params])

        #     transfer    gather 0 | gather 1  | gather 2, scatter 0 | scatter 1
        #     compute              | matrix 0  | matrix 1            | matrix 2
        arriving = gather(rounds[0])
        leaving: Callable[[], None] = lambda: None  # noqa: E731
        for number, round_ in enumerate(rounds):
            following = gather(rounds[number + 1]) if number + 1 < len(rounds) else None
            whole = arriving()
            result = None if whole is None else orthogonalize(whole, group["ns_steps"], dtype)
            # Applied after the GEMMs of this round were launched, so that its transfer had their time.
            leaving()
            leaving = self._returning(round_, result, group, dtype)
            if following is not None:
                arriving = following
        leaving()

    def _returning(
        self, round_: MatrixRound, result: Tensor | None, group: MuonGroup, dtype: torch.dtype
    ) -> Callable[[], None]:
        """Start to return the results of a round. The result applies them."""
        like = to_local(round_.params[0]).new_empty(0, dtype=dtype)
        shards = round_.scatter(result, like)

        def apply() -> None:
            for param, shard in zip(round_.params, shards(), strict=True):
                _apply(param, shard, group)

        return apply

    def _groups(self, *, muon: bool) -> list[Any]:
        return [group for group in self.param_groups if group["muon"] is muon]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self._groups(muon=True):
            self._muon_step([param for param in group["params"] if param.grad is not None], group)
        if self._adamw is not None:
            # Assigned at every step, because loading a state replaces both objects.
            self._adamw.state, self._adamw.param_groups = self.state, self._groups(muon=False)
            self._adamw.step()
        return loss


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return `torch.optim.AdamW`, or for float16 parameters an AdamW whose moments are not float16."""
    if not has_float16(groups):
        return torch.optim.AdamW(groups)
    lr, betas, eps = (groups[0][name] for name in ("lr", "betas", "eps"))
    return RoundedAdamW(groups, lr, betas, eps, state_dtype=None, stochastic_rounding=False)


def _update(param: Tensor, state: dict[str, Any], group: MuonGroup) -> Tensor:
    """Update the momentum, and return the shard of the update in the dtype of the GEMMs.

    With momentum m and gradient g::

        m <- mu m + (1 - mu) g
        u <- mu m + (1 - mu) g if nesterov else m
    """
    assert param.grad is not None
    momentum_S, grad_S = to_local(state["momentum_buffer"]), to_local(param.grad)
    grad_S = grad_S.to(momentum_S.dtype)
    # lerp(a, b, w) = a + w (b - a): momentum 0.95 keeps 95% of the old value.
    momentum_S.lerp_(grad_S, 1 - group["momentum"])
    update_S = grad_S.lerp(momentum_S, group["momentum"]) if group["nesterov"] else momentum_S
    return update_S.to(_ns_dtype(state, group))


def _apply(param: Tensor, orthogonal_S: Tensor, group: MuonGroup) -> None:
    """Apply weight decay w and the shard of the orthogonalized update u: p <- (1 - lr w) p - adjusted_lr(lr) u."""
    param_S = to_local(param)
    param_S.mul_(1 - group["lr"] * group["weight_decay"])
    param_S.add_(orthogonal_S, alpha=-_adjusted_lr(group, param.shape))


def _init_state(param: nn.Parameter, state: dict[str, object], group: MuonGroup) -> None:
    assert param.grad is not None
    state["momentum_buffer"] = torch.zeros_like(param.grad, dtype=moment_dtype(param.dtype))
    if torch.float32 in (group["ns_dtype"], group["ns_measured"]):
        state[_FLOAT32] = 1


def _ns_dtype(state: dict[str, Any], group: MuonGroup) -> torch.dtype:
    """Return the dtype of the GEMMs. A resumed run keeps that of its first step, even on other hardware."""
    dtype: torch.dtype = group["ns_dtype"] or (torch.float32 if state.get(_FLOAT32) else torch.bfloat16)
    return dtype


def _adjusted_lr(group: MuonGroup, shape: torch.Size) -> float:
    """Return the learning rate adjusted to the shape of a matrix, as in `torch.optim.Muon`.

    `match_rms_adamw`: 0.2 sqrt(max(rows, columns)), so that the RMS of the update matches AdamW (Liu et al., 2025).
    `original`: sqrt(max(1, rows / columns)) (Jordan et al., 2024).
    """
    rows, columns = shape
    if group["adjust_lr"] == "match_rms_adamw":
        # 4096 x 1024: 0.2 * 64 = 12.8 times lr. An orthogonal r x c matrix (r <= c) has an RMS of 1 / sqrt(c), here
        # 1/64, so the update has the RMS 0.2 lr, about that of AdamW.
        return float(group["lr"] * 0.2 * math.sqrt(max(rows, columns)))
    return float(group["lr"] * math.sqrt(max(1, rows / columns)))
