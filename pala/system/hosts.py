"""The hosts of a job: how they are named, and which of them start a process."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from pala.system.errors import PalaError, reason
from pala.system.jobs import LOOK_S, MpiJob, environment_of_jobs

_PROBE_S = 60.0  # for a host to start one process


class Host(NamedTuple):
    """A machine, and how many ranks it takes."""

    name: str
    slots: int


def read_hosts(host: str | None, hostfile: Path | None) -> list[Host]:
    """Read `name:slots,user@name:slots`, or a file in Open MPI's or MPICH's form, one a line: `name slots=4`,
    `name:4`."""
    if host is not None and hostfile is not None:
        raise PalaError("Give '--host' or '--hostfile', not both.")
    source = f"host file '{hostfile}'" if hostfile else "'--host'"
    try:
        text = hostfile.read_text(encoding="utf-8-sig") if hostfile else (host or "").replace(",", "\n")
    except (OSError, ValueError) as error:
        raise PalaError(f"Host file '{hostfile}' cannot be read: {reason(error)}.") from None
    hosts: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split("#")[0].strip()
        match = re.fullmatch(
            r"((?:[\w.\-]+@)?[\w.\-]+)(?::(\d+)|(?:\s+\w+=\w+)*?\s+slots=(\d+))?(?:\s+\w+=\w+)*", words
        )
        if match is None and re.match(r"\[|\S*:\S*:", words):
            raise PalaError(
                f"In {source}, '{words}' is an IPv6 address, which mpirun does not take: write the host's name, as "
                "/etc/hosts or DNS has it."
            )
        if words and match is None:
            raise PalaError(f"In {source}, '{words}' is no host; write 'name:4' for one that takes 4 ranks.")
        if match is not None:
            hosts[match[1]] = hosts.get(match[1], 0) + int(match[2] or match[3] or 1)
    if (host is not None or hostfile) and not all(hosts.values() or [0]):
        raise PalaError(f"In {source} there is no host, or one that takes no rank.")
    return [Host(name, slots) for name, slots in hosts.items()]


def answering(hosts: Sequence[Host], mpirun: Sequence[str]) -> list[Host]:
    """Return the hosts on which mpirun starts a process within a minute."""
    probes: list[MpiJob] = []
    ends = threading.Event()

    def answers(host: Host) -> bool:
        words = [*mpirun, "-np", "1", "--host", host.name, "echo", "here"]
        probe = MpiJob(words, environment_of_jobs(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        probes.append(probe)
        try:
            if ends.is_set():  # while this one began, so it was not killed with the others
                probe.kill()
            return b"here" in probe.launcher.communicate(timeout=_PROBE_S)[0]
        except subprocess.TimeoutExpired:
            probe.kill()
            return False
        finally:
            probe.reap()

    with ThreadPoolExecutor(len(hosts)) as pool:
        try:
            asked = {pool.submit(answers, host): host for host in hosts}
            while wait(asked, LOOK_S).not_done:  # without a limit it may miss a signal that comes as it begins
                pass
            return [host for answer, host in asked.items() if answer.result()]
        except BaseException:  # a signal: the pool waits for its threads, and they for the probes
            ends.set()
            for probe in probes:
                probe.kill()
            raise
