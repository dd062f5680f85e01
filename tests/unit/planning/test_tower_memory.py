"""Memory of a tower against the bytes that autograd keeps, and in the plan of a recipe."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from automodel_cli.cli.common import load_recipe
from automodel_cli.config.security.trust import Trust
from automodel_cli.data.batch import Pictures
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.models.hub.source import composite_config
from automodel_cli.models.vision.probe import small_part
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.models.vision.work import FrontWork, load_of_shapes, meta_work
from automodel_cli.planning.activation_checkpointing import GIB, MARGIN, choose_activation_checkpointing
from automodel_cli.planning.activation_memory import Activations
from automodel_cli.planning.plan import make_plan
from automodel_cli.planning.reserve import RESERVE_GIB
from automodel_cli.planning.tower_memory import TowerMemory, tower_memory
from automodel_cli.run.plan_request import plan_request
from tests.vision import config_of, model_of, noise, processor_of


def estimate(work: FrontWork, mode: bool | str, *, patches: float, tokens: float, trained: bool = True) -> TowerMemory:
    return tower_memory(
        work, mode, patches=patches, image_tokens=tokens, text_width=32, item_bytes=4, is_trained=trained
    )


def test_the_estimate_is_near_what_autograd_keeps():
    processor = FamilyProcessor(processor_of("qwen3_vl"), config_of("qwen3_vl"))
    front = small_part(model_of("qwen3_vl")).front
    assert front is not None
    images = [noise(32, 32, seed) for seed in range(16)]
    runs = [torch.from_numpy(processor.replacement(image.height, image.width).astype("int64")) for image in images]
    ids_BT, inputs = torch.cat(runs)[None], processor.inputs(images)
    weights = {p.untyped_storage().data_ptr() for p in front.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        positions = torch.zeros(3, *ids_BT.shape, dtype=torch.int64)
        front(ids_BT, Pictures(inputs, processor.placeholder, positions))
    work = FrontWork.of(front)
    tokens = int((ids_BT == processor.placeholder).sum())
    load = load_of_shapes(work, inputs, tokens)
    found = estimate(work, False, patches=load.patches, tokens=load.tokens)
    # The mergers of this tiny model hold as much as its two blocks. Those of a real model are 3 of 27 layers.
    blocks = found.kept - 4 * (load.patches * work.patch_elements + load.tokens * 32)
    assert 0.5 < blocks / (sum(kept.values()) - blocks) < 2


def test_recomputation_keeps_the_inputs_of_blocks_and_one_block_while_it_runs():
    work = meta_work(config_of("qwen3_vl"))
    whole, again, selective, frozen = (
        estimate(work, mode, patches=100, tokens=25, trained=trained)
        for mode, trained in ((False, True), ("full", True), ("selective", True), (False, False))
    )
    ends = 4 * (100 * 48 + 25 * 32)
    block = 4 * 100 * (8 * 32 + 2 * 96)  # the widest matrix is that of queries, keys and values
    assert (whole.kept, whole.recomputed) == (ends + 2 * block, 0)
    assert (again.kept, again.recomputed) == (ends + 2 * 4 * 100 * 32, block)
    # Inputs, results of q, k and v (3 widths), of attention, of its projection, and of both matrices of the MLP.
    assert (selective.kept, selective.recomputed) == (ends + 2 * 4 * 100 * (32 + 6 * 32 + 96), block)
    assert (frozen.kept, frozen.recomputed) == (ends, block)
    text = Activations(10.0, (1.0, 1.0), 5.0, 2.0, 3.0)
    assert again.beside(text) == replace(text, before=10.0 + again.kept, recomputed=float(block))


def test_a_plan_counts_parameters_and_memory_of_the_tower():
    _, recipe = load_recipe("quickstart_vlm", (), Trust())
    request = plan_request(recipe, Layout())
    plan, none = make_plan(request), make_plan(replace(request, patches_per_image_token=0.0))
    with torch.device("meta"):
        library = AutoModelForImageTextToText.from_config(composite_config(recipe.model))
    assert plan.num_parameters == sum(param.numel() for param in library.parameters())
    assert request.patches_per_image_token == 4
    assert plan.tower is not None and none.tower is not None
    assert plan.tower.patches == 4 * 4 * 160
    more = plan.memory[0].activations - none.memory[0].activations
    assert more == pytest.approx(plan.tower.kept - none.tower.kept) and more > 0


def test_the_chosen_recomputation_has_room_for_the_tower_too():
    """In memory that is enough for the text model alone, layers are recomputed, and the plan stays within it."""
    _, recipe = load_recipe("quickstart_vlm", ("data.seq_len=1024",), Trust())
    request = plan_request(recipe, Layout())
    assert isinstance(request.parallelizer, FSDP2Config)

    def planned(mode: bool | str) -> float:
        return make_plan(
            replace(request, parallelizer=replace(request.parallelizer, activation_checkpointing=mode))
        ).heaviest

    text_only = replace(request, patches_per_image_token=0.0)
    room = make_plan(text_only).heaviest
    memory = room * (1 + MARGIN) + RESERVE_GIB * GIB + 1
    assert choose_activation_checkpointing(text_only, memory).mode is False
    choice = choose_activation_checkpointing(request, memory)
    assert choice.mode is not False and planned(choice.mode) <= room < planned(False)
