"""MkDocs hook: add ARCHITECTURE.md, CONTRIBUTING.md and CHANGELOG.md of the repository to the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGES = {
    "ARCHITECTURE.md": "development/architecture.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "CHANGELOG.md": "development/changelog.md",
}
"""File in the repository, and its page below docs/."""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the files of the site."""
    from mkdocs.structure.files import File  # not installed where tests import this module

    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        text = (root / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=site_links(text)))
    return files


def site_links(text: str) -> str:
    """Point links at pages of the site. A link to a file that the site lacks becomes plain text."""

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match.groups()
        page = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        return label if page is None else f"[{label}](../{page}{anchor or ''})"

    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)", link, text)
