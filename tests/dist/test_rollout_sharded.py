"""The sampler on sharded models: every layout draws the tokens, with the log-probs, that one process draws.

Data-parallel ranks have different numbers of prompts, one of them none: forwards must not need company once weights are
gathered, and must keep in step where experts are exchanged.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.models.attention.packed import packed_attention, register_packed_attention
from automodel_cli.models.builder import part_of
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lm_head.head import HeadKind
from automodel_cli.models.model_part import ModelPart
from automodel_cli.parity.cases import FP32
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.torch_runtime.fsdp_compat import fsdp_roots
from automodel_cli.rollout.engines.base import sample_seed
from automodel_cli.rollout.engines.policy_engine import build_sampler
from automodel_cli.rollout.engines.sampler import cuda_graphs
from automodel_cli.rollout.engines.sampler.decoder import Decoder
from automodel_cli.rollout.engines.sampler.sampler import Sampler
from automodel_cli.rollout.types import SamplingParams
from automodel_cli.training.stages import SingleStage
from tests import tiny
from tests.dist.harness import launch_all
from tests.hybrids import HYBRIDS, hybrid
from tests.marks import nightly

PARAMS = SamplingParams(max_new_tokens=9, temperature=0.8, top_p=0.9)
STOP = [2, 5, 9, 30, 77]
COUNTS = (5, 2, 0, 7)  # prompts of each data-parallel rank


def prompts_of(dp_rank: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(dp_rank)
    lengths = torch.randint(1, 12, (COUNTS[dp_rank],), generator=generator).tolist()
    return [torch.randint(3, tiny.VOCAB, (n,), generator=generator).tolist() for n in lengths]


def seeds_of(dp_rank: int) -> list[int]:
    return [sample_seed(0, dp_rank, i) for i in range(COUNTS[dp_rank])]


def num_layers(schedule: str | None) -> int:
    """Two stages on each of two ranks have a layer each."""
    return tiny.NUM_LAYERS if schedule in ("interleaved_1f1b", "zbv") else 2


def whole_part(family: str, layers: int = 2) -> ModelPart:
    if family in HYBRIDS:
        small, library = hybrid(family)
        part = part_of(small, ModelConfig(pretrained="-"), device="cpu")
        part.model.load_state_dict(library.state_dict())
        return part
    register_packed_attention()
    model = tiny.build_hf(family, num_hidden_layers=layers)
    model.set_attn_implementation("packed")
    return ModelPart(model, HeadKind("plain"))


@cache
def alone(family: str, layers: int):
    sampler = Sampler(
        Decoder.from_part(whole_part(family, layers)), packed_attention, stop_token_ids=STOP, max_num_seqs=3
    )
    return [sampler.generate(prompts_of(rank), PARAMS, seeds_of(rank)) for rank in range(len(COUNTS))]


def _generate(rank, world, family, mesh_config, pipeline, parallelizer):
    """This rank's completions; checks that the model trains afterwards as if nothing had been generated."""
    mesh = build_mesh(mesh_config.resolve(world), "cpu")
    config = parallelizer or FSDP2Config(mp_policy=FP32)
    part = whole_part(family, num_layers(pipeline))
    if pipeline is None:
        stages = SingleStage(parallelize(part, mesh, config))
    else:
        stages = build_stages(part, mesh, PipelineConfig(schedule=pipeline), config, num_microbatches=4)
    said = cuda_graphs.obstacle(stages.parts, replace(mesh, device=torch.device("cuda")))
    layout = mesh.layout
    assert bool(said) == (layout.pp * layout.ep * layout.tp * layout.cp > 1 or family in HYBRIDS), said
    sampler = build_sampler(stages, mesh, stop_token_ids=STOP, max_num_seqs=2)
    completions = []
    for _ in range(2):  # the second phase gathers again
        completions = sampler.generate(prompts_of(mesh.dp_rank), PARAMS, seeds_of(mesh.dp_rank))
        sharded = [p for module in stages.parts for p in module.parameters() if isinstance(p, DTensor)]
        assert sharded or parallelizer is not None, "weights stayed gathered"
    assert all(module.training for part in stages.parts for module in part.modules())
    batches = [tiny.packed_batch([[tiny.token_row(10, rank)]]) for _ in range(4)]
    loss = stages.forward_backward(
        batches, lambda output, batch: -output.logprobs_BT[batch.labels_BT != IGNORE_INDEX].sum()
    )
    assert loss.isfinite() and all(p.grad is not None for m in stages.parts for p in m.parameters())
    return mesh.dp_rank, [(c.tokens, c.logprobs, c.finish_reason) for c in completions]


def _frozen(rank, world):
    """As `_generate`, by traced steps, the second phase by one that fails on rank 1; and how often a stream waited in
    the steps as they are and as they are frozen."""
    mesh = build_mesh(MeshConfig(dp_size=world).resolve(world), "cpu")
    stages = SingleStage(parallelize(whole_part("llama"), mesh, FSDP2Config(mp_policy=FP32)))
    with pytest.raises(ConfigError, match="the device is cpu"):
        cuda_graphs.settled(True, stages.parts, mesh)
    cuda_graphs._FEWEST_SLOTS, cuda_graphs._SHORTEST, cuda_graphs._EAGER = 2, 16, 0
    waits, called = [], []
    torch.cpu.Stream.wait_stream = lambda self, stream: waits.append(stream)

    def capture(step, inputs_B3):
        before = len(waits)
        frozen = make_fx(step)(inputs_B3)
        called.append((len(waits) - before, [str(n.target) for n in frozen.graph.nodes if "c10d" in str(n.target)]))
        if rank == 1 and len(called) > 2:
            raise RuntimeError("not this one")
        return lambda: frozen(inputs_B3)

    frozen = cuda_graphs.of_gathered(capture, [root for part in stages.parts for root in fsdp_roots(part)])
    sampler = build_sampler(stages, mesh, stop_token_ids=STOP, max_num_seqs=2, capture=frozen)
    for _ in range(2):
        completions = sampler.generate(prompts_of(mesh.dp_rank), PARAMS, seeds_of(mesh.dp_rank))
        assert all(isinstance(p, DTensor) for module in stages.parts for p in module.parameters())
    return mesh.dp_rank, [(c.tokens, c.logprobs, c.finish_reason) for c in completions], called, len(waits)


def check(world, family, mesh_config, pipeline=None, parallelizer=None):
    found = launch_all(_generate, world, family, mesh_config, pipeline, parallelizer)
    return compare(found, family, num_layers(pipeline))


def compare(results, family, layers=2):
    seen = set()
    for dp_rank, completions in results:
        seen.add(dp_rank)
        expected = alone(family, layers)[dp_rank]
        assert [tokens for tokens, _, _ in completions] == [c.tokens for c in expected]
        assert [reason for _, _, reason in completions] == [c.finish_reason for c in expected]
        for (_, logprobs, _), want in zip(completions, expected, strict=True):
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(want.logprobs), atol=1e-5, rtol=0)
    return seen


@pytest.mark.parametrize("family", ["llama", *nightly("deepseek_v3")])
def test_fsdp2_with_an_idle_rank(family):
    assert check(4, family, MeshConfig(dp_size=4)) == {0, 1, 2, 3}


@pytest.mark.slow
def test_frozen_steps_on_gathered_weights_hold_no_gather_and_a_rank_may_go_on_without():
    results = launch_all(_frozen, 2)
    compare([result[:2] for result in results], "llama")
    for _, _, called, waits in results:
        assert called and all(inside == (0, []) for inside in called)
        assert waits > 0, "steps as they are make streams wait"


def test_hybrid_sharding_and_ddp():
    check(4, "llama", MeshConfig(dp_size=4, dp_replicate_size=2))
    check(2, "llama", MeshConfig(dp_size=2), parallelizer=DDPConfig())


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gpt_oss", *nightly("qwen3_moe", "deepseek_v3")])
def test_expert_parallel_ranks_keep_in_step(family):
    check(4, family, MeshConfig(dp_size=4, ep_size=2))


@pytest.mark.parametrize(
    ("family", "schedule"),
    [
        pytest.param("llama", "1f1b", marks=pytest.mark.nightly),
        ("gpt_oss", "interleaved_1f1b"),
        ("llama", "zbv"),
    ],
)
def test_pipeline(family, schedule):
    check(2, family, MeshConfig(dp_size=1, pp_size=2), schedule)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", *nightly("deepseek_v3")])
def test_pipeline_of_expert_parallel_stages(family):
    assert check(4, family, MeshConfig(dp_size=2, pp_size=2, ep_size=2), "1f1b") == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "schedule"),
    [
        ("qwen3_5_moe_text", {"dp_size": 2, "ep_size": 2}, None),
        ("falcon_h1", {"dp_size": 1, "pp_size": 2}, "interleaved_1f1b"),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in (
                ("qwen3_5_text", {"dp_size": 1, "pp_size": 2}, "1f1b"),
                ("qwen3_5_text", {"dp_size": 1, "tp_size": 2}, None),
                ("qwen3_5_text", {"dp_size": 1, "cp_size": 2}, None),
                ("nemotron_h", {"dp_size": 2, "ep_size": 2}, None),
                ("kimi_linear", {"dp_size": 1, "pp_size": 2}, "zbv"),
                ("minimax", {"dp_size": 1, "pp_size": 2}, "1f1b"),
            )
        ),
    ],
)
def test_states_of_each_layout(family, layout, schedule):
    check(2, family, MeshConfig(**layout), schedule)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dp"), [("llama", 1), pytest.param("qwen3_moe", 2, marks=pytest.mark.nightly)])
def test_tensor_parallel_ranks_draw_the_same(family, dp):
    check(2 * dp, family, MeshConfig(dp_size=dp, tp_size=2))


def test_context_parallel_ranks_generate_the_same():
    check(2, "gpt_oss", MeshConfig(dp_size=1, cp_size=2))
