"""A real Slurm for tests: munged, slurmctld and a slurmd a node, with a configuration, a key and ports of their own.

Nothing of the machine's own Slurm, if it has one, is touched. Needs root and the Debian packages slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_START_S = 60.0
_END_S = 10.0
_MOST_JOB = 60_000_000
_CONFIGURATION = """\
ClusterName=pala
SlurmctldHost={controller.name}({controller.address})
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
FirstJobId={first_job}
AuthType=auth/munge
# After a requeue, Slurm waits until the job's credential has expired: two minutes, if nothing is said.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2
"""


class Node(NamedTuple):
    """Where a slurmd runs: `inside` is what to put before a command so that it runs there."""

    name: str
    address: str
    inside: Sequence[str] = ()


class Said(NamedTuple):
    """A command's exit status, and what it wrote."""

    status: int
    output: str


class SlurmError(Exception):
    """Slurm cannot be started here; a sentence."""


class SlurmStartError(SlurmError):
    """It is installed, and did not start."""


class Slurm:
    """A context manager: inside it, a cluster of these nodes takes jobs; the first one is its controller, too.

    Jobs in the partition `high` preempt those in `low`, where jobs go by default.
    """

    def __init__(self, nodes: Sequence[Node], cpus_per_node: int = 4) -> None:
        """`cpus_per_node`: that Slurm gives away, whatever the machine has."""
        self.nodes, self._cpus = nodes, cpus_per_node
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._takes_jobs = False

    def __enter__(self) -> Slurm:
        if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
            raise SlurmError(f"Slurm needs {', '.join(missing)}: install the packages slurm-wlm and munge.")
        if os.geteuid() != 0:
            raise SlurmError("Slurm's tests need root, to start its daemons.")
        self._folder = Path(tempfile.mkdtemp(prefix="pala-slurm-"))
        try:
            self._configure()
            self._start_daemons()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the jobs and the daemons."""
        if self._takes_jobs:
            self.run("scancel", "--user=root", "--full", "--signal=KILL")
            self.run("scancel", "--user=root")
            deadline = time.monotonic() + _END_S
            while self.run("squeue", "--noheader").output and time.monotonic() < deadline:
                time.sleep(0.1)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(_END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        shutil.rmtree(self._folder)

    def run(self, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> Said:
        """Run a command on the first node, such as one of Slurm's, to its end. The controller may be away for a moment:
        one that says so is run again."""
        for _ in range(10):
            done = subprocess.run(
                [*self.nodes[0].inside, *command], cwd=cwd, env=(env or os.environ) | self._environment, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
            )  # fmt: skip
            if done.returncode == 0 or "Unable to contact slurm controller" not in done.stdout:
                break
            time.sleep(0.5)
        return Said(done.returncode, done.stdout.strip())

    def states(self, job: str) -> list[str]:
        """As COMPLETED or RUNNING; of a job array, of each of its jobs."""
        for _ in range(10):
            said = self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
            if said.status == 0:  # else the controller was away for a moment, and squeue has said that in words
                return said.output.split()
            time.sleep(0.5)
        raise AssertionError(f"squeue: {said.output}")

    @property
    def _environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def _configure(self) -> None:
        self._folder.chmod(0o755)  # munged insists that everybody can reach its socket
        (self._folder / "munge.key").write_bytes(os.urandom(128))
        (self._folder / "munge.key").chmod(0o600)
        (self._folder / "state").mkdir()
        nodes = [f"NodeName={node.name} NodeAddr={node.address} CPUs={self._cpus}" for node in self.nodes]
        (self._folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                controller=self.nodes[0],
                ports=_free_ports(),
                folder=self._folder,
                nodes="\n".join(nodes),
                # MPICH names its shared memory by it: a killed job of the same number had left some, and Init hung.
                first_job=random.randrange(1, _MOST_JOB),
            )
        )

    def _start_daemons(self) -> None:
        files = [f"--{what}-file={self._folder}/munge.{what}" for what in ("key", "pid", "seed", "log")]
        self._start("munged", "--foreground", f"--socket={self._folder}/munge.socket", *files)
        self._wait("munged", (self._folder / "munge.socket").exists)
        self._start(*self.nodes[0].inside, "slurmctld", "-D")
        for node in self.nodes:
            self._start(*node.inside, "slurmd", "-D", "-N", node.name)
        self._wait("slurmctld and slurmd", self._is_idle)
        self._takes_jobs = True

    def _is_idle(self) -> bool:
        idle = (
            self.run("sinfo", "--noheader", "--partition=low", "--responding", "--format=%D") if self._daemons else None
        )
        return idle is not None and idle.output == str(len(self.nodes))

    def _start(self, *command: str) -> None:
        with open(self._folder / "daemons.log", "ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=os.environ | self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while not condition():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                log = (self._folder / "daemons.log").read_text(errors="replace").splitlines()
                faults = [line for line in log if "error" in line.lower() or "fatal" in line.lower()]
                raise SlurmStartError(
                    f"Slurm does not start here ({what}): {' '.join(faults[-2:]) or 'it does not say why'}"
                )
            time.sleep(0.1)


def _free_ports() -> list[int]:
    """For slurmctld and slurmd. The kernel gives none of these to others, as it would of those that it chooses itself
    between now and the daemons' start."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [*range(2000, first), *range(last + 1, 65_536)]
    found: list[int] = []
    for port in random.sample(others, min(100, len(others))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == 2:
            return found
    raise SlurmStartError(f"Slurm does not start here: there are no two free ports outside {first} to {last}")
