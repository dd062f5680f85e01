"""Find missing files and folders of a config, without reading files or using the network."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.tokenizer import no_tokenizer
from automodel_cli.run.checks.cross_section_checks import check_exported


def missing_files(model: ModelConfig, data: DataConfig) -> Iterator[ConfigError]:
    """Yield one error for each missing path. A name that may be a hub id is not a path."""
    yield from _of_model(model)
    places = [("data", source) for source in data.train_sources()]
    if data.datasets:
        places = [(f"data.datasets.{i}", source) for i, source in enumerate(data.datasets)]
    paths = [(section, "path", source.path, source.split) for section, source in places]
    paths += [
        (each.key.rpartition(".")[0], "validation_path", each.source.path, "train")
        for each in data.validation_sources()
        if each.whole
    ]
    for section, name, path, split in paths:
        if (error := _missing_data(section, name, path, split)) is not None:
            yield error
    if data.media_dir is not None and not Path(data.media_dir).is_dir():
        yield _no_such("data.media_dir", data.media_dir)
    template = data.chat_template
    if template is not None and template.endswith(".jinja") and "{" not in template and not Path(template).is_file():
        yield _no_such("data.chat_template", template)


def _missing_data(section: str, name: str, path: str, split: str) -> ConfigError | None:
    from automodel_cli.data.sources.file_discovery import local_files

    try:
        local_files(path, split, whole=name == "validation_path")
    except ConfigError as error:
        fix = error.fix and error.fix.replace("data.path=", f"{section}.{name}=").replace(
            "data.split=", f"{section}.split="
        )
        return ConfigError(error.message, code=error.code, keys=(f"{section}.{name}",), fix=fix)
    return None


def _of_model(model: ModelConfig) -> Iterator[ConfigError]:
    try:
        check_exported(model)
    except ConfigError as error:
        yield error
        return
    adapter = None if model.lora is None else model.lora.pretrained
    if adapter is not None and looks_local(adapter) and not Path(adapter).expanduser().is_dir():
        yield _no_such("model.lora.pretrained", adapter)
    if model.pretrained is not None and looks_local(model.pretrained):
        folder = Path(model.pretrained).expanduser()
        if not folder.is_dir():
            yield _no_such("model.pretrained", model.pretrained)
        elif model.gguf_file is None and not (folder / "config.json").is_file():
            yield ConfigError(
                f"model.pretrained={model.pretrained} is not a transformers model: it contains no config.json",
                code="model_not_found",
                keys=("model.pretrained",),
            )
    if model.gguf_file is not None and not _has_gguf(model.pretrained, model.gguf_file):
        yield _no_such("model.gguf_file", model.gguf_file)
    if isinstance(model.tokenizer, str) and looks_local(model.tokenizer) and not Path(model.tokenizer).exists():
        yield _no_such("model.tokenizer", model.tokenizer)
    if model.tokenizer is None and model.pretrained is None and model.gguf_file is None:
        yield no_tokenizer()


def _has_gguf(pretrained: str | None, gguf_file: str) -> bool:
    if pretrained is None:
        return Path(gguf_file).is_file()
    return not Path(pretrained).is_dir() or (Path(pretrained) / gguf_file).is_file()


def looks_local(name: str) -> bool:
    """Whether `name` can only be a path: a hub id is `name` or `owner/name`, and does not begin with a dot."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/") or Path(name).exists()


def _no_such(key: str, path: str) -> ConfigError:
    here = Path(path).expanduser()
    names = [entry.name for entry in here.parent.iterdir()] if here.parent.is_dir() else []
    near = difflib.get_close_matches(here.name, names, 1, 0.6)
    where = f"relative to {Path.cwd()}" if here.parent.is_dir() else f"its folder {here.parent} does not exist"
    fix = f"{key}={here.parent / near[0]}" if near else None
    return ConfigError(f"{key}={path} does not exist ({where})", code="missing_file", keys=(key,), fix=fix)
