"""Front end of a vision-language model: the unmodified composite, whose text model is replaced by a catcher.

The composite's own forward turns ids and pictures into `inputs_embeds` and further keywords for its text model. The
catcher stops the forward there and returns them. The text model runs as a causal LM as without pictures.

A microbatch without a picture runs the front end on one blank picture too. Its results are added as empty slices, so
that every rank computes a gradient for every parameter, as sharded data parallelism requires.

Shapes: B rows, T tokens, D hidden.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import Pictures
from automodel_cli.distributed.typed_torch import modules_of
from automodel_cli.models import transformers_compat
from automodel_cli.models.document_masking.document_bounds import tensors_in
from automodel_cli.models.hub import composite_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TYPE_IDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""Keywords with 1 at a placeholder and 0 elsewhere."""
_SETTINGS = ("use_cache", "return_dict", "output_attentions", "output_hidden_states", "attention_mask")


class _Caught(Exception):
    def __init__(self, keywords: dict[str, object]):
        super().__init__("the keywords of the text model")
        self.keywords = keywords


class _Catcher(nn.Module):
    """In the place of the text model. Has its embedding and attributes, but registers none of its parameters."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.__dict__["_base"] = base
        self.config = base.config

    def get_input_embeddings(self) -> nn.Module:
        table: nn.Module = self.__dict__["_base"].get_input_embeddings()
        return table

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"], name)

    def forward(self, **keywords: object) -> NoReturn:
        raise _Caught(keywords)


class Front(nn.Module):
    """Everything of a composite except its text model and head. Parameters keep the composite's names below
    `composite`.

    Attributes:
        text_name: name of the text model inside the composite.
        head_name: name of the output matrix inside the composite.
    """

    def __init__(self, composite: PreTrainedModel, base: nn.Module):
        """`base`: the text model whose embedding is used. It stays outside."""
        super().__init__()
        name = composite_text.text_module(composite)
        assert name is not None, "`composite_on_meta` checks it"
        self.text_name = name
        head = composite.get_output_embeddings()
        self.head_name = next(name for name, module in composite.named_modules() if module is head)
        replace_module(composite, self.text_name, _Catcher(base))
        replace_module(composite, self.head_name, nn.Identity())
        self.composite = composite
        self._takes = frozenset(inspect.signature(self._entry.forward).parameters)

    @property
    def _entry(self) -> nn.Module:
        base: nn.Module = self.composite.base_model
        return self.composite if isinstance(base, _Catcher) else base

    def forward(self, ids_BT: Tensor, pictures: Pictures) -> dict[str, Any]:
        """Return the keywords of the text model for these ids: `inputs_embeds`, and what else the family has."""
        table = self.composite.get_input_embeddings()
        dtype = cast(Tensor, table.weight).dtype
        inputs = {name: _moved(value, ids_BT.device, dtype) for name, value in pictures.inputs.items()}
        positions = None if pictures.positions_3BT is None else pictures.positions_3BT.to(ids_BT.device)
        if pictures.shared_P is not None:
            caught = self._shared(ids_BT, positions, pictures.shared_P, pictures.placeholder, inputs)
        elif pictures.blank_ids_T is None:
            caught = self._inputs_of_text(ids_BT, positions, pictures.placeholder, inputs)
        else:
            caught = self._inputs_of_text(ids_BT, positions, pictures.placeholder, {})
            blank_ids = pictures.blank_ids_T[None].to(ids_BT.device)
            blank_positions = None if positions is None else positions.new_zeros(3, *blank_ids.shape)
            blank = self._inputs_of_text(blank_ids, blank_positions, pictures.placeholder, inputs)
            caught["inputs_embeds"] = caught["inputs_embeds"] + _empty_sum(blank)
        if positions is not None:
            caught["position_ids"] = positions
        else:
            caught.pop("position_ids", None)
        return caught

    def _shared(
        self, ids_BT: Tensor, positions: Tensor | None, shared_P: Tensor, placeholder: int, inputs: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the keywords if the tower reads each of several pictures once, and its features are repeated."""
        caught = self._inputs_of_text(ids_BT, positions, placeholder, {})
        once_1P = ids_BT.new_full((1, int(shared_P.max()) + 1), placeholder)
        positions_31P = None if positions is None else positions.new_zeros(3, *once_1P.shape)
        once = self._inputs_of_text(once_1P, positions_31P, placeholder, inputs)
        index_P, is_shown_BT = shared_P.to(ids_BT.device, non_blocking=True), ids_BT == placeholder
        seen_PD = once.pop("inputs_embeds")[0].index_select(0, index_P)
        caught["inputs_embeds"] = caught["inputs_embeds"].masked_scatter(is_shown_BT[..., None], seen_PD)
        return caught | {
            name: _repeated(value, index_P, is_shown_BT) for name, value in once.items() if name not in caught
        }

    def _inputs_of_text(
        self, ids_BT: Tensor, positions: Tensor | None, placeholder: int, inputs: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the keywords of the text model without None and without settings."""
        caught = self._caught(ids_BT, positions, placeholder, inputs)
        return {name: value for name, value in caught.items() if value is not None and name not in _SETTINGS}

    def _caught(
        self, ids_BT: Tensor, positions: Tensor | None, placeholder: int, inputs: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return all keywords that the composite passes to its text model."""
        types = {name: (ids_BT == placeholder).long() for name in TYPE_IDS if name in self._takes}
        given = {} if positions is None else {"position_ids": positions}
        try:
            self._entry(input_ids=ids_BT, **types, **given, **inputs, use_cache=False)
        except _Caught as caught:
            return caught.keywords
        raise RuntimeError(f"{type(self.composite).__name__} did not call its text model")

    def masks(self, ids_BT: Tensor, pictures: Pictures) -> object:
        """Return the attention mask that the composite makes for its text model, None if it makes none."""
        caught = self._caught(ids_BT, pictures.positions_3BT, pictures.placeholder, dict(pictures.inputs.items()))
        return caught.get("attention_mask")

    def masks_of_types(self, ids_BT: Tensor, placeholder: int) -> object:
        """Return the attention mask as `masks` does, from the types of tokens without pixels."""
        return self._caught(ids_BT, None, placeholder, {}).get("attention_mask")

    @contextmanager
    def completed(self, base: nn.Module, head: nn.Module) -> Iterator[PreTrainedModel]:
        """Inside, the composite is complete: its text model and its head are in their places."""
        catcher = self.composite.get_submodule(self.text_name)
        replace_module(self.composite, self.text_name, base)
        replace_module(self.composite, self.head_name, head)
        try:
            yield self.composite
        finally:
            replace_module(self.composite, self.text_name, catcher)
            replace_module(self.composite, self.head_name, nn.Identity())

    def is_tower(self, name: str) -> bool:
        """Return whether a parameter (named as in the composite) belongs to the tower. All others are the projector."""
        towers, projectors = self._places
        return _is_below(name, towers) and not _is_below(name, projectors)

    @functools.cached_property
    def _places(self) -> tuple[list[str], list[str]]:
        """Return the names of the towers, and of projectors inside them.

        A tower is the module beside the text model that contains layers. A projector inside it stands behind the layers
        and has an output of the width of the text model (the mergers of Qwen).
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        width = self.composite.config.get_text_config().hidden_size
        blocks = [name for name, _ in modules_of(self.composite, GradientCheckpointingLayer)]
        towers = sorted({_outermost_beside(name, self.text_name) for name in blocks})
        projectors = []
        for stack in {name.rpartition(".")[0] for name in blocks}:
            holder, _, own = stack.rpartition(".")
            children = list(self.composite.get_submodule(holder).named_children())
            position = [name for name, _ in children].index(own)
            projectors += [f"{holder}.{name}" for name, child in children[position + 1 :] if _writes(child, width)]
        return towers, projectors


def _outermost_beside(name: str, text_name: str) -> str:
    """Return the outermost module on the way to `name` that does not contain the text model."""
    paths = composite_text.module_paths(name)
    return next(path for path in paths if not f"{text_name}.".startswith(f"{path}."))


def _is_below(name: str, prefixes: list[str]) -> bool:
    return any(name.startswith(f"{prefix}.") for prefix in prefixes)


def _writes(module: nn.Module, width: int) -> bool:
    """Return whether a matrix of the module has this many outputs."""
    kinds: tuple[type[nn.Linear | nn.Conv2d], ...] = (nn.Linear, nn.Conv2d)
    return any(len(child.weight) == width for _, child in modules_of(module, kinds))


def composite_on_meta(composite_config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the composite on the meta device. Raises ConfigError if it has no text model of its own."""
    cls = composite_text.composite_class(composite_config)
    problem = "it is no model of images and text"
    if (
        cls is not None
        and composite_config.get_text_config() is not composite_config
        and not composite_config.is_encoder_decoder
    ):
        try:
            with torch.device("meta"), transformers_compat.quiet():
                composite: PreTrainedModel = cls._from_config(copy.deepcopy(composite_config), dtype=dtype)
        except ImportError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{cls.__name__} cannot be built: {reason}", code="missing_package", keys=("model",)
            ) from error
        if composite_text.text_module(composite) is not None and composite.get_output_embeddings() is not None:
            return composite
        problem = f"{cls.__name__} has no text model with an output matrix"
    raise ConfigError(
        f"pictures are not supported for {composite_config.model_type} because {problem}",
        code="not_supported_by_model",
        keys=("model.vision",),
        fix="model.vision=null, or a model such as Qwen/Qwen3-VL-2B-Instruct",
    )


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Set the module `name` of a model."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def _moved(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)


def _repeated(value: Tensor, index_P: Tensor, is_shown_BT: Tensor) -> object:
    """Return features of distinct placeholders for all placeholders. A mask of tokens becomes that of the batch."""
    match value:
        case list() | tuple():
            return [_repeated(item, index_P, is_shown_BT) for item in value]
        case Tensor(dtype=torch.bool):
            return is_shown_BT
        case _:
            return value.index_select(0, index_P)


def _empty_sum(value: object) -> Tensor | int:
    """Return 0 as the sum over no element of every float tensor, which gives each of them a gradient of zeros."""
    floats = (x for x in tensors_in(value) if x.is_floating_point())
    return sum(x.flatten()[:0].sum() for x in floats)
