"""Tensors of a checkpoint that compute the requested part when it is read."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class StoredTensor(Protocol):
    """A tensor of a checkpoint that reads the requested part, such as a slice of `safetensors`."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: object) -> Tensor: ...


class LazyTensor:
    """The interface of a safetensors slice that transformers uses. Indices are slices with step 1."""

    shape: list[int]
    dtype_name: str

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype_name

    def __getitem__(self, index: object) -> Tensor:
        requested = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        ranges = []
        for size, part in zip(
            self.shape, (*requested, *[slice(None)] * len(self.shape))[: len(self.shape)], strict=True
        ):
            start, stop, step = part.indices(size)
            assert step == 1, f"quantized tensors do not support slices with step {step}"
            ranges.append((start, max(start, stop)))
        return self._read(ranges)

    def _read(self, ranges: list[tuple[int, int]]) -> Tensor:
        raise NotImplementedError
