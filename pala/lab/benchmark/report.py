"""The benchmark's page: all tables. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pala.lab.benchmark.analysis import BASELINE, PARTS, Parts, Training, all_training, parts_of
from pala.report.page import Column, Form, Page, origin, table
from pala.run.metrics import SECTIONS

Job = dict[str, Any]

_PARTS = "Microseconds a step of a rank; all ranks at the same time."
_TRAINING = "Steps of all ranks a second, and their ratios within a round."
_SPLIT = """Microseconds a step of a rank; processor time of the process and of the exchange's threads in wall time."""
_EXCHANGE = "Median over rounds and ranks; of the updates without mix, the most."
_PROTOCOL = """Microseconds of processor time a model, on both sides together and with the credit that goes back, \
without the model's own bytes. All ranks are in one process and share its caches, which is a part of what more cost."""
_RANKS = "Of the benchmark's processes, which hold a network for each precision."


def markdown(benchmark: dict[str, Any]) -> str:
    """Return all tables, as readable in a terminal or a log as on a page."""
    jobs = benchmark["jobs"]
    env = benchmark["config"]["env"]
    page = Page(f"Benchmark: {env['id']}, {env['num_envs']} environments a rank, {_pace(benchmark['config'])}")
    page.add(_conditions(benchmark))
    page.section(
        "The parts alone, and the bounds", _PARTS, table(_PARTS_COLUMNS, [p for j in jobs for p in parts_of(j)])
    )
    page.section("Training", _TRAINING, table(_TRAINING_COLUMNS, all_training(jobs)) + _left_out(jobs))
    page.section("Where the time of a step goes", _SPLIT, table(_SPLIT_COLUMNS, all_training(jobs)))
    page.section("What was exchanged", _EXCHANGE, _exchange_table(jobs) or "Nothing.")
    page.section("What the protocol costs", _PROTOCOL, _protocol_table(benchmark))
    page.section("Ranks", _RANKS, table(_RANKS_COLUMNS, jobs))
    return page.add(origin(benchmark)).text()


def _conditions(benchmark: dict[str, Any]) -> str:
    jobs, machine = benchmark["jobs"], benchmark["machine"]
    flops = jobs[0]["flops_per_step"]
    cores = f"{machine['cores']} cores"
    gpus = sorted({rank["gpu"] for job in jobs for rank in job["of_ranks"] if rank["gpu"]})
    return (
        f"{', '.join([machine['cpu'], cores, *gpus])}; "
        f"{len(jobs[0]['rounds'])} rounds of {benchmark['options']['seconds']:g} s a measurement, interleaved; "
        f"median (range) over rounds.{_slowed(benchmark['options'])}\n"
        f"A step is {flops['forward'] / 1e6:.3g} million floating-point operations forward and "
        f"{flops['backward'] / 1e6:.3g} million backward."
    )


def _pace(config: dict[str, Any]) -> str:
    """Return how often training learns."""
    if config.get("algorithm") == "gorila":
        gorila = config["gorila"]
        return f"Gorila: a minibatch of {gorila['minibatch_size']} for {gorila['update_period_steps']} steps"
    return f"{config['a2c']['rollout_steps']}-step rollouts"


def _slowed(options: dict[str, Any]) -> str:
    slowdown = options.get("slowdown", 1.0)
    if slowdown <= 1:
        return ""
    return (
        f" The last rank sleeps {slowdown - 1:g} times as long as its threads compute, after each step: where all of "
        f"them compute all the time it is {slowdown:g} times slower, else less."
    )


def _left_out(jobs: list[Job]) -> str:
    reasons = {(job["ranks"], *item) for job in jobs for item in job.get("left_out", {}).items()}
    return "".join(f"\n\nLeft out with {ranks} ranks: {kind}. {reason}" for ranks, kind, reason in sorted(reasons))


# ---- columns ---------------------------------------------------------------------------------------------------------


def _part(name: str) -> Column[Parts]:
    return Column(name, lambda parts: parts.network_us[name], ".0f")


def _section(name: str) -> Column[Training]:
    return Column(name, lambda training: training.split_us[name], ".1f")


def _figure(title: str, key: str, form: Form, unit: float = 1) -> Column[Training]:
    """Return a column of a figure that not every exchange has."""
    return Column(title, lambda training: training.figures[key] / unit if key in training.figures else None, form)


def _most(title: str, value: Callable[[Job], list[float | None]], form: Form) -> Column[Job]:
    """Return a column of the greatest value of a job's ranks, of those that have one."""
    return Column(title, lambda job: max((found for found in value(job) if found is not None), default=None), form)


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f}"


def _threads(job: Job) -> list[float | None]:
    return [rank["num_threads"] for round_ in job["rounds"] for row in round_["training"] for rank in row["ranks"]]


_PARTS_COLUMNS: list[Column[Parts]] = [
    Column("ranks", lambda parts: parts.ranks),
    Column("threads", lambda parts: parts.threads),
    Column("precision", lambda parts: parts.precision),
    Column("environment", lambda parts: parts.environment_us, ".0f"),
    *map(_part, PARTS),
    Column("GFLOP/s", lambda parts: parts.matrix_gflops, ".0f"),
    Column("lower bound", lambda parts: f"{parts.environment_us:.0f} + {parts.operations_us:.0f}"),
    Column("upper bound, steps/s", lambda parts: parts.bound_steps_per_s, ",.0f"),
]
_NAMES: list[Column[Training]] = [
    Column("ranks", lambda training: training.ranks),
    Column("precision", lambda training: training.precision),
    Column("exchange", lambda training: training.exchange),
]
_TRAINING_COLUMNS = [
    *_NAMES,
    Column("global steps/s", lambda training: training.steps_per_s, ",.0f"),
    Column("of none", lambda training: training.of_none, ".3f"),
    Column("of the upper bound", lambda training: training.of_bound, ".2f"),
    Column("of the environments", lambda training: training.of_environments, ".2f"),
]
_SPLIT_COLUMNS = [
    *_NAMES,
    *map(_section, SECTIONS),
    Column("processor a core", lambda training: training.cpu_per_core, ".1%"),
    Column("exchange's threads", lambda training: training.exchange_thread_share, ".2%"),
]
_RANKS_COLUMNS = [
    Column("ranks", lambda job: job["ranks"]),
    _most("peak memory, MiB", lambda job: [rank["memory_peak_bytes"] for rank in job["of_ranks"]], _mebibytes),
    _most("on the GPU, MiB", lambda job: [rank["device_memory_peak_bytes"] for rank in job["of_ranks"]], _mebibytes),
    _most("threads of a process", _threads, ""),
    _most("start to first step, s", lambda job: [rank["seconds_to_first_step"] for rank in job["of_ranks"]], ".1f"),
]


def _exchange_table(jobs: list[Job]) -> str:
    kib = {(job["ranks"], kind): size / 1024 for job in jobs for kind, size in job["message_bytes"].items()}
    columns = [
        *_NAMES,
        _figure("models sent an update", "models_sent", ".2f"),
        _figure("mixed an update", "models_mixed", ".2f"),
        _figure("most updates without mix", "staleness_updates", ".0f"),
        _figure("relative distance", "consensus_distance_relative", ".4f"),
        _figure("progress kept", "progress_kept", ".2f"),
        _figure("KiB sent an update", "bytes_sent", ",.0f", unit=1024),
        Column("model, KiB", lambda training: kib[training.ranks, training.exchange], ",.0f"),
    ]
    return table(columns, [training for training in all_training(jobs) if training.exchange != BASELINE])


def _protocol_table(benchmark: dict[str, Any]) -> str:
    """Return the cost of a model over numbers of ranks; nothing where there is no protocol, as in Gorila."""
    costs: dict[str, float] = benchmark["protocol_us"]

    def cost(ranks: str) -> Column[dict[str, float]]:
        return Column(ranks, lambda row: row[ranks], ".1f")

    return table([Column("ranks", lambda row: "a model"), *map(cost, costs)], [costs] if costs else [])
