"""Text of the batch script."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence

SCRIPT = "job.sbatch"
"""Its name in the run folder."""
BODY = """\
RUN={run}
LOG=$RUN/logs/rank-0.log        # this script and rank 0; the others write rank-N.log
MAX_REQUEUES={max_requeues}
ATTEMPT=${{SLURM_RESTART_COUNT:-0}}
STATUS=$RUN/logs/job-$SLURM_JOB_ID-$ATTEMPT        # each rank leaves its pid and its exit code here
mkdir -p "$STATUS" && rm -f "$STATUS"/*
exec >>"$LOG" 2>&1
BEGIN=$(($(wc -c <"$LOG") + 1))
say() {{ echo "$(date +%FT%T) job $SLURM_JOB_ID: $*"; }}
{setup}
set +e -uo pipefail
say "attempt $((ATTEMPT + 1)) (requeued $ATTEMPT of at most $MAX_REQUEUES times) on $SLURM_JOB_NODELIST"

# A run keeps the config it began with, and this script, whatever is edited later.
[ -e "$RUN/job.sbatch" ] || cp "$0" "$RUN/job.sbatch"
if [ ! -e "$RUN/config.yaml" ]; then
    {check} >"$STATUS/config.yaml" || exit 2
    mv "$STATUS/config.yaml" "$RUN/config.yaml"
fi

# Where the ranks meet: the first node of the job, on a port that no other job and no earlier attempt uses.
export MASTER_ADDR MASTER_PORT
NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_ADDR=$(scontrol show node "$NODE" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')        # as Slurm reaches it
MASTER_ADDR=${{MASTER_ADDR:-$NODE}}
MASTER_PORT=$((20000 + (SLURM_JOB_ID * 31 + ATTEMPT) % 12000))
export AUTOMODEL_LOG_DIR=$RUN/logs OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}
{export}
# A notice (USR1, to this shell alone) is handed on once every rank listens. scancel (TERM) has told the ranks itself.
listening() {{ [ "$(find "$STATUS" -name 'rank-*.pid' | wc -l)" -ge "${ntasks}" ]; }}
notice() {{
    NOTICE=1
    say "notice: the ranks finish their step and save"
    until listening || ! kill -0 "$STEP" 2>/dev/null; do sleep 0.2; done
    kill -USR1 "$STEP" 2>/dev/null
}}
NOTICE=0
trap 'NOTICE=1' USR1
trap 'say "Slurm ends this job: the ranks save"' TERM

{servers}srun{component} --export=ALL --kill-on-bad-exit=1{container} \\
    env AUTOMODEL_STATUS_DIR="$STATUS" {python} -u -m automodel_cli resume "$RUN"{trust} &
STEP=$!
trap notice USR1{listen}
[ "$NOTICE" -eq 1 ] && notice
while kill -0 "$STEP" 2>/dev/null; do wait "$STEP"; done        # a trap ends `wait` early
wait "$STEP"
CODE=$?
{end_servers}[ "$CODE" -eq 0 ] && CODE=$(cat "$STATUS/rank-0.exit" || echo 1)        # 75, 130: stopped, and saved
# Slurm itself requeues a job that is preempted or whose node fails.
RESTARTS=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.*Restarts=\\([0-9]*\\).*/\\1/p' | head -n 1)
HOW="go on with: sbatch $RUN/job.sbatch"
[ "${{RESTARTS:-0}}" -gt "$ATTEMPT" ] && HOW="Slurm has requeued this job, which goes on by itself"

case $CODE in
0) say "done" ;;
75 | 130)
    if [ "$NOTICE" -eq 0 ]; then
        say "stopped, and saved; $HOW"
    elif [ "$ATTEMPT" -ge "$MAX_REQUEUES" ]; then
        say "stopped, and saved; requeued $ATTEMPT times already; $HOW"
    else
        say "saved; requeued"
        trap - TERM
        scontrol requeue "$SLURM_JOB_ID" && sleep 60        # until Slurm ends this shell: an exit would end the job
    fi
    ;;
*)
    FIRST=$(tail -c "+$BEGIN" "$LOG" | grep -m 1 -E '^srun: error: [^ ]+: tasks? ')        # srun ended the others
    CODE=1
    [[ $FIRST =~ "exit code "([0-9]+)$ ]] && CODE=${{BASH_REMATCH[1]}}
    SAVED=$(find "$RUN/checkpoints" -maxdepth 1 -regex '.*/step-[0-9]+' 2>/dev/null | sort | tail -n 1)
    say "failed with exit code $CODE${{FIRST:+; the first rank (task) to end: ${{FIRST#srun: error: }}}}"
    say "nothing is lost but the steps since ${{SAVED:-the start}}; $HOW"
    ;;
esac
exit "$CODE"
"""


def setup_block(lines: Sequence[str]) -> str:
    """Return the setup lines of a job, each followed by a check of its exit code. The error names the line.

    A command that continues on the next line is checked at its end.
    """
    if not lines:
        return ""
    block, begun = [_CHECK_SETUP], ""
    for number, line in enumerate(lines):
        begun += f"{line}\n"
        if number == len(lines) - 1 or _is_complete(begun):
            block.append(f"{begun}setup_ok {shlex.quote(begun.strip())}\n")
            begun = ""
    return "".join(block)


_CHECK_SETUP = """\
setup_ok() {
    local code=$?
    [ "$code" -eq 0 ] && return
    say "the setup failed with exit code $code at: --setup '$1'"
    exit 2
}
"""


def _is_complete(text: str) -> bool:
    bash = shutil.which("bash")
    if text.rstrip("\n").endswith("\\"):
        return False
    return bash is None or subprocess.run([bash, "-n"], input=text, capture_output=True, text=True).returncode == 0
