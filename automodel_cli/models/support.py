"""Can this model train on packed rows, and on rows that ranks share? Measured on a shrunken random copy of the user's
own config, before anything is built.

Cheap structural rules give a good message for known reasons; the measurement decides for everything else: two
documents in one row must give what each gives alone under the library's own eager attention, and a row whose tokens lie
in the order of context-parallel ranks must give what it gives in its own order. Nothing is cached: each takes about
0.1 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import dual_chunks
from automodel_cli.models import attention as packed
from automodel_cli.models import compat
from automodel_cli.models.context import Context
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


def probe_context(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError, naming the layer, when anything but packed attention mixes the tokens of a row.

    Context parallelism shows every layer some tokens of a row, in an order that is not theirs, and only attention knows
    how to reach the others. One process stands in for its two ranks: their tokens one after another.
    """
    packed.register()
    with compat.quiet():
        try:
            model = _small(hf_config, trust_remote_code)
            difference, where = _shared_against_whole(model)
        except Exception as error:  # any class of the library may fail in its own way on sizes it never saw
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            difference, where = float("inf"), f"a small copy of it cannot be measured ({reason}): it"
    if difference > _TOLERANCE:
        raise ConfigError(
            f"{hf_config.model_type} cannot share its rows between ranks: {where} does not give shared rows what it "
            f"gives whole ones (off by {difference:.1e})",
            keys=("mesh.cp_size",),
            fix="mesh.cp_size=1",
        )


class _BothRanks:
    """Two context-parallel ranks in one process: there is nothing to exchange."""

    rank, size, ring = 0, 1, False
    owners = (tuple(chunk for chunks in dual_chunks(2) for chunk in chunks),)

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_results = gather

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x


@torch.no_grad()
def _shared_against_whole(model: Any) -> tuple[float, str]:
    """Largest difference relative to the largest hidden value, and the first layer that differs."""
    model.eval()
    model.set_attn_implementation(packed.PACKED)
    ids_BT = _probe_row(model)
    inputs = model_inputs_for(model, ids_BT, _DOCUMENTS)
    group = _BothRanks()
    context = Context(group, (1, ids_BT.shape[1]), inputs.get("cu_seq_lens_q"), ids_BT.device, group.owners)
    whole, names = _layer_outputs(model, inputs)
    shared, _ = _layer_outputs(model, context.local_inputs(ids_BT, inputs["position_ids"]))
    return _first_difference([context.whole(outputs) for outputs in shared], whole, names)


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

    try:
        model = _small(hf_config, trust_remote_code)
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


def _small(hf_config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    def build(config: PretrainedConfig) -> PreTrainedModel:
        return compat.causal_lm(config, dtype=torch.float32, trust_remote_code=trust_remote_code)

    return build_small(shrink(hf_config), build)


def _probe_row(model: Any) -> Tensor:
    vocab = model.config.get_text_config().vocab_size
    ids_T = torch.randint(3, vocab, (sum(_DOCUMENTS),), generator=torch.Generator().manual_seed(0))
    return ids_T[None]


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
    ids_BT = _probe_row(model)
    model.set_attn_implementation(attention)
    together, names = _layer_outputs(model, model_inputs_for(model, ids_BT, documents))
    model.set_attn_implementation("eager")
    apart = [
        _layer_outputs(model, model_inputs_for(model, document, (document.shape[1],)))[0]
        for document in ids_BT.split(documents, 1)
    ]
    return _first_difference(together, [torch.cat(outputs, 1) for outputs in zip(*apart, strict=True)], names)


def _first_difference(got: list[Tensor], want: list[Tensor], names: list[str]) -> tuple[float, str]:
    where, worst = "the model", 0.0
    for index, name in enumerate(names):
        gap = ((got[index] - want[index]).abs().max() / want[index].abs().max()).item()
        worst = max(worst, gap if gap == gap else float("inf"))
        if worst > _TOLERANCE:
            where = name
            break
    return worst, where


def _layer_outputs(model: Any, inputs: dict[str, Any]) -> tuple[list[Tensor], list[str]]:
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
        hidden = model.base_model(**inputs, use_cache=False)[0]
    finally:
        for handle in handles:
            handle.remove()
    names = [f"layer {i} ({type(layer).__name__})" for i, layer in enumerate(layers)]
    if [tuple(o.shape) for o in outputs] != [tuple(hidden.shape)] * len(layers):
        outputs, names = [], []  # layers with outputs of their own kind: only the end can be compared
    return [*outputs, hidden], [*names, f"a layer of {type(model.base_model).__name__}"]
