"""One family through a run of the default precision: load, FSDP2 with bf16 compute, one step, export, reload.

The ranks are gloo processes on the CPU. Parameters are float32 and the parallelizer's defaults compute in bfloat16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from automodel_cli.data.batch import Batch
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.fsdp2.config import FSDP2Config, MixedPrecision
from automodel_cli.launch.fork_server import RankFailure, launch
from automodel_cli.models import transformers_compat
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.probes.tiny_model import build_small, shrink
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.batches import packed_batch, token_row
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.training.optimizers.build import build_optimizer
from automodel_cli.training.optimizers.nodes import AdamW
from automodel_cli.training.stages import Stages
from automodel_cli.training.step import train_step

RANKS = 2
FLOAT32 = "parallelizer.mp_policy.param_dtype=float32"
_LR, _TOKENS, _SLACK = 0.02, 24, 3.0
"""One step of this rate moves log-probs by far more than bfloat16 rounds them."""


class TrainingError(RuntimeError):
    """A run in the default precision fails, or its export is another model than the trained one."""


def check_training(config: PretrainedConfig, seconds: int) -> None:
    """Raise TrainingError where one of the steps fails, or takes longer than `seconds`."""
    small = shrink(config)
    with tempfile.TemporaryDirectory() as folder:
        build_small(small, _library_model).save_pretrained(Path(folder, "base"))
        try:
            differences = launch(train_and_export, RANKS, folder, timeout=seconds)
        except RankFailure as error:
            reason = _last_line(str(error))
            if reason == _failure_of(train_library_alone, seconds, folder):
                other = "" if _failure_of(train_and_export, seconds, folder, None) else f" (works with: {FLOAT32})"
                reason = f"the library's own model fails alike under FSDP2: {reason}{other}"
            raise TrainingError(reason) from error
        base, trained, moved = differences
        if not (trained <= _SLACK * base + 1e-3 and trained < moved / 2):
            raise TrainingError(
                f"mean |log-prob difference| between the trained model and its export {trained:.1e}, between bfloat16 "
                f"and float32 {base:.1e}, by the step {moved:.1e}"
            )


def train_and_export(
    rank: int, world: int, folder: str, param_dtype: str | None = "bfloat16"
) -> tuple[float, float, float]:
    """Mean |log-prob difference| of base in bf16 and fp32, of trained model and export, of trained model and base."""
    config = ModelConfig(pretrained=f"{folder}/base")
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    part = build_part(config)
    parallelizer = FSDP2Config(mp_policy=MixedPrecision(param_dtype=param_dtype))
    stages = build_stages(part, mesh, None, parallelizer, num_microbatches=1)
    for local in stages.parts:
        load_weights(local, config, device="cpu", seed=0)  # type: ignore[arg-type]
    batch = packed_batch([[token_row(_TOKENS, seed=rank)]])
    before = _logprobs(stages, batch)
    optimizer = build_optimizer(AdamW(lr=_LR), stages.parts)
    train_step(stages, [batch], SFT(), optimizer, mesh, max_grad_norm=1.0)
    after = _logprobs(stages, batch)
    export_hf(stages.parts, config, None, f"{folder}/export")  # type: ignore[arg-type]
    dist.barrier()
    base, export = (_of_library(f"{folder}/{name}", batch) for name in ("base", "export"))
    pairs = ((before, base), (after, export), (after, before))
    found = torch.stack([(a - b).abs().mean() for a, b in pairs])
    dist.all_reduce(found)
    return tuple((found / world).tolist())


def train_library_alone(rank: int, world: int, folder: str) -> None:
    """Forward and backward of the library's own model under FSDP2, with nothing of this package."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32, attn_implementation="eager")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [m for m in loaded.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(module, mp_policy=policy)
    fully_shard(loaded, mp_policy=policy)
    ids = token_row(_TOKENS, seed=rank)[None]
    loaded.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def _failure_of(function: Callable[..., object], seconds: int, *args: object) -> str | None:
    try:
        launch(function, RANKS, *args, timeout=seconds)
    except RankFailure as error:
        return _last_line(str(error))
    return None


def _library_model(config: PretrainedConfig) -> PreTrainedModel:
    return transformers_compat.causal_lm(config, dtype=torch.float32)


def _logprobs(stages: Stages, batch: Batch) -> Tensor:
    return stages.forward([batch], lambda output, _: output.logprobs_BT[0, :-1])[0].float()


@torch.no_grad()
def _of_library(folder: str, batch: Batch) -> Tensor:
    """By the library's own model in float32, with nothing of this package."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits = loaded(input_ids=batch.input_ids_BT, use_cache=False).logits[0, :-1]
    labels = batch.labels_BT[0, :-1, None]
    found: Tensor = logits.float().log_softmax(-1).gather(-1, labels)[:, 0]
    return found


def _last_line(text: str) -> str:
    """The error of a rank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    own = [line for line in errors if "closed by peer" not in line]  # not what a rank says of another that is gone
    return (own or errors or lines)[-1]
