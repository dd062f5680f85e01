"""Newton-Schulz orthogonalization of Muon updates, and the dtype of its GEMMs.

The five iterations do not converge, so bfloat16 is precise enough. `torch.optim.Muon` uses it too. If the processor has
no bfloat16 units, bfloat16 GEMMs are emulated and fp32 is ten times faster (256 x 256 on one AVX2 core: 0.4 ms instead
of 5.0 ms).
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_EPS = 1e-7
_SLOWER = 3.0
"""Use fp32 if bfloat16 takes this many times as long. Hardware support makes bfloat16 faster and emulation makes it 10
times slower, so noise does not change the choice between two runs."""


def orthogonalize(update_RC: Tensor, num_steps: int, dtype: torch.dtype) -> Tensor:
    """Return an approximation of U V^T for the matrix U S V^T, computed in `dtype`.

    Quintic Newton-Schulz iteration of Muon (Jordan et al., 2024)::

        X <- X / ||X||
        X <- a X + (b A + c A A) X  with  A = X X^T

    In bfloat16 the result is bitwise identical to `torch.optim.Muon`.

    Args:
        update_RC: matrix with R rows and C columns.
        num_steps: number of iterations.
        dtype: dtype of the GEMMs.
    """
    # Each singular value s of X becomes a s + b s^3 + c s^5. diag(3, 1) is scaled to (0.949, 0.316). Five iterations
    # give (0.753, 1.134): near 1, not equal to 1, and nearly independent of the scale before.
    a, b, c = _COEFFICIENTS
    # Iterate on the orientation with fewer rows, so that A = X X^T is as small as possible.
    tall = update_RC.shape[0] > update_RC.shape[1]
    x = update_RC.to(dtype, copy=True)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=_EPS))
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def measured_dtype(device: torch.device) -> torch.dtype:
    """Return float32 if any rank emulates bfloat16 GEMMs, else bfloat16.

    Collective if a process group is initialized, so that all ranks use one dtype.
    """
    slow = torch.tensor(int(emulates_bfloat16(device)), device=device)
    if dist.is_initialized():
        dist.all_reduce(slow, op=dist.ReduceOp.MAX)
    return torch.float32 if bool(slow) else torch.bfloat16


def emulates_bfloat16(device: torch.device) -> bool:
    """Measure whether bfloat16 GEMMs are emulated. Takes about 30 ms if they are, otherwise less than 5 ms."""
    size = 2048 if device.type == "cuda" else 256
    return _seconds(torch.bfloat16, size, device) > _SLOWER * _seconds(torch.float32, size, device)


def _seconds(dtype: torch.dtype, size: int, device: torch.device) -> float:
    """Return the minimum time of five GEMMs in seconds, after one warm-up."""
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    timings = []
    for _ in range(6):
        began = time.perf_counter()
        (matrix @ matrix.T)[0, 0].item()  # synchronizes with the device
        timings.append(time.perf_counter() - began)
    return min(timings[1:])
