"""Groups of real ranks: healthy, and with ranks that are killed, stopped and told to leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from support.helpers import CARTPOLE, SLOW_UNTIL_FREE, record_of, wait_for, write_disturbed
from support.mpi import Job, Launcher, assert_all_end, pids_of_ranks, processor_seconds
from support.run_folders import all_train, intervals, local_steps, states_of, total
from support.standing_ranks import StandingRanks
from virtual_hosts import VirtualHosts

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

GROUPS = ["--exchange.group", "2", "--exchange.mixing", "paired"]


def start_slow(launcher: Launcher, ranks: int, *arguments: str, cwd: Path) -> tuple[Job, dict[int, int]]:
    """A job in groups of two that can outlive its ranks, slow until there is a file `free`; and its processes."""
    script = write_disturbed(cwd, SLOW_UNTIL_FREE, *GROUPS, *arguments)
    python = str(launcher.folder / "python")
    job = launcher.start("--with-ft", "ulfm", "-np", str(ranks), python, script, cwd=cwd)
    wait_for(lambda: all_train(cwd / "runs/r", ranks), what="training")
    return job, pids_of_ranks(cwd)


def assert_one_model(run: Path, *ranks: int) -> None:
    """They hold one model, bit by bit, in the checkpoints that all made after the same last update."""
    states = states_of(run, max(ranks) + 1)
    first = states[ranks[0]]
    for rank in ranks[1:]:
        assert states[rank].counters["updates"] == first.counters["updates"]
        for name, tensor in first.tensors.items():
            assert torch.equal(tensor, states[rank].tensors[name]), name


@pytest.mark.parametrize(
    ("each_standing", "group"),
    [("openmpi", "2"), ("openmpi", "host"), ("mpich", "host")],
    indirect=["each_standing"],
)
def test_the_ranks_of_a_group_hold_one_model(each_standing: StandingRanks, group: str, tmp_path: Path) -> None:
    options = ["--exchange.group", group, "--total-steps", "6000", "--run.name", "r"]
    job = each_standing.train(4, *CARTPOLE, *options, cwd=tmp_path)
    run, leaders = tmp_path / "runs/r", [0, 2] if group == "2" else [0]
    assert job.status == 0 and "Traceback" not in job.output, job.output
    words = "2 groups, each with one model: ranks 0 to 1; ranks 2 to 3" if group == "2" else "1 group, each with one"
    assert words in job.output and "WARNING" not in job.output
    segment = record_of(run)["segments"][0]
    assert sum(local_steps(run)) == segment["global_steps"] and 6000 <= segment["global_steps"] < 7000
    assert all((total(run, "mixes", rank) > 0) == (rank in leaders and len(leaders) > 1) for rank in range(4))
    assert_one_model(run, 0, 1)
    assert_one_model(run, 2, 3)
    assert {record["group"] for record in intervals(run, 3)} == {len(leaders) - 1}


@pytest.mark.parametrize("killed", [[0, 1], [0, 3]])
def test_a_group_continues_without_its_dead(killed: Sequence[int], any_mpi: Launcher, tmp_path: Path) -> None:
    """A whole group; the leader of one and a member of the other. Each alone, with threads: `test_group.py`."""
    job, pids = start_slow(any_mpi, 4, "--total-steps", "6000", cwd=tmp_path)
    run, living = tmp_path / "runs/r", [rank for rank in range(4) if rank not in killed]
    for rank in killed:
        os.kill(pids[rank], signal.SIGKILL)
    wait_for(lambda: len(record_of(run)["segments"][0].get("lost_ranks", [])) == len(killed), what="news of the dead")
    before = {rank: total(run, "mixes", rank) for rank in living}
    (tmp_path / "free").touch()
    job.wait()
    assert job.status == 0 and "WARNING" not in job.output, job.output
    segment = record_of(run)["segments"][0]
    assert record_of(run)["completed"] and 6000 <= segment["global_steps"] < 9000
    for group in ([0, 1], [2, 3]):
        if rest := [rank for rank in group if rank in living]:
            assert_one_model(run, *rest)
            if len(living) > len(rest):  # there is another group
                assert total(run, "mixes", rest[0]) > before[rest[0]]
    assert_all_end(tmp_path)


def test_a_leader_leaves_and_a_stopped_member_stops_its_group_alone(any_mpi: Launcher, tmp_path: Path) -> None:
    job, pids = start_slow(any_mpi, 4, "--total-steps", "100000000", cwd=tmp_path)
    run = tmp_path / "runs/r"
    os.kill(pids[0], signal.SIGUSR2)
    wait_for(lambda: "left_ranks" in record_of(run)["segments"][0], what="the news that rank 0 has left")
    (tmp_path / "free").touch()
    os.kill(pids[3], signal.SIGSTOP)
    time.sleep(1.0)
    made, used_s = local_steps(run), processor_seconds(pids[2])
    wait_for(lambda: local_steps(run)[1] - made[1] > 2000, what="the other group's steps")
    assert local_steps(run)[2] - made[2] <= 200
    assert processor_seconds(pids[2]) - used_s < 1.0 + 0.2 * 60  # asleep: it looks 2,000 times a second at most
    os.kill(pids[3], signal.SIGCONT)
    wait_for(lambda: local_steps(run)[2] - made[2] > 1000, what="steps of the group that was stopped")
    for rank in (1, 2, 3):
        os.kill(pids[rank], signal.SIGUSR1)
    job.wait()
    assert record_of(run)["segments"][0]["status"] == "stopped" and "Traceback" not in job.output, job.output
    assert_one_model(run, 2, 3)
    assert_all_end(tmp_path)


def test_groups_of_two_hosts_outlive_a_cut_link_and_a_killed_member(possible: Launcher, tmp_path: Path) -> None:
    """Each group is a host. While the link is cut both continue; after that a rank of one dies, its leader."""
    script = write_disturbed(tmp_path, SLOW_UNTIL_FREE, "--exchange.group", "host", "--total-steps", "40000")
    run = tmp_path / "runs/r"

    def wait_for_steps(*ranks: int) -> None:
        made = local_steps(run)
        wait_for(lambda: min(local_steps(run)[rank] - made[rank] for rank in ranks) > 500, what=f"steps of {ranks}")

    with VirtualHosts(2) as hosts:
        command, environment = hosts.mpirun(
            ["--with-ft", "ulfm", str(possible.folder / "python"), script],
            ranks_per_host=2, mpirun=str(possible.folder / "mpirun"),
        )  # fmt: skip
        job = possible.start_command(command, cwd=tmp_path, env=environment)
        wait_for(lambda: all_train(run, 4), what="training")
        pids = pids_of_ranks(tmp_path)
        hosts.set_link(1, up=False)
        wait_for_steps(0, 1, 2, 3)
        mixes = total(run, "mixes", 0)
        hosts.set_link(1, up=True)
        wait_for(lambda: total(run, "mixes", 0) > mixes, what="models over the link")
        os.kill(pids[2], signal.SIGKILL)
        wait_for_steps(0, 1, 3)
        (tmp_path / "free").touch()
        job.wait()
    segment = record_of(run)["segments"][0]
    assert job.status == 0 and record_of(run)["completed"], job.output
    assert [entry["rank"] for entry in segment["lost_ranks"]] == [2]
    assert_one_model(run, 0, 1)
    assert min(total(run, "mixes", rank) for rank in (0, 2, 3)) > 0  # rank 3 led after rank 2
