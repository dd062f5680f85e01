"""Apply expert parallelism to any Hugging Face model whose experts use the experts interface of transformers.

`token_dispatcher` moves tokens between ranks. `grouped_mlp` computes the experts if a measurement shows that the family
computes gated MLPs. Otherwise the module of the family computes them.

Sharding: experts are DTensors with Shard(0) over the `ep` axis. FSDP2 shards them further over `ep_shard`. Expert
gradients are summed over `ep_shard` only, because each expert already receives the tokens of all ranks of `ep`.

Example: 8 experts on ep=4 are 2 experts per rank. A token of rank 0 with the experts (1, 6) is sent to ranks 0 and 3.

Tensor parallelism replicates tokens over its ranks. Each tp rank dispatches a share of the tokens, and all tp ranks
gather the results. No token is computed or counted twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.distributed import kernel_report
from automodel_cli.distributed.activation_checkpointing.saved_results import register_saver
from automodel_cli.distributed.expert_parallel import low_rank
from automodel_cli.distributed.expert_parallel.deep_ep import DeepEP, require_deep_ep
from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts, main_grads_of
from automodel_cli.distributed.expert_parallel.grouped_mlp_gemms import parameters_of
from automodel_cli.distributed.expert_parallel.shared_expert_overlap import SharedExperts
from automodel_cli.distributed.expert_parallel.token_dispatcher import AllToAll, TokenDispatcher
from automodel_cli.distributed.float8.grouped_gemm import arithmetic_of
from automodel_cli.distributed.float8.quantization import autocast_dtype
from automodel_cli.distributed.fusion.compiled_regions import RegionCompiler
from automodel_cli.distributed.layer_wrapping import swap_parameters
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.qat.settings import FakeQuantization
from automodel_cli.distributed.scatter_gather import gather_from_group, scatter_to_group
from automodel_cli.distributed.tensors import to_local
from automodel_cli.distributed.typed_torch import disable, set_attributes

_Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
_DEFAULT_IMPLEMENTATION = "grouped_mm"


def is_experts(module: nn.Module) -> bool:
    """Return whether `module` has the attributes that the experts decorator of transformers sets.

    The forward of such a module is `(hidden_TD, index_TK, weight_TK) -> [T, D]`.
    """
    return all(hasattr(module, name) for name in ("num_experts", "is_transposed", "has_gate"))


def num_experts_of(experts: nn.Module) -> int:
    """Return the number of experts that the forward of this module counts with."""
    return cast(int, experts.num_experts)


def experts_modules(module: nn.Module) -> list[nn.Module]:
    """Return the experts modules in `module`, in module order."""
    return [child for child in module.modules() if is_experts(child)]


def apply_expert_parallel(
    part: nn.Module,
    mesh: Mesh,
    dispatch: str = "all_to_all",
    fuser: RegionCompiler | None = None,
    *,
    overlap_shared_experts: bool = True,
) -> None:
    """Distribute the experts of a part over `mesh.ep`, in place.

    A pipeline stage without experts is not changed. Parameters may be on the meta device, or have the same values on
    every rank.

    Args:
        part: a module whose child `model` is a transformers model.
        dispatch: `all_to_all` or `deepep`.
        fuser: compiles the fused ops between the GEMMs of the experts.
        overlap_shared_experts: compute shared experts while tokens are in transit. Ignored with tensor parallelism.

    Raises ConfigError for a model without experts, for experts without the experts interface, and if the number of
    experts is not a multiple of the size of `mesh.ep`.
    """
    assert mesh.ep is not None, "this layout distributes no experts"
    blocks = [(block, child) for block in part.modules() for child in block.children() if is_experts(child)]
    if not blocks:
        _check_has_experts(part, mesh)
    for block, experts in blocks:
        _check(experts, mesh)
        num_local = num_experts_of(experts) // mesh.ep.size()
        for name, param in experts.named_parameters(recurse=False):
            # `src_data_rank=None`: no communication. Each rank slices its own copy, which may be on the meta device.
            shard = distribute_tensor(param.detach(), mesh.ep, [Shard(0)], src_data_rank=None)
            experts._parameters[name] = nn.Parameter(shard, param.requires_grad)
        set_attributes(experts, num_experts=num_local)  # the family's forward counts its own
        around = block if overlap_shared_experts and mesh.tp.size() == 1 else None
        experts.forward, text = _dispatched(experts, dispatch, num_local, mesh, fuser, around)
        kernel_report.record("experts", text)
        register_saver(experts)


def multiply_in_fp8(part: nn.Module, mesh: Mesh, fuser: RegionCompiler | None = None) -> None:
    """Compute unsharded experts in float8 as configured by `model.fp8`, in place. Sharded experts do so in
    `_dispatched`.
    """
    modules = [experts for experts in experts_modules(part) if arithmetic_of(experts) is not None]
    if modules and mesh.layout.tp > 1:
        warn(
            "precision_loss",
            "%d experts modules do not compute in float8 because tensor parallelism shards them. Results differ from "
            "one process. Expert parallelism (mesh.ep_size) keeps experts unsharded",
            len(modules),
        )
        return
    for experts in modules:
        compute = _sorted_once(experts, num_experts_of(experts), mesh, fuser)
        assert compute is not None, "experts with 8-bit products are those whose arithmetic is known"
        experts.forward = torch.compiler.disable(compute)


def make_dispatcher(dispatch: str, num_local_experts: int, mesh: Mesh) -> TokenDispatcher:
    assert mesh.ep_group is not None
    if dispatch == "deepep":
        require_deep_ep(mesh.device.type)
        return DeepEP(num_local_experts, mesh.ep_group)
    return AllToAll(num_local_experts, mesh.ep_group)


def _dispatched(
    experts: nn.Module, dispatch: str, num_local: int, mesh: Mesh, fuser: RegionCompiler | None, block: nn.Module | None
) -> tuple[Callable[..., Tensor], str]:
    """Return a forward with the signature of the family's own, for experts distributed over `mesh.ep`, and its line of
    the startup summary.
    """
    tp_group = mesh.tp.get_group() if mesh.tp.size() > 1 else None
    compute = _sorted_once(experts, num_local, mesh, fuser, block) if dispatch == "all_to_all" else None
    text = f"grouped GEMM over tokens sorted once, {dispatch}"
    if compute is None:
        compute = _by_own_code(experts, make_dispatcher(dispatch, num_local, mesh))
        own = type(experts).__name__
        reason = " (not a known gated MLP, or another experts implementation)" if dispatch == "all_to_all" else ""
        text = f"code of {own} after {dispatch}{reason}"

    # The number of tokens per rank depends on the data, which a graph cannot contain. The compiler skips this function
    # and compiles the code around it.
    @disable()
    def forward(hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        if tp_group is None:
            return compute(hidden_TD, index_TK, weight_TK)
        # (T, D) -> (T / tp, D): every tp rank has the same tokens, and dispatches 1 / tp of them.
        hidden_SD, index_SK, weight_SK = (scatter_to_group(rows, tp_group) for rows in (hidden_TD, index_TK, weight_TK))
        return gather_from_group(compute(hidden_SD, index_SK, weight_SK), len(hidden_TD), tp_group)

    return forward, text


def _sorted_once(
    experts: nn.Module, num_local: int, mesh: Mesh, fuser: RegionCompiler | None, block: nn.Module | None = None
) -> _Compute | None:
    """Return the grouped GEMM path, which sorts tokens once and overlaps shared experts with communication.

    Return None if the arithmetic of the experts is unknown, or if the user selected another experts implementation.
    """
    if experts.config._experts_implementation != _DEFAULT_IMPLEMENTATION:  # type: ignore[union-attr]
        return None
    gated = GatedExperts.of(experts, num_local, mesh.ep_group, fuser, arithmetic_of(experts))
    if gated is None:
        return None
    shared = None if block is None else SharedExperts.of(block, experts)
    overlap_shared_experts = None if shared is None else shared.run

    def compute(hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        return sorted_forward(gated, experts, hidden_TD, index_TK, weight_TK, overlap_shared_experts)

    return compute


def sorted_forward(
    gated: GatedExperts,
    experts: nn.Module,
    hidden_TD: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    overlapped: Callable[[], None] | None = None,
) -> Tensor:
    """Compute `experts` with the grouped GEMM path and the present values of their parameters and adapters."""
    parameters = parameters_of(experts)
    qat: FakeQuantization | None = vars(experts).get("qat")
    # Gradients of quantized weights are masked before they are added.
    adds_directly = qat is None and autocast_dtype(hidden_TD.device) is None
    main_grads = main_grads_of(experts) if adds_directly else []
    if not main_grads:
        parameters = [to_local(param) for param in parameters]
    scale = low_rank.scale_of(experts)
    return gated(hidden_TD, index_TK, weight_TK, parameters, main_grads, overlapped, scale, qat)


def _by_own_code(experts: nn.Module, dispatch: TokenDispatcher) -> _Compute:
    """Return the fallback: dispatch tokens and call the experts module of the family with one expert per row."""
    swap_parameters(experts, to_local)  # The family's code indexes its parameters by expert. It needs the local shard.
    own_forward = experts.forward

    def local_experts(hidden_ND: Tensor, expert_N: Tensor) -> Tensor:
        """Compute row n with local expert `expert_N[n]`. `[N, D]` -> `[N, D]`."""
        # One expert per row with weight 1: the family's code becomes a plain per-row function, and weights are applied
        # later.
        result_ND: Tensor = own_forward(hidden_ND, expert_N[:, None], hidden_ND.new_ones(len(expert_N), 1))
        return result_ND

    return lambda hidden_TD, index_TK, weight_TK: dispatch(hidden_TD, index_TK, weight_TK, local_experts)


def _check(experts: nn.Module, mesh: Mesh) -> None:
    """Raise ConfigError unless all parameters have the expert as first dimension and `ep` divides the experts."""
    num_experts, ep = num_experts_of(experts), mesh.layout.ep
    for name, param in experts.named_parameters():
        if param.shape[0] != num_experts:
            raise ConfigError(
                f"mesh.ep_size={ep} is not supported because the {num_experts} experts share the parameter "
                f"{type(experts).__name__}.{name} of shape {tuple(param.shape)}",
                code="not_supported_by_model",
                keys=("mesh.ep_size",),
                fix="mesh.ep_size=1",
            )
    if num_experts % ep:
        ranks = mesh.layout.world_size // mesh.layout.pp
        valid = [size for size in range(1, num_experts + 1) if num_experts % size == 0 and ranks % size == 0]
        below, above = max(n for n in valid if n < ep), min((n for n in valid if n > ep), default=None)
        raise ConfigError(
            f"mesh.ep_size={ep} must divide the {num_experts} experts of {type(experts).__name__}",
            code="not_divisible",
            keys=("mesh.ep_size",),
            fix=f"mesh.ep_size={below}" + (f", or mesh.ep_size={above}" if above else ""),
        )


def _check_has_experts(part: nn.Module, mesh: Mesh) -> None:
    """Raise ConfigError if the full model has no experts. A single pipeline stage may have none."""
    model: Any = part.model
    with torch.device("meta"):
        full_model = type(model)(copy.deepcopy(model.config))
    if experts_modules(full_model):
        return
    ep, name = mesh.layout.ep, type(model).__name__
    own = [
        m
        for path, m in full_model.named_modules()
        if path.rpartition(".")[2] == "experts" or "Experts" in type(m).__name__
    ]
    if own:
        reason = f"{name} calls its experts ({type(own[0]).__name__}) without the experts interface of transformers"
    else:
        reason = f"{name} has no experts"
    raise ConfigError(
        f"mesh.ep_size={ep} is not supported because {reason}",
        code="not_supported_by_model",
        keys=("mesh.ep_size",),
        fix="mesh.ep_size=1",
    )
