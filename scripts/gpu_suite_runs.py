"""Five steps of a small model on the GPU and on the CPU, compared: one piece of `scripts/gpu_suite.sh`.

    python scripts/gpu_suite_runs.py NAME FOLDER OUT [--fake]

Both runs train on the same rows in the same order. Losses and gradient norms of every step must agree within the
tolerance of the piece. Every run ends with an export that transformers reloads.
OUT receives the figures. With `--fake`, the step of the run is traced on fake CUDA tensors (`automodel dryrun`), or the
config is checked if a dry run does not support it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 5
_AUTOMODEL = (sys.executable, "-m", "automodel_cli")
_FLOAT32, _ROUNDED = 1e-3, 3e-2
"""Largest relative difference of a loss or norm. Not measured on a GPU yet: TF32 alone would give 1e-3."""

_CONFIG = """
defaults: [sft, _self_]
model:
  dtype: float32
  tokenizer: {_target_: automodel_cli.models.tokenizer.ByteTokenizer}
  config: {vocab_size: 384, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 4, num_attention_heads: 4,
           num_key_value_heads: 4, head_dim: 64, max_position_embeddings: 512, tie_word_embeddings: false,
           pad_token_id: 0, bos_token_id: null, eos_token_id: 1, %s}
data:
  generator: {_target_: automodel_cli.data.synthetic.chat_tasks.ChatTasks, num_train: 400, num_validation: 4}
  seq_len: 256
parallelizer: {mp_policy: {param_dtype: float32}}
optimizer: {lr: 1e-3}
lr_scheduler: {_target_: automodel_cli.training.optimizers.lr_scheduler.Constant}
train: {global_batch_size: 4, microbatch_size: 2, max_steps: 5, epochs: null}
logging: {every: 1}
"""
_MODELS = {
    "dense": "model_type: llama",
    "experts": "model_type: qwen3_moe, moe_intermediate_size: 128, num_experts: 64, num_experts_per_tok: 2",
}
_GREEDY = """
import torch
import torch.distributed as dist
from automodel_cli.training.callback import Callback

class Greedy(Callback):
    def on_step(self, run, step, values):
        if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            torch.empty(1 << 60, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
"""
_IN_GREEDY = ("--trust-package", "gpu_suite_greedy", "callbacks=[{_target_: gpu_suite_greedy.Greedy}]")
"""The last rank runs out of memory after step 3, while the others go on."""
_BF16 = ("model.dtype=bfloat16", "parallelizer.mp_policy.param_dtype=bfloat16")


@dataclass(frozen=True)
class Comparison:
    """One run. The reference is one process on the CPU with `settings` but without `layout`.

    Attributes:
        gpus: number of GPUs that the piece needs.
        package: optional package that the piece needs.
        resumes: stop after step 3 with an asynchronous checkpoint, and resume. The reference does not stop.
        fails_with: error code that the run must end with, instead of a comparison.
        traced: whether a dry run supports it. A run that fails and that no dry run supports is run on the CPU if it
            needs several ranks, and checked otherwise.
        said: text that the output of a failed run must have.
        options: more words of the command of a run that fails.
    """

    settings: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    tolerance: float = _FLOAT32
    model: str = "dense"
    gpus: int = 1
    package: str | None = None
    resumes: bool = False
    fails_with: str | None = None
    traced: bool = True
    said: str = ""
    options: tuple[str, ...] = ()


COMPARISONS = {
    "float32": Comparison(),
    "bfloat16, export and reload": Comparison(_BF16, tolerance=_ROUNDED),
    "LoRA": Comparison(("model.lora={rank: 8}",)),
    "QLoRA": Comparison(
        ("model.lora={rank: 8, quantization: nf4}",), tolerance=_ROUNDED, package="bitsandbytes", traced=False
    ),
    "Muon": Comparison(("optimizer=muon", "optimizer.lr=1e-3", "optimizer.ns_dtype=float32")),
    "8-bit AdamW": Comparison(("optimizer=adamw8bit", "optimizer.lr=1e-3"), tolerance=_ROUNDED, package="torchao"),
    "float8": Comparison((*_BF16, "model.fp8={recipe: tensorwise}"), tolerance=2 * _ROUNDED),
    "DDP": Comparison(("parallelizer=ddp", "~parallelizer.mp_policy")),
    "Transformer Engine": Comparison(
        _BF16, ("model.transformer_engine={}",), _ROUNDED, package="transformer_engine", traced=False
    ),
    "experts without tokens": Comparison(
        ("data.packing=none", "train.microbatch_size=1"), model="experts"
    ),
    "asynchronous checkpoint and resume": Comparison(resumes=True),
    "out of memory": Comparison(
        ("model.config.hidden_size=16384", "model.config.num_hidden_layers=64", "model.config.head_dim=4096"),
        fails_with="out_of_memory", traced=False,
    ),
    "FSDP2 on 2 GPUs": Comparison(gpus=2),
    "out of memory on one of 2 GPUs": Comparison(
        layout=("mesh.dp_size=2",), options=_IN_GREEDY, gpus=2, fails_with="out_of_memory", traced=False,
        said="rank 1 of 2 ran out",
    ),
    "Muon on 2 GPUs": Comparison(("optimizer=muon", "optimizer.lr=1e-3", "optimizer.ns_dtype=float32"), gpus=2),
    "Megatron-FSDP on 2 GPUs": Comparison(
        layout=("parallelizer=megatron_fsdp", "~parallelizer.mp_policy"), gpus=2, package="megatron_fsdp", traced=False
    ),
    "tensor parallelism on 2 GPUs": Comparison(layout=("mesh.tp_size=2",), gpus=2),
    "context parallelism on 2 GPUs": Comparison(layout=("mesh.cp_size=2",), gpus=2),
    "ring attention on 2 GPUs": Comparison(layout=("mesh.cp_size=2", "parallelizer.context_parallel=ring"), gpus=2),
    "flash attention under context parallelism on 2 GPUs": Comparison(_BF16, ("mesh.cp_size=2",), _ROUNDED, gpus=2),
    "pipeline on 2 GPUs": Comparison(layout=("mesh.pp_size=2", "pipeline=1f1b"), gpus=2),
    "zero-bubble pipeline on 2 GPUs": Comparison(layout=("mesh.pp_size=2", "pipeline=zb_h1"), gpus=2),
    "expert parallelism on 2 GPUs": Comparison(layout=("mesh.ep_size=2",), model="experts", gpus=2),
}  # fmt: skip
"""In the order of what is worth most."""


def config_file(comparison: Comparison, folder: Path) -> Path:
    """Write the config of a comparison, and return its path."""
    path = folder / f"small_{comparison.model}.yaml"
    path.write_text(_CONFIG % _MODELS[comparison.model], encoding="utf-8")
    (folder / "gpu_suite_greedy.py").write_text(_GREEDY, encoding="utf-8")
    return path


def compare(comparison: Comparison, folder: Path) -> dict[str, Any]:
    """Run on the GPU and on the CPU, and return the figures. Exits with the output of a run that fails."""
    devices = ",".join(map(str, range(comparison.gpus)))
    settings = (*comparison.settings, *comparison.layout)
    if comparison.fails_with is not None:
        return _failure(comparison, folder, devices)
    if comparison.resumes:
        saving = ("checkpoint.every=3", "checkpoint.async_save=true")
        _train(comparison, folder / "gpu", (*settings, *saving, "train.max_steps=3"), devices)
        run = next(path.parent for path in (folder / "gpu").rglob("metrics.jsonl"))
        _automodel(("resume", str(run), f"train.max_steps={STEPS}"), devices)
    else:
        _train(comparison, folder / "gpu", settings, devices)
    _train(comparison, folder / "cpu", comparison.settings, "")
    found, wanted = (_steps(folder / device) for device in ("gpu", "cpu"))
    if [step["step"] for step in found] != [step["step"] for step in wanted]:
        sys.exit(f"steps {[step['step'] for step in found]} on the GPU, {[step['step'] for step in wanted]} on the CPU")
    figures: dict[str, Any] = {"tolerance": comparison.tolerance}
    for name in ("loss", "grad_norm"):
        errors = [abs(ours[name] / theirs[name] - 1) for ours, theirs in zip(found, wanted, strict=True)]
        figures[name] = {"gpu": [s[name] for s in found], "cpu": [s[name] for s in wanted], "error": max(errors)}
    return figures


def _train(comparison: Comparison, output: Path, settings: tuple[str, ...], devices: str) -> None:
    output.mkdir()
    conf = config_file(comparison, output)
    _automodel(("finetune", "llm", "-c", str(conf), *settings, f"output_dir={output}"), devices)


def _automodel(words: tuple[str, ...], devices: str) -> None:
    """Run a command and print its output. The output of a run on the CPU is printed only if it fails."""
    done = _run(words, devices)
    if devices or done.returncode:
        print(done.stdout + done.stderr, flush=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}")


def _run(words: tuple[str, ...], devices: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": devices} | more
    return subprocess.run((*_AUTOMODEL, *words), capture_output=True, text=True, env=environment, check=False)


def _failure(comparison: Comparison, folder: Path, devices: str) -> dict[str, Any]:
    output = folder / "gpu"
    output.mkdir()
    conf = config_file(comparison, output)
    settings = (*comparison.settings, *comparison.layout)
    words = ("finetune", "llm", "-c", str(conf), *comparison.options, *settings, f"output_dir={output}")
    done = _run(words, devices, PYTHONPATH=os.pathsep.join(filter(None, [str(output), os.environ.get("PYTHONPATH")])))
    told = done.stdout + done.stderr
    if done.returncode == 0 or f"[{comparison.fails_with}]" not in told or comparison.said not in told:
        print(told)
        wanted = f"[{comparison.fails_with}] {comparison.said}".strip()
        sys.exit(f"must fail with {wanted}, but ended with {done.returncode}")
    return {"failed_with": comparison.fails_with}


def _steps(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.rglob("metrics.jsonl")
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "grad_norm" in line]


def trace(comparison: Comparison, folder: Path, out: Path) -> None:
    """Run the step on fake CUDA tensors, run a failure on the CPU, or check the config."""
    conf, settings = config_file(comparison, folder), (*comparison.settings, *comparison.layout)
    if comparison.traced:
        dry = ("dryrun", "--gpus", str(comparison.gpus), "--changes", "0", "--json", str(out), "-c", str(conf))
        _automodel((*dry, *settings), "0")
    elif comparison.fails_with is not None and comparison.gpus > 1:
        _failure(comparison, folder, "")
    else:
        _automodel(("check", "-c", str(conf), *settings), "0")


def main(arguments: list[str]) -> int:
    name, folder, out = arguments[0], Path(arguments[1]), Path(arguments[2])
    comparison = COMPARISONS[name]
    if "--fake" in arguments:
        trace(comparison, folder, out)
        return 0
    figures = compare(comparison, folder)
    out.write_text(json.dumps(figures), encoding="utf-8")
    worst = max((figures[key]["error"] for key in ("loss", "grad_norm") if key in figures), default=0.0)
    if worst > comparison.tolerance:
        print(json.dumps(figures, indent=1))
        sys.exit(f"the GPU differs from the CPU by {worst:.1e}, more than {comparison.tolerance:.0e}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
