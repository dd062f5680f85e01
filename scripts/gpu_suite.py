"""The pieces of `scripts/gpu_suite.sh`: each a command with a time limit and figures, or its last lines if it fails.

Results are written after every piece, and a second call leaves out what was ok on the same GPU and torch. The figures
of a piece are the JSON that it writes to `{out}`. A piece whose output has a warning or a fall-back to slower code has
failed, unless the piece names it. Exit codes: 0 all ok, 1 something failed, 75 time was up (call it again), 77 there is
no CUDA device.

`--fake` needs no GPU: steps are traced on fake CUDA tensors, tests are collected, and other configs are checked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from automodel_cli.cli.common import GPUS
from automodel_cli.config.error_codes import CODES
from scripts.gpu_suite_runs import COMPARISONS

BUDGET_SECONDS = 480.0
MEMORY_TOLERANCE = 0.10
_TAIL = 25
_AUTOMODEL = (sys.executable, "-m", "automodel_cli")
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-rs", "-x", "-m", "gpu", "--no-header", "-p", "no:cacheprovider")
_DRY = (*_AUTOMODEL, "dryrun", "--gpus", "1", "--changes", "0", "--json", "{out}")
_DOUBLE = "tests/e2e/test_grpo_server.py::test_a_run_starts_its_servers_and_takes_turns_with_them"
_NCCL_ON_CPU = ("scripts/gpu_suite_nccl.py", "--cpu")
_BENCH = (*_AUTOMODEL, "bench", "--warmup", "5", "--steps", "12", "--json", "{out}", "-c")

_OLD_TORCH = "SKIPPED.* it requires torch "
"""A kernel of a later version of torch."""

_ROWS = """
defaults: [sft, _self_]
model:
  dtype: float32
  tokenizer: {_target_: automodel_cli.models.tokenizer.ByteTokenizer}
  config: {vocab_size: 32064, pad_token_id: 0, bos_token_id: null, eos_token_id: 1, max_position_embeddings: 4096,
           tie_word_embeddings: false, %s}
data:
  generator: {_target_: automodel_cli.data.synthetic.chat_tasks.ChatTasks, num_train: 40000, num_validation: 16}
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
    """One command. `{folder}` and `{out}` in it are filled in.

    Attributes:
        fake: the command without a GPU, or None to leave the piece out.
        expected: fall-backs that are no failure (regular expressions of output lines).
        gpus: number of GPUs that it needs.
        package: optional package that it needs.
        program: program on PATH that it needs.
    """

    name: str
    command: tuple[str, ...]
    seconds: float = 90.0
    fake: tuple[str, ...] | None = None
    expected: tuple[str, ...] = ()
    gpus: int = 1
    package: str | None = None
    program: str | None = None

    def missing(self, num_gpus: int) -> str | None:
        """Return what this machine lacks, or None."""
        if num_gpus < self.gpus:
            return f"needs {self.gpus} GPUs"
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"needs the package {self.package}"
        if self.program is not None and shutil.which(self.program) is None:
            return f"needs the program {self.program}"
        return None


def _test(name: str, file: str, seconds: float = 90.0, **fields: Any) -> Piece:
    return Piece(name, (*_PYTEST, file), seconds, fake=(*_PYTEST, "--collect-only", file), **fields)


def _served(name: str, transport: str, gpus: int) -> Piece:
    """A run that starts vLLM. Without a GPU, the double of vLLM stands in its place."""
    command = (*_PYTEST, "tests/gpu/test_servers_cuda.py", "-k", transport)
    return Piece(name, command, 300, fake=(*_PYTEST[:4], _DOUBLE), gpus=gpus, program="vllm")


def _bench(name: str, *words: str, seconds: float = 90.0, fake: str = "dryrun", **fields: Any) -> Piece:
    traced = {"dryrun": (*_DRY, "-c", *words), "check": (*_AUTOMODEL, "check", "-c", *words)}[fake]
    return Piece(name, (*_BENCH, *words), seconds, fake=traced, **fields)


def gpu_type(device_name: str) -> str:
    """Return the type of `automodel dryrun --gpu` of a device. Without a known name, that of an H100."""
    return next((gpu for gpu in GPUS if gpu in device_name.lower()), "h100")


def pieces(gpu: str = "h100") -> list[Piece]:
    """In the order of what is worth most. `gpu`: type of the GPU, for dry runs."""
    found = [
        _test(
            "attention kernels against the dense definition", "tests/gpu/test_attention_cuda.py", expected=(_OLD_TORCH,)
        ),
        Piece("nccl", (sys.executable, "scripts/gpu_suite_nccl.py"), 60, fake=(sys.executable, *_NCCL_ON_CPU)),
        *(_comparison(name) for name in COMPARISONS),
        _test("attention that torch compiles", "tests/gpu/test_flex_cuda.py", 150),
        _test("the head's products", "tests/gpu/test_head_cuda.py"),
        _test("float8 GEMMs", "tests/gpu/test_fp8_cuda.py", 120),
        _test("parallel axes, two ranks on this GPU over gloo", "tests/gpu/test_axes_cuda.py", 150),
        _test("two pipeline stages on this GPU", "tests/gpu/test_pipeline_cuda.py", 150),
        _bench("a run of one rank over nccl", "quickstart"),
        _served("vLLM that a run starts on the GPU that trains", "ipc", 1),
        _served("vLLM that a run starts on another GPU", "nccl", 2),
        _test("compiled fused operations", "tests/gpu/test_fused_operations_cuda.py", 120),
        _bench("compiled layers", "quickstart", "parallelizer.enable_compile=true", seconds=150),
        _bench("parameters in host memory", "{folder}/dense.yaml", _OFFLOAD),
        _bench("the sampler", "quickstart_grpo", *_SAMPLED, fake="check"),
        _test("the sampler's CUDA graphs", "tests/gpu/test_graphs_cuda.py", 120),
    ]
    for name in SHAPES:
        conf = f"{{folder}}/{name}.yaml"
        found.append(Piece(f"speed: {name}", (*_BENCH, conf), 75))
        dry = (*_DRY, "--gpu", gpu, "-c", conf)
        found.append(Piece(f"memory by dry run: {name}", dry, 75, fake=dry))
    return found


def _comparison(name: str) -> Piece:
    words = (sys.executable, "scripts/gpu_suite_runs.py", name, "{folder}", "{out}")
    of = COMPARISONS[name]
    return Piece(f"5 steps: {name}", words, 120, fake=(*words, "--fake"), gpus=of.gpus, package=of.package)


def main(output: Path, *, fake: bool = False, names: Sequence[str] = ()) -> int:
    """Run the pieces that are not ok yet, or only those called `names`."""
    if not fake and not torch.cuda.is_available():
        print("gpu_suite: this machine has no CUDA device, so nothing was run")
        return 77
    began, budget = time.monotonic(), 3600.0 if fake else BUDGET_SECONDS
    machine, gpu = _machine(fake), gpu_type("" if fake else torch.cuda.get_device_name(0))
    results = _earlier(output, machine)
    chosen = [piece for piece in pieces(gpu) if not names or piece.name in names]

    def write() -> None:
        known = {"machine": machine, "gpu": gpu, "pieces": results}
        output.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")

    for piece in chosen:
        if results.get(piece.name, {}).get("status") == "ok" or (fake and piece.fake is None):
            continue
        lacking = None if fake and piece.program else piece.missing(piece.gpus if fake else torch.cuda.device_count())
        left = budget - (time.monotonic() - began)
        if lacking is None and left < 10:
            print(f"gpu_suite: {budget:.0f} s are over; the same command goes on with: {piece.name}")
            return 75
        found = {"status": "skipped", "seconds": 0.0, "command": "", "tail": [lacking]}
        results[piece.name] = found if lacking else run(piece, min(piece.seconds * (1 + 9 * fake), left), fake=fake)
        write()
        print(f"{results[piece.name]['status']:9} {results[piece.name]['seconds']:6.1f} s  {piece.name}", flush=True)
    _check_memory(results)
    write()
    print("\n".join(summary(results)))
    return 1 if any(found["status"] not in ("ok", "skipped") for found in results.values()) else 0


def run(piece: Piece, limit: float, *, fake: bool = False) -> dict[str, Any]:
    """status ("ok", "failed", "fell back", "timeout"), seconds, the command, figures, and the last lines or fall-backs
    of what was not ok."""
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as name:
        folder, out = Path(name), Path(name) / "out.json"
        for shape, config in SHAPES.items():
            (folder / f"{shape}.yaml").write_text(_ROWS % config, encoding="utf-8")
        words = piece.fake if fake and piece.fake is not None else piece.command
        command = [word.replace("{folder}", name).replace("{out}", str(out)) for word in words]
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
        fallen = [] if fake or status != "ok" else fall_backs(said, piece.expected)
        status = "fell back" if fallen else status
        found: dict[str, Any] = {"status": status, "seconds": time.monotonic() - began, "command": " ".join(command)}
        if status in ("ok", "fell back") and out.is_file():
            found["figures"] = json.loads(out.read_text(encoding="utf-8"))
    if status != "ok":
        found["tail"] = fallen or said.strip().splitlines()[-_TAIL:]
    return found


def fall_backs(output: str, expected: Sequence[str] = ()) -> list[str]:
    """Return the lines of an output that tell of slower code than the GPU has, of a warning, or of a skipped test."""

    def tells(line: str) -> bool:
        warned = any(code in CODES for code in re.findall(r"\[([a-z_0-9]+)\]", line))
        return warned or line.startswith("SKIPPED") or "torch operators (" in line or "WARNING" in line

    return [line for line in output.splitlines() if tells(line) and not any(re.search(e, line) for e in expected)]


def _check_memory(results: dict[str, dict[str, Any]]) -> None:
    """Mark a speed piece as failed if its reserved memory is more than 10% outside the range of its dry run."""
    for shape in SHAPES:
        speed, dry = (results.get(f"{kind}: {shape}", {}) for kind in ("speed", "memory by dry run"))
        if speed.get("status") != "ok" or "figures" not in speed or "figures" not in dry:
            continue
        low, high = dry["figures"]["reserved_gib"]
        found = speed["figures"]["memory_gib"]
        if not low * (1 - MEMORY_TOLERANCE) <= found <= high * (1 + MEMORY_TOLERANCE):
            speed["status"] = "failed"
            speed["tail"] = [f"{found:.1f} GiB reserved, but the dry run gives {low:.1f} to {high:.1f}"]


def summary(results: dict[str, dict[str, Any]]) -> list[str]:
    """What to act on: each failure with its command and last lines, then speeds, and memory beside its dry run."""
    lines = []
    for name, found in results.items():
        if found["status"] != "ok":
            lines += [
                f"\n{found['status'].upper()}: {name}",
                f"  {found['command']}",
                *(f"  | {t}" for t in found.get("tail", ())),
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


def _machine(fake: bool) -> list[str]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=_root(), check=False)
    return [
        "fake CUDA" if fake else torch.cuda.get_device_name(0),
        torch.__version__,
        str(torch.version.cuda),
        commit.stdout.strip(),
    ]


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--fake"]
    sys.exit(main(Path(given[0]), fake="--fake" in sys.argv, names=given[1:]))
