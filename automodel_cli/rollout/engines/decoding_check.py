"""Check at the start of a run that decoding with a cache gives the log-probs of the model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import one_document
from automodel_cli.models import transformers_compat
from automodel_cli.models.attention.packed import PACKED, packed_attention
from automodel_cli.models.builder import part_of
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.probes import isolation
from automodel_cli.models.probes.tiny_model import build_small, shrink
from automodel_cli.rollout.engines.sampler.decoder import Decoder
from automodel_cli.rollout.engines.sampler.sampler import Sampler
from automodel_cli.rollout.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_PROMPTS, _NEW_TOKENS = (13, 13, 5), (3, 9, 9)  # longer than every window of a shrunken config
_LONGEST = max(_PROMPTS) + max(_NEW_TOKENS)  # the longer check rejects tables that switch in between
_TOLERANCE = 1e-4


@torch.no_grad()
def check_decoding(hf_config: PretrainedConfig, *, attention: str = PACKED, trust_remote_code: bool = False) -> None:
    """Raise ConfigError if the family cannot be decoded with the caches of the sampler.

    Measured on a small copy of the model, built as for training with this attention. Some families bypass the
    attention registry of transformers, or have recurrent state outside its cache classes. Without this check they
    would silently see only one token at a time.
    """
    if isolation.select_isolation(hf_config, attention=attention, trust_remote_code=trust_remote_code).by_document:
        raise _unsupported(
            hf_config, "not_supported_by_model", "its own attention runs one document at a time, without cache slots"
        )
    own = attention if attention == PACKED else "eager"
    choice = ModelConfig(pretrained="-", attn_implementation=own, trust_remote_code=trust_remote_code)

    def build(config: PretrainedConfig) -> PreTrainedModel:
        return transformers_compat.causal_lm(config, dtype=torch.float32, trust_remote_code=trust_remote_code)

    try:
        with transformers_compat.quiet(), torch.random.fork_rng(devices=[]):
            small = shrink(hf_config, switch=_LONGEST)
            model = build_small(small, build)
            part = part_of(copy.deepcopy(small), choice, device="cpu")
            part.model.load_state_dict(model.state_dict())
            difference = _decoding_error(part, trust_remote_code)
    except ConfigError as error:
        raise _unsupported(hf_config, error.code, error.message) from error
    except Exception as error:  # library classes may fail in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise _unsupported(hf_config, "not_measured", f"a small copy fails ({reason})") from error
    if not difference <= _TOLERANCE:
        raise _unsupported(
            hf_config,
            "not_supported_by_model",
            f"log-probs of incremental decoding and of one forward pass differ by {difference:.1e}",
        )


def _unsupported(hf_config: PretrainedConfig, code: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the sampler does not support {hf_config.model_type}: {reason}",
        code=code,
        keys=("rollout.engine",),
        fix="rollout=hf",
    )


def _decoding_error(part: ModelPart, trust_remote_code: bool) -> float:
    """Return the largest difference between log-probs of incremental decoding and of one forward pass. The first two
    samples share a prompt. The first sample ends early, so the second moves into its slot and the third starts."""
    part.eval()
    vocab = part.model.config.get_text_config().vocab_size
    prompts = [torch.arange(3, 3 + length).remainder(vocab).tolist() for length in _PROMPTS]
    decoder = Decoder.from_part(part, trust_remote_code=trust_remote_code)
    sampler = Sampler(decoder, packed_attention, stop_token_ids=[], max_num_seqs=2)
    completions = sampler.generate(prompts, SamplingParams(seed=0), limits=_NEW_TOKENS)
    worst = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        batch = one_document([*prompt, *completion.tokens])
        whole_T = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0, len(prompt) - 1 : -1]
        worst = max(worst, (whole_T - torch.tensor(completion.logprobs)).abs().max().item())
    return worst
