"""Implementation of `automodel verify`: compare layouts on a tiny copy of the model with a single process."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.parameter_patterns import matches
from automodel_cli.launch import fork_server
from automodel_cli.launch.process_startup import disable_gc, enable_gc
from automodel_cli.objectives.base import request_of
from automodel_cli.parity import report as parity_report
from automodel_cli.parity.case_selection import choose_cases, pick, small_attention
from automodel_cli.parity.cases import Case
from automodel_cli.parity.option_cases import exact_lora, with_settings
from automodel_cli.parity.report import Result

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.parity.pictures import PictureOriginal
    from automodel_cli.parity.reference import Original
    from automodel_cli.run.recipe import Recipe

_SECONDS_PER_ROW = 300.0
_MAY_BE_ROUNDING = 1e-3  # mistakes cost more


def run_verify(recipe: Recipe, source: Composed, *, wanted: Sequence[str], tolerance: float, as_json: bool) -> int:
    """Return 0 if all cases of the recipe match the single process, else 1.

    Raises ConfigError if the model config is not available, or if no small copy can be built.
    """
    fork_server.preload("automodel_cli.parity.compare")
    fork_server.start_server()  # it imports while this process does
    disable_gc()
    hf_config = _hf_config(recipe, source)
    enable_gc()
    if request_of(recipe.objective).hidden:
        raise ConfigError(
            f"verify does not support {type(recipe.objective).__name__}, whose loss reads all texts of a step at once",
            code="not_supported",
            keys=("objective",),
        )
    layouts = choose_cases(recipe.mesh, recipe.parallelizer, recipe.pipeline, recipe.objective)
    chosen = with_settings(recipe, layouts, hf_config.get_text_config().num_hidden_layers)
    rows = pick(chosen.rows, wanted)
    report = _Report(rows, tolerance, as_json, packs=recipe.data.packing != "none")
    with tempfile.TemporaryDirectory(prefix="automodel-verify-") as folder:
        kind = _Copies if recipe.model.vision is None else _PictureCopies
        copies = kind(recipe, hf_config, Path(folder), rows)
        rows, uncovered = copies.frozen(rows)
        report.begin(copies.description, [*chosen.not_covered, *uncovered])
        refusals = {packed: _packing_refusal(recipe, hf_config, packed) for packed in {row.packed for row in rows}}
        for row in rows:
            report.running(row)
            report.add(_measure(copies.of(row), row, refusals[row.packed], tolerance))
    return report.end()


def _hf_config(recipe: Recipe, source: Composed) -> PretrainedConfig:
    """Return the model config without reading weights. The error names the origin of the model name."""
    from automodel_cli.models.hub.source import hf_config

    try:
        return hf_config(recipe.model)
    except ConfigError as error:
        keys = [f"model.{key}" for key in error.keys]
        origin = "; ".join(f"{key} ({source.nearest_origin(key)})" for key in keys)
        fix = error.fix
        if recipe.model.pretrained is not None:
            fix = f"{fix}; verify needs only a folder with config.json"
        raise ConfigError(error.message, code=error.code, keys=keys, origin=origin or None, fix=fix) from None


class _Copies:
    """The saved small copy of the model with its results in one process, and the copy with all layers if a case needs
    it."""

    def __init__(self, recipe: Recipe, hf_config: PretrainedConfig, folder: Path, rows: Sequence[Case]):
        self._recipe, self._hf_config, self._folder, self._rows = recipe, hf_config, folder, rows
        self._made: dict[bool, Original | PictureOriginal] = {}
        self.description = ""
        self._names: set[str] = set()
        self.of(Case())

    def of(self, row: Case) -> Original | PictureOriginal:
        """Return the copy for this case. Raises ConfigError if it cannot be built."""
        if row.own_layers not in self._made:
            self._made[row.own_layers] = self._write(row.own_layers)
        return self._made[row.own_layers]

    def frozen(self, rows: Sequence[Case]) -> tuple[list[Case], list[str]]:
        """Return cases that train the parameters that the recipe trains, or the reason why they train all."""
        selection = self._recipe.train.selection
        absent = [
            pattern
            for pattern in (*selection.trainable, *selection.freeze)
            if not any(matches(pattern, name) for name in self._names)
        ]
        if absent:
            reason = f"train.freeze, train.trainable: no parameter of the copy matches {', '.join(absent)}"
            return list(rows), [f"{reason}; the rows train all parameters"]
        return [replace(row, selection=selection) for row in rows], []

    def _kinds(self, own_layers: bool) -> list[bool]:
        """Return whether rows of this copy are packed, padded, or both."""
        return sorted({row.packed for row in self._rows if row.own_layers == own_layers} or {True})

    def _describe(self, family: str, text: PretrainedConfig, size: int) -> None:
        self.description = self.description or (
            f"{family}: a random copy with {text.num_hidden_layers} layers of width {text.hidden_size} "
            f"({size / 1e6:.2f}M parameters), float32, CPU ranks"
        )

    def _write(self, own_layers: bool) -> Original | PictureOriginal:
        import torch

        from automodel_cli.models import transformers_compat
        from automodel_cli.models.probes.small_sizes import LAYERS
        from automodel_cli.models.probes.tiny_model import build_small, shrink
        from automodel_cli.parity.reference import Original

        recipe, hf_config = self._recipe, self._hf_config
        trust = recipe.model.trust_remote_code
        num_layers = hf_config.get_text_config().num_hidden_layers if own_layers else LAYERS
        small = shrink(hf_config, num_layers=num_layers)
        small.__dict__.pop("quantization_config", None)  # storage format of the hub; the copy is float32
        small = _untied(small, recipe)
        try:
            model = build_small(
                small,
                lambda c: transformers_compat.causal_lm(c, dtype=torch.float32, trust_remote_code=trust),
                seed=recipe.seed,
            )
        except Exception as error:  # library classes may fail in any way for untested sizes
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(
                f"verify cannot build a small copy of {hf_config.model_type}: {reason[:200]}",
                code="not_measured",
                keys=("model",),
            ) from error
        self._names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        text, size = small.get_text_config(), sum(p.numel() for p in model.parameters())
        self._describe(hf_config.model_type, text, size)
        return Original.write(
            self._folder / ("whole" if own_layers else "small"),
            model,
            recipe.objective,
            kinds=self._kinds(own_layers),
            attention=small_attention(recipe.model.attn_implementation),
            trust_remote_code=trust,
        )


class _PictureCopies(_Copies):
    """The small copies of a vision-language model."""

    def _write(self, own_layers: bool) -> PictureOriginal:
        from automodel_cli.models.hub.source import composite_config
        from automodel_cli.models.probes.small_sizes import LAYERS
        from automodel_cli.models.vision.probe import probe_pictures
        from automodel_cli.models.vision.processor import shared_processor
        from automodel_cli.parity.pictures import PictureOriginal
        from automodel_cli.pipelining.cut.picture_split import layers_of_first_stage

        recipe, num_layers = self._recipe, LAYERS
        processor, config = shared_processor(recipe.model), composite_config(recipe.model)
        probe_pictures(config, processor)
        if own_layers:
            num_layers = self._hf_config.get_text_config().num_hidden_layers
        elif any(row.pipeline is not None for row in self._rows):
            # The first stage must have the layers that read features, and one more with sequence parallelism.
            num_layers += layers_of_first_stage(config, processor)
        folder = self._folder / ("whole" if own_layers else "small")
        original = PictureOriginal.write(folder, recipe.model, num_layers, recipe.objective, self._kinds(own_layers))
        whole = original.composite()
        self._names = original.names()
        self._describe(whole.config.model_type, whole.config.get_text_config(), whole.num_parameters())
        return original


def _untied(small: PretrainedConfig, recipe: Recipe) -> PretrainedConfig:
    """Return the copy's config. The head is untied if an adapter reaches it, because the closed form of adapter
    gradients supports one use of each weight."""
    if recipe.model.lora is None:
        return small
    from automodel_cli.models.builder import part_of

    exact = exact_lora(recipe.model.lora)
    part = part_of(copy.deepcopy(small), replace(recipe.model, lora=exact, mtp=None, tokenizer=None), device="meta")
    return part.untied(small)


def _packing_refusal(recipe: Recipe, hf_config: PretrainedConfig, packed: bool) -> str | None:
    """Return why a run would reject such sequences for this model, or None."""
    from automodel_cli.models.packing_support import probe_packing

    try:
        probe_packing(
            hf_config,
            attention=small_attention(recipe.model.attn_implementation),
            rows="packed" if packed else "padded",
            trust_remote_code=recipe.model.trust_remote_code,
        )
    except ConfigError as error:
        return str(error)
    return None


def _measure(original: Original | PictureOriginal, row: Case, refusal: str | None, tolerance: float) -> Result:
    from automodel_cli.parity.compare import TIMES_ROUNDING, Refused, run_rows
    from automodel_cli.parity.pictures import PictureOriginal, run_picture_rows

    started = time.monotonic()
    if refusal is not None:
        return Result(row, "refused", 0.0, reason=refusal)
    try:
        run = run_picture_rows if isinstance(original, PictureOriginal) else run_rows
        (outcome,) = fork_server.launch(run, row.world_size, original, [row], timeout=_SECONDS_PER_ROW)
    except fork_server.RankFailure as failure:
        return Result(row, "FAILED", time.monotonic() - started, reason=str(failure).strip()[-1500:])
    seconds = time.monotonic() - started
    if isinstance(outcome, Refused):
        return Result(row, "refused", seconds, reason=outcome.reason)
    verdict: parity_report.Verdict = "ok" if outcome.within(*row.bounds(tolerance)) else "WRONG"
    note = ""
    of_rounding = row.bounds(max(tolerance, TIMES_ROUNDING * outcome.rounding))
    if verdict == "WRONG" and outcome.worst < _MAY_BE_ROUNDING and outcome.within(*of_rounding):
        verdict = "ok"
        own = f"{outcome.rounding:.1e}"
        note = f"rounding: the library's own float32 pass in one process is off by {own} on this copy"
    return Result(row, verdict, seconds, outcome.loss, outcome.grad_norm, outcome.gradient, outcome.name, note)


@dataclass
class _Report:
    """Prints cases as they finish. With `as_json`: one object at the end, and the cases to stderr. `packs`: whether the
    recipe packs; then a rejection of the other kind of sequences is not a failure of the recipe.
    """

    rows: Sequence[Case]
    tolerance: float
    as_json: bool
    packs: bool
    results: list[Result] = field(default_factory=list)
    description: str = ""
    without: Sequence[str] = ()

    def begin(self, description: str, without: Sequence[str]) -> None:
        self.description, self.without = description, without
        self._say(description)
        self._say("relative differences to the library's own model in one process, one document at a time\n")
        self._say(parity_report.header(self.rows))

    def running(self, row: Case) -> None:
        if sys.stderr.isatty():
            print(f"{len(self.results) + 1} of {len(self.rows)}: {row} ...", end="", file=sys.stderr, flush=True)

    def add(self, result: Result) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self.results.append(result)
        self._say(parity_report.line(result, self.rows))

    def end(self) -> int:
        passed = all(self._passes(result) for result in self.results)
        passed = passed and any(result.verdict == "ok" for result in self.results)
        if self.as_json:
            more = {"model": self.description, "not_covered": list(self.without)}
            print(json.dumps(parity_report.as_json(self.results, self.tolerance, passed=passed, **more), indent=2))
        self._say("\n" + parity_report.parity_summary(self.results, self.tolerance, passed=passed))
        for setting in self.without:
            self._say(f"not covered: {setting}")
        return 0 if passed else 1

    def _passes(self, result: Result) -> bool:
        return result.verdict == "ok" or (result.verdict == "refused" and result.row.packed != self.packs)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)
