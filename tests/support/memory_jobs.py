"""What the tests of whole trainings on threads share: configurations, jobs and what came of them, faults by script."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import SIGUSR1
from typing import Any
from unittest import mock

import gymnasium
import torch
from torch import Tensor

from pala.config import (
    A2CConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    ExchangeConfig,
    GorilaConfig,
    NetworkConfig,
    RunConfig,
)
from pala.config.catalogue import KINDS
from pala.job.rank import run_rank
from pala.job.request import Request, Result
from pala.run import checkpoint
from pala.run.checkpoint import RankState, load_policy
from pala.run.loop import Loop
from pala.run.metrics import read_run
from pala.system.errors import EndError
from pala.testing.faults import Fault, ToRank
from pala.testing.memory import MemoryCommunicator, run_ranks
from support.checkpoints import read_state
from support.helpers import Together, record_of

ENVS, ROLLOUT = 5, 2  # in this form a batch of ten costs least
BATCH = ENVS * ROLLOUT
COUPLED = [kind.name for kind in KINDS.values() if not kind.independent]
OUTLIVING = [kind.name for kind in KINDS.values() if kind.outlives_ranks]
NEEDING_ALL = [kind.name for kind in KINDS.values() if not kind.outlives_ranks]
BEYOND = 10  # updates a rank, at most, by which a job exceeds its budget: how late ranks hear of it is the scheduler's
ENDLESS = 10**9
GORILA = GorilaConfig(
    replay_capacity_steps=1000, min_replay_steps=60, minibatch_size=8, target_period_updates=20, num_shards=2
)
SEPARATE = replace(GORILA, roles="separate", num_actors=2, num_learners=2)  # shards 0 and 1, learners, actors

OnCount = Callable[[MemoryCommunicator, int], None]


class Paced(gymnasium.Wrapper):
    """Takes its time, so that a job lasts, and does nothing once it is closed, as a simulator that is gone."""

    is_closed = False

    def step(self, action: Any) -> Any:
        assert not self.is_closed
        time.sleep(0.002)
        return super().step(action)

    def close(self) -> None:
        self.is_closed = True
        super().close()


gymnasium.register("Paced-v0", lambda: Paced(gymnasium.make("CartPole-v1")))


def configure(folder: Path, kind: str = "gossip", steps: int = 600, **settings: Any) -> Config:
    """CartPole and a network so small that a rank makes a hundred updates in a blink."""
    return Config(
        total_steps=steps, env=EnvConfig("CartPole-v1", num_envs=ENVS), network=NetworkConfig(mlp_hidden=(4,)),
        a2c=A2CConfig(rollout_steps=ROLLOUT),
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
            read_state(checkpoint.rank_path(folder, rank, previous=first)) for rank in range(ranks or len(self.results))
        ]

    def total(self, key: str, rank: int | None = None) -> float:
        """Sum of a metric over all records, of one rank or of all."""
        ranks = read_run(self.run)
        kept = ranks if rank is None else [ranks[rank]]
        return sum(r.get(key) or 0 for records in kept for r in records if r["type"] == "interval")

    def fields(self) -> set[str]:
        """Names of all fields in all records."""
        return {key for records in read_run(self.run) for record in records for key in record}

    def ended_well(self, but_for: Iterable[int] = ()) -> bool:
        """Raise what a rank raised that should have completed: the cause, rather than that another rank was gone."""
        results = [result for rank, result in enumerate(self.results) if rank not in but_for]
        raised = [result for result in results if isinstance(result, BaseException)]
        for error in sorted(raised, key=lambda error: isinstance(error, EndError)):
            raise error
        assert all(result.status == "completed" for result in results)
        return self.record["completed"]

    def met(self, budget: int) -> bool:
        """Whether the last segment made its budget, and little more."""
        return budget <= self.segment["global_steps"] < budget + BEYOND * len(self.results) * BATCH

    def resume(self, ranks: int, steps: int) -> Trained:
        return train(ranks, replace(self.config, total_steps=steps), resume=self.run)


def nothing(comm: MemoryCommunicator, updates: int) -> None:
    pass


def train(
    ranks: int, config: Config, faults: Iterable[Fault] = (), resume: Path | None = None, on_count: OnCount = nothing
) -> Trained:
    faults, run, together = list(faults), Loop.run, Together(ranks - config.run.spares)

    def run_together(loop: Loop, *given: Any) -> Any:
        together.barrier()
        return run(loop, *given)

    patient = _slow_before(faults, on_count)

    def main(comm: MemoryCommunicator) -> Result:
        with asking_as_abort_does(comm):
            comm.on_count = partial(patient, comm)  # type: ignore[method-assign]
            return run_rank(comm, Request(config, resume=resume))

    with mock.patch.object(Loop, "run", run_together):
        return Trained(config, run_ranks(ranks, main, faults))


_AHEAD_S = 0.3


def _slow_before(faults: list[Fault], on_count: OnCount) -> OnCount:
    """The same, then the faults; and ranks which are ahead of what is planned to happen to another wait for it, though
    not long: it may be waiting for them."""
    made = dict[int, int]()
    planned = [(fault.rank, fault.n) for fault in faults if isinstance(fault, ToRank) and fault.when == "update"]
    planned += planned_of(on_count)

    def slow(comm: MemoryCommunicator, updates: int) -> None:
        made[comm.rank] = updates
        on_count(comm, updates)
        MemoryCommunicator.on_count(comm, updates)
        until = time.monotonic() + _AHEAD_S
        while any(made.get(rank, 0) < update <= updates for rank, update in planned) and time.monotonic() < until:
            time.sleep(0.02)

    return slow


@contextmanager
def asking_as_abort_does(comm: MemoryCommunicator) -> Iterator[None]:
    """Who ends the job asks first who else lives: then no transport's thread may still be in MPI."""
    try:
        yield
    except EndError:
        comm.is_alone()  # refuses while a transport is open
        raise


def planned_of(on_count: OnCount) -> list[tuple[int, int]]:
    """What it will do to ranks, and at which of their updates: (rank, update)."""
    return getattr(on_count, "planned", [])


def both(first: OnCount, second: OnCount) -> OnCount:
    """One after the other, with what either plans: where only a function that calls them is given, nobody waits."""

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        first(comm, updates)
        second(comm, updates)

    on_count.planned = [*planned_of(first), *planned_of(second)]  # type: ignore[attr-defined]
    return on_count


def saved_steps(states: Iterable[RankState]) -> list[int]:
    return [state.counters["local_steps"] for state in states]


def leave_at(*ranks: int, update: int) -> OnCount:
    """These ranks get SIGUSR2 when they have made so many updates."""

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if comm.rank in ranks and updates == update:
            comm.interrupt.leave_requested = True

    on_count.planned = [(rank, update) for rank in ranks]  # type: ignore[attr-defined]
    return on_count


def parameters(states: Iterable[RankState]) -> Tensor:
    return torch.stack([state.tensors["parameters"] for state in states])


def with_spares(folder: Path, spares: int, steps: int = ENDLESS, **settings: Any) -> Config:
    config = configure(folder, steps=steps, **{"max_staleness": 2} | settings)
    return replace(config, env=replace(config.env, id="Paced-v0"), run=replace(config.run, spares=spares))


def stop_when(*ranks: int, updates: int) -> OnCount:
    """The job gets SIGUSR1 when these ranks have all made so many updates."""
    have_come: set[int] = set()

    def stop(comm: MemoryCommunicator, made: int) -> None:
        if comm.rank in ranks and made >= updates:
            have_come.add(comm.rank)
            if len(have_come) == len(ranks):
                comm.interrupt.signal = SIGUSR1

    return stop


def slow_until_joined(spare: int) -> OnCount:
    """The other ranks take their time until the spare has made an update: else it may come when all is over."""
    has_joined = threading.Event()

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        if comm.rank == spare:
            has_joined.set()
        elif not has_joined.is_set():
            time.sleep(0.05)

    return on_count


def ranks_in(job: Trained, key: str) -> list[int]:
    return [entry["rank"] for entry in job.segment.get(key, [])]


def stopped_well(job: Trained, but_for: Iterable[int]) -> bool:
    """Raise what a rank raised that should have stopped, and what one raised that was to be killed, or to fail."""
    causes = [job.results[rank] for rank in but_for if isinstance(job.results[rank], Exception)]  # `Killed` is none
    for rank, result in enumerate(job.results):
        if rank not in but_for:
            if isinstance(result, BaseException):
                raise result from (causes[0] if causes else None)
            assert result.status in ("stopped", "spared")
    return job.segment["status"] == "stopped"
