"""Base class of config roots that the command line can start. Torch-free, because every command imports it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.config.errors import ConfigError

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.launch.generation_servers import GenerationServers


class ConfigRoot(ABC):
    """Interface that `check`, `finetune`, `resume` and `submit` require of a config.

    `run.recipe.Recipe` implements it, and has the sections that the other commands read.
    """

    kind: ClassVar[str] = ""
    """Kind that `automodel KIND llm` requires: sft, dpo, ..."""
    run_name: str | None
    """Name of the run folder. null: the name of the config file."""
    output_dir: str
    """Folder of the run folders. With a URL (`s3://bucket/runs`) a copy is uploaded there."""

    @property
    def goes_on(self) -> bool:
        """Return whether a new run continues in the folder of an earlier run of the same name."""
        return False

    @property
    def max_restarts(self) -> int:
        """Maximum number of restarts of the ranks of one host after a failure."""
        return 0

    @property
    def grows_segments(self) -> bool:
        """Whether CUDA's allocator may grow its segments. NCCL registers no memory of such segments."""
        return True

    def generation_servers(self) -> GenerationServers | None:
        """Generation servers that a run starts in addition to its ranks, or None."""
        return None

    def gpus_to_train_on(self, num_gpus: int) -> int:
        """Return the number of GPUs with a rank. Raises ConfigError if generation servers leave too few."""
        servers = self.generation_servers()
        taken = 0 if servers is None else servers.own_gpus
        if taken and taken >= num_gpus:
            assert servers is not None
            raise ConfigError(
                f"{servers.number} generation server(s) with {servers.gpus} GPU(s) each leave none of the {num_gpus} "
                "GPUs for training",
                code="mesh_size",
                keys=("rollout.engine.servers.num_servers", "rollout.engine.servers.gpus_per_server"),
                fix=f"start at least {taken + 1} GPUs, or rollout.placement=colocated",
            )
        return num_gpus - taken

    @abstractmethod
    def num_ranks(self, num_gpus: int) -> int:
        """Processes to start on a machine with so many GPUs, when nobody (torchrun, srun) has started them."""

    @abstractmethod
    def check_ranks(self, num_ranks: int) -> None:
        """Whether a run on so many ranks, of one host or several, is possible. Raises ConfigError."""

    def missing_files(self) -> Iterable[ConfigError]:
        """Yield an error for each missing local file, with its key."""
        return ()

    def data_problems(self) -> Iterable[ConfigError]:
        """Yield an error for each problem of the local data files, with its key."""
        return ()

    @abstractmethod
    def run(self, source: Composed) -> int:
        """Train as one rank and return the exit code.

        Args:
            source: the content of `config.yaml` in the run folder. Its `run_dir` is set when a run resumes in place.
        """
