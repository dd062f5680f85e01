"""The trainer's process of a transfer through vLLM's factory, in vLLM's environment: send.py URLS WEIGHTS BACKEND.

BACKEND `wire` sends the weights (to servers whose addresses have a comma between them); `refused` is refused by the
server; `nccl` builds what NCCL needs, as a run would.
"""

import json
import os
import sys

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.servers.live_pool import LivePool
from automodel_cli.rollout.engines.servers.vllm import VLLMEngine
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.weight_sync.transports import FactoryTransfer, bucket_source, ipc_init, nccl_init
from automodel_cli.rollout.weight_sync.update_requests import json_safe
from tests.vllm.wire import TrainerInit, register

urls, weights, backend = sys.argv[1:]
register()
named = list(load_file(weights).items())
if backend == "nccl":
    init = nccl_init("10.0.0.1", 29600)(4)
    assert init == NCCLTrainerInitInfo("10.0.0.1", 29600, 5, rank=0) and init.packed and init.is_sender
    # of NCCL's own engine what needs no GPU: a second rank, which reads the source, and what the first checks
    second = NCCLTrainerInitInfo("10.0.0.1", 29600, 5, rank=1)
    engine = WeightTransferTrainerFactory.trainer_init(second, client=None, source=bucket_source(named))
    engine.send_weights()
    metas = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    checked = NCCLTrainerWeightTransferEngine._checked_iter(engine.source, metas)
    assert all(tensor is given for (_, tensor), (_, given) in zip(checked, named, strict=True))
    init = ipc_init()(4)
    assert init == IPCTrainerInitInfo(rank=0, packed=True) and init.is_sender
    handles = {"GPU-1": (1, "a", b"c")}
    asked = {"names": ["x"], "dtype_names": ["bfloat16"], "shapes": [[2]], "tensor_sizes": [4], "ipc_handles": handles}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    body = json.loads(json.dumps(json_safe(asked)))
    assert IPCWeightTransferUpdateInfo(**body) == IPCWeightTransferUpdateInfo(**asked)
else:
    refused = backend == "refused"
    transfer = FactoryTransfer(lambda num_workers: TrainerInit(num_workers + 1, refused, rank=0))
    tokenizer = ByteTokenizer().build()
    engines = [VLLMEngine(Server(url, timeout=60), tokenizer, transfer, model="tiny") for url in urls.split(",")]
    engine = engines[0] if len(engines) == 1 else LivePool(engines, transfer, concurrency=8)
    engine.update_weights([named[:3], named[3:]])
    engine.update_weights([named])  # over the connections that are there
print("sent")
