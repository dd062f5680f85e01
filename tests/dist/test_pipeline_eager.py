"""Megatron-core's pipeline functions against one process, and against the torch runtime."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.pipelining.megatron_core.config import ModelParallelConfig, ProcessGroupCollection
from automodel_cli.pipelining.megatron_core.finalize import finalize_model_grads
from automodel_cli.pipelining.megatron_core.forward_backward import forward_backward_no_pipelining
from automodel_cli.pipelining.megatron_core.p2p import P2PCommunicator
from tests.dist import pipeline_cases
from tests.dist.eager_cases import Chunk, Row, forward_step, reference, run_rows, step
from tests.dist.harness import launch, launch_all
from tests.dist.pipeline_cases import Case
from tests.dist.turns import in_turns
from tests.marks import nightly
from tests.rounding import tolerance
from tests.tiny import gradient_error, gradients

pytestmark = pytest.mark.slow

ONE_BY_ONE = (("batch_p2p_comm", False),)
OVERLAP = (*ONE_BY_ONE, ("overlap_p2p_comm", True))
FLUSH = (*OVERLAP, ("overlap_p2p_comm_warmup_flush", True))
RELEASE = (("deallocate_pipeline_outputs", True),)
FUNCTION_FAMILIES = ("llama", "gpt_oss", "qwen3_moe")


def group(size: int) -> tuple[tuple[str, Any], ...]:
    return (("microbatch_group_size_per_vp_stage", size),)


def check_rows(world: int, rows: list[Row]) -> None:
    per_rank = launch_all(run_rows, world, rows, timeout=60 + 20 * len(rows))
    wrong = [f"{row}: {errors}" for row, *errors in zip(rows, *per_rank, strict=True) if not max(errors) <= tolerance()]
    assert not wrong, "\n".join(wrong)


# The functions as their users call them.


def test_functions_on_two_ranks():
    check_rows(
        2,
        [
            Row(kind="masked", loss="microbatch", flags=(*ONE_BY_ONE, *RELEASE)),
            Row("gpt_oss", kind="variable", loss="token", m=1),
            Row(v=1, m=2),
            Row("qwen3_moe", v=2, m=5, loss="token", flags=(*RELEASE, *group(3))),
            Row(v=2, kind="variable"),
            Row(v=2, flags=(*FLUSH, *RELEASE)),
            Row(v=2, m=6, flags=(*OVERLAP, *RELEASE, *group(6))),
        ],
    )


def test_functions_on_four_ranks():
    check_rows(
        4,
        [
            Row(kind="variable", loss="token", m=3, flags=RELEASE),
            # Two ranks run everything before their first backward here and serve activations and gradients in separate
            # calls, while the others exchange both at once.
            Row(v=2, m=4, kind="variable"),
            Row(v=2, m=9, loss="token", flags=(*FLUSH, *RELEASE, *group(5))),
        ],
    )


@pytest.mark.parametrize("world", [2, *nightly(4)])
@pytest.mark.parametrize("family", FUNCTION_FAMILIES)
def test_function_matrix(world: int, family: str):
    kinds, posted = ("packed", "variable", "masked"), (RELEASE, (*ONE_BY_ONE, *RELEASE))
    single = [Row(family, None, m, kind, flags=f) for f, m, kind in itertools.product(posted, (1, 4, 7), kinds)]
    shapes = [(4, 4), (8, 4), (8, 8), (11, 6)]
    multi = [Row(family, 2, m, k, "token", (*RELEASE, *group(g))) for (m, g), k in itertools.product(shapes, kinds)]
    early = itertools.product(shapes, (OVERLAP, FLUSH))
    multi += [Row(family, 2, m, flags=(*f, *RELEASE, *group(g))) for (m, g), f in early]
    check_rows(world, in_turns(single + multi, world, FUNCTION_FAMILIES.index(family)))


def _token_mean(rank: int, world: int) -> float:
    """Two data-parallel ranks without a pipeline, unequal label counts: the mean over all tokens."""
    case = Case("1F1B", kind="masked")
    part = pipeline_cases.whole_part(case, 2)
    batches = [pipeline_cases.make_batches(case, 2 + r, 0, r) for r in range(world)]
    groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)

    def finalize(models: Any, num_tokens: Any) -> None:
        for param in part.parameters():
            dist.all_reduce(param.grad)
        finalize_model_grads(models, num_tokens, pg_collection=groups)

    config = ModelParallelConfig(hidden_size=64, calculate_per_token_loss=True, finalize_model_grads_func=finalize)
    chunk = Chunk(part, config, "token")
    stored = forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=[iter(batches[rank])],
        model=[chunk],
        num_microbatches=len(batches[rank]),
        seq_length=1,
        micro_batch_size=18,
    )
    assert len(stored) == len(batches[rank])
    got = gradients(part)
    _, want = reference(part, [batch for own in batches for batch in own], "token")
    return gradient_error(want, got)


def test_token_mean_over_data_parallel_ranks():
    assert launch(_token_mean, 2) <= tolerance()


def _shared_embedding(rank: int, world: int) -> list[float]:
    table = torch.nn.Parameter(torch.zeros(2)) if rank != 1 else None
    if rank == 0:
        table.grad = torch.tensor([1.0, 2.0])  # type: ignore[union-attr]
    model = torch.nn.ParameterList([table] if table is not None else [])
    embd = dist.new_group([0, 2])
    groups = ProcessGroupCollection(pp=dist.group.WORLD, embd=embd if table is not None else None)
    tokens = torch.tensor(4 if rank == world - 1 else 0)
    finalize_model_grads([model], tokens, pg_collection=groups, shared_embedding=table)
    return [] if table is None else table.grad.tolist()


def test_copies_are_summed_before_tokens_divide():
    assert launch_all(_shared_embedding, 3) == [[0.25, 0.5], [], [0.25, 0.5]]


# The communicator.


def _every_method(rank: int, world: int, batched: bool) -> list[Any]:
    """Every method once, where all ranks make matching calls; what each receive returned."""
    config = ModelParallelConfig(hidden_size=2, pipeline_dtype=torch.float32, batch_p2p_comm=batched)
    p2p = P2PCommunicator(dist.group.WORLD, config)
    first, last, shape = p2p.is_pp_first_stage, p2p.is_pp_last_stage, (2, 1, 2)

    def mine(value: int) -> torch.Tensor:
        return torch.full(shape, float(value + rank), requires_grad=True)

    def value(got: Any) -> Any:
        assert got is None or (got.shape == shape and got.requires_grad)
        return None if got is None else got[0, 0, 0].item()

    seen = [value(p2p.recv_forward(shape, first))]
    p2p.send_forward(mine(10), last)
    seen.append([value(t) for t in p2p.recv_backward([shape, shape], last)])
    p2p.send_backward([mine(20), mine(30)], first)
    pair = p2p.send_forward_recv_backward if rank % 2 == 0 else p2p.send_backward_recv_forward
    seen.append(value(pair(mine(40), shape, False)))
    assert p2p.send_forward_recv_backward(mine(0), [shape], True) == [None]
    assert p2p.send_backward_recv_forward(mine(0), shape, True) is None
    seen.append(value(p2p.send_forward_recv_forward(mine(80), True, shape)))
    seen.append(value(p2p.send_backward_recv_backward(mine(90), True, shape)))
    both = p2p.send_forward_backward_recv_forward_backward(mine(100), mine(200), True, True, shape)
    assert p2p.send_forward_recv_forward(None, False, shape) is None
    return [*seen, *map(value, both)]


@pytest.mark.parametrize(("world", "batched"), [(2, True), (2, False), (4, True)])
def test_every_method(world: int, batched: bool):
    for rank, seen in enumerate(launch_all(_every_method, world, batched)):
        before, after = (rank - 1) % world, (rank + 1) % world
        assert seen == [
            None if rank == 0 else 10 + before,
            [None, None] if rank == world - 1 else [20 + after, 30 + after],
            40 + (rank ^ 1),
            80 + before,
            90 + after,
            100 + before,
            200 + after,
        ]


# Against the torch runtime.


def _both(rank: int, world: int, schedule: str, count: int) -> list[str]:
    """Names of the losses and gradients that differ between the functions and AutoPipeline, in any bit."""
    case = Case(schedule, "gpt_oss", "variable")
    batches = pipeline_cases.make_batches(case, count, 0, 0)
    pipeline = pipeline_cases.make_pipeline(case, build_mesh(MeshConfig(pp_size=world).resolve(world), "cpu"), count)
    loss = pipeline.forward_backward(batches, pipeline_cases.loss_over(1.0))
    want = {name: grad for part in pipeline.parts for name, grad in gradients(part).items()}

    row = Row("gpt_oss", v=None if schedule == "1F1B" else 2, m=count, kind="variable", loss="token")
    whole = pipeline_cases.whole_part(case, pipeline_cases.num_layers(case, world))
    chunks, stored = step(whole, batches, rank, world, row, finalize=False)
    got = {name: grad for chunk in chunks for name, grad in gradients(chunk.part).items()}
    if rank == world - 1:
        want["loss"], got["loss"] = loss, torch.stack([one["loss"] for one in stored]).sum()
    assert got.keys() == want.keys()
    return [name for name in want if not torch.equal(want[name], got[name])]


@pytest.mark.parametrize(("schedule", "count"), [("1F1B", 5), ("Interleaved1F1B", 6)])
def test_functions_and_torch_runtime_agree_bitwise(schedule: str, count: int):
    """Gradients are plain sums in both: tokens do not divide without `finalize_model_grads_func`."""
    assert launch_all(_both, 2, schedule, count) == [[], []]
