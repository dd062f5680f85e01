"""Interfaces of objectives. An objective reads `HeadOutput` per token, returns sums, and does not divide.

Recipes fill the columns of `Batch.extra` that objectives read. A document of the batch is a sequence: a prompt with its
response. Tokens with an ignored label are not read.

| column | dtype | objective | content |
|---|---|---|---|
| `pairs_P2` | int64 | DPO, BradleyTerry, OnlineDPO | documents of the chosen and rejected response of each pair |
| `partners_P2` | fp32 | DPO with `aot`, `aot_unpaired` | values that the sorted values of each pair are compared with |
| `sharpened_logprobs_BT` | fp32 | DPO with WPO weighting | log-probs of the labels at temperature 1/2 |
| `margins_P` | fp32 | BradleyTerry | margin of each pair; 0 if the data has none |
| `desirable_S` | int64 | KTO | 1 for a desirable response, 0 for an undesirable one, -1 for neither |
| `kl_baseline_1` | fp32 | KTO | reference point of the step, equal in all microbatches |
| `class_ids_S`, `class_ids_BT` | int64 | SingleLabel | class of each document or token; -1 without a label |
| `targets_SL` | fp32 | MultiLabel, Regression | targets of each document; NaN without a label |
| `roles_S` | int64 | InfoNCE, CosineScore | 0 for a query, 1 for its passage, 2 for a negative, -1 for padding |
| `scores_S` | fp32 | CosineScore | score of the pair of each document |
| `query_losses_S` | fp32 | InfoNCE, CosineScore | loss of each query, 0 for other documents |
| `pooled_gradients_SD` | fp32 | InfoNCE, CosineScore | gradient of the sum of losses of the step for each embedding |
| `ref_logprobs_BT` | fp32 | DPO, KTO, GRPO | log-probs of the labels under the reference model |
| `advantages_BT` | fp32 | GRPO | advantage of each label token |
| `sampler_logprobs_BT` | fp32 | GRPO | log-probs under the sampling distribution |
| `old_logprobs_BT` | fp32 | GRPO | log-probs under the weights before the first update; absent if a rollout has one
    update |
| `uncertain_BT` | fp32 | GRPO with `top_entropy_fraction` | 1 for tokens with a policy loss, 0 for the others |
| `old_values_BT`, `returns_BT` | fp32 | PPO | values of the critic at the rollout, and their targets |
| `sources_B` | int64 | `sources.WithSourceLosses` | dataset of each row, -1 for none; if a run has several |
| `loss_weights_B` | fp32 | SFT | loss weight of each row's dataset; if one differs from 1 |
| `teacher_ids_BTN` | int64 | Distillation | the teacher's most likely tokens, in descending order |
| `teacher_logprobs_BTN` | fp32 | Distillation | log-probs of these tokens |
| `label_bytes_BT` | int64 | NextToken | UTF-8 bytes of each label; 0 for special tokens and ignored labels |
| `rewards_BT` | fp32 | GRPO with `positive_nll_coef` | reward of the token's document |
| `positive_scale_1` | fp32 | GRPO with `positive_nll_coef` | `weight` of the step / its label tokens with a positive
    reward, 0 without any; filled by the step |
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
"""Source of the reference log-probs: see `automodel_cli/run/frozen_models/reference_logprobs.py`."""


class Objective(Protocol):
    """Loss of a recipe.

    The loss is the sum of `objective(output, batch)` over all microbatches and ranks, divided by the sum of
    `weight(batch)`. Both are sums over the batch, so the gradient does not depend on the number of ranks or
    microbatches.
    """

    def weight(self, batch: Batch) -> Tensor:
        """Return the contribution of this batch to the denominator (label tokens, pairs, sequences): a scalar on the
        batch's device."""
        ...

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        """Return the SUM over the batch, to be minimized: an fp32 scalar with gradient."""
        ...


class TermWeights(Objective, Protocol):
    """Objective with `term_weights`: some terms have their own denominators."""

    def term_weights(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the contribution of this batch to the denominator of each term, by column of `Batch.extra`.

        Scalars, with the same names in every batch. The step fills each column with the sum of `weight` divided by the
        sum of the term (0 if that is 0). The sum of a term times its column, divided by `weight`, is then a mean over
        the term's own tokens.
        """
        ...


def term_weights_of(objective: Objective, batch: Batch) -> Mapping[str, Tensor]:
    """Return `term_weights` of the objective, empty if it does not define them."""
    term_weights: Callable[[Batch], Mapping[str, Tensor]] | None = getattr(objective, "term_weights", None)
    return {} if term_weights is None else term_weights(batch)


class PreferenceObjective(Objective, Protocol):
    """Objective on pairs or labeled responses, for recipes of kind dpo."""

    @property
    def columns(self) -> frozenset[str]:
        """Columns of `Batch.extra` that the objective reads.

        `pairs_P2` or `desirable_S` selects the kind of data. `ref_logprobs_BT` requires a reference model.
        `kl_baseline_1` requires that each step measures the reference point.
        """
        ...


@dataclass(frozen=True)
class RewardKL:
    """KL to the reference that is subtracted from the reward: `coef` x estimate `kl_type`, summed over tokens.

    The clamps are those of `GRPO` (None: no clamp).
    """

    coef: float
    kl_type: KLType
    input_clamp: float | None = 20.0
    output_clamp: float | None = 10.0

    def of(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Return the penalty per token, float64."""
        return self.coef * kl_penalty(
            logprobs.double(),
            ref_logprobs.double(),
            self.kl_type,
            input_clamp=self.input_clamp,
            output_clamp=self.output_clamp,
        )


class PolicyObjective(Objective, Protocol):
    """Objective on sampled responses, for recipes of kind grpo."""

    @property
    def columns(self) -> frozenset[str]:
        """Columns of `Batch.extra` that the objective reads.

        Without `old_logprobs_BT`, it supports one update per rollout. `ref_logprobs_BT` requires a reference model.
        """
        ...

    @property
    def reward_kl(self) -> RewardKL | None:
        """The KL that the recipe subtracts from rewards, None for none."""
        ...

    @property
    def corrects_staleness(self) -> bool:
        """Whether samples of older weights are corrected, which `rollout.max_off_policy_steps` above 0 requires."""
        ...


class SelectingObjective(PolicyObjective, Protocol):
    """Policy objective with `select`: trains on some samples of each group.

    Log-probs are those of the model at temperature 1, independent of `rollout.temperature`.
    """

    @property
    def samples_of_group(self) -> int:
        """Maximum number of selected samples of a group."""
        ...

    def select(self, rewards_N: Tensor, groups_N: Tensor, valid_N: Tensor) -> list[tuple[int, ...]]:
        """Return the indices of the samples to train on. Samples of one tuple share a row.

        Args:
            rewards_N: float64.
            groups_N: int64, equal for the samples of one prompt.
            valid_N: bool. Other samples must not be selected.
        """
        ...


def selection_of(objective: PolicyObjective) -> SelectingObjective | None:
    """Return the objective if it selects samples, else None."""
    return cast(SelectingObjective, objective) if hasattr(objective, "select") else None


@dataclass(frozen=True)
class Metric:
    """How values of microbatches are combined to one value of the step.

    combine: over all microbatches and ranks.
    per: name of another metric (a count) by whose sum the result is divided.
    shown: also printed on the step line.
    """

    per: str | None = None
    combine: Literal["sum", "min", "max"] = "sum"
    shown: bool = False


class RequestingObjective(Objective, Protocol):
    """Objective with `needs`: reads more of `HeadOutput` than log-probs of labels."""

    @property
    def needs(self) -> HeadRequest:
        """The other fields that it reads."""
        ...


def request_of(objective: Objective) -> HeadRequest:
    """Return the head outputs that this objective reads."""
    needs: HeadRequest = getattr(objective, "needs", LOGPROBS)
    return needs


class MeasuredObjective(Objective, Protocol):
    """Objective with `metrics`: reports more than its loss."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """All names that `measure` returns. Equal on all ranks and known before the run."""
        ...

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """Return fp32 scalars of this batch by the names in `metrics`: sums (never means), minima or maxima.

        Called without gradient.
        """
        ...


def metrics_of(objective: Objective) -> Mapping[str, Metric]:
    """Return the metrics of the objective, empty if it does not define any."""
    declared: Mapping[str, Metric] = getattr(objective, "metrics", {})
    return declared
