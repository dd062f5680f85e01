"""Config node of the pictures of a vision-language model. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Trained = Literal["trained", "frozen"]
TrainedOutside = Literal["trained", "frozen", "adapters"]


class ProcessorNode(Protocol):
    """A processor made in code."""

    def build_processor(self, tokenizer: PreTrainedTokenizerBase) -> object:
        """Return a processor of transformers around this tokenizer."""


@dataclass(frozen=True)
class VisionConfig:
    """Pictures as inputs, and which parts of the model are trained.

    The tower turns pixels into features. The projector is everything else outside the text model.
    """

    tower: TrainedOutside = "trained"
    """Train the vision tower, keep it `frozen`, or place `adapters` of `model.lora` on it."""
    projector: TrainedOutside = "trained"
    """Train the modules between tower and text model, keep them `frozen`, or place `adapters` on them."""
    text: Trained = "trained"
    """Train the text model and the head, or keep them `frozen`. With `model.lora`, `trained` means its adapters."""
    processor: str | ProcessorNode | None = None
    """Folder or hub id of the image processor, or a node that makes one. null: the one stored with the weights."""

    @property
    def freezes(self) -> bool:
        """Whether some part is not trained."""
        return "frozen" in (self.tower, self.projector, self.text)

    @property
    def front_is_frozen(self) -> bool:
        """Whether nothing outside the text model is trained."""
        return self.tower == self.projector == "frozen"
