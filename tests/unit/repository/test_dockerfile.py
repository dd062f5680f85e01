"""The Dockerfile, read as text: what an image must offer. (`hadolint` says the rest; no test here builds an image.)"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def instructions() -> list[tuple[str, str]]:
    """Every instruction with its arguments, continued lines joined and comments dropped."""
    text = "\n".join(line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(line.split()[0], " ".join(line.split()[1:])) for line in lines if line.strip()]


def settings() -> dict[str, str]:
    joined = " ".join(arguments for name, arguments in instructions() if name == "ENV")
    return dict(re.findall(r"(\w+)=(\S+)", joined))


def test_torch_is_pinned_and_extras_do_not_move_it() -> None:
    arguments = dict(a.split("=", 1) for name, a in instructions() if name == "ARG")
    assert re.fullmatch(r"\d+\.\d+\.\d+", arguments["TORCH"]), "one version, the one that CI tests"
    assert f"torch=={arguments['TORCH']}" in (ROOT / ".ci/run").read_text()
    assert arguments["BASE"] == "runtime"
    last = [a for name, a in instructions() if name == "RUN" and "/src[" in a]
    assert len(last) == 1 and "--constraint" in last[0] and "[${EXTRAS}]" in last[0]


def test_every_extra_that_the_file_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"# Any of (.*), with commas", (ROOT / "Dockerfile").read_text())
    assert set(named.split(", ")) == set(extras) - {"dev", "docs"}


def test_another_user_can_write_where_the_program_writes() -> None:
    """`docker run --user 1234` has no home and owns nothing: the folders named in the environment are open to all."""
    found = settings()
    opened = " ".join(a for name, a in instructions() if name == "RUN" and "chmod -R a+rwX" in a)
    for name in ("HOME", "HF_HOME", "AUTOMODEL_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        place = found[name]
        assert any(place == top or place.startswith(f"{top}/") for top in opened.partition("a+rwX")[2].split()), name
    assert "/workspace" in opened and found["LOGNAME"]
    assert ("VOLUME", f'["{found["HF_HOME"]}"]') in instructions()
    names = [name for name, _ in instructions()]
    assert names.index("VOLUME") > max(i for i, name in enumerate(names) if name == "RUN"), "later changes are lost"
    assert ("USER", "10001") in instructions()


def test_infiniband_is_there() -> None:
    assert any("rdma-core" in a for name, a in instructions() if name == "RUN")
