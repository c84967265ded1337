"""The page of `minatar.jsonl`: `python results/mixing/minatar_report.py > results/mixing/minatar.md`."""

from __future__ import annotations

import json
import statistics
import sys

import numpy as np
from minatar_bed import BASE_RATE, FOLDER, METHODS, TOTAL_STEPS, Job, best_rates, read

from pala.report.text import table

_RESAMPLES = 10_000


def iqm(values: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis."""
    ordered = np.sort(values, axis=-1)
    n = ordered.shape[-1]
    cut = int(n * 0.25)
    return ordered[..., cut : n - cut].mean(-1)


def ratio(ours: list[float], theirs: list[float]) -> str:
    """IQM over IQM with a 95 % bootstrap interval over seeds."""
    draw = np.random.default_rng(1)
    a, b = np.array(ours), np.array(theirs)
    samples = iqm(draw.choice(a, (_RESAMPLES, len(a)))) / iqm(draw.choice(b, (_RESAMPLES, len(b))))
    low, high = np.percentile(samples, [2.5, 97.5])
    return f"{float(iqm(a) / iqm(b)):.2f} [{low:.2f}, {high:.2f}]"


def sweep(results: dict[Job, dict]) -> str:
    """Mean heights by rate; the best of a row is marked."""
    rows = []
    best = best_rates(results)
    rates = sorted({job.rate for job in results})
    for game, ranks, method in sorted(best, key=lambda key: (key[0], key[1], METHODS.index(key[2]))):
        cells = []
        for rate in rates:
            found = [
                line.get("mean_height") for job, line in results.items()
                if (job.game, job.ranks, job.method, job.rate) == (game, ranks, method, rate) and job.seed < 100
                and (job.delay, job.slow_ranks) == (0.05, 0)
            ]  # fmt: skip
            known = [height for height in found if height is not None]
            mark = "**" if best[game, ranks, method] == rate else ""
            cells.append(
                f"{mark}{statistics.fmean(known):.2f}{mark} ({len(found)})" if known else "failed" * bool(found)
            )
        rows.append((game, str(ranks), method, *cells))
    return table(("game", "ranks", "method", *(f"{rate:g} x" for rate in rates)), rows)


def final(results: dict[Job, dict]) -> str:
    """Each method at its best rate, fresh seeds, beside synchronous A2C."""
    cells: dict[tuple[str, int, str], list[dict]] = {}
    for job, line in results.items():
        if job.seed > 100 and (job.delay, job.slow_ranks) == (0.05, 0) and "mean_height" in line:
            cells.setdefault((job.game, job.ranks, job.method), []).append(line)
    rows = []
    for cell in sorted(cells, key=lambda cell: (cell[0], cell[1], METHODS.index(cell[2]))):
        (game, ranks, method), lines = cell, cells[cell]
        heights = [line["mean_height"] for line in lines]
        others = [line["mean_height"] for line in cells.get((game, ranks, "allreduce"), [])]
        kept, divergence = (statistics.fmean(line[key] for line in lines) for key in ("progress_kept", "divergence"))
        rows.append((
            game, str(ranks), method, f"{lines[0]['rate']:g} x", str(len(lines)), f"{iqm(np.array(heights)):.2f}",
            ratio(heights, others) if others and method != "allreduce" else "", f"{kept:.2f}", f"{divergence:.4f}",
        ))  # fmt: skip
    header = ("game", "ranks", "method", "rate", "seeds", "IQM of mean height", "of allreduce", "kept", "KL, nats")
    return table(header, rows) if rows else "Not run yet."


def trial() -> str:
    """The trial of momentum, with 16 ranks."""
    lines = [json.loads(line) for line in (FOLDER / "momentum_trial.jsonl").read_text().splitlines()]
    cells: dict[tuple, dict[str, list[float]]] = {}
    for line in lines:
        key = (line["method"], line["rate"], line["momentum"], line["smoothing"] if line["momentum"] else None)
        cells.setdefault(key, {}).setdefault(line["game"], []).append(line["mean_height"])
    games = ("breakout", "space_invaders")
    rows = []
    for (method, rate, momentum, smoothing), heights in sorted(cells.items(), key=str):
        texts = [f"{statistics.fmean(found):.2f} ({len(found)})" if (found := heights.get(g)) else "" for g in games]
        spans = [f"{min(found):.2f}-{max(found):.2f}" if (found := heights.get(g)) else "" for g in games]
        how = (f"{momentum:g}", f"{smoothing:g}") if momentum else ("none", "")
        rows.append((method, f"{rate:g} x", *how, texts[0], spans[0], texts[1], spans[1]))
    header = ("method", "rate", "momentum", "smoothing", "breakout", "range", "space_invaders", "range")
    return table(header, rows)


def main() -> None:
    """Print the page."""
    results = read()
    print(f"# Mixing on MinAtar: {TOTAL_STEPS:,} steps over all ranks\n")
    print(
        f"## Sweep\n\nMean height of the curve (number of seeds), by the rate over {BASE_RATE:g}.\n\n{sweep(results)}"
    )
    print("\n## At its best rate, with fresh seeds\n\nRatios with 95 % bootstrap intervals over seeds.\n")
    print(final(results))
    print("\n## Trial: quasi-global momentum, 16 ranks\n\nMean height of the curve (number of seeds).\n")
    print(trial())


if __name__ == "__main__":
    sys.exit(main())
