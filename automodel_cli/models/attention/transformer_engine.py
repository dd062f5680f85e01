"""NVIDIA Transformer Engine layers in place of torch's attention, linear layers and RMS norms (extra `te`, CUDA).

The only module that uses names of the package. It is imported when a model with Transformer Engine is built. NEVER run
on a GPU. The calls were checked against the signatures of the 2.20 wheel, and run with a stand-in that has these
signatures and computes with torch.

Layers are replaced under their names before memory is allocated. Parameters keep their hub names and are loaded,
sharded and exported like torch's. The head and modules outside the decoder layers are not replaced.

Each linear layer enters fp8 itself, so pipelines, recomputation and forwards without backward need no support for it.
This requires recipes without state between steps. Delayed scaling, which stores maxima of earlier steps, is therefore
not supported.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import require_package
from automodel_cli.distributed.typed_torch import modules_of
from automodel_cli.models.fp8_config import TransformerEngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "transformer_engine"
_RECIPES = {"current": "Float8CurrentScaling", "block": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}
_FP8_MULTIPLE = 32  # tokens and features. Sufficient for every recipe; some need only 16.


def require_transformer_engine() -> None:
    """Raise ConfigError if Transformer Engine is not installed or no CUDA device is available."""
    require_package(
        "transformer_engine",
        "model.transformer_engine",
        install="--no-build-isolation automodel-cli[te]",
        keys=("transformer_engine",),
    )
    if not torch.cuda.is_available():
        raise ConfigError(
            "model.transformer_engine requires a CUDA device, and none is available",
            code="hardware_required",
            keys=("transformer_engine",),
            fix="model.transformer_engine=null",
        )


def register_te_attention() -> None:
    """Register `transformer_engine` in the attention registry of transformers. Can be called repeatedly."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, te_attention)


def swap_layers(model: PreTrainedModel, config: TransformerEngineConfig) -> None:
    """Replace the linear layers of the decoder layers and all RMS norms, on their current device.

    Raises ConfigError for norms with another formula than the two of the package, and for layers whose sizes fp8 does
    not support.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    inside = {child for _, layer in modules_of(model, GradientCheckpointingLayer) for child in layer.modules()}
    make_linear = _linear_factory(config.fp8_recipe) if config.linear else None
    for path, module in list(model.named_modules()):
        new: nn.Module | None = None
        if make_linear is not None and type(module) is nn.Linear and module in inside:
            new = make_linear(path, module)
        elif config.norm and "RMSNorm" in type(module).__name__:
            new = _norm(path, module)
        if new is not None:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new.train(module.training))


def te_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTV: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Implement the attention interface of transformers and return `(out_BTHV, None)`.

    Causal attention inside the documents of packed rows, in the THD layout of N = B*T tokens. Raises ConfigError for
    inputs without an exact implementation.
    """
    batch, heads, length, width = query_BHTD.shape
    _check_inputs(query_BHTD, key_BKTD, attention_mask, dropout, s_aux, kwargs)
    if cu_seq_lens_q is None:  # every row is one document
        cu_seq_lens_q = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=query_BHTD.device)
    query_BHTD, key_BKTD = query_BHTD.to(value_BKTV.dtype), key_BKTD.to(value_BKTV.dtype)
    core = _core(heads, key_BKTD.shape[1], width, value_BKTV.shape[-1], scaling or width**-0.5, softcap or 0.0)
    query_NHD, key_NKD, value_NKV = (
        x.transpose(1, 2).flatten(0, 1).contiguous() for x in (query_BHTD, key_BKTD, value_BKTV)
    )
    out_NHV = core(
        query_NHD,
        key_NKD,
        value_NKV,
        qkv_format="thd",
        cu_seqlens_q=cu_seq_lens_q,
        cu_seqlens_kv=cu_seq_lens_q,
        max_seqlen_q=max_length_q or length,
        max_seqlen_kv=max_length_q or length,
        attn_mask_type="padding_causal",
        window_size=(-1, 0) if sliding_window is None else (sliding_window - 1, 0),
    )
    return out_NHV.view(batch, length, heads, -1), None


def _check_inputs(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, sinks: Tensor | None, kwargs: dict[str, object]
) -> None:
    reason = None
    if dropout > 0:
        reason = f"the model sets attention_dropout={dropout}"
    elif mask is not None:
        reason = "the model passes its own attention mask"
    elif sinks is not None:
        reason = "the model has attention sinks, which Transformer Engine stores as its own parameters"
    elif key.shape[2] != query.shape[2]:
        reason = f"the model passed {query.shape[2]} queries and {key.shape[2]} keys, and a KV cache is not implemented"
    elif kwargs.get("is_causal") is False:
        reason = "the attention of the model is not causal"
    elif kwargs.get("context") is not None:
        reason = "it does not implement context parallelism"
    elif query.dtype == torch.float32 and key.dtype == torch.float32:
        reason = "it computes in bfloat16 or float16 only, and the inputs are float32"
    if reason is not None:
        raise ConfigError(
            f"transformer_engine.attention=true is not supported because {reason}",
            code="not_supported_by_model",
            keys=("transformer_engine.attention",),
            fix="model.transformer_engine.attention=false",
        )


@functools.cache
def _core(heads: int, groups: int, width: int, value_width: int, scale: float, softcap: float) -> Callable[..., Tensor]:
    """Return the package's attention for these shapes. It has no parameters, so all layers share one."""
    core: Callable[..., Tensor] = _package().DotProductAttention(
        num_attention_heads=heads,
        kv_channels=width if width == value_width else (width, value_width),
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=scale,
        softcap=softcap,
    )
    return core


def _linear_factory(fp8_recipe: str) -> Callable[[str, nn.Linear], nn.Module]:
    te = _package()
    if fp8_recipe == "none":
        kind = te.Linear
    else:
        recipe = getattr(import_module("transformer_engine.common.recipe"), _RECIPES[fp8_recipe])()

        class Fp8Linear(te.Linear):  # type: ignore[name-defined, misc]
            def forward(self, inp: Tensor) -> Tensor:
                if inp.shape[:-1].numel() % _FP8_MULTIPLE:
                    raise ConfigError(
                        f"transformer_engine.fp8_recipe={fp8_recipe} is not supported because the microbatch has "
                        f"{inp.shape[:-1].numel()} tokens, which must be a multiple of {_FP8_MULTIPLE}",
                        code="not_divisible",
                        keys=("transformer_engine.fp8_recipe", "data.seq_len"),
                        fix="data.packing=best_fit with a data.seq_len that is a multiple of 32",
                    )
                with te.autocast(enabled=True, recipe=recipe):
                    out: Tensor = super().forward(inp)
                return out

        kind = Fp8Linear

    def make(path: str, linear: nn.Linear) -> nn.Module:
        features = (linear.in_features, linear.out_features)
        if fp8_recipe != "none" and any(number % _FP8_MULTIPLE for number in features):
            raise ConfigError(
                f"transformer_engine.fp8_recipe={fp8_recipe} is not supported because {path} has {features[0]} inputs "
                f"and {features[1]} outputs, which must be multiples of {_FP8_MULTIPLE}",
                code="not_divisible",
                keys=("transformer_engine.fp8_recipe",),
                fix="model.transformer_engine.fp8_recipe=none",
            )
        weight = linear.weight
        new: nn.Module = kind(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=weight.dtype,
            device=weight.device,
        )
        return _with_parameters_of(linear, new)

    return make


def _norm(path: str, norm: nn.Module) -> nn.Module:
    """Return the package's norm. The formula, `x / rms * w` or `x / rms * (1 + w)`, is measured, not read from the
    name."""
    zero_centered, eps = _formula(path, norm)
    weight = norm.get_parameter("weight")
    new: nn.Module = _package().RMSNorm(
        weight.shape[0], eps=eps, zero_centered_gamma=zero_centered, device=weight.device, dtype=weight.dtype
    )
    return _with_parameters_of(norm, new)


@torch.no_grad()
def _formula(path: str, norm: nn.Module) -> tuple[bool, float]:
    """Return whether the scale is `1 + weight`, and eps.

    Measured on a copy with small inputs, for which eps is significant.
    """
    names = [name for name, _ in norm.named_parameters()]
    epsilons = [value for name, value in vars(norm).items() if "eps" in name and isinstance(value, float)]
    if names == ["weight"] and len(epsilons) == 1:
        probe = copy.deepcopy(norm).to_empty(device="cpu").float()
        weight = torch.linspace(0.5, 1.5, probe.get_parameter("weight").shape[0])
        probe.get_parameter("weight").copy_(weight)
        x = torch.linspace(-1, 1, len(weight)) * epsilons[0] ** 0.5
        unit = x * torch.rsqrt(x.square().mean() + epsilons[0])
        got = probe(x[None])[0]
        for zero_centered in (False, True):
            if torch.allclose(got, unit * (weight + 1 if zero_centered else weight), rtol=1e-4, atol=1e-6):
                return zero_centered, epsilons[0]
    raise ConfigError(
        f"transformer_engine.norm=true is not supported because {path} ({type(norm).__name__}) is not an RMS norm that "
        "Transformer Engine implements",
        code="not_supported_by_model",
        keys=("transformer_engine.norm",),
        fix="model.transformer_engine.norm=false",
    )


def _with_parameters_of(old: nn.Module, new: nn.Module) -> nn.Module:
    """Assign the parameters of `old` to `new` and return `new`.

    Names, values, ties and frozen parameters are preserved.
    """
    old_params, new_params = dict(old.named_parameters()), dict(new.named_parameters())
    assert old_params.keys() == new_params.keys(), (
        f"{type(new).__name__} has {list(new_params)}, not {list(old_params)}"
    )
    for name, param in old_params.items():
        assert param.shape == new_params[name].shape, f"{name} is {new_params[name].shape} there, {param.shape} here"
        setattr(new, name, param)
    return new


def _package() -> ModuleType:
    return import_module("transformer_engine.pytorch")
