"""Check that a release works without this checkout.

python scripts/release_check.py [--packages FOLDER]

1. Build the sdist, and the wheel from the sdist.
2. Compare the files of both with the repository: every module, config, template, model config and `py.typed`.
3. Install the wheel into a fresh virtual environment.
4. Run the README's quickstart for a few steps from another folder, and load its export as the README does.

`--packages` is a site-packages folder that already has the dependencies, which saves the download of torch. Without it,
pip installs the dependencies under the constraints of constraints.txt.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHORT = ("train.max_steps=4", "lr_scheduler.warmup_steps=1")
"""Overrides that shorten the quickstart."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=Path, help="site-packages folder that has the dependencies")
    packages = parser.parse_args().packages
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        check_contents(sdist, wheel)
        python = install(wheel, folder / "env", packages)
        run_quickstart(python, folder / "elsewhere")


def build(folder: Path) -> tuple[Path, Path]:
    """Build both distributions from a copy of the tracked files, because old files in build/ would enter the wheel."""
    source, dist = folder / "source", folder / "dist"
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    run([sys.executable, "-m", "build", "--outdir", dist, source], folder, quiet=True)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return sdist, wheel


def tracked_files(*folders: str) -> list[str]:
    """Return the files of the repository that git does not ignore, below `folders` or everywhere."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted(name for name in names if name and (ROOT / name).is_file())


def check_contents(sdist: Path, wheel: Path) -> None:
    """Compare the distributions with the repository. Exits with the names of missing and unexpected files."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {place: package.replace(".", "/") for package, place in settings["package-dir"].items()}
    folders |= {name: name for name in settings["packages"] if "." not in name}
    installed = {
        name: f"{package}{name.removeprefix(folder)}"
        for folder, package in folders.items()
        for name in tracked_files(folder)
    }
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    must_have = {"automodel_cli/py.typed", "automodel_cli/conf/sft.yaml", "automodel_cli/conf/quickstart.yaml"}
    fail_on("missing from the wheel", (must_have | set(installed.values())) - in_wheel)
    fail_on("in the wheel, but not in the repository", in_wheel - set(installed.values()))
    fail_on("missing from the sdist", {*installed, "pyproject.toml", "README.md", "LICENSE"} - in_sdist)
    print(f"ok  {wheel.name}: {len(in_wheel)} files, {wheel.stat().st_size / 2**20:.1f} MiB; {sdist.name}")


def fail_on(problem: str, names: Iterable[str]) -> None:
    """Exit if there are names."""
    if found := sorted(names):
        sys.exit("\n  ".join([f"{len(found)} files are {problem}:", *found]))


def install(wheel: Path, env: Path, packages: Path | None) -> Path:
    """Install the wheel into a new environment and return its interpreter."""
    run([sys.executable, "-m", "venv", env], ROOT)
    python = env / "bin" / "python"
    if packages is None:
        run([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel], env)
    else:
        run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], env)
        # A plain path, not site.addsitedir: an editable install there would add this checkout.
        site_packages = next(env.glob("lib/python3*/site-packages"))
        (site_packages / "dependencies.pth").write_text(f"{packages.resolve()}\n", encoding="utf-8")
    return python


def run_quickstart(python: Path, folder: Path) -> None:
    """Run the README's first training command from `folder`, and the Python code that loads its export."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = re.search(r"automodel (finetune (?:llm )?-c quickstart)\b", readme)
    code = re.search(r"^```python\n(.*?from_pretrained\(\"runs/quickstart/export\"\).*?)^```$", readme, re.M | re.S)
    if command is None or code is None:
        sys.exit("README.md has no quickstart: a training command and the Python code that loads its export")
    folder.mkdir()
    automodel = python.with_name("automodel")
    where = "import automodel_cli, sys; sys.exit(not automodel_cli.__file__.startswith(sys.prefix))"
    run([python, "-c", where], folder)
    run([automodel, "--version"], folder)
    run([automodel, "recipes", "ls"], folder, quiet=True)
    run([automodel, *command[1].split(), *SHORT], folder)
    run([python, "-c", code[1]], folder)
    print("ok  the quickstart runs, and its export loads")


def run(command: Sequence[str | Path], folder: Path, *, quiet: bool = False) -> None:
    """Run a command without the variables that would add this checkout to its path. Exits if it fails."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environ["AUTOMODEL_CACHE"] = str(folder / ".cache")  # prepared data of this checkout does not help
    done = subprocess.run(command, cwd=folder, env=environ, text=True, capture_output=quiet)
    if done.returncode:
        sys.exit(f"{done.stdout or ''}{done.stderr or ''}failed: {' '.join(map(str, command))}")


if __name__ == "__main__":
    main()
