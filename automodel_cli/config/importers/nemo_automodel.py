"""NeMo AutoModel's YAML (docs.nvidia.com/nemo/automodel; 0.7)."""

from __future__ import annotations

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.importers import hugging_face as hf
from automodel_cli.config.importers import vision
from automodel_cli.config.importers.framework import Default, Draft, KeyMapping, Kind, Table, none, to
from automodel_cli.config.importers.nemo_model import (
    fp8_settings,
    freeze_settings,
    quantization_settings,
    teacher_settings,
)

_AXES = ("tp", "pp", "cp", "ep")
_SCHEDULES = {"1f1b": "1f1b", "interleaved1f1b": "interleaved_1f1b", "gpipe": "gpipe", "zbvzerobubble": "zbv"}
_DTYPES = {
    theirs: ours
    for ours, short in (("bfloat16", "bf16"), ("float32", "fp32"), ("float16", "fp16"))
    for theirs in (ours, short, f"torch.{ours}")
}
_STYLES = {"constant": "constant", "cosine": "cosine", "linear": "linear", "WSD": "wsd"}
_STRATEGIES = {"fsdp2": "fsdp2", "megatron_fsdp": "megatron_fsdp", "ddp": "ddp"}


_RECIPES: dict[str, Kind] = {
    "TrainFinetuneRecipeForNextTokenPrediction": "sft",
    "FinetuneRecipeForVLM": "vlm",
    "KnowledgeDistillationRecipeForNextTokenPrediction": "kd",
}
_OTHERS = {
    "Multimodal": "models that read and write several media",
    "Diffusion": "diffusion models",
    "Encoder": "encoders for retrieval",
    "EmbeddingDistill": "encoders for retrieval",
    "HardNegatives": "encoders for retrieval",
    "SequenceClassification": "classifiers",
    "Benchmarking": "nothing, it measures a step (`automodel bench`)",
    "Eagle": "draft models",
    "Spark": "draft models",
    "Flash": "draft models",
    "Domino": "draft models",
    "JetSpec": "draft models",
    "Vispec": "draft models",
}
"""Name parts of their other recipes and model classes, with their training method."""


def _kind(draft: Draft) -> Kind:
    """Raise ConfigError for a recipe without a counterpart."""
    for key in ("recipe", "recipe._target_", "model._target_"):
        name = str(draft.get(key, "")).removesuffix(".from_pretrained").removesuffix(".from_config").rpartition(".")[2]
        what = next((what for part, what in _OTHERS.items() if part in name), None)
        if what is None and key != "model._target_" and name and name not in _RECIPES:
            what = "what is not known here"
        if what is not None:
            raise ConfigError(
                f"{key}={name} of NeMo AutoModel is not supported because it trains {what}",
                code="not_supported",
                keys=(key,),
                fix="--kind sft   (translates the other keys as for text)",
            )
    name = str(draft.get("recipe", draft.get("recipe._target_", ""))).rpartition(".")[2]
    reads_pictures = "ImageTextToText" in str(draft.get("model._target_", "")) or draft.has("processor.")
    return _RECIPES.get(name, "kd" if draft.has("teacher_model.") else "vlm" if reads_pictures else "sft")


def _together(draft: Draft) -> None:
    draft.source = {key: None if value in ("None", "none") else value for key, value in draft.source.items()}
    if draft.kind == "kd":
        teacher_settings(draft)
    quantization_settings(draft)
    if draft.has("wandb."):
        fields = {name: f"wandb.{name}" for name in ("project", "entity", "group", "mode")}
        hf.trackers(draft, {"wandb": fields})
    elif draft.has("mlflow."):
        fields = {"experiment": "mlflow.experiment_name", "tracking_uri": "mlflow.tracking_uri"}
        hf.trackers(draft, {"mlflow": fields})
    for axis in _AXES:
        size = draft.get(f"distributed.{axis}_size")
        if size not in (None, "none"):
            draft.put(f"mesh.{axis}_size", size, f"distributed.{axis}_size")
    _pipeline(draft)
    micro = draft.get("step_scheduler.local_batch_size", 1)
    draft.put("train.microbatch_size", micro, "step_scheduler.local_batch_size")
    hf.length(draft, "step_scheduler.max_steps", "step_scheduler.num_epochs", default=10)
    hf.clipping(draft, "clip_grad_norm.max_norm", 1.0)
    _data(draft)
    _optimizer(draft)
    fp8_settings(draft)
    freeze_settings(draft)
    if draft.has("peft."):
        linear = draft.get("peft.match_all_linear", False)
        modules = "all-linear" if linear else draft.get("peft.target_modules", "all-linear")
        modules = [str(name).removeprefix("*.") for name in modules] if isinstance(modules, list) else modules
        draft.put("model.lora.target_modules", modules, "peft.match_all_linear", "peft.target_modules", "peft._target_")
        excluded = [str(name).removeprefix("*.") for name in draft.get("peft.exclude_modules") or []]
        if excluded:
            draft.put("model.lora.exclude_modules", excluded, "peft.exclude_modules")
        draft.put("model.lora.rank", draft.get("peft.dim", 8), "peft.dim")
        draft.put("model.lora.alpha", draft.get("peft.alpha", 32), "peft.alpha")


def _pipeline(draft: Draft) -> None:
    prefix = "distributed.pipeline."
    num_stages = int(draft.get("distributed.pp_size", 1) or 1)
    if num_stages < 2:
        for key in [key for key in draft.source if key.startswith(prefix)]:
            draft.leave(key, "no stages: distributed.pp_size is 1")
        return
    name = str(draft.get(prefix + "pp_schedule", "1f1b")).lower()
    draft.put("pipeline", _SCHEDULES.get(name, "1f1b"), prefix + "pp_schedule")
    for key in ("layers_per_stage", "round_virtual_stages_to_pp_multiple"):
        if draft.get(prefix + key):
            draft.put(f"pipeline.{key}", draft.get(prefix + key), prefix + key)


def _data(draft: Draft) -> None:
    names = ("path_or_dataset_id", "dataset_name", "path_or_dataset", "path")
    key = next((f"dataset.{name}" for name in names if draft.get(f"dataset.{name}")), "")
    target = str(draft.get("dataset._target_", ""))
    draft.put("data.path", draft.get(key, "train.jsonl"), key, "dataset._target_")
    if "squad" in target:
        hint = "their builder makes a prompt of context and question; map your own columns, or write a format"
        draft.put("data.column_mapping", {"prompt": "question", "completion": "answers"}, note=hint)
        draft.put("data.format", "prompt_completion", "dataset._target_")
        draft.undecided.append(
            "data.column_mapping: theirs joins context and question, and takes the first of the answers"
        )
    if not key:
        draft.undecided.append("data.path: the file names no dataset that is known here")
    validation = next((f"validation_{key}" for _ in (0,) if draft.get(f"validation_{key}")), "")
    if validation and draft.get(validation) == draft.get(key):
        split = str(draft.get("validation_dataset.split", "validation"))
        draft.put("data.validation_split", split, validation, "validation_dataset.split", "validation_dataset._target_")
    elif validation:
        draft.put("data.validation_path", draft.get(validation), validation, "validation_dataset._target_")
    size = int(draft.get("packed_sequence.packed_sequence_size", 0))
    note = "" if size else "NeMo AutoModel packs only where it is told to; ours packs by default"
    draft.put("data.packing", "best_fit" if size else "none", "packed_sequence.packed_sequence_size", note=note)
    length = size or draft.get("dataset.seq_length", 2048)
    draft.put("data.seq_len", length, "dataset.seq_length", note="theirs is bounded by the model alone by default")


def _optimizer(draft: Draft) -> None:
    name = str(draft.get("optimizer._target_", "torch.optim.AdamW")).rpartition(".")[2]
    if name in ("AdamW", "FusedAdam", "FusedAdamW"):
        draft.put("optimizer", "adamw", "optimizer._target_", note="decoupled decay")
    elif name == "Adam":
        same = not float(draft.get("optimizer.weight_decay", 0) or 0)
        note = (
            "Adam without decay is AdamW without decay" if same else "Adam adds decay to the gradient, AdamW does not"
        )
        draft.put("optimizer", "adamw", "optimizer._target_", note=note)
    elif name == "Muon":
        draft.put("optimizer", "muon", "optimizer._target_")
    draft.put("optimizer.betas", draft.get("optimizer.betas", [0.9, 0.999]), "optimizer.betas")
    style = str(draft.get("lr_scheduler.lr_decay_style", "cosine")) if draft.has("lr_scheduler.") else "constant"
    if style not in _STYLES:
        draft.decide("lr_scheduler.lr_decay_style", f"lr_scheduler is {', '.join(sorted(set(_STYLES.values())))}")
    draft.put("lr_scheduler", _STYLES.get(style, "cosine"), "lr_scheduler.lr_decay_style")
    if style == "WSD":
        _stable(draft)
    if style != "constant":
        lr, least = float(draft.get("optimizer.lr", 1e-5)), draft.get("lr_scheduler.min_lr")
        ratio = round(float(least) / lr, 6) if least is not None else 0.01
        note = "a share of the peak" if least is not None else "their default is a hundredth of the peak"
        draft.put("lr_scheduler.min_lr_ratio", ratio, "lr_scheduler.min_lr", note=note)
    if (steps := draft.get("lr_scheduler.lr_warmup_steps")) is not None:
        draft.put("lr_scheduler.warmup_steps", steps, "lr_scheduler.lr_warmup_steps")
    elif style != "constant":
        draft.put("lr_scheduler.warmup_ratio", 0.1, note="their default: a tenth of the run, at most 1000 steps")


def _stable(draft: Draft) -> None:
    """The last part of warm-up, stable, decay."""
    steps, form = "lr_scheduler.wsd_decay_steps", "lr_scheduler.lr_wsd_decay_style"
    if draft.get(steps) is not None:
        draft.put("lr_scheduler.decay_steps", int(draft.get(steps)), steps)
    else:
        draft.decide(steps, "theirs needs it; ours decays over the last fifth of the run")
    decay = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}.get(str(draft.get(form)))
    if decay is None:
        draft.decide(form, "lr_scheduler.decay is linear, cosine or 1-sqrt, here linear")
    else:
        draft.put("lr_scheduler.decay", decay, form)


_LOADER = none("rows are collated and padded by packing and data.padding")

TABLE = Table(
    tool="NeMo AutoModel",
    slug="nemo-automodel",
    signs=(
        2,
        (
            "step_scheduler.global_batch_size",
            "dist_env.backend",
            "loss_fn._target_",
            "model.pretrained_model_name_or_path",
            "distributed.tp_size",
            "recipe",
            "recipe._target_",
            "teacher_model.pretrained_model_name_or_path",
        ),
    ),
    kind=_kind,
    run_lockstep=_together,
    rows={
        "step_scheduler.global_batch_size": to("train.global_batch_size"),
        "step_scheduler.ckpt_every_steps": to("checkpoint.every"),
        "step_scheduler.val_every_steps": to("validation.every"),
        "step_scheduler.gc_every_steps": hf.SPEED,
        "step_scheduler.*": none("train has global_batch_size, microbatch_size, max_steps and epochs"),
        "dist_env.*": hf.PLACE,
        "rng.seed": to("seed"),
        "rng.*": none("every rank has its own generators, saved with checkpoints"),
        "seed": to("seed"),
        "recipe*": none("the recipe is named by defaults: [sft, ...]"),
        "model.pretrained_model_name_or_path": to("model.pretrained"),
        "model.torch_dtype": KeyMapping("model.dtype", values=_DTYPES),
        "model.attn_implementation": hf.ATTENTION,
        "model.backend.attn": none("model.transformer_engine.attention=true is their te"),
        "model.backend.*": none(
            "kernels: model.transformer_engine, model.moe.experts_implementation, parallelizer.expert_dispatch"
        ),
        "model.*": none("the library's own model, probed"),
        "checkpoint.checkpoint_dir": to("output_dir", "ours makes a folder for each run in it"),
        "checkpoint.is_async": to("checkpoint.async_save"),
        "checkpoint.*": none("checkpoints hold everything; the export is what transformers loads"),
        "peft.dropout": to("model.lora.dropout"),
        "peft.use_dora": to("model.lora.use_dora"),
        "peft.*": none("not in our adapters: see model.lora in docs/config/model.md"),
        "distributed._target_": none("parallelizer says what shards"),
        "distributed.strategy": KeyMapping("parallelizer", values=_STRATEGIES),
        "distributed.dp_size": none("the ranks that are left"),
        "distributed.dp_replicate_size": to("mesh.dp_replicate_size", none=1),
        "distributed.activation_checkpointing": KeyMapping(
            "parallelizer.activation_checkpointing", values=hf.CHECKPOINTING
        ),
        "distributed.sequence_parallel": to("parallelizer.sequence_parallel", true=True),
        "distributed.*": hf.PLACE,
        "distributed_config.sequence_parallel": to("parallelizer.sequence_parallel", true=True),
        "distributed_config.*": hf.PLACE,
        "loss_fn.*": none("objective: the log-probs come in chunks, fused with the head"),
        "dataset.split": to("data.split"),
        "dataset.chat_template": to("data.chat_template"),
        "dataset.truncation": to("data.truncation", true="truncate", false="error"),
        "dataset.limit_dataset_samples": none("all rows are read: cut the file, or set train.max_steps"),
        "dataset.shuffle_seed": none("seed decides the order of rows"),
        "dataset.*": none("no counterpart in data.path, .name, .split, .format, .column_mapping"),
        "validation_dataset.*": none(
            "validation rows are read as the training rows are; validation.num_batches limits them"
        ),
        "validation_dataloader.*": _LOADER,
        "dataloader.shuffle": to("data.shuffle"),
        "dataloader.*": _LOADER,
        "packed_sequence.*": none("data.packing and data.seq_len"),
        "optimizer.lr": to("optimizer.lr"),
        "optimizer.eps": to("optimizer.eps"),
        "optimizer.weight_decay": to("optimizer.weight_decay"),
        "optimizer.*": none("not in our optimizers"),
        "lr_scheduler.*": none("lr_scheduler has warmup_steps, warmup_ratio and min_lr_ratio"),
        "wandb.name": to("run_name"),
        "wandb.*": none("logging.trackers takes a WandB node with project, entity, group and mode"),
        "teacher_model.torch_dtype": KeyMapping("teacher.dtype", values=_DTYPES),
        "teacher_model.*": none("the library's own model, sharded like the student"),
        "kd_loss_fn.*": none("objective: KL(teacher || student) in float32"),
        "offload_teacher_model": none("cache_teacher_logprobs=true asks the teacher once, before the first step"),
        "quantization.*": none("model.lora.quantization is none or nf4"),
        "lr_scheduler.lr_decay_steps": none("ours decays over the whole run"),
        "lr_scheduler.init_lr": none("ours warms up from 0"),
        "mlflow.*": none("logging.trackers takes an MLflow node"),
        **vision.ROWS,
        "freeze_config.freeze_audio_tower": none("no audio"),
        "freeze_config.*": none("recipes of kind vlm have model.vision: {tower: frozen, text: trained}"),
        "fp8.*": none("weights are gathered in what is computed in, and cast at every use: no scale is kept"),
        "compile.enabled": to("parallelizer.enable_compile"),
        "compile.*": hf.SPEED,
        "slurm.*": none("automodel submit"),
        "ci.*": none("their own tests"),
        "clip_grad_norm.*": none("train.max_grad_norm"),
    },
    defaults=(
        Default("seed", 42, "ours is 0"),
        Default("train.global_batch_size", 8, "a guess: name it"),
        Default("optimizer.weight_decay", 0.01, "torch's AdamW, ours too"),
    ),
    finish=vision.finish_if_any,
    averaging="theirs divides by the label tokens of the step of all ranks, ours too",
)
