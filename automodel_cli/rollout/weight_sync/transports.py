"""Weight transports: files that a server reads, or vLLM's weight-transfer engines (NCCL, IPC).

Supports vLLM 0.31 to 0.33 (`entrypoints/rl/online`, `distributed/weight_transfer`). In 0.30 and older, updates had a
field `packed` and another trainer interface.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.value_checks import require_package
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.weight_sync.update_requests import UpdateClient, Watch

if TYPE_CHECKING:
    from torch import Tensor

Bucket = Sequence[tuple[str, "Tensor"]]


Paused = Callable[[], AbstractContextManager[None]]
"""A context in which the server does not generate."""


class Receiver(Protocol):
    """Server that accepts weights."""

    server: Server

    def load_files(self, folder: Path) -> None:
        """See `WeightUpdateMixin`."""
        ...

    def num_ranks(self) -> int:
        """See `WeightUpdateMixin`."""
        ...


class Transfer(Protocol):
    """One way for a stream of weights into a server."""

    def send(self, receiver: Receiver, buckets: Iterator[Bucket], paused: Paused) -> None:
        """Send the weights to the server, inside `paused` if generation must stop. Blocks until the server has them.
        Raises RunError if it rejects them."""


class SharedTransfer(Transfer, Protocol):
    """`Transfer` that sends to several servers at once."""

    def send_to(self, receivers: Sequence[Receiver], buckets: Iterator[Bucket], paused: Sequence[Paused]) -> None:
        """Send to all servers at once. Raises RunError as soon as one rejects the weights, even if the trainer's side
        would wait forever. All servers then have a mixture of weights."""
        ...


class FileTransfer:
    """Write safetensors to a folder under `root`, which servers see under the same path. Works with any backend,
    number of nodes and layout of the server. A folder exists during one update."""

    def __init__(self, root: Path):
        self._root = root.absolute()

    def send(self, receiver: Receiver, buckets: Iterator[Bucket], paused: Paused) -> None:
        """Write one file per bucket while the server generates. Then the server reads the folder, and it is removed."""
        # The order matters: generation stops only while the server reads, not while the files are written.
        with self.written(buckets) as folder, paused():
            receiver.load_files(folder)

    @contextmanager
    def written(self, buckets: Iterator[Bucket]) -> Iterator[Path]:
        """Context of a folder with the weights, one file per bucket. Raises RunError if it cannot be written."""
        folder = self._root / f"weights-{uuid.uuid4().hex[:12]}"
        try:
            self._write(folder, buckets)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def _write(folder: Path, buckets: Iterator[Bucket]) -> None:
        from safetensors.torch import save_file

        try:
            folder.mkdir(parents=True)
            for number, bucket in enumerate(buckets):
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
                save_file(tensors, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        except OSError as error:
            raise RunError(
                f"the weights cannot be written to {folder}: {error.strerror or error}",
                code="unwritable_file",
                keys=("rollout.engine.weights_dir",),
                fix="rollout.engine.weights_dir=/a/folder/with/free/space",
            ) from error


class FactoryTransfer:
    """Trainer side of vLLM's weight-transfer engines. `make_init` returns the `TrainerInitInfo` for a number of
    workers.

    A bucket is one transfer. Servers get its names, dtypes and shapes before the data, so no process stores more than
    a bucket. The first rank of the trainer sends. Workers of several servers form one group: the ranks of each server
    follow those of the previous server.
    """

    def __init__(self, make_init: Callable[[int], object]):
        self._make_init = make_init
        self._engine: Any = None
        self._servers: tuple[str, ...] = ()

    def join(self, buckets: Iterator[Bucket]) -> None:
        """Take part in `send` on a rank without a connection to the server (`ipc_init`)."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        if self._engine is None:
            init = self._make_init(0)
            self._engine = WeightTransferTrainerFactory.trainer_init(init, client=_Nobody(), source=bucket_source(()))
        for bucket in buckets:
            self._engine.source = bucket_source(bucket)
            self._engine.send_weights()
        self._engine.source = bucket_source(())

    def send(self, receiver: Receiver, buckets: Iterator[Bucket], paused: Paused) -> None:
        """See `Transfer`."""
        self.send_to([receiver], buckets, [paused])

    def send_to(self, receivers: Sequence[Receiver], buckets: Iterator[Bucket], paused: Sequence[Paused]) -> None:
        """See `SharedTransfer`. The group cannot continue without one of its servers."""
        servers = [receiver.server for receiver in receivers]
        watch = Watch(servers[0])
        with ExitStack() as stack:
            for pause in paused:
                stack.enter_context(pause())
            named = tuple(server.url for server in servers)
            if self._engine is None:
                self._engine, self._servers = watch.run(lambda: self._connected(receivers, watch)), named
            elif named != self._servers:
                raise RunError(
                    f"the servers changed from {', '.join(self._servers)} to {', '.join(named)}, but the "
                    "communication group of their workers cannot change",
                    code="weight_update_failed",
                    keys=("rollout.engine.transport",),
                    fix="automodel resume RUN, with rollout.engine.transport=files to go on without a server",
                )
            client = self._engine.client = UpdateClient(servers, watch)
            # One update has one start, a transfer per bucket, and one end. vLLM's engine would start and end each
            # bucket.
            client.each("/start_weight_update", {})
            for bucket in buckets:
                self._engine.source = bucket_source(bucket)
                watch.run(self._engine.send_weights)
            self._engine.source = bucket_source(())
            client.each("/finish_weight_update", {})

    def _connected(self, receivers: Sequence[Receiver], watch: Watch) -> object:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        workers = [receiver.num_ranks() for receiver in receivers]
        client = UpdateClient([receiver.server for receiver in receivers], watch, workers)
        # One group of the trainer and the workers of all servers.
        init = self._make_init(sum(workers))
        return WeightTransferTrainerFactory.trainer_init(init, client=client, source=bucket_source(()))


def bucket_source(bucket: Bucket) -> object:
    """Return a `WeightSource` of one bucket for the installed vLLM. `metadata()` and iteration up to 0.32. Since 0.33
    `metadata` is a `cached_property`, and `iter_full()` returns the tensors."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    metas = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket]
    if hasattr(WeightSource, "iter_full"):
        about: Any = cached_property(lambda self: metas)
    else:
        about = lambda self: metas  # noqa: E731

    class BucketSource(WeightSource):  # type: ignore[misc]
        metadata = about

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(bucket)

        def iter_full(self) -> Iterator[tuple[str, Tensor]]:
            return iter(bucket)

    return BucketSource()


def nccl_init(address: str, port: int) -> Callable[[int], object]:
    """See `FactoryTransfer`: the trainer is rank 0 of a NCCL group that meets at `address`:`port`."""

    def make(num_workers: int) -> object:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(address, port, num_workers + 1, rank=0)

    return make


def ipc_init() -> Callable[[int], object]:
    """See `FactoryTransfer`. Workers read the memory of ranks on their GPUs. Every rank of the trainer (on one node)
    takes part: the first with `send`, the others with `join`."""

    def make(num_workers: int) -> object:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=dist.get_rank() if dist.is_initialized() else 0, packed=True)

    return make


class _Nobody:
    """Client of a rank without a connection to the server."""


def check_gpus(transport: str, device_type: str) -> None:
    """Raise ConfigError if weights cannot be sent between GPUs: on a CPU, or without the package vllm."""
    if device_type != "cuda":
        raise ConfigError(
            f"rollout.engine.transport={transport} requires GPUs, but this run uses {device_type}",
            code="hardware_required",
            keys=("rollout.engine.transport",),
            fix="rollout.engine.transport=files",
        )
    require_package(
        "vllm",
        f"rollout.engine.transport={transport}",
        install="'automodel-cli[vllm]', or rollout.engine.transport=files",
        keys=("rollout.engine.transport",),
    )
