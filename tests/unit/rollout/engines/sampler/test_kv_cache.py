"""What a slot is given of a prompt, and attention of one new token for each slot, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from automodel_cli.rollout.engines.sampler.kv_cache import Decode, Prefill, _decode, _store_at_once, _store_by_prompt


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("window", [None, 4])
def test_each_slot_sees_its_own_tokens_through_the_window(dtype, tolerance, groups, window):
    """Grouped heads, values narrower than keys, slots of other lengths, and garbage behind each of them."""
    generator = torch.Generator().manual_seed(0)
    cached = torch.tensor([0, 6, 8, 3])  # tokens before the new one
    shapes = ((4, 2 * groups, 1, 8), (4, 2, 12, 8), (4, 2, 12, 5))
    query, keys, values = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    keys, values = keys[:, :, :9], values[:, :, :9]
    mask = Decode(cached, 9).mask_B11L(window, dtype)
    got = _decode(query, keys, values, mask, scale=0.3, softcap=None, sink_H=None)
    assert got.shape == (4, 1, 2 * groups, 5) and got.dtype == dtype
    for slot, last in enumerate(cached.tolist()):
        seen = slice(0 if window is None else max(0, last - window + 1), last + 1)
        for head in range(2 * groups):
            k, v = (x[slot, head // groups, seen].double() for x in (keys, values))
            want = (k @ query[slot, head, 0].double() * 0.3).softmax(0) @ v
            assert (got[slot, 0, head].double() - want).abs().max() < tolerance


@pytest.mark.parametrize("store", [_store_at_once, _store_by_prompt])
def test_every_slot_of_a_prompt_gets_its_tokens_and_no_other_is_touched(store):
    """The last prompt waits in the slot behind all others, too."""
    forward = Prefill([3, 1, 5], [[0, 1], [2], [3, 4, 9]], torch.device("cpu"))
    new = torch.randn(1, 2, 9, 4)
    stored = torch.zeros(10, 2, 7, 4)
    store(stored, new, forward)
    want = torch.zeros(10, 2, 7, 4)
    for slot, start, length in ((0, 0, 3), (1, 0, 3), (2, 3, 1), (3, 4, 5), (4, 4, 5), (9, 4, 5)):
        for position in range(length):
            want[slot, :, position] = new[0, :, start + position]
    assert torch.equal(stored, want)
