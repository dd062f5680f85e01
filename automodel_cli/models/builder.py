"""Config node -> `ModelPart` on the meta device: the library's own class, nothing rewritten, nothing allocated."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.head_output import LOGPROBS, HeadRequest
from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.models import float8, lora, transformers_compat
from automodel_cli.models.attention import packed as attention_packed
from automodel_cli.models.attention import transformer_engine
from automodel_cli.models.config import ModelConfig, MoEConfig
from automodel_cli.models.document_masking import dynamic_rope, recurrent_layers
from automodel_cli.models.hub import source
from automodel_cli.models.lm_head.head import detect_head
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.mtp import key_mapping
from automodel_cli.models.mtp import layers as mtp_layers
from automodel_cli.models.probes import isolation

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build_part(
    config: ModelConfig, *, device: torch.device | str = "meta", request: HeadRequest = LOGPROBS
) -> ModelPart:
    """A part in train mode with adapters injected and attention chosen; `load_weights` fills it after it is
    parallelised.

    Parameters have dtype `config.dtype` (a family's fp32-kept ones stay fp32). On another `device` than meta the
    memory is allocated, but the values are no defined initialisation: load anyway. It can give what `request` asks for.
    Raises ConfigError for a config the library refuses, an unknown attention name, QLoRA without bitsandbytes, or
    Transformer Engine where it cannot run.
    """
    hf_config = source.hf_config(config)
    stored = hf_config.dtype
    part = part_of(hf_config, config, device=device)
    part.hub_dtype = stored if config.config is None and isinstance(stored, torch.dtype) else part.model.dtype
    if request.values:
        part.add_value_head()
    return part


def part_of(hf_config: PretrainedConfig, config: ModelConfig, *, device: torch.device | str) -> ModelPart:
    """`build_part` for a library config that is at hand; `config` says all the rest. `hf_config` is changed."""
    if config.transformer_engine is not None:
        transformer_engine.require_transformer_engine()
    original = copy.deepcopy(hf_config)
    kind = detect_head(hf_config, trust_remote_code=config.trust_remote_code)
    way = isolation.select_isolation(
        original, attention=config.attn_implementation, trust_remote_code=config.trust_remote_code
    )
    model = _prepared_model(hf_config, config, way, device)
    if config.lora is not None:
        lora.inject(model, config.lora)
    part = ModelPart(model, kind, chunk_size=config.lm_head_chunk_size, source_config=original)
    if config.lora is not None and lora.sharing(model):
        part.unties_head = True
        _check_untied(part, config)
    if config.mtp is not None:
        names = key_mapping.of_config(config, original, model)
        depths = [_prepared_model(original, config, way, device, as_depth=True) for _ in names.depths]
        part.add_multi_token(depths, names)
    return part.train()


def _check_untied(part: ModelPart, config: ModelConfig) -> None:
    """Raise ConfigError where the family ties its head whatever its config says: its adapter could not be exported."""
    untied = part.untied(part.source_config)
    whole = transformers_compat.meta_model(untied, dtype=torch.float32, trust_remote_code=config.trust_remote_code)
    head, table = whole.get_output_embeddings(), whole.get_input_embeddings()
    if head is None or head.weight is table.weight:
        raise ConfigError(
            f"lora.target_modules must not match the head of {type(part.model).__name__}, because it is always tied to "
            "the embedding and no export could contain its adapter",
            code="not_supported_by_model",
            keys=("lora.target_modules",),
            fix="model.lora.target_modules=all-linear",
        )


def _prepared_model(
    hf_config: PretrainedConfig,
    config: ModelConfig,
    way: isolation.IsolationMethod,
    device: torch.device | str,
    *,
    as_depth: bool = False,
) -> PreTrainedModel:
    """The library's model, made ready to train; `as_depth` cut to a depth of multi-token prediction."""
    with torch.device("meta" if as_depth else device):
        model = _library_model(copy.deepcopy(hf_config) if as_depth else hf_config, config, way.attention)
    if as_depth:
        mtp_layers.cut_to_depth(model)
        if torch.device(device).type != "meta":
            model.to_empty(device=device)
    if config.transformer_engine is not None:
        transformer_engine.swap_layers(model, config.transformer_engine)
    if config.fp8 is not None:
        float8.convert_layers(model, config.fp8, config.moe)
    train_every_token(model)
    dynamic_rope.install_document_rope(model)
    recurrent_layers.install_document_reset(model, way.classes, by_position=way.by_document)
    model.config.use_cache = False
    if not as_depth or any(is_experts(module) for module in model.modules()):
        _choose_experts_kernel(model, config)
    return model


def _library_model(hf_config: PretrainedConfig, config: ModelConfig, name: str) -> PreTrainedModel:
    if name == attention_packed.PACKED:
        attention_packed.register_packed_attention()
    if config.transformer_engine is not None and config.transformer_engine.attention:
        transformer_engine.register_te_attention()
        name = transformer_engine.ATTENTION
    dtype = getattr(torch, config.dtype)
    try:
        return transformers_compat.causal_lm(
            hf_config, attention=name, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
    except (ValueError, ImportError, KeyError) as error:
        unknown = isinstance(error, KeyError) and error.args == (name,)  # a class with attention of its own kinds
        reason = f"the model has no attention of this name ({error})" if unknown else error
        raise ConfigError(
            f"attn_implementation={config.attn_implementation!r} is not supported with {type(hf_config).__name__}: "
            f"{reason}",
            code="not_supported_by_model",
            keys=("attn_implementation",),
            fix="model.attn_implementation=eager"
            if config.attn_implementation == attention_packed.PACKED
            else "model.attn_implementation=packed",
        ) from error


def _choose_experts_kernel(model: PreTrainedModel, config: ModelConfig) -> None:
    """grouped_mm is the library's own choice, where it can make one."""
    kernel = config.moe.experts_implementation
    if kernel == MoEConfig.experts_implementation:
        return
    if not any(is_experts(module) for module in model.modules()):
        raise ConfigError(
            f"moe.experts_implementation={kernel} is not supported because {type(model).__name__} has no experts that "
            "use the experts interface of transformers",
            code="not_supported_by_model",
            keys=("moe.experts_implementation",),
            fix=f"model.moe.experts_implementation={MoEConfig.experts_implementation}",
        )
    model.set_experts_implementation(kernel)


def train_every_token(model: PreTrainedModel) -> None:
    """Keep the input embedding from dropping a gradient.

    The library sets `padding_idx = pad_token_id`, and torch then gives that row no gradient. Where pad is also EOS
    (most chat models), EOS as an input would never be trained. Padding is already masked by its labels.
    """
    embeddings = model.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding):
        embeddings.padding_idx = None
