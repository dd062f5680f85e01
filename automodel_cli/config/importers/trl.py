"""TRL's YAML for `trl sft|dpo|grpo --config` (huggingface.co/docs/trl; 1.16)."""

from __future__ import annotations

from automodel_cli.config.importers import hugging_face as hf
from automodel_cli.config.importers import vision
from automodel_cli.config.importers.framework import (
    WITH_PICTURES,
    Default,
    Draft,
    KeyMapping,
    Kind,
    Table,
    at_default,
    none,
    to,
)
from automodel_cli.config.importers.trl_grpo import follow_settings, grpo_settings

_PAIRS = (
    "max_prompt_length",
    "precompute_ref_log_probs",
    "f_divergence_type",
    "ld_alpha",
    "rpo_alpha",
    "ref_model_mixup_alpha",
)
_LOSSES = (
    *("sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard"),
    *("apo_zero", "apo_down", "discopop", "aot", "aot_unpaired"),
)
_ALWAYS: dict[str, tuple[object, str]] = {
    "use_bnb_nested_quant": (False, "model.lora.quantization is none or nf4"),
    "ignore_bias_buffers": (False, "buffers are not reduced over ranks"),
}
_OF_DPO: dict[str, tuple[object, str]] = {
    "f_divergence_type": ("reverse_kl", "the log-ratio of the losses is that of the reverse KL"),
    "f_alpha_divergence_coef": (0.5, "read with f_divergence_type=alpha_divergence only"),
    "discopop_tau": (0.05, "the temperature of objective.loss=discopop is 0.05"),
    "disable_dropout": (True, "the models of the library have dropout as their configs say"),
}
_OF_GRPO: dict[str, tuple[object, str]] = {
    "repetition_penalty": (1.0, "samples are drawn from the policy, which the ratios are about"),
    "min_p": (None, "samples are drawn by temperature, top_p and top_k"),
    "multi_objective_aggregation": ("sum_then_normalize", "rewards are summed, then compared within the group"),
    "off_policy_mask_threshold": (None, "objective.sampler_correction drops what the sampler and trainer disagree on"),
    "cast_lm_head_to_fp32": (False, "the log-prob head computes in float32 where it matters"),
    "disable_dropout": (False, "the models of the library have dropout as their configs say"),
    "ds3_gather_for_generation": (True, "our sampler generates on the trained weights"),
    "use_transformers_continuous_batching": (False, "our sampler generates on the trained weights"),
    "use_transformers_paged": (False, "our sampler generates on the trained weights"),
}
"""Keys without a counterpart: their default, and the behavior of this package."""


def _kind(draft: Draft) -> Kind:
    if draft.get("num_generations") or draft.get("max_completion_length") or draft.get("reward_funcs"):
        return "grpo"
    pairs = any(key in draft.source for key in _PAIRS) or str(draft.get("loss_type")) in _LOSSES
    kind: Kind = "dpo" if pairs or "beta" in draft.source else "sft"
    named = vision.names_vision_model(draft.get("model_name_or_path"), draft.get("dataset_name"))
    return WITH_PICTURES[kind] if named else kind


def _together(draft: Draft) -> None:
    ranks = hf.batch(
        draft,
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        default=8,
        rows="samples" if draft.kind == "grpo" else "rows",
    )
    hf.betas(draft)
    hf.length(draft)
    hf.warmup(draft)
    hf.clipping(draft)
    hf.report_to(draft)
    if draft.get("use_peft"):
        targets = draft.get("lora_target_modules", "all-linear")
        draft.put("model.lora.target_modules", targets, "use_peft", "lora_target_modules")
        if draft.get("lora_modules_to_save"):
            draft.put("model.lora.modules_to_save", draft.get("lora_modules_to_save"), "lora_modules_to_save")
        draft.put("model.lora.rank", draft.get("lora_r", 16), "lora_r")
        draft.put("model.lora.alpha", draft.get("lora_alpha", 32), "lora_alpha")
        draft.put(
            "model.lora.dropout", draft.get("lora_dropout", 0.05), "lora_dropout", note="their default 0.05, ours 0"
        )
        if draft.get("load_in_4bit"):
            draft.put("model.lora.quantization", "nf4", "load_in_4bit")
    if draft.get("dataset_test_split"):
        draft.put("data.validation_split", draft.get("dataset_test_split"), "dataset_test_split")
    _streams(draft)
    at_default(draft, _ALWAYS | (_OF_DPO if draft.kind == "dpo" else _OF_GRPO if draft.kind == "grpo" else {}))
    {"sft": _sft, "dpo": _dpo, "grpo": grpo_settings}[draft.kind](draft, ranks)
    if draft.kind != "grpo" and draft.source.get("max_length", 0) is None:
        _uncut(draft)


def _streams(draft: Draft) -> None:
    """Stream in SFT. Theirs needs `max_steps` too, and reads the rows in their order."""
    key = "dataset_streaming"
    if not draft.get(key):
        draft.leave(key, "rows are prepared before the first step, and cached")
    elif draft.base != "sft":
        draft.decide(key, "data.streaming is supported by recipes of kind sft without pictures")
    else:
        draft.put("data.streaming", {}, key, note="ours shuffles; data.shuffle=false keeps the order within each lane")
        draft.values.pop("data.num_workers", None)
        draft.leave("dataset_num_proc", "a stream is tokenized in threads: data.streaming.num_threads")
        if not draft.is_set("train.max_steps"):
            draft.decide("max_steps", "a stream has no length: set train.max_steps")


def _sft(draft: Draft, ranks: int) -> None:
    if draft.get("loss_type", "nll") not in ("nll", "chunked_nll"):
        draft.decide("loss_type", "the objective of sft is the negative log-likelihood")
    packs = bool(draft.get("packing"))
    strategy = draft.get("packing_strategy", "bfd")
    note = "TRL packs only where it is told to; ours packs by default" if not packs else ""
    packing = ("wrapped" if strategy == "wrapped" else "best_fit") if packs else "none"
    draft.put("data.packing", packing, "packing", "packing_strategy", note=note)
    if packing != "wrapped":
        draft.put("data.truncation", "split" if strategy == "bfd_split" else "truncate", note="as theirs")
    if draft.get("assistant_only_loss"):
        draft.put("data.loss_mask", "assistant", "assistant_only_loss", "completion_only_loss")
    elif draft.get("completion_only_loss") is False:
        draft.put("data.loss_mask", "all", "assistant_only_loss", "completion_only_loss")
    else:
        what = "TRL trains every token of a conversation unless assistant_only_loss; of prompt and completion only the"
        draft.put(
            "data.loss_mask",
            "all",
            "assistant_only_loss",
            "completion_only_loss",
            note=f"{what} completion: set assistant for such rows (and ours is assistant by default)",
        )


def _uncut(draft: Draft) -> None:
    """Lose no row if `max_length` is null, which means no limit there."""
    draft.put("data.truncation", "error", "max_length", note="no row is cut there, so a longer one is an error")
    draft.put("data.seq_len", 2048, "max_length", note="null has no limit there")
    draft.undecided.append("max_length=null: set data.seq_len to the tokens of the longest row")


def _dpo(draft: Draft, ranks: int) -> None:
    follow_settings(draft)
    losses = draft.listed("loss_type", "sigmoid")
    loss = losses[0] if len(losses) == 1 else None
    if loss in _LOSSES:
        draft.put("objective", "ipo" if loss == "ipo" else "dpo", "loss_type")
        draft.put("objective.loss", loss, "loss_type")
    else:
        draft.decide("loss_type", f"objective.loss is one of {', '.join(_LOSSES)}")
    draft.put("objective.beta", draft.get("beta", 0.1), "beta")
    if draft.get("label_smoothing"):
        draft.put("objective.label_smoothing", draft.get("label_smoothing"), "label_smoothing")
    if draft.get("use_weighting"):
        draft.put("objective.use_wpo_weighting", True, "use_weighting")
    if draft.get("rpo_alpha"):
        draft.put("objective.nll_weight", draft.get("rpo_alpha"), "rpo_alpha")
    if draft.get("precompute_ref_log_probs"):
        draft.put("reference_mode", "precomputed", "precompute_ref_log_probs")


_LEVELS: dict[str, object] = {level: level for level in ("token", "sequence", "sequence_token")}
_FALSE_IS_NONE: dict[str, object] = {"true": True, "group": True, "false": False, "none": False}

TABLE = Table(
    tool="TRL",
    slug="trl",
    signs=(
        4,
        (
            *("model_name_or_path", "dataset_name", "max_length", "per_device_train_batch_size", "torch_dtype"),
            *("use_peft", "lora_r", "attn_implementation", "dataset_text_field", "packing", "learning_rate"),
            *("gradient_checkpointing", "hub_model_id", "report_to", "num_train_epochs", "dataset_num_proc"),
        ),
    ),
    kind=_kind,
    run_lockstep=_together,
    rows=hf.ROWS
    | {
        "model_name_or_path": to("model.pretrained"),
        "model_revision": to("model.revision"),
        "trust_remote_code": hf.REMOTE_CODE,
        "torch_dtype": to("model.dtype", bfloat16="bfloat16", float16="float16", float32="float32"),
        "dtype": to("model.dtype", bfloat16="bfloat16", float16="float16", float32="float32"),
        "attn_implementation": hf.ATTENTION,
        "use_peft": none("without adapters all parameters are trained"),
        "use_rslora": to("model.lora.use_rslora"),
        "use_dora": to("model.lora.use_dora"),
        "lora_*": none("without use_peft nothing there; model.lora has rank, alpha, dropout, target_modules"),
        "load_in_*": none("model.lora.quantization is none or nf4, with adapters"),
        "bnb_*": none("model.lora.quantization is none or nf4"),
        "dataset_name": to("data.path"),
        "dataset_config": to("data.name"),
        "dataset_train_split": to("data.split"),
        "dataset_text_field": none(
            "data.format=text and data.column_mapping={text: ...} name the column of plain texts"
        ),
        "dataset_num_proc": to("data.num_workers"),
        "dataset_kwargs*": none("rows are always prepared"),
        "datasets*": none("several datasets are data.datasets, a list of {path, name, split, sampling_weight}"),
        "chat_template_path": to("data.chat_template"),
        "eos_token": none("the tokenizer's; a trained turn always ends with its stop token"),
        "pad_token": none("ours pads without a token of its own"),
        "max_length": to("data.seq_len"),
        "truncation_mode": none("rows that are too long lose their end"),
        "shuffle_dataset": to("data.shuffle"),
        "padding_free": hf.SPEED,
        "pad_to_multiple_of": none(
            "packed rows have data.seq_len tokens; data.pad_to_multiple_of is for unpacked ones"
        ),
        "eval_packing": none("validation rows are packed as the training rows are"),
        "loss_type": none("objective has its own list"),
        "activation_offloading": none("activations stay; parallelizer.activation_checkpointing recomputes them"),
        "rpo_alpha": to("objective.nll_weight"),
        "precompute_ref_*": none("reference says it"),
        "max_completion_length": to("rollout.max_new_tokens"),
        "max_prompt_length": none("data.seq_len holds prompt and response together"),
        "use_adaptive_entropy": none("objective.entropy_coef is constant"),
        "entropy_*": none("objective.entropy_coef is constant"),
        "vespo_*": none("read by loss_type vespo only"),
        "sync_ref_model": none("reference_sync is null: the reference stays as it was loaded"),
        "ref_model_*": none("reference_sync is null: the reference stays as it was loaded"),
        "sapo_*": none("read by loss_type sapo only"),
        "top_entropy_quantile": none("1 there: all tokens have a policy loss"),
        "label_smoothing": none("0 there: no smoothing"),
        "use_weighting": none("objective.use_wpo_weighting=false"),
        "log_unique_prompts": hf.SHOWN,
        "log_multimodal": hf.SHOWN,
        "temperature": to("rollout.temperature"),
        "top_p": to("rollout.top_p"),
        "top_k": to("rollout.top_k"),
        "num_iterations": to("rollout.num_iterations"),
        "delta": to("objective.dual_clip_ratio"),
        "scale_rewards": KeyMapping("rollout.normalize_advantages", values=_FALSE_IS_NONE),
        "importance_sampling_level": KeyMapping("objective.importance_sampling_level", values=_LEVELS),
        "mask_truncated_completions": to("rollout.overlong.filter"),
        "reward_funcs": none(
            "rewards are nodes of the section rewards (docs/rollouts/rewards.md); theirs are Python functions"
        ),
        "reward_weights": none("each node of rewards has a weight"),
        "use_vllm": none("colocated vLLM has no counterpart: our sampler generates on the trained weights"),
        "vllm_*": none("rollout.engine has its own keys"),
        "log_completions": to("rollout.log_samples_every", true=1, false=None),
        "num_completions_to_print": to("rollout.num_samples_logged"),
    },
    defaults=(
        Default("optimizer.lr", 2e-5, "as ours", ("sft",)),
        Default("optimizer.lr", 1e-6, "ours is 5e-7 for dpo", ("dpo", "grpo")),
        *hf.DEFAULTS,
        Default("data.seq_len", 1024, "max_length; ours is 2048"),
        Default("parallelizer.activation_checkpointing", "full", "gradient_checkpointing is on there"),
        Default("rollout.temperature", 1.0, "as ours", ("grpo",)),
    ),
    finish=vision.finish_if_any,
    averaging="theirs divides by the label tokens of the accumulated batch of all ranks, ours too",
)
