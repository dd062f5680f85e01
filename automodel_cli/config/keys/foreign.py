"""Other tools' names for our keys, as of 2026-11. At most 90 rows; only names that people paste, and that
`suggest` would not find: a name whose leaf is ours needs no row.

A name with a dot is looked up before its leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Foreign:
    """A key of this package and the difference to the other tool.

    `ours` may contain a value if the foreign name implies one (`data.packing=best_fit`). `values` translates lower-case
    foreign values into overrides. Without either, the value is used unchanged, unless `other_value` is set: then the
    note explains how to choose the value.
    """

    ours: str
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    other_value: bool = False
    is_list: bool = False
    """Whether text with commas is a list of ours."""

    @property
    def key(self) -> str:
        return self.ours.partition("=")[0]


_GLOBAL = "train.global_batch_size = microbatch x accumulation x data-parallel ranks"
_BETAS = Foreign("optimizer.betas", "optimizer.betas is the pair [beta1, beta2]", other_value=True)
_ALL_LINEAR = {"all": "model.lora.target_modules=all-linear", "all-linear": "model.lora.target_modules=all-linear"}
_OPTIMIZERS = {
    "adamw_torch": "optimizer=adamw",
    "adamw_torch_fused": "optimizer=adamw",
    "adamw": "optimizer=adamw",
    "adamw_8bit": "optimizer=adamw8bit",
    "adamw_bnb_8bit": "optimizer=adamw8bit",
    "paged_adamw_8bit": "optimizer=adamw8bit",
    "muon": "optimizer=muon",
}
_SCHEDULES = {
    "cosine": "lr_scheduler=cosine",
    "linear": "lr_scheduler=linear",
    "constant": "lr_scheduler=constant",
    "constant_with_warmup": "lr_scheduler=constant",
    "warmup_stable_decay": "lr_scheduler=wsd",
}
_PACKING = {"true": "data.packing=best_fit", "false": "data.packing=none"}
_CHECKPOINTING = {
    "true": "parallelizer.activation_checkpointing=full",
    "false": "parallelizer.activation_checkpointing=false",
}
_PRECISION = Foreign(
    "model.dtype",
    "parameters are stored in model.dtype; products run in parallelizer.mp_policy.param_dtype, bfloat16 by default",
    other_value=True,
)
_DRAWN = "rollouts are drawn by rollout.temperature, rollout.top_p and rollout.top_k only"
_STOPS = Foreign(
    "rollout.max_new_tokens",
    "a response ends at a stop token of the tokenizer or of the model's config, or at rollout.max_new_tokens",
    other_value=True,
)

FOREIGN: dict[str, Foreign] = {
    # batch and steps: HF/TRL, LLaMA-Factory, axolotl, NeMo, torchtitan
    "per_device_train_batch_size": Foreign("train.microbatch_size"),
    "micro_batch_size": Foreign("train.microbatch_size"),
    "batch_size": Foreign("train.microbatch_size", "microbatch is one forward, global batch one step"),
    "local_batch_size": Foreign("train.microbatch_size"),
    "per_device_eval_batch_size": Foreign("train.microbatch_size", "validation uses the same microbatch"),
    "gradient_accumulation_steps": Foreign("train.global_batch_size", _GLOBAL, other_value=True),
    "train_batch_size": Foreign("train.global_batch_size", _GLOBAL),
    "training_steps": Foreign("train.max_steps"),
    "total_steps": Foreign("train.max_steps"),
    "num_train_epochs": Foreign("train.epochs"),
    "num_epochs": Foreign("train.epochs"),
    "max_epochs": Foreign("train.epochs"),
    "clip_grad_norm": Foreign("train.max_grad_norm"),
    "gradient_clip_val": Foreign("train.max_grad_norm"),
    "gradient_checkpointing": Foreign("parallelizer.activation_checkpointing", values=_CHECKPOINTING),
    "enable_activation_checkpointing": Foreign("parallelizer.activation_checkpointing", values=_CHECKPOINTING),
    "enable_gradient_checkpointing": Foreign("parallelizer.activation_checkpointing", values=_CHECKPOINTING),
    "bf16": _PRECISION,
    "torch_compile": Foreign("parallelizer.enable_compile"),
    # optimizer and schedule
    "learning_rate": Foreign("optimizer.lr"),
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "adam_epsilon": Foreign("optimizer.eps"),
    "optimizer": Foreign("optimizer", "optimizer=adamw, muon or adamw8bit", _OPTIMIZERS, other_value=True),
    "optim": Foreign("optimizer", "optimizer=adamw, muon or adamw8bit", _OPTIMIZERS, other_value=True),
    "num_warmup_steps": Foreign("lr_scheduler.warmup_steps"),
    "lr_warmup_steps": Foreign("lr_scheduler.warmup_steps"),
    "lr_scheduler": Foreign(
        "lr_scheduler", "lr_scheduler=cosine, linear, wsd or constant", _SCHEDULES, other_value=True
    ),
    "lr_scheduler_type": Foreign(
        "lr_scheduler", "lr_scheduler=cosine, linear, wsd or constant", _SCHEDULES, other_value=True
    ),
    # data
    "dataset": Foreign("data.path", "data.path is a hub id, a file or a folder", other_value=True),
    "dataset_path": Foreign("data.path"),
    "dataset_name": Foreign("data.path", "a hub id or a file"),
    "datasets": Foreign("data.datasets", "data.datasets is a list of {path, sampling_weight}", other_value=True),
    "train_file": Foreign("data.path"),
    "sequence_len": Foreign("data.seq_len"),
    "seq_length": Foreign("data.seq_len"),
    "cutoff_len": Foreign("data.seq_len"),
    "max_length": Foreign("data.seq_len"),
    "max_seq_len": Foreign("data.seq_len"),
    "max_seq_length": Foreign("data.seq_len"),
    "packing": Foreign("data.packing", values=_PACKING),
    "sample_packing": Foreign("data.packing", values=_PACKING),
    "neat_packing": Foreign("data.packing", values=_PACKING),
    "packed": Foreign("data.packing", values=_PACKING),
    "packed_sequence_size": Foreign("data.seq_len", "with data.packing=best_fit"),
    "train_on_inputs": Foreign(
        "data.loss_mask", values={"true": "data.loss_mask=all", "false": "data.loss_mask=assistant"}
    ),
    "assistant_only_loss": Foreign(
        "data.loss_mask", values={"true": "data.loss_mask=assistant", "false": "data.loss_mask=all"}
    ),
    "completion_only_loss": Foreign(
        "data.loss_mask", values={"true": "data.loss_mask=assistant", "false": "data.loss_mask=all"}
    ),
    "mask_history": Foreign(
        "data.loss_mask", values={"true": "data.loss_mask=last_turn", "false": "data.loss_mask=assistant"}
    ),
    "chat_template_path": Foreign("data.chat_template"),
    "template": Foreign("data.chat_template", "the tokenizer's own is the default", other_value=True),
    "val_set_size": Foreign("data.validation_size"),
    "eval_steps": Foreign("validation.every"),
    "early_stopping_patience": Foreign("validation.patience", "it counts validations, every `validation.every` steps"),
    "metric_for_best_model": Foreign(
        "validation.metric", "val_loss, or what else a validation measures", other_value=True
    ),
    "dataset_num_proc": Foreign("data.num_workers"),
    "preprocessing_num_workers": Foreign("data.num_workers"),
    # model and adapters
    "base_model": Foreign("model.pretrained"),
    "model.name": Foreign("model.pretrained"),
    "model_name_or_path": Foreign("model.pretrained"),
    "pretrained_model_name_or_path": Foreign("model.pretrained"),
    "torch_dtype": Foreign("model.dtype"),
    "attn_implementation": Foreign("model.attn_implementation"),
    "flash_attention": Foreign("model.attn_implementation=packed"),
    "flash_attn": Foreign("model.attn_implementation=packed"),
    "lora_r": Foreign("model.lora.rank"),
    "lora_rank": Foreign("model.lora.rank"),
    "lora_alpha": Foreign("model.lora.alpha"),
    "lora_dropout": Foreign("model.lora.dropout"),
    "peft_init_lora_weights": Foreign("model.lora.init_lora_weights"),
    "use_dora": Foreign("model.lora.use_dora"),
    "peft_use_dora": Foreign("model.lora.use_dora"),
    "lora_target": Foreign("model.lora.target_modules", values=_ALL_LINEAR, is_list=True),
    "lora_target_modules": Foreign("model.lora.target_modules", values=_ALL_LINEAR, is_list=True),
    "lora_target_linear": Foreign("model.lora.target_modules=all-linear"),
    # mesh: axolotl, NeMo, torchtitan
    "tensor_parallel_size": Foreign("mesh.tp_size"),
    "tensor_parallel_degree": Foreign("mesh.tp_size"),
    "pipeline_parallel_degree": Foreign("mesh.pp_size"),
    "context_parallel_size": Foreign("mesh.cp_size"),
    "context_parallel_degree": Foreign("mesh.cp_size"),
    "expert_parallel_degree": Foreign("mesh.ep_size"),
    "data_parallel_shard_degree": Foreign("mesh.dp_size", "dp_size counts replicas too"),
    "data_parallel_replicate_degree": Foreign("mesh.dp_replicate_size"),
    # rollouts: TRL, vLLM
    "num_generations": Foreign("rollout.group_size"),
    "rollout.stop": _STOPS,
    "stop_strings": _STOPS,
    "stop_token_ids": _STOPS,
    "min_p": Foreign("rollout.top_p", _DRAWN, other_value=True),
    "repetition_penalty": Foreign("rollout.temperature", _DRAWN, other_value=True),
    # the run
    "save_steps": Foreign("checkpoint.every"),
    "save_total_limit": Foreign("checkpoint.keep_latest_k"),
    "logging_steps": Foreign("logging.every"),
    "report_to": Foreign("logging.trackers"),
}
"""Whether each of our names exists is checked against the config at hand: a row never suggests a key that is unknown
there.
"""


def lookup(key: str) -> Foreign | None:
    """The row of a dotted key, by its full name or its leaf."""
    return FOREIGN.get(key) or FOREIGN.get(key.rpartition(".")[2])
