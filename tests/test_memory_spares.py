"""Spares on threads: which take places, when, and what becomes of those that nobody needs."""

from __future__ import annotations

import pkgutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from pala.algorithms import ALGORITHMS, Algorithm
from pala.comm.base import Communicator
from pala.config import Config, EnvConfig, ExchangeConfig
from pala.config.checks import check
from pala.envs.vector import Envs
from pala.exchange.budget import StepBudget
from pala.exchange.gossip.driver import GossipDriver
from pala.exchange.gossip.exchange import GossipExchange
from pala.job.job import Job
from pala.job.rank import run_rank
from pala.job.request import Request, Result
from pala.run.agent import Agent
from pala.run.hooks import UserCode
from pala.system.errors import CollectiveError, EndError, PalaError
from pala.testing.faults import (
    fail_at,
    fail_at_message,
    stop_at_message,
)
from pala.testing.memory import Killed, MemoryCommunicator, run_ranks
from support.helpers import slow_among, slow_but_for, wait_for
from support.memory_jobs import (
    BATCH,
    NEEDING_ALL,
    both,
    leave_at,
    ranks_in,
    saved_steps,
    slow_until_joined,
    stop_when,
    stopped_well,
    train,
    with_spares,
)

pytestmark = pytest.mark.often(
    "test_a_spare_replaces_a_rank_that_leaves",
    "test_a_spare_computes_in_what_the_others_have_chosen",
    "test_a_spare_takes_a_place_in_any_topology",
    "test_a_spare_may_die_with_any_of_its_messages",
)


def test_spares_that_nobody_needs_do_nothing(tmp_path: Path) -> None:
    job = train(5, with_spares(tmp_path, spares=2, steps=200))
    assert job.ended_well(but_for=[3, 4]) and [result.status for result in job.results[3:]] == ["spared"] * 2
    assert job.segment["ranks"] == 3 and not {"lost_ranks", "joined_ranks"} & job.segment.keys()
    assert len(list(job.run.glob("metrics/*"))) == len(list(job.run.glob("checkpoints/*/rank-000?.safetensors"))) == 3
    before = [saved_steps(job.states(ranks=3)), job.segment["global_steps"]]
    resumed = train(4, replace(job.config, total_steps=1000, run=replace(job.config.run, spares=1)), resume=job.run)
    assert resumed.ended_well(but_for=[3]) and before[1] == sum(before[0])
    # The same ranks train, so each continues from its own checkpoint, however many spares there are.
    assert all(now > then for now, then in zip(saved_steps(resumed.states(ranks=3)), before[0], strict=True))


@pytest.mark.parametrize("mixing", slow_but_for(["uniform", "push_sum", "paired"], "uniform"))
@pytest.mark.parametrize("dead", slow_but_for([0, 2], 0))
def test_a_spare_takes_the_place_of_a_rank_that_dies(
    dead: int, mixing: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = with_spares(tmp_path, spares=1, mixing=mixing)
    job = train(4, config, [fail_at(dead, update=5)], on_count=stop_when(3, updates=20))
    assert stopped_well(job, but_for=[dead]) and isinstance(job.results[dead], Killed)
    assert ranks_in(job, "lost_ranks") == [dead] and ranks_in(job, "joined_ranks") == [3]
    own, others = job.states()[3], [rank for rank in (0, 1, 2) if rank != dead]
    assert own.counters["local_steps"] >= 20 * BATCH and own.counters["lost"] == [dead]
    assert job.total("models_refused") == 0 and all(job.total("models_mixed", rank) > 0 for rank in (*others, 3))
    assert "rank 3, a spare, on" in (said := capsys.readouterr().err) and said.count("has joined; 3 train") == 1
    steps = job.segment["global_steps"] + 200
    resumed = train(4, replace(job.config, total_steps=steps), resume=job.run)
    assert resumed.ended_well(but_for=[3]) and "joined_ranks" not in resumed.segment
    assert "had lost 1 rank" in capsys.readouterr().err and resumed.segment["global_steps"] >= steps


def test_a_spare_computes_in_what_the_others_have_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = type(ALGORITHMS["a2c"])
    chosen, usual = dict[str, tuple[Any, Any]](), row.build

    def build(self: Algorithm, comm: Communicator, config: Config, *given: Any) -> Agent[Any]:
        chosen[threading.current_thread().name] = config.network.precision, config.network.background
        return usual(self, comm, config, *given)

    monkeypatch.setattr(row, "build", build)
    config = with_spares(tmp_path, spares=1)
    config = replace(config, network=replace(config.network, precision="auto"))
    job = train(3, config, [fail_at(0, update=5)], on_count=stop_when(2, updates=5))
    assert stopped_well(job, but_for=[0]) and job.segment["precision"] == "float32"
    assert chosen == {"rank-0": ("auto", "auto"), "rank-1": ("auto", "auto"), "rank-2": ("float32", 0.0)}


@pytest.mark.parametrize("topology", slow_but_for(["ring", "exponential", "complete"], "ring"))
def test_a_spare_takes_a_place_in_any_topology(topology: str, tmp_path: Path) -> None:
    config = with_spares(tmp_path, spares=1, topology=topology, compression="top_k", patience_s=0.5)
    job = train(5, config, [fail_at(1, update=5)], on_count=stop_when(4, updates=10))
    assert stopped_well(job, but_for=[1]) and ranks_in(job, "joined_ranks") == [4]
    assert job.total("models_mixed", rank=4) > 0


def test_a_resume_goes_on_from_the_spare_that_trained_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """All that began died before their next checkpoints, which know of no death."""
    joined = threading.Event()

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if comm.rank == 2:
            joined.set()
        elif joined.is_set() and updates > 5:
            comm.die()

    stop = both(on_count, stop_when(2, updates=20))
    job = train(3, with_spares(tmp_path, spares=1), [fail_at(0, update=5)], on_count=stop)
    assert stopped_well(job, but_for=[0, 1]) and ranks_in(job, "joined_ranks") == [2]
    (trained,) = [state for state in job.states() if state.rank == 2]
    assert trained.counters["updates"] >= 20 and job.states()[1].counters["lost"] == []
    steps = job.segment["global_steps"]
    resumed = train(3, replace(job.config, total_steps=steps + 1), resume=job.run)
    assert resumed.ended_well(but_for=[2]) and "had lost 1 rank" in capsys.readouterr().err
    assert resumed.segment["global_steps"] > steps and resumed.states(ranks=1)[0].counters["updates"] >= 20


@pytest.mark.parametrize("what", ["pala.job.start.build_envs", "pala.run.run.Run.start_metrics"])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_spare_that_cannot_build_leaves_its_place_to_others(
    is_last: bool, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has taken the place or after: another takes it, or, if nobody else lives then, the run has failed."""
    usual, comms = pkgutil.resolve_name(what), list[MemoryCommunicator]()

    def fail(*given: object) -> object:
        if threading.current_thread().name != "rank-3":
            return usual(*given)
        if is_last:
            with comms[0].world.changed:
                comms[0].world.dead.update({0, 1, 2, 4})
            wait_for(lambda: not {f"rank-{n}" for n in (1, 2, 4)} & {thread.name for thread in threading.enumerate()})
        raise ValueError("no licence")

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        comms.append(comm)
        stop_when(4, updates=5)(comm, updates)

    monkeypatch.setattr(what, fail)
    job = train(5, with_spares(tmp_path, spares=2), [fail_at(0, update=5)], on_count=on_count)
    assert isinstance(job.results[3], ValueError)
    if is_last:
        assert job.segment["status"] == "failed" and "no licence" in job.segment["error"]
    else:
        assert stopped_well(job, but_for=[0, 3]) and 4 in ranks_in(job, "joined_ranks")


def test_a_run_is_completed_with_a_spare(tmp_path: Path) -> None:
    faults = [fail_at(0, update=5)]
    job = train(3, with_spares(tmp_path, spares=1, steps=1000), faults, on_count=slow_until_joined(2))
    assert job.ended_well(but_for=[0]) and job.segment["global_steps"] >= 1000


@pytest.mark.parametrize("dead", slow_but_for([(0, 1), (1, 2)], (0, 1)))
def test_two_that_die_one_after_the_other_are_both_replaced(dead: tuple[int, int], tmp_path: Path) -> None:
    faults = [fail_at(dead[0], update=5), fail_at(dead[1], update=6)]
    job = train(5, with_spares(tmp_path, spares=2), faults, on_count=stop_when(3, 4, updates=5))
    assert stopped_well(job, but_for=dead)
    assert ranks_in(job, "lost_ranks") == list(dead) and ranks_in(job, "joined_ranks") == [3, 4]


def test_a_spare_that_dies_is_replaced_by_the_next_and_then_the_others_go_on(tmp_path: Path) -> None:
    job = train(5, with_spares(tmp_path, spares=2, steps=2000), [fail_at(rank, update=5) for rank in (1, 3, 4)])
    assert job.ended_well(but_for=[1, 3, 4]) and 1 in ranks_in(job, "lost_ranks")


@pytest.mark.parametrize("n", slow_but_for([1, 2, 3, 5], 2))
def test_a_spare_may_die_with_any_of_its_messages(n: int, tmp_path: Path) -> None:
    faults = [fail_at(0, update=5), fail_at_message(3, n)]
    job = train(5, with_spares(tmp_path, spares=2), faults, on_count=stop_when(4, updates=5))
    assert stopped_well(job, but_for=[0, 3]) and 4 in ranks_in(job, "joined_ranks")


def test_a_spare_that_is_stopped_as_it_takes_a_place_ends_the_job_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not dead, so the next sleeps on; the others meet the budget, and wait for it in vain."""

    def wait_for_the_stop(comm: MemoryCommunicator, updates: int) -> None:
        if comm.world.dead:  # else they might meet the budget before the spare has heard of the death
            wait_for(lambda: comm.world.stopped_until_s[3] > 0, 60, "the stop of the spare")

    monkeypatch.setattr(Job, "patience_s", 2.0)
    config = with_spares(tmp_path, spares=2, steps=1000, patience_s=0.5)
    job = train(5, config, [fail_at(0, update=5), stop_at_message(3, 1)], on_count=wait_for_the_stop)
    for rank in (1, 2, 4):
        assert isinstance(job.results[rank], EndError) and "did not answer within 2 s" in str(job.results[rank])
    assert job.segment["status"] == "failed" and "did not answer" in job.segment["error"]
    assert ranks_in(job, "lost_ranks") == [0] and 4 not in ranks_in(job, "joined_ranks")
    monkeypatch.setattr(Job, "patience_s", 300.0)
    resumed = train(4, replace(job.config, run=replace(job.config.run, spares=1)), resume=job.run)
    assert resumed.ended_well(but_for=[3])


@pytest.mark.parametrize(("ranks", "spares", "dead"), slow_among([(3, 1, None), (3, 0, 2), (2, 0, None)], 3))
def test_ranks_that_all_leave_in_the_same_moment_are_not_lost(
    ranks: int, spares: int, dead: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds that the other has left, and stays; what it saved meanwhile calls the other lost."""
    leave, together = GossipDriver.leave, threading.Barrier(2)

    def leave_together(driver: GossipDriver) -> None:
        together.wait(60)
        leave(driver)
        wait_for(lambda: not driver.state.living, 60, "the news that the other leaves")

    monkeypatch.setattr(GossipDriver, "leave", leave_together)
    # A spare that joined just then would let one of them go for good.
    monkeypatch.setattr(StepBudget, "is_needed", property(lambda budget: False))
    config = with_spares(tmp_path, spares=spares)
    faults = [fail_at(dead, update=5)] if dead is not None else []
    job = train(ranks, config, faults, on_count=leave_at(0, 1, update=20))
    assert stopped_well(job, but_for=[dead] if dead is not None else [])
    assert [state.counters["lost"] for state in job.states(ranks=2)] == [[] if dead is None else [dead]] * 2
    resumed = train(ranks, replace(job.config, total_steps=2000), resume=job.run)
    assert resumed.ended_well(but_for=[2] if spares else [])


def test_a_spare_replaces_a_rank_that_leaves(tmp_path: Path) -> None:
    on_count = both(leave_at(1, update=5), stop_when(3, updates=5))
    job = train(4, with_spares(tmp_path, spares=1), on_count=on_count)
    assert stopped_well(job, but_for=[1]) and job.results[1].status == "left"
    assert ranks_in(job, "left_ranks") == [1] and ranks_in(job, "joined_ranks") == [3]


@pytest.mark.parametrize("mixing", slow_but_for(["uniform", "paired"], "uniform"))
def test_who_has_the_only_model_leaves_when_a_spare_has_one_too(
    mixing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told just when the spare's word has come that it takes a place; it once took the model along."""
    leave = GossipExchange.leave

    def leave_as_the_spare_joins(exchange: GossipExchange) -> bool:
        wait_for(lambda: 2 in {*exchange.joining} or exchange.state().steps_by_rank[2], 60, "the word of the spare")
        return leave(exchange)

    monkeypatch.setattr(GossipExchange, "leave", leave_as_the_spare_joins)
    on_count = both(leave_at(0, update=5), stop_when(2, updates=5))
    job = train(3, with_spares(tmp_path, spares=1, mixing=mixing), [fail_at(1, update=5)], on_count=on_count)
    assert stopped_well(job, but_for=[0, 1]) and job.results[0].status == "left"
    assert ranks_in(job, "left_ranks") == [0] and ranks_in(job, "joined_ranks") == [2]


def test_when_all_who_have_a_model_die_a_spare_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned = list[str]()
    monkeypatch.setattr(Envs, "abandon", lambda envs: abandoned.append(threading.current_thread().name))

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if comm.rank == 0 and updates >= 5:
            with comm.world.changed:  # both in one moment: the other must not answer the spare
                comm.world.dead.update({0, 1})
            comm.die()

    job = train(3, with_spares(tmp_path, spares=1), on_count=on_count)
    assert isinstance(job.results[2], PalaError) and "no rank is left that has a model" in str(job.results[2])
    assert "rank-2" in abandoned
    assert job.segment["status"] == "failed" and "no rank is left that has a model" in job.segment["error"]
    assert train(3, replace(job.config, total_steps=200), resume=job.run).ended_well(but_for=[2])


def test_a_signal_ends_ranks_that_have_joined_and_ranks_that_sleep(tmp_path: Path) -> None:
    job = train(4, with_spares(tmp_path, spares=2), [fail_at(0, update=5)], on_count=stop_when(2, updates=5))
    assert [result.status for result in job.results[1:]] == ["stopped", "stopped", "spared"]
    assert ranks_in(job, "joined_ranks") == [2]


@pytest.mark.parametrize("kind", [*NEEDING_ALL, "none"])
def test_where_no_rank_can_be_replaced_spares_are_a_mistake(kind: str, tmp_path: Path) -> None:
    config = with_spares(tmp_path, spares=1)
    with pytest.raises(PalaError, match="no rank can take another's place"):
        check(replace(config, exchange=ExchangeConfig(kind)), "A preset")  # type: ignore[arg-type]
    check(replace(config, algorithm="gorila"), "A preset")


def test_spares_need_others_and_a_job_that_outlives_its_ranks(tmp_path: Path) -> None:
    for result in train(2, with_spares(tmp_path, spares=2)).results:
        assert isinstance(result, CollectiveError) and "'run.spares' is 2, but the job has 2 ranks" in str(result)

    def main(comm: MemoryCommunicator) -> Result:
        comm.outlives_ranks = False
        return run_rank(comm, Request(with_spares(tmp_path, spares=1)))

    for result in run_ranks(3, main):
        assert isinstance(result, CollectiveError) and "mpirun --with-ft ulfm" in str(result)


@pytest.mark.parametrize("dead", [1, 2])
def test_a_rank_or_a_spare_that_dies_in_the_start_ends_the_job(dead: int, tmp_path: Path) -> None:
    def make_env() -> gymnasium.Env:
        if threading.current_thread().name == "rank-1" and dead == 1:
            raise Killed
        return gymnasium.make("CartPole-v1")

    def main(comm: MemoryCommunicator) -> Result:
        if comm.rank == dead == 2:
            comm.first = lambda size: comm.die()  # type: ignore[method-assign]
        return run_rank(comm, Request(with_spares(tmp_path, spares=1), UserCode(make_env)))

    for rank, result in enumerate(run_ranks(3, main)):
        assert isinstance(result, Killed if rank == dead else EndError), result


def test_when_the_others_do_not_start_spares_end_too(tmp_path: Path) -> None:
    config = with_spares(tmp_path, spares=1)
    for result in train(3, replace(config, env=EnvConfig("NoSuchGame-v0"))).results:
        assert isinstance(result, CollectiveError)
    assert not (tmp_path / "r").exists()
