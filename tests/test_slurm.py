"""The batch scripts as they are shipped, and srun, on a real Slurm of one node and of two (`slurm_cluster.py`)."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pala.comm.mpi_process import check_slurm_tasks
from support import REPOSITORY
from support.helpers import CARTPOLE, record_of, wait_for, write_paced
from support.mpi import LAUNCHERS, Launcher
from support.slurm_cluster import Node, Slurm, SlurmError, SlurmStartError
from virtual_hosts import VirtualHosts, VirtualHostsError

pytestmark = [pytest.mark.mpi, pytest.mark.xdist_group("slurm")]  # one cluster for all of them
OFTEN = ["--run.checkpoint-interval-s", "0.5"]
_LOOK_S = 0.6  # each look is a process


@contextmanager
def started(num_nodes: int) -> Iterator[Slurm]:
    """One node is this machine; several are virtual hosts of it. Skips, with the reason, where that cannot be."""
    with ExitStack() as stack:
        try:
            if num_nodes == 1:
                nodes = [Node(platform.node().split(".")[0], "127.0.0.1")]
            else:
                hosts = stack.enter_context(VirtualHosts(num_nodes))
                nodes = [Node(hosts.names[i], hosts.addresses[i], hosts.inside(i)) for i in range(num_nodes)]
            cluster = stack.enter_context(Slurm(nodes))
        except (SlurmError, VirtualHostsError) as error:
            assert not isinstance(error, SlurmStartError), error  # it is installed, and would be skipped forever
            pytest.skip(str(error))
        yield cluster


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with started(1) as cluster:
        yield cluster


class Submitted:
    """A batch script of launch/slurm, as it is, with options of sbatch and of pala.train."""

    def __init__(
        self, slurm: Slurm, script: str, *train: str, options: list[str], folder: Path, step_s: float = 0.001
    ) -> None:
        self.slurm, self.runs, self._logs = slurm, folder / "runs", folder
        environment = {k: v for k, v in LAUNCHERS[0].environment().items() if not k.startswith(("OMPI_", "PRTE_"))}
        environment |= write_paced(folder, step_s)  # no job ends before it is told to
        environment["PALA_SHORTEST_TURN_S"] = "0"
        said = slurm.run(
            "sbatch", *options, f"--output={folder}/%j.log", f"launch/slurm/{script}.sbatch", *train, *CARTPOLE,
            "--env.id", "Paced-v0", "--run.dir", str(self.runs), cwd=REPOSITORY, env=environment,
        ).output  # fmt: skip
        assert "Submitted batch job" in said, said
        self.id = said.split()[-1]

    def log(self) -> str:
        return "\n".join(file.read_text(errors="replace") for file in sorted(self._logs.glob("*.log")))

    def has_ended(self) -> bool:
        return not {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"} & set(self.slurm.states(self.id))

    def wait(self) -> None:
        wait_for(self.has_ended, 420, "the end of the job", _LOOK_S)

    def wait_for_checkpoints(self, run: str, segment: int = 0) -> None:
        """Until the ranks have saved while they trained."""
        later = self.runs / run / f"checkpoints/segment-{segment:03d}/rank-0000.previous.safetensors"
        wait_for(lambda: later.exists() or self.has_ended(), 420, "a second checkpoint", _LOOK_S)
        assert not self.has_ended(), self.log()


@pytest.mark.slow
def test_one_node(slurm: Slurm, any_mpi: Launcher, tmp_path: Path) -> None:
    train = ["pong", "--run.name", "r", "--total-steps", "1000"]
    job = Submitted(slurm, "one_node", *train, options=["--ntasks=2"], folder=tmp_path)
    job.wait()
    assert slurm.states(job.id) == ["COMPLETED"], job.log()
    record = record_of(job.runs / "r")
    assert record["completed"] and record["segments"][0]["ranks"] == 2
    assert "Slurm has allocated" not in job.log()


@pytest.mark.slow
def test_a_preemptible_job_goes_on_to_the_end(slurm: Slurm, any_mpi: Launcher, tmp_path: Path) -> None:
    """Told to end and requeued by hand; then as if its time were over; then preempted by a job that needs all cores."""
    train = ["pong", *OFTEN, "--total-steps", "8000"]  # 40 s of training, but for the last job
    job = Submitted(slurm, "preemptible", *train, options=["--ntasks=2"], folder=tmp_path, step_s=0.01)
    run = f"slurm-{job.id}"
    job.wait_for_checkpoints(run)
    assert slurm.run("scancel", "--signal=TERM", "--batch", job.id).status == 0
    job.wait()
    assert slurm.states(job.id) == ["FAILED"], job.log()
    assert slurm.run("scontrol", "requeue", job.id).status == 0
    job.wait_for_checkpoints(run, segment=1)
    assert slurm.run("scancel", "--signal=USR1", "--batch", job.id).status == 0
    job.wait_for_checkpoints(run, segment=2)
    urgent = ["--partition=high", "--ntasks=4", "--output=/dev/null", "--wrap=true"]
    assert slurm.run("sbatch", *urgent).status == 0
    wait_for(lambda: record_of(job.runs / run)["segments"][2]["status"] == "stopped", 420, "the preemption", _LOOK_S)
    (tmp_path / "free").touch()
    job.wait()
    assert slurm.states(job.id) == ["COMPLETED"], job.log()
    record = record_of(job.runs / run)
    assert record["completed"] and job.log().count("checkpoint written to") == 3
    assert [s["status"] for s in record["segments"]] == ["stopped", "stopped", "stopped", "completed"]
    assert [s["resumed"] for s in record["segments"]] == [False, True, True, True]


@pytest.mark.slow
def test_an_array_is_a_run_for_each_game_and_seed(slurm: Slurm, any_mpi: Launcher, tmp_path: Path) -> None:
    options = ["--array=0,7", "--ntasks=1"]
    job = Submitted(slurm, "array", "--total-steps", "200", options=options, folder=tmp_path)
    job.wait()
    assert slurm.states(job.id) == ["COMPLETED"] * 2, job.log()
    seeds = {run.name: record_of(run)["config"]["seed"] for run in job.runs.iterdir()}
    assert seeds == {f"beam_rider-seed-1-{job.id}": 1, f"breakout-seed-2-{job.id}": 2}


@pytest.mark.slow
def test_a_comparison_is_a_job_for_each_run_and_one_that_reports(
    slurm: Slurm, any_mpi: Launcher, tmp_path: Path
) -> None:
    """The second submission comes while the jobs of the first wait or run."""
    (tmp_path / "game.toml").write_text('total_steps = 400\nenv = {id = "CartPole-v1", num_envs = 4}\n')
    (tmp_path / "tiny.toml").write_text(f"""
name = "tiny"
seeds = [1]
ranks = [1]
slurm.options = ["--hold"]
games.Pole = "{tmp_path}/game.toml"
train = {{run = {{dir = "{tmp_path}/runs", tensorboard = false}}, evaluation = {{episodes = 1}}}}
[variants.gossip]
""")
    for _ in range(2):
        said = slurm.run(
            "sbatch", "--parsable", f"--output={tmp_path}/%j.log", "launch/slurm/scaling.sbatch",
            f"{tmp_path}/tiny.toml", "--output", f"{tmp_path}/results", cwd=REPOSITORY,
        )  # fmt: skip
        wait_for(lambda job=said.output: slurm.states(job) == ["COMPLETED"], what="the submission")
        names = ["pala-tiny-gossip-Pole-1-1", "pala-tiny-report"]  # the controller may be away for a moment
        wait_for(
            lambda: sorted(slurm.run("squeue", "--noheader", "--format=%j").output.split()) == names,  # noqa: B023
            what="the queue",
        )
    slurm.run("scontrol", "release", "JobName=pala-tiny-gossip-Pole-1-1")
    wait_for(lambda: not slurm.run("squeue", "--noheader").output, 420, "the end of the jobs")
    log = (tmp_path / "runs/tiny/report.log").read_text()
    assert "FAILED" not in log and f"{tmp_path}/results/compare.md" in log
    assert record_of(tmp_path / "runs/tiny/gossip-Pole-1-1")["completed"]


@pytest.mark.slow
def test_several_nodes(any_mpi: Launcher, tmp_path: Path) -> None:
    """scancel reaches every process on every node, Open MPI's own too; the ranks have the time for their checkpoint."""
    with started(2) as slurm:
        options, endless = ["--ntasks-per-node=1"], ["--run.name", "r", "--total-steps", "100000000", *OFTEN]
        job = Submitted(slurm, "several_nodes", "pong", *endless, options=options, folder=tmp_path)
        job.wait_for_checkpoints("r")
        assert slurm.run("scancel", job.id).status == 0
        job.wait()
        assert "checkpoint written to" in job.log(), job.log()
        go_on = ["--resume", str(job.runs / "r"), "--total-steps", "1000"]  # those are done already
        job = Submitted(slurm, "several_nodes", *go_on, options=options, folder=tmp_path)
        job.wait()
        assert slurm.states(job.id) == ["COMPLETED"], job.log()
        assert "Slurm has allocated" not in job.log()
        segments = record_of(job.runs / "r")["segments"]
        assert [segment["status"] for segment in segments] == ["stopped", "completed"]
        assert [segment["hosts"] for segment in segments] == [["vhost0", "vhost1"]] * 2
        assert_goes_on_over_nodes(slurm, tmp_path)


def assert_goes_on_over_nodes(slurm: Slurm, folder: Path) -> None:
    """A preemptible job of several nodes, as if its time were over, and then cancelled."""
    options = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    train = ["pong", "--total-steps", "100000000", *OFTEN]
    job = Submitted(slurm, "preemptible", *train, options=options, folder=folder)
    run = f"slurm-{job.id}"
    job.wait_for_checkpoints(run)
    assert slurm.run("scancel", "--signal=USR1", "--batch", job.id).status == 0
    job.wait_for_checkpoints(run, segment=1)
    assert slurm.run("scancel", job.id).status == 0
    job.wait()
    segments = record_of(job.runs / run)["segments"]
    assert [(segment["status"], segment["resumed"]) for segment in segments] == [("stopped", False), ("stopped", True)]
    assert [segment["hosts"] for segment in segments] == [["vhost0", "vhost1"]] * 2


@pytest.mark.slow
def test_tasks_of_srun_that_mpi_does_not_join_are_a_mistake(slurm: Slurm, any_mpi: Launcher, tmp_path: Path) -> None:
    train = [str(any_mpi.folder / "python"), "-m", "pala.train", *CARTPOLE, "--total-steps", "500"]
    said = slurm.run("srun", "--mpi=none", "--ntasks=2", *train, cwd=tmp_path, env=any_mpi.environment())
    assert said.status == 2 and said.output.count("srun started 2 tasks, but to MPI each is alone") == 1, said.output
    assert "Traceback" not in said.output and not (tmp_path / "runs").exists()
    mpirun = [str(any_mpi.folder / "mpirun"), "-np", "1"]
    said = slurm.run("salloc", "--ntasks=2", *mpirun, *train, cwd=tmp_path, env=any_mpi.environment())
    assert said.status == 0 and "completed" in said.output, said.output
    assert said.output.count("Slurm has allocated 2 tasks, but this job has 1 rank") == 1


@pytest.mark.slow
def test_srun_starts_mpichs_ranks(slurm: Slurm, tmp_path: Path) -> None:
    mpich = next((launcher for launcher in LAUNCHERS if launcher.name == "mpich"), None)
    if mpich is None:
        pytest.skip("mpich is not installed: ./launch/test.sh installs it")
    train = [str(mpich.folder / "python"), "-m", "pala.train", *CARTPOLE, "--total-steps", "500", "--run.name", "r"]
    said = slurm.run(
        "srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "--ntasks=2", *train, cwd=tmp_path, env=mpich.environment()
    )
    assert said.status == 0, said.output
    record = record_of(tmp_path / "runs/r")
    assert record["completed"] and record["segments"][0]["ranks"] == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_one_task_says_that_srun_and_mpi_disagree(any_mpi: Launcher, rank: int, tmp_path: Path) -> None:
    """Without Slurm: with what a task of srun finds in its environment, and above it."""
    task = {"SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2"}
    (tmp_path / "slurmstepd").write_text('#!/bin/sh\n"$@"\nexit $?\n')
    (tmp_path / "slurmstepd").chmod(0o755)
    train = [str(any_mpi.folder / "python"), "-m", "pala.train", *CARTPOLE]
    job = any_mpi.start_command([str(tmp_path / "slurmstepd"), *train], cwd=tmp_path, env=task).wait()
    assert job.status == 2 and job.output.count("srun started 2 tasks") == 1 - rank, job.output
    assert "Traceback" not in job.output


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"SLURM_NTASKS": "4"}, "Slurm has allocated 4 tasks, but this job has 2 ranks; `mpirun -np`"),
        ({"SLURM_NTASKS": "1"}, "Slurm has allocated 1 tasks, but this job has 2 ranks"),
        ({"SLURM_NTASKS": "2"}, ""),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, ""),  # mpirun's daemon on a node, started by srun
        ({}, ""),
    ],
)
def test_another_number_of_ranks_than_tasks_is_told(
    slurm: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    check_slurm_tasks(2, spares=0)
    output = "".join(capsys.readouterr())
    assert said in output and bool(said) == bool(output)


def test_spares_may_be_tasks_or_come_to_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    for size in (4, 5, 6):
        check_slurm_tasks(size, spares=1)
    assert "".join(capsys.readouterr()).count("Slurm has allocated 4 tasks, but this job has 6 ranks") == 1


def test_every_script_is_bash_and_says_how_it_is_submitted() -> None:
    scripts = list((REPOSITORY / "launch/slurm").glob("*.sbatch"))
    assert len(scripts) == 6
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
        assert re.search(rf"sbatch( \S+)* {script.relative_to(REPOSITORY)}", script.read_text())
