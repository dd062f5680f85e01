"""Decoding steps as CUDA graphs, captured once and replayed for every token.

A graph repeats fixed shapes, addresses and Python numbers. Therefore nothing in a step may depend on the tokens. The
captured function is the eager step, called for a *bucket*: the next power of two of slots, and of cached tokens. A
mask from the positions hides the rest.

Example: 5 sequences with at most 90 cached tokens use the bucket of 8 slots and 128 tokens.

- Changing inputs (newest tokens, positions, random numbers) are copied into one buffer before each replay.
- Slots of a bucket without a sequence read and write the first position of a free slot.
- Sampling parameters and weights are constant during a phase. Graphs end with the phase, because their cache memory
  does.

Only `cuda_capture` uses CUDA. It has not yet run on a GPU. tests/unit/rollout/engines/sampler/test_cuda_graphs.py
replaces it with tracing into a list of operators, which also freezes Python numbers, and generates with it. On a GPU,
some replays of each graph (including the first) are compared with the eager step. A difference raises `GraphsFailed`,
and the phase is repeated without graphs.

Shapes: B slots of a bucket, R sequences in it, V vocabulary. `drawn_2B`: sampled tokens and log-probs as float64.
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
from automodel_cli.pipelining.torch_runtime.fsdp_compat import forwards_of_gathered, fsdp_roots
from automodel_cli.rollout.engines.sampler.sampling import sample_tokens, shaping_of
from automodel_cli.rollout.types import SamplingParams

if TYPE_CHECKING:
    from automodel_cli.distributed.mesh import Mesh
    from automodel_cli.rollout.types import CudaGraphs

Step = Callable[[Tensor], Tensor]
"""From the inputs `[B, 3]` of a bucket to `drawn_2B`."""

Capture = Callable[[Step, Tensor], Callable[[], Tensor]]
"""Capture a step on a tensor. The returned function replays it with the current values of the tensor."""

_FEWEST_SLOTS, _SHORTEST = 8, 256
_EAGER = 4  # steps of a bucket that are run as they are before one is captured: short visits are not worth it
_COMPARED = frozenset(8**n for n in range(8))
_ALIKE = 1e-3  # nats, of two runs of the same operators
_GAP = 0.05  # nats on average, of two runs with other shapes, in bf16 too


class GraphsFailed(Exception):
    """A step could not be captured, or its graph computes another result. The message has the reason."""


class DecodeGraphs:
    """CUDA graphs of one phase of generation.

    Args:
        logits: `logits(inputs_B3, longest)` is the eager step for sequences of up to `longest` cached tokens. Inputs
            per slot: newest token, its position, and the random number of the next token.
        room: `room(length)` enlarges the cache to `length` tokens and returns its address. Graphs of other addresses
            are dropped.
        largest: maximum slots and cached tokens of a bucket. Slots beyond may hold other sequences.
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
        """Return `[2, R]`, the next token of each sequence and its log-prob, or None if the eager step must run.
        `rows` are the inputs of the slots in use, from the first. Raises GraphsFailed."""
        # A graph has fixed shapes. 11 sequences of up to 300 tokens use the bucket of 16 slots and 512 tokens. Powers
        # of two keep the number of graphs logarithmic.
        shape = _power(len(rows), _FEWEST_SLOTS), _power(longest, _SHORTEST)
        bucket = min(shape[0], self._largest[0]), min(shape[1], self._largest[1])
        self._visits[bucket] += 1
        if self._visits[bucket] <= _EAGER:
            return None
        place = self._room(bucket[1])
        if place != self._place:
            self._place = place
            self._replays.clear()
            self._runs.clear()
        # Unused slots compute with token 0 at position 0. Their results are dropped.
        self._host_B3.zero_()
        self._host_B3[: len(rows)] = torch.tensor(rows, dtype=torch.float64)
        self._inputs_B3.copy_(self._host_B3, non_blocking=True)
        if bucket not in self._replays:
            self._replays[bucket] = self._captured(bucket)
            return None  # its first replay uses other numbers than the capture
        drawn_2R = self._run(bucket)[:, : len(rows)]
        if self._runs[bucket] in _COMPARED:
            self._compare(drawn_2R, bucket, longest)
        return drawn_2R

    def _captured(self, bucket: tuple[int, int]) -> Callable[[], Tensor]:
        try:
            return self._capture(lambda inputs_B3: self._step(inputs_B3, bucket[1]), self._inputs_B3[: bucket[0]])
        except Exception as failure:  # from CUDA, a kernel, or code that reads a value on the host
            reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
            raise GraphsFailed(f"{_named(bucket)} could not be captured ({reason})") from failure

    def _run(self, bucket: tuple[int, int]) -> Tensor:
        self._runs[bucket] += 1
        return self._replays[bucket]()

    def _step(self, inputs_B3: Tensor, longest: int) -> Tensor:
        tokens_B, logprobs_B = sample_tokens(self._logits(inputs_B3, longest), self._params, inputs_B3[:, 2])
        return torch.stack([tokens_B.double(), logprobs_B.double()])

    def _compare(self, drawn_2R: Tensor, bucket: tuple[int, int], longest: int) -> None:
        """Compare a replay with the captured step, which rounds identically. Compare log-probs with the eager step of
        the actual sequences, which rounds differently because of its shapes."""
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
    """Return the capture function of a sampler on these parts, and a text for the startup summary. Raise ConfigError
    if graphs are requested but not possible."""
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
    """Capture steps of models whose weights FSDP2 has gathered for the phase, without the hooks of FSDP2 around the
    forward."""

    def captured(step: Step, inputs_B3: Tensor) -> Callable[[], Tensor]:
        def alone(inputs_B3: Tensor) -> Tensor:
            with forwards_of_gathered(roots):
                return step(inputs_B3)

        return capture(alone, inputs_B3)

    return captured


def obstacle(parts: Sequence[nn.Module], mesh: Mesh) -> str:
    """Return why a step on this rank cannot be captured. Empty if it can."""
    layout = mesh.layout
    stateful = any(isinstance(module, StateLayer) for part in parts for module in part.modules())
    message = (
        (mesh.device.type != "cuda", f"the device is {mesh.device.type}"),
        (layout.pp > 1, f"the model is cut into stages (mesh.pp_size={layout.pp})"),
        (layout.ep > 1, f"experts are on other ranks (mesh.ep_size={layout.ep})"),
        (layout.tp > 1, f"layers are shared between ranks (mesh.tp_size={layout.tp})"),
        (layout.cp > 1, f"ranks draw the same samples (mesh.cp_size={layout.cp})"),
        (stateful, "its layers carry a state from token to token"),
    )
    return next((reason for holds, reason in message if holds), "")


def cuda_capture() -> Capture:
    """Into CUDA graphs that share one pool of memory. Never run on a GPU yet."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def capture(step: Step, inputs_B3: Tensor) -> Callable[[], Tensor]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(inputs_B3)  # libraries allocate workspaces at first use, which cannot be captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The watchdog thread of NCCL queries events concurrently.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            drawn_2B = step(inputs_B3)

        def replay() -> Tensor:
            graph.replay()
            return drawn_2B

        return replay

    return capture


def _power(count: int, least: int) -> int:
    """Return the smallest power of two that is at least `least` and the number."""
    return max(least, 1 << (count - 1).bit_length())


def _named(bucket: tuple[int, int]) -> str:
    return f"the step of {bucket[0]} slots with {bucket[1]} tokens"
