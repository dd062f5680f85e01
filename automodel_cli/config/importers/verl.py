"""verl's YAML: overrides of ppo_trainer.yaml or sft_trainer.yaml (verl.readthedocs.io; 0.7)."""

from __future__ import annotations

from automodel_cli.config.importers import hugging_face as hf
from automodel_cli.config.importers.framework import Default, Draft, KeyMapping, Kind, Table, none, to

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_AGGREGATION = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
    "seq-mean-token-sum": "constant",
}
_KL = {"kl": "k1", "k1": "k1", "abs": None, "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _kind(draft: Draft) -> Kind:
    return "grpo" if draft.has("actor_rollout_ref.") or draft.has("algorithm.") else "sft"


def _together(draft: Draft) -> None:
    (_grpo if draft.kind == "grpo" else _sft)(draft)
    files = draft.get("data.train_files", "train.parquet")
    first = files[0] if isinstance(files, list) and len(files) == 1 else files
    if isinstance(first, list):
        draft.put("data.datasets", [{"path": path} for path in first], "data.train_files")
    else:
        draft.put("data.path", first, "data.train_files")
    held_out = draft.get("data.val_files")
    if isinstance(held_out, list) and len(held_out) > 1:
        draft.decide("data.val_files", f"data.validation_path is one file; here the first, {held_out[0]}")
    if held_out:
        draft.put("data.validation_path", held_out[0] if isinstance(held_out, list) else held_out, "data.val_files")
    _trackers(draft)
    for theirs, ours in (("trainer.save_freq", "checkpoint.every"), ("trainer.test_freq", "validation.every")):
        if draft.get(theirs) is not None:
            count = int(draft.get(theirs))
            draft.put(ours, count if count > 0 else None, theirs)
    hf.length(draft, "trainer.total_training_steps", "trainer.total_epochs", default=30 if draft.kind == "grpo" else 4)


def _trackers(draft: Draft) -> None:
    """Loggers by name. Project and experiment apply to each."""
    loggers = draft.get("trainer.logger", [])
    names = [
        str(name) for name in (loggers if isinstance(loggers, list) else [loggers]) if name not in ("console", "file")
    ]
    own = {"wandb": "project", "trackio": "project", "mlflow": "experiment"}
    fields = {name: {own[name]: "trainer.project_name"} if name in own else {} for name in names}
    if names:
        hf.trackers(draft, fields, "trainer.logger")


def _warmup(draft: Draft, prefix: str, ratio: str) -> None:
    steps = int(draft.get(prefix + "lr_warmup_steps", -1))
    keys = (prefix + "lr_warmup_steps", prefix + ratio)
    if steps > 0:
        draft.put("lr_scheduler.warmup_steps", steps, *keys)
    else:
        draft.put("lr_scheduler.warmup_ratio", float(draft.get(prefix + ratio, 0.0)), *keys)


def _grpo(draft: Draft) -> None:
    group = int(draft.get(_ROLLOUT + "n", 1))
    prompts = int(draft.get("data.train_batch_size", 1024))
    mini = int(draft.get(_ACTOR + "ppo_mini_batch_size", 256))
    response = int(draft.get("data.max_response_length", 512))
    prompt = int(draft.get("data.max_prompt_length", 512))
    if draft.get("data.filter_overlong_prompts"):
        draft.put("data.truncation", "drop", "data.filter_overlong_prompts")
    draft.put("rollout.group_size", group, _ROLLOUT + "n")
    draft.put("rollout.prompts_per_step", prompts, "data.train_batch_size")
    note = f"theirs counts prompts: {mini} x {group} samples"
    draft.put("train.global_batch_size", mini * group, _ACTOR + "ppo_mini_batch_size", note=note)
    draft.put("rollout.max_new_tokens", response, "data.max_response_length")
    lengths = ("data.max_prompt_length", "data.max_response_length")
    draft.put("data.seq_len", prompt + response, *lengths, note="prompt and response")
    _clip(draft)
    _advantages(draft)
    _policy_loss(draft, response)
    _kl(draft)
    if draft.get("distillation.enabled"):
        draft.decide("distillation.enabled", "distillation on samples is objective=gkd with a teacher here")
    _held_out(draft)
    _warmup(draft, _ACTOR + "optim.", "lr_warmup_steps_ratio")
    hf.clipping(draft, _ACTOR + "grad_clip", 1.0)
    if int(draft.get(_MODEL + "lora_rank", 0)):
        draft.put("model.lora.rank", draft.get(_MODEL + "lora_rank"), _MODEL + "lora_rank")
        draft.put("model.lora.alpha", draft.get(_MODEL + "lora_alpha", 16), _MODEL + "lora_alpha")
        draft.put(
            "model.lora.target_modules", draft.get(_MODEL + "target_modules", "all-linear"), _MODEL + "target_modules"
        )


def _clip(draft: Draft) -> None:
    keys = [_ACTOR + name for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio")]
    if draft.get(_ACTOR + "policy_loss.loss_mode") in ("sapo", "gpg"):
        for key in (*keys, _ACTOR + "clip_ratio_c"):
            draft.leave(key, "this loss has no ratio to clip")
        return
    both = draft.get(keys[2], 0.2)
    draft.put("objective.clip_low", draft.get(keys[0], both), keys[0], keys[2])
    draft.put("objective.clip_high", draft.get(keys[1], both), keys[1])


def _advantages(draft: Draft) -> None:
    key = "algorithm.adv_estimator"
    name = str(draft.get(key, "gae")).removesuffix("_vectorized")
    if name == "rloo":
        draft.put("rollout.leave_one_out", True, key)
        draft.put("rollout.normalize_advantages", False, note="theirs divides rloo by no deviation")
    elif name == "gae":
        draft.put("objective", "ppo", key, note="their default")
        draft.put(
            "rollout.advantage_estimator", "critic", key, note="theirs is a model of its own, ours a head on the policy"
        )
        draft.put("rollout.gae_lambda", draft.get("algorithm.lam", 1.0), "algorithm.lam", note="their default 1")
        clip = draft.get("critic.cliprange_value", 0.5)
        draft.put("objective.value_clip_range", clip, "critic.cliprange_value", note="their default 0.5, ours 0.2")
    elif name == "reinforce_plus_plus":
        draft.put("rollout.advantage_estimator", "batch", key)
    elif name == "grpo":
        draft.put("rollout.leave_one_out", False, key)
    elif name == "gpg":
        draft.put("rollout.normalize_advantages", False, note="theirs divides gpg by no deviation")
        draft.decide(key, "theirs also multiplies by samples / samples with a reward; ours does not")
    else:
        draft.decide(key, "no such estimator: rollout.advantage_estimator, .leave_one_out and .scale are GRPO's here")
    if name in ("gae", "reinforce_plus_plus"):
        draft.put("rollout.gamma", draft.get("algorithm.gamma", 1.0), "algorithm.gamma")
    if name != "grpo":
        draft.leave("algorithm.norm_adv_by_std_in_grpo", f"theirs reads it with grpo only, not with {name}")


def _policy_loss(draft: Draft, response: int) -> None:
    key, own = _ACTOR + "policy_loss.loss_mode", _ACTOR + "loss_agg_mode"
    loss, mode = draft.get(key, "vanilla"), draft.get(own, "token-mean")
    if loss == "gspo":
        draft.put("objective.importance_sampling_level", "sequence_token", key)
        if own in draft.source and mode != "seq-mean-token-mean":
            draft.decide(own, "with gspo ours takes means over sequences, as the paper and verl before 0.9 do")
        draft.put("objective.loss_aggregation", "sequence", own, note="means over sequences, as in the paper")
        return
    if loss == "sapo":
        draft.put("objective.policy_loss", "sapo", key)
        draft.put("objective.sapo_positive", draft.get(_ACTOR + "tau_pos", 1.0), _ACTOR + "tau_pos")
        draft.put("objective.sapo_negative", draft.get(_ACTOR + "tau_neg", 1.05), _ACTOR + "tau_neg")
        draft.put("objective.loss_aggregation", "sequence", own, note="sapo has means over sequences there in any case")
        return
    if loss == "cispo":
        draft.put("objective.policy_loss", "cispo", key)
        if mode == "seq-mean-token-mean":
            draft.decide(own, "cispo is a mean over all tokens here (token-mean)")
            mode = "token-mean"
    elif loss == "gpg":
        draft.put("objective.policy_loss", "reinforce", key)
        draft.put("objective.importance_sampling_level", "on_policy", key, note="-A log p, without a ratio")
    elif loss == "vanilla":
        keys = (_ACTOR + "clip_ratio_c", key)
        draft.put("objective.dual_clip_ratio", draft.get(keys[0], 3.0), *keys, note="their default 3, ours none")
    else:
        draft.decide(key, "no such loss here: objective.policy_loss and .ratio are GRPO's, clipped")
    _aggregate(draft, own, str(mode), response)


def _aggregate(draft: Draft, own: str, mode: str, response: int) -> None:
    if mode not in _AGGREGATION:
        draft.decide(own, "no such mean here: objective.loss_aggregation is token, sequence or constant")
        return
    draft.put("objective.loss_aggregation", _AGGREGATION[mode], own)
    if mode == "seq-mean-token-sum":
        draft.put("objective.normalization_length", 1, note="sums over tokens, means over responses")
    elif mode == "seq-mean-token-sum-norm":
        factor = _ACTOR + "loss_scale_factor"
        draft.put("objective.normalization_length", draft.get(factor, response), factor, "data.max_response_length")


def _held_out(draft: Draft) -> None:
    """The source either samples or is greedy. This package is greedy and samples in addition."""
    prefix = _ROLLOUT + "val_kwargs."
    if not draft.get(prefix + "do_sample") or not draft.get("data.val_files"):
        return
    draft.put("rollout.validation_samples", int(draft.get(prefix + "n", 1)), prefix + "n", prefix + "do_sample")
    if draft.get(prefix + "temperature"):
        draft.put("rollout.validation_temperature", draft.get(prefix + "temperature"), prefix + "temperature")


def _kl(draft: Draft) -> None:
    loss, reward = draft.get(_ACTOR + "use_kl_loss"), draft.get("algorithm.use_kl_in_reward")
    if loss:
        coef = draft.get(_ACTOR + "kl_loss_coef", 0.001)
        draft.put(
            "objective.kl_coef",
            coef,
            _ACTOR + "use_kl_loss",
            _ACTOR + "kl_loss_coef",
            "algorithm.use_kl_in_reward",
        )
        estimator = str(draft.get(_ACTOR + "kl_loss_type", "low_var_kl"))
        kind = (
            "k2" if estimator.endswith("+") else _KL.get(estimator)
        )  # with +, theirs has the value of one and the gradient of k2
        if coef and kind is None:
            draft.decide(_ACTOR + "kl_loss_type", "no such estimator: objective.kl_type is k1, k2 or k3, here k3")
        if kind and coef:  # with 0, theirs is measured only
            draft.put("objective.kl_type", kind, _ACTOR + "kl_loss_type")
            _clamps(draft, kind, _ACTOR + "kl_loss_type")
            note = "theirs has the gradient of the KL's value alone"
            draft.put("objective.kl_score_term", False, _ACTOR + "kl_loss_type", note=note)
    elif reward:
        keys = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")
        draft.put("objective.kl_coef", draft.get("algorithm.kl_ctrl.kl_coef", 0.001), *keys)
        draft.put("objective.kl_placement", "reward", "algorithm.use_kl_in_reward")
        kind = _KL.get(str(draft.get("algorithm.kl_penalty", "kl")).removesuffix("+"))  # a reward has no gradient
        if kind is None:
            draft.decide("algorithm.kl_penalty", "no such estimator: objective.kl_type is k1, k2 or k3, here k3")
        if kind:
            draft.put("objective.kl_type", kind, "algorithm.kl_penalty", note="their default kl is k1")
            _clamps(draft, kind, "algorithm.kl_penalty")
    else:
        draft.put("objective.kl_coef", 0.0, _ACTOR + "use_kl_loss", "algorithm.use_kl_in_reward")
    if draft.options.get("objective") == "ppo" and not draft.is_set("objective.kl_placement"):
        draft.put("objective.kl_placement", "loss", note="ours has it in the reward with ppo")
        if not draft.is_set("objective.kl_type"):
            draft.put("objective.kl_type", "k3", note="as without ppo")


def _clamps(draft: Draft, kind: str, theirs: str) -> None:
    """Only k3 clamps its input and output in the source, as in this package."""
    if kind != "k3":
        for name in ("kl_input_clamp", "kl_output_clamp"):
            draft.put(f"objective.{name}", None, theirs, note=f"their {kind} has no clamp")


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
    _warmup(
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
        _MODEL + "path": to("model.pretrained"),
        _MODEL + "enable_gradient_checkpointing": to("parallelizer.activation_checkpointing", true="full", false=False),
        _MODEL + "trust_remote_code": hf.REMOTE_CODE,
        _MODEL + "use_remove_padding": none("rows are packed"),
        _MODEL + "*": none("the library's own model, probed"),
        **{f"{_ACTOR}optim.{key}": row for key, row in _OPTIM.items()},
        _ACTOR + "ppo_epochs": to("rollout.num_iterations"),
        _ACTOR + "ppo_micro_batch_size_per_gpu": to("train.microbatch_size", "packed rows of data.seq_len tokens here"),
        _ACTOR + "entropy_coeff": to("objective.entropy_coef"),
        _ACTOR + "ulysses_sequence_parallel_size": to("mesh.cp_size"),
        _ACTOR + "use_kl_loss": none("objective.kl_coef"),
        _ACTOR + "kl_loss_*": none("no KL loss there: objective.kl_coef=0"),
        _ACTOR + "strategy": to("parallelizer", fsdp="fsdp2", fsdp2="fsdp2"),
        _ACTOR + "use_torch_compile": hf.SPEED,
        _ACTOR + "fsdp_config.*": hf.PLACE,
        _ACTOR + "*": none("not in our step: docs/methods/grpo.md has what there is"),
        "actor_rollout_ref.ref.*": none("the reference is the model as loaded (reference=...)"),
        _ROLLOUT + "temperature": to("rollout.temperature"),
        _ROLLOUT + "top_p": to("rollout.top_p"),
        _ROLLOUT + "top_k": KeyMapping("rollout.top_k", values={"-1": 0}),
        _ROLLOUT + "name": none("rollout=vllm takes a server (docs/rollouts/vllm.md); the default needs none"),
        _ROLLOUT + "*": _OWN,
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
