"""How far float32 sums of the tiny models are off on this processor, as a unit of bounds.

Kernels add in another order on each processor (scalar, AVX2, AVX-512, AMX), so a bound in plain numbers holds on the
machine on which it was chosen. A bound here is a multiple of the error of one process, measured beside the test.
"""

from __future__ import annotations

from functools import cache

from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.compare import TIMES_ROUNDING
from automodel_cli.parity.reference import exact_process
from tests import tiny


@cache
def tolerance() -> float:
    """Return the bound of relative errors in float32: a multiple of the error of one process against float64."""
    batches = step_batches(packed=True, count=2)
    models = (tiny.build_hf(family, num_hidden_layers=2) for family in ("llama", "gpt_oss", "deepseek_v3"))
    return TIMES_ROUNDING * max(exact_process(model, batches, SFT()).rounding for model in models)
