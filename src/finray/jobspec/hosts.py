"""A run on named machines: a Slurm script, a Compose file for several hosts, Ray's cluster YAML."""

from __future__ import annotations

import shlex
from typing import Any

from finray.errors import ConfigError
from finray.jobspec.spec import MOUNT, JobSpec, to_yaml

# Exit code of `finray train` after a stop with a checkpoint: 128 + SIGTERM.
STOPPED = 143
# The time limit of a Slurm job for which none is given.
SLURM_HOURS = 24.0

_SLURM = """\
#!/usr/bin/env bash
{directives}
# Made by `finray jobspec --to slurm`. Submit it with: sbatch {file}
# A job that is preempted, or ends by its time limit, saves a checkpoint and is queued again. The same script continues
# from there.
# shellcheck disable=SC2016  # What stands in single quotes is for the steps.
set -euo pipefail
umask 077

{secrets}
folder=${{TMPDIR:-/tmp}}/finray-$SLURM_JOB_ID
config=$folder/{name}.yaml
mkdir -p "$folder"
cat > "$config" <<'FINRAY_CONFIG'
{config}FINRAY_CONFIG

# A token of this job alone. srun hands the environment on; it is on no command line.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
# Machines that are busy start slowly. When the run is over Ray has nothing to wait for, and a preempted job no time.
export RAY_raylet_start_wait_time_s=300 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')
export RAY_AUTH_TOKEN
# Since Slurm 22.05 a step has one CPU unless it asks for more.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# The first host is this one. Two jobs on one machine have two ports.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 20000))
export RAY_ADDRESS="${{hosts[0]}}:$port"
again() {{ scontrol requeue "$SLURM_JOB_ID"; }}
trap 'again; exit {stopped}' TERM

# Slurm sends SIGTERM to the steps of a job that it preempts. Ray is needed until the checkpoint is written, so its head
# is no step, and elsewhere the signal stays with a shell that does not hear it.
ray start --head --port="$port" --include-dashboard=false{resources} --block > "$folder/ray.log" 2>&1 &
children=($!)
# That its port answers does not say that workers can be placed.
for _ in $(seq 300); do
  if grep -qs "Ray runtime started" "$folder/ray.log" || ! kill -0 "${{children[0]}}" 2> /dev/null; then break; fi
  sleep 1
done
kill -0 "${{children[0]}}" 2> /dev/null || cat "$folder/ray.log"
on() {{ exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" bash -c "${{@:2}}"; }}
for host in "${{hosts[@]:1}}"; do
  on "$host" 'trap "" TERM; ray start --address="$RAY_ADDRESS"{resources} --block; exit' &
  children+=($!)
done
# This step hears it, and tells this script.
on "${{hosts[0]}}" 'trap "kill $0 2> /dev/null; exit" TERM; while true; do sleep 2 & wait; done' $$ &
children+=($!)

# SIGTERM comes {grace} s before the end (--signal), and when the job is preempted: finray saves a checkpoint. A second
# one would end it without.
finray train "$config" &
run=$!
trap 'trap "" TERM; kill -TERM "$run" 2> /dev/null || true' TERM
code=0
wait "$run" || code=$?
# A signal ends the first wait, and the run continues until its checkpoint is written.
while kill -0 "$run" 2> /dev/null; do
  code=0
  wait "$run" || code=$?
done
trap '' TERM
kill "${{children[@]}}" 2> /dev/null || true
wait "${{children[@]}}" 2> /dev/null || true

if [ "$code" -eq {stopped} ]; then
  echo "the run was stopped and has a checkpoint: it is queued again"
  again
fi
exit "$code"
"""


def _grace(spec: JobSpec) -> int:
    """Seconds that a stopped run gets: for its checkpoint, and for what follows it."""
    return max(120, round(spec.config.checkpoint.grace_seconds) + 60)


def slurm(spec: JobSpec) -> str:
    """A batch script."""
    machines = spec.machines
    directives: dict[str, Any] = {
        "job-name": spec.name,
        "nodes": spec.nodes if spec.min_nodes == spec.nodes else f"{spec.min_nodes}-{spec.nodes}",
        "ntasks-per-node": 1,
        "cpus-per-task": spec.cpus_per_node,
        "mem": f"{spec.memory_gb}G",
    }
    if spec.gpus_per_node:
        kind = f"{machines.gpu_type}:" if machines.gpu_type else ""
        directives["gpus-per-node"] = f"{kind}{spec.gpus_per_node}"
    if machines.queue:
        directives["partition"] = machines.queue
    minutes = round((machines.hours or SLURM_HOURS) * 60)
    directives |= {"time": f"{minutes // 60:02}:{minutes % 60:02}:00", "signal": f"B:TERM@{_grace(spec)}"}
    directives |= {"open-mode": "append", "output": f"{spec.name}-%j.log"}
    lines = [f"#SBATCH --{key}={value}" for key, value in directives.items()] + ["#SBATCH --requeue"]
    names = " ".join(machines.secrets)
    secrets = (
        f"# Secrets come from the environment of whoever submits: {names}." if names else "# There are no secrets."
    )
    if "FINRAY_CONFIG" in spec.config_text:
        raise ConfigError("contains the end marker of the config in the script", where="FINRAY_CONFIG")
    resources = f" --num-cpus={spec.cpus_per_node}"
    resources += f" --num-gpus={spec.gpus_per_node}" if spec.gpus_per_node else ""
    return _SLURM.format(
        directives="\n".join(lines),
        file=f"{spec.name}.sbatch",
        secrets=secrets,
        name=spec.name,
        config=spec.config_text,
        resources=resources,
        grace=_grace(spec),
        stopped=spec.config.cluster.requeue_exit_code or STOPPED,
    )


def compose(spec: JobSpec) -> str:
    """A Compose file: one host runs the profiles `head` and `job`, every other one the profile `worker`."""
    machines = spec.machines
    environment: dict[str, str | None] = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "${RAY_AUTH_TOKEN:?export RAY_AUTH_TOKEN, the same on all hosts}",
        "RAY_USAGE_STATS_ENABLED": "0",
        **spec.environment,
        # Without a value, Compose takes the host's.
        **dict.fromkeys(machines.secrets),
    }
    # By names of Compose's own: those of files may not be.
    files = {f"file-{number}": name for number, name in enumerate(spec.files)}
    mounted = [{"source": source, "target": f"{MOUNT}/{name}"} for source, name in files.items()]
    base: dict[str, Any] = {
        "image": machines.image,
        "network_mode": "host",
        "environment": environment,
        "volumes": [f"{machines.shared}:{machines.shared}"],
        **({"configs": mounted} if mounted else {}),
        "shm_size": f"{max(1, spec.memory_gb // 4)}gb",
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "stop_grace_period": f"{_grace(spec)}s",
    }
    amounts: dict[str, Any] = {"limits": {"cpus": str(spec.cpus_per_node), "memory": f"{spec.memory_gb}G"}}
    if spec.gpus_per_node:
        amounts["reservations"] = {
            "devices": [{"driver": "nvidia", "count": spec.gpus_per_node, "capabilities": ["gpu"]}]
        }
    resources = [f"--num-cpus={spec.cpus_per_node}"]
    resources += [f"--num-gpus={spec.gpus_per_node}"] if spec.gpus_per_node else []
    address = "${HEAD:?export HEAD, the name or address of the first host}:6379"
    services: dict[str, Any] = {
        "head": {
            **base,
            "profiles": ["head"],
            "command": ["ray", "start", "--head", "--port=6379", "--dashboard-host=127.0.0.1", *resources, "--block"],
            "deploy": {"resources": amounts},
            "healthcheck": {
                "test": ["CMD", "ray", "health-check", "--address", "127.0.0.1:6379"],
                "interval": "10s",
                "timeout": "10s",
                "retries": 12,
            },
            "restart": "unless-stopped",
        },
        "worker": {
            **base,
            "profiles": ["worker"],
            "command": ["ray", "start", f"--address={address}", *resources, "--block"],
            "deploy": {"resources": amounts},
            "restart": "unless-stopped",
        },
        "job": {
            **base,
            "profiles": ["job"],
            "command": ["finray", "train", f"{MOUNT}/config.yaml"],
            "environment": {**environment, "RAY_ADDRESS": "127.0.0.1:6379"},
            "configs": [{"source": "config", "target": f"{MOUNT}/config.yaml"}, *mounted],
            # A run that was stopped or lost continues with the same command. An error in the config would be there
            # again every time.
            "restart": "on-failure:3",
        },
    }
    texts = {"config": spec.config_text, **{source: spec.files[name] for source, name in files.items()}}
    plain = {
        "name": spec.name,
        "services": services,
        # Compose would interpolate a dollar.
        "configs": {source: {"content": text.replace("$", "$$")} for source, text in texts.items()},
    }
    about = (
        f"# Made by `finray jobspec --to compose`, for {spec.nodes} host{'s' if spec.nodes > 1 else ''} with\n"
        f"# {machines.shared}. Everywhere: export RAY_AUTH_TOKEN (the same) and HEAD (the first host). There:\n"
        "#   docker compose --profile head up -d --wait && docker compose --profile job up\n"
        "# On every other one: docker compose --profile worker up -d\n"
    )
    return about + to_yaml(plain)


def ray_cluster(spec: JobSpec) -> str:
    """A file for `ray up`: Ray logs in to the named machines by ssh.
    Raises ConfigError: machines are not named, or too few."""
    machines = spec.machines
    if len(machines.hosts) < spec.nodes:
        raise ConfigError(
            f"{spec.nodes} machines are needed, but {len(machines.hosts)} are given",
            where="--host",
            repair="list them all, the head first: --host a --host b",
        )
    resources = f" --num-cpus={spec.cpus_per_node}"
    resources += f" --num-gpus={spec.gpus_per_node}" if spec.gpus_per_node else ""
    # `ray up` runs these in a shell over ssh; the token is in a file because it must not be on a command line.
    token = 'test -s ~/.ray/auth_token || { echo "put the token of the cluster into ~/.ray/auth_token" >&2; exit 1; }'
    options = [
        "--network=host",
        f"--shm-size={max(1, spec.memory_gb // 4)}g",
        # Ray joins these into a command of a shell.
        shlex.quote(f"--volume={machines.shared}:{machines.shared}"),
        "--volume=$HOME/.ray/auth_token:/home/finray/.ray/auth_token:ro",
        *(f"--env={name}" for name in machines.secrets),
        *(["--gpus=all"] if spec.gpus_per_node else []),
    ]
    plain = {
        "cluster_name": spec.name,
        "max_workers": spec.max_nodes - 1,
        "provider": {
            "type": "local",
            "head_ip": machines.hosts[0],
            "worker_ips": list(machines.hosts[1 : spec.max_nodes]),
        },
        "auth": {"ssh_user": machines.user},
        "docker": {
            "image": machines.image,
            "container_name": f"finray-{spec.name}",
            "pull_before_run": False,
            "run_options": options,
        },
        "initialization_commands": [token],
        "head_start_ray_commands": [
            "ray stop",
            f"RAY_AUTH_MODE=token ray start --head --port=6379 --dashboard-host=127.0.0.1{resources} "
            "--autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": [
            "ray stop",
            f"RAY_AUTH_MODE=token ray start --address=$RAY_HEAD_IP:6379{resources}",
        ],
    }
    fewest, most = spec.config.cluster.min_workers, spec.config.cluster.max_workers
    about = (
        f"# Made by `finray jobspec --to ray-cluster`, for {fewest if fewest == most else f'{fewest} to {most}'} "
        f"worker{'s' if most > 1 else ''}. Copy one ~/.ray/auth_token to all machines, then:\n"
        f"#   ray up {spec.name}.yaml && ray dashboard {spec.name}.yaml\n"
        "#   finray submit CONFIG --address http://127.0.0.1:8265   (in another terminal)\n"
    )
    return about + to_yaml(plain)
