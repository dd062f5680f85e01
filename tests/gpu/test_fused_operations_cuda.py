"""What stands between products, compiled on CUDA: all that is found compiles, and gradients stay what they were."""

from __future__ import annotations

import copy

import pytest
import torch

from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts
from automodel_cli.distributed.fusion import compiled_regions
from automodel_cli.distributed.fusion.compiled_regions import Compiled
from automodel_cli.distributed.fusion.patterns import fuse_layers
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_regions_compile_on_this_gpu_and_compute_the_same(family: str, dtype: torch.dtype):
    fuser = Compiled("inductor", torch.device("cuda"), dtype)
    plain = tiny.build_hf(family)
    for experts in (module for module in plain.modules() if hasattr(module, "is_transposed")):
        GatedExperts.of(experts, int(experts.num_experts), None, fuser)
    model = copy.deepcopy(plain)
    fuse_layers(model, fuser)
    assert fuser.compiled and not fuser.rejected, str(fuser)
    found = []
    for one in (plain.to("cuda", dtype), model.to("cuda", dtype)):
        for tokens in (12, 17, 30):
            before = len(compiled_regions.compilations)
            one.zero_grad()
            one(
                input_ids=torch.arange(2 * tokens, device="cuda").view(2, -1) % 40
            ).logits.float().square().mean().backward()
        assert len(compiled_regions.compilations) == before, "other numbers of tokens are the same graphs"
        found.append(tiny.gradients(one))
    assert tiny.gradient_error(*found) < (1e-5 if dtype == torch.float32 else 0.05)
