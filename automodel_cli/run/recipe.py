"""What every recipe shares: the sections of the YAML, the rules between them, and what the command line may ask.

Importing this module, and building a recipe, needs no torch: `automodel check` does both. Everything heavy is imported
when a run starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.problems import Finding
from automodel_cli.data.config import DataConfig
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.layout import MeshConfig
from automodel_cli.distributed.strategies.base import Strategy
from automodel_cli.models.config import ModelConfig
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.run.rules import check_4bit_base, check_packed_probe, check_run_name, check_transformer_engine
from automodel_cli.run.sizes import check_sizes
from automodel_cli.training.callback import Callback
from automodel_cli.training.config import CheckpointConfig, LoggingConfig, TrainConfig, ValidationConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from automodel_cli.config.compose import Composed
    from automodel_cli.data.batch import Batch
    from automodel_cli.run.session import Session


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One YAML file. A recipe differs from another in where its batches come from and in its objective."""

    model: ModelConfig
    """Where the model comes from, how it is stored and adapted."""
    data: DataConfig
    """Rows to train on, and how they become tokens."""
    objective: Any
    """What is minimised."""
    optimizer: Any
    """A node (`optimizer=adamw`, `muon`, `adamw8bit`), or any class of torch.optim with `_partial_: true`."""
    lr_scheduler: Any
    """The learning rate over the run: `lr_scheduler=cosine`, `linear`, `wsd` or `constant`."""
    parallelizer: Strategy = field(default_factory=FSDP2Config)
    """What shards parameters and sums gradients: `parallelizer=fsdp2`, `ddp` or `megatron_fsdp`."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How many ranks each parallelism has."""
    pipeline: PipelineConfig | None = None
    """How stages are cut and scheduled; needed where mesh.pp_size is above 1: `pipeline=1f1b`."""
    train: TrainConfig
    """Length of the run and size of a step."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """When the held-out rows are measured."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When checkpoints are written, which are kept, and what a run goes on from."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """What a run shows and records."""
    callbacks: list[Callback] = field(default_factory=list)
    """Your own classes that hear of steps, validations, checkpoints and the end: `[{_target_: mine.Watch}]`."""
    run_name: str | None = None
    """The name of the run's folder; null: that of the config file."""
    output_dir: str = "runs"
    """The folder that run folders are made in."""
    seed: int = 0
    """Decides initial weights, the order of rows, dropout and samples."""

    kind: ClassVar[str] = ""
    """What `automodel KIND llm` insists on: sft, dpo, ..."""
    preferences: ClassVar[bool] = False
    """Whether rows are pairs or judged responses."""
    row_name: ClassVar[str] = "rows"
    """What a step counts."""

    def __post_init__(self) -> None:
        """The rules between sections; each section has checked itself."""
        check_run_name(self.run_name)
        self.data.check_kind(preferences=self.preferences)
        self.parallelizer.check_mesh(self.mesh)
        check_packed_probe(self.parallelizer, self.model, self.data)
        check_transformer_engine(self.parallelizer, self.model, self.mesh)
        check_4bit_base(self.parallelizer, self.model, self.mesh)
        pp_size = self.mesh.pp_size or 1
        if pp_size > 1 and self.pipeline is None:
            raise ConfigError(
                f"mesh.pp_size={pp_size} cuts the model into stages, but no pipeline says how they run",
                keys=("mesh.pp_size",),
                fix="pipeline=1f1b",
            )
        if pp_size == 1 and self.pipeline is not None:
            raise ConfigError(
                "pipeline is set, but mesh.pp_size=1", keys=("pipeline",), fix="pipeline=null, or mesh.pp_size=2"
            )
        if self.mesh.dp_size is not None:
            self._check_batch(self.mesh.dp_size)
        check_sizes(self.model, self.mesh, self.pipeline)

    def _check_batch(self, dp_size: int) -> None:
        num_microbatches = self.train.num_microbatches(dp_size)
        if self.pipeline is not None:
            self.pipeline.check(self.mesh.pp_size or 1, num_microbatches)

    def check_ranks(self, num_ranks: int) -> None:
        """Whether mesh and batch fit so many ranks, on however many hosts. Raises ConfigError."""
        self._check_batch(self.mesh.resolve(num_ranks).dp)

    def missing_files(self) -> list[ConfigError]:
        """What the config names on this disk and is not there, for `automodel check`."""
        from automodel_cli.run.files import missing_files

        return list(missing_files(self.model, self.data))

    def run_folder(self, source: Composed, *, make: bool) -> Path:
        """The folder that a run begun from `source` writes into; made, with its config, if `make`."""
        from automodel_cli.run.run_folder import run_folder

        return run_folder(self, source, make=make)

    def num_ranks(self, num_gpus: int) -> int:
        """Processes to start on this machine when nobody (torchrun, srun) has started them."""
        return self.mesh.num_ranks(num_gpus)

    def run(self, source: Composed) -> int:
        """Train. Returns the exit code; `source` is what `config.yaml` in the run directory will say."""
        raise NotImplementedError

    def prepared(self, tokenizer: Any) -> Any:
        """The data as a run reads it: `train`, `validation` (or None) and `report`. Needs no process group."""
        from automodel_cli.data.prepare import prepare
        from automodel_cli.models.source import stop_ids

        stops = stop_ids(self.model)
        return prepare(self.data, tokenizer, seed=self.seed, preferences=self.preferences, stop_ids=stops)

    def rows_of_a_step(self) -> dict[str, int]:
        """How many rows of the data a step reads over all ranks, and how many of them belong together."""
        return {
            "global_batch_size": self.train.global_batch_size,
            "microbatch_size": self.train.microbatch_size,
        }

    def batch_columns(self, session: Session) -> Callable[[list[Batch]], list[Batch]]:
        """What adds the columns that the objective reads besides the rows. Called once, while the model is as
        loaded.
        """
        return lambda batches: batches

    def own_callbacks(self, session: Session) -> list[Callback]:
        """What a run of this recipe always does besides its steps: what a validation measures, above all."""
        from automodel_cli.run.held_out import HeldOutLoss

        return [HeldOutLoss(session)]

    def inspect_data(self, source: Composed, **options: Any) -> None:
        """Print prepared rows with trained tokens marked, and the totals."""
        from automodel_cli.data.inspect import show
        from automodel_cli.models.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.model)
        show(self.prepared(tokenizer), tokenizer, **options)

    def plan(self, source: Composed, *, num_gpus: int, memory_gib: float, svg: Path | None) -> int:
        """Print stages, memory of a GPU and idle time on `num_gpus`, from the model's config alone."""
        from automodel_cli.run.plan import print_plan

        return print_plan(self, source, num_gpus=num_gpus, memory_gib=memory_gib, svg=svg)

    def verify(self, source: Composed, *, wanted: Sequence[str], tolerance: float, as_json: bool) -> int:
        """Compare every parallelism of this recipe with one process, on a tiny copy of its model."""
        from automodel_cli.run.verify import verify

        return verify(self, source, wanted=wanted, tolerance=tolerance, as_json=as_json)

    def examine(self, run_dir: Path) -> Iterable[Finding]:
        """Whether the files of a run are as they were written."""
        from automodel_cli.run.examine import examine

        return examine(run_dir)

    def export(self, run_dir: Path, output: Path) -> int:
        """Write the newest checkpoint of `run_dir` as a Hugging Face folder, reload it and compare."""
        from automodel_cli.run.results import export_run

        return export_run(self, run_dir, output)
