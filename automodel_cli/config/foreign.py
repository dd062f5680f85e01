"""Other tools' names for our keys, as of 2026-11. At most 80 rows; only names that people paste.

A row is `name: (our key, note)`. The note says what differs; it is empty where the meaning is the same. A name with a
dot is looked up before its leaf.
"""

from __future__ import annotations

from typing import NamedTuple


class Foreign(NamedTuple):
    """Our key (with a value where the foreign name implies one: `data.packing=best_fit`) and what differs."""

    ours: str
    note: str = ""


_GLOBAL = "global batch = microbatch x accumulation x data-parallel ranks"

FOREIGN: dict[str, Foreign] = {
    # batch and steps: HF/TRL, LLaMA-Factory, axolotl, torchtune, NeMo, torchtitan
    "per_device_train_batch_size": Foreign("train.microbatch_size"),
    "micro_batch_size": Foreign("train.microbatch_size"),
    "batch_size": Foreign("train.microbatch_size", "microbatch is one forward, global batch one step"),
    "local_batch_size": Foreign("train.microbatch_size"),
    "per_device_eval_batch_size": Foreign("train.microbatch_size", "validation uses the same microbatch"),
    "gradient_accumulation_steps": Foreign("train.global_batch_size", _GLOBAL),
    "train_batch_size": Foreign("train.global_batch_size", _GLOBAL),
    "max_steps_per_epoch": Foreign("train.max_steps"),
    "training_steps": Foreign("train.max_steps"),
    "total_steps": Foreign("train.max_steps"),
    "num_train_epochs": Foreign("train.epochs"),
    "num_epochs": Foreign("train.epochs"),
    "max_epochs": Foreign("train.epochs"),
    "max_grad_norm": Foreign("train.max_grad_norm"),
    "clip_grad_norm": Foreign("train.max_grad_norm"),
    "gradient_clip_val": Foreign("train.max_grad_norm"),
    "gradient_checkpointing": Foreign("parallelizer.activation_checkpointing"),
    "enable_activation_checkpointing": Foreign("parallelizer.activation_checkpointing"),
    "enable_gradient_checkpointing": Foreign("parallelizer.activation_checkpointing"),
    "torch_compile": Foreign("parallelizer.enable_compile"),
    # optimizer and schedule
    "learning_rate": Foreign("optimizer.lr"),
    "adam_beta1": Foreign("optimizer.betas", "betas is the pair [beta1, beta2]"),
    "adam_beta2": Foreign("optimizer.betas", "betas is the pair [beta1, beta2]"),
    "adam_epsilon": Foreign("optimizer.eps"),
    "optim": Foreign("optimizer", "an optimizer is a node: optimizer._target_"),
    "warmup_ratio": Foreign("lr_scheduler.warmup_ratio"),
    "num_warmup_steps": Foreign("lr_scheduler.warmup_steps"),
    "lr_warmup_steps": Foreign("lr_scheduler.warmup_steps"),
    "lr_scheduler_type": Foreign("lr_scheduler", "a schedule is a group: lr_scheduler=cosine"),
    # data
    "dataset_path": Foreign("data.path"),
    "dataset_name": Foreign("data.path", "a hub id or a file"),
    "datasets": Foreign("data.sources"),
    "train_file": Foreign("data.path"),
    "sequence_len": Foreign("data.seq_len"),
    "seq_length": Foreign("data.seq_len"),
    "cutoff_len": Foreign("data.seq_len"),
    "max_length": Foreign("data.seq_len"),
    "max_seq_len": Foreign("data.seq_len"),
    "max_seq_length": Foreign("data.seq_len"),
    "sample_packing": Foreign("data.packing=best_fit"),
    "neat_packing": Foreign("data.packing=best_fit"),
    "packed": Foreign("data.packing=best_fit"),
    "packed_sequence_size": Foreign("data.seq_len", "with data.packing=best_fit"),
    "train_on_inputs": Foreign("data.mask=all", "false there is data.mask=assistant here"),
    "assistant_only_loss": Foreign("data.mask=assistant"),
    "completion_only_loss": Foreign("data.mask=assistant"),
    "mask_history": Foreign("data.mask=last_turn"),
    "chat_template_path": Foreign("data.chat_template"),
    "template": Foreign("data.chat_template", "by default the tokenizer's own"),
    "val_set_size": Foreign("data.validation_rows", "a number of rows, not a share"),
    "eval_steps": Foreign("validation.every"),
    "dataset_num_proc": Foreign("data.num_workers"),
    "preprocessing_num_workers": Foreign("data.num_workers"),
    # model and adapters
    "base_model": Foreign("model.pretrained"),
    "model_name_or_path": Foreign("model.pretrained"),
    "pretrained_model_name_or_path": Foreign("model.pretrained"),
    "hf_assets_path": Foreign("model.pretrained"),
    "torch_dtype": Foreign("model.dtype"),
    "attn_implementation": Foreign("model.attention"),
    "flash_attention": Foreign("model.attention=packed"),
    "flash_attn": Foreign("model.attention=packed"),
    "lora_r": Foreign("model.lora.rank"),
    "lora_rank": Foreign("model.lora.rank"),
    "lora_alpha": Foreign("model.lora.alpha"),
    "lora_dropout": Foreign("model.lora.dropout"),
    "lora_target": Foreign("model.lora.target_modules"),
    "lora_target_modules": Foreign("model.lora.target_modules"),
    # mesh: axolotl, NeMo, torchtitan
    "tensor_parallel_size": Foreign("mesh.tp_size"),
    "tensor_parallel_degree": Foreign("mesh.tp_size"),
    "pipeline_parallel_degree": Foreign("mesh.pp_size"),
    "context_parallel_size": Foreign("mesh.cp_size"),
    "context_parallel_degree": Foreign("mesh.cp_size"),
    "expert_parallel_degree": Foreign("mesh.ep_size"),
    "data_parallel_shard_degree": Foreign("mesh.dp_size", "dp_size counts replicas too"),
    "data_parallel_replicate_degree": Foreign("mesh.dp_replicate_size"),
    # the run
    "save_steps": Foreign("checkpoint.every"),
    "save_total_limit": Foreign("checkpoint.keep"),
    "logging_steps": Foreign("logging.every"),
    "report_to": Foreign("logging.trackers"),
}
"""Whether each of our names exists is checked against the config at hand: a row never suggests a key that is unknown
there.
"""


def lookup(key: str) -> Foreign | None:
    """The row of a dotted key, by its full name or its leaf."""
    return FOREIGN.get(key) or FOREIGN.get(key.rpartition(".")[2])
