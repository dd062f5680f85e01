"""KV cache with one slot per sequence, and the attention that reads it.

The cache is an attention function in the registry of transformers. It stores the keys and values of each attention
module and attends to the stored ones. Therefore unmodified models can decode with it (`use_cache=False`), and a
pipeline stage caches only its own layers. Masks follow from positions. Grouped heads, sliding windows, soft caps,
sinks and latent attention are supported.

Two kinds of forward:

- `Prefill`: complete prompts, packed in one row. A prompt may fill several slots (samples of one prompt).
- `Decode`: one token for each of the first B slots.

Example: the prompts [a b c] and [d e], two samples of the first. Prefill reads the row `a b c d e` with lengths 3, 2
and slots (0, 1), (2). Decode then reads B = 3 tokens at the positions 3, 3, 2.

Shapes: B slots in use, T tokens of a packed row, H query heads, K kv heads, G = H/K, D head width, V value width, L
cached tokens of the longest sequence, M copied tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError

NAME = "slots"

_Call = tuple[nn.Module, int]
"""A module and how often it was called before in the same forward: layers may share one."""

WholeAttention = Callable[..., tuple[Tensor, None]]
"""Attention over complete sequences with the interface of the registry. Receives `cu_seq_lens_q` and `max_length_q`."""


class Prefill:
    """Prompts of `lengths`, packed in a row. Prompt i is stored in each of `slots[i]`."""

    def __init__(self, lengths: Sequence[int], slots: Sequence[Sequence[int]], device: torch.device):
        self.lengths, self.slots = lengths, slots
        self.bounds = [0, *itertools.accumulate(lengths)]
        self.cu_seqlens = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        self.max_length = max(lengths)

    @cached_property
    def copies_3M(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each copied token: its index in the row, its slot, and its position in the slot."""
        # Example of the module docstring: source 0 1 2 0 1 2 3 4, slot 0 0 0 1 1 1 2 2, position 0 1 2 0 1 2 0 1.
        spans = [torch.arange(length) for length in self.lengths]
        copies = [(i, slot) for i, of_prompt in enumerate(self.slots) for slot in of_prompt]
        source_M = torch.cat([spans[i] + self.bounds[i] for i, _ in copies])
        slot_M = torch.cat([torch.full_like(spans[i], slot) for i, slot in copies])
        position_M = torch.cat([spans[i] for i, _ in copies])
        device = self.cu_seqlens.device
        return source_M.to(device), slot_M.to(device), position_M.to(device)

    def rows_of_slots(self) -> list[slice]:
        """Indices of the tokens of each slot among the tokens of this forward."""
        ends = [*itertools.accumulate(self.lengths)]
        spans = zip(self.lengths, ends, self.slots, strict=True)
        return [slice(end - length, end) for length, end, of_prompt in spans for _ in of_prompt]


# Example: 2 slots at positions 3 and 1, `longest` 4. The mask hides cached tokens 2 and 3 of the second slot. With a
# window of 2, it also hides tokens 0 and 1 of the first.
class Decode:
    """One token for each of the slots 0..B-1, at `position_B` of its sequence.
    Afterwards `longest` tokens are cached."""

    def __init__(self, position_B: Tensor, longest: int):
        self.position_B, self.longest = position_B, longest
        self.slot_B = torch.arange(len(position_B), device=position_B.device)
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def rows_of_slots(self) -> list[slice]:
        """See `Prefill.rows_of_slots`."""
        return [slice(row, row + 1) for row in range(len(self.slot_B))]

    def mask_B11L(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 at the cached tokens that each slot's new token sees and -inf elsewhere, to be added to its scores. All
        layers of one window share it."""
        if (window, dtype) not in self._masks:
            # Example: position 2, 5 cached tokens: distances 2 1 0 -1 -2. Negative ones are later tokens or stale
            # entries of the slot.
            distance_BL = self.position_B[:, None] - torch.arange(self.longest, device=self.position_B.device)
            hidden_BL = distance_BL < 0 if window is None else (distance_BL < 0) | (distance_BL >= window)
            mask_BL = torch.zeros_like(hidden_BL, dtype=dtype).masked_fill_(hidden_BL, -torch.inf)
            self._masks[window, dtype] = mask_BL[:, None, None]
        return self._masks[window, dtype]


class KVCache:
    """Keys `[slots, K, capacity, D]` and values of every attention module that used it, grown as sequences do up to
    `longest` tokens (None: without end)."""

    def __init__(self, max_num_seqs: int, whole_attention: WholeAttention):
        self.max_num_seqs = max_num_seqs
        self.longest: int | None = None
        self._whole_attention = whole_attention
        self._layers: dict[_Call, tuple[Tensor, Tensor]] = {}
        self._forward: Prefill | Decode | None = None
        self._calls: Counter[nn.Module] = Counter()
        self.register()

    def register(self) -> None:
        """Register this cache as attention `slots`. The registry is global, so the last cache wins."""
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, self._attend)

    @contextmanager
    def during(self, forward: Prefill | Decode) -> Iterator[None]:
        """Attention inside belongs to this forward."""
        self._forward = forward
        self._calls.clear()
        try:
            yield
        finally:
            self._forward = None

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a slot's first `length` tokens over another slot."""
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def reserve(self, length: int) -> tuple[int, ...]:
        """Allocate `length` tokens in every layer that has run. Returns the addresses, which change when it grows."""
        for call, (keys, values) in self._layers.items():
            self._room(call, keys, values, length)
        return tuple(tensor.data_ptr() for stored in self._layers.values() for tensor in stored)

    def clear(self) -> None:
        """Free the memory."""
        self._layers.clear()

    def _attend(
        self,
        module: nn.Module,
        query_BHTD: Tensor,
        key_BKTD: Tensor,
        value_BKTV: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """The registry's contract: returns `(out_BTHV, None)`."""
        forward = self._forward
        assert forward is not None, "attention through the cache belongs inside KVCache.during"
        if attention_mask is not None:
            raise ConfigError(
                f"the sampler does not support {type(module).__name__}, because it passes its own attention mask",
                code="not_supported_by_model",
                keys=("rollout.engine",),
                fix="rollout=hf",
            )
        # A module that two layers share has two caches: the n-th call of a forward is the n-th layer.
        call = (module, self._calls[module])
        self._calls[module] += 1
        scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
        key_BKTD, query_BHTD = key_BKTD.to(value_BKTV.dtype), query_BHTD.to(value_BKTV.dtype)
        options = {"scaling": scale, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        if isinstance(forward, Prefill):
            self._store_prompts(call, key_BKTD, value_BKTV, forward)
            options |= {"cu_seq_lens_q": forward.cu_seqlens, "max_length_q": forward.max_length}
            return self._whole_attention(module, query_BHTD, key_BKTD, value_BKTV, None, **options)
        keys, values = self._store_tokens(call, key_BKTD, value_BKTV, forward)
        mask_B11L = forward.mask_B11L(sliding_window, query_BHTD.dtype)
        return _decode(query_BHTD, keys, values, mask_B11L, scale=scale, softcap=softcap, sink_H=s_aux), None

    def _store_prompts(self, call: _Call, key_1KTD: Tensor, value_1KTV: Tensor, forward: Prefill) -> None:
        keys, values = self._room(call, key_1KTD, value_1KTV, forward.max_length)
        for stored, new in ((keys, key_1KTD), (values, value_1KTV)):
            (_store_by_prompt if new.device.type == "cpu" else _store_at_once)(stored, new, forward)

    def _store_tokens(
        self, call: _Call, key_BK1D: Tensor, value_BK1V: Tensor, forward: Decode
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._room(call, key_BK1D, value_BK1V, forward.longest)
        target = (forward.slot_B, slice(None), forward.position_B)
        # One write for all slots: slot b at its own position. The copy of the whole cache that `torch.cat` makes is
        # avoided.
        keys[target] = key_BK1D[:, :, 0]
        values[target] = value_BK1V[:, :, 0]
        used = slice(0, len(forward.slot_B))
        # Views, not copies.
        return keys[used, :, : forward.longest], values[used, :, : forward.longest]

    def _room(self, call: _Call, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the storage of this call with at least `length` tokens per slot.
        Doubles the size if it is too small."""
        stored = self._layers.get(call)
        if stored is None or stored[0].shape[2] < length:
            # Doubling copies each token a constant number of times on average.
            capacity = max(length, 2 * length if self.longest is None else min(2 * length, self.longest))
            # Zeros, because masked positions are multiplied by 0, and 0 * nan is nan.
            room = (self._zeros(key, capacity), self._zeros(value, capacity))
            for new, old in zip(room, stored or (), strict=False):
                new[:, :, : old.shape[2]] = old
            self._layers[call] = stored = room
        return stored

    def _zeros(self, like_BKTD: Tensor, length: int) -> Tensor:
        return like_BKTD.new_zeros(self.max_num_seqs, like_BKTD.shape[1], length, like_BKTD.shape[3])


def _store_at_once(stored: Tensor, new_1KTD: Tensor, forward: Prefill) -> None:
    """The prompts of a row into their slots, in one launch of a kernel."""
    source_M, slot_M, position_M = forward.copies_3M
    # [1, K, T, D] -> [T, K, D] -> [M, K, D]. Samples of one prompt get copies, because each continues differently.
    stored[slot_M, :, position_M] = new_1KTD[0].transpose(0, 1)[source_M]


def _store_by_prompt(stored: Tensor, new_1KTD: Tensor, forward: Prefill) -> None:
    """Store contiguous tokens with one copy per prompt. Takes less than half of the time on a CPU."""
    for (start, end), slots in zip(itertools.pairwise(forward.bounds), forward.slots, strict=True):
        # A slice is one strided copy. A list of slots needs an index tensor.
        follow_one_another = slots[-1] - slots[0] == len(slots) - 1
        where = slice(slots[0], slots[-1] + 1) if follow_one_another else list(slots)
        stored[where, :, : end - start] = new_1KTD[:, :, start:end]


def _decode(
    query_BH1D: Tensor,
    key_BKLD: Tensor,
    value_BKLV: Tensor,
    mask_B11L: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sink_H: Tensor | None,
) -> Tensor:
    """Return `out_B1HV`. The G query heads of a kv head take the place of G query tokens, so that keys are not
    repeated."""
    batch, heads, _, width = query_BH1D.shape
    groups = heads // key_BKLD.shape[1]
    # Example: 8 query heads and 2 kv heads give [B, 2, 4, D]. Each kv head has 4 query rows in one GEMM.
    query_BKGD = query_BH1D.view(batch, -1, groups, width)
    # A flash kernel processes sequences and heads one by one. On a CPU two GEMMs over all of them take two thirds of
    # its time for short sequences, and as much for long ones. GEMMs in 16-bit dtypes are slow there.
    two_products = query_BH1D.device.type == "cpu" and query_BH1D.dtype == torch.float32
    if softcap is None and sink_H is None and not two_products:
        out_BKGV = F.scaled_dot_product_attention(query_BKGD, key_BKLD, value_BKLV, attn_mask=mask_B11L, scale=scale)
    else:
        scores_BKGL = (query_BKGD.float() * scale) @ key_BKLD.transpose(2, 3).float()
        if softcap is not None:
            scores_BKGL = softcap * torch.tanh(scores_BKGL / softcap)
        scores_BKGL = scores_BKGL + mask_B11L
        if sink_H is not None:
            # The sink is one more column of the softmax, which is dropped afterwards.
            sink_BKG1 = sink_H.float().view(1, -1, groups, 1).expand(batch, -1, -1, 1)
            scores_BKGL = torch.cat([scores_BKGL, sink_BKG1], -1)
        probs_BKGL = scores_BKGL.softmax(-1)[..., : key_BKLD.shape[2]]
        out_BKGV = probs_BKGL.to(value_BKLV.dtype) @ value_BKLV
    return out_BKGV.reshape(batch, 1, heads, -1)
