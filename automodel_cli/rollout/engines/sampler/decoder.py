"""Access of the sampler to the model that is being trained: pipeline stages, sharded or unsharded.

A decoder runs one forward and returns the logits of selected positions on the rank that samples tokens. It receives
parts (callables like `ModelPart`), groups, and a context that keeps gathered weights.

Shapes: B rows, T tokens, D hidden, V vocabulary, S selected positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.distributed.typed_torch import set_attributes
from automodel_cli.models.document_masking import document_bounds, recurrent_layers
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.probes import token_mixing
from automodel_cli.rollout.engines.sampler.kv_cache import NAME
from automodel_cli.rollout.routed_experts import join_layers

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class DecoderStage:
    """One pipeline stage. `part` is None on ranks that do not own it. `owner` is a rank of the group."""

    owner: int
    part: ModelPart | None


class Decoder:
    """Parts of one model replica, in pipeline order. An unsharded model has one stage with owner 0.

    Args:
        pp_group: its ranks run each forward together, stage by stage. The owner of a stage sends hidden states to the
            next owner. All ranks must make the same calls.
        lockstep_group: ranks whose forwards contain collectives (expert parallelism). A rank without sequences runs
            dummy forwards.
        gathered: context of a phase of generation that keeps gathered weights.
        gathers: whether the first forward of a phase gathers weights, together with other ranks.
        hidden_dtype: dtype that stages send.
        trust_remote_code: whether code of the model repository may run to inspect its recurrent state.
    """

    def __init__(
        self,
        stages: Sequence[DecoderStage],
        device: torch.device,
        *,
        pp_group: dist.ProcessGroup | None = None,
        lockstep_group: dist.ProcessGroup | None = None,
        gathered: Callable[[], AbstractContextManager[None]] | None = None,
        hidden_dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
    ):
        self.stages, self.device = list(stages), device
        self.pp_group, self.lockstep_group = pp_group, lockstep_group
        self.gathers = gathered is not None
        self._gathered, self._hidden_dtype = gathered or nullcontext, hidden_dtype
        self._trust = trust_remote_code
        self.parts = [stage.part for stage in self.stages if stage.part is not None]
        self._rank = 0 if pp_group is None else dist.get_rank(pp_group)

    @classmethod
    def from_part(cls, part: ModelPart, device: torch.device | str = "cpu", **options: Any) -> Decoder:
        """Build a decoder of one part that contains the complete model."""
        return cls([DecoderStage(0, part)], torch.device(device), **options)

    @contextmanager
    def generating(self, states: document_bounds.Runner) -> Iterator[None]:
        """Context of generation: evaluation mode, attention with the KV cache, and recurrent layers with `states`."""
        modules = [module for part in self.parts for module in part.modules()]
        training = [module.training for module in modules]
        before = [part.model.config._attn_implementation for part in self.parts]
        try:
            for part in self.parts:
                part.eval()
                part.model.set_attn_implementation(NAME)
            # Shapes change with every step: compiled layers would be compiled over and over.
            with ExitStack() as stack:
                for part in self.parts:
                    stack.enter_context(part.whole_rows())
                    stack.enter_context(recurrent_layers.run_by(part.model, states))
                stack.enter_context(torch.no_grad())
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(self._gathered())
                yield
        finally:
            for part, name in zip(self.parts, before, strict=True):
                part.model.set_attn_implementation(name)
            for module, mode in zip(modules, training, strict=True):
                module.training = mode

    def new_cache(self) -> object:
        """An empty cache as the family's own generation makes it."""
        return token_mixing.new_cache(self.parts[0].source_config, trust_remote_code=self._trust)

    def logits(self, input_ids_BT: Tensor, position_ids_BT: Tensor, wanted_S: Tensor) -> Tensor | None:
        """Return fp32 logits `[S, V]` of the flat positions `wanted_S` on the rank of the last stage, None
        elsewhere."""
        inputs = {"input_ids": input_ids_BT, "position_ids": position_ids_BT}
        hidden: Tensor | None = None
        for index, stage in enumerate(self.stages):
            if stage.part is not None:
                last = index == len(self.stages) - 1
                with _logits_head(stage.part, wanted_S) if last else nullcontext():
                    output: Tensor = stage.part(hidden if index else None, labels=input_ids_BT, **inputs)
                if last:
                    return output
                hidden = self._hand_on(output, index)
            elif index + 1 < len(self.stages) and self.stages[index + 1].owner == self._rank:
                hidden = self._receive(input_ids_BT, index)
        return None

    def agree(self, drawn_2S: Tensor | None, count: int) -> Tensor:
        """Broadcast the samples of the last stage (tokens and log-probs, float64 `[2, S]`) to every pipeline rank."""
        if self.pp_group is None:
            assert drawn_2S is not None
            return drawn_2S
        if drawn_2S is None:
            drawn_2S = torch.empty(2, count, dtype=torch.float64, device=self.device)
        source = dist.get_global_rank(self.pp_group, self.stages[-1].owner)
        dist.broadcast(drawn_2S, src=source, group=self.pp_group)
        return drawn_2S

    def over_stages(self, layers: Sequence[int], mine: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Return routed experts `[T, L, K]` of all MoE layers, from the layers of each stage. Collective over the
        pipeline, whose ranks have the same samples."""
        everywhere = [(tuple(layers), dict(mine))]
        if self.pp_group is not None:
            everywhere = everywhere * dist.get_world_size(self.pp_group)
            dist.all_gather_object(everywhere, everywhere[0], group=self.pp_group)
        return {index: join_layers([(numbers, by_index[index]) for numbers, by_index in everywhere]) for index in mine}

    def anyone(self, busy: bool) -> bool:
        """Whether a rank in lock-step with this one still has work. Collective over `lockstep_group`."""
        if self.lockstep_group is None:
            return busy
        flag = torch.tensor(int(busy), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.lockstep_group)
        return bool(flag.item())

    def _hand_on(self, hidden_BTD: Tensor, index: int) -> Tensor | None:
        """To the owner of the next stage, which may be this rank."""
        target = self.stages[index + 1].owner
        if target == self._rank:
            return hidden_BTD
        assert self.pp_group is not None
        if self._hidden_dtype is not None:
            hidden_BTD = hidden_BTD.to(self._hidden_dtype)
        dist.send(hidden_BTD.contiguous(), group=self.pp_group, group_dst=target)
        return None

    def _receive(self, input_ids_BT: Tensor, index: int) -> Tensor:
        config = self.parts[0].model.config.get_text_config()
        dtype = self._hidden_dtype or self.parts[0].dtype
        hidden_BTD = torch.empty(*input_ids_BT.shape, config.hidden_size, dtype=dtype, device=self.device)
        assert self.pp_group is not None
        dist.recv(hidden_BTD, group=self.pp_group, group_src=self.stages[index].owner)
        return hidden_BTD


@contextmanager
def _logits_head(part: ModelPart, wanted_S: Tensor) -> Iterator[None]:
    """Replace the head of the part, so that its forward returns logits instead of log-probs. Hooks around the head
    (gathering, autocast) remain active."""
    head = part.head

    def logits(hidden_BTD: Tensor, *not_looked_at: object) -> Tensor:
        logits_SV: Tensor = head.logits(hidden_BTD.flatten(0, 1)[wanted_S])
        return logits_SV

    set_attributes(part, head=logits)
    try:
        yield
    finally:
        part.head = head


def fsdp_gathered(
    parts: Sequence[nn.Module], reshards_after_forward: Callable[[FSDPModule], bool]
) -> Callable[[], AbstractContextManager[None]]:
    """Keep FSDP2 parameters gathered during a phase, so that ranks may run different numbers of forwards. The first
    forward gathers on all ranks (the sampler runs a dummy if a rank has no prompt). The end of the phase frees.
    `reshards_after_forward(module)` is the setting to restore. Needs memory for the unsharded part on every rank."""
    from torch.distributed.fsdp import FSDPModule

    modules = [module for part in parts for module in part.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def gathered() -> Iterator[None]:
        resharding = [module for module in modules if reshards_after_forward(module)]
        for module in resharding:
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
            for module in resharding:
                module.set_reshard_after_forward(True, recurse=False)

    return gathered
