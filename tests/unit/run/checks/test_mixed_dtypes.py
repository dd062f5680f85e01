"""Errors of torch about dtypes, raised where a model's code lies, become one with a setting."""

from __future__ import annotations

import pytest
import torch

from automodel_cli.run.checks.mixed_dtypes import explain_mixed_dtypes


def raised(code: str, file: str) -> RuntimeError:
    """What torch says of this code, as if it stood in this file."""
    with pytest.raises(RuntimeError) as caught:
        exec(compile(code, file, "exec"), {"torch": torch})
    return caught.value


MIXED = (
    "torch.zeros(2, 2) @ torch.zeros(2, 2).bfloat16()",
    "torch.zeros(1, 2, 2) @ torch.zeros(1, 2, 2).bfloat16()",
    "torch.nn.functional.linear(torch.zeros(2, 2), torch.zeros(2, 2).bfloat16())",
    "torch.zeros(2, 2).index_put_((torch.tensor([0]),), torch.zeros(2).bfloat16())",
)


@pytest.mark.parametrize("code", MIXED)
def test_operands_of_two_dtypes_in_a_models_code_are_answered_with_float32(code):
    half, full = torch.bfloat16, torch.float32
    of_model = raised(code, "/x/transformers/models/minimax/modeling_minimax.py")
    explained = explain_mixed_dtypes(of_model, half)
    assert explained.fix == "parallelizer.mp_policy.param_dtype=float32"
    assert "modeling_minimax.py:1" in explained.message and "bfloat16" in explained.message
    assert explain_mixed_dtypes(of_model, full) is None  # something else is wrong


def test_other_errors_are_left_as_they_are():
    half = torch.bfloat16
    assert explain_mixed_dtypes(raised(MIXED[0], "/x/mine.py"), half) is None
    shapes = raised("torch.zeros(2, 2) @ torch.zeros(3, 3)", "/x/transformers/models/minimax/modeling_minimax.py")
    assert explain_mixed_dtypes(shapes, half) is None
