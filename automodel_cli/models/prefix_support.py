"""Prefix probe: can documents share the tokens of a prefix (`Batch.seen`)? Measured on a tiny copy."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from automodel_cli.data.batch import IGNORE_INDEX, NO_RUN, Batch, SeenKeys
from automodel_cli.models import transformers_compat
from automodel_cli.models.attention import packed as packed
from automodel_cli.models.builder import part_of
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.model_inputs import model_inputs_for
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.probes import isolation
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
    from transformers import PretrainedConfig

_NO_SWITCH = 512  # tokens: no document of a probe is as long


def why_not_shared(hf_config: PretrainedConfig, *, trust_remote_code: bool = False) -> str:
    """Return the reason why documents cannot share a prefix (`Batch.seen`), or an empty string.

    Length-dependent rotary tables are treated as one table. The caller must ensure that no text is longer than the
    first table (`dynamic_rope.longest_unswitched`).
    """
    method = isolation.select_isolation(hf_config, trust_remote_code=trust_remote_code)
    if method.by_document:
        return f"the attention of {hf_config.model_type} is the library's own, run document by document"
    if method.classes:
        names = ", ".join(sorted(name.rpartition(".")[2] for name in method.classes))
        return f"{hf_config.model_type} has layers that are run document by document ({names})"
    with transformers_compat.quiet():
        try:
            small = shrink(hf_config, switch=_NO_SWITCH)
            model = small_model(small, trust_remote_code)
            choice = ModelConfig(pretrained="-", trust_remote_code=trust_remote_code)
            part = part_of(copy.deepcopy(small), choice, device="cpu")
            part.model.load_state_dict(model.state_dict())
            difference, where = _prefix_against_copies(part)
        except Exception as error:  # any class of the library may fail in its own method on sizes it never saw
            return f"{UNMEASURED} ({type(error).__name__}: {error})".splitlines()[0][:200]
    if difference <= TOLERANCE:
        return ""
    return f"{where} of {hf_config.model_type} gives them something else (off by {difference:.1e})"


@torch.no_grad()
def _prefix_against_copies(part: ModelPart) -> tuple[float, str]:
    """Compare two documents with a shared prefix and with copies of it: largest difference, and its layer."""
    (long, short), prefix = DOCUMENTS, 5
    ids_T = probe_row(part.model)[0]
    ids_T[long : long + prefix] = ids_T[:prefix]
    bounds, runs = (0, prefix, long, long + short - prefix), (NO_RUN, (0, prefix), (0, prefix))
    positions_T = torch.cat([torch.arange(long), torch.arange(prefix, short)])
    batch = Batch(
        input_ids_BT=torch.cat([ids_T[:long], ids_T[long + prefix :]])[None],
        labels_BT=torch.full((1, bounds[-1]), IGNORE_INDEX),
        position_ids_BT=positions_T[None],
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=long - prefix,
        row_ids_B=torch.zeros(1, dtype=torch.int64),
        seen=SeenKeys.of(bounds, runs),
    )
    part.eval()
    packed, names = layer_outputs(part.model, model_inputs_for(ids_T[None], DOCUMENTS))
    shared, _ = layer_outputs(part.model, batch.model_inputs())
    want = [torch.cat([layer_output[:, :long], layer_output[:, long + prefix :]], 1) for layer_output in packed]
    return first_difference(shared, want, names)
