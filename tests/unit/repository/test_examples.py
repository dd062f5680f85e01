"""The objectives under `examples/` against their formulas, worked out by hand."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.security.trust import Trust
from automodel_cli.data.batch import IGNORE_INDEX, Batch, one_document
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.rollout.rewards.base import RewardInput

sys.path.append(str(Path(__file__).parents[3] / "examples"))


def test_own_preference_objective() -> None:
    from own_preference import MarginHinge

    documents = one_document([1] * 7)  # 3 + 4 tokens, the first of each is no label
    labels_BT = torch.tensor([[1, 1, IGNORE_INDEX, 1, 1, 1, IGNORE_INDEX]])
    batch: Batch = replace(
        documents,
        labels_BT=labels_BT,
        cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32),
        extra={"pairs_P2": torch.tensor([[0, 1]])},
    )
    logprobs_BT = torch.tensor([[-1.0, -3.0, 0.0, -2.0, -2.5, -3.0, 0.0]])
    chosen, rejected = (-1.0 - 3.0) / 2, (-2.0 - 2.5 - 3.0) / 3
    assert MarginHinge(margin=2.0)(HeadOutput(logprobs_BT), batch).item() == pytest.approx(2.0 - (chosen - rejected))
    assert MarginHinge(margin=0.25)(HeadOutput(logprobs_BT), batch).item() == 0.0
    assert MarginHinge().weight(batch) == 1


def test_own_policy_objective() -> None:
    from own_policy import ClippedReinforce

    now = torch.tensor([[-1.0, -2.0, 0.0]], requires_grad=True)
    columns = {
        "advantages_BT": torch.tensor([[0.5, -2.0, 9.0]]),
        "sampler_logprobs_BT": torch.tensor([[-3.0, -1.5, 0.0]]),
    }
    batch = replace(one_document([1, 1, 1]), extra=columns)  # the third token has no label
    loss = ClippedReinforce(max_weight=2.0)(HeadOutput(now), batch)
    weights = [2.0, torch.tensor(-0.5).exp().item()]  # e^2 is above the bound
    assert loss.item() == pytest.approx(0.5 * weights[0] * 1.0 - 2.0 * weights[1] * 2.0)
    loss.backward()
    assert now.grad is not None
    assert now.grad[0].tolist() == pytest.approx([-0.5 * weights[0], 2.0 * weights[1], 0.0])


def test_own_optimizer() -> None:
    from own_optimizer import SignOfMomentum

    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = SignOfMomentum([{"params": [weight], "weight_decay": 0.5}], lr=0.1, betas=(0.75, 0.5))
    weight.grad = torch.tensor([4.0, -2.0])
    optimizer.step()  # update = sign(grad); w = 0.95 w - 0.1 sign
    assert weight.tolist() == pytest.approx([0.95 - 0.1, -1.9 + 0.1])
    weight.grad = torch.tensor([-4.0, 10.0])
    optimizer.step()  # momentum (2, -1): 0.75 m + 0.25 g = (0.5, 1.75)
    assert weight.tolist() == pytest.approx([0.95 * 0.85 - 0.1, 0.95 * -1.8 - 0.1])


def test_own_schedule() -> None:
    from own_schedule import Milestones

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = Milestones(at=(0.5, 0.75), factor=0.1).build(optimizer, num_steps=8), []
    for _ in range(8):
        rates.append(schedule.get_last_lr()[0])
        schedule.step()
    assert rates == pytest.approx([1.0] * 4 + [0.1] * 2 + [0.01] * 2)


def test_own_format() -> None:
    from own_format import BestAndWorst, BestAnswer

    from automodel_cli.data.formats.row_accessor import Fields
    from automodel_cli.data.row_errors import RowError

    row = {"title": "2 + 3?", "body": "Quick!", "answers": [{"text": "6", "score": -1}, {"text": "5", "score": 4}]}
    said = BestAnswer().read(Fields(row, BestAnswer.fields, {}))
    assert [m["content"] for m in said.messages] == ["2 + 3?\nQuick!", "5"] and said.trained == [False, True]
    pair = BestAndWorst().read(Fields({**row, "body": None}, BestAndWorst.fields, {}))
    assert [d.messages[-1]["content"] for d in (pair.chosen, pair.rejected)] == ["5", "6"]
    assert pair.chosen.messages[0]["content"] == "2 + 3?"
    with pytest.raises(RowError, match="no answer has a score of 5 or more"):
        BestAnswer(least=5).read(Fields(row, BestAnswer.fields, {}))


def test_own_tracker(tmp_path: Path) -> None:
    from own_tracker import Spreadsheet

    run = Spreadsheet("x.csv").start("run", tmp_path, {})
    run.log({"step": 2, "loss": 0.5, "mfu": None}, 2)
    run.finish(succeeded=True)
    assert (tmp_path / "x.csv").read_text().splitlines() == ["2,step,2", "2,loss,0.5", "end,succeeded,True"]


def test_own_reward_environment_and_dataset() -> None:
    from own_dataset import Backwards
    from own_environment import SayMore
    from own_reward import Vowels

    assert Vowels().score(RewardInput("s", "A bee!", {})) == pytest.approx(3 / 4)
    assert Vowels().score(RewardInput("s", "12", {})) == 0.0
    first = SayMore().step([{"role": "assistant", "content": "x"}], {}, None)
    assert first.reward == 1.0 and not first.done and first.observations[0]["content"] == "And?"
    assert SayMore().step([{"role": "assistant", "content": "x"}], {}, first.state).done
    rows = list(Backwards(number=20).rows("train"))
    assert len(rows) == 20 and all(row["messages"][0]["content"][::-1] == row["answer"] for row in rows)
    assert rows == list(Backwards(number=20).rows("train")) != list(Backwards(number=20).rows("validation"))


def test_own_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its command line names it: the function is found, described and called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/quickstart/export").mkdir(parents=True)
    node = "_target_: automodel_cli.rollout.environments.functions.FunctionTools, show_tools: false"
    function = "letters: {_target_: own_tools.letters, _partial_: true}"
    override = f"rollout.environment={{{node}, functions: {{{function}}}}}"
    recipe = check_config(compose("quickstart_grpo", [override]), Trust(packages=("own_tools",)))
    tools = recipe.rollout.environment
    described = tools.definitions()[0]["function"]
    assert described["name"] == "letters" and described["description"] == "Spells a word."
    for word, said in (("tree", "t r e e"), ("2", "error: ValueError: only letters can be spelled")):
        text = f'<tool_call>{{"name": "letters", "arguments": {{"word": "{word}"}}}}</tool_call>'
        turn = asyncio.run(tools.step([{"role": "assistant", "content": text}], {}, None))
        assert turn.observations == ({"role": "tool", "content": said},)
