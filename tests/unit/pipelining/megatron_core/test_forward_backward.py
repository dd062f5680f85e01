"""The eager schedules' events against recorded ones, and what the communicator refuses."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from automodel_cli.pipelining.megatron_core.config import ModelParallelConfig, ProcessGroupCollection
from automodel_cli.pipelining.megatron_core.forward_backward import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from automodel_cli.pipelining.megatron_core.p2p import _ORDER as ORDER
from automodel_cli.pipelining.megatron_core.p2p import Exchange, P2PCommunicator

VECTORS = json.loads((Path(__file__).parents[3] / "vectors" / "schedules_pp2_pp4.json").read_text())
HIDDEN = 3


class Recorder(P2PCommunicator):
    """Writes down what it is asked to move, and lets every receive arrive at once.

    `both_ends`: claim to be first and last rank. The recorded interleaved runs were made that way: on every rank chunk
    0 receives no input and the last chunk sends nothing, although the warm-up counts are those of the rank.
    """

    def __init__(self, rank, size, config, events, both_ends=False):
        self.rank, self.size, self.config, self.events, self.both_ends = rank, size, config, events, both_ends

    @property
    def is_pp_first_stage(self):
        return self.both_ends or super().is_pp_first_stage

    @property
    def is_pp_last_stage(self):
        return self.both_ends or super().is_pp_last_stage

    def exchange(self, send_next=None, send_prev=None, recv_prev=False, recv_next=False, shape=None, *, wait=True):
        moves = {"SN": send_next is not None, "SP": send_prev is not None, "RP": recv_prev, "RN": recv_next}
        if names := [name for name, done in moves.items() if done]:
            self.events.append("c:" + "+".join(names) + ("" if wait else "~"))
        handles = {} if wait else {n: Done() for n, done in zip(HANDLES, moves.values(), strict=True) if done}
        return Exchange(
            *(torch.ones(shape, requires_grad=True) if r else None for r in (recv_prev, recv_next)), handles
        )


HANDLES = ("send_next", "send_prev", "recv_prev", "recv_next")


class Done:
    def wait(self):
        return True


CHUNKS: list[Chunk] = []


class Chunk(nn.Module):
    """One weight. Knows the microbatch of the forward under way, and writes down its backward."""

    def __init__(self, index, config, events):
        super().__init__()
        self.index, self.config, self.events = index, config, events
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.first_microbatch = False
        self.held_at_backward: list[int] = []
        CHUNKS.append(self)

    def set_input_tensor(self, tensors):
        (self.input,) = tensors

    def set_is_first_microbatch(self):
        self.first_microbatch = True

    def forward(self, microbatch, recompute):
        mark = {None: "", True: "!", False: "-"}[recompute] + ("*" if self.first_microbatch else "")
        self.events.append(f"F{microbatch}.{self.index}{mark}")
        self.first_microbatch = False
        hidden = torch.ones(2, 1, HIDDEN) if self.input is None else self.input
        output: list[torch.Tensor] = []

        def begins_backward():
            self.events.append(f"B{microbatch}.{self.index}")
            self.held_at_backward.append(output.pop().numel())

        output.append(Mark.apply(hidden * self.weight, begins_backward))
        return output[0]


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, write):
        ctx.write = write
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.write()
        return grad, None


def record(row, both_ends=False, **flags):
    """The events of one rank, with the options of a recorded run and more flags of the config."""
    events: list[str] = []
    options, v = row.get("options", {}), row["vp"]

    @contextmanager
    def no_sync():
        events.append("no_sync+")
        yield
        events.append("no_sync-")

    def sync(kind):
        if not options.get(f"{kind}_sync"):
            return None
        return [lambda parameters, c=c: events.append(f"{kind}_sync{c}") for c in range(v or 1)]

    overlap = options.get("overlap_p2p", False)
    config = ModelParallelConfig(
        hidden_size=HIDDEN,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=not overlap,
        overlap_p2p_comm=overlap,
        overlap_p2p_comm_warmup_flush=options.get("overlap_warmup_flush", False),
        microbatch_group_size_per_vp_stage=row["group"],
        num_microbatches_with_partial_activation_checkpoints=options.get("ckpt_microbatches"),
        no_sync_func=no_sync,
        grad_sync_func=sync("grad"),
        param_sync_func=sync("param"),
        **flags,
    )
    chunks = [Chunk(c, config, events) for c in range(v or 1)]
    iterators = [iter(range(row["microbatches"])) for _ in chunks]
    communicator = Recorder(row["rank"], row["pp"], config, events, both_ends)

    def forward_step(iterator, model, recompute=None):
        return model(next(iterator), recompute), lambda output: (output.sum(), {})

    get_forward_backward_func(row["pp"], v)(
        forward_step_func=forward_step,
        data_iterator=iterators if v else iterators[0],
        model=chunks if v else chunks[0],
        num_microbatches=row["microbatches"],
        seq_length=2,
        micro_batch_size=1,
        forward_only=options.get("forward_only", False),
        first_val_step=options.get("first_val_step"),
        p2p_communicator=communicator,
    )
    return events


def row_id(row):
    options = "-".join(f"{k}={v}" for k, v in row.get("options", {}).items())
    return f"p{row['pp']}r{row['rank']}v{row['vp']}m{row['microbatches']}g{row['group']}-{options}"


@pytest.mark.parametrize("row", VECTORS["traces_full"], ids=row_id)
def test_full_traces(row):
    """Compute, recompute flags, communication, no_sync and collectives, in order, as recorded."""
    if "error" in row:
        with pytest.raises(ValueError, match=row["rule"]):
            record(row)
    else:
        assert record(row, both_ends=row["vp"] is not None) == row["events"]


def test_traces():
    for row in VECTORS["traces"]:
        if "error" in row:
            with pytest.raises((ValueError, RuntimeError), match=row["rule"]) as error:
                record(row)
            assert type(error.value).__name__ == row["error"]
        else:
            assert [event.rstrip("*") for event in record(row) if event[0] in "FB"] == row["compute"], row


@pytest.mark.parametrize("v", [None, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_sent_outputs_are_released_and_gradients_stay(v, overlap):
    """Between its send and its backward an output holds one element; on the last stage nothing is released."""
    if overlap and v is None:
        return
    row = {"pp": 4, "rank": 1, "vp": v, "microbatches": 8, "group": 4, "options": {"overlap_p2p": overlap}}
    runs = []
    for release in (False, True):
        CHUNKS.clear()
        assert record(row, deallocate_pipeline_outputs=release) == record(row)
        chunks = CHUNKS[: v or 1]
        assert {n for chunk in chunks for n in chunk.held_at_backward} == {1 if release else 2 * HIDDEN}
        runs.append([chunk.weight.grad for chunk in chunks])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def communicator(**flags):
    return Recorder(0, 4, ModelParallelConfig(hidden_size=HIDDEN, **flags), [])


def test_receives_need_dtype_and_shape():
    p2p = communicator()
    with pytest.raises(RuntimeError, match="recv_prev: pipeline_dtype"):
        p2p._buffer((2, 1, 3), "recv_prev")
    p2p.config.pipeline_dtype = torch.bfloat16
    with pytest.raises(RuntimeError, match="recv_next: a tensor shape"):
        p2p._buffer(None, "recv_next")
    buffer = p2p._buffer((2, 1, 3), "recv_next")
    assert buffer.requires_grad and buffer.dtype == torch.bfloat16 and buffer.shape == (2, 1, 3)


def test_posting_orders_mirror_each_other():
    """What makes matching by order right: a send stands where the peer's receive does, in both directions."""
    even, odd = ORDER
    assert even == ("send_next", "recv_prev", "send_prev", "recv_next")
    assert odd == ("recv_prev", "send_next", "recv_next", "send_prev")
    assert set(HANDLES) == set(even)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"overlap_p2p_comm": True}, "batch_p2p_comm=False"),
        ({"overlap_p2p_comm_warmup_flush": True}, "needs overlap_p2p_comm=True"),
        (
            {"overlap_p2p_comm": True, "batch_p2p_comm": False, "variable_seq_lengths": True},
            "variable_seq_lengths=False",
        ),
    ],
)
def test_config_refusals(flags, message):
    with pytest.raises(ValueError, match=message):
        ModelParallelConfig(hidden_size=HIDDEN, **flags)


def contract(model, data_iterator, **more):
    return {
        "forward_step_func": lambda iterator, model: (
            model(next(iterator), None),
            lambda out: (out.sum(), out.sum().item()),
        ),
        "data_iterator": data_iterator,
        "model": model,
        "num_microbatches": 4,
        "seq_length": 2,
        "micro_batch_size": 1,
        **more,
    }


def test_no_pipelining():
    """Accumulates the mean over microbatches; all but the last backward run inside no_sync; lists have one entry."""
    events: list[str] = []

    @contextmanager
    def no_sync():
        events.append("no_sync+")
        yield
        events.append("no_sync-")

    config = ModelParallelConfig(hidden_size=HIDDEN, no_sync_func=no_sync, grad_scale_func=lambda loss: loss * 8)
    chunk = Chunk(0, config, events)
    assert forward_backward_no_pipelining(**contract([chunk], [iter(range(4))])) == [2.0 * HIDDEN] * 4
    assert torch.equal(chunk.weight.grad, torch.full((HIDDEN,), 2.0 * 8))
    compute = [f"{kind}{k}.0" + "*" * (kind == "F" and k == 0) for k in range(4) for kind in "FB"]
    assert events == ["no_sync+", *compute[:-2], "no_sync-", *compute[-2:]]

    chunk.weight.grad = None
    forward_backward_no_pipelining(**contract(chunk, iter(range(4)), forward_only=True))
    assert chunk.weight.grad is None
    with pytest.raises(ValueError, match="model has 2 entries"):
        forward_backward_no_pipelining(**contract([chunk, chunk], [iter(range(4))]))


def test_an_unused_input_gets_zeros():
    """The last stage of a microbatch without labels: its neighbour waits for a gradient all the same."""
    config, events = ModelParallelConfig(hidden_size=HIDDEN, pipeline_dtype=torch.float32), []

    def constant(iterator, model):
        next(iterator)
        return model.weight * 1, lambda output: (output.sum(), None)

    forward_backward_pipelining_without_interleaving(
        **{**contract(Chunk(0, config, []), iter(range(4))), "forward_step_func": constant},
        p2p_communicator=Recorder(3, 4, config, events),
    )
    assert events == ["c:RP", *["c:SP+RP"] * 3, "c:SP"]


def test_pipelined_refusals():
    config = ModelParallelConfig(hidden_size=HIDDEN, pipeline_dtype=torch.float32)
    chunk = Chunk(0, config, [])
    single, multi = forward_backward_pipelining_without_interleaving, forward_backward_pipelining_with_interleaving
    with pytest.raises(ValueError, match="needs p2p_communicator, or pg_collection with pp"):
        single(**contract(chunk, iter(())))
    with pytest.raises(ValueError, match="needs p2p_communicator, or pg_collection with pp"):
        multi(**contract([chunk], [iter(())]), pg_collection=ProcessGroupCollection())
    with pytest.raises(ValueError, match="a list of chunks and a list of as many iterators"):
        multi(**contract([chunk, chunk], [iter(())]))
    with pytest.raises(ValueError, match="all exchange the same shape"):
        multi(**contract([chunk], [iter(())]), adjust_tensor_shapes_fn=lambda a, b: (a, b))


def test_adjusted_shapes_are_received():
    config = ModelParallelConfig(hidden_size=HIDDEN, pipeline_dtype=torch.float32)
    asked: list[tuple] = []

    class Shapes(Recorder):
        def exchange(self, *args, shape=None, **kwargs):
            asked.append(shape)
            return super().exchange(*args, shape=shape, **kwargs)

    forward_backward_pipelining_without_interleaving(
        **contract(Chunk(0, config, []), iter(range(4)), forward_only=True),
        p2p_communicator=Shapes(3, 4, config, []),
        adjust_tensor_shapes_fn=lambda receive, send: ([(7, 1, HIDDEN)], send),
    )
    assert asked == [(7, 1, HIDDEN)] * 4
