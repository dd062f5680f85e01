"""Keys of version 0.1 and the keys that replaced them. The message for an unknown key names the new one."""

from __future__ import annotations

RENAMED = {
    "data.on_bad_row": "data.on_invalid_row",
    "data.max_bad": "data.max_invalid_fraction",
    "data.long_documents": "data.truncation",
    "data.mask": "data.loss_mask",
    "data.turns": "data.multi_turn",
    "data.validation_rows": "data.validation_size",
    "data.txt_rows": "data.text_unit",
    "data.columns": "data.column_mapping",
    "data.sources": "data.datasets",
    "data.task": "data.generator",
    "data.special_tokens_in_text": "data.special_tokens_policy",
    "data.pad_to": "data.padding",
    "data.pad_multiple": "data.pad_to_multiple_of",
    "data.ignore_columns": "data.ignored_columns",
    "model.attention": "model.attn_implementation",
    "teacher.attention": "teacher.attn_implementation",
    "model.head_chunk_size": "model.lm_head_chunk_size",
    "model.lora.base_quantization": "model.lora.quantization",
    "model.fp8.skip": "model.fp8.exclude_modules",
    "model.moe.bias_update_speed": "model.moe.bias_update_rate",
    "model.moe.experts": "model.moe.experts_implementation",
    "objective.surrogate": "objective.policy_loss",
    "objective.ratio": "objective.importance_sampling_level",
    "objective.aggregation": "objective.loss_aggregation",
    "objective.max_tokens": "objective.normalization_length",
    "objective.kl_in": "objective.kl_placement",
    "objective.kl_importance": "objective.kl_bias_correction",
    "objective.correction": "objective.sampler_correction",
    "objective.correction_level": "objective.sampler_correction_level",
    "objective.correction_max": "objective.sampler_correction_clip_max",
    "objective.correction_min": "objective.sampler_correction_clip_min",
    "objective.positive_nll": "objective.positive_nll_coef",
    "objective.top_entropy": "objective.top_entropy_fraction",
    "objective.dual_clip": "objective.dual_clip_ratio",
    "objective.value_clip": "objective.value_clip_range",
    "objective.center": "objective.center_rewards_coef",
    "objective.keep": "objective.num_kept",
    "objective.more_losses": "objective.extra_losses",
    "objective.sft_weight": "objective.nll_weight",
    "objective.wpo": "objective.use_wpo_weighting",
    "reference": "reference_mode",
    "reference_update.every": "reference_sync.every_steps",
    "reference_update.alpha": "reference_sync.mixup_alpha",
    "cache_teacher": "cache_teacher_logprobs",
    "rollout.passes": "rollout.num_iterations",
    "rollout.baseline": "rollout.advantage_estimator",
    "rollout.normalise": "rollout.normalize_advantages",
    "rollout.scale": "rollout.reward_scaling",
    "rollout.dynamic_sampling.max_batches": "rollout.dynamic_sampling.max_gen_batches",
    "rollout.max_staleness": "rollout.max_off_policy_steps",
    "rollout.share_prompts": "rollout.share_prompt_prefix",
    "rollout.max_mult_prob_error": "rollout.warn_token_mult_prob_error",
    "rollout.max_logprob_gap": "rollout.max_initial_logprob_gap",
    "rollout.reward_helpers": "rollout.num_reward_workers",
    "rollout.show_every": "rollout.log_samples_every",
    "rollout.show": "rollout.num_samples_logged",
    "rollout.engine.num_slots": "rollout.engine.max_num_seqs",
    "rollout.engine.prefill_tokens": "rollout.engine.max_num_batched_tokens",
    "rollout.engine.refill_share": "rollout.engine.refill_threshold",
    "rollout.engine.weights_folder": "rollout.engine.weights_dir",
    "rollout.engine.servers.number": "rollout.engine.servers.num_servers",
    "rollout.engine.servers.gpus": "rollout.engine.servers.gpus_per_server",
    "rollout.engine.servers.memory_share": "rollout.engine.servers.gpu_memory_utilization",
    "rollout.engine.servers.tensor_parallel": "rollout.engine.servers.tensor_parallel_size",
    "rollout.engine.servers.program": "rollout.engine.servers.executable",
    "rollout.engine.servers.options": "rollout.engine.servers.extra_args",
    "rollout.environment.call_reward": "rollout.environment.tool_call_reward",
    "rollout.environment.blocks": "rollout.environment.run_code_blocks",
    "pipeline.csv": "pipeline.schedule_csv",
    "checkpoint.keep": "checkpoint.keep_latest_k",
    "train.step_timeout": "train.step_timeout_seconds",
    "train.cpu_threads": "train.num_cpu_threads",
    "logging.display": "logging.console",
}
RENAMED_OF_REWARDS = {"must_finish": "require_eos", "only": "filter", "free_tokens": "soft_limit"}
RENAMED_OF_TASKS = {"normalise": "normalize"}


def renamed(key: str) -> str | None:
    """Return the key that replaced `key`, or None."""
    parts = key.split(".")
    if parts[0] == "rewards" and len(parts) == 3:
        leaf = RENAMED_OF_REWARDS.get(parts[2])
    elif parts[-1] in RENAMED_OF_TASKS and "tasks" in parts[:-1]:
        leaf = RENAMED_OF_TASKS[parts[-1]]
    elif parts[:2] == ["data", "datasets"] and parts[-1] == "columns":
        leaf = "column_mapping"
    else:
        return RENAMED.get(key)
    return leaf and ".".join([*parts[:-1], leaf])
