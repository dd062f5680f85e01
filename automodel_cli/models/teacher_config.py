"""The section of a teacher to distill. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_cli.models.config import DType, ModelConfig


@dataclass(frozen=True)
class TeacherConfig:
    """A frozen model to distill.

    It must have the student's tokens. `dtype` is the storage dtype. The parallelizer sets the compute dtype.
    `attn_implementation` as in the model section.
    """

    pretrained: str
    """Hub id or folder of the teacher. It must have the student's tokens."""
    revision: str | None = None
    """Branch, tag or commit of the teacher's hub id."""
    dtype: DType = "float32"
    """Storage dtype of the teacher. It computes in the parallelizer's compute dtype."""
    attn_implementation: str = "packed"
    """Attention of the teacher, as in `model.attn_implementation`."""

    def as_model(self) -> ModelConfig:
        """The same as a section of a model."""
        return ModelConfig(
            pretrained=self.pretrained,
            revision=self.revision,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
        )
