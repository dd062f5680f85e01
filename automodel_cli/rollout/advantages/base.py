"""Interface of custom advantage estimators. Torch-free at import."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from automodel_cli.config.errors import RunError
from automodel_cli.config.schema import wraps_functions
from automodel_cli.rollout.types import Sample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RewardedSamples:
    """The N samples of a step, of all ranks in one order.

    rewards_N: float64, with the KL term if `objective.kl_placement=reward`.
    groups_N: int64, the prompt of each sample.
    valid_N: bool. Other samples are not trained, and should not affect baselines.
    samples: prompt, tokens, text, parts of the reward and environment of each sample.
    """

    rewards_N: Tensor
    groups_N: Tensor
    valid_N: Tensor
    samples: Sequence[Sample]


@wraps_functions("automodel_cli.rollout.advantages.base.FunctionEstimator")
class AdvantageNode(Protocol):
    """Interface of a node in `rollout.advantage_estimator`.

    Every rank calls `estimate` with the same samples, before log-probs are computed and again afterwards. The result
    must depend on its argument only.
    """

    @abstractmethod
    def estimate(self, samples: RewardedSamples) -> Tensor:
        """Return the advantage of each sample, `[N]`. A group whose advantages are all 0 is not trained."""
        ...


@dataclass(frozen=True)
class FunctionEstimator:
    """An estimator by a function: `function: {_target_: mine.advantages, _partial_: true}`."""

    function: Callable[[RewardedSamples], Tensor]
    """Your function. It receives `RewardedSamples` and returns a tensor `[N]`."""

    def estimate(self, samples: RewardedSamples) -> Tensor:
        """Call the function."""
        return self.function(samples)


def estimated(node: AdvantageNode, samples: RewardedSamples) -> Tensor:
    """Return the advantages by a custom estimator, float64 `[N]`. Raises RunError if it fails."""
    name = type(node).__name__
    try:
        advantages_N = node.estimate(samples)
    except Exception as error:
        raise RunError(
            f"rollout.advantage_estimator={name} raised {type(error).__name__}: {error}",
            code="estimator_failed",
            keys=("rollout.advantage_estimator",),
        ) from error
    shape = getattr(advantages_N, "shape", None)
    if shape != samples.rewards_N.shape or not bool(advantages_N.isfinite().all()):
        found = f"a tensor of shape {tuple(shape)}" if shape is not None else f"a {type(advantages_N).__name__}"
        reason = "values that are not finite" if shape == samples.rewards_N.shape else found
        raise RunError(
            f"rollout.advantage_estimator={name} returned {reason}, but it must return {len(samples.rewards_N)} finite "
            "numbers, one for each sample",
            code="estimator_failed",
            keys=("rollout.advantage_estimator",),
        )
    return advantages_N.detach().cpu().double()
