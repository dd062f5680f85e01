"""Work of a front end: matrix products of the tower by patches, and of the projector by image tokens.

Forward, per picture of P patches and N tokens:

    2 * tower * P + 2 * projector * N + 4 * blocks * width * P * S

`tower` and `projector` are numbers of matrix parameters. S: patches that a patch attends to, those of its picture or
tile. Windows inside a tower are not subtracted. Read from modules, so that no family needs a formula of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automodel_cli.data.pictures.load import PictureLoad
from automodel_cli.distributed.typed_torch import modules_of
from automodel_cli.models.hub import composite_text
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.vision.config import VisionConfig
from automodel_cli.models.vision.front import Front, composite_on_meta

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from automodel_cli.data.pictures.reader import PictureProcessor

_MATRICES: tuple[type[nn.Linear | nn.Conv2d | nn.Conv3d], ...] = (nn.Linear, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class FrontWork:
    """Sizes of a front end.

    Attributes:
        tower: matrix parameters that a patch passes through.
        projector: matrix parameters that an image token passes through.
        width: of the tower.
        blocks: number of blocks of the tower.
        inner: width inside the MLPs of the blocks.
        patch_elements: input values of a patch.
        patch_side: side of a patch [pixels]. 0: the image processor flattens patches (Qwen, Gemma 4).
    """

    tower: int
    projector: int
    width: int
    blocks: int
    inner: int
    patch_elements: int
    patch_side: int

    @classmethod
    def of(cls, front: Front) -> FrontWork:
        """Read the sizes from the modules, which may be on the meta device or sharded."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        with lora.bare(front.composite):
            matrices = dict(modules_of(front.composite, _MATRICES))
        sizes = {True: 0, False: 0}
        for name, module in matrices.items():
            sizes[front.is_tower(f"{name}.weight")] += module.weight.numel()
        blocks = [block for _, block in modules_of(front.composite, GradientCheckpointingLayer)]
        inner = max((len(m.weight) for block in blocks for _, m in modules_of(block, nn.Linear)), default=0)
        first = next(m for n, m in matrices.items() if front.is_tower(f"{n}.weight"))
        width, *kernel = first.weight.shape
        elements = int(first.weight[:1].numel())
        side = int(kernel[-1]) if len(kernel) > 1 else 0
        return cls(sizes[True], sizes[False], int(width), len(blocks), inner, elements, side)

    def training_flops(self, load: PictureLoad, vision: VisionConfig) -> float:
        """Return the FLOPs of forward and backward. A frozen matrix has a backward only if one before it is trained.

        Matrices with adapters have no gradient of their own. The first matrix behind a frozen part is counted as if its
        input had a gradient.
        """
        times = {"trained": 3, "adapters": 2, "frozen": 1}
        tower = 2 * self.tower * load.patches * times[vision.tower]
        attention = 4 * self.blocks * self.width * load.pairs * (1 if vision.tower == "frozen" else 3)
        of_projector = max(times[vision.projector], 1 if vision.tower == "frozen" else 2)
        return tower + attention + 2 * self.projector * load.tokens * of_projector


def meta_work(composite_config: PretrainedConfig) -> FrontWork:
    """Return the sizes of the front end of a config, without memory."""
    composite = composite_on_meta(composite_config, torch.float32)
    name = composite_text.text_module(composite)
    assert name is not None, "`composite_on_meta` checks it"
    return FrontWork.of(Front(composite, composite.get_submodule(name)))


def load_of_shapes(work: FrontWork, inputs: Mapping[str, Tensor], tokens: int) -> PictureLoad:
    """Return the load of pictures that the image processor has processed.

    Args:
        inputs: outputs of the image processor.
        tokens: placeholders of these pictures.
    """
    pixels = inputs["pixel_values"]
    patches = pixels.numel() // work.patch_elements
    if "image_grid_thw" in inputs:
        pairs = sum(int(grid.prod()) ** 2 for grid in inputs["image_grid_thw"])
    else:
        side = work.patch_side
        per_tile = pixels.shape[-1] * pixels.shape[-2] // side**2 if side else pixels.shape[-2]
        pairs = patches * per_tile
    return PictureLoad(patches, tokens, pairs)


def load_of_blank(work: FrontWork, processor: PictureProcessor) -> PictureLoad:
    """Return the load of the blank picture, for families whose pictures differ in their number of tiles only."""
    ids, inputs = processor.blank()
    return load_of_shapes(work, inputs, int((ids == processor.placeholder).sum()))
