"""Every YAML block of the pages is a config that is accepted, and every command line one that the real parser takes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from automodel_cli.cli.main import cli, run
from automodel_cli.cli.optuna_sweep import axes
from automodel_cli.config.check import check_config
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.security.trust import Trust
from automodel_cli.data.pictures.reader import PictureSupport
from automodel_cli.data.pictures.rows import PictureRows
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.preparation.prompts import prepare_prompts
from automodel_cli.data.sources.file_discovery import local_files
from automodel_cli.evaluation.config import EvalConfig
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.models.vision.processor import FamilyProcessor
from tests.pages import PAGES, ROOT, Block, blocks, commands
from tests.vision import config_of, processor_of

pytestmark = pytest.mark.slow

MINE = next(block for block in blocks(ROOT / "README.md") if block.text.startswith("# my_run.yaml"))
YAML = [(page, block) for page in PAGES for block in blocks(page) if block.language == "yaml"]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*"))
OWN = ("day_reward", *(path.stem for path in EXAMPLES if path.suffix == ".py"))
"""Modules of a reader's own that blocks name: of a page, and of examples/."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every file that a page shows, those of examples/, and `my_run.yaml`, which many start from."""
    made = tmp_path_factory.mktemp("pages")
    for example in EXAMPLES:
        if example.is_file():
            shutil.copy(example, made)
    for page in PAGES:
        write_files(page, made)
    (made / "my_tasks").mkdir()
    (made / "my_run.yaml").write_text(MINE.text)
    for name in ("A", "B", "C"):
        (made / f"{name}.yaml").write_text(MINE.text)
    return made


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)


def whole(block: Block) -> str:
    """A block that is a part of a config, as what it changes in `my_run.yaml`."""
    is_root = re.search(r"^(defaults|_target_|tasks):", block.text, re.M)
    return block.text if is_root else f"defaults: [my_run, _self_]\n{block.text}"


@pytest.mark.parametrize(("page", "block"), YAML, ids=lambda x: x.name if isinstance(x, Path) else x.text[:30])
def test_a_yaml_block_is_accepted(page: Path, block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    path = folder / "block.yaml"
    path.write_text(whole(block))
    kind = EvalConfig if re.search(r"^tasks:", block.text, re.M) else None
    check_config(compose(path), Trust(frozenset(), OWN), kind=kind)


def typed(page: Path) -> list[list[str]]:
    """The command lines of a page's blocks, as words; those of its text are only names of commands."""
    fenced = "".join(block.text for block in blocks(page) if block.language in ("bash", "console")).replace("\\\n", " ")
    lines = [re.sub(r" +#.*", "", line.removeprefix("$ ")) for line in fenced.splitlines()]
    words = [shlex.split(re.split(r" [|>] ", part)[0]) for line in lines for part in re.split(r" && |; ", line)]
    ours = [line[line.index("-m") + 1 :] if "-m" in line and line[0] == "torchrun" else line for line in words if line]
    return [line[1:] for line in ours if line[0] in ("automodel", "automodel_cli")]


def parsed(words: list[str]) -> tuple[click.Command, dict[str, object]]:
    """What click makes of it, without running it. Raises UsageError."""
    command, name = cli, ["automodel"]
    with click.Context(cli) as context:
        while isinstance(command, click.Group):
            found = command.get_command(context, words[0])
            if found is None:
                raise click.UsageError(f"no command {words[0]}")
            command, name, words = found, [*name, words[0]], words[1:]
    context = command.make_context(" ".join(name), list(words), parent=click.Context(cli, obj=words))
    return command, context.params


@pytest.mark.parametrize("page", [p for p in PAGES if typed(p)], ids=lambda page: page.name)
def test_a_command_of_a_block_is_one_that_runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser takes it; and its config with its overrides is accepted, or is a reader's own."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for words in typed(page):
        _, params = parsed(words)
        conf, overrides = params.get("conf"), params.get("overrides") or ()
        if conf is None or words[0] == "eval":
            continue
        assert isinstance(conf, str) and (Path(conf).is_file() or conf in bundled_recipes.recipe_names()), (
            f"{page.name}: {words}"
        )
        if words[0] == "sweep":
            axes(overrides)
        else:  # what a URL needs may not be installed
            config = compose(conf, [o for o in overrides if not o.startswith("output_dir=s3:")])
            check_config(config, Trust(frozenset(), OWN) | (params.get("trust") or Trust()))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of someone who follows the tutorials: their files, and the rows that their scripts write."""
    made = tmp_path_factory.mktemp("reader")
    for page in TUTORIALS:
        write_files(page, made)
        for block in blocks(page):
            for line in block.text.splitlines() if block.language == "bash" else ():
                if line.startswith("python make_"):
                    subprocess.run([sys.executable, *shlex.split(line)[1:]], cwd=made, check=True)
    return made


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_the_rows_of_every_line_of_a_tutorial_are_read(
    page: Path, reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those under `needs GPUs` too: what `check` and `data inspect` do of a line needs none."""
    monkeypatch.chdir(reader)
    monkeypatch.setenv("AUTOMODEL_CACHE", str(reader / "cache"))
    monkeypatch.setattr(sys, "path", [str(reader), *sys.path])
    lines = [params for _, params in map(parsed, typed(page)) if params.get("conf")]
    assert lines
    for params in lines:
        recipe: Any = check_config(compose(str(params["conf"]), params["overrides"]), Trust(frozenset(), OWN))  # type: ignore[arg-type]
        assert recipe.data_problems() == []
        if recipe.data.generator is not None or local_files(recipe.data.path) is None:
            continue  # made in code, or on the hub
        tokenizer = ByteTokenizer().build()
        if recipe.kind == "vlm":
            library = processor_of("qwen3_vl")
            rows = PictureRows(str(Path(recipe.data.path).parent), recipe.data.max_image_pixels)
            support = PictureSupport(rows, FamilyProcessor(library, config_of("qwen3_vl")))
            prepare_data(recipe.data, library.tokenizer, seed=0, pictures=support)
        elif recipe.kind == "grpo":
            prepare_prompts(recipe.data, tokenizer, seed=0, max_tokens=64)
        else:
            prepare_data(
                recipe.data,
                tokenizer,
                seed=0,
                preferences=recipe.data_kind == "preferences",
                row_spec=recipe.row_spec,
                progress=lambda _: None,
            )


@pytest.mark.parametrize(
    "words",
    [
        ["check", "-c", "my_run.yaml", "data.path=my_run.jsonl", "model.pretrained=owner/name"],
        ["options", "data"],
        ["recipes", "ls"],
        ["runs", "ls"],
        ["sweep", "-c", "my_run.yaml", "optimizer.lr=1e-5,3e-5", "--dry-run"],
    ],
    ids=" ".join,
)
def test_what_costs_nothing_is_run(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "my_run.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert run(words) == 0


def test_a_block_that_no_parser_takes_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.UsageError):
        parsed(["plan", "-c", "quickstart"])  # --gpus is required
    page = ROOT / "docs" / "guides" / "export_and_serving.md"
    assert typed(page).count(["chat", "my_run"]) == 1 and commands(ROOT / "README.md")
