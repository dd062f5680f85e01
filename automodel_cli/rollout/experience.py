"""Samples of a rollout, and how they become microbatches: the same rows whatever the layout.

Every rank knows all samples of a step. Rows are packed over all of them and then dealt, so that ranks have equally many
microbatches and a run does not depend on how many ranks there are.

Shapes: N samples, B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX, ROUTED_EXPERTS, Batch
from automodel_cli.data.packing import best_fit_decreasing
from automodel_cli.data.prompts import Prompt
from automodel_cli.objectives.policy import kl_penalty
from automodel_cli.rollout.environment import EpisodeEnd, Message
from automodel_cli.rollout.environments.pool import Account
from automodel_cli.rollout.rewards.combine import Score

Spread = tuple[int, int, int]
"""Of one sample in a microbatch: its row there, the position of its first label, its number among all samples."""


@dataclass(frozen=True)
class Sample:
    """The `index`-th response to `prompt`; `place` is where the prompt stands in the endless stream of prompts, and
    names the group.

    Of several turns `tokens` holds what the environment said too: `generated` tells the model's own apart (None: all of
    them), `said` are the messages after the prompt, and `text` is the last of the model's; `environment` is the name of
    who answered, and `account` what that cost. `routed_experts` `[tokens, layers, k]`: of prompt and response, as
    far as it is known.
    """

    place: int
    index: int
    prompt: Prompt
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: EpisodeEnd
    weight_version: int
    score: Score
    generated: list[bool] | None = None
    said: list[Message] = field(default_factory=list)
    environment: str | None = None
    account: Account | None = None
    token_versions: list[int] | None = None
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def failed(self) -> bool:
        """Whether its environment failed."""
        return self.finish_reason in ("error", "timeout")

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", "turns")

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens that the model drew."""
        return len(self.tokens) if self.generated is None else sum(self.generated)

    @property
    def drawn_versions(self) -> list[int]:
        """By which weights each token was drawn that the model drew; the oldest of the sample's where it is not known
        of each."""
        known = [self.weight_version] * len(self.tokens) if self.token_versions is None else self.token_versions
        return known if self.generated is None else [v for v, drawn in zip(known, self.generated, strict=True) if drawn]

    @property
    def num_turns(self) -> int:
        """Messages of the model."""
        return 1 if self.generated is None else sum(message["role"] == "assistant" for message in self.said)

    def generated_T(self) -> Tensor:
        """Which of `tokens` the model drew."""
        return torch.tensor([True] * len(self.tokens) if self.generated is None else self.generated)


@dataclass(frozen=True)
class RowPlan:
    """How rows are made: `seq_len` tokens each, several samples in one if `packed`, else as long as the longest sample
    or pair (a multiple of `pad_multiple`). `fits` says whether a rank can run so many microbatches."""

    seq_len: int
    packed: bool
    pad_multiple: int
    microbatch_size: int
    pad_id: int
    fits: Callable[[int], bool] = lambda count: True


@dataclass(frozen=True)
class Update:
    """This rank's microbatches of one optimizer update, and where samples stand in them."""

    batches: list[Batch]
    spread: list[list[Spread]]

    def with_column(self, name: str, values: Sequence[Tensor]) -> Update:
        """Another column of `Batch.extra`, one tensor for each microbatch."""
        pairs = zip(self.batches, values, strict=True)
        return replace(self, batches=[b.with_columns(**{name: v}) for b, v in pairs])

    def with_values(self, name: str, values_N: Tensor, samples: Sequence[Sample]) -> Update:
        """A column that holds one value for each sample, at all its labels."""
        columns = []
        for batch, spread in zip(self.batches, self.spread, strict=True):
            column_BT = torch.zeros(batch.shape)
            for row, first, number in spread:
                sample = samples[number]
                column_BT[row, first : first + len(sample.tokens)] = values_N[number] * sample.generated_T()
            columns.append(column_BT)
        return self.with_column(name, columns)

    def with_pairs(self, pairs: Sequence[Sequence[int]]) -> Update:
        """`pairs_P2`: the documents of the samples of each pair, which share a row."""
        columns = []
        for batch, spread in zip(self.batches, self.spread, strict=True):
            documents_BT = batch.document_ids_BT
            found = {number: documents_BT[row, first].item() for row, first, number in spread}
            inside = [[found[number] for number in pair] for pair in pairs if pair[0] in found]
            columns.append(torch.tensor(inside, dtype=torch.int64).view(-1, 2))
        return self.with_column("pairs_P2", columns)


def plan_updates(
    samples: Sequence[Sample],
    trained: Sequence[Sequence[int]],
    num_updates: int,
    plan: RowPlan,
    *,
    dp_rank: int,
    dp_size: int,
) -> list[Update]:
    """The samples of these numbers in `num_updates` updates of about equal size, in their order; those that stand
    together in `trained` share a row. An update without any sample is left out. Every rank gets equally many
    microbatches, some of them without labels where rows run short.
    """
    parts = [part.tolist() for part in np.array_split(np.arange(len(trained)), num_updates)]
    return [_update(samples, [trained[i] for i in part], plan, dp_rank, dp_size) for part in parts if part]


def _update(
    samples: Sequence[Sample], chosen: Sequence[Sequence[int]], plan: RowPlan, dp_rank: int, dp_size: int
) -> Update:
    lengths = np.array([sum(samples[number].length for number in numbers) for numbers in chosen], np.int64)
    bins = best_fit_decreasing(lengths, plan.seq_len) if plan.packed else np.arange(len(chosen))
    rows: list[list[int]] = [[] for _ in range(int(bins.max()) + 1)]
    for numbers, row in zip(chosen, bins.tolist(), strict=True):
        rows[row] += numbers
    longest = -(-int(lengths.max()) // plan.pad_multiple) * plan.pad_multiple
    num_tokens = plan.seq_len if plan.packed else longest
    unit = plan.microbatch_size * dp_size
    count = -(-len(rows) // unit)
    while not plan.fits(count):
        count += 1
    rows += [[] for _ in range(count * unit - len(rows))]
    mine = [rows[first : first + plan.microbatch_size] for first in range(0, len(rows), plan.microbatch_size)]
    made = [_batch(samples, of_batch, num_tokens, plan.pad_id) for of_batch in mine[dp_rank::dp_size]]
    return Update([batch for batch, _ in made], [spread for _, spread in made])


def _batch(
    samples: Sequence[Sample], rows: Sequence[Sequence[int]], num_tokens: int, pad_id: int
) -> tuple[Batch, list[Spread]]:
    """Prompt and response of each sample are one document; labels are the tokens that the model drew."""
    shape = (len(rows), num_tokens)
    ids_BT = torch.full(shape, pad_id)
    labels_BT = torch.full(shape, IGNORE_INDEX)
    positions_BT = torch.zeros(shape, dtype=torch.int64)
    sampler_BT, rewards_BT = torch.zeros(shape), torch.zeros(shape)
    routed_BTC = _no_routing(samples, shape)
    bounds, spread = [], []
    for row, numbers in enumerate(rows):
        start = 0
        for number in numbers:
            sample = samples[number]
            span = slice(start, start + sample.length)
            first = start + len(sample.prompt.tokens) - 1
            labelled = slice(first, first + len(sample.tokens))
            ids_BT[row, span] = torch.tensor([*sample.prompt.tokens, *sample.tokens])
            positions_BT[row, span] = torch.arange(sample.length)
            generated_T = sample.generated_T()
            labels_BT[row, labelled] = torch.tensor(sample.tokens).masked_fill(~generated_T, IGNORE_INDEX)
            sampler_BT[row, labelled] = torch.tensor(sample.logprobs)
            rewards_BT[row, labelled] = sample.score.total * generated_T
            if routed_BTC is not None and sample.routed_experts is not None:
                known = slice(start, start + len(sample.routed_experts))
                routed_BTC[row, known] = torch.from_numpy(sample.routed_experts.astype(np.int16)).flatten(1)
            spread.append((row, first, number))
            bounds.append(row * num_tokens + start)
            start += sample.length
        if start < num_tokens:
            positions_BT[row, start:] = torch.arange(num_tokens - start)
            bounds.append(row * num_tokens + start)
    bounds.append(len(rows) * num_tokens)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    batch = Batch(
        input_ids_BT=ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=positions_BT,
        cu_seqlens=cu_seqlens,
        max_seqlen=int(cu_seqlens.diff().max()),
        row_ids_B=torch.tensor([samples[numbers[0]].prompt.number if numbers else -1 for numbers in rows]),
        extra={
            "sampler_logprobs_BT": sampler_BT,
            "rewards_BT": rewards_BT,
            **({} if routed_BTC is None else {ROUTED_EXPERTS: routed_BTC}),
        },
    )
    return batch, spread


def _no_routing(samples: Sequence[Sample], shape: tuple[int, int]) -> Tensor | None:
    """`ROUTED_EXPERTS` with nothing known, of the width that the samples of the step have; None where none has any."""
    known = next((sample.routed_experts for sample in samples if sample.routed_experts is not None), None)
    return None if known is None else torch.full((*shape, known[0].size), -1, dtype=torch.int16)


def kl_sums(updates: Sequence[Update], samples: Sequence[Sample], kl_type: str) -> Tensor:
    """KL(policy || reference) of each sample on this rank, summed over its tokens; float64 `[N]`, 0 for the others."""
    sums_N = torch.zeros(len(samples), dtype=torch.float64)
    for update in updates:
        for batch, spread in zip(update.batches, update.spread, strict=True):
            old_BT, ref_BT = (batch.extra[f"{name}_logprobs_BT"].cpu() for name in ("old", "ref"))
            kl_BT = kl_penalty(old_BT, ref_BT, kl_type)  # type: ignore[arg-type]
            for row, first, number in spread:
                sample = samples[number]
                kl_T = kl_BT[row, first : first + len(sample.tokens)].double()
                sums_N[number] = kl_T[sample.generated_T()].sum()
    return sums_N
