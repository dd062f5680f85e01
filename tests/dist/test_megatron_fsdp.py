"""Megatron-FSDP on CPU ranks, by a stand-in for `torch.cuda`: every strategy against one process, and what follows a
step (optimizer, clipping, checkpoints, export) against the whole model.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import DDPConfig, MegatronFSDPConfig
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.distributed.sharded_module import follow_optimizer, handle_of, weights_changed
from automodel_cli.distributed.strategies.megatron_fsdp import sharding as megatron_fsdp
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.checkpoint_io.weight_stream import iter_hf_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.uneven_dtensor import gather_uneven, is_uneven
from automodel_cli.objectives.sft import SFT
from automodel_cli.training.checkpoint.checkpointer import Checkpointer
from automodel_cli.training.config import CheckpointConfig
from automodel_cli.training.optimizers.build import build_optimizer
from automodel_cli.training.optimizers.lr_scheduler import Constant
from automodel_cli.training.optimizers.nodes import AdamW, Muon
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist import cuda_stand_in, vision_cases
from tests.dist.harness import launch, launch_all
from tests.dist.parity import FSDP2, Case, compare, step_batches, tiny_part
from tests.errors import raises
from tests.rounding import tolerance

pytestmark = pytest.mark.slow

pytest.importorskip("megatron_fsdp", reason="pip install automodel-cli[megatron]")

MEGATRON = MegatronFSDPConfig()
STEPS, SAVED_AFTER = 4, 2


def _compare(rank, world, cases, sabotage=None):
    cuda_stand_in.install()
    return compare(rank, world, cases, sabotage)


def _check(world, cases):
    """All in one set of ranks."""
    for case, errors in zip(cases, launch(_compare, world, cases), strict=True):
        assert errors.within_rounding(), f"{case}: {errors}"


def test_every_strategy_has_the_numbers_of_one_process():
    configs = [replace(MEGATRON, zero_dp_strategy=strategy) for strategy in (0, 1, 2, 3)]
    _check(2, [Case("qwen3", config=config, num_layers=2) for config in configs])


def test_a_step_of_one_microbatch_has_the_numbers_of_one_process():
    configs = [replace(MEGATRON, zero_dp_strategy=strategy) for strategy in (0, 3)]
    _check(2, [Case("qwen3", config=config, num_microbatches=1, num_layers=2) for config in configs])


OPTIONS = {
    "no overlap, whole copies": {"zero_dp_strategy": 0, "overlap_grad_reduce": False, "overlap_param_gather": False},
    "no overlap, sharded state": {"zero_dp_strategy": 1, "overlap_grad_reduce": False, "overlap_param_gather": False},
    "no overlapped gathering": {"zero_dp_strategy": 2, "overlap_param_gather": False},
    "one bucket": {"disable_bucketing": True},
    "double buffer": {"fsdp_double_buffer": True},
    "fp32 copies": {"preserve_fp32_weights": True, "grad_reduce_in_fp32": True},
    "units by path": {"megatron_fsdp_unit_modules": ["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]},
}


def test_options_do_not_change_the_numbers():
    """Two buffers are used again from the third layer on."""
    layers = {"double buffer": 4}
    _check(2, [Case(config=replace(MEGATRON, **OPTIONS[name]), num_layers=layers.get(name, 2)) for name in OPTIONS])


def test_tied_embeddings_and_experts():
    _check(2, [Case(family, config=MEGATRON) for family in ("gemma3_text", "qwen3_moe")])


def _of_mesh(sizes, *strategies):
    configs = [replace(MEGATRON, zero_dp_strategy=strategy) for strategy in strategies]
    mesh = MeshConfig(**sizes)
    return [Case("qwen3", config=config, mesh=mesh, num_microbatches=2, num_layers=2) for config in configs]


def _compare_pictures(rank, world, cases):
    cuda_stand_in.install()
    return vision_cases.compare(rank, world, "qwen3_vl", cases)


def test_a_vision_tower_has_the_numbers_of_one_process():
    """Recipes refuse it, because loading and export have not been run with a tower."""
    strategies = [replace(MEGATRON, zero_dp_strategy=strategy) for strategy in (0, 3)]
    cases = [vision_cases.Case(parallelizer=strategy) for strategy in strategies]
    for case, errors in zip(cases, launch(_compare_pictures, 2, cases), strict=True):
        assert errors.within_rounding(), f"{case}: {errors}"


def test_under_tensor_and_context_parallelism():
    _check(4, [*_of_mesh({"tp_size": 2}, 3), *_of_mesh({"cp_size": 2}, 3)])


def test_other_strategies_under_tensor_parallelism():
    _check(4, _of_mesh({"tp_size": 2}, 0, 1))


def _scores(rank, world, configs, frozen):
    """Log-probs of one microbatch under each strategy."""
    cuda_stand_in.install()
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    model, found = ModelConfig(config=tiny.tiny_fields("qwen3", tie_word_embeddings=False, num_hidden_layers=2)), []
    for config in configs:
        part = build_part(model)
        part.requires_grad_(not frozen)
        stages = SingleStage(parallelize(part, mesh, config))
        load_weights(part, model, device=mesh.device, seed=3)
        weights_changed([part])
        assert not frozen or not any(param.requires_grad for param in part.parameters())
        found += stages.forward(step_batches(Case("qwen3"), 1)[0], lambda output, _: output.logprobs_BT)
    return found


def test_a_model_that_is_frozen_before_it_is_sharded_scores_as_one_that_trains():
    configs = [*(replace(MEGATRON, zero_dp_strategy=strategy) for strategy in (0, 3)), DDPConfig(), FSDP2]
    frozen, trained = (launch(_scores, 2, configs, given) for given in (True, False))
    for mine, theirs in zip(frozen, trained, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def _trained(config, world, folder, *, resume=False, async_save=False):
    """Losses, norms and final weights of a short run from random weights; `resume` goes on after `SAVED_AFTER`."""
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    model = ModelConfig(config=tiny.tiny_fields("qwen3", tie_word_embeddings=False, num_hidden_layers=2))
    part = build_part(model)
    stages = SingleStage(parallelize(part, mesh, config))
    load_weights(part, model, device=mesh.device, seed=3)
    weights_changed([part])
    optimizer = build_optimizer(AdamW(lr=1e-2, weight_decay=0.1), [part])
    scheduler = Constant().build(optimizer, STEPS)
    checkpointer = Checkpointer(folder, CheckpointConfig(async_save=async_save, resume="auto" if resume else None))
    first = 0
    if resume:
        first = checkpointer.load(checkpointer.resume_path(), [part], optimizer, scheduler).step
    results = []
    for step in range(first, STEPS):
        everyone = [batch for batches in step_batches(Case(num_microbatches=2), 2) for batch in batches]
        count = len(everyone) // mesh.dp_size
        mine = everyone[mesh.dp_rank * count :][:count]
        if step == 1:
            stages.forward(mine, lambda output, batch: output.logprobs_BT.sum())  # a forward alone, as validation is
        result = train_step(stages, mine, SFT(), optimizer, mesh, max_grad_norm=0.5)
        scheduler.step()
        results += [result.loss.item(), result.grad_norm.item()]
        if step + 1 == SAVED_AFTER:
            checkpointer.save(step + 1, [part], optimizer, scheduler)
    checkpointer.close()
    weights = {name: tensor for bucket in iter_hf_weights([part]) for name, tensor in bucket}
    return results, weights


def _train(rank, world, config, folder, options):
    cuda_stand_in.install()
    return _trained(config, world, folder, **options)


def _difference(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    return launch(_train, 1, FSDP2, tmp_path_factory.mktemp("one"), {})


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_a_run_trains_resumes_and_exports_like_one_process(in_one_process, tmp_path, strategy):
    want, want_weights = in_one_process
    config = replace(MEGATRON, zero_dp_strategy=strategy, init_fsdp_with_meta_device=strategy == 3)
    got, weights = launch(_train, 2, config, tmp_path / "two", {})
    assert got == pytest.approx(want, rel=1e-5)
    assert _difference(weights, want_weights) < 1e-5
    resumed, resumed_weights = launch(_train, 2, config, tmp_path / "two", {"resume": True})
    assert resumed == got[2 * SAVED_AFTER :]
    assert _difference(resumed_weights, weights) == 0


def test_checkpoints_go_on_under_another_strategy(tmp_path):
    got, weights = launch(_train, 2, MEGATRON, tmp_path, {"async_save": True})
    resumed, resumed_weights = launch(_train, 1, FSDP2, tmp_path, {"resume": True})
    assert resumed == pytest.approx(got[2 * SAVED_AFTER :], rel=1e-5)
    assert _difference(resumed_weights, weights) < 1e-5


def _loaded(rank, world, folder, config):
    """Largest difference from the file after loading, and whether shards are really unequal."""
    cuda_stand_in.install()
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    model = ModelConfig(pretrained=folder)
    part = build_part(model)
    module = parallelize(part, mesh, config)
    load_weights(SingleStage(module).parts[0], model, device=mesh.device, seed=0)
    want = dict(tiny.build_hf("llama").named_parameters())
    got = {
        part.hub_name(name): gather_uneven(p) if is_uneven(p) else p.full_tensor()
        for name, p in part.named_parameters()
    }
    return _difference(got, want), any(p._local_tensor.shape[0] * world != p.shape[0] for p in part.parameters())


@pytest.mark.parametrize("strategy", [0, 3])
def test_checkpoints_of_the_hub_load_into_uneven_shards(tmp_path, strategy):
    tiny.build_hf("llama").save_pretrained(tmp_path)
    results = launch_all(_loaded, 2, str(tmp_path), replace(MEGATRON, zero_dp_strategy=strategy))
    assert [error for error, _ in results] == [0, 0]
    assert strategy == 0 or any(uneven for _, uneven in results)


def _sgd_updates(rank, world):
    """What one step of SGD changes: by the older function, and by the documented one with its optimizer."""
    cuda_stand_in.install()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    everyone = step_batches(Case(num_microbatches=2), world)
    weight = sum(int(batch.num_label_tokens) for batches in everyone for batch in batches)
    updates = []
    for older in (True, False):
        part = tiny_part("llama")
        before = {name: param.detach().clone() for name, param in part.named_parameters()}
        if older:
            module = megatron_fsdp.nvfsdp_strategy_parallelize(part, mesh, [LlamaDecoderLayer])
            optimizer = torch.optim.SGD(part.parameters(), lr=1.0)
            follow_optimizer(optimizer, [part])
        else:
            optimizer = torch.optim.SGD(part.parameters(), lr=1.0)
            module, _ = megatron_fsdp.megatron_fsdp_strategy_parallelize(
                part, mesh, [LlamaDecoderLayer], optimizer=optimizer
            )
        for i, batch in enumerate(everyone[rank]):
            with handle_of(module).microbatch(is_last=i == 1):
                (-module(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT.sum() / weight).backward()
        optimizer.step()
        updates.append({name: before[name] - gather_uneven(param) for name, param in part.named_parameters()})
    return updates


def test_the_documented_functions():
    model = tiny_part("llama")
    everyone = [batch for batches in step_batches(Case(num_microbatches=2), 2) for batch in batches]
    weight = sum(int(batch.num_label_tokens) for batch in everyone)
    for batch in everyone:
        (-model(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT.sum() / weight).backward()
    want = tiny.gradients(model)
    for update in launch(_sgd_updates, 2):
        assert tiny.gradient_error(want, update) < tolerance()


def _refusals(rank, world):
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    with raises(ConfigError, "hardware_required", keys=("parallelizer",), fix="parallelizer=fsdp2"):
        parallelize(tiny_part("llama"), mesh, MEGATRON)
    cuda_stand_in.install()
    with raises(ConfigError, "unknown_name", keys=("megatron_fsdp_unit_modules",), values=("Conv2d",)):
        parallelize(tiny_part("llama"), mesh, replace(MEGATRON, megatron_fsdp_unit_modules=["torch.nn.Conv2d"]))
    with raises(ConfigError, "not_supported_by_model", keys=("init_fsdp_with_meta_device",)):
        parallelize(tiny_part("gemma3_text"), mesh, replace(MEGATRON, init_fsdp_with_meta_device=True))
    hybrid = build_mesh(MeshConfig(dp_replicate_size=2).resolve(world), "cpu")
    with raises(ConfigError, "unsupported_combination", keys=("mesh.dp_replicate_size",)):
        megatron_fsdp.megatron_fsdp_strategy_parallelize(tiny_part("llama"), hybrid.root)
    with raises(ConfigError, "not_supported", keys=("average_in_collective",)):
        megatron_fsdp.megatron_fsdp_strategy_parallelize(tiny_part("llama"), mesh.root, average_in_collective=True)
    module = parallelize(tiny_part("llama"), mesh, MEGATRON)
    with raises(ConfigError, "unsupported_combination", keys=("optimizer", "parallelizer"), values=("Muon",)):
        build_optimizer(Muon(lr=1e-3), SingleStage(module).parts)


def test_what_cannot_be_honoured_is_refused():
    launch(_refusals, 4)


def _one_rank(rank, world):
    cuda_stand_in.install()
    part = tiny_part("llama")
    return parallelize(part, build_mesh(MeshConfig().resolve(world), "cpu"), MEGATRON) is part


def test_one_rank_has_nothing_to_shard():
    assert launch(_one_rank, 1)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(megatron_fsdp, "HAVE_MEGATRON_FSDP", False)
    with pytest.raises(ConfigError) as caught:
        megatron_fsdp.require_megatron_fsdp()
    assert caught.value.fix == "pip install automodel-cli[megatron]"
