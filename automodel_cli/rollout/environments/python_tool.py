"""Python tool, in the sandbox of the rewards. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from automodel_cli.config.value_checks import check_range
from automodel_cli.rollout.environments.event_loop import in_thread
from automodel_cli.rollout.environments.tools import ToolCall, ToolEnvironment, ToolError
from automodel_cli.rollout.rewards.code import code_blocks
from automodel_cli.rollout.rewards.sandbox.host import Limits, check_memory, require_isolation, run_python

_DEFINITION: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and gives what it prints. Nothing is kept from one call to the next.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class PythonTool(ToolEnvironment):
    """Run code of the model and return its output (docs/security.md describes the isolation).

    Every call is a new process with a limit of `seconds` and `memory_mib`, 16 MiB of files, the standard library, and
    an empty `stdin`. It has no access to the network, other processes or files of the machine. The model calls the
    tool `python` with `{"code": ...}`. With `run_code_blocks`, every ```python block of a message is a call, and the
    template shows no tool. If the machine cannot isolate code, the run stops, unless `allow_unisolated` is set.
    """

    run_code_blocks: bool = False
    """Run every ```python block of a message instead of offering a tool."""
    seconds: float = 5.0
    """Time limit of a call in seconds."""
    memory_mib: int = 512
    """Memory limit of a call in MiB."""
    allow_unisolated: bool = False
    """Run the code even if the machine cannot isolate it."""
    concurrency: int = 4
    """Maximum number of concurrent calls per rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("seconds", self.seconds, above=0, fix="seconds=5")
        check_memory(self.memory_mib)

    def check(self) -> None:
        """Raise ConfigError if this machine cannot isolate generated code."""
        require_isolation(allow=self.allow_unisolated)

    @property
    def tools(self) -> Sequence[dict[str, object]]:
        """Return no tools if code blocks are calls."""
        return () if self.run_code_blocks else super().tools

    def definitions(self) -> list[dict[str, object]]:
        """See `ToolEnvironment.definitions`."""
        return [_DEFINITION]

    def _calls(self, text: str) -> Iterator[ToolCall | ToolError]:
        if not self.run_code_blocks:
            yield from super()._calls(text)
            return
        for code in code_blocks(text):
            yield ToolCall("python", {"code": code})

    async def call(self, name: str, arguments: dict[str, object]) -> str:
        """Return the output, and the end of the error output. Raises ToolError if the program fails, and OSError if
        the sandbox does not start."""
        match arguments:
            case {"code": str() as code, **others} if not others:
                pass
            case _:
                raise ToolError("python takes code, a text, and nothing else")
        limits = replace(Limits(), seconds=self.seconds, memory_bytes=self.memory_mib * 2**20)
        outcome = await in_thread(partial(run_python, code, "", limits))
        if outcome.timed_out:
            raise ToolError(f"the program was ended after {self.seconds:g} s")
        if outcome.returncode:
            last = outcome.stderr.strip().splitlines()[-1:] or [f"the program ended with {outcome.returncode}"]
            raise ToolError(f"{outcome.stdout}{last[0]}")
        return outcome.stdout or "(nothing was printed)"
