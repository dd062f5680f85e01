"""How new weights reach a server: as files that it reads, or through vLLM's own weight-transfer engines (NCCL, IPC).

The calls are those of vLLM 0.31 to 0.33 (`entrypoints/rl/online`, `distributed/weight_transfer`). 0.30 and older said
`packed` in each update, and had another trainer's side.
"""

from __future__ import annotations

import base64
import pickle
import queue
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.distributed.device_threads import on_this_device
from automodel_cli.rollout.http import Server

if TYPE_CHECKING:
    from torch import Tensor

Bucket = Sequence[tuple[str, "Tensor"]]


Paused = Callable[[], AbstractContextManager[None]]
"""A context in which the server does not generate."""


class Receiver(Protocol):
    """A server that takes weights."""

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
        """Bring the weights into the server, inside `paused` what must not be mixed with generation. Blocks until it
        has them. Raises RunError when it refuses."""


class SharedTransfer(Transfer, Protocol):
    """A `Transfer` that takes no longer for several servers than for one."""

    def send_to(self, receivers: Sequence[Receiver], buckets: Iterator[Bucket], paused: Sequence[Paused]) -> None:
        """To all of them at once. Raises RunError as soon as one refuses, also where our own side would wait for ever;
        the weights of all are a mixture then."""
        ...


class FileTransfer:
    """Weights as safetensors in a folder under `root`, which the server's machines see under the same path.

    Any backend, any number of nodes and any layout of the server; a folder lives for one update.
    """

    def __init__(self, root: Path):
        self._root = root.absolute()

    def send(self, receiver: Receiver, buckets: Iterator[Bucket], paused: Paused) -> None:
        """Writes one file a bucket while the server goes on; then the server reads the folder, and it is removed."""
        with self.written(buckets) as folder, paused():
            receiver.load_files(folder)

    @contextmanager
    def written(self, buckets: Iterator[Bucket]) -> Iterator[Path]:
        """A folder with the weights, one file a bucket, that is there inside the context. Raises RunError where it
        cannot be written."""
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
    """vLLM's trainer side of its weight-transfer engines: `make_init` gives the `TrainerInitInfo` for so many workers.

    A bucket is one transfer, whose names, dtypes and shapes the servers know before the data, so nothing holds more
    than a bucket. The trainer's first rank is the sender. Several servers are told the same, and their workers are in
    one group: each server's ranks come after those of the servers before it.
    """

    def __init__(self, make_init: Callable[[int], Any]):
        self._make_init = make_init
        self._engine: Any = None
        self._servers: tuple[str, ...] = ()

    def join(self, buckets: Iterator[Bucket]) -> None:
        """`send`, on a rank that does not speak to the server, where every rank takes part (`ipc_init`)."""
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
        """See `SharedTransfer`. A group cannot go on without a server that was in it."""
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
            client = self._engine.client = _Client(servers, watch)
            client.each("/start_weight_update", {})
            for bucket in buckets:
                self._engine.source = bucket_source(bucket)
                watch.run(self._engine.send_weights)
            self._engine.source = bucket_source(())
            client.each("/finish_weight_update", {})

    def _connected(self, receivers: Sequence[Receiver], watch: Watch) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        workers = [receiver.num_ranks() for receiver in receivers]
        client = _Client([receiver.server for receiver in receivers], watch, workers)
        init = self._make_init(sum(workers))
        return WeightTransferTrainerFactory.trainer_init(init, client=client, source=bucket_source(()))


def bucket_source(bucket: Bucket) -> Any:
    """A `WeightSource` of one bucket, as vLLM's release has it: `metadata()` and iteration up to 0.32; from 0.33 on
    `metadata` is a `cached_property`, and `iter_full()` gives the tensors."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    metas = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket]
    if hasattr(WeightSource, "iter_full"):
        about: Any = cached_property(lambda self: metas)
    else:
        about = lambda self: metas  # noqa: E731

    class BucketSource(WeightSource):
        metadata = about

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(bucket)

        def iter_full(self) -> Iterator[tuple[str, Tensor]]:
            return iter(bucket)

    return BucketSource()


def nccl_init(address: str, port: int) -> Callable[[int], Any]:
    """See `FactoryTransfer`: the trainer is rank 0 of a NCCL group that meets at `address`:`port`."""

    def make(num_workers: int) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(address, port, num_workers + 1, rank=0)

    return make


def ipc_init() -> Callable[[int], Any]:
    """See `FactoryTransfer`: workers read memory of the ranks on their own GPUs. Every rank of the trainer, which is on
    one machine, takes part, the first by `send` and the others by `join`."""

    def make(num_workers: int) -> Any:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=dist.get_rank() if dist.is_initialized() else 0, packed=True)

    return make


def json_safe(update_info: dict[str, Any]) -> dict[str, Any]:
    """Handles of memory as a pickle in a text, as vLLM's own HTTP client sends them; the rest as it is."""
    handles = update_info.get("ipc_handles")
    if handles is None:
        return update_info
    pickled = base64.b64encode(pickle.dumps(handles)).decode("ascii")
    return {**update_info, "ipc_handles": None, "ipc_handles_pickled": pickled}


class _Nobody:
    """The client of a rank that does not speak to the server."""


class _Client:
    """What vLLM's trainer engine calls (its `VLLMWeightSyncClient`); an update is many buckets, so its begin and end
    are not a bucket's. Every call goes to all `servers` together; `workers` of each, where a group is made."""

    def __init__(self, servers: Sequence[Server], watch: Watch, workers: Sequence[int] = ()):
        self._servers, self._watch, self._workers = servers, watch, workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = [dict(init_info) for _ in self._servers]
        if "rank_offset" in init_info:  # of a group; what is not one is the same for all
            for number, info in enumerate(infos):
                info["rank_offset"] += sum(self._workers[:number])
        self._posted("/init_weight_transfer_engine", [{"init_info": info} for info in infos])

    def start_weight_update(self) -> None:
        """Said once for all buckets."""

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        infos = [json_safe(info) for info in (update_info if isinstance(update_info, list) else [update_info])]
        self.each("/update_weights", {"update_info": infos if isinstance(update_info, list) else infos[0]})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Said once for all buckets."""

    def each(self, path: str, body: dict[str, Any]) -> None:
        self._posted(path, [body] * len(self._servers))

    def _posted(self, path: str, bodies: Sequence[dict[str, Any]]) -> None:
        posts = [
            begun(partial(posted, server, path, body, self._watch))
            for server, body in zip(self._servers, bodies, strict=True)
        ]
        for post in posts:
            post.result()


class Watch:
    """Runs a call that has a half on the server, and ends with whichever half fails first, or at the time limit.

    Our half may be in a collective that nobody joins any more. It is left behind in its thread: the run ends.
    """

    def __init__(self, server: Server):
        self._server = server
        self._ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def failed(self, error: BaseException) -> None:
        self._ended.put((None, error))

    def run(self, call: Callable[[], Any]) -> Any:
        def ours() -> None:
            try:
                self._ended.put((call(), None))
            except BaseException as error:
                self._ended.put((None, error))

        threading.Thread(target=on_this_device(ours), daemon=True).start()
        try:
            found, error = self._ended.get(
                timeout=self._server.timeout + 1
            )  # a request has its own limit, in better words
        except queue.Empty:
            raise RunError(
                f"the weights did not reach {self._server.url} within {self._server.timeout:g} seconds",
                code="weight_update_failed",
                keys=("rollout.engine.timeout",),
                fix="read the log of the server; then automodel resume RUN",
            ) from None
        if error is not None:
            raise error
        return found


def check_gpus(transport: str, device_type: str) -> None:
    """Raise ConfigError where weights cannot be sent from GPU to GPU: on a CPU, or without vLLM's package."""
    if device_type != "cuda":
        raise ConfigError(
            f"rollout.engine.transport={transport} requires GPUs, but this run uses {device_type}",
            code="hardware_required",
            keys=("rollout.engine.transport",),
            fix="rollout.engine.transport=files",
        )
    if find_spec("vllm") is None:
        raise ConfigError(
            f"rollout.engine.transport={transport} requires the package vllm, which is not installed",
            code="missing_package",
            keys=("rollout.engine.transport",),
            fix="pip install 'automodel-cli[vllm]', or rollout.engine.transport=files",
        )


def begun(call: Callable[[], None]) -> Future[None]:
    """`call` in a thread that nobody waits for at the end: a server may hang in a broadcast that another has left."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def posted(server: Server, path: str, body: dict[str, Any], watch: Watch) -> None:
    """`once`, of which `watch` hears at once that it failed."""
    try:
        once(server, path, body)
    except BaseException as error:
        watch.failed(error)
        raise


def once(server: Server, path: str, body: dict[str, Any]) -> Any:
    """A call that must not be sent twice: a transfer that was half done cannot be repeated."""
    return server.request("POST", path, body, retries=0)
