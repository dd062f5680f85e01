"""Shard a part with the package `megatron-fsdp` (extra `megatron`).

The package shards flat parameter buffers. It has two sets of parameters, raw ones for computation and sharded ones for
the optimizer, and swaps them in the modules. Differences to its own examples:

- Gradients are sums (`calculate_per_token_loss=True`). By default it divides by the number of ranks.
- Reduction waits for the last microbatch. Strategies without sharded gradients reduce in place, and a second reduction
  would count the first one once per rank.
- The optimizer is not wrapped by `fully_shard_optimizer`, which creates the optimizer state by a step with zero
  gradients. That step decays the weights once and increments Adam's counters. `sharded_module.follow_optimizer` uses
  torch's hook instead.
- Parameters without local rows get an empty gradient instead of None, so that every rank has state for the same ones.

Needs CUDA. Tests run on a CPU with a substitute for `torch.cuda`. Overlap, double buffers and NCCL user buffers have
NOT run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.distributed.layer_wrapping import materialize, prepare_layers
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.sharded_module import follow_optimizer
from automodel_cli.distributed.strategies.megatron_fsdp import compat
from automodel_cli.distributed.strategies.megatron_fsdp.arguments import current_device, sharding_mesh, unit_modules
from automodel_cli.distributed.strategies.megatron_fsdp.config import MegatronFSDPConfig, zero_strategy
from automodel_cli.distributed.strategies.megatron_fsdp.handle import MegatronPart
from automodel_cli.distributed.typed_torch import set_attributes

if TYPE_CHECKING:
    from megatron_fsdp import MixedPrecisionPolicy

HAVE_MEGATRON_FSDP = find_spec("megatron_fsdp") is not None
HAVE_NVFSDP = HAVE_MEGATRON_FSDP  # Former name of the package.


def require_megatron_fsdp() -> None:
    """Raise ConfigError if the package or CUDA is missing."""
    if not HAVE_MEGATRON_FSDP:
        raise ConfigError(
            "parallelizer=megatron_fsdp needs the package megatron-fsdp, which is not installed",
            code="missing_package",
            keys=("parallelizer",),
            fix="pip install automodel-cli[megatron]",
        )
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # torch without CUDA, or no device.
        raise ConfigError(
            f"parallelizer=megatron_fsdp needs CUDA devices: {error}",
            code="hardware_required",
            keys=("parallelizer",),
            fix="parallelizer=fsdp2",
        ) from error


def megatron_fsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    megatron_fsdp_unit_modules: Sequence[str | type[nn.Module]] | None = None,
    tp_shard_plan: dict[str, ParallelStyle] | None = None,
    zero_dp_strategy: int | str = 3,
    init_fsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    dp_shard_dim: str = "dp",
    tp_dim: str = "tp",
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Shard `model` with Megatron-FSDP and return `(MegatronPart, optimizer)`. Collective.

    With one data-parallel rank, it applies tensor parallelism only, returns the model unwrapped, and logs a warning.

    Args:
        device_mesh: `(dp, cp, tp)`, `(dp, tp)`, or the root mesh with its five axes.
        tp_shard_plan: applied first.
        init_fsdp_with_meta_device: shard a model on the meta device without values. Otherwise it must have memory.
        check_for_nan_in_grad: raise ValueError before a reduction of NaN. One host synchronization per gradient.
        calculate_per_token_loss: no effect. Gradients are always sums.
        optimizer: its parameters are replaced by the sharded ones. See also `sharded_module.follow_optimizer`.

    Raises ConfigError without the package or CUDA, and for hybrid sharding, `average_in_collective`, or unit modules
    that the model does not have.
    """
    del calculate_per_token_loss
    _check_supported(average_in_collective)
    if tp_shard_plan is not None:
        parallelize_module(model, device_mesh[tp_dim], tp_shard_plan)
    mesh, shard_dim = sharding_mesh(device_mesh, dp_shard_dim, tp_dim)
    if mesh[shard_dim].size() == 1:
        warn("no_effect", "megatron_fsdp shards nothing on one data-parallel rank. Only tensor parallelism is applied")
        return model, optimizer
    before = list(model.named_parameters())
    options = {
        "fsdp_unit_modules": unit_modules(model, megatron_fsdp_unit_modules),
        "zero_dp_strategy": zero_strategy(zero_dp_strategy), "report_nan_in_param_grad": check_for_nan_in_grad,
        "overlap_grad_reduce": overlap_grad_reduce, "overlap_param_gather": overlap_param_gather,
        "disable_bucketing": disable_bucketing, "keep_fp8_transpose_cache": keep_fp8_transpose_cache,
        "nccl_ub": nccl_ub, "fsdp_double_buffer": fsdp_double_buffer,
    }  # fmt: skip
    precision = _mixed_precision(preserve_fp32_weights, grad_reduce_in_fp32)
    with _fillable_later(model) if init_fsdp_with_meta_device else nullcontext():
        sharded = _fully_shard(model, mesh, shard_dim, tp_dim, init_fsdp_with_meta_device, precision, options)
    if optimizer is not None:
        _point_at_shards(optimizer, before, model)
        follow_optimizer(optimizer, [model])
    return sharded, optimizer


def _check_supported(average_in_collective: bool) -> None:
    require_megatron_fsdp()
    if average_in_collective:
        raise ConfigError(
            "average_in_collective=true is not supported because gradients are sums over tokens, not means over ranks",
            code="not_supported",
            keys=("average_in_collective",),
            fix="parallelizer.average_in_collective=false",
        )


def _mixed_precision(wide_weights: bool, wide_gradients: bool) -> MixedPrecisionPolicy:
    import megatron_fsdp

    main, reduced = (torch.float32 if wide else None for wide in (wide_weights, wide_gradients))
    return megatron_fsdp.MixedPrecisionPolicy(main_params_dtype=main, main_grads_dtype=reduced, grad_comm_dtype=reduced)


def _fully_shard(
    model: nn.Module,
    mesh: DeviceMesh,
    shard_dim: str,
    tp_dim: str,
    on_meta: bool,
    precision: MixedPrecisionPolicy,
    options: Mapping[str, object],
) -> MegatronPart:
    """Call the package with the arguments that the contract of gradient sums fixes."""
    import megatron_fsdp

    if mesh[tp_dim].size() > 1:
        compat.correct_tensor_parallel_shards()
    return MegatronPart(
        megatron_fsdp.fully_shard_model(
            module=model,
            device_mesh=mesh,
            dp_shard_dim=shard_dim,
            tp_dim=tp_dim,
            # The package recognizes experts by their name. They are sharded like other parameters.
            expt_device_mesh=mesh,
            device=current_device(mesh.device_type),
            init_model_with_meta_device=on_meta,
            mixed_precision_policy=precision,
            sync_model_each_microbatch=False,
            preproc_state_dict_for_dcp_ckpt=False,
            calculate_per_token_loss=True,
            **options,
        )
    )


def nvfsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    nvfsdp_unit_modules: Sequence[str | type[nn.Module]] | None = None,
    tp_shard_plan: dict[str, ParallelStyle] | None = None,
    data_parallel_sharding_strategy: int | str = "optim_grads_params",
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
) -> nn.Module:
    """Call `megatron_fsdp_strategy_parallelize` by its former name and arguments. Returns the model only."""
    wrapped, _ = megatron_fsdp_strategy_parallelize(
        model,
        device_mesh,
        nvfsdp_unit_modules,
        tp_shard_plan,
        data_parallel_sharding_strategy,
        init_nvfsdp_with_meta_device,
        grad_reduce_in_fp32,
        preserve_fp32_weights,
        overlap_grad_reduce,
        overlap_param_gather,
        check_for_nan_in_grad,
        average_in_collective,
        disable_bucketing,
        calculate_per_token_loss,
        keep_fp8_transpose_cache_when_using_custom_fsdp,
        nccl_ub,
        fsdp_double_buffer,
    )
    return wrapped


@contextmanager
def _fillable_later(model: nn.Module) -> Iterator[None]:
    """Add `reset_parameters` to meta modules, which the package calls and transformers models lack.

    Weights are loaded afterwards, shard by shard, so the method does nothing.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(model.parameters())):
        raise ConfigError(
            "init_fsdp_with_meta_device=true is not supported because it would untie the tied weights of this model",
            code="not_supported_by_model",
            keys=("init_fsdp_with_meta_device",),
            fix="parallelizer.init_fsdp_with_meta_device=false",
        )
    owners = [module for module in model.modules() if any(p.is_meta for p in module.parameters(recurse=False))]
    for module in owners:
        set_attributes(module, reset_parameters=_keep)
    try:
        yield
    finally:
        for module in owners:
            del module.reset_parameters


def _keep() -> None:
    """Do not initialize."""


def _point_at_shards(
    optimizer: torch.optim.Optimizer, before: Sequence[tuple[str, nn.Parameter]], model: nn.Module
) -> None:
    """Replace the parameters of an optimizer before its first step by the sharded ones."""
    assert not optimizer.state, "an optimizer must be sharded before its first step"
    sharded = dict(model.named_parameters())
    # By identity, because an optimizer has no names.
    replaced = {id(param): sharded[name] for name, param in before}
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(param), param) for param in group["params"]]


def megatron_parallelize(part: nn.Module, mesh: Mesh, config: MegatronFSDPConfig) -> nn.Module:
    """Shard a part with Megatron-FSDP.

    Parameters on the meta device are allocated without values first, unless the package shards them on meta: it copies
    them into its buffers.
    """
    prepare_layers(part, config, mesh.device.type)
    if not config.init_fsdp_with_meta_device:
        materialize(part, mesh.device)
    module, _ = megatron_fsdp_strategy_parallelize(
        part,
        mesh.root,
        config.megatron_fsdp_unit_modules,
        None,
        config.zero_dp_strategy,
        config.init_fsdp_with_meta_device,
        config.grad_reduce_in_fp32,
        config.preserve_fp32_weights,
        config.overlap_grad_reduce,
        config.overlap_param_gather,
        check_for_nan_in_grad=False,  # The training step checks the norm of all gradients, and reports the rows.
        disable_bucketing=config.disable_bucketing,
        calculate_per_token_loss=True,
        nccl_ub=config.nccl_ub,
        fsdp_double_buffer=config.fsdp_double_buffer,
    )
    return module
