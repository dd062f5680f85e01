"""Kernels for vLLM's CPU build in the quantized formats that it has none for.

vLLM parses the config, chooses the scheme, and loads and joins the tensors. Only the product is replaced: the package
compressed-tensors unpacks the weight, and torch multiplies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import vllm.model_executor.kernels.linear as kernels
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearKernel,
    Int8ScaledMMLinearKernel,
    MPLinearKernel,
    MxFp4LinearKernel,
    NvFp4LinearKernel,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as mxfp4_experts,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as integer_experts,
)
from vllm.platforms import PlatformEnum


def of_integers(packed_OW: Tensor, scale_OG: Tensor, bits: int) -> Tensor:
    outputs, inputs = len(packed_OW), packed_OW.shape[1] * 32 // bits
    coded_OI = unpack_from_int32(packed_OW.data, bits, torch.Size((outputs, inputs)))
    return coded_OI.float() * spread(scale_OG.data.float(), inputs)


def of_e2m1(packed_OB: Tensor, scale_OG: Tensor) -> Tensor:
    """The weight in bfloat16, as vLLM's own emulation has it."""
    outputs, inputs = len(packed_OB), packed_OB.shape[1] * 2
    coded_OI = unpack_fp4_from_uint8(packed_OB.data, outputs, inputs, torch.float32)
    return (coded_OI * spread(scale_OG, inputs)).bfloat16()


def spread(scale_OG: Tensor, inputs: int) -> Tensor:
    return scale_OG.repeat_interleave(inputs // scale_OG.shape[1], 1)


class Supported:
    """Of every device."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, *_: object) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave them as they are loaded."""


class Integers(Supported, MPLinearKernel):
    """int4 and int8. Inputs in fp8 where the scheme says so, as CUTLASS has them."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        packed, scale, _ = self._get_weight_params(layer)
        if self.config.act_type == torch.float8_e4m3fn:
            of_tokens = x.abs().amax(-1, keepdim=True) / 448
            x = (x / of_tokens).to(torch.float8_e4m3fn).to(x.dtype) * of_tokens
        bits = self.config.weight_type.size_bits
        return F.linear(x, of_integers(packed, scale, bits).to(x.dtype), bias)


class Int8(Supported, Int8ScaledMMLinearKernel):
    """int8 weights and inputs, with the scales of compressed-tensors."""

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight_OI, scale, *_ = self._get_layer_params(layer)
        of_tokens = x.abs().amax(-1, keepdim=True) / 127.5
        x = (x / of_tokens).round().clamp(-128, 127) * of_tokens
        return F.linear(x, (weight_OI.float() * scale).to(x.dtype), bias)


class Fp8(Supported, FP8ScaledMMLinearKernel):
    """fp8 weights, plain inputs."""

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight_IO, scale, *_ = self._get_layer_params(layer)
        return F.linear(x, (weight_IO.t().float() * scale).to(x.dtype), bias)

    def apply_scaled_mm(self, **_: object) -> Tensor:
        raise NotImplementedError


class MxFp4(Supported, MxFp4LinearKernel):
    """mxfp4 weights, plain inputs."""

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, of_e2m1(layer.weight, decompress_mx_scale(layer.weight_scale.data)).to(x.dtype), bias)


class NvFp4(Supported, NvFp4LinearKernel):
    """nvfp4 weights, plain inputs."""

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        scale = layer.weight_scale.data.float() * layer.weight_global_scale
        return F.linear(x, of_e2m1(layer.weight, scale).to(x.dtype), bias)


class Experts:
    """Experts one after another."""

    is_monolithic = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave them as they are loaded."""

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    def matrix(self, packed_OW: Tensor, scale_OG: Tensor) -> Tensor:
        raise NotImplementedError

    def apply(self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **_: object) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(len(layer.w13_weight_packed)):
            w13 = self.matrix(layer.w13_weight_packed[expert], layer.w13_weight_scale[expert]).to(x.dtype)
            w2 = self.matrix(layer.w2_weight_packed[expert], layer.w2_weight_scale[expert]).to(x.dtype)
            gate, up = F.linear(x, w13).chunk(2, -1)
            share = ((topk_ids == expert) * topk_weights).sum(-1, keepdim=True).to(x.dtype)
            y += share * F.linear(F.silu(gate) * up, w2)
        return y


class IntegerExperts(Experts, integer_experts.CompressedTensorsWNA16MoEMethod):
    def matrix(self, packed_OW: Tensor, scale_OG: Tensor) -> Tensor:
        return of_integers(packed_OW, scale_OG, self.num_bits)


class MxFp4Experts(Experts, mxfp4_experts.CompressedTensorsW4A4Mxfp4MoEMethod):
    def matrix(self, packed_OW: Tensor, scale_OG: Tensor) -> Tensor:
        return of_e2m1(packed_OW, decompress_mx_scale(scale_OG))


def install() -> None:
    """Let vLLM choose these where it has no kernel, and the schemes of a Hopper GPU."""
    cpu, linear = PlatformEnum.CPU, kernels
    # Only the library for AVX-512 has the product of int4. Without VNNI that of int8 saturates.
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        linear._POSSIBLE_KERNELS[cpu] = []
    linear._POSSIBLE_KERNELS[cpu].append(Integers)
    if not torch.cpu._is_vnni_supported():
        linear._POSSIBLE_INT8_KERNELS[cpu] = [Int8]
    linear._POSSIBLE_WFP8A16_KERNELS[cpu] = [Fp8]
    linear._POSSIBLE_MXFP4_KERNELS[cpu] = [MxFp4]
    linear.MarlinNvFp4LinearKernel = NvFp4
    CompressedTensorsConfig._check_scheme_supported = staticmethod(on_hopper)
    integer_experts.select_wna16_moe_backend = lambda **_: (integer_experts.WNA16MoEBackend.MARLIN, None)
    integer_experts.check_moe_marlin_supports_config = lambda *_, **__: True
    integer_experts.CompressedTensorsWNA16MoEMethod = IntegerExperts
    mxfp4_experts.CompressedTensorsW4A4Mxfp4MoEMethod = MxFp4Experts


def on_hopper(min_capability: int, error: bool = True, match_exact: bool = False) -> bool:
    return min_capability == 90 if match_exact else min_capability <= 90
