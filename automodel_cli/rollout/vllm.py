"""vLLM as a server: its completions API, and weight updates through its public weight-transfer endpoints.

NEVER RUN AGAINST vLLM: the tests speak to a small server that implements the documented endpoints of vLLM >= 0.22, and
the NCCL transfer has not been run at all. Start the server with

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' \\
        --logprobs-mode processed_logprobs

Nothing of vLLM is patched, and its package is imported only to send weights (extra `vllm`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.rollout.engine import Capabilities, WeightStream
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.openai import OpenAIEngine

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class Transfer(Protocol):
    """How tensors travel to the server's workers."""

    packed: bool

    def open(self, num_workers: int) -> dict[str, Any]:
        """What the server needs to know to connect; `connect` is called while it does."""

    def connect(self) -> None:
        """Meet the workers. Blocks until they are there."""

    def send(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Send these tensors, in this order. Blocks until the workers have them."""


class NCCLTransfer:
    """vLLM's own trainer side of its NCCL backend. The trainer is rank 0, the server's workers follow.

    `address` is this machine as the server sees it.
    """

    packed = True

    def __init__(self, address: str, port: int):
        self._address, self._port = address, port
        self._world_size = 0
        self._group: Any = None

    def open(self, num_workers: int) -> dict[str, Any]:
        self._world_size = num_workers + 1
        return {
            "master_address": self._address,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": self._world_size,
        }

    def connect(self) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self._group = NCCLWeightTransferEngine.trainer_init(
            {"master_address": self._address, "master_port": self._port, "world_size": self._world_size}
        )

    def send(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

        NCCLWeightTransferEngine.trainer_send_weights(
            iterator=iter(tensors), trainer_args=NCCLTrainerSendWeightsArgs(group=self._group, packed=self.packed)
        )


class VLLMEngine(OpenAIEngine):
    """An `OpenAIEngine` whose weights can be replaced. One process speaks to the server (rank 0 of the run)."""

    def __init__(
        self,
        server: Server,
        tokenizer: PreTrainedTokenizerBase,
        transfer: Transfer,
        *,
        model: str | None = None,
        concurrency: int = 256,
    ):
        super().__init__(server, tokenizer, model=model, concurrency=concurrency, trust_logprobs=True)
        if not (self.capabilities.token_ids and self.capabilities.logprobs):
            raise ConfigError(
                f"{server.url} does not answer with token ids and log-probs: it is no vLLM server of version 0.22 or "
                "later",
                keys=("rollout.url",),
                fix="vllm serve MODEL --logprobs-mode processed_logprobs",
            )
        self.capabilities = Capabilities(logprobs=True, weight_updates=True, seeds=False, hub_names=True)
        self._transfer = transfer
        self._connected = False

    def update_weights(self, stream: WeightStream) -> None:
        """Send every bucket while generation pauses (what is running goes on with the new weights afterwards).

        The server resumes even when a transfer fails; that raises RunError, and its weights are then a mixture. A
        transfer that does not end within the server's time limit, or whose server is gone, is an error too.
        """
        buckets = iter(stream)
        self.server.post("/pause?mode=keep")
        try:
            if not self._connected:
                self._connect()
            self._send(buckets)
        except BaseException:
            with suppress(RunError):  # a server that is gone; what happened first says more
                self.server.request("POST", "/resume", {}, retries=0)
            raise
        self.server.post("/resume")
        self.weight_version += 1

    def _connect(self) -> None:
        answer = self.server.get("/get_world_size")
        if not isinstance(answer, dict) or "world_size" not in answer:
            raise RunError(f"{self.server.url}/get_world_size answered {answer!r}: VLLM_SERVER_DEV_MODE=1 is not set")
        info = self._transfer.open(int(answer["world_size"]))
        self._meanwhile("/init_weight_transfer_engine", {"init_info": info}, self._transfer.connect)
        self._connected = True

    def _send(self, buckets: Iterator[Sequence[tuple[str, Tensor]]]) -> None:
        self._once("/start_weight_update", {"is_checkpoint_format": True})
        for bucket in buckets:
            info = {
                "names": [name for name, _ in bucket],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "packed": self._transfer.packed,
            }
            self._meanwhile("/update_weights", {"update_info": info}, partial(self._transfer.send, bucket))
        self._once("/finish_weight_update", {})

    def _meanwhile(self, path: str, body: dict[str, Any], ours: Callable[[], None]) -> None:
        """The server answers once our side of the transfer is done, so both must run at the same time.

        The first error ends it: a transfer whose server has died never comes back, and is left behind in its thread.
        """
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run(half: Callable[[], Any]) -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # which is the thread's own
                half()
                ended.put(None)
            except BaseException as error:
                ended.put(error)

        halves: tuple[Callable[[], Any], ...] = (partial(self._once, path, body), ours)
        for half in halves:
            threading.Thread(target=run, args=(half,), daemon=True).start()
        for _ in range(2):
            try:
                error = ended.get(timeout=self.server.timeout + 1)  # the request has its own limit, and better words
            except queue.Empty:
                raise RunError(
                    f"the weights did not reach {self.server.url} within {self.server.timeout:g} seconds",
                    keys=("rollout.engine.timeout",),
                    fix="look into the server's log; then automodel resume RUN",
                ) from None
            if error is not None:
                raise error

    def _once(self, path: str, body: dict[str, Any]) -> Any:
        return self.server.request("POST", path, body, retries=0)  # a transfer that was half done cannot be sent again
