"""Time to a score over the number of ranks: what simulated ranks learn on MinAtar, at the speeds that `pala simulate
predict` says.

    python results/time_to_score/report.py > results/time_to_score/table.md      # writes time_to_score.png, too

A training of simulated ranks (`../mixing/minatar.jsonl`) says after how many steps the target is reached, a prediction
(`speeds/`) how many steps are made in a second. In both a model is under way for as long.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "mixing"))

from minatar_bed import TOTAL_STEPS, Job, read  # noqa: E402

from pala.report.pictures import COLOURS, new_figure, tidy, write_picture  # noqa: E402
from pala.system.text import table  # noqa: E402

TARGETS = {"breakout": 3.5, "space_invaders": 10.0}  # of results/wander, frozen before its first run
RANKS = (2, 4, 8, 16)
SEEDS = range(101, 103)
BINS = 50  # points of a curve


class Place(NamedTuple):
    """Where the ranks are."""

    title: str
    speeds: str  # file of the predicted steps/s; that of groups has "groups_" before it
    delay: float  # of a model, in updates
    slow_ranks: int = 0
    ranks: tuple[int, ...] = RANKS


PLACES = (
    Place("one host", "one_host", 0.05),
    Place("a rank a host, 1 Gbit/s", "1gbit", 0.5),
    Place("a rank a host, 100 Mbit/s", "100mbit", 5.0),
    Place("one host, one rank four times slower", "one_host", 0.05, slow_ranks=1),
    Place("four ranks a host, 1 Gbit/s", "four_1gbit", 0.5, ranks=(16,)),
    Place("four ranks a host, 100 Mbit/s", "four_100mbit", 5.0, ranks=(16,)),
)
METHODS = (
    "gossip",
    "gossip, groups of 4",
    "gossip, `uniform`",
    "synchronous A2C",
    "synchronous A2C without the slow rank",
)
RESULTS = read()


def steps_to(target: float, line: dict[str, Any]) -> float:
    """Return the steps after which the curve is first at the target, between two of its points; infinite: never."""
    curve, before = line.get("curve", ()), 0.0
    for number, height in enumerate(curve):
        if height >= target:
            return TOTAL_STEPS / BINS * (number + 0.5 - (height - target) / (height - before))
        before = height
    return math.inf


def trainings(game: str, **wanted: Any) -> list[float]:
    """Return the steps to the target of the trainings that differ from the usual in what is wanted, a seed each."""
    found = {
        job.seed: steps_to(TARGETS[game], line)
        for job, line in RESULTS.items()
        if job.game == game and job.seed in SEEDS and job == Job(game, seed=job.seed, **wanted)
    }
    return [found[seed] for seed in sorted(found)]


def settings_of(method: str, ranks: int, place: Place) -> list[dict[str, Any]]:
    """Return the settings of a method that were tried on fresh seeds: the better of two for the rivals of gossip."""
    default = {"momentum": 0.5, "smoothing": 0.8, "start": "bias"}
    there = {"delay": place.delay, "slow_ranks": place.slow_ranks}
    if method == "gossip":
        return [{"method": "paired", "ranks": ranks, "rate": min(ranks / 2, 2), **default, **there}]
    if method == "gossip, groups of 4":
        grouped = ranks == 16 and not place.slow_ranks and "a rank a host" not in place.title
        return [{"method": "paired", "ranks": 4, "envs": 64, "rate": 2, **default, **there}] if grouped else []
    if method == "gossip, `uniform`":
        return _without_and_with("uniform", ranks) if place.delay == 0.05 and not place.slow_ranks else []
    if method == "synchronous A2C" or (place.slow_ranks and ranks > 2):  # less one rank it learns as with all: assumed
        return _without_and_with("allreduce", ranks)
    return alone() if place.slow_ranks else []


def alone() -> list[dict[str, Any]]:
    """Return the settings of one rank."""
    one = {"method": "allreduce", "ranks": 1}
    return [{**one, "rate": 1, "momentum": 0.5, "smoothing": 0.8, "start": "bias"}, {**one, "rate": 2}]


def _without_and_with(method: str, ranks: int) -> list[dict[str, Any]]:
    """Return settings of which fresh seeds have those that the sweep chose without momentum and with it."""
    return [
        {"method": method, "ranks": ranks, "rate": rate, **momentum}
        for rate in (1, 2, 4)
        for momentum in ({}, {"momentum": 0.5, "smoothing": 0.8}, {"momentum": 0.75, "smoothing": 0.8})
    ]


def median_steps(game: str, settings: list[dict[str, Any]]) -> float | None:
    """Return the least median over seeds of the steps to the target of settings that all seeds have; None: there is no
    such setting."""
    of_all = [steps for each in settings if len(steps := trainings(game, **each)) == len(SEEDS)]
    return min(map(statistics.median, of_all), default=None)


def steps_per_s(method: str, ranks: int, place: Place) -> float:
    """Return the predicted steps of all ranks a second."""
    name = f"groups_{place.speeds}" if method == "gossip, groups of 4" else place.speeds
    of, straggler = "allreduce" if "A2C" in method else "random", 4.0 if place.slow_ranks else 1.0
    if method == METHODS[4]:  # the ranks that are left, which are alike
        return one_rank() if ranks == 2 else speeds(name)[of, 1.0, ranks] * (ranks - 1) / ranks
    return speeds(name)[of, straggler, ranks]


def speeds(name: str) -> dict[tuple[str, float, int], float]:
    """Return a prediction's steps/s by method, slowness and number of ranks."""
    return {
        (each["method"], each["straggler"], each["ranks"]): each["steps_per_s"] for each in _read(name)["predictions"]
    }


def one_rank() -> float:
    """Return the steps/s of one rank, as measured."""
    return float(_read("one_host")["one_rank_steps_per_s"])


def _read(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((FOLDER / f"speeds/{name}.json.gz").read_bytes()))


def times(method: str, ranks: int, place: Place) -> dict[str, float]:
    """Return by game the median time to the target, as a share of that of one rank; empty: not all was trained."""
    found = {}
    for game in TARGETS:
        steps, ones = median_steps(game, settings_of(method, ranks, place)), median_steps(game, alone())
        if steps is None or ones is None:
            return {}
        found[game] = steps / steps_per_s(method, ranks, place) / (ones / one_rank())
    return found


def mean(values: dict[str, float]) -> float:
    """Return the geometric mean over games."""
    return math.prod(values.values()) ** (1 / len(values))


def main() -> None:
    """See the top."""
    rows = []
    for place in PLACES:
        for ranks in place.ranks:
            for method in METHODS:
                if found := times(method, ranks, place):
                    cells = [f"{found[game]:.2f}" if found[game] < math.inf else "not reached" for game in TARGETS]
                    both = f"{mean(found):.2f}" if mean(found) < math.inf else ""
                    speed = f"{steps_per_s(method, ranks, place):,.0f}"
                    rows.append([place.title, str(ranks), method, speed, *cells, both])
    print(table(("place", "ranks", "method", "steps/s", "Breakout", "Space Invaders", "both games"), rows))
    draw()


def draw() -> None:
    """Draw a panel for each of the first four places."""
    figure = new_figure(11, 3.6)
    for axes, place in zip(figure.subplots(1, 4, sharey=True), PLACES[:4], strict=True):
        for colour, method in zip(COLOURS, METHODS, strict=False):
            points = {n: mean(found) for n in place.ranks if (found := times(method, n, place))}
            if points:
                start = {1: 1.0} if len(points) > 1 else {}
                line = start | points
                axes.plot(list(line), list(line.values()), "o-", color=colour, label=method.replace("`", ""))
        axes.plot((1, 16), (1, 1 / 16), ":", color="grey", label="N times as fast as one rank")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks((1, *RANKS), map(str, (1, *RANKS)))
        axes.set_yticks((4, 2, 1, 0.5, 0.25, 0.125, 0.0625), ("4", "2", "1", "1/2", "1/4", "1/8", "1/16"))
        axes.set_title(place.title, fontsize=9)
        axes.set_xlabel("ranks")
        tidy(axes)
    figure.axes[0].set_ylabel("time to the score / one rank's")
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    write_picture(figure, FOLDER / "time_to_score.png")


if __name__ == "__main__":
    main()
