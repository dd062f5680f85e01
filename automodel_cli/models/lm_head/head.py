"""LM head: hidden states and labels -> `HeadOutput`, in chunks, so that `[B, T, V]` logits never exist.

There are two implementations:

- Fused (`fused_linear_logprobs.py`): one autograd function that computes fp32 logits chunk by chunk and recomputes them
  in backward. For heads that are one GEMM, optionally scaled (Granite, Cohere) or soft-capped (Gemma-2).
- Generic: the ForCausalLM forward of transformers with the base model replaced by a stub, checkpointed per chunk. For
  all other heads.

`detect_head` selects one by running a small random copy of the config, not by family name.

With tensor parallelism, the fused head has a shard of the vocabulary. Logits stay local and ranks exchange a few
numbers per token. The outputs are equal on every rank.

Positions with label IGNORE_INDEX are skipped, not masked, so prompts cost nothing. The batch contains the other
positions, computed on the host. Computing them here (with context parallelism) is one host synchronization per
microbatch on CUDA.

Shapes: B rows, T tokens, D hidden, V vocabulary, S supervised positions, N tokens whose log-probs are requested, K
top-k tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.head_output import LOGPROBS, HeadOutput, HeadRequest
from automodel_cli.distributed.typed_torch import set_attributes
from automodel_cli.distributed.wgrad_fusion.linear import weight_sum_of
from automodel_cli.models.lm_head import kernels as lm_head_kernels
from automodel_cli.models.lm_head.detection import head_logits, is_plain_linear
from automodel_cli.models.lm_head.fused_linear_logprobs import fused_scores
from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.models.lm_head.scores import HeadKind as HeadKind
from automodel_cli.models.lm_head.scores import Scores, Settings, merge_chunk_scores, plain_scores
from automodel_cli.models.lm_head.vocab_parallel import WHOLE, Vocabulary, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK_BYTES_CPU = 24 * 2**20  # fp32 logits that fit the last-level cache
_CHUNK_BYTES_CORE = 2**20  # per thread, fits the cache of a core
_CHUNK_TOKENS_CPU = 256  # GEMMs with fewer rows cost more than cache misses
_CHUNK_BYTES_DEVICE = 512 * 2**20
_CHUNK_BYTES_KERNELS = 1024 * 2**20  # logits in the compute dtype

T = TypeVar("T")


class Head:
    """Computes log-probs of one model. Refers to the model without registering its parameters.

    `shaping` selects the distribution that completions were sampled from (temperature, top-k, top-p). None is the plain
    softmax. Set it while scoring completions or training on them.

    The weight is read in forward and must be unsharded then. If the output embeddings are an FSDP unit of their own
    (`own_unit`), the head runs as their forward, so that FSDP's hooks gather the weight and reduce its gradient.
    Otherwise keep them in the root unit of the part.
    """

    def __init__(self, model: PreTrainedModel, kind: HeadKind, chunk_size: int | None = None):
        self.model, self.kind, self.chunk_size = model, kind, chunk_size
        self.shaping: SamplingTransform | None = None

    def __call__(
        self,
        hidden_BTD: Tensor,
        labels_BT: Tensor,
        request: HeadRequest = LOGPROBS,
        token_ids_BTN: Tensor | None = None,
        label_positions_S: Tensor | None = None,
    ) -> HeadOutput:
        """Return the `HeadOutput` of these tokens.

        Args:
            token_ids_BTN: the tokens of `request.token_ids`.
            label_positions_S: flat positions of the labels (`Batch.label_positions_S`). None: computed here, which
                synchronizes the host.
        """
        index_S = label_positions_S
        if index_S is None:  # synchronizes with the device
            index_S = (labels_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0]
        if not request.logprobs:
            index_S = index_S[:0]  # parameters of the head still receive a gradient of zeros
        ids_SN = labels_BT.flatten()[index_S, None]
        if token_ids_BTN is not None:
            ids_SN = torch.cat([ids_SN, token_ids_BTN.flatten(0, 1)[index_S]], 1)
        # (B, T, D) -> (S, D): only positions with a label reach the GEMM.
        scores = self._scores(hidden_BTD.flatten(0, 1)[index_S], ids_SN, request)
        where = torch.unravel_index(index_S, labels_BT.shape)  # FSDP2 warns about views of a flat tensor

        def whole(of_S: Tensor | None) -> Tensor | None:
            if of_S is None:
                return None
            # (S, ...) -> (B, T, ...), 0 where nothing is trained. Sums over tokens then need no mask.
            zeros = torch.zeros(*labels_BT.shape, *of_S.shape[1:], dtype=of_S.dtype, device=of_S.device)
            return zeros.index_put(where, of_S)

        logprobs_BT = whole(scores.logprobs_SN[:, 0])
        assert logprobs_BT is not None
        return HeadOutput(
            logprobs_BT,
            entropy_BT=whole(scores.entropy_S),
            topk_logprobs_BTK=whole(scores.topk_logprobs_SK),
            topk_ids_BTK=whole(scores.topk_ids_SK),
            token_logprobs_BTN=None if token_ids_BTN is None else whole(scores.logprobs_SN[:, 1:]),
            lse_BT=whole(scores.lse_S),
        )

    def own_unit(self) -> nn.Module | None:
        """Return the output embeddings if they can be an FSDP unit of their own: this class alone reads their weight,
        once per forward, and calls them without other hooks (tensor parallelism). Otherwise None.
        """
        linear = self.model.get_output_embeddings()
        if self.kind.name == "generic" or not is_plain_linear(linear):
            return None
        return None if linear._forward_pre_hooks or linear._forward_hooks else linear

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Return the unshaped fp32 logits `[S, V]`. For sampling, not for full batches."""
        linear = self.model.get_output_embeddings()
        if self.kind.name == "generic" or not is_plain_linear(linear):
            return head_logits(self.model, hidden_SD[None])[0].float()

        def compute(hidden_SD: Tensor) -> Tensor:
            weight_VD, vocabulary = vocabulary_of(linear.weight)
            settings = self._settings(LOGPROBS, len(weight_VD), hidden_SD, vocabulary)
            return vocabulary.gather(settings.logits(_narrowed(hidden_SD, weight_VD), weight_VD))

        logits_SV: Tensor = _as_forward_of(linear, compute, hidden_SD)
        return logits_SV

    def _scores(self, hidden_SD: Tensor, ids_SN: Tensor, request: HeadRequest) -> Scores:
        linear = self.model.get_output_embeddings()
        if self.kind.name == "generic" or not is_plain_linear(linear):
            vocab = self.model.config.get_text_config().vocab_size
            return self._generic(hidden_SD, ids_SN, self._settings(request, vocab, hidden_SD))

        def compute(hidden_SD: Tensor) -> Scores:
            return self._fused(linear, hidden_SD, ids_SN, request)

        scores: Scores = _as_forward_of(linear, compute, hidden_SD)
        return scores

    def _fused(self, linear: nn.Linear, hidden_SD: Tensor, ids_SN: Tensor, request: HeadRequest) -> Scores:
        weight_VD, vocabulary = vocabulary_of(linear.weight)
        settings = self._settings(request, len(weight_VD), hidden_SD, vocabulary)
        filters = self.shaping is not None and self.shaping.filters
        if kernels_allow(request, ids_SN.shape[1], filters=filters) and lm_head_kernels.has_head_kernels(
            hidden_SD.device.type
        ):
            chunk = self.chunk_size or kernel_chunk_size(len(weight_VD), hidden_SD.dtype)
            settings = replace(settings, chunk=chunk, kernels=True)
        return fused_scores(_narrowed(hidden_SD, weight_VD), weight_VD, ids_SN, settings, weight_sum_of(linear))

    def _settings(
        self, request: HeadRequest, num_logits: int, hidden: Tensor, vocabulary: Vocabulary = WHOLE
    ) -> Settings:
        chunk = self.chunk_size or default_chunk_size(num_logits, hidden.device)
        return Settings(self.kind, chunk, self.shaping, vocabulary, request.entropy, request.topk, request.lse)

    def _generic(self, hidden_SD: Tensor, ids_SN: Tensor, settings: Settings) -> Scores:
        def part(hidden: Tensor, ids: Tensor) -> Scores:
            return plain_scores(head_logits(self.model, hidden[None])[0], ids, settings)

        if len(ids_SN) == 0:  # run one dummy token: every rank needs gradients of the head's parameters
            hidden_1D = hidden_SD.new_zeros(1, hidden_SD.shape[1]) + hidden_SD.sum()
            found = self._generic(hidden_1D, ids_SN.new_zeros(1, ids_SN.shape[1]), settings)
            return merge_chunk_scores([found], lambda of_chunks: of_chunks[0][:0])
        chunks = zip(hidden_SD.split(settings.chunk), ids_SN.split(settings.chunk), strict=True)
        return merge_chunk_scores([checkpoint(part, h, ids, use_reentrant=False) for h, ids in chunks], torch.cat)


def default_chunk_size(vocab: int, device: torch.device) -> int:
    """Return the number of tokens per chunk.

    On a CPU, the fp32 logits of a chunk fit the cache (of the cores, if these are enough tokens for an efficient GEMM).
    On other devices, they use a fixed amount of memory.
    """
    if device.type != "cpu":
        # Vocabulary 128,256: 512 MiB / (4 * 128,256) = 1,046 tokens per chunk.
        return max(16, _CHUNK_BYTES_DEVICE // (4 * vocab))
    upper = max(16, _CHUNK_BYTES_CPU // (4 * vocab))
    of_cores = torch.get_num_threads() * _CHUNK_BYTES_CORE // (4 * vocab)
    return min(upper, max(_CHUNK_TOKENS_CPU, of_cores))


def kernel_chunk_size(vocab: int, dtype: torch.dtype) -> int:
    """Return the number of tokens per chunk of the kernels, which keep one copy of the logits in the compute dtype."""
    return max(16, _CHUNK_BYTES_KERNELS // (dtype.itemsize * vocab))


def kernels_allow(request: HeadRequest, num_ids: int, *, filters: bool) -> bool:
    """Return whether the Triton kernels support the request.

    `num_ids`: log-probs per position. `filters`: completions were sampled with top-k or top-p.
    """
    return not request.topk and not filters and num_ids <= lm_head_kernels.MOST_COLUMNS


def _narrowed(hidden_SD: Tensor, weight_VD: Tensor) -> Tensor:
    """Cast hidden states to the dtype of the head, as the heads of transformers do.

    Mamba keeps its residual in fp32 regardless of the compute dtype.
    """
    return hidden_SD.to(weight_VD.dtype) if weight_VD.dtype.itemsize < hidden_SD.dtype.itemsize else hidden_SD


def _as_forward_of(linear: nn.Linear, compute: Callable[[Tensor], T], hidden_SD: Tensor) -> T:
    """Return `compute(hidden_SD)`. If `linear` is an FSDP unit, compute in its forward, inside FSDP's hooks."""
    if not isinstance(linear, FSDPModule):
        return compute(hidden_SD)
    # FSDP's hooks run around `forward`: they gather the weight before and reshard it after. Calling `compute` outside
    # would see a shard.
    set_attributes(linear, forward=compute)
    try:
        return cast(T, linear(hidden_SD))
    finally:
        del linear.__dict__["forward"]
