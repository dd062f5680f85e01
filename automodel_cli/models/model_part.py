"""The module a rank owns: an unmodified Hugging Face model and the head that turns its hidden states into
`HeadOutput`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, ON_HOST, OnHost, further
from automodel_cli.data.head_output import LOGPROBS, HeadOutput, HeadRequest
from automodel_cli.distributed.expert_parallel.router_replay import RoutedLayers, choosing
from automodel_cli.models.attention.packed import PACKED
from automodel_cli.models.context_parallel_layout import Context, ContextGroup, local_length
from automodel_cli.models.document_masking import recurrent_layers
from automodel_cli.models.lm_head.head import Head, HeadKind
from automodel_cli.models.lm_head.value_head import ValueHead
from automodel_cli.models.model_inputs import ROUTED, accepted_by
from automodel_cli.models.mtp.layers import Depth, MultiToken, tokens_further

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from automodel_cli.models.hub.multimodal_backbone import BackboneMapping
    from automodel_cli.models.mtp.key_mapping import DepthNames

_PREFIX = "model."


class ModelPart(nn.Module):
    """One forward for every objective: batch in, `HeadOutput` out.

    The child `model` is the library's own object, so a parameter's name is "model." + its hub name (`hub_name` takes
    that back, and an adapter's wrapping too). Wrap the whole part for data parallelism, and keep the output
    embeddings in its root group: the head reads their weight directly.
    `hub_dtype` is what the checkpoint was stored in, the default dtype of exports. `source_config` is the library's
    config as it was read, before attention, dtype or caching were set on the model's own copy. `unclaimed`: keys of the
    checkpoint for which the whole model has no place, once loaded; `within`: where the model is in the composite
    that the checkpoint is of. `routing`: set where the experts of a token may be given (`Batch.model_inputs`).
    `unties_head`: an adapter changes the head of a whole model whose table is the embedding's too, so that exports and
    replicas need a config without the tie (`untied`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kind: HeadKind,
        *,
        chunk_size: int | None = None,
        hub_dtype: torch.dtype | None = None,
        source_config: PretrainedConfig | None = None,
    ):
        super().__init__()
        self.model = model
        self.head = Head(model, kind, chunk_size)
        self.value_head: ValueHead | None = None
        self.multi_token: MultiToken | None = None
        self.depth_names: DepthNames | None = None
        self.hub_dtype = hub_dtype or model.dtype
        self.source_config = source_config or copy.deepcopy(model.config)
        self.unclaimed: tuple[str, ...] = ()
        self.within: BackboneMapping | None = None
        self.routing: RoutedLayers | None = None
        self.unties_head = False
        self._context_group: ContextGroup | None = None

    def forward(
        self,
        hidden_BTD: Tensor | None = None,
        *,
        labels: Tensor,
        label_positions: Tensor | None = None,
        request: HeadRequest = LOGPROBS,
        token_ids: Tensor | None = None,
        **model_inputs: Any,
    ) -> HeadOutput:
        """What the head gives for these tokens and labels (`Batch.head_inputs(request)`).

        `model_inputs` is `Batch.model_inputs()`. `hidden_BTD` belongs to pipeline stages; a whole model takes None.
        """
        assert hidden_BTD is None, "a whole model reads input_ids, not hidden states"
        inputs, whole_labels = self.local_inputs(model_inputs), labels
        hidden_BTD, *depths = self.with_depths(model_inputs, inputs, request)
        context: Context | None = inputs.get("context")
        if context is not None:
            labels = context.local(labels, IGNORE_INDEX)
            token_ids = None if token_ids is None else context.local(token_ids, IGNORE_INDEX)
            on_host: OnHost | None = model_inputs.get(ON_HOST)
            label_positions = None if on_host is None else context.local_label_positions(on_host.label_positions_S)
        output = self.head(hidden_BTD, labels, request, token_ids, label_positions)
        if request.values:
            assert self.value_head is not None, "who asks for values builds the part with a value head"
            output = output._replace(values_BT=self.value_head(hidden_BTD))
        if request.further:
            further_BTM = self._further_logprobs(depths, whole_labels, model_inputs["cu_seq_lens_q"], context)
            output = output._replace(further_logprobs_BTM=further_BTM)
        return output if context is None else output.map(context.whole)

    def with_depths(
        self, model_inputs: dict[str, Any], local_inputs: dict[str, Any], request: HeadRequest
    ) -> list[Tensor]:
        """Hidden states `[B, T, D]` of this rank's tokens: the model's, and where further labels are asked for those of
        each depth."""
        hidden_BTD = self.hidden(local_inputs)
        if not request.further:
            return [hidden_BTD]
        assert self.multi_token is not None, "who asks for further labels builds the part with `model.mtp`"
        context: Context | None = local_inputs.get("context")
        ids = tokens_further(model_inputs["input_ids"], model_inputs["cu_seq_lens_q"])
        local_ids = ids if context is None else (context.local(ids_BT, 0) for ids_BT in ids)
        embed: Any = self.model.get_input_embeddings()
        inputs = accepted_by(self.model, local_inputs)
        return [hidden_BTD, *self.multi_token.hidden(embed, hidden_BTD, local_ids, inputs)]

    def _further_logprobs(
        self, depths: list[Tensor], labels_BT: Tensor, cu_seqlens: Tensor, context: Context | None
    ) -> Tensor:
        """What the head makes of each depth: log-probs of the labels 1, 2, ... tokens further on, `[B, T, M]`."""
        found = []
        for by, hidden_BTD in enumerate(depths, start=1):
            labels = further(labels_BT, by, cu_seqlens, IGNORE_INDEX)
            labels = labels if context is None else context.local(labels, IGNORE_INDEX)
            found.append(self.head(hidden_BTD, labels).logprobs_BT)
        return torch.stack(found, -1)

    def add_multi_token(self, models: Sequence[PreTrainedModel], names: DepthNames) -> None:
        """From now on the part can give log-probs of further labels; `load_weights` fills the new parameters."""
        self.multi_token = MultiToken([Depth(model, hidden_first=names.hidden_first) for model in models])
        self.depth_names = names

    def add_value_head(self) -> None:
        """From now on the part can give values; `load_weights` fills the new parameters."""
        width = self.model.config.get_text_config().hidden_size
        self.value_head = ValueHead(width, self.model.dtype, self.model.device)

    def hidden(self, local_inputs: dict[str, Any]) -> Tensor:
        """Hidden states `[B, T, D]` after the last layer, of this rank's tokens (`local_inputs`)."""
        return self.run(self.model.base_model, local_inputs)

    def run(self, module: nn.Module, local_inputs: dict[str, Any]) -> Tensor:
        """What `module`, the model or its base model, makes of this rank's tokens: the first tensor of its output."""
        with recurrent_layers.documents_of(self.model, local_inputs), self._routed(local_inputs):
            output = module(**accepted_by(self.model, local_inputs), use_cache=False)
        hidden_BTD: Tensor = output if isinstance(output, Tensor) else output[0]
        return hidden_BTD

    def _routed(self, local_inputs: dict[str, Any]) -> AbstractContextManager[None]:
        """Around the layers: tokens go to the experts that the inputs name."""
        experts_BTC = local_inputs.get(ROUTED)
        if experts_BTC is None or self.routing is None:
            return nullcontext()
        return choosing(self.routing.replay(experts_BTC, counts=torch.is_grad_enabled()))

    def untied(self, hf_config: PretrainedConfig) -> PretrainedConfig:
        """A config for the merged weights: a copy, without the tie where an adapter has changed the head."""
        changed = copy.deepcopy(hf_config)
        if self.unties_head:
            changed.tie_word_embeddings = changed.get_text_config().tie_word_embeddings = False
        return changed

    def share_context(self, group: ContextGroup) -> None:
        """Work on this rank's tokens of every row from now on. `forward` stays the same from outside, and becomes
        collective over `group`.

        Raises ConfigError where attention would not see the other ranks' tokens.
        """
        attention = self.model.config._attn_implementation
        if recurrent_layers.runs_by_document(self.model):
            raise ConfigError(
                f"mesh.cp_size={group.size} is not supported because {type(self.model).__name__} runs its attention "
                "document by document on full rows",
                code="not_supported_by_model",
                keys=("mesh.cp_size",),
                fix="mesh.cp_size=1",
            )
        if attention != PACKED:
            raise ConfigError(
                f"attn_implementation={attention!r} does not support context parallelism (mesh.cp_size={group.size})",
                code="unsupported_combination",
                keys=("model.attn_implementation", "mesh.cp_size"),
                fix="model.attn_implementation=packed",
            )
        self._context_group = group

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Inside, every rank runs the rows that it is given by itself, as generation does."""
        group, self._context_group = self._context_group, None
        try:
            yield
        finally:
            self._context_group = group

    def local_inputs(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        """Under context parallelism this rank's share of `Batch.model_inputs()`, with a `context` for attention in
        place of the document boundaries; else as they are."""
        if self._context_group is None:
            return {name: value for name, value in model_inputs.items() if name != ON_HOST}
        ids_BT: Tensor = model_inputs["input_ids"]
        rows, tokens = ids_BT.shape
        on_host: OnHost | None = model_inputs.get(ON_HOST)
        bounds = model_inputs["cu_seq_lens_q"] if on_host is None else on_host.cu_seqlens
        context = Context(self._context_group, (rows, tokens), bounds, ids_BT.device)
        inputs = context.local_inputs(ids_BT, model_inputs["position_ids"])
        if ROUTED in model_inputs:
            inputs[ROUTED] = context.local(model_inputs[ROUTED], -1)
        return inputs

    def boundary_shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Rows and tokens of the hidden states of a microbatch on this rank, as pipeline stages exchange them."""
        if self._context_group is None:
            return rows, tokens
        return rows, local_length(tokens, self._context_group.size)

    @staticmethod
    def hub_name(name: str) -> str:
        """Parameter name of the part -> in-memory name of the library's model."""
        return name.removeprefix(_PREFIX).replace(".base_layer.", ".")
