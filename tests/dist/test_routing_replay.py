"""Samples that bring their experts along: every layout against the library's model in one process, whose routers are
forced by hand; and what the sampler records under each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from automodel_cli.config.errors import RunError
from automodel_cli.data.batch import ROUTED_EXPERTS, Batch
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.moe.load_balancing import routers
from automodel_cli.models.moe.router_hooks import install_routing, selectors_of
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import Errors, GradientRecorder, step_errors
from automodel_cli.parity.reference import Reference, exact_process
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.rollout.engines.base import sample_seed
from automodel_cli.rollout.engines.policy_engine import build_sampler
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.types import Completion, Sample, SamplingParams
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch, launch_all
from tests.dist.test_grpo import OBJECTIVE, built, given_samples, updates_of, with_columns

pytestmark = pytest.mark.slow

FAMILY = "qwen3_moe"
K = 2


def routed_samples() -> list[Sample]:
    """The same samples, each token but the last one with two experts at random in every layer."""
    samples = []
    for number, sample in enumerate(given_samples()):
        generator = torch.Generator().manual_seed(1000 + number)
        scores = torch.rand(sample.length - 1, tiny.NUM_LAYERS, 8, generator=generator)
        samples.append(replace(sample, routed_experts=scores.topk(K).indices.numpy().astype(np.uint8)))
    return samples


def force(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Make each call of the model the next document of these batches, with its experts; after the last, the first."""
    documents: list[Tensor] = []
    for batch in batches:
        experts_NLK = batch.extra[ROUTED_EXPERTS].flatten(0, 1).unflatten(-1, (tiny.NUM_LAYERS, K)).long()
        documents += experts_NLK.tensor_split(batch.cu_seqlens[1:-1].long())
    coming, current = cycle(documents), [torch.empty(0)]

    def routed(router: Any, layer: int) -> Any:
        def forward(hidden_ND: Tensor) -> tuple[None, Tensor, Tensor]:
            probs_NE = (hidden_ND @ router.weight.T).softmax(-1)
            given_NK = current[0][:, layer]
            index_NK = torch.where(given_NK >= 0, given_NK, probs_NE.topk(K).indices)
            gates_NK = probs_NE.gather(-1, index_NK)
            return None, gates_NK / gates_NK.sum(-1, keepdim=True), index_NK

        return forward

    model.register_forward_pre_hook(lambda *_: current.__setitem__(0, next(coming)))
    for layer, (_, _, router) in enumerate(routers(model)):
        router.forward = routed(router, layer)  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and what one process makes of the samples with their experts, in float64."""
    folder = tmp_path_factory.mktemp("routed")
    model = tiny.build_hf(FAMILY)
    model.save_pretrained(folder / FAMILY)
    samples = routed_samples()
    (update,) = updates_of(samples, packed=False)
    batches = with_columns(update, samples).batches
    force(model, batches)
    torch.save(vars(exact_process(model, batches, OBJECTIVE)), folder / f"{FAMILY}.pt")
    return folder


def row(*, schedule: str = "1f1b", recompute: bool = True, **sizes: int) -> Case:
    mesh = MeshConfig(**{f"{name}_size": size for name, size in sizes.items()})
    config = FSDP2Config(mp_policy=FP32, activation_checkpointing="full" if recompute else False)
    pipeline = PipelineConfig(schedule=schedule) if sizes.get("pp", 1) > 1 else None
    return Case(mesh, config, pipeline, objective=OBJECTIVE)


def updated(rank: int, world: int, folder: Path, rows: Sequence[Case]) -> list[tuple[Errors, float]]:
    """What an update on the samples differs by from one process, and the mismatch that it counts."""
    found = []
    for which in rows:
        mesh, stages = built(folder, FAMILY, which, world)
        routing = install_routing(stages.parts, selectors_of(tiny.tiny_config(FAMILY)), mesh.device, stages.pp_group)
        samples = routed_samples()
        (update,) = updates_of(samples, which.packed, mesh.dp_rank, mesh.dp_size)
        recorder, batches = GradientRecorder(*stages.parts), with_columns(update, samples).batches
        result = train_step(stages, batches, OBJECTIVE, recorder, mesh, max_grad_norm=None, hooks=[routing])
        wanted = Reference(**torch.load(folder / f"{FAMILY}.pt"))
        found.append((step_errors(wanted, result, recorder.gradients), result.metrics["routing_mismatch"].item()))
    return found


LAYOUTS = {
    1: [row(), row(recompute=False)],
    2: [row(dp=2, ep=2), row(pp=2), row(cp=2), row(tp=2)],
}


@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts_replay_what_one_process_with_forced_routers_computes(folder, world):
    (_, mismatch), *_ = launch(updated, 1, folder, [row()])
    assert 0.8 < mismatch < 1  # two of eight at random are the router's own once in 28
    for which, (errors, counted) in zip(LAYOUTS[world], launch(updated, world, folder, LAYOUTS[world]), strict=True):
        assert errors.within_rounding(), f"{which}: {errors}"
        assert counted == pytest.approx(mismatch, abs=0.01), which


@pytest.mark.parametrize("which", [row(pp=2, dp=2, ep=2), row(pp=2, dp=2, ep=2, schedule="interleaved1f1b")])
def test_stages_with_experts_over_ranks_replay_them(folder, which):
    ((errors, _),) = launch(updated, 4, folder, [which])
    assert errors.within_rounding(), errors


def recorded(rank: int, world: int, folder: Path, rows: Sequence[Case]) -> list[dict[int, list[Any]]]:
    """By number of the prompt: the tokens that are drawn and the experts that are told."""
    params = SamplingParams(max_new_tokens=6, routing=True)
    found = []
    for which in rows:
        mesh, stages = built(folder, FAMILY, which, world)
        install_routing(stages.parts, selectors_of(tiny.tiny_config(FAMILY)), mesh.device, stages.pp_group)
        sampler = build_sampler(stages, mesh, stop_token_ids=[5, 9], max_num_seqs=3)
        prompts = [sample.prompt.tokens for sample in given_samples()]
        mine = list(range(len(prompts)))[mesh.dp_rank :: mesh.dp_size]
        drawn = sampler.generate([prompts[i] for i in mine], params, [sample_seed(0, i) for i in mine])
        experts = [None if c.routed_experts is None else np.sort(c.routed_experts).tolist() for c in drawn]
        found.append({i: [c.tokens, chosen] for i, c, chosen in zip(mine, drawn, experts, strict=True)})
    return found


def test_layouts_record_what_one_process_records(folder):
    (want,) = launch(recorded, 1, folder, [row()])
    assert all(
        len(experts) == len(given_samples()[i].prompt.tokens) + len(tokens) - 1 for i, (tokens, experts) in want.items()
    )
    every_rank = launch_all(recorded, 2, folder, LAYOUTS[2])
    for number, which in enumerate(LAYOUTS[2]):
        for of_rank in every_rank:
            assert of_rank[number].items() <= want.items(), which
        assert {i for of_rank in every_rank for i in of_rank[number]} == set(want)


RUN = """
defaults: [grpo, {data: chat_tasks}, {override rewards: none}, _self_]
model: {pretrained: null, config: {model_type: qwen3_moe, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
  num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16, num_experts: 8, num_experts_per_tok: 2,
  moe_intermediate_size: 24, decoder_sparse_step: 1, vocab_size: 512},
  tokenizer: {_target_: automodel_cli.models.tokenizer.ByteTokenizer}}
data: {seq_len: 128}
rollout: {prompts_per_step: 2, group_size: 2, max_new_tokens: 6, advantage_estimator: batch, log_samples_every: null,
  replay_routing: true}
rewards:
  digits: {_target_: automodel_cli.rollout.rewards.text.FormatRegex, pattern: ".*[0-9].*", timeout: null}
parallelizer: {mp_policy: {param_dtype: float32}}
train: {global_batch_size: 4, microbatch_size: 1, max_steps: 2, epochs: null, num_cpu_threads: 1}
validation: {every: null, num_batches: null, at_start: false}
logging: {report: false}
"""


def replayed_run(rank: int, world: int, folder: Path, overrides: Sequence[str]) -> list[dict[str, float]]:
    """What the steps of a run measure."""
    from automodel_cli.rollout.rollout_manager import Rollouts
    from tests.dist.sessions import session

    found = []
    with session(folder, RUN, *overrides) as opened:
        recipe = opened.recipe
        rollouts = Rollouts(opened, recipe.rollout, recipe.rewards, recipe.objective)
        opened.callbacks.add(rollouts)
        for step, prompts in opened.steps():
            rollout = rollouts.collect(step, prompts)
            with rollouts.scoring():
                measured = opened.train(step, *rollout.passes(), shown=rollout.shown, unshown=rollout.unshown)
            rollouts.sync(step)
            names = ("logprob_abs_diff", "logprob_abs_diff_without_replay")
            found.append({"mismatch": measured["routing_mismatch"].item(), **{n: rollout.unshown[n] for n in names}})
    return found


def test_a_run_that_samples_its_own_weights_has_no_mismatch(tmp_path):
    live = launch(replayed_run, 1, tmp_path, (), process_group=False)
    assert [step["mismatch"] for step in live] == [0, 0]
    assert all(max(step["logprob_abs_diff"], step["logprob_abs_diff_without_replay"]) < 1e-5 for step in live)


def refused_run(rank: int, world: int, folder: Path, overrides: Sequence[str]) -> str:
    """What is said before the first step of an engine that knows nothing of the second layer's experts."""
    from automodel_cli.rollout.rollout_manager import Rollouts
    from tests.dist.sessions import session

    def forgetful(self: HFEngine, *args: Any) -> list[Completion]:
        found = generate(self, *args)
        for completion in found:
            assert completion.routed_experts is not None
            completion.routed_experts[:, 1] = 0
        return found

    generate = HFEngine.generate
    with pytest.MonkeyPatch.context() as patch, session(folder, RUN, *overrides) as opened:
        patch.setattr(HFEngine, "generate", forgetful)
        recipe = opened.recipe
        with pytest.raises(RunError) as error:
            Rollouts(opened, recipe.rollout, recipe.rewards, recipe.objective)
    return str(error.value)


def test_an_engine_that_does_not_know_of_a_layer_is_refused_before_the_first_step(tmp_path):
    said = launch(refused_run, 1, tmp_path, ("rollout=hf",), process_group=False)
    assert "expert 0 twice for token 0 in MoE layer 1" in said


def test_a_run_on_stale_samples_has_a_mismatch(tmp_path):
    stale = (
        "rollout=hf",
        "rollout.max_off_policy_steps=1",
        "objective.sampler_correction=truncate",
        "objective.sampler_correction_clip_max=2.0",
    )
    first, second = launch(replayed_run, 1, tmp_path, (*stale, "optimizer.lr=0.03"), process_group=False)
    assert first["mismatch"] == 0 and second["mismatch"] > 0.01
    assert second["logprob_abs_diff"] > 1e-3 and second["logprob_abs_diff"] != second["logprob_abs_diff_without_replay"]
