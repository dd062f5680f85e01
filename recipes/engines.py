"""Generation engines on a run's own model: what the recipes hand to `rollout`, which knows no model and no mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import one_document
from automodel_cli.models import compat
from automodel_cli.models.attention import PACKED, packed_attention, register
from automodel_cli.models.head import HeadKind
from automodel_cli.models.part import ModelPart
from automodel_cli.models.shrink import build_small, shrink
from automodel_cli.pipelining.torch_compat import reshards_after_forward
from automodel_cli.rollout.decoder import Decoder, Stage, fsdp_gathered
from automodel_cli.rollout.engine import SamplingParams
from automodel_cli.rollout.sampler import Sampler

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from automodel_cli.distributed.mesh import Mesh
    from automodel_cli.training.stages import Stages

_PROMPTS, _NEW_TOKENS = (13, 5), 9  # longer than every window of a shrunken config
_TOLERANCE = 1e-4


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


@torch.no_grad()
def check_decoding(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError when this family cannot be decoded through the sampler's cache: measured, on a small copy.

    Families whose attention does not go through the library's registry, or that carry another state from token to
    token, would silently see one token at a time.
    """

    def build(config: PretrainedConfig) -> PreTrainedModel:
        return compat.causal_lm(config, dtype=torch.float32, trust_remote_code=trust_remote_code)

    try:
        with compat.quiet(), torch.random.fork_rng(devices=[]):
            difference = _decoding_error(build_small(shrink(hf_config), build))
    except Exception as error:  # any class of the library may fail in its own way
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise _refusal(hf_config, f"a small copy of it fails ({reason})") from error
    if not difference <= _TOLERANCE:
        raise _refusal(
            hf_config, f"token by token it gives other log-probs than the whole sequence (off by {difference:.1e})"
        )


def _refusal(hf_config: PretrainedConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"the sampler cannot generate with {hf_config.model_type}: {reason}", keys=("rollout",), fix="rollout=hf"
    )


def _decoding_error(model: PreTrainedModel) -> float:
    """Largest difference between log-probs drawn token by token and those of one forward."""
    register()
    model.set_attn_implementation(PACKED)
    part = ModelPart(model, HeadKind("generic"))
    part.eval()
    vocab = model.config.get_text_config().vocab_size
    prompts = [torch.arange(3, 3 + length).remainder(vocab).tolist() for length in _PROMPTS]
    sampler = Sampler(Decoder.whole(part), packed_attention, stop_token_ids=[], num_slots=len(prompts))
    worst = 0.0
    for prompt, completion in zip(
        prompts, sampler.generate(prompts, SamplingParams(max_new_tokens=_NEW_TOKENS, seed=0)), strict=True
    ):
        batch = one_document([*prompt, *completion.tokens])
        whole_T = part(labels=batch.labels_BT, **batch.model_inputs())[0, len(prompt) - 1 : -1]
        worst = max(worst, (whole_T - torch.tensor(completion.logprobs)).abs().max().item())
    return worst
