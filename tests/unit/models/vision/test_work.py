"""FLOPs of tower and projector against those that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from automodel_cli.data.batch import Pictures
from automodel_cli.models.vision.config import TrainedOutside, VisionConfig
from automodel_cli.models.vision.probe import small_part
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.models.vision.work import FrontWork, load_of_blank, load_of_shapes
from tests.vision import config_of, model_of, noise, processor_of


def total(value: Any) -> Any:
    """Sum of every float tensor."""
    if isinstance(value, torch.Tensor):
        return value.float().sum() if value.is_floating_point() else 0
    return sum(map(total, value)) if isinstance(value, (list, tuple)) else 0


@pytest.mark.parametrize("kind", ["qwen3_vl", "llava"])
@pytest.mark.parametrize(
    ("tower", "projector"),
    [
        ("trained", "trained"),
        ("frozen", "trained"),
        ("trained", "frozen"),
        ("frozen", "frozen"),
        ("adapters", "adapters"),
        ("adapters", "frozen"),
    ],
)
def test_the_formula_counts_what_torch_counts(kind: str, tower: TrainedOutside, projector: TrainedOutside):
    """Trained norms and biases have the backward of adapters, without their small matrices."""
    processor = FamilyProcessor(processor_of(kind), config_of(kind))
    front = small_part(model_of(kind)).front
    assert front is not None
    front.composite.set_attn_implementation("eager")
    for name, param in front.composite.named_parameters():
        choice = tower if front.is_tower(name) else projector
        param.requires_grad_(choice == "trained" or (choice == "adapters" and param.ndim == 1))
    images = [noise(32, 48), noise(24, 24)]
    runs = [torch.from_numpy(processor.replacement(image.height, image.width).astype("int64")) for image in images]
    ids_BT, inputs = torch.cat(runs)[None], processor.inputs(images)
    positions = torch.zeros(3, *ids_BT.shape, dtype=torch.int64) if processor.has_grid else None
    with FlopCounterMode(display=False) as counter:
        outputs = front(ids_BT, Pictures(inputs, processor.placeholder, positions))
        if (tower, projector) != ("frozen", "frozen"):
            total(list(outputs.values())).backward()
    work = FrontWork.of(front)
    tokens = int((ids_BT == processor.placeholder).sum())
    flops = work.training_flops(load_of_shapes(work, inputs, tokens), VisionConfig(tower, projector))
    if kind == "llava" and tower != "frozen":  # of two blocks, the last is not used, so it has no backward
        flops -= (2 if tower == "trained" else 1) * 2 * (work.tower - 48 * 32) / 2 * 32 + 2 * 4 * work.width * 512
    counted = counter.get_total_flops()
    if projector != "frozen" and tower == "frozen":  # the input of the projector has no gradient
        assert flops == pytest.approx(counted, rel=0.25)
    else:  # llava: a class token beside 16 patches
        assert flops == pytest.approx(counted, rel=0.05 if kind == "qwen3_vl" else 0.07)


def test_the_blank_picture_gives_patches_for_each_token_of_families_without_grids():
    processor = FamilyProcessor(processor_of("llava"), config_of("llava"))
    front = small_part(model_of("llava")).front
    assert front is not None
    assert load_of_blank(FrontWork.of(front), processor) == (16, 16, 256)  # 16 x 16 pixels, patches of 4
