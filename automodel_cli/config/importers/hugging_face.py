"""Keys of transformers' TrainingArguments, which TRL and LLaMA-Factory share, and combinations of them."""

from __future__ import annotations

from collections.abc import Mapping

from automodel_cli.config.importers.framework import Default, Draft, KeyMapping, none, to

OPTIMIZERS = {
    name: option
    for option, names in {
        "adamw": "adamw adamw_torch adamw_torch_fused adamw_hf paged_adamw_32bit adamw_apex_fused",
        "adamw8bit": "adamw_8bit adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit",
        "muon": "muon",
    }.items()
    for name in names.split()
}
SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "cosine_with_min_lr": "cosine",
}
CHECKPOINTING = {"true": "full", "false": False}
TRACKERS = {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow", "trackio": "Trackio"}
"""Their names, and the classes of `training/trackers.py`."""
_FIELDS = {
    "wandb": {"project": "wandb_project", "entity": "wandb_entity", "group": "wandb_run_group", "mode": "wandb_mode"},
    "trackio": {"project": "project", "space_id": "trackio_space_id"},
}
PLACE = none("ranks, nodes and devices: mesh and the launcher say it here (docs/guides/parallelism.md)")
SPEED = none("how fast, not what: see docs/performance.md")
SHOWN = none("what is shown while it runs; metrics.jsonl has every step")
PRECISION = none(
    "ours computes in bfloat16 over float32 parameters unless model.dtype or parallelizer.mp_policy say so"
)
HUB = none("an upload; the export is in the run folder")
ATTENTION = none("model.attn_implementation=packed isolates documents, with the best kernel there is")
REMOTE_CODE = to("model.trust_remote_code", "the command line must allow it: --trust remote-code")

ROWS: dict[str, KeyMapping] = {
    "learning_rate": to("optimizer.lr"),
    "weight_decay": to("optimizer.weight_decay"),
    "adam_epsilon": to("optimizer.eps"),
    "optim": KeyMapping("optimizer", values=OPTIMIZERS),
    "lr_scheduler_type": KeyMapping("lr_scheduler", values=SCHEDULES),
    "lr_scheduler_kwargs.min_lr_rate": to("lr_scheduler.min_lr_ratio"),
    "num_train_epochs": to("train.epochs"),
    "seed": to("seed"),
    "data_seed": none("seed decides the order of rows too"),
    "bf16": PRECISION,
    "fp16": PRECISION,
    "tf32": PRECISION,
    "gradient_checkpointing": KeyMapping("parallelizer.activation_checkpointing", values=CHECKPOINTING),
    "gradient_checkpointing_kwargs*": none("ours is always the non-reentrant kind"),
    "torch_compile": to("parallelizer.enable_compile"),
    "save_steps": to("checkpoint.every"),
    "save_total_limit": to("checkpoint.keep_latest_k"),
    "save_strategy": none("checkpoint.every says it: a number of steps, null: only at the end"),
    "save_only_model": none("checkpoints are always whole; the export holds the model alone"),
    "load_best_model_at_end": none(
        "validation.patience exports the best one; else `automodel export --checkpoint best`"
    ),
    "metric_for_best_model": none("validation.metric: val_loss, or what else a validation measures"),
    "greater_is_better": none("validation.direction=max"),
    "eval_steps": to("validation.every"),
    "eval_strategy": none("validation.every says it: a number of steps, null: only at the end"),
    "eval_on_start": to("validation.at_start"),
    "do_eval": none("rows are held out by data.validation_size, _path or _split"),
    "do_train": none("training is what `automodel finetune` does"),
    "per_device_eval_batch_size": none("validation uses the training microbatch; the loss does not depend on it"),
    "logging_steps": to("logging.every"),
    "logging_*": SHOWN,
    "plot_loss": to("logging.report"),
    "wandb_*": none("logging.trackers takes a WandB node with project, entity, group and mode"),
    "trackio_*": none("logging.trackers takes a Trackio node with project and space_id"),
    "project": none("read by trackio only, which report_to does not name"),
    "run_name": to("run_name"),
    "output_dir": to("output_dir", "ours makes a folder for each run in it"),
    "overwrite_output_dir": none("a run never overwrites another: each has a folder of its own"),
    "resume_from_checkpoint": none("`automodel resume RUN`, or checkpoint.resume=auto"),
    "dataloader_*": SPEED,
    "ddp_*": SPEED,
    "fsdp*": PLACE,
    "deepspeed": none("parallelizer=fsdp2 shards as ZeRO-3 does"),
    "push_to_hub": HUB,
    "hub_*": HUB,
    "use_liger_kernel": SPEED,
    "group_by_length": none("rows are packed, so there is no padding to save"),
    "remove_unused_columns": none("columns that nothing reads are listed in the run's header"),
    "neftune_noise_alpha": none("no noise on embeddings: the loss differs from theirs"),
    "label_smoothing_factor": none("no label smoothing of the likelihood: the loss differs from theirs"),
    "average_tokens_across_devices": none("ours always averages over the tokens of all ranks"),
    "include_num_input_tokens_seen": none("metrics.jsonl has num_tokens of every step"),
}

DEFAULTS = (
    Default("optimizer.betas", [0.9, 0.999], "ours is [0.9, 0.95]"),
    Default("optimizer.weight_decay", 0.0, "ours is 0.01"),
    Default("lr_scheduler", "linear", "ours is cosine (constant for grpo)"),
    Default("seed", 42, "ours is 0"),
)


def batch(draft: Draft, microbatch: str, accumulation: str, *, default: int, rows: str = "rows") -> int:
    """Theirs per device times accumulation times data-parallel ranks is our global batch. Returns the ranks."""
    axes = [draft.values.get(f"mesh.{axis}_size", 1) or 1 for axis in ("tp", "cp", "pp")]
    ranks = max(1, draft.gpus // (axes[0] * axes[1] * axes[2]))
    each, steps = int(draft.get(microbatch, default)), int(draft.get(accumulation, 1))
    there = [key for key in (microbatch, accumulation) if key in draft.source]
    product = f"{each} a device x {steps} accumulated x {ranks} data-parallel rank(s), of --gpus {draft.gpus}"
    draft.put("train.global_batch_size", each * steps * ranks, *there, note=f"{rows}: {product}")
    draft.put("train.microbatch_size", each, note=microbatch)
    return ranks


def betas(draft: Draft, first: str = "adam_beta1", second: str = "adam_beta2") -> None:
    if first in draft.source or second in draft.source:
        pair = [float(draft.get(first, 0.9)), float(draft.get(second, 0.999))]
        draft.put("optimizer.betas", pair, first, second, note="where one is not named: 0.9 and 0.999")


def length(draft: Draft, steps: str = "max_steps", epochs: str = "num_train_epochs", default: float = 3.0) -> None:
    """Steps override epochs in these tools. In this package, the run ends at the one reached first."""
    if (count := draft.get(steps)) is not None and int(count) > 0:
        draft.put("train.max_steps", int(count), steps)
        draft.put("train.epochs", None, epochs, note=f"{steps} decides there")
    else:
        draft.put("train.epochs", draft.get(epochs, default), epochs, steps)


def warmup(draft: Draft) -> None:
    """Set at most one of the two. Steps take precedence if they are not 0. Steps below 1 are a fraction."""
    steps, ratio = draft.get("warmup_steps", 0), draft.get("warmup_ratio", 0)
    if steps and float(steps) >= 1:
        draft.put("lr_scheduler.warmup_steps", int(steps), "warmup_steps", "warmup_ratio")
    else:
        draft.put("lr_scheduler.warmup_ratio", float(steps or ratio), "warmup_steps", "warmup_ratio")


def report_to(draft: Draft) -> None:
    """Trackers by name, with the keys that belong to them."""
    if draft.get("report_to") is None:
        return
    names = [str(name) for name in draft.listed("report_to")]
    if "all" in names:
        draft.leave("report_to", "name the trackers: logging.trackers=[wandb]")
        return
    trackers(draft, {name: _FIELDS.get(name, {}) for name in names if name != "none"}, "report_to")


def trackers(draft: Draft, fields: Mapping[str, Mapping[str, str]], *theirs: str) -> None:
    """`fields`: of each tracker, our option -> the source key. A tracker without options is a name."""
    nodes: list[object] = []
    used: list[str] = []
    for name, options in fields.items():
        if name not in TRACKERS:
            draft.leave(theirs[0], f"no tracker {name}: logging.trackers has {', '.join(TRACKERS)}, or a node of yours")
            continue
        given = {ours: key for ours, key in options.items() if draft.get(key) is not None}
        if draft.get(given.get("mode", "")) == "disabled":
            used += given.values()
            continue
        values = {ours: draft.get(key) for ours, key in given.items()}
        used += given.values()
        nodes.append({"_target_": f"automodel_cli.training.trackers.{TRACKERS[name]}", **values} if values else name)
    draft.put("logging.trackers", nodes, *(key for key in theirs if key not in draft.done), *used)


def clipping(draft: Draft, key: str = "max_grad_norm", default: float | None = 1.0) -> None:
    value = draft.get(key, default)
    draft.put("train.max_grad_norm", value or None, key, note="" if value else "0 there: no clipping")
