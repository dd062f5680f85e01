"""Rows in which samples share their prompt: which, how many, and what stands where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from automodel_cli.data.batch import IGNORE_INDEX, ROUTED_EXPERTS
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.rollout.samples import Minibatch, PackingConfig, pack_minibatches
from automodel_cli.rollout.types import Sample, Score


def group(place: int, prompt: int, responses: Sequence[int]) -> list[Sample]:
    """Tokens that no other sample has: 1000 x place for the prompt, and 100 x the sample's index besides."""
    of_prompt = Prompt(place, [1000 * place + i for i in range(prompt)], [], {}, f"prompt {place}")
    made = []
    for index, count in enumerate(responses):
        tokens = [1000 * place + 100 * (index + 1) + i for i in range(count)]
        logprobs = [-0.5] * count
        made.append(Sample(place, index, of_prompt, tokens, logprobs, "", "stop", 0, Score(1.0, {}, {})))
    return made


def update_of(samples: Sequence[Sample], seq_len: int, units: Sequence[tuple[int, ...]] | None = None, **options):
    units = units or [(number,) for number in range(len(samples))]
    plan = PackingConfig(seq_len, True, 1, microbatch_size=1, pad_id=9, **{"share_prompt_prefix": True, **options})
    (update,) = pack_minibatches(samples, units, 1, plan, dp_rank=0, dp_size=1)
    return update


def documents_read(update: Minibatch) -> Counter[tuple[int, ...]]:
    """Every document that has a label, as its last token sees it, and that its positions count it through."""
    found: Counter[tuple[int, ...]] = Counter()
    for batch in update.batches:
        ids_N, labels_N, positions_N = (
            x.flatten() for x in (batch.input_ids_BT, batch.labels_BT, batch.position_ids_BT)
        )
        for number, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
            index = torch.arange(start, end)
            if batch.seen is not None:
                index = batch.seen.index_M[batch.seen.cu_seqlens[number] : batch.seen.cu_seqlens[number + 1]]
            if (labels_N[start:end] != IGNORE_INDEX).any():
                assert positions_N[index].tolist() == list(range(len(index)))
                found[tuple(ids_N[index].tolist())] += 1
    return found


def test_every_sample_is_read_behind_its_prompt_with_its_own_labels():
    samples = [*group(1, 6, (3, 5, 2)), *group(2, 1, (4, 2)), *group(3, 9, (8, 7, 8))]
    update = update_of(samples, 28)
    assert documents_read(update) == Counter((*s.prompt.tokens, *s.tokens) for s in samples)
    labels = [t for b in update.batches for t in b.labels_BT[b.labels_BT != IGNORE_INDEX].tolist()]
    assert sorted(labels) == sorted(token for sample in samples for token in sample.tokens)
    for batch, spread in zip(update.batches, update.spread, strict=True):
        for row, first, number in spread:
            sample = samples[number]
            at = slice(first, first + len(sample.tokens))
            assert batch.labels_BT[row, at].tolist() == sample.tokens
            assert batch.input_ids_BT[row, first].item() == sample.prompt.tokens[-1]
            assert (batch.extra["sampler_logprobs_BT"][row, at] == -0.5).all()


def test_a_group_takes_its_prompt_once_and_a_group_that_is_too_long_once_a_row():
    """Five tokens shared, and 1 + 3 of each response: 17 of 18; with five responses 25, so two rows have the prompt."""
    whole = update_of(group(1, 6, (3, 3, 3)), 18)
    assert len(whole.batches) == 1 and (whole.batches[0].input_ids_BT == 1000).sum() == 1
    cut = update_of(group(1, 6, (3, 3, 3, 3, 3)), 18)
    assert [int((batch.input_ids_BT == 1000).sum()) for batch in cut.batches] == [1, 1]
    assert len(update_of(group(1, 6, (3, 3, 3, 3, 3)), 18, share_prompt_prefix=False).batches) == 3


def test_sharing_never_takes_more_rows_than_not_sharing():
    """A row of 103 holds three samples of 34; of whole groups of 66 only one: these are cut."""
    samples = [sample for place in range(1, 7) for sample in group(place, 3, (31, 31))]
    alone = update_of(samples, 103, share_prompt_prefix=False)
    shared = update_of(samples, 103)
    assert len(shared.batches) <= len(alone.batches) == 4


def test_samples_of_a_pair_share_their_prompt_and_pairs_are_found():
    samples = group(1, 6, (3, 5, 2, 4))
    update = update_of(samples, 40, [(2, 0), (1, 3)]).with_pairs([(2, 0), (1, 3)])
    (batch,) = update.batches
    assert (batch.input_ids_BT == 1000).sum() == 1
    place = {number: int(batch.document_ids_BT[row, first]) for row, first, number in update.spread[0]}
    assert batch.extra["pairs_P2"].tolist() == [[place[2], place[0]], [place[1], place[3]]]


def test_prompts_are_shared_by_samples_that_were_sent_to_the_same_experts_only():
    """Two choices of experts for each of the prompt's tokens but the last, which every sample reads for itself."""
    samples = group(1, 4, (2, 2, 2))
    chosen = [np.arange(5 * 2, dtype=np.uint8).reshape(5, 1, 2) for _ in samples]
    chosen[1][3:] += 50  # the prompt's last token, and the response
    chosen[2][0] += 50
    samples = [replace(s, routed_experts=c) for s, c in zip(samples, chosen, strict=True)]
    update = update_of(samples, 40)
    (batch,) = update.batches
    assert (batch.input_ids_BT == 1000).sum() == 2
    for row, first, number in update.spread[0]:
        got = batch.extra[ROUTED_EXPERTS][row, first : first + 2]
        assert torch.equal(got, torch.from_numpy(chosen[number][3:].astype(np.int16)).flatten(1))
    start = (batch.input_ids_BT[0] == 1000).nonzero()[:, 0].tolist()
    prompts = {tuple(batch.extra[ROUTED_EXPERTS][0, at : at + 3].flatten().tolist()) for at in start}
    assert prompts == {tuple(chosen[n][:3].flatten().tolist()) for n in (0, 2)}
