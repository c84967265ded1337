"""Gorila's spares in whole trainings, on threads: ranks that die or leave are replaced."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from signal import SIGUSR1

import pytest

from pala.algorithms import ALGORITHMS
from pala.comm.base import Communicator
from pala.config import Config, GorilaConfig
from pala.envs.vector import Envs
from pala.exchange.budget import Stop
from pala.gorila.agent import GorilaAgent, build
from pala.gorila.exchange import GorilaExchange
from pala.gorila.node import Node
from pala.gorila.sleeping import SleepingGorila
from pala.system.errors import EndError, PalaError
from pala.testing.faults import fail_at, fail_at_message
from pala.testing.memory import Killed, MemoryCommunicator
from support.helpers import slow_but_for, wait_for
from support.memory_jobs import (
    ENDLESS,
    GORILA,
    SEPARATE,
    OnCount,
    both,
    gorila,
    leave_at,
    ranks_in,
    saved_steps,
    slow_until_joined,
    stop_when,
    stopped_well,
    train,
)
from support.run_folders import intervals

BUNDLED = replace(GORILA, num_shards=1)


def with_spares(folder: Path, spares: int, config: GorilaConfig = BUNDLED, steps: int = ENDLESS) -> Config:
    plain = gorila(folder, config, steps)
    return replace(plain, env=replace(plain.env, id="Paced-v0"), run=replace(plain.run, spares=spares))


# ---- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", slow_but_for([1, 2], 2))
def test_a_spare_takes_the_place_of_a_bundle(dead: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    job = train(4, with_spares(tmp_path, 1), [fail_at(dead, 5)], on_count=stop_when(3, updates=20))
    assert stopped_well(job, but_for=[dead]) and isinstance(job.results[dead], Killed)
    assert ranks_in(job, "lost_ranks") == [dead] and ranks_in(job, "joined_ranks") == [3]
    assert job.total("gradients_sent", rank=3) >= 19 and saved_steps(job.states())[3] > 60
    assert job.total("messages_refused") == 0
    said = capsys.readouterr().err
    assert "[rank 3] begins an empty replay: what the one before it held is lost" in said
    assert said.count("rank 3, a spare, on") == 1 and said.count("has joined; 3 train") == 1
    steps = job.segment["global_steps"] + 200
    resumed = train(4, replace(job.config, total_steps=steps), resume=job.run)
    assert resumed.ended_well(but_for=[3]) and resumed.segment["global_steps"] >= steps
    assert "had lost 1 rank: the shards' parameters are shared out again" in capsys.readouterr().err


@pytest.mark.slow
def test_the_replay_of_a_spare_is_sampled_by_all_where_replay_is_global(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other learners hear of it by its steps."""
    config = with_spares(tmp_path, 1, replace(BUNDLED, replay="global"))
    job = train(4, config, [fail_at(2, 5)], on_count=stop_when(3, updates=60))
    assert stopped_well(job, but_for=[2]) and ranks_in(job, "joined_ranks") == [3]
    assert job.total("gradients_sent", rank=3) > 40
    assert max(record["replay_transitions"] for record in intervals(job.run, 3)) > 60
    assert job.total("messages_refused") == 0 and "refused a message" not in capsys.readouterr().err


def test_ranks_of_one_role_each_have_no_spares(tmp_path: Path) -> None:
    errors = train(6, with_spares(tmp_path, 1, replace(SEPARATE, num_shards=1))).results[:5]
    sentence = "'run.spares' is 1, but 'gorila.roles' is 'separate', in which a spare takes no place; leave"
    assert all(isinstance(error, PalaError) and sentence in str(error) for error in errors), errors


def test_a_run_is_completed_with_a_spare(tmp_path: Path) -> None:
    job = train(4, with_spares(tmp_path, 1, steps=800), [fail_at(2, 5)], on_count=slow_until_joined(3))
    assert job.ended_well(but_for=[2]) and 800 <= job.segment["global_steps"] < 900


@pytest.mark.slow
def test_spares_that_nobody_needs_do_nothing(tmp_path: Path) -> None:
    job = train(4, with_spares(tmp_path, 2, steps=300))
    assert job.ended_well(but_for=[2, 3]) and [result.status for result in job.results[2:]] == ["spared"] * 2
    assert job.segment["ranks"] == 2 and not {"lost_ranks", "joined_ranks"} & job.segment.keys()
    before = saved_steps(job.states(ranks=2))
    resumed = train(3, replace(job.config, total_steps=1500, run=replace(job.config.run, spares=1)), resume=job.run)
    assert resumed.ended_well(but_for=[2])
    assert all(now > then for now, then in zip(saved_steps(resumed.states(ranks=2)), before, strict=True))


# ---- deaths at bad moments -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("has_joined", [False, True])
def test_the_death_of_a_shard_ends_the_job_and_the_spares(has_joined: bool, tmp_path: Path) -> None:
    faults = [fail_at(2, 5)] * has_joined + [fail_at_message(1, 200)]
    job = train(4, with_spares(tmp_path, 1, GORILA), faults)
    sentence = "Rank 1 has died, which served shard 1 of the parameters, of which no spare has a copy; nothing can"
    for rank in {0, 3} if has_joined else {0, 2, 3}:
        assert isinstance(job.results[rank], EndError) and sentence in str(job.results[rank]), job.results[rank]
    assert job.segment["status"] == "failed" and sentence in job.segment["error"]
    assert train(4, replace(job.config, total_steps=400), resume=job.run).ended_well(but_for=[3])


@pytest.mark.parametrize("n", slow_but_for([1, 2, 5], 5))
def test_a_spare_may_die_with_any_of_its_messages(n: int, tmp_path: Path) -> None:
    """As it tells that it joins, as it asks for a model, as it sends its first gradient."""
    faults = [fail_at(1, 5), fail_at_message(3, n)]
    job = train(5, with_spares(tmp_path, 2), faults, on_count=stop_when(4, updates=5))
    assert stopped_well(job, but_for=[1, 3]) and 4 in ranks_in(job, "joined_ranks")


def test_two_that_die_one_after_the_other_and_a_sleeping_spare(tmp_path: Path) -> None:
    faults = [fail_at(1, 5), fail_at(2, 6)]
    slept = []

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if not slept:
            slept.append(comm.world.say_that(3, comm.world.dead))  # it sleeps, and is gone
        stop(comm, updates)

    stop = stop_when(4, 5, updates=5)
    job = train(6, with_spares(tmp_path, 3), faults, on_count=on_count)
    assert stopped_well(job, but_for=[1, 2, 3]) and ranks_in(job, "joined_ranks") == [4, 5]
    assert ranks_in(job, "lost_ranks") == [1, 2]


# ---- ranks that leave ------------------------------------------------------------------------------------------------


def stop_after_a_departure(*ranks: int) -> OnCount:
    """The job gets SIGUSR1 when a rank has gone, and then one of these has made forty updates."""
    since = list[int]()

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if comm.rank in ranks and comm.world.dead:
            since.append(updates)
            if len(since) == 40:
                comm.interrupt.signal = SIGUSR1

    return on_count


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.slow
def test_a_rank_leaves_and_a_spare_if_there_is_one_takes_its_place(
    spares: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    on_count = both(leave_at(2, update=5), stop_after_a_departure(3 if spares else 1))
    job = train(3 + spares, with_spares(tmp_path, spares), on_count=on_count)
    assert stopped_well(job, but_for=[2]) and job.results[2].status == "left"
    assert ranks_in(job, "left_ranks") == [2] and "lost_ranks" not in job.segment
    assert ranks_in(job, "joined_ranks") == [3] * spares
    assert job.results[0].global_steps == sum(saved_steps(job.states()))  # unlike those of the dead, all are counted
    assert "[rank 2] leaves (SIGUSR2); 2 continue" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "config", "told", "why"),
    [
        (2, BUNDLED, 0, "it serves a shard"),
        (4, replace(SEPARATE, num_shards=1, num_learners=1), 1, "'gorila.roles' is 'separate'"),
    ],
)
@pytest.mark.slow
def test_a_rank_that_others_need_stays_and_says_so(
    ranks: int, config: GorilaConfig, told: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    job = train(ranks, with_spares(tmp_path, 0, config, steps=400), on_count=leave_at(told, update=5))
    assert job.ended_well()
    assert f"[rank {told}] was told to leave (SIGUSR2), but {why}: it stays" in capsys.readouterr().err


def test_when_the_shard_dies_a_rank_that_was_about_to_go_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = GorilaExchange.leave

    def outlive(exchange: GorilaExchange) -> bool:
        leaves, world = leave(exchange), exchange._comm.world  # type: ignore[attr-defined]
        world.say_that(0, world.dead)
        wait_for(lambda: not exchange.living, 60, "the news of that")
        return leaves

    monkeypatch.setattr(GorilaExchange, "leave", outlive)
    job = train(2, with_spares(tmp_path, 0), on_count=leave_at(1, update=5))
    assert stopped_well(job, but_for=[0]) and job.results[1].leads and ranks_in(job, "lost_ranks") == [0]
    assert train(2, replace(job.config, total_steps=400), resume=job.run).ended_well()


def test_where_ranks_cannot_go_who_leaves_sleeps_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryCommunicator, "outlives_ranks", False)
    job = train(3, with_spares(tmp_path, 0, steps=600), on_count=leave_at(2, update=5))
    assert job.ended_well() and ranks_in(job, "left_ranks") == [2]
    assert job.segment["global_steps"] == sum(saved_steps(job.states())) >= 600


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_when_training_ends_while_a_spare_wakes_up_it_ends_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes_up = threading.Event()

    def build_slowly(
        comm: Communicator, config: Config, envs: Envs, make_network: None, sleeping: SleepingGorila | None = None
    ) -> GorilaAgent:
        if sleeping is not None:
            wakes_up.set()
        parts = build(comm, config, envs, make_network, sleeping)
        if sleeping is not None:
            wait_for(lambda: sleeping.members.budget.stop is not Stop.NONE, 60, "the end")
        return parts

    def wait_for_the_spare(comm: MemoryCommunicator, updates: int) -> None:
        if comm.world.dead:
            wait_for(wakes_up.is_set, 60, "the waking of the spare")

    monkeypatch.setattr(ALGORITHMS["gorila"], "build", build_slowly)
    job = train(3, with_spares(tmp_path, 1, steps=500), [fail_at(1, 5)], on_count=wait_for_the_spare)
    assert wakes_up.is_set()
    assert job.ended_well(but_for=[1, 2]) and job.results[2].status == "spared"
    assert ranks_in(job, "lost_ranks") == [1] and "joined_ranks" not in job.segment


def test_a_spare_whose_model_has_not_come_when_training_ends_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Node, "has_model", False)
    job = train(3, with_spares(tmp_path, 1, steps=500), [fail_at(1, 5)])
    assert job.ended_well(but_for=[1, 2]) and job.results[2].status == "spared"
    assert "takes the place" not in capsys.readouterr().err
    assert train(3, replace(job.config, total_steps=700), resume=job.run).ended_well(but_for=[2])


def test_a_death_in_the_last_moment_needs_no_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = GorilaExchange.close

    def dies(exchange: GorilaExchange, timeout_s: float) -> Stop:
        if exchange._comm.rank == 1:
            exchange._comm.die()  # type: ignore[attr-defined]
        return close(exchange, timeout_s)

    monkeypatch.setattr(GorilaExchange, "close", dies)
    job = train(3, with_spares(tmp_path, 1, steps=300))
    assert job.ended_well(but_for=[1, 2]) and job.results[2].status == "spared"
    assert "joined_ranks" not in job.segment
