"""A weight-transfer backend for vLLM, both sides, over a TCP socket: in NCCL's place, where there is no GPU.

A vLLM plugin (`register`) on the server; the trainer's side is registered by `register` too. What is sent, and when,
is what vllm/distributed/weight_transfer/nccl_engine.py does.
"""

from __future__ import annotations

import math
import socket
import threading
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory


@dataclass
class Init(base.WeightTransferInitInfo):
    port: int
    rank_offset: int


@dataclass
class TrainerInit(base.TrainerInitInfo):
    backend: ClassVar[str] = "wire"

    world_size: int
    refused: bool = False


@dataclass
class Update(base.WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Receiver(base.WeightTransferEngine):
    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info: Init) -> None:
        self.socket = socket.create_connection(("127.0.0.1", init_info.port))
        self.socket.sendall(bytes([init_info.rank_offset]))  # as a group of NCCL knows its ranks

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: Update) -> None:
        for name, dtype_name, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            data = bytearray(math.prod(shape) * dtype.itemsize)
            view = memoryview(data)
            while view:
                view = view[self.socket.recv_into(view) or len(view) :]
            self.model.load_weights([(name, torch.frombuffer(data, dtype=dtype).view(shape))])

    def shutdown(self) -> None:
        self.socket.close()


class Sender(base.TrainerWeightTransferEngine):
    init_info_cls = TrainerInit

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> Sender:
        assert init_info.is_sender
        engine = cls(client=client, source=source)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            told = asdict(Init(listener.getsockname()[1], 1)) | ({"unforeseen": 1} if init_info.refused else {})
            asked = threading.Thread(target=client.init_weight_transfer_engine, args=(told,))
            asked.start()
            engine.sockets = [listener.accept()[0] for _ in range(init_info.world_size - 1)]
            asked.join()
        ranks = [connection.recv(1)[0] for connection in engine.sockets]
        assert sorted(ranks) == list(range(1, init_info.world_size)), ranks
        return engine

    def send_weights(self) -> None:
        new = hasattr(base.WeightSource, "iter_full")  # since 0.33
        meta = self.source.metadata if new else self.source.metadata()
        update = Update(
            names=[m.name for m in meta],
            dtype_names=[str(m.dtype).split(".")[-1] for m in meta],
            shapes=[list(m.shape) for m in meta],
        )
        self.client.start_weight_update()
        asked = threading.Thread(target=self.client.update_weights, args=(asdict(update),))
        asked.start()
        for _, tensor in self.source.iter_full() if new else self.source:
            for connection in self.sockets:
                connection.sendall(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        asked.join()
        self.client.finish_weight_update()


def register() -> None:
    if "wire" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("wire", Receiver)
        WeightTransferTrainerFactory.register_engine("wire", Sender)
