"""Generation servers as the second component of a Slurm job. Torch-free."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from automodel_cli.config.errors import ConfigError
from automodel_cli.launch.generation_servers import ADDRESSES, GenerationServers

_END = """\
# USR2 (scancel --batch --signal=USR2) ends the job after a checkpoint: a plain scancel ends the servers at once, and
# ranks that wait for them cannot finish their step.
ending() {
    say "told to end: the ranks save"
    until listening || ! kill -0 "$STEP" 2>/dev/null; do sleep 0.2; done
    kill -USR1 "$STEP" 2>/dev/null
}
"""
_SERVERS = """\
# The generation servers: a task each, on the nodes of the second component. One that ends is started again; it gets
# the current weights with the next step.
serve() {{
    unset MASTER_ADDR MASTER_PORT OMP_NUM_THREADS        # those of the ranks
    PORT=$(({port} + SLURM_LOCALID))
{devices}    while :; do
        CODE=0
        {command} || CODE=$?
        echo "$(date +%FT%T) the server at $SLURMD_NODENAME:$PORT ended with code $CODE; again in 10 s"
        sleep 10
    done
}}
export -f serve
export {addresses}
for NODE in $(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1"); do
    for ((i = 0; i < {on_each}; i++)); do
        {addresses}=${{{addresses}:+${addresses},}}http://$NODE:$(({port} + i))
    done
done
say "generation servers: ${addresses}"
srun --het-group=1 --export=ALL --open-mode=append --output="$RUN/logs/rollout_server-%t.log"{container} \\
    bash -c serve 2>>"$RUN/logs/rollout_servers.log" &
SERVERS=$!

"""
_DEVICES = """\
    export CUDA_VISIBLE_DEVICES
    CUDA_VISIBLE_DEVICES=$(seq -s , $((SLURM_LOCALID * {gpus})) $((SLURM_LOCALID * {gpus} + {gpus} - 1)))
"""
_END_SERVERS = """\
kill -TERM "$SERVERS" 2>/dev/null
wait "$SERVERS" 2>/dev/null
"""


@dataclass(frozen=True)
class RolloutNodes:
    """The second component of a heterogeneous job: `nodes` with `gpus_per_node` each, for `servers`. `cpus_per_task`
    are the cores of a server, `image` the container that they start in.

    Raises ConfigError if the servers do not fit on the nodes.
    """

    servers: GenerationServers
    nodes: int
    gpus_per_node: int
    cpus_per_task: int | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        number, gpus = self.servers.number, self.servers.gpus
        keys = ("rollout.engine.servers.num_servers", "rollout.engine.servers.gpus_per_server")
        if number % self.nodes:
            raise ConfigError(
                f"rollout.engine.servers.num_servers={number} is not divisible by --rollout-nodes {self.nodes}",
                code="not_divisible",
                keys=(*keys[:1], "--rollout-nodes"),
                fix=f"rollout.engine.servers.num_servers={self.nodes}",
            )
        if self.on_each * gpus != self.gpus_per_node:
            raise ConfigError(
                f"{self.on_each} server(s) per node with rollout.engine.servers.gpus_per_server={gpus} use "
                f"{self.on_each * gpus} GPUs, but a node has {self.gpus_per_node}",
                code="mesh_size",
                keys=keys,
                fix=f"rollout.engine.servers.num_servers={self.nodes} "
                f"rollout.engine.servers.gpus_per_server={self.gpus_per_node}",
            )

    @property
    def on_each(self) -> int:
        """Servers on a node."""
        return self.servers.number // self.nodes

    def begin(self, container: str) -> str:
        """Return the script lines before the ranks start. `container`: options of srun."""
        words = self.servers.words("0.0.0.0", "$PORT")
        command = " ".join('"$PORT"' if word == "$PORT" else shlex.quote(word) for word in words)
        devices = _DEVICES.format(gpus=self.servers.gpus) if self.servers.gpus else ""
        return _END + _SERVERS.format(
            port=self.servers.port,
            devices=devices,
            command=command,
            addresses=ADDRESSES,
            on_each=self.on_each,
            container=container,
        )

    def listen(self) -> str:
        """Return the script lines while the ranks run."""
        return "; trap ending USR2"

    def end(self) -> str:
        """Return the script lines after the ranks have ended."""
        return _END_SERVERS
