"""The package's own rank launcher, with pytest and the families of the tests warm in its server. Use it from here.

So are PEFT and torch's compiler, half a second and a whole one of each rank that has adapters or compiles.
"""

from __future__ import annotations

from automodel_cli.launch.fork_server import RankFailure, launch, launch_all, preload

preload(
    "pytest",
    "peft",
    "torch._inductor.compile_fx",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_moe", "gpt_oss", "deepseek_v3", "gemma3")),
    "tests.dist.warmed",
)

__all__ = ["RankFailure", "launch", "launch_all"]
