"""Generation engines on a run's own model: what the recipes hand to `rollout`, which knows no model and no mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from automodel_cli.models.attention import packed_attention
from automodel_cli.pipelining.torch_compat import reshards_after_forward
from automodel_cli.rollout.decoder import Decoder, Stage, fsdp_gathered
from automodel_cli.rollout.sampler import Sampler

if TYPE_CHECKING:
    from automodel_cli.distributed.mesh import Mesh
    from automodel_cli.training.stages import Stages


def build_sampler(stages: Stages, mesh: Mesh, *, stop_token_ids: list[int], **options: Any) -> Sampler:
    """A `Sampler` on the live weights of `stages` under any layout; `options` are the sampler's own.

    Ranks of one pipeline, tensor- or context-parallel group must pass the same prompts; data-parallel ranks pass their
    own, as many as they have. Collective over the pipeline.
    """
    return Sampler(build_decoder(stages, mesh), packed_attention, stop_token_ids=stop_token_ids, **options)


def build_decoder(stages: Stages, mesh: Mesh) -> Decoder:
    """See `build_sampler`."""
    parts = stages.parts
    sharded = any(isinstance(module, FSDPModule) for part in parts for module in part.modules())
    options: dict[str, Any] = {
        "gathered": fsdp_gathered(parts, reshards_after_forward) if sharded else None,
        "lockstep_group": mesh.ep.get_group() if mesh.ep is not None else None,
    }
    if mesh.layout.pp == 1:
        return Decoder.whole(parts[0], mesh.device, **options)
    local: Any = stages  # AutoPipeline: the protocol does not tell which stages of the pipeline are here
    group = mesh.pp.get_group()
    mine = {stage.stage_index: part for stage, part in zip(local.info.stages, parts, strict=True)}
    everywhere: list[list[int]] = [[] for _ in range(mesh.layout.pp)]
    dist.all_gather_object(everywhere, list(mine), group=group)
    owners = {index: rank for rank, indices in enumerate(everywhere) for index in indices}
    return Decoder(
        [Stage(owners[index], mine.get(index)) for index in range(len(owners))],
        mesh.device,
        pp_group=group,
        hidden_dtype=local.info.stages[0].boundary_dtype,
        **options,
    )
