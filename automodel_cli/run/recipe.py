"""Base class of recipes: the config sections and the rules between them.

Importing this module, and building a recipe, needs no torch: `automodel check` does both. Everything heavy is imported
when a run starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.formats.base import DataKind
from automodel_cli.data.groups import GroupSpec
from automodel_cli.data.labels import LabelSpec
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.base import Strategy
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.score_head import EmbeddingHead, ScoreHead
from automodel_cli.objectives.base import Objective
from automodel_cli.objectives.mtp import WithMultiToken
from automodel_cli.objectives.sources import with_source_losses
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.run.checks.cross_section_checks import (
    check_mixture,
    check_output_dir,
    check_profile,
    check_ramp,
    check_run_name,
    check_streaming,
    check_validation,
)
from automodel_cli.run.checks.mesh_checks import check_mesh_sizes
from automodel_cli.run.checks.model_section_checks import (
    check_4bit_base,
    check_float16,
    check_fp8,
    check_freezing,
    check_multi_token,
    check_packed_probe,
    check_qat,
    check_transformer_engine,
)
from automodel_cli.run.checks.vision_checks import check_vision, refuse_vision
from automodel_cli.run.config_root import ConfigRoot
from automodel_cli.training.callback import Callback
from automodel_cli.training.config import CheckpointConfig, LoggingConfig, ValidationConfig
from automodel_cli.training.optimizers.build import OptimizerNode
from automodel_cli.training.optimizers.lr_scheduler import ScheduleNode
from automodel_cli.training.train_config import TrainConfig

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Recipe(ConfigRoot):
    """Root of a YAML file. Recipes differ in the origin of their batches and in their objective."""

    model: ModelConfig
    """Model, tokenizer and adapters."""
    data: DataConfig
    """Training data, and its tokenization and packing."""
    objective: Objective
    """Training objective."""
    optimizer: OptimizerNode
    """Optimizer: `optimizer=adamw`, `muon` or `adamw8bit`, or any class of torch.optim with `_partial_: true`."""
    lr_scheduler: ScheduleNode
    """Learning-rate schedule: `lr_scheduler=cosine`, `linear`, `wsd` or `constant`."""
    parallelizer: Strategy = field(default_factory=FSDP2Config)
    """Data-parallel strategy: `parallelizer=fsdp2`, `ddp` or `megatron_fsdp`."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Number of ranks of each parallelism."""
    pipeline: PipelineConfig | None = None
    """Pipeline stages and schedule, for example `pipeline=1f1b`. Required if mesh.pp_size is above 1."""
    train: TrainConfig
    """Batch sizes, length of the run, gradient clipping and limits."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Validation on held-out examples."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When checkpoints are written, which are kept, and how a run resumes."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Console output, trackers, profiling and the report."""
    callbacks: list[Callback] = field(default_factory=list)
    """Your own callbacks for steps, validations, checkpoints and the end of the run: `[{_target_: mine.Watch}]`."""
    run_name: str | None = None
    """Name of the run folder. null: the name of the config file."""
    output_dir: str = "runs"
    """Folder of the run folders. With a URL (`s3://bucket/runs`) a copy is uploaded there."""
    seed: int = 0
    """Seed of initial weights, data order, dropout and samples."""

    data_kind: ClassVar[DataKind] = "documents"
    """What rows are: documents, preferences (pairs or rated responses) or labeled texts."""
    reads_pictures: ClassVar[bool] = False
    """Whether rows may have pictures (`model.vision`)."""
    row_name: ClassVar[str] = "rows"
    """Unit of the step counter."""

    @property
    def row_spec(self) -> LabelSpec | GroupSpec | None:
        """How labels, or queries and passages, of rows are read. None: rows have another kind."""
        return None

    @property
    def score_head(self) -> ScoreHead | EmbeddingHead | None:
        """Scores or embeddings that the model trains, exports and compares in place of log-probs
        (`models/checkpoint_io/sequence_classifier.py`, `embedding_model.py`)."""
        return None

    @property
    def frozen_model(self) -> ModelConfig | None:
        """Another model that is in memory while this one trains, cut and sharded like it."""
        return None

    @property
    def reads_loaded_weights(self) -> bool:
        """Whether a resumed run reads the weights again that it was begun from: frozen parameters, a reference."""
        frozen_parts = self.model.vision is not None and self.model.vision.freezes
        return self.model.lora is not None or self.train.selects or frozen_parts

    @property
    def extra_memory_user(self) -> str | None:
        """Return GPU memory in addition to the planned training step, if any."""
        return None

    @property
    def packing_note(self) -> str | None:
        """Return the note for plans and dry runs, which assume full sequences."""
        return None

    def __post_init__(self) -> None:
        """Check the rules between sections. Each section has checked itself."""
        check_run_name(self.run_name)
        check_output_dir(self.output_dir)
        self.data.check_kind(self.data_kind)
        check_mixture(self.data, self.objective, self.train)
        check_streaming(self.data, self.train, self.kind)
        check_ramp(self.train, self.data, samples=self.row_name == "prompts")
        check_validation(self.validation, self.data, self.kind)
        self.parallelizer.check_mesh(self.mesh)
        check_packed_probe(self.parallelizer, self.model, self.data)
        check_transformer_engine(self.parallelizer, self.model, self.mesh)
        check_4bit_base(self.parallelizer, self.model, self.mesh)
        check_fp8(self.parallelizer, self.model)
        check_qat(self.parallelizer, self.model, self.train, self.kind)
        check_float16(self.model, self.optimizer)
        check_multi_token(self.parallelizer, self.model, self.kind)
        check_freezing(self.train, self.model)
        if self.kind == "vlm" or (self.reads_pictures and self.model.vision is not None):
            check_vision(self.kind, self.model, self.data, self.parallelizer)
        else:
            refuse_vision(self.kind, self.model, self.data, may_read=self.reads_pictures)
        pp_size = self.mesh.pp_size or 1
        if pp_size > 1 and self.pipeline is None:
            raise ConfigError(
                f"mesh.pp_size={pp_size} requires a pipeline schedule, but pipeline is not set",
                code="requires_setting",
                keys=("mesh.pp_size",),
                fix="pipeline=1f1b",
            )
        if pp_size == 1 and self.pipeline is not None:
            raise ConfigError(
                "pipeline has no effect, because mesh.pp_size=1",
                code="no_effect",
                keys=("pipeline",),
                fix="pipeline=null, or mesh.pp_size=2",
            )
        if self.mesh.dp_size is not None:
            self._check_batch(self.mesh.dp_size)
        has_own_plan = getattr(self.parallelizer, "tp_plan", None) is not None
        check_mesh_sizes(self.model, self.mesh, self.pipeline, has_own_plan=has_own_plan)

    def _check_batch(self, dp_size: int) -> None:
        full = self.train.num_microbatches(dp_size)
        if self.data.streaming is not None:
            self.data.streaming.check_ranks(self.train.batch_sizes, dp_size)
        if self.pipeline is not None:
            for size in self.train.batch_sizes:
                self.pipeline.check(self.mesh.pp_size or 1, full * size // self.train.global_batch_size)

    @property
    def validated_objective(self) -> Objective:
        """`objective`, with the loss of each dataset if there are several."""
        return with_source_losses(self.objective, self.data.mixture().names)

    @property
    def trained_objective(self) -> Objective:
        """`validated_objective`, with the multi-token-prediction loss if the model trains it."""
        objective = self.validated_objective
        return objective if self.model.mtp is None else WithMultiToken(objective, self.model.mtp.loss_weight)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the GEMMs. It determines how far two implementations may differ."""
        import torch

        dtype: torch.dtype = self.parallelizer.compute_dtype() or getattr(torch, self.model.dtype)
        return dtype

    def check_ranks(self, num_ranks: int) -> None:
        self._check_batch(self.mesh.resolve(num_ranks).dp)
        check_profile(self.logging.profile, num_ranks)

    def check_model(self, hf_config: PretrainedConfig) -> None:
        """Raise ConfigError for requirements of this recipe on the model, before it is built."""

    def missing_files(self) -> list[ConfigError]:
        from automodel_cli.run.checks.missing_files import missing_files

        return list(missing_files(self.model, self.data))

    def data_problems(self) -> list[ConfigError]:
        from automodel_cli.run.checks.data_checks import data_problems

        return list(
            data_problems(
                self.data,
                self.train,
                self.lr_scheduler,
                rows_of_a_step=self.rows_of_a_step(),
                kind=self.data_kind,
                prompts=self.row_name == "prompts",
            )
        )

    @property
    def goes_on(self) -> bool:
        return self.checkpoint.resume == "auto"

    @property
    def max_restarts(self) -> int:
        return self.train.max_restarts

    @property
    def grows_segments(self) -> bool:
        return not getattr(self.parallelizer, "nccl_ub", False)  # Megatron-FSDP rejects expandable segments

    def num_ranks(self, num_gpus: int) -> int:
        return self.mesh.num_ranks(self.gpus_to_train_on(num_gpus) if num_gpus else 0)

    def prepared(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """The data as a run reads it: `train`, `validation` (or None) and `report`. Needs no process group."""
        from automodel_cli.data.preparation.pipeline import prepare_data
        from automodel_cli.models.hub.source import stop_ids
        from automodel_cli.run.checks.token_ids import check_prepared, check_streamed
        from automodel_cli.run.picture_data import picture_support

        if self.data.streaming is not None:
            from automodel_cli.data.streaming.streamed_data import open_streams

            streamed = open_streams(self.data, tokenizer, stop_ids=stop_ids(self.model))
            check_streamed(streamed, tokenizer, self.model)
            return streamed
        data = prepare_data(
            self.data,
            tokenizer,
            seed=self.seed,
            preferences=self.data_kind == "preferences",
            stop_ids=stop_ids(self.model),
            pictures=None if self.model.vision is None else picture_support(self.model, self.data, tokenizer),
            row_spec=self.row_spec,
        )
        check_prepared(data, tokenizer, self.model)
        return data

    def prepare_shards(self, tokenizer: PreTrainedTokenizerBase, index: int, count: int) -> int:
        """Tokenize part `index` of `count` of the data. Return how many shards of other parts are incomplete."""
        if self.model.vision is not None or self.row_name == "prompts":
            return 0  # `prepared` reads these data as a whole
        from automodel_cli.data.preparation.build_shards import build_shards
        from automodel_cli.models.hub.source import stop_ids

        return build_shards(
            self.data,
            tokenizer,
            index=index,
            count=count,
            preferences=self.data_kind == "preferences",
            stop_ids=stop_ids(self.model),
            row_spec=self.row_spec,
        )

    def rows_of_a_step(self) -> dict[str, int]:
        """How many rows of the data a step reads over all ranks, and how many of them belong together."""
        return {
            "global_batch_size": self.train.global_batch_size,
            "microbatch_size": self.train.microbatch_size,
        }
