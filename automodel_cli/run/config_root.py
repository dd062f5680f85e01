"""What the root of a config must be for the command line to start it. No torch here: every command asks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from automodel_cli.config.compose import Composed
    from automodel_cli.config.errors import ConfigError


class ConfigRoot(ABC):
    """What `check`, `finetune`, `resume` and `submit` need of a config. Ours is `run.recipe.Recipe`, which has the
    sections that the other commands read.
    """

    kind: ClassVar[str] = ""
    """What `automodel KIND llm` insists on: sft, dpo, ..."""
    run_name: str | None
    """The name of the run's folder; None: that of the config file."""
    output_dir: str
    """The folder that run folders are made in."""

    @property
    def goes_on(self) -> bool:
        """Whether a new run goes on in the folder of an earlier run of its name."""
        return False

    @property
    def max_restarts(self) -> int:
        """How often the ranks of one host are started again where one fails."""
        return 0

    @abstractmethod
    def num_ranks(self, num_gpus: int) -> int:
        """Processes to start on a machine with so many GPUs, when nobody (torchrun, srun) has started them."""

    @abstractmethod
    def check_ranks(self, num_ranks: int) -> None:
        """Whether a run on so many ranks, of one host or several, is possible. Raises ConfigError."""

    def missing_files(self) -> Iterable[ConfigError]:
        """What the config names on this disk and is not there; each error names its key."""
        return ()

    @abstractmethod
    def run(self, source: Composed) -> int:
        """Train, as one rank. Returns the exit code; `source` is what `config.yaml` in the run folder will say, and its
        `run_dir` is set when a run goes on in place."""
