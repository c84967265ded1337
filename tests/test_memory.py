"""Whole trainings whose ranks are threads of one process: every exchange, Gorila, and faults by script.

What these tests show of the protocols, `test_mpi.py` and `test_faults.py` show of MPI.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGTERM, SIGUSR1
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from conftest import record_of, slow_among, slow_but_for, wait_for
from torch import Tensor

from pala.a2c.learner import Learner
from pala.config import (
    A2CConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    ExchangeConfig,
    GorilaConfig,
    NetworkConfig,
    RunConfig,
    check,
)
from pala.exchange.base import average_of_ranks
from pala.exchange.budget import Stop
from pala.exchange.gossip.driver import GossipDriver
from pala.exchange.gossip.exchange import Gossip
from pala.exchange.gossip.messages import Kind
from pala.exchange.kinds import KINDS
from pala.gorila.shard import assemble
from pala.run import checkpoint
from pala.run.checkpoint import RankState, load_policy
from pala.run.hooks import Hooks, Moment
from pala.run.job import Job
from pala.run.metric_table import METRICS
from pala.run.metrics import read_run
from pala.run.rank import run_rank
from pala.run.records import Records
from pala.run.result import Result
from pala.system.errors import CollectiveError, EndError, PalaError
from pala.transport.faults import (
    Fault,
    OnTheWay,
    corrupt,
    drop,
    fail_at,
    fail_at_message,
    signal_at,
    stop_at,
    stop_at_message,
)
from pala.transport.memory import Killed, MemoryCommunicator, run_ranks

ENVS, ROLLOUT = 5, 2  # in this form a batch of ten costs least
BATCH = ENVS * ROLLOUT
COUPLED = [kind.name for kind in KINDS.values() if not kind.independent]
OUTLIVING = [kind.name for kind in KINDS.values() if kind.outlives_ranks]
NEEDING_ALL = [kind.name for kind in KINDS.values() if not kind.outlives_ranks]
ENDLESS = 10**9
GORILA = GorilaConfig(
    replay_capacity_steps=1000, min_replay_steps=60, minibatch_size=8, target_period_updates=20, num_shards=2
)
SEPARATE = replace(GORILA, roles="separate", num_actors=2, num_learners=2)  # shards 0 and 1, learners, actors

OnUpdate = Callable[[MemoryCommunicator, int], None]


class Paced(gymnasium.Wrapper):
    """Takes its time, so that a job lasts."""

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return super().step(action)


gymnasium.register("Paced-v0", lambda: Paced(gymnasium.make("CartPole-v1")))


def configure(folder: Path, kind: str = "gossip", steps: int = 600, **settings: Any) -> Config:
    """CartPole and a network so small that a rank makes a hundred updates in a blink."""
    envs, rollout = (2, 5) if "exchanges_per_update" in settings else (ENVS, ROLLOUT)
    return Config(
        total_steps=steps, env=EnvConfig("CartPole-v1", num_envs=envs), network=NetworkConfig(mlp_hidden=(4,)),
        a2c=A2CConfig(rollout_steps=rollout),
        exchange=ExchangeConfig(kind, **settings), evaluation=EvaluationConfig(episodes=0),  # type: ignore[arg-type]
        run=RunConfig(str(folder), "r", console="none", tensorboard=False, log_interval_s=0.1, threads=1),
    )  # fmt: skip


def gorila(folder: Path, config: GorilaConfig = GORILA, steps: int = 400) -> Config:
    plain = configure(folder, steps=steps)
    env = replace(plain.env, id="Paced-v0") if config.roles == "separate" else plain.env  # actors wait for no learner
    return replace(plain, algorithm="gorila", gorila=config, env=env)


@dataclass
class Trained:
    """A job that has ended."""

    config: Config
    results: list[Any]  # of each rank, what it returned or raised

    @property
    def run(self) -> Path:
        return Path(self.config.run.dir) / self.config.run.name

    @property
    def record(self) -> dict[str, Any]:
        return record_of(self.run)

    @property
    def segment(self) -> dict[str, Any]:
        return self.record["segments"][-1]

    @property
    def policy(self) -> dict[str, Tensor]:
        return load_policy(self.run / "policy.safetensors")[0]

    def states(self, first: bool = False, ranks: int | None = None) -> list[RankState]:
        """The ranks' newest checkpoints, or those that they began with."""
        folder = checkpoint.newest_segment(self.run)
        return [
            checkpoint._read_rank(checkpoint._rank_path(folder, rank, previous=first))
            for rank in range(ranks or len(self.results))
        ]

    def total(self, key: str, rank: int | None = None) -> float:
        """Sum of a metric over all records, of one rank or of all."""
        ranks = read_run(self.run)
        kept = ranks if rank is None else [ranks[rank]]
        return sum(r.get(key) or 0 for records in kept for r in records if r["type"] == "interval")

    def fields(self) -> set[str]:
        """The sum over all records of all ranks."""
        return {key for records in read_run(self.run) for record in records for key in record}

    def ended_well(self, but_for: Iterable[int] = ()) -> bool:
        """Raise what a rank raised that should have completed."""
        for rank, result in enumerate(self.results):
            if rank not in but_for:
                if isinstance(result, BaseException):
                    raise result
                assert result.status == "completed"
        return self.record["completed"]

    def resume(self, ranks: int, steps: int) -> Trained:
        return train(ranks, replace(self.config, total_steps=steps), resume=self.run)


def train(
    ranks: int, config: Config, faults: Iterable[Fault] = (), resume: Path | None = None,
    on_update: OnUpdate = MemoryCommunicator.on_update,
) -> Trained:  # fmt: skip
    def main(comm: MemoryCommunicator) -> Result:
        with asking_as_abort_does(comm):
            return run_rank(
                comm, config, resume=resume, on_update=lambda updates: on_update(comm, updates),
                interrupt=comm.interrupt,
            )  # fmt: skip

    return Trained(config, run_ranks(ranks, main, faults))


@contextmanager
def asking_as_abort_does(comm: MemoryCommunicator) -> Iterator[None]:
    """Who ends the job asks first who else lives: then no transport's thread may still be in MPI."""
    try:
        yield
    except EndError:
        comm.is_alone()  # refuses while a transport is open
        raise


def own_steps(states: Iterable[RankState]) -> list[int]:
    return [state.counters["own_steps"] for state in states]


def leave_at(*ranks: int, update: int) -> OnUpdate:
    """These ranks get SIGUSR2 when they have made so many updates."""

    def on_update(comm: MemoryCommunicator, updates: int) -> None:
        comm.on_update(updates)
        if comm.rank in ranks and updates == update:
            comm.interrupt.is_told_to_leave = True

    return on_update


def parameters(states: Iterable[RankState]) -> Tensor:
    return torch.stack([state.tensors["parameters"] for state in states])


# ---- all is well -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_training_completes_with_the_budget_met(kind: str, ranks: int, tmp_path: Path) -> None:
    trained = train(ranks, configure(tmp_path, kind, 300 * ranks))
    assert trained.ended_well()
    states = trained.states()
    made, asked = sum(own_steps(states)), trained.config.total_steps
    assert asked <= made < asked + 10 * ranks * BATCH
    assert {result.global_steps for result in trained.results} == {made} == {trained.segment["global_steps"]}
    assert [result.leads for result in trained.results] == [rank == 0 for rank in range(ranks)]
    assert all(bool(tensor.isfinite().all()) for tensor in trained.policy.values())
    assert (trained.total("models_mixed") > 0) == (kind in ("gossip", "shared_memory"))
    known = {metric.name for metric in METRICS if metric.algorithm != "gorila"}
    assert trained.fields() == known if kind == "gossip" else trained.fields() <= known
    if KINDS[kind].independent:
        assert own_steps(states) == [300] * ranks
        assert len(parameters(states).unique(dim=0)) == ranks
    if KINDS[kind].one_model:
        assert len(parameters(states).unique(dim=0)) == len(set(own_steps(states))) == 1


@pytest.mark.parametrize(
    "settings",
    slow_but_for(
        [
            {"topology": "ring"}, {"topology": "exponential"}, {"topology": "complete"}, {"mixing": "push_sum"},
            {"max_staleness": 0}, {"compression": "bfloat16"}, {"compression": "top_k"}, {"mixing": "paired"},
            {"compression": "top_k", "max_staleness": 0}, {"mixing": "paired", "topology": "ring"},
            {"mixing": "paired", "topology": "exponential", "max_staleness": 0},
            {"mixing": "paired", "exchanges_per_update": 4},
            {"mixing": "paired", "exchanges_per_update": 4, "max_staleness": 0, "compression": "top_k"},
        ],
        {"mixing": "push_sum"}, {"max_staleness": 0}, {"mixing": "paired", "exchanges_per_update": 4},
    ),
    ids=str,
)  # fmt: skip
def test_gossip_completes_however_it_is_set(settings: dict[str, Any], tmp_path: Path) -> None:
    trained = train(4, configure(tmp_path, **settings))
    assert trained.ended_well() and trained.total("models_mixed") > 0
    assert trained.total("models_refused") == 0


@pytest.mark.parametrize("kind", ["none", "allreduce"])
def test_equal_seeds_give_equal_policies(kind: str, tmp_path: Path) -> None:
    """Though ranks are threads: neither first weights nor actions depend on who comes first."""
    first, second = (train(3, configure(tmp_path / name, kind)) for name in ("first", "second"))
    assert parameters(first.states()).equal(parameters(second.states()))
    assert all(tensor.equal(second.policy[name]) for name, tensor in first.policy.items())


def test_one_gossiping_rank_equals_an_independent_one_bit_for_bit(tmp_path: Path) -> None:
    policies = [train(1, configure(tmp_path / kind, kind, 300)).policy for kind in KINDS]
    for policy in policies[1:]:
        assert all(tensor.equal(policies[0][name]) for name, tensor in policy.items())


def test_a_callback_hears_of_every_update(tmp_path: Path) -> None:
    heard: list[list[int]] = [[], []]
    train(2, configure(tmp_path, "none", 200), on_update=lambda comm, updates: heard[comm.rank].append(updates))
    assert heard == [list(range(1, 11))] * 2


# ---- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", slow_but_for([[1], [0], [0, 3], [1, 2, 3]], [0, 3]), ids=str)
@pytest.mark.parametrize("kind", OUTLIVING)
def test_the_living_make_the_rest(kind: str, dead: list[int], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    faults = [fail_at(rank, update=5 + 3 * rank) for rank in dead]
    trained = train(4, configure(tmp_path, kind, 800, patience_s=0.5), faults)
    assert trained.ended_well(but_for=dead)
    assert all(isinstance(trained.results[rank], Killed) for rank in dead)
    living = [rank for rank in range(4) if rank not in dead]
    assert [rank for rank in living if trained.results[rank].leads] == living[:1]
    assert [lost["rank"] for lost in trained.segment["lost_ranks"]] == dead
    assert f"[rank {living[0]}] rank {dead[-1]} on" in capsys.readouterr().err
    steps = own_steps(trained.states())
    if KINDS[kind].independent:
        assert all(steps[rank] == 200 for rank in living), "a dead rank takes its share along"
    else:
        assert trained.results[living[0]].global_steps >= 800
        assert sum(steps[rank] for rank in living) + sum(10 * (5 + 3 * rank) for rank in dead) >= 800


@pytest.mark.parametrize("n", slow_but_for([1, 2, 9], 2))
def test_a_rank_may_die_in_the_middle_of_its_messages(n: int, tmp_path: Path) -> None:
    trained = train(3, configure(tmp_path, patience_s=0.5), [fail_at_message(1, n)])
    assert isinstance(trained.results[1], Killed) and trained.ended_well(but_for=[1])


@pytest.mark.parametrize("mixing", slow_but_for(["uniform", "push_sum", "paired"], "paired"))
@pytest.mark.parametrize("left", slow_but_for([[0], [1, 3]], [0]))
def test_the_others_go_on_when_ranks_leave(
    left: list[int], mixing: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    job = train(4, configure(tmp_path, steps=1200, mixing=mixing, max_staleness=1), on_update=leave_at(*left, update=5))
    assert job.ended_well(but_for=left)
    assert [job.results[rank].status for rank in left] == ["left"] * len(left)
    assert [entry["rank"] for entry in job.segment["left_ranks"]] == left and "lost_ranks" not in job.segment
    states = job.states()
    # Unlike that of the dead, all of their work is counted.
    assert job.segment["global_steps"] == sum(own_steps(states)) >= 1200
    assert [own_steps(states)[rank] for rank in left] == [5 * BATCH] * len(left)
    assert job.total("waits_given_up") == 0 and "has died" not in capsys.readouterr().err
    resumed = job.resume(4, steps=1600)
    assert resumed.ended_well() and "left_ranks" not in resumed.segment


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_leaves_when_the_budget_is_met_meanwhile_counts_in_the_policy(
    leaver: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is as new as the others', and it stays for the average. What was noted of it is taken back."""
    leave, weights = GossipDriver.leave, {}

    def leave_at_the_end(driver: GossipDriver) -> None:
        leave(driver)
        wait_for(lambda: driver.protocol.budget.stop is not Stop.NONE, 60, "the end")

    def average(comm: MemoryCommunicator, own: Tensor, weight: float, *others: Any) -> Tensor:
        weights[comm.rank] = weight
        return average_of_ranks(comm, own, weight, *others)

    monkeypatch.setattr(GossipDriver, "leave", leave_at_the_end)
    monkeypatch.setattr("pala.exchange.gossip.exchange.average_of_ranks", average)
    job = train(2, configure(tmp_path, steps=400), on_update=leave_at(leaver, update=3))
    assert job.ended_well() and weights == {0: 1.0, 1: 1.0} and not ranks_in(job, "left_ranks")


def test_where_ranks_cannot_go_and_all_leave_in_the_same_moment_the_run_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the news of any of them has come. One of them says so in the record."""

    def leave(gossip: Gossip) -> bool:
        gossip._driver.leave()
        return True

    monkeypatch.setattr(MemoryCommunicator, "outlives_ranks", False)
    monkeypatch.setattr(Gossip, "leave", leave)
    job = train(3, configure(tmp_path, steps=ENDLESS), on_update=leave_at(0, 1, 2, update=5))
    assert [result.status for result in job.results] == ["stopped"] * 3
    assert [result.leads for result in job.results] == [True, False, False]
    assert job.segment["status"] == "stopped" and job.segment["saved"] and "left_ranks" not in job.segment


def test_where_ranks_cannot_go_who_leaves_sleeps_until_the_end(tmp_path: Path) -> None:
    def on_update(comm: MemoryCommunicator, updates: int) -> None:
        comm.outlives_ranks = False
        leave_at(0, update=5)(comm, updates)

    job = train(3, configure(tmp_path, steps=900), on_update=on_update)
    assert job.ended_well() and [entry["rank"] for entry in job.segment["left_ranks"]] == [0]
    assert own_steps(job.states())[0] == 5 * BATCH and job.segment["global_steps"] == sum(own_steps(job.states()))
    others = job.states()[1:]
    policy = torch.cat([tensor.flatten() for tensor in job.policy.values()])
    assert math.isclose(float(policy.norm()), float(parameters(others).mean(0).norm()), rel_tol=1e-3)


def test_who_leads_while_the_first_sleeps_writes_nothing_of_its_own_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy of run.json is of the time before the run was complete."""
    monkeypatch.setattr(MemoryCommunicator, "outlives_ranks", False)
    saved = Records.saved

    def save_late(records: Records) -> None:
        time.sleep(0.3 * records._rank)
        saved(records)

    monkeypatch.setattr(Records, "saved", save_late)
    job = train(3, configure(tmp_path, steps=900), on_update=leave_at(0, update=5))
    assert job.ended_well() and job.segment["saved"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_when_all_are_told_to_leave_the_run_stops_and_is_resumed(ranks: int, tmp_path: Path) -> None:
    job = train(ranks, configure(tmp_path, steps=ENDLESS), on_update=leave_at(*range(ranks), update=5))
    statuses = [result.status for result in job.results]
    assert set(statuses) <= {"left", "stopped"} and "stopped" in statuses
    assert job.segment["status"] == "stopped" and job.segment["signal"] == "SIGUSR2" and job.segment["saved"]
    steps = sum(own_steps(job.states()))
    assert job.resume(ranks, steps=steps + 200).ended_well()


@pytest.mark.parametrize("leavers", [[0], [0, 1]], ids=str)
def test_when_who_stays_dies_those_who_were_about_to_go_stop_the_run(
    leavers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, about_to_go = Gossip.leave, threading.Barrier(len(leavers))

    def outlive(gossip: Gossip) -> bool:
        leaves, world = leave(gossip), gossip._comm.world  # type: ignore[attr-defined]
        about_to_go.wait(60)
        world.say_that(2, world.dead)
        wait_for(lambda: not gossip.living, 60, "the news of that")
        return leaves

    monkeypatch.setattr(Gossip, "leave", outlive)
    faults = [fail_at(rank, update=5) for rank in (1,) if rank not in leavers]
    job = train(3, configure(tmp_path, steps=ENDLESS), faults, on_update=leave_at(*leavers, update=9))
    assert isinstance(job.results[2], Killed) and {job.results[rank].status for rank in leavers} == {"stopped"}
    assert [rank for rank in leavers if job.results[rank].leads] == [0]
    assert job.segment["status"] == "stopped" and job.segment["signal"] == "SIGUSR2" and job.segment["saved"]
    assert ranks_in(job, "left_ranks") == [] and ranks_in(job, "lost_ranks") == [*{1, 2}.difference(leavers)]
    assert job.resume(3, steps=sum(own_steps(job.states())) + 200).ended_well()


@pytest.mark.parametrize("kind", [*NEEDING_ALL, "none"])
def test_who_cannot_leave_says_so_and_stays(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    job = train(2, configure(tmp_path, kind, steps=300), on_update=leave_at(1, update=5))
    assert job.ended_well() and "only ranks that gossip can: it stays" in capsys.readouterr().err


# ---- spares ----------------------------------------------------------------------------------------------------------


def with_spares(folder: Path, spares: int, steps: int = ENDLESS, **settings: Any) -> Config:
    config = configure(folder, steps=steps, **{"max_staleness": 2} | settings)
    return replace(config, env=replace(config.env, id="Paced-v0"), run=replace(config.run, spares=spares))


def stop_when(*ranks: int, updates: int, also: OnUpdate = MemoryCommunicator.on_update) -> OnUpdate:
    """The job gets SIGUSR1 when these ranks have all made so many updates."""
    have_come: set[int] = set()

    def on_update(comm: MemoryCommunicator, made: int) -> None:
        also(comm, made)
        if comm.rank in ranks and made >= updates:
            have_come.add(comm.rank)
            if len(have_come) == len(ranks):
                comm.interrupt.signal = SIGUSR1

    return on_update


def ranks_in(job: Trained, key: str) -> list[int]:
    return [entry["rank"] for entry in job.segment.get(key, [])]


def stopped_well(job: Trained, but_for: Iterable[int]) -> bool:
    """Raise what a rank raised that should have stopped."""
    for rank, result in enumerate(job.results):
        if rank not in but_for:
            if isinstance(result, BaseException):
                raise result
            assert result.status in ("stopped", "spared")
    return job.segment["status"] == "stopped"


def test_spares_that_nobody_needs_do_nothing(tmp_path: Path) -> None:
    job = train(5, with_spares(tmp_path, spares=2, steps=200))
    assert job.ended_well(but_for=[3, 4]) and [result.status for result in job.results[3:]] == ["spared"] * 2
    assert job.segment["ranks"] == 3 and not {"lost_ranks", "joined_ranks"} & job.segment.keys()
    assert len(list(job.run.glob("metrics/*"))) == len(list(job.run.glob("checkpoints/*/rank-000?.safetensors"))) == 3
    before = [own_steps(job.states(ranks=3)), job.segment["global_steps"]]
    resumed = train(4, replace(job.config, total_steps=400, run=replace(job.config.run, spares=1)), resume=job.run)
    assert resumed.ended_well(but_for=[3]) and before[1] == sum(before[0])
    # The same ranks train, so each goes on from its own checkpoint, however many spares there are.
    assert all(now > then for now, then in zip(own_steps(resumed.states(ranks=3)), before[0], strict=True))


@pytest.mark.parametrize("mixing", slow_but_for(["uniform", "push_sum", "paired"], "uniform"))
@pytest.mark.parametrize("dead", slow_but_for([0, 2], 0))
def test_a_spare_takes_the_place_of_a_rank_that_dies(
    dead: int, mixing: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = with_spares(tmp_path, spares=1, mixing=mixing)
    job = train(4, config, [fail_at(dead, update=5)], on_update=stop_when(3, updates=20))
    assert stopped_well(job, but_for=[dead]) and isinstance(job.results[dead], Killed)
    assert ranks_in(job, "lost_ranks") == [dead] and ranks_in(job, "joined_ranks") == [3]
    own, others = job.states()[3], [rank for rank in (0, 1, 2) if rank != dead]
    assert own.counters["own_steps"] >= 20 * BATCH and own.counters["lost"] == [dead]
    assert job.total("models_refused") == 0 and all(job.total("models_mixed", rank) > 0 for rank in (*others, 3))
    assert "rank 3, a spare, on" in (said := capsys.readouterr().err) and said.count("has joined; 3 train") == 1
    steps = job.segment["global_steps"] + 200
    resumed = train(4, replace(job.config, total_steps=steps), resume=job.run)
    assert resumed.ended_well(but_for=[3]) and "joined_ranks" not in resumed.segment
    assert "had lost 1 rank" in capsys.readouterr().err and resumed.segment["global_steps"] >= steps


@pytest.mark.parametrize("topology", slow_but_for(["ring", "exponential", "complete"], "ring"))
def test_a_spare_takes_a_place_in_any_topology(topology: str, tmp_path: Path) -> None:
    config = with_spares(tmp_path, spares=1, topology=topology, compression="top_k")
    job = train(5, config, [fail_at(1, update=5)], on_update=stop_when(4, updates=10))
    assert stopped_well(job, but_for=[1]) and ranks_in(job, "joined_ranks") == [4]
    assert job.total("models_mixed", rank=4) > 0


def test_a_run_is_completed_with_a_spare(tmp_path: Path) -> None:
    job = train(3, with_spares(tmp_path, spares=1, steps=1000), [fail_at(0, update=5)])
    assert job.ended_well(but_for=[0]) and job.segment["global_steps"] >= 1000


@pytest.mark.parametrize("dead", slow_but_for([(0, 1), (1, 2)], (0, 1)))
def test_two_that_die_one_after_the_other_are_both_replaced(dead: tuple[int, int], tmp_path: Path) -> None:
    faults = [fail_at(dead[0], update=5), fail_at(dead[1], update=6)]
    job = train(5, with_spares(tmp_path, spares=2), faults, on_update=stop_when(3, 4, updates=5))
    assert stopped_well(job, but_for=dead)
    assert ranks_in(job, "lost_ranks") == list(dead) and ranks_in(job, "joined_ranks") == [3, 4]


@pytest.mark.slow
def test_a_spare_that_dies_is_replaced_by_the_next_and_then_the_others_go_on(tmp_path: Path) -> None:
    job = train(5, with_spares(tmp_path, spares=2, steps=2000), [fail_at(rank, update=5) for rank in (1, 3, 4)])
    assert job.ended_well(but_for=[1, 3, 4]) and 1 in ranks_in(job, "lost_ranks")


@pytest.mark.parametrize("n", slow_but_for([1, 2, 3, 5], 2))
def test_a_spare_may_die_with_any_of_its_messages(n: int, tmp_path: Path) -> None:
    faults = [fail_at(0, update=5), fail_at_message(3, n)]
    job = train(5, with_spares(tmp_path, spares=2), faults, on_update=stop_when(4, updates=5))
    assert stopped_well(job, but_for=[0, 3]) and 4 in ranks_in(job, "joined_ranks")


def test_a_spare_that_is_stopped_as_it_takes_a_place_ends_the_job_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not dead, so the next sleeps on; the others meet the budget, and wait for it in vain."""
    monkeypatch.setattr(Job, "patience_s", 2.0)
    config = with_spares(tmp_path, spares=2, steps=1000, patience_s=0.5)
    job = train(5, config, [fail_at(0, update=5), stop_at_message(3, 1)])
    for rank in (1, 2, 4):
        assert isinstance(job.results[rank], EndError) and "did not answer within 2 s" in str(job.results[rank])
    assert job.segment["status"] == "failed" and "did not answer" in job.segment["error"]
    assert ranks_in(job, "lost_ranks") == [0] and 4 not in ranks_in(job, "joined_ranks")
    resumed = train(4, replace(job.config, run=replace(job.config.run, spares=1)), resume=job.run)
    assert resumed.ended_well(but_for=[3])


def test_a_spare_replaces_a_rank_that_leaves(tmp_path: Path) -> None:
    on_update = stop_when(3, updates=5, also=leave_at(1, update=5))
    job = train(4, with_spares(tmp_path, spares=1), on_update=on_update)
    assert stopped_well(job, but_for=[1]) and job.results[1].status == "left"
    assert ranks_in(job, "left_ranks") == [1] and ranks_in(job, "joined_ranks") == [3]


def test_when_all_who_have_a_model_die_a_spare_says_so(tmp_path: Path) -> None:
    def on_update(comm: MemoryCommunicator, updates: int) -> None:
        if comm.rank == 0 and updates >= 5:
            with comm.world.changed:  # both in one moment: the other must not answer the spare
                comm.world.dead.update({0, 1})
            comm.die()

    job = train(3, with_spares(tmp_path, spares=1), on_update=on_update)
    assert isinstance(job.results[2], PalaError) and "no rank is left that has a model" in str(job.results[2])
    assert job.segment["status"] == "failed" and "no rank is left that has a model" in job.segment["error"]
    assert train(3, replace(job.config, total_steps=200), resume=job.run).ended_well(but_for=[2])


def test_a_signal_ends_ranks_that_have_joined_and_ranks_that_sleep(tmp_path: Path) -> None:
    job = train(4, with_spares(tmp_path, spares=2), [fail_at(0, update=5)], on_update=stop_when(2, updates=5))
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
        return run_rank(comm, with_spares(tmp_path, spares=1))

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
        return run_rank(comm, with_spares(tmp_path, spares=1), make_env)

    for rank, result in enumerate(run_ranks(3, main)):
        assert isinstance(result, Killed if rank == dead else EndError), result


def test_when_the_others_do_not_start_spares_end_too(tmp_path: Path) -> None:
    config = with_spares(tmp_path, spares=1)
    for result in train(3, replace(config, env=EnvConfig("NoSuchGame-v0"))).results:
        assert isinstance(result, CollectiveError)
    assert not (tmp_path / "r").exists()


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_fails_is_as_good_as_dead(tmp_path: Path) -> None:
    def fail(comm: MemoryCommunicator, updates: int) -> None:
        if (comm.rank, updates) == (1, 10):
            raise RuntimeError("the planted fault")

    trained = train(3, configure(tmp_path, patience_s=0.5), on_update=fail)
    assert isinstance(trained.results[1], RuntimeError) and trained.ended_well(but_for=[1])


@pytest.mark.parametrize("kind", ["gossip", "none", "gorila"])
def test_a_rank_that_fails_leaves_no_thread_behind(kind: str, tmp_path: Path) -> None:
    """A second `pala.fit` of the same process would call MPI beside it."""

    def main(comm: MemoryCommunicator) -> Result:
        def fail(moment: Moment) -> None:
            if moment.updates == 5:
                raise RuntimeError("the planted fault")

        config = gorila(tmp_path, replace(GORILA, num_shards=1)) if kind == "gorila" else configure(tmp_path, kind)
        try:
            return run_rank(comm, config, interrupt=comm.interrupt, hooks=Hooks(on_update=fail))
        finally:
            left.extend(thread.name for thread in threading.enumerate() if thread.name.startswith("pala-"))

    left: list[str] = []
    (result,) = run_ranks(1, main)
    assert isinstance(result, RuntimeError) and left == []


@pytest.mark.parametrize("kind", NEEDING_ALL)
def test_who_needs_all_ranks_ends_with_a_sentence_and_goes_on_later(kind: str, tmp_path: Path) -> None:
    trained = train(3, configure(tmp_path, kind, ENDLESS), [fail_at(1, update=12)])
    for rank in (0, 2):
        assert isinstance(trained.results[rank], EndError)
        assert "Rank 1 has died, and this 'exchange.kind' cannot go on" in str(trained.results[rank])
    assert not trained.record["completed"]
    resumed = trained.resume(3, 300)
    assert resumed.ended_well() and resumed.results[0].global_steps >= 300


def test_a_resumed_run_leaves_out_what_the_dead_had(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trained = train(3, configure(tmp_path, patience_s=0.5), [fail_at(2, update=5)])
    before = trained.results[0].global_steps
    resumed = trained.resume(3, before + 300)
    assert resumed.ended_well() and "The run had lost 1 rank: every rank starts from the" in capsys.readouterr().err
    assert resumed.results[0].global_steps >= before + 300


# ---- ranks that stop, messages that are lost or damaged --------------------------------------------------------------


@pytest.mark.parametrize("kind", slow_but_for(KINDS, "gossip"))
def test_who_needs_no_other_goes_on_while_a_rank_is_stopped(kind: str, tmp_path: Path) -> None:
    """The others wait for it for a moment only, or for as long as it is stopped; in the end all complete."""
    stopped_s, made = 1.0, [list[float](), list[float](), list[float]()]
    begun: list[float] = []

    def on_update(comm: MemoryCommunicator, updates: int) -> None:
        made[comm.rank].append(time.monotonic())
        if (comm.rank, updates) == (1, 10):
            begun.append(time.monotonic())
        comm.on_update(updates)

    steps = 2400 if KINDS[kind].outlives_ranks else 900  # the others must not have ended before
    config = configure(tmp_path, kind, steps, patience_s=0.1)
    paced = replace(config, env=replace(config.env, id="Paced-v0"))
    trained = train(3, paced, [stop_at(1, update=10, seconds=stopped_s)], on_update=on_update)
    assert trained.ended_well()
    late = begun[0] + 0.5 * stopped_s  # by then, who waits for the others has come to wait for this one
    meanwhile = [sum(late < at < begun[0] + stopped_s for at in times) for times in made]
    assert meanwhile[1] == 0
    if KINDS[kind].outlives_ranks:
        assert meanwhile[0] > 0 < meanwhile[2]
    elif KINDS[kind].one_model:
        assert meanwhile == [0, 0, 0]
    if kind == "gossip":
        assert trained.total("models_stale", rank=1) + trained.total("waits_given_up") > 0


@pytest.mark.parametrize("max_staleness", [0, 10])
def test_a_lost_model_is_not_waited_for_for_ever(max_staleness: int, tmp_path: Path) -> None:
    settings = {"patience_s": 0.1, "max_staleness": max_staleness}
    trained = train(2, configure(tmp_path, steps=200, **settings), [drop(0, 1, n=3), drop(1, 0, n=4)])
    assert trained.ended_well()


def test_a_damaged_model_is_refused_counted_and_named_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    damaged = (2, 3, 4)
    trained = train(3, configure(tmp_path, topology="ring", steps=1500), [corrupt(1, 2, n) for n in damaged])
    assert trained.ended_well()
    sent = trained.total("models_sent", rank=1)
    said = [line for line in capsys.readouterr().err.splitlines() if "refused" in line]
    assert len(said) == 1 and said[0].startswith("[rank 2] rejected a model from rank 1: it begins with")
    expected = sum(n <= sent for n in damaged)  # on a busy machine one rank may do nearly all of the work
    assert (trained.total("models_refused", rank=2), trained.total("models_refused")) == (expected, expected)
    assert expected > 0
    assert bool(parameters(trained.states()).isfinite().all())


# ---- the paired exchange ---------------------------------------------------------------------------------------------

slow = pytest.mark.slow
_KIND_AT = 6  # where a message says of which kind it is


def paired(folder: Path, steps: int = 600, **settings: Any) -> Config:
    return configure(folder, steps=steps, mixing="paired", **settings)


@pytest.mark.parametrize(
    ("ranks", "compression"), [
        (2, "none"), pytest.param(2, "bfloat16", marks=slow), (2, "top_k"), pytest.param(8, "none", marks=slow),
    ],
)  # fmt: skip
def test_paired_training_completes_with_the_budget_met(compression: str, ranks: int, tmp_path: Path) -> None:
    trained = train(ranks, paired(tmp_path, 200 * ranks, compression=compression, max_staleness=2))
    assert trained.ended_well()
    states = trained.states()
    made, asked = sum(own_steps(states)), trained.config.total_steps
    assert asked <= made < asked + 10 * ranks * BATCH and trained.results[0].global_steps == made
    assert trained.total("models_mixed") > 3 * ranks
    assert trained.total("models_refused") == 0
    assert all(bool(tensor.isfinite().all()) for tensor in trained.policy.values())


@slow
def test_paired_ranks_stay_together(tmp_path: Path) -> None:
    """Nothing that a rank learns makes it leave the others, as it does without an exchange."""

    def apart(config: Config) -> float:
        models = parameters(train(3, config).states())
        return float((models - models.mean(0)).norm())

    alone = apart(configure(tmp_path / "alone", "none", 1500))
    assert apart(paired(tmp_path / "paired", 1500, max_staleness=0)) < 0.5 * alone


@pytest.mark.parametrize(("compression", "dead"), [("none", [1]), ("top_k", [0, 3])])
def test_when_paired_ranks_die_the_living_make_the_rest(compression: str, dead: list[int], tmp_path: Path) -> None:
    faults = [fail_at(rank, update=5 + 3 * rank) for rank in dead]
    trained = train(4, paired(tmp_path, 800, patience_s=0.5, compression=compression), faults)
    assert trained.ended_well(but_for=dead)
    assert [lost["rank"] for lost in trained.segment["lost_ranks"]] == dead
    living = [rank for rank in range(4) if rank not in dead]
    assert trained.results[living[0]].global_steps >= 800
    assert bool(parameters([trained.states()[rank] for rank in living]).isfinite().all())


@pytest.mark.parametrize("n", slow_but_for([1, 3], 1))
def test_a_paired_rank_may_die_in_the_middle_of_its_messages(n: int, tmp_path: Path) -> None:
    """As it makes an offer, as it answers one, as it refuses one."""
    trained = train(3, paired(tmp_path, patience_s=0.5), [fail_at_message(1, n)])
    assert isinstance(trained.results[1], Killed) and trained.ended_well(but_for=[1])


@slow
def test_a_paired_rank_that_was_stopped_takes_its_peers_model(tmp_path: Path) -> None:
    config = paired(tmp_path, 1500, patience_s=0.1)
    paced = replace(config, env=replace(config.env, id="Paced-v0"))
    trained = train(3, paced, [stop_at(1, update=10, seconds=1.0)])
    assert trained.ended_well()
    assert trained.total("models_stale", rank=1) + trained.total("waits_given_up") > 0
    assert bool(parameters(trained.states()).isfinite().all())


def meet_the_first(
    number: int, kind: Kind, sender: int, receiver: int, becomes: Callable[[np.ndarray], np.ndarray | None]
) -> list[Fault]:
    """Something happens to so many offers, or answers, of those that are the first from one rank to the other."""
    met = itertools.count()

    def meet(data: np.ndarray) -> np.ndarray | None:
        return becomes(data) if data[_KIND_AT] == kind and next(met) < number else data

    return [OnTheWay(sender, receiver, n, meet) for n in range(1, 100)]


@pytest.mark.parametrize("kind", [Kind.OFFER, Kind.ANSWER], ids=str)
@pytest.mark.parametrize("lost", slow_but_for([(0, 1), (1, 0)], (0, 1)), ids=str)
def test_after_a_lost_offer_or_answer_two_ranks_go_on_to_exchange(
    lost: tuple[int, int], kind: Kind, tmp_path: Path
) -> None:
    """By the offers of the other: the lock of who lost it stays held."""
    trained = train(2, paired(tmp_path, 1000, patience_s=0.1), meet_the_first(1, kind, *lost, lambda data: None))
    assert trained.ended_well() and trained.total("models_mixed") > 10


@pytest.mark.parametrize(
    ("compression", "kind"),
    slow_among([("none", Kind.OFFER), ("none", Kind.ANSWER), ("bfloat16", Kind.OFFER), ("top_k", Kind.ANSWER)], "none"),
)
def test_damaged_offers_and_answers_are_refused_and_leave_nobody_waiting(
    compression: str, kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """On a ring, where rank 1 offers to rank 2."""
    sender, receiver = (1, 2) if kind is Kind.OFFER else (2, 1)
    config = paired(tmp_path, 900, topology="ring", compression=compression, max_staleness=1)
    trained = train(3, config, meet_the_first(3, kind, sender, receiver, np.invert))
    assert trained.ended_well()
    said = [line for line in capsys.readouterr().err.splitlines() if "refused" in line]
    assert any(line.startswith(f"[rank {receiver}] rejected a model from rank {sender}: it begins") for line in said)
    assert trained.total("models_refused", rank=receiver) == 3 and trained.total("models_mixed") > 10
    assert bool(parameters(trained.states()).isfinite().all())


@pytest.mark.parametrize("ranks", [3, pytest.param(5, marks=slow)])
def test_a_paired_run_is_resumed(ranks: int, tmp_path: Path) -> None:
    trained = train(3, paired(tmp_path))
    before, mixed = trained.states(), trained.total("models_mixed")
    resumed = trained.resume(ranks, 1200)
    assert resumed.ended_well() and resumed.results[0].global_steps >= 1200
    assert resumed.total("models_mixed") > mixed > 0
    begun = parameters(resumed.states(first=True))
    expected = parameters(before) if ranks == 3 else parameters(before).mean(0).expand(5, -1)
    torch.testing.assert_close(begun, expected)


# ---- models that are not finite --------------------------------------------------------------------------------------


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's parameters are not finite from update 5 to 29, and it believes itself healthy. The others are slow from
    their update 60 on until it has healed, so as not to use up the budget before."""
    share, healed = Learner._share, threading.Event()

    def poisoned(learner: Learner, result: Any) -> None:
        if learner._rank == 1 and learner.counters.updates in range(5, 30):
            learner._flat.data.fill_(math.nan)
            result = result._replace(applied=True)
        if learner._rank != 1 and learner.counters.updates > 60 and not healed.is_set():
            time.sleep(0.02)
        share(learner, result)
        if learner._rank == 1 and learner.counters.updates >= 30 and learner._flat.data.isfinite().all():
            healed.set()

    monkeypatch.setattr(Learner, "_share", poisoned)


@pytest.mark.parametrize(
    ("compression", "mixing"),
    slow_among(
        [("none", "uniform"), ("bfloat16", "uniform"), ("none", "paired"), ("top_k", "uniform"), ("top_k", "paired")],
        "bfloat16", "none",
    ),
)  # fmt: skip
def test_nan_is_refused_and_healed(
    compression: str, mixing: str, poison: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    trained = train(3, configure(tmp_path, steps=1500, compression=compression, mixing=mixing))
    assert trained.ended_well()
    said = capsys.readouterr().err
    assert "rejected a model from rank 1: it holds NaN" in said and "rejected a model from rank 0" not in said
    assert "the parameters were not finite either; they are replaced by what the peers sent" in said
    assert trained.total("models_refused") >= 1
    assert bool(parameters(trained.states()).isfinite().all())


def test_nan_without_peers_ends_that_rank_with_a_sentence(poison: None, tmp_path: Path) -> None:
    trained = train(2, configure(tmp_path, "none", 800))
    assert isinstance(trained.results[1], PalaError)
    assert "[rank 1] update 30: the parameters are not finite and there is no peer" in str(trained.results[1])
    assert trained.ended_well(but_for=[1])


# ---- signals and resumes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COUPLED)
def test_a_signal_to_one_rank_stops_all_and_a_resume_goes_on(kind: str, tmp_path: Path) -> None:
    trained = train(3, configure(tmp_path, kind, ENDLESS), [signal_at(1, update=15)])
    assert [(r.status, r.signal) for r in trained.results] == [
        ("stopped", SIGUSR1 if rank == 1 else SIGTERM) for rank in range(3)
    ]
    assert trained.segment["status"] == "stopped" and not trained.record["completed"]
    made = sum(own_steps(trained.states()))
    assert made == trained.results[0].global_steps == trained.segment["global_steps"]
    resumed = trained.resume(3, made + 200)
    assert resumed.ended_well() and resumed.results[0].global_steps >= made + 200
    assert [segment["resumed"] for segment in resumed.record["segments"]] == [False, True]


@pytest.mark.parametrize("kind", slow_but_for(KINDS, "gossip"))
def test_the_same_ranks_go_on_from_their_own_checkpoints(kind: str, tmp_path: Path) -> None:
    trained = train(3, configure(tmp_path, kind))
    before = trained.states()
    resumed = trained.resume(3, 1200)
    assert resumed.ended_well() and resumed.results[0].global_steps >= 1200
    begun = resumed.states(first=True)
    assert parameters(begun).equal(parameters(before)) and own_steps(begun) == own_steps(before)
    assert all(after > old for after, old in zip(own_steps(resumed.states()), own_steps(before), strict=True))
    for old, new in zip(before, begun, strict=True):
        assert old.random_states["actions"].equal(new.random_states["actions"])


@pytest.mark.parametrize("ranks", slow_but_for([1, 4], 4))
@pytest.mark.parametrize("kind", slow_but_for(KINDS, "gossip"))
def test_other_ranks_go_on_from_the_runs_policy(
    kind: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    trained = train(2, configure(tmp_path, kind))
    before, made = trained.states(), trained.results[0].global_steps
    resumed = trained.resume(ranks, made + 300)
    assert resumed.ended_well() and made + 300 <= resumed.results[0].global_steps
    assert f"The run had 2 ranks and now has {ranks}: every rank starts from" in capsys.readouterr().err
    expected = parameters(before)[0] if KINDS[kind].policy == "first" else parameters(before).mean(0)
    for state in resumed.states(first=True):
        torch.testing.assert_close(state.tensors["parameters"], expected)
        assert (state.counters["own_steps"], state.counters["base_steps"]) == (0, made)


def test_ranks_of_one_model_begin_alike_when_they_saved_at_unlike_times(tmp_path: Path) -> None:
    trained = train(3, configure(tmp_path, "allreduce"))
    newest = trained.states()[0]
    segment = checkpoint.newest_segment(trained.run)
    checkpoint._rank_path(segment, 1, previous=True).replace(checkpoint._rank_path(segment, 1))
    assert own_steps(trained.states())[1] == 0
    begun = trained.resume(3, 1200).states(first=True)
    assert own_steps(begun) == [newest.counters["own_steps"]] * 3
    assert parameters(begun).equal(newest.tensors["parameters"].expand(3, -1))


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_ranks_with_other_settings_are_told_and_nothing_is_left(tmp_path: Path) -> None:
    config = configure(tmp_path)

    def main(comm: MemoryCommunicator) -> Result:
        return run_rank(comm, replace(config, seed=1 + comm.rank // 2))

    errors = run_ranks(3, main)
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert "Rank 2: this rank was started with another configuration than rank 0: 'seed' is 2" in str(errors[1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("resume", slow_but_for([False, True], True))
def test_a_run_that_cannot_be_saved_fails_at_once_and_leaves_nothing(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train(2, configure(tmp_path)) if resume else None
    save_rank = checkpoint.save_rank

    def save_or_fail(folder: Path, state: RankState) -> None:
        if state.rank == 1:
            raise OSError(28, "No space left on device")
        save_rank(folder, state)

    monkeypatch.setattr(checkpoint, "save_rank", save_or_fail)
    failed = train(2, configure(tmp_path), resume=trained.run if trained else None)
    assert all(isinstance(error, CollectiveError) and "Rank 1: No space left" in str(error) for error in failed.results)
    assert [path.name for path in tmp_path.iterdir()] == (["r"] if resume else [])
    if trained is not None:
        assert [path.name for path in (trained.run / "checkpoints").iterdir()] == ["segment-000"]
        assert trained.record["completed"] and len(trained.record["segments"]) == 1


# ---- Gorila ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "config"), [(1, replace(GORILA, num_shards=1)), (3, GORILA), (6, SEPARATE)])
def test_gorila_completes_with_the_budget_met(ranks: int, config: GorilaConfig, tmp_path: Path) -> None:
    trained = train(ranks, gorila(tmp_path, config))
    assert trained.ended_well() and 400 <= trained.results[0].global_steps < 500
    assert trained.fields() == {metric.name for metric in METRICS if metric.algorithm != "a2c"}
    states = trained.states()
    assert sum(own_steps(states)) == trained.results[0].global_steps
    assert assemble(states).version > 20 and trained.total("messages_refused") == 0
    assert all(bool(tensor.isfinite().all()) for tensor in trained.policy.values())


@pytest.mark.parametrize(
    ("ranks", "config", "fault"),
    [
        (3, GORILA, fail_at(2, 10)),
        pytest.param(6, SEPARATE, fail_at(3, 10), marks=pytest.mark.slow),
        pytest.param(6, SEPARATE, fail_at_message(5, 30), marks=pytest.mark.slow),
    ],
    ids=["bundle", "learner", "actor"],
)
def test_gorila_outlives_what_others_can_do_as_well(
    ranks: int, config: GorilaConfig, fault: Fault, tmp_path: Path
) -> None:
    trained = train(ranks, gorila(tmp_path, config, steps=800), [fault])
    assert isinstance(trained.results[fault.rank], Killed)  # type: ignore[union-attr]
    assert trained.ended_well(but_for=[fault.rank])  # type: ignore[union-attr]
    assert trained.results[0].global_steps >= 800


@pytest.mark.parametrize(("ranks", "config"), slow_among([(3, GORILA), (6, SEPARATE)], 6))
def test_the_death_of_a_shard_ends_gorila_with_a_sentence(ranks: int, config: GorilaConfig, tmp_path: Path) -> None:
    trained = train(ranks, gorila(tmp_path, config, ENDLESS), [fail_at_message(1, 20)])
    sentence = "Rank 1 has died, which served shard 1 of the parameters; nothing can be learned without it"
    for rank in {*range(ranks)} - {1}:
        assert isinstance(trained.results[rank], EndError) and sentence in str(trained.results[rank])
    assert not trained.record["completed"]
    resumed = trained.resume(ranks, 400)
    assert resumed.ended_well() and resumed.results[0].global_steps >= 400


def test_a_signal_to_one_rank_stops_gorila_and_its_replay_is_kept(tmp_path: Path) -> None:
    config = replace(GORILA, save_replay=True)
    trained = train(3, gorila(tmp_path, config, ENDLESS), [signal_at(2, update=10)])
    assert {result.status for result in trained.results} == {"stopped"}
    begin, made = assemble(trained.states()), trained.results[0].global_steps
    resumed = trained.resume(3, made + 200)
    assert resumed.ended_well() and resumed.results[0].global_steps >= made + 200
    assert assemble(resumed.states(first=True)).parameters.equal(begin.parameters)
    assert assemble(resumed.states()).version > begin.version
    assert len(list((resumed.run / "checkpoints/segment-001").glob("*.replay"))) == 3
    assert not list((resumed.run / "checkpoints/segment-000").glob("*.replay"))


def test_other_ranks_and_roles_go_on_with_gorilas_parameters(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trained = train(3, gorila(tmp_path))
    begin, made = assemble(trained.states()), trained.results[0].global_steps
    config = gorila(tmp_path, SEPARATE, made + 300)
    resumed = train(6, config, resume=trained.run)
    assert resumed.ended_well() and resumed.results[0].global_steps >= made + 300
    assert "The run had 3 ranks and now has 6: the shards' parameters are shared out" in capsys.readouterr().err
    begun = assemble(resumed.states(first=True))
    assert begun.parameters.equal(begin.parameters) and begun.version == begin.version


def test_roles_that_do_not_fit_are_a_mistake_of_all(tmp_path: Path) -> None:
    errors = train(3, gorila(tmp_path, SEPARATE)).results
    assert all(isinstance(error, CollectiveError) and "but the job has 3" in str(error) for error in errors)
    assert not list(tmp_path.iterdir())
