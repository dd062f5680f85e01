"""Decoding steps that are frozen once and run again for every token: CUDA graphs of the sampler's step.

A frozen step has the shapes, addresses and Python numbers of the moment, so nothing in it may depend on the tokens. It
is the eager step itself, called for a whole *bucket*: a power of two of slots, and a power of two of cached tokens, of
which a mask computed from the positions hides the rest. What changes from step to step (newest tokens, positions and
random numbers) stands in one buffer that is filled before each run; slots of a bucket that hold no sequence read and
write the first place of a free slot. Parameters of sampling are the same through a phase, and so are the weights;
graphs end with it, because the memory of the cache does, and so does the room that they take.

Nothing here knows CUDA but `cuda_capture`, which has NEVER been run on a GPU. Whatever freezes a step may take its
place: tests/unit/rollout/engines/sampler/test_cuda_graphs.py traces it into a list of operators, which freezes every
Python number
as a graph does, and runs whole generations by that. On a device some runs of each graph, the first among them, are
compared with the eager step on the same inputs; `GraphsFailed` then ends the phase, which is drawn again without.

Shapes: B slots of a bucket, R sequences in it, V vocabulary. `drawn_2B`: tokens and log-probs as float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.document_masking.recurrent_layers import StateLayer
from automodel_cli.pipelining.torch_runtime.torch_compat import forwards_of_gathered, fsdp_roots
from automodel_cli.rollout.engines.sampler.sampling import sample_tokens, shaping_of
from automodel_cli.rollout.types import SamplingParams

if TYPE_CHECKING:
    from automodel_cli.distributed.mesh import Mesh
    from automodel_cli.rollout.types import CudaGraphs

Step = Callable[[Tensor], Tensor]
"""From the inputs `[B, 3]` of a bucket to `drawn_2B`."""

Capture = Callable[[Step, Tensor], Callable[[], Tensor]]
"""Freezes a step on this very tensor: what is returned runs it again on what the tensor then holds."""

_FEWEST_SLOTS, _SHORTEST = 8, 256
_EAGER = 4  # steps of a bucket that are run as they are before one is captured: short visits are not worth it
_COMPARED = frozenset(8**n for n in range(8))
_ALIKE = 1e-3  # nats, of two runs of the same operators
_GAP = 0.05  # nats on average, of two runs with other shapes, in bf16 too


class GraphsFailed(Exception):
    """A step could not be captured, or its graph computes something else; the text says which."""


class DecodeGraphs:
    """The graphs of one phase of generation.

    `logits(inputs_B3, longest)` is the eager step for sequences of up to `longest` cached tokens: of each slot the
    newest token, its position and the random number of the next one. `room(length)` makes the cache hold so many tokens
    and tells where it is: graphs of other places are dropped. `largest`: slots and cached tokens that a bucket may
    have; a slot behind those may hold something.
    """

    def __init__(
        self,
        capture: Capture,
        logits: Callable[[Tensor, int], Tensor],
        room: Callable[[int], tuple[int, ...]],
        params: SamplingParams,
        *,
        largest: tuple[int, int],
        device: torch.device,
    ):
        self._capture, self._logits, self._room, self._params = capture, logits, room, params
        self._largest, slots = largest, largest[0]
        self._host_B3 = torch.zeros(slots, 3, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._inputs_B3 = torch.zeros(slots, 3, dtype=torch.float64, device=device)
        self._place: tuple[int, ...] = ()
        self._replays: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._visits: Counter[tuple[int, int]] = Counter()
        self._runs: Counter[tuple[int, int]] = Counter()

    def drawn(self, rows: Sequence[tuple[float, float, float]], longest: int) -> Tensor | None:
        """`[2, R]`: the next token of each sequence and its log-prob; None where the eager step shall run.

        `rows` are the inputs of the slots in use, from the first. Raises GraphsFailed.
        """
        wanted = _power(len(rows), _FEWEST_SLOTS), _power(longest, _SHORTEST)
        bucket = min(wanted[0], self._largest[0]), min(wanted[1], self._largest[1])
        self._visits[bucket] += 1
        if self._visits[bucket] <= _EAGER:
            return None
        place = self._room(bucket[1])
        if place != self._place:
            self._place = place
            self._replays.clear()
            self._runs.clear()
        self._host_B3.zero_()
        self._host_B3[: len(rows)] = torch.tensor(rows, dtype=torch.float64)
        self._inputs_B3.copy_(self._host_B3, non_blocking=True)
        if bucket not in self._replays:
            self._replays[bucket] = self._captured(bucket)
            return None  # its first run is one on other numbers than those that it was captured on
        drawn_2R = self._run(bucket)[:, : len(rows)]
        if self._runs[bucket] in _COMPARED:
            self._compare(drawn_2R, bucket, longest)
        return drawn_2R

    def _captured(self, bucket: tuple[int, int]) -> Callable[[], Tensor]:
        try:
            return self._capture(lambda inputs_B3: self._step(inputs_B3, bucket[1]), self._inputs_B3[: bucket[0]])
        except Exception as failure:  # of CUDA, of a kernel, of code that asks for a value on the host
            reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
            raise GraphsFailed(f"{_named(bucket)} could not be captured ({reason})") from failure

    def _run(self, bucket: tuple[int, int]) -> Tensor:
        self._runs[bucket] += 1
        return self._replays[bucket]()

    def _step(self, inputs_B3: Tensor, longest: int) -> Tensor:
        tokens_B, logprobs_B = sample_tokens(self._logits(inputs_B3, longest), self._params, inputs_B3[:, 2])
        return torch.stack([tokens_B.double(), logprobs_B.double()])

    def _compare(self, drawn_2R: Tensor, bucket: tuple[int, int], longest: int) -> None:
        """With the frozen step itself, which rounds alike; and the log-probs of its tokens with those of the eager step
        of exactly the sequences that there are, which rounds as other shapes do."""
        size = drawn_2R.shape[1]
        tokens_R = drawn_2R[0].long()
        own_2R = self._step(self._inputs_B3[: bucket[0]], bucket[1])[:, :size]
        other_R = (own_2R - drawn_2R).abs().max(0).values > _ALIKE
        if (other := int(other_R.sum())) > max(1, size // 8):
            raise GraphsFailed(f"{_named(bucket)} gives {other} of {size} sequences something else in a graph")
        logits_RV = self._logits(self._inputs_B3[:size], longest)
        logprobs_RV = shaping_of(self._params)(logits_RV, tokens_R).log_softmax(-1)
        gap = float((logprobs_RV.gather(-1, tokens_R[:, None])[:, 0] - drawn_2R[1]).abs().mean())
        if not gap <= _GAP:
            raise GraphsFailed(f"log-probs of {_named(bucket)} are off by {gap:.1e} from those of its sequences alone")


def settled(asked: CudaGraphs, parts: Sequence[nn.Module], mesh: Mesh) -> tuple[Capture | None, str]:
    """What freezes the steps of a sampler on these parts, and what the run says of it. Raises ConfigError where graphs
    are asked for that cannot be."""
    reason = obstacle(parts, mesh) if asked else "rollout.engine.cuda_graphs=false"
    roots = [root for part in parts for root in fsdp_roots(part)]
    if not reason and roots and asked == "auto":
        reason = "FSDP2 gathers the weights (rollout.engine.cuda_graphs=true captures what runs between two gathers)"
    if not reason:
        return of_gathered(cuda_capture(), roots), "CUDA graphs"
    if asked is True:
        raise ConfigError(
            f"rollout.engine.cuda_graphs=true is not supported: {reason}",
            code="kernel_unavailable",
            keys=("rollout.engine.cuda_graphs",),
            fix="rollout.engine.cuda_graphs=auto",
        )
    return None, f"no CUDA graphs: {reason}"


def of_gathered(capture: Capture, roots: Sequence[FSDPModule]) -> Capture:
    """Freezes steps of models whose weights FSDP2 has gathered for the phase, without what it does around a forward."""

    def captured(step: Step, inputs_B3: Tensor) -> Callable[[], Tensor]:
        def alone(inputs_B3: Tensor) -> Tensor:
            with forwards_of_gathered(roots):
                return step(inputs_B3)

        return capture(alone, inputs_B3)

    return captured


def obstacle(parts: Sequence[nn.Module], mesh: Mesh) -> str:
    """Why a step on this rank is more than kernels that read the same memory each time; empty where it is not."""
    layout = mesh.layout
    stateful = any(isinstance(module, StateLayer) for part in parts for module in part.modules())
    found = (
        (mesh.device.type != "cuda", f"the device is {mesh.device.type}"),
        (layout.pp > 1, f"the model is cut into stages (mesh.pp_size={layout.pp})"),
        (layout.ep > 1, f"experts are on other ranks (mesh.ep_size={layout.ep})"),
        (layout.tp > 1, f"layers are shared between ranks (mesh.tp_size={layout.tp})"),
        (layout.cp > 1, f"ranks draw the same samples (mesh.cp_size={layout.cp})"),
        (stateful, "its layers carry a state from token to token"),
    )
    return next((reason for holds, reason in found if holds), "")


def cuda_capture() -> Capture:
    """Into CUDA graphs that share one pool of memory. Never run on a GPU yet."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def capture(step: Step, inputs_B3: Tensor) -> Callable[[], Tensor]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(inputs_B3)  # what libraries set up at a first use cannot be captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on: the watchdog of NCCL asks for events meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            drawn_2B = step(inputs_B3)

        def replay() -> Tensor:
            graph.replay()
            return drawn_2B

        return replay

    return capture


def _power(count: int, least: int) -> int:
    """The power of two that has room, from `least` on."""
    return max(least, 1 << (count - 1).bit_length())


def _named(bucket: tuple[int, int]) -> str:
    return f"the step of {bucket[0]} slots with {bucket[1]} tokens"
