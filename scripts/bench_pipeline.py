"""Time per step of pipeline schedules on two CPU ranks against the simulator: `python scripts/bench_pipeline.py`.

Every stage's forward, input gradients and all gradients are timed alone (on both ranks at once, as in a step), and a
hop between the ranks; the simulator predicts the step from them. Schedules take turns, so that a busy machine slows
all of them alike. Medians, and the fastest samples, which other programs disturb least. The last table is what a step
costs when its microbatches have shapes, or a number, that the step before did not have.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from automodel_cli.data.batch import Batch, one_document
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.pipelining.auto_pipeline import AutoPipeline
from automodel_cli.pipelining.schedule.programs import build_program
from automodel_cli.pipelining.timeline.simulator import Costs, simulate

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
SEQ_LEN, HIDDEN, LAYERS, MICROBATCHES, RANKS = 256, 128, 8, 8, 2
MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": 384,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}

Pick = Callable[[Sequence[float]], float]


def make_pipeline(mesh: Mesh, schedule: str) -> AutoPipeline:
    config = ModelConfig(config=MODEL)
    part = build_part(config)
    load_weights(part, config, device=torch.device("cpu"), seed=0)
    pipeline = AutoPipeline(world_mesh=mesh, pp_schedule=schedule, pp_batch_size=MICROBATCHES, device="cpu")
    return pipeline.build(part, loss)


def loss(output: HeadOutput, batch: Batch) -> Tensor:
    return -output.logprobs_BT.sum() / (MICROBATCHES * SEQ_LEN)


def make_batches(length: int, count: int = MICROBATCHES) -> list[Batch]:
    """One document each."""
    generator = torch.Generator().manual_seed(length)
    return [one_document(torch.randint(3, 500, (length,), generator=generator).tolist()) for _ in range(count)]


def timed(function: Callable[[], Any]) -> float:
    """Seconds from a common start to the end on the slower rank."""
    dist.barrier()
    began = time.perf_counter()
    function()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def clear(parts: Sequence[nn.Module]) -> None:
    for part in parts:
        part.zero_grad(set_to_none=True)


def step(pipeline: AutoPipeline, batches: Sequence[Batch]) -> float:
    clear(pipeline.parts)
    return timed(lambda: pipeline.forward_backward(batches))


@dataclass
class Times:
    """Seconds of one stage, every sample. A stage that reads tokens has no input gradients."""

    forward: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def summary(self, pick: Pick) -> tuple[float, float, float]:
        """Forward, input gradients, and what is left of the backward: weight gradients."""
        given = pick(self.inputs) if self.inputs else 0.0
        return pick(self.forward), given, max(0.0, pick(self.backward) - given)


def time_stage(part: nn.Module, times: Times, *, is_first: bool) -> None:
    """One microbatch forward and backward."""
    batch = make_batches(SEQ_LEN, 1)[0]
    hidden = None if is_first else torch.randn(1, SEQ_LEN, HIDDEN, requires_grad=True)
    began = time.perf_counter()
    output = part(hidden, labels=batch.labels_BT, **batch.model_inputs())
    output = output.logprobs_BT if isinstance(output, HeadOutput) else output
    times.forward.append(time.perf_counter() - began)
    grad = torch.ones_like(output)
    if hidden is not None:
        began = time.perf_counter()
        torch.autograd.grad(output, hidden, grad, retain_graph=True)
        times.inputs.append(time.perf_counter() - began)
    began = time.perf_counter()
    output.backward(grad)
    times.backward.append(time.perf_counter() - began)


def hop_seconds(rank: int, repeats: int) -> float:
    """One tensor from rank to rank: half of a round trip."""
    hidden, times = torch.zeros(1, SEQ_LEN, HIDDEN), []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        for sender in (0, 1):
            (dist.send if rank == sender else dist.recv)(hidden, 1 - rank)  # type: ignore[operator]
        times.append((time.perf_counter() - began) / 2)
    return statistics.median(times)


def predicted(mine: dict[int, Times], schedule: str, hop: float, pick: Pick) -> float:
    """Seconds of a step by the simulator, from the stages that each rank has timed. Collective."""
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, {stage: times.summary(pick) for stage, times in mine.items()})
    times = {stage: value for of_rank in gathered for stage, value in of_rank.items()}
    forward, given, weight = (tuple(times[s][kind] for s in range(len(times))) for kind in range(3))
    program = build_program(schedule, RANKS, MICROBATCHES, len(times) // RANKS)
    return simulate(program, Costs(forward, given, weight, hop)).makespan


def compare(rank: int, mesh: Mesh, rounds: int) -> AutoPipeline:
    """The first table. Returns the pipeline of the first schedule, warm."""
    pipelines = {schedule: make_pipeline(mesh, schedule) for schedule in SCHEDULES}
    batches = make_batches(SEQ_LEN)
    for pipeline in pipelines.values():
        step(pipeline, batches)
    measured: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    stages = {name: {s.stage_index: Times() for s in p.info.stages or []} for name, p in pipelines.items()}
    hops = []
    for _ in range(rounds):
        hops.append(hop_seconds(rank, 5))
        for schedule, pipeline in pipelines.items():
            measured[schedule].append(step(pipeline, batches))
            for (index, times), part in zip(stages[schedule].items(), pipeline.parts, strict=True):
                dist.barrier()  # both ranks measure at once: they share memory bandwidth in a step too
                for _ in range(3):
                    time_stage(part, times, is_first=index == 0)
    for name, pick in (("median", statistics.median), ("fastest", min)):
        hop = pick(hops)
        paper = {schedule: predicted(stages[schedule], schedule, hop, pick) for schedule in SCHEDULES}
        real = {schedule: pick(times) for schedule, times in measured.items()}
        if rank == 0:
            print(f"{name:<7} of {rounds:<5} measured [ms]  simulated [ms]  ratio  of 1F1B: measured  simulated")
            for schedule in SCHEDULES:
                one, two = real[schedule], paper[schedule]
                times_ms = f"{1e3 * one:>13.1f} {1e3 * two:>15.1f} {one / two:>6.2f}"
                print(f"{schedule:<16} {times_ms} {one / real['1F1B']:>18.2f} {two / paper['1F1B']:>10.2f}")
            print(f"a hop takes {1e3 * hop:.2f} ms\n")
    return pipelines[SCHEDULES[0]]


def rebuild(rank: int, mesh: Mesh, pipeline: AutoPipeline, steps: int) -> None:
    """The second table: blocks of steps with one shape, and of steps that each bring a length never seen before."""
    same, new = [], []
    step(pipeline, make_batches(SEQ_LEN))
    for k in range(steps):
        for _ in range(2):  # the first one comes after another shape
            last = step(pipeline, make_batches(SEQ_LEN))
        same.append(last)
        offset = (k // 2 + 1) * (1 if k % 2 else -1)  # mean length unchanged
        new.append(step(pipeline, make_batches(SEQ_LEN + offset)))
    more = [step(pipeline, make_batches(SEQ_LEN, MICROBATCHES + 1)) for _ in range(steps)]
    built = [timed(lambda: make_pipeline(mesh, SCHEDULES[0])) for _ in range(3)]
    if rank == 0:
        print(f"{SCHEDULES[0]}, what changes from the step before     median [ms]  fastest [ms]")
        for what, times in (
            ("nothing", same),
            ("every length, never seen before", new),
            ("one microbatch more: the first step", more[:1]),
            ("one microbatch more: later steps", more[1:]),
            ("(building a pipeline anew)", built),
        ):
            print(f"{what:<40} {1e3 * statistics.median(times):>14.1f} {1e3 * min(times):>13.1f}")


def main_of_rank(rank: int, store: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = build_mesh(MeshConfig(pp_size=RANKS).resolve(RANKS), "cpu")
    rebuild(rank, mesh, compare(rank, mesh, rounds), max(4, rounds // 2 * 2))
    dist.destroy_process_group()


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    with tempfile.TemporaryDirectory(prefix="bench_pipeline_") as folder:
        torch.multiprocessing.spawn(main_of_rank, (f"{folder}/store", args.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
