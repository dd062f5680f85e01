"""Preference optimization: pairs or labeled responses from a dataset, compared with a reference model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.models.config import ModelConfig
from automodel_cli.objectives.base import ReferenceSource
from automodel_cli.recipes.preferences import PreferenceRecipe
from automodel_cli.run.frozen_models.reference_sync import ReferenceSync, check_reference_update

if TYPE_CHECKING:
    from automodel_cli.data.batch import Columns
    from automodel_cli.run.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class DPORecipe(PreferenceRecipe):
    """Preference training with a reference model (see `PreferenceRecipe`).

    Values of `reference_mode` (`automodel_cli/run/frozen_models/reference_logprobs.py`): `precomputed`,
    `disable_adapter`, `frozen_copy`, or `auto`, which is disable_adapter with new adapters and precomputed otherwise.
    Objectives without a reference (simpo, orpo) ignore it.
    """

    reference_mode: ReferenceSource = "auto"
    """Source of the reference's log-probs: `precomputed`, `disable_adapter` or `frozen_copy`. `auto` is
    `disable_adapter` with new adapters, else `precomputed`."""
    reference_sync: ReferenceSync | None = None
    """Let the reference model follow the policy. null: it stays as loaded."""

    kind: ClassVar[str] = "dpo"
    reads_pictures: ClassVar[bool] = True

    @property
    def _copies(self) -> bool:
        return self.reference_mode == "frozen_copy" or self.reference_sync is not None

    @property
    def frozen_model(self) -> ModelConfig | None:
        return self.model if self._copies else None

    @property
    def reads_loaded_weights(self) -> bool:
        return super().reads_loaded_weights or "ref_logprobs_BT" in self.objective.columns

    def __post_init__(self) -> None:
        super().__post_init__()
        lora = self.model.lora
        if self.reference_mode == "disable_adapter" and lora is not None and not lora.starts_as_base:
            key = "pretrained" if lora.pretrained is not None else "modules_to_save"
            raise ConfigError(
                f"reference_mode=disable_adapter is not supported with model.lora.{key}, because the model without its "
                "adapters is not the model that training starts from",
                code="unsupported_combination",
                keys=("reference_mode", f"model.lora.{key}"),
                fix="reference_mode=precomputed",
            )
        if self.reference_mode == "disable_adapter" and self.model.lora is None:
            raise ConfigError(
                "reference_mode=disable_adapter requires an adapter, but model.lora is not set",
                code="requires_setting",
                keys=("reference_mode", "model.lora"),
                fix="reference_mode=precomputed, or model.lora={rank: 16}",
            )
        if self.reference_mode != "auto" and "ref_logprobs_BT" not in self.objective.columns:
            raise ConfigError(
                f"reference_mode={self.reference_mode} has no effect: this objective uses no reference model",
                code="no_effect",
                keys=("reference_mode", "objective"),
                fix="reference_mode=auto",
            )
        has_reference = "ref_logprobs_BT" in self.objective.columns
        check_reference_update(self.model, self.parallelizer, self.reference_sync, has_reference=has_reference)
        if self.reference_sync is not None and self.reference_mode not in ("auto", "frozen_copy"):
            raise ConfigError(
                f"reference_mode={self.reference_mode} is not supported with reference_sync: the loaded "
                "weights cannot follow the policy",
                code="unsupported_combination",
                keys=("reference_mode", "reference_sync"),
                fix="reference_mode=frozen_copy, or reference_sync=null",
            )

    def columns(self, session: Trainer) -> Columns:
        """Return a function that adds log-probs of the reference and other inputs of the loss. Collective."""
        from automodel_cli.run.frozen_models.preference_features import partners, sharpened
        from automodel_cli.run.frozen_models.reference_logprobs import reference_columns, reference_point

        needed = self.objective.columns
        wanted = "judged" if "desirable_S" in needed else "pairs"
        for rows in filter(None, (session.data.train, session.data.validation)):
            if rows.kind != wanted:
                raise DataError(
                    f"{type(self.objective).__name__} requires {_KINDS[wanted]}, but the data contains "
                    f"{_KINDS[rows.kind]}",
                    code="wrong_data_kind",
                    keys=("objective", "data"),
                    fix=f"objective._target_=automodel_cli.objectives.{_OBJECTIVES[rows.kind]}",
                )
        measures: list[Columns] = []
        if "ref_logprobs_BT" in needed:
            measures.append(reference_columns(session, self.reference_mode, self.reference_sync))
        of_policy = {
            "kl_baseline_1": reference_point,
            "partners_P2": partners,
            "sharpened_logprobs_BT": sharpened,
        }
        measures += [partial(measure, session) for name, measure in of_policy.items() if name in needed]
        return lambda batches: reduce(lambda done, measure: measure(done), measures, batches)


_KINDS = {"pairs": "pairs of responses", "judged": "single responses judged good or bad"}
_OBJECTIVES = {"pairs": "dpo.DPO", "judged": "kto.KTO"}
