"""Settings of TRL's GRPOTrainer, and of a reference that follows, which DPOTrainer has too."""

from __future__ import annotations

from automodel_cli.config.importers.framework import Draft

_AGGREGATION = {
    "grpo": "sequence",
    "sapo": "sequence",
    "bnpo": "token",
    "dapo": "token",
    "cispo": "token",
    "dr_grpo": "constant",
}


def grpo_settings(draft: Draft, ranks: int) -> None:
    if draft.get("beta"):
        follow_settings(draft)
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


def follow_settings(draft: Draft) -> None:
    """A reference that is updated."""
    if draft.get("sync_ref_model"):
        draft.put(
            "reference_sync.every_steps",
            draft.get("ref_model_sync_steps", 512),
            "ref_model_sync_steps",
            "sync_ref_model",
        )
        draft.put("reference_sync.mixup_alpha", draft.get("ref_model_mixup_alpha", 0.6), "ref_model_mixup_alpha")
