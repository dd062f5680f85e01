"""Bytes read and memory of every rank while a checkpoint is loaded, against the share that the layout should give it.

    python scripts/measure_loading.py [--family qwen3_moe] [--hidden 512] [--ranks 8] [mesh.pp_size=2 mesh.ep_size=4]

Writes a random checkpoint of the family to a temporary folder, then builds, cuts, parallelises and loads it on forked
CPU ranks as a run does, and prints one row a rank. "fair share" is the file over the ranks that hold different
bytes of it: 1/n under FSDP2 alone; a pipeline adds what both ends hold of a tied table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from automodel_cli.distributed.config import FSDP2Config, MixedPrecision
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.launch.fork_server import launch_all
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.metrics.peak_memory import GIB, peak_memory_gib
from automodel_cli.training.stages import SingleStage

MIB = 2**20
FP32 = MixedPrecision(param_dtype=None, reduce_dtype=None)


def fields(family: str, hidden: int, layers: int) -> dict:
    """A config of the family whose weight is mostly experts, as in the real ones."""
    common = {
        "model_type": family,
        "vocab_size": 8192,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": hidden // 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    experts = {
        "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": hidden},
        "gpt_oss": {"num_local_experts": 16, "intermediate_size": hidden},
        "llama": {},
    }
    return common | experts[family]


def load(rank: int, world: int, folder: str, mesh_config: MeshConfig) -> tuple[int, int, float]:
    """(bytes read, bytes of parameters held, growth of the peak memory) of this rank."""
    config = ModelConfig(pretrained=folder)
    mesh = build_mesh(mesh_config.resolve(world), "cpu")
    part, parallelizer = build_part(config), FSDP2Config(mp_policy=FP32)
    if mesh.layout.pp > 1:
        stages = build_stages(part, mesh, PipelineConfig(), parallelizer, num_microbatches=world)
    else:
        stages = SingleStage(parallelize(part, mesh, parallelizer))
    cpu = torch.device("cpu")
    before = peak_memory_gib(cpu)
    read = sum(load_weights(p, config, device=cpu, seed=0).num_bytes_read for p in stages.parts)
    held = sum(p.to_local().nbytes for own in stages.parts for p in own.parameters())
    return read, held, (peak_memory_gib(cpu) - before) * GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen3_moe", choices=["qwen3_moe", "gpt_oss", "llama"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("sizes", nargs="*", default=["mesh.pp_size=2", "mesh.ep_size=4"], metavar="mesh.SIZE=N")
    args = parser.parse_args()
    sizes = {key.removeprefix("mesh."): int(value) for key, value in (size.split("=") for size in args.sizes)}
    with tempfile.TemporaryDirectory() as folder:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        about = fields(args.family, args.hidden, args.layers)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[about.pop("model_type")](**about), dtype=torch.float32)
        model.save_pretrained(folder, max_shard_size="64MB")
        del model
        total = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        rows = launch_all(load, args.ranks, folder, MeshConfig(**sizes))
    if args.json:
        print(
            json.dumps(
                {"file_bytes": total, "ranks": [dict(zip(("read", "held", "peak"), r, strict=True)) for r in rows]}
            )
        )
        return
    print(f"{args.family}, {total / MIB:.0f} MiB on disk, {args.ranks} ranks: {' '.join(args.sizes)}")
    print("rank  read [MiB]  of the file  held [MiB]  peak above the built model [MiB]")
    for rank, (read, held, peak) in enumerate(rows):
        print(f"{rank:>4}  {read / MIB:10.1f}  {read / total:11.1%}  {held / MIB:10.1f}  {peak / MIB:10.1f}")
    print(
        f"fair share: {1 / args.ranks:.1%}; read by all ranks together: {sum(r for r, _, _ in rows) / total:.3f} files"
    )


if __name__ == "__main__":
    main()
