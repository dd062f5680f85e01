"""LLaMA-Factory's YAML (llamafactory.readthedocs.io, arguments; 0.9.5)."""

from __future__ import annotations

from automodel_cli.config.importers import hugging_face as hf
from automodel_cli.config.importers import vision
from automodel_cli.config.importers.framework import WITH_PICTURES, Default, Draft, KeyMapping, Kind, Table, none, to

_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "hinge": "dpo"}
_PICTURES = ("image_", "freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model", "media_dir")
_STAGES: dict[str, Kind] = {"dpo": "dpo", "kto": "dpo"}


def _kind(draft: Draft) -> Kind:
    kind = _STAGES.get(str(draft.get("stage")), "sft")
    named = vision.names_vision_model(draft.get("model_name_or_path"), draft.get("template"))
    return WITH_PICTURES[kind] if named or any(draft.has(key) for key in _PICTURES) else kind


def _together(draft: Draft) -> None:
    hf.batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps", default=8)
    hf.betas(draft)
    hf.length(draft)
    hf.warmup(draft)
    hf.clipping(draft)
    hf.report_to(draft)
    _data(draft)
    if draft.reads_pictures:
        _vision(draft)
    for key in ("add_tokens", "add_special_tokens"):
        if tokens := [token.strip() for token in str(draft.get(key) or "").split(",") if token.strip()]:
            draft.put(f"model.tokenizer.{key}", tokens, key)
    if draft.get("finetuning_type", "lora") == "lora":
        _lora(draft)
    elif draft.get("finetuning_type") == "full":
        draft.put("model.lora", None, "finetuning_type")
    if draft.get("stage") == "pt":
        draft.put("data.loss_mask", "all", "stage", note="every token of a text is trained")
    elif draft.kind == "sft":
        draft.put("data.loss_mask", *_mask(draft), "train_on_prompt", "mask_history", "stage")
    if draft.kind == "dpo":
        kto = draft.get("stage") == "kto"
        draft.put(
            "objective", "kto" if kto else _LOSSES.get(draft.get("pref_loss", "sigmoid"), "dpo"), "stage", "pref_loss"
        )
        if draft.get("pref_loss") == "hinge":
            draft.put("objective.loss", "hinge", "pref_loss")
        draft.put("objective.beta", draft.get("pref_beta", 0.1), "pref_beta")
        if draft.get("pref_ftx") and not kto:
            draft.put("objective.nll_weight", draft.get("pref_ftx"), "pref_ftx")


def _vision(draft: Draft) -> None:
    """Their tower and projector are frozen unless the file trains them."""
    keys = {
        "tower": ("freeze_vision_tower", True),
        "projector": ("freeze_multi_modal_projector", True),
        "text": ("freeze_language_model", False),
    }
    vision.put_parts(draft, {part: (key, bool(draft.get(key, default))) for part, (key, default) in keys.items()})
    folder = draft.get("media_dir") or draft.get("dataset_dir", "data")
    draft.put("data.media_dir", folder, "media_dir", note="their default is dataset_dir")
    limit = draft.get("image_max_pixels", 768 * 768)
    draft.decide("image_max_pixels", f"theirs resizes pictures to {limit} pixels; here the processor's files decide")


def _mask(draft: Draft) -> tuple[str]:
    if draft.get("train_on_prompt"):
        return ("all",)
    return ("last_turn",) if draft.get("mask_history") else ("assistant",)


def _data(draft: Draft) -> None:
    names = [name.strip() for name in str(draft.get("dataset", "")).split(",") if name.strip()]
    folder = draft.get("dataset_dir", "data")
    paths = [f"{folder}/{name}.json" for name in names] or ["train.jsonl"]
    there = "a name of theirs in dataset_info.json: put its file or hub id (and data.column_mapping) here"
    if len(paths) == 1:
        draft.put("data.path", paths[0], "dataset", "dataset_dir", note=there)
    else:
        draft.put("data.datasets", [{"path": path} for path in paths], "dataset", "dataset_dir", note=there)
    packs = bool(draft.get("packing")) or bool(draft.get("neat_packing")) or draft.get("stage") == "pt"
    reason = "packing without neat_packing lets documents see each other there; ours never does"
    blind = reason if draft.get("packing") and not draft.get("neat_packing") else ""
    packing = "best_fit" if packs or draft.kind == "dpo" else "none"
    if draft.get("stage") == "pt":
        packing = "wrapped"
    note = blind or ("" if packs else "LLaMA-Factory packs only where it is told to; ours packs by default")
    draft.put("data.packing", packing, "packing", "neat_packing", note=note)
    if draft.get("val_size"):
        draft.put("data.validation_size", draft.get("val_size"), "val_size")


def _lora(draft: Draft) -> None:
    rank = int(draft.get("lora_rank", 8))
    draft.put("model.lora.rank", rank, "finetuning_type", "lora_rank", note="their default is 8, ours 16")
    draft.put(
        "model.lora.alpha", float(draft.get("lora_alpha", 2 * rank)), "lora_alpha", note="default: twice the rank"
    )
    targets = str(draft.get("lora_target", "all"))
    modules = "all-linear" if targets == "all" else [name.strip() for name in targets.split(",")]
    draft.put("model.lora.target_modules", modules, "lora_target")
    if draft.get("additional_target"):
        names = [name.strip() for name in str(draft.get("additional_target")).split(",")]
        draft.put("model.lora.modules_to_save", names, "additional_target")
    if draft.get("pissa_init"):
        count = int(draft.get("pissa_iter", 16))
        method = "pissa" if count < 0 else f"pissa_niter_{count}"
        draft.put("model.lora.init_lora_weights", method, "pissa_init", "pissa_iter", "pissa_convert")
    if draft.get("loraplus_lr_ratio"):
        group = {"params": ["lora_B"], "lr_scale": float(draft.get("loraplus_lr_ratio"))}
        draft.put("optimizer.groups", [group], "loraplus_lr_ratio")
    if draft.get("quantization_bit") == 4:
        draft.put("model.lora.quantization", "nf4", "quantization_bit")


TABLE = Table(
    tool="LLaMA-Factory",
    slug="llama-factory",
    signs=(
        4,
        (
            *("model_name_or_path", "stage", "finetuning_type", "cutoff_len", "template", "dataset", "lora_target"),
            *("do_train", "lora_rank", "overwrite_cache", "plot_loss", "preprocessing_num_workers", "neat_packing"),
            "dataset_dir",
        ),
    ),
    kind=_kind,
    run_lockstep=_together,
    rows=hf.ROWS
    | {
        "model_name_or_path": to("model.pretrained"),
        "model_revision": to("model.revision"),
        "trust_remote_code": hf.REMOTE_CODE,
        "adapter_name_or_path": none("model.lora.pretrained, without rank, alpha and layers, which its files have"),
        "stage": none("the recipe: sft, dpo or grpo (pt, rm and ppo have none)"),
        "finetuning_type": none("full or lora; there is no oft"),
        **vision.ROWS,
        "freeze_*": none("train.freeze and train.trainable take patterns of parameter names"),
        "lora_dropout": to("model.lora.dropout"),
        "use_rslora": to("model.lora.use_rslora"),
        "use_dora": to("model.lora.use_dora"),
        "loraplus_*": none("optimizer.groups takes patterns of parameter names and their rates"),
        "pissa_*": none("model.lora.init_lora_weights=pissa, which is always exported as plain LoRA"),
        "quantization_*": none("model.lora.quantization is none or nf4"),
        "double_quantization": none("nf4 scales are not quantised again"),
        "new_special_tokens_config": none("the text of the description: model.tokenizer.init_new_tokens has two ways"),
        "init_special_tokens": none("model.tokenizer.init_new_tokens is pieces or mean"),
        "resize_vocab": none("the vocabulary grows with model.tokenizer.add_tokens"),
        "cutoff_len": to("data.seq_len"),
        "template": none(
            "the chat template is the tokenizer's own (data.chat_template takes a file); compare with "
            "`automodel data inspect`"
        ),
        "enable_thinking": none("the chat template decides; see data.multi_turn"),
        "max_samples": none("all rows are read: cut the file, or set train.max_steps"),
        "overwrite_cache": none("the cache is keyed by content: there is nothing to overwrite"),
        "preprocessing_num_workers": to("data.num_workers"),
        "preprocessing_batch_size": hf.SPEED,
        "eval_dataset": none("data.validation_path takes its file"),
        "val_size": none("0 rows are held out"),
        "mix_strategy": none("data.datasets.N.sampling_weight are shares of the tokens"),
        "streaming": none("rows are prepared first; data.streaming={} with train.max_steps streams them"),
        "flash_attn": hf.ATTENTION,
        "enable_liger_kernel": hf.SPEED,
        "use_unsloth*": hf.SPEED,
        "rope_scaling": none("model.config of the weights decides; give a folder with another config.json"),
        "pref_ftx": to("objective.nll_weight"),
        "pref_loss": none("objective.loss has its own list"),
        "kto_*": none("objective.desirable_weight and .undesirable_weight"),
        "ref_model": none("the reference is the model as loaded (reference=...)"),
        "pure_bf16": to("model.dtype", true="bfloat16", false="float32"),
        "upcast_*": hf.PRECISION,
        "disable_gradient_checkpointing": KeyMapping(
            "parallelizer.activation_checkpointing", values={"true": False, "false": "full"}
        ),
        "include_effective_tokens_per_second": hf.SHOWN,
        "swanlab_*": none("no such tracker; logging.trackers takes nodes of your own"),
        "use_swanlab": none("no such tracker; logging.trackers takes nodes of your own"),
        "ray_*": hf.PLACE,
    },
    defaults=(
        *hf.DEFAULTS,
        Default("data.seq_len", 2048, "cutoff_len; longer rows are cut there"),
        Default("parallelizer.activation_checkpointing", "full", "it is on there unless disabled; no number changes"),
        Default("data.truncation", "truncate", "longer rows are cut there", ("sft",)),
        Default("optimizer.lr", 5e-5, "ours is 2e-5 (5e-7 for dpo)"),
    ),
    finish=vision.finish_if_any,
    averaging="theirs divides by the label tokens of the accumulated batch of all ranks, ours too",
)
