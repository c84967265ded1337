"""Draw time to a score: the peers' episodes (*.csv) beside PALA's curves (curves.csv); and print who took how long.

python results/peers/plot.py [FOLDER]       # of *.csv and time_to_score.png; default: this file's
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
TARGETS = {"Breakout": 30.5, "Pong": 0.0}
NAMES = {
    "sb3-a2c": "Stable-Baselines3 A2C",
    "sb3-ppo": "Stable-Baselines3 PPO",
    "appo": "Sample Factory APPO",
    "gossip": "PALA, gossip, defaults",
}
OWN = {"paired": "PALA, gossip (paired)", "allreduce": "PALA, synchronous A2C"}
WINDOW, LEAST = 100, 20  # episodes of a mean; fewer at the beginning of a curve, where nothing is printed of it


def read_peers():
    """(name, game, seed) -> minutes, running means of the returns of the last 100 episodes; of fewer, if 20 or more.
    Also of PALA's episodes, where they lie beside them as such a file."""
    curves = {}
    for path in sorted(HERE.glob("*-*-*.csv")):
        name, game, seed = path.stem.rsplit("-", 2)
        rows = np.loadtxt(path, delimiter=",", skiprows=2, ndmin=2)
        if len(rows) < LEAST:
            continue
        sums = np.cumsum(np.insert(rows[:, 2], 0, 0.0))
        ends = np.arange(LEAST, len(sums))
        begins = np.maximum(ends - WINDOW, 0)
        curves[NAMES[name], game, seed] = rows[ends - 1, 0] / 60, (sums[ends] - sums[begins]) / (ends - begins)
    return curves


def read_own():
    """(name, game, runs) -> minutes, mean returns; of PALA's runs, by `pala compare`."""
    points = defaultdict(list)
    if not (HERE / "curves.csv").exists():
        return {}
    with (HERE / "curves.csv").open() as file:
        for row in csv.DictReader(file):
            if row["axis"] == "time_s":
                name = OWN[row["variant"].removesuffix("_warmup")]
                points[name, row["game"], row["runs"]].append((float(row["x"]) / 60, float(row["mean_return"])))
    return {key: tuple(np.transpose(values)) for key, values in points.items()}


def own_minutes():
    """(name, game) -> minutes to the target, by `pala compare`: at the episode whose mean of 100 was first there."""
    if not (HERE / "runs.csv").exists():
        return {}
    with (HERE / "runs.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["s_to_target"]]
    return {(OWN[row["variant"].removesuffix("_warmup")], row["game"]): float(row["s_to_target"]) / 60 for row in rows}


def main():
    """The program."""
    own = own_minutes()
    curves = read_own() | read_peers()
    games = [game for game in TARGETS if any(its_game == game for _, its_game, _ in curves)]
    figure, panels = plt.subplots(
        1, len(games), figsize=(3 + 4 * len(games), 4), layout="constrained", squeeze=False
    )  # fmt: skip
    names = sorted({name for name, _, _ in curves})
    for panel, game in zip(panels[0], games, strict=True):
        target = TARGETS[game]
        for (name, its_game, number), (minutes, returns) in curves.items():
            if its_game != game:
                continue
            panel.plot(minutes, returns, color=f"C{names.index(name)}", label=name)
            whole = slice(WINDOW - LEAST, None) if name in NAMES.values() else slice(None)  # means of 100 episodes
            at_best, there = max(returns[whole], default=float("nan")), np.flatnonzero(returns[whole] >= target)
            took = f"not within {minutes[-1]:.1f} minutes, {at_best:.2f} at best"
            if len(there) or (name, game) in own:
                took = f"{own.get((name, game)) or minutes[whole][there[0]]:.1f} minutes, {at_best:.2f} at best"
            print(f"{game} {target:g}: {name} ({number}): {took}")
        panel.axhline(target, color="0.4", linestyle="--", linewidth=0.8)
        panel.set(title=game, xlabel="wall-clock time (minutes)", ylabel="episode return (mean of up to 100 episodes)")
    lines = {line.get_label(): line for panel in panels[0] for line in panel.get_lines() if line.get_label()[0] != "_"}
    figure.legend(lines.values(), lines.keys(), loc="outside right upper")
    figure.savefig(HERE / "time_to_score.png", dpi=130)


if __name__ == "__main__":
    main()
