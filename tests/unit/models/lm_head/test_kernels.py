"""The head's Triton kernels, in Triton's interpreter on the CPU, against whole logits in float64; and compiled for an
H100, which needs no GPU. Skipped where triton is not installed (torch for the CPU does not bring it)."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from automodel_cli.models.lm_head import kernels as lm_head_kernels
from automodel_cli.models.lm_head.fused_linear_logprobs import fused_scores
from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.models.lm_head.scores import HeadKind, Settings, plain_scores
from automodel_cli.models.lm_head.vocab_parallel import Vocabulary
from tests import interpreter

pytestmark = interpreter.needs_triton

KINDS = [HeadKind("plain"), HeadKind("scale", 0.25), HeadKind("softcap", 3.0)]
SHAPES = {"one block": 300, "several blocks and a rest": 4096 + 77}


def _inputs(vocabulary: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden_SD = torch.randn(7, 16, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocabulary, 16, generator=generator).to(dtype).requires_grad_()
    ids_SN = torch.randint(vocabulary, (7, columns), generator=generator)
    ids_SN[2, 1:] = -1  # none was asked for
    ids_SN[3] = vocabulary - 1
    return hidden_SD, weight_VD, ids_SN


@pytest.mark.parametrize("vocabulary", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_log_probs_entropies_and_gradients_are_those_of_whole_logits(kind: HeadKind, vocabulary: int) -> None:
    settings = Settings(kind, chunk=4, shaping=SamplingTransform(temperature=0.7), entropy=True, kernels=True)
    hidden_SD, weight_VD, ids_SN = _inputs(vocabulary, 3)
    got = fused_scores(hidden_SD, weight_VD, ids_SN, settings)
    leaves = [x.detach().double().requires_grad_() for x in (hidden_SD, weight_VD)]
    z_SV = leaves[0] @ leaves[1].t()
    if kind.name == "softcap":
        z_SV = kind.value * (z_SV / kind.value).tanh()
    logp_SV = (z_SV * (kind.value if kind.name == "scale" else 1) / 0.7).log_softmax(-1)
    picked_SN = logp_SV.gather(-1, ids_SN.clamp(min=0)).where(ids_SN >= 0, 0)
    entropy_S = -(logp_SV.exp() * logp_SV).sum(-1)
    assert got.entropy_S is not None
    torch.testing.assert_close(got.logprobs_SN.double(), picked_SN, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy_S.double(), entropy_S, rtol=1e-5, atol=1e-5)
    weights_SN, weights_S = torch.randn(ids_SN.shape), torch.randn(len(ids_SN))
    ours = torch.autograd.grad(
        (got.logprobs_SN * weights_SN).sum() + (got.entropy_S * weights_S).sum(), [hidden_SD, weight_VD]
    )
    want = torch.autograd.grad((picked_SN * weights_SN).sum() + (entropy_S * weights_S).sum(), leaves)
    for mine, theirs in zip(ours, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


def test_bf16_is_as_close_to_the_definition_as_the_other_way() -> None:
    hidden_SD, weight_VD, ids_SN = _inputs(4096 + 77, 1, torch.bfloat16)
    leaves = [x.detach().double().requires_grad_() for x in (hidden_SD, weight_VD)]
    want = torch.autograd.grad(plain_scores(leaves[0] @ leaves[1].t(), ids_SN, Settings(KINDS[0], 4))[0].sum(), leaves)
    errors = []
    for kernels in (False, True):
        settings = Settings(KINDS[0], 4, kernels=kernels)
        got = torch.autograd.grad(
            fused_scores(hidden_SD, weight_VD, ids_SN, settings).logprobs_SN.sum(), [hidden_SD, weight_VD]
        )
        errors.append([float((g.double() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)])
    assert max(errors[1]) < 0.01
    # The interpreter cuts bits off where a GPU rounds.
    assert all(ours < 1.5 * theirs for ours, theirs in zip(errors[1], errors[0], strict=True))


def test_a_shard_of_the_vocabulary_gives_its_own_share() -> None:
    """Of a rank with tokens 100 to 300, before ranks meet; tokens of others count in the gradient of its logits."""
    hidden_SD, weight_VD, ids_SN = _inputs(300, 1)
    vocabulary = Vocabulary(start=100, size=200)
    product_SV = (hidden_SD @ weight_VD.t()).detach()
    own_SV = product_SV[:, 100:].contiguous()
    columns_SN = vocabulary.columns(ids_SN)
    lse_S, picked_SN, _ = lm_head_kernels.statistics(own_SV, columns_SN, 1.0, 0.0, False)
    torch.testing.assert_close(lse_S, own_SV.logsumexp(-1))
    is_own = ids_SN >= 100
    torch.testing.assert_close(picked_SN[is_own], product_SV.gather(-1, ids_SN)[is_own])
    assert not picked_SN[~is_own].any()
    whole_S, none, ones = product_SV.logsumexp(-1), lse_S[:0], torch.ones_like(lse_S)
    want_SV = torch.zeros_like(product_SV).scatter_(-1, ids_SN, 1.0) - product_SV.softmax(-1)
    lm_head_kernels.gradient_(own_SV, columns_SN, ones[:, None], whole_S, ones, none, none, 1.0, 0.0)
    torch.testing.assert_close(own_SV, want_SV[:, 100:], rtol=1e-5, atol=1e-6)


def test_the_comparison_that_decides_on_a_gpu_passes_here_and_sees_a_wrong_kernel(monkeypatch) -> None:
    assert lm_head_kernels.head_kernel_error(torch.device("cpu")) < lm_head_kernels._PROBE_ERROR
    from automodel_cli.models.lm_head import triton_kernels

    right = triton_kernels.gradient_
    monkeypatch.setattr(triton_kernels, "gradient_", lambda *given: right(*given[:-2], given[-2] * 1.001, given[-1]))
    assert lm_head_kernels.head_kernel_error(torch.device("cpu")) > lm_head_kernels._PROBE_ERROR


def test_no_tokens_are_no_kernels() -> None:
    hidden_SD, weight_VD, ids_SN = _inputs(300, 1)
    settings = replace(Settings(KINDS[0], 4), kernels=True)
    got = fused_scores(hidden_SD[:0], weight_VD, ids_SN[:0], settings).logprobs_SN
    got.sum().backward()
    assert got.shape == (0, 1) and weight_VD.grad is not None and not weight_VD.grad.any()


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_both_kernels_compile_for_an_h100_without_spilling_registers() -> None:
    float32 = dict.fromkeys(["lse", "picked", "entropies", "grads", "totals", "grad_entropies"], "*fp32")
    kinds = {**float32, "logits": "*bf16", "columns": "*i64", "multiplier": "fp32", "cap": "fp32"}
    fixed = {"vocabulary": 201088, "num_columns": 2, "capped": True, "entropy": True, "block": 4096}
    kernels = ["_statistics", "_gradient"]
    interpreter.compile_for_an_h100("automodel_cli.models.lm_head.triton_kernels", kernels, kinds, fixed, warps=8)
