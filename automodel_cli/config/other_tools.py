"""Which other tool a whole config file was written for, told by the keys at its root."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_SIGNATURES: dict[str, tuple[int, tuple[str, ...]]] = {
    "axolotl": (
        3,
        (
            *("base_model", "sequence_len", "micro_batch_size", "datasets", "sample_packing", "val_set_size"),
            *("adapter", "load_in_4bit", "train_on_inputs", "num_epochs", "lora_r", "lora_target_linear"),
            *("dataset_prepared_path", "special_tokens"),
        ),
    ),
    "LLaMA-Factory": (
        4,
        (
            *("model_name_or_path", "stage", "finetuning_type", "cutoff_len", "template", "dataset", "lora_target"),
            *("do_train", "lora_rank", "overwrite_cache", "plot_loss", "preprocessing_num_workers", "neat_packing"),
            "dataset_dir",
        ),
    ),
    "TRL": (
        4,
        (
            *("model_name_or_path", "dataset_name", "max_length", "per_device_train_batch_size", "torch_dtype"),
            *("use_peft", "lora_r", "attn_implementation", "dataset_text_field", "packing", "learning_rate"),
            *("gradient_checkpointing", "hub_model_id", "report_to", "num_train_epochs", "dataset_num_proc"),
        ),
    ),
}
"""How many of a tool's keys must stand there, and the keys."""


def recognise(tree: Mapping[str, Any], unknown: Collection[str] | None = None) -> str | None:
    """The tool that a whole file was written for, or None. `unknown`: of the root's keys those that are not ours."""
    if any(isinstance(section, dict) and "_component_" in section for section in tree.values()):
        return "torchtune"  # says `_component_` where Hydra says `_target_`
    keys = set(tree if unknown is None else unknown)
    counts = {tool: len(keys & set(names)) for tool, (_, names) in _SIGNATURES.items()}
    likely = max(counts, key=lambda tool: counts[tool])
    return likely if counts[likely] >= _SIGNATURES[likely][0] else None
