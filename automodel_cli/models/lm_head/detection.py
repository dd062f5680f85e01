"""Detect how a model computes logits from hidden states."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.sharded_module import class_of
from automodel_cli.distributed.wgrad_fusion.linear import WgradFusedLinear
from automodel_cli.models import transformers_compat
from automodel_cli.models.lm_head.scores import HeadKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_PROBE_VOCAB = 64


def is_plain_linear(module: nn.Module | None) -> bool:
    """Return whether this is torch's Linear without bias. A subclass or adapter may compute something else."""
    return module is not None and class_of(module) in (nn.Linear, WgradFusedLinear) and module.bias is None


class _BaseStub(nn.Module):
    """Replaces the base model: returns the given hidden states from any call, and attributes of the real module."""

    def __init__(self, real: nn.Module, hidden: Tensor):
        super().__init__()
        self.__dict__["real"], self.__dict__["hidden"] = (
            real,
            hidden,
        )  # no submodule

    def forward(self, *args: object, **kwargs: object) -> object:
        return _stub_output(self.__dict__["hidden"])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["real"], name)
        # Some families call the decoder inside their base model. Embeddings are accessed for their weights.
        inner = isinstance(found, nn.Module) and any(isinstance(m, nn.ModuleList) for m in found.children())
        return _BaseStub(found, self.__dict__["hidden"]) if inner else found


def stub_base(real: nn.Module, hidden: Tensor) -> nn.Module:
    """Return a module in the place of `real` whose output is `hidden`."""
    return _BaseStub(real, hidden)


def _stub_output(hidden: Tensor) -> object:
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Output(MoeModelOutputWithPast):
        """Base output whose extra fields (cross_attentions, cache_params, ...) are None."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return None

    return Output(last_hidden_state=hidden)


def head_logits(model: PreTrainedModel, hidden_BTD: Tensor) -> Tensor:
    """Return the logits `[B, T, V]` of the model's own forward for these hidden states, with all caps, scales and
    biases."""
    name = model.base_model_prefix
    real = model._modules[name]
    assert real is not None, f"{type(model).__name__} has no base model at {name!r}"
    # The rest of the forward is the family's own code, with its caps and scales.
    model._modules[name] = _BaseStub(real, hidden_BTD)
    try:
        output = model(inputs_embeds=hidden_BTD, use_cache=False)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits
    finally:
        model._modules[name] = real


_detected: dict[tuple[type, str], HeadKind] = {}


def detect_head(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> HeadKind:
    """Classify the head by its outputs for random hidden states. Cached per config and process.

    Raises ConfigError if the head cannot run separately from the base model.
    """
    key = (type(hf_config), hf_config.to_json_string())
    if key not in _detected:
        _detected[key] = _detect_head(hf_config, trust_remote_code)
    return _detected[key]


@torch.no_grad()
def _detect_head(hf_config: PretrainedConfig, trust_remote_code: bool) -> HeadKind:
    """Run a copy on the meta device with a vocabulary of 64.

    Only modules outside the base model are allocated. The base model does not run.
    """
    small = copy.deepcopy(hf_config)
    text = small.get_text_config()
    text.vocab_size, text.pad_token_id = _PROBE_VOCAB, 0  # some families require one
    with transformers_compat.quiet():
        model = transformers_compat.meta_model(small, dtype=torch.float32, trust_remote_code=trust_remote_code)
    weight_VD = _materialize_head(model)
    if weight_VD is None:
        return HeadKind("generic")
    generator = torch.Generator().manual_seed(1)
    hidden_BTD = torch.randn(1, 32, weight_VD.shape[1], generator=generator) * 4
    try:
        logits_BTV = head_logits(model, hidden_BTD)
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} is not supported because its head cannot run separately from the base model: "
            f"{error}",
            code="not_supported_by_model",
            keys=("model",),
        ) from error
    return classify(logits_BTV, F.linear(hidden_BTD, weight_VD), getattr(text, "final_logit_softcapping", None))


def _materialize_head(model: PreTrainedModel) -> Tensor | None:
    """Give random weights to all modules except the base model. Return the output matrix, None if it is not plain
    linear."""
    generator = torch.Generator().manual_seed(0)
    for name, child in model.named_children():
        if name != model.base_model_prefix:
            child.to_empty(device="cpu")
            for param in child.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    linear = model.get_output_embeddings()
    return linear.weight if is_plain_linear(linear) and not linear.weight.is_meta else None


def classify(logits: Tensor, matmul: Tensor, cap: float | None) -> HeadKind:
    """Compare the logits with the bare GEMM."""
    tolerance = 1e-5 * matmul.abs().max().item()
    if torch.allclose(logits, matmul, rtol=0, atol=tolerance):
        return HeadKind("plain")
    # Least squares: the scale s that minimizes |logits - s matmul|.
    scale = ((logits * matmul).sum() / (matmul * matmul).sum()).item()
    if torch.allclose(logits, matmul * scale, rtol=0, atol=tolerance * abs(scale)):
        return HeadKind("scale", scale)
    if cap and torch.allclose(logits, cap * torch.tanh(matmul / cap), rtol=0, atol=1e-5 * cap):
        return HeadKind("softcap", float(cap))
    return HeadKind("generic")
