"""AdamW with a configurable dtype of the moments and optional stochastic rounding to bfloat16.

A value between two bfloat16 numbers is rounded up with the probability that keeps its expectation. Updates far below
the distance of two numbers therefore still accumulate (Zamirai et al. 2020, arXiv:2010.06192; Higham and Mary 2022).
Example: a value 1/4 of the way between two numbers is rounded up in 1 of 4 cases. The random numbers are a hash of
step, parameter and element, so that replicas of a parameter stay equal and a resumed run is bitwise identical.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from automodel_cli.distributed.fusion.compiled_regions import FusibleRegion, by_compiler
from automodel_cli.distributed.tensors import to_local
from automodel_cli.training.torch_compat import refuses_by_found_inf

MOMENTS = ("exp_avg", "exp_avg_sq")
_MASK = 0xFFFFFFFF


@refuses_by_found_inf
class RoundedAdamW(torch.optim.Optimizer):
    """Every element is updated in float32. `state_dtype`: dtype of both moments, None for `moment_dtype`. With
    `stochastic_rounding`, bfloat16 parameters and moments are rounded stochastically, otherwise to the nearest. A step
    with `found_inf` set (`torch_compat.step_if_finite`) changes nothing.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        *,
        state_dtype: torch.dtype | None,
        stochastic_rounding: bool,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._state_dtype, self._rounds = state_dtype, stochastic_rounding

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments without a detour through the parameter's dtype, to which torch's own method rounds them."""
        super().load_state_dict(state_dict)
        load_moments(self, state_dict, MOMENTS, self._dtype_of)

    def _dtype_of(self, param: Tensor) -> torch.dtype:
        return self._state_dtype or moment_dtype(param.dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "a training step evaluates the loss once"
        bad: Tensor | None = getattr(self, "found_inf", None)
        index = 0
        for group in self.param_groups:
            for param in group["params"]:
                index += 1
                if param.grad is not None:
                    self._step_one(param, group, index, bad)

    def _step_one(self, param: Tensor, group: dict[str, Any], index: int, bad: Tensor | None) -> None:
        state, dtype = self.state[param], self._dtype_of(param)
        if not state:
            # On the device: a captured graph can count steps, and a skipped step changes nothing without a host
            # synchronization.
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state |= {name: torch.zeros_like(param, dtype=dtype) for name in MOMENTS}
        tensors = [_flat(tensor) for tensor in (param, param.grad, *(state[name] for name in MOMENTS))]
        if not tensors[0].numel():
            return
        numbers = [state["step"], _number(group["lr"], param), _number(index, param, torch.int64)]
        numbers.append(_number(0.0, param) if bad is None else bad.to(param.device))
        constants = (*group["betas"], group["eps"], group["weight_decay"], self._rounds)
        _run(param.device)(*tensors, *numbers, *constants)


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the moments of a parameter of `dtype`, if the config does not set it.

    float16 ends at 6e-8: squares of gradients and `eps` would become 0, and the update a division by 0.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def load_moments(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    names: Collection[str],
    dtype_of: Callable[[Tensor], torch.dtype],
) -> None:
    """Load the moments `names` into `optimizer`, each in the dtype that `dtype_of` returns for its parameter."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, saved in state_dict["state"].items():
        param = params[index]
        for name in saved.keys() & set(names):
            optimizer.state[param][name] = saved[name].to(device=param.device, dtype=dtype_of(param))


def _flat(tensor: Tensor) -> Tensor:
    """A view."""
    return to_local(tensor).view(-1)


def _number(value: float, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((), value, dtype=dtype, device=like.device)


@cache
def _run(device: torch.device) -> Callable[..., object]:
    """Compile to one kernel per parameter if possible, otherwise run as written."""
    if device.type != "cuda":
        return update
    run = by_compiler("inductor", device, torch.float32)(FusibleRegion("AdamW", update, None, _sample, by_element=True))
    return run or update


def _sample(rows: int) -> tuple[object, ...]:
    numbers = torch.linspace(0.1, 1.0, 7 * rows)
    scalars = (torch.ones(()), torch.full((), 0.1), torch.ones((), dtype=torch.int64), torch.zeros(()))
    return numbers, numbers * 2, numbers * 3, numbers * 4, *scalars, 0.9, 0.95, 1e-8, 0.1, True


def update(
    param_N: Tensor,
    grad_N: Tensor,
    mean_N: Tensor,
    square_N: Tensor,
    step: Tensor,
    lr: Tensor,
    index: Tensor,
    bad: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    rounds: bool,
) -> tuple[Tensor, ...]:
    """Run one AdamW step in place. `step` (scalar) counts it. Nothing changes if `bad` is 1. Returns the results."""
    is_bad = bad > 0
    count = step + 1
    grad, mean, square, param = grad_N.float(), mean_N.float(), square_N.float(), param_N.float()
    mean = mean + (grad - mean) * (1 - beta1)
    square = square * beta2 + grad * grad * (1 - beta2)
    # Bias corrections: moments start at 0. In step 1, mean / (1 - beta1) is the gradient itself.
    root = (square / (1 - beta2**count)).sqrt() + eps
    param = param * (1 - lr * weight_decay) - lr / (1 - beta1**count) * mean / root
    for place, (target, value) in enumerate(((param_N, param), (mean_N, mean), (square_N, square))):
        if rounds and target.dtype == torch.bfloat16:
            value = round_bf16_stochastically(value, count, index * 3 + place)
        target.copy_(torch.where(is_bad, target, value.to(target.dtype)))
    step.copy_(torch.where(is_bad, step, count))
    return param_N, mean_N, square_N, step


def round_bf16_stochastically(value_N: Tensor, step: Tensor, key: Tensor) -> Tensor:
    """bfloat16 numbers next to float32 `value_N`, the mean of which over steps and keys is `value_N`."""
    # Example: 1 + 2^-9 lies 1/4 of the way from 1 to the next bfloat16 number, 1 + 2^-7. Its 16 low bits are 0x4000.
    # Adding a random number from 0 to 0xFFFF carries into the upper bits in 1 of 4 cases.
    element_N = torch.arange(len(value_N), device=value_N.device)
    below_N = _hash(element_N * 0x9E3779B1 + step.long() * 0x85EBCA77 + key * 0xC2B2AE3D) & 0xFFFF
    # Added to the 16 bits that bfloat16 lacks it carries as often as they are large.
    bits_N = (value_N.view(torch.int32) + below_N.int()) & -0x10000
    return torch.where(value_N.isfinite(), bits_N.view(torch.float32), value_N).to(torch.bfloat16)


def _hash(key_N: Tensor) -> Tensor:
    """32 bits of each number (C. Wellons' lowbias32)."""
    x_N = key_N & _MASK
    x_N = ((x_N ^ (x_N >> 16)) * 0x7FEB352D) & _MASK
    x_N = ((x_N ^ (x_N >> 15)) * 0x846CA68B) & _MASK
    return x_N ^ (x_N >> 16)
