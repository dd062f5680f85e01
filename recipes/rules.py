"""Rules between sections that no section can check alone. No torch here: `automodel check` asks them too."""

from __future__ import annotations

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.distributed.config import FSDP2Config, ParallelizerConfig
from automodel_cli.distributed.layout import MeshConfig
from automodel_cli.models.config import ModelConfig


def check_packed_probe(parallelizer: ParallelizerConfig, model: ModelConfig, data: DataConfig) -> None:
    """Switching off the library's search for packed rows needs rows that are none, and attention that searches."""
    if not (isinstance(parallelizer, FSDP2Config) and parallelizer.patch_is_packed_sequence):
        return
    if data.packing != "none":
        raise ConfigError(
            f"patch_is_packed_sequence=true takes every row for one document, but data.packing={data.packing}",
            keys=("parallelizer.patch_is_packed_sequence", "data.packing"),
            fix="parallelizer.patch_is_packed_sequence=false",
        )
    if model.attention == "packed":
        raise ConfigError(
            "patch_is_packed_sequence=true does nothing with model.attention=packed, which is told where documents end",
            keys=("parallelizer.patch_is_packed_sequence", "model.attention"),
            fix="parallelizer.patch_is_packed_sequence=false",
        )


def check_transformer_engine(parallelizer: ParallelizerConfig, model: ModelConfig, mesh: MeshConfig) -> None:
    """What Transformer Engine's layers cannot be combined with here."""
    engine = model.transformer_engine
    if engine is None:
        return
    tp_size, cp_size = mesh.tp_size or 1, mesh.cp_size or 1
    for name in ("linear", "norm"):
        if getattr(engine, name) and tp_size > 1:
            raise ConfigError(
                f"transformer_engine.{name}=true holds whole layers, but mesh.tp_size={tp_size} cuts torch's",
                keys=(f"model.transformer_engine.{name}", "mesh.tp_size"),
                fix=f"model.transformer_engine.{name}=false, or mesh.tp_size=1",
            )
    if engine.attention and cp_size > 1:
        raise ConfigError(
            f"transformer_engine.attention=true sees whole rows, but mesh.cp_size={cp_size} shares them over ranks",
            keys=("model.transformer_engine.attention", "mesh.cp_size"),
            fix="model.transformer_engine.attention=false, or mesh.cp_size=1",
        )
    if parallelizer.enable_compile:
        raise ConfigError(
            "enable_compile=true cannot look into Transformer Engine's layers",
            keys=("parallelizer.enable_compile", "model.transformer_engine"),
            fix="parallelizer.enable_compile=false",
        )
