"""Newton-Schulz orthogonalisation of Muon's updates, and the dtype of its products.

The dtype only has to be precise enough for five iterations that do not converge anyway: bfloat16 is what
`torch.optim.Muon` and its authors take. Where the processor has no bfloat16 units its products are emulated, and fp32
is both exact and ten times faster (256 x 256 on one AVX2 core: 0.4 ms against 5.0 ms).
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_EPS = 1e-7
_SLOWER = 3.0
"""bfloat16 must take this many times as long as fp32 to be given up: units make it faster, emulation 10 times slower,
so neither noise nor a busy machine makes two runs choose differently."""


def orthogonalise(update_RC: Tensor, num_steps: int, dtype: torch.dtype) -> Tensor:
    """Of U S V^T about U V^T, in `dtype`: the quintic iteration of Keller Jordan's Muon, with its coefficients.

    In bfloat16 bit for bit what `torch.optim.Muon` computes. R rows, C columns.
    """
    a, b, c = _COEFFICIENTS
    tall = update_RC.shape[0] > update_RC.shape[1]
    x = update_RC.to(dtype, copy=True)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=_EPS))
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def measured_dtype(device: torch.device) -> torch.dtype:
    """bfloat16, or float32 where a rank's bfloat16 products are emulated. Collective if there is a process group, so
    that all ranks take one dtype.
    """
    slow = torch.tensor(int(emulates_bfloat16(device)), device=device)
    if dist.is_initialized():
        dist.all_reduce(slow, op=dist.ReduceOp.MAX)
    return torch.float32 if bool(slow) else torch.bfloat16


def emulates_bfloat16(device: torch.device) -> bool:
    """Measured on one product: about 30 ms where it is so, less than 5 elsewhere."""
    size = 2048 if device.type == "cuda" else 256
    return _seconds(torch.bfloat16, size, device) > _SLOWER * _seconds(torch.float32, size, device)


def _seconds(dtype: torch.dtype, size: int, device: torch.device) -> float:
    """The shortest of five, after one that loads the kernel."""
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    found = []
    for _ in range(6):
        began = time.perf_counter()
        (matrix @ matrix.T)[0, 0].item()  # waits for the device
        found.append(time.perf_counter() - began)
    return min(found[1:])
