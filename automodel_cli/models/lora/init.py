"""First values of adapters: `peft`'s own initializations, on weights of any sharding.

PiSSA (Meng et al. 2024) and OLoRA start at the largest directions of the weight, B0 A0. `peft` subtracts them from the
base, W - s B0 A0. Here the base stays as it is, and the layer subtracts their output:

    y = x W^T + b + s (x A^T B^T - x A0^T B0^T)

A0 and B0 are frozen parameters in the layer's `peft` modules under the name "initial". They are sharded like A and B
and stored in checkpoints. So the model without adapters is the base, 4-bit weights stay, and no resume repeats a
decomposition. In files, `peft`'s conversion to plain LoRA applies: rank 2 r, A = [A; A0] and B = [B, -B0].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import transformers_compat
from automodel_cli.models.lora import dora as lora_dora
from automodel_cli.models.lora.layer import ADAPTER, AdapterLayer
from automodel_cli.models.lora.targets import is_embedding, is_transposed
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.rng import generator_for, seed_for

_INITIAL = "initial"
if TYPE_CHECKING:
    import peft

_MATRICES = ("lora_A", "lora_B")


def has_initial(layer: AdapterLayer) -> bool:
    """Return whether a wrapped layer subtracts the output of its initial matrices."""
    return _INITIAL in layer.lora_A


def add_initial(layers: Mapping[str, AdapterLayer], config: LoRAConfig) -> None:
    """Add the frozen matrices A0 and B0 to wrapped layers. Works on the meta device, before sharding.

    Raises ConfigError if a rank is too large or odd for the initialization.
    """
    for name, layer in layers.items():
        if is_embedding(layer):
            continue
        _check_rank(name, layer, config)
        if not config.starts_at_weights:
            continue
        for matrix in _MATRICES:
            trained = getattr(layer, matrix)[ADAPTER]
            sizes = trained.in_features, trained.out_features
            like = trained.weight
            frozen = nn.Linear(*sizes, bias=False, device=like.device, dtype=like.dtype).requires_grad_(False)
            getattr(layer, matrix)[_INITIAL] = frozen
        layer.__class__ = _own_class()


def _check_rank(name: str, layer: AdapterLayer, config: LoRAConfig) -> None:
    rank, most = layer.r[ADAPTER], min(layer.in_features, layer.out_features)
    if config.starts_at_weights and rank > most:
        raise ConfigError(
            f"lora.init_lora_weights={config.init_lora_weights} requires a rank of at most {most}, the smaller side of "
            f"{name}, but its rank is {rank}",
            code="out_of_range",
            keys=("lora.rank", "lora.init_lora_weights"),
            fix=f"model.lora.rank={most}",
        )
    if config.init_lora_weights == "orthogonal" and rank % 2:
        raise ConfigError(
            f"lora.init_lora_weights=orthogonal requires an even rank, but the rank of {name} is {rank}",
            code="not_divisible",
            keys=("lora.rank", "lora.init_lora_weights"),
            fix=f"model.lora.rank={rank + 1}",
        )


@cache
def _own_class() -> type[AdapterLayer]:
    from peft.tuners.lora.layer import Linear

    return type("CenteredLoRALinear", (_Centered, Linear), {})


# At the start A = A0 and B = B0, so the update is exactly 0 and the model equals its base.
class _Centered(AdapterLayer):
    """Forward of a layer with initial matrices, mixed into the class of `peft`."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        y: Tensor = self.base_layer(x, *args, **kwargs)
        dropped = self.lora_dropout[ADAPTER](x).to(self.lora_A[ADAPTER].weight.dtype)
        trained, initial = (self.lora_B[of](self.lora_A[of](dropped)) for of in (ADAPTER, _INITIAL))
        update: Tensor = self.scaling[ADAPTER] * (trained - initial)
        return y + update.to(y.dtype)


@torch.no_grad()
def start(layers: Mapping[str, AdapterLayer], config: LoRAConfig | None, seed: int) -> None:
    """Fill the adapters of wrapped layers with their first values, equal under every layout.

    A decomposition runs on the full weight, on the first rank that holds the layer, which sends the matrices to the
    others. Collective over all ranks then.
    """
    for name, layer in layers.items():
        if is_embedding(layer):
            b = layer.lora_embedding_B[ADAPTER]
            normal = torch.randn(b.shape, generator=generator_for(seed, f"{name}.lora_embedding_B"))
            _fill(layer, ADAPTER, (torch.zeros(layer.lora_embedding_A[ADAPTER].shape), normal))
    layers = {name: layer for name, layer in layers.items() if not is_embedding(layer)}
    method = "default" if config is None else config.init_lora_weights
    if method in ("default", "gaussian"):
        for name, layer in layers.items():
            full = torch.empty(layer.lora_A[ADAPTER].weight.shape, dtype=torch.float32)
            generator = generator_for(seed, f"{name}.lora_A")
            if method == "gaussian":
                full.normal_(std=1 / layer.r[ADAPTER], generator=generator)
            else:
                nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
            _fill(layer, ADAPTER, (full, torch.zeros(layer.lora_B[ADAPTER].weight.shape)))
    else:
        for name, matrices in _decomposed(layers, method, seed):
            for adapter in layers[name].lora_A:
                _fill(layers[name], adapter, matrices)
    for layer in layers.values():
        if lora_dora.has_magnitude(layer):
            lora_dora.start(layer)


def _params(layer: AdapterLayer, adapter: str) -> tuple[Tensor, Tensor]:
    if is_embedding(layer):
        return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    return layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


def _fill(layer: AdapterLayer, adapter: str, matrices: tuple[Tensor, Tensor]) -> None:
    for param, full in zip(_params(layer, adapter), matrices, strict=True):
        local = transformers_compat.local(param)
        local.copy_(transformers_compat.local_part(param, full.to(local.dtype)))


def _decomposed(
    layers: Mapping[str, AdapterLayer], method: str, seed: int
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield name, A and B of this rank's layers."""
    held = [list(layers)]
    if dist.is_initialized():
        held = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(held, list(layers))
    # Reversed, so that the first rank that has a layer wins.
    owners = {name: rank for rank, names in reversed(list(enumerate(held))) for name in names}
    for name in dict.fromkeys(name for names in held for name in names):
        is_owner = not dist.is_initialized() or owners[name] == dist.get_rank()
        weight = lora_dora.full_weight(layers[name]) if name in layers else None
        matrices: list[tuple[Tensor, Tensor] | None] = [None]
        if is_owner and weight is not None:
            matrices = [_of_peft(weight, layers[name], method, seed_for(seed, name))]
        if dist.is_initialized():
            dist.broadcast_object_list(matrices, src=owners[name])
        if name in layers:
            assert matrices[0] is not None, "the owner has sent them"
            yield name, matrices[0]


def _of_peft(weight_OI: Tensor, layer: AdapterLayer, method: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return A and B on the CPU, as `peft` initializes a layer with this weight."""
    import peft
    from peft.tuners.lora.layer import Linear

    outputs, inputs = weight_OI.shape
    base = nn.Linear(inputs, outputs, bias=False, device="meta")
    base.weight = nn.Parameter(weight_OI.float().clone(), requires_grad=False)
    rank, alpha = layer.r[ADAPTER], layer.lora_alpha[ADAPTER]
    of_layer = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        use_rslora=layer.use_rslora[ADAPTER],
        init_lora_weights=method,  # type: ignore[arg-type]  # a name that the config has checked
    )
    devices = [weight_OI.device] if weight_OI.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(seed)
        made = Linear(base, ADAPTER, config=of_layer, r=rank, lora_alpha=alpha)
    a, b = (getattr(made, matrix)[ADAPTER].weight.detach().float().cpu() for matrix in _MATRICES)
    return a, b


def joined(layer: AdapterLayer, adapter: str = ADAPTER) -> tuple[Tensor, Tensor]:
    """Return full A and B whose product is the update: of rank 2 r with initial matrices. Collective if sharded."""
    a, b = (transformers_compat.full_tensor(param) for param in _params(layer, adapter))
    if adapter == _INITIAL or not has_initial(layer):
        return a, b
    return _difference((a, b), joined(layer, _INITIAL))


def local_factors(layer: AdapterLayer) -> tuple[Tensor, Tensor]:
    """Return A and B as `joined`, of the parameters as they are, inside autograd."""
    own = _params(layer, ADAPTER)
    return own if not has_initial(layer) else _difference(own, _params(layer, _INITIAL))


def _difference(trained: tuple[Tensor, Tensor], initial: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    (a, b), (a0, b0) = trained, initial
    # [B, -B0] [A; A0] = B A - B0 A0: the difference as one product, of rank 2 r.
    return torch.cat([a, a0]), torch.cat([b, -b0], 1)


def constant(layer: AdapterLayer) -> Tensor | None:
    """Return the frozen part `s B0 A0` of a layer in float32, like its weight. None without. Collective if sharded."""
    if not has_initial(layer):
        return None
    a0, b0 = joined(layer, _INITIAL)
    update: Tensor = b0.float() @ a0.float() * layer.scaling[ADAPTER]
    return update.T if is_transposed(layer) else update


def convert(settings: peft.LoraConfig) -> None:
    """Change a `peft.LoraConfig` to that of the joined matrices: twice the rank, the same scale."""
    # The scale is alpha / r, or alpha / sqrt(r) with rsLoRA. It must not change when r doubles.
    factor = math.sqrt(2) if settings.use_rslora else 2
    settings.r *= 2
    settings.lora_alpha = cast(int, factor * settings.lora_alpha)  # peft computes with it, integer or not
    settings.rank_pattern = {name: 2 * rank for name, rank in (settings.rank_pattern or {}).items()}
    settings.alpha_pattern = {name: factor * alpha for name, alpha in (settings.alpha_pattern or {}).items()}
