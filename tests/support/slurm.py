"""A Slurm of one node, with Debian's packages: its own munge, free ports, and two partitions, one of which preempts."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

PATIENCE_S = 400.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
# The jobs of `low` have GRACE_S seconds from the signal to the end when those of `high` want their CPUs.
LOW, HIGH, GRACE_S = "low", "high", 300
_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser=root
AuthType=auth/munge
# A job that is queued again waits for as long as its credential is valid.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=1,batch_sched_delay=0,preempt_reorder_count=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SwitchType=switch/none
ReturnToService=2
KillWait=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
PartitionName={low} Nodes={host} Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName={high} Nodes={host} MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str | None:
    """What this machine lacks for a Slurm; None where it has all."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if lacking:
        return f"no {', '.join(lacking)} (as root on Debian: INSTALL=1 .ci/slurm)"
    return None if os.geteuid() == 0 else "slurmd is run by root"


@dataclass(frozen=True)
class Slurm:
    """A running one.

    Attributes:
        folder: configuration, state and logs.
        host: name of the node.
    """

    folder: Path
    host: str

    def env(self) -> dict[str, str]:
        """Of commands that ask this Slurm."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: object, check: bool = True, cwd: Path | None = None, **env: str) -> str:
        """What a command of Slurm's says."""
        command = [str(word) for word in words]
        done = subprocess.run(
            command, env=self.env() | env, capture_output=True, text=True, timeout=120, cwd=cwd or self.folder
        )
        assert done.returncode == 0 or not check, f"{command}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout + done.stderr

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.run("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        """The ends of the logs of controller and node."""
        found = [self.folder / "slurmctld.log", self.folder / "slurmd.log"]
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in found if file.exists())


@contextmanager
def serve(folder: Path) -> Iterator[Slurm]:
    """A Slurm for as long as the block runs.

    Args:
        folder: of its own, with a short path (for the socket).
    """
    host = socket.gethostname().partition(".")[0]
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        controller, node = (one.getsockname()[1] for one in held)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    conf = _CONF.format(
        host=host,
        controller=controller,
        node=node,
        user="root",
        folder=folder,
        # It believes what it is told, so that it takes any preset; no job of a test uses that much.
        cpus=512,
        memory=4_000_000,
        gpus=16,
        low=LOW,
        high=HIGH,
        grace=GRACE_S,
    )
    (folder / "slurm.conf").write_text(conf)
    for number in range(16):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-15]\n")
    slurm = Slurm(folder, host)
    env = slurm.env() | {"PATH": f"{os.environ['PATH']}:/usr/sbin"}
    files = [f"--{name}={folder}/munge.{end}" for name, end in (("socket", "sock"), ("key-file", "key"))]
    files += [f"--{name}={folder}/munge.{end}" for name, end in (("pid-file", "pid"), ("seed-file", "seed"))]
    daemons = (
        ["munged", "--foreground", "--force", *files, f"--log-file={folder}/munge.log"],
        ["slurmctld", "-D", "-f", str(folder / "slurm.conf")],
        ["slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", host],
    )
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            with (folder / f"{command[0]}.out").open("wb") as out:
                started.append(subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True))
        deadline = time.monotonic() + PATIENCE_S
        while "idle" not in slurm.run("sinfo", "--noheader", "--format=%t", check=False):
            said = "".join(file.read_text() for file in folder.glob("*.out")) + slurm.logs()
            assert all(process.poll() is None for process in started), said
            assert time.monotonic() < deadline, said
            time.sleep(0.3)
        yield slurm
    finally:
        slurm.run("scancel", "--me", "--signal=KILL", check=False)
        family = [one for process in started for one in _family(process.pid)]
        for one in reversed(family):
            one.kill()
        psutil.wait_procs(family, timeout=30)
        for process in started:
            process.wait()


def _family(process: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(process)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
