"""Rows of the questions of an evaluation, without a model."""

from __future__ import annotations

from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.sources import Source, TaskSource, open_source
from automodel_cli.data.storage.cache import cache_root
from automodel_cli.evaluation.config import EvalConfig
from automodel_cli.evaluation.settings import GenerationSettings, MultipleChoiceSettings


def question_sources(config: EvalConfig) -> tuple[list[Source], list[str]]:
    """Return the datasets of all tasks, and the names of tasks without one: they use the rows of a run, or are custom.

    `limit` of a task does not apply. Raises DataError for files that cannot be read.
    """
    sources: list[Source] = []
    without = []
    root = cache_root(None)
    for name, task in config.tasks.items():
        match task:
            case MultipleChoiceSettings():
                sources.append(open_source(SourceConfig(task.path), root))
            case GenerationSettings() if task.data is not None:
                if task.data.generator is not None:
                    sources.append(TaskSource(task.data.generator, "validation"))
                    continue
                held_out = task.data.validation_sources()
                sources += [open_source(each.source, root, whole=each.whole) for each in held_out]
                sources += [] if held_out else [open_source(each, root) for each in task.data.train_sources()]
            case _:
                without.append(name)
    return sources, without
