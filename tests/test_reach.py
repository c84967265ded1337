"""The start of a job: hosts that do not reach each other, who is waited for, and a launcher that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pala.comm.reach import Told, peers_of, shared_address
from pala.system.text import named
from support.helpers import CARTPOLE
from support.mpi import Launcher, assert_all_end
from support.standing_ranks import StandingRanks
from virtual_hosts import VirtualHosts


def test_an_address_that_two_hosts_have_is_named_with_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = {"eth0": "10.0.0.1", "docker0": "172.17.0.1"}, {"eth0": "10.0.0.2", "docker0": "172.17.0.1"}
    told = [Told("a", a), Told("b", b)]
    message = shared_address(told)
    assert "hosts a and b both have the address 172.17.0.1 (docker0)" in message
    assert "OMPI_MCA_btl_tcp_if_exclude=lo,docker0" in message
    with monkeypatch.context() as patch:
        patch.setenv("OMPI_MCA_btl_tcp_if_include", "eth0")
        assert shared_address(told) == ""
    b["docker0"] = "172.18.0.1"
    assert shared_address(told) == ""


def test_all_networks_that_hosts_share_are_left_out() -> None:
    networks = {"docker0": "172.17.0.1", "virbr0": "192.168.122.1"}
    message = shared_address([Told("a", networks), Told("b", networks), None, Told("c", {"eth0": "10.0.0.3"})])
    assert "and 1 more" in message and "lo,docker0,virbr0" in message


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 40, 1000])
def test_whoever_tries_a_host_is_tried_by_it(size: int) -> None:
    ranks = [3 * place for place in range(size)]
    peers = {rank: peers_of(place, ranks) for place, rank in enumerate(ranks)}
    for rank, others in peers.items():
        assert rank not in others and len(others) <= 16
        assert all(rank in peers[other] for other in others)
    if size <= 17:
        assert all(len(others) == size - 1 for others in peers.values())


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([3, 5], "ranks 3, 5"),
        (range(10), "ranks 0 to 9"),
        (range(0, 20, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2 more"),
    ],
)
def test_of_many_ranks_that_are_waited_for_some_are_named(ranks: Sequence[int], words: str) -> None:
    assert named(ranks) == words


SLOW_RANKS = """
import time
import pala.system.waiting as waiting
from pala.comm.mpi_process import start_mpi
comm = start_mpi()
comm.barrier()  # not all come up at once
waiting.TELL_S, waiting.SAY_S = 0.2, 2.0
for slow in (2, 0):
    if comm.rank == slow:
        time.sleep(3.0)
    comm.barrier()
"""


@pytest.mark.mpi
def test_who_waits_for_long_says_for_whom(mpi: Launcher, tmp_path: Path) -> None:
    job = mpi.script(4, SLOW_RANKS, tmp_path)
    assert job.status == 0, job.output
    said = [re.sub(r"\d+ s", "some s", line) for line in job.output.splitlines() if "has waited" in line]
    assert said == ["[rank 0] has waited some s for rank 2.", "[rank 1] has waited some s for rank 0."]


LATE = """
import time
import pala.comm.reach as reach
from pala.comm.mpi_process import start_mpi
comm = start_mpi()
comm.barrier()
reach._ASK_S, reach._LIMIT_S = 0.2, 0.5
time.sleep(2.0 * comm.rank)
reach.check_reach(comm)
"""


@pytest.mark.mpi
def test_a_rank_that_comes_late_is_not_taken_for_out_of_reach(any_mpi: Launcher, tmp_path: Path) -> None:
    job = any_mpi.script(2, LATE, tmp_path)
    assert job.status == 0 and "[rank 0] has waited 1 s for rank 1." in job.output, job.output


def count_on(comm: Any) -> tuple[int, int]:
    """The number of barriers before and after the communicator is taken into use again."""
    comm.barrier()
    before = comm._roll_call._number
    again = type(comm)(comm.mpi)
    again.barrier()
    return before, again._roll_call._number


@pytest.mark.mpi
def test_the_next_training_of_a_process_counts_its_waits_on(standing: StandingRanks, tmp_path: Path) -> None:
    """What a rank told late in the first was taken for a wait in the second, and nobody was named."""
    for before, after in standing.run(2, count_on, cwd=tmp_path).values:
        assert after == before + 1 > 1


def speaks_after_a_death(comm: Any) -> bool:
    """Whether this rank names who is missing, if rank 0 has told that it waits, and has died since."""
    call = type(comm._roll_call)(comm.mpi)
    wait = call.wait(dead={0})
    call._reached[0] = call._number
    return wait.is_first()


@pytest.mark.mpi
def test_who_has_died_since_it_waited_is_no_longer_the_first(standing: StandingRanks, tmp_path: Path) -> None:
    assert standing.run(3, speaks_after_a_death, cwd=tmp_path).values[1]


INHERITED = """
import os, subprocess, sys
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    print(subprocess.run([sys.executable, "-m", *sys.argv[1:]], capture_output=True, text=True, timeout=60))
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mpi", "module"),
    [("openmpi", "pala.train"), pytest.param("mpich", "pala.doctor", marks=pytest.mark.slow)],
    indirect=["mpi"],
)
@pytest.mark.slow
def test_a_program_that_a_rank_starts_is_refused(mpi: Launcher, module: str, tmp_path: Path) -> None:
    """With the rank's variables it waited forever."""
    job = mpi.script(2, INHERITED, tmp_path, module)
    assert job.status == 0 and "a rank of an MPI job (process " in job.output, job.output
    assert f"returncode={1 if module == 'pala.doctor' else 2}" in job.output


LEFT_OVER = {
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    "PMI": {"PMI_RANK": "1", "PMI_SIZE": "2"},
    "Slurm": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    "MPICH": {"PMI_FD": "999", "PMI_RANK": "1", "PMI_SIZE": "2"},
    "a rank alone": {"OMPI_COMM_WORLD_RANK": "1"},
    "PMIx": {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "PMIX_SERVER_URI4": "prterun@0.0;tcp4://127.0.0.1:1"},
}


@pytest.mark.parametrize("launcher", LEFT_OVER)
@pytest.mark.slow
def test_variables_of_a_launcher_that_is_gone_are_named(launcher: str, tmp_path: Path) -> None:
    """Rank 1 of them ended without a word."""
    variables = LEFT_OVER[launcher]
    command = [sys.executable, "-m", "pala.train", *CARTPOLE]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"`unset {' '.join(sorted(variables))}`" in done.stderr


@pytest.mark.slow
def test_the_doctor_names_what_a_launcher_has_left(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pala.doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | LEFT_OVER["PMI"], capture_output=True, text=True)
    assert done.returncode == 1 and "Remove them: `unset PMI_RANK" in " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("module", ["pala.train", "pala.doctor"])
def test_an_address_that_two_hosts_share_ends_the_job_with_its_name(
    module: str, possible: Launcher, tmp_path: Path
) -> None:
    """As docker0's, which is the same on every host; before, both programs hung."""
    with VirtualHosts(2) as hosts:
        for host in range(2):
            for words in ("link add docker0 up type bridge", "addr add 172.17.0.1/16 dev docker0"):
                subprocess.run([*hosts.inside(host), "ip", *words.split()], check=True)
        options = CARTPOLE if module == "pala.train" else []
        program = [str(possible.folder / "python"), "-m", module, *options]
        command, environment = hosts.mpirun(program, mpirun=str(possible.folder / "mpirun"))
        job = possible.start_command(command, cwd=tmp_path, env=environment).wait()
        assert job.status == 2, job.output
        assert job.output.count("pala: error") == 1 and "172.17.0.1 (docker0)" in job.output
        assert_all_end(tmp_path)
