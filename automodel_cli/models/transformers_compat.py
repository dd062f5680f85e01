"""Access to names of `transformers` that are not public API. Supports 5.17 to 5.24.

Relies on `_init_weights` by module, `_get_dtype_plan`, and torch's `_non_persistent_buffers_set`. Each is covered by
tests/unit/models/checkpoint_io/test_load.py and tests/dist/test_models_sharded.py. `conversion_compat.py` and
`vision/processor_compat.py` have the other names. tests/unit/distributed/test_empty_groups.py covers the grouped GEMM
of experts.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor, nn

from automodel_cli.distributed.empty_groups import guarded
from automodel_cli.distributed.typed_torch import set_attributes
from automodel_cli.models import uneven_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from transformers import PretrainedConfig, PreTrainedModel

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "past_key_value")
"""Names of the cache in forwards of modules. 5.24 renamed all of them to `cache`. The others can go when 5.24 is the
oldest supported release."""


def meta_model(
    hf_config: PretrainedConfig, *, attention: str = "eager", dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the library's causal LM class on the meta device, without memory and initialization."""
    with torch.device("meta"):
        return causal_lm(hf_config, attention=attention, dtype=dtype, trust_remote_code=trust_remote_code)


def causal_lm(
    hf_config: PretrainedConfig, *, attention: str = "eager", dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The library's own causal LM class on the default device. Parameters that the family keeps in fp32 stay fp32."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        hf_config, attn_implementation=attention, dtype=dtype, trust_remote_code=trust_remote_code
    )
    settle_names(model)
    plan = fp32_names(model, dtype)
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if plan(f"{module_name}.{name}"):
                setattr(module, name, nn.Parameter(param.detach().float(), requires_grad=param.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            if plan(f"{module_name}.{name}"):
                setattr(module, name, buffer.float())
    return model


def settle_names(model: PreTrainedModel) -> None:
    """Make the base model the first child and `base_model_prefix` its name.

    The text model of some composites is built under another name than its class declares (Llama 4). transformers would
    then use the complete model, including the head, as its base. If the head comes first (XLM-RoBERTa), a tied table
    would be called by its name there, and by the embedding's on a pipeline stage without a head.
    """
    if model.base_model_prefix not in model._modules:
        table = model.get_input_embeddings()
        holders = [name for name, child in model.named_children() if table in child.modules() and child is not table]
        model.base_model_prefix = holders[0] if holders else model.base_model_prefix
    base = model._modules.pop(model.base_model_prefix, None)
    if base is not None:
        model._modules = {model.base_model_prefix: base, **model._modules}


class _Names:
    """Matches parameter names against the glob-like patterns of a dtype plan."""

    def __init__(self, patterns: list[str]):
        parts = ["(^|\\.)" + re.escape(p).replace("\\*", ".*") + "(\\.|$)" for p in patterns]
        self._regex = re.compile("|".join(parts)) if parts else None

    def __call__(self, name: str) -> bool:
        return self._regex is not None and self._regex.search(name) is not None


def fp32_names(model: PreTrainedModel, dtype: torch.dtype) -> _Names:
    """Which parameters and buffers the family keeps in fp32 when the rest is stored as `dtype`."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    return _Names([name for name, kept in plan.items() if kept == torch.float32])


def non_persistent_buffers(module: nn.Module) -> Iterator[str]:
    """Names of the module's own buffers that no checkpoint holds (rotary tables)."""
    yield from (name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None)


def init_weights(model: PreTrainedModel, name: str, *, recurse: bool) -> None:
    """Run the family's initialization on the module of this name and its children, children first.

    As in transformers, the nearest model above a module initializes it. Uses the global RNG.
    """
    with torch.no_grad():
        _init_below(_models_above(model, name)[-1][1], model.get_submodule(name), recurse)


def init_from_above(model: PreTrainedModel, name: str) -> None:
    """Run the initialisation of the models that contain the module of this name, nearest first: some set tensors of
    modules below them."""
    with torch.no_grad():
        for path, owner in reversed(_models_above(model, name)):
            if path != name:
                owner._init_weights(owner)


def _init_below(owner: PreTrainedModel, root: nn.Module, recurse: bool) -> None:
    from transformers import PreTrainedModel

    owner = root if isinstance(root, PreTrainedModel) else owner
    for child in root.children() if recurse else ():
        _init_below(owner, child, True)
    owner._init_weights(root)


def _models_above(model: PreTrainedModel, name: str) -> list[tuple[str, PreTrainedModel]]:
    """(name, model) of every library model on the way to this module, itself included, outermost first."""
    from transformers import PreTrainedModel

    parts = name.split(".") if name else []
    paths = [".".join(parts[:count]) for count in range(len(parts) + 1)]
    found = ((path, model.get_submodule(path)) for path in paths)
    return [(path, module) for path, module in found if isinstance(module, PreTrainedModel)]


def uncut_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The class of a model that may be cut, with all its layers, on the meta device."""
    with torch.device("meta"):
        full_copy: PreTrainedModel = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    settle_names(full_copy)
    return full_copy


def register_classes(
    config: type[PretrainedConfig], base: type[PreTrainedModel], causal: type[PreTrainedModel]
) -> None:
    """Let the library build `base` and the causal LM `causal` for a config class made at run time.

    transformers 5.17 registers no config class whose module is one of the library, even with `exist_ok`.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    module, config.__module__ = config.__module__, __name__
    try:
        AutoModel.register(config, base, exist_ok=True)
        AutoModelForCausalLM.register(config, causal, exist_ok=True)
    finally:
        config.__module__ = module


def peft_renames_experts(model: PreTrainedModel) -> bool:
    """Whether `peft` reads the names that linear experts once had as the fused experts of this family."""
    from peft.utils import transformers_weight_conversion as conversion

    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(str(model.config.model_type))
    return pattern in conversion._MOE_TARGET_MODULE_MAPPING


def local_part(param: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of `whole` for `param`: all of it for a plain tensor. No communication."""
    if not is_dtensor(param):
        return whole
    if uneven_dtensor.is_uneven(param):
        return whole[uneven_dtensor.chunk(param)]
    if local(param).numel() == 0:  # the library has no interval for it
        return local(param)
    from transformers.distributed.sharding_utils import DtensorShardOperation

    return cast(Tensor, DtensorShardOperation(param).shard_tensor(whole))


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """By its method, so that DTensor (0.7 s of imports) is not imported for models that are not sharded."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's own storage of a DTensor or plain tensor: writing to it writes to the tensor."""
    storage: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return storage.detach()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor, detached. Collective for a DTensor."""
    if uneven_dtensor.is_uneven(tensor):
        return uneven_dtensor.gather_uneven(tensor)
    full: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return full.detach()


def assume_unpacked() -> None:
    """Answer the library's question whether rows are packed, in this process, without looking at them."""
    from transformers import masking_utils, modeling_flash_attention_utils

    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    modeling_flash_attention_utils._is_packed_sequence = lambda position_ids, batch_size: False


def clear_empty_experts() -> None:
    """Make the library's grouped GEMMs return zero gradients for experts without tokens."""
    from transformers.integrations import moe

    if not hasattr(moe._grouped_mm, "__wrapped__"):
        moe._grouped_mm = guarded(moe._grouped_mm)


def look_at_positions() -> None:
    """Make the library's check for packed sequences work for fake tensors, which have no values."""
    from transformers import masking_utils

    masking_utils.is_tracing = lambda tensor=None: False


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the library's progress bars, and its warnings about tiny copies of a config (odd rope factors)."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def forget_positions(composite: PreTrainedModel) -> None:
    """Remove the rotary positions that a composite keeps of its last pictures."""
    if hasattr(composite.base_model, "rope_deltas"):
        set_attributes(composite.base_model, rope_deltas=None)
