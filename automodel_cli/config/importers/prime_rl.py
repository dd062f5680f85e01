"""prime-rl's TOML: `sft`, and `rl` with trainer, orchestrator and inference (docs in its repository; 0.8)."""

from __future__ import annotations

from automodel_cli.config.importers import hugging_face as hf
from automodel_cli.config.importers.framework import Default, Draft, Kind, Table, none, to

_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}


def _kind(draft: Draft) -> Kind:
    return "grpo" if draft.has("orchestrator.") or draft.has("trainer.") else "sft"


def _together(draft: Draft) -> None:
    prefix = "trainer." if draft.kind == "grpo" else ""
    hf.length(draft, "max_steps", "epochs", default=1.0)
    hf.betas(draft, f"{prefix}optim.betas1", f"{prefix}optim.betas2")
    hf.clipping(draft, f"{prefix}optim.max_norm", 1.0)
    if draft.has("wandb"):
        hf.trackers(draft, {"wandb": {name: f"wandb.{name}" for name in ("project", "entity", "group")}}, "wandb")
    name = draft.get("model.name", draft.get(f"{prefix}model.name"))
    if name:
        draft.put("model.pretrained", name, "model.name", f"{prefix}model.name")
    _model(draft, prefix)
    _schedule(draft, prefix)
    if draft.has("ckpt"):
        keys = [key for key in ("ckpt.interval", "ckpt") if key in draft.source]
        draft.put("checkpoint.every", draft.get("ckpt.interval"), *keys, note="null: at the end only")
    (_grpo if draft.kind == "grpo" else _sft)(draft)


def _model(draft: Draft, prefix: str) -> None:
    for theirs, axis in (("cp", "cp"), ("ep", "ep"), ("tp", "tp")):
        key = f"{prefix}model.{theirs}"
        if int(draft.get(key, 1)) > 1:
            draft.put(f"mesh.{axis}_size", draft.get(key), key)
    lora = f"{prefix}model.lora."
    if draft.has(lora.rstrip(".")):
        draft.put("model.lora.rank", draft.get(lora + "rank", 16), lora + "rank")
        draft.put("model.lora.alpha", draft.get(lora + "alpha", 32.0), lora + "alpha")
        draft.put(
            "model.lora.target_modules", draft.get(lora + "target_modules", "all-linear"), lora + "target_modules"
        )
    if draft.has(f"{prefix}model.ac"):
        mode = draft.get(f"{prefix}model.ac.mode", "full")
        every = draft.get(f"{prefix}model.ac.freq", 1)
        value = mode if every == 1 or mode != "full" else int(every)
        keys = [key for key in draft.source if key == f"{prefix}model.ac" or key.startswith(f"{prefix}model.ac.")]
        draft.put("parallelizer.activation_checkpointing", value, *keys)


def _schedule(draft: Draft, prefix: str) -> None:
    there = f"{prefix}scheduler."
    kind = str(draft.get(there + "type", "constant"))
    draft.put("lr_scheduler", _SCHEDULES.get(kind, "constant"), there + "type", note="their default is constant")
    if kind == "constant":
        return
    draft.put("lr_scheduler.warmup_steps", draft.get(there + "warmup_steps", 10), there + "warmup_steps")
    if kind == "linear" and there + "decay_steps" in draft.source:
        draft.put("lr_scheduler", "wsd", there + "type", note="held, then down over the last decay_steps")
        draft.put("lr_scheduler.decay_steps", draft.get(there + "decay_steps"), there + "decay_steps")
    least, lr = float(draft.get(there + "min_lr", 0.0)), float(draft.get(f"{prefix}optim.lr", 1e-6))
    draft.put("lr_scheduler.min_lr_ratio", round(least / lr, 6), there + "min_lr", note="a share of the peak")


def _sft(draft: Draft) -> None:
    draft.put("train.global_batch_size", draft.get("data.batch_size", 128), "data.batch_size")
    draft.put("train.microbatch_size", draft.get("data.micro_batch_size", 1), "data.micro_batch_size")
    draft.put("data.seq_len", draft.get("data.seq_len", 128), "data.seq_len", note="their default is 128")
    names = [key for key in draft.source if key.startswith("data.source[") and key.endswith((".dataset", ".name"))]
    single = draft.get("data.name", draft.get(names[0]) if len(names) == 1 else None)
    if single or not names:
        draft.put("data.path", single or "PrimeIntellect/Reverse-Text-SFT", "data.name", *names)
    else:
        draft.put("data.datasets", [{"path": draft.get(key)} for key in names], *names)
    splits = draft.get("data.splits")
    if splits:
        draft.put("data.split", splits[0], "data.splits")
    if draft.get("val.data.name"):
        draft.put("data.validation_path", draft.get("val.data.name"), "val.data.name")
    elif draft.get("val.data.splits"):
        draft.put("data.validation_split", draft.get("val.data.splits")[0], "val.data.splits")
    pack = draft.get("data.pack_function", "cat")
    note = "cat: documents one after the other, cut at every row" if pack == "cat" else ""
    draft.put("data.packing", "wrapped" if pack == "cat" else "none", "data.pack_function", note=note)
    trained = [role for role in ("system", "user", "tool") if draft.get(f"data.loss_mask.{role}")]
    keys = [key for key in draft.source if key.startswith("data.loss_mask.")]
    draft.put("data.loss_mask", "all" if trained else "assistant", *keys)


def _grpo(draft: Draft) -> None:
    group = int(draft.get("orchestrator.group_size", draft.get("orchestrator.rollouts_per_example", 16)))
    samples = int(draft.get("orchestrator.batch_size", 128))
    draft.put("rollout.group_size", group, "orchestrator.group_size", "orchestrator.rollouts_per_example")
    draft.put("train.global_batch_size", samples, "orchestrator.batch_size")
    draft.put("rollout.prompts_per_step", max(1, samples // group), note="batch_size / group_size")
    draft.put(
        "data.seq_len",
        draft.get("seq_len", draft.get("trainer.model.seq_len", 2048)),
        "seq_len",
        "trainer.model.seq_len",
    )
    names = ("max_completion_tokens", "max_tokens")
    sampling = ("orchestrator.train.sampling.", "orchestrator.sampling.")
    keys = [prefix + name for prefix in sampling for name in names]
    environment = next((draft.get(key) for key in keys if draft.get(key)), None)
    draft.put("rollout.max_new_tokens", environment or int(draft.values["data.seq_len"]) // 2, *keys)
    for key in (prefix + "temperature" for prefix in sampling):
        if draft.get(key) is not None:
            draft.put("rollout.temperature", draft.get(key), key)
    note = "an environment of theirs brings its rows: give yours, and rewards for them"
    draft.put("data.path", "train.jsonl", note=note)


_SERVER = none("no server is needed: our sampler generates on the trained weights (rollout=vllm takes one)")
_ENVIRONMENT = none(
    "environments are packages of theirs; ours are rewards and rollout.environment (docs/rollouts/environments.md)"
)
_TRACKER = none("logging.trackers takes a WandB node with project, entity, group and mode (offline)")

_SHARED = {
    "optim.type": to("optimizer", adamw="adamw", muon="muon"),
    "optim.lr": to("optimizer.lr"),
    "optim.weight_decay": to("optimizer.weight_decay"),
    "optim.mu": to("optimizer.momentum"),
    "model.trust_remote_code": hf.REMOTE_CODE,
    "model.attn": hf.ATTENTION,
    "model.impl": none("the library's own model, probed"),
    "model.compile*": to("parallelizer.enable_compile"),
    "model.dp_replicate": to("mesh.dp_replicate_size"),
    "model.lora.dropout": to("model.lora.dropout"),
    "model.optimization_dtype": to("model.dtype"),
    "model.*": none("the library's own model, probed; memory is parallelizer's business"),
    "tokenizer.chat_template": to("data.chat_template"),
    "tokenizer.*": none("the tokenizer beside the weights (model.tokenizer)"),
    "loss.*": none("objective has its own keys: clip_low, clip_high, sampler_correction (docs/methods/grpo.md)"),
}

TABLE = Table(
    tool="prime-rl",
    slug="prime-rl",
    signs=(
        2,
        (
            "model.name",
            "orchestrator.batch_size",
            "trainer.optim.lr",
            "optim.lr",
            "data.batch_size",
            "deployment.num_gpus",
            "data.seq_len",
            "inference",
            "orchestrator.group_size",
        ),
    ),
    kind=_kind,
    run_lockstep=_together,
    rows={
        **_SHARED,
        **{f"trainer.{key}": row for key, row in _SHARED.items()},
        "seed": to("seed"),
        "output_dir": to("output_dir", "ours makes a folder for each run in it"),
        "ckpt.keep_last": to("checkpoint.keep_latest_k"),
        "ckpt.*": none("checkpoint has every, keep, async_save and resume"),
        "trainer.*": none("one process group trains and samples here"),
        "orchestrator.train.env[].*": _ENVIRONMENT,
        "orchestrator.env[].*": _ENVIRONMENT,
        "orchestrator.eval*": _ENVIRONMENT,
        "orchestrator.max_off_policy_steps": to("rollout.max_off_policy_steps"),
        "orchestrator.renderer.*": none("the chat template is the tokenizer's own (data.chat_template)"),
        "orchestrator.*": none("the rollout section has its own keys (docs/rollouts/overview.md)"),
        "inference*": _SERVER,
        "deployment.*": hf.PLACE,
        "slurm*": none("automodel submit"),
        "wandb.name": to("run_name"),
        "wandb*": _TRACKER,
        "data.shuffle": to("data.shuffle"),
        "data.seed": to("seed"),
        "data.subsets": to("data.name"),
        "data.probabilities": none("data.datasets.N.sampling_weight are shares of the tokens"),
        "data.*": none("no counterpart in data.path, .name, .split, .format, .column_mapping"),
        "val.interval": to("validation.every"),
        "val.eval_on_start": to("validation.at_start"),
        "val.*": none("validation rows are read as the training rows are"),
        "eval*": _ENVIRONMENT,
        "renderer.*": none("the chat template is the tokenizer's own (data.chat_template)"),
        "loss_impl": hf.SPEED,
        "log.*": hf.SHOWN,
        "gc.*": hf.SPEED,
        "dist_timeout_seconds": none("train.step_timeout_seconds"),
        "clean_output_dir": none("a run never overwrites another: each has a folder of its own"),
        "matmul_precision": hf.SPEED,
        "async_level": to("rollout.max_off_policy_steps"),
        "max_async_level": to("rollout.max_off_policy_steps"),
        "bench*": none("scripts/bench_*.py"),
        "heartbeat*": none("no such watch"),
    },
    defaults=(
        Default("optimizer.lr", 1e-6, "ours is 2e-5 for sft", ("sft", "grpo")),
        Default("optimizer.betas", [0.9, 0.999], "ours is [0.9, 0.95]"),
        Default("optimizer.weight_decay", 0.01, "ours is 0 for grpo"),
    ),
    averaging="theirs divides by the label tokens of the step of all ranks, ours too",
)
