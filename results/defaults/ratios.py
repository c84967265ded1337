"""What the defaults learn beside synchronous A2C and GALA's exchange, seed by seed and pooled, from both `runs.csv`.

python results/defaults/ratios.py > results/defaults/ratios.md
"""

from __future__ import annotations

import csv
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from pala.evaluation.references import reference_of
from pala.system.text import table

RATIOS = (
    ("gossip / synchronous A2C", "gossip", "allreduce"),
    ("GALA's exchange / gossip", "shared_memory", "gossip"),
    ("GALA's exchange / synchronous A2C", "shared_memory", "allreduce"),
)
RESULTS = ("defaults", "defaults_pong")
RESAMPLES = 2000
LEARNED_NOTHING = 0.02  # of the way from random play to a human, by AUC: chosen after a run that had 0.01
Scores = dict[tuple[str, int], dict[str, float]]  # game and seed -> variant -> AUC above random play


def read() -> Scores:
    """Return the AUC above random play of every completed run."""
    scores: Scores = {}
    for name in RESULTS:
        for row in csv.DictReader((Path(__file__).parents[1] / name / "runs.csv").read_text().splitlines()):
            reference = reference_of(f"ALE/{row['game']}-v5")
            assert reference is not None
            if row["completed"] == "True":
                of = scores.setdefault((row["game"], int(row["seed"])), {})
                of[row["variant"]] = float(row["auc"]) - reference[0]
    return dict(sorted(scores.items()))


def learned(game: str, score: float) -> bool:
    """Return whether a run with this AUC above random play learned anything."""
    reference = reference_of(f"ALE/{game}-v5")
    assert reference is not None
    return score >= LEARNED_NOTHING * (reference[1] - reference[0])


def ratios(scores: Scores, upper: str, lower: str) -> dict[str, list[float]]:
    """Return, for each game, the ratio of every seed with which both variants learned."""
    found: dict[str, list[float]] = {}
    for (game, _), of in scores.items():
        if {upper, lower} <= {*of} and all(learned(game, of[variant]) for variant in (upper, lower)):
            found.setdefault(game, []).append(of[upper] / of[lower])
    return found


def pooled(of_games: Mapping[str, Sequence[float]]) -> float:
    """Return the geometric mean over games and seeds, every game with the same weight."""
    return statistics.geometric_mean([statistics.geometric_mean(seeds) for seeds in of_games.values()])


def interval(of_games: Mapping[str, Sequence[float]]) -> str:
    """Return a 95 % bootstrap interval, in which the seeds of each game are drawn among themselves."""
    if min(map(len, of_games.values())) < 2:
        return "one seed"
    draw = random.Random(0)
    drawn = sorted(
        pooled({game: draw.choices(seeds, k=len(seeds)) for game, seeds in of_games.items()}) for _ in range(RESAMPLES)
    )
    return f"{drawn[RESAMPLES // 40]:.2f} to {drawn[-RESAMPLES // 40]:.2f}"


def main() -> None:
    """Print the table of runs and that of ratios."""
    scores = read()
    header = ["game", "seed", "gossip", "synchronous A2C", "GALA's exchange"]
    rows = [
        [game, str(seed), *(f"{of[v]:,.1f}" if v in of else "" for v in ("gossip", "allreduce", "shared_memory"))]
        for (game, seed), of in scores.items()
    ]
    print(table(header, rows), end="\n\n")
    games = dict.fromkeys(game for game, _ in scores)
    rows = []
    for name, upper, lower in RATIOS:
        found = ratios(scores, upper, lower)
        means = [f"{statistics.geometric_mean(found[game]):.2f}" if game in found else "" for game in games]
        rows.append([name, *means, *((f"{pooled(found):.2f}", interval(found)) if found else ("", ""))])
    print(table(["ratio of AUCs", *games, "geometric mean", "95 % interval"], rows))
    for (game, seed), of in scores.items():
        for variant, score in of.items():
            if not learned(game, score):
                print(f"\n{game}, seed {seed}, {variant} learned nothing, and is in no ratio.")


if __name__ == "__main__":
    main()
