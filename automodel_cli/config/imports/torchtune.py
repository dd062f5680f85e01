"""torchtune's YAML (pytorch.org/torchtune; 0.6.1, the last one)."""

from __future__ import annotations

from typing import Any

from automodel_cli.config.imports import hugging_face as hf
from automodel_cli.config.imports.engine import Default, Draft, Kind, Row, Table, none, to

_HUB = {
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", "all"),
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", "all"),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt", "assistant"),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", "preference", ""),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", "preference", ""),
    "gsm8k_dataset": ("openai/gsm8k", "auto", ""),
}
"""Builders that name a dataset: hub id, our format, and what they train of a row."""
_COLUMNS = {
    "stack_exchange_paired_dataset": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
    "gsm8k_dataset": {"prompt": "question"},
}


def _leaf(draft: Draft, section: str) -> str:
    return str(draft.get(f"{section}._component_", "")).rpartition(".")[2]


def _kind(draft: Draft) -> Kind:
    if draft.get("grpo_samples"):
        return "grpo"
    return "dpo" if _leaf(draft, "loss") in ("DPOLoss", "RSOLoss", "SimPOLoss") else "sft"


def _together(draft: Draft) -> None:
    for axis in ("tp", "cp"):
        key = {"tp": "tensor_parallel_dim", "cp": "context_parallel_dim"}[axis]
        if draft.get(key):
            draft.put(f"mesh.{axis}_size", draft.get(key), key)
    hf.batch(draft, "batch_size", "gradient_accumulation_steps", default=2)
    hf.length(draft, "max_steps_per_epoch", "epochs", default=1.0)
    hf.clipping(draft, "clip_grad_norm", None)
    if str(draft.get("metric_logger._component_", "")).endswith("WandBLogger"):
        fields = {name: f"metric_logger.{name}" for name in ("project", "entity", "group")}
        hf.trackers(draft, {"wandb": fields}, "metric_logger._component_")
    elif str(draft.get("metric_logger._component_", "")).endswith("TensorBoardLogger"):
        hf.trackers(draft, {"tensorboard": {"log_dir": "metric_logger.log_dir"}}, "metric_logger._component_")
    folder = draft.get("checkpointer.checkpoint_dir")
    if folder:
        draft.put("model.pretrained", str(folder), "checkpointer.checkpoint_dir", note="a folder in the hub's format")
    _data(draft)
    _lora(draft)
    _optimizer(draft)
    if draft.kind == "dpo":
        draft.put("objective.beta", draft.get("loss.beta", 0.1), "loss.beta", "loss._component_")
        draft.put("objective.label_smoothing", draft.get("loss.label_smoothing", 0), "loss.label_smoothing")


def _data(draft: Draft) -> None:
    name = _leaf(draft, "dataset")
    path, fmt, mask = _HUB.get(name, (None, "auto", "assistant"))
    source = draft.get("dataset.data_files", draft.get("dataset.source", path))
    source = source[0] if isinstance(source, list) else source
    if source in ("json", "csv", "parquet", None):
        source = "train.jsonl"
    draft.put("data.path", source, "dataset._component_", "dataset.source", "dataset.data_files")
    if name in _HUB:
        draft.put("data.format", fmt, "dataset._component_")
    columns = _COLUMNS.get(name) or _mapped(draft)
    if columns:
        draft.put("data.columns", columns, *(key for key in draft.source if key.startswith("dataset.column_map.")))
    if draft.kind == "sft":
        whole = draft.get("dataset.train_on_input", mask == "all")
        said = "train_on_input is on in their alpaca builders" if "dataset.train_on_input" not in draft.source else ""
        draft.put("data.mask", "all" if whole else "assistant", "dataset.train_on_input", note=said)
        packs = bool(draft.get("dataset.packed"))
        note = "" if packs else "torchtune packs only where it is told to; ours packs by default"
        draft.put("data.packing", "best_fit" if packs else "none", "dataset.packed", note=note)
    length = draft.get("tokenizer.max_seq_len")
    note = "theirs is bounded by the model alone" if length is None else ""
    draft.put("data.seq_len", length or 4096, "tokenizer.max_seq_len", note=note)


def _mapped(draft: Draft) -> dict[str, Any]:
    prefix = "dataset.column_map."
    names = {"conversations": "messages"}
    found = {key.removeprefix(prefix): value for key, value in draft.source.items() if key.startswith(prefix)}
    return {names.get(name, name): column for name, column in found.items() if column}


def _lora(draft: Draft) -> None:
    builder = _leaf(draft, "model")
    if not builder.startswith(("lora_", "qlora_")):
        return
    modules = list(draft.get("model.lora_attn_modules", ["q_proj", "v_proj"]))
    if draft.get("model.apply_lora_to_mlp"):
        modules += ["gate_proj", "up_proj", "down_proj"]
    modules = ["o_proj" if name == "output_proj" else name for name in modules]
    draft.put("model.lora.target_modules", modules, "model.lora_attn_modules", "model.apply_lora_to_mlp")
    draft.put("model.lora.rank", draft.get("model.lora_rank", 8), "model.lora_rank")
    draft.put("model.lora.alpha", draft.get("model.lora_alpha", 16), "model.lora_alpha")
    quantised = "nf4" if builder.startswith("qlora_") or draft.get("model.quantize_base") else "none"
    draft.put("model.lora.base_quantization", quantised, "model._component_", "model.quantize_base")


def _optimizer(draft: Draft) -> None:
    name = _leaf(draft, "optimizer")
    option = {"AdamW": "adamw", "PagedAdamW8bit": "adamw8bit", "AdamW8bit": "adamw8bit"}.get(name)
    if option:
        draft.put("optimizer", option, "optimizer._component_")
    schedule = _leaf(draft, "lr_scheduler")
    if schedule == "get_cosine_schedule_with_warmup":
        draft.put("lr_scheduler", "cosine", "lr_scheduler._component_")
        draft.put(
            "lr_scheduler.warmup_steps", draft.get("lr_scheduler.num_warmup_steps", 0), "lr_scheduler.num_warmup_steps"
        )
    elif not schedule:
        draft.put("lr_scheduler", "constant", note="none is named there")


_SHARDS = none("model.pretrained names the folder; its index says which files there are")

TABLE = Table(
    tool="torchtune",
    slug="torchtune",
    signs=(3, ("tokenizer._component_", "model._component_", "checkpointer._component_", "dataset._component_")),
    kind=_kind,
    together=_together,
    rows={
        "model._component_": none("model.pretrained names the model"),
        "model.lora_dropout": to("model.lora.dropout"),
        "model.apply_lora_to_output": none("the head has no adapter: its log-probs come from one fused head"),
        "model.use_dora": none("no DoRA"),
        "model.*": none("model.pretrained brings the whole architecture"),
        "tokenizer.prompt_template*": to("data.chat_template"),
        "tokenizer.*": none("the tokenizer beside the weights (model.tokenizer)"),
        "checkpointer.output_dir": none("output_dir"),
        "checkpointer.*": _SHARDS,
        "ref_checkpointer.*": none("the reference is the model as loaded (reference=...)"),
        "resume_from_checkpoint": none("`automodel resume RUN`, or checkpoint.resume=auto"),
        "save_adapter_weights_only": none("the export of a run with adapters is the adapter"),
        "dataset.split": to("data.split"),
        "dataset.conversation_column": none("data.columns={messages: ...}"),
        "dataset.conversation_style": none("openai or sharegpt is found from the rows"),
        "dataset.new_system_prompt": none("no system prompt is added: put it into the rows"),
        "dataset.*": none("no counterpart in data.path, .name, .split, .format, .columns"),
        "dataset_val.*": none("data.validation_path, .validation_split or .validation_rows"),
        "seed": to("seed"),
        "shuffle": to("data.shuffle"),
        "optimizer.lr": to("optimizer.lr"),
        "optimizer.weight_decay": to("optimizer.weight_decay"),
        "optimizer.betas": to("optimizer.betas"),
        "optimizer.eps": to("optimizer.eps"),
        "optimizer.fused": none("the fused kernel is taken where there is one"),
        "optimizer.*": none("not in our optimizers"),
        "lr_scheduler.*": none("lr_scheduler=cosine, linear, wsd or constant"),
        "loss.*": none("objective: the log-probs come in chunks here too"),
        "compile": to("parallelizer.enable_compile"),
        "optimizer_in_bwd": none("gradients are summed over the whole step first"),
        "custom_sharded_layers": hf.PLACE,
        "fsdp_*": hf.PLACE,
        "output_dir": to("output_dir", "ours makes a folder for each run in it"),
        "metric_logger._component_": none("logging.trackers: tensorboard, wandb, mlflow, trackio"),
        "metric_logger.*": none("logging.trackers takes nodes"),
        "log_every_n_steps": to("logging.every"),
        "log_*": hf.SHOWN,
        "profiler.*": none("logging.profile"),
        "device": hf.PLACE,
        "dtype": to("model.dtype", bf16="bfloat16", fp32="float32", fp16="float16"),
        "enable_activation_checkpointing": Row("parallelizer.activation_checkpointing", values=hf.CHECKPOINTING),
        "enable_activation_offloading": none("activations stay; activation checkpointing recomputes them"),
        "run_val_every_n_steps": to("validation.every"),
        "save_every_n_steps": to("checkpoint.every"),
    },
    defaults=(
        Default("optimizer.betas", [0.9, 0.999], "torch's; ours is [0.9, 0.95]"),
        Default("data.long_documents", "truncate", "longer rows are cut there", ("sft",)),
    ),
    averaging="theirs divides by the label tokens of the step of all ranks, ours too",
)
