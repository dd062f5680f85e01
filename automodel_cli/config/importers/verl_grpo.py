"""Settings of verl's policy optimization: advantages, losses and KL."""

from __future__ import annotations

from automodel_cli.config.importers import hugging_face as hf
from automodel_cli.config.importers.framework import Draft

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_AGGREGATION = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
    "seq-mean-token-sum": "constant",
}
_KL = {"kl": "k1", "k1": "k1", "abs": None, "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def warmup_settings(draft: Draft, prefix: str, ratio: str) -> None:
    steps = int(draft.get(prefix + "lr_warmup_steps", -1))
    keys = (prefix + "lr_warmup_steps", prefix + ratio)
    if steps > 0:
        draft.put("lr_scheduler.warmup_steps", steps, *keys)
    else:
        draft.put("lr_scheduler.warmup_ratio", float(draft.get(prefix + ratio, 0.0)), *keys)


def grpo_settings(draft: Draft) -> None:
    group = int(draft.get(ROLLOUT + "n", 1))
    prompts = int(draft.get("data.train_batch_size", 1024))
    mini = int(draft.get(ACTOR + "ppo_mini_batch_size", 256))
    response = int(draft.get("data.max_response_length", 512))
    prompt = int(draft.get("data.max_prompt_length", 512))
    if draft.get("data.filter_overlong_prompts"):
        draft.put("data.truncation", "drop", "data.filter_overlong_prompts")
    draft.put("rollout.group_size", group, ROLLOUT + "n")
    draft.put("rollout.prompts_per_step", prompts, "data.train_batch_size")
    note = f"theirs counts prompts: {mini} x {group} samples"
    draft.put("train.global_batch_size", mini * group, ACTOR + "ppo_mini_batch_size", note=note)
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
    warmup_settings(draft, ACTOR + "optim.", "lr_warmup_steps_ratio")
    hf.clipping(draft, ACTOR + "grad_clip", 1.0)
    if int(draft.get(MODEL + "lora_rank", 0)):
        draft.put("model.lora.rank", draft.get(MODEL + "lora_rank"), MODEL + "lora_rank")
        draft.put("model.lora.alpha", draft.get(MODEL + "lora_alpha", 16), MODEL + "lora_alpha")
        draft.put(
            "model.lora.target_modules", draft.get(MODEL + "target_modules", "all-linear"), MODEL + "target_modules"
        )


def _clip(draft: Draft) -> None:
    keys = [ACTOR + name for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio")]
    if draft.get(ACTOR + "policy_loss.loss_mode") in ("sapo", "gpg"):
        for key in (*keys, ACTOR + "clip_ratio_c"):
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
    key, own = ACTOR + "policy_loss.loss_mode", ACTOR + "loss_agg_mode"
    loss, mode = draft.get(key, "vanilla"), draft.get(own, "token-mean")
    if loss == "gspo":
        draft.put("objective.importance_sampling_level", "sequence_token", key)
        if own in draft.source and mode != "seq-mean-token-mean":
            draft.decide(own, "with gspo ours takes means over sequences, as the paper and verl before 0.9 do")
        draft.put("objective.loss_aggregation", "sequence", own, note="means over sequences, as in the paper")
        return
    if loss == "sapo":
        draft.put("objective.policy_loss", "sapo", key)
        draft.put("objective.sapo_positive", draft.get(ACTOR + "tau_pos", 1.0), ACTOR + "tau_pos")
        draft.put("objective.sapo_negative", draft.get(ACTOR + "tau_neg", 1.05), ACTOR + "tau_neg")
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
        keys = (ACTOR + "clip_ratio_c", key)
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
        factor = ACTOR + "loss_scale_factor"
        draft.put("objective.normalization_length", draft.get(factor, response), factor, "data.max_response_length")


def _held_out(draft: Draft) -> None:
    """The source either samples or is greedy. This package is greedy and samples in addition."""
    prefix = ROLLOUT + "val_kwargs."
    if not draft.get(prefix + "do_sample") or not draft.get("data.val_files"):
        return
    draft.put("rollout.validation_samples", int(draft.get(prefix + "n", 1)), prefix + "n", prefix + "do_sample")
    if draft.get(prefix + "temperature"):
        draft.put("rollout.validation_temperature", draft.get(prefix + "temperature"), prefix + "temperature")


def _kl(draft: Draft) -> None:
    loss, reward = draft.get(ACTOR + "use_kl_loss"), draft.get("algorithm.use_kl_in_reward")
    if loss:
        coef = draft.get(ACTOR + "kl_loss_coef", 0.001)
        draft.put(
            "objective.kl_coef",
            coef,
            ACTOR + "use_kl_loss",
            ACTOR + "kl_loss_coef",
            "algorithm.use_kl_in_reward",
        )
        estimator = str(draft.get(ACTOR + "kl_loss_type", "low_var_kl"))
        kind = (
            "k2" if estimator.endswith("+") else _KL.get(estimator)
        )  # with +, theirs has the value of one and the gradient of k2
        if coef and kind is None:
            draft.decide(ACTOR + "kl_loss_type", "no such estimator: objective.kl_type is k1, k2 or k3, here k3")
        if kind and coef:  # with 0, theirs is measured only
            draft.put("objective.kl_type", kind, ACTOR + "kl_loss_type")
            _clamps(draft, kind, ACTOR + "kl_loss_type")
            note = "theirs has the gradient of the KL's value alone"
            draft.put("objective.kl_score_term", False, ACTOR + "kl_loss_type", note=note)
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
        draft.put("objective.kl_coef", 0.0, ACTOR + "use_kl_loss", "algorithm.use_kl_in_reward")
    if draft.options.get("objective") == "ppo" and not draft.is_set("objective.kl_placement"):
        draft.put("objective.kl_placement", "loss", note="ours has it in the reward with ppo")
        if not draft.is_set("objective.kl_type"):
            draft.put("objective.kl_type", "k3", note="as without ppo")


def _clamps(draft: Draft, kind: str, theirs: str) -> None:
    """Only k3 clamps its input and output in the source, as in this package."""
    if kind != "k3":
        for name in ("kl_input_clamp", "kl_output_clamp"):
            draft.put(f"objective.{name}", None, theirs, note=f"their {kind} has no clamp")
