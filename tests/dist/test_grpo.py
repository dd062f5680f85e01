"""One update on given samples: every layout and packing against the library's model in one process, and what a first
update on the policy's own samples must give exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.objectives.base import RewardKL
from automodel_cli.objectives.grpo import GRPO
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import Errors, GradientRecorder, build_parity_stages, step_errors
from automodel_cli.parity.reference import Original, Reference, exact_process
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.rollout import samples as rollout_samples
from automodel_cli.rollout.engines.base import sample_seed
from automodel_cli.rollout.engines.policy_engine import RankZeroEngine, at_once, build_sampler
from automodel_cli.rollout.engines.sampler.sampling import shaping_of
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.minibatches.advantage_estimation import kl_sums
from automodel_cli.rollout.samples import Minibatch, PackingConfig, pack_minibatches
from automodel_cli.rollout.types import Completion, Sample, SamplingParams, Score
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch, launch_all

SEQ_LEN = 26  # no multiple of what context parallelism cuts rows into
OBJECTIVE = GRPO(kl_coef=0.1, clip_high=0.28, sampler_correction="truncate", sampler_correction_clip_max=2.0)
ADVANTAGES = torch.tensor([0.5, -1.0, 2.0, 1.5, -0.25, 0.75, 1.0, -0.5, 0.25, 1.25])


def given_samples() -> list[Sample]:
    """Ten responses to five prompts, of uneven lengths, with log-probs such as a sampler would report."""
    samples = []
    for place in range(5):
        prompt = Prompt(place, tiny.token_row(3 + place, seed=place).tolist(), [], {}, f"prompt {place}")
        for index in range(2):
            tokens = tiny.token_row(2 + 3 * index + place, seed=100 + 10 * place + index).tolist()
            generator = torch.Generator().manual_seed(10 * place + index)
            logprobs = (torch.randn(len(tokens), generator=generator) * 0.3 - 5).tolist()
            score = Score(float(place + index), {}, {})
            samples.append(Sample(place, index, prompt, tokens, logprobs, "", "stop", 0, score))
    return samples


def row_plan(packed: bool) -> PackingConfig:
    """Two microbatches at least: what two pipeline stages need."""
    return PackingConfig(
        SEQ_LEN, packed, pad_to_multiple_of=1, microbatch_size=2, pad_id=0, fits=lambda count: count % 2 == 0
    )


def updates_of(samples: Sequence[Sample], packed: bool, dp_rank: int = 0, dp_size: int = 1, number: int = 1):
    trained = [(i,) for i in range(len(samples)) if i != 3]  # one that is left out
    return pack_minibatches(samples, trained, number, row_plan(packed), dp_rank=dp_rank, dp_size=dp_size)


def with_columns(update: Minibatch, samples: Sequence[Sample]) -> Minibatch:
    """Old and reference log-probs that differ from the policy's, and the advantages."""
    update = update.with_values("advantages_BT", ADVANTAGES, samples)
    for name, shift in (("old", 0.05), ("ref", -0.2)):
        values = [b.extra["sampler_logprobs_BT"] + shift * (b.labels_BT != IGNORE_INDEX) for b in update.batches]
        update = update.with_column(f"{name}_logprobs_BT", values)
    return update


def row(*, dp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, schedule: str = "1f1b", packed: bool = True) -> Case:
    mesh = MeshConfig(dp_size=dp, pp_size=pp, cp_size=cp, ep_size=ep)
    pipeline = PipelineConfig(schedule=schedule) if pp > 1 else None
    return Case(mesh, FSDP2Config(mp_policy=FP32), pipeline, objective=OBJECTIVE, packed=packed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models, and what one process makes of the samples, in float64 and one document at a time."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3_moe"):
        model = tiny.build_hf(family)
        model.save_pretrained(folder / family)
        samples = given_samples()
        (update,) = updates_of(samples, packed=False)
        found = exact_process(model, with_columns(update, samples).batches, OBJECTIVE)
        torch.save(vars(found), folder / f"{family}.pt")
    return folder


def same_update(rank: int, world: int, folder: Path, family: str, rows: Sequence[Case]) -> list[Errors]:
    found = []
    for which in rows:
        mesh, stages = built(folder, family, which, world)
        samples = given_samples()
        (update,) = updates_of(samples, which.packed, mesh.dp_rank, mesh.dp_size)
        recorder = GradientRecorder(*stages.parts)
        batches = with_columns(update, samples).batches
        result = train_step(stages, batches, OBJECTIVE, recorder, mesh, max_grad_norm=None)
        found.append(step_errors(Reference(**torch.load(folder / f"{family}.pt")), result, recorder.gradients))
    return found


def built(folder: Path, family: str, which: Case, world: int):
    mesh = build_mesh(which.mesh.resolve(world), "cpu")
    return mesh, build_parity_stages(Original(folder / family), which, mesh)


LAYOUTS = {
    1: [row(), row(packed=False)],
    2: [row(dp=2), row(dp=2, packed=False), row(pp=2), row(pp=2, packed=False), row(cp=2), row(cp=2, packed=False)],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts_and_packing_give_the_numbers_of_one_process(folder, world):
    for which, errors in zip(LAYOUTS[world], launch(same_update, world, folder, "llama", LAYOUTS[world]), strict=True):
        assert errors.within_rounding(), f"{which}: {errors}"


@pytest.mark.parametrize(
    ("world", "which"),
    [(2, row(dp=2, ep=2)), pytest.param(4, row(dp=2, ep=2, pp=2), marks=pytest.mark.slow)],  # drawn and learnt below
    ids=["ep2", "pp2 ep2"],
)
def test_experts_over_ranks(folder, world, which):
    (errors,) = launch(same_update, world, folder, "qwen3_moe", [which])
    assert errors.within_rounding(), errors


def shifted_by_one(rank: int, world: int, folder: Path) -> Errors:
    """Advantages one token too far to the right."""
    whole = Minibatch.with_values

    def late(self, name, values_N, samples):
        done = whole(self, name, values_N, samples)
        return done.with_column(name, [batch.extra[name].roll(1, 1) for batch in done.batches])

    rollout_samples.Minibatch.with_values = late  # type: ignore[method-assign]
    return same_update(rank, world, folder, "llama", [row(dp=2)])[0]


def test_sabotage_is_noticed(folder):
    assert launch(shifted_by_one, 2, folder).gradient > 1e-3


# Rows


def test_every_rank_gets_equally_many_rows_and_every_label_once():
    samples = given_samples()
    for packed in (True, False):
        for dp_size in (1, 2, 4):
            every = [updates_of(samples, packed, rank, dp_size, number=2) for rank in range(dp_size)]
            for updates in zip(*every, strict=True):
                assert len({len(update.batches) for update in updates}) == 1
            labels = [
                token
                for updates in every
                for update in updates
                for batch in update.batches
                for token in batch.labels_BT[batch.labels_BT != IGNORE_INDEX].tolist()
            ]
            assert sorted(labels) == sorted(t for i, s in enumerate(samples) if i != 3 for t in s.tokens)


def test_labels_are_the_response_with_its_logprobs_and_documents_restart():
    samples = given_samples()
    for packed in (True, False):
        (update,) = updates_of(samples, packed)
        for batch, spread in zip(update.batches, update.spread, strict=True):
            for r, first, number in spread:
                sample = samples[number]
                at = slice(first, first + len(sample.tokens))
                assert batch.labels_BT[r, at].tolist() == sample.tokens
                assert batch.input_ids_BT[r, first + 1 : first + len(sample.tokens)].tolist() == sample.tokens[:-1]
                torch.testing.assert_close(batch.extra["sampler_logprobs_BT"][r, at], torch.tensor(sample.logprobs))
                assert batch.position_ids_BT[r, at].tolist() == [
                    len(sample.prompt.tokens) - 1 + i for i in range(len(sample.tokens))
                ]
            starts = batch.cu_seqlens[:-1].tolist()
            assert (batch.position_ids_BT.flatten() == 0).nonzero()[:, 0].tolist() == starts


def test_dummy_microbatches_fill_up_what_a_schedule_needs():
    plan = replace(row_plan(True), fits=lambda count: count % 4 == 0)
    samples = given_samples()
    (update,) = pack_minibatches(samples, [(i,) for i in range(len(samples))], 1, plan, dp_rank=0, dp_size=1)
    assert len(update.batches) == 4
    assert not (update.batches[-1].labels_BT != IGNORE_INDEX).any()


def test_the_kl_of_a_sample_is_the_sum_over_its_tokens():
    samples = given_samples()
    updates = [with_columns(update, samples) for update in updates_of(samples, True, number=2)]
    sums_N = kl_sums(updates, samples, RewardKL(1.0, "k1"))
    expected = [0.25 * len(sample.tokens) * (i != 3) for i, sample in enumerate(samples)]  # old - ref = 0.05 + 0.2
    torch.testing.assert_close(sums_N, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


# Samples of the policy itself

PARAMS = SamplingParams(max_new_tokens=7, temperature=0.7, top_p=0.9, top_k=40)


def on_policy(rank: int, world: int, folder: Path, family: str, which: Case) -> dict[str, float]:
    """Generate, score under the same distribution, and one update."""
    mesh, stages = built(folder, family, which, world)
    sampler = build_sampler(stages, mesh, stop_token_ids=[5, 9], max_num_seqs=3)
    prompts = [sample.prompt for sample in given_samples()]
    mine = list(range(len(prompts)))[mesh.dp_rank :: mesh.dp_size]
    drawn = sampler.generate([prompts[i].tokens for i in mine], PARAMS, [sample_seed(0, i) for i in mine])
    samples = [drawn_sample(i, prompts[i], completion) for i, completion in zip(mine, drawn, strict=True)]
    samples = everyones(samples, mesh)
    for part in stages.parts:
        part.head.shaping = shaping_of(PARAMS)  # type: ignore[union-attr]
    (update,) = updates_of(samples, True, mesh.dp_rank, mesh.dp_size)
    old = stages.forward(update.batches, lambda output, _: output.logprobs_BT)
    update = update.with_column("old_logprobs_BT", old).with_values("advantages_BT", ADVANTAGES, samples)
    recorder = GradientRecorder(*stages.parts)
    result = train_step(stages, update.batches, GRPO(), recorder, mesh, max_grad_norm=None)
    trained = [i for i in range(len(samples)) if i != 3]
    count = sum(len(samples[i].tokens) for i in trained)
    wanted = -sum(ADVANTAGES[i].item() * len(samples[i].tokens) for i in trained) / count
    numbers = {name: value.item() for name, value in result.metrics.items()}
    tokens = sum((k + 1) * token for k, token in enumerate(t for s in samples for t in s.tokens))
    return {**numbers, "loss": result.loss.item(), "wanted": wanted, "norm": result.grad_norm.item(), "tokens": tokens}


@cache
def in_one_process(folder: Path, family: str) -> dict[str, float]:
    return launch(on_policy, 1, folder, family, row())


def drawn_sample(number: int, prompt: Prompt, completion: Completion) -> Sample:
    score = Score(0.0, {}, {})
    return Sample(
        number // 2, number % 2, prompt, completion.tokens, completion.logprobs, "", completion.finish_reason, 0, score
    )


def everyones(samples: list[Sample], mesh: Mesh) -> list[Sample]:
    everywhere: list[list[Sample]] = [[] for _ in range(mesh.dp_size)]
    torch.distributed.all_gather_object(everywhere, samples, group=mesh.dp.get_group())
    return sorted((s for of_rank in everywhere for s in of_rank), key=lambda s: (s.place, s.index))


def test_a_first_update_has_ratio_one_and_minus_the_mean_advantage_as_its_loss(folder):
    got = in_one_process(folder, "llama")
    assert got["probs_ratio_min"] == got["probs_ratio_max"] == 1.0 and got["clip_fraction"] == 0.0
    assert got["loss"] == pytest.approx(got["wanted"], abs=1e-6)
    assert got["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("world", "family", "which"),
    [
        (2, "llama", row(dp=2)),
        (2, "llama", row(pp=2)),
        (2, "llama", row(cp=2)),
        (4, "qwen3_moe", row(pp=2, dp=2, ep=2)),
    ],
    ids=["fsdp2", "pp2", "cp2", "pp2 ep2"],
)
def test_layouts_draw_the_same_and_learn_the_same(folder, world, family, which):
    want = in_one_process(folder, family)
    for got in launch_all(on_policy, world, folder, family, which):
        assert got["tokens"] == want["tokens"]
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6)


# A server that one rank speaks to


def through_the_first_rank(rank: int, world: int, folder: Path) -> list[list[int]]:
    engine = None
    if rank == 0:
        engine = HFEngine.from_config(tiny.tiny_config("llama"), stop_token_ids=[2], pad_token_id=0)
    shared = RankZeroEngine(engine)
    model = tiny.build_hf("llama")
    shared.update_weights([list(model.named_parameters())])
    prompts = [sample.prompt.tokens for sample in given_samples()]
    mine = list(range(len(prompts)))[rank::world]
    done = shared.generate([prompts[i] for i in mine], PARAMS, [sample_seed(0, i) for i in mine])
    assert {completion.weight_version for completion in done} == {1}
    asked = [(rank, i, [engine is not None]) for i in range(rank + 1)]
    behind: list[int] = []
    finish = shared.begin_for_all(
        asked,
        lambda engine, items: [item[2].append(len(items)) for item in items],  # type: ignore[arg-type]
        at_once,
        lambda items, by: behind.append(by),
    )
    assert finish() == [(rank, i, [rank == 0, world * (world + 1) // 2]) for i in range(rank + 1)]
    assert behind == ([0] if rank == 0 else [])
    return [completion.tokens for completion in done]


def test_an_engine_of_one_rank_serves_all_ranks():
    ((whole,), parts) = launch_all(through_the_first_rank, 1, Path()), launch_all(through_the_first_rank, 2, Path())
    assert [parts[i % 2][i // 2] for i in range(len(whole))] == whole
