"""Tensor-parallel styles of Hugging Face plans that torch lacks.

All styles communicate inside autograd: a gradient is summed over tp where it is computed, once per backward. So they
support several microbatches, recomputation, and FSDP2, which replaces parameters of a module. In contrast, the hook of
transformers all-reduces the accumulated `.grad` after each backward, which is wrong from the second microbatch on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.expert_parallel.apply import num_experts_of
from automodel_cli.distributed.layer_wrapping import swap_parameters
from automodel_cli.distributed.replicated_sums import sum_gradient, sum_value
from automodel_cli.distributed.tensors import to_local
from automodel_cli.distributed.typed_torch import set_attributes


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a replicated parameter by its local shard, a DTensor. No communication."""
    param = module._parameters[name]
    assert param is not None
    sharded = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
    module._parameters[name] = nn.Parameter(sharded, requires_grad=param.requires_grad)


class SumParameterGradients(ParallelStyle):
    """Replicated parameters that each rank applies to its own heads or tokens. Their gradients are summed over tp."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        swap_parameters(module, lambda param: sum_gradient(param, device_mesh))
        return module


class LocalParameters(ParallelStyle):
    """Pass sharded parameters to the module as plain local tensors. Used for attention sinks, one value per head."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        swap_parameters(module, to_local)
        return module


class MLAKeyProjection(ParallelStyle):
    """The joint key projection of latent attention, replicated.

    The compressed part feeds a column-parallel layer, which already sums the gradient of its input. The last `rope_dim`
    features are a key that all heads share, so their gradient is summed here.
    """

    def __init__(self, rope_dim: int | None = None):
        super().__init__()
        self.rope_dim = rope_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rope_dim = self.rope_dim
        assert rope_dim is not None, "the width of the shared key comes from the model's config"

        def sum_rope(module: nn.Module, args: object, out_BTF: Tensor) -> Tensor:
            # 512 compressed features and 64 of the shared key, for example.
            compressed, rope = out_BTF.split([out_BTF.shape[-1] - rope_dim, rope_dim], dim=-1)
            return torch.cat([compressed, sum_gradient(rope, device_mesh)], dim=-1)

        module.register_forward_hook(sum_rope)
        return module


class PackedColwise(ParallelStyle):
    """A linear layer whose outputs are `num_packed` blocks (gate and up). Each rank gets a shard of each block.

    Example: outputs [g0 g1 u0 u1] on 2 ranks. Rank 0 needs g0 and u0, but stores the contiguous shard g0 g1, which
    checkpoints can describe. Therefore the output is all-gathered first.
    """

    def __init__(self, num_packed: int = 2):
        super().__init__()
        self.num_packed = num_packed

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = ColwiseParallel(output_layouts=Replicate())._apply(module, device_mesh)
        size, rank = device_mesh.size(), device_mesh.get_local_rank()

        def own_part(module: nn.Module, args: object, out_BTF: Tensor) -> Tensor:
            full = sum_gradient(out_BTF, device_mesh)
            return torch.cat([block.chunk(size, -1)[rank] for block in full.chunk(self.num_packed, -1)], dim=-1)

        module.register_forward_hook(own_part)
        return module


class SumOutput(ParallelStyle):
    """The output of the module is a partial sum over tp."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda module, args, out: sum_value(out, device_mesh))
        return module


class ExpertsOverTP(ParallelStyle):
    """Each tp rank owns complete experts and computes them for the tokens that all tp ranks have.

    Plans shard the features of every expert instead. Complete experts give the same sums and have contiguous shards,
    which checkpoints can describe. Transposed, interleaved and biased experts need no special case.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        num_local = num_experts_of(module) // device_mesh.size()
        first = num_local * device_mesh.get_local_rank()
        for name in list(module._parameters):
            shard_parameter(module, name, device_mesh, Shard(0))
        set_attributes(module, num_experts=num_local)  # what its forward counts with
        swap_parameters(module, to_local)
        forward = module.forward

        def own_experts(hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
            weights_NK = sum_gradient(weights_NK, device_mesh)
            is_own_NK = (index_NK >= first) & (index_NK < first + num_local)
            token_P, choice_P = is_own_NK.nonzero(as_tuple=True)
            index_P, weights_P = index_NK[token_P, choice_P] - first, weights_NK[token_P, choice_P]
            # Use one token with weight 0, because every rank must compute a gradient of its experts.
            if len(token_P) == 0:
                token_P, index_P, weights_P = token_P.new_zeros(1), index_P.new_zeros(1), weights_NK[:1, 0] * 0
            # All ranks have all N tokens. Each computes the P (token, expert) pairs of its own experts: [N, D] -> [P,
            # D] -> [N, D], and the sum over ranks is the result of all experts.
            tokens_PD = sum_gradient(hidden_ND, device_mesh)[token_P]
            out_PD = forward(tokens_PD, index_P[:, None], weights_P[:, None])
            out_ND = torch.zeros_like(hidden_ND).index_add(0, token_P, out_PD.to(hidden_ND.dtype))
            return sum_value(out_ND, device_mesh)

        module.forward = own_experts
        return module


class PackedRowwise(ParallelStyle):
    """Packed experts, which `ExpertsOverTP` shards as a whole. No linear layer uses this style."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise ConfigError(
            f"packed_rowwise supports experts modules only, not {type(module).__name__}",
            code="wrong_type",
            keys=("tp_plan",),
            fix="rowwise, or rowwise_split_input",
        )
