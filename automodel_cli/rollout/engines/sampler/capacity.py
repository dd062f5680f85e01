"""Number of sequences that the sampler decodes together, if `max_num_seqs` is null."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from automodel_cli.distributed.mesh import Mesh

_MOST = 256
_SHARE = 8  # of the rank's memory, its part for the cache
_CACHE_BYTES = 4  # of one number of the cache, at most
_LOGIT_BYTES = 32  # bytes per vocabulary entry during sampling: logits, log-probs, and float64 cumulative sums


def max_num_seqs(hf_config: PretrainedConfig, seq_len: int, mesh: Mesh, state_bytes: int = 0) -> int:
    """Return how many sequences of `seq_len` tokens fit into an eighth of a rank's memory, from 1 to 256.

    The number is the same on every rank. `state_bytes` is the recurrent state of a sequence on this rank. Total memory
    is used instead of free memory, so that a resumed run decodes bitwise identically. Collective.
    """
    config = hf_config.get_text_config()
    # Example: 32 layers, 8 KV heads of width 128, 4,096 tokens. 2 * 8 * 128 = 2,048 numbers per token and layer, in
    # float32 1 GiB per sequence. An eighth of 80 GiB has room for 9.
    layers = -(-config.num_hidden_layers // mesh.layout.pp)
    of_slot = seq_len * layers * cached_numbers(config) * _CACHE_BYTES
    of_slot += state_bytes + config.vocab_size * _LOGIT_BYTES
    room = torch.tensor(_memory(mesh.device) // _SHARE // of_slot, device=mesh.device)
    dist.all_reduce(room, op=dist.ReduceOp.MIN)
    return min(max(int(room), 1), _MOST)


def cached_numbers(config: PretrainedConfig) -> int:
    """Return an upper limit of the cached numbers per token in one layer. Latent attention caches the inputs of its
    heads. A model without attention heads caches none."""
    heads = getattr(config, "num_attention_heads", 0)
    if getattr(config, "kv_lora_rank", None):  # only configs of latent attention have it
        return int(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return int(2 * width * (getattr(config, "num_key_value_heads", None) or heads))


def _memory(device: torch.device) -> int:
    """Return the memory of the device in bytes. On a CPU, the share of this rank."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here
