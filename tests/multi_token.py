"""Tiny checkpoints with layers for multi-token prediction, and what such a model computes, by hand in float64.

A checkpoint is written from a model with so many more layers: what follows the last layer of the model is the decoder
layer of a depth. By hand means: one document at a time, the library's decoder layer called directly, norms as formulas.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.models import transformers_compat
from automodel_cli.models.probes.tiny_model import build_small, shrink
from tests.tiny import NUM_LAYERS, tiny_config

# Names of a depth's own tensors, and of its layer, by spelling: DeepSeek-V3 and GLM-4.5, Qwen3-Next, MiMo.
SPELLINGS = {
    "after": ("model.layers.{n}.", "", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "apart": ("mtp.", "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "mimo": ("model.mtp_layers.{k}.", "", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
}
OWN = ("enorm", "hnorm", "eh_proj", "norm")


@dataclass
class Made:
    """`model`: all layers, those of the depths last, in float64. `own`: of each depth, by the names in `OWN`."""

    folder: Path
    model: PreTrainedModel
    own: list[dict[str, nn.Parameter]]
    hidden_first: bool = False
    zero_centred: bool = False
    copies: dict[str, str] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return len(self.model.model.layers) - len(self.own)


def write(folder: Path, family: str = "deepseek_v3", spelling: str = "after", depths: int = 1, **extra) -> Made:
    """`extra`: fields of the config. The spelling "after" comes with copies of embedding and head."""
    config = tiny_config(family, **{"num_hidden_layers": NUM_LAYERS + depths, **extra})
    return write_config(folder, config, spelling, depths)


def write_config(folder: Path, config, spelling: str, depths: int = 1, *, zero_centred: bool = False) -> Made:
    """`config` has the layers of the depths too."""
    model = build_small(copy.deepcopy(config), lambda c: transformers_compat.causal_lm(c, dtype=torch.float32))
    model.save_pretrained(folder)
    count, width = config.num_hidden_layers - depths, config.hidden_size
    generator = torch.Generator().manual_seed(5)
    prefix, layer, names = SPELLINGS[spelling]
    stored = load_file(folder / "model.safetensors")
    own, written, copies = [], {}, {}
    for k in range(depths):
        here = prefix.format(n=count + k, k=k)
        norms = [(0.0 if zero_centred else 1.0) + 0.3 * torch.randn(width, generator=generator) for _ in range(3)]
        projection = 0.15 * torch.randn(width, 2 * width, generator=generator)
        tensors = dict(zip(OWN, [*norms[:2], projection, norms[2]], strict=True))
        own.append({name: nn.Parameter(t.double()) for name, t in tensors.items()})
        written |= {f"{here}{name}.weight": tensors[own_name] for own_name, name in zip(OWN, names, strict=True)}
        for key in [key for key in stored if key.startswith(f"model.layers.{count + k}.")]:
            written[here + layer + key.removeprefix(f"model.layers.{count + k}.")] = stored.pop(key)
        if spelling == "after":
            head = "lm_head.weight" if "lm_head.weight" in stored else "model.embed_tokens.weight"
            copies |= {
                f"{here}embed_tokens.weight": "model.embed_tokens.weight",
                f"{here}shared_head.head.weight": head,
            }
    written |= {key: stored[table].clone() for key, table in copies.items()}
    save_file(stored | written, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == count + depths:
            fields[name] = value[:count]
    fields["num_hidden_layers"] = count
    (folder / "config.json").write_text(json.dumps(fields))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others know no float64
    return Made(folder, model.double(), own, spelling == "mimo", zero_centred, copies)


def change(folder: Path, key: str) -> None:
    """Add 1 to a tensor of the checkpoint."""
    stored = load_file(folder / "model.safetensors")
    stored[key] += 1
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def hybrid_config(family: str, depths: int = 1):
    """A small config of a family of `tests/hybrids.py` whose added layers are like its last one."""
    from transformers import CONFIG_MAPPING

    config = shrink(CONFIG_MAPPING[family]())
    config.layer_types = [*config.layer_types, *[config.layer_types[-1]] * depths]
    config.num_hidden_layers += depths
    return config


@dataclass
class ByHand:
    loss: float
    mtp_loss: float
    gradients: dict[str, Tensor]


def by_hand(made: Made, batches: Sequence[Batch], loss_weight: float) -> ByHand:
    """The loss of SFT, the mean negative log-likelihood of further labels, and every gradient by the part's names."""
    model, count = made.model, made.num_layers
    weight = sum(int(batch.num_label_tokens) for batch in batches)
    total = torch.zeros((), dtype=torch.float64)
    further, num_further = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        for start, end in itertools.pairwise(bounds):
            ids, labels = batch.input_ids_BT.flatten()[start:end], batch.labels_BT.flatten()[start:end]
            nll, more, n = _document(made, ids, labels, count)
            total, further, num_further = total + nll, further + more, num_further + n
    loss = total / weight
    (loss + loss_weight / len(made.own) * further / weight).backward()
    gradients = {}
    for name, param in model.named_parameters():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if found and int(found[1]) >= count:
            name = f"multi_token.{int(found[1]) - count}.model.model.layers.0.{found[2]}"
        if param.grad is not None:
            gradients[name], param.grad = param.grad, None
    for k, own in enumerate(made.own):
        for name, param in own.items():
            inner = "model.norm" if name == "norm" else name
            gradients[f"multi_token.{k}.model.{inner}.weight"], param.grad = param.grad, None
    return ByHand(float(loss.detach()), float(further.detach() / num_further), gradients)


def _document(made: Made, ids: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
    model, base = made.model, made.model.model
    every, length = base.layers, len(ids)
    positions = torch.arange(length)[None]
    base.layers, config = every[:count], model.config
    before, config.num_hidden_layers = config.num_hidden_layers, count
    hidden = base(input_ids=ids[None], use_cache=False)[0]
    base.layers, config.num_hidden_layers = every, before
    nll = F.cross_entropy(model.lm_head(hidden)[0], labels, ignore_index=IGNORE_INDEX, reduction="sum")
    further, n = hidden.new_zeros(()), 0
    for k, own in enumerate(made.own, start=1):
        # Token t + k beside the hidden state of t: what is left is the first `length - k` places.
        if length <= k:
            break
        embedded = base.embed_tokens(ids[k:])[None]
        hidden = hidden[:, : length - k]
        both = [_norm(made, embedded, own["enorm"]), _norm(made, hidden, own["hnorm"])]
        x = torch.cat(both[::-1] if made.hidden_first else both, -1) @ own["eh_proj"].T
        mask = torch.full((length - k, length - k), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        place = positions[:, : length - k]
        x = every[count + k - 1](
            x,
            attention_mask=mask,
            position_ids=place,
            position_embeddings=base.rotary_emb(x, place),
        )
        hidden = _norm(made, x[0] if isinstance(x, tuple) else x, own["norm"])
        target = labels[k:]
        further = further + F.cross_entropy(
            model.lm_head(hidden)[0], target, ignore_index=IGNORE_INDEX, reduction="sum"
        )
        n += int((target != IGNORE_INDEX).sum())
    return nll, further, n


def _norm(made: Made, x: Tensor, weight: Tensor) -> Tensor:
    normed = x / (x.square().mean(-1, keepdim=True) + made.model.config.rms_norm_eps).sqrt()
    return normed * (weight + 1 if made.zero_centred else weight)
