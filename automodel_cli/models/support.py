"""Can this model train on packed rows? Measured on a shrunken random copy of the user's own config, before anything
is built.

Cheap structural rules give a good message for known reasons; the measurement decides for everything else: two
documents in one row must give what each gives alone under the library's own eager attention. Nothing is cached: it
takes about 0.1 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import attention as packed
from automodel_cli.models import compat
from automodel_cli.models.part import model_inputs_for
from automodel_cli.models.shrink import build_small, shrink

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_ISOLATED = {"full_attention", "sliding_attention", "chunked_attention"}
_STATE = ("conv1d", "A_log", "dt_bias", "short_conv", "recurrent_gate", "rg_lru", "x_proj")
_DOCUMENTS = (13, 9)  # longer than every shrunken window, chunk and index size, or a leak would hide
_TOLERANCE = 1e-4  # of the largest hidden value; a leak is 1e-2 and more


def probe_packing(
    hf_config: PretrainedConfig,
    *,
    attention: str = packed.PACKED,
    packed_rows: bool = True,
    trust_remote_code: bool = False,
) -> None:
    """Raise ConfigError, naming the layer, when this attention does not compute each document as the library does
    alone.

    With `packed_rows=False` (one document a row) only the attention itself is in question, not the isolation. The
    config is not changed. A config that cannot be built small is refused as unknown.
    """
    if packed_rows:
        _refuse_by_rule(hf_config)
    documents = _DOCUMENTS if packed_rows else (sum(_DOCUMENTS),)
    with compat.quiet():
        difference, where = _measure(hf_config, attention, documents, trust_remote_code)
        if difference <= _TOLERANCE:
            return
        others = [name for name in ("sdpa", "eager") if name != attention]
        works = next((o for o in others if _works(hf_config, o, documents, trust_remote_code)), None)
    reason = f"{where} does not give packed documents what they get apart (off by {difference:.1e})"
    if not packed_rows:
        reason = f"{where} does not give what the library's own attention gives (off by {difference:.1e})"
    raise _refusal(hf_config, reason, attention, works)


def _works(hf_config: PretrainedConfig, attention: str, documents: tuple[int, ...], trust_remote_code: bool) -> bool:
    try:
        return _measure(hf_config, attention, documents, trust_remote_code)[0] <= _TOLERANCE
    except ConfigError:
        return False


def _refusal(hf_config: PretrainedConfig, reason: str, attention: str, works: str | None = None) -> ConfigError:
    return ConfigError(
        f"{hf_config.model_type} with attention={attention!r} cannot train on these rows: {reason}",
        keys=("data.packing", "model.attention"),
        fix=f"model.attention={works}" if works else "data.packing=none",
    )


def _leak(hf_config: PretrainedConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"{hf_config.model_type} cannot train on packed rows: {reason}", keys=("data.packing",), fix="data.packing=none"
    )


def _refuse_by_rule(hf_config: PretrainedConfig) -> None:
    """Reasons that the config tells by itself."""
    text = hf_config.get_text_config()
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in _ISOLATED:
            raise _leak(hf_config, f"layer {index} is of type {kind!r}, which carries a state from token to token")
    for field in ("index_topk", "index_head_dim"):
        if getattr(text, field, None):
            raise _leak(hf_config, f"its sparse indexer ({field}) reads an attention mask that packing does not build")


def _measure(
    hf_config: PretrainedConfig, attention: str, documents: tuple[int, ...], trust_remote_code: bool
) -> tuple[float, str]:
    """On the shrunken copy. Refuses what its modules give away, and what cannot be built or run at that size."""

    def build(config: PretrainedConfig) -> PreTrainedModel:
        return compat.causal_lm(config, dtype=torch.float32, trust_remote_code=trust_remote_code)

    try:
        model = build_small(shrink(hf_config), build)
        if len(documents) > 1:
            _refuse_by_modules(hf_config, model)
        if attention == packed.PACKED:
            packed.register()
        return _packed_against_separate(model, attention, documents)
    except ConfigError:
        raise
    except Exception as error:  # any class of the library may fail in its own way on sizes it never saw
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise _refusal(hf_config, f"a small copy of it cannot be measured ({reason})", attention) from error


def _refuse_by_modules(hf_config: PretrainedConfig, model: nn.Module) -> None:
    for name, module in model.named_modules():
        own = {*module._modules, *module._parameters}
        if state := next((s for s in _STATE if s in own), None):
            raise _leak(hf_config, f"{name} ({type(module).__name__}) has {state}: it mixes neighbouring tokens")
        if isinstance(module, nn.Conv1d):
            raise _leak(hf_config, f"{name} is a convolution over tokens")


@torch.no_grad()
def _packed_against_separate(model: Any, attention: str, documents: tuple[int, ...]) -> tuple[float, str]:
    """Largest difference relative to the largest hidden value, and the first layer that differs."""
    model.eval()
    vocab = model.config.get_text_config().vocab_size
    ids_T = torch.randint(3, vocab, (sum(_DOCUMENTS),), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation(attention)
    together, names = _layer_outputs(model, ids_T[None], documents)
    model.set_attn_implementation("eager")
    apart = [_layer_outputs(model, document[None], (len(document),))[0] for document in ids_T.split(documents)]
    where, worst = "the model", 0.0
    for index, name in enumerate(names):
        reference = torch.cat([outputs[index] for outputs in apart], 1)
        gap = ((together[index] - reference).abs().max() / reference.abs().max()).item()
        worst = max(worst, gap if gap == gap else float("inf"))
        if worst > _TOLERANCE:
            where = name
            break
    return worst, where


def _layer_outputs(model: Any, ids_BT: Tensor, documents: tuple[int, ...]) -> tuple[list[Tensor], list[str]]:
    """Hidden states after every decoder layer and of the whole, with a name for each."""
    outputs: list[Tensor] = []
    names: list[str] = []
    layers = max(
        (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList()
    )
    handles = [
        layer.register_forward_hook(lambda _m, _a, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for layer in layers
    ]
    try:
        hidden = model.base_model(**model_inputs_for(model, ids_BT, documents), use_cache=False)[0]
    finally:
        for handle in handles:
            handle.remove()
    names = [f"layer {i} ({type(layer).__name__})" for i, layer in enumerate(layers)]
    if [tuple(o.shape) for o in outputs] != [tuple(hidden.shape)] * len(layers):
        outputs, names = [], []  # layers with outputs of their own kind: only the end can be compared
    return [*outputs, hidden], [*names, f"a layer of {type(model.base_model).__name__}"]
