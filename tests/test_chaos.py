"""`pala chaos`: what it refuses, whom it touches, what it leaves behind, and what it reports."""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pala.config import Config, ExchangeConfig, RunConfig
from pala.lab.chaos import __main__ as chaos
from pala.lab.chaos import processes
from pala.lab.chaos.history import Fault, History, Interval
from pala.lab.chaos.processes import Guard, RankProcess, find
from pala.lab.chaos.shake import Draw, Plan, Shaker
from pala.run.metrics import read_run
from pala.system.errors import PalaError
from pala.system.interrupt import Interrupt
from support import REPOSITORY
from support.fake_ranks import ranks_of, start_rank, write_record
from support.helpers import CARTPOLE, record_of, wait_for, write_paced
from support.mpi import Launcher, assert_all_end, processes_in

QUICK = Config(run=RunConfig(log_interval_s=0.1))
ALL = ("kill", "stop", "slow")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that says of itself that it trains."""
    write_record(tmp_path / "r")
    return tmp_path / "r"


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """A process that ends with the block."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def command(run: Path, *arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "pala", "chaos", str(run), *arguments]
    return subprocess.Popen(words, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"status": "completed"}, "does not train: its 'run.json' says 'completed'"),
        ({"status": "stopped"}, "says 'stopped'"),
        ({}, "its job is gone"),
        ({"ranks": None}, "does not say 'ranks'"),
        ({"hosts": ["far", "away"]}, "they are on away, far. Processes of other hosts cannot be reached"),
    ],
)
def test_a_run_that_nobody_here_trains_is_refused(facts: dict[str, Any], words: str, run: Path) -> None:
    write_record(run, **facts)
    with pytest.raises(PalaError, match=words):
        chaos.ranks_to_shake(run, ALL)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PalaError, match=r"it has no 'run\.json'"):
        chaos.ranks_to_shake(tmp_path, ALL)


def test_a_run_with_links_is_refused(run: Path) -> None:
    """Its lock could lead to that of another run."""
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(run / "run.json")
    with pytest.raises(PalaError, match="is a link"):
        chaos.ranks_to_shake(run, ALL)


def test_a_run_of_another_user_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks_of(run):
        monkeypatch.setattr(os, "getuid", lambda: 54321)
        with pytest.raises(PalaError, match="only your own jobs are disturbed"):
            chaos.ranks_to_shake(run, ALL)


def test_processes_of_another_user_are_not_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root could signal them; here they are another's since this process says that it is somebody else."""
    with ranks_of(run):
        assert sorted(find(run, {})) == [0, 1, 2]
        monkeypatch.setattr(os, "getuid", lambda: 54321)
        assert find(run, {}) == {}


def test_processes_that_are_like_ranks_but_hold_no_lock_are_refused(run: Path, tmp_path: Path) -> None:
    """Those of another run are none either; and one that has the lock's file open without holding the lock."""
    write_record(other := tmp_path / "other")
    opened = "lock = open('.lock'); print(flush=True); import time; time.sleep(600)"
    environment = os.environ | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_mpi_ft_enable": "1"}
    words = [sys.executable, "-I", "-c", opened]
    opener = subprocess.Popen(words, cwd=run, env=environment, stdout=subprocess.PIPE)
    unlike = subprocess.Popen([sys.executable, "-I", "-c", LOCKED], cwd=run, stdout=subprocess.PIPE)
    with ranks_of(other), ended(opener), ended(unlike):
        for process in (opener, unlike):
            assert process.stdout is not None and process.stdout.readline()
        assert find(run, {}) == {}
        with pytest.raises(PalaError, match=r"No process on .* can be proven to be a rank"):
            chaos.ranks_to_shake(run, ALL)


LOCKED = "import fcntl, time; f = open('.lock'); fcntl.flock(f, fcntl.LOCK_SH); print(flush=True); time.sleep(600)"


def test_two_processes_that_claim_to_be_one_rank_are_refused(run: Path) -> None:
    with ranks_of(run), ended(start_rank(run, 1)):
        wait_for(lambda: is_refused(run, "both hold the lock"), 60, "the second process's lock")


def is_refused(run: Path, words: str) -> bool:
    try:
        find(run, {})
    except PalaError as error:
        return words in str(error)
    return False


def test_the_only_rank_here_is_refused(run: Path) -> None:
    with ranks_of(run, 1), pytest.raises(PalaError, match=r"Only rank 0 .* host is left alone"):
        chaos.ranks_to_shake(run, ("stop",))


@pytest.mark.parametrize(
    ("config", "ulfm", "words"),
    [
        (QUICK, False, "was not started by `mpirun --with-ft ulfm`"),
        (replace(QUICK, exchange=ExchangeConfig("allreduce")), True, "has 'exchange.kind' 'allreduce'"),
        (replace(QUICK, algorithm="gorila"), True, "trains 'gorila'"),
    ],
)
@pytest.mark.slow
def test_kills_that_would_end_the_job_are_refused(config: Config, ulfm: bool, words: str, run: Path) -> None:
    write_record(run, config)
    with ranks_of(run, 2, ulfm=ulfm):
        with pytest.raises(PalaError, match=f"{words}.*its job would end.*`--faults stop slow`"):
            chaos.ranks_to_shake(run, ALL)
        assert sorted(chaos.ranks_to_shake(run, ("stop", "slow"))) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Name a run that trains now"),
        (["r", "--mean-s", "0"], "'--mean-s' is 0"),
        (["r", "--duration-s", "-1"], "'--duration-s' is -1"),
        (["r", "--output", "."], "is a folder; name a file"),
        (["r", "--output", "nowhere/report.json"], "nothing can be written into"),
        (["r", "--fault", "stop"], "--faults"),
    ],
)
def test_mistakes_in_the_command_are_told(arguments: list[str], words: str) -> None:
    with pytest.raises(PalaError) as raised:
        chaos.parse(arguments)
    assert words in str(raised.value)


# ---- whom signals reach ----------------------------------------------------------------------------------------------


def with_number(pid: int, words: list[str]) -> subprocess.Popen[bytes]:
    """Start a process under a number that has become free. Skips where the kernel cannot be told the next number."""
    for _ in range(200):  # others start processes, too
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError:
            pytest.skip("only root, outside a container, can have a process number used again")
        process = subprocess.Popen(words)
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    raise AssertionError(f"no process got the number {pid}")


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard()
    yield guard
    guard.close()


@pytest.mark.parametrize("deed", [lambda process, _: process.kill(), RankProcess.stop])
@pytest.mark.slow
def test_a_later_process_of_the_same_number_is_not_touched(
    deed: Callable[[RankProcess, Guard], None], guard: Guard, run: Path
) -> None:
    with ranks_of(run) as ranks:
        found = find(run, {})[1]
        ranks[1].kill()
        ranks[1].wait()
        with ended(with_number(found.pid, ["sleep", "600"])) as later:
            assert not found.lives()
            deed(found, guard)
            assert state_of(later.pid) != "T" and later.poll() is None


def test_a_number_that_changes_hands_while_it_is_looked_at_is_not_taken(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that was looked at ends before its descriptor is opened, which is then another process's."""
    open_ = os.pidfd_open
    with ranks_of(run, 2), ended(subprocess.Popen(["sleep", "600"])) as bystander:
        assert len(find(run, {})) == 2
        monkeypatch.setattr(processes, "_holds", holds_once := HoldsOnce())
        monkeypatch.setattr(os, "pidfd_open", lambda pid: open_(bystander.pid))
        assert find(run, {}) == {} and holds_once.asked


class HoldsOnce:
    """Says that a process holds the lock, and the next time that it does not: it is another one by then."""

    def __init__(self) -> None:
        self.asked: set[Path] = set()

    def __call__(self, process: Path, lock: tuple[int, int]) -> bool:
        is_first = process not in self.asked
        self.asked.add(process)
        return is_first


@pytest.mark.slow
def test_a_rank_that_is_known_gets_no_other_process(run: Path) -> None:
    """One that takes its number in a later job."""
    with ranks_of(run, 2) as ranks:
        known = find(run, {})
        ranks[1].kill()
        ranks[1].wait()
        with ended(start_rank(run, 1)):
            wait_for(lambda: 1 in find(run, {}), 60, "the new process's lock")
            assert find(run, known) == {}


# ---- ways out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["stop", "slow"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
def test_no_process_is_left_stopped_whatever_ends_it(number: signal.Signals, fault: str, run: Path) -> None:
    with ranks_of(run) as ranks:
        process = command(run, "--faults", fault, "--mean-s", "2", "--seed", "3")
        wait_for(lambda: any(state_of(rank.pid) == "T" for rank in ranks), what="a stopped rank")
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        wait_for(lambda: all(state_of(rank.pid) != "T" for rank in ranks), 60, "the return of all")
        assert all(rank.poll() is None for rank in ranks)
        if number == signal.SIGKILL:
            assert process.returncode == -number
        else:
            assert process.returncode == 128 + number and "Traceback" not in output, output
            assert "survivors: ranks 0, 1, 2" in output, output


@pytest.mark.slow
def test_an_error_leaves_no_process_stopped(run: Path) -> None:
    with ranks_of(run) as ranks:
        shaker = Shaker(run, find(run, {}), Plan(1, 2.0, ["stop"], None), 60.0, 0.1)
        look = shaker.watch.look

        def look_until_one_is_stopped() -> None:
            look()
            if shaker.history.faults:
                wait_for(lambda: state_of(ranks[shaker.history.faults[0].rank].pid) == "T")
                raise PalaError("the planted fault")

        shaker.watch.look = look_until_one_is_stopped  # type: ignore[method-assign]
        with pytest.raises(PalaError, match="the planted fault"):
            shaker.shake(Interrupt())
        assert all(state_of(rank.pid) != "T" for rank in ranks)


# ---- what it does and reports ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kills_leave_one_rank_and_are_reported(run: Path) -> None:
    """The run never ends by itself: the program's own time does."""
    with ranks_of(run) as ranks:
        process = command(run, "--faults", "kill", "--mean-s", "0.2", "--duration-s", "6", "--output", f"{run}.report")
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
        (left,) = [rank for rank, one in enumerate(ranks) if one.poll() is None]
        killed = sorted({0, 1, 2} - {left})
        assert f"killed: ranks {killed[0]}, {killed[1]}; survivors: rank {left}" in output, output
        assert "hung, without a record for" in output and "the last rank here" in output, output
    report = json.loads(Path(f"{run}.report").read_text())
    assert report["killed"] == killed and report["survivors"] == [left] and report["hung"] == []
    assert [fault["fault"] for fault in report["faults"]] == ["kill", "kill"]
    assert all(fault["others_s"] > 0 for fault in report["faults"])
    assert report["steps_per_s"]["before"] > report["steps_per_s"]["after"] > 0
    assert report["plan"]["seed"] == 1 and "pala chaos" in report["command"]


@pytest.mark.slow
def test_a_rank_that_makes_no_more_records_is_said_to_hang(run: Path) -> None:
    plan = Plan(1, 600.0, ["stop"], None)
    with ranks_of(run, silent_after=5):
        shaker = Shaker(run, find(run, {}), plan, 2.0, 0.1)
        shaker.shake(Interrupt())
    assert shaker.history.hung and not shaker.history.faults
    result = chaos.result_of(shaker.history, plan, 2.0, 0.1, [0, 1, 2])
    assert chaos.exit_status(result) == 1
    assert "hung, without a record for 2 s: rank" in chaos.page_of(run, result)


def test_a_job_whose_ranks_are_gone_is_told(run: Path) -> None:
    with ranks_of(run) as ranks:
        shaker = Shaker(run, find(run, {}), Plan(1, 600.0, ["stop"], None), 60.0, 0.1)
        for rank in ranks:
            rank.kill()
            rank.wait()
        shaker.shake(Interrupt())
    assert shaker.history.status == "gone" and shaker.history.survivors == []


def test_deaths_are_those_of_the_watch(run: Path) -> None:
    """A rank that was lost before is none; one that dies meanwhile, without being killed here, is said."""
    plan = Plan(1, 600.0, ["stop"], None)
    write_record(run, ranks=4, hosts=[platform.node()] * 4, lost_ranks=[{"rank": 3}])
    with ranks_of(run):
        shaker = Shaker(run, find(run, {}), plan, 60.0, 0.1)
        shaker.watch.look()
        assert shaker.history.died_otherwise == [] and shaker.history.survivors == [0, 1, 2]
        write_record(run, ranks=4, lost_ranks=[{"rank": 2}, {"rank": 3}], status="completed")
        shaker.shake(Interrupt())
    result = chaos.result_of(shaker.history, plan, 60.0, 0.1, [0, 1, 2])
    assert result["died_otherwise"] == [2] and result["survivors"] == [0, 1]
    assert chaos.exit_status(result) == 1 and "; died otherwise: rank 2;" in chaos.page_of(run, result)


def test_a_folder_that_goes_is_one_error(run: Path) -> None:
    with ranks_of(run):
        shaker = Shaker(run, find(run, {}), Plan(1, 600.0, ["stop"], None), 60.0, 0.1)
        (run / "run.json").unlink()
        with pytest.raises(PalaError, match=r"it has no 'run\.json'"):
            shaker.shake(Interrupt())


def test_a_seed_says_which_faults_there_are() -> None:
    plan = Plan(1, 10.0, ("stop", "slow"), None)

    def drawn(seed: int) -> list[Draw]:
        source = random.Random(seed)
        return [plan.draw(source) for _ in range(50)]

    first = drawn(1)
    assert first == drawn(1) != drawn(2)
    assert {draw.kind for draw in first} == {"stop", "slow"} and all(1 <= draw.lasts_s <= 10 for draw in first)
    assert 5 < sum(draw.wait_s for draw in first) / 50 < 20


def even(begin: int, end: int, steps: int = 10) -> list[Interval]:
    """An interval of a second, and so on."""
    return [Interval(second, second + 1, steps) for second in range(begin, end)]


def test_figures_of_a_kill() -> None:
    """Rank 1 dies at 4.5; rank 0 makes an interval that holds the death, waits in the next one, and is then as before;
    rank 2 is at once."""
    kill = Fault("kill", 1, 4.5, noticed_s=5.2)
    waits = [*even(0, 5), Interval(5, 8, 12), *even(8, 10)]
    history = History([kill], {0: waits, 1: even(0, 4), 2: even(0, 10)}, {1: 4.5}, end_s=10.0)
    assert history.survivors == [0, 2] and history.recovered(kill)
    assert history.others_s(kill) == 3.5 and history.back_s(kill) is None
    (facts,) = history.facts()
    assert facts["noticed_s"] == 0.7 and facts["lasted_s"] is None
    assert facts["steps_per_s_before"] == pytest.approx(20 + 40 / 4.5, abs=0.01)
    assert facts["steps_per_s_after"] == pytest.approx(10 + (5 + 12 + 20) / 5.5, abs=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_speeds_are_the_steps_of_all_ranks_over_the_time(seed: int) -> None:
    """Ranks come, die, leave and stay, each with its own steps in each second."""
    draw = random.Random(seed)
    steps: dict[int, dict[int, int]] = {0: {second: draw.randrange(20) for second in range(20)}}
    history = History(end_s=20.0)
    for rank in range(1, 6):
        begin = draw.choice([0, draw.randrange(18)])
        end = draw.choice([20, draw.randrange(begin + 1, 20)])
        steps[rank] = {second: draw.randrange(20) for second in range(begin, end)}
        if end < 20 and draw.random() < 0.5:
            history.left.add(rank)
        elif end < 20:
            history.died[rank] = end + 0.5
    for rank, seconds in steps.items():
        history.intervals[rank] = [Interval(second, second + 1, made) for second, made in seconds.items()]
    for begin in range(20):
        for end in range(begin + 1, 21):
            made = sum(seconds.get(second, 0) for seconds in steps.values() for second in range(begin, end))
            assert history.steps_per_s(begin, end) == pytest.approx(made / (end - begin)), (begin, end)


def test_ranks_whose_next_record_is_to_come_keep_their_pace() -> None:
    history = History(intervals={0: even(0, 4), 1: [Interval(0.5, 3.5, 30)], 2: []}, end_s=9.0)
    assert history.steps_per_s(1.0, 9.0) == pytest.approx(20), "nor does anything count after the last record"
    assert history.steps_per_s(4.0, 9.0) is None
    history.died[1] = 3.6
    assert history.steps_per_s(1.0, 9.0) == pytest.approx((30 + 25) / 3)


def test_figures_of_a_stop() -> None:
    """Of rank 1, from 2 to 5. Rank 0 continues, rank 2 never does again."""
    stop = Fault("stop", 1, 2.0, until_s=5.0)
    history = History(
        [stop], {0: even(0, 9), 1: [*even(0, 2), Interval(2, 6, 2), *even(6, 9)], 2: even(0, 2)}, end_s=9.0
    )
    assert history.others_s(stop) is None and not history.recovered(stop)
    history.intervals[2] += even(2, 9)
    assert history.others_s(stop) == 1 and history.back_s(stop) == 2 and history.recovered(stop)
    assert history.survivors == [0, 1, 2]


def test_ranks_that_other_faults_disturb_say_nothing_of_recovery() -> None:
    kill, stop = Fault("kill", 1, 2.0), Fault("stop", 0, 2.5)
    history = History([kill, stop], {0: even(0, 2), 1: even(0, 2), 2: even(0, 5)}, {1: 2.0}, end_s=5.0)
    assert history.others_s(kill) == 1 and history.others_s(stop) == pytest.approx(1.5)
    assert not history.recovered(stop), "it continues"
    stop.until_s = 3.0
    history.intervals[0] += [Interval(2, 3.2, 1), Interval(3.2, 4.2, 10)]
    assert history.recovered(stop) and history.back_s(stop) == pytest.approx(1.2)


def test_a_rank_that_left_is_not_waited_for() -> None:
    stop = Fault("stop", 1, 2.0, until_s=3.0)
    history = History([stop], {0: even(0, 5), 1: even(0, 2)}, end_s=5.0)
    assert not history.recovered(stop)
    history.left.add(1)
    assert history.recovered(stop)


# ---- real ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_under_faults_completes_with_its_survivors(any_mpi: Launcher, tmp_path: Path) -> None:
    """Kills, stops and slowness by a seed, until the run is complete: as a user would shake it."""
    environment = write_paced(tmp_path, 0.02)  # with its budget 100 s of training, until it is free: two die before
    arguments = [*CARTPOLE, "--env.id", "Paced-v0", "--run.name", "r", "--total-steps", "20000"]
    python = str(any_mpi.folder / "python")
    train = ["--with-ft", "ulfm", "-np", "4", python, "-m", "pala.train", *arguments]
    job, run = any_mpi.start(*train, cwd=tmp_path, env=environment), tmp_path / "runs/r"
    wait_for(lambda: (run / "run.json").exists(), what="the run")
    faults = command(run, "--mean-s", "3", "--seed", "1", "--output", str(tmp_path / "report.json"))
    wait_for(lambda: len(record_of(run)["segments"][0].get("lost_ranks", [])) == 2, 300, "two deaths")
    (tmp_path / "free").touch()
    output, _ = faults.communicate(timeout=600)
    assert job.wait().status == 0, job.output + output
    assert faults.returncode == 0, output
    report, (segment,) = json.loads((tmp_path / "report.json").read_text()), record_of(run)["segments"]
    print(output)
    assert report["status"] == "completed" == segment["status"] and report["hung"] == []
    assert report["killed"] == [lost["rank"] for lost in segment["lost_ranks"]] and report["killed"]
    assert report["survivors"] == sorted({0, 1, 2, 3} - set(report["killed"])) and report["died_otherwise"] == []
    assert {fault["fault"] for fault in report["faults"]} >= {"kill", "stop"}
    assert segment["global_steps"] >= 20000 and len(read_run(run)) == 4
    assert_all_end(tmp_path)
    assert not processes_in(tmp_path)
