"""The benchmark's page: all tables. Pure."""

from __future__ import annotations

from typing import Any

from pala.lab.benchmark.analysis import BASELINE, PARTS, Training, all_training, parts_of
from pala.run.metrics import SECTIONS
from pala.system.text import table


def markdown(benchmark: dict[str, Any]) -> str:
    """All tables, as readable in a terminal or a log as on a page."""
    jobs = benchmark["jobs"]
    flops = jobs[0]["flops_per_step"]
    env, machine = benchmark["config"]["env"], benchmark["machine"]
    rounds = " or ".join(map(str, sorted({len(job["rounds"]) for job in jobs})))
    gpus = sorted({rank["gpu"] for job in jobs for rank in job["of_ranks"] if rank["gpu"]})
    sections = [
        f"# Benchmark: {env['id']}, {env['num_envs']} environments a rank, {_pace(benchmark['config'])}",
        f"{machine['cpu']}, {machine['cores']} cores{', ' if gpus else ''}{', '.join(gpus)}; "
        f"{rounds} rounds of {benchmark['options']['seconds']:g} s a measurement, interleaved; "
        f"median (range) over rounds.{_slowed(benchmark['options'])}\n"
        f"A step is {flops['forward'] / 1e6:.3g} million floating-point operations forward and "
        f"{flops['backward'] / 1e6:.3g} million backward.",
        "## The parts alone, and the bounds\n\nMicroseconds a step of a rank; all ranks at the same time.\n\n"
        + _parts_table(jobs),
        "## Training\n\nSteps of all ranks a second, and their ratios within a round.\n\n"
        + _training_table(jobs)
        + _left_out(jobs),
        "## Where the time of a step goes\n\nMicroseconds a step of a rank; processor time of the process and of the "
        "exchange's threads in wall time.\n\n" + _split_table(jobs),
        "## What was exchanged\n\nMedian over rounds and ranks; of the updates without mix, the most.\n\n"
        + _exchange_table(jobs),
        *_protocol_section(benchmark),
        "## Ranks\n\nOf the benchmark's processes, which hold a network for each precision.\n\n" + _ranks_table(jobs),
        f"{benchmark['date']}, commit {benchmark['git_commit']}{' (changed)' if benchmark['git_dirty'] else ''}: "
        f"`{benchmark['command']}`",
    ]
    return "\n\n".join(sections) + "\n"


def _pace(config: dict[str, Any]) -> str:
    """How often is learned."""
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


def _left_out(jobs: list[dict[str, Any]]) -> str:
    reasons = {(job["ranks"], *item) for job in jobs for item in job.get("left_out", {}).items()}
    return "".join(f"\n\nLeft out with {ranks} ranks: {kind}. {reason}" for ranks, kind, reason in sorted(reasons))


def _parts_table(jobs: list[dict[str, Any]]) -> str:
    header = ("ranks", "threads", "precision", "environment", *PARTS, "GFLOP/s", "lower bound", "upper bound, steps/s")
    return table(header, [
        (
            str(p.ranks), str(p.threads), p.precision, f"{p.environment_us:.0f}",
            *(f"{p.network_us[part]:.0f}" for part in PARTS), f"{p.matrix_gflops:.0f}",
            f"{p.environment_us:.0f} + {p.operations_us:.0f}", p.bound_steps_per_s.text(",.0f"),
        )
        for job in jobs for p in parts_of(job)
    ])  # fmt: skip


def _training_table(jobs: list[dict[str, Any]]) -> str:
    header = (
        "ranks",
        "precision",
        "exchange",
        "global steps/s",
        "of none",
        "of the upper bound",
        "of the environments",
    )
    return table(header, [
        (
            *_names(t), t.steps_per_s.text(",.0f"), t.of_none.text(".3f") if t.of_none else "",
            t.of_bound.text(".2f"), t.of_environments.text(".2f"),
        )
        for t in all_training(jobs)
    ])  # fmt: skip


def _split_table(jobs: list[dict[str, Any]]) -> str:
    header = ("ranks", "precision", "exchange", *SECTIONS, "processor a core", "exchange's threads")
    return table(header, [
        (
            *_names(t), *(f"{t.split_us[s]:.1f}" for s in SECTIONS),
            f"{t.cpu_per_core:.1%}", f"{t.exchange_thread_share:.2%}",
        )
        for t in all_training(jobs)
    ])  # fmt: skip


def _exchange_table(jobs: list[dict[str, Any]]) -> str:
    header = (
        "ranks", "precision", "exchange", "models sent an update", "mixed an update", "most updates without mix",
        "relative distance", "progress kept", "KiB sent an update", "model, KiB",
    )  # fmt: skip
    sizes = {(job["ranks"], kind): size for job in jobs for kind, size in job["message_bytes"].items()}
    rows = []
    for t in all_training(jobs):
        f = t.figures
        row = (
            _optional(f, "models_sent", ".2f"), _optional(f, "models_mixed", ".2f"),
            _optional(f, "staleness_updates", ".0f"), _optional(f, "consensus_distance_relative", ".4f"),
            _optional(f, "progress_kept", ".2f"),
            _optional(f, "bytes_sent", ",.0f", 1024), f"{sizes[t.ranks, t.exchange] / 1024:,.0f}",
        )  # fmt: skip
        if t.exchange != BASELINE:
            rows.append((*_names(t), *row))
    return table(header, rows) if rows else "Nothing."


def _protocol_section(benchmark: dict[str, Any]) -> list[str]:
    if not benchmark["protocol_us"]:  # of gossip; Gorila has none
        return []
    return [
        "## What the protocol costs\n\nMicroseconds of processor time a model, on both sides together and with the "
        "credit that goes back, without the model's own bytes. All ranks are in one process: what more of them "
        "cost in jobs of 8 as well is the caches', not the protocol's.\n\n"
        + _protocol_table(benchmark["protocol_us"], benchmark.get("protocol_in_jobs_of_8_us", {}))
    ]


def _protocol_table(costs_us: dict[str, float], in_jobs_us: dict[str, float]) -> str:
    rows = [("a model", *(f"{cost:.1f}" for cost in costs_us.values()))]
    if in_jobs_us:
        rows.append(("a model, in jobs of 8", *(_optional(in_jobs_us, ranks, ".1f") for ranks in costs_us)))
    return table(("ranks", *costs_us), rows)


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


def _names(training: Training) -> tuple[str, str, str]:
    return str(training.ranks), training.precision, training.exchange
