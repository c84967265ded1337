"""Several hosts on one Linux machine, for tests and benchmarks of what only happens between hosts.

    python launch/virtual_hosts.py --hosts 2 --ranks-per-host 1 --rate 100mbit -- python -m pala.train pong

A virtual host is a network namespace (an address, a link to a switch, no way out), a UTS namespace (a name) and a share
of the machine's cores. MPI sees separate nodes and sends over TCP; a link can be slowed and cut; a host can be killed.
Files are common to all, as on a cluster with a shared file system.

The namespaces have no names in the file system: each lives in a small holder process that ends with this one, however
this one ends. What runs on the hosts is ended too, unless this process is killed by SIGKILL: then a job runs to its own
end. The switch has a namespace of its own as well: the machine's real network is never touched. Needs root, Open MPI 5,
and the Debian packages iproute2, util-linux and hostname; `why_not` says what is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_TOOLS = ("hostname", "ip", "nsenter", "sh", "taskset", "tc", "unshare")
# The holder says that it is ready, then waits for the end of its input: this process' end, at the latest.
_HOLDER = 'hostname "$0" && ip link set lo up && echo ready && exec cat'


class VirtualHostsError(Exception):
    """Virtual hosts cannot be made here; a sentence."""


class VirtualHosts:
    """A context manager: inside it, hosts 0 ... num_hosts - 1 exist, all on one switch."""

    def __init__(self, num_hosts: int, rate: str | None = None, cores_per_host: int | None = None) -> None:
        """`rate`: rate of each host's link, each way, as `100mbit`; None: as fast as it goes.

        `cores_per_host`: by default the machine's cores divided by the hosts, at least one; hosts share cores if there
        are too few.
        """
        if num_hosts < 1:
            raise VirtualHostsError(f"There must be at least one virtual host, not {num_hosts}.")
        self.num_hosts, self._shape = num_hosts, _shape(rate)
        mine = sorted(os.sched_getaffinity(0))
        share = cores_per_host or max(1, len(mine) // num_hosts)
        self.cores = [sorted({mine[(host * share + i) % len(mine)] for i in range(share)}) for host in range(num_hosts)]
        self.names = [f"vhost{host}" for host in range(num_hosts)]
        self.addresses = [f"10.77.{host // 254}.{host % 254 + 1}" for host in range(num_hosts)]
        self._holders: list[subprocess.Popen[str]] = []  # of the hosts, then of the switch

    def __enter__(self) -> VirtualHosts:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise VirtualHostsError(
                f"Virtual hosts need {', '.join(missing)}: install iproute2, util-linux and hostname."
            )
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="pala-hosts-")
        except OSError as error:
            raise VirtualHostsError(f"Virtual hosts need a temporary folder: {error}.") from None
        try:
            for name in (*self.names, "vswitch"):
                self._holders.append(_start_holder(name))
            self._switch = self._holders[-1].pid
            _run(*_inside(self._switch), "ip", "link", "add", "bridge", "up", "type", "bridge")
            for host in range(self.num_hosts):
                self._connect(host)
            self._write_agent()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs on the hosts, and end them."""
        for host in range(len(self._holders)):
            self.kill(host)
        self._holders.clear()
        self._folder.cleanup()

    # ---- using them ----------------------------------------------------------------------------------------------

    def inside(self, host: int) -> list[str]:
        """Return the words that run a command on this host if they stand before it; the process stays the one that was
        started."""
        cores = ",".join(map(str, self.cores[host]))
        return [*_inside(self._holders[host].pid), "taskset", "-c", cores]

    def mpirun(
        self, arguments: Sequence[str], ranks_per_host: int = 1, mpirun: str = "mpirun"
    ) -> tuple[list[str], dict[str, str]]:
        """Return a command, and additions to its environment, that runs `arguments` on all hosts by Open MPI, from host
        0."""
        where = ",".join(f"{address}:{ranks_per_host}" for address in self.addresses)
        mapping = f"ppr:{ranks_per_host}:node:oversubscribe"  # a default of the environment could fill host 0 first
        placed = ["-np", str(ranks_per_host * self.num_hosts), "--host", where, "--map-by", mapping]
        return [*self.inside(0), mpirun, *placed, *arguments], {
            "PRTE_MCA_plm_ssh_agent": str(self._agent),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_hwloc_default_binding_policy": "none",  # a host's cores are those that taskset gave it
        }

    def network(self, host: int) -> str:
        """Return the host's network namespace, as the kernel names it, for `processes_in`."""
        return str(Path(f"/proc/{self._holders[host].pid}/ns/net").readlink())

    def set_link(self, host: int, up: bool) -> None:
        """Cut a host's cable, or plug it in again."""
        _run(*_inside(self._switch), "ip", "link", "set", f"port{host}", "up" if up else "down")

    def pids(self, host: int) -> list[int]:
        """Return the processes on this host, except its holder."""
        holder = self._holders[host]
        if holder.poll() is not None:  # it was killed
            return []
        return [pid for pid in processes_in(self.network(host)) if pid != holder.pid]

    def kill(self, host: int) -> None:
        """Kill everything that runs on this host, and the host. Its peers see connections close: for a death without
        a sound, as when power fails, cut its link first."""
        holder = self._holders[host]
        if holder.poll() is not None:
            return
        while pids := self.pids(host):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
        holder.kill()
        holder.communicate()

    # ---- making them ---------------------------------------------------------------------------------------------

    def _connect(self, host: int) -> None:
        """Lay a cable from the host's `eth0` to the switch's `port<host>`, slowed at both ends."""
        switch = _inside(self._switch)
        inside = _inside(self._holders[host].pid)
        port = f"port{host}"
        peer = ["peer", "name", "eth0", "netns", str(self._holders[host].pid)]
        _run(*switch, "ip", "link", "add", port, "type", "veth", *peer)
        _run(*switch, "ip", "link", "set", port, "master", "bridge", "up")
        _run(*inside, "ip", "address", "add", f"{self.addresses[host]}/16", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "addrgenmode", "none", "up")
        if self._shape:
            _run(*switch, "tc", "qdisc", "add", "dev", port, *self._shape)
            _run(*inside, "tc", "qdisc", "add", "dev", "eth0", *self._shape)

    def _write_agent(self) -> None:
        """Write the script that Open MPI calls in place of ssh: `agent ADDRESS COMMAND...`."""
        cases = [
            f'{address}) exec {shlex.join(self.inside(host))} sh -c "$*" ;;'
            for host, address in enumerate(self.addresses)
        ]
        self._agent = Path(self._folder.name) / "agent"
        self._agent.write_text("\n".join(["#!/bin/sh", "host=$1", "shift", 'case "$host" in', *cases, "esac\n"]))
        self._agent.chmod(0o755)


def processes_in(network: str) -> list[int]:
    """Return the processes in a network namespace."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str((entry / "ns/net").readlink()) == network:
                    found.append(int(entry.name))
            except OSError:  # it has ended
                continue
    return found


def why_not() -> str | None:
    """Return the reason why virtual hosts cannot be made here; None if they can."""
    try:
        with VirtualHosts(1, rate="1gbit"):
            return None
    except VirtualHostsError as error:
        return str(error)


def _start_holder(name: str) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", _HOLDER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != "ready\n":
        raise VirtualHostsError(f"Virtual hosts need root: {holder.communicate()[1].strip()}.")
    return holder


def _inside(holder: int) -> list[str]:
    return ["nsenter", "--target", str(holder), "--net", "--uts"]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise VirtualHostsError(f"Virtual hosts: '{shlex.join(command)}' failed: {done.stderr.strip()}.")


def _shape(rate: str | None) -> list[str]:
    """Return tc's arguments for a link of this rate. Raises VirtualHostsError."""
    if rate is None:
        return []
    match = re.fullmatch(r"([1-9]\d*)(kbit|mbit|gbit)", rate)
    if match is None:
        raise VirtualHostsError(f"Rate '{rate}' is not a number with kbit, mbit or gbit, as in 100mbit.")
    bytes_per_s = int(match[1]) * {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}[match[2]] // 8
    burst = max(256 << 10, bytes_per_s // 200)  # what 5 ms carry; more than a segment of TCP offload, or all are cut up
    return ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]


def main() -> None:
    """Run a command on virtual hosts by Open MPI; signals are passed on to it; its exit status is this one's.

    SIGHUP, of a closed terminal, as SIGTERM: mpirun would end by it without a word to its ranks."""
    parser = argparse.ArgumentParser(description="Run an MPI job on virtual hosts of this machine.")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", help="of each host's link, as 100mbit or 1gbit; by default without a limit")
    parser.add_argument("--cores-per-host", type=int, help="by default the machine's cores divided by the hosts")
    parser.add_argument("command", nargs="+", help="after --, as in: -- python -m pala.train pong")
    options = parser.parse_args()
    passed_on = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # not under nohup
        passed_on.append(signal.SIGHUP)
    for number in passed_on:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))  # on the way out the hosts end
    try:
        with VirtualHosts(options.hosts, options.rate, options.cores_per_host) as hosts:
            command, environment = hosts.mpirun(options.command, options.ranks_per_host)
            job, early = None, []  # signals that came before mpirun was there

            def pass_on(number, frame):
                number = signal.SIGTERM if number == signal.SIGHUP else number
                early.append(number) if job is None else job.send_signal(number)

            for number in passed_on:
                signal.signal(number, pass_on)
            # A session of its own: mpirun, which gives up at once when it gets ^C twice, gets it from here alone.
            job = subprocess.Popen(
                command, env=os.environ | environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
            for number in early:
                job.send_signal(number)
            status = job.wait()
    except VirtualHostsError as error:
        print(f"virtual_hosts: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
