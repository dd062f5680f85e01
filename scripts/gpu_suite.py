"""The pieces of `scripts/gpu_suite.sh`: each a command with a time limit and figures, or its last lines if it fails.

Results are written after every piece, and a second call leaves out what was ok on the same GPU and torch. The figures
of a piece are the JSON that it writes to `{out}`. Exit codes: 0 all ok, 1 something failed, 75 time was up (call it
again), 77 there is no CUDA device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BUDGET_SECONDS = 480.0
_TAIL = 25
_AUTOMODEL = (sys.executable, "-m", "automodel_cli")
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "--no-header", "-p", "no:cacheprovider")
_BENCH = (*_AUTOMODEL, "bench", "--warmup", "5", "--steps", "12", "--json", "{out}", "-c")

_ROWS = """
defaults: [sft, _self_]
model:
  dtype: float32
  tokenizer: {_target_: automodel_cli.models.tokenizer.ByteTokenizer}
  config: {vocab_size: 32064, pad_token_id: 0, bos_token_id: null, eos_token_id: 1, max_position_embeddings: 4096,
           tie_word_embeddings: false, %s}
data:
  task: {_target_: automodel_cli.data.synthetic.chat_tasks.ChatTasks, num_train: 40000, num_validation: 16}
  seq_len: 4096
optimizer: {lr: 1e-5}
train: {global_batch_size: 4, microbatch_size: 1, max_steps: 100, epochs: null}
"""
_SIZES = "hidden_size: 2048, num_attention_heads: 16, num_key_value_heads: 8, head_dim: 128"
_MOE = f"{_SIZES}, num_hidden_layers: 8, num_experts_per_tok: 4"
SHAPES = {
    "dense": f"model_type: llama, {_SIZES}, num_hidden_layers: 16, intermediate_size: 8192",
    "qk_norm": f"model_type: qwen3, {_SIZES}, num_hidden_layers: 16, intermediate_size: 6144",
    "experts": f"model_type: qwen3_moe, {_MOE}, num_experts: 32, moe_intermediate_size: 768, intermediate_size: 6144",
    "sinks_and_windows": f"model_type: gpt_oss, {_MOE}, num_local_experts: 16, intermediate_size: 1536",
}
"""Four models of about a billion parameters, at random, on packed rows of 4,096 tokens."""

_OFFLOAD = "parallelizer.offload_policy._target_=automodel_cli.distributed.config.CPUOffload"
_TINY = "vocab_size: 354, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 4, "
_TINY += "head_dim: 16, intermediate_size: 192, pad_token_id: 0, eos_token_id: 1, bos_token_id: null"
_SAMPLED = (
    "model.pretrained=null",
    f"model.config={{model_type: qwen3, {_TINY}}}",
    "model.tokenizer._target_=automodel_cli.models.tokenizer.ByteTokenizer",
)


@dataclass(frozen=True)
class Piece:
    """One command. `{folder}` and `{out}` in it are filled in."""

    name: str
    command: tuple[str, ...]
    seconds: float = 90.0


def pieces() -> list[Piece]:
    """In the order of what is worth most."""
    found = [
        Piece("attention kernels against the dense definition", (*_PYTEST, "tests/gpu/test_attention_cuda.py")),
        Piece("attention that torch compiles", (*_PYTEST, "tests/gpu/test_flex_cuda.py"), 150),
        Piece("the head's products", (*_PYTEST, "tests/gpu/test_head_cuda.py")),
        Piece("parallel axes, two ranks on this GPU over gloo", (*_PYTEST, "tests/gpu/test_axes_cuda.py"), 150),
        Piece("a run of one rank over nccl", (*_BENCH, "quickstart")),
        Piece("compiled fused operations", (*_PYTEST, "tests/gpu/test_fused_operations_cuda.py"), 120),
        Piece("compiled layers", (*_BENCH, "quickstart", "parallelizer.enable_compile=true"), 150),
        Piece("parameters in host memory", (*_BENCH, "{folder}/dense.yaml", _OFFLOAD)),
        Piece("the sampler", (*_BENCH, "quickstart_grpo", *_SAMPLED)),
        Piece("the sampler's CUDA graphs", (*_PYTEST, "tests/gpu/test_graphs_cuda.py"), 120),
    ]
    for name in SHAPES:
        found.append(Piece(f"speed: {name}", (*_BENCH, f"{{folder}}/{name}.yaml"), 75))
        dry = (*_AUTOMODEL, "dryrun", "--gpus", "1", "--json", "{out}", "-c", f"{{folder}}/{name}.yaml")
        found.append(Piece(f"memory by dry run: {name}", dry, 75))
    return found


def main(output: Path) -> int:
    if not torch.cuda.is_available():
        print("gpu_suite: this machine has no CUDA device, so nothing was run")
        return 77
    began = time.monotonic()
    results = _earlier(output, machine := _machine())
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as folder:
        for name, config in SHAPES.items():
            (Path(folder) / f"{name}.yaml").write_text(_ROWS % config, encoding="utf-8")
        waiting = [piece for piece in pieces() if results.get(piece.name, {}).get("status") != "ok"]
        for piece in waiting:
            left = BUDGET_SECONDS - (time.monotonic() - began)
            if left < 10:
                print(f"gpu_suite: {BUDGET_SECONDS:.0f} s are over; the same command goes on with: {piece.name}")
                return 75
            results[piece.name] = found = run(piece, Path(folder), min(piece.seconds, left))
            output.write_text(json.dumps({"machine": machine, "pieces": results}, indent=2) + "\n", encoding="utf-8")
            print(f"{found['status']:8} {found['seconds']:6.1f} s  {piece.name}", flush=True)
    print("\n".join(summary(results)))
    return 1 if any(found["status"] != "ok" for found in results.values()) else 0


def run(piece: Piece, folder: Path, limit: float) -> dict[str, Any]:
    """status ("ok", "failed", "timeout"), seconds, the command, figures, and the last lines of what failed."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    command = [word.replace("{folder}", str(folder)).replace("{out}", str(out)) for word in piece.command]
    began = time.monotonic()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "AUTOMODEL_CACHE": str(folder / "cache")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=environment, cwd=_root(), check=False
        )
        status, said = "ok" if done.returncode == 0 else "failed", done.stdout + done.stderr
    except subprocess.TimeoutExpired as expired:
        status = "timeout"
        said = "".join(part.decode(errors="replace") for part in (expired.stdout, expired.stderr) if part)
    found: dict[str, Any] = {"status": status, "seconds": time.monotonic() - began, "command": " ".join(command)}
    if status == "ok" and out.is_file():
        found["figures"] = json.loads(out.read_text(encoding="utf-8"))
    if status != "ok":
        found["tail"] = said.strip().splitlines()[-_TAIL:]
    return found


def summary(results: dict[str, dict[str, Any]]) -> list[str]:
    """What to act on: each failure with its command and last lines, then speeds, and memory beside its dry run."""
    lines = []
    for name, found in results.items():
        if found["status"] != "ok":
            lines += [
                f"\n{found['status'].upper()}: {name}",
                f"  {found['command']}",
                *(f"  | {t}" for t in found["tail"]),
            ]
    for shape in SHAPES:
        speed = results.get(f"speed: {shape}", {}).get("figures")
        dry = results.get(f"memory by dry run: {shape}", {}).get("figures")
        if speed and dry:
            mfu = sorted(speed["mfu"])[len(speed["mfu"]) // 2] if speed["mfu"] else float("nan")
            low, high = dry["mfu_estimate"]
            rate = f"{speed['tokens_per_second']:,.0f} tokens/s, MFU {mfu:.1%} (dry run {low:.0%} to {high:.0%})"
            memory = f"{speed['memory_gib']:.1f} GiB reserved, {dry['peak_gib']:.1f} by dry run"
            lines.append(f"{shape}: {rate}; {memory}")
    return lines


def _earlier(output: Path, machine: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Results of a call before this one, if it was on the same machine."""
    try:
        before = json.loads(output.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    pieces_before: dict[str, dict[str, Any]] = before["pieces"] if before["machine"] == list(machine) else {}
    return pieces_before


def _machine() -> list[str]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=_root(), check=False)
    return [torch.cuda.get_device_name(0), torch.__version__, str(torch.version.cuda), commit.stdout.strip()]


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
