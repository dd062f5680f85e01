"""Builds a `ModelPart` from a config node, on the meta device: the unmodified transformers class, without memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.head_output import LOGPROBS, HeadRequest
from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.models import new_tokens, transformers_compat
from automodel_cli.models.attention import packed as attention_packed
from automodel_cli.models.attention import transformer_engine
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.document_masking import dynamic_rope, recurrent_layers
from automodel_cli.models.freezing import freeze_by_vision
from automodel_cli.models.hub import source
from automodel_cli.models.lm_head.detection import detect_head
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import front as lora_front
from automodel_cli.models.lora import fused as lora_fused
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.moe_config import MoEConfig
from automodel_cli.models.mtp import key_mapping
from automodel_cli.models.mtp import layers as mtp_layers
from automodel_cli.models.precision import float8, qat
from automodel_cli.models.probes import block_plan, isolation
from automodel_cli.models.vision.config import VisionConfig
from automodel_cli.models.vision.front import Front, composite_on_meta
from automodel_cli.models.vision.two_way import two_way_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build_part(
    config: ModelConfig, *, device: torch.device | str = "meta", request: HeadRequest = LOGPROBS
) -> ModelPart:
    """Build a part in train mode with adapters and attention. `load_weights` fills it after parallelization.

    Parameters have dtype `config.dtype`, except those that the family keeps in fp32. On a device other than meta,
    memory is allocated, but values are undefined until they are loaded. Raises ConfigError for a config that
    transformers rejects, an unknown attention name, QLoRA without bitsandbytes, or Transformer Engine without a GPU.

    Args:
        request: outputs that the head must support.
    """
    hf_config = source.hf_config(config)
    stored = hf_config.dtype
    part = part_of(hf_config, config, device=device)
    part.hub_dtype = stored if config.config is None and isinstance(stored, torch.dtype) else part.model.dtype
    if config.vision is not None:
        add_front(part, config, config.vision)
    if config.qat is not None:
        part.quantization = qat.convert_layers(part.model, config.qat, part.hub_dtype)
    if request.values or request.scores:
        part.add_value_head(request.scores or 1)
    part.reads_logits = request.logprobs
    if not request.logprobs:
        _freeze_unused_head(part.model)
    return part


def _freeze_unused_head(model: PreTrainedModel) -> None:
    """Freeze an untied LM head whose logits nobody reads. DDP would wait for its gradient and sum no other."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    table = None if embedding is None else next(embedding.parameters(), None)
    if head is not None and not any(param is table for param in head.parameters()):
        head.requires_grad_(False)


def add_front(part: ModelPart, config: ModelConfig, vision: VisionConfig) -> None:
    """Add the front end of a vision-language model, on the meta device. Freeze what the config says, and add its
    adapters."""
    composite_config = source.composite_config(config)
    composite = composite_on_meta(composite_config, getattr(torch, config.dtype))
    part.add_front(Front(composite, part.model.base_model).train())
    freeze_by_vision(part, vision)
    if config.lora is not None:
        lora_front.inject(part, config.lora, vision)
        _note_untied(part, config)
    part.two_way = two_way_of(composite_config)


def part_of(hf_config: PretrainedConfig, config: ModelConfig, *, device: torch.device | str) -> ModelPart:
    """Build a part from an existing transformers config, which is modified. `config` defines all other settings."""
    if config.transformer_engine is not None:
        transformer_engine.require_transformer_engine()
    original = copy.deepcopy(hf_config)
    kind = detect_head(hf_config, trust_remote_code=config.trust_remote_code)
    isolation_method = isolation.select_isolation(
        original, attention=config.attn_implementation, trust_remote_code=config.trust_remote_code
    )
    model = _prepared_model(hf_config, config, isolation_method, device)
    block_plan.add_measured_plan(model)
    text_only = config.vision is None  # otherwise names of layers are those of the composite (`add_front`)
    if config.lora is not None and text_only:
        lora.inject(model, config.lora, _new_rows(config))
        lora_fused.fuse_adapters(model)
    part = ModelPart(model, kind, chunk_size=config.lm_head_chunk_size, source_config=original)
    if config.lora is not None and text_only:
        _note_untied(part, config)
    if config.mtp is not None:
        names = key_mapping.of_config(config, original, model)
        depths = [_prepared_model(original, config, isolation_method, device, as_depth=True) for _ in names.depths]
        part.add_multi_token(depths, names)
    return part.train()


def _new_rows(config: ModelConfig) -> list[int]:
    """Return the rows of new tokens, and unused rows behind them: a table of `peft` has other values there."""
    if not new_tokens.adds_tokens(config):
        return []
    stored = source.composite_config(replace(config, tokenizer=None)).get_text_config().vocab_size
    rows = new_tokens.new_rows(config, stored)
    return [] if rows is None else sorted({*rows.pieces, *range(rows.num_stored, rows.num_rows)})


def _note_untied(part: ModelPart, config: ModelConfig) -> None:
    """Set `unties_head`. Raises ConfigError if the family always ties its head, because its adapter could not be
    exported."""
    part.unties_head = bool(lora.untied_weights(part.model))
    if not part.unties_head:
        return
    untied_config = part.untied(part.source_config)
    untied_model = transformers_compat.meta_model(
        untied_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code
    )
    head, table = untied_model.get_output_embeddings(), untied_model.get_input_embeddings()
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
    isolation_method: isolation.IsolationMethod,
    device: torch.device | str,
    *,
    as_depth: bool = False,
) -> PreTrainedModel:
    """Build the transformers model for training. `as_depth` reduces it to a multi-token prediction layer."""
    with torch.device("meta" if as_depth else device):
        model = _library_model(copy.deepcopy(hf_config) if as_depth else hf_config, config, isolation_method.attention)
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
    recurrent_layers.install_document_reset(model, isolation_method.classes, by_position=isolation_method.by_document)
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
        unknown = isinstance(error, KeyError) and error.args == (name,)  # a class with its own attention names
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
    """Set the experts implementation. grouped_mm is the default of transformers."""
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
    """Let the input embedding train every token.

    transformers sets `padding_idx = pad_token_id`, for which torch computes no gradient. If pad equals EOS (most chat
    models), EOS as an input would not be trained. Padding is already excluded by its labels.
    """
    embeddings = model.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding):
        embeddings.padding_idx = None
