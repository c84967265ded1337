"""What gossip lacks of synchronous A2C, taken apart: 16 ranks on the bed of `minatar_bed.py`, one thing at a time.

    python results/mixing/diagnosis.py                  adds lines to diagnosis.jsonl; goes on where it was interrupted
    python results/mixing/diagnosis.py --report         prints the table, with the paired runs of minatar.jsonl

| variant | what |
|---|---|
| clip_each | synchronous A2C, but that each rank's gradient is clipped before the mean |
| exact | each rank clips, divides by its own mean squares and steps; then all models are averaged exactly |
| pooled | the same, and the mean squares are averaged as well |
| late | synchronous A2C by the mean gradient of the update before |
| pairs | as `exact`, but that so many times the ranks are paired at random, and each pair averages its models |
| mixed_first | paired; a step is acted with one update later, when it is mixed. Gained nothing; commit 6bc2fae has it |
| paired | paired exchanges as training makes them |
| waits | paired; after an update a rank waits until it has exchanged since (`max_staleness` 0 until commit 83ca3fc) |
| tracking | paired exchanges of model and tracker, each rank steps by its tracker, an estimate of the mean gradient |
| tracking_late | the same, by the tracker before the newest gradient comes to it, so that what it steps by is mixed |

Tracking (Di Lorenzo & Scutari 2016, arXiv 1602.00591): t <- t + (my gradient - my last gradient), and exchanges mix t
as they mix models. Paired exchanges change no sum, so the mean of all t is the mean of the ranks' newest gradients.
With a `leak` each rank forgets a part of what it holds, so that what a lost message leaves does not stay for ever.
`clip` and `smoothing` change how each rank makes its step of a gradient (`Trial`); they were tried last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from minatar_bed import BASE_RATE, GAMES, SWEPT, TOTAL_STEPS, _commit, make_bed, read

from pala.system.resources import prepare
from pala.system.text import table

RAW = Path(__file__).with_suffix(".jsonl")
RANKS = 16
_ON_A_NETWORK = ("paired", "waits", "tracking", "tracking_late")
_TRIALS = (  # variant, rate, exchanges an update
    ("waits", 4, 4), ("pairs", 4, 4), ("tracking_late", 2, 4), ("late", 2, 0), ("exact", 4, 0), ("tracking", 2, 4),
    ("pairs", 4, 1), ("clip_each", 2, 0), ("pairs", 4, 2), ("tracking_late", 2, 1), ("pooled", 4, 0),
)  # fmt: skip
_LAST_TRIALS = (  # variant, rate, exchanges, clip, smoothing
    ("tracking_late", 4, 4, 1.0, 0.0), ("exact", 2, 0, 1.0, 0.0), ("exact", 8, 0, 1.0, 0.0), ("exact", 4, 0, 4.0, 0.0),
    ("exact", 4, 0, 1000.0, 0.0), ("pooled", 4, 0, 1000.0, 0.0), ("exact", 1, 0, 1.0, 0.9375),
    ("exact", 1, 0, 4.0, 0.9375), ("exact", 1.4, 0, 4.0, 0.9375), ("paired", 1, 1, 1.0, 0.9375),
)  # fmt: skip


class Trial(NamedTuple):
    """One training of 16 ranks."""

    game: str
    variant: str
    rate: float  # times BASE_RATE
    exchanges: int  # an update; 0: of no pairs
    seed: int
    delay: float = 0.05
    momentum: float = 0.0
    leak: float = 0.0
    clip: float = 1.0  # times the usual norm at which a gradient is clipped
    smoothing: float = 0.0  # RMSprop divides by the root mean square of the gradient so smoothed over a rank's updates


def train(trial: Trial) -> dict[str, Any]:
    """Run it; returns its line."""
    import torch

    from pala.config import Config

    torch.set_num_threads(1)
    config = Config(total_steps=TOTAL_STEPS, seed=trial.seed)
    own = {"learning_rate": trial.rate * BASE_RATE, "momentum": trial.momentum}
    exchange = replace(config.exchange, mixing="paired", exchanges_per_update=max(1, trial.exchanges))
    if trial.variant == "waits":
        exchange = replace(exchange, max_staleness=0)
    own["max_gradient_norm"] = trial.clip * config.a2c.max_gradient_norm
    config = replace(config, a2c=replace(config.a2c, **own), exchange=exchange)
    _divide_by_smoothed(trial.smoothing)
    make = partial(make_bed, game=trial.game)
    learn = _on_a_network if trial.variant in _ON_A_NETWORK else _in_rounds
    learned = learn(config, trial, make)
    return trial._asdict() | {
        "mean_height": learned.auc(TOTAL_STEPS),
        "curve": [round(height, 3) for height in learned.curve(50, TOTAL_STEPS)],
        "distance": statistics.fmean(learned.distances or [0.0]),
        "divergence": statistics.fmean(learned.divergences or [0.0]),
        "models_an_update": learned.models_sent / sum(learned.updates),
        "time_updates": learned.time_updates,
    }


def _divide_by_smoothed(smoothing: float) -> None:
    """From now on RMSprop's mean squares are of m <- smoothing m + (1 - smoothing) g, made larger in the beginning as
    Adam does; it steps along g as before."""
    import torch

    from pala.a2c import update

    smooth: dict[int, list] = {}

    def step(
        parameters: torch.Tensor, gradient: torch.Tensor, mean_square: torch.Tensor, learning_rate: float,
        alpha: float, epsilon: float, epsilon_inside_root: bool,
    ) -> None:  # fmt: skip
        kept = smooth.setdefault(mean_square.data_ptr(), [torch.zeros_like(gradient), 1.0])
        kept[0].mul_(smoothing).add_(gradient, alpha=1 - smoothing)
        kept[1] *= smoothing
        m = kept[0] / (1 - kept[1])
        mean_square.mul_(alpha).addcmul_(m, m, value=1 - alpha)
        parameters.addcdiv_(gradient, (mean_square + 1e-30).sqrt_().add_(epsilon), value=-learning_rate)

    update.rmsprop_ = step


def _in_rounds(config: Any, trial: Trial, make: Callable) -> Any:
    """All ranks in step, without a network."""
    import torch

    from pala.lab.simulate.learn import Learned, Learners
    from pala.networks.optimisers import clip_gradient_

    learners, steps, rounds = Learners(config, RANKS, make), 0, 0
    flats = [rank.flat for rank in learners.ranks]
    draw, newest = random.Random(trial.seed), torch.zeros_like(learners.beginning)
    squares = [rank.learner._a2c.mean_square for rank in learners.ranks]
    while steps < config.total_steps:
        losses = [rank.learner.differentiate() for rank in learners.ranks]
        if trial.variant == "clip_each":
            for flat in flats:
                clip_gradient_(flat.gradient, config.a2c.max_gradient_norm)
        if trial.variant in ("clip_each", "late"):
            _equal([flat.gradient for flat in flats])
        if trial.variant == "late":
            last, newest = newest, flats[0].gradient.clone()
            for flat in flats:
                flat.gradient.copy_(last)
        for rank, loss in zip(learners.ranks, losses, strict=True):
            rank.learner.step(loss)
        rounds, steps = rounds + 1, steps + RANKS * config.steps_per_update
        learners.look([flat.data for flat in flats], steps)  # before the ranks become alike
        if trial.variant in ("exact", "pooled"):
            _equal([flat.data for flat in flats])
        for _ in range(trial.exchanges if trial.variant == "pairs" else 0):
            order = draw.sample(flats, RANKS)
            for one, other in zip(order[::2], order[1::2], strict=True):
                _equal([one.data, other.data])
        if trial.variant == "pooled":
            _equal(squares)
        for number in range(RANKS):
            learners.note(number, steps, float(rounds))
    return Learned(
        learners.episodes, steps, float(rounds), [rounds] * RANKS, 0, 1.0, learners.distances, learners.divergences
    )


def _equal(tensors: list) -> None:
    """Each becomes the mean of all."""
    import torch

    mean = torch.stack(tensors).mean(0)
    for tensor in tensors:
        tensor.copy_(mean)


def _on_a_network(config: Any, trial: Trial, make: Callable) -> Any:
    """By the simulated network. With tracking ranks exchange model and tracker, one behind the other."""
    import numpy as np
    import torch

    from pala.lab.simulate.learn import Conditions, Learned, Learners, scenario
    from pala.lab.simulate.virtual_cluster import VirtualCluster

    learners = Learners(config, RANKS, make)
    size, tracks = len(learners.beginning), trial.variant.startswith("tracking")
    last = [torch.zeros(size) for _ in range(RANKS)]
    updates = [0] * RANKS

    def update(number: int, both: np.ndarray) -> None:
        rank, models = learners.ranks[number], cluster.ranks[number].models
        rank.flat.data.copy_(torch.from_numpy(both[:size]))
        loss = rank.learner.differentiate()
        model = torch.from_numpy(both)
        if tracks:
            models.settle()  # what was exchanged in the rollout counts for the step
            model, tracker = torch.from_numpy(models.model).split(size)
            rank.flat.data.copy_(model)
            gradient, mixed = rank.flat.gradient.clone(), tracker.clone()
            tracker.mul_(1 - trial.leak).add_(gradient - (1 - trial.leak) * last[number])
            last[number] = gradient
            rank.flat.gradient.copy_(mixed if trial.variant == "tracking_late" else tracker)
        rank.learner.step(loss)
        model.copy_(rank.flat.data)
        updates[number] += 1
        learners.note(number, cluster.global_steps + config.steps_per_update, cluster.now)

    def observe(cluster: VirtualCluster) -> None:
        learners.look([torch.from_numpy(rank.model[:size]) for rank in cluster.living], cluster.global_steps)

    begin = np.concatenate([learners.beginning.numpy(), np.zeros(size * tracks, np.float32)])
    simulated = scenario(config, "paired", Conditions(RANKS, trial.delay))
    cluster = VirtualCluster(simulated, np.tile(begin, (RANKS, 1)), learn=update, observe=observe)
    cluster.run()
    assert not cluster.stuck and not cluster.violations
    return Learned(
        learners.episodes, cluster.global_steps, cluster.ended_s, updates, cluster.models_sent, 1.0, learners.distances,
        learners.divergences,
    )  # fmt: skip


def made() -> dict[Trial, dict[str, Any]]:
    """What is there already."""
    lines = map(json.loads, RAW.read_text().splitlines()) if RAW.exists() else ()
    return {Trial(**{key: line[key] for key in Trial._fields if key in line}): line for line in lines}


def report() -> str:
    """Mean heights: mean over seeds, and of how many."""
    heights: dict[tuple, dict[str, list[float]]] = {}
    for trial, line in made().items():
        key = trial.variant, trial.rate, trial.momentum, trial.exchanges or "", trial.delay if trial.exchanges else ""
        changed = trial.leak or "", trial.clip if trial.clip != 1 else "", trial.smoothing or ""
        heights.setdefault((*key, *changed), {}).setdefault(trial.game, []).append(line["mean_height"])
    for job, line in read().items():
        if job.ranks == RANKS and job.is_of_the_sweep and job.smoothing in (0, 0.8):
            pairs = (job.exchanges, job.delay) if job.method != "allreduce" else ("", "")
            key = job.method, job.rate, job.momentum, *pairs, "", "", ""
            heights.setdefault(key, {}).setdefault(job.game, []).append(line.get("mean_height", 0.0))
    rows = []
    for key in sorted(heights, key=str):
        cells = [heights[key].get(game, []) for game in SWEPT]
        texts = (
            (f"{statistics.fmean(c):.2f} [{min(c):.2f}, {max(c):.2f}]", str(len(c))) if c else ("", "") for c in cells
        )
        rows.append((*map(str, key), *(text for pair in texts for text in pair)))
    header = ("variant", "rate", "momentum", "exchanges", "delay", "leak", "clip", "smoothing")
    return table((*header, *(name for game in SWEPT for name in (game, "seeds"))), rows)


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--games", nargs="+", default=list(SWEPT), choices=GAMES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.report:
        print(report())
        return
    done, commit = made(), {"commit": _commit()}
    trials = [
        Trial(game, *trial, seed) for seed in range(1, arguments.seeds + 1) for trial in _TRIALS
        for game in arguments.games
    ]  # fmt: skip
    trials += [
        Trial(game, *trial, seed, clip=clip, smoothing=smoothing) for seed in range(1, arguments.seeds + 1)
        for *trial, clip, smoothing in _LAST_TRIALS for game in arguments.games
    ]  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(arguments.processes, prepare, (1,)) as pool:
        for line in pool.imap_unordered(train, [trial for trial in trials if trial not in done]):
            with open(RAW, "a", encoding="utf-8") as file:
                file.write(json.dumps(line | commit) + "\n")
            print({key: line[key] for key in (*Trial._fields, "mean_height", "divergence")}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
