"""The tables of `minatar.jsonl`: `python results/mixing/minatar_report.py > results/mixing/minatar_tables.md`.

AUC, the mean return over all steps of a training, is `mean_height` in that file.
"""

from __future__ import annotations

import statistics
import sys

import numpy as np
from minatar_bed import (
    BASE_RATE,
    GROUPS,
    GROUPS_RIVALS,
    GROUPS_SETTING,
    METHODS,
    SWEPT,
    TOTAL_STEPS,
    Job,
    Setting,
    best_settings,
    held_out_steps,
    read,
)

from pala.system.text import table

_RESAMPLES = 10_000
_FRESH_SEEDS = range(101, 109)
Results = dict[Job, dict]


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


def sweep(results: Results) -> str:
    """AUC by setting; the best of a method is marked."""
    heights: dict[tuple[int, Setting], dict[str, list[float]]] = {}
    for job, line in results.items():
        if job.is_of_the_sweep:
            heights.setdefault((job.ranks, job.setting), {}).setdefault(job.game, []).append(line.get("mean_height", 0))
    best, rows = best_settings(results), []
    for ranks, setting in sorted(heights, key=lambda key: (key[0], METHODS.index(key[1].method), key[1])):
        found = heights[ranks, setting]
        cells = [
            text for game in SWEPT for text in (
                (f"{statistics.fmean(found[game]):.2f}", str(len(found[game]))) if game in found else ("", "")
            )
        ]  # fmt: skip
        mark = "**" if best.get((ranks, setting.method)) == setting else ""
        rows.append((str(ranks), f"{mark}{setting.method}{mark}", *_texts(setting), *cells))
    return table(("ranks", "method", *_SETTING, *(name for game in SWEPT for name in (game, "seeds"))), rows)


_SETTING = ("rate", "momentum", "smoothing", "exchanges")


def _texts(setting: Setting) -> tuple[str, ...]:
    how = (f"{setting.momentum:g}", f"{setting.smoothing:g}") if setting.momentum else ("", "")
    return f"{setting.rate:g} x", *how, str(setting.exchanges) if setting.method == "paired" else ""


def fresh(results: Results) -> str:
    """Each method at its best settings, fresh seeds, beside the best of synchronous A2C."""
    usual = {
        job: line for job, line in results.items()
        if not (job.is_of_the_sweep or job.is_of_stability) and job.is_usual and 1 < job.ranks <= 16
    }  # fmt: skip
    return _beside_allreduce(usual, best_settings(results))


def held_out(results: Results) -> str:
    """Each method's best setting on a game that had no say in it, beside synchronous A2C's."""
    return _beside_allreduce({job: line for job, line in results.items() if job.is_held_out}, best_settings(results))


def together(results: Results) -> str:
    """Interquartile means of fresh seeds over those of synchronous A2C: the geometric mean over the games."""
    best, draw = best_settings(results), np.random.default_rng(1)
    there: dict[tuple[str, int, Setting], list[float]] = {}
    for job, line in results.items():
        is_fresh = job.is_held_out or (job.is_usual and not (job.is_of_the_sweep or job.is_of_stability))
        if is_fresh and "mean_height" in line and job.game != "asterix":
            there.setdefault((job.game, job.ranks, job.setting), []).append(line["mean_height"])

    def cell(ranks: int, ours: Setting, theirs: Setting) -> tuple[str, str]:
        games = sorted({game for game, n, _ in there if n == ranks and (game, n, ours) in there})
        pairs = [(there[game, ranks, ours], there.get((game, ranks, theirs), [])) for game in games]
        pairs = [(np.array(a), np.array(b)) for a, b in pairs if len(b) > 1]  # not a look at a single seed
        middle = np.mean([np.log(iqm(a) / iqm(b)) for a, b in pairs])
        drawn = [[iqm(draw.choice(side, (_RESAMPLES, len(side)))) for side in pair] for pair in pairs]
        low, high = np.percentile(np.mean([np.log(a / b) for a, b in drawn], axis=0), [2.5, 97.5])
        return f"{np.exp(middle):.2f} [{np.exp(low):.2f}, {np.exp(high):.2f}]", str(len(pairs))

    rows = []
    for ranks in (2, 4, 8, 16):
        paired, uniform, rival = (best[ranks, method] for method in ("paired", "uniform", "allreduce"))
        ratios, games = zip(
            *(cell(ranks, *of) for of in ((paired, rival), (uniform, rival), (paired, uniform))), strict=True
        )
        rows.append((str(ranks), games[0], *ratios))
    plain = cell(16, best[16, "paired"], Setting("allreduce", 2.0))
    rows.append(("16, synchronous A2C at 2 x without momentum", plain[1], plain[0], "", ""))
    header = ("ranks", "games", "paired of allreduce", "uniform of allreduce", "paired of uniform")
    return table(header, rows)


def _beside_allreduce(results: Results, best: dict[tuple[int, str], Setting]) -> str:
    """A row for each game, number of ranks and setting."""
    cells: dict[tuple[str, int, Setting], list[dict]] = {}
    for job, line in results.items():
        if "mean_height" in line:
            cells.setdefault((job.game, job.ranks, job.setting), []).append(line)
    rows = []
    for game, ranks, setting in sorted(cells, key=lambda key: (key[0], key[1], METHODS.index(key[2].method), key[2])):
        lines = cells[game, ranks, setting]
        heights = [line["mean_height"] for line in lines]
        rival = best[ranks, "allreduce"]
        others = [line["mean_height"] for line in cells.get((game, ranks, rival), [])]
        kept, divergence = (statistics.fmean(line[key] for line in lines) for key in ("progress_kept", "divergence"))
        rows.append((
            game, str(ranks), setting.method, *_texts(setting), str(len(lines)), f"{iqm(np.array(heights)):.2f}",
            ratio(heights, others) if others and setting != rival else "", f"{kept:.2f}", f"{divergence:.4f}",
        ))  # fmt: skip
    header = ("game", "ranks", "method", *_SETTING, "seeds", "IQM of AUC", "of allreduce", "kept", "KL, nats")
    return table(header, rows) if rows else "Not run yet."


def disturbed(results: Results) -> str:
    """Under delays and with a slow rank, beside the same setting and seeds undisturbed."""
    cells: dict[tuple[str, int, Setting, float, int], dict[int, float]] = {}  # height by seed
    for job, line in results.items():
        if job._replace(delay=0.05, slow_ranks=0).is_usual and not job.is_of_the_sweep and "mean_height" in line:
            key = (job.game, job.ranks, job.setting, job.delay, job.slow_ranks)
            cells.setdefault(key, {})[job.seed] = line["mean_height"]
    rows = []
    for game, ranks, setting, delay, slow in sorted(cells, key=str):
        if (delay, slow) != (0.05, 0):
            by_seed, undisturbed = cells[game, ranks, setting, delay, slow], cells[game, ranks, setting, 0.05, 0]
            heights, still = list(by_seed.values()), [undisturbed[seed] for seed in by_seed]
            rows.append((
                game, str(ranks), setting.method, *_texts(setting), f"{delay:g}", str(slow), str(len(heights)),
                f"{iqm(np.array(heights)):.2f}", ratio(heights, still),
            ))  # fmt: skip
    header = ("game", "ranks", "method", *_SETTING, "delay, updates", "slow ranks", "seeds", "IQM of AUC",
              "of the same seeds undisturbed")  # fmt: skip
    return table(header, rows) if rows else "Not run yet."


def stability(results: Results) -> str:
    """How often trainings did not get on, at an equal step of the mean."""
    cells: dict[tuple[str, Setting], list[dict]] = {}
    for job, line in results.items():
        if job.is_of_stability and "curve" in line:
            cells.setdefault((job.game, job.setting), []).append(line)
    rows = []
    for (game, setting), lines in sorted(cells.items()):
        usual = statistics.median(
            line["curve"][-1] for (other, _), all_ in cells.items() for line in all_ if other == game
        )
        still = sum(line["curve"][len(line["curve"]) // 2] < usual / 2 for line in lines)
        to_the_end = sum(line["curve"][-1] < usual / 2 for line in lines)
        smooth = [[statistics.fmean(line["curve"][k : k + 5]) for k in range(len(line["curve"]) - 4)] for line in lines]
        fell = sum(curve[-1] < max(curve) / 2 for curve in smooth)
        heights = sorted(line["mean_height"] for line in lines)
        rivals = [
            line["mean_height"] for (other, theirs), all_ in cells.items() for line in all_
            if (other, theirs.method, theirs.momentum) == (game, "allreduce", setting.momentum) and theirs != setting
        ]  # fmt: skip
        rows.append((
            game, setting.method, *_texts(setting), str(len(lines)), str(still), str(to_the_end), str(fell),
            f"{heights[0]:.2f}", f"{statistics.median(heights):.2f}", f"{heights[-1]:.2f}",
            ratio(heights, rivals) if rivals else "",
        ))  # fmt: skip
    header = ("game", "method", *_SETTING, "seeds", "stood still to the half", "to the end", "fell", "least AUC",
              "median", "greatest", "IQM of allreduce's")  # fmt: skip
    return table(header, rows) if rows else "Not run yet."


def larger(results: Results) -> str:
    """4 ranks of 64 environments."""
    rows = []
    for job, line in sorted(results.items()):
        if job.envs != 16 and job.seed not in _FRESH_SEEDS and job.start == "plain" and "mean_height" in line:
            heights = f"{line['mean_height']:.2f}"
            rows.append(
                (job.game, str(job.ranks), str(job.envs), job.method, *_texts(job.setting), str(job.seed), heights)
            )
    header = ("game", "ranks", "environments of a rank", "method", *_SETTING, "seed", "AUC")
    return table(header, rows) if rows else "Not run yet."


def groups(results: Results) -> str:
    """Groups of ranks that gossip as one, beside synchronous A2C of as many ranks at the better of its two settings on
    each game: interquartile means over the seeds that both have, and the geometric mean over the games."""
    there: dict[tuple[str, int, int, Setting], dict[int, float]] = {}
    for job, line in results.items():
        if job.seed in _FRESH_SEEDS and job.start == "plain" and "mean_height" in line:
            is_usual = job.total_steps == (TOTAL_STEPS if job.game in SWEPT else held_out_steps(16))
            if is_usual and job.clipping == "own" and job.max_staleness == 10 and job.delay == 0.05:
                there.setdefault((job.game, job.ranks, job.envs, job.setting), {})[job.seed] = line["mean_height"]
    draw, rows = np.random.default_rng(1), []
    kinds = [(16, 16, Setting("paired", 2, 0.75, 0.8)), *((n, count, GROUPS_SETTING) for n, count in GROUPS)]
    for ranks, count, setting in kinds:
        logs, drawn, cells = [], [], []
        for game in (*SWEPT, "freeway"):
            ours = there.get((game, count, 16 * ranks // count, setting), {})
            rivals = [there.get((game, ranks, 16, rival), {}) for rival in GROUPS_RIVALS]
            theirs = max(rivals, key=lambda found: iqm(np.array(list(found.values()))) if found else 0.0)
            if not ours or not theirs:
                cells += ["", ""]
                continue
            a, b = np.array(list(ours.values())), np.array(list(theirs.values()))
            cells += [f"{iqm(a) / iqm(b):.2f}", f"{len(a)} and {len(b)}"]
            logs.append(np.log(iqm(a) / iqm(b)))
            sides = [iqm(draw.choice(side, (_RESAMPLES, len(side)))) for side in (a, b)]
            drawn.append(np.log(sides[0] / sides[1]))
        if logs:
            low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
            pooled = [f"{np.exp(np.mean(logs)):.2f}", f"{np.exp(low):.2f} to {np.exp(high):.2f}"]
            rows.append((str(ranks), str(count), *_texts(setting)[:2], *cells, *pooled))
    names = (name for game in (*SWEPT, "freeway") for name in (game, "seeds"))
    return table(("ranks", "groups", "rate", "momentum", *names, "geometric mean", "95 % interval"), rows)


def starts(results: Results) -> str:
    """Bias-corrected mean squares and a warm-up, beside the plain start with the same seeds."""
    cells: dict[tuple[str, int, int, Setting], dict[str, dict[int, float]]] = {}
    for job, line in results.items():
        if job._replace(start="plain", envs=16).is_usual and job.seed < _FRESH_SEEDS.start and "mean_height" in line:
            by_start = cells.setdefault((job.game, job.ranks, job.envs, job.setting), {})
            by_start.setdefault(job.start, {})[job.seed] = line["mean_height"]
    rows = []
    for (game, ranks, envs, setting), by_start in sorted(cells.items()):
        plain = by_start.get("plain", {})
        for start, found in sorted(by_start.items()):
            both = sorted(set(found) & set(plain))
            if start != "plain" and both:
                means = [statistics.fmean(of[seed] for seed in both) for of in (plain, found)]
                rows.append((
                    game, str(ranks), str(envs), setting.method, *_texts(setting)[:2], start, str(len(both)),
                    f"{means[0]:.2f}", f"{means[1]:.2f}", f"{means[1] / means[0]:.2f}",
                ))  # fmt: skip
    header = ("game", "ranks", "environments", "method", "rate", "momentum", "start", "seeds", "plain: mean of AUC",
              "this start", "ratio")  # fmt: skip
    return table(header, rows) if rows else "Not run yet."


def default(results: Results) -> str:
    """The two settings that the default might have needed: geometric means of AUC ratios over pairs of trainings that
    differ in one alone, with intervals in which the seeds of each game and number of ranks are resampled."""
    aucs = {job: line["mean_height"] for job, line in results.items() if job.start == "bias" and job.ranks in (2, 4)}
    kinds = {"clip as the mean's / own": {"clipping": "own"}, "four exchanges / one": {"exchanges": 1}}
    rows, draw = [], np.random.default_rng(1)
    for name, without in kinds.items():
        cells: dict[tuple[str, int], dict[int, list[float]]] = {}
        for job, auc in aucs.items():
            other = job._replace(**without)
            if other != job and other in aucs:
                seeds = cells.setdefault((job.game, job.ranks), {})
                seeds.setdefault(job.seed, []).append(float(np.log(auc / aucs[other])))
        row = [name]
        for games in ((SWEPT[0],), (SWEPT[1],), SWEPT):
            blocks = [np.array(list(seeds.values())) for (game, _), seeds in sorted(cells.items()) if game in games]
            picks = [block[draw.integers(len(block), size=(_RESAMPLES, len(block)))].mean((1, 2)) for block in blocks]
            low, high = np.exp(np.percentile(np.mean(picks, axis=0), [2.5, 97.5]))
            row.append(f"{np.exp(np.mean([block.mean() for block in blocks])):.2f} [{low:.2f}, {high:.2f}]")
        rows.append(tuple(row))
    return table(("AUC ratio", *SWEPT, "both"), rows)


def longer(results: Results) -> str:
    """Four times the steps: the whole curve, and its last three quarters, beside synchronous A2C of the same seed."""
    long = {job: line for job, line in results.items() if job.total_steps == 4 * TOTAL_STEPS and not job.is_held_out}
    runs = {job: line["curve"] for job, line in long.items() if "curve" in line}
    rows = []
    for job, curve in sorted(runs.items(), key=lambda item: (item[0].game, item[0].seed, item[0].method)):
        late = curve[len(curve) // 4 :]
        shares = ["", ""]
        for other, theirs in runs.items():
            if (other.method, other.game, other.seed) == ("allreduce", job.game, job.seed) and other != job:
                pairs = ((curve, theirs), (late, theirs[len(theirs) // 4 :]))
                shares = [f"{statistics.fmean(a) / statistics.fmean(b):.2f}" for a, b in pairs]
        means = (f"{statistics.fmean(values):.2f}" for values in (curve, late))
        rows.append((job.game, str(job.seed), job.method, *_texts(job.setting), *means, *shares))
    header = ("game", "seed", "method", *_SETTING, "AUC", "of the last three quarters",
              "of allreduce", "of allreduce, last three quarters")  # fmt: skip
    return table(header, rows) if rows else "Not run yet."


def variants(results: Results) -> str:
    """Gradients clipped as their mean would be, and pairs in step, beside the usual with the same seeds."""
    cells: dict[tuple[str, int, Setting, int, str], tuple[list[float], list[float]]] = {}
    for job, line in results.items():
        usual = job._replace(clipping="own", max_staleness=10)
        if job != usual and usual in results:
            ours, theirs = cells.setdefault(
                (job.game, job.ranks, job.setting, job.max_staleness, job.clipping), ([], [])
            )
            ours.append(line.get("mean_height", 0.0))
            theirs.append(results[usual].get("mean_height", 0.0))
    rows = [
        (
            game, str(ranks), setting.method, *_texts(setting), str(staleness), clipping, str(len(ours)),
            f"{iqm(np.array(theirs)):.2f}", f"{iqm(np.array(ours)):.2f}", ratio(ours, theirs),
        )
        for (game, ranks, setting, staleness, clipping), (ours, theirs) in sorted(cells.items())
    ]  # fmt: skip
    header = ("game", "ranks", "method", *_SETTING, "max staleness", "clipping", "seeds", "IQM of the usual",
              "IQM of this", "of the usual")  # fmt: skip
    return table(header, rows) if rows else "Not run yet."


def main() -> None:
    """Print the page."""
    results = read()
    print(f"# Mixing on MinAtar: {TOTAL_STEPS:,} steps over all ranks\n")
    print(
        "## Choice of settings\n\nAUC: the mean return over all steps of a training. The rate is that over "
        f"{BASE_RATE:g}."
    )
    print(f"The best setting of each method and number of ranks is marked.\n\n{sweep(results)}")
    print("\n## With fresh seeds\n\nEach method at its best settings, with and without momentum. Ratios with 95 %")
    print("bootstrap intervals over seeds. Settings were chosen on Breakout and Space Invaders only.\n")
    print(fresh(results))
    print(
        "\n## All games together\n\nThe geometric mean over Breakout, Space Invaders and Freeway of the ratios, "
        "each method at"
    )
    print(
        "its best setting; 95 % bootstrap intervals, in which the seeds of each game are resampled among themselves.\n"
    )
    print(together(results))
    print("\n## On a game that chose no setting\n")
    budgets = {job.ranks: f"{job.total_steps:,} steps with {job.ranks} ranks" for job in results if job.is_held_out}
    print(f"Each method at its best setting, fresh seeds; {', '.join(budgets[n] for n in sorted(budgets))}.\n")
    print(held_out(results))
    print(
        "\n## Stability\n\n4 ranks at an equal step of the mean, with seeds that nobody had seen when this was asked."
    )
    print("Stood still: at half of the steps (or at the end) below half of the median of all final returns of the")
    print(
        "game. Fell: at the end below half of its own best mean over a tenth of the steps. The ratio is to synchronous"
    )
    print("A2C with the same momentum.\n")
    print(stability(results))
    print("\n## Fewer, larger ranks\n\nAs many environments in all as 16 ranks of 16.\n")
    print(larger(results))
    print("\n## Groups of ranks\n\nRanks of 16 environments. A group averages its gradients and gossips as one, so it")
    print("learns as one rank with the environments of all its members, and is simulated so. Ratios are to synchronous")
    print("A2C of as many ranks, at the better of its two settings on each game; fresh seeds (ours and its).\n")
    print(groups(results))
    print("\n## The first updates\n\nThe same seeds with bias-corrected mean squares, with a warm-up, and plain.\n")
    print(starts(results))
    print("\n## Clip and exchanges of the default\n\n2 ranks at 1 x and 4 at 2 x, momentum 0.5, bias-corrected mean")
    print("squares; four seeds.\n")
    print(default(results))
    print(f"\n## Longer\n\n16 ranks, {4 * TOTAL_STEPS:,} steps, at the best settings of {TOTAL_STEPS:,}.\n")
    print(longer(results))
    print("\n## Clipping, and pairs in step\n\nGradients clipped as the mean over the ranks would be (`mean`), and an")
    print(
        "exchange after each update (max staleness 0), beside the usual: each rank's own clip, and 10; equal seeds.\n"
    )
    print(variants(results))
    print("\n## Delays, and a slow rank\n\nSlow ranks are 4 times slower than the others.\n")
    print(disturbed(results))


if __name__ == "__main__":
    sys.exit(main())
