"""Activation memory and kernels of a microbatch per layer, measured by autograd on the meta device.

The whole model runs forward with shapes only: nothing is allocated, and what every operator of the family keeps is
counted, whatever the family. Attention counts as a fused kernel (queries, keys, values, outputs) unless the config
says `eager`, and experts as grouped products of evenly routed tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.activation_checkpointing.apply import KEPT_RESULTS
from automodel_cli.distributed.activation_checkpointing.mode import is_recomputed
from automodel_cli.distributed.expert_parallel.apply import experts_modules, num_experts_of
from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts
from automodel_cli.distributed.expert_parallel.grouped_mlp_gemms import parameters_of
from automodel_cli.distributed.expert_parallel.low_rank import ADAPTERS, has_adapters
from automodel_cli.distributed.fusion.patterns import fuse_layers
from automodel_cli.distributed.fusion.region_kernels import as_one
from automodel_cli.distributed.layer_wrapping import transformer_layers
from automodel_cli.distributed.torch_compat import OpOverload
from automodel_cli.distributed.typed_torch import Ctx, Function, TorchDispatchMode
from automodel_cli.models.model_part import ModelPart
from automodel_cli.planning.cost_model import OperatorCall
from automodel_cli.planning.layer_calls import Call, Calls

_COUNTED = "counted_not_computed"
_GROUPED_MM = torch.ops.aten._grouped_mm.default


@dataclass(frozen=True)
class Activations:
    """Bytes of one microbatch. `layers[i]` stay until the backward of layer i, `before` and `after` of the ends.

    `boundary` is one tensor between stages. `recomputed` exists for one microbatch at a time: the layer that is being
    recomputed.
    """

    before: float
    layers: tuple[float, ...]
    after: float
    boundary: float
    recomputed: float
    further: float = 0.0
    """Of all layers for multi-token prediction."""
    calls: tuple[tuple[Call, ...], ...] = ()
    """Kernels before the layers, of each layer, and after them."""
    received: tuple[float, ...] = ()
    """Bytes of tokens that each layer's experts exchange, one way. 0 without distributed experts."""
    keys: tuple[float, ...] = ()
    """Bytes of keys and values of each layer."""

    def of_stage(self, layers: range, *, is_first: bool, is_last: bool, holds_depths: bool) -> float:
        """What one microbatch keeps alive on a stage, with what it received and sent."""
        ends = (self.before if is_first else self.boundary) + (self.after if is_last else self.boundary)
        return ends + sum(self.layers[i] for i in layers) + (self.further if holds_depths else 0.0)

    def sharded_over_tokens(self, tp: int) -> Activations:
        """With sequence parallelism: between a part's first and last layer every rank of tp keeps its share. (Tensor
        parallelism alone shards what is inside a block and not what is between blocks; that is counted whole.)
        """
        layers = tuple(kept / tp for kept in self.layers)
        return replace(self, layers=layers, recomputed=self.recomputed / tp)


def trace_activations(
    part: ModelPart,
    dtype: torch.dtype,
    checkpointing: bool | int | str,
    *,
    rows: int,
    seq_len: int,
    ep: int = 1,
    masks: bool = False,
    fuses_operations: bool = False,
    **counting: Any,
) -> Activations:
    """Run `part` (on the meta device, not touched) forward in `dtype` on rows x seq_len tokens and count.

    `ep`: ranks over which experts are distributed, each of which receives as many tokens as it sends.
    `masks`: every call of attention makes numbers of a mask of all tokens of a row, and keeps them.
    `fuses_operations`: elementwise operations between GEMMs are compiled.
    `counting`: of `Calls`.
    """
    from transformers import AttentionInterface

    # A copy on the meta device has shapes only, so any model size is traced in seconds.
    model: Any = copy.deepcopy(part.model)
    model.to(dtype)
    layers = transformer_layers(model)
    parameters = {StorageWeakRef(p.untyped_storage()): p.requires_grad for p in model.parameters()}
    buffers = {StorageWeakRef(t.untyped_storage()) for t in model.buffers()}
    watch = _Watch(layers, parameters.keys() | buffers, Calls(parameters, **counting))
    if fuses_operations:
        fuse_layers(model, as_one(watch.inside, watch.region))
    if masks:
        watch.bytes_of_mask = rows * seq_len**2 * dtype.itemsize
        watch.kept.add(-1, rows * seq_len**2)  # the mask itself, one byte each
    for experts in experts_modules(model):
        if ep > 1 or has_adapters(experts):  # adapters on experts compute as distributed experts do
            watch.distribute(experts, ep)
    # A mask that is given is not looked into, which a tensor without values could not stand.
    mask = torch.zeros(rows, 1, seq_len, seq_len, dtype=dtype, device="meta")
    if model.config._attn_implementation != "eager":
        AttentionInterface.register(_COUNTED, watch.attention)
        model.set_attn_implementation(_COUNTED)
    ids_BT = torch.zeros(rows, seq_len, dtype=torch.long, device="meta")
    try:
        with watch, torch.autograd.graph.saved_tensors_hooks(watch.saved, _never):
            hidden_BTD = model.base_model(input_ids=ids_BT, attention_mask=mask, use_cache=False)[0]
    except (RuntimeError, NotImplementedError) as error:  # control flow that depends on values
        raise ConfigError(
            f"the activation memory of {type(part.model).__name__} cannot be traced: {error}",
            code="not_measured",
            keys=("model.attn_implementation",),
        ) from error
    depths = 0 if part.depth_names is None else len(part.depth_names.depths)
    return _counted(watch, len(layers), checkpointing, float(hidden_BTD.nbytes), depths)


def _counted(
    watch: _Watch, num_layers: int, checkpointing: bool | int | str, boundary: float, depths: int
) -> Activations:
    """Bytes that `watch` has seen, under this checkpointing; `boundary` bytes leave the last of the layers."""
    exchanges = _Tallies() if checkpointing == "minimal" else watch.exchanges
    # A layer that is not recomputed keeps everything that autograd saved in it. A recomputed one keeps its input,
    # received tokens, and with "selective" the results of GEMMs.
    kept = [
        watch.inputs[i] + exchanges[i] + (watch.products[i] if checkpointing == "selective" else 0.0)
        if is_recomputed(i, checkpointing)
        else watch.kept[i]
        for i in range(num_layers)
    ]
    again = [i for i in range(num_layers) if is_recomputed(i, checkpointing)]
    # One layer at a time is recomputed, so the largest one counts once, not per microbatch in flight.
    recomputed = max((watch.kept[i] - exchanges[i] for i in again), default=0)
    # Of multi-token prediction: a layer like the last, what stands before it (embeddings, two norms, both of them side
    # by side, the projection), and what its head reads.
    further = depths * (kept[-1] + 7 * boundary)
    after = watch.kept[num_layers] + boundary
    calls = tuple(tuple(watch.calls.at[place]) for place in range(-1, num_layers + 1))
    received, keys = (tuple(map(at.__getitem__, range(num_layers))) for at in (watch.received, watch.calls.keys))
    return Activations(watch.kept[-1], tuple(kept), after, boundary, recomputed, further, calls, received, keys)


@dataclass
class _Tallies:
    """Bytes by place: -1 before the first layer, then the layers, then after the last."""

    bytes_at: dict[int, float] = field(default_factory=dict)

    def add(self, place: int, size: float) -> None:
        self.bytes_at[place] = self.bytes_at.get(place, 0.0) + size

    def __getitem__(self, place: int) -> float:
        return self.bytes_at.get(place, 0.0)


class _Watch(TorchDispatchMode):
    """Counts what autograd saves (each storage once), inputs of layers, and results that selective recomputation
    keeps."""

    def __init__(self, layers: Sequence[nn.Module], parameters: set[StorageWeakRef], calls: Calls):
        super().__init__()
        self.kept, self.inputs, self.products, self.exchanges = _Tallies(), _Tallies(), _Tallies(), _Tallies()
        self.received, self.calls = _Tallies(), calls
        self._place, self._seen, self.bytes_of_mask = -1, set(parameters), 0
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._enter(index))
        layers[-1].register_forward_hook(lambda *_: setattr(self, "_place", len(layers)))

    def _enter(self, index: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._place = index
            self.inputs.add(index, args[0].nbytes)

        return hook

    def saved(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        # By storage: q, k and v save the same input, which takes memory once. Parameters are in `_seen` from the start.
        if reference not in self._seen:
            self._seen.add(reference)
            self.kept.add(self._place, storage.nbytes())
        return tensor

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        call = OperatorCall(func, args, kwargs or {})
        if func is _GROUPED_MM and args[0].dtype != torch.bfloat16:  # the only dtype that has a meta kernel
            result = func(*(t.bfloat16() for t in args[:2]), *args[2:], **call.kwargs).to(args[0].dtype)
        else:
            result = call()
        if func in KEPT_RESULTS:
            self.products.add(self._place, result.nbytes)
        self.calls.ran(self._place, call, result)
        return result

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A fused region runs."""
        self.calls.is_inside = True
        try:
            yield
        finally:
            self.calls.is_inside = False

    def region(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """A fused region has run."""
        self.calls.region(self._place, read, written)

    def distribute(self, experts: nn.Module, ep: int) -> None:
        """Let experts keep what they keep where they are distributed (`distributed/expert_parallel/grouped_mlp.py`)."""
        known, own = GatedExperts.of(experts, num_experts_of(experts), None), experts.forward
        first = parameters_of(experts)[0] if known else None
        adapters = [experts._parameters[name] for name in ADAPTERS if has_adapters(experts)]

        def forward(hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
            size = hidden_TD.element_size()
            # Evenly routed experts receive as many (token, expert) pairs as the rank sends: T * K.
            received = index_TK.numel() * hidden_TD.shape[1] * size
            self.received.add(self._place, received)
            if known is None:
                self.exchanges.add(self._place, 2 * received)  # and as many results
                result_TD: Tensor = own(hidden_TD, index_TK, weight_TK)
                return result_TD
            self.exchanges.add(self._place, received + hidden_TD.nbytes)
            assert first is not None
            columns = first.shape[-1] if known.transposed else first.shape[1]
            self.products.add(self._place, index_TK.numel() * columns * size)
            second = parameters_of(experts)[1]
            gated = second.numel() // (len(second) * hidden_TD.shape[1])
            shapes = (hidden_TD.shape[1], columns), (gated, hidden_TD.shape[1])
            self.calls.experts(self._place, index_TK.numel(), shapes, len(second) // ep, size)
            result_TD = _DistributedExperts.apply(hidden_TD, weight_TK, columns, *adapters)
            return result_TD

        experts.forward = forward

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """In the library's place for attention functions."""
        output: Tensor = _FusedAttention.apply(query, key, value)
        self.calls.attention(
            self._place,
            (query, key, value, output),
            all_pairs=query.shape[2] if self.bytes_of_mask else None,
            window=options.get("sliding_window"),
            is_compiled=any(options.get(name) is not None for name in ("s_aux", "softcap")),
        )
        self.kept.add(self._place, self.bytes_of_mask)
        self.products.add(self._place, output.nbytes)
        return output, None


def _never(tensor: Tensor) -> Tensor:
    raise AssertionError("a traced forward has no backward")


class _FusedAttention(Function):
    """Keeps what a fused kernel keeps; computes nothing."""

    @staticmethod
    def forward(ctx: Ctx, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTV: Tensor) -> Tensor:
        rows, heads, tokens, _ = query_BHTD.shape
        output_BTHV = query_BHTD.new_empty(rows, tokens, heads, value_BKTV.shape[-1])
        ctx.save_for_backward(query_BHTD, key_BKTD, value_BKTV, output_BTHV)
        return output_BTHV


class _DistributedExperts(Function):
    """Keeps what `grouped_mlp` keeps; computes nothing."""

    @staticmethod
    def forward(ctx: Ctx, hidden_TD: Tensor, weight_TK: Tensor, columns: int, *adapters: Tensor) -> Tensor:
        num_pairs = weight_TK.numel()
        ctx.save_for_backward(
            hidden_TD.new_empty(num_pairs, hidden_TD.shape[1]), hidden_TD.new_empty(num_pairs, columns), weight_TK
        )
        return torch.empty_like(hidden_TD)
