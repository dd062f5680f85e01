"""Compare vision-language fine-tuning with TRL's SFTTrainer or DPOTrainer on the same rows, weights and label rule.

    pip install trl==1.16.0 && python scripts/trl_vision.py [sft|dpo]

TRL gets rows of prompt and completion with `completion_only_loss`, because its default trains every token except
padding, those of pictures included. The two commands read one tiny repository with random weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))
from automodel_cli.models.vision.processor_compat import images_only_processor
from tests.vision import pairs, repository, rows

NUM_ROWS, NUM_STEPS = 8, 3
CONFIG = f"""
defaults: [BASE, override lr_scheduler: constant, _self_]
model: {{pretrained: original}}
data: {{path: data/rows.jsonl, seq_len: 256, packing: none}}
parallelizer: {{mp_policy: {{param_dtype: float32}}}}
optimizer: {{lr: 0.001, betas: [0.9, 0.999], weight_decay: 0}}
train: {{global_batch_size: {NUM_ROWS}, microbatch_size: {NUM_ROWS}, max_steps: {NUM_STEPS}, epochs: null}}
run_name: ours
"""


def _as_parts(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row with `<image>` tags as TRL's prompt, responses and images."""
    question = row["prompt"] if "prompt" in row else row["messages"][0]["content"]
    parts: list[dict[str, str | None]] = []
    for number, text in enumerate(question.split("<image>")):
        parts += [{"type": "image", "text": None}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    names = ("chosen", "rejected") if "chosen" in row else ("completion",)
    responses = {name: row.get(name) or row["messages"][1]["content"] for name in names}
    return {
        "prompt": [{"role": "user", "content": parts}],
        **{n: [{"role": "assistant", "content": [{"type": "text", "text": text}]}] for n, text in responses.items()},
        "images": [str(folder / name) for name in row["images"]],
    }


def theirs(folder: Path, kind: str) -> list[dict[str, float]]:
    """Return loss and gradient norm of each step of TRL."""
    from datasets import Dataset, Image, List
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    lines = map(json.loads, (folder / "data/rows.jsonl").read_text().splitlines())
    data = Dataset.from_list([_as_parts(row, folder / "data") for row in lines])
    tokenizer = AutoTokenizer.from_pretrained(folder / "original")
    new_config, new_trainer = (SFTConfig, SFTTrainer) if kind == "sft" else (DPOConfig, DPOTrainer)
    config = new_config(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=NUM_ROWS,
        max_steps=NUM_STEPS,
        logging_steps=1,
        learning_rate=0.001,
        lr_scheduler_type="constant",
        max_length=None,
        **({"completion_only_loss": True} if kind == "sft" else {"beta": 0.1}),
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = new_trainer(
        model=AutoModelForImageTextToText.from_pretrained(folder / "original", dtype=torch.float32),
        args=config,
        train_dataset=data.cast_column("images", List(Image())),
        processing_class=images_only_processor(str(folder / "original"), None, tokenizer),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def ours(folder: Path, kind: str) -> list[dict[str, float]]:
    """Return loss and gradient norm of each step of `automodel finetune`."""
    (folder / "ours.yaml").write_text(CONFIG.replace("BASE", "vlm" if kind == "sft" else "dpo_vlm"))
    command = [sys.executable, "-m", "automodel_cli", "finetune", "llm", "-c", "ours.yaml"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return [row for row in map(json.loads, (folder / "runs/ours/metrics.jsonl").open()) if "loss" in row]


def main() -> None:
    """Print both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repository("qwen3_vl", folder / "original")
        kind = sys.argv[1] if len(sys.argv) > 1 else "sft"
        (rows if kind == "sft" else pairs)(folder / "data", NUM_ROWS, share=1.0)
        for step, (a, b) in enumerate(zip(ours(folder, kind), theirs(folder, kind), strict=True), start=1):
            for key in ("loss", "grad_norm"):
                print(f"step {step} {key}: automodel {a[key]:.9g}, TRL {b[key]:.9g}, difference {a[key] - b[key]:.1e}")


if __name__ == "__main__":
    main()
