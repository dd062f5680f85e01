"""What a plan says the head computes with, against what is alive at once when it does."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from automodel_cli.data.head_output import HeadRequest
from automodel_cli.models.lm_head.fused_linear_logprobs import fused_scores
from automodel_cli.models.lm_head.scores import HeadKind, Settings
from automodel_cli.planning.head_memory import head_bytes

TOKENS, VOCABULARY, WIDTH, CHUNK = 96, 3000, 64, 32


class Peak(TorchDispatchMode):
    """Bytes of the storages that operators make, at the moment when most of them are alive."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self._seen = {t.untyped_storage()._cdata for t in known}
        self.alive = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._seen:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.alive += size
        self.most = max(self.most, self.alive)

        def freed() -> None:
            self._seen.discard(key)
            self.alive -= size

        weakref.finalize(storage, freed)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("kind", [HeadKind("plain"), HeadKind("softcap", 30.0)], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_buffers_are_what_is_alive_at_its_worst_moment(dtype: torch.dtype, kind: HeadKind, entropy: bool):
    hidden_SD = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    # Another token besides the label keeps the CPU from taking gradients early, which a device does not do either.
    ids_SN = torch.randint(0, VOCABULARY, (TOKENS, 2))
    with Peak(hidden_SD, weight_VD, ids_SN) as peak:
        scores = fused_scores(hidden_SD * 1, weight_VD, ids_SN, Settings(kind, CHUNK, entropy=entropy))
        total = scores.logprobs_SN.sum()
        if scores.entropy_S is not None:
            total = total + scores.entropy_S.sum()
        torch.autograd.grad(total, (hidden_SD, weight_VD))
    planned = head_bytes(
        kind, HeadRequest(entropy), dtype, vocabulary=VOCABULARY, width=WIDTH, tokens=TOKENS, chunk=CHUNK
    )
    assert planned == pytest.approx(peak.most, rel=0.01)  # beside it are a few numbers by token


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("kind", [HeadKind("plain"), HeadKind("softcap", 30.0)], ids=lambda kind: kind.name)
def test_with_kernels_a_chunks_logits_are_the_only_copy(kind: HeadKind, entropy: bool):
    """On fake tensors, which know what operators return: the kernels themselves allocate nothing that is large."""
    with FakeTensorMode():
        hidden_SD = torch.randn(TOKENS, WIDTH, requires_grad=True)
        weight_VD = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
        ids_SN = torch.randint(0, VOCABULARY, (TOKENS, 1))
        with Peak(hidden_SD, weight_VD, ids_SN) as peak:
            settings = Settings(kind, CHUNK, entropy=entropy, kernels=True)
            scores = fused_scores(hidden_SD * 1, weight_VD, ids_SN, settings)
            total = scores.logprobs_SN.sum()
            if scores.entropy_S is not None:
                total = total + scores.entropy_S.sum()
            torch.autograd.grad(total, (hidden_SD, weight_VD))
    sizes = {"vocabulary": VOCABULARY, "width": WIDTH, "tokens": TOKENS, "chunk": CHUNK}
    planned = head_bytes(kind, HeadRequest(entropy), torch.float32, **sizes, kernels=True)
    assert planned == pytest.approx(peak.most, rel=0.01)
