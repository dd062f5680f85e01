"""Episodes with an environment: every layout draws the same turns, and learns the same from them as the library's model
in one process; only what the model drew is a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.objectives.base import RewardKL
from automodel_cli.parity.cases import Case
from automodel_cli.parity.compare import Errors, GradientRecorder, step_errors
from automodel_cli.parity.reference import Reference, exact_process
from automodel_cli.rollout.collection.multi_turn import exchange_replies, scored_samples, with_environment
from automodel_cli.rollout.engines.base import sample_seed
from automodel_cli.rollout.engines.policy_engine import build_sampler
from automodel_cli.rollout.environments.calculator import Calculator
from automodel_cli.rollout.environments.episode import Episode, EpisodeRunner
from automodel_cli.rollout.environments.pool import EnvironmentPool
from automodel_cli.rollout.minibatches.advantage_estimation import kl_sums
from automodel_cli.rollout.rewards.aggregate import RewardSum
from automodel_cli.rollout.rewards.text import FormatRegex
from automodel_cli.rollout.samples import Minibatch, PackingConfig, pack_minibatches
from automodel_cli.rollout.types import Sample, SamplingParams, Score
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch, launch_all
from tests.dist.test_grpo import OBJECTIVE, built, everyones, row, with_columns

pytestmark = pytest.mark.slow

VOCAB, SEQ_LEN = 354, 100  # of the byte tokenizer, which must read what the model says
STOPS = [1, *range(100, 260)]  # so many that random weights end their messages
TOOL = Calculator(pattern="([a-zA-Z0-9])", max_turns=3, tool_call_reward=0.5, error_reward=-0.25)
PARAMS = SamplingParams(max_new_tokens=9, temperature=0.9, top_p=0.95)


def prompts(tokenizer: Any) -> list[Prompt]:
    """Five questions, each twice: the samples of five groups."""
    made = []
    for number in range(5):
        messages = [{"role": "user", "content": f"{number} + {10**number}"}]
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        made += [Prompt(number, list(tokens), messages, {}, f"prompt {number}")] * 2
    return made


def drawn_samples(rank: int, world: int, folder: Path, family: str, which: Case) -> list[Sample]:
    """All ranks' samples, of the model as it is laid out."""
    mesh, stages = built(folder, family, which, world)
    tokenizer = ByteTokenizer().build()
    everything = prompts(tokenizer)
    mine = list(range(len(everything)))[mesh.dp_rank :: mesh.dp_size]
    engine = build_sampler(stages, mesh, stop_token_ids=STOPS, max_num_seqs=3)
    played = [Episode(f"sample {i}", everything[i].tokens, everything[i].messages, {}, sample_seed(0, i)) for i in mine]
    exchange = partial(exchange_replies, mesh)
    asked = [(i // 2, i % 2, everything[i]) for i in mine]
    rewards = RewardSum({"letter": FormatRegex(pattern=".*[a-m].*", timeout=None)})
    with EnvironmentPool({"environment": TOOL}) as pool, rewards:
        EpisodeRunner(engine, tokenizer, pool, PARAMS, SEQ_LEN).run_lockstep(played, exchange)
        return everyones(scored_samples(asked, played, tokenizer, rewards, pool), mesh)


def update_of(samples: Sequence[Sample], packed: bool, dp_rank: int = 0, dp_size: int = 1) -> Minibatch:
    plan = PackingConfig(
        SEQ_LEN, packed, pad_to_multiple_of=1, microbatch_size=2, pad_id=0, fits=lambda count: count % 2 == 0
    )
    (update,) = pack_minibatches(
        samples, [(i,) for i in range(len(samples))], 1, plan, dp_rank=dp_rank, dp_size=dp_size
    )
    return with_columns(update, samples)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models, the samples that one process draws of each, and what the library makes of these in float64, one
    document at a time."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3_moe"):
        model = tiny.build_hf(family, vocab_size=VOCAB)
        model.save_pretrained(folder / family)
        samples = launch(drawn_samples, 1, folder, family, row())
        torch.save(samples, folder / f"{family}.samples")
        reference = exact_process(model, update_of(samples, packed=False).batches, OBJECTIVE)
        torch.save(vars(reference), folder / f"{family}.pt")
    return folder


def samples_in(folder: Path, family: str) -> list[Sample]:
    return torch.load(folder / f"{family}.samples", weights_only=False)


def same_update(rank: int, world: int, folder: Path, family: str, which: Case) -> tuple[list[Sample], Errors]:
    """What this layout draws, and its update on the samples of one process."""
    drawn = drawn_samples(rank, world, folder, family, which)
    mesh, stages = built(folder, family, which, world)
    update = update_of(samples_in(folder, family), which.packed, mesh.dp_rank, mesh.dp_size)
    recorder = GradientRecorder(*stages.parts)
    result = train_step(stages, update.batches, OBJECTIVE, recorder, mesh, max_grad_norm=None)
    return drawn, step_errors(Reference(**torch.load(folder / f"{family}.pt")), result, recorder.gradients)


def test_the_samples_have_something_to_show(folder):
    for family in ("llama", "qwen3_moe"):
        samples = samples_in(folder, family)
        assert {sample.num_turns for sample in samples} == {1, 2, 3}
        assert {"stop", "turns"} <= {sample.finish_reason for sample in samples}
        assert max(sample.length for sample in samples) <= SEQ_LEN


@pytest.mark.parametrize(
    ("world", "family", "which"),
    [
        (1, "llama", row(packed=False)),
        (2, "llama", row(dp=2)),
        (2, "llama", row(pp=2)),
        (2, "qwen3_moe", row(dp=2, ep=2)),
    ],
    ids=["not packed", "fsdp2", "pp2", "ep2"],
)
def test_layouts_draw_the_same_turns_and_learn_the_same(folder, world, family, which):
    want = samples_in(folder, family)
    for drawn, errors in launch_all(same_update, world, folder, family, which):
        assert len(drawn) == len(want)
        for got, expected in zip(drawn, want, strict=True):
            for key in ("tokens", "generated", "response_messages", "text", "finish_reason", "score"):
                assert getattr(got, key) == getattr(expected, key), key
            torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(expected.logprobs))
        assert errors.within_rounding(), errors


def test_labels_are_what_the_model_drew_and_nothing_else():
    """Written by hand: prompt 50 51 52; the model draws 60 61, the tool says 70 71 72, the model draws 62."""
    response_messages = [{"role": role, "content": ""} for role in ("assistant", "tool", "assistant")]
    tokens, generated = [60, 61, 70, 71, 72, 62], [True, True, False, False, False, True]
    logprobs = [-1.0, -2.0, 0.0, 0.0, 0.0, -3.0]
    prompt = Prompt(0, [50, 51, 52], [], {}, "by hand")
    one = Sample(0, 0, prompt, tokens, logprobs, "", "stop", 0, Score(4.0, {}, {}), generated, response_messages)
    plan = PackingConfig(12, packed=True, pad_to_multiple_of=1, microbatch_size=1, pad_id=9)
    (update,) = pack_minibatches([one], [(0,)], 1, plan, dp_rank=0, dp_size=1)
    (batch,) = update.with_values("advantages_BT", torch.tensor([0.5]), [one]).batches
    no = IGNORE_INDEX
    assert batch.input_ids_BT.tolist() == [[50, 51, 52, 60, 61, 70, 71, 72, 62, 9, 9, 9]]
    assert batch.labels_BT.tolist() == [[no, no, 60, 61, no, no, no, 62, no, no, no, no]]
    assert batch.extra["sampler_logprobs_BT"].tolist() == [[0, 0, -1, -2, 0, 0, 0, -3, 0, 0, 0, 0]]
    assert batch.extra["advantages_BT"].tolist() == [[0, 0, 0.5, 0.5, 0, 0, 0, 0.5, 0, 0, 0, 0]]
    assert batch.extra["rewards_BT"].tolist() == [[0, 0, 4, 4, 0, 0, 0, 4, 0, 0, 0, 0]]
    assert batch.position_ids_BT[0, :9].tolist() == list(range(9)) and batch.cu_seqlens.tolist() == [0, 9, 12]
    ones = [torch.ones(batch.shape)]
    update = update.with_column("old_logprobs_BT", ones).with_column("ref_logprobs_BT", [0 * ones[0]])
    assert kl_sums([update], [one], RewardKL(1.0, "k1")).tolist() == [3.0]
    assert one.num_generated == 3 and one.num_turns == 2


@pytest.mark.parametrize(
    ("on_error", "total", "valid"), [("zero", 2.0, True), ("fail", 0.0, True), ("skip", 2.0, False)]
)
def test_an_environment_that_raised_counts_as_configured(on_error, total, valid):
    tool = Calculator(on_error=on_error, weight=10.0)
    rewards = Score(2.0, {"exact": 2.0}, {})
    broken = Episode("", [1], [], {}, rewards=[1.0, 0.0], error="ValueError: no")
    score = with_environment(rewards, tool, broken)
    assert (score.total, score.valid) == (total, valid)
    assert score.parts == {"exact": 2.0} and score.errors == {"environment": "ValueError: no"}
    fine = with_environment(rewards, tool, Episode("", [1], [], {}, rewards=[1.0, 0.5]))
    assert fine == Score(17.0, {"exact": 2.0, "environment": 1.5}, {})
    failed = Score(0.0, {}, {"exact": "RuntimeError: no"})
    assert with_environment(failed, tool, Episode("", [1], [], {}, rewards=[1.0]), {"exact"}).total == 0
