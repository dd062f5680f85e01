"""Test the newest torch and transformers in an environment of their own; record the result in docs/compatibility.md.

    python scripts/new_release.py                      # the newest releases of the index
    python scripts/new_release.py --torch 2.11.0 --transformers 5.17.0
    python scripts/new_release.py --support-table      # measure every family too, without the column training
    python scripts/new_release.py --render             # write the table of tested releases anew; install nothing

All other packages are those of the environment that runs this. If a constraint of pip caps torch,
PIP_CONSTRAINT=/dev/null lifts it. Names are compared as text, without an import of the new release.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from automodel_cli.cli import tested_versions

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/compatibility.md"
LIBRARIES = ("torch", "transformers")
INTRO = """# Tested versions

`automodel doctor` compares your installation with this table. *Tested* means that CI runs with this release. Other
releases of the range are accepted.

"""
MATRIX = """
CI runs the full suite with the pinned releases. It runs the tests below with every other combination of torch and
transformers. `scripts/new_release.py` writes these sections.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", metavar="VERSION", help="default: the newest of the index")
    parser.add_argument("--transformers", metavar="VERSION", help="default: the newest of the index")
    parser.add_argument("--support-table", action="store_true", help="measure every family and compare docs/support.md")
    parser.add_argument("--render", action="store_true", help="write the table of tested releases; install nothing")
    options = parser.parse_args()
    if options.render:
        write_page()
        return
    wanted = [f"{name}=={version}" if (version := getattr(options, name)) else name for name in LIBRARIES]
    with tempfile.TemporaryDirectory(prefix="new-release-") as folder:
        env = Path(folder, "env")
        tests = run_tests(env, wanted)
        here = Path(sysconfig.get_path("purelib"))
        (packages,) = env.glob("lib/python3*/site-packages")
        versions = [f"{name} {installed_version(packages, name)}" for name in LIBRARIES]
        report = [*tests, "", *missing_names(packages, here)]
        if options.support_table:
            report += ["", *support_table(env / "bin" / "python", Path(folder, "support.md"))]
    print("\n".join(report))
    write_page(", ".join(versions), report)


def installed_version(packages: Path, name: str) -> str:
    """Return the version of a distribution from the name of its folder of metadata."""
    (folder,) = packages.glob(f"{name}-*.dist-info")
    return folder.name.removeprefix(f"{name}-").removesuffix(".dist-info").partition("+")[0]


def run_tests(env: Path, wanted: list[str]) -> list[str]:
    """Build the environment, run the tests, and return a table of the counts with the names of failed tests."""
    command = [ROOT / "scripts/compatibility.sh", env, *wanted]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if process.returncode == 3:
        sys.exit(f"cannot be installed: {' '.join(wanted)}")
    table, failed, name = ["| tests | passed | failed | skipped |", "|---|--:|--:|--:|"], [], ""
    for line in lines:
        if line.startswith("== ") and not line.endswith("=="):
            name = line.removeprefix("== ")
        elif name and re.search(r"\d+ (passed|failed|skipped|errors?)\b.* in [\d.]+s", line):
            counts = {word.rstrip("s"): int(count) for count, word in re.findall(r"(\d+) (\w+)", line)}
            bad = counts.get("failed", 0) + counts.get("error", 0)
            table.append(f"| {name} | {counts.get('passed', 0)} | {bad} | {counts.get('skipped', 0)} |")
        elif line.startswith(("FAILED ", "ERROR ")):
            failed.append(f"- `{line.split(' - ')[0].split(' ', 1)[1]}`")
    return [*table, *(["", "Failed:", "", *failed] if failed else [])]


def missing_names(packages: Path, here: Path) -> list[str]:
    """Return the names of torch and transformers that the code uses, `here` has and `packages` lacks.

    Both are site-packages folders. A name that only a compiled library has is not found.
    """
    imports, words = used_names()
    gone = []
    for library in LIBRARIES:
        old, new = source_words(here / library), source_words(packages / library)
        gone += [f"- `{word}` of {library}" for word in sorted(words & old - new)]
    for module, name in sorted(imports):
        if has_name(here, module, name) and not has_name(packages, module, name):
            gone.append(f"- `{name}` of `{module}`{found_elsewhere(packages, module, name)}")
    versions = " and ".join(f"{name} {installed_version(here, name)}" for name in LIBRARIES)
    if not gone:
        return [f"No name that the package uses is missing, compared with {versions}."]
    return [f"Names that the package uses, present in {versions} and missing here:", "", *gone]


def used_names() -> tuple[set[tuple[str, str]], set[str]]:
    """Return (module, name) of each import from torch and transformers, and further names that may be theirs.

    These are all names of compat modules, and the private names that other modules use and do not define.
    """
    imports: set[tuple[str, str]] = set()
    names: set[str] = set()
    private: set[str] = set()
    own: set[str] = set()
    for path in [*(ROOT / "automodel_cli").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        used |= {str(node.arg) for node in nodes if isinstance(node, ast.keyword)}
        used |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}  # for getattr
        defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        defined |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        defined |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
                imports |= {(str(node.module), alias.name) for alias in node.names}
        if "compat" in path.stem:
            names |= used | defined  # a method may override
        else:
            private |= {name for name in used if name.startswith("_")}
            own |= defined
    return imports, names - own | private - own


def source_words(folder: Path) -> set[str]:
    """Return all identifiers in the Python sources and stubs of a package."""
    words: set[str] = set()
    for path in source_files(folder):
        words.update(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8", errors="replace")))
    return words


def source_files(folder: Path) -> Iterator[Path]:
    yield from (path for pattern in ("*.py", "*.pyi") for path in folder.rglob(pattern))


def has_name(packages: Path, module: str, name: str) -> bool:
    """Return whether the source of a module contains a name, or a module of that name is below it."""
    base = packages.joinpath(*module.split("."))
    files = [base.with_suffix(".py"), base.with_suffix(".pyi"), base / "__init__.py", base / "__init__.pyi"]
    texts = [path.read_text(encoding="utf-8") for path in files if path.is_file()]
    if any((base / name).with_suffix(suffix).exists() for suffix in (".py", "")):
        return True
    return any(re.search(rf"\b{name}\b|import \*", text) for text in texts)


def found_elsewhere(packages: Path, module: str, name: str) -> str:
    """Return the files of the same package that define a name which moved."""
    define = re.compile(rf"^(?:class|def) {name}\b|^{name}\b.*=", re.M)
    files = source_files(packages / module.split(".")[0])
    places = [path for path in files if define.search(path.read_text(encoding="utf-8", errors="replace"))]
    return "".join(f", now in `{path.relative_to(packages)}`" for path in places[:2])


def support_table(python: Path, found: Path) -> list[str]:
    """Measure every family in the new environment, and return what differs from docs/support.md."""
    command = [python, ROOT / "scripts/support_table.py", "--output", found, "--compare", ROOT / "docs/support.md"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    difference = done.stdout.partition("== differences\n")[2].splitlines()
    if not difference:
        return ["No family of docs/support.md differs."]
    return ["Families that differ from [supported models](support.md):", "", *(f"- {line}" for line in difference)]


def tested_table() -> str:
    """Return the Markdown table of tested releases."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [line for lines in project["optional-dependencies"].values() for line in lines] + project["dependencies"]
    ranges = {"python": project["requires-python"], **tested_versions.ranges_of(needs)}
    rows = [
        f"| {name} | {f'`{ranges[name]}`' if ranges.get(name) else 'any'} | {', '.join(releases)} |"
        for name, releases in tested_versions.TESTED.items()
    ]
    return "\n".join(["| package | supported | tested |", "|---|---|---|", *rows]) + "\n"


def write_page(title: str = "", report: list[str] | None = None) -> None:
    """Write the page: the table of today, and all sections of earlier runs. A section of the same title is replaced."""
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    sections = re.split(r"^## ", old, flags=re.M)[1:]
    if report is not None:
        sections = [section for section in sections if not section.startswith(f"{title}\n")]
        ran = f"Python {platform.python_version()}, {datetime.datetime.now(tz=datetime.UTC).date()}."
        sections.insert(0, "\n".join([title, "", ran, "", *report, "", ""]))
    page = INTRO + tested_table() + MATRIX + "".join(f"\n## {section.rstrip()}\n" for section in sections)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
