"""Names of `torch.distributed.checkpoint`, of fused optimizers and of CUDA's allocator which are not public API.

torch 2.11 to 2.13.

Relies on the following. Fused optimizers have `_step_supports_amp_scaling` and check `found_inf`. The metadata of a
checkpoint is a pickle in `.metadata`. `FileSystemReader` locates and reads it by `_get_metadata_path`,
`fs.create_stream` and `read_metadata`. tests/unit/training/test_torch_compat.py reads a real checkpoint through it,
tests/dist/test_step.py verifies that a fused optimizer skips a step. `torch.cuda.memory._dump_snapshot(path)` is what
torch's own documentation of its memory viewer calls. `_compute_local_shape_and_global_offset` takes the coordinate of
any rank (tests/dist/test_muon.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from automodel_cli.config.errors import RunError
from automodel_cli.distributed.typed_torch import set_attributes


def _path(*parts: str) -> str:
    return "/".join(parts)  # path at which the checkpoint was written, not used


_CLASSES = (
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
_NAMES: dict[tuple[str, str], object] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {str(torch.strided): torch.strided}.__getitem__,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "WindowsPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # Python 3.13
}
"""Classes in the metadata of tensors, and dtypes by name. Torch's own reader would import and call anything that the
file names."""


class CheckpointReader(dcp.FileSystemReader):
    """Reader of checkpoint folders of untrusted origin. Code in the files is never executed.

    `.metadata` may contain only classes that describe tensors. torch reads tensors with `weights_only`. Entries that
    are not tensors, which torch would unpickle without it, are rejected.
    """

    def read_metadata(self, *args: object, **kwargs: Any) -> Metadata:
        """Read the metadata. Raises RunError if it is damaged or refers to other classes."""
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        # A pickle can call `setattr` on classes that it may name, so their attributes are compared afterwards.
        before = [dict(vars(kind)) for kind in _CLASSES]
        with self.fs.create_stream(path, "rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except RunError:
                raise
            except Exception as error:  # a damaged pickle fails in any way
                raise _refused(path, f"cannot be read: {type(error).__name__}: {error}") from error
            finally:
                changed = [_restored(kind, content) for kind, content in zip(_CLASSES, before, strict=True)]
        if any(changed):  # a pickle can set attributes of the classes that it names
            raise _refused(path, "changes the classes that it names")
        _check(metadata, path)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return cast("Metadata", metadata)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _NAMES:
            return _NAMES[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise RunError(
            f"the metadata of the checkpoint refers to {module}.{name}, which describes no tensor. It was not loaded, "
            "because unpickling it could run code",
            code="unsafe_file",
            keys=("checkpoint.resume",),
            fix="checkpoint.resume=null, and check where the checkpoint comes from",
        )


def _restored(kind: type, before: dict[str, object]) -> bool:
    """Restore the attributes of a class. Return whether they had changed."""
    now = dict(vars(kind))
    changed = [name for name in {*now, *before} if now.get(name) is not before.get(name)]
    for name in changed:
        if name in before:
            setattr(kind, name, before[name])
        else:
            delattr(kind, name)
    return bool(changed)


def _check(metadata: object, path: Path) -> None:
    """Raise RunError unless the metadata describes only tensors in files of this folder."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise _refused(path, "describes no tensors")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise _refused(path, f"has an entry {name!r} that is no tensor")
    for index, place in (metadata.storage_data or {}).items():
        # A name like `../other` would read files outside the folder.
        if not isinstance(place, _StorageInfo) or Path(place.relative_path).name != place.relative_path:
            raise _refused(path, f"places {index} outside the checkpoint's folder")


def _refused(path: Path, what: str) -> RunError:
    return RunError(
        f"{path} {what}, so automodel did not write this checkpoint",
        code="unsafe_file",
        keys=("checkpoint.resume",),
        fix="checkpoint.resume=an earlier step-NNNNNN of the run",
    )


def step_if_finite(bad: Tensor, optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Run `optimizer.step()` without an effect if `bad` (bool scalar on `device`) is true, and without a
    synchronization.

    Returns False, and does nothing, for optimizers whose kernels do not support this. The mechanism is that of
    `torch.amp.GradScaler`, which passes `found_inf` to fused kernels. Parameters on another device would not wait for
    the copy of `found_inf`, so it must be on theirs.
    """
    there = {param.device.type for group in optimizer.param_groups for param in group["params"]}
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or there != {device.type}:
        return False
    # Fused kernels leave parameters and states unchanged if `found_inf` is 1. The decision stays on the device.
    set_attributes(optimizer, found_inf=bad.float())
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
    return True


def refuses_by_found_inf(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return an optimizer class whose steps change nothing while its `found_inf` is 1, for `step_unless`."""
    set_attributes(kind, _step_supports_amp_scaling=True)
    return kind


def shard_of(
    shape: Sequence[int], mesh: DeviceMesh, coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[slice, ...]:
    """Return the part of a tensor of `shape` that the rank at `coordinate` of `mesh` holds. No communication."""
    sizes, starts = _compute_local_shape_and_global_offset(tuple(shape), mesh.shape, list(coordinate), placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def dump_cuda_memory(path: Path) -> None:
    """Every segment and block of CUDA's allocator on the current device, as torch's memory viewer reads it."""
    torch.cuda.memory._dump_snapshot(str(path))
