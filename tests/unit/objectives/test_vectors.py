"""Every row of tests/vectors/losses.json: value, gradient and metrics as other implementations give them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.advantages import group_advantages
from automodel_cli.objectives.denominators import with_denominators
from automodel_cli.objectives.dpo import DPO
from automodel_cli.objectives.grpo import GRPO
from automodel_cli.objectives.sft import SFT

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "losses.json").read_text())
TOLERANCE = 1e-6  # the file has six decimals
_KL = {"kl_type": "reference_policy_kl_type", "kl_bias_correction": "use_on_policy_kl_approximation"}


def rows_as_batch(token_mask: Tensor, sample_mask: Tensor, **columns: Tensor) -> Batch:
    """Rows of S tokens as a batch of documents: the label of a token is the one after it, where that is unmasked."""
    rows, tokens = token_mask.shape
    counts = token_mask[:, 1:].bool() & sample_mask[:, None].bool()
    labels_BT = torch.full((rows, tokens), IGNORE_INDEX)
    labels_BT[:, :-1] = torch.where(counts, 7, IGNORE_INDEX)
    return Batch(
        input_ids_BT=torch.zeros(rows, tokens, dtype=torch.int64),
        labels_BT=labels_BT,
        position_ids_BT=torch.arange(tokens).expand(rows, tokens),
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32) * tokens,
        max_seqlen=tokens,
        row_ids_B=torch.arange(rows),
        extra=columns,
    )


def judge(objective: Any, batch: Batch, next_token_logprobs: Tensor) -> tuple[float, Tensor, dict[str, float]]:
    """(loss, gradient by next-token log-prob, metrics) as a step of this batch alone would report them."""
    leaf = next_token_logprobs.double().requires_grad_()
    logprobs_BT = torch.nn.functional.pad(leaf, (0, 1)).masked_fill(batch.labels_BT == IGNORE_INDEX, 0.0)
    output = HeadOutput(logprobs_BT, entropy_BT=torch.full_like(logprobs_BT, 0.5))
    weight, (batch,) = with_denominators(objective, [batch])
    loss = objective(output, batch) / weight
    loss.backward()
    if isinstance(objective, SFT):
        return loss.item(), leaf.grad, {}
    rules = objective.metrics
    sums = objective.measure(output.detach(), batch)
    assert set(sums) == set(rules)
    values = {n: (v / sums[rules[n].per] if rules[n].per else v).item() for n, v in sums.items()}
    return loss.item(), leaf.grad, values


def shifted(values: list[list[float]]) -> Tensor:
    """[B, S] per token -> the same at the token before, which predicts it."""
    return torch.nn.functional.pad(torch.tensor(values, dtype=torch.float64)[:, 1:], (0, 1))


def grpo_of(options: dict[str, Any]) -> GRPO:
    """The vectors' option names as ours."""
    o = {"token_level_loss": True, **options}
    correction = {"tis": "truncate", "icepop": "icepop", "seq-mask-tis": "sequence_mask", None: "importance"}
    surrogate = "reinforce" if o.get("disable_ppo_ratio") else "cispo" if o.get("use_cispo") else "clip"
    sequence, on_policy = o.get("sequence_level_importance_ratios"), o.get("force_on_policy_ratio")
    corrected = o.get("use_importance_sampling_correction")
    return GRPO(
        policy_loss=surrogate,
        importance_sampling_level="sequence" if sequence else "on_policy" if on_policy else "token",
        loss_aggregation="token" if o["token_level_loss"] else "sequence",
        clip_low=o.get("ratio_clip_min", 0.2),
        clip_high=o.get("ratio_clip_max", 0.2),
        dual_clip_ratio=o.get("ratio_clip_c"),
        kl_coef=o["reference_policy_kl_penalty"],
        sampler_correction=correction[o.get("truncated_importance_sampling_type")] if corrected else "none",
        sampler_correction_clip_max=o.get("truncated_importance_sampling_ratio"),
        sampler_correction_clip_min=o.get("truncated_importance_sampling_ratio_min"),
        **{ours: o[theirs] for ours, theirs in _KL.items() if theirs in o},
    )


def compare(got: tuple[float, Tensor, dict[str, float]], row: dict[str, Any], names: dict[str, str]) -> None:
    loss, grad, metrics = got
    assert loss == pytest.approx(row["loss"], abs=TOLERANCE)
    want = torch.tensor(row["grad"], dtype=torch.float64)
    assert (grad - want).abs().max() <= TOLERANCE, f"{grad} is not {want}"
    for name, value in row["metrics"].items():
        if name != "loss":
            ours = metrics.get(
                names.get(name, name), 0.0
            )  # a term that is off is reported as 0 there, and not at all here
            assert ours == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), name


@pytest.mark.parametrize("row", VECTORS["policy_gradient"], ids=lambda row: f"{row['input']}-{row['cfg']}")
def test_policy_gradient(row):
    given = VECTORS["policy_gradient_inputs"][row["input"]]
    columns = {"advantages": "advantages", "prev": "old_logprobs", "gen": "sampler_logprobs", "ref": "ref_logprobs"}
    batch = rows_as_batch(
        torch.tensor(given["token_mask"]),
        torch.tensor(given["sample_mask"]),
        **{f"{ours}_BT": shifted(given[theirs]) for theirs, ours in columns.items()},
    )
    compare(judge(grpo_of(row["options"]), batch, torch.tensor(given["curr"])), row, {})


@pytest.mark.parametrize("row", VECTORS["dpo"], ids=lambda row: "-".join(str(v) for v in row["options"].values()))
def test_dpo(row):
    given, o = VECTORS["preference_inputs"], row["options"]
    reference = torch.tensor(given["reference_policy_logprobs"], dtype=torch.float64)
    reference[:, -1] = 0
    batch = rows_as_batch(
        torch.tensor(given["token_mask"]),
        torch.tensor(given["sample_mask"]),
        ref_logprobs_BT=reference,
        pairs_P2=torch.tensor([[0, 1], [2, 3]]),
    )
    objective = DPO(
        beta=o["reference_policy_kl_penalty"],
        preference_weight=o["preference_loss_weight"],
        nll_weight=o["sft_loss_weight"],
        average_log_probs=o["preference_average_log_probs"],
        average_sft=o["sft_average_log_probs"] and o["sft_loss_weight"] > 0,
    )
    names = {"rewards_chosen_mean": "rewards_chosen", "rewards_rejected_mean": "rewards_rejected"}
    compare(
        judge(objective, batch, torch.tensor(given["next_token_logprobs"])),
        row,
        {**names, "num_valid_samples": "num_pairs"},
    )


@pytest.mark.parametrize("row", VECTORS["nll"], ids=lambda row: str(row["sample_mask"]))
def test_sft(row):
    given = VECTORS["preference_inputs"]
    batch = rows_as_batch(torch.tensor(given["token_mask"]), torch.tensor(row["sample_mask"]))
    compare(judge(SFT(), batch, torch.tensor(given["next_token_logprobs"])), {**row, "metrics": {}}, {})
    assert int(batch.num_label_tokens) == row["metrics"]["num_unmasked_tokens"]


@pytest.mark.parametrize("row", VECTORS["baseline"], ids=lambda row: row["name"])
def test_baseline(row):
    """The file's deviations are those of `torch.std`, under leave_one_out of the others alone: we take neither."""
    got = group_advantages(
        torch.tensor(row["rewards"]),
        torch.tensor(row["prompts"]),
        valid_N=torch.tensor(row["valid"]),
        leave_one_out=row["leave_one_out"],
    )
    assert got.baseline_N.tolist() == pytest.approx(row["baseline"], abs=TOLERANCE)
    if not row["leave_one_out"]:
        assert got.std_N.tolist() == pytest.approx([std * math.sqrt(2 / 3) for std in row["std"]], abs=TOLERANCE)


@pytest.mark.parametrize(
    "row", [row for row in VECTORS["advantage"] if not (row["leave_one_out"] and row["normalise"])], ids=str
)
def test_advantages(row):
    groups = torch.arange(len(row["rewards"])) // row["group_size"]
    got = group_advantages(
        torch.tensor(row["rewards"]), groups, leave_one_out=row["leave_one_out"], normalize=row["normalise"]
    )
    theirs = math.sqrt((row["group_size"] - 1) / row["group_size"]) if row["normalise"] else 1.0
    assert (got.advantages_N * theirs).tolist() == pytest.approx(row["advantages"], abs=2 * TOLERANCE)
