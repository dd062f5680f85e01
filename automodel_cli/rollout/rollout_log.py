"""Reports of rollouts: rollouts.jsonl, sample tables, values of the step line, and warnings."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from automodel_cli.config.security.safe_files import open_own
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.monitoring.reward_statistics import counted, has_reward, mean_reward
from automodel_cli.rollout.rollout_result import Rollout
from automodel_cli.rollout.types import Sample
from automodel_cli.run.heldout_accuracy import Accuracy, Answer
from automodel_cli.runs.rollouts import conversation_text
from automodel_cli.training.metrics_file import keep_rows_until

_WIDTH, _MOST = 118, 60
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)


class RolloutLog:
    """Appends to `rollouts.jsonl` (rank 0), one line a sample. Lines of steps that are trained again are removed."""

    def __init__(self, run_dir: Path, resume_step: int, *, is_main: bool):
        self._file = None
        if is_main:
            path = run_dir / "rollouts.jsonl"
            keep_rows_until(path, resume_step)
            self._file = open_own(path, "a")

    def write(self, step: int, rollout: Rollout) -> None:
        """Every sample of the step."""
        if self._file is None:
            return
        trained = set(rollout.trained)
        for number, (sample, advantage) in enumerate(zip(rollout.samples, rollout.advantages_N.tolist(), strict=True)):
            row = {
                "step": step,
                "prompt": sample.prompt.messages,
                "completion": sample.text,
                **(
                    {"turns": sample.response_messages, "environment": sample.environment}
                    if sample.response_messages
                    else {}
                ),
                "reward": sample.score.total,
                "parts": sample.score.parts,
                "errors": sample.score.errors,
                "advantage": advantage,
                "trained": number in trained,
                "num_tokens": sample.num_generated,
                "finish_reason": sample.finish_reason,
                "weight_version": sample.weight_version,
                "origin": sample.prompt.origin,
            }
            self._file.write(_ENCODER.encode(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def sample_table(step: int, rollout: Rollout, count: int) -> str:
    """The best and the worst samples of the first groups that have something to teach, as text."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"samples of step {step}", title_justify="left")
    for name in ("prompt", "completion", "reward", "advantage", "end"):
        table.add_column(name, justify="right" if name in ("reward", "advantage") else "left")
    for number in _telling(rollout, count):
        sample = rollout.samples[number]
        table.add_row(
            _cut(str(sample.prompt.messages[-1]["content"])),
            _cut(conversation_text(sample.text, sample.response_messages)),
            f"{sample.score.total:.3g}",
            f"{rollout.advantages_N[number].item():+.2f}",
            f"{sample.finish_reason}, {sample.num_generated}",
        )
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH, markup=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _telling(rollout: Rollout, count: int) -> list[int]:
    """Of each group the highest and the lowest advantage, groups with a difference first."""
    groups: dict[int, list[int]] = {}
    for number, sample in enumerate(rollout.samples):
        groups.setdefault(sample.place, []).append(number)
    advantage = rollout.advantages_N.tolist()
    order = sorted(groups.values(), key=lambda numbers: not bool(rollout.differs_N[numbers[0]]))
    chosen = []
    for numbers in order:
        best, worst = max(numbers, key=lambda n: advantage[n]), min(numbers, key=lambda n: advantage[n])
        chosen += [best] if best == worst else [best, worst]
    return chosen[:count]


def _cut(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _MOST else f"{flat[: _MOST - 4]} ..."


def disagreement_warning(value: float, limit: float) -> str | None:
    """Return a warning if the probabilities of sampler and trainer differ by more than `limit`, else None."""
    if value <= limit:
        return None
    return (
        f"WARNING: sampler and trainer disagree: sampled tokens are {value:.3f} times as likely to one as to the other "
        f"on average (rollout.warn_token_mult_prob_error={limit}). Ratios and KL have the same error"
    )


def too_few(step: int, samples: Sequence[Sample], equal: Sequence[Sample], config: RolloutConfig) -> str:
    """Return the warning of dynamic sampling with too few groups of different rewards (`samples`)."""
    dynamic = config.dynamic_sampling
    assert dynamic is not None
    num_groups, mean = len(samples) // config.group_size, mean_reward(equal)
    others = (
        "the others were excluded after errors" if math.isnan(mean) else f"the mean reward of the others is {mean:.3g}"
    )
    return (
        f"WARNING: step {step}: after {dynamic.max_gen_batches} batches of prompts {num_groups} of "
        f"{config.prompts_per_step} "
        f"groups have different rewards ({others}). The step trains on these groups. num_zero_std_groups and "
        "num_sampled in metrics.jsonl count later steps. Use prompts of medium difficulty, a larger "
        "rollout.group_size or a higher rollout.temperature"
    )


def reward_line(samples: Sequence[Sample], when: str) -> str:
    """Return a line with the mean reward on held-out prompts, and of each `kind` of rows. None without rewards."""
    if not has_reward(samples):
        return ""
    judged = counted(samples)
    if not judged:
        return f"reward {when} training: none, all {len(samples)} held-out prompts were excluded after errors"
    kinds: dict[str, list[float]] = {}
    for sample in judged:
        kinds.setdefault(str(sample.prompt.row.get("kind", "")), []).append(sample.score.total)
    means = "  ".join(f"{kind} {sum(rewards) / len(rewards):.2f}" for kind, rewards in sorted(kinds.items()) if kind)
    text = f"reward {when} training: {mean_reward(judged):.3f}, the mean of {len(judged)} held-out prompts"
    if len(judged) < len(samples):
        text += f" ({len(samples) - len(judged)} more were excluded after errors)"
    return f"{text} ({means})" if means else text


def accuracy_of(samples: Sequence[Sample], check_answer: Callable[[str, str], bool]) -> Accuracy:
    """Return the responses as correct and wrong answers, for the report."""
    return Accuracy(
        tuple(
            Answer(
                question=str(sample.prompt.messages[-1]["content"]),
                completion=sample.text,
                answer=str(sample.prompt.row["answer"]),
                correct=not sample.truncated and check_answer(sample.text, sample.prompt.row["answer"]),
                kind=str(sample.prompt.row.get("kind", "")),
            )
            for sample in samples
        )
    )
