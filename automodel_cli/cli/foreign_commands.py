"""Commands and options of other tools, and their equivalents here."""

from __future__ import annotations

from collections.abc import Sequence

from click import NoSuchOption

from automodel_cli.cli import completion_values
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.keys.suggestions import suggest

_TRAIN = "automodel finetune llm -c quickstart"
_SWEEP = "automodel sweep -c quickstart optimizer.lr=0.01,0.02"
_ANSWERS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("train", "sft", "run", "tune", "launch", "fit", "pretrain"),
        "use finetune, with your config after -c",
        _TRAIN,
    ),
    (("rl", "ppo", "rlhf"), "use grpo for reinforcement learning", "automodel grpo llm -c quickstart_grpo"),
    (("kto", "orpo", "simpo"), "use dpo with another objective", "automodel dpo llm -c quickstart_dpo"),
    (
        ("evaluate", "test", "validate", "judge"),
        "use eval, with the tasks of a config",
        "automodel eval quickstart -c quickstart",
    ),
    (
        ("generate", "inference", "infer", "predict"),
        "use chat, or serve for an OpenAI-compatible server",
        "automodel chat quickstart",
    ),
    (("upload", "publish"), "use push to upload a run to the hub", "automodel push quickstart me/quickstart --dry-run"),
    (("merge", "convert", "save"), "use export, which merges adapters", "automodel export runs/quickstart"),
    (("ls", "list", "cp", "init", "new", "template"), "list the bundled recipes", "automodel recipes ls"),
    (("lint", "validate-config"), "use check to validate a config", "automodel check -c quickstart"),
    (("dry-run", "dry_run", "simulate"), "use dryrun", "automodel dryrun -c quickstart --gpus 1"),
    (
        ("preprocess", "tokenize", "prepare"),
        "runs prepare their data. Use data inspect to see it",
        "automodel data inspect -c quickstart",
    ),
    (("env", "info", "status"), "use doctor to inspect the machine", "automodel doctor"),
    (("config", "keys", "params", "schema"), "use options to list all keys", "automodel options"),
    (("help",), "use --help to list the commands", "automodel --help"),
)
_COMMANDS = {word: (says, fix) for words, says, fix in _ANSWERS for word in words}


def other_command(word: str) -> ConfigError | None:
    """Return the error for a command of another tool, with the equivalent here."""
    if word not in _COMMANDS:
        return None
    says, fix = _COMMANDS[word]
    return ConfigError(f"{word} is not a command: {says}", code="unknown_command", keys=(word,), fix=fix)


def unknown_option(error: NoSuchOption, arguments: Sequence[str]) -> ConfigError:
    """Return the error for an option that does not exist: an option of Hydra, a config key with dashes, or a typo."""
    name = error.option_name

    def unknown(rule: str, fix: str) -> ConfigError:
        return ConfigError(f"{name} is not an option{rule}", code="unknown_option", keys=(name,), fix=fix)

    if name in ("-m", "--multirun"):
        return unknown(". Use sweep for several runs", _SWEEP)
    if name in ("--config-name", "--config-path", "-cn", "-cp", "--config", "--cfg"):
        given = _value(name, arguments)
        return unknown(". Use -c for the config", f"-c {word(given or 'quickstart')}")
    command = error.ctx
    if command is not None and not any(parameter.name == "overrides" for parameter in command.command.params):
        known = ", ".join(name for parameter in command.command.params for name in parameter.opts if name[0] == "-")
        near = sorted(error.possibilities or [f"{command.command_path} --help"])
        return unknown(f". The options are: {known or 'none'}", near[0])
    key, value = name.lstrip("-").replace("-", "_"), _value(name, arguments)
    fix = _override(key, value, completion_values.keys(_value("-c", arguments) or _value("--conf", arguments) or "sft"))
    if fix is None and error.possibilities:
        return unknown("", sorted(error.possibilities)[0])
    return unknown(". Write config keys without dashes: key=value", fix or f"{key}=VALUE")


def _override(key: str, value: str | None, known: set[str]) -> str | None:
    """`key=value` of ours for an option that names a key, a part of one, or another tool's."""
    if key in known:
        return f"{key}={'VALUE' if value is None else value}"
    suggestion = suggest(key, "VALUE" if value is None else value, known)
    return suggestion and suggestion.fix


def _value(name: str, arguments: Sequence[str]) -> str | None:
    """Return the value of an option on the command line, after `=` or a space."""
    for i, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name and i + 1 < len(arguments) and not arguments[i + 1].startswith("-"):
            return arguments[i + 1]
    return None
