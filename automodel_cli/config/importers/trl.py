"""TRL's YAML for `trl sft|dpo|grpo --config` (huggingface.co/docs/trl; 1.16)."""

from __future__ import annotations

from typing import Any

from automodel_cli.config.importers import hugging_face as hf
from automodel_cli.config.importers import vision
from automodel_cli.config.importers.framework import Default, Draft, KeyMapping, Kind, Table, at_default, none, to

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
_ALWAYS: dict[str, tuple[Any, str]] = {
    "dataset_streaming": (False, "rows are prepared before the first step, and cached"),
    "use_bnb_nested_quant": (False, "model.lora.quantization is none or nf4"),
    "ignore_bias_buffers": (False, "buffers are not reduced over ranks"),
}
_OF_DPO: dict[str, tuple[Any, str]] = {
    "f_divergence_type": ("reverse_kl", "the log-ratio of the losses is that of the reverse KL"),
    "f_alpha_divergence_coef": (0.5, "read with f_divergence_type=alpha_divergence only"),
    "discopop_tau": (0.05, "the temperature of objective.loss=discopop is 0.05"),
    "disable_dropout": (True, "the models of the library have dropout as their configs say"),
}
_OF_GRPO: dict[str, tuple[Any, str]] = {
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
_AGGREGATION = {
    "grpo": "sequence",
    "sapo": "sequence",
    "bnpo": "token",
    "dapo": "token",
    "cispo": "token",
    "dr_grpo": "constant",
}


def _kind(draft: Draft) -> Kind:
    if draft.get("num_generations") or draft.get("max_completion_length") or draft.get("reward_funcs"):
        return "grpo"
    pairs = any(key in draft.source for key in _PAIRS) or str(draft.get("loss_type")) in _LOSSES
    if pairs or "beta" in draft.source:
        return "dpo"
    named = vision.names_vision_model(draft.get("model_name_or_path"), draft.get("dataset_name"))
    return "vlm" if named else "sft"


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
    at_default(draft, _ALWAYS | (_OF_DPO if draft.kind == "dpo" else _OF_GRPO if draft.kind == "grpo" else {}))
    {"sft": _sft, "dpo": _dpo, "grpo": _grpo}[draft.kind](draft, ranks)


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


def _follows(draft: Draft) -> None:
    """A reference that is updated."""
    if draft.get("sync_ref_model"):
        draft.put(
            "reference_sync.every_steps",
            draft.get("ref_model_sync_steps", 512),
            "ref_model_sync_steps",
            "sync_ref_model",
        )
        draft.put("reference_sync.mixup_alpha", draft.get("ref_model_mixup_alpha", 0.6), "ref_model_mixup_alpha")


def _dpo(draft: Draft, ranks: int) -> None:
    _follows(draft)
    loss = draft.get("loss_type", "sigmoid")
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    if isinstance(loss, str) and loss in _LOSSES:
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


def _grpo(draft: Draft, ranks: int) -> None:
    if draft.get("beta"):
        _follows(draft)
    if draft.get("top_entropy_quantile", 1.0) < 1:
        draft.put("objective.top_entropy_fraction", draft.get("top_entropy_quantile"), "top_entropy_quantile")
    group = int(draft.get("num_generations", 8))
    each = int(draft.get("per_device_train_batch_size", 8))
    rounds = int(draft.get("steps_per_generation", draft.get("gradient_accumulation_steps", 1)))
    samples = int(draft.get("generation_batch_size", each * ranks * rounds))
    draft.put("rollout.group_size", group, "num_generations")
    per_step = max(1, samples // group)
    theirs = ("steps_per_generation", "generation_batch_size")
    draft.put("rollout.prompts_per_step", per_step, *theirs, note=f"{samples} samples a generation / {group}")
    draft.put("rollout.max_new_tokens", int(draft.get("max_completion_length", 256)), "max_completion_length")
    prompt = int(draft.get("max_prompt_length", 512))
    seq_len = prompt + int(draft.get("max_completion_length", 256))
    draft.put("data.seq_len", seq_len, "max_prompt_length", note=f"prompt of up to {prompt} and response")
    loss = str(draft.get("loss_type", "dapo"))
    low, high = draft.get("epsilon", 0.2), draft.get("epsilon_high", draft.get("epsilon", 0.2))
    if loss == "cispo":
        draft.put("objective.clip_low", 1.0, "epsilon", note="theirs has no lower bound")
        note = "theirs bounds the ratio itself, ours 1 + clip_high, which is at least 1"
        draft.put("objective.clip_high", max(0.0, high - 1), "epsilon_high", note=note)
    elif loss == "sapo":
        draft.put("objective.sapo_positive", draft.get("sapo_temperature_pos", 1.0), "sapo_temperature_pos")
        draft.put("objective.sapo_negative", draft.get("sapo_temperature_neg", 1.05), "sapo_temperature_neg")
        for key in ("epsilon", "epsilon_high", "delta"):
            draft.leave(key, "sapo has a gate in the clip's place")
    else:
        draft.put("objective.clip_low", low, "epsilon")
        draft.put("objective.clip_high", high, "epsilon_high")
    _kl(draft)
    if loss in _AGGREGATION:
        draft.put(
            "objective.loss_aggregation", _AGGREGATION[loss], "loss_type", note="their default dapo: a mean over tokens"
        )
        if loss == "dr_grpo":
            draft.put(
                "objective.normalization_length", int(draft.get("max_completion_length", 256)), "max_completion_length"
            )
        if loss in ("cispo", "sapo"):
            draft.put("objective.policy_loss", loss, "loss_type")
    _by_sequence(draft, loss)
    _entropy(draft, loss)
    if draft.get("scale_rewards") == "batch":
        draft.put("rollout.reward_scaling", "batch", "scale_rewards")
    if draft.get("use_vllm") and draft.get("vllm_mode", "server") == "server":
        host, port = draft.get("vllm_server_host", "127.0.0.1"), draft.get("vllm_server_port", 8000)
        url = draft.get("vllm_server_base_url", f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}")
        keys = ("use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
        draft.put("rollout", "vllm", *keys)
        draft.put(
            "rollout.engine.url", url, *keys, note="a server as docs/rollouts/vllm.md starts it, not `trl vllm-serve`"
        )


def _kl(draft: Draft) -> None:
    """Theirs is k3 without clamps, times the policy's ratio to the rollout's weights by default (from TRL 1.16 on)."""
    theirs = "use_bias_correction_kl"
    draft.put("objective.kl_coef", draft.get("beta", 0.0), "beta", note="their default 0")
    if not draft.get("beta"):
        draft.leave(theirs, "beta is 0: there is no KL")
        return
    if draft.get(theirs, True):
        note = "their default; theirs is the trainer's ratio, ours the ratio to the sampler"
        draft.put("objective.kl_bias_correction", True, theirs, note=note)
    else:
        draft.put("objective.kl_score_term", False, theirs, note="the gradient of the KL's value alone")
    for name in ("kl_input_clamp", "kl_output_clamp"):
        draft.put(f"objective.{name}", None, "beta", note="theirs has no clamp")


def _by_sequence(draft: Draft, loss: str) -> None:
    """Losses over ratios of complete responses. This package then averages over responses."""
    level = "importance_sampling_level"
    if loss not in _AGGREGATION:
        draft.decide("loss_type", "no such loss here: this file has GRPO's clipped loss, a mean over tokens")
    elif draft.get(level) in ("sequence", "sequence_token") and _AGGREGATION[loss] != "sequence":
        draft.decide("loss_type", f"with {level}={draft.get(level)} ours takes means over responses (loss_type: grpo)")
        draft.values.pop("objective.normalization_length", None)
        draft.put("objective.loss_aggregation", "sequence", note="with a ratio of sequences")
    if loss == "luspo":  # it sums over responses, for which there is no aggregation with a sequence ratio
        draft.put(
            "objective.importance_sampling_level",
            "token",
            level,
            note="luspo's ratio of sequences is left out with its loss",
        )


def _entropy(draft: Draft, loss: str) -> None:
    coef = float(draft.get("entropy_coef", 0.0))
    if draft.get("use_adaptive_entropy"):
        draft.decide("use_adaptive_entropy", "objective.entropy_coef is constant: it has no target to follow")
    if coef < 0:
        draft.decide("entropy_coef", "objective.entropy_coef is a bonus, at least 0")
    elif coef:
        mean = "" if _AGGREGATION.get(loss) in (None, "token") else "theirs is a mean over tokens, ours as the loss"
        draft.put("objective.entropy_coef", coef, "entropy_coef", note=mean)


_LEVELS: dict[str, Any] = {level: level for level in ("token", "sequence", "sequence_token")}
_FALSE_IS_NONE: dict[str, Any] = {"true": True, "group": True, "false": False, "none": False}

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
