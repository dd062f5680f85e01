"""Every call that we make of a package that tests cannot run fits what the package's released files say it takes.

Calls are found in our source by what they call. The file of signatures: scripts/signatures.py.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from automodel_cli.rollout.weight_sync import update_requests
from tests.signatures import SIGNATURES, bind

ROOT = Path(__file__).parents[3]
MEGATRON = "automodel_cli/distributed/strategies/megatron_fsdp"
OPTIMIZERS = "automodel_cli/training/optimizers"
TRANSFER = "automodel_cli/rollout/weight_sync/transports.py"


@dataclass(frozen=True)
class Called:
    """Where `file` calls something that reads `as_`, it is `member` of `package`, or of several whose fields add up."""

    package: str
    member: str
    file: str
    as_: str
    parent: str | None = None

    def __str__(self) -> str:
        return f"{self.package}: {self.as_}"


def _wrapped(*names: str) -> list[Called]:
    """Calls of the package's wrapper, which our code holds as `wrapped` or gets from `self._wrapped`."""
    return [Called("megatron_fsdp", f"MegatronFSDP.{name}", f"{MEGATRON}/handle.py", f"*.{name}") for name in names]


CALLED = [
    Called("bitsandbytes", "quantize_4bit", "automodel_cli/models/precision/nf4.py", "quantize_4bit"),
    Called("bitsandbytes", "dequantize_4bit", "automodel_cli/models/precision/nf4.py", "dequantize_4bit"),
    Called("bitsandbytes", "matmul_4bit", "automodel_cli/models/precision/nf4.py", "matmul_4bit"),
    Called("bitsandbytes", "AdamW8bit.__init__", "automodel_cli/training/optimizers/nodes.py", "kind"),
    Called("torchao", "AdamW8bit.__init__", "automodel_cli/training/optimizers/nodes.py", "kind"),
    Called("torchao", "_AdamBase._new_buffer", f"{OPTIMIZERS}/torchao_adamw.py", "self._new_buffer"),
    Called("megatron_fsdp", "fully_shard_model", f"{MEGATRON}/sharding.py", "megatron_fsdp.fully_shard_model"),
    Called("megatron_fsdp", "MixedPrecisionPolicy", f"{MEGATRON}/sharding.py", "megatron_fsdp.MixedPrecisionPolicy"),
    Called("megatron_fsdp", "_get_fsdp_tensor_spec", f"{MEGATRON}/compat.py", "package._get_fsdp_tensor_spec"),
    Called(
        "megatron_fsdp", "update_uneven_dtensor_chunk_metadata", f"{MEGATRON}/compat.py",
        "update_uneven_dtensor_chunk_metadata",
    ),
    Called(
        "megatron_fsdp", "MegatronFSDP._replace_param_with_distributed_if_needed", f"{MEGATRON}/compat.py",
        "wrapped._replace_param_with_distributed_if_needed",
    ),
    *_wrapped("start_param_sync", "finish_grad_sync", "synchronize_param_gather", "install_optimized_model_weights",
              "zero_grad_buffer"),
    Called("deep_ep", "Buffer.__init__", "automodel_cli/distributed/expert_parallel/deep_ep.py", "Buffer"),
    *(
        Called("deep_ep", f"Buffer.{name}", "automodel_cli/distributed/expert_parallel/deep_ep.py", f"*.{name}")
        for name in ("get_dispatch_layout", "dispatch", "combine", "get_dispatch_config", "get_combine_config")
    ),
    Called("vllm", "WeightTransferTrainerFactory.trainer_init", TRANSFER, "*.trainer_init"),
    Called("vllm", "ParamMeta", TRANSFER, "ParamMeta"),
    Called("vllm", "NCCLTrainerInitInfo", TRANSFER, "NCCLTrainerInitInfo", "TrainerInitInfo"),
    Called("vllm", "IPCTrainerInitInfo", TRANSFER, "IPCTrainerInitInfo", "TrainerInitInfo"),
]  # fmt: skip


@pytest.mark.parametrize("called", CALLED, ids=str)
def test_our_call_is_one_that_the_newest_release_takes(called: Called) -> None:
    calls = _calls((ROOT / called.file).read_text(), called.as_)
    assert calls, f"{called.file} does not call {called.as_} any more: this row has lost its reason"
    for positional, keywords in calls:
        keywords -= _fields_of(called.package, called.parent)
        bind(called.package, called.member, *positional, **dict.fromkeys(keywords))


def _calls(source: str, text: str) -> list[tuple[list[str], set[str]]]:
    """(positional arguments, names of keywords) of each call of what reads `text`; `*.name` is any object's method."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        callee = ast.unparse(node.func)
        if callee != text and not (text.startswith("*.") and callee.endswith(text[1:])):
            continue
        assert not any(isinstance(a, ast.Starred) for a in node.args), f"{text}: arguments that no reader can count"
        found.append(([ast.unparse(a) for a in node.args], {k.arg for k in node.keywords if k.arg is not None}))
    return found


def _fields_of(package: str, parent: str | None) -> set[str]:
    kinds = ("required", "optional", "keyword_required", "keyword_only")
    return set() if parent is None else {name for kind in kinds for name in SIGNATURES[package][parent][kind]}


def test_the_correction_of_megatron_fsdp_takes_what_the_function_that_it_replaces_takes() -> None:
    (ours,) = [
        node
        for node in ast.parse((ROOT / MEGATRON / "compat.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "_make_fsdp_dtensor"
    ]
    recorded = SIGNATURES["megatron_fsdp"]["make_fsdp_dtensor"]
    assert [a.arg for a in ours.args.args] == [*recorded["required"], *recorded["optional"]]


def test_what_vllm_asks_of_a_weight_source_is_what_ours_has() -> None:
    for method in ("metadata", "iter_full"):
        bind("vllm", f"WeightSource.{method}")


def test_what_vllm_calls_of_a_client_is_what_ours_has() -> None:
    prefix = "VLLMWeightSyncClient."
    members = [member for member in SIGNATURES["vllm"] if member.startswith(prefix)]
    assert len(members) == 4
    for member in members:
        ours = inspect.signature(getattr(update_requests.UpdateClient, member.removeprefix(prefix))).parameters
        recorded = SIGNATURES["vllm"][member]
        assert list(ours) == ["self", *recorded["required"], *recorded["optional"]]


@pytest.mark.parametrize(
    ("package", "least", "num_variables", "more"),
    [("vllm", 13, 3, {"nccl", "ipc", "processed_logprobs"}), ("sglang", 13, 2, {"serve"})],
)
def test_the_words_that_start_a_server_are_in_its_files(
    package: str, least: int, num_variables: int, more: set[str]
) -> None:
    source = (ROOT / f"automodel_cli/rollout/engines/servers/{package}_servers.py").read_text()
    said = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    options = {text for text in said if isinstance(text, str) and text.startswith("--")}
    prefix = f"{package.upper()}_"
    variables = {text.split("=")[0] for text in said if isinstance(text, str) and text.startswith(prefix)}
    assert len(options) >= least and len(variables) == num_variables
    assert options | variables | more <= set(SIGNATURES[package]["words"])


@pytest.mark.parametrize(
    ("package", "files", "least"),
    [
        (
            "vllm",
            ("weight_sync/transports", "weight_sync/update_requests", "engines/servers/vllm", "engines/servers/openai"),
            16,
        ),
        ("sglang", ("engines/servers/sglang", "weight_sync/broadcast"), 11),
    ],
    ids=["vllm", "sglang"],
)
def test_the_paths_that_we_ask_are_routes_of_the_server(package: str, files: tuple[str, ...], least: int) -> None:
    sources = [(ROOT / f"automodel_cli/rollout/{name}.py").read_text() for name in files]
    texts = [
        node.value.partition("?")[0]
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    paths = {text for text in texts if text.startswith("/") and text[1:].replace("/", "_").isidentifier()}
    assert len(paths) >= least
    assert paths <= set(SIGNATURES[package]["routes"])


@pytest.mark.parametrize(
    ("line", "member"),
    [
        ('"/init_weights_update_group"', "InitWeightsUpdateGroupReqInput"),
        ('"/update_weights_from_distributed"', "UpdateWeightsFromDistributedReqInput"),
    ],
)
def test_what_a_group_is_told_are_fields_of_sglang(line: str, member: str) -> None:
    """The bodies that no double takes; what they take is bound where it arrives (servers/test_sglang)."""
    tree = ast.parse((ROOT / "automodel_cli/rollout/weight_sync/broadcast.py").read_text())
    assert line.strip('"') in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    bodies = [
        {key.value for key in node.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict) and node.keys
    ]
    of_member = set(SIGNATURES["sglang"][member]["required"])
    (body,) = (keys for keys in bodies if of_member <= keys)
    bind("sglang", member, **dict.fromkeys(map(str, body)))


@pytest.mark.parametrize("kernel", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_flash_linear_attention_takes_what_the_library_gives_its_kernels(kernel: str) -> None:
    """`transformers` calls them with queries, keys and values in the places of its own functions."""
    spec = importlib.util.find_spec("transformers.models.qwen3_next.modeling_qwen3_next")
    assert spec is not None and spec.origin is not None
    name = {"fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule"}.get(kernel, f"torch_{kernel}")
    calls = _calls(Path(spec.origin).read_text(), name)
    assert calls
    for positional, keywords in calls:
        bind("fla", kernel, *positional, **dict.fromkeys(keywords))


def test_a_file_that_a_release_has_moved_is_named_with_its_package(tmp_path: Path) -> None:
    wheel = tmp_path / "fla_core-9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fla/ops/gated_delta_rule/chunk.py", "def chunk_gated_delta_rule(q, k, v): ...")
    command = [sys.executable, ROOT / "scripts" / "signatures.py", tmp_path / "signatures.json", f"fla={wheel}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "signatures.json").exists()
    gone = "fla/ops/gated_delta_rule/fused_recurrent.py"
    assert done.stderr.startswith(f"fla: {wheel.name} has no {gone}; say in "), done.stderr

    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(gone, "def fused_recurrent_gated_delta_rule(q, *, scale=None): ...")
    subprocess.run(command, check=True)
    recorded = json.loads((tmp_path / "signatures.json").read_text())["fla"]
    assert recorded["chunk_gated_delta_rule"]["required"] == ["q", "k", "v"]
    assert recorded["fused_recurrent_gated_delta_rule"]["keyword_only"] == ["scale"]
