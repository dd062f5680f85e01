"""Imported by the ranks' server before it forks: what every rank would else find out anew about the tiny families.

Which way each is run (`models/probes/isolation.py`), that it can be cut into stages, how its hub keys become
parameters, and what
torch and the library import or compile at the first model, pass and checkpoint: 0.3 CPU s of each rank. No rank sees
anything but warm caches.
"""

from __future__ import annotations

import tempfile

import torch
from tqdm import tqdm

from automodel_cli.models import transformers_compat
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.parity.batches import microbatch
from automodel_cli.pipelining.cut.split_check import check_split
from tests import tiny


def warm() -> None:
    torch.set_num_threads(1)  # a process that ran more cannot be forked
    tqdm.monitor_interval = 0  # saving shows its progress, which starts a thread
    batch = microbatch(0, packed=True)
    for family in ("llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma3_text"):
        with tempfile.TemporaryDirectory() as folder:
            with transformers_compat.quiet():
                tiny.build_hf(family).save_pretrained(folder)
            config = ModelConfig(pretrained=folder, lm_head_chunk_size=16)
            part = build_part(config)
            check_split(part.model)
            load_weights(part, config, device="cpu", seed=0)
        part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT.sum().backward()
        torch.optim.AdamW(part.parameters(), lr=1e-3, foreach=True).step()


warm()
