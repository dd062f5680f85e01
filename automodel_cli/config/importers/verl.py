"""verl's YAML: overrides of ppo_trainer.yaml or sft_trainer.yaml (verl.readthedocs.io; 0.7)."""

from __future__ import annotations

from automodel_cli.config.importers import hugging_face as hf
from automodel_cli.config.importers.framework import Default, Draft, KeyMapping, Kind, Table, none, to
from automodel_cli.config.importers.verl_grpo import ACTOR, MODEL, ROLLOUT, grpo_settings, warmup_settings


def _kind(draft: Draft) -> Kind:
    return "grpo" if draft.has("actor_rollout_ref.") or draft.has("algorithm.") else "sft"


def _together(draft: Draft) -> None:
    (grpo_settings if draft.kind == "grpo" else _sft)(draft)
    files = draft.listed("data.train_files", "train.parquet")
    if len(files) == 1:
        draft.put("data.path", files[0], "data.train_files")
    else:
        draft.put("data.datasets", [{"path": path} for path in files], "data.train_files")
    held_out = draft.listed("data.val_files")
    if len(held_out) > 1:
        draft.decide("data.val_files", f"data.validation_path is one file; here the first, {held_out[0]}")
    if any(held_out):
        draft.put("data.validation_path", held_out[0], "data.val_files")
    _trackers(draft)
    for theirs, ours in (("trainer.save_freq", "checkpoint.every"), ("trainer.test_freq", "validation.every")):
        if draft.get(theirs) is not None:
            count = int(draft.get(theirs))
            draft.put(ours, count if count > 0 else None, theirs)
    hf.length(draft, "trainer.total_training_steps", "trainer.total_epochs", default=30 if draft.kind == "grpo" else 4)


def _trackers(draft: Draft) -> None:
    """Loggers by name. Project and experiment apply to each."""
    names = [str(name) for name in draft.listed("trainer.logger") if name not in ("console", "file")]
    own = {"wandb": "project", "trackio": "project", "mlflow": "experiment"}
    fields = {name: {own[name]: "trainer.project_name"} if name in own else {} for name in names}
    if names:
        hf.trackers(draft, fields, "trainer.logger")


def _sft(draft: Draft) -> None:
    draft.put("train.global_batch_size", draft.get("data.train_batch_size", 256), "data.train_batch_size")
    micro = draft.get("data.micro_batch_size_per_gpu", 4)
    draft.put("train.microbatch_size", micro, "data.micro_batch_size_per_gpu", "data.micro_batch_size")
    if draft.get("data.multiturn.enable"):
        column = draft.get("data.multiturn.messages_key", "messages")
        draft.put("data.column_mapping", {"messages": column}, "data.multiturn.enable", "data.multiturn.messages_key")
    else:
        columns = {
            "prompt": draft.get("data.prompt_key", "question"),
            "completion": draft.get("data.response_key", "answer"),
        }
        draft.put("data.column_mapping", columns, "data.prompt_key", "data.response_key")
        draft.put("data.format", "prompt_completion", note="single turns there")
    draft.put("data.packing", "none", note="verl pads; ours packs by default")
    draft.put("data.seq_len", draft.get("data.max_length", 1024), "data.max_length")
    if int(draft.get("ulysses_sequence_parallel_size", 1)) > 1:
        draft.put("mesh.cp_size", draft.get("ulysses_sequence_parallel_size"), "ulysses_sequence_parallel_size")
    warmup_settings(
        draft,
        "optim.",
        "lr_warmup_steps_ratio" if "optim.lr_warmup_steps_ratio" in draft.source else "warmup_steps_ratio",
    )
    hf.clipping(draft, "optim.clip_grad", 1.0)
    if int(draft.get("model.lora_rank", 0)):
        draft.put("model.lora.rank", draft.get("model.lora_rank"), "model.lora_rank")
        draft.put("model.lora.alpha", draft.get("model.lora_alpha", 16), "model.lora_alpha")
        draft.put("model.lora.target_modules", draft.get("model.target_modules", "all-linear"), "model.target_modules")


_REWARD = none("rewards are nodes of the section rewards (docs/rollouts/rewards.md)")
_OWN = none("rollout.engine has its own keys; the default samples on the trained weights")
_OPTIM = {
    "lr": to("optimizer.lr"),
    "weight_decay": to("optimizer.weight_decay"),
    "betas": to("optimizer.betas"),
    "min_lr_ratio": none("lr_scheduler.min_lr_ratio, with cosine or linear"),
    "warmup_style": to("lr_scheduler", constant="constant", cosine="cosine"),
    "lr_scheduler_type": to("lr_scheduler", constant="constant", cosine="cosine"),
    "lr_scheduler": to("lr_scheduler", cosine="cosine", wsd="wsd"),
    "*": none("not in our optimizers and schedules"),
}

TABLE = Table(
    tool="verl",
    slug="verl",
    signs=(
        3,
        (
            "data.train_files",
            "actor_rollout_ref.model.path",
            "trainer.project_name",
            "trainer.total_epochs",
            "model.partial_pretrain",
            "trainer.n_gpus_per_node",
        ),
    ),
    kind=_kind,
    run_lockstep=_together,
    rows={
        "data.prompt_key": none("data.column_mapping={prompt: ...}"),
        "data.shuffle": to("data.shuffle"),
        "data.truncation": to("data.truncation", error="error", right="truncate"),
        "data.chat_template": to("data.chat_template"),
        "data.seed": to("seed"),
        "data.balance_dp_token": hf.SPEED,
        "data.reward_fn_key": _REWARD,
        "data.*": none("no counterpart in data.path, .format, .column_mapping"),
        MODEL + "path": to("model.pretrained"),
        MODEL + "enable_gradient_checkpointing": to("parallelizer.activation_checkpointing", true="full", false=False),
        MODEL + "trust_remote_code": hf.REMOTE_CODE,
        MODEL + "use_remove_padding": none("rows are packed"),
        MODEL + "*": none("the library's own model, probed"),
        **{f"{ACTOR}optim.{key}": row for key, row in _OPTIM.items()},
        ACTOR + "ppo_epochs": to("rollout.num_iterations"),
        ACTOR + "ppo_micro_batch_size_per_gpu": to("train.microbatch_size", "packed rows of data.seq_len tokens here"),
        ACTOR + "entropy_coeff": to("objective.entropy_coef"),
        ACTOR + "ulysses_sequence_parallel_size": to("mesh.cp_size"),
        ACTOR + "use_kl_loss": none("objective.kl_coef"),
        ACTOR + "kl_loss_*": none("no KL loss there: objective.kl_coef=0"),
        ACTOR + "strategy": to("parallelizer", fsdp="fsdp2", fsdp2="fsdp2"),
        ACTOR + "use_torch_compile": hf.SPEED,
        ACTOR + "fsdp_config.*": hf.PLACE,
        ACTOR + "*": none("not in our step: docs/methods/grpo.md has what there is"),
        "actor_rollout_ref.ref.*": none("the reference is the model as loaded (reference=...)"),
        ROLLOUT + "temperature": to("rollout.temperature"),
        ROLLOUT + "top_p": to("rollout.top_p"),
        ROLLOUT + "top_k": KeyMapping("rollout.top_k", values={"-1": 0}),
        ROLLOUT + "name": none("rollout=vllm takes a server (docs/rollouts/vllm.md); the default needs none"),
        ROLLOUT + "*": _OWN,
        "actor_rollout_ref.*": _OWN,
        "algorithm.norm_adv_by_std_in_grpo": to("rollout.normalize_advantages"),
        "algorithm.*": none("docs/methods/grpo.md has what there is"),
        "distillation.*": none("objective=gkd with a teacher (docs/methods/distillation.md)"),
        "transfer_queue.*": hf.PLACE,
        "skip.*": none("every step draws its samples"),
        "checkpoint.*": none("checkpoints hold everything; the export is what transformers loads"),
        "critic.*": none("a critic is a head on the policy here: objective.value_coef and .value_clip_range"),
        "reward_model.*": _REWARD,
        "reward.*": _REWARD,
        "custom_reward_function.*": _REWARD,
        "model.partial_pretrain": to("model.pretrained"),
        "model.path": to("model.pretrained"),
        "model.enable_gradient_checkpointing": to("parallelizer.activation_checkpointing", true="full", false=False),
        "model.trust_remote_code": hf.REMOTE_CODE,
        "model.fsdp_config.model_dtype": to("model.dtype", fp32="float32", bf16="bfloat16"),
        "model.strategy": to("parallelizer", fsdp="fsdp2", fsdp2="fsdp2"),
        "model.lora_*": none("lora_rank is 0 there: all parameters are trained"),
        "model.target_modules": none("lora_rank is 0 there: all parameters are trained"),
        "model.*": none("the library's own model, probed"),
        **{f"optim.{key}": row for key, row in _OPTIM.items()},
        "use_remove_padding": none("rows are packed"),
        "ulysses_sequence_parallel_size": to("mesh.cp_size"),
        "trainer.experiment_name": to("run_name"),
        "trainer.project_name": none("read by trackers that trainer.logger does not name"),
        "trainer.default_local_dir": to("output_dir", "ours makes a folder for each run in it"),
        "trainer.seed": to("seed"),
        "trainer.logger": none("logging.trackers: tensorboard, wandb, mlflow, trackio"),
        "trainer.val_before_train": to("validation.at_start"),
        "trainer.max_ckpt_to_keep": to("checkpoint.keep_latest_k"),
        "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep_latest_k"),
        "trainer.nnodes": hf.PLACE,
        "trainer.n_gpus_per_node": hf.PLACE,
        "trainer.device": hf.PLACE,
        "trainer.resume_*": none("`automodel resume RUN`, or checkpoint.resume=auto"),
        "trainer.log_val_generations": none(
            "rollout.num_samples_logged samples are printed every rollout.log_samples_every steps"
        ),
        "trainer.*": none("not in our loop"),
        "ray_*": hf.PLACE,
        "global_profiler.*": none("logging.profile"),
    },
    defaults=(
        Default("optimizer.betas", [0.9, 0.999], "ours is [0.9, 0.95]", ("grpo",)),
        Default("optimizer.weight_decay", 0.01, "ours is 0 for grpo", ("grpo",)),
        Default("lr_scheduler", "constant", "ours too for grpo", ("grpo",)),
        Default("data.truncation", "error", "truncation: error", ("sft",)),
        Default("seed", 1, "ours is 0"),
    ),
    averaging="theirs divides by the tokens of a mini batch (token-mean; older ones average microbatches), ours by all",
)
