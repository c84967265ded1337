"""Time to a score while slowness wanders: simulated ranks on MinAtar, each of them slow a quarter of the time.

    pip install --no-deps minatar==1.0.15
    python results/wander/bed.py --seeds 3            continues where it was interrupted
    python results/wander/bed.py --report             the tables, from runs.jsonl

Each rank is 4 times slower in spells of 20 updates of its own fast speed on average, and fast for 60 between them,
drawn from the seed, the same for all methods. Time is virtual: a fast rank's update takes 1 (0.95 to 1.05), a model is
under way for 0.05. Synchronous A2C waits for its slowest rank at each update; with `backup` it drops the latest ranks,
in the number that gives most steps in this scenario, as backup workers do (Chen et al. 2016, arXiv 1604.00981): what a
dropped rank has played is lost. All have the default setting but `allreduce_plain`, which has 1.4e-3 without momentum
and bias correction: on MinAtar one or the other was synchronous A2C's best.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import random
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "mixing"))

from minatar_bed import _commit, make_bed  # noqa: E402

from pala.system.resources import prepare  # noqa: E402

SLOWNESS, SLOW, FAST = 4.0, 20.0, 60.0  # times; mean spells in updates of a fast rank
TARGETS = {"breakout": 3.5, "space_invaders": 10.0}  # mean return of the last 100 episodes; frozen before the first run
METHODS = ("gossip", "uniform", "allreduce", "allreduce_plain", "backup")
RANKS = (1, 2, 4, 8, 16)
BUDGET = {1: 400_000, 2: 400_000, 4: 400_000, 8: 600_000, 16: 800_000}
BACKUPS = {4: 1, 8: 3, 16: 6}  # ranks dropped at each update: most steps, by `best_backup`


class Job(NamedTuple):
    """One training."""

    game: str
    ranks: int
    method: str
    seed: int


class Spells:
    """When a rank is slow: a pure function of (seed, rank), whatever the method."""

    def __init__(self, seed: int, rank: int) -> None:
        self._random = random.Random(f"{seed} {rank}")
        self._is_slow = self._random.random() < SLOW / (SLOW + FAST)
        self._until = self._length()

    def _length(self) -> float:
        return self._random.expovariate(1 / (SLOW if self._is_slow else FAST))

    def factor(self, now: float) -> float:
        """Return how many times as long an update takes that begins at `now`, which may only grow."""
        while now >= self._until:
            self._is_slow = not self._is_slow
            self._until += self._length()
        return SLOWNESS if self._is_slow else 1.0


def best_backup(ranks: int, rounds: int = 20_000) -> int:
    """Return the number of latest ranks to drop that gives most steps over time."""
    speeds = []
    for dropped in range(ranks):
        spells, now = [Spells(0, rank) for rank in range(ranks)], 0.0
        for _ in range(rounds):
            now += sorted(each.factor(now) for each in spells)[ranks - 1 - dropped]
        speeds.append((ranks - dropped) * rounds / now)
    return speeds.index(max(speeds))


def config_of(job: Job) -> Any:
    """Return the default setting, with the budget of the number of ranks."""
    from pala.config import Config

    return Config(total_steps=BUDGET[job.ranks], seed=job.seed)


def train(job: Job) -> dict[str, Any]:
    """Run it; returns its line."""
    import torch

    from pala.lab.simulate import learn as program

    torch.set_num_threads(1)
    spells = [Spells(job.seed, rank) for rank in range(job.ranks)]
    conditions, make = program.Conditions(job.ranks), partial(make_bed, game=job.game)
    plain_cluster, plain_learners = program.VirtualCluster, program.Learners

    class Wandering(plain_cluster):  # type: ignore[misc, valid-type]
        def _start_update(self, rank: Any) -> None:
            slowness = tuple(each.factor(self.now) for each in spells)
            self.scenario = dataclasses.replace(self.scenario, slowness=slowness)
            super()._start_update(rank)

    class Watched(plain_learners):  # type: ignore[misc, valid-type]
        def note(self, number: int, global_steps: int, time: float) -> None:
            super().note(number, global_steps, time)
            self.best = max(getattr(self, "best", 0.0), _mean(self.episodes))
            if self.best >= TARGETS[job.game]:
                raise ReachedError(global_steps, time)

    program.VirtualCluster, program.Learners = Wandering, Watched
    try:
        if job.method in ("gossip", "uniform"):
            program.learn("paired" if job.method == "gossip" else "uniform", config_of(job), conditions, make)
        else:
            train_in_rounds(job, spells, make)
    except ReachedError as reached:
        return job._asdict() | {"steps_to_target": reached.args[0], "time_to_target": round(reached.args[1], 1)}
    return job._asdict() | {"steps_to_target": None, "time_to_target": None}


class ReachedError(Exception):
    """The target was reached after (steps, time)."""


def _mean(episodes: list[tuple[int, float, float]]) -> float:
    """Return the mean return of the last 100 episodes; 0: there are fewer."""
    return statistics.fmean(each[2] for each in episodes[-100:]) if len(episodes) >= 100 else 0.0


def train_in_rounds(job: Job, spells: list[Spells], make: Any) -> None:
    """Train by synchronous A2C. Raises ReachedError."""
    import torch

    from pala.lab.simulate import learn as program

    config, draw, now, steps = config_of(job), random.Random(job.seed), 0.0, 0
    config = dataclasses.replace(
        config,
        network=dataclasses.replace(config.network, precision="float32"),
        exchange=dataclasses.replace(config.exchange, kind="allreduce"),
    )
    if job.method == "allreduce_plain":
        a2c = dataclasses.replace(config.a2c, learning_rate=1.4e-3, momentum=0.0, rmsprop_bias_correction=False)
        config = dataclasses.replace(config, a2c=a2c)
    dropped = BACKUPS.get(job.ranks, 0) if job.method == "backup" else 0
    learners = program.Learners(config, job.ranks, make)
    while steps < config.total_steps:
        took = [draw.uniform(0.95, 1.05) * each.factor(now) for each in spells]
        order = sorted(range(job.ranks), key=took.__getitem__)[: job.ranks - dropped]
        counted = [learners.ranks[number] for number in order]
        for rank in counted:
            rank.exchange.global_steps = steps
        losses = [rank.learner.differentiate() for rank in counted]
        mean = torch.stack([rank.flat.gradient for rank in counted]).mean(0)
        for rank in learners.ranks:
            rank.flat.gradient.copy_(mean)
            rank.learner.step(losses[0])
        now += took[order[-1]] + (0.1 if job.ranks > 1 else 0.0)
        steps += len(counted) * config.steps_per_update
        for number in order:
            learners.note(number, steps, now)


def read() -> dict[Job, dict[str, Any]]:
    """What is there already."""
    path = FOLDER / "runs.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {Job(*(line[key] for key in Job._fields)): line for line in lines}


def report() -> str:
    """Return the table: median time to the target, as a share of synchronous A2C's with as many ranks."""
    lines = ["| game | ranks | method | seeds | reached | time to target | steps to target | over the best rival |"]
    lines.append("|---|---:|---|---:|---:|---:|---:|---:|")
    done = read()
    for game in TARGETS:
        ones = [_median(done, game, 1, method, "time_to_target") for method in ("allreduce", "allreduce_plain")]
        for ranks in RANKS:
            rivals = [_median(done, game, ranks, method, "time_to_target") for method in METHODS[2:]]
            best = min((rival for rival in (*rivals, *ones) if rival is not None), default=None)
            for method in METHODS:
                of = [line for job, line in done.items() if job[:3] == (game, ranks, method)]
                if not of:
                    continue
                time, steps = (_median(done, game, ranks, method, key) for key in ("time_to_target", "steps_to_target"))
                reached = sum(line["time_to_target"] is not None for line in of)
                over = f"{time / best:.2f}" if time is not None and best else ""
                row = (game, ranks, method, len(of), reached, _shown(time), _shown(steps), over)
                lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "not reached" if value is None else f"{value:,.0f}"


def _median(done: dict[Job, dict[str, Any]], game: str, ranks: int, method: str, key: str) -> float | None:
    """Return the median over seeds, where one that did not reach the target counts as infinitely late."""
    values = [line[key] for job, line in done.items() if job[:3] == (game, ranks, method)]
    known = [float("inf") if value is None else value for value in values]
    median = statistics.median(known) if known else None
    return None if median in (None, float("inf")) else median


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if arguments.report:
        print(report())
        return
    assert all(best_backup(ranks) == dropped for ranks, dropped in BACKUPS.items())
    done, commit = read(), {"commit": _commit()}
    wanted = [
        Job(game, ranks, method, seed)
        for seed in range(1, arguments.seeds + 1)
        for ranks in arguments.ranks
        for method in METHODS
        for game in TARGETS
        if (ranks > 1 or method.startswith("allreduce")) and (ranks in BACKUPS or method != "backup")
    ]
    jobs = [job for job in wanted if job not in done]
    print(f"{len(jobs)} trainings", flush=True)
    with multiprocessing.get_context("spawn").Pool(arguments.processes, prepare, (1,), maxtasksperchild=1) as pool:
        for line in pool.imap_unordered(train, jobs):
            with open(FOLDER / "runs.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line | commit) + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
