"""Analysis of the benchmark's raw rounds: bounds, speeds and their ratios. Pure.

The lower bound of a step's time is the environment's own time plus the network's floating-point operations, one forward
and one backward pass, at the rate at which the machine multiplies matrices; nothing that this design does can be
faster. Its inverse, summed over ranks, is the upper bound of the speed.
Ratios are taken within a round, where noise meets both sides, then their median and range over rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pala.config.catalogue import KINDS
from pala.run.metrics import SECTIONS, progress_kept
from pala.system.text import Spread

BASELINE = next(kind.name for kind in KINDS.values() if kind.independent)
"""The exchange that the others are compared with."""
PARTS = ("forward", "backward", "optimiser")


@dataclass(frozen=True)
class Parts:
    """Costs of a step's parts, with one number of ranks in one precision: microseconds a step of a rank; medians."""

    ranks: int
    threads: int  # a rank
    precision: str
    environment_us: float
    network_us: dict[str, float]  # forward, backward, optimiser
    matrix_gflops: float
    operations_us: float  # the network's share of a step's lower bound
    bound_steps_per_s: Spread  # upper bound of all ranks together


@dataclass(frozen=True)
class Training:
    """Speed of training, with one number of ranks, in one precision, with one exchange."""

    ranks: int
    precision: str
    exchange: str
    steps_per_s: Spread  # of all ranks
    of_none: Spread | None
    of_bound: Spread
    of_environments: Spread
    split_us: dict[str, float]  # a step of a rank; median
    cpu_per_core: float
    exchange_thread_share: float
    figures: dict[str, float]  # of the exchange, where it has them; medians, but of staleness the most


def parts_of(job: dict[str, Any]) -> list[Parts]:
    """Return the parts of a job, for each of its precisions."""
    return [_parts(job, precision) for precision in job["precisions"]]


def _parts(job: dict[str, Any], precision: str) -> Parts:
    flops = sum(job["flops_per_step"].values())

    def median(value: Callable[[dict[str, Any]], Iterable[float]]) -> float:
        return statistics.median(statistics.fmean(value(round_)) for round_ in job["rounds"])

    def network(key: str) -> float:
        return median(lambda round_: [rank[key] for rank in round_["network"][precision]])

    return Parts(
        job["ranks"],
        job["of_ranks"][0]["threads"],
        precision,
        environment_us=median(lambda round_: round_["environment_us"]),
        network_us={part: network(part) for part in PARTS},
        matrix_gflops=network("matrix_gflops"),
        operations_us=median(lambda r: [_operations_us(flops, k["matrix_gflops"]) for k in r["network"][precision]]),
        bound_steps_per_s=Spread.of(_bound_steps_per_s(round_, precision, flops) for round_ in job["rounds"]),
    )


def _operations_us(flops: float, gflops_per_s: float) -> float:
    return flops / gflops_per_s / 1e3


def _bound_steps_per_s(round_: dict[str, Any], precision: str, flops: float) -> float:
    rates = [rank["matrix_gflops"] for rank in round_["network"][precision]]
    ranks = zip(round_["environment_us"], rates, strict=True)
    return sum(1e6 / (environment_us + _operations_us(flops, rate)) for environment_us, rate in ranks)


def training_of(job: dict[str, Any]) -> list[Training]:
    """Return the training of a job, for each of its precisions and exchanges."""
    return [_training(job, precision, exchange) for precision in job["precisions"] for exchange in job["exchanges"]]


def _training(job: dict[str, Any], precision: str, exchange: str) -> Training:
    rounds, flops = job["rounds"], sum(job["flops_per_step"].values())
    ranks = [ranks_of(round_, precision, exchange) for round_ in rounds]
    speeds = [_speed(of_round) for of_round in ranks]
    none = [_speed(ranks_of(r, precision, BASELINE)) for r in rounds] if BASELINE in job["exchanges"] else None
    everything = [rank for of_round in ranks for rank in of_round]

    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(statistics.fmean(map(value, of_round)) for of_round in ranks)

    kept = [_progress_kept(of_round) for of_round in ranks if all("movement" in rank for rank in of_round)]
    figures = {key: [rank[key] for rank in everything if key in rank] for key in _FIGURES}
    return Training(
        job["ranks"],
        precision,
        exchange,
        steps_per_s=Spread.of(speeds),
        of_none=_ratio(speeds, none) if none is not None and exchange != BASELINE else None,
        of_bound=_ratio(speeds, [_bound_steps_per_s(round_, precision, flops) for round_ in rounds]),
        of_environments=_ratio(speeds, [sum(1e6 / us for us in round_["environment_us"]) for round_ in rounds]),
        split_us={s: _median_us(s, ranks) for s in SECTIONS},
        cpu_per_core=median(lambda rank: rank["cpu_per_core"]),
        exchange_thread_share=median(lambda rank: rank["exchange_thread_share"]),
        figures={key: _FIGURES[key](values) for key, values in figures.items() if values}
        | ({"progress_kept": statistics.median(kept)} if kept else {}),
    )


def _median_us(section: str, ranks: list[list[dict[str, Any]]]) -> float:
    """Return the time a step that a section takes: the median over rounds of the mean over ranks, without ranks that
    made none."""
    taken_us = (
        [1e6 * rank["time"][section] / rank["steps_per_s"] for rank in of_round if rank["steps_per_s"] > 0]
        for of_round in ranks
    )
    means = [statistics.fmean(of_round) for of_round in taken_us if of_round]
    return statistics.median(means) if means else math.nan


def _progress_kept(ranks: list[dict[str, Any]]) -> float:
    kept = progress_kept((rank["own_movement"] for rank in ranks), (rank["movement"] for rank in ranks))
    return math.nan if kept is None else kept


_FIGURES: dict[str, Callable[[list[float]], float]] = {
    "models_sent": statistics.median,
    "models_mixed": statistics.median,
    "staleness_updates": max,
    "consensus_distance_relative": statistics.median,
    "bytes_sent": statistics.median,
}


def precision_of(benchmark: dict[str, Any]) -> str:
    """Return the precision that training by the benchmark's preset computes in."""
    configured = str(benchmark["config"]["network"]["precision"])
    return configured if configured != "auto" else str(benchmark["jobs"][0]["precision"])


def ranks_of(round_: dict[str, Any], precision: str, exchange: str) -> list[dict[str, Any]]:
    """Return the figures of each rank of one measurement of training. Raises StopIteration if there is none."""
    return next(
        row["ranks"] for row in round_["training"] if (row["precision"], row["exchange"]) == (precision, exchange)
    )


def _speed(ranks: list[dict[str, Any]]) -> float:
    return sum(rank["steps_per_s"] for rank in ranks)


def _ratio(values: Sequence[float], others: Sequence[float]) -> Spread:
    """Return the spread of the ratios of `values` to `others`, pair by pair."""
    return Spread.of(value / other for value, other in zip(values, others, strict=True))


def all_training(jobs: list[dict[str, Any]]) -> list[Training]:
    """Return the training of all jobs, one after the other."""
    return [training for job in jobs for training in training_of(job)]
