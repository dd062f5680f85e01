"""Tensor parallelism: one part's layers over the ranks of tp, from the plan its model publishes.

Every tp rank sees the same tokens. Column-parallel layers take them whole and make this rank's features or heads;
row-parallel layers take those and sum over tp. With sequence parallelism the residual between the two is sharded over
tokens (`sequence_parallel.py`). The head computes log-probs from vocabulary shards by itself.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.distributed.axis_options import AxisOptions
from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.distributed.layer_wrapping import transformer_layers
from automodel_cli.distributed.tensor_parallel.plan import Plan, custom_plan, get_hf_tp_shard_plan, name_of, wildcard
from automodel_cli.distributed.tensor_parallel.sequence_parallel import (
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
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_QUERY = ("q_proj", "q_b_proj", "query_key_value", "qkv_proj")
_KEY = ("k_proj", "kv_b_proj", "query_key_value", "qkv_proj")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")


def apply_tensor_parallel(
    part: nn.Module, tp_mesh: DeviceMesh, options: AxisOptions, *, shard_experts: bool = True
) -> None:
    """Shard a part (its child `model`), or the library's model itself, over `tp_mesh`, in place; parameters may still
    be on meta.

    `shard_experts` False leaves experts whole, for expert parallelism. What the plan does not name stays whole on
    every rank, with the same gradient everywhere. Raises ConfigError for a model without a plan, and for heads,
    features or a plan that do not fit.
    """
    from transformers import PreTrainedModel

    model = part if isinstance(part, PreTrainedModel) else part.model
    assert isinstance(model, PreTrainedModel), f"{type(part).__name__} holds no model of the library"
    if options.async_tensor_parallel:
        use_async_collectives(tp_mesh)
    plan = _checked_plan(model, options, tp_mesh.size())
    layers = transformer_layers(part)
    uniform = {block for layer in layers for block in blocks(layer) if _is_uniform(model, block, plan)}
    if options.sequence_parallel or options.async_tensor_parallel:
        _apply_plan(model, plan, tp_mesh, shard_experts=shard_experts, scattered=uniform)
        apply_sequence_parallel(layers, tp_mesh, uniform)
    else:
        _apply_plan(model, plan, tp_mesh, shard_experts=shard_experts)
        for block in uniform:
            share_input(block, tp_mesh)
    whole = sorted(set(_whole_modules(model)))
    logger.info("tensor parallel over %d ranks; whole on each: %s", tp_mesh.size(), ", ".join(whole) or "nothing")


def _apply_plan(
    model: PreTrainedModel,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    shard_experts: bool,
    scattered: Collection[nn.Module] = (),
) -> None:
    """Every style on its modules. The row-parallel layers of `scattered` blocks sum into shards of the tokens."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = getattr(head, "weight", 0) is getattr(embedding, "weight", 1)  # a stage may have neither
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
        if _is_local_colwise(style) and name.rpartition(".")[2] in (*_QUERY, *_KEY):
            attentions.add(parent)
    if is_tied:
        head.weight = embedding.weight
    for attention in attentions:
        _count_local_heads(attention, mesh.size())


def cut_parameters(
    model: PreTrainedModel, options: AxisOptions, tp_size: int, *, shard_experts: bool = True
) -> Iterator[nn.Parameter]:
    """What `apply_tensor_parallel` would cut, without ranks to cut it over: for planning."""
    plan = _checked_plan(model, options, tp_size)
    for name, module in model.named_modules():
        style = _style_of(plan, name)
        if is_experts(module):
            divides = int(module.num_experts) % tp_size == 0  # type: ignore[arg-type]
            yield from module.parameters() if style is not None and shard_experts and divides else ()
            continue
        for leaf, param in module.named_parameters(recurse=False):
            in_style = style if not isinstance(style, LocalParameters) else _style_of(plan, f"{name}.{leaf}")
            whole_bias = isinstance(in_style, RowwiseParallel) and leaf == "bias"
            if isinstance(in_style, (ColwiseParallel, RowwiseParallel, PackedColwise)) and not whole_bias:
                yield param


def _checked_plan(model: PreTrainedModel, options: AxisOptions, tp_size: int) -> Plan:
    """The model's own plan or the config's, for as many ranks. Raises ConfigError for heads that do not divide."""
    plan = get_hf_tp_shard_plan(model) if options.tp_plan is None else custom_plan(options.tp_plan, model)
    check_heads(model.config, plan, tp_size)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        _keep_odd_vocabulary_whole(model, module, plan, tp_size)
    return plan


def use_async_collectives(mesh: DeviceMesh) -> None:
    """Let the compiler overlap the gathers and scatters of sequence parallelism with the products next to them, through
    symmetric memory. It needs sequence parallelism, which is switched on with a warning, and CUDA.
    """
    if mesh.device_type != "cuda":
        raise ConfigError(
            "enable_async_tensor_parallel=true needs CUDA devices for symmetric memory, but this run uses "
            f"{mesh.device_type}",
            code="hardware_required",
            keys=("parallelizer.enable_async_tensor_parallel",),
            fix="parallelizer.enable_async_tensor_parallel=false",
        )
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    warn("implied_setting", "enable_async_tensor_parallel enables sequence_parallel, whose communication it overlaps")
    inductor._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # needed in torch 2.11, done by itself in 2.13
        enable_symm_mem_for_group(mesh.get_group().group_name)


def check_heads(config: PretrainedConfig, plan: Plan, tp_size: int) -> None:
    """Refuse a tp size that does not divide the heads that the plan shards."""
    text = config.get_text_config()
    counts = {}
    for field, projections in (("num_key_value_heads", _KEY), ("num_attention_heads", _QUERY)):
        count = getattr(text, field, None)  # not every family has key-value heads of its own
        if isinstance(count, int) and any(
            name.rpartition(".")[2] in projections and _is_local_colwise(style) for name, style in plan.items()
        ):
            counts[field] = count
    for field, count in counts.items():
        if count % tp_size:
            sizes = [size for size in range(1, count + 1) if math.gcd(*counts.values()) % size == 0]
            nearest = max((size for size in sizes if size < tp_size), default=1)
            raise ConfigError(
                f"mesh.tp_size={tp_size} must divide {field}={count}. Valid sizes for this model: "
                f"{', '.join(map(str, sizes))}",
                code="not_divisible",
                keys=("mesh.tp_size",),
                fix=f"mesh.tp_size={nearest}",
            )


def _is_uniform(model: nn.Module, block: nn.Module, plan: Plan) -> bool:
    """Does everything in this block with parameters follow the plan: column-parallel layers on the block's input (and
    norms of their heads), then one row-parallel layer that makes its output?
    """
    prefix = name_of(model, block)
    num_outputs = 0
    for name, module in block.named_modules(prefix=prefix or ""):
        style = _style_of(plan, name)
        is_output = isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),)
        num_outputs += is_output and module in block.children()
        follows = is_output or _is_local_colwise(style) or isinstance(style, SumParameterGradients | LocalParameters)
        if any(True for _ in module.parameters(recurse=False)) and not follows:
            return False
    return num_outputs == 1


def _is_local_colwise(style: ParallelStyle | None) -> bool:
    return isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),)


def _style_of(plan: Plan, name: str) -> ParallelStyle | None:
    return plan.get(name) or plan.get(wildcard(name))


def _keep_odd_vocabulary_whole(model: nn.Module, module: nn.Module | None, plan: Plan, tp_size: int) -> None:
    """A table whose rows do not divide stays whole on every rank: uneven shards do not combine with FSDP2."""
    weight = getattr(module, "weight", None)  # a pipeline stage may have neither table nor head
    name = name_of(model, module)
    if weight is not None and name in plan and weight.shape[0] % tp_size:
        logger.info("%s stays whole: its %d rows do not divide over tp_size=%d", name, weight.shape[0], tp_size)
        del plan[name]


def _apply_style(model: PreTrainedModel, name: str, module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    if isinstance(style, MLAKeyProjection):
        style = MLAKeyProjection(model.config.get_text_config().qk_rope_head_dim)
    if hasattr(module, "lora_A"):  # the adapter library's wrapper around the layer that the plan means
        _apply_to_adapter(name, module, style, mesh)
        return
    if isinstance(style, ExpertsOverTP):
        returns_input = any(isinstance(child, nn.Identity) for child in module.children())
        if not is_experts(module) or returns_input or module.num_experts % mesh.size():  # type: ignore[operator]
            return  # whole on every rank, like every module without a style
    else:
        _check_features(name, module, style, mesh.size())
    parallelize_module(module, mesh, style, src_data_rank=None)
    for leaf, buffer in module._buffers.items():  # torch makes DTensors of them too; a scale stays a plain number
        if isinstance(buffer, DTensor):
            module._buffers[leaf] = buffer.to_local()


def _apply_to_adapter(name: str, wrapper: Any, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """The wrapped layer as planned; of its adapter `B @ A`, the matrix with the sharded features likewise. The other
    one is whole, and so is what passes between them.
    """
    base = wrapper.get_base_layer()
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in wrapper.modules()):
        raise ConfigError(
            "lora.dropout must be 0 under tensor parallelism, because every tp rank would drop different inputs",
            code="unsupported_combination",
            keys=("model.lora.dropout", "mesh.tp_size"),
            fix="model.lora.dropout=0",
        )
    if isinstance(style, MLAKeyProjection):  # works on what comes out, whole
        parallelize_module(wrapper, mesh, style)
        return
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        raise ConfigError(
            f"an adapter on {name} cannot be sharded as {type(style).__name__}",
            code="unsupported_combination",
            keys=("model.lora.target_modules", "mesh.tp_size"),
            fix="model.lora.target_modules without this module",
        )
    _check_features(name, base, style, mesh.size())
    parallelize_module(base, mesh, style, src_data_rank=None)
    if isinstance(style, ColwiseParallel):
        matrices = wrapper.lora_B.values()
    else:
        matrices = wrapper.lora_A.values() if style.input_layouts == (Shard(-1),) else ()
    for matrix in matrices:
        parallelize_module(matrix, mesh, style, src_data_rank=None)


def _check_features(name: str, module: nn.Module, style: ParallelStyle, tp_size: int) -> None:
    if not isinstance(module, nn.Linear):
        return
    for kind, field in ((ColwiseParallel | PackedColwise, "out_features"), (RowwiseParallel, "in_features")):
        if isinstance(style, kind) and getattr(module, field) % tp_size:
            raise ConfigError(
                f"mesh.tp_size={tp_size} must divide {field}={getattr(module, field)} of {name}",
                code="not_divisible",
                keys=("mesh.tp_size",),
                fix=f"mesh.tp_size={math.gcd(getattr(module, field), tp_size)}",
            )


def _shard_own_parameters(name: str, module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Parameters that the plan names themselves: by output features or heads (colwise), or input features (rowwise)."""
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
    """Families that keep numbers of heads on the module split features by them: they must be this rank's."""
    for name in _HEAD_COUNTS:
        count = vars(attention).get(name)
        if isinstance(count, int):
            setattr(attention, name, count // tp_size)


def _whole_modules(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not any(isinstance(param, DTensor) for param in own):
            yield wildcard(name)
