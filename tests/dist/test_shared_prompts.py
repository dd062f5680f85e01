"""Updates in which the samples of a group share one copy of their prompt: every layout against the library's model,
which reads each sample whole and alone, in one process and float64.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.distributed.config import DDPConfig, FSDP2Config, MegatronFSDPConfig
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.attention import varlen_segments
from automodel_cli.objectives.distillation import Distillation
from automodel_cli.objectives.grpo import GRPO
from automodel_cli.objectives.ppo import PPO
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import Errors, GradientRecorder, build_parity_stages, step_errors
from automodel_cli.parity.reference import Original, Reference, exact_process
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.rollout.samples import Minibatch, PackingConfig, pack_minibatches
from automodel_cli.rollout.types import Sample, Score
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist import cuda_stand_in
from tests.dist.harness import launch
from tests.marks import slow

SEQ_LEN = 32
OBJECTIVES: dict[str, Any] = {
    "grpo": GRPO(
        kl_coef=0.1,
        clip_high=0.28,
        sampler_correction="truncate",
        sampler_correction_clip_max=2.0,
        loss_aggregation="sequence",
    ),
    "critic": PPO(kl_coef=0.1, value_coef=0.5),
    "teacher": Distillation(beta=0.3, top_k=2, nll_weight=0.3),
}
# (tokens of the prompt, of each response): a group, one that has nothing to share, one with a response of several
# turns, and one that no row holds whole
GROUPS = ((8, (2, 6, 3, 5)), (1, (4, 7)), (5, (3, 4, 6, 5, 7)), (12, (9, 9, 9)))


def given_samples() -> list[Sample]:
    samples = []
    for place, (length, responses) in enumerate(GROUPS):
        prompt = Prompt(place, tiny.token_row(length, seed=place).tolist(), [], {}, f"prompt {place}")
        for index, count in enumerate(responses):
            seed = 100 + 10 * place + index
            tokens = tiny.token_row(count, seed=seed).tolist()
            logprobs = (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.3 - 5).tolist()
            said = {"generated": [i % 4 != 2 for i in range(count)]} if (place, index) == (2, 2) else {}
            score = Score(float(index), {}, {})
            samples.append(Sample(place, index, prompt, tokens, logprobs, "", "stop", 0, score, **said))
    return samples


def update_of(samples: Sequence[Sample], *, share: bool, dp_rank: int = 0, dp_size: int = 1) -> Minibatch:
    """Old and reference log-probs that differ from the policy's, and an advantage of each sample; one is left out.
    What a critic and a teacher say follows from a token's label.
    """
    plan = PackingConfig(
        SEQ_LEN, True, 1, microbatch_size=2, pad_id=0, fits=lambda n: n % 2 == 0, share_prompt_prefix=share
    )
    trained = [(i,) for i in range(len(samples)) if i != 3]
    (update,) = pack_minibatches(samples, trained, 1, plan, dp_rank=dp_rank, dp_size=dp_size)
    advantages_N = torch.randn(len(samples), generator=torch.Generator().manual_seed(5))
    update = update.with_values("advantages_BT", advantages_N, samples)
    for name, shift in (("old", 0.05), ("ref", -0.2)):
        values = [b.extra["sampler_logprobs_BT"] + shift * (b.labels_BT != IGNORE_INDEX) for b in update.batches]
        update = update.with_column(f"{name}_logprobs_BT", values)
    for name, period in (("old_values", 7), ("returns", 5)):
        update = update.with_column(f"{name}_BT", [(b.labels_BT % period) / period for b in update.batches])
    ids = [torch.stack([b.labels_BT.clamp(min=0), b.labels_BT.clamp(min=0) // 2 + 1], -1) for b in update.batches]
    said = [-1.0 - (i % 11) / 10 for i in ids]
    return update.with_column("teacher_ids_BTN", ids).with_column("teacher_logprobs_BTN", said)


def row(
    objective: str = "grpo",
    *,
    dp: int = 1,
    pp: int = 1,
    tp: int = 1,
    ep: int = 1,
    recompute: bool | str = False,
) -> Case:
    mesh = MeshConfig(dp_size=dp, pp_size=pp, tp_size=tp, ep_size=ep)
    pipeline = PipelineConfig(schedule="1f1b") if pp > 1 else None
    config = FSDP2Config(mp_policy=FP32, sequence_parallel=tp > 1, activation_checkpointing=recompute)
    return Case(mesh, config, pipeline, objective=OBJECTIVES[objective], packed=True)


def objectives_of(family: str) -> list[str]:
    return list(OBJECTIVES) if family == "llama" else ["grpo"]


def reference(folder: Path, family: str, objective: Any) -> Path:
    return folder / f"{family}-{type(objective).__name__}.pt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models (plain; windows, sinks and experts; latent attention), and what one process makes of the samples."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "gpt_oss", "deepseek_v3"):
        model = tiny.build_hf(family)
        model.save_pretrained(folder / family)
        update = update_of(given_samples(), share=False)
        for name in objectives_of(family):
            of_one_process = exact_process(model, update.batches, OBJECTIVES[name])
            torch.save(vars(of_one_process), reference(folder, family, OBJECTIVES[name]))
    return folder


def same_update(rank: int, world: int, folder: Path, cases: Sequence[tuple[str, Case]]) -> list[Errors]:
    found = []
    for family, which in cases:
        mesh = build_mesh(which.mesh.resolve(world), "cpu")
        stages = build_parity_stages(Original(folder / family), which, mesh)
        update = update_of(given_samples(), share=True, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
        recorder = GradientRecorder(*stages.parts)
        result = train_step(stages, update.batches, which.objective, recorder, mesh, max_grad_norm=None)
        want = Reference(**torch.load(reference(folder, family, which.objective)))
        found.append(step_errors(want, result, recorder.gradients))
    return found


CASES = {
    1: [
        ("llama", row()),
        ("gpt_oss", row()),
        ("deepseek_v3", row()),
        ("llama", row("critic")),
        ("llama", row("teacher")),
    ],
    2: [
        ("llama", row(dp=2, recompute="selective")),
        ("llama", row(pp=2)),
        ("llama", row(tp=2)),
        ("gpt_oss", row(dp=2, ep=2, recompute=True)),
        ("llama", replace(row(dp=2), parallelizer=DDPConfig())),
        ("llama", row("critic", pp=2)),
        ("llama", row("teacher", dp=2)),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_every_layout_gives_the_numbers_of_samples_that_share_nothing(folder, world):
    for case, errors in zip(CASES[world], launch(same_update, world, folder, CASES[world]), strict=True):
        assert errors.within_rounding(), f"{case}: {errors}"


def same_update_of_megatron_fsdp(
    rank: int, world: int, folder: Path, cases: Sequence[tuple[str, Case]]
) -> list[Errors]:
    cuda_stand_in.install()
    return same_update(rank, world, folder, cases)


@pytest.mark.skipif(importlib.util.find_spec("megatron_fsdp") is None, reason="pip install automodel-cli[megatron]")
def test_so_does_megatron_fsdp(folder):
    case = ("llama", replace(row(dp=2), parallelizer=MegatronFSDPConfig()))
    (errors,) = launch(same_update_of_megatron_fsdp, 2, folder, [case])
    assert errors.within_rounding(), errors


def same_update_put_together(rank: int, world: int, folder: Path, cases: Sequence[tuple[str, Case]]) -> list[Errors]:
    """As rows that are too long for a mask are computed."""
    varlen_segments._SHORT_ROW = 0
    return same_update(rank, world, folder, cases)


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_so_do_documents_that_are_put_together_as_those_of_long_rows_are(folder, world):
    cases = CASES[world][:4]
    for case, errors in zip(cases, launch(same_update_put_together, world, folder, cases), strict=True):
        assert errors.within_rounding(), f"{case}: {errors}"


def one_token_ahead(rank: int, world: int, folder: Path) -> Errors:
    """Responses that begin at the last token of the prefix, not behind it: their keys are seen one token late."""
    whole = varlen_segments.document_segments

    def early(documents):
        return tuple(s._replace(ahead=max(0, s.ahead - 1)) for s in whole(documents))

    varlen_segments.document_segments = early
    return same_update_put_together(rank, world, folder, [("llama", row())])[0]


def first_token_unseen(rank: int, world: int, folder: Path) -> Errors:
    """Rows in which responses see their prefix without its first token."""
    whole = varlen_segments.row_mask

    def late(documents, *arguments):
        prefixes = tuple((first + 1, length - 1) if length else (first, length) for first, length in documents.prefixes)
        return whole(documents._replace(prefixes=prefixes), *arguments)

    varlen_segments.row_mask = late
    return same_update(rank, world, folder, [("llama", row())])[0]


@pytest.mark.parametrize("sabotage", [one_token_ahead, first_token_unseen])
def test_sabotage_is_noticed(folder, sabotage):
    assert launch(sabotage, 1, folder).gradient > 1e-3


RUN = """
defaults: [grpo, {data: chat_tasks}, {override rewards: none}, _self_]
model: {pretrained: null, config: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
  num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, vocab_size: 512},
  tokenizer: {_target_: automodel_cli.models.tokenizer.ByteTokenizer}}
data: {seq_len: 48}
rollout: {prompts_per_step: 2, group_size: 4, max_new_tokens: 6, advantage_estimator: batch, log_samples_every: null}
rewards:
  digits: {_target_: automodel_cli.rollout.rewards.text.FormatRegex, pattern: ".*[0-9].*", timeout: null}
optimizer: {lr: 1.0e-3}
parallelizer: {mp_policy: {param_dtype: float32}}
train: {global_batch_size: 4, microbatch_size: 1, max_steps: 2, epochs: null, num_cpu_threads: 1}
validation: {every: null, num_batches: null, at_start: false}
logging: {report: false}
"""


def two_steps(
    rank: int, world: int, folder: Path, overrides: Sequence[str]
) -> dict[str, tuple[list[dict[str, float]], str]]:
    """What the steps of a run measure with shared prompts and without, and what its header says of them."""
    from automodel_cli.rollout.rollout_manager import Rollouts
    from tests.dist.sessions import session

    found = {}
    for share in ("auto", "false"):
        with session(
            folder, RUN, f"rollout.share_prompt_prefix={share}", f"run_name=share_{share}", *overrides
        ) as opened:
            recipe, steps = opened.recipe, []
            rollouts = Rollouts(opened, recipe.rollout, recipe.rewards, recipe.objective, recipe.teacher)
            opened.callbacks.add(rollouts)
            for step, prompts in opened.steps():
                rollout = rollouts.collect(step, prompts)
                batches = [batch for update in rollout.updates for batch in update.batches]
                with rollouts.scoring():
                    measured = opened.train(step, *rollout.passes(), shown=rollout.shown, unshown=rollout.unshown)
                rollouts.sync(step)
                rows = sum(len(batch.input_ids_BT) for batch in batches)
                steps.append({"rows": rows, **{name: value.item() for name, value in measured.items()}})
            found[share] = steps, dict(rollouts.about)["prompts"]
    return found


VARIANTS = {
    "reference": ("objective.kl_coef=0.1",),
    "critic": ("objective=ppo", "rollout.advantage_estimator=critic", "objective.value_coef=1.0"),
    "teacher": ("objective=gkd", "teacher={pretrained: teacher}", "rollout.advantage_estimator=group"),
}


@pytest.mark.parametrize("variant", ["critic", *slow(*(name for name in VARIANTS if name != "critic"))])
def test_a_run_measures_the_same_in_fewer_rows(tmp_path, variant):
    """Two updates of a rollout: the passes of what it reads before them, the updates, and the next step's weights."""
    if variant == "teacher":
        tiny.build_hf("llama", vocab_size=512).save_pretrained(tmp_path / "teacher")
    found = launch(two_steps, 1, tmp_path, VARIANTS[variant], process_group=False)
    (shared, said), (apart, said_apart) = found["auto"], found["false"]
    assert said == "shared by the responses of a group in the update"
    assert said_apart.endswith("rollout.share_prompt_prefix=false")
    for ours, theirs in zip(shared, apart, strict=True):
        assert ours.pop("rows") < theirs.pop("rows")
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-6)
