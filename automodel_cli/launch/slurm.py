"""Slurm jobs: write the batch script of a run and submit it. Torch-free.

One Slurm task is one rank, started by `srun`: Slurm itself then delivers signals to every rank of every node, ends all
of them when one dies and names it. torchrun between the two would die of USR1 itself, flatten exit codes to 1 and end
its ranks 30 s after a TERM.

The batch script guarantees three things. A notice (USR1) reaches the ranks only after all of them listen. A clean stop
is recorded in a file of rank 0, because srun kills all tasks if one exits non-zero. Only a stop after a notice is
requeued: `scancel` ends a job permanently, and a failing job does not loop.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.security.trust import NOTHING, Trust
from automodel_cli.launch.slurm_script import BODY, SCRIPT, setup_block
from automodel_cli.launch.slurm_servers import RolloutNodes

_NOT_IN_A_LINE = ("Cc", "Zl", "Zp")
"""Unicode's categories of control characters and of separators of lines and paragraphs."""

_SIGNAL_SECONDS = 60
"""How much earlier than requested Slurm may send a signal (sbatch(1), --signal)."""
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")


@dataclass(frozen=True)
class Job:
    """Settings of the batch script. Relative paths are relative to `chdir`."""

    name: str
    run_dir: Path
    nodes: int
    ranks_per_node: int
    conf: str
    overrides: tuple[str, ...] = ()
    trust: Trust = NOTHING
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    notice: int = 300
    max_requeues: int = 20
    setup: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    image: str | None = None
    chdir: Path | None = None
    python: tuple[str, ...] = ("python", "-P")
    rollout: RolloutNodes | None = None
    has_folder: bool = True
    """Whether the folder of the logs exists when Slurm opens the job's output."""

    def __post_init__(self) -> None:
        if self.time is not None:
            _check_time(self.time, self.notice)
        for option in self.options:
            if not option.startswith("-"):
                raise ConfigError(
                    f"--sbatch {option} must be a complete option that begins with -",
                    code="invalid_value",
                    keys=("--sbatch",),
                    fix=f"--sbatch=--{option}",
                )
        for name, value in self._texts():
            invalid = next(
                (character for character in value if unicodedata.category(character) in _NOT_IN_A_LINE), None
            )
            if invalid is not None and not (invalid == "\t" and name == "--setup"):
                raise ConfigError(
                    f"{name} {value!r} must not contain the control character {invalid!r}, which could end a line of "
                    "the batch script and start a command",
                    code="invalid_value",
                    keys=(name,) if name.startswith("-") else (),
                    fix=f"{name} without {invalid!r}",
                )

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Every text in the script, with its option name."""
        yield from (
            (name, str(value))
            for name, value in (
                ("--job-name", self.name),
                ("output_dir or run_name", self.run_dir),
                ("-c", self.conf),
                ("--partition", self.partition),
                ("--account", self.account),
                ("--image", self.image),
                ("the working directory", self.chdir),
            )
            if value is not None
        )
        if self.rollout is not None and self.rollout.image is not None:
            yield "--rollout-image", self.rollout.image
        lists = {
            "rollout.engine.servers": () if self.rollout is None else self.rollout.servers.command,
            "the override": self.overrides,
            "--trust": self.trust.arguments(),
            "--setup": self.setup,
            "--sbatch": self.options,
            "the path of Python": self.python,
        }
        yield from ((name, value) for name, values in lists.items() for value in values)

    @property
    def num_ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def size(self) -> str:
        """For people."""
        numbers = {"node": self.nodes, "rank": self.ranks_per_node}
        size = " x ".join(f"{number} {noun}{'s' * (number > 1)}" for noun, number in numbers.items())
        if self.rollout is None:
            return size
        nodes = self.rollout.nodes
        return f"{size}, and {nodes} node{'s' * (nodes > 1)} that generate{'s' * (nodes == 1)}"

    def cancel(self, job: str) -> str:
        """The command that ends it after a checkpoint. A plain `scancel` reaches servers too, which end at once, and
        ranks that wait for them cannot finish their step."""
        return f"scancel {job}" if self.rollout is None else f"scancel --batch --signal=USR2 {job}"

    def script(self) -> str:
        """Return the complete batch script."""
        trust = shlex.join(self.trust.arguments())
        python = shlex.join(("python3", "-P") if self.image is not None else self.python)
        container, rollout = self._container(self.image), self.rollout
        check = f"{python} -m automodel_cli check -c {shlex.join((self.conf, *self.overrides))} --resolved{_and(trust)}"
        cpus = self.cpus_per_task
        body = BODY.format(
            run=shlex.quote(str(self.run_dir)),
            max_requeues=self.max_requeues,
            setup=setup_block(self.setup),
            check=f"srun --export=ALL --nodes=1 --ntasks=1{container} {check}" if container else check,
            threads=cpus or 1,
            export=f"export SRUN_CPUS_PER_TASK={cpus}        # srun does not ask sbatch for it\n" if cpus else "",
            container=container,
            python=python,
            trust=_and(trust),
            component="" if rollout is None else " --het-group=0",
            ntasks="SLURM_NTASKS" if rollout is None else "SLURM_NTASKS_HET_GROUP_0",
            servers="" if rollout is None else rollout.begin(self._container(rollout.image)),
            listen="" if rollout is None else rollout.listen(),
            end_servers="" if rollout is None else rollout.end(),
        )
        return "\n".join([*self._head(), *self._directives()]) + "\n" + body

    def _container(self, image: str | None) -> str:
        """Options of srun (pyxis) that start every task in the image, in the directory of the job."""
        if image is None:
            return ""
        here = self.chdir or Path.cwd()
        values = {"image": image, "mounts": f"{here}:{here}", "workdir": here}
        return _and(shlex.join(f"--container-{name}={value}" for name, value in values.items()))

    def _head(self) -> Iterator[str]:
        logs = shlex.quote(str(self.run_dir / "logs"))
        yield "#!/usr/bin/env bash"
        yield f"# {self.name}: {self.size}. On notice (before the time limit, or a preemption) the ranks"
        yield "# save at the end of a step, the job is requeued, and the run goes on exactly where it stopped."
        yield "#   submit  sbatch THIS_FILE"
        yield f"#   follow  tail -f {logs}/rank-0.log"
        yield f"#   cancel  {self.cancel('JOB')}   (the ranks save first)"

    def _directives(self) -> Iterator[str]:
        yield _directive("job-name", self.name)
        yield _directive("nodes", self.nodes)
        yield _directive("ntasks-per-node", self.ranks_per_node)
        if self.gpus_per_node and not any(o.startswith(("--gres=gpu", "--gpus")) for o in self.options):
            yield _directive("gpus-per-node", self.gpus_per_node)
        yield from _given({"cpus-per-task": self.cpus_per_task})
        yield from self._shared_directives()
        yield "#SBATCH --requeue --open-mode=append"
        yield f"#SBATCH --signal=B:USR1@{self.notice}"
        log = str(self.run_dir / "logs" / "rank-0.log").replace("%", "%%")
        yield _directive("output", log if self.has_folder else "/dev/null")
        if (rollout := self.rollout) is not None:
            yield "#SBATCH hetjob"
            yield _directive("nodes", rollout.nodes)
            yield _directive("ntasks-per-node", rollout.on_each)
            gpus, cpus = rollout.gpus_per_node or None, rollout.cpus_per_task
            yield from _given({"gpus-per-node": gpus, "cpus-per-task": cpus})
            yield from self._shared_directives()

    def _shared_directives(self) -> Iterator[str]:
        """Return the options that apply to every component."""
        names = {"partition": self.partition, "account": self.account, "time": self.time, "chdir": self.chdir}
        yield from _given(names)
        yield from (f"#SBATCH {option}" for option in self.options)


def _check_time(limit: str, notice: int) -> None:
    """Raise ConfigError for a time limit that Slurm rejects, or that is shorter than the notice period."""
    if not _TIME.fullmatch(limit):
        raise ConfigError(
            f"--time {limit} must have the form minutes, H:MM:SS or D-HH:MM:SS",
            code="invalid_value",
            keys=("--time",),
            fix="--time 24:00:00",
        )
    seconds = _seconds(limit)
    if seconds and notice + _SIGNAL_SECONDS >= seconds:
        raise ConfigError(
            f"--notice {notice} is too long for --time {limit}: ranks save {notice} s before the limit of {seconds} s, "
            f"and Slurm may signal up to {_SIGNAL_SECONDS} s earlier, so every attempt would end at once",
            code="out_of_range",
            keys=("--notice", "--time"),
            fix=f"--notice {seconds // 4}" if seconds > 2 * _SIGNAL_SECONDS else "--time 1:00:00",
        )


def _seconds(limit: str) -> int:
    """Parse a time limit to seconds; 0 is unlimited. Forms: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` and `D-H:M:S`."""
    days, dash, rest = limit.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    if not dash:
        numbers = [0] * (len(numbers) < 3) + numbers + [0] * (len(numbers) < 2)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def array_script(name: str, jobs: Sequence[Job], *, at_once: int | None) -> str:
    """Return one job array whose tasks are `jobs`, at most `at_once` of them at a time. Each task executes the script
    in its run folder, and is notified, requeued and cancelled like a single job."""
    unlike = ("--job-name", "--output")
    limit = f"%{at_once}" if at_once else ""
    runs = "\n".join(f"    {shlex.quote(str(job.run_dir))}" for job in jobs)
    directives = [line for line in jobs[0]._directives() if not line.startswith(tuple(f"#SBATCH {o}=" for o in unlike))]
    lines = [
        "#!/usr/bin/env bash",
        f"# {name}: {len(jobs)} runs of {jobs[0].size}, one array task each; logs are in their folders",
        _directive("job-name", name),
        *directives,
        f"#SBATCH --array=0-{len(jobs) - 1}{limit}",
        "#SBATCH --output=/dev/null",
        f"RUNS=(\n{runs}\n)",
        "RUN=${RUNS[$SLURM_ARRAY_TASK_ID]}",
        'mkdir -p "$RUN/logs"',
        f'exec bash "$RUN/{SCRIPT}" >>"$RUN/logs/rank-0.log" 2>&1',
    ]
    return "\n".join(lines) + "\n"


def _and(words: str) -> str:
    return f" {words}" if words else ""


def _given(values: Mapping[str, object]) -> Iterator[str]:
    yield from (_directive(name, value) for name, value in values.items() if value is not None)


def _directive(name: str, value: object) -> str:
    return f"#SBATCH --{name}={shlex.quote(str(value))}"


def find_sbatch() -> str:
    """Return the path of `sbatch`. Raises ConfigError if it is missing."""
    path = shutil.which("sbatch")
    if path is None:
        raise ConfigError(
            "sbatch is not on PATH, so this host cannot submit Slurm jobs",
            code="submission_failed",
            fix="write the script with --dry-run, copy it to a login node and run sbatch there",
        )
    return path


def send(sbatch: str, script: Path) -> str:
    """Submit the script and return the job id. Raises RunError with Slurm's message."""
    answer = subprocess.run([sbatch, "--parsable", str(script)], capture_output=True, text=True)
    if answer.returncode:
        raise RunError(f"Slurm rejected the job: {_error_text(answer.stderr)}", code="submission_failed")
    return answer.stdout.strip().partition(";")[0]


def _error_text(text: str) -> str:
    lines: Sequence[str] = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in text.splitlines()]
    return "; ".join(line for line in lines if line) or "no reason given"
