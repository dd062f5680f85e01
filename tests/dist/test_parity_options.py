"""Options of the parallelizers: each acts, and none changes the numbers unless it is meant to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import CPUOffload, DDPConfig, MixedPrecision
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import fsdp2_strategy_parallelize, parallelize
from automodel_cli.models.model_part import ModelPart
from automodel_cli.objectives.sft import SFT
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import RankFailure, launch, launch_all
from tests.dist.parity import FP32, FSDP2, Case, GradientRecorder, compare, step_batches, tiny_part
from tests.errors import raises
from tests.marks import nightly

pytestmark = pytest.mark.slow

EXACT = {
    "checkpointing full": replace(FSDP2, activation_checkpointing="full"),
    "checkpointing selective": replace(FSDP2, activation_checkpointing="selective"),
    "checkpointing every 2nd": replace(FSDP2, activation_checkpointing=2),
    "prefetch": replace(FSDP2, enable_fsdp2_prefetch=True),
    "prefetch 3, 2": replace(
        FSDP2, enable_fsdp2_prefetch=True, fsdp2_backward_prefetch_depth=3, fsdp2_forward_prefetch_depth=2
    ),
    "prefetch, checkpointing": replace(FSDP2, enable_fsdp2_prefetch=True, activation_checkpointing="selective"),
    "sync each microbatch": replace(FSDP2, defer_fsdp_grad_sync=False),
    "cpu offload": replace(FSDP2, offload_policy=CPUOffload()),
    "output dtype": replace(FSDP2, mp_policy=replace(FP32, output_dtype="float32")),
    "ddp, checkpointing": DDPConfig(activation_checkpointing="selective"),
    "ddp, buckets": DDPConfig(bucket_cap_mb=0.05, gradient_as_bucket_view=True, broadcast_buffers=True),
    "ddp, unused": DDPConfig(find_unused_parameters=True),
}
COMPILED = {
    "fsdp2": replace(FSDP2, enable_compile=True, compile_backend="aot_eager"),
    "fsdp2, selective": replace(
        FSDP2, enable_compile=True, compile_backend="aot_eager", activation_checkpointing="selective"
    ),
    "ddp, checkpointing": DDPConfig(enable_compile=True, compile_backend="aot_eager", activation_checkpointing=True),
}
FUSED_OPS = {"enable_compile": "fused_ops", "compile_backend": "aot_eager"}
COMPILED |= {
    "fsdp2, fused_ops": replace(FSDP2, activation_checkpointing=2, **FUSED_OPS),
    "tp, fused_ops": replace(FSDP2, sequence_parallel=True, **FUSED_OPS),
}
REDUCED = {
    "bfloat16": replace(FSDP2, mp_policy=MixedPrecision()),
    "bfloat16 by default": replace(FSDP2, mp_policy=None),
    "autocast": replace(FSDP2, autocast_dtype="bfloat16"),
    "ddp, autocast": DDPConfig(autocast_dtype="bfloat16"),
}


def test_numbers_do_not_change():
    cases = [
        Case("qwen3", config=config, num_layers=4 if "prefetch" in option else 2) for option, config in EXACT.items()
    ]
    found = launch(compare, 2, cases)
    for option, errors in zip(EXACT, found, strict=True):
        assert errors.within_rounding(), (option, errors)


def _compiled(rank, world, case):
    errors = compare(rank, world, [case])
    return errors, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "option", ["fsdp2, selective", *nightly("fsdp2", "ddp, checkpointing", "fsdp2, fused_ops"), "tp, fused_ops"]
)
def test_compiled_layers_give_the_same_numbers(option):
    """By default one; test_verify_rows has whole layers around packed attention, unit/distributed/test_fused the
    fused operations."""
    case = Case("qwen3", config=COMPILED[option], num_layers=2)
    if "selective" in option:  # must be one graph, which packed attention on a CPU breaks
        case = replace(case, packed=False, attention="eager")
    if "tp" in option:
        case = replace(case, mesh=MeshConfig(tp_size=2))
    (errors,), num_graphs = launch(_compiled, 2, case)
    assert errors.within_rounding() and num_graphs > 0, (errors, num_graphs)


def test_static_graph_works_with_one_microbatch_and_is_refused_with_more():
    case = Case("qwen3", num_microbatches=1, config=DDPConfig(static_graph=True), num_layers=2)
    (errors,) = launch(compare, 2, [case])
    assert errors.within_rounding(), errors
    with pytest.raises(RankFailure, match=r"fix +parallelizer.static_graph=false"):
        launch(compare, 2, [replace(case, num_microbatches=3)])


def test_reduced_precision_is_close_and_really_reduced():
    found = launch(compare, 2, [Case(config=config, num_layers=2) for config in REDUCED.values()])
    for option, errors in zip(REDUCED, found, strict=True):
        assert 1e-5 < errors.gradient < 0.1, (option, errors)
        assert errors.loss < 1e-2 and errors.grad_norm < 5e-2, (option, errors)


KINDS = {
    "gathers": ("c10d._allgather_base_",),
    "scatters": ("c10d._reduce_scatter",),
    "reductions": ("chunk_cat",),  # also those of one rank, which scatter nothing
    "matmuls": ("aten.mm.", "aten.addmm."),
}


class _Count(TorchDispatchMode):
    """How often operators ran whose name contains one of these."""

    def __init__(self):
        super().__init__()
        self.counts = dict.fromkeys(KINDS, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for kind, names in KINDS.items():
            self.counts[kind] += any(name in str(func) for name in names)
        return func(*args, **(kwargs or {}))


def _operators(config, world, *, pp_size=1, ep_size=1):
    """What one step runs; with `pp_size`, on what a pipeline stage gets, without the pipeline."""
    mesh = build_mesh(MeshConfig(ep_size=ep_size).resolve(world), "cpu")
    part = tiny_part("llama" if ep_size == 1 else "qwen3_moe")
    if ep_size == 1:
        fsdp2_strategy_parallelize(part, mesh.fsdp, config=config, pp_size=pp_size)
    else:
        parallelize(part, mesh, config)
    batches = step_batches(Case(), world)[mesh.dp_rank]
    with _Count() as count:
        train_step(SingleStage(part), batches, SFT(), GradientRecorder(part), mesh, max_grad_norm=None)
    return count.counts


def _communication(rank, world):
    return [
        _operators(FSDP2, world),
        _operators(replace(FSDP2, defer_fsdp_grad_sync=False), world),
        _operators(FSDP2, world, pp_size=2),
        _operators(replace(FSDP2, defer_fsdp_grad_sync=False), world, ep_size=2),
    ]


def test_gradients_are_reduced_once_per_step_unless_asked_and_a_pipeline_keeps_parameters():
    deferred, each, pipeline, experts = launch(_communication, 2)
    units, microbatches = tiny.NUM_LAYERS + 3, 3  # layers, embedding, head and the root
    assert deferred["scatters"] == pipeline["scatters"] == units
    assert each["scatters"] == units * microbatches
    # experts that one rank has for itself have nobody to be summed with, and wait for the last microbatch
    assert each["reductions"] == units * microbatches
    assert experts["reductions"] == units * microbatches + tiny.NUM_LAYERS
    assert pipeline["gathers"] == units * microbatches
    # all but the embedding, the last layer, the head and the root are gathered again for backward
    assert deferred["gathers"] == each["gathers"] == (units + units - 4) * microbatches


def _matmuls(rank, world):
    modes = (False, "selective", 2, "full")
    return [_operators(replace(FSDP2, activation_checkpointing=mode), world)["matmuls"] for mode in modes]


def test_checkpointing_recomputes_what_it_says():
    none, selective, every_second, full = launch(_matmuls, 1)
    assert none == selective < every_second < full  # selective keeps every matrix product
    assert full - none == 2 * (every_second - none)


def _dtypes_and_modes(rank, world):
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    part = tiny_part("llama")
    parallelize(part, mesh, replace(FSDP2, mp_policy=None))
    stages = SingleStage(part)
    batches = step_batches(Case(), world)[rank]
    part.model.model.layers[0].mlp.eval()
    (first, *_) = stages.forward(batches, lambda output, batch: output.logprobs_BT)
    kinds = {type(param) for param in part.parameters()}
    modes = part.training, part.model.model.layers[0].mlp.training
    return first.dtype, first.requires_grad, [k is DTensor or issubclass(k, DTensor) for k in kinds], modes


def test_forward_leaves_shards_and_modes_as_they_were():
    for dtype, requires_grad, sharded, modes in launch_all(_dtypes_and_modes, 2):
        assert dtype == torch.float32 and not requires_grad
        assert sharded == [True]
        assert modes == (True, False)


def _refusals(rank, world):
    mesh = build_mesh(MeshConfig(tp_size=2).resolve(world), "cpu")
    with raises(ConfigError, "unsupported_combination", keys=("mesh.tp_size",), fix="mesh.tp_size=1"):
        parallelize(tiny_part("llama"), mesh, DDPConfig())
    one_axis = build_mesh(MeshConfig().resolve(world), "cpu")
    with raises(ConfigError, "not_supported_by_model", keys=("model",), values=("Linear",)):
        parallelize(torch.nn.Linear(2, 2), one_axis, FSDP2)


def test_what_cannot_be_honoured_is_refused():
    launch(_refusals, 2)


def _ddp_on_meta(rank, world):
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    real = tiny_part("llama")
    with torch.device("meta"):
        model = type(real.model)(tiny.tiny_config("llama", tie_word_embeddings=True))
    part = ModelPart(model, real.head.kind)
    wrapped = parallelize(part, mesh, DDPConfig())
    tied = part.model.lm_head.weight is part.model.model.embed_tokens.weight
    return SingleStage(wrapped).parts[0] is part, tied, any(p.is_meta for p in part.parameters())


def test_ddp_allocates_a_meta_part_and_keeps_ties():
    assert launch(_ddp_on_meta, 2) == (True, True, False)


def _wrapped(rank, world):
    mesh = build_mesh(MeshConfig().resolve(1), "cpu")
    plain = replace(FSDP2, mp_policy=MixedPrecision(param_dtype="float32", reduce_dtype=None))
    configs = (FSDP2, plain, replace(FSDP2, mp_policy=None), replace(FSDP2, offload_policy=CPUOffload()))
    return [isinstance(parallelize(tiny_part("llama"), mesh, config), FSDPModule) for config in configs]


def test_one_rank_is_wrapped_only_where_that_changes_something():
    assert launch(_wrapped, 1) == [False, False, True, True]
