"""Regions on tensors without values: results have the shapes, strides and dtypes of the function's own."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from automodel_cli.distributed.fusion.compiled_regions import FusibleRegion
from automodel_cli.distributed.fusion.region_kernels import as_one


@pytest.mark.parametrize("change", ["nothing", "rows", "dtype", "stride", "constant"])
def test_a_region_runs_again_only_for_other_shapes_or_constants(change: str) -> None:
    calls = []

    def function(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        calls.append(x)
        return x.to(dtype).t(), x.sum(-1)

    run = as_one(nullcontext, lambda *_: None)(FusibleRegion("region", function, None, lambda rows: (rows,)))
    assert run is not None
    x, dtype = torch.empty(4, 6, device="meta"), torch.bfloat16
    run(x, dtype)
    match change:
        case "rows":
            x = torch.empty(5, 6, device="meta")
        case "dtype":
            x = x.double()
        case "stride":
            x = torch.empty(6, 4, device="meta").t()
        case "constant":
            dtype = torch.float16
    found, want = run(x, dtype), (x.to(dtype).t(), x.sum(-1))
    assert len(calls) == (1 if change == "nothing" else 2)
    for got, expected in zip(found, want, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert got.untyped_storage()._cdata != x.untyped_storage()._cdata
