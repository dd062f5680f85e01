"""What the step asks of an objective. An objective sees what the head gives for each token (`HeadOutput`),
returns sums, and never divides.

Columns of `Batch.extra` that objectives read, and recipes fill (a document of the batch is a sequence: a response with
its prompt; tokens whose label is ignored are not read):

- `pairs_P2` int64 (DPO, BradleyTerry, OnlineDPO): documents of the chosen and the rejected response of each pair
- `partners_P2` fp32 (DPO with `aot`, `aot_unpaired`): what the sorted values of each pair are compared with
- `sharpened_logprobs_BT` fp32 (DPO with `wpo`): log-probs of the labels at temperature 1/2
- `margins_P` fp32 (BradleyTerry): how much better the chosen response of each pair is; 0 where the data does not say
- `desirable_S` int64 (KTO): per document 1 for a desirable response, 0 for an undesirable one, -1 for neither
- `kl_baseline_1` fp32 (KTO): the reference point of the step, the same in all its microbatches
- `ref_logprobs_BT` fp32 (DPO, KTO, GRPO): log-probs of the labels under the reference model
- `advantages_BT` fp32 (GRPO): the advantage of each label token
- `sampler_logprobs_BT` fp32 (GRPO): log-probs under the distribution that the tokens were drawn from
- `old_logprobs_BT` fp32 (GRPO): log-probs under the trainer's weights at the time of the rollout; left out of the only
  update of a rollout, whose own log-probs they are
- `uncertain_BT` fp32 (GRPO with `top_entropy_fraction`): 1 for the tokens that the policy loss is of, 0 for the others
- `old_values_BT`, `returns_BT` fp32 (PPO): what the critic made of each label token at the time of the rollout, and
  what it should have made of it
- `teacher_ids_BTN` int64, `teacher_logprobs_BTN` fp32 (Distillation): the tokens that a teacher thinks likeliest in
  each label's place, largest first, and their log-probs
- `rewards_BT` fp32 (GRPO with `positive_nll_coef`): the reward of the token's document
- `positive_scale_1` fp32 (GRPO with `positive_nll_coef`; the step fills it): the step's `weight` over its label
tokens with
  a reward above 0, and 0 without any
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

from automodel_cli.data.head_output import LOGPROBS, HeadRequest
from automodel_cli.objectives.kl import KLType, kl_penalty

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput

ReferenceSource = Literal["auto", "precomputed", "disable_adapter", "frozen_copy"]
"""Where the log-probs of the reference model come from: see `automodel_cli/run/frozen_models/reference_logprobs.py`."""


class Objective(Protocol):
    """`objective(output, batch)` summed over all microbatches and ranks, divided by the sum of `weight(batch)`,
    is the loss. Both are sums over the batch, so neither the number of ranks nor that of microbatches changes the
    gradient.
    """

    def weight(self, batch: Batch) -> Tensor:
        """What this batch adds to the denominator (label tokens, pairs, sequences): scalar on the batch's device."""
        ...

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        """fp32 scalar with gradient: the batch's SUM, to be minimised."""
        ...


class TermWeights(Objective, Protocol):
    """An objective with terms that have denominators of their own: one that has `term_weights`."""

    def term_weights(self, batch: Batch) -> Mapping[str, Tensor]:
        """Column of `Batch.extra` -> what this batch adds to that term's denominator: a scalar, the same names in every
        batch. The step fills each column with the sum of `weight` over the sum of the term (0 where that is 0), so a
        term's sum times its column, divided by `weight`, is a mean over the term's own tokens.
        """
        ...


def term_weights_of(objective: Objective, batch: Batch) -> Mapping[str, Tensor]:
    """What `TermWeights` says; nothing for an objective without, which need not have it."""
    ask: Callable[[Batch], Mapping[str, Tensor]] | None = getattr(objective, "term_weights", None)
    return {} if ask is None else ask(batch)


class PreferenceObjective(Objective, Protocol):
    """An objective on pairs or judged responses, for recipes of kind dpo."""

    @property
    def columns(self) -> frozenset[str]:
        """What it reads of `Batch.extra`, by the names above: `pairs_P2` or `desirable_S` says which rows it is for,
        `ref_logprobs_BT` that there is a reference model, `kl_baseline_1` that each step measures the reference
        point."""
        ...


@dataclass(frozen=True)
class RewardKL:
    """A KL to the reference that is taken off each sample's reward: `coef` x estimate `kl_type`, summed over tokens.
    The clamps are those of `GRPO` (None: no clamp)."""

    coef: float
    kl_type: KLType
    input_clamp: float | None = 20.0
    output_clamp: float | None = 10.0

    def of(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """What is taken off at each token; float64."""
        return self.coef * kl_penalty(
            logprobs.double(),
            ref_logprobs.double(),
            self.kl_type,
            input_clamp=self.input_clamp,
            output_clamp=self.output_clamp,
        )


class PolicyObjective(Objective, Protocol):
    """An objective on sampled responses, for recipes of kind grpo."""

    @property
    def columns(self) -> frozenset[str]:
        """What it reads of `Batch.extra`, by the names above. Without `old_logprobs_BT` it is right for one update per
        rollout only; `ref_logprobs_BT` says that there is a reference model."""
        ...

    @property
    def reward_kl(self) -> RewardKL | None:
        """The KL that the recipe takes off the rewards; None for none."""
        ...

    @property
    def corrects_staleness(self) -> bool:
        """Whether samples of older weights are weighed, so that `rollout.max_off_policy_steps` may be above 0."""
        ...


class SelectingObjective(PolicyObjective, Protocol):
    """A policy objective that trains on some samples of each group, with the log-probs of the model as it is (whatever
    `rollout.temperature` samples were drawn at): one that has `select`."""

    @property
    def samples_of_group(self) -> int:
        """The most that it takes of a group."""
        ...

    def select(self, rewards_N: Tensor, groups_N: Tensor, valid_N: Tensor) -> list[tuple[int, ...]]:
        """Numbers of the samples to train on; those of one tuple share a row. `rewards_N` float64, `groups_N` int64
        (equal for the samples of one prompt), `valid_N` bool: the others are not to be taken."""
        ...


def selection_of(objective: PolicyObjective) -> SelectingObjective | None:
    """The objective itself where it chooses samples."""
    return cast(SelectingObjective, objective) if hasattr(objective, "select") else None


@dataclass(frozen=True)
class Metric:
    """How the values of microbatches become one number of the step: combined over all microbatches and ranks, and
    then, where `per` names another metric (a count), divided by that one's sum. `shown`: also on the step line.
    """

    per: str | None = None
    combine: Literal["sum", "min", "max"] = "sum"
    shown: bool = False


class RequestingObjective(Objective, Protocol):
    """An objective that reads more of `HeadOutput` than the log-probs of labels: one that has `needs`."""

    @property
    def needs(self) -> HeadRequest:
        """Which other fields."""
        ...


def request_of(objective: Objective) -> HeadRequest:
    """What the head must give for this objective."""
    needs: HeadRequest = getattr(objective, "needs", LOGPROBS)
    return needs


class MeasuredObjective(Objective, Protocol):
    """An objective that reports more than its loss: one that has `metrics`."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Every name that `measure` returns, the same on all ranks, known before anything runs."""
        ...

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """fp32 scalars of this batch, by the names in `metrics`: sums (never means), smallest or largest values.
        Called without gradient.
        """
        ...


def metrics_of(objective: Objective) -> Mapping[str, Metric]:
    """What an objective reports besides its loss; nothing for one without `metrics`, which need not have them."""
    declared: Mapping[str, Metric] = getattr(objective, "metrics", {})
    return declared
