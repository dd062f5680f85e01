"""axolotl's YAML (docs.axolotl.ai, config reference; 0.18)."""

from __future__ import annotations

import re

from automodel_cli.config.importers import hugging_face as hf
from automodel_cli.config.importers import vision
from automodel_cli.config.importers.framework import WITH_PICTURES, Default, Draft, KeyMapping, Kind, Table, none, to

_FORMATS = {"alpaca": "alpaca", "chat_template": "messages", "sharegpt": "sharegpt", "completion": "text"}
_RL: dict[str, Kind] = {
    "dpo": "dpo",
    "ipo": "dpo",
    "kto": "dpo",
    "orpo": "dpo",
    "simpo": "dpo",
    "grpo": "grpo",
    "gdpo": "grpo",
}
_KERNEL = none("a kernel of theirs; ours has its own")
_SOURCE = {"path": "path", "name": "name", "revision": "revision", "split": "split"}

_INIT = {"true": "default", "pissa_niter_16": "pissa_niter_16"} | {
    name: name for name in ("gaussian", "orthogonal", "olora", "pissa")
}


def _kind(draft: Draft) -> Kind:
    kind = _RL.get(str(draft.get("rl")), "sft")
    return WITH_PICTURES.get(kind, kind) if draft.get("processor_type") or draft.has("image_") else kind


def _together(draft: Draft) -> None:
    draft.put("mesh.dp_size", None, "dp_shard_size", note="the ranks that are left")
    hf_axes = {"tensor_parallel_size": "tp", "context_parallel_size": "cp", "expert_parallel_size": "ep"}
    for theirs, axis in hf_axes.items():
        if draft.get(theirs):
            draft.put(f"mesh.{axis}_size", draft.get(theirs), theirs)
    hf.batch(draft, "micro_batch_size", "gradient_accumulation_steps", default=1)
    hf.betas(draft, "adam_beta1", "adam_beta2")
    hf.length(draft, epochs="num_epochs", default=1.0)
    hf.warmup(draft)
    if not draft.get("warmup_steps") and not draft.get("warmup_ratio"):
        draft.put("lr_scheduler.warmup_ratio", 0.03, note="axolotl's default; ours is none")
    hf.clipping(draft)
    if draft.get("wandb_project"):
        hf.trackers(draft, {"wandb": {key: f"wandb_{key}" for key in ("project", "entity", "mode")}})
    _adapter(draft)
    _parts(draft)
    _data(draft)
    if draft.reads_pictures:
        frozen = bool(draft.get("freeze_mm_modules", False))
        vision.put_parts(draft, dict.fromkeys(("tower", "projector"), ("freeze_mm_modules", frozen)))
    if draft.kind == "dpo":
        _preferences(draft)


def _adapter(draft: Draft) -> None:
    adapter = draft.get("adapter")
    if adapter not in ("lora", "qlora"):
        return
    four_bits = adapter == "qlora" or bool(draft.get("load_in_4bit"))
    theirs = ("adapter", "load_in_4bit")
    draft.put("model.lora.quantization", "nf4" if four_bits else "none", *theirs)
    if draft.get("lora_target_linear") or not draft.get("lora_target_modules"):
        draft.put("model.lora.target_modules", "all-linear", "lora_target_linear", "lora_target_modules")


def _parts(draft: Draft) -> None:
    """Parameters that are trained, and groups with another learning rate."""
    patterns = draft.get("unfrozen_parameters") or []
    if any(re.search(r"\[\d*:?\d*\]$", str(pattern)) for pattern in patterns):
        draft.decide("unfrozen_parameters", "train.trainable selects whole parameters, not ranges of rows")
    elif patterns:
        draft.put("train.trainable", [f"re:{pattern}" for pattern in patterns], "unfrozen_parameters")
    groups: list[dict[str, object]] = []
    theirs: list[str] = []
    while draft.has(there := f"lr_groups[{len(groups)}]."):
        names = [f"re:.*{re.escape(str(name))}" for name in draft.get(there + "modules", [])]
        groups.append({"params": names, "lr": draft.get(there + "lr")})
        theirs += [there + key for key in ("name", "modules", "lr")]
    if draft.get("loraplus_lr_ratio"):
        groups.append({"params": ["lora_B"], "lr_scale": float(draft.get("loraplus_lr_ratio"))})
        theirs.append("loraplus_lr_ratio")
    if groups:
        draft.put("optimizer.groups", groups, *theirs)


def _data(draft: Draft) -> None:
    """One dataset becomes data.path and its companions, several data.datasets."""
    numbers = sorted({int(key[9 : key.index("]")]) for key in draft.source if key.startswith("datasets[")})
    entries = [_dataset(draft, i, "data." if len(numbers) == 1 else None) for i in numbers]
    if len(entries) > 1:
        draft.put("data.datasets", entries, *(k for k in draft.source if k.startswith("datasets[") and k in draft.done))
    if draft.get("val_set_size"):
        draft.put("data.validation_size", draft.get("val_set_size"), "val_set_size")
    if draft.get("test_datasets[0].path") and not draft.get("val_set_size"):
        same = draft.get("test_datasets[0].path") == draft.get("datasets[0].path")
        key, value = (
            ("split", draft.get("test_datasets[0].split")) if same else ("path", draft.get("test_datasets[0].path"))
        )
        draft.put(f"data.validation_{key}", value, "test_datasets[0].path", "test_datasets[0].split")


def _dataset(draft: Draft, i: int, prefix: str | None) -> dict[str, object]:
    entry: dict[str, object] = {}
    there = f"datasets[{i}]."

    def put(name: str, value: object, *theirs: str) -> None:
        entry[name] = value
        if prefix:
            draft.put(prefix + name, value, *theirs)
        draft.done.update(theirs)

    path = "data_files" if draft.get(there + "data_files") else "path"
    for theirs, ours in (_SOURCE | {"data_files": "path"}).items():
        value = draft.get(there + theirs)
        if value is not None and (theirs not in ("path", "data_files") or theirs == path):
            first = value[0] if isinstance(value, list) else value
            put(ours, first, there + theirs)
    kind = str(draft.get(there + "type", "")).split(".")[0]
    if draft.kind == "dpo":
        put("format", "preference" if draft.get("rl") != "kto" else "unpaired_preference", there + "type")
    elif kind in _FORMATS:
        put("format", _FORMATS[kind], there + "type")
    columns = _columns(draft, there, kind)
    if columns:
        put("column_mapping", columns, *(k for k in draft.source if k.startswith(there) and "field" in k))
    return entry


def _columns(draft: Draft, there: str, kind: str) -> dict[str, str]:
    fields = {
        "field_messages": "messages",
        "field_system": "system",
        "field_tools": "tools",
        "type.field_instruction": "instruction",
        "type.field_input": "input",
        "type.field_output": "output",
        "type.field_system": "system",
    }
    if kind == "completion":
        fields["field"] = "text"
    return {ours: draft.get(there + theirs) for theirs, ours in fields.items() if draft.get(there + theirs)}


def _preferences(draft: Draft) -> None:
    objective = str(draft.get("rl"))
    draft.put("objective", objective, "rl")
    beta = "orpo_alpha" if objective == "orpo" else "rl_beta"
    draft.put("objective.beta", draft.get(beta, draft.get("dpo_beta", 0.1)), beta, "dpo_beta")
    draft.put("data.packing", "best_fit", "sample_packing", note="the loss of a pair does not depend on it")


TABLE = Table(
    tool="axolotl",
    slug="axolotl",
    signs=(
        3,
        (
            *("base_model", "sequence_len", "micro_batch_size", "datasets", "sample_packing", "val_set_size"),
            *("adapter", "load_in_4bit", "train_on_inputs", "num_epochs", "lora_r", "lora_target_linear"),
            *("dataset_prepared_path", "special_tokens"),
        ),
    ),
    kind=_kind,
    run_lockstep=_together,
    rows=hf.ROWS
    | {
        "base_model": to("model.pretrained"),
        "base_model_config": to("model.pretrained"),
        "revision_of_model": to("model.revision"),
        "trust_remote_code": hf.REMOTE_CODE,
        "model_type": none("found from the model's own config"),
        "tokenizer_type": none("found from the model's own files"),
        "tokenizer_config": to("model.tokenizer"),
        **vision.ROWS,
        "val_set_size": none("0 rows are held out"),
        "skip_prepare_dataset": none("rows are always prepared, and pictures are read while a step runs"),
        "strict": none("our check is always strict"),
        "load_in_8bit": none("no 8-bit base: model.lora.quantization is none or nf4"),
        "load_in_4bit": none("model.lora.quantization says it, with adapters"),
        "adapter": none("without adapters all parameters are trained"),
        "lora_r": to("model.lora.rank"),
        "lora_alpha": to("model.lora.alpha"),
        "lora_dropout": to("model.lora.dropout"),
        "qat.weight_dtype": to(
            "model.qat.weight_dtype", int4="int4", int8="int8", float8_e4m3fn="fp8", mxfp4="mxfp4", nvfp4="nvfp4"
        ),
        "qat.activation_dtype": to(
            "model.qat.activation_dtype",
            "symmetric scales per token; theirs have zero points",
            int8="int8",
            float8_e4m3fn="fp8",
            null="none",
        ),
        "qat.group_size": to("model.qat.group_size"),
        "qat.fake_quant_after_n_steps": to("model.qat.fake_quant_after_n_steps"),
        "qat.quantize_embedding": none("embeddings keep their precision"),
        "lora_target_modules": to("model.lora.target_modules"),
        "lora_target_parameters": to("model.lora.target_parameters"),
        "peft_use_rslora": to("model.lora.use_rslora"),
        "peft_use_dora": to("model.lora.use_dora"),
        "peft_init_lora_weights": to("model.lora.init_lora_weights", **_INIT),
        "lora_model_dir": none("model.lora.pretrained, without rank, alpha and layers, which its files have"),
        "lora_modules_to_save": to("model.lora.modules_to_save"),
        "peft_layers_to_transform": to("model.lora.layers_to_transform"),
        "peft_trainable_token_indices": to("model.lora.trainable_token_indices"),
        "lora_*_kernel": _KERNEL,
        "lora_*": none("not in our adapters: see model.lora in docs/config/model.md"),
        "peft*": none("not in our adapters: see model.lora in docs/config/model.md"),
        "sequence_len": to("data.seq_len"),
        "sample_packing": KeyMapping("data.packing", values={"true": "best_fit", "false": "none"}),
        "eval_sample_packing": none("validation rows are packed as the training rows are"),
        "pad_to_sequence_len": none("packed rows always have data.seq_len tokens; unpacked ones see data.padding"),
        "excess_length_strategy": to("data.truncation", drop="drop", truncate="truncate", **{"raise": "error"}),
        "train_on_inputs": to("data.loss_mask", true="all", false="assistant"),
        "roles_to_train": none("data.loss_mask: the assistant's turns, or all"),
        "train_on_eos": none("a trained turn always ends with its stop token, trained"),
        "chat_template": to("data.chat_template", tokenizer_default="auto"),
        "chat_template_jinja": to("data.chat_template"),
        "datasets[].ds_type": none("found from the file's suffix"),
        "datasets[].roles_to_train": none("data.loss_mask: the assistant's turns, or all"),
        "datasets[].train_on_eos": none("a trained turn always ends with its stop token, trained"),
        "datasets[].message_property_mappings.*": none("role and content, or from and value, are found"),
        "datasets[].*": none("no counterpart in data.path, .name, .split, .format, .column_mapping"),
        "test_datasets[].*": none("data.validation_path or data.validation_split reads as the training data is read"),
        "dataset_prepared_path": none("prepared data has its own cache: data.cache_dir"),
        "dataset_processes": to("data.num_workers"),
        "shuffle_merged_datasets": to("data.shuffle"),
        "optimizer": KeyMapping("optimizer", values=hf.OPTIMIZERS),
        "lr_scheduler": KeyMapping("lr_scheduler", values=hf.SCHEDULES),
        "cosine_min_lr_ratio": to("lr_scheduler.min_lr_ratio"),
        "flash_attention": hf.ATTENTION,
        "attn_implementation": hf.ATTENTION,
        "sdp_attention": hf.ATTENTION,
        "xformers_attention": hf.ATTENTION,
        "flex_attention": hf.ATTENTION,
        "dp_shard_size": hf.PLACE,
        "dp_replicate_size": to("mesh.dp_replicate_size"),
        "evals_per_epoch": none("validation.every counts steps"),
        "saves_per_epoch": none("checkpoint.every counts steps"),
        "eval_*": none("what validation measures is fixed: loss, and what callbacks add"),
        "early_stopping_patience": none("validation.patience; it counts validations, so validation.every is needed"),
        "loss_watchdog_*": none("a step that is not finite stops the run; nothing stops one that is merely high"),
        "wandb_name": to("run_name"),
        "wandb_*": none("logging.trackers takes a WandB node with project, entity, group and mode"),
        "mlflow_*": none("logging.trackers takes an MLflow node"),
        "special_tokens.*": none("the tokenizer's own; ours pads without a token of its own"),
        "tokens": to("model.tokenizer.add_tokens"),
        "plugins": none("plugins of theirs are their code; callbacks and objectives are ours"),
        "cut_cross_entropy": _KERNEL,
        "liger_*": _KERNEL,
        "local_rank": hf.PLACE,
        "deepspeed": none("parallelizer=fsdp2 shards as ZeRO-3 does"),
        "debug": hf.SHOWN,
        "trl.*": none("rollout has its own keys"),
    },
    defaults=(
        Default("data.packing", "none", "ours packs: sample_packing is off there", ("sft",)),
        Default("data.loss_mask", "assistant", "train_on_inputs is off there", ("sft",)),
        Default("data.truncation", "drop", "ours truncates chats", ("sft", "dpo")),
        Default("optimizer.betas", [0.9, 0.999], "ours is [0.9, 0.95]"),
        Default("optimizer.weight_decay", 0.0, "ours is 0.01"),
        Default("lr_scheduler", "cosine", "ours too, but for grpo"),
        Default("seed", 42, "ours is 0"),
    ),
    finish=vision.finish_if_any,
    averaging="theirs divides by the label tokens of the accumulated batch of all ranks, ours too",
)
