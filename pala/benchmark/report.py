"""What is made of the benchmark's raw rounds: ratios, tables, a picture. Pure, but for `draw`, which writes a file.

The floor of a step is the environment's own time plus the network's floating-point operations, one forward and one
backward pass, at the rate at which the machine multiplies matrices; nothing that this design does can be faster.
Ratios are taken within a round, where noise meets both sides, then their median and range over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pala.plot import COLOURS, write_picture
from pala.run.metrics import SECTIONS
from pala.system.errors import PalaError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = ("forward", "backward", "optimiser")


@dataclass(frozen=True)
class Spread:
    """Median and range over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def text(self, form: str) -> str:
        """`1,930 (1,850-2,010)` for the form `,.0f`."""
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


@dataclass(frozen=True)
class Parts:
    """What the machine can do, with one number of ranks in one precision. Microseconds a step of a rank; medians."""

    ranks: int
    threads: int  # a rank
    precision: str
    environment_us: float
    network_us: dict[str, float]  # forward, backward, optimiser
    matrix_gflops: float
    operations_us: float  # the floor's share of the network
    floor_steps_per_s: Spread  # of all ranks


@dataclass(frozen=True)
class Training:
    """What training reaches, with one number of ranks, in one precision, with one exchange."""

    ranks: int
    precision: str
    exchange: str
    steps_per_s: Spread  # of all ranks
    of_none: Spread | None
    of_floor: Spread
    of_environments: Spread
    split_us: dict[str, float]  # a step of a rank; median
    cpu_per_core: float
    exchange_thread_share: float
    figures: dict[str, float]  # of the exchange, where it has them; medians


def parts_of(job: dict[str, Any]) -> list[Parts]:
    """One for each precision of a job."""
    return [_parts(job, precision) for precision in job["precisions"]]


def _parts(job: dict[str, Any], precision: str) -> Parts:
    flops = sum(job["flops_per_step"].values())

    def median(value: Callable[[dict[str, Any]], Iterable[float]]) -> float:
        return statistics.median(statistics.fmean(value(round_)) for round_ in job["rounds"])

    def network(key: str) -> float:
        return median(lambda round_: [rank[key] for rank in round_["network"][precision]])

    return Parts(
        job["ranks"], job["of_ranks"][0]["threads"], precision,
        environment_us=median(lambda round_: round_["environment_us"]),
        network_us={part: network(part) for part in PARTS},
        matrix_gflops=network("matrix_gflops"),
        operations_us=median(lambda r: [_operations_us(flops, k["matrix_gflops"]) for k in r["network"][precision]]),
        floor_steps_per_s=Spread.of(_floor_steps_per_s(round_, precision, flops) for round_ in job["rounds"]),
    )  # fmt: skip


def _operations_us(flops: float, gflops_per_s: float) -> float:
    return flops / gflops_per_s / 1e3


def _floor_steps_per_s(round_: dict[str, Any], precision: str, flops: float) -> float:
    rates = [rank["matrix_gflops"] for rank in round_["network"][precision]]
    floors = zip(round_["environment_us"], rates, strict=True)
    return sum(1e6 / (environment_us + _operations_us(flops, rate)) for environment_us, rate in floors)


def training_of(job: dict[str, Any]) -> list[Training]:
    """One for each precision and exchange of a job."""
    return [_training(job, precision, exchange) for precision in job["precisions"] for exchange in job["exchanges"]]


def _training(job: dict[str, Any], precision: str, exchange: str) -> Training:
    rounds, flops = job["rounds"], sum(job["flops_per_step"].values())
    ranks = [_ranks_of(round_, precision, exchange) for round_ in rounds]
    speeds = [_speed(of_round) for of_round in ranks]
    none = [_speed(_ranks_of(r, precision, "none")) for r in rounds] if "none" in job["exchanges"] else None
    everything = [rank for of_round in ranks for rank in of_round]

    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(statistics.fmean(map(value, of_round)) for of_round in ranks)

    keys = [key for key in _FIGURES if any(key in rank for rank in everything)]
    return Training(
        job["ranks"], precision, exchange,
        steps_per_s=Spread.of(speeds),
        of_none=_ratio(speeds, none) if none is not None and exchange != "none" else None,
        of_floor=_ratio(speeds, [_floor_steps_per_s(round_, precision, flops) for round_ in rounds]),
        of_environments=_ratio(speeds, [sum(1e6 / us for us in round_["environment_us"]) for round_ in rounds]),
        split_us={s: median(lambda rank, s=s: 1e6 * rank["time"][s] / rank["steps_per_s"]) for s in SECTIONS},  # type: ignore[misc]
        cpu_per_core=median(lambda rank: rank["cpu_per_core"]),
        exchange_thread_share=median(lambda rank: rank["exchange_thread_share"]),
        figures={key: statistics.median(rank[key] for rank in everything if key in rank) for key in keys},
    )  # fmt: skip


_FIGURES = ("models_sent", "models_mixed", "staleness_updates", "consensus_distance_relative", "bytes_sent")


def _ranks_of(round_: dict[str, Any], precision: str, exchange: str) -> list[dict[str, Any]]:
    return next(
        row["ranks"] for row in round_["training"] if (row["precision"], row["exchange"]) == (precision, exchange)
    )


def _speed(ranks: list[dict[str, Any]]) -> float:
    return sum(rank["steps_per_s"] for rank in ranks)


def _ratio(values: Sequence[float], others: Sequence[float]) -> Spread:
    """Pair by pair."""
    return Spread.of(value / other for value, other in zip(values, others, strict=True))


def far_off(jobs: list[dict[str, Any]], lowest: float) -> list[str]:
    """A sentence for each exchange whose training is below `lowest` of training without one."""
    return [
        f"With {t.ranks} ranks in {t.precision}, training with exchange '{t.exchange}' is only {t.of_none.text('.2f')} "
        f"as fast as without; at least {lowest:g} is expected."
        for job in jobs for t in training_of(job) if t.of_none is not None and t.of_none.median < lowest
    ]  # fmt: skip


# ---- tables ----------------------------------------------------------------------------------------------------------


def markdown(benchmark: dict[str, Any]) -> str:
    """All tables, as readable in a terminal or a log as on a page."""
    jobs = benchmark["jobs"]
    flops = jobs[0]["flops_per_step"]
    env, a2c, machine = benchmark["config"]["env"], benchmark["config"]["a2c"], benchmark["machine"]
    gpus = sorted({rank["gpu"] for job in jobs for rank in job["of_ranks"] if rank["gpu"]})
    sections = [
        f"# Benchmark: {env['id']}, {env['num_envs']} environments a rank, {a2c['rollout_steps']}-step rollouts",
        f"{machine['cpu']}, {machine['cores']} cores{', ' if gpus else ''}{', '.join(gpus)}; "
        f"{benchmark['options']['rounds']} rounds of {benchmark['options']['seconds']:g} s a measurement, interleaved; "
        f"median (range) over rounds.{_slowed(benchmark['options'])}\n"
        f"A step is {flops['forward'] / 1e6:.3g} million floating-point operations forward and "
        f"{flops['backward'] / 1e6:.3g} million backward.",
        "## The parts alone, and the floor\n\nMicroseconds a step of a rank; all ranks at the same time.\n\n"
        + _parts_table(jobs),
        "## Training\n\nSteps of all ranks a second, and their ratios within a round.\n\n"
        + _training_table(jobs)
        + _left_out(jobs),
        "## Where the time of a step goes\n\nMicroseconds a step of a rank; processor time of the process and of the "
        "exchange's threads in wall time.\n\n" + _split_table(jobs),
        "## What was exchanged\n\nMedian over rounds and ranks.\n\n" + _exchange_table(jobs),
        "## What the protocol costs\n\nMicroseconds of processor time a model, on both sides together and with the "
        "credit that goes back, without the model's own bytes.\n\n" + _protocol_table(benchmark["protocol_us"]),
        "## Ranks\n\nOf the benchmark's processes, which hold a network for each precision.\n\n" + _ranks_table(jobs),
        f"{benchmark['date']}, commit {benchmark['git_commit']}{' (changed)' if benchmark['git_dirty'] else ''}: "
        f"`{benchmark['command']}`",
    ]
    return "\n\n".join(sections) + "\n"


def _slowed(options: dict[str, Any]) -> str:
    slowdown = options.get("slowdown", 1.0)
    return f" The last rank is made {slowdown:g} times slower: it sleeps after each step." if slowdown > 1 else ""


def _left_out(jobs: list[dict[str, Any]]) -> str:
    reasons = {(job["ranks"], *item) for job in jobs for item in job.get("left_out", {}).items()}
    return "".join(f"\n\nLeft out with {ranks} ranks: {kind}. {reason}" for ranks, kind, reason in sorted(reasons))


def _parts_table(jobs: list[dict[str, Any]]) -> str:
    header = ("ranks", "threads", "precision", "environment", *PARTS, "GFLOP/s", "floor", "floor steps/s")
    return table(header, [
        (
            str(p.ranks), str(p.threads), p.precision, f"{p.environment_us:.0f}",
            *(f"{p.network_us[part]:.0f}" for part in PARTS), f"{p.matrix_gflops:.0f}",
            f"{p.environment_us:.0f} + {p.operations_us:.0f}", p.floor_steps_per_s.text(",.0f"),
        )
        for job in jobs for p in parts_of(job)
    ])  # fmt: skip


def _training_table(jobs: list[dict[str, Any]]) -> str:
    header = ("ranks", "precision", "exchange", "global steps/s", "of none", "of the floor", "of the environments")
    return table(header, [
        (
            *_names(t), t.steps_per_s.text(",.0f"), t.of_none.text(".3f") if t.of_none else "",
            t.of_floor.text(".2f"), t.of_environments.text(".2f"),
        )
        for t in _all_training(jobs)
    ])  # fmt: skip


def _split_table(jobs: list[dict[str, Any]]) -> str:
    header = ("ranks", "precision", "exchange", *SECTIONS, "processor a core", "exchange's threads")
    return table(header, [
        (
            *_names(t), *(f"{t.split_us[s]:.1f}" for s in SECTIONS),
            f"{t.cpu_per_core:.1%}", f"{t.exchange_thread_share:.2%}",
        )
        for t in _all_training(jobs)
    ])  # fmt: skip


def _exchange_table(jobs: list[dict[str, Any]]) -> str:
    header = (
        "ranks", "precision", "exchange", "models sent an update", "mixed an update", "most updates without mix",
        "relative distance", "KiB sent an update", "model, KiB",
    )  # fmt: skip
    sizes = {(job["ranks"], kind): size for job in jobs for kind, size in job["message_bytes"].items()}
    rows = []
    for t in _all_training(jobs):
        f = t.figures
        row = (
            _optional(f, "models_sent", ".2f"), _optional(f, "models_mixed", ".2f"),
            _optional(f, "staleness_updates", ".0f"), _optional(f, "consensus_distance_relative", ".4f"),
            _optional(f, "bytes_sent", ",.0f", 1024), f"{sizes[t.ranks, t.exchange] / 1024:,.0f}",
        )  # fmt: skip
        if t.exchange != "none":
            rows.append((*_names(t), *row))
    return table(header, rows) if rows else "Nothing."


def _protocol_table(costs_us: dict[str, float]) -> str:
    return table(("ranks", *costs_us), [("a model", *(f"{cost:.1f}" for cost in costs_us.values()))])


def _optional(figures: dict[str, float], key: str, form: str, unit: float = 1) -> str:
    return f"{figures[key] / unit:{form}}" if key in figures else ""


def _ranks_table(jobs: list[dict[str, Any]]) -> str:
    header = ("ranks", "peak memory, MiB", "on the GPU, MiB", "threads of a process", "start to first step, s")
    rows = []
    for job in jobs:
        ranks = job["of_ranks"]
        device = [rank["device_memory_peak_bytes"] for rank in ranks if rank["device_memory_peak_bytes"] is not None]
        threads = [f["num_threads"] for r in job["rounds"] for row in r["training"] for f in row["ranks"]]
        rows.append((
            str(job["ranks"]), f"{max(rank['memory_peak_bytes'] for rank in ranks) / 2**20:,.0f}",
            f"{max(device) / 2**20:,.0f}" if device else "", str(max(threads)),
            f"{max(rank['seconds_to_first_step'] for rank in ranks):.1f}",
        ))  # fmt: skip
    return table(header, rows)


def _all_training(jobs: list[dict[str, Any]]) -> list[Training]:
    return [training for job in jobs for training in training_of(job)]


def _names(training: Training) -> tuple[str, str, str]:
    return str(training.ranks), training.precision, training.exchange


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up: words to the left, figures to the right. Empty columns are left out."""
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    columns = [[header[i], *(row[i] for row in rows)] for i in kept]
    widths = [max(map(len, column)) for column in columns]
    figures = [all(not cell or cell.lstrip("-")[:1].isdigit() for cell in column[1:]) for column in columns]

    def line(cells: Iterable[str]) -> str:
        padded = zip(cells, widths, figures, strict=True)
        return "| " + " | ".join(f"{c:>{width}}" if right else f"{c:<{width}}" for c, width, right in padded) + " |"

    rule = "".join(
        "|" + ("-" * (width + 1) + ":" if right else "-" * (width + 2))
        for width, right in zip(widths, figures, strict=True)
    )
    return "\n".join(
        [
            line(c[0] for c in columns),
            rule + "|",
            *(line(cells) for cells in zip(*(c[1:] for c in columns), strict=True)),
        ]
    )


# ---- the picture -----------------------------------------------------------------------------------------------------

_OPERATIONS = "operations (floor)"
_PIECE_COLOURS = {
    "environment": COLOURS[0], _OPERATIONS: COLOURS[5], "inference": COLOURS[1], "update": COLOURS[2],
    "exchange": COLOURS[3], "wait": COLOURS[4], "other": "#999999",
}  # fmt: skip
_MARKERS = "osD^vP*X"


def draw(benchmark: dict[str, Any], output: Path) -> None:
    """Where a step's time goes beside the floor, and steps a second over the number of ranks. Raises PalaError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PalaError(f"A picture needs matplotlib ({error}): `pip install matplotlib`.") from None
    jobs = benchmark["jobs"]
    bars = sum(len(job["precisions"]) * (1 + len(job["exchanges"])) + 1 for job in jobs)
    height = max(4.6, 1.9 + 0.3 * bars)
    figure = Figure(figsize=(13, height), dpi=130, layout="constrained")
    split, speed = figure.subplots(1, 2, width_ratios=[1.35, 1])
    _draw_split(split, jobs)
    _draw_speed(speed, jobs)
    for panel in (split, speed):
        panel.spines[["top", "right"]].set_visible(False)
        handles, labels = panel.get_legend_handles_labels()
        panel.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.7 / height), ncols=3, frameon=False)
    env, machine = benchmark["config"]["env"], benchmark["machine"]
    title = f"{env['id']}, {env['num_envs']} environments a rank; {machine['cpu']}, {machine['cores']} cores"
    figure.suptitle(title, fontsize=11)
    write_picture(figure, output)


def _draw_split(axes: Axes, jobs: list[dict[str, Any]]) -> None:
    """Stacked bars, from top to bottom as in the tables; a gap after each number of ranks."""
    bars: list[tuple[float, str, dict[str, float]]] = []  # place, label, pieces
    y = 0.0
    for job in jobs:
        many = f"{job['ranks']} rank{'s' * (job['ranks'] > 1)}"
        for parts in parts_of(job):
            floor = {"environment": parts.environment_us, _OPERATIONS: parts.operations_us}
            mine = [t for t in training_of(job) if t.precision == parts.precision]
            group = [(f"{many}, {parts.precision}: floor", floor), *((t.exchange, t.split_us) for t in mine)]
            bars += [(y + i, label, pieces) for i, (label, pieces) in enumerate(group)]
            y += len(group) + 0.25
        y += 0.5
    places, left = [place for place, _, _ in bars], [0.0] * len(bars)
    for name, colour in _PIECE_COLOURS.items():
        widths = [pieces.get(name, 0.0) for _, _, pieces in bars]
        axes.barh(places, widths, left=left, height=0.78, color=colour, linewidth=0, label=name)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, end in zip(places, left, strict=True):
        axes.text(end, place, f" {end:,.0f}", va="center", fontsize=8)
    axes.set_yticks(places, [label for _, label, _ in bars])
    axes.set_ylim(places[-1] + 0.7, -0.7)
    axes.set_xlim(0, 1.13 * max(left))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_xlabel("microseconds a step of a rank (median)")


def _draw_speed(axes: Axes, jobs: list[dict[str, Any]]) -> None:
    """A marker with its range for each kind of training; the floor as a dash."""
    kinds = list(dict.fromkeys((t.precision, t.exchange) for t in _all_training(jobs)))
    precisions = list(dict.fromkeys(precision for precision, _ in kinds))
    exchanges = list(dict.fromkeys(exchange for _, exchange in kinds))
    step = 0.7 / len(kinds)
    for number, kind in enumerate(kinds):
        drawn = [(x, t) for x, job in enumerate(jobs) for t in training_of(job) if (t.precision, t.exchange) == kind]
        speeds = [t.steps_per_s for _, t in drawn]
        filled = precisions.index(kind[0]) == 0
        colour = COLOURS[exchanges.index(kind[1]) % len(COLOURS)]
        axes.errorbar(
            [x + (number - (len(kinds) - 1) / 2) * step for x, _ in drawn], [s.median for s in speeds],
            yerr=[[s.median - s.low for s in speeds], [s.high - s.median for s in speeds]],
            fmt=_MARKERS[exchanges.index(kind[1]) % len(_MARKERS)], color=colour, capsize=3,
            markerfacecolor=colour if filled else "white", label=f"{kind[1]}, {kind[0]}",
        )  # fmt: skip
    for number, precision in enumerate(precisions):
        floors = [p.floor_steps_per_s.median for job in jobs for p in parts_of(job) if p.precision == precision]
        axes.hlines(
            floors, [x - 0.42 for x in range(len(jobs))], [x + 0.42 for x in range(len(jobs))], color="black",
            linestyle=("-", "--", ":")[number % 3], linewidth=1.2, label=f"floor, {precision}",
        )  # fmt: skip
    axes.set_xticks(range(len(jobs)), [str(job["ranks"]) for job in jobs])
    axes.set_xlim(-0.6, len(jobs) - 0.4)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.25)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("ranks")
    axes.set_ylabel("global steps a second (median and range)")
