"""Several hosts with real TCP between them: virtual hosts of this machine (`launch/virtual_hosts.py`)."""

from __future__ import annotations

import operator
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import virtual_hosts
from pala.run.metrics import read_run
from pala.system.resources import most_cores, share_of_cores
from support import REPOSITORY
from support.helpers import CARTPOLE, record_of, wait_for, write_disturbed, write_paced
from support.mpi import Job, Launcher, assert_all_end, processes_in
from support.run_folders import all_train, intervals, local_steps, longest_gap_s
from virtual_hosts import VirtualHosts, VirtualHostsError

pytestmark = pytest.mark.mpi

SCRIPT = REPOSITORY / "launch" / "virtual_hosts.py"


def start_train(hosts: VirtualHosts, launcher: Launcher, *arguments: str, cwd: Path) -> Job:
    command, environment = hosts.mpirun(
        [str(launcher.folder / "python"), "-m", "pala.train", *CARTPOLE, "--run.name", "r", *arguments],
        mpirun=str(launcher.folder / "mpirun"),
    )
    return launcher.start_command(command, cwd=cwd, env=environment)


@pytest.mark.slow
def test_hosts_of_a_file_gossip_over_tcp(possible: Launcher, tmp_path: Path) -> None:
    with VirtualHosts(2, "100mbit") as hosts:
        networks = [hosts.network(host) for host in range(2)]
        (tmp_path / "hosts.txt").write_text("".join(f"{address} slots=1\n" for address in hosts.addresses))
        command = [*hosts.inside(0), str(possible.folder / "python"), "-m", "pala.supervise", "--hostfile", "hosts.txt"]
        environment = hosts.mpirun([])[1] | write_paced(tmp_path, step_s=0.002)  # eight seconds: both take part
        paced = [*CARTPOLE, "--env.id", "Paced-v0", "--run.name", "r", "--total-steps", "8000"]
        job = possible.start_command([*command, *paced], cwd=tmp_path, env=environment).wait()
        assert job.status == 0, job.output
        assert_all_end(tmp_path)
        assert all(bytes_sent(hosts, host) > 100_000 for host in range(2))
    assert not any(virtual_hosts.processes_in(network) for network in networks)
    assert_gossiped(tmp_path / "runs/r", hosts)


def assert_gossiped(run: Path, hosts: VirtualHosts) -> None:
    """The run is complete, with a rank on each host, which has mixed what others sent."""
    record, ranks = record_of(run), read_run(run)
    assert record["completed"] and len(ranks) == hosts.num_hosts
    segment = record["segments"][0]
    assert segment["hosts"] == hosts.names
    cores = set(hosts.cores[0])
    assert segment["threads_per_rank"] == share_of_cores(cores, [cores], most_cores(cores))
    for records in ranks:
        intervals = [r for r in records if r["type"] == "interval"]
        assert sum(r["models_mixed"] for r in intervals) > 0
        assert sum(r["models_refused"] for r in intervals) == 0


def wait_for_training(job: Job, folder: Path) -> None:
    """Until rank 1 is past its first, slow steps: after SIGTERM, Open MPI's mpirun leaves ranks only 0.2 s."""
    metrics = folder / "runs/r/metrics/rank-0001.jsonl"

    def trains() -> bool:
        return metrics.exists() and metrics.read_text().count('"interval"') > 1

    wait_for(lambda: trains() or job.process.poll() is not None, what="training")
    assert trains(), job.wait().output


def bytes_sent(hosts: VirtualHosts, host: int) -> int:
    table = subprocess.run([*hosts.inside(host), "cat", "/proc/self/net/dev"], capture_output=True, text=True).stdout
    return int(re.search(r"eth0:(.*)", table)[1].split()[8])


@pytest.mark.slow
def test_a_killed_host_leaves_nothing(possible: Launcher, tmp_path: Path) -> None:
    with VirtualHosts(2) as hosts:
        job = start_train(hosts, possible, "--total-steps", "100000000", cwd=tmp_path)
        wait_for_training(job, tmp_path)
        network = hosts.network(1)
        assert len(hosts.pids(1)) >= 2  # Open MPI's daemon and a rank
        hosts.kill(1)
        assert not virtual_hosts.processes_in(network) and hosts.pids(1) == []
        job.wait()  # Open MPI ends the job; its exit status is then 0 all the same
        assert_all_end(tmp_path)
    assert not record_of(tmp_path / "runs/r")["completed"]


@pytest.mark.slow
def test_ranks_outlive_a_link_that_is_cut_for_seconds(possible: Launcher, tmp_path: Path) -> None:
    """Each side trains on, and the two find together again; what both do without knowing of it is overshoot."""
    with VirtualHosts(2) as hosts:
        # At most 250 steps/s a rank until all is seen: five seconds of it without the link, however fast the machine
        # is, and time for TCP to try again.
        options = ["--exchange.patience-s", "1", "--total-steps", "32000"]
        script = write_disturbed(tmp_path, "os.path.exists('free') or time.sleep(0.004)", *options)
        command, environment = hosts.mpirun(
            ["--with-ft", "ulfm", str(possible.folder / "python"), script],
            ranks_per_host=2, mpirun=str(possible.folder / "mpirun"),
        )  # fmt: skip
        job, run = possible.start_command(command, cwd=tmp_path, env=environment), tmp_path / "runs/r"
        wait_for(lambda: all_train(run, 4) or job.process.poll() is not None, what="training")
        assert job.process.poll() is None, job.wait().output
        hosts.set_link(1, up=False)
        sent, steps = [bytes_sent(hosts, 1)], local_steps(run)
        wait_for(lambda: min(map(operator.sub, local_steps(run), steps)) > 1250, what="training on both sides")
        sent.append(bytes_sent(hosts, 1))
        mended_at = [records[-1]["time_s"] for records in read_run(run)]
        hosts.set_link(1, up=True)
        wait_for(lambda: bytes_sent(hosts, 1) > sent[1] + 100_000, what="models over the mended link")
        (tmp_path / "free").touch()
        job.wait()
        assert job.status == 0, job.output
    assert sent[1] - sent[0] < 10_000
    assert record_of(run)["completed"] and "lost_ranks" not in record_of(run)["segments"][0]
    for rank, time_s in enumerate(mended_at):
        print(f"\nthe longest time between two records: {longest_gap_s(run, rank):.2f} s")
        assert sum(r["models_mixed"] for r in intervals(run, rank) if r["time_s"] > time_s + 0.5) > 0


@pytest.mark.slow
def test_shared_memory_between_hosts_is_refused(possible: Launcher, tmp_path: Path) -> None:
    with VirtualHosts(2) as hosts:
        job = start_train(hosts, possible, "--exchange.kind", "shared_memory", cwd=tmp_path).wait()
    assert job.status == 2 and "Traceback" not in job.output
    assert job.output.count("pala: error") == 1 and "they are on vhost0, vhost1. Start all on one" in job.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_links_can_be_cut_and_mended(possible: Launcher) -> None:
    with VirtualHosts(2) as hosts:
        carrier = [*hosts.inside(1), "ip", "-oneline", "link", "show", "eth0"]
        for up in (False, True):
            hosts.set_link(1, up)
            wait_for(lambda up=up: ("NO-CARRIER" in subprocess.check_output(carrier, text=True)) != up, what="the link")


FAKE_MPIRUN = """#!/bin/sh
trap 'echo INT > told; exit 7' INT
trap 'echo TERM > told; exit 7' TERM
trap 'echo USR1 > told; exit 7' USR1
sleep 1000 &
sleep .3
touch begun
while :; do sleep .1; done
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.slow
def test_the_command_passes_signals_on_and_ends_its_hosts(
    number: signal.Signals, possible: Launcher, tmp_path: Path
) -> None:
    """To an mpirun that notes what it is told, and leaves a process behind. `pala compare` stops a job by SIGUSR1."""
    if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored, as under nohup, and stays so")
    told = signal.SIGTERM if number == signal.SIGHUP else number
    (tmp_path / "mpirun").write_text(FAKE_MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    command = [str(possible.folder / "python"), str(SCRIPT), "--hosts", "2", "--", "true"]
    path = f"{tmp_path}:{possible.environment()['PATH']}"
    job = possible.start_command(command, cwd=tmp_path, env={"PATH": path})
    wait_for(lambda: (tmp_path / "begun").exists() or job.process.poll() is not None, what="the fake mpirun")
    job.process.send_signal(number)
    job.wait()
    assert job.status == 7 and (tmp_path / "told").read_text() == f"{told.name[3:]}\n", job.output
    assert_all_end(tmp_path, "all processes")  # what is left of the job, holders


@pytest.mark.slow
def test_a_signal_while_mpirun_is_being_started_reaches_it(possible: Launcher, tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text(FAKE_MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    source = """
import os, signal, subprocess, sys, time
import virtual_hosts
start = subprocess.Popen
def start_and_signal(command, **options):
    job = start(command, **options)
    if any(word.endswith("mpirun") for word in command):
        while not os.path.exists("begun"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
    return job
subprocess.Popen = start_and_signal
sys.argv[1:] = ["--hosts", "2", "--", "true"]
virtual_hosts.main()
"""
    env = {"PATH": f"{tmp_path}:{possible.environment()['PATH']}", "PYTHONPATH": str(SCRIPT.parent)}
    job = possible.start_command([str(possible.folder / "python"), "-c", source], cwd=tmp_path, env=env)
    job.wait()
    assert job.status == 7 and (tmp_path / "told").read_text() == "TERM\n", job.output
    assert_all_end(tmp_path, "all processes")


@pytest.mark.slow
def test_the_end_of_the_process_is_the_end_of_its_hosts(possible: Launcher, tmp_path: Path) -> None:
    """Even when it is killed and can clean nothing up."""
    source = "import sys, time\nfrom virtual_hosts import VirtualHosts\nwith VirtualHosts(2):\n"
    source += "    print('ready', flush=True)\n    time.sleep(60)\n"
    job = subprocess.Popen(
        [sys.executable, "-c", source], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    assert len(processes_in(tmp_path)) == 4  # itself, two hosts, the switch
    job.kill()
    job.communicate()
    assert_all_end(tmp_path, "all holders")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = virtual_hosts.why_not()
    assert reason is not None and "need hostname, ip, nsenter" in reason and "install iproute2" in reason
    done = subprocess.run([sys.executable, SCRIPT, "--", "true"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and reason in done.stderr


@pytest.mark.parametrize(("hosts", "rate"), [(0, None), (2, "fast"), (2, "0mbit")])
def test_impossible_hosts_are_refused(hosts: int, rate: str | None) -> None:
    with pytest.raises(VirtualHostsError):
        VirtualHosts(hosts, rate)
