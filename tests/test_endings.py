"""What comes after training: closing, averaging, saving, recording, evaluation. Nobody waits without a limit, nobody is
deaf to signals, and what is not done is said. Ranks are threads of one process, but for the last tests."""

from __future__ import annotations

import builtins
import errno
import itertools
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGTERM, SIGUSR1
from typing import Any

import gymnasium
import numpy as np
import pytest

from pala.a2c.learner import Learner
from pala.comm.base import Received
from pala.config import Config, EvaluationConfig
from pala.envs.vector import MakeEnv
from pala.exchange.budget import Stop
from pala.exchange.gossip.driver import GossipDriver
from pala.exchange.gossip.exchange import GossipExchange
from pala.job import conclusion
from pala.job.entry import evaluate_and_draw
from pala.job.job import Job
from pala.job.rank import run_rank
from pala.job.request import Request, Result
from pala.run import checkpoint
from pala.run.hooks import UserCode
from pala.run.metrics import Record, read_run
from pala.run.run import Run
from pala.system import waiting
from pala.system.errors import CollectiveError, EndError, SaveError
from pala.system.interrupt import Interrupt
from pala.testing.memory import Killed, MemoryCommunicator, run_ranks
from support.helpers import contents, record_of, slow_but_for, wait_for
from support.memory_jobs import (
    ENDLESS,
    KINDS,
    OUTLIVING,
    OnCount,
    asking_as_abort_does,
    configure,
    gorila,
    nothing,
    slow_until_joined,
    train,
    with_spares,
)

pytestmark = pytest.mark.often(
    "test_a_stopped_run_says_how_it_goes_on",
    "test_of_ranks_that_leave_in_the_same_moment_one_leads",
    "test_code_that_no_longer_loads_when_training_ends_is_no_ranks_death",
    "test_what_is_wrong_in_the_first_reset_or_step_is_a_mistake_of_all_ranks_that_leaves_no_run",
    "test_ranks_that_all_leave_do_not_wait_long_for_one_that_hangs",
)

Concluding = Callable[[MemoryCommunicator, Result, Config, Interrupt], Result]


class Ranks:
    """A training whose ranks can be reached while it ends."""

    def __init__(
        self, size: int, config: Config, conclude: Concluding | None = None, make_env: MakeEnv | None = None
    ) -> None:
        self.size, self.config, self.conclude, self.make_env = size, config, conclude, make_env
        self.comms: dict[int, MemoryCommunicator] = {}
        self.results: list[Any] = []
        self.resume: Path | None = None

    def train(self, on_count: OnCount = nothing) -> None:
        def main(comm: MemoryCommunicator) -> Result:
            self.comms[comm.rank] = comm
            given = self.conclude
            conclude = None if given is None else lambda *arguments: given(comm, *arguments)
            comm.on_count = partial(on_count, comm)
            with asking_as_abort_does(comm):
                request = Request(self.config, UserCode(self.make_env), resume=self.resume, conclude=conclude)
                return run_rank(comm, request)

        self.results = run_ranks(self.size, main)

    def signal(self, but_for: int | None = None) -> None:
        """All get SIGUSR1, as mpirun passes it on."""
        for rank, comm in self.comms.items():
            if rank != but_for:
                comm.interrupt.signal = SIGUSR1

    def kill(self, rank: int) -> None:
        world = self.comms[rank].world
        world.say_that(rank, world.dead)

    @property
    def record(self) -> dict[str, Any]:
        return record_of(Path(self.config.run.dir) / "r")

    @property
    def segment(self) -> dict[str, Any]:
        return self.record["segments"][-1]


@pytest.mark.parametrize("kind", slow_but_for(["gossip", "none"], "gossip"))
def test_the_last_line_has_the_last_records_of_all_ranks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of one that writes them after the first has ended its loop."""
    write = Run.write

    def write_late(run: Run, records: list[Record]) -> None:
        time.sleep(0.3 * run.rank)
        write(run, records)

    monkeypatch.setattr(Run, "write", write_late)
    config = configure(tmp_path, kind)
    job = train(2, replace(config, run=replace(config.run, console="lines", log_interval_s=100.0)))
    assert job.ended_well()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps ")]
    episodes = [sum(record["type"] == "episode" for record in records) for records in read_run(job.run)]
    assert min(episodes) > 0 and f" of {sum(episodes)} episode" in line


@pytest.mark.parametrize("group", [1, 2])
def test_ranks_that_end_for_unlike_reasons_agree_on_the_highest(
    group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is met on one as a signal comes to the others: no news of either arrives before the exchange closes.
    If each kept its own reason, one would average models with ranks that only save theirs, and wait forever."""
    close = GossipExchange.close

    def unlike(gossip: GossipExchange, timeout_s: float) -> Stop:
        gossip._state.budget.stop = Stop.SIGNAL if gossip._comm.rank else Stop.BUDGET
        return close(gossip, timeout_s)

    monkeypatch.setattr(GossipExchange, "close", unlike)
    config = configure(tmp_path, group=group)
    job = train(4, replace(config, env=replace(config.env, id="Paced-v0")))
    assert [result.status for result in job.results] == ["stopped"] * 4 and job.segment["status"] == "stopped"
    assert not job.record["completed"]


def train_until_all_leave(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are told to leave after their fifth update, and each finds that all others do."""
    leave, together = GossipDriver.leave, threading.Barrier(ranks.size)

    def leave_together(driver: GossipDriver) -> None:
        together.wait(60)
        leave(driver)
        wait_for(lambda: not driver.state.living, 60, "that all have left")

    def told(comm: MemoryCommunicator, updates: int) -> None:
        comm.interrupt.leave_requested |= updates == 5

    monkeypatch.setattr(GossipExchange, "_is_assured", lambda gossip: True)  # each has heard it before the others go
    monkeypatch.setattr(GossipDriver, "leave", leave_together)
    ranks.train(told)


# ---- a rank that does not come, or does not come back ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["in time", "after a signal"])
def test_nobody_waits_for_ever_for_a_rank_that_is_stopped_while_it_saves(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end with a sentence, and one of them says in the record how it ended, since who keeps that does not."""
    ranks = Ranks(3, configure(tmp_path))
    save_policy, seen = checkpoint.save_policy, []
    # Rank 0's own is long: if it waits in vain before, for a rank that is slow, another saves in its place. The others'
    # is short only when all have come to the end.
    final, together, all_there = GossipExchange.final_parameters, threading.Barrier(3), threading.Event()

    def final_together(gossip: GossipExchange, timeout_s: float) -> Any:
        parameters = final(gossip, timeout_s)
        together.wait(60)
        all_there.set()
        return parameters

    monkeypatch.setattr(GossipExchange, "final_parameters", final_together)
    short = property(lambda job: 0.5 if how == "in time" and job.comm.rank and all_there.is_set() else 300.0)
    monkeypatch.setattr(Job, "patience_s", short)
    monkeypatch.setattr(waiting, "_PATIENCE_AFTER_SIGNAL_S", 0.2)

    def stopped(*arguments: Any) -> None:
        if how == "after a signal":
            ranks.signal(but_for=0)
        wait_for(lambda: ranks.comms[0].world.gone == {1, 2}, 30, "the others' end")
        seen.append(ranks.segment)
        save_policy(*arguments)

    monkeypatch.setattr(checkpoint, "save_policy", stopped)
    ranks.train()
    assert [type(result) for result in ranks.results[1:]] == [EndError, EndError], ranks.results
    assert seen[0]["status"] == "failed" and seen[0]["error"] in map(str, ranks.results[1:])
    sentence = "did not answer within 0 s" if how == "in time" else "did not end within 0 s of the signal"
    assert sentence in seen[0]["error"]


def test_who_waits_in_vain_leaves_a_run_complete_that_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_PATIENCE_AFTER_SIGNAL_S", 0.2)

    def never_ends(comm: MemoryCommunicator, result: Result, *_: Any) -> Result:
        ranks.signal(but_for=0)
        wait_for(lambda: comm.world.gone == {1, 2}, 30, "the others' end")
        return result

    ranks = Ranks(3, configure(tmp_path), never_ends)
    ranks.train()
    assert all(isinstance(result, EndError) for result in ranks.results[1:])
    assert ranks.record["completed"] and ranks.segment["status"] == "completed" and "error" not in ranks.segment


def test_ranks_that_all_leave_do_not_wait_long_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them has got a signal that ends the job."""
    close = GossipExchange.close
    ranks = Ranks(3, configure(tmp_path, steps=ENDLESS))
    monkeypatch.setattr(Job, "stop_patience_s", property(lambda job: 60.0 if job.comm.rank == 2 else 0.2))

    def hangs(gossip: GossipExchange, timeout_s: float) -> Any:
        if gossip._comm.rank == 2:  # type: ignore[attr-defined]
            wait_for(lambda: ranks.comms[0].world.gone == {0, 1}, 30, "the others' end")
        return close(gossip, timeout_s)

    monkeypatch.setattr(GossipExchange, "close", hangs)
    train_until_all_leave(ranks, monkeypatch)
    assert [type(result) for result in ranks.results[:2]] == [EndError, EndError], ranks.results
    assert "did not answer within 0 s" in str(ranks.results[0]) and ranks.segment["saved"]


@pytest.mark.parametrize("kind", slow_but_for(OUTLIVING, "gossip"))
@pytest.mark.parametrize("how", ["dies before", "dies after", "cannot write"])
def test_another_rank_writes_the_policy_that_the_first_could_not(
    how: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, save_policy = Ranks(3, configure(tmp_path, kind)), checkpoint.save_policy

    def faulty(path: Path, *arguments: Any) -> None:
        is_first = path.name == "policy.safetensors" and threading.current_thread().name == "rank-0"
        if is_first and how == "cannot write":
            raise OSError(errno.EIO, "Input/output error", str(path))
        if not is_first or how == "dies after":
            save_policy(path, *arguments)
        if is_first:
            ranks.comms[0].die()

    monkeypatch.setattr(checkpoint, "save_policy", faulty)
    ranks.train()
    assert isinstance(ranks.results[0], SaveError if how == "cannot write" else Killed)
    ends = [(result.status, result.leads) for result in ranks.results[1:]]
    assert ends == [("completed", True), ("completed", False)]
    assert ranks.record["completed"] and [lost["rank"] for lost in ranks.segment["lost_ranks"]] == [0]
    _, header = checkpoint.load_policy(tmp_path / "r" / "policy.safetensors")
    assert header["global_steps"] == ranks.segment["global_steps"] == ranks.results[1].global_steps


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", slow_but_for(["close", "final_parameters", "save_policy"], "final_parameters"))
def test_a_signal_while_a_run_ends_leaves_the_evaluation_out(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The policy is there all the same: what is left is done in no time."""
    owner: Any = checkpoint if moment == "save_policy" else GossipExchange
    action, here = getattr(owner, moment), itertools.count(1)

    def signalled(*arguments: Any) -> Any:
        if owner is checkpoint or next(here) == 3:  # who still trained would stop without having met the budget
            ranks.signal()
        return action(*arguments)

    monkeypatch.setattr(owner, moment, signalled)
    monkeypatch.setattr(conclusion, "evaluate", lambda *_, **__: pytest.fail("it was evaluated"))
    config = replace(configure(tmp_path), evaluation=EvaluationConfig(episodes=1))
    ranks = Ranks(3, config, lambda comm, *rest: conclusion.conclude(*rest))
    ranks.train()
    assert ranks.record["completed"] and (tmp_path / "r/policy.safetensors").exists()
    assert [result.exit_status for result in ranks.results] == [128 + SIGUSR1, 0, 0]
    assert ranks.segment["conclusion"] == {"evaluation": "interrupted by SIGUSR1", "rank": 0}
    assert "evaluation: interrupted; `pala evaluate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spares", "variables", "says"),
    [
        (0, {}, "pala train -n 3 --resume"), (1, {}, "pala train -n 2 --resume"),
        (0, {"PALA_SUPERVISED": "1"}, "the command that started it, with `--resume "),
    ],
)  # fmt: skip
def test_a_stopped_run_says_how_it_goes_on(
    spares: int, variables: dict[str, str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("PALA_SUPERVISED", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = configure(tmp_path, steps=ENDLESS)
    config = replace(config, run=replace(config.run, spares=spares))
    ranks = Ranks(3, config, lambda comm, *rest: conclusion.conclude(*rest))
    ranks.train(lambda comm, updates: ranks.signal() if updates == 5 else None)
    assert f"continue with: {says}" in capsys.readouterr().out


def test_commands_that_are_told_trust_a_run_that_brings_code_along(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would be refused."""
    monkeypatch.delenv("PALA_SUPERVISED", raising=False)
    config = replace(configure(tmp_path, steps=100), evaluation=EvaluationConfig(episodes=1))
    Ranks(1, config).train()
    run = tmp_path / "r"
    result = Result(run, "stopped", 10, SIGTERM, True, 128 + SIGTERM)
    for kept, told in ((None, f"--resume {run}\n"), ("module:Name", f"--resume {run} --trust-run\n")):
        if kept is not None:
            (run / "make_env.txt").write_text(kept)
        conclusion.conclude(result, config, Interrupt())
        assert told in capsys.readouterr().out


# ---- the last words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow_but_for(KINDS, "gossip", "allreduce"))
def test_the_first_rank_concludes_alone_and_the_record_says_so(kind: str, tmp_path: Path) -> None:
    said: list[tuple[int, Result]] = []

    def conclude(comm: MemoryCommunicator, result: Result, *_: Any) -> Result:
        said.append((comm.rank, result))
        return replace(result, exit_status=3, outcomes={"evaluation": "done"})

    ranks = Ranks(3, configure(tmp_path, kind), conclude)
    ranks.train()
    assert [rank for rank, _ in said] == [0] and said[0][1].status == "completed"
    assert [result.exit_status for result in ranks.results] == [3, 0, 0]
    assert ranks.segment["conclusion"] == {"evaluation": "done", "rank": 0}


def test_an_evaluation_that_fails_is_no_ranks_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A fault of the user's environment, say: the next rank would meet it as well."""
    asked = []

    def fails(*arguments: Any, **options: Any) -> None:
        asked.append(1)
        raise ValueError("out of paint")

    monkeypatch.setattr(conclusion, "evaluate", fails)
    config = configure(tmp_path)
    config = replace(config, evaluation=replace(config.evaluation, episodes=1))
    ranks = Ranks(3, config, lambda comm, *rest: conclusion.conclude(*rest))
    ranks.train()
    assert asked == [1] and ranks.record["completed"] and "lost_ranks" not in ranks.segment
    assert ranks.segment["conclusion"]["evaluation"] == "failed (ValueError: out of paint)"
    assert "Traceback" in capsys.readouterr().err


def test_code_that_no_longer_loads_when_training_ends_is_no_ranks_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As after an update of PALA during a long run."""
    monkeypatch.setitem(sys.modules, "pala.job.conclusion", None)  # an ImportError
    ranks = Ranks(2, configure(tmp_path), lambda comm, *rest: evaluate_and_draw(*rest))
    ranks.train()
    assert ranks.record["completed"] and "lost_ranks" not in ranks.segment
    assert [result.exit_status for result in ranks.results] == [0, 0]
    assert ranks.segment["conclusion"]["evaluation"].startswith("failed (ModuleNotFoundError: ")
    assert "evaluation, learning curve: failed (" in capsys.readouterr().out


def test_when_who_concludes_dies_the_next_rank_does(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    said: list[int] = []

    def conclude(comm: MemoryCommunicator, result: Result, *_: Any) -> Result:
        said.append(comm.rank)
        if comm.rank == 0:
            comm.die()
        return replace(result, outcomes={"evaluation": "done"})

    ranks = Ranks(3, configure(tmp_path), conclude)
    ranks.train()
    assert said == [0, 1] and [result.leads for result in ranks.results[1:]] == [True, False]
    assert ranks.record["completed"] and [lost["rank"] for lost in ranks.segment["lost_ranks"]] == [0]
    assert ranks.segment["conclusion"] == {"evaluation": "done", "rank": 1}
    assert "[rank 1] rank 0 on" in capsys.readouterr().err


def test_when_another_rank_dies_meanwhile_nothing_is_concluded_twice(tmp_path: Path) -> None:
    said: list[int] = []

    def conclude(comm: MemoryCommunicator, result: Result, *_: Any) -> Result:
        said.append(comm.rank)
        ranks.kill(2)
        return result

    ranks = Ranks(3, configure(tmp_path), conclude)
    ranks.train()
    assert said == [0] and [result.exit_status for result in ranks.results[:2]] == [0, 0]
    assert [lost["rank"] for lost in ranks.segment["lost_ranks"]] == [2]


# ---- spares ----------------------------------------------------------------------------------------------------------


def test_spares_that_nobody_needed_are_gone_when_a_run_is_concluded(tmp_path: Path) -> None:
    def conclude(comm: MemoryCommunicator, result: Result, *_: Any) -> Result:
        wait_for(lambda: comm.world.gone == {2, 3}, 30, "the spares' end")
        return replace(result, outcomes={"evaluation": "done"})

    ranks = Ranks(4, with_spares(tmp_path, spares=2, steps=200), conclude)
    ranks.train()
    assert [result.status for result in ranks.results] == ["completed"] * 2 + ["spared"] * 2
    assert [result.exit_status for result in ranks.results] == [0] * 4 and "lost_ranks" not in ranks.segment
    assert ranks.segment["conclusion"] == {"evaluation": "done", "rank": 0}


def test_a_spare_that_has_joined_concludes_when_no_other_rank_is_left(tmp_path: Path) -> None:
    said: list[int] = []

    def conclude(comm: MemoryCommunicator, result: Result, *_: Any) -> Result:
        said.append(comm.rank)
        if comm.rank != 2:
            comm.die()
        return replace(result, outcomes={"evaluation": "done"})

    slow = slow_until_joined(2)

    def dies(comm: MemoryCommunicator, updates: int) -> None:
        slow(comm, updates)
        if comm.rank == 0 and updates == 5:
            comm.die()

    ranks = Ranks(3, with_spares(tmp_path, spares=1, steps=1000), conclude)
    ranks.train(dies)
    assert said == [1, 2] and ranks.results[2].leads and ranks.record["completed"]
    assert ranks.segment["conclusion"] == {"evaluation": "done", "rank": 2}
    assert [lost["rank"] for lost in ranks.segment["lost_ranks"]] == [0, 1]


def test_who_has_left_concludes_nothing(tmp_path: Path) -> None:
    said: list[int] = []

    def conclude(comm: MemoryCommunicator, result: Result, *_: Any) -> Result:
        said.append(comm.rank)
        return result

    def leaves(comm: MemoryCommunicator, updates: int) -> None:
        comm.interrupt.leave_requested |= comm.rank == 0 and updates == 5

    ranks = Ranks(3, configure(tmp_path, steps=1200, max_staleness=1), conclude)
    ranks.train(leaves)
    assert ranks.results[0].status == "left" and said == [1] and "lost_ranks" not in ranks.segment
    assert [left["rank"] for left in ranks.segment["left_ranks"]] == [0]


def test_of_ranks_that_leave_in_the_same_moment_one_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each finds that all others have left, and stays."""
    said = list[int]()

    def conclude(comm: MemoryCommunicator, result: Result, *_: Any) -> Result:
        said.append(comm.rank)
        return result

    ranks = Ranks(3, configure(tmp_path, steps=ENDLESS), conclude)
    train_until_all_leave(ranks, monkeypatch)
    assert said == [0] and [result.leads for result in ranks.results] == [True, False, False]
    assert {result.status for result in ranks.results} == {"stopped"}
    assert ranks.segment["status"] == "stopped" and ranks.segment["signal"] == "SIGUSR2" and ranks.segment["saved"]
    assert not {"left_ranks", "lost_ranks"} & ranks.segment.keys()
    assert capsys.readouterr().err.count("checkpoint written") == 1


def test_a_spare_that_waits_in_vain_for_the_only_rank_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, with_spares(tmp_path, spares=1, steps=200))
    close, seen = GossipExchange.close, []
    monkeypatch.setattr(Job, "patience_s", 0.5)

    def stopped(gossip: GossipExchange, timeout_s: float) -> Any:
        wait_for(lambda: ranks.comms[0].world.gone == {1}, 30, "the spare's end")
        seen.append(ranks.segment)
        return close(gossip, timeout_s)

    monkeypatch.setattr(GossipExchange, "close", stopped)
    ranks.train()
    assert isinstance(ranks.results[1], EndError) and seen[0]["status"] == "failed"
    assert seen[0]["error"] == str(ranks.results[1])


def test_a_damaged_word_of_the_end_keeps_nobody_waiting_for_a_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    hear, damaged = GossipDriver.on_message, list[Received]()

    def hear_damaged(driver: GossipDriver, message: Received) -> None:
        if driver.state.rank == 1 and not damaged:
            damaged.append(message)
            message = message._replace(data=np.invert(message.data))
        hear(driver, message)

    monkeypatch.setattr(GossipDriver, "on_message", hear_damaged)
    monkeypatch.setattr(Job, "patience_s", 30.0)
    ranks = Ranks(2, with_spares(tmp_path, spares=1, steps=200))
    ranks.train()
    assert "[rank 1] rejected a message from rank 0: it begins with" in capsys.readouterr().err
    assert [result.status for result in ranks.results] == ["completed", "spared"] and ranks.record["completed"]


# ---- gradients that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("guilty", slow_but_for([[1], [0, 2], [0, 1, 2]], [1]))
def test_allreduce_names_the_rank_whose_gradients_are_not_finite(
    guilty: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The mean of all is not finite on any rank; no other accuses itself, and the job ends on all of them."""
    differentiate = Learner.differentiate

    def poisoned(learner: Learner) -> Any:
        loss = differentiate(learner)
        if learner._rank in guilty and learner.counters.updates >= 5:
            learner._flat.gradient[3] = float("nan")
        return loss

    monkeypatch.setattr(Learner, "differentiate", poisoned)
    ranks = Ranks(3, configure(tmp_path, "allreduce", 10**6))
    ranks.train()
    who = ", ".join(map(str, guilty))
    for rank, error in enumerate(ranks.results):
        whose = "" if rank in guilty else f"rank {who} has given "
        assert isinstance(error, EndError)
        assert str(error).startswith(f"[rank {rank}] update 105: {whose}no finite gradient for 100 updates.")
    said = capsys.readouterr().err
    for rank in range(3):
        assert (f"[rank {rank}] update 6: the loss or its gradient is not finite" in said) == (rank in guilty)
    assert ranks.segment["status"] == "failed" and "no finite gradient" in ranks.segment["error"]


# ---- a folder that is deleted and made again -------------------------------------------------------------------------


def test_a_job_whose_folder_was_made_anew_by_another_ends_and_leaves_that_alone(tmp_path: Path) -> None:
    """Both train under one name; the first would write its checkpoints, metrics and record over those of the second."""
    first, second = Ranks(2, configure(tmp_path, steps=10**9)), Ranks(2, configure(tmp_path))
    run, before = tmp_path / "r", dict[Path, bytes]()

    def begin_anew(comm: MemoryCommunicator, updates: int) -> None:
        if comm.rank == 0 and updates == 20:
            run.rename(tmp_path / "deleted")  # at once, whatever rank 1 writes meanwhile
            shutil.rmtree(tmp_path / "deleted", ignore_errors=True)
            second.train()
            before.update(contents(run))

    first.train(begin_anew)
    assert all(isinstance(error, EndError) for error in first.results)
    assert "was deleted while this job trained, and another job works in a new one" in str(first.results[0])
    assert second.record["completed"] and before and contents(run) == before


# ---- a disk that is full when a run begins ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        ["r", "metrics", ".lock", "segment-000", "make_env.pkl", "rank-0000.safet", "rank-0001.safet", "run.json"],
        "r", "segment-000", "rank-0001.safet",
    ),
)  # fmt: skip
def test_a_run_that_could_not_begin_keeps_nobody_from_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full just when that is made."""

    def unless_full(action: Callable[..., Any]) -> Callable[..., Any]:
        def act(path: Any, *arguments: Any, **options: Any) -> Any:
            made = Path(path) if isinstance(path, (str, Path)) else Path()
            if full and tmp_path in made.parents and made.name.lstrip(".").startswith(name.lstrip(".")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return action(path, *arguments, **options)

        return act

    monkeypatch.setattr(os, "mkdir", unless_full(os.mkdir))
    monkeypatch.setattr(os, "open", unless_full(os.open))
    monkeypatch.setattr(builtins, "open", unless_full(open))
    ranks, full = Ranks(2, configure(tmp_path), make_env=lambda: gymnasium.make("CartPole-v1")), True
    ranks.train()
    assert all(isinstance(error, CollectiveError) and "No space" in str(error) for error in ranks.results)
    full = False
    ranks.train()
    assert ranks.record["completed"] and len(ranks.record["segments"]) == 1


# ---- nothing was learned ---------------------------------------------------------------------------------------------


def test_ranks_that_do_not_agree_on_the_run_to_resume_say_so(tmp_path: Path) -> None:
    job = train(2, configure(tmp_path, steps=100))
    for other in (None, tmp_path / "other"):
        requests = [Request(job.config, resume=job.run), Request(job.config, resume=other)]
        for error in run_ranks(2, lambda comm: run_rank(comm, requests[comm.rank])):  # noqa: B023
            assert isinstance(error, CollectiveError) and "'resume' is" in str(error) and "Rank 1: " in str(error)


def test_a_run_keeps_its_name_but_a_copy_may_have_another(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    job = train(1, configure(tmp_path, steps=100))
    renamed = replace(job.config, run=replace(job.config.run, name="fork"), total_steps=200)
    copy = job.run.with_name("fork")
    shutil.copytree(job.run, copy)
    for run, name, told in ((job.run, job.config.run.name, True), (copy, "fork", False)):
        (result,) = train(1, renamed, resume=run).results
        assert result.status == "completed" and result.run == run and record_of(run)["config"]["run"]["name"] == name
        assert ("copy the folder and resume the copy" in capsys.readouterr().err) == told


def test_a_run_that_left_out_all_of_its_updates_has_failed(tmp_path: Path) -> None:
    def make_env() -> gymnasium.Env:
        return gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: 1e30)

    ranks = Ranks(2, replace(configure(tmp_path), total_steps=400), make_env=make_env)
    ranks.train()
    assert [type(result) for result in ranks.results] == [EndError, EndError], ranks.results
    assert "updates of all ranks were left out" in ranks.segment["error"]
    assert ranks.segment["status"] == "failed" and not ranks.record["completed"]
    assert not (tmp_path / "r" / "policy.safetensors").exists()
    ranks.resume = tmp_path / "r"  # which used up its budget
    ranks.train()
    assert [type(result) for result in ranks.results] == [EndError, EndError], ranks.results
    assert ranks.segment["status"] == "failed" and not ranks.record["completed"]


def raises(env: gymnasium.Env) -> None:
    raise ValueError("no level")


def raises_in_a_step() -> None:
    """Stand for `raises` in the first step."""


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (lambda: np.zeros(2, bool), "gives an action mask that allows no action"),
        (lambda: np.ones(3, bool), r"gives action masks, but one has the shape \(3,\)"),
        (lambda: np.full(2, np.nan), "gives action masks, but one has other numbers than 0 and 1"),
        (raises, "fails at the start: 'reset' raised ValueError: no level"),
        (raises_in_a_step, "fails at the start: 'step' raised ValueError: no level"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_wrong_in_the_first_reset_or_step_is_a_mistake_of_all_ranks_that_leaves_no_run(
    first: Callable[..., Any], sentence: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    class Own(gymnasium.Wrapper):
        def reset(self, **arguments: Any) -> Any:
            return raises(self) if first is raises else super().reset(**arguments)

        def step(self, action: Any) -> Any:
            return raises(self) if first is raises_in_a_step else super().step(action)

        if first not in (raises, raises_in_a_step):

            def action_masks(self) -> Any:
                return first()

    job = Ranks(ranks, configure(tmp_path), make_env=lambda: Own(gymnasium.make("CartPole-v1")))
    job.train()
    assert [type(error) for error in job.results] == [CollectiveError] * ranks
    assert len(set(map(str, job.results))) == 1
    assert re.match(rf"The environment 'CartPole-v1' {sentence}", str(job.results[0]))
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().err


def test_what_is_wrong_in_the_first_reset_of_a_resumed_run_changes_nothing_in_it(tmp_path: Path) -> None:
    ranks = Ranks(2, configure(tmp_path))
    ranks.train()
    before = contents(tmp_path)
    del before[tmp_path / "r/.lock"]  # says who had it last
    ranks = Ranks(2, replace(ranks.config, total_steps=1200), make_env=Unready)
    ranks.resume = tmp_path / "r"
    ranks.train()
    assert [type(error) for error in ranks.results] == [CollectiveError] * 2, ranks.results
    after = contents(tmp_path)
    assert {path: after.get(path) for path in before} == before and len(after) == len(before) + 1


class Unready(gymnasium.Wrapper):
    """CartPole that cannot be reset."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def reset(self, **arguments: Any) -> Any:
        raise ValueError("no level")


def test_a_run_of_gorila_without_an_update_says_that_it_learned_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """All its rewards after the start are NaN, so that each step is a failure and nothing comes into a replay."""
    tried_out: set[str] = set()

    def spoiled(reward: Any) -> Any:
        rank = threading.current_thread().name
        if rank in tried_out:
            return float("nan")
        tried_out.add(rank)
        return reward

    def make_env() -> gymnasium.Env:
        return gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), spoiled)

    config = gorila(tmp_path)
    ranks = Ranks(2, replace(config, env=replace(config.env, restarts=10**6)), make_env=make_env)
    ranks.train()
    assert ranks.record["completed"]
    said = capsys.readouterr().err
    assert said.count("No rank made an update in the ") == 1 and "'rewards_not_finite'" in said


class Busy(gymnasium.Wrapper):
    """CartPole whose next resets fail, as often as `left` says."""

    left = 0

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def reset(self, **arguments: Any) -> Any:
        if Busy.left > 0:
            Busy.left -= 1
            raise ConnectionError("the simulator is busy")
        return super().reset(**arguments)


@pytest.mark.parametrize(("failures", "is_scored"), [(3, True), (4, False)])
def test_an_evaluation_whose_environment_fails_at_once_makes_it_anew_or_says_how_to_evaluate_later(
    failures: int, is_scored: bool, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(comm: MemoryCommunicator, *rest: Any) -> Any:
        monkeypatch.setattr(Busy, "left", failures)
        return conclusion.conclude(*rest)

    config = replace(configure(tmp_path, steps=200), evaluation=EvaluationConfig(episodes=2, num_envs=1))
    ranks = Ranks(2, config, busy, make_env=Busy)
    ranks.train()
    assert ranks.record["completed"] and [result.exit_status for result in ranks.results] == [0, 0]
    concluded = ranks.segment["conclusion"]["evaluation"]
    assert (concluded == "done") == is_scored and (tmp_path / "r/policy.safetensors").exists()
    said = capsys.readouterr()
    assert said.err.count("Traceback") == 1
    if is_scored:
        assert "'reset' raised ConnectionError: the simulator is busy" in said.err
    else:
        assert "has failed 4 times" in concluded and "raised ConnectionError: the simulator is busy" in concluded
        assert f"; `pala evaluate {tmp_path / 'r'} --trust-run` makes up for it" in said.out


def test_an_evaluation_that_is_given_up_leaves_a_complete_run(tmp_path: Path) -> None:
    settings = EvaluationConfig(episodes=10**6, num_envs=1, timeout_s=1.0)
    config = replace(configure(tmp_path, steps=200), evaluation=settings)
    ranks = Ranks(2, config, lambda comm, *rest: conclusion.conclude(*rest))
    ranks.train()
    assert ranks.record["completed"] and [result.exit_status for result in ranks.results] == [0, 0]
    said = ranks.segment["conclusion"]["evaluation"]
    assert said.startswith("given up after 1 s ('evaluation.timeout_s') with ")
