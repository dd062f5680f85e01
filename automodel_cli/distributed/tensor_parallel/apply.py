"""Apply tensor parallelism to the layers of a part, by the plan of the model.

All tp ranks process the same tokens. A column-parallel layer reads all features and computes a shard of the output
features (or heads). The next row-parallel layer reads this shard and sums its output over tp::

    column-parallel   y_i = x W_i        W [O, I] sharded over O, no communication in forward
    row-parallel      z = sum_i y_i V_i  V [D, O] sharded over its inputs, all-reduce in forward

With sequence parallelism, the residual between them is sharded over tokens (`sequence_parallel.py`). The LM head
computes log-probs from vocabulary shards itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.adapter_layers import is_adapter
from automodel_cli.distributed.axis_options import AxisOptions
from automodel_cli.distributed.expert_parallel.apply import is_experts, num_experts_of
from automodel_cli.distributed.layer_wrapping import transformer_layers
from automodel_cli.distributed.tensor_parallel.checks import (
    KEY,
    QUERY,
    check_features,
    check_heads,
    is_local_colwise,
    use_async_collectives,
)
from automodel_cli.distributed.tensor_parallel.plan import Plan, custom_plan, get_hf_tp_shard_plan, name_of, wildcard
from automodel_cli.distributed.tensor_parallel.sequence_parallel import (
    TokenShards,
    apply_sequence_parallel,
    blocks,
    scattering,
    share_input,
)
from automodel_cli.distributed.tensor_parallel.styles import (
    ExpertsOverTP,
    LocalParameters,
    MLAKeyProjection,
    PackedColwise,
    SumParameterGradients,
    shard_parameter,
)

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")


def apply_tensor_parallel(
    part: nn.Module, tp_mesh: DeviceMesh, options: AxisOptions, *, shard_experts: bool = True
) -> None:
    """Shard a part (its child `model`), or a transformers model, over `tp_mesh`, in place.

    Parameters may be on the meta device. Modules without an entry in the plan are replicated, and their gradients are
    equal on all ranks.

    Args:
        shard_experts: False leaves experts unsharded, for expert parallelism.

    Raises ConfigError for a model without a plan, for an invalid plan, and for heads or features that tp does not
    divide.
    """
    from transformers import PreTrainedModel

    model = part if isinstance(part, PreTrainedModel) else part.model
    assert isinstance(model, PreTrainedModel), f"{type(part).__name__} holds no model of the library"
    if options.async_tensor_parallel:
        use_async_collectives(tp_mesh)
    plan = _checked_plan(model, options, tp_mesh.size())
    front = getattr(part, "front", None)  # of a vision-language model, which every rank runs on all tokens
    tower = set() if front is None else set(front.modules())
    for adapter in (module for module in tower if is_adapter(module)):
        _refuse_dropout(adapter)
    layers = [layer for layer in transformer_layers(part) if layer not in tower]
    # In a uniform block, the gradient of the input is a partial sum that needs one reduction. In other blocks, some
    # parameters are replicated, and each column-parallel layer reduces its own.
    uniform = {block for layer in layers for block in blocks(layer) if _is_uniform(model, block, plan)}
    if options.sequence_parallel or options.async_tensor_parallel:
        _apply_plan(model, plan, tp_mesh, shard_experts=shard_experts, scattered=uniform)
        apply_sequence_parallel(layers, tp_mesh, uniform)
        if front is not None:
            part.share_tokens(TokenShards(tp_mesh))  # type: ignore[operator]
    else:
        _apply_plan(model, plan, tp_mesh, shard_experts=shard_experts)
        for block in uniform:
            share_input(block, tp_mesh)
    replicated = sorted(set(_replicated_modules(model)))
    logger.info("tensor parallelism over %d ranks. Replicated: %s", tp_mesh.size(), ", ".join(replicated) or "nothing")


def _apply_plan(
    model: PreTrainedModel,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    shard_experts: bool,
    scattered: Collection[nn.Module] = (),
) -> None:
    """Apply the style of every module. Row-parallel layers of `scattered` blocks reduce-scatter over tokens."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = getattr(head, "weight", 0) is getattr(embedding, "weight", 1)  # A pipeline stage may have neither.
    attentions: set[nn.Module] = set()
    for name, module in list(model.named_modules()):
        style = _style_of(plan, name)
        if style is None or not any(True for _ in module.parameters()) or (is_experts(module) and not shard_experts):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        if parent in scattered and isinstance(style, RowwiseParallel):
            style = scattering()
        _apply_style(model, name, module, style, mesh)
        if isinstance(style, LocalParameters):
            _shard_own_parameters(name, module, plan, mesh)
        if is_local_colwise(style) and name.rpartition(".")[2] in (*QUERY, *KEY):
            attentions.add(parent)
    # `parallelize_module` creates a new parameter for each module. The tie is restored, so that the table has one
    # gradient.
    if is_tied:  # Adapters around them expose the weight only.
        getattr(head, "base_layer", head).weight = getattr(embedding, "base_layer", embedding).weight
    for attention in attentions:
        _count_local_heads(attention, mesh.size())


def cut_parameters(
    model: PreTrainedModel, options: AxisOptions, tp_size: int, *, shard_experts: bool = True
) -> Iterator[nn.Parameter]:
    """Yield the parameters that `apply_tensor_parallel` would shard. Used for planning, without ranks."""
    plan = _checked_plan(model, options, tp_size)
    for name, module in model.named_modules():
        style = _style_of(plan, name)
        if is_experts(module):
            divides = int(module.num_experts) % tp_size == 0
            yield from module.parameters() if style is not None and shard_experts and divides else ()
            continue
        for leaf, param in module.named_parameters(recurse=False):
            match style if not isinstance(style, LocalParameters) else _style_of(plan, f"{name}.{leaf}"):
                case RowwiseParallel() if leaf == "bias":  # Replicated.
                    continue
                case ColwiseParallel() | RowwiseParallel() | PackedColwise():
                    yield param


def _checked_plan(model: PreTrainedModel, options: AxisOptions, tp_size: int) -> Plan:
    """Return the plan of the model or of the config. Raises ConfigError if tp does not divide the heads."""
    plan = get_hf_tp_shard_plan(model) if options.tp_plan is None else custom_plan(options.tp_plan, model)
    check_heads(model.config, plan, tp_size)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        _replicate_indivisible_vocabulary(model, module, plan, tp_size)
    return plan


def _is_uniform(model: nn.Module, block: nn.Module, plan: Plan) -> bool:
    """Return whether every parameter of the block follows the plan.

    Such a block has column-parallel layers on its input (and norms of their heads), and one row-parallel layer that
    computes its output.
    """
    prefix = name_of(model, block)
    num_outputs = 0
    for name, module in block.named_modules(prefix=prefix or ""):
        style = _style_of(plan, name)
        is_output = isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),)
        num_outputs += is_output and module in block.children()
        follows = is_output or is_local_colwise(style) or isinstance(style, SumParameterGradients | LocalParameters)
        if any(True for _ in module.parameters(recurse=False)) and not follows:
            return False
    return num_outputs == 1


def _style_of(plan: Plan, name: str) -> ParallelStyle | None:
    return plan.get(name) or plan.get(wildcard(name))


def _replicate_indivisible_vocabulary(model: nn.Module, module: nn.Module | None, plan: Plan, tp_size: int) -> None:
    """Replicate an embedding or head whose rows tp does not divide, because FSDP2 does not support uneven shards."""
    weight = getattr(module, "weight", None)  # A pipeline stage may have neither embedding nor head.
    name = name_of(model, module)
    if weight is not None and name in plan and weight.shape[0] % tp_size:
        logger.info("%s is replicated, because tp_size=%d does not divide its %d rows", name, tp_size, weight.shape[0])
        del plan[name]


def _apply_style(model: PreTrainedModel, name: str, module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    if isinstance(style, MLAKeyProjection):
        style = MLAKeyProjection(model.config.get_text_config().qk_rope_head_dim)
    if is_adapter(module):  # The wrapper of peft around the layer in the plan.
        _apply_to_adapter(name, cast("LoraLinear", module), style, mesh)
        return
    if isinstance(style, ExpertsOverTP):
        returns_input = any(isinstance(child, nn.Identity) for child in module.children())
        if not is_experts(module) or returns_input or num_experts_of(module) % mesh.size():
            return  # Replicated, like modules without a style.
    else:
        check_features(name, module, style, mesh.size())
    parallelize_module(module, mesh, style, src_data_rank=None)
    # torch converts buffers to DTensors too. Scales must stay plain tensors.
    for leaf, buffer in module._buffers.items():
        if isinstance(buffer, DTensor):
            module._buffers[leaf] = buffer.to_local()


def _apply_to_adapter(name: str, wrapper: LoraLinear, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Shard the wrapped layer as planned, and one matrix of its adapter `B @ A`.

    A column-parallel layer shards B over outputs, a row-parallel layer shards A over inputs. The other matrix and the
    activations of rank r between them are replicated. DoRA's norms are sharded like the outputs.
    """
    base = wrapper.get_base_layer()
    _refuse_dropout(wrapper)
    matrices: Iterable[nn.Module] = ()
    match style:
        case MLAKeyProjection():  # This style acts on the replicated output.
            parallelize_module(wrapper, mesh, style)
            return
        case ColwiseParallel():
            matrices = wrapper.lora_B.values()
        case RowwiseParallel():
            matrices = wrapper.lora_A.values() if style.input_layouts == (Shard(-1),) else ()
        case _:
            raise ConfigError(
                f"an adapter on {name} cannot be sharded as {type(style).__name__}",
                code="unsupported_combination",
                keys=("model.lora.target_modules", "mesh.tp_size"),
                fix="model.lora.target_modules without this module",
            )
    check_features(name, base, style, mesh.size())
    parallelize_module(base, mesh, style, src_data_rank=None)
    for matrix in matrices:
        parallelize_module(matrix, mesh, style, src_data_rank=None)
    for vector in getattr(wrapper, "lora_magnitude_vector", {}).values():  # DoRA: one norm for each local output
        if is_local_colwise(style):
            shard_parameter(vector, "weight", mesh, Shard(0))


def _refuse_dropout(wrapper: nn.Module) -> None:
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in wrapper.modules()):
        raise ConfigError(
            "lora.dropout must be 0 under tensor parallelism, because every tp rank would drop different inputs",
            code="unsupported_combination",
            keys=("model.lora.dropout", "mesh.tp_size"),
            fix="model.lora.dropout=0",
        )


def _shard_own_parameters(name: str, module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Shard parameters with their own entry in the plan: over outputs or heads (colwise), or over inputs (rowwise)."""
    for leaf, param in list(module._parameters.items()):
        style = _style_of(plan, f"{name}.{leaf}")
        if param is None or style is None:
            continue
        dim = max(param.ndim - 2, 0) if isinstance(style, ColwiseParallel) else param.ndim - 1
        if param.shape[dim] % mesh.size():
            raise ConfigError(
                f"mesh.tp_size={mesh.size()} must divide the {param.shape[dim]} entries of {name}.{leaf}",
                code="not_divisible",
                keys=("mesh.tp_size",),
                fix=f"mesh.tp_size={math.gcd(param.shape[dim], mesh.size())}",
            )
        shard_parameter(module, leaf, mesh, Shard(dim))


def _count_local_heads(attention: nn.Module, tp_size: int) -> None:
    """Set the numbers of heads on the module to local values. Families reshape features with them."""
    for name in _HEAD_COUNTS:
        count = vars(attention).get(name)
        if isinstance(count, int):
            setattr(attention, name, count // tp_size)


def _replicated_modules(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not any(isinstance(param, DTensor) for param in own):
            yield wildcard(name)
