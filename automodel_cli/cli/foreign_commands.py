"""What people type who come from another tool, and what to type here."""

from __future__ import annotations

from collections.abc import Sequence

from click import NoSuchOption

from automodel_cli.cli import completion_values
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.suggestions import suggest

_TRAIN = "automodel finetune llm -c quickstart"
_SWEEP = "automodel sweep -c quickstart optimizer.lr=0.01,0.02"
_ANSWERS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("train", "sft", "run", "tune", "launch", "fit", "pretrain"),
        "training is finetune, with the config of your run after -c",
        _TRAIN,
    ),
    (("rl", "ppo", "rlhf"), "reinforcement learning is grpo", "automodel grpo llm -c quickstart_grpo"),
    (("kto", "orpo", "simpo"), "preferences are dpo, with an objective", "automodel dpo llm -c quickstart_dpo"),
    (
        ("evaluate", "test", "validate", "judge"),
        "a run is judged by eval, with the questions of a config",
        "automodel eval quickstart -c quickstart",
    ),
    (
        ("generate", "inference", "infer", "predict"),
        "a run answers in chat, and behind OpenAI's interface with serve",
        "automodel chat quickstart",
    ),
    (("upload", "publish"), "a run goes to the hub by push", "automodel push quickstart me/quickstart --dry-run"),
    (("merge", "convert", "save"), "export writes a run, adapters merged", "automodel export runs/quickstart"),
    (("ls", "list", "cp", "init", "new", "template"), "configs to start from", "automodel recipes ls"),
    (("lint", "validate-config"), "a config is checked by check", "automodel check -c quickstart"),
    (("dry-run", "dry_run", "simulate"), "it is one word", "automodel dryrun -c quickstart --gpus 1"),
    (
        ("preprocess", "tokenize", "prepare"),
        "a run prepares its data itself; this shows it",
        "automodel data inspect -c quickstart",
    ),
    (("env", "info", "status"), "the machine is looked at by doctor", "automodel doctor"),
    (("config", "keys", "params", "schema"), "every key is listed by options", "automodel options"),
    (("help",), "the commands are listed by --help", "automodel --help"),
)
_COMMANDS = {word: (says, fix) for words, says, fix in _ANSWERS for word in words}


def other_command(word: str) -> ConfigError | None:
    """The answer to another tool's name for a command."""
    if word not in _COMMANDS:
        return None
    says, fix = _COMMANDS[word]
    return ConfigError(f"no such command: {word}; {says}", fix=fix)


def unknown_option(error: NoSuchOption, arguments: Sequence[str]) -> ConfigError:
    """An option that does not exist: Hydra's own, a config key with dashes (of a command that takes any), or a
    misspelling."""
    name = error.option_name
    if name in ("-m", "--multirun"):
        return ConfigError(f"no such option: {name}; several runs are a sweep", fix=_SWEEP)
    if name in ("--config-name", "--config-path", "-cn", "-cp", "--config", "--cfg"):
        given = _value(name, arguments)
        return ConfigError(f"no such option: {name}; a config is named by -c", fix=f"-c {word(given or 'quickstart')}")
    command = error.ctx
    if command is not None and not any(parameter.name == "overrides" for parameter in command.command.params):
        known = ", ".join(name for parameter in command.command.params for name in parameter.opts if name[0] == "-")
        near = sorted(error.possibilities or [f"{command.command_path} --help"])
        return ConfigError(f"no such option: {error.option_name}; there are {known or 'none'}", fix=near[0])
    key, value = name.lstrip("-").replace("-", "_"), _value(name, arguments)
    fix = _override(key, value, completion_values.keys(_value("-c", arguments) or _value("--conf", arguments) or "sft"))
    if fix is None and error.possibilities:
        return ConfigError(f"no such option: {name}", fix=sorted(error.possibilities)[0])
    return ConfigError(
        f"no such option: {name}; a config key is set without dashes, as key=value", fix=fix or f"{key}=VALUE"
    )


def _override(key: str, value: str | None, known: set[str]) -> str | None:
    """`key=value` of ours for an option that names a key, a part of one, or another tool's."""
    if key in known:
        return f"{key}={'VALUE' if value is None else value}"
    found = suggest(key, "VALUE" if value is None else value, known)
    return found and found.fix


def _value(name: str, arguments: Sequence[str]) -> str | None:
    """What stands behind an option on the command line, after `=` or a space."""
    for i, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name and i + 1 < len(arguments) and not arguments[i + 1].startswith("-"):
            return arguments[i + 1]
    return None
