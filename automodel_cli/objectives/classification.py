"""Classification objectives: scores of documents or tokens, trained on labels. Torch-free to import.

| class | loss of an example | denominator |
|---|---|---|
| `SingleLabel` | cross-entropy x weight of the class | sum of these weights |
| `MultiLabel` | mean over labels of binary cross-entropy, positives x weight of the label | examples |
| `Regression` | mean over targets of the squared error | examples |

The same sums as `torch.nn.CrossEntropyLoss(weight=...)`, `BCEWithLogitsLoss(pos_weight=...)` and `MSELoss` with
`reduction="mean"`, over the examples of all ranks and microbatches.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import mapping_override
from automodel_cli.data.head_output import HeadRequest
from automodel_cli.objectives.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
"""As `problem_type` in configs of transformers."""


class Classification:
    """Base of the objectives that compare scores with targets. Subclasses implement `losses` and `metrics`.

    Examples are documents, whose score is that of their last token.
    """

    problem: ClassVar[Problem]
    labels: list[str]

    @property
    def of_tokens(self) -> bool:
        """Whether each token is an example."""
        return False

    @property
    def needs(self) -> HeadRequest:
        """See `RequestingObjective`."""
        return HeadRequest(scores=len(self.labels), logprobs=False)

    @property
    def columns(self) -> frozenset[str]:
        """The column of `Batch.extra` with the targets."""
        return frozenset({"targets_SL"})

    def scores(self, output: HeadOutput, batch: Batch) -> Tensor:
        """Return the scores of all documents (padding included) or tokens of the batch, `[N, L]`."""
        assert output.scores_BTL is not None, "a classifier needs scores"
        # [B, T, L] -> [B * T, L]. A causal model's last token is the only one that has seen the whole document.
        scores_NL = output.scores_BTL.flatten(0, 1)
        return scores_NL if self.of_tokens else scores_NL[batch.cu_seqlens[1:].long() - 1]

    def labeled(self, scores_NL: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the scores and targets of the examples that have a target: `[examples, L]`, and `[examples]` or
        `[examples, L]`. `batch` is on the device of the scores, and the number of examples is read from it.
        """
        targets = self._targets(batch)
        is_labeled_N = self._is_labeled(targets)
        return scores_NL[is_labeled_N], targets[is_labeled_N]

    @abstractmethod
    def losses(self, scores_NL: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example."""

    def weights(self, targets: Tensor) -> Tensor:
        """Return the contribution of each example to the denominator, fp32. 0 without a target."""
        return self._is_labeled(targets).float()

    def weight(self, batch: Batch) -> Tensor:
        """Return the denominator of this batch."""
        return self.weights(self._targets(batch)).sum()

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        scores_NL, targets = self.scores(output, batch), self._targets(batch)
        is_labeled_N = self._is_labeled(targets)
        # nan targets would give nan gradients even with weight 0, so they are replaced before the loss and masked after
        # it.
        known = targets.where(is_labeled_N.view(-1, *[1] * (targets.ndim - 1)), targets.new_zeros(()))
        return self.losses(scores_NL, known).where(is_labeled_N, 0.0).sum()

    def _targets(self, batch: Batch) -> Tensor:
        (name,) = self.columns
        return batch.extra[name].flatten() if self.of_tokens else batch.extra[name]

    def _is_labeled(self, targets: Tensor) -> Tensor:
        return ~targets.isnan().any(1) if targets.ndim == 2 else targets >= 0


@dataclass(frozen=True, kw_only=True)
class SingleLabel(Classification):
    """Cross-entropy of one label per text, or per token with `token_level`.

    Example: scores 2 and 0 for a text of the first class give a loss of log(1 + e^-2) = 0.127.

    Metric: `accuracy`, over the examples of all ranks.
    """

    labels: list[str] = field(default_factory=list)
    """Names of the classes, in the order of the outputs."""
    class_weights: dict[str, float] = field(default_factory=dict)
    """Weight of the loss of each class by name, as `weight` of `torch.nn.CrossEntropyLoss`. Others have weight 1."""
    token_level: bool = False
    """Classify every token (named entities) instead of every text. Rows then have `tokens` and `tags`."""

    problem: ClassVar[Problem] = "single_label_classification"

    def __post_init__(self) -> None:
        check_labels(self.labels, at_least=2)
        check_weights(self.class_weights, self.labels)

    @property
    def of_tokens(self) -> bool:
        return self.token_level

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({"class_ids_BT" if self.token_level else "class_ids_S"})

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `MeasuredObjective`."""
        return {"accuracy": Metric("num_examples", shown=True), "num_examples": Metric()}

    def losses(self, scores_NL: Tensor, targets: Tensor) -> Tensor:
        loss_N = -scores_NL.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return loss_N * self._of_class(targets)

    def weights(self, targets: Tensor) -> Tensor:
        return self._of_class(targets.clamp(min=0)) * self._is_labeled(targets)

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """See `MeasuredObjective`."""
        scores_NL, targets_N = self.scores(output, batch), self._targets(batch)
        return {"accuracy": (scores_NL.argmax(1) == targets_N).sum(), "num_examples": (targets_N >= 0).sum()}

    def _of_class(self, targets_N: Tensor) -> Tensor:
        return weights_of(self.class_weights, self.labels, targets_N)[targets_N]


@dataclass(frozen=True, kw_only=True)
class MultiLabel(Classification):
    """Binary cross-entropy of each label: a text has any number of them.

    Metric: `accuracy`, the fraction of texts whose labels are all right at a score of 0, over all ranks.
    """

    labels: list[str] = field(default_factory=list)
    """Names of the labels, in the order of the outputs."""
    class_weights: dict[str, float] = field(default_factory=dict)
    """Weight of the positive examples of each label by name, as `pos_weight` of `torch.nn.BCEWithLogitsLoss`. Others
    have weight 1."""

    problem: ClassVar[Problem] = "multi_label_classification"

    def __post_init__(self) -> None:
        check_labels(self.labels, at_least=1)
        check_weights(self.class_weights, self.labels)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `MeasuredObjective`."""
        return {"accuracy": Metric("num_examples", shown=True), "num_examples": Metric()}

    def losses(self, scores_NL: Tensor, targets: Tensor) -> Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        positive_L = weights_of(self.class_weights, self.labels, targets)
        return binary_cross_entropy_with_logits(
            scores_NL, targets.to(scores_NL.dtype), pos_weight=positive_L, reduction="none"
        ).mean(1)

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """See `MeasuredObjective`."""
        scores_NL, targets_NL = self.scores(output, batch), self._targets(batch)
        is_labeled_N = self._is_labeled(targets_NL)
        right_N = ((scores_NL > 0) == (targets_NL > 0.5)).all(1) & is_labeled_N
        return {"accuracy": right_N.sum(), "num_examples": is_labeled_N.sum()}


@dataclass(frozen=True, kw_only=True)
class Regression(Classification):
    """Squared error of one or several numbers per text.

    Metric: `mae`, the mean absolute error over all ranks.
    """

    labels: list[str] = field(default_factory=lambda: ["score"])
    """Names of the numbers, in the order of the outputs."""

    problem: ClassVar[Problem] = "regression"

    def __post_init__(self) -> None:
        check_labels(self.labels, at_least=1)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `MeasuredObjective`."""
        return {"mae": Metric("num_examples", shown=True), "num_examples": Metric()}

    def losses(self, scores_NL: Tensor, targets: Tensor) -> Tensor:
        return (scores_NL - targets).square().mean(1)

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """See `MeasuredObjective`."""
        scores_NL, targets_NL = self.scores(output, batch), self._targets(batch)
        errors_N = (scores_NL - targets_NL).abs().mean(1)
        is_labeled_N = self._is_labeled(targets_NL)
        return {"mae": errors_N.where(is_labeled_N, 0.0).sum(), "num_examples": is_labeled_N.sum()}


def weights_of(weights: Mapping[str, float], labels: list[str], like: Tensor) -> Tensor:
    """Return the weight of each label, fp32 `[L]` on the device of `like`."""
    import torch

    return torch.tensor([weights.get(label, 1.0) for label in labels], dtype=torch.float32, device=like.device)


def check_labels(labels: list[str], *, at_least: int) -> None:
    """Raise ConfigError for too few labels, and for equal ones."""
    if len(labels) < at_least:
        raise ConfigError(
            f"labels has {len(labels)} names, but must have at least {at_least}",
            code="missing_key" if not labels else "out_of_range",
            keys=("labels",),
            fix="objective.labels=[negative,positive]",
        )
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(
            f"labels contains {repeated[0]!r} {labels.count(repeated[0])} times, but each name must occur once",
            code="invalid_value",
            keys=("labels",),
            fix=f"objective.labels=[{','.join(dict.fromkeys(labels))}]",
        )


def check_weights(weights: Mapping[str, float], labels: list[str]) -> None:
    """Raise ConfigError for weights of unknown labels, and for those that are not positive.

    The fix keeps all others. The most similar label without a weight replaces an unknown one.
    """
    unknown = [name for name in weights if name not in labels]
    small = [name for name, weight in weights.items() if not (weight > 0 and math.isfinite(weight))]
    if not unknown and not small:
        return
    kept: dict[str, float] = {}
    for name, weight in weights.items():
        free = [label for label in labels if label not in weights and label not in kept]
        near = [name] if name in labels else get_close_matches(name, free, 1, 0.0)
        kept |= dict.fromkeys(near[:1], 1.0 if name in small else weight)
    if unknown:
        message = f"class_weights has {unknown[0]!r}, which is not in labels: {', '.join(labels)}"
    else:
        message = f"class_weights.{small[0]}={weights[small[0]]:g} must be finite and greater than 0"
    raise ConfigError(
        message,
        code="unknown_name" if unknown else "out_of_range",
        keys=("class_weights", "labels") if unknown else ("class_weights",),
        fix=mapping_override("objective.class_weights", kept) or "objective.class_weights={}",
    )
