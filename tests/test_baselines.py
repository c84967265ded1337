"""What gossip is compared with: synchronous A2C by all-reduce, and GALA's shared memory; with real ranks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pala.comm.base import Communicator
from pala.config import Config, ExchangeConfig, catalogue
from pala.config.catalogue import TOPOLOGIES
from pala.exchange.allreduce import AllReduce
from pala.exchange.base import Setup
from pala.exchange.budget import ExchangeState, Stop
from pala.exchange.shared_memory import SharedMemory
from pala.run.checkpoint import load_policy
from pala.system.errors import PalaError
from pala.testing.memory import run_ranks
from support.helpers import CARTPOLE, record_of, wait_for
from support.mpi import Launcher, assert_all_end, pids_of_ranks
from support.run_folders import all_train, states_of, total
from support.standing_ranks import StandingRanks

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

KINDS = [kind.name for kind in catalogue.KINDS.values() if not kind.outlives_ranks]
ENDLESS = ["--total-steps", "100000000"]


def start_of(comm: Communicator) -> ExchangeState:
    return ExchangeState([0] * comm.size)


def trainer_of(kind: str) -> list[str]:
    """What `pala.train` is given."""
    return [*CARTPOLE, "--exchange.kind", kind, "--run.name", "r"]


# ---- the arithmetic --------------------------------------------------------------------------------------------------


def average_gradients(comm: Communicator) -> None:
    exchange = AllReduce(Setup(comm, torch.zeros(10_007), Config(total_steps=10**9), start_of(comm)))
    gradients = np.random.default_rng(7).normal(size=(4, 3, 10_007)).astype(np.float32)
    gradients[3, 1, 5] = np.nan
    for of_ranks in gradients:
        gradient = torch.from_numpy(of_ranks[comm.rank].copy())
        assert exchange.average_gradient(gradient)
        np.testing.assert_allclose(gradient.numpy(), of_ranks.astype(np.float64).mean(0), rtol=1e-5, atol=1e-6)
        assert exchange.after_update(20, healthy=True)
    assert exchange.global_steps == 4 * 3 * 20 and exchange.stop is Stop.NONE
    if comm.rank == 1:
        exchange.stop_now(Stop.SIGNAL)  # one leaves in mid-rollout: the others leave their update out
    else:
        assert not exchange.average_gradient(torch.zeros(10_007))
    assert exchange.close(10) is exchange.stop is Stop.SIGNAL and exchange.global_steps == 240


def test_allreduce_gives_every_rank_the_mean_gradient(each_standing: StandingRanks, tmp_path: Path) -> None:
    """Against numpy's mean of what all ranks had; what is not finite on one rank is so on all."""
    each_standing.run(3, average_gradients, cwd=tmp_path)


def mix_in_step(comm: Communicator, topology: str, senders: list[list[int]]) -> None:
    x = np.random.default_rng(3).normal(size=(4, 1001))
    parameters = torch.from_numpy(x[comm.rank].astype(np.float32))
    config = ExchangeConfig(kind="shared_memory", topology=topology, max_staleness=0)
    exchange = SharedMemory(Setup(comm, parameters, Config(total_steps=10**9, exchange=config), start_of(comm)))
    for round_ in range(5):
        x[:, round_] += np.arange(4)  # what the ranks learn
        parameters[round_] += comm.rank
        comm.barrier()  # else a rank that is ahead would find its buffer unread
        exchange.after_update(10, healthy=True)
        x = np.array([(x[i] + x[peers].sum(0)) / (1 + len(peers)) for i, peers in enumerate(senders)])
        np.testing.assert_allclose(parameters.numpy(), x[comm.rank], rtol=1e-5, atol=1e-5)
    comm.barrier()  # who waits is let go when training ends
    exchange.stop_now(Stop.BUDGET)
    assert exchange.close(10) is Stop.BUDGET and exchange.global_steps == 4 * 5 * 10
    np.testing.assert_allclose(exchange.final_parameters(10).numpy(), x.mean(0), rtol=1e-5, atol=1e-5)
    figures = exchange.metrics()
    assert figures["mixes"] == 5 and figures["models_mixed"] == 5 * len(senders[0]), figures


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_shared_memory_mixes_by_galas_formula(standing: StandingRanks, topology: str, tmp_path: Path) -> None:
    """In step (staleness 0): x <- (x + sum of in-peers) / (1 + k), against the formula in float64."""
    senders = [[i for i in range(4) if rank in TOPOLOGIES[topology].out_peers(i, range(4), 0, 0)] for rank in range(4)]
    standing.run(4, mix_in_step, topology, senders, cwd=tmp_path)


def mix_at_unlike_speeds(comm: Communicator, topology: str) -> None:
    import pala.exchange.shared_memory as module

    rng = np.random.default_rng(comm.rank)
    parameters = torch.full((200_000,), float(comm.rank))
    config = ExchangeConfig(kind="shared_memory", topology=topology, max_staleness=3)
    exchange = SharedMemory(Setup(comm, parameters, Config(total_steps=10**9, exchange=config), start_of(comm)))
    made = 0
    for update in range(300):
        if exchange.stop is not Stop.NONE:
            break
        made += 1
        time.sleep(rng.exponential(0.002 if comm.rank == 2 else 0.0005))
        parameters += rng.normal()
        sick = update == 50 and comm.rank == 1
        if sick:
            parameters.fill_(float("nan"))
        assert exchange.after_update(1, healthy=not sick) and bool((parameters == parameters[0]).all())
    figures = exchange.metrics()
    assert figures["mixes"] >= made // 4 - 1 and figures["staleness_updates"] <= 4, figures
    exchange.stop_now(Stop.BUDGET)
    exchange.close(10)
    assert bool(exchange.final_parameters(10).isfinite().all())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_HEALING_S", 0.3)  # instead of 300
        exchange = SharedMemory(Setup(comm, parameters, Config(total_steps=10**9, exchange=config), start_of(comm)))
        with pytest.raises(PalaError, match="no peer has sent finite ones"):
            exchange.after_update(1, healthy=False)
        comm.barrier()


def heal_twice_running(comm: Communicator) -> None:
    import pala.exchange.shared_memory as module

    parameters = torch.full((100,), float(comm.rank))
    config = ExchangeConfig(kind="shared_memory", max_staleness=0)
    exchange = SharedMemory(Setup(comm, parameters, Config(total_steps=10**9, exchange=config), start_of(comm)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_HEALING_S", 20.0)
        for update in range(6):
            sick = comm.rank == 1 and update in (2, 3)
            if sick:
                parameters.fill_(float("nan"))
            assert exchange.after_update(1, healthy=not sick) and bool(parameters.isfinite().all())
    exchange.stop_now(Stop.BUDGET)  # lets the peer go: it may wait for a model that found its buffer unread
    exchange.close(10)


def test_a_rank_is_healed_twice_running_by_one_that_waits_for_it(standing: StandingRanks, tmp_path: Path) -> None:
    """In step: who has no model says so, which lets its peer continue."""
    standing.run(2, heal_twice_running, cwd=tmp_path)


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize(("ranks", "topology"), [(2, "ring"), (3, "ring"), (3, "complete")])
def test_ranks_that_need_healing_and_their_peers_never_wait_for_each_other_for_ever(
    ranks: int, topology: str, max_staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks at a buffer is held up at random before it continues by what it saw."""
    for name in ("_write", "_all_written"):
        looks = getattr(SharedMemory, name)

        def slowly(exchange: SharedMemory, looks: Callable[[SharedMemory], bool] = looks) -> bool:
            seen = looks(exchange)
            time.sleep(random.choice((0, 0, 0.002)))
            return seen

        monkeypatch.setattr(SharedMemory, name, slowly)
    monkeypatch.setattr("pala.exchange.shared_memory._HEALING_S", 60.0)

    def learn(comm: Communicator) -> tuple[Stop, int]:
        rng = random.Random(comm.rank)
        parameters = torch.zeros(10)
        config = ExchangeConfig(kind="shared_memory", topology=topology, max_staleness=max_staleness)
        exchange = SharedMemory(
            Setup(comm, parameters, Config(total_steps=ranks * 60, exchange=config), start_of(comm))
        )
        healed = 0
        while exchange.stop is Stop.NONE:
            sick = comm.rank > 0 and rng.random() < 0.3
            if sick:
                parameters.fill_(float("nan"))
            finite = exchange.after_update(1, healthy=not sick)
            assert finite or exchange.stop is Stop.BUDGET
            assert not finite or bool(parameters.isfinite().all())
            healed += sick and finite
        return exchange.close(10), healed

    ended = run_ranks(ranks, learn)
    assert [end[0] for end in ended] == [Stop.BUDGET] * ranks and all(end[1] > 5 for end in ended[1:]), ended


def test_ranks_that_all_need_healing_hear_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may find one another's turns ready each time, and then never wait."""
    monkeypatch.setattr(SharedMemory, "_all_written", lambda exchange: True)
    monkeypatch.setattr("pala.exchange.shared_memory._HEALING_S", 20.0)

    def heal(comm: Communicator) -> tuple[bool, Stop]:
        if comm.rank == 1:
            threading.Timer(0.3, lambda: setattr(comm.interrupt, "signal", signal.SIGTERM)).start()
        config = ExchangeConfig(kind="shared_memory", max_staleness=0)
        exchange = SharedMemory(
            Setup(comm, torch.full((10,), float("nan")), Config(total_steps=10**9, exchange=config), start_of(comm))
        )
        return exchange.after_update(1, healthy=False), exchange.close(10)

    assert run_ranks(2, heal) == [(False, Stop.SIGNAL)] * 2


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_no_model_is_read_while_it_is_written(standing: StandingRanks, topology: str, tmp_path: Path) -> None:
    """Every model is one number over and over, so a torn one would show; ranks of unlike speed, never further than
    the staleness bound, a rank whose model is not finite is healed if anybody can, and nobody hangs."""
    standing.run(4, mix_at_unlike_speeds, topology, cwd=tmp_path)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["allreduce", "shared_memory"])
def test_training_completes_with_the_budget_met(each_standing: StandingRanks, kind: str, tmp_path: Path) -> None:
    done = each_standing.train(3, *trainer_of(kind), "--total-steps", "6000", cwd=tmp_path)
    assert done.status == 0, done.output
    run = tmp_path / "runs/r"
    assert record_of(run)["completed"]
    states = states_of(run, 3)
    steps = [state.counters["local_steps"] for state in states]
    assert 6000 <= sum(steps) == record_of(run)["segments"][0]["global_steps"] < 6000 + 3 * 3 * 20
    if kind == "allreduce":
        assert len(set(steps)) == 1
        assert all(state.tensors["parameters"].equal(states[0].tensors["parameters"]) for state in states)
        assert all(state.tensors["mean_square"].equal(states[0].tensors["mean_square"]) for state in states)
        _, header = load_policy(run / "policy.safetensors")
        assert header["global_steps"] == 6000
    else:
        assert total(run, "models_mixed") > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_to_one_rank_stops_all_and_a_resume_goes_on(
    standing: StandingRanks, kind: str, tmp_path: Path
) -> None:
    job, run = standing.start_train(2, *trainer_of(kind), *ENDLESS, cwd=tmp_path), tmp_path / "runs/r"
    wait_for(lambda: all_train(run, 2), what="training")
    os.kill(job.pids[1], signal.SIGUSR1)
    done = job.wait()
    assert done.values == [128 + signal.SIGTERM, 128 + signal.SIGUSR1], done.output
    assert "checkpoint written to" in done.output, done.output
    stopped = states_of(run, 2)
    made = sum(state.counters["local_steps"] for state in stopped)
    if kind == "allreduce":
        assert stopped[0].counters["local_steps"] == stopped[1].counters["local_steps"]
        assert stopped[0].tensors["parameters"].equal(stopped[1].tensors["parameters"])
    done = standing.train(2, "--resume", str(run), "--total-steps", str(made + 2000), cwd=tmp_path)
    assert done.status == 0, done.output
    assert made + 2000 <= record_of(run)["segments"][-1]["global_steps"] < made + 2000 + 2 * 3 * 20


@pytest.mark.parametrize("kind", KINDS)
def test_the_death_of_a_rank_ends_the_job_with_a_sentence(
    any_mpi: Launcher, standing: StandingRanks, kind: str, tmp_path: Path
) -> None:
    """Even where ranks outlive one another: both methods need all of theirs."""
    python = str(any_mpi.folder / "python")
    options = [*trainer_of(kind), "--exchange.max-staleness", "1000000", *ENDLESS]
    job = any_mpi.start("--with-ft", "ulfm", "-np", "2", python, "-m", "pala.train", *options, cwd=tmp_path)
    run = tmp_path / "runs/r"
    wait_for(lambda: all_train(run, 2), what="training")
    os.kill(pids_of_ranks(tmp_path)[1], signal.SIGKILL)
    job.wait()
    assert job.status != 0 and "Rank 1 has died, and this 'exchange.kind' cannot continue" in job.output, job.output
    assert not record_of(run)["completed"]
    assert_all_end(tmp_path)
    done = standing.train(2, "--resume", str(run), "--total-steps", "2000", cwd=tmp_path)
    assert done.status == 0, done.output
