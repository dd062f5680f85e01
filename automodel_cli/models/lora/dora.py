"""DoRA (Liu et al. 2024, arXiv:2402.09353): adapters of the direction of a weight, and a trained norm of each output.

    W' = m / n * (W + s B A)        n: norm of each row of W + s B A, [O]. m: trained, [O], at first the norm of W
    y  = m / n * (x W^T + s (x A^T) B^T) + b

As in `peft`, n is a constant in backward. `peft` forms B A by a product with an identity matrix and computes in the
compute dtype. Here rows are added in chunks, in float32 or wider, so the memory does not depend on the layer.

Under tensor parallelism each rank adds the squares of its shard. A row-parallel layer, whose inputs are sharded, sums
them over the ranks, and a column-parallel layer has the rows of its outputs only.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from automodel_cli.distributed.tensors import to_local
from automodel_cli.models import transformers_compat
from automodel_cli.models.lora.layer import ADAPTER, AdapterLayer
from automodel_cli.models.lora.targets import is_transposed
from automodel_cli.models.precision.nf4 import NF4Linear

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_CHUNK = 2**24  # elements of a weight that are added to its update at a time


def has_magnitude(layer: nn.Module) -> bool:
    """Return whether a wrapped layer trains the norm of its rows."""
    return bool(len(getattr(layer, "lora_magnitude_vector", ())))


def magnitude(layer: AdapterLayer) -> nn.Parameter:
    """Return the trained norm of each output, `[O]`."""
    return layer.get_parameter(f"lora_magnitude_vector.{ADAPTER}.weight")


def use_own_forward(model: nn.Module) -> None:
    """Convert the DoRA layers of `peft` in place. Works on the meta device, before sharding."""
    for module in model.modules():
        if has_magnitude(module):
            module.__class__ = _own_class()


@cache
def _own_class() -> type[AdapterLayer]:
    from peft.tuners.lora.layer import Linear

    return type("DoRALinear", (_DoRA, Linear), {})


# Example: W has the rows (3, 4) and (1, 0), so m = (5, 1) at the start. With s B A = ((0, -4), (0, 1)), W + s B A has
# the rows (3, 0) and (1, 1) with norms n = (3, 1.414), and W' = ((5, 0), (0.707, 0.707)): new directions, old norms.
class _DoRA(AdapterLayer):
    """Forward of a converted layer, mixed into the class of `peft`."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        base, scale = self.base_layer, self.scaling[ADAPTER]
        bias = cast(Tensor | None, base.bias)
        plain: Tensor = base(x, *args, **kwargs)
        if scale == 0.0:  # `lora.adapters_off`
            return plain
        down, up = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        factor_O = self._factor(x).to(plain.dtype)
        dropout = self.lora_dropout[ADAPTER]
        dropped = dropout(x)
        update = up(down(dropped.to(down.weight.dtype))) * scale
        # Dropout that does nothing returns its input itself.
        if dropped is x:  # also in evaluation
            # `plain` contains the bias, which must not be scaled. The next line adds what the factor took away.
            y: Tensor = factor_O * (plain + update.to(plain.dtype))
            return y if bias is None else y + (1 - factor_O) * to_local(bias)
        of_dropped = base(dropped)
        of_dropped = of_dropped if bias is None else of_dropped - to_local(bias)
        # As in `peft`: only `plain` is computed without dropout.
        z: Tensor = plain + (factor_O - 1) * of_dropped + factor_O * update.to(plain.dtype)
        return z

    def _factor(self, x: Tensor) -> Tensor:
        """Return `m / n` of the outputs that this rank computes. The norm is rounded to the dtype of m, so that the
        first step computes with a factor of 1."""
        own = magnitude(self)
        matrices = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        # Squares and not norms: squares of shards of a row can be summed over ranks.
        squares = _row_squares(_weight(self.base_layer), *matrices, self.scaling[ADAPTER], is_transposed(self))
        if transformers_compat.is_dtensor(own):
            norm_O = cast("DTensor", squares).redistribute(placements=own.placements).to_local().sqrt()
        else:
            norm_O = transformers_compat.full_tensor(squares).sqrt()
        factor_O: Tensor = to_local(own) / norm_O.to(own.dtype)
        return factor_O


def _weight(base: nn.Module) -> Tensor:
    if not isinstance(base, NF4Linear):
        return cast(Tensor, base.weight)
    if base.instead is not None:
        return base.instead()
    return base.unloaded() if base.is_unloaded else base.dequantized()


@torch.no_grad()
def _row_squares(weight: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> Tensor:
    """Return the squared norms `[O]` of the rows of `W + scale B A`, a DTensor if W is one.

    Args:
        weight: `[O, I]`, or `[I, O]` if `transposed`, whole or sharded over one mesh dimension.
        a, b: `[R, I]` and `[O, R]`, whole, or sharded like W.
    """
    if not transformers_compat.is_dtensor(weight):
        return _squares(weight.t() if transposed else weight, a, b, scale)
    from torch.distributed.tensor import DTensor, Partial, Shard

    (placement,), mesh = weight.placements, weight.device_mesh
    over_outputs = placement.is_shard(int(transposed))
    own_OI, own_RI, own_OR = to_local(weight), to_local(a), to_local(b)
    own_OI = own_OI.t() if transposed else own_OI
    if placement.is_shard() and not over_outputs and not transformers_compat.is_dtensor(a):
        own_RI = a.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    if over_outputs and not transformers_compat.is_dtensor(b):
        own_OR = b.chunk(mesh.size(), 0)[mesh.get_local_rank()]
    squares_O = _squares(own_OI, own_RI, own_OR, scale)
    if not placement.is_shard():
        return DTensor.from_local(squares_O, mesh, [placement], run_check=False)
    return DTensor.from_local(squares_O, mesh, [Shard(0) if over_outputs else Partial()], run_check=False)


def _squares(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    a_RI = a_RI.to(wide) * scale
    rows = max(1, _CHUNK // max(weight_OI.shape[1], 1))
    chunks = zip(weight_OI.split(rows), b_OR.split(rows), strict=True)
    # 16.8 million elements at a time: 64 MiB in float32, instead of a float32 copy of the weight. A batch of one,
    # because selective checkpointing saves the results of other GEMMs (`KEPT_RESULTS`), which must not change.
    sums = (torch.baddbmm(own.to(wide)[None], of_b.to(wide)[None], a_RI[None])[0] for own, of_b in chunks)
    return torch.cat([rows_OI.square_().sum(1) for rows_OI in sums])


def full_weight(layer: AdapterLayer) -> Tensor:
    """Return the base weight `[O, I]` of a wrapped layer. Collective if it is sharded."""
    weight = transformers_compat.full_tensor(_weight(layer.get_base_layer()))
    return weight.t() if is_transposed(layer) else weight


@torch.no_grad()
def start(layer: AdapterLayer) -> None:
    """Set m to the norms of the base weight, as a new adapter has B A = 0. Collective if the weight is sharded."""
    weight = full_weight(layer)
    wide = torch.promote_types(weight.dtype, torch.float32)
    norms_O = torch.cat([rows.to(wide).square().sum(1).sqrt() for rows in weight.split(1024)])
    own = transformers_compat.local(magnitude(layer))
    own.copy_(transformers_compat.local_part(magnitude(layer), norms_O.to(own.dtype)))


@torch.no_grad()
def rescaled(merged: Tensor, layer: AdapterLayer) -> Tensor:
    """Return `m / n * (W + s B A)` of the full fp32 sum. Collective if m is sharded."""
    rows = merged.t() if is_transposed(layer) else merged
    factor_O = transformers_compat.full_tensor(magnitude(layer)).to(rows.dtype) / rows.norm(dim=1)
    scaled: Tensor = rows * factor_O[:, None].to(rows.device)
    return scaled.t() if is_transposed(layer) else scaled
