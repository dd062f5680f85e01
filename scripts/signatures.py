"""Write the signatures of the calls that this project makes of packages that tests cannot import or do not install.

Read by AST from the packages' own wheels, so nothing of them is imported and no CUDA is needed:

    python scripts/signatures.py tests/vectors/signatures.json                    # download the newest releases
    python scripts/signatures.py tests/vectors/signatures.json deep_ep=FOLDER     # or a wheel or folder at hand

A package that cannot be had keeps what the file says of it. tests/unit/repository/test_signatures.py binds our calls to
what is recorded; AUTOMODEL_SIGNATURES names another file for it, as CI does with one written that day.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

_ATTENTION = "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py"
_DEEP_EP = "deep_ep/buffers/legacy.py"
_VLLM = "vllm/distributed/weight_transfer"
_VLLM_COMPLETION = "vllm/entrypoints/openai/completion/protocol.py"
_VLLM_ONLINE = "vllm/entrypoints/rl/online/api_router.py"
_SGLANG = "sglang/srt/managers/io_struct.py"
_SGLANG_OPTIONS = "sglang/srt/arg_groups/fields"

WHEELS = {
    "transformer_engine": "transformer-engine",
    "megatron_fsdp": "megatron-fsdp",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "fla": "fla-core",
    "vllm": "vllm<0.34",  # what the extra allows, a CUDA build: the one for CPUs comes later
    "sglang": "sglang",
}
"""What to ask an index for. DeepEP has no wheel: its folder is a checkout."""

MEMBERS = {
    "transformer_engine": {
        "DotProductAttention.__init__": _ATTENTION,
        "DotProductAttention.forward": _ATTENTION,
        "Linear.__init__": "transformer_engine/pytorch/module/linear.py",
        "Linear.forward": "transformer_engine/pytorch/module/linear.py",
        "RMSNorm.__init__": "transformer_engine/pytorch/module/rmsnorm.py",
        "ops.RMSNorm.__init__": "transformer_engine/pytorch/ops/basic/rmsnorm.py",  # where the ** of the one above goes
        "autocast.__init__": "transformer_engine/pytorch/quantization.py",
    },
    "megatron_fsdp": {
        "fully_shard_model": "megatron_fsdp/fully_shard.py",
        "MixedPrecisionPolicy": "megatron_fsdp/mixed_precision.py",
        "make_fsdp_dtensor": "megatron_fsdp/param_and_grad_buffer.py",
        "_get_fsdp_tensor_spec": "megatron_fsdp/param_and_grad_buffer.py",
        "update_uneven_dtensor_chunk_metadata": "megatron_fsdp/uneven_dtensor.py",
        "MegatronFSDP.start_param_sync": "megatron_fsdp/megatron_fsdp.py",
        "MegatronFSDP.finish_grad_sync": "megatron_fsdp/megatron_fsdp.py",
        "MegatronFSDP.synchronize_param_gather": "megatron_fsdp/megatron_fsdp.py",
        "MegatronFSDP.install_optimized_model_weights": "megatron_fsdp/megatron_fsdp.py",
        "MegatronFSDP.zero_grad_buffer": "megatron_fsdp/megatron_fsdp.py",
        "MegatronFSDP._replace_param_with_distributed_if_needed": "megatron_fsdp/megatron_fsdp.py",
    },
    "bitsandbytes": {
        "quantize_4bit": "bitsandbytes/functional.py",
        "dequantize_4bit": "bitsandbytes/functional.py",
        "matmul_4bit": "bitsandbytes/autograd/_functions.py",
        "AdamW8bit.__init__": "bitsandbytes/optim/adamw.py",
    },
    "torchao": {
        "AdamW8bit.__init__": "torchao/optim/adam.py",
        "_AdamBase._new_buffer": "torchao/optim/adam.py",
        "OptimState8bit.__init__": "torchao/optim/subclass_8bit.py",
    },
    "fla": {
        "chunk_gated_delta_rule": "fla/ops/gated_delta_rule/chunk.py",
        "fused_recurrent_gated_delta_rule": "fla/ops/gated_delta_rule/fused_recurrent.py",
    },
    "vllm": {
        "WeightTransferTrainerFactory.trainer_init": f"{_VLLM}/factory.py",
        "ParamMeta": f"{_VLLM}/base.py",
        "WeightSource.metadata": f"{_VLLM}/base.py",
        "WeightSource.iter_full": f"{_VLLM}/base.py",
        "NCCLTrainerInitInfo": f"{_VLLM}/nccl_engine.py",
        "IPCTrainerInitInfo": f"{_VLLM}/ipc_engine.py",
        "TrainerInitInfo": f"{_VLLM}/base.py",  # the parent of both, which has `rank`
        "TrainerWeightTransferEngine.send_weights": f"{_VLLM}/base.py",
        **{
            f"VLLMWeightSyncClient.{name}": f"{_VLLM}/base.py"
            for name in (
                "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
            )
        },
        "CompletionRequest": _VLLM_COMPLETION,
        "CompletionResponseChoice": _VLLM_COMPLETION,
        "GenerateRequest": "vllm/entrypoints/scale_out/token_in_token_out/protocol.py",
        "SamplingParams": "vllm/sampling_params.py",
        "WeightVersionSpan": "vllm/outputs.py",
        "pause_generation": _VLLM_ONLINE,
        "init_weight_transfer_engine": _VLLM_ONLINE,
        "update_weights": _VLLM_ONLINE,
        "update_weight_version": _VLLM_ONLINE,
        "GPUModelRunner.reload_weights": "vllm/v1/worker/gpu_model_runner.py",
    },
    "sglang": {
        "SamplingParams": "sglang/srt/sampling/sampling_params.py",
        **dict.fromkeys(
            (
                "GenerateReqInput", "PauseGenerationReqInput", "ContinueGenerationReqInput",
                "UpdateWeightFromDiskReqInput", "UpdateWeightVersionReqInput", "InitWeightsUpdateGroupReqInput",
                "UpdateWeightsFromDistributedReqInput", "BeginWeightUpdateReqInput", "EndWeightUpdateReqInput",
                "ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput",
            ),
            _SGLANG,
        ),
    },
    "deep_ep": {
        f"Buffer.{name}": _DEEP_EP
        for name in (
            "__init__", "get_dispatch_layout", "dispatch", "combine", "get_dispatch_config", "get_combine_config",
        )
    },
}  # fmt: skip
"""By package: functions, methods or dataclasses, and the file that defines them."""

ROUTES = {
    "sglang": ("sglang/srt/entrypoints/http_server.py",),
    "vllm": (
        _VLLM_ONLINE,
        "vllm/entrypoints/openai/completion/api_router.py",
        "vllm/entrypoints/openai/models/api_router.py",
        "vllm/entrypoints/scale_out/token_in_token_out/api_router.py",
        "vllm/entrypoints/serve/dev/cache/api_router.py",
        "vllm/entrypoints/serve/dev/rpc/api_router.py",
        "vllm/entrypoints/serve/dev/sleep/api_router.py",
        "vllm/entrypoints/serve/instrumentator/basic.py",
    ),
}
WORDS = {
    "vllm": {
        **dict.fromkeys(
            (
                "--data-parallel-size", "--dtype", "--enable-expert-parallel", "--enable-return-routed-experts",
                "--enable-sleep-mode", "--generation-config", "--gpu-memory-utilization", "--logprobs-mode",
                "--max-model-len", "--revision", "--tensor-parallel-size", "--trust-remote-code",
                "--weight-transfer-config",
            ),
            "vllm/engine/arg_utils.py",
        ),
        **dict.fromkeys(("--enable-scale-out", "--host", "--port"), "vllm/entrypoints/common/cli_args.py"),
        **dict.fromkeys(
            ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_SERVER_DEV_MODE", "VLLM_USE_V2_MODEL_RUNNER"),
            "vllm/envs.py",
        ),
        "processed_logprobs": "vllm/config/model.py",
        **dict.fromkeys(("nccl", "ipc"), f"{_VLLM}/factory.py"),
    },
    "sglang": {
        "serve": "sglang/cli/main.py",
        "SGLANG_USE_CPU_ENGINE": "sglang/srt/platforms/__init__.py",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "sglang/srt/environ.py",
        **dict.fromkeys(
            ("--context-length", "--dtype", "--model-path", "--revision", "--trust-remote-code"),
            f"{_SGLANG_OPTIONS}/model.py",
        ),
        **dict.fromkeys(("--dp-size", "--ep-size", "--tp-size"), f"{_SGLANG_OPTIONS}/parallel.py"),
        **dict.fromkeys(("--enable-memory-saver", "--enable-return-routed-experts"), f"{_SGLANG_OPTIONS}/exec_.py"),
        **dict.fromkeys(("--host", "--port"), f"{_SGLANG_OPTIONS}/serving.py"),
        "--device": f"{_SGLANG_OPTIONS}/device.py",
        "--mem-fraction-static": f"{_SGLANG_OPTIONS}/schedule.py",
    },
}  # fmt: skip
"""By package: what a command line or an environment says to it, and the file in which that is a string, or a field of a
class for an option."""
RECIPES = "transformer_engine/common/recipe/__init__.py"


def main(target: Path, *given: str) -> None:
    known: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    at_hand = dict(argument.split("=", 1) for argument in given)
    with tempfile.TemporaryDirectory() as folder:
        for package in MEMBERS:
            source = at_hand.get(package) or (_downloaded(package, Path(folder)) if not given else None)
            if source:
                known[package] = recorded(package, Path(source))
    target.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def _downloaded(package: str, folder: Path) -> str | None:
    if package not in WHEELS:
        return None
    into = folder / package
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(into), WHEELS[package]]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        print(f"{package} stays as recorded: {last}", file=sys.stderr)
        return None
    return str(wheels[0])


def recorded(package: str, source: Path) -> dict[str, Any]:
    """What a wheel or a folder says of the members above.

    Raises SystemExit with the files that the package has no more.
    """
    root = source if source.is_dir() else zipfile.Path(source)
    files = {*MEMBERS[package].values(), *ROUTES.get(package, ()), *WORDS.get(package, {}).values()}
    files |= {RECIPES} if package == "transformer_engine" else set()
    if gone := sorted(file for file in files if not (root / file).exists()):
        sys.exit(f"{package}: {source.name} has no {', '.join(gone)}; say in {__file__} where its members are now")
    trees = {file: ast.parse((root / file).read_text(encoding="utf-8")) for file in files}
    found: dict[str, Any] = {"release": "-".join(source.name.split("-")[:2]) if source.is_file() else "main"}
    for member, file in MEMBERS[package].items():
        found[member] = _signature(trees[file], member.split("."))
    if package in ROUTES:
        found["routes"] = sorted(route for file in ROUTES[package] for route in _routes(trees[file]))
    if package in WORDS:
        found["words"] = sorted(word for word, file in WORDS[package].items() if word in _words(trees[file]))
    if package == "transformer_engine":
        found["recipes"] = [node.name for node in trees[RECIPES].body if isinstance(node, ast.ClassDef)]
    return found


def _signature(tree: ast.Module, path: list[str]) -> dict[str, list[str]] | None:
    """Names without `self`: those that must be given, those with a default, those by keyword only, and `**`. None where
    the file has no such member."""
    body: list[ast.stmt] = tree.body
    for name in path[-2:-1]:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == path[-1]:
            decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
            return _of_function(node, bound=len(path) > 1 and "staticmethod" not in decorators)
        if isinstance(node, ast.ClassDef) and node.name == path[-1]:
            return _of_fields(node)
    return None


def _of_function(function: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> dict[str, list[str]]:
    arguments = function.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    num_required = len(positional) - len(arguments.defaults)
    needed = [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    return {
        "required": positional[bound:num_required],
        "optional": positional[max(num_required, bound) :],
        "keyword_required": needed,
        "keyword_only": [a.arg for a in arguments.kwonlyargs if a.arg not in needed],
        "rest": [arguments.kwarg.arg] if arguments.kwarg else [],
    }


def _of_fields(owner: ast.ClassDef) -> dict[str, list[str]]:
    """Of a dataclass, without the fields of its parents."""
    fields = [node for node in owner.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    fields = [node for node in fields if "ClassVar" not in ast.unparse(node.annotation)]
    found: dict[str, list[str]] = {
        "required": [], "optional": [], "keyword_required": [], "keyword_only": [], "rest": [],
    }  # fmt: skip
    for node in fields:
        assert isinstance(node.target, ast.Name)
        given = "" if node.value is None else ast.unparse(node.value)
        has_default = node.value is not None and ("field(" not in given or "default" in given)
        if "kw_only=True" in given:
            found["keyword_only" if has_default else "keyword_required"].append(node.target.id)
        else:
            found["optional" if has_default else "required"].append(node.target.id)
    return found


def _routes(tree: ast.Module) -> list[str]:
    """`/path` of every `@router.get`, `@app.post` and so on."""
    calls = [
        decorator
        for node in tree.body
        if isinstance(node, ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
    ]
    paths = [call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)]
    return [path for path in paths if isinstance(path, str)]


def _words(tree: ast.Module) -> set[str]:
    """Every string, every name that is assigned to, and the option of every field of a class."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assigned = (target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets)
    texts |= {target.id for target in assigned if isinstance(target, ast.Name)}
    fields = (node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
    return texts | {f"--{field.id.replace('_', '-')}" for field in fields if isinstance(field, ast.Name)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
