"""Packing probe: can this model train on packed rows, and with context parallelism? Measured on a tiny copy of the
config.

Structural rules give good messages for known reasons. The measurement decides all other cases. Two documents in one row
must give the same hidden states as each alone under eager attention of transformers. A row in the token order of
context-parallel ranks must give the same as in its own order. Runs before anything is built. Nothing is cached: each
probe takes about 0.1 s.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import dual_chunks
from automodel_cli.models import transformers_compat
from automodel_cli.models.attention import packed as packed
from automodel_cli.models.builder import part_of
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.context_parallel_layout import Context, OneProcess
from automodel_cli.models.document_masking import dynamic_rope, recurrent_layers
from automodel_cli.models.model_inputs import model_inputs_for
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.probes import isolation, token_mixing
from automodel_cli.models.probes.hidden_states import (
    DOCUMENTS,
    TOLERANCE,
    UNMEASURED,
    first_difference,
    layer_outputs,
    probe_row,
    small_model,
)
from automodel_cli.models.probes.tiny_model import shrink

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Rows = Literal["packed", "padded", "whole"]
"""Contents of rows: several documents; one document and padding; one document."""
# (documents of a row, number of compared tokens). In padded rows, the second document is padding.
_ROWS: dict[Rows, tuple[tuple[tuple[int, ...], int], ...]] = {
    "packed": ((DOCUMENTS, sum(DOCUMENTS)),),
    "padded": (((13, 9), 13), ((9, 13), 9)),
    "whole": (((sum(DOCUMENTS),), sum(DOCUMENTS)),),
}
# Simpler row types, and their overrides.
_SIMPLER: dict[Rows, tuple[tuple[Rows, str], ...]] = {
    "packed": (("padded", "data.packing=none"), ("whole", "data.packing=none train.microbatch_size=1")),
    "padded": (("whole", "train.microbatch_size=1"),),
    "whole": (),
}


def probe_packing(
    hf_config: PretrainedConfig,
    *,
    attention: str = packed.PACKED,
    rows: Rows = "packed",
    trust_remote_code: bool = False,
) -> None:
    """Raise ConfigError with the first differing layer if this attention does not isolate documents.

    Outputs of padding do not matter. The config is not changed. If no tiny copy can be built, the error is
    `not_measured`.
    """
    _reject_layerdrop(hf_config)
    with transformers_compat.quiet():
        reason = _objection(hf_config, attention, rows, trust_remote_code)
        if reason is None:
            return
        fix = _fix(hf_config, attention, rows, trust_remote_code)
    raise ConfigError(
        f"attn_implementation={attention!r} is not supported for {hf_config.model_type} with {rows} rows because "
        f"{reason}",
        code="not_measured" if reason.startswith(UNMEASURED) else "not_supported_by_model",
        keys=("data.packing", "model.attn_implementation"),
        fix=fix,
    )


def _fix(hf_config: PretrainedConfig, attention: str, rows: Rows, trust_remote_code: bool) -> str | None:
    """Return overrides for the closest supported attention and row type."""
    for simpler, how in ((rows, ""), *_SIMPLER[rows]):
        for name in dict.fromkeys((attention, "sdpa", "eager")):
            if (simpler, name) != (rows, attention) and not _objection(hf_config, name, simpler, trust_remote_code):
                return f"{how} model.attn_implementation={name}".strip() if name != attention else how
    return None


def probe_context(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError with the first differing layer if other modules than packed attention and recurrent layers mix
    tokens.

    With context parallelism, every layer sees some tokens of a row in another order. Only these modules communicate
    with other ranks. One process simulates two ranks, whose tokens follow each other.
    """
    packed.register_packed_attention()
    if isolation.select_isolation(hf_config, trust_remote_code=trust_remote_code).by_document:
        raise ConfigError(
            f"context parallelism is not supported for {hf_config.model_type} because its attention runs document by "
            "document on full rows",
            code="not_supported_by_model",
            keys=("mesh.cp_size",),
            fix="mesh.cp_size=1",
        )
    with transformers_compat.quiet():
        try:
            small = shrink(hf_config)
            model = small_model(small, trust_remote_code)
            recurrent_layers.install_document_reset(
                model, token_mixing.state_layer_classes(small, trust_remote_code=trust_remote_code)
            )
            difference, where = _shared_against_whole(model)
        except Exception as error:  # any class of the library may fail in its own method on sizes it never saw
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise ConfigError(
                f"context parallelism is not supported for {hf_config.model_type} because {UNMEASURED} ({reason})",
                code="not_measured",
                keys=("mesh.cp_size",),
                fix="mesh.cp_size=1",
            ) from error
    if difference > TOLERANCE:
        raise ConfigError(
            f"context parallelism is not supported for {hf_config.model_type} because {where} computes other values "
            f"for a sharded sequence (relative difference {difference:.1e})",
            code="not_supported_by_model",
            keys=("mesh.cp_size",),
            fix="mesh.cp_size=1",
        )


class _BothRanks(OneProcess):
    """Simulates two context-parallel ranks in one process. Records the gathered tensors of each layer."""

    owners: tuple[tuple[int, ...], ...] = (tuple(chunk for chunks in dual_chunks(2) for chunk in chunks),)

    def __init__(self) -> None:
        self.gathered: list[Tensor] = []

    def gather(self, x: Tensor) -> Tensor:
        self.gathered.append(x)
        return x


class _OneRank(_BothRanks):
    """One of the two ranks. The tokens of the other rank are those recorded by `_BothRanks`."""

    size, owners = 2, dual_chunks(2)

    def __init__(self, rank: int, both: _BothRanks):
        self.rank, self.gathered = rank, list(both.gathered)

    def gather(self, x: Tensor) -> Tensor:
        everything = self.gathered.pop(0).clone()
        everything[self.rank * len(x) :][: len(x)] = x
        return everything


@torch.no_grad()
def _shared_against_whole(model: PreTrainedModel) -> tuple[float, str]:
    """Return the largest difference relative to the largest hidden value, and the first layer that differs."""
    model.eval()
    model.set_attn_implementation(packed.PACKED)
    dynamic_rope.install_document_rope(model)
    ids_BT = probe_row(model)
    inputs = model_inputs_for(ids_BT, DOCUMENTS)

    def outputs(group: _BothRanks) -> tuple[list[Tensor], Context]:
        context = Context(group, (1, ids_BT.shape[1]), inputs.get("cu_seq_lens_q"), ids_BT.device, group.owners)
        fresh = copy.deepcopy(model)  # some rotary tables have state
        return layer_outputs(fresh, context.local_inputs(ids_BT, inputs["position_ids"]))[0], context

    whole, names = layer_outputs(copy.deepcopy(model), inputs)
    both = _BothRanks()
    shared, context = outputs(both)
    worst = first_difference([context.gather_rows(layer_output) for layer_output in shared], whole, names)
    if worst[0] > TOLERANCE:
        return worst
    halves = [layer_output.chunk(2, 1) for layer_output in shared]
    rank_differences = [
        first_difference(outputs(_OneRank(rank, both))[0], [half[rank] for half in halves], names) for rank in (0, 1)
    ]
    return max([worst, *rank_differences])


def _reject_layerdrop(hf_config: PretrainedConfig) -> None:
    share = getattr(hf_config.get_text_config(), "layerdrop", None) or 0
    if share > 0:
        raise ConfigError(
            f"layerdrop={share} is not supported because ranks that skip different layers would deadlock",
            code="not_supported",
            keys=("model",),
            fix="model.config.layerdrop=0, or layerdrop: 0.0 in the model's config.json",
        )


def _objection(hf_config: PretrainedConfig, attention: str, rows: Rows, trust_remote_code: bool) -> str | None:
    """Return the reason why a part differs from transformers on a tiny copy, built and run as in training, or None."""
    choice = ModelConfig(pretrained="-", attn_implementation=attention, trust_remote_code=trust_remote_code)
    try:
        small = shrink(hf_config)
        model = small_model(small, trust_remote_code)
        part = part_of(copy.deepcopy(small), choice, device="cpu")
        part.model.load_state_dict(model.state_dict())
        measured = [_row_against_documents(model, part, *row) for row in _ROWS[rows]]
        _train_once(part, _ROWS[rows][0][0])
        if dropout := token_mixing.dropout_of(hf_config):
            noisy = copy.deepcopy(small)
            noisy.get_text_config().update(dropout)
            _train_once(part_of(noisy, choice, device="cpu"), _ROWS[rows][0][0])
    except ConfigError as error:
        return error.message
    except Exception as error:  # any class of the library may fail in its own method on sizes it never saw
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return f"{UNMEASURED} ({reason})"
    difference, where = max(measured)
    if difference <= TOLERANCE:
        return None
    if rows == "packed":
        return f"{where} mixes packed documents (relative difference {difference:.1e})"
    return f"{where} differs from the attention of transformers (relative difference {difference:.1e})"


def _train_once(part: ModelPart, documents: tuple[int, ...]) -> None:
    """Run forward and backward once, so that errors of a training step occur here."""
    ids_BT = probe_row(part.model)
    output = part(labels=ids_BT.roll(-1, 1), **model_inputs_for(ids_BT, documents))
    output.logprobs_BT.sum().backward()


@torch.no_grad()
def _row_against_documents(
    model: PreTrainedModel, part: ModelPart, documents: tuple[int, ...], compared: int
) -> tuple[float, str]:
    """Return the largest relative difference of the first `compared` tokens, and the first layer that differs.

    `model` is the transformers model, `part` has its weights.
    """
    ids_BT = probe_row(model)
    apart = []
    for document in ids_BT.split(documents, 1):
        alone = copy.deepcopy(model).eval()  # of its own: some rotary tables remember what they saw
        apart.append(layer_outputs(alone, {"input_ids": document})[0])
    part.eval()
    together, names = layer_outputs(part.model, model_inputs_for(ids_BT, documents))
    part.train()
    want = [torch.cat(outputs, 1)[:, :compared] for outputs in zip(*apart, strict=True)]
    return first_difference([outputs[:, :compared] for outputs in together], want, names)
