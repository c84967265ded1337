"""Trainings of simulated ranks on MinAtar (Young & Tian 2019, arXiv 1903.03176), many at a time; continues where it was
interrupted.

    pip install minatar==1.0.15
    python results/mixing/minatar_bed.py sweep          which rate is best for each method
    python results/mixing/minatar_bed.py momentum       and which momentum
    python results/mixing/minatar_bed.py larger         as many environments in all on fewer ranks
    python results/mixing/minatar_bed.py longer         four times the steps, with 16 ranks
    python results/mixing/minatar_bed.py final          each method at its best setting, with fresh seeds
    python results/mixing/minatar_bed.py stability      how often a training of 4 ranks with momentum does not get on
    python results/mixing/minatar_bed.py delays         gossip under delays, and with a slow rank
    python results/mixing/minatar_bed.py in_step        pairs that go in step
    python results/mixing/minatar_bed.py held_out       each method's best setting on a game that chose none of them
    python results/mixing/minatar_bed.py start --ranks 2 4 16   the first updates: bias-corrected squares, a warm-up
    python results/mixing/minatar_bed.py groups --ranks 16 32   groups of ranks that average their gradients and gossip
    python results/mixing/minatar_bed.py ranks --ranks 1 2 4 8 16   the defaults, over three networks and a slow rank

Each training adds a line to `minatar.jsonl` beside this file. `minatar_report.py` makes the tables of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pala.system.resources import prepare

FOLDER = Path(__file__).resolve().parent
STAGES = (
    "sweep", "momentum", "larger", "longer", "stability", "final", "delays", "in_step",
    "held_out", "groups", "start", "ranks",
)  # fmt: skip
SWEPT = ("breakout", "space_invaders")  # settings are chosen on these
GAMES = (*SWEPT, "asterix", "freeway")
METHODS = ("allreduce", "uniform", "paired")
BASE_RATE = 7e-4
TOTAL_STEPS = 500_000
_FRESH = 100  # seeds from here on have not been looked at when settings are chosen,
_STABILITY = 200  # and from here on not when it was asked how often trainings stand still


def held_out_steps(ranks: int) -> int:
    """An episode of Freeway has 2,500 steps, whatever is done in it: six rounds of them, or twelve with 2 ranks."""
    return max(1_000_000, 250_000 * ranks)


class Setting(NamedTuple):
    """What is chosen for each method and number of ranks."""

    method: str
    rate: float  # times BASE_RATE
    momentum: float = 0.0
    smoothing: float = 0.0  # of the momentum: always 0.8 by now; without momentum 0
    exchanges: int = 1  # an update, of paired; more than one left PALA after commit 816108e3


class Job(NamedTuple):
    """One training."""

    game: str
    ranks: int
    method: str
    rate: float
    seed: int
    momentum: float = 0.0
    smoothing: float = 0.0
    delay: float = 0.05
    slow_ranks: int = 0
    exchanges: int = 1
    envs: int = 16  # of a rank
    total_steps: int = TOTAL_STEPS
    clipping: str = "own"  # "mean": as the mean of all would be, which left PALA after commit 816108e3
    max_staleness: int = 10
    start: str = "plain"  # or "bias": bias-corrected mean squares; or "warm-up N": over N updates

    @property
    def is_usual(self) -> bool:
        """True if nothing but setting, game, ranks and seed tells it from others."""
        return self == Job(*self[:7], exchanges=self.exchanges)

    @property
    def setting(self) -> Setting:
        """How its method is set."""
        return Setting(self.method, self.rate, self.momentum, self.smoothing, self.exchanges)

    @property
    def is_of_the_sweep(self) -> bool:
        """True if settings may be chosen by it."""
        return self.seed < _FRESH and self.is_usual

    @property
    def is_held_out(self) -> bool:
        """True if it asks how settings do on a game that had no say in them."""
        return self.game not in SWEPT and self.total_steps == held_out_steps(self.ranks)

    @property
    def is_of_stability(self) -> bool:
        """True if it was made to see how often trainings stand still."""
        return self.seed > _STABILITY and self.is_usual


def make_bed(env_config: Any, game: str) -> Any:
    """A rank's environments, without gymnasium's per-environment layers: MinAtar is faster than they are."""
    import gymnasium
    import numpy as np
    from minatar import Environment

    from pala.envs.vector import Envs

    class MinAtarVector(gymnasium.vector.VectorEnv):
        """Observations are float32 [10 * 10 * channels]; sticky actions with probability 0.1, as is usual."""

        def __init__(self, num_envs: int) -> None:
            self.games = [Environment(game) for _ in range(num_envs)]
            size = int(np.prod(self.games[0].state_shape()))
            self.num_envs = num_envs
            self.single_observation_space = gymnasium.spaces.Box(0.0, 1.0, (size,), np.float32)
            self.actions = self.games[0].minimal_action_set()
            self.single_action_space = gymnasium.spaces.Discrete(len(self.actions))

        def _look(self):
            return np.stack([game.state().reshape(-1) for game in self.games]).astype(np.float32)

        def reset(self, *, seed=None, options=None):
            for number, game_ in zip(seed, self.games, strict=True):
                game_.seed(int(number))
                game_.reset()
            return self._look(), {}

        def step(self, actions):
            rewards, terminated = np.zeros(self.num_envs, np.float32), np.zeros(self.num_envs, bool)
            for i, (action, game_) in enumerate(zip(actions, self.games, strict=True)):
                rewards[i], terminated[i] = game_.act(self.actions[action])
                if terminated[i]:
                    game_.reset()
            return self._look(), rewards, terminated, np.zeros(self.num_envs, bool), {}

    return Envs(MinAtarVector(env_config.num_envs), clip_rewards=False)


def train(job: Job) -> dict[str, Any]:
    """Run it; returns its line."""
    from dataclasses import replace
    from functools import partial

    import torch

    from pala.config import Config
    from pala.lab.simulate.learn import Conditions, NotFiniteError, learn

    if job.exchanges > 1 or job.clipping != "own":
        raise ValueError(f"{job} needs settings that PALA has no more: take commit 816108e3")
    torch.set_num_threads(1)
    config = Config(total_steps=job.total_steps, seed=job.seed)
    config = replace(config, env=replace(config.env, num_envs=job.envs))
    own: dict[str, Any] = {
        "learning_rate": job.rate * BASE_RATE,
        "momentum": job.momentum,
        "rmsprop_bias_correction": job.start == "bias",
    }
    if job.start not in ("plain", "bias"):
        own["learning_rate_warmup_updates"] = int(job.start.removeprefix("warm-up "))
    exchange = replace(config.exchange, max_staleness=job.max_staleness)
    config = replace(config, a2c=replace(config.a2c, **own), exchange=exchange)
    conditions = Conditions(job.ranks, job.delay, job.slow_ranks)
    try:
        learned = learn(job.method, config, conditions, partial(make_bed, game=job.game))
    except NotFiniteError as error:  # a rate that is too high is a result
        return job._asdict() | {"failed": str(error)}
    mean = lambda values: sum(values) / len(values) if values else 0.0  # noqa: E731
    return job._asdict() | {
        "mean_height": learned.auc(job.total_steps),
        "curve": [round(height, 3) for height in learned.curve(job.total_steps)],
        "progress_kept": learned.progress_kept,
        "distance": mean(learned.distances),
        "divergence": mean(learned.divergences),
        "time_updates": learned.time_updates,
        "models_an_update": learned.models_sent / sum(learned.updates),
    }


def read() -> dict[Job, dict[str, Any]]:
    """What is there already."""
    path = FOLDER / "minatar.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {Job(**{key: line[key] for key in Job._fields if key in line}): line for line in lines}


def best_settings(results: dict[Job, dict[str, Any]]) -> dict[tuple[int, str], Setting]:
    """By ranks and method: of the settings tried on all of `SWEPT`, the one with the greatest mean over these games of
    the mean height, as a share of the greatest that any setting has on the game."""
    heights: dict[tuple[int, str, Setting], list[float]] = {}
    for job, line in results.items():
        if job.is_of_the_sweep:
            heights.setdefault((job.ranks, job.game, job.setting), []).append(line.get("mean_height", 0.0))
    means = {key: statistics.fmean(values) for key, values in heights.items()}
    best: dict[tuple[int, str], tuple[float, Setting]] = {}
    for ranks, setting in {(ranks, setting) for ranks, _, setting in means}:
        if all((ranks, game, setting) in means for game in SWEPT):
            share = statistics.fmean(
                means[ranks, game, setting]
                / max(mean for (n, other, _), mean in means.items() if (n, other) == (ranks, game))
                for game in SWEPT
            )
            best[ranks, setting.method] = max(best.get((ranks, setting.method), (0.0, setting)), (share, setting))
    return {key: setting for key, (_, setting) in best.items()}


def chosen_settings(results: dict[Job, dict[str, Any]]) -> set[tuple[int, Setting]]:
    """By number of ranks: each method's best setting, and its best without momentum."""
    plain = {job: line for job, line in results.items() if not job.momentum}
    return {(ranks, setting) for of in (results, plain) for (ranks, _), setting in best_settings(of).items()}


_RATES = {2: (1, 2, 4), 4: (1, 2, 4, 8), 8: (1, 2, 4), 16: (1, 2, 4, 8, 16)}
_MOMENTA = {  # by ranks and method: rate, momentum, smoothing
    (2, "allreduce"): ((1, 0.5, 0.8), (1, 0.75, 0.8)),
    (2, "uniform"): ((1, 0.5, 0.8), (2, 0.5, 0.8)),
    (2, "paired"): ((1, 0.5, 0.8), (2, 0.5, 0.8)),
    (4, "allreduce"): ((1, 0.5, 0.8), (1, 0.75, 0.8), (0.5, 0.75, 0.8)),
    (4, "uniform"): ((2, 0.5, 0.8), (2, 0.75, 0.8)),
    (4, "paired"): ((2, 0.5, 0.8), (4, 0.5, 0.8), (2, 0.75, 0.8), (1, 0.75, 0.8)),
    (8, "allreduce"): ((1, 0.5, 0.8), (1, 0.75, 0.8)),
    (8, "uniform"): ((2, 0.5, 0.8), (2, 0.75, 0.8)),
    (8, "paired"): ((2, 0.5, 0.8), (2, 0.75, 0.8), (1, 0.75, 0.8), (1, 0.875, 0.8)),
    (16, "allreduce"): ((0.5, 0.75, 0.8), (1, 0.75, 0.8), (0.5, 0.9, 0.8)),
    (16, "uniform"): ((2, 0.75, 0.8), (2, 0.9, 0.8)),
    (16, "paired"): (
        (1, 0.75, 0.8), (2, 0.75, 0.8), (4, 0.75, 0.8), (1, 0.875, 0.8), (1, 0.9, 0.8), (2, 0.9, 0.8),
    ),
}  # fmt: skip


_LARGER = (  # of 4 ranks of 64 environments
    (2, 0.75, 0.8), (4, 0.0, 0.0), (4, 0.5, 0.8),
)  # fmt: skip
_EQUAL_STEPS = (  # of 4 ranks' mean: gossip's is shorter by the root of the ranks at the same rate
    Setting("allreduce", 1, 0.75, 0.8), Setting("paired", 2, 0.75, 0.8), Setting("allreduce", 2), Setting("paired", 4),
)  # fmt: skip
_ASKED = (  # that the sweep did not choose, or not by itself: hypotheses 19, 21
    (4, Setting("paired", 1, 0.75, 0.8)), (8, Setting("paired", 1, 0.875, 0.8)),
)  # fmt: skip
GROUPS = (  # ranks of 16 environments in all, groups: a group learns as one rank with the environments of its members
    (16, 4), (16, 2), (32, 4),
)  # fmt: skip
GROUPS_SETTING = Setting("paired", 2, 0.5, 0.8)  # chosen by seeds 1 and 2 of 4 groups of 4
GROUPS_RIVALS = (Setting("allreduce", 1, 0.75, 0.8), Setting("allreduce", 2))  # the best of 16 ranks with and without
_STARTS = (  # ranks, environments of each, setting, starts
    (16, 16, Setting("paired", 2, 0.75, 0.8), ("bias", "warm-up 20")),
    (16, 16, Setting("paired", 4, 0.75, 0.8), ("bias", "warm-up 20")),
    (16, 16, Setting("allreduce", 1, 0.75, 0.8), ("bias", "warm-up 20")),
    (16, 16, Setting("allreduce", 2), ("bias",)),
    (4, 64, Setting("paired", 2, 0.5, 0.8), ("plain", "bias", "warm-up 50")),
    (4, 16, Setting("paired", 1, 0.5, 0.8), ("bias", "warm-up 50")),
    (4, 16, Setting("paired", 2, 0.5, 0.8), ("bias", "warm-up 50")),
    (2, 16, Setting("paired", 1, 0.5, 0.8), ("bias", "warm-up 200")),
)
_ALONE = ((Setting("allreduce", 1, 0.5, 0.8), "bias"), (Setting("allreduce", 2), "plain"))  # one rank: default, other
NETWORKS = (0.05, 0.5, 5.0)  # delays in updates: a model of 3.3 MiB over 10, 1 and 0.1 Gbit/s, an update takes 60 ms
_LONGER = (Setting("allreduce", 1, 0.75, 0.8), Setting("paired", 2, 0.75, 0.8))  # each method's best of 16 ranks


def jobs_of(stage: str, games: list[str], ranks: list[int], seeds: int) -> list[Job]:
    """The trainings of a stage; those of `final`, `delays`, `in_step` and `held_out` need the others."""
    trials = itertools.product(range(1, seeds + 1), ranks, games, METHODS)
    if stage == "sweep":
        return [Job(game, n, method, rate, seed) for seed, n, game, method in trials for rate in _RATES[n]]
    if stage == "momentum":
        return [
            Job(game, n, method, rate, seed, momentum, smoothing)
            for seed, n, game, method in trials
            for rate, momentum, smoothing in _MOMENTA.get((n, method), ())
        ]
    if stage == "larger":
        trials = itertools.product(range(1, seeds + 1), _LARGER, games)
        return [
            Job(game, 4, "paired", rate, seed, momentum, smoothing, envs=64)
            for seed, (rate, momentum, smoothing), game in trials
        ]
    if stage == "longer":
        trials = itertools.product(range(1, seeds + 1), games, _LONGER)
        return [_job(game, 16, setting, seed)._replace(total_steps=4 * TOTAL_STEPS) for seed, game, setting in trials]
    if stage == "stability":
        trials = itertools.product(range(_STABILITY + 1, _STABILITY + 1 + seeds), games, _EQUAL_STEPS)
        return [_job(game, 4, setting, seed) for seed, game, setting in trials]
    fresh = range(_FRESH + 1, _FRESH + 1 + seeds)
    if stage == "start":
        trials = itertools.product(range(1, seeds + 1), _STARTS, games)
        return [
            _job(game, n, setting, seed)._replace(envs=envs, start=start)
            for seed, (n, envs, setting, starts), game in trials
            if n in ranks
            for start in starts
        ]
    if stage == "ranks":
        return [job for seed in fresh for n in ranks for game in games for job in _jobs_of_ranks(game, n, seed)]
    if stage == "groups":
        return [job for seed in fresh for game in games for job in _jobs_of_groups(game, ranks, seed)]
    chosen = sorted((n, setting) for n, setting in chosen_settings(read()) if n in ranks)
    if stage == "final":
        chosen += [(n, setting) for n, setting in _ASKED if n in ranks and (n, setting) not in chosen]
        return [_job(game, n, setting, seed) for seed in fresh for n, setting in chosen for game in games]
    best = best_settings(read())
    if stage == "held_out":
        wanted = [(n, best[n, of]) for n in ranks for of in METHODS] + [
            (n, setting) for n, setting in _ASKED if n in ranks
        ]
        usual = [_job(game, n, setting, seed) for seed in fresh for n, setting in wanted for game in games]
        return [job._replace(total_steps=held_out_steps(job.ranks)) for job in usual]
    if stage == "in_step":
        usual = [_job(game, n, best[n, "paired"], seed) for n in ranks for seed in fresh for game in games]
        return [job._replace(max_staleness=0) for job in usual]
    conditions = [(1.0, 0), (3.0, 0), (10.0, 0), (0.05, 1)]
    return [
        _job(game, n, setting, seed, delay, slow)
        for seed in fresh
        for delay, slow in conditions
        for n, setting in chosen
        for game in games
        if setting.method != "allreduce"
    ]


def _jobs_of_groups(game: str, ranks: list[int], seed: int) -> list[Job]:
    """Groups of each kind, of so many ranks in all, and synchronous A2C with as many environments, which is one group
    of all ranks."""
    kinds = [(n, count) for n, count in GROUPS if n in ranks]
    groups = [_job(game, count, GROUPS_SETTING, seed)._replace(envs=16 * n // count) for n, count in kinds]
    rivals = [_job(game, n, setting, seed) for n in dict.fromkeys(n for n, _ in kinds) for setting in GROUPS_RIVALS]
    if game not in SWEPT:
        return [job._replace(total_steps=held_out_steps(16)) for job in groups + rivals]
    return groups + rivals


def _jobs_of_ranks(game: str, ranks: int, seed: int) -> list[Job]:
    """Gossip by the defaults over each network, and with a slow rank on the fast one; 16 ranks also as 4 groups. One
    rank alone by two settings, as many as synchronous A2C of more ranks has in `final`."""
    if ranks == 1:
        return [_job(game, 1, setting, seed)._replace(start=start) for setting, start in _ALONE]
    default = _job(game, ranks, Setting("paired", min(ranks / 2, 2), 0.5, 0.8), seed)._replace(start="bias")
    jobs = [default._replace(delay=delay) for delay in NETWORKS] + [default._replace(slow_ranks=1)]
    if ranks == 16:
        jobs += [default._replace(ranks=4, envs=64, delay=delay) for delay in NETWORKS]
    return jobs


def _job(game: str, ranks: int, setting: Setting, seed: int, delay: float = 0.05, slow_ranks: int = 0) -> Job:
    return Job(
        game, ranks, setting.method, setting.rate, seed, setting.momentum, setting.smoothing, delay, slow_ranks,
        setting.exchanges,
    )  # fmt: skip


def _commit() -> str:
    """The commit of the code that trains, with a mark if it was changed since."""
    git = ["git", "-C", str(FOLDER)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ":/pala", ":/results/mixing/*.py"])
    return commit.stdout.strip() + ("-changed" if changed.returncode else "")


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--games", nargs="+", default=list(SWEPT), choices=GAMES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    done, commit = read(), {"commit": _commit()}
    jobs = [
        job for job in jobs_of(arguments.stage, arguments.games, arguments.ranks, arguments.seeds) if job not in done
    ]
    print(f"{len(jobs)} trainings", flush=True)
    with multiprocessing.get_context("spawn").Pool(arguments.processes, prepare, (1,), maxtasksperchild=1) as pool:
        for line in pool.imap_unordered(train, jobs):
            with open(FOLDER / "minatar.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line | commit) + "\n")
            print({key: line.get(key) for key in (*Job._fields, "mean_height", "failed")}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
