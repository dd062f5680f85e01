"""Models that keep some parameters in float32 beside bfloat16, under FSDP2, against the same model on one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.fsdp2.sharding import fsdp2_strategy_parallelize
from automodel_cli.distributed.strategies.fsdp2.units import modules_in_other_dtype
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from tests.dist.harness import launch
from tests.errors import raises
from tests.tiny import build_hf, full, packed_batch, tiny_fields, token_row


def _part(parallel: bool, world: int):
    config = ModelConfig(config=tiny_fields("deepseek_v3", num_hidden_layers=2), dtype="bfloat16")
    part = build_part(config)
    gates = [module for name, module in part.named_modules() if name.endswith("mlp.gate")]
    for gate in gates:  # transformers keeps them in float32 since 5.24
        gate.weight = nn.Parameter(gate.weight.detach().float())
    if parallel:
        mesh = build_mesh(MeshConfig().resolve(world), "cpu")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fsdp2_strategy_parallelize(part, mesh.fsdp, policy)
    load_weights(part, config, device="cpu", seed=3)
    return part


def _check(rank: int, world: int) -> None:
    batch = packed_batch([[token_row(9), token_row(6, 1)]])
    results = []
    for parallel in (True, False):
        part = _part(parallel, world)
        logprobs = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
        logprobs.sum().backward()
        gate = next(p for name, p in part.named_parameters() if name.endswith("mlp.gate.weight"))
        results.append((logprobs.detach(), full(gate), full(gate.grad)))
    (logprobs, gate, grad), (want, want_gate, want_grad) = results
    assert gate.dtype == torch.float32 and torch.equal(gate, want_gate)
    assert torch.equal(logprobs, want)
    assert grad.dtype == torch.float32 and torch.allclose(grad / world, want_grad, rtol=1e-5, atol=1e-6)


def test_float32_gates_beside_bfloat16_compute_as_stored():
    launch(_check, 2)


def test_a_module_with_two_dtypes_is_rejected():
    model = build_hf("llama").bfloat16()
    layer = model.model.layers[1].self_attn.q_proj
    layer.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with raises(ConfigError, "not_supported_by_model", keys=("model.dtype", "parallelizer"), values=("scale",)):
        modules_in_other_dtype(model, model.model.layers)
