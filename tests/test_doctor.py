"""The doctor: advice from planted facts, the order of the pings, limits, and real jobs, sound and mixed."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import virtual_hosts
from pala.doctor import facts
from pala.doctor.__main__ import _with_runs
from pala.doctor.checks import Advice, Findings, examine
from pala.doctor.facts import Host, Job, PairPing, Rank
from pala.doctor.ping import pairs_of
from pala.doctor.report import report
from support.mpi import LAUNCHERS, Launcher, assert_all_end, fake_mpirun, processes_in
from virtual_hosts import VirtualHosts

OPEN_MPI, MPICH = "Open MPI 5.0.11", "MPICH 5.0.2"
GIB = 2**30


# ---- advice ----------------------------------------------------------------------------------------------------------


def host(name: str = "a", **changes) -> Host:
    sound = Host(
        name, "/env/bin/python", {"torch": "2.13.0"}, cores=[0, 1, 2, 3], most_cores=math.inf, memory_bytes=8 * GIB,
        shm_bytes=GIB, nvidia_driver=False, bfloat16=True, sees_runs=True,
    )  # fmt: skip
    return replace(sound, **changes)


def ranks(*of_host: str, cores: tuple[int, ...] = (0, 1, 2, 3)) -> list[Rank]:
    return [Rank(number, name, list(cores), threads=2, library=OPEN_MPI) for number, name in enumerate(of_host)]


def job(**changes) -> Job:
    """Two ranks on one host of four cores: nothing is wrong with it."""
    launcher = facts.Launcher("Open MPI", "/env/bin/mpirun", processes=2)
    return replace(Job(launcher, [host()], ranks("a", "a"), OPEN_MPI, "3.1"), **changes)


def by_hand(**changes) -> Job:
    """`python -m pala.doctor`."""
    launcher = facts.Launcher(command="/env/bin/mpirun")
    return replace(job(launcher=launcher, ranks=ranks("a"), trial=""), **changes)


def started_by(name: str) -> facts.Launcher:
    return facts.Launcher(name, "/other/mpirun", processes=2)


def pings(**slow: float) -> list[PairPing]:
    """A job of four ranks at 1,000 MB/s, but for pairs such as r03=10."""
    rates = {pair: slow.get(f"r{pair[0]}{pair[1]}", 1000.0) for pair in itertools.combinations(range(4), 2)}
    return [PairPing(pair, 10.0, rate) for pair, rate in rates.items()]


TWO_HOSTS = {"hosts": [host("a"), host("b")], "ranks": ranks("a", "a", "b", "b")}
PROBLEMS = {
    "fails": (by_hand(trial="It said: no."), "A job of two ranks does not start. It said: no.", True),
    "no MPI": (job(library="", mpi_fault="MPI cannot be loaded."), "MPI cannot be loaded.", True),
    "no MPI, by hand": (by_hand(library="", mpi_fault="No MPI.", trial="It said: no."), "No MPI.", True),
    "no mpirun": (by_hand(launcher=facts.Launcher()), "There is no mpirun, so no more", True),
    "no mpirun, Slurm": (by_hand(launcher=facts.Launcher(), slurm={"SLURM_JOB_ID": "7"}), "There is no mpirun", False),
    "python": (by_hand(in_path={"python": "/bin/python"}), "`python` in PATH is /bin/python, not that of", False),
    "oversubscribed": (job(ranks=ranks(*"aaaaa")), "Ranks outnumber cores (5 ranks, 4 cores on a)", False),
    "one core": (job(ranks=ranks("a", "a", cores=(0,))), "bound to the same cores (2 ranks, 1 core on a)", False),
    "idle": (job(ranks=ranks("a", "a", cores=(0, 1))), "leave 2 cores idle (2 ranks, 2 cores on a)", False),
    "quota": (job(hosts=[host(most_cores=1.5)]), "on a may use 1.5 cores' worth of time", False),
    "memory": (job(hosts=[host(memory_bytes=600 << 20)]), "600 MiB of memory are available on a", False),
    "memory, with GPUs": (
        job(hosts=[host(memory_bytes=3 * GIB, gpus=["H100"] * 2, nvidia_driver=True)]), "Pong take 3,624 MiB", False
    ),
    "shm": (job(hosts=[host(shm_bytes=9 << 20)]), "9 MiB are free in /dev/shm on a; Open MPI 5.0.11 wants 16", False),
    "shm, MPICH": (
        job(hosts=[host(shm_bytes=9 << 20)], library=MPICH, launcher=started_by("MPICH")), "MPICH 5.0.2 wants 12", True
    ),
    "torch differs": (
        job(**TWO_HOSTS | {"hosts": [host("a"), host("b", versions={"torch": "2.4.0"})]}),
        "Hosts differ in torch: 2.13.0 on a, 2.4.0 on b", False,
    ),
    "cores differ": (
        job(hosts=[host("a"), host("b", cores=[4, 5])], ranks=[*ranks("a"), replace(ranks("b")[0], cores=[4, 5])]),
        "Hosts differ in cores: 4 on a, 2 on b", False,
    ),
    "libraries differ": (
        job(ranks=[ranks("a")[0], replace(ranks("a", "a")[1], library="Open MPI 5.0.3")]),
        "Ranks load different MPI libraries: Open MPI 5.0.11 on rank 0, Open MPI 5.0.3 on rank 1", False,
    ),
    "not shared": (
        job(**TWO_HOSTS | {"hosts": [host("a"), host("b", sees_runs=False)]}), "'runs' on a is not seen by b", True
    ),
    "not writable": (job(hosts=[host(sees_runs=False)]), "Nothing can be written where 'runs' is", True),
    "ROMs": (job(hosts=[host(atari_fault="no ROM.")]), "Pong does not start on a: no ROM. Reinstall ale-py", True),
    "CPU build": (job(hosts=[host(nvidia_driver=True)]), "torch, built without CUDA, sees no GPU", False),
    "GPUs": (job(hosts=[host(gpus=["H100"])]), "2 ranks share 1 GPU on a", False),
    "slow link": (
        job(**TWO_HOSTS, pings=pings(r02=12, r03=12, r12=12, r13=12)),
        "A model takes 0.29 s between rank 0 on a and rank 2 on b", False,
    ),
    "bad link": (
        job(**TWO_HOSTS, pings=pings(r03=100)),
        "The link between rank 0 on a and rank 3 on b has 100 MB/s where the median between hosts is 1,000", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("problem", "sentence", "stops"), PROBLEMS.values(), ids=PROBLEMS)
def test_each_problem_gets_its_advice_and_no_other(problem: Job, sentence: str, stops: bool) -> None:
    findings = examine(problem)
    (advice,) = findings.advice
    assert sentence in advice.text
    assert advice.stops == stops
    text = report(problem, findings)
    assert ("  STOP  " in text) == stops and max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    "sound",
    [
        job(),
        by_hand(),
        job(**TWO_HOSTS, pings=pings()),
        job(**TWO_HOSTS, pings=pings(r01=5000, r23=5000)),  # within hosts it is always faster
        job(launcher=started_by("MPICH"), library="Intel MPI 2021.9", local_ranks=2),
        job(launcher=started_by("Slurm"), slurm={"SLURM_NTASKS": "2"}),
        job(launcher=started_by("")),
        by_hand(hosts=[host(shm_bytes=0)]),  # one rank needs none
        job(hosts=[host(most_cores=4.0)]),
        job(hosts=[host(most_cores=2.0)], ranks=[replace(rank, threads=1) for rank in ranks("a", "a", cores=(0, 1))]),
        job(hosts=[host(gpus=["H100", "H100"], nvidia_driver=True)]),
        job(hosts=[host(nvidia_driver=True, bfloat16=None)]),  # torch was not asked
        job(  # each rank sees a GPU of its own
            hosts=[host(gpus=["H100"])],
            ranks=[replace(rank, visible_gpus=str(rank.rank)) for rank in ranks("a", "a")],
        ),
    ],
)
def test_where_nothing_is_wrong_nothing_is_said(sound: Job) -> None:
    findings = examine(sound)
    assert findings.advice == []
    assert "None: nothing stands in the way of training." in report(sound, findings)


def test_what_many_hosts_have_in_common_is_said_once() -> None:
    crowded = job(hosts=[host(name) for name in "abcdef"], ranks=ranks(*"abcdef" * 5))
    (advice,) = examine(crowded).advice
    assert "(5 ranks, 4 cores on a, b, c, d and 2 more)" in advice.text


def test_what_stops_training_comes_first() -> None:
    troubled = by_hand(in_path={"python": "missing", "mpirun": "missing"}, hosts=[host(sees_runs=False)])
    assert [advice.stops for advice in examine(troubled).advice] == [True, False, False]


# ---- the report ------------------------------------------------------------------------------------------------------


def rows_of(problem: Job, name: str) -> list[str]:
    return [row.text for row in examine(problem).rows if row.name == name]


@pytest.mark.parametrize(
    ("launched", "expected"),
    [
        (job(), "Open MPI, /env/bin/mpirun (started 2)"),
        (job(launcher=facts.Launcher(processes=2)), "unknown (started 2)"),
        (by_hand(), "/env/bin/mpirun (this job was started without it)"),
        (by_hand(launcher=facts.Launcher()), "no mpirun"),
    ],
)
def test_the_launcher_is_shown(launched: Job, expected: str) -> None:
    (text,) = rows_of(launched, "launcher")
    assert text == expected


def test_a_host_is_shown_as_a_line_of_columns() -> None:
    bound = job(hosts=[host(most_cores=2.0, gpus=["H100", "H100"])], ranks=ranks("a", "a", cores=(0, 1)))
    (cells,) = examine(bound).hosts
    assert {cell.name: cell.text for cell in cells} == {
        "host": "a", "ranks": "2", "cores": "4 (2 to use)", "threads": "2 a rank", "binding": "one set for all",
        "memory": "8.0 GiB", "/dev/shm": "1,024 MiB", "GPUs": "2 x H100", "bfloat16": "yes", "Atari": "Pong starts",
    }  # fmt: skip


def test_the_slowest_pairs_are_shown() -> None:
    few = job(**TWO_HOSTS, pings=pings(r03=7))
    (summary,) = rows_of(few, "ping")
    assert summary.startswith("6 of 6 pairs; median 10.0 µs for 8 bytes, 1,000.0 MB/s for 3.3 MiB")
    shown = rows_of(few, "")
    assert shown[0] == "rank 0 on a and rank 3 on b: 10.0 µs, 7.0 MB/s" and len(shown) == 6
    assert shown[0] in report(few, examine(few))
    pairs = [PairPing(pair, 1.0, 10.0 + sum(pair)) for pair in itertools.combinations(range(9), 2)]
    many = job(ranks=ranks(*"a" * 9), pings=[*pairs[:-1], replace(pairs[-1], round_trip_us=16_000.0)])
    assert "36 of 36 pairs" in rows_of(many, "ping")[0]
    shown = rows_of(many, "")
    assert len(shown) == 6 and shown[0] == "rank 0 on a and rank 1 on a: 1.0 µs, 11.0 MB/s"
    assert "rank 7 on a and rank 8 on a: 16,000.0 µs, 25.0 MB/s" in shown  # the longest round trip


def test_long_names_are_folded() -> None:
    long = host(
        "node-" + 40 * "x", gpus=["NVIDIA H100 80GB HBM3"] * 8, versions={f"package{i}": "1.2.3" for i in range(30)}
    )
    folded = job(hosts=[long], ranks=ranks(long.name, long.name))
    findings = examine(folded)
    advice = [Advice("word " * 60), Advice("a\n    b", stops=True)]
    text = report(folded, Findings(findings.rows, findings.hosts, advice))
    assert max(map(len, text.splitlines())) <= 120
    assert "  -     word word" in text and "\n        word" in text
    assert text.endswith("  STOP  a\n            b")


# ---- the pings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 12))
def test_few_ranks_ping_in_all_pairs(size: int) -> None:
    assert pairs_of(size) == [*itertools.combinations(range(size), 2)]


@pytest.mark.parametrize(("size", "pairs"), [(16, 56), (20, 50), (100, 50), (1000, 500)])
def test_of_many_ranks_some_distances_are_left_out(size: int, pairs: int) -> None:
    """One distance at least, the longest, which leads to other hosts."""
    found = pairs_of(size)
    assert len(found) == len(set(found)) == pairs and (0, size // 2) in found
    assert {rank for pair in found for rank in pair} == set(range(size))


# ---- facts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("", 0, 0)),
        ({"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4"}, ("", 0, 0)),  # by hand, in an allocation
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, ("Open MPI", 4, 3)),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "4", "PMI_RANK": "1"}, ("MPICH", 4, 1)),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "PMI_SIZE": "4", "PMI_RANK": "2"}, ("Slurm", 4, 2)),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ("", 0, 0)),  # by hand, in a shell of `srun --pty`
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMI_SIZE": "1", "PMI_RANK": "0"}, ("", 0, 0)),
        ({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, ("Open MPI", 4, 3)),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, ("", 4, 1)),
    ],
)
def test_the_launcher_is_told_by_its_variables(environment, expected, monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI_", "MPI_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    launcher = facts.launcher_here()
    assert (launcher.name, launcher.processes, launcher.rank) == expected


@pytest.mark.parametrize(
    ("files", "quota", "limit_bytes"),
    [
        ({}, math.inf, None),
        ({"cpu.max": "max 100000", "memory.max": "max"}, math.inf, None),
        ({"cpu.max": "150000 100000", "memory.max": "4096", "memory.current": "0", "memory.stat": ""}, 1.5, 4096),
        (
            {
                "memory.max": "8192", "memory.current": "6000",
                "memory.stat": "anon 1000\ninactive_file 500\nactive_file 3000",
            },
            math.inf, 2692,
        ),
        ({"memory.max": "4096", "memory.current": "5000", "memory.stat": "inactive_file 500"}, math.inf, 0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf, None),
        (
            {
                "cpu/cpu.cfs_quota_us": "90000", "cpu/cpu.cfs_period_us": "30000",
                "memory/memory.limit_in_bytes": "8192", "memory/memory.usage_in_bytes": "5000",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 1000",
            },
            3.0, 4192,
        ),
    ],
)  # fmt: skip
def test_a_containers_limits_are_read(files, quota, limit_bytes, monkeypatch, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr("pala.system.resources._CGROUP", tmp_path)
    monkeypatch.setattr("pala.system.resources._OWN_GROUP", tmp_path / "none")
    here = facts.host_here(facts.Launcher())
    assert here.most_cores == quota
    assert here.memory_bytes == limit_bytes if limit_bytes is not None else here.memory_bytes > 1e6


@pytest.mark.parametrize(
    ("own", "files"),
    [
        (
            "0::/slurm/job_7/step_0",
            {
                "slurm/job_7/memory.max": "4196", "slurm/job_7/memory.current": "200",
                "slurm/job_7/memory.stat": "inactive_file 100", "slurm/job_7/step_0/cpu.max": "200000 100000",
                "slurm/job_7/step_0/memory.max": "max", "slurm/job_7/step_0/memory.current": "100",
                "slurm/job_7/step_0/memory.stat": "inactive_file 50",
            },
        ),
        (
            "3:cpu,cpuacct:/slurm/job_7\n2:memory:/slurm/job_7/step_0\n1:name=systemd:/x",
            {
                "memory/slurm/job_7/memory.limit_in_bytes": "4196", "memory/memory.limit_in_bytes": "9223372036854",
                "memory/slurm/job_7/memory.usage_in_bytes": "200", "memory/memory.usage_in_bytes": "300",
                "memory/slurm/job_7/memory.stat": "total_inactive_file 100", "memory/memory.stat": "",
                "cpu/slurm/job_7/cpu.cfs_quota_us": "200000", "cpu/slurm/job_7/cpu.cfs_period_us": "100000",
            },
        ),
    ],
)  # fmt: skip
def test_a_jobs_limits_are_read_wherever_they_stand(own, files, monkeypatch, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own + "\n")
    monkeypatch.setattr("pala.system.resources._CGROUP", tmp_path)
    monkeypatch.setattr("pala.system.resources._OWN_GROUP", tmp_path / "own")
    here = facts.host_here(facts.Launcher())
    assert (here.most_cores, here.memory_bytes) == (2.0, 4096)


@pytest.mark.parametrize(
    ("runs", "sees"),
    [(".", True), ("there", True), ("there/to/be/made", True), ("dangling", False), ("dangling/below", False)],
)
def test_where_runs_are_to_be_is_written_to_without_a_trace(
    runs: str, sees: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is not there yet a run would make, but not what a link to nothing stands for."""
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("dangling").symlink_to("nowhere")
    before, seen = sorted(tmp_path.rglob("*")), []
    comm = SimpleNamespace(
        rank=0, bcast=lambda file: file, barrier=lambda: seen.extend(tmp_path.rglob(".pala-doctor-*"))
    )
    assert _with_runs(comm, job(runs=runs)).sees_runs == sees  # type: ignore[arg-type]
    assert len(seen) == sees and sorted(tmp_path.rglob("*")) == before


def test_what_a_shell_finds_in_place_of_this_python_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing, where PATH leads to the same folder by a link."""
    (tmp_path / "link").symlink_to(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", str(tmp_path / "link"))
    assert facts.others_in_path() == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.others_in_path()["python"] == "missing"
    (tmp_path / "python").symlink_to(sys.executable)
    assert facts.others_in_path()["python"] == str(tmp_path / "python")


# ---- trying mpirun ---------------------------------------------------------------------------------------------------


def test_what_a_job_said_that_did_not_start_is_kept(tmp_path: Path) -> None:
    assert facts.try_mpirun(fake_mpirun(tmp_path, "exit 0\n")) == ""
    failure = facts.try_mpirun(fake_mpirun(tmp_path, 'echo "no library" >&2; exit 1\n'))
    assert "no library" in failure and "log'" not in failure


def test_an_mpirun_that_hangs_is_ended(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(facts, "_TRIAL_S", 0.3)
    assert "was not done after" in facts.try_mpirun(fake_mpirun(tmp_path, f"cd {tmp_path}; sleep 1000\n"))
    assert_all_end(tmp_path, "the program")


# ---- limits ----------------------------------------------------------------------------------------------------------

WATCHED = """
import time
from pala.doctor.watchdog import Watchdog
with Watchdog(0) as watchdog:
    watchdog.expect("the first", {first}, "Do this.")
    watchdog.expect("the second", {second}, "Do that.")
    print("ready", flush=True)
    time.sleep({work})
"""


def watched(folder: Path, **seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WATCHED.format(**seconds)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_takes_too_long_is_ended_with_a_sentence(tmp_path: Path) -> None:
    process = watched(tmp_path, first=1000, second=0.1, work=1000)
    _, said = process.communicate(timeout=60)
    assert said == "pala: error: rank 0: the second was not done after 0 s. Do that.\n"
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_only_the_newest_limit_counts(tmp_path: Path) -> None:
    process = watched(tmp_path, first=3, second=1000, work=3.5)
    assert process.communicate(timeout=60) == ("ready\n", "") and process.returncode == 0


def test_the_watchdog_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    process = watched(tmp_path, first=1000, second=1000, work=1000)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert len(processes_in(tmp_path)) == 2
    process.kill()
    process.communicate(timeout=60)
    assert_all_end(tmp_path, "the watchdog")


# ---- real jobs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.mpi
def test_a_sound_job(mpi: Launcher, tmp_path: Path) -> None:
    done = mpi.start("-np", "2", str(mpi.folder / "python"), "-m", "pala.doctor", "--json", "facts.json", cwd=tmp_path)
    done.wait()
    assert done.status == 0, done.output
    product = "Open MPI" if mpi.name == "openmpi" else "MPICH"
    for words in (f"MPI library      {product}", f"launcher         {product}", "(started 2)"):
        assert words in done.output
    assert re.search(r"rank 0 on \S+ and rank 1 on \S+: [\d,.]+ µs, [\d,.]+ MB/s", done.output)
    assert [path.name for path in tmp_path.iterdir()] == ["facts.json"]  # no trace of what was tried
    table = json.loads((tmp_path / "facts.json").read_text())
    assert [rank["rank"] for rank in table["job"]["ranks"]] == [0, 1]
    assert table["job"]["launcher"]["name"] == product and table["job"]["library"].startswith(product)
    assert not any(advice["stops"] for advice in table["advice"])
    assert not processes_in(tmp_path)


@pytest.mark.mpi
@pytest.mark.slow
def test_by_hand_mpirun_is_tried(any_mpi: Launcher, tmp_path: Path) -> None:
    """Without what the launch scripts set, as by its whole path."""
    environment = {k: v for k, v in any_mpi.environment().items() if not k.startswith(("OMPI_", "PRTE_"))}
    environment["PATH"] = os.defpath
    done = subprocess.run(
        [any_mpi.folder / "python", "-m", "pala.doctor"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == "", done.stdout
    words = " ".join(done.stdout.split())  # the path before it may be long
    assert f"{any_mpi.folder}/mpirun (this job was started without it)" in words
    assert "`mpirun` in PATH is " in words and "Activate the environment" in words


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("launched_by", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_a_mixed_job_is_named_in_one_sentence(launched_by: str, tmp_path: Path) -> None:
    """And by no crash in MPI_Init."""
    if len(LAUNCHERS) < 2:
        pytest.skip("only one MPI is installed: ./launch/test.sh installs two")
    own, other = LAUNCHERS if launched_by == "openmpi" else LAUNCHERS[::-1]
    job = own.start("-np", "2", str(other.folder / "python"), "-m", "pala.doctor", cwd=tmp_path).wait()
    assert job.status == 1
    words = " ".join(job.output.split())
    assert words.count("use different MPI libraries") == 1
    assert f"Use {other.folder}/mpirun." in words
    assert "Abort" not in job.output and "Traceback" not in job.output


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_without_a_pmi_are_named_once(any_mpi: Launcher, tmp_path: Path) -> None:
    """As under `srun --mpi=none`, whose tasks have a process `slurmstepd` above them."""
    task_manager = shutil.copy("/bin/sh", tmp_path / "slurmstepd")
    jobs = [
        any_mpi.start_command(
            [task_manager, "-c", '"$@"; exit $?', "sh", str(any_mpi.folder / "python"), "-m", "pala.doctor"],
            cwd=tmp_path,
            env={"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(task)},
        )
        for task in range(2)
    ]  # fmt: skip
    first, second = (job.wait() for job in jobs)
    assert (first.status, second.status) == (1, 0) and second.output == ""
    assert "srun started 2 tasks, but to MPI each is alone" in " ".join(first.output.split())


@pytest.mark.mpi
@pytest.mark.slow
def test_a_mistake_is_told_once(any_mpi: Launcher, tmp_path: Path) -> None:
    job = any_mpi.start(
        "-np", "2", str(any_mpi.folder / "python"), "-m", "pala.doctor", "--jsn", "x", cwd=tmp_path
    ).wait()
    assert job.status == 2
    assert job.output.count("the command line was not understood") == 1 and "--json" in job.output


@pytest.mark.mpi
@pytest.mark.slow
def test_two_hosts_and_their_link(any_mpi: Launcher, tmp_path: Path) -> None:
    """Host 1 has a `runs` of its own, and a link of 100 Mbit/s: 12.5 MB/s."""
    if (reason := virtual_hosts.why_not()) is not None:
        pytest.skip(reason)
    (tmp_path / "runs").mkdir()
    doctor = f"exec {any_mpi.folder}/python -m pala.doctor --json {tmp_path}/facts.json"
    own_runs = f"mount -t tmpfs tmpfs {tmp_path}/runs && cd . && {doctor}"
    script = f"if [ $(hostname) = vhost1 ]; then exec unshare -m sh -c '{own_runs}'; fi; {doctor}"
    with VirtualHosts(2, "100mbit") as hosts:
        command, environment = hosts.mpirun(["sh", "-c", script], mpirun=str(any_mpi.folder / "mpirun"))
        job = any_mpi.start_command(command, cwd=tmp_path, env=environment).wait()
    assert job.status == 1
    table = json.loads((tmp_path / "facts.json").read_text())
    assert [host["name"] for host in table["job"]["hosts"]] == ["vhost0", "vhost1"]
    (pair,) = table["job"]["pings"]
    assert pair["ranks"] == [0, 1] and pair["megabytes_per_s"] < 13
    assert "'runs' on vhost0 is not seen by vhost1" in job.output
    assert "`--exchange.compression bfloat16` halves it" in job.output
