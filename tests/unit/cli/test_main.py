"""The command line in real processes: start-up cost, texts, exit codes, completion."""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from automodel_cli.cli.main import COMMANDS, cli, run
from automodel_cli.config.composition import bundled_recipes
from tests import warm
from tests.errors import assert_error, raises

HERE = Path(__file__).parents[1]
TOY = """\
# A toy
_target_: toy_recipe.nodes.Recipe
data: {path: train.jsonl}
optimizer: {_target_: toy_recipe.nodes.Optimizer, lr: 1e-5}
"""
PATH = f"{HERE}:{HERE.parents[1]}"
"""The toy recipe, and this checkout before whatever else is installed."""
TRUST = ["--trust-package", "toy_recipe"]
PROBE = """\
import sys
from automodel_cli.cli.main import run
code = run(sys.argv[2:])
loaded = [name for name in sys.argv[1].split(",") if name in sys.modules]
sys.exit(f"imported {loaded}" if loaded else code)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "toy.yaml").write_text(TOY)
    return tmp_path


def environment(**env: str) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOMODEL_", "SLURM_"))}
    return environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **env}


def automodel(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return warm.run(arguments, folder, environment(**env), timeout=120)


def cold(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`automodel` in a new interpreter."""
    command = [sys.executable, "-m", "automodel_cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=120)


def check_quick(folder: Path, limit: float, forbidden: str, *arguments: str, **env: str) -> None:
    """The whole process takes at most `limit` seconds of CPU on a machine that imports Hydra in 0.3, and as many more
    on a slower one, in one of four tries. A busy machine is slower, so it is measured beside each further try. The
    process imports none of the forbidden modules.
    """
    tries: list[float] = []
    while len(tries) < 4 and min(tries, default=limit + 1) > limit:
        if tries:
            slowness.cache_clear()
        command = [sys.executable, "-c", PROBE, forbidden, *arguments]
        seconds, code, output = _cpu_seconds(command, folder, {**os.environ, "PYTHONPATH": PATH, **env})
        assert code == 0, output
        tries.append(seconds / slowness())
    assert min(tries) <= limit, f"{' '.join(arguments)}: {tries}"


@functools.cache
def slowness() -> float:
    """How much slower than the machine of `check_quick` this one is, at least 1."""
    return max(1.0, _cpu_seconds([sys.executable, "-c", "import hydra"], HERE, os.environ)[0] / 0.3)


def _cpu_seconds(command: list[str], folder: Path, environ: Mapping[str, str]) -> tuple[float, int, str]:
    """User and system time of one process, its exit code and what it printed."""
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as p:
        assert p.stdout is not None
        output = p.stdout.read().decode()
        _, status, usage = os.wait4(p.pid, 0)
        p.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime, p.returncode, output


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["recipes", "ls"], ["finetune", "llm", "--help"], ["completion", "bash"]],
    ids=" ".join,
)
def test_quick_commands_import_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    check_quick(
        tmp_path, 0.2 if arguments == ["--help"] else 0.4, "torch,hydra,omegaconf,rich,transformers", *arguments
    )


def walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command with the words that name it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from walk(child, f"{path} {name}")


@pytest.mark.parametrize("columns", [80, 110])
def test_help_is_grouped_and_cuts_off_no_summary(columns: int) -> None:
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, ["--help"], terminal_width=columns)
    rows = dict(re.findall(r"^  ([a-z-]+)  +(\S.*)$", done.output, re.M))
    assert {name: rows.get(name) for name in COMMANDS} == {name: entry.summary for name, entry in COMMANDS.items()}
    assert re.findall(r"^(\w+):$", done.output, re.M) == ["Options", "Train", "Inspect", "Evaluate", "Manage"]


def test_every_help_text_is_a_short_sentence() -> None:
    wrong = []
    for path, command in walk(cli, "automodel"):
        summary = command.get_short_help_str(1000)
        if command is not cli and (len(summary) > 60 or not summary[:1].isupper()):
            wrong.append(f"{path}: {summary}")
        for option in command.params:
            text = re.sub(r"  \[.*?\]", "", getattr(option, "help", None) or "")
            if isinstance(option, click.Option) and not re.fullmatch(r"([A-Z]|k8s|skypilot).*\.", text):
                wrong.append(f"{path} {option.opts[0]}: {text}")
    assert wrong == []


def test_completion_of_keys_imports_nothing_heavy(toy: Path) -> None:
    words = {
        "COMP_WORDS": "automodel finetune llm -c toy.yaml ",
        "COMP_CWORD": "5",
        "_AUTOMODEL_COMPLETE": "bash_complete",
    }
    check_quick(toy, 0.4, "torch,hydra,rich,transformers", **words)


def test_check_is_quick_and_torch_free(toy: Path) -> None:
    check_quick(toy, 1.2, "torch,numpy,rich,transformers", "check", "-c", "toy.yaml", *TRUST)


EACH = """\
import contextlib, io, json, sys, time
from automodel_cli.cli.main import run
found = {}
for name, filled in json.loads(sys.argv[1]).items():
    before, output = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run(["check", "-c", name, *filled])
    found[name] = [code, output.getvalue(), time.process_time() - before]
loaded = [name for name in ("torch", "numpy", "rich", "transformers") if name in sys.modules]
sys.exit(f"imported {loaded}") if loaded else print(json.dumps(found))
"""


NEEDS_DATA = (
    "sft",
    "pretrain",
    "vlm",
    "dpo",
    "dpo_vlm",
    "rm",
    "embedding",
    "grpo",
    "gemma3_12b_vlm",
    "qwen3_vl_8b",
    "qwen3_vl_8b_lora",
    "qwen3_vl_30b_pp2ep4",
)


def settings(name: str) -> list[str]:
    """Return what users of a bundled config must fill in."""
    extra = {"classifier": "objective.labels=[negative,positive]", "kd": "teacher.pretrained=org/name"}
    if name not in (*NEEDS_DATA, *extra):
        return []
    return ["model.pretrained=org/name", "data.path=train.jsonl", *([extra[name]] if name in extra else [])]


@pytest.fixture(scope="module")
def filled_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files that the bundled configs read."""
    folder = tmp_path_factory.mktemp("checked")
    (folder / "train.jsonl").touch()
    (folder / "runs/quickstart/export").mkdir(parents=True)  # what quickstart_grpo goes on from
    (folder / "runs/quickstart/export/config.json").touch()
    return folder


@pytest.fixture(scope="module")
def checked(filled_in: Path) -> dict[str, tuple[int, str, float]]:
    """Exit code, output and CPU seconds of `check` on every bundled config, all in one process without torch."""
    asked = {name: settings(name) for name in bundled_recipes.recipe_names()}
    command = [sys.executable, "-c", EACH, json.dumps(asked)]
    done = subprocess.run(command, cwd=filled_in, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", bundled_recipes.recipe_names())
def test_every_bundled_config_checks_without_torch(checked: dict[str, tuple[int, str, float]], name: str) -> None:
    code, output, _ = checked[name]
    assert code == 0 and output.splitlines()[-1].startswith("ok "), output


def test_slowest_bundled_config_checks_quickly(checked: dict[str, tuple[int, str, float]], filled_in: Path) -> None:
    others = list(bundled_recipes.recipe_names())[1:]  # the first pays for the imports
    slowest = max(others, key=lambda name: checked[name][2])
    check_quick(filled_in, 1.2, "torch,numpy,rich,transformers", "check", "-c", slowest, *settings(slowest))


def test_check_prints_a_line_per_section(toy: Path) -> None:
    found = automodel(toy, "check", "-c", "toy.yaml", *TRUST, "train.max_steps=5")
    assert found.stdout == (
        "recipe     toy_recipe.nodes.Recipe\n"
        "data       path=train.jsonl\n"
        "optimizer  Optimizer lr=1e-05\n"
        "train      max_steps=5\n"
        "ok         toy.yaml, 1 from the command line\n"
    )
    assert os.listdir(toy) == ["toy.yaml"], "check writes nothing"


def test_check_resolved_prints_origins(toy: Path) -> None:
    found = automodel(toy, "check", "-c", "toy.yaml", "--resolved", *TRUST, "train.max_steps=5")
    assert "  path: train.jsonl  # toy.yaml:3\n" in found.stdout and "  max_steps: 5  # command line\n" in found.stdout


def test_errors_go_to_stderr_with_exit_code_2(toy: Path) -> None:
    found = cold(toy, "check", "-c", "toy.yaml", *TRUST, "train.lr=1")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == (
        "ConfigError [unknown_key]: unknown key train.lr\n  from  train.lr=1 (command line)\n  fix   optimizer.lr=1\n"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "values", "fix"),
    [
        (["chek"], "unknown_command", ("chek",), "fix   automodel check"),
        (
            ["finetune", "llm", "-c", "toy.yaml", "--optimizer.lr=3"],
            "unknown_option",
            ("--optimizer.lr",),
            "fix   optimizer.lr=3",
        ),
        # takes no config keys
        (["runs", "diff", "a", "b", "--tolerence", "1"], "unknown_option", ("--tolerence",), "fix   --tolerance"),
        (["train"], "unknown_command", ("train",), "fix   automodel finetune llm -c quickstart"),
        (["check", "-c", "toi.yaml"], "missing_file", ("toi.yaml",), "fix   -c toy.yaml"),
        (
            ["check", "-c", "toy.yaml"],
            "untrusted_code",
            ("toy_recipe.nodes.Recipe", "_target_=toy_recipe.nodes.Recipe (toy.yaml:2)"),
            "fix   --trust-package toy_recipe   (if you trust its code)",
        ),
        (["resume", "nothing"], "run_not_found", ("nothing",), None),
        (["recipes", "show", "qwertz"], "unknown_name", ("qwertz",), "fix   automodel recipes ls"),
        (["runs", "diff", "a"], "usage", (), "fix   automodel runs diff --help"),
        (["check", "-c"], "usage", ("-c",), "fix   automodel check --help"),
        (["plan", "-c", "toy.yaml", "--gpus", "x"], "usage", ("--gpus", "x"), "fix   automodel plan --help"),
    ],
)
def test_usage_errors(toy: Path, arguments: list[str], code: str, values: tuple[str, ...], fix: str | None) -> None:
    found = automodel(toy, *arguments)
    assert found.returncode == 2
    assert_error(found.stderr, code, values=values, fix=fix)


@pytest.mark.parametrize(
    ("arguments", "name", "fix"),
    [
        (["evaluate"], "evaluate", "automodel eval quickstart -c quickstart"),
        (["infer"], "infer", "automodel chat quickstart"),
        (["finetune", "llm", "-c", "quickstart", "-m", "seed=1,2"], "-m", "automodel sweep -c"),
        (["finetune", "llm", "-c", "quickstart", "--lr", "1e-4"], "--lr", "optimizer.lr=1e-4"),
        (["finetune", "llm", "-c", "quickstart", "--lr=1e-4"], "--lr", "optimizer.lr=1e-4"),
        (["check", "-c", "sft", "--num-train-epochs", "3"], "--num-train-epochs", "train.epochs=3"),
        (["check", "-c", "sft", "--train.max_steps", "3"], "--train.max_steps", "train.max_steps=3"),
        (["check", "--config-name", "quickstart"], "--config-name", "-c quickstart"),
    ],
)
def test_habits_of_other_tools_are_answered(
    arguments: list[str], name: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    code = "unknown_option" if name.startswith("-") else "unknown_command"
    assert_error(capsys.readouterr().err, code, values=(name,), fix=f"fix   {fix}")


def test_check_names_every_missing_file(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "x.yaml").write_text(
        "defaults: [sft, _self_]\n"
        "model:\n  pretrained: ./model\n"
        "data:\n  path: trian.jsonl\n  validation_path: other/val.jsonl\n"
    )
    found = automodel(tmp_path, "check", "-c", "x.yaml")
    assert found.returncode == 2
    for code, value, fix in (
        ("model_not_found", "model.pretrained=./model", None),
        ("missing_file", "trian.jsonl", "fix  data.path=train.jsonl"),
        ("missing_file", "other/val.jsonl", None),
    ):
        assert_error(found.stderr, code, values=(value,), fix=fix)
    assert "x.yaml:3  [" in found.stderr and "x.yaml:5  [" in found.stderr


def test_a_root_that_is_no_recipe(toy: Path) -> None:
    (toy / "x.yaml").write_text("_target_: toy_recipe.nodes.Mesh\n")
    found = automodel(toy, "check", "-c", "x.yaml", *TRUST)
    assert_error(found.stderr, "wrong_recipe", "_target_", values=("toy_recipe.nodes.Mesh (x.yaml:1)",))


def test_train_and_resume(toy: Path) -> None:
    assert automodel(toy, "toy.yaml", *TRUST).stdout.splitlines()[1:] == [f"step {i} total 1" for i in (1, 2, 3)]
    more = automodel(toy, "resume", "toy", *TRUST, "train.max_steps=4")
    assert more.stdout.splitlines()[1:] == ["step 4 total 1"], "goes on in place, with the override"


@pytest.mark.parametrize("words", [["finetune", "llm", "-c"], ["finetune", "-c"], ["finetune"], []])
def test_finetune_needs_no_llm(toy: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "quickstart", "train.max_steps=many"]) == 2
    assert_error(capsys.readouterr().err, "wrong_type", "train.max_steps", values=("'many'",))


def test_commands_of_one_kind_need_no_llm(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dpo", "-c", "quickstart"]) == 2
    assert_error(capsys.readouterr().err, "wrong_recipe", values=("quickstart", "dpo", "SFTRecipe"))
    assert run(["finetune", "vlm", "-c", "quickstart"]) == 2
    assert_error(capsys.readouterr().err, "wrong_recipe", values=("quickstart", "vlm", "SFTRecipe"))
    assert run(["finetune", "audio", "-c", "quickstart"]) == 2
    assert "No such command 'audio'" in capsys.readouterr().err
    assert run(["finetune"]) in (0, 2) and "llm" in "".join(capsys.readouterr())


def test_a_mesh_that_does_not_fit_is_printed_by_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun's ranks: each finds it before any of them waits for another."""
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as silent:
        run(["finetune", "-c", "quickstart", "mesh.tp_size=3"])
    assert silent.value.code == 2 and capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert run(["finetune", "-c", "quickstart", "mesh.tp_size=3"]) == 2
    assert "fix   mesh.tp_size=2" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "local_rank", "silent"), [(0, 0, False), (1, 1, True), (2, 0, False), (3, 1, True)])
def test_a_missing_file_is_printed_once_on_each_host(
    monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, silent: bool
) -> None:
    from automodel_cli.config.errors import ConfigError
    from automodel_cli.launch import rank_errors

    monkeypatch.setattr(rank_errors, "_SECONDS", 0.0)
    for name, value in {"WORLD_SIZE": 4, "LOCAL_RANK": local_rank, "RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises((SystemExit, ConfigError)) as ended, rank_errors.by_one_of_a_host():
        raise ConfigError("no such folder")
    assert isinstance(ended.value, SystemExit) == silent


@pytest.mark.parametrize("server", ["transformers", "vllm"])
def test_serve_dry_run_needs_no_server(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    from automodel_cli.cli import serve
    from automodel_cli.config.errors import ConfigError

    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(serve.shutil, "which", lambda name: None)
    arguments = (server, Path("runs/a/export"), "a", ("127.0.0.1", 8000, ("--x",)))
    with pytest.raises(ConfigError):
        serve._command(*arguments)
    command = serve._command(*arguments, dry_run=True)
    named = ["a"] if server == "transformers" else ["runs/a/export", "--served-model-name", "a"]
    assert command[0].endswith(server)
    assert command[1:] == ["serve", *named, "--host", "127.0.0.1", "--port", "8000", "--x"]


def test_serving_a_processor_of_videos_needs_torchvision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from automodel_cli.cli import serve
    from automodel_cli.config.errors import ConfigError

    (tmp_path / "video_preprocessor_config.json").write_text("{}")
    found = {"fastapi": True, "uvicorn": True, "torchvision": None}
    monkeypatch.setattr(serve.importlib.util, "find_spec", found.get)
    with raises(ConfigError, "missing_package", values=("torchvision",)):
        serve._command("transformers", tmp_path, "a", ("127.0.0.1", 8000, ()))
    found["torchvision"] = True
    serve._command("transformers", tmp_path, "a", ("127.0.0.1", 8000, ()))


@pytest.mark.parametrize(
    ("words", "name", "num_names"),
    [
        (("--with", "vllm"), "my run", 1),
        (("--with", "vllm", "--", "--served-model-name", "other"), "other", 1),
        (("--with", "vllm", "--", "--served-model-name=other"), "other", 1),
        (("--with", "transformers"), "runs/my run/export", 0),
    ],
)
def test_a_served_model_is_asked_by_a_short_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    name: str,
    num_names: int,
) -> None:
    export = tmp_path / "runs/my run/export"
    export.mkdir(parents=True)
    (export.parent / "config.yaml").touch()
    (export / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.chdir(tmp_path)
    assert run(["serve", "my run", "--dry-run", *words]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    asked = json.loads(next(line for line in lines if line[:1] == ["curl"])[-1])
    command = lines[-1]
    assert asked["model"] == name
    assert " ".join(command).count("--served-model-name") == num_names
    assert command[2] == (str(export) if num_names else name)


def test_the_request_to_a_model_with_pictures_contains_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export = tmp_path / "runs/one/export"
    export.mkdir(parents=True)
    (export.parent / "config.yaml").touch()
    (export / "config.json").write_text('{"architectures": ["Qwen3VLForConditionalGeneration"]}')
    (export / "processor_config.json").touch()
    (tmp_path / "photo.png").write_bytes(b"pixels" * 20)
    monkeypatch.chdir(tmp_path)
    assert run(["serve", "one", "--dry-run"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("curl"))
    sent = subprocess.run(["bash", "-c", line.replace("curl", "printf '%s\\n'", 1)], capture_output=True, text=True)
    content = json.loads(sent.stdout.splitlines()[-1])["messages"][0]["content"]
    url = content[0]["image_url"]["url"]
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == b"pixels" * 20


def test_a_recipe_of_your_own_without_the_sections_that_a_command_reads(toy: Path) -> None:
    found = automodel(toy, "data", "inspect", "-c", "toy.yaml", *TRUST)
    assert_error(found.stderr, "wrong_recipe", "_target_", values=("toy_recipe.nodes.Recipe",))
    assert found.returncode == 2


@pytest.mark.parametrize(
    ("fail", "code", "text"),
    [
        ("raise", 1, "ValueError: rank 0 is broken"),
        ("memory", 4, "OutOfMemoryError: wanted 2.3 GiB"),
        ("data", 3, "DataError [invalid_data]: row 7 has no supervised token\n  fix   data.on_invalid_row=drop"),
    ],
)
def test_exit_codes_of_a_run(toy: Path, fail: str, code: int, text: str) -> None:
    found = automodel(toy, "toy.yaml", *TRUST, f"fail={fail}")
    assert found.returncode == code and text in found.stderr
    assert "click" not in found.stderr, "frames of the command line library help nobody"
    assert ("Traceback" in found.stderr) == (fail != "data")


def test_recipes_cp_gives_a_config_one_owns(tmp_path: Path) -> None:
    name = bundled_recipes.recipe_names()[0]
    assert automodel(tmp_path, "recipes", "cp", name).stdout.startswith(f"wrote {name}.yaml\n")
    assert (tmp_path / f"{name}.yaml").read_bytes() == bundled_recipes.recipe_path(name).read_bytes()
    again = automodel(tmp_path, "recipes", "cp", name)
    assert again.returncode == 2
    assert_error(again.stderr, "file_exists", values=(f"{name}.yaml",))
    assert automodel(tmp_path, "recipes", "show", name).stdout == bundled_recipes.recipe_path(name).read_text()
    listed = automodel(tmp_path, "recipes", "ls").stdout
    assert all(n in listed for n in bundled_recipes.recipe_names())


def complete(folder: Path, *words: str) -> list[str]:
    env = {
        "_AUTOMODEL_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["automodel", *words]),
        "COMP_CWORD": str(len(words)),
    }
    return [line.partition(",")[2] for line in automodel(folder, **env).stdout.splitlines()]


def test_completion_offers_recipes_keys_and_options(toy: Path) -> None:
    assert "finetune" in complete(toy, "fi")
    assert set(bundled_recipes.recipe_names()) <= set(complete(toy, "check", "-c", ""))
    assert "toy.yaml" in complete(toy, "check", "-c", "to")
    (toy / "own.yaml").write_text("defaults: [sft, _self_]\ndata: {path: x.jsonl}\n")
    keys = complete(toy, "finetune", "llm", "-c", "own.yaml", "train.")
    assert {"train.global_batch_size=", "train.microbatch_size="} <= set(keys)
    assert "optimizer.lr=" in complete(toy, "finetune", "llm", "-c", "own.yaml", "optimizer.")
    assert "lr_scheduler=cosine" in complete(toy, "finetune", "llm", "-c", "own.yaml", "lr_scheduler=co")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(tmp_path: Path, shell: str) -> None:
    assert "_AUTOMODEL_COMPLETE" in automodel(tmp_path, "completion", shell).stdout


def test_doctor_finds_nothing_wrong_here(tmp_path: Path) -> None:
    good = automodel(tmp_path, "doctor")
    assert "fail" not in good.stdout and good.stdout.count("\n") > 10
    subjects = {line[6:].split("  ")[0] for line in good.stdout.splitlines()}
    assert {"attention", "FlexAttention", "LM head", "routers", "fused ops", "recurrent layers"} <= subjects
    assert re.search(r"^ok +torch +\S+  tested$", good.stdout, re.M)


def test_options_of_a_part_go_with_it_when_a_group_replaces_it(capsys: pytest.CaptureFixture) -> None:
    """The quickstart sets a precision of FSDP2, which DDP lacks; what the user sets is held to the part named."""
    assert run(["check", "-c", "quickstart", "parallelizer=ddp"]) == 0
    assert run(["check", "-c", "quickstart", "parallelizer=fsdp2", "parallelizer.bucket_cap_mb=1"]) == 2
    assert_error(capsys.readouterr().err, "unknown_key", "parallelizer.bucket_cap_mb")
    assert run(["check", "-c", "quickstart", "parallelizer=ddp", "parallelizer.reshard_after_forward=true"]) == 2
