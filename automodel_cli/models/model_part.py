"""The module that a rank owns: an unmodified transformers model, and the head that computes `HeadOutput`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, ON_HOST, PICTURES, OnHost, Pictures
from automodel_cli.data.head_output import LOGPROBS, HeadOutput, HeadRequest
from automodel_cli.distributed.expert_parallel.router_replay import RoutedLayers, choosing
from automodel_cli.distributed.qat.settings import FakeQuantization
from automodel_cli.models.attention.packed import PACKED
from automodel_cli.models.attention.picture_runs import PictureRuns, TwoWay
from automodel_cli.models.context_parallel_layout import Context, ContextGroup, local_length
from automodel_cli.models.document_masking import recurrent_layers
from automodel_cli.models.document_masking.document_bounds import tensors_in
from automodel_cli.models.lm_head.head import Head, HeadKind
from automodel_cli.models.lm_head.value_head import ValueHead
from automodel_cli.models.model_inputs import ROUTED, accepted_by
from automodel_cli.models.mtp.layers import Depth, MultiToken, further_logprobs, tokens_further
from automodel_cli.models.vision import shares

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from automodel_cli.models.hub.multimodal_backbone import BackboneMapping
    from automodel_cli.models.mtp.key_mapping import DepthNames
    from automodel_cli.models.vision.front import Front

_PREFIX, _FRONT_PREFIX = "model.", "front.composite."
_WHOLE_IDS = "whole_ids_BT"


class ModelPart(nn.Module):
    """A model (or pipeline stage) with its head. One forward for every objective: batch in, `HeadOutput` out.

    The child `model` is the transformers object, so that a parameter's name is "model." + its hub name (`hub_name`
    removes the prefix and adapter wrapping). Wrap the full part for data parallelism. Besides the layers, only
    `units_around_layers` can be FSDP units of their own.

    Attributes:
        hub_dtype: dtype of the checkpoint, the default dtype of exports.
        source_config: transformers config as read, before attention, dtype or caching are set on the model's copy.
        unclaimed: checkpoint keys without a counterpart in the full model, set by loading.
        within: location of the model in a multimodal checkpoint.
        routing: set if batches can contain router decisions (`Batch.model_inputs`).
        front: the rest of a vision-language model, which turns ids and pictures into inputs of `model`. Pipeline
            stages after the first one have none.
        first_layers: decoder layers that read features of pictures. The first pipeline stage must contain them.
        two_way: set if tokens of a picture see each other in both directions.
        front_keys: parameter of the front end (named as in the composite) -> key of the checkpoint.
        quantization: settings of fake-quantized layers. A pipeline stage may have none of these layers.
        may_train_nothing: a pipeline stage without trained parameters is valid, because another stage has some.
        reads_logits: the logits of the LM head are computed. Scores and embeddings do not need them.
        unties_head: an adapter changes a head that is tied to the embedding, so exports and replicas need an untied
            config (`untied`).
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
        self._whole_dtype: torch.dtype = model.dtype
        self.hub_dtype = hub_dtype or model.dtype
        self.source_config = source_config or copy.deepcopy(model.config)
        self.unclaimed: tuple[str, ...] = ()
        self.within: BackboneMapping | None = None
        self.routing: RoutedLayers | None = None
        self.front: Front | None = None
        self.first_layers = 0
        self.two_way: TwoWay | None = None
        self.front_keys: dict[str, str] = {}
        self.unties_head = False
        self.reads_logits = True
        self.may_train_nothing = False
        self.quantization: FakeQuantization | None = None
        self._context_group: ContextGroup | None = None
        self._token_shards: shares.TokenShards | None = None

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
        """Return the outputs of the head for these tokens and labels (`Batch.head_inputs(request)`).

        `model_inputs` is `Batch.model_inputs()`. `hidden_BTD` is for pipeline stages. A full model accepts None.
        """
        assert hidden_BTD is None, "a whole model reads input_ids, not hidden states"
        inputs, full_labels = self.local_inputs(model_inputs), labels
        hidden_BTD, *depths = self.with_depths(model_inputs, inputs, request)
        # With context parallelism, hidden states and labels are local (B, t). The outputs are gathered to (B, T) at the
        # end, so the objective sees full rows.
        context: Context | None = inputs.get("context")
        if context is not None:
            labels = context.local(labels, IGNORE_INDEX)
            token_ids = None if token_ids is None else context.local(token_ids, IGNORE_INDEX)
            on_host: OnHost | None = model_inputs.get(ON_HOST)
            label_positions = None if on_host is None else context.local_label_positions(on_host.label_positions_S)
        output = self.head(hidden_BTD, labels, request, token_ids, label_positions)
        if request.values or request.scores:
            assert self.value_head is not None, "who asks for values builds the part with a value head"
            scores_BTL = self.value_head(hidden_BTD)
            output = output._replace(
                values_BT=scores_BTL[..., 0].clone() if request.values else None,
                scores_BTL=scores_BTL if request.scores else None,
            )
        if request.hidden:
            output = output._replace(hidden_BTD=hidden_BTD)
        if request.further:
            further_BTM = further_logprobs(self.head, depths, full_labels, model_inputs["cu_seq_lens_q"], context)
            output = output._replace(further_logprobs_BTM=further_BTM)
        return output if context is None else output.map(context.gather_rows)

    def with_depths(
        self, model_inputs: dict[str, Any], local_inputs: dict[str, Any], request: HeadRequest
    ) -> list[Tensor]:
        """Return hidden states `[B, T, D]` of the local tokens: of the model, and of each depth if the request needs
        them."""
        hidden_BTD = self.hidden(local_inputs)
        if not request.further:
            return [hidden_BTD]
        assert self.multi_token is not None, "who asks for further labels builds the part with `model.mtp`"
        context: Context | None = local_inputs.get("context")
        ids = tokens_further(model_inputs["input_ids"], model_inputs["cu_seq_lens_q"])
        local_ids = ids if context is None else (context.local(ids_BT, 0) for ids_BT in ids)
        embed, inputs = self.model.get_input_embeddings(), accepted_by(self.model, local_inputs)
        return [hidden_BTD, *self.multi_token.hidden(embed, hidden_BTD, local_ids, inputs)]

    def add_multi_token(self, models: Sequence[PreTrainedModel], names: DepthNames) -> None:
        """Add multi-token prediction layers. `load_weights` fills the new parameters."""
        self.multi_token = MultiToken([Depth(model, hidden_first=names.hidden_first) for model in models])
        self.depth_names = names

    def add_front(self, front: Front) -> None:
        """Add the rest of a vision-language model. It runs first, so its layers are the first of the part."""
        # The order of modules is the order of FSDP's prefetch and of the layers in activation checkpointing.
        modules = dict(self._modules)
        self._modules.clear()
        self.front = front
        modules.pop("front", None)
        self._modules.update(modules)

    @property
    def models(self) -> list[nn.Module]:
        """The text model, and the rest of a vision-language model if this rank has it."""
        return [self.model] if self.front is None else [self.model, self.front.composite]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the parameters. For a pipeline stage without any, it is that of the complete model."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), self._whole_dtype)

    def add_value_head(self, num_outputs: int = 1) -> None:
        """Add a value head. `load_weights` fills the new parameters."""
        width = self.model.config.get_text_config().hidden_size
        self.value_head = ValueHead(width, self.model.dtype, self.model.device, num_outputs)

    def hidden(self, local_inputs: dict[str, object]) -> Tensor:
        """Return hidden states `[B, T, D]` of the local tokens (`local_inputs`) after the last layer."""
        return self.run(self.model.base_model, local_inputs)

    def run(self, module: nn.Module, local_inputs: dict[str, Any]) -> Tensor:
        """Run `module`, the model or its base model, on the local tokens and return the first tensor of its output."""
        local_inputs = dict(local_inputs)
        pictures: Pictures | None = local_inputs.pop(PICTURES, None)
        whole_ids_BT = local_inputs.pop(_WHOLE_IDS, local_inputs["input_ids"])
        with recurrent_layers.documents_of(self.model, local_inputs), self._routed(local_inputs):
            inputs = accepted_by(self.model, local_inputs)
            if pictures is not None:
                inputs |= self._shown(whole_ids_BT, pictures, local_inputs.get("context"))
                # The front end has returned embeddings with picture features, so no ids are passed.
                if self.front is not None:
                    del inputs["input_ids"]
            output = module(**inputs, use_cache=False)
        return next(tensors_in(output))

    def _shown(self, ids_BT: Tensor, pictures: Pictures, context: Context | None) -> dict[str, object]:
        """Return the keywords of the text model for pictures, of the tokens of this rank. `ids_BT`: of full rows."""
        if self.front is None:
            found = shares.keywords_without_front(self.model.base_model, ids_BT, pictures)
        else:
            # Full rows on every rank: a picture may lie on the boundary of two ranks.
            found = self.front(ids_BT, pictures)
        is_shown_BT = ids_BT == pictures.placeholder
        runs = None if self.two_way is None else PictureRuns.of(is_shown_BT, self.two_way, context)
        if context is not None:
            found, is_shown_BT = shares.of_context(found, is_shown_BT, context)
        if runs is not None:
            found["picture_runs"] = runs
        return found if self._token_shards is None else shares.of_layers(found, is_shown_BT, self._token_shards)

    def units_around_layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules before and after the layers that can be FSDP units of their own: embedding and head, each
        called once per forward.

        A table that both use stays in the root unit: it is gathered before the first layer and its gradient is complete
        after the last one. Depths of multi-token prediction call both again, and pictures read the dtype of the table.
        """
        if self.multi_token is not None:
            return [], []
        owners = Counter(id(p) for m in self.modules() for p in m.parameters(recurse=False))

        def units(module: nn.Module | None) -> list[nn.Module]:
            params = [] if module is None else list(module.parameters())
            return [module] if module is not None and params and all(owners[id(p)] == 1 for p in params) else []

        table = None if self.front is not None else self.model.get_input_embeddings()
        return units(table if isinstance(table, nn.Embedding) else None), units(self.head.own_unit())

    def share_tokens(self, shards: shares.TokenShards) -> None:
        """Give layers only the features of pictures of their own tokens (sequence parallelism)."""
        self._token_shards = shards

    def _routed(self, local_inputs: dict[str, Any]) -> AbstractContextManager[None]:
        """Replay the router decisions of the inputs inside the context."""
        experts_BTC = local_inputs.get(ROUTED)
        if experts_BTC is None or self.routing is None:
            return nullcontext()
        return choosing(self.routing.replay(experts_BTC, counts=torch.is_grad_enabled()))

    def untied(self, hf_config: PretrainedConfig) -> PretrainedConfig:
        """Return a copy of the config for merged weights. Without the tie if an adapter changes the head."""
        changed = copy.deepcopy(hf_config)
        if self.unties_head:
            changed.tie_word_embeddings = changed.get_text_config().tie_word_embeddings = False
        return changed

    def share_context(self, group: ContextGroup) -> None:
        """Process the local tokens of every row from now on. The signature of `forward` is unchanged, and it is
        collective over `group`.

        Raises ConfigError if attention does not support context parallelism.
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
        """Let every rank run full rows independently inside the context, as in generation."""
        group, self._context_group = self._context_group, None
        try:
            yield
        finally:
            self._context_group = group

    def local_inputs(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the local part of `Batch.model_inputs()`.

        With context parallelism, `context` replaces the document boundaries.
        """
        if self._context_group is None:
            return {name: value for name, value in model_inputs.items() if name != ON_HOST}
        ids_BT: Tensor = model_inputs["input_ids"]
        on_host: OnHost | None = model_inputs.get(ON_HOST)
        bounds = model_inputs["cu_seq_lens_q"] if on_host is None else on_host.cu_seqlens
        context = Context(self._context_group, (len(ids_BT), ids_BT.shape[1]), bounds, ids_BT.device)
        inputs = context.local_inputs(ids_BT, model_inputs["position_ids"])
        if ROUTED in model_inputs:
            inputs[ROUTED] = context.local(model_inputs[ROUTED], -1)
        if PICTURES in model_inputs:
            inputs |= {PICTURES: model_inputs[PICTURES], _WHOLE_IDS: ids_BT}
        return inputs

    def boundary_shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Return rows and tokens of a microbatch's local hidden states, as exchanged by pipeline stages."""
        if self._context_group is None:
            return rows, tokens
        return rows, local_length(tokens, self._context_group.size)

    @staticmethod
    def hub_name(name: str) -> str:
        """Convert a parameter name of the part to the in-memory name of the transformers model."""
        prefix = _FRONT_PREFIX if name.startswith(_FRONT_PREFIX) else _PREFIX
        return name.removeprefix(prefix).replace(".base_layer.", ".")


def model_parts(parts: Iterable[nn.Module]) -> list[ModelPart]:
    """Return the parts of a model among modules that may have a wrapper."""
    return [part for part in parts if isinstance(part, ModelPart)]
