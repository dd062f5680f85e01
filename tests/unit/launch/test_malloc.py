"""That the allocator keeps freed memory, seen in page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROBE = """\
import resource, sys
from automodel_cli.launch.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for i in range(20):
    if i == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_blocks_are_used_again() -> None:
    def page_faults(mode: str) -> int:
        return int(
            subprocess.run([sys.executable, "-c", PROBE, mode], capture_output=True, text=True, check=True).stdout
        )

    assert page_faults("keep") < page_faults("leave") / 10
