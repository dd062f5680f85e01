"""A real SGLang server on the CPU.

AUTOMODEL_SGLANG names a virtual environment with SGLang in it (`.ci/sglang ENV` makes one).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.real_servers import Served

SGLANG = os.environ.get("AUTOMODEL_SGLANG")
MARKS = [
    pytest.mark.sglang,
    pytest.mark.skipif(not SGLANG, reason="AUTOMODEL_SGLANG names no environment with SGLang"),
    pytest.mark.timeout(600),
]
_ABOUT = {
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{SGLANG}/bin:{os.environ['PATH']}",
    "CUDA_VISIBLE_DEVICES": "",
}
PROGRAM = ["env", *(f"{name}={value}" for name, value in _ABOUT.items()), f"{SGLANG}/bin/sglang"]
OPTIONS = ["--attention-backend", "torch_native", "--max-total-tokens", "8192", "--mem-fraction-static", "0.3"]
OPTIONS += ["--disable-overlap-schedule", "--skip-server-warmup"]
"""What a CPU without SGLang's kernels needs besides."""


class SGLangServed(Served):
    start_timeout = 500

    def command_for(self, model: Path) -> list[str]:
        """See `Served`."""
        return [
            *("env", "SGLANG_USE_CPU_ENGINE=1", *PROGRAM, "serve", "--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", self.port, "--device", "cpu", "--dtype", "float32", *OPTIONS),
        ]
