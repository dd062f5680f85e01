"""The documentation names commands, options, recipes and keys that exist (e2e/test_tutorials.py runs the tutorials)."""

from __future__ import annotations

import re
import runpy
import shlex

import click
import pytest

from automodel_cli.cli.main import cli
from automodel_cli.config.composition import bundled_recipes
from tests.pages import PAGES, ROOT, commands

REFERENCE = [ROOT / "docs" / "config.md", *sorted((ROOT / "docs" / "config").glob("*.md"))]
ROW = re.compile(r"^\| <a [^`]*`([\w.]+)` \|", re.M)
KEYS = {key for page in REFERENCE for key in ROW.findall(page.read_text(encoding="utf-8"))}
KEYS |= {page.stem for page in REFERENCE[1:]}


def wrong(line: str) -> list[str]:
    """What of a command line does not exist. Capital words and brackets stand for what a user has."""
    words = [word for word in shlex.split(re.sub(r"[\[\](]", " ", line))[1:] if word not in ("...", "…", ">")]
    command: click.Command = cli
    context = click.Context(cli)
    while words and isinstance(command, click.Group) and (found := command.get_command(context, words[0])):
        command, words = found, words[1:]
    if isinstance(command, click.Group) and command is cli:
        return [line]
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    words = words[: words.index("--")] if "--" in words else words  # what follows is another program's
    bad = [word for word in words if word.startswith("-") and word.split("=")[0] not in options | {"--help"}]
    for before, word in zip(["", *words], words, strict=False):
        if (
            before in ("-c", "--conf")
            and word.islower()
            and not word.endswith(".yaml")
            and word not in bundled_recipes.recipe_names()
        ):
            bad.append(f"no recipe {word}")
        key = re.fullmatch(r"\+{0,2}([a-z_]\w*(?:\.\w+)*)=.*", word, re.S)
        if key and not before.startswith("--") and key[1] not in KEYS:
            bad.append(f"no key {key[1]}")
    return bad


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "errors.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_name_what_exists(page):
    assert [f"{line}: {bad}" for line in commands(page) if (bad := wrong(line))] == []


def test_a_wrong_command_is_noticed():
    assert wrong("automodel tune -c quickstart") == ["automodel tune -c quickstart"]
    assert wrong("automodel plan -c quickstart --gpuz 8") == ["--gpuz"]
    assert wrong("automodel finetune llm -c quick") == ["no recipe quick"]
    assert wrong("automodel finetune llm -c x.yaml optimizer.lrr=1") == ["no key optimizer.lrr"]
    assert wrong("automodel finetune llm -c x.yaml optimizer.lr=1 parallelizer=ddp") == []


def test_every_page_is_in_the_navigation_of_the_site():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    generated = runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))["PAGES"].values()
    pages = {str(p.relative_to(ROOT / "docs")) for p in PAGES if p.name != "README.md"}
    assert sorted(listed) == sorted({*pages, *generated})


def test_links_of_the_pages_outside_docs_point_at_the_site():
    site_links = runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))["site_links"]
    assert site_links("[a](docs/cli.md#x), [b](CHANGELOG.md)") == "[a](../cli.md#x), [b](../development/changelog.md)"
    assert site_links("[c](examples), [d](https://e.org/f), [g](#h)") == "c, [d](https://e.org/f), [g](#h)"


def test_the_page_of_errors_lists_codes_and_messages():
    made = runpy.run_path(str(ROOT / "scripts" / "error_page.py"))["page"]()
    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8") == made, (
        "python scripts/error_page.py > docs/errors.md"
    )
    assert "| [`unknown_key`](#unknown_key) | 2 | A config key does not exist. |" in made
    messages = made.partition("### `unknown_key`")[2].partition("###")[0]
    assert "- `unknown key <key><note>`" in messages


def test_the_page_of_commands_is_what_the_command_line_says():
    made = runpy.run_path(str(ROOT / "scripts" / "cli_page.py"))["page"]()
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == made, "python scripts/cli_page.py > docs/cli.md"
