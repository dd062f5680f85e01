"""How new weights reach a vLLM server: as files that it reads, or through vLLM's own weight-transfer engines (NCCL).

The calls are those of vLLM 0.31 and 0.32 (`entrypoints/rl/online`, `distributed/weight_transfer`). 0.30 and older said
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
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.rollout.http import Server

if TYPE_CHECKING:
    from torch import Tensor

Bucket = Sequence[tuple[str, "Tensor"]]


Paused = Callable[[], AbstractContextManager[None]]
"""A context in which the server does not generate."""


class Transfer(Protocol):
    """One way for a stream of weights into a server."""

    def send(self, server: Server, buckets: Iterator[Bucket], paused: Paused) -> None:
        """Bring the weights into the server, inside `paused` what must not be mixed with generation. Blocks until it
        has them. Raises RunError when it refuses."""


class FileTransfer:
    """Weights as safetensors in a folder under `root`, which the server's machines see under the same path.

    Any backend, any number of nodes and any layout of the server; a folder lives for one update.
    """

    def __init__(self, root: Path):
        self._root = root.absolute()

    def send(self, server: Server, buckets: Iterator[Bucket], paused: Paused) -> None:
        """Writes one file a bucket while the server goes on; then the server reads the folder, and it is removed."""
        with self.written(buckets) as folder:
            read_files(server, folder, paused)

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
                f"the weights for the server cannot be written to {folder}: {error.strerror or error}",
                keys=("rollout.engine.weights_folder",),
                fix="rollout.engine.weights_folder=/a/folder/with/room",
            ) from error


def read_files(server: Server, folder: Path, paused: Paused) -> None:
    """Have the server read the weights in `folder`, inside `paused`."""
    with paused():
        once(server, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})


class FactoryTransfer:
    """vLLM's trainer side of its weight-transfer engines: `make_init` gives the `TrainerInitInfo` for so many workers.

    A bucket is one transfer, whose names, dtypes and shapes the server knows before the data, so nothing holds more
    than a bucket. The trainer's first rank is the sender.
    """

    def __init__(self, make_init: Callable[[int], Any]):
        self._make_init = make_init
        self._bucket: Bucket = ()
        self._engine: Any = None

    def join(self, buckets: Iterator[Bucket]) -> None:
        """`send`, on a rank that does not speak to the server, where every rank takes part (`ipc_init`)."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        if self._engine is None:
            init = self._make_init(0)
            self._engine = WeightTransferTrainerFactory.trainer_init(init, client=_Nobody(), source=self._source())
        for bucket in buckets:
            self._bucket = bucket
            self._engine.send_weights()
        self._bucket = ()

    def send(self, server: Server, buckets: Iterator[Bucket], paused: Paused) -> None:
        """Raises RunError as soon as the server refuses, also where our own side would wait for ever."""
        watch = Watch(server)
        with paused():
            if self._engine is None:
                self._engine = watch.run(lambda: self._connected(server, watch))
            self._engine.client = _Client(server, watch)
            once(server, "/start_weight_update", {})
            for bucket in buckets:
                self._bucket = bucket
                watch.run(self._engine.send_weights)
            self._bucket = ()
            once(server, "/finish_weight_update", {})

    def _connected(self, server: Server, watch: Watch) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        answer = server.get("/get_world_size")
        init = self._make_init(int(answer["world_size"]))
        return WeightTransferTrainerFactory.trainer_init(init, client=_Client(server, watch), source=self._source())

    def _source(self) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        transfer = self

        class BucketSource(WeightSource):
            """The bucket at hand."""

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in transfer._bucket]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(transfer._bucket)

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
    are not a bucket's."""

    def __init__(self, server: Server, watch: Watch):
        self._server, self._watch = server, watch

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Said once for all buckets."""

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        infos = [json_safe(info) for info in (update_info if isinstance(update_info, list) else [update_info])]
        self._post("/update_weights", {"update_info": infos if isinstance(update_info, list) else infos[0]})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Said once for all buckets."""

    def _post(self, path: str, body: dict[str, Any]) -> None:
        try:
            once(self._server, path, body)
        except BaseException as error:
            self._watch.failed(error)
            raise


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
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def ours() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # which is the thread's own
                self._ended.put((call(), None))
            except BaseException as error:
                self._ended.put((None, error))

        threading.Thread(target=ours, daemon=True).start()
        try:
            found, error = self._ended.get(
                timeout=self._server.timeout + 1
            )  # a request has its own limit, in better words
        except queue.Empty:
            raise RunError(
                f"the weights did not reach {self._server.url} within {self._server.timeout:g} seconds",
                keys=("rollout.engine.timeout",),
                fix="look into the server's log; then automodel resume RUN",
            ) from None
        if error is not None:
            raise error
        return found


def check_gpus(transport: str, device_type: str) -> None:
    """Raise ConfigError where weights cannot be sent from GPU to GPU: on a CPU, or without vLLM's package."""
    if device_type != "cuda":
        raise ConfigError(
            f"rollout.engine.transport={transport} sends weights between GPUs, and this run is on {device_type}",
            keys=("rollout.engine.transport",),
            fix="rollout.engine.transport=files",
        )
    if find_spec("vllm") is None:
        raise ConfigError(
            f"rollout.engine.transport={transport} sends weights with the package vllm, which is not installed",
            keys=("rollout.engine.transport",),
            fix="pip install 'automodel-cli[vllm]', or rollout.engine.transport=files",
        )


def once(server: Server, path: str, body: dict[str, Any]) -> Any:
    """A call that must not be sent twice: a transfer that was half done cannot be repeated."""
    return server.request("POST", path, body, retries=0)
