"""Whole trainings whose ranks are threads of one process: every exchange, and faults by script.

What these tests show of the protocols, `test_mpi.py` and `test_faults.py` show of MPI. Spares, the paired exchange and
Gorila have files of their own.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM, SIGUSR1
from types import SimpleNamespace
from typing import Any, cast

import gymnasium
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from metric_table import METRICS
from pala.a2c.learner import Learner
from pala.config import Config, ExchangeConfig, facts_of
from pala.config.catalogue import KINDS
from pala.config.facts import Facts
from pala.evaluation import evaluate as evaluate_program
from pala.evaluation.policy import policy_of
from pala.evaluation.scoring import Acting, evaluate
from pala.exchange import make as make_module
from pala.exchange.base import Setup, average_of_ranks
from pala.exchange.budget import ExchangeState, Stop
from pala.exchange.gossip.driver import GossipDriver
from pala.exchange.gossip.exchange import GossipExchange
from pala.exchange.gossip.messages import Action
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.gossip.state import GossipState
from pala.exchange.make import make_exchange
from pala.exchange.none import NoExchange
from pala.job import start
from pala.job.rank import run_rank
from pala.job.request import Request, Result
from pala.job.training import Training
from pala.run import checkpoint, run_folder
from pala.run.best_policy import BestPolicy
from pala.run.checkpoint import RankState
from pala.run.hooks import Callbacks, Moment, UserCode
from pala.run.metrics import read_run
from pala.run.run import Run
from pala.run.run_folder import RunRecord
from pala.run.view import RunView
from pala.system.errors import CollectiveError, EndError, PalaError, SaveError, reason
from pala.testing.faults import (
    corrupt,
    drop,
    fail_at,
    fail_at_message,
    signal_at,
    stop_at,
)
from pala.testing.memory import Killed, MemoryCommunicator, run_ranks
from support.environments import Sparkle
from support.helpers import slow_among, slow_but_for, wait_for
from support.memory_jobs import (
    BATCH,
    COUPLED,
    ENDLESS,
    GORILA,
    NEEDING_ALL,
    OUTLIVING,
    both,
    configure,
    gorila,
    leave_at,
    parameters,
    ranks_in,
    saved_steps,
    stop_when,
    stopped_well,
    train,
)

pytestmark = pytest.mark.often(
    "test_training_completes_with_the_budget_met",
    "test_a_callback_hears_of_every_update",
    "test_other_ranks_go_on_from_the_runs_policy",
    "test_where_ranks_cannot_go_who_leaves_sleeps_until_the_end",
    "test_a_rank_that_fails_leaves_no_thread_behind",
    "test_a_run_that_cannot_be_saved_fails_at_once_and_leaves_nothing",
    "test_ranks_of_unlike_networks_are_told",
    "test_one_mix_in_eight_is_measured_however_often_records_are_written",
    "test_a_model_that_mpi_cannot_count_is_told",
)

# ---- all is well -----------------------------------------------------------------------------------------------------

METRICS_OF_A2C = {metric.name for metric in METRICS if metric.is_of("a2c")} - {"info_KEY"}


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_training_completes_with_the_budget_met(kind: str, ranks: int, tmp_path: Path) -> None:
    trained = train(ranks, configure(tmp_path, kind, 300 * ranks))
    assert trained.ended_well()
    states = trained.states()
    made, asked = sum(saved_steps(states)), trained.config.total_steps
    assert trained.met(asked)
    assert {result.global_steps for result in trained.results} == {made} == {trained.segment["global_steps"]}
    assert [result.leads for result in trained.results] == [rank == 0 for rank in range(ranks)]
    assert all(bool(tensor.isfinite().all()) for tensor in trained.policy.values())
    assert (trained.total("models_mixed") > 0) == (KINDS[kind].coupling == 1)
    assert trained.fields() <= METRICS_OF_A2C
    if KINDS[kind].independent:
        assert saved_steps(states) == [300] * ranks
        assert len(parameters(states).unique(dim=0)) == ranks
    if KINDS[kind].averages_gradients:
        assert len(parameters(states).unique(dim=0)) == len(set(saved_steps(states))) == 1


def test_every_metric_is_written_by_some_kind(tmp_path: Path) -> None:
    fields = train(2, configure(tmp_path / "grouped", group=2)).fields()
    assert fields.union(*(train(2, configure(tmp_path / kind, kind)).fields() for kind in KINDS)) == METRICS_OF_A2C


@pytest.mark.parametrize(
    "settings",
    slow_but_for(
        [
            {"topology": "ring"}, {"topology": "exponential", "max_staleness": 0}, {"mixing": "push_sum"},
            {"topology": "complete", "mixing": "uniform"}, {"mixing": "uniform"}, {"max_staleness": 0},
            {"compression": "bfloat16"}, {"compression": "top_k"}, {"compression": "top_k", "max_staleness": 0},
        ],
        {"mixing": "push_sum"}, {"max_staleness": 0},
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
    train(2, configure(tmp_path, "none", 200), on_count=lambda comm, updates: heard[comm.rank].append(updates))
    assert heard == [list(range(1, 11))] * 2


class Passes(TorchDispatchMode):
    """Names the operations on this thread that go over so many numbers."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.names = numbers, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() >= self.numbers and not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return result


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("allreduce", 2, ["copy_", "div"]),
        ("shared_memory", 2, ["copy_", "lerp_"]),
        ("shared_memory", 3, ["copy_", "add", "add_", "mul_"]),
    ],
)
def test_a_rival_makes_no_pass_that_it_does_not_need(kind: str, ranks: int, expected: list[str]) -> None:
    """So that gossip is not compared with a slow one."""
    config = Config(exchange=ExchangeConfig(kind, topology="complete", max_staleness=0))  # type: ignore[arg-type]

    def main(comm: MemoryCommunicator) -> tuple[list[str], Tensor]:
        parameters, gradient = torch.full((2, 1000), float(comm.rank))
        start = ExchangeState([0] * ranks)
        exchange = make_exchange(Setup(comm, parameters, config, start))
        for _ in range(2):  # the first mix is measured
            with Passes(1000) as passes:
                exchange.average_gradient(gradient)
                exchange.after_update(1, healthy=True)
            comm.barrier()
        exchange.stop_now(Stop.BUDGET)
        exchange.close(10)
        return passes.names, gradient if kind == "allreduce" else parameters

    for names, mixed in run_ranks(ranks, main):
        assert names == expected
        torch.testing.assert_close(mixed, torch.full((1000,), (ranks - 1) / 2))


def test_one_mix_in_eight_is_measured_however_often_records_are_written() -> None:
    config = Config(exchange=ExchangeConfig("shared_memory", max_staleness=0))

    def main(comm: MemoryCommunicator) -> list[int]:
        exchange = make_exchange(Setup(comm, torch.zeros(10), config, ExchangeState([0] * 2)))
        measured = list[int]()
        for update in range(24):
            exchange.after_update(1, healthy=True)
            if exchange.metrics()["consensus_distance"] is not None:
                measured.append(update)
            comm.barrier()
        exchange.stop_now(Stop.BUDGET)
        exchange.close(10)
        return measured

    for measured in run_ranks(2, main):
        assert measured == [0, 8, 16]


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
    assert re.search(rf"\[rank \d\] rank {dead[-1]} on", capsys.readouterr().err), "who led then says so"
    steps = saved_steps(trained.states())
    if KINDS[kind].independent:
        assert all(steps[rank] == 200 for rank in living), "a dead rank takes its share along"
    else:
        assert trained.results[living[0]].global_steps >= 800
        assert sum(steps[rank] for rank in living) + sum(10 * (5 + 3 * rank) for rank in dead) >= 800


def test_a_death_that_a_full_disk_keeps_out_of_the_record_is_noted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write, failed = RunRecord._write, []

    def fail_once(record: RunRecord, text: dict[str, Any]) -> None:
        if "lost_ranks" in text["segments"][-1] and not failed:
            failed.append(text)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(record, text)

    monkeypatch.setattr(RunRecord, "_write", fail_once)
    trained = train(3, configure(tmp_path), [fail_at(2, update=10)])
    assert trained.ended_well(but_for=[2]) and failed and ranks_in(trained, "lost_ranks") == [2]
    said = capsys.readouterr().err
    assert "[rank 0] 'run.json' cannot be written: No space left on device. Training continues." in said
    assert said.count("rank 2 on") == 1


@pytest.mark.parametrize("n", slow_but_for([1, 2, 3, 9], 2))
def test_a_rank_may_die_in_the_middle_of_its_messages(n: int, tmp_path: Path) -> None:
    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if comm.rank != 1 and 1 not in comm.world.dead:  # else they might meet the budget before it sends so much
            time.sleep(0.05)

    trained = train(3, configure(tmp_path, patience_s=0.5), [fail_at_message(1, n)], on_count=on_count)
    assert isinstance(trained.results[1], Killed) and trained.ended_well(but_for=[1])


@pytest.mark.parametrize("mixing", slow_but_for(["uniform", "push_sum", "paired"], "paired"))
@pytest.mark.parametrize("left", slow_but_for([[0], [1, 3]], [0]))
def test_the_others_go_on_when_ranks_leave(
    left: list[int], mixing: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = configure(tmp_path, steps=1200, mixing=mixing, max_staleness=1, patience_s=60.0)
    job = train(4, config, on_count=leave_at(*left, update=5))
    assert job.ended_well(but_for=left)
    assert [job.results[rank].status for rank in left] == ["left"] * len(left)
    assert [entry["rank"] for entry in job.segment["left_ranks"]] == left and "lost_ranks" not in job.segment
    states = job.states()
    # Unlike that of the dead, all of their work is counted.
    assert job.segment["global_steps"] == sum(saved_steps(states)) >= 1200
    # It leaves when another has said that it has a model: after the next update or two.
    assert all(5 * BATCH < saved_steps(states)[rank] < 20 * BATCH for rank in left)
    said = capsys.readouterr().err
    assert job.total("waits_given_up") == 0 and "has died" not in said and "waits for" not in said
    resumed = job.resume(4, steps=1600)
    assert resumed.ended_well() and "left_ranks" not in resumed.segment


@pytest.mark.parametrize("mixing", slow_but_for(["uniform", "push_sum"], "uniform"))
def test_the_policy_of_the_last_that_trains_is_its_own_model(mixing: str, tmp_path: Path) -> None:
    """What the other sent as it left is mixed soon, and not hours later at the end."""
    job = train(2, configure(tmp_path, steps=2000, mixing=mixing), on_count=leave_at(1, update=5))
    assert job.ended_well(but_for=[1])
    policy = torch.cat([tensor.flatten() for tensor in job.policy.values()])
    own = job.states(ranks=1)[0].tensors["parameters"]  # saved before the end
    assert math.isclose(float(policy.norm()), float(own.norm()), rel_tol=1e-6)


@pytest.mark.parametrize("kind", ["gossip", "shared_memory"])
@pytest.mark.parametrize(("made", "expected"), [(0, 0.0), (100, 0.5)])
def test_a_rank_that_made_no_update_does_not_count_in_the_policy(
    made: int, expected: float, kind: str, tmp_path: Path
) -> None:
    """Its weights are those of the seed, while another's meet the budget; unless an earlier start has trained them."""

    def main(comm: MemoryCommunicator) -> Tensor:
        parameters, config = torch.full((5,), float(comm.rank)), configure(tmp_path, kind, steps=2 * made + 10)
        exchange = make_exchange(Setup(comm, parameters, config, ExchangeState([made, made])))
        if comm.rank == 0:
            exchange.after_update(10, healthy=True)
        else:
            wait_for(lambda: exchange.stop is Stop.BUDGET, 60, "the end")
        exchange.close(60.0)
        parameters.fill_(comm.rank)  # whatever was mixed at the end
        return exchange.final_parameters(60.0)

    for policy in run_ranks(2, main):
        torch.testing.assert_close(policy, torch.full((5,), expected), atol=1e-6, rtol=0)


def test_of_independent_learners_the_first_that_has_trained_gives_the_policy() -> None:
    """Where a callback ends training before the first has made an update. After the end the steps of all are known."""

    def main(comm: MemoryCommunicator) -> tuple[Tensor, bool]:
        start, config = ExchangeState([0, 0]), Config(total_steps=100)
        exchange = NoExchange(Setup(comm, torch.full((5,), float(comm.rank)), config, start))
        exchange.listen()
        if comm.rank == 1:
            exchange.after_update(10, healthy=True)
            exchange.stop_now(Stop.CALLBACK)
        wait_for(lambda: exchange.stop is Stop.CALLBACK, 60, "the end")
        exchange.close(60.0)
        return exchange.final_parameters(60.0), exchange.state().global_steps == exchange.global_steps == 10

    for policy, is_exact in run_ranks(2, main):
        assert policy.tolist() == [1.0] * 5 and is_exact


@pytest.mark.parametrize("full", [False, True])
def test_the_best_policy_in_training_is_kept(full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is judged by the first 100 episodes that end after its checkpoint; a resume continues with what was kept.
    The parameters are the number of the checkpoint. `full`: the disk, when the best is to be written."""
    means = [None, None, 3.0, None, 7.0, 4.0, 2.0]  # since the last that was held, at each checkpoint
    looks, save_policy = [-1], checkpoint.save_policy

    judge = BestPolicy.judge

    def judged(best: BestPolicy, view: RunView, now_s: float, header: dict[str, Any], present: Any) -> None:
        looks[0] += 1
        numbered = {name: torch.full_like(tensor, looks[0]) for name, tensor in present().items()}
        judge(best, view, now_s, header, lambda: numbered)

    def save(path: Path, named: dict[str, Tensor], header: dict[str, Any]) -> None:
        if full and header.get("mean_return") == 7.0:
            raise OSError(28, "No space left on device")
        save_policy(path, named, header)

    monkeypatch.setattr(checkpoint, "save_policy", save)
    monkeypatch.setattr(RunView, "mean_since", property(lambda view: means[min(looks[0], len(means) - 1)]))
    monkeypatch.setattr(BestPolicy, "judge", judged)
    monkeypatch.setitem(facts_of(Config), "run.checkpoint_interval_s", Facts(between=(0, 1)))
    config = configure(tmp_path, steps=600)
    job = train(2, replace(config, run=replace(config.run, checkpoint_interval_s=0.0)))  # after each update
    assert job.ended_well() and looks[0] > len(means)
    best, header = checkpoint.load_policy(job.run / "best_policy.safetensors")
    # Held: that of checkpoint 0, judged by 3.0 at 2; that of 2, judged by 7.0 at 4; that of 4, judged by 4.0 at 5.
    expected = (4, 4.0) if full else (2, 7.0)
    assert (float(next(iter(best.values())).flatten()[0]), header["mean_return"]) == expected
    assert job.resume(2, 800).ended_well()
    assert checkpoint.load_policy(job.run / "best_policy.safetensors")[1] == header


def test_a_policy_that_is_held_is_judged_at_a_stop_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = list[Stop]()

    def judged(training: Training, view: RunView | None) -> None:
        if view is not None:
            stops.append(training._exchange.stop)

    monkeypatch.setattr(Training, "_judge", judged)
    train(2, configure(tmp_path, steps=ENDLESS), [signal_at(0, update=5)])
    assert stops[-1] is Stop.SIGNAL


@pytest.mark.parametrize(
    ("changed", "is_kept"),
    [
        ({"num_envs": 3, "vectorization": "async"}, True),
        ({"frame_skip": 2}, False),
        ({"wrappers": ["x:Y"]}, False),
        ({"fire_on_reset": True}, True),  # which the earlier one did not know
        ({"fire_on_reset": False}, False),
    ],
)
def test_the_best_policy_of_another_environment_does_not_stay(
    changed: dict[str, Any], is_kept: bool, tmp_path: Path
) -> None:
    file = tmp_path / "best_policy.safetensors"
    env = {"id": "CartPole-v1", "num_envs": 4, "vectorization": "sync", "wrappers": (), "frame_skip": 4}
    earlier = {"environment": "CartPole-v1", "config": {"env": env}, "global_steps": 10}
    checkpoint.save_policy(file, {"weight": torch.zeros(2)}, earlier | {"mean_return": 600.0})
    best, now = BestPolicy(file), earlier | {"config": {"env": env | changed}, "global_steps": 20}
    for value in (None, 5.0):
        view = SimpleNamespace(mean_since=value, watch=lambda now_s: None)
        best.judge(cast(RunView, view), 1.0, now, lambda: {"weight": torch.ones(2)})
    kept = checkpoint.load_policy(file)[1]
    assert (kept["mean_return"], kept["global_steps"]) == ((600.0, 10) if is_kept else (5.0, 20))


def test_who_hears_of_nobody_who_stays_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Rank 1 gives no answer before it has been asked 12 times."""
    wish, assure = GossipProtocol.wish_to_leave, GossipProtocol._assure
    asked = list[str]()

    def ask(protocol: GossipProtocol, state: GossipState) -> list[Action]:
        asked.append(capsys.readouterr().err)
        return wish(protocol, state)

    def answer(protocol: GossipProtocol, state: GossipState) -> list[Action]:
        return assure(protocol, state) if len(asked) >= 12 else []

    monkeypatch.setattr("pala.exchange.gossip.exchange._ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(GossipProtocol, "wish_to_leave", ask)
    monkeypatch.setattr(GossipProtocol, "_assure", answer)
    config = configure(tmp_path, steps=1200, max_staleness=1, patience_s=60.0)
    job = train(2, config, on_count=leave_at(0, update=5))
    assert job.ended_well(but_for=[0]) and job.results[0].status == "left"
    words = "[rank 0] was told to leave (SIGUSR2) and waits for rank 1: it trains until one of the others"
    assert [words in said for said in asked] == [number == 4 for number in range(len(asked))]
    assert words not in capsys.readouterr().err


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_leaves_when_the_budget_is_met_meanwhile_counts_in_the_policy(
    leaver: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is as new as the others', and it stays for the average. What was noted of it is taken back."""
    leave, weights = GossipDriver.leave, {}

    def leave_at_the_end(driver: GossipDriver) -> None:
        leave(driver)
        wait_for(lambda: driver.state.budget.stop is not Stop.NONE, 60, "the end")

    def average(comm: MemoryCommunicator, own: Tensor, weight: float, counts: bool, *others: Any) -> Tensor:
        weights[comm.rank] = weight * counts
        return average_of_ranks(comm, own, weight, counts, *others)

    monkeypatch.setattr(GossipDriver, "leave", leave_at_the_end)
    monkeypatch.setattr("pala.exchange.gossip.exchange.average_of_ranks", average)
    job = train(2, configure(tmp_path, steps=400), on_count=leave_at(leaver, update=3))
    assert job.ended_well() and weights == {0: 1.0, 1: 1.0} and not ranks_in(job, "left_ranks")


def test_where_ranks_cannot_go_and_all_leave_in_the_same_moment_the_run_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the news of any of them has come. One of them says so in the record."""

    together = threading.Barrier(3)

    def leave(gossip: GossipExchange) -> bool:
        together.wait(60)
        gossip.driver.leave()
        return True

    monkeypatch.setattr(MemoryCommunicator, "outlives_ranks", False)
    monkeypatch.setattr(GossipExchange, "leave", leave)
    job = train(3, configure(tmp_path, steps=ENDLESS), on_count=leave_at(0, 1, 2, update=5))
    assert [result.status for result in job.results] == ["stopped"] * 3
    assert [result.leads for result in job.results] == [True, False, False]
    assert job.segment["status"] == "stopped" and job.segment["saved"] and "left_ranks" not in job.segment


def test_where_ranks_cannot_go_who_leaves_sleeps_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryCommunicator, "outlives_ranks", False)
    job = train(3, configure(tmp_path, steps=900), on_count=leave_at(0, update=5))
    assert job.ended_well() and [entry["rank"] for entry in job.segment["left_ranks"]] == [0]
    assert 5 * BATCH < saved_steps(job.states())[0] < 25 * BATCH and job.segment["global_steps"] == sum(
        saved_steps(job.states())
    )
    others = job.states()[1:]
    policy = torch.cat([tensor.flatten() for tensor in job.policy.values()])
    assert math.isclose(float(policy.norm()), float(parameters(others).mean(0).norm()), rel_tol=1e-3)


def test_who_leads_while_the_first_sleeps_writes_nothing_of_its_own_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy of run.json is of the time before the run was complete."""
    monkeypatch.setattr(MemoryCommunicator, "outlives_ranks", False)
    saved, have_saved = Run.saved, [threading.Event() for _ in range(3)]

    def save_in_turn(run: Run) -> None:
        if run.rank > 0:
            assert have_saved[run.rank - 1].wait(60)
        saved(run)
        have_saved[run.rank].set()

    monkeypatch.setattr(Run, "saved", save_in_turn)
    job = train(3, configure(tmp_path, steps=900), on_count=leave_at(0, update=5))
    assert job.ended_well() and job.segment["saved"]


def test_a_signal_to_the_job_is_named_even_by_a_rank_that_was_about_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, about_to_go = GossipDriver.leave, threading.Event()

    def leave_at_the_end(driver: GossipDriver) -> None:
        leave(driver)
        about_to_go.set()
        wait_for(lambda: driver.state.budget.stop is not Stop.NONE, 60, "the end")

    def end(comm: MemoryCommunicator, updates: int) -> None:
        if comm.rank == 1 and about_to_go.is_set():
            comm.interrupt.signal = SIGTERM

    monkeypatch.setattr(GossipDriver, "leave", leave_at_the_end)
    job = train(2, configure(tmp_path, steps=ENDLESS), on_count=both(leave_at(0, update=3), end))
    assert [result.status for result in job.results] == ["stopped"] * 2
    assert job.segment["signal"] == "SIGTERM" and {result.signal for result in job.results} == {SIGTERM}


@pytest.mark.parametrize("ranks", [1, 3])
def test_when_all_are_told_to_leave_the_run_stops_and_is_resumed(ranks: int, tmp_path: Path) -> None:
    job = train(ranks, configure(tmp_path, steps=ENDLESS), on_count=leave_at(*range(ranks), update=5))
    statuses = [result.status for result in job.results]
    assert set(statuses) <= {"left", "stopped"} and "stopped" in statuses
    assert job.segment["status"] == "stopped" and job.segment["signal"] == "SIGUSR2" and job.segment["saved"]
    steps = sum(saved_steps(job.states()))
    assert job.resume(ranks, steps=steps + 200).ended_well()


@pytest.mark.parametrize("leavers, hears_of_the_end", [([0], False), ([0, 1], False), ([0, 1], True)], ids=str)
def test_when_who_stays_dies_those_who_were_about_to_go_stop_the_run(
    leavers: list[int], hears_of_the_end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds so itself, or rank 0 hears it of the other."""
    leave, about_to_go = GossipExchange.leave, threading.Barrier(len(leavers))

    def outlive(gossip: GossipExchange) -> bool:
        leaves, world = leave(gossip), gossip._comm.world  # type: ignore[attr-defined]
        if not gossip._state.has_left:  # it has asked who stays
            return leaves
        about_to_go.wait(60)
        world.say_that(2, world.dead)
        wait_for(lambda: not gossip.living, 60, "the news of that")
        if hears_of_the_end and gossip._comm.rank == 0:  # type: ignore[attr-defined]
            wait_for(lambda: gossip.stop is not Stop.NONE, 60, "the end")
        return leaves

    monkeypatch.setattr(GossipExchange, "leave", outlive)
    faults = [fail_at(rank, update=5) for rank in (1,) if rank not in leavers]
    job = train(3, configure(tmp_path, steps=ENDLESS), faults, on_count=leave_at(*leavers, update=9))
    assert isinstance(job.results[2], Killed) and {job.results[rank].status for rank in leavers} == {"stopped"}
    assert [rank for rank in leavers if job.results[rank].leads] == [0]
    assert job.segment["status"] == "stopped" and job.segment["signal"] == "SIGUSR2" and job.segment["saved"]
    assert ranks_in(job, "left_ranks") == [] and ranks_in(job, "lost_ranks") == [*{1, 2}.difference(leavers)]
    assert job.resume(3, steps=sum(saved_steps(job.states())) + 200).ended_well()


@pytest.mark.parametrize("answers", [True, False])
def test_who_left_with_all_it_counted_on_waits_for_another_to_say_that_it_stays(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Ranks 0 and 1 count on each other. Rank 2 answers when both have left, or never: then the job ends."""
    leave, say, assure = GossipExchange.leave, GossipDriver.leave, GossipProtocol._assure
    may, together = set[int](), threading.Barrier(2)

    def leave_with_the_other(gossip: GossipExchange) -> bool:
        rank = gossip._comm.rank  # type: ignore[attr-defined]
        may.update([rank] if gossip._state.may_leave else [])
        if may == {rank}:
            gossip.interrupt.leave_requested = True  # the next update answers the other
            return False
        return leave(gossip)

    def say_together(driver: GossipDriver) -> None:
        together.wait(60)
        say(driver)

    def answer(protocol: GossipProtocol, state: GossipState) -> list[Action]:
        both_left = answers and list(state.living) == [2]
        return assure(protocol, state) if state.rank < 2 or both_left else []

    def end(comm: MemoryCommunicator, updates: int) -> None:
        if comm.world.ended == {0, 1}:
            comm.interrupt.signal = SIGTERM

    monkeypatch.setattr(GossipExchange, "leave", leave_with_the_other)
    monkeypatch.setattr(GossipDriver, "leave", say_together)
    monkeypatch.setattr(GossipProtocol, "_assure", answer)
    config = configure(tmp_path, steps=ENDLESS, patience_s=60.0 if answers else 1.0)
    job = train(3, config, on_count=both(leave_at(0, 1, update=5), end))
    said = capsys.readouterr().err
    if answers:
        assert [result.status for result in job.results] == ["left", "left", "stopped"], said
        assert ranks_in(job, "left_ranks") == [0, 1] and job.segment["signal"] == "SIGTERM"
        assert "the job ends" not in said
    else:
        assert job.segment["status"] == "stopped" and job.segment["signal"] == "SIGUSR2" and job.segment["saved"]
        assert "but rank 2 reported no usable model: the job ends." in said


@pytest.mark.parametrize("kind", [*NEEDING_ALL, "none"])
def test_who_cannot_leave_says_so_and_stays(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    job = train(2, configure(tmp_path, kind, steps=300), on_count=leave_at(1, update=5))
    assert job.ended_well() and "only ranks of gossip and Gorila can: it stays" in capsys.readouterr().err


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_fails_is_as_good_as_dead(tmp_path: Path) -> None:
    def fail(comm: MemoryCommunicator, updates: int) -> None:
        if (comm.rank, updates) == (1, 10):
            raise RuntimeError("the planted fault")

    fail.planned = [(1, 10)]  # type: ignore[attr-defined]
    trained = train(3, configure(tmp_path, patience_s=0.5), on_count=fail)
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
            return run_rank(comm, Request(config, callbacks=Callbacks(on_update=fail)))
        finally:
            left.extend(
                thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("pala-")
            )

    before, left = set(threading.enumerate()), list[str]()
    (result,) = run_ranks(1, main)
    assert isinstance(result, RuntimeError) and left == []


@pytest.mark.parametrize("kind", NEEDING_ALL)
def test_who_needs_all_ranks_ends_with_a_sentence_and_goes_on_later(kind: str, tmp_path: Path) -> None:
    trained = train(3, configure(tmp_path, kind, ENDLESS), [fail_at(1, update=12)])
    for rank in (0, 2):
        assert isinstance(trained.results[rank], EndError)
        assert "Rank 1 has died, and this 'exchange.kind' cannot continue" in str(trained.results[rank])
    assert not trained.record["completed"]
    resumed = trained.resume(3, 300)
    assert resumed.ended_well() and resumed.results[0].global_steps >= 300


def test_a_copy_of_a_run_without_its_metrics_writes_those_of_a_resume(tmp_path: Path) -> None:
    job = train(1, configure(tmp_path, steps=200))
    shutil.rmtree(job.run / "metrics")
    assert job.resume(1, steps=400).ended_well()
    assert sum(record["type"] == "interval" for record in read_run(job.run)[0]) > 0


def test_a_resumed_rank_goes_on_with_its_warm_up(tmp_path: Path) -> None:
    """Of one whose mean squares had been lost after update 15: its rate begins again there."""
    config = configure(tmp_path, steps=20 * BATCH)
    config = replace(config, a2c=replace(config.a2c, learning_rate=1.0, learning_rate_warmup_updates=1000))
    job = train(1, config)
    assert job.ended_well()
    (state,) = job.states()
    assert (state.counters["updates"], state.counters["num_squares"]) == (20, 20)
    state.counters["num_squares"] = 5
    checkpoint.save_rank(checkpoint.newest_segment(job.run), state)
    resumed = job.resume(1, steps=40 * BATCH)
    assert resumed.ended_well() and resumed.states()[0].counters["num_squares"] == 25
    (records,) = read_run(job.run)
    assert [r["learning_rate"] for r in records if r["type"] == "interval"][-1] == pytest.approx((25 + 1) / 1000)
    averaged = job.resume(2, steps=60 * BATCH)
    assert averaged.ended_well()
    assert all(state.counters["updates"] - state.counters["num_squares"] == 15 for state in averaged.states())


def test_a_resumed_run_leaves_out_what_the_dead_had(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trained = train(3, configure(tmp_path, patience_s=0.5), [fail_at(2, update=5)])
    before = trained.results[0].global_steps
    resumed = trained.resume(3, before + 300)
    assert resumed.ended_well() and "The run had lost 1 rank: every rank starts from the" in capsys.readouterr().err
    assert resumed.results[0].global_steps >= before + 300


# ---- ranks that stop, messages that are lost or damaged --------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_who_needs_no_other_goes_on_while_a_rank_is_stopped(kind: str, tmp_path: Path) -> None:
    """The others wait for it for a moment only, or for as long as it is stopped; in the end all complete."""
    goes_on, made = KINDS[kind].outlives_ranks, [list[float](), list[float](), list[float]()]
    begun, freed = list[float](), list[float]()

    def is_free(comm: MemoryCommunicator) -> bool:
        """Whether the stop is over: rank 0 ends it after a while, if both others have continued."""
        is_long = comm.rank == 0 and begun and not freed and time.monotonic() > begun[0] + 3.0
        if is_long and all(sum(at > begun[0] for at in made[rank]) > 20 for rank in (0, 2)):
            freed.append(time.monotonic())
            comm.world.stopped_until_s[1] = 0.0
        return bool(freed)

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        made[comm.rank].append(time.monotonic())
        if (comm.rank, updates) == (1, 10):
            begun.append(time.monotonic())
        if goes_on and comm.rank != 1:
            is_free(comm)
            if updates == 30:
                wait_for(lambda: begun, 60, "the stop")
            elif updates == 70:  # not the end of its share, however soon it comes
                wait_for(lambda: is_free(comm), 60, "the end of the stop")

    steps = 2400 if goes_on else 900  # the others must not have ended before
    config = configure(tmp_path, kind, steps, patience_s=0.1)
    paced = replace(config, env=replace(config.env, id="Paced-v0"))
    trained = train(3, paced, [stop_at(1, update=10, seconds=60.0 if goes_on else 1.0)], on_count=on_count)
    assert trained.ended_well()
    goes_on_s = freed[0] if goes_on else made[1][10]  # when the stopped rank makes its next update
    meanwhile = [sum(begun[0] < at < goes_on_s for at in times) for times in made]
    assert meanwhile[1] == 0 and len(freed) == goes_on
    if not goes_on and KINDS[kind].averages_gradients:
        assert max(meanwhile) <= 2, "they make the update that this one has made, and wait in the next"
    if kind == "gossip":
        assert trained.total("models_stale", rank=1) + trained.total("waits_given_up") > 0


@pytest.mark.parametrize(("max_staleness", "steps"), [(0, 200), (10, 1000)])
def test_a_lost_model_is_not_waited_for_for_ever(max_staleness: int, steps: int, tmp_path: Path) -> None:
    settings = {"patience_s": 0.1, "max_staleness": max_staleness}
    trained = train(2, configure(tmp_path, steps=steps, **settings), [drop(0, 1, n=3), drop(1, 0, n=4)])
    assert trained.ended_well() and trained.total("waits_given_up") > 0


def test_a_damaged_model_is_refused_counted_and_named_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    damaged = (2, 3, 4)
    config = configure(tmp_path, topology="ring", steps=ENDLESS)
    # Every ten updates rank 2 has to take in a model of rank 1's, so that more than these three are sent.
    trained = train(3, config, [corrupt(1, 2, n) for n in damaged], on_count=stop_when(1, 2, updates=60))
    assert stopped_well(trained, but_for=[])
    said = [line for line in capsys.readouterr().err.splitlines() if "rejected" in line]
    assert len(said) == 1 and said[0].startswith("[rank 2] rejected a message from rank 1: it begins with")
    assert trained.total("models_refused", rank=2) == trained.total("models_refused") == len(damaged)
    assert bool(parameters(trained.states()).isfinite().all())


# ---- models that are not finite --------------------------------------------------------------------------------------


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's parameters are not finite from update 5 to 29, and it believes itself healthy. The others are slow from
    their update 20 on until it has healed: it needs their models."""
    finish_update, healed = Learner._finish_update, threading.Event()

    def poisoned(learner: Learner, result: Any) -> None:
        if learner._rank == 1 and learner.counters.updates in range(5, 30):
            learner._flat.data.fill_(math.nan)
            result = result._replace(applied=True)
        if learner._rank != 1 and learner.counters.updates > 20 and not healed.is_set():
            time.sleep(0.05)
        finish_update(learner, result)
        if learner._rank == 1 and learner.counters.updates >= 30 and learner._flat.data.isfinite().all():
            healed.set()

    monkeypatch.setattr(Learner, "_finish_update", poisoned)


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
    config = configure(tmp_path, steps=ENDLESS, compression=compression, mixing=mixing)
    trained = train(3, config, on_count=stop_when(1, updates=40))
    assert stopped_well(trained, but_for=[])
    said = capsys.readouterr().err
    assert "rejected a message from rank 1: it holds NaN" in said and "rejected a model from rank 0" not in said
    assert "the parameters were not finite either; they are replaced by what the peers sent" in said
    assert trained.total("models_refused") >= 1
    assert bool(parameters(trained.states()).isfinite().all())


def test_a_rank_that_nobody_sends_a_finite_model_gives_up(
    poison: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only peer is stopped when it finds that its own is not finite."""

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if (comm.rank, updates) == (1, 25):  # by update 30 nothing of the peer is left in its inbox
            wait_for(lambda: comm.world.stopped_until_s[0] > 0, 60, "the stop of rank 0")

    monkeypatch.setattr("pala.exchange.gossip.exchange._GIVE_UP_AFTER_S", 0.5)
    config = configure(tmp_path, steps=600, patience_s=0.5)
    trained = train(2, config, [stop_at(0, update=20, seconds=600.0)], on_count=on_count)
    assert isinstance(trained.results[1], PalaError) and trained.ended_well(but_for=[1])
    said = "[rank 1] has no model of its own that is finite, and no peer has sent one"
    assert said in str(trained.results[1])


def test_nan_without_peers_ends_that_rank_with_a_sentence(poison: None, tmp_path: Path) -> None:
    trained = train(2, configure(tmp_path, "none", 800))
    assert isinstance(trained.results[1], PalaError)
    assert "[rank 1] update 30: the parameters are not finite and there is no peer" in str(trained.results[1])
    assert trained.ended_well(but_for=[1])


@pytest.mark.parametrize("kind", slow_but_for(COUPLED, "gossip"))
def test_what_is_not_finite_at_a_stop_is_not_saved(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    finish_update = Learner._finish_update

    def spoil(learner: Learner, result: Any) -> None:
        finish_update(learner, result)
        if learner._rank == 0 and learner.counters.updates == 15:
            learner._flat.data.fill_(math.nan)
            learner._interrupt.signal = SIGTERM

    monkeypatch.setattr(Learner, "_finish_update", spoil)
    stopped = train(2, configure(tmp_path, kind, ENDLESS))
    assert stopped_well(stopped, but_for=[])
    said = capsys.readouterr().err
    assert "[rank 0] its parameters or optimiser's state are not finite: the checkpoint before is kept." in said
    assert "[rank 0] SIGTERM: checkpoint of before kept in" in said
    saved = saved_steps(stopped.states())
    assert saved[0] == 0 and saved[1] > 0 and bool(parameters(stopped.states()).isfinite().all())
    monkeypatch.setattr(Learner, "_finish_update", finish_update)
    assert stopped.resume(2, saved[1] + 200).ended_well()


# ---- signals and resumes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COUPLED)
def test_a_signal_to_one_rank_stops_all_and_a_resume_goes_on(kind: str, tmp_path: Path) -> None:
    trained = train(3, configure(tmp_path, kind, ENDLESS), [signal_at(1, update=15)])
    assert [(r.status, r.signal) for r in trained.results] == [
        ("stopped", SIGUSR1 if rank == 1 else SIGTERM) for rank in range(3)
    ]
    assert trained.segment["status"] == "stopped" and not trained.record["completed"]
    made = sum(saved_steps(trained.states()))
    assert made == trained.results[0].global_steps == trained.segment["global_steps"]
    resumed = trained.resume(3, made + 200)
    assert resumed.ended_well() and resumed.results[0].global_steps >= made + 200
    assert [segment["resumed"] for segment in resumed.record["segments"]] == [False, True]


@pytest.mark.parametrize("kind", slow_but_for(COUPLED, "gossip"))
@pytest.mark.parametrize("moment", ["describe", "_make_exchange"])
def test_a_signal_before_the_first_update_stops_all_and_a_resume_goes_on(
    moment: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = getattr(start, moment)

    def signalled(job: Any, *given: Any) -> Any:
        if job.comm.rank == 1:
            job.comm.interrupt.signal = SIGUSR1
        return action(job, *given)

    monkeypatch.setattr(start, moment, signalled)
    trained = train(3, configure(tmp_path, kind, ENDLESS))
    monkeypatch.setattr(start, moment, action)
    assert stopped_well(trained, but_for=[]) and trained.segment["saved"] and not trained.record["completed"]
    made = sum(saved_steps(trained.states()))
    resumed = trained.resume(3, made + 200)
    assert resumed.ended_well() and resumed.results[0].global_steps >= made + 200


@pytest.mark.parametrize("kind", slow_but_for(KINDS, "gossip"))
def test_the_same_ranks_go_on_from_their_own_checkpoints(kind: str, tmp_path: Path) -> None:
    trained = train(3, configure(tmp_path, kind))
    before = trained.states()
    resumed = trained.resume(3, 3000)
    assert resumed.ended_well() and resumed.results[0].global_steps >= 3000
    begun = resumed.states(first=True)
    assert parameters(begun).equal(parameters(before)) and saved_steps(begun) == saved_steps(before)
    assert all(after > old for after, old in zip(saved_steps(resumed.states()), saved_steps(before), strict=True))
    for old, new in zip(before, begun, strict=True):
        assert old.random_states["actions"].equal(new.random_states["actions"])


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (torch.zeros(16, dtype=torch.uint8), "of another kind of device: the random streams of actions are new"),
        (torch.zeros_like(torch.Generator().get_state()), "[rank 0] The checkpoint's random stream cannot be used"),
    ],
)
def test_a_random_stream_that_cannot_go_on_begins_anew(
    stream: Tensor, says: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of a GPU's generator; of none."""
    job = train(2, configure(tmp_path, steps=ENDLESS), on_count=stop_when(0, updates=10))
    for state in job.states():
        state.random_states["actions"] = stream
        checkpoint.save_rank(checkpoint.newest_segment(job.run), state)
    steps = job.segment["global_steps"] + 100
    resumed = train(2, replace(job.config, total_steps=steps), resume=job.run)
    assert resumed.ended_well() and capsys.readouterr().err.count(says) == 1


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
    expected = parameters(before)[0] if KINDS[kind].independent else parameters(before).mean(0)
    for state in resumed.states(first=True):
        torch.testing.assert_close(state.tensors["parameters"], expected)
        assert (state.counters["local_steps"], state.counters["base_steps"]) == (0, made)


def test_environments_that_cannot_be_closed_cost_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    class Stuck(gymnasium.Wrapper):
        def close(self) -> None:
            raise RuntimeError("the viewer is gone")

    def main(comm: MemoryCommunicator) -> Result:
        return run_rank(comm, Request(config, UserCode(lambda: Stuck(gymnasium.make("CartPole-v1")))))

    config = configure(tmp_path)
    assert [result.status for result in run_ranks(2, main)] == ["completed"] * 2
    assert capsys.readouterr().err.count("The environments cannot be closed (RuntimeError: the viewer is gone)") == 2
    assert (tmp_path / "r" / "policy.safetensors").exists()


def test_environments_are_closed_when_the_run_is_complete(tmp_path: Path) -> None:
    """It is the user's code, and may not return."""

    class Looking(gymnasium.Wrapper):
        def close(self) -> None:
            if threading.current_thread().name == "rank-0":
                record = json.loads((tmp_path / "r" / "run.json").read_text())
                found.append((record["completed"], (tmp_path / "r" / "policy.safetensors").exists()))

    def main(comm: MemoryCommunicator) -> Result:
        return run_rank(comm, Request(config, UserCode(lambda: Looking(gymnasium.make("CartPole-v1")))))

    config, found = configure(tmp_path), []
    assert [result.status for result in run_ranks(2, main)] == ["completed"] * 2
    assert found == [(True, True)] * config.env.num_envs


def test_environments_are_closed_if_those_of_another_rank_cannot_be_made(tmp_path: Path) -> None:
    class Closing(gymnasium.Wrapper):
        def close(self) -> None:
            closed.append(self)

    def main(comm: MemoryCommunicator) -> Result:
        def make() -> gymnasium.Env:
            if comm.rank == 1:
                raise ValueError("no licence")
            return Closing(gymnasium.make("CartPole-v1"))

        return run_rank(comm, Request(config, UserCode(make)))

    config, closed = configure(tmp_path), []
    assert all(isinstance(error, CollectiveError) and "no licence" in str(error) for error in run_ranks(2, main))
    assert len(set(closed)) == config.env.num_envs


@pytest.mark.parametrize("where", ["reset", "step", "network", "callback"])
def test_a_users_code_that_changes_the_working_directory_later_loses_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(at: str) -> None:
        if at == where:
            os.chdir(assets)

    class Leaving(gymnasium.Wrapper):
        def reset(self, **arguments: Any) -> Any:
            leave("reset")
            return super().reset(**arguments)

        def step(self, action: Any) -> Any:
            leave("step")
            return super().step(action)

    class Network(torch.nn.Module):
        def __init__(self, space: gymnasium.Space, num_outputs: tuple[int, ...]) -> None:
            leave("network")
            super().__init__()
            self.trunk = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
            self.heads = torch.nn.ModuleList(torch.nn.Linear(8, outputs) for outputs in num_outputs)

    def main(comm: MemoryCommunicator) -> Result:
        # One at a time: any of them alone has to be known for code that may leave.
        make_env = (lambda: Leaving(gymnasium.make("CartPole-v1"))) if where in ("reset", "step") else None
        code = UserCode(make_env, Network if where == "network" else None)
        callbacks = Callbacks(on_update=lambda moment: leave("callback")) if where == "callback" else Callbacks()
        return run_rank(comm, Request(config, code, callbacks))

    assets = str(tmp_path / "assets")
    (tmp_path / "assets").mkdir()
    monkeypatch.chdir(tmp_path)
    config = configure(Path("runs"))
    (result,) = run_ranks(1, main)
    assert result.status == "completed" and Path.cwd() == Path(assets)
    assert (tmp_path / "runs/r/policy.safetensors").exists() and not list(Path(assets).iterdir())
    assert list((tmp_path / "runs/r/metrics").iterdir()) and run_folder.read(result.run)["completed"]


def test_the_working_directory_is_known_by_the_shells_name_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    for named, known in (("link", "link"), ("gone", "real"), ("", "real")):
        monkeypatch.setenv("PWD", str(tmp_path / named))
        assert start._working_directory() == tmp_path / known


def test_environments_that_change_the_working_directory_do_not_move_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> gymnasium.Env:
        os.chdir(assets)
        return Sparkle("rgb_array")

    def main(comm: MemoryCommunicator) -> Result:
        return run_rank(comm, Request(config, UserCode(make)))

    assets, run = str(tmp_path / "assets"), Path("runs/r")
    (tmp_path / "assets").mkdir()
    monkeypatch.chdir(tmp_path)
    config = configure(Path("runs"))
    (result,) = run_ranks(1, main)
    assert result.status == "completed" and result.run == tmp_path / run
    assert (tmp_path / run / "policy.safetensors").exists() and not list((tmp_path / "assets").iterdir())
    monkeypatch.setattr(evaluate_program, "prepare", lambda threads: None)
    monkeypatch.setattr("sys.argv", ["evaluate", str(run), "--episodes", "1", "--video", "video.mp4"])
    for play in (lambda: evaluate(run, 1, 1, Acting()), lambda: policy_of(run), evaluate_program.main):
        monkeypatch.chdir(tmp_path)
        play()
        assert Path.cwd() == tmp_path / "assets"
    assert (tmp_path / run / "evaluation.json").exists() and (tmp_path / "video.mp4").exists()
    assert not list((tmp_path / "assets").iterdir())


def test_how_an_environments_module_sets_torch_does_not_count(tmp_path: Path) -> None:
    """Many set one thread at their top, some another type of numbers."""

    def make() -> gymnasium.Env:
        torch.set_num_threads(3)
        torch.set_default_dtype(torch.float64)
        return gymnasium.make("CartPole-v1")

    def main(comm: MemoryCommunicator) -> Result:
        comm.on_count = lambda _: seen.add(torch.get_num_threads())
        return run_rank(comm, Request(config, UserCode(make)))

    config, seen, threads = configure(tmp_path), set[int](), torch.get_num_threads()
    config = replace(config, run=replace(config.run, threads=1))
    try:
        (result,) = run_ranks(1, main)
        assert result.status == "completed" and seen == {1}
        torch.set_default_dtype(torch.float64)
        assert evaluate(result.run, 1, 1, Acting(threads=2)).episodes == 1 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("fits", [False, True])
def test_a_rollout_that_does_not_fit_into_memory_is_refused(
    fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path)
    both = 2 * config.a2c.rollout_steps * config.env.num_envs * 4 * 4  # ranks of CartPole's four float32
    monkeypatch.setattr("pala.a2c.agent.available_memory_bytes", lambda: both - (not fits))
    trained = train(2, config)
    if fits:
        assert trained.ended_well()
    else:
        assert all(isinstance(error, CollectiveError) for error in trained.results)
        assert "'a2c.rollout_steps' is 2: the observations of a rollout alone take" in str(trained.results[0])
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["save_policy", "save_rank"])
def test_a_file_that_cannot_be_written_at_the_end_is_an_error_of_its_own(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is told in a sentence, unlike the errors of a user's environment."""

    def fail(path: Path, *_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if updates == 10:
            monkeypatch.setattr(checkpoint, what, fail)
            if what == "save_rank":
                comm.interrupt.signal = SIGTERM

    trained = train(1, configure(tmp_path), on_count=on_count)
    (error,) = trained.results
    assert isinstance(error, SaveError) and reason(error).startswith("Permission denied ('")


def test_a_record_that_who_takes_the_lead_cannot_write_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once ended in a traceback."""

    def fail(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if updates == 10:
            monkeypatch.setattr(run_folder, "write_json", fail)

    error = train(2, configure(tmp_path), [fail_at(0, update=10)], on_count=on_count).results[1]
    assert isinstance(error, SaveError) and reason(error).startswith("Permission denied ('")


def test_a_run_whose_folder_is_deleted_says_that_nothing_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said that the checkpoint before was."""

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if updates == 10:
            shutil.rmtree(tmp_path / "r")

    (error,) = train(1, configure(tmp_path), on_count=on_count).results
    said = capsys.readouterr().err
    assert f"Run folder '{tmp_path / 'r'}' was deleted, and all that was kept of this run with it" in said
    assert isinstance(error, OSError) and "The one before is kept" not in said


@pytest.mark.parametrize("kind", slow_but_for(COUPLED, "gossip"))
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_save_at_a_stop_keeps_no_other_from_it(
    failing: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_rank, disk_is_full, have_saved = checkpoint.save_rank, threading.Event(), set[int]()

    def save_or_fail(folder: Path, state: RankState) -> None:
        if disk_is_full.is_set() and state.rank == failing:
            wait_for(lambda: len(have_saved) == 2, what="the others' checkpoints")  # else its death may come before
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        save_rank(folder, state)
        if disk_is_full.is_set():
            have_saved.add(state.rank)

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if (comm.rank, updates) == (2, 15):
            disk_is_full.set()
            comm.interrupt.signal = SIGTERM

    on_count.planned = [(0, 1), (1, 1)]  # type: ignore[attr-defined]
    monkeypatch.setattr(checkpoint, "save_rank", save_or_fail)
    stopped = train(3, configure(tmp_path, kind, ENDLESS), on_count=on_count)
    assert isinstance(stopped.results[failing], SaveError)
    assert all(stopped.results[rank].status == "stopped" for rank in {0, 1, 2} - {failing})
    saved = saved_steps(stopped.states())
    assert [steps > 0 for steps in saved] == [rank != failing for rank in range(3)]
    disk_is_full.clear()
    assert stopped.resume(3, sum(saved) + 200).ended_well()


def test_ranks_of_unlike_networks_are_told(tmp_path: Path) -> None:
    def main(comm: MemoryCommunicator) -> Result:
        game = "CartPole-v1" if comm.rank < 2 else "Acrobot-v1"
        return run_rank(comm, Request(config, UserCode(lambda: gymnasium.make(game))))

    config = configure(tmp_path)
    for result in run_ranks(3, main):
        assert isinstance(result, CollectiveError) and "network of rank 2 is not that of rank 0" in str(result)


def test_a_model_that_mpi_cannot_count_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_module, "_MOST_PARAMETERS", 10)
    for result in train(2, configure(tmp_path)).results:
        assert isinstance(result, CollectiveError) and "more than 10 cannot be exchanged" in str(result)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", slow_but_for(["gossip", "none"], "none"))
def test_a_run_of_many_models_goes_on_with_one(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trained = train(2, configure(tmp_path, kind))
    before, made = trained.states(), sum(saved_steps(trained.states()))
    config = replace(trained.config, exchange=ExchangeConfig("allreduce"), total_steps=made + 300)
    resumed = train(2, config, resume=trained.run)
    assert resumed.ended_well() and made + 300 <= resumed.results[0].global_steps
    assert (
        "The run had a model for each rank, which are now brought together: every rank starts"
        in capsys.readouterr().err
    )
    expected = parameters(before)[0] if kind == "none" else parameters(before).mean(0)
    for state in resumed.states(first=True):
        torch.testing.assert_close(state.tensors["parameters"], expected)
        assert state.counters["base_steps"] == made
    capsys.readouterr()
    assert resumed.resume(2, made + 600).ended_well() and "The run had" not in capsys.readouterr().err
    kept = (trained.run / "checkpoints").iterdir()  # what the newest start made, and what it continued from
    assert sorted(folder.name for folder in kept) == ["segment-001", "segment-002"]


def test_independent_learners_go_on_with_gossip_from_the_first_one(tmp_path: Path) -> None:
    """Unrelated networks have no average that means anything."""
    trained = train(2, configure(tmp_path, "none"))
    first = parameters(trained.states())[0]
    config = replace(trained.config, exchange=ExchangeConfig("gossip"), total_steps=1200)
    resumed = train(2, config, resume=trained.run)
    assert resumed.ended_well()
    for state in resumed.states(first=True):
        torch.testing.assert_close(state.tensors["parameters"], first)


def test_ranks_of_one_model_begin_alike_when_they_saved_at_unlike_times(tmp_path: Path) -> None:
    trained = train(3, configure(tmp_path, "allreduce"))
    newest = trained.states()[0]
    segment = checkpoint.newest_segment(trained.run)
    checkpoint.rank_path(segment, 1, previous=True).replace(checkpoint.rank_path(segment, 1))
    assert saved_steps(trained.states())[1] == 0
    begun = trained.resume(3, 1200).states(first=True)
    assert saved_steps(begun) == [newest.counters["local_steps"]] * 3
    assert parameters(begun).equal(newest.tensors["parameters"].expand(3, -1))
    assert len({state.counters["time_s"] for state in begun}) == 1, "readers would drop what it did since its own"


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_ranks_with_other_settings_are_told_and_nothing_is_left(tmp_path: Path) -> None:
    config = configure(tmp_path)

    def main(comm: MemoryCommunicator) -> Result:
        return run_rank(comm, Request(replace(config, seed=1 + comm.rank // 2)))

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
