"""Fake tensors that report the device `cuda`, and process groups that answer alone (torch 2.11 to 2.14).

A build of torch without CUDA cannot run autograd on tensors whose device is CUDA in C++. So fake tensors stay `meta`
there and say `cuda` in Python, where every decision of this program and of the library is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from automodel_cli.distributed.typed_torch import set_attributes
from automodel_cli.dryrun.fake_device.torch_compat import fake_mode_is_on

_LIBRARY = torch.library.Library("c10d", "IMPL")
_ATEN = torch.library.Library("aten", "IMPL")
_MESH_METHODS = (
    "__getitem__", "get_local_rank", "get_coordinate", "get_group", "get_all_groups", "size", "__init__", "_flatten",
    "__eq__", "__hash__",
)  # fmt: skip


def install_fake_cuda(cuda: torch.device) -> FakeTensorMode:
    """Fake tensors on `cuda`, and process groups of any size in which this process is one rank. Returns the mode, not
    yet entered."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _meta_in_cpp(cuda)
    _build_on(mode)
    _objects_stay_here()
    _meshes_are_real()
    _coalesced_answer()
    _grouped_products_of_8_bits_have_a_shape()
    return mode


def _grouped_products_of_8_bits_have_a_shape() -> None:
    """The operator of the public function has no shape function up to torch 2.13; the one before it has, which checks
    layouts and scales as a device does."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_grouped_mm_v2", "Meta"):
        return

    def shape_of(
        a: Tensor, b: Tensor, scale_a: list[Tensor], _a: object, _b: object, scale_b: list[Tensor], *rest: Tensor
    ) -> Tensor:
        return torch._scaled_grouped_mm(a, b, scale_a[0], scale_b[0], rest[2], out_dtype=torch.bfloat16)

    _ATEN.impl("_scaled_grouped_mm_v2", shape_of, "Meta")


def _meta_in_cpp(cuda: torch.device) -> None:
    make = torch.Tensor._make_subclass

    def make_subclass(cls: type, elem: Tensor, require_grad: bool = False, **keywords: Any) -> object:
        if cls is FakeTensor:
            keywords.pop("dispatch_device", None)
            keywords.pop("device_for_backend_keys", None)
        return make(cls, elem, require_grad, **keywords)

    def set_device(tensor: FakeTensor, device: torch.device) -> None:
        set_attributes(tensor, _fake_device=cuda if device.type in ("meta", "cuda") else device)

    patched: list[tuple[object, str, object]] = [
        (torch.Tensor, "_make_subclass", staticmethod(make_subclass)),
        # C++ makes gradients and buffers "like" such a tensor on meta: in Python that is cuda again.
        (FakeTensor, "fake_device", property(lambda t: t._fake_device, set_device)),  # 2.11 has a plain attribute
        (FakeTensorMode, "avoid_device_init", True),  # torch asks cuda.is_available(), which has been made true
        (fake_tensor, "init_gpu_context", lambda device: None),  # 2.11 asks it too, and then allocates on the device
        (FakeTensor, "is_meta", property(lambda t: False)),
        (FakeTensor, "is_cuda", property(lambda t: t.fake_device.type == "cuda")),
        (DTensor, "device", property(lambda t: t._local_tensor.device)),
        (DTensor, "is_meta", property(lambda t: t._local_tensor.is_meta)),
        (DTensor, "is_cuda", property(lambda t: t._local_tensor.is_cuda)),
    ]
    for owner, name, value in patched:
        setattr(owner, name, value)
    assert fake_tensor.FakeTensor is FakeTensor


def _build_on(mode: FakeTensorMode) -> None:
    """FSDP2 allocates a small tensor on the device while it wraps modules that are still on the real meta device."""
    empty = torch.empty

    class Torch:
        """What FSDP2's module sees as `torch`: torch itself must keep its constructors, which contexts know."""

        @staticmethod
        def empty(*sizes: Any, **keywords: Any) -> Tensor:
            device = keywords.get("device")
            if device is not None and torch.device(device).type == "cuda" and not fake_mode_is_on():
                with mode:
                    return empty(*sizes, **keywords)
            return empty(*sizes, **keywords)

        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

    set_attributes(_fsdp_param_group, torch=Torch())


def _objects_stay_here() -> None:
    """Every rank is taken to hold what this one holds."""

    def all_gather_object(found: list[object], mine: object, group: dist.ProcessGroup | None = None) -> None:
        found[:] = [mine] * len(found)

    set_attributes(dist, all_gather_object=all_gather_object, broadcast_object_list=lambda *_, **__: None)


def _meshes_are_real() -> None:
    """Meshes are small real tensors, also where they are sliced while the fake mode is on."""

    def really(method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def without_fakes(*args: object, **kwargs: object) -> object:
            with unset_fake_temporarily():
                return method(*args, **kwargs)

        return without_fakes

    members = vars(DeviceMesh)
    for name in _MESH_METHODS:
        if name in members:
            setattr(DeviceMesh, name, really(members[name]))
    match members.get("mesh"):
        case property(fget=read) if read is not None:
            set_attributes(DeviceMesh, mesh=property(really(read)))


def _coalesced_answer() -> None:
    """Collectives of several tensors at once have no form for fake ones (torch 2.13)."""
    for name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_"):
        _LIBRARY.impl(name, lambda *_, **__: FakeWork().boxed(), "Meta")
