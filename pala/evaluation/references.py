"""Reference scores of Atari games, and scores normalised by them. Two tables come with PALA:

| file | columns | source |
|---|---|---|
| `atari_scores.csv` | random, human; 57 games | dqn_zoo |
| `dqn_gorila_noop_scores.csv` | random, human, dqn, gorila; 49 games | Mnih et al. 2015; Nair et al. 2015 |
"""

from __future__ import annotations

import csv
import importlib.resources
import re

SCORE_TABLE = "dqn_zoo random/human scores, 57 games"
"""Name of the table that an evaluation is normalised by."""


def score_table(file: str) -> dict[str, dict[str, float]]:
    """Read a table that comes with PALA: the ROM's name of each game -> column -> score."""
    text = importlib.resources.files("pala.evaluation").joinpath(file).read_text(encoding="utf-8")
    return {row.pop("game"): {k: float(v) for k, v in row.items()} for row in csv.DictReader(text.splitlines())}


def rom_of(env_id: str) -> str:
    """Turn `ALE/SpaceInvaders-v5` into `space_invaders`, whether or not ale-py has such a game; empty for other ids."""
    game = re.fullmatch(r"ALE/(\w+)-v\d+", env_id)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", game[1]).lower() if game else ""


def reference_of(env_id: str) -> tuple[float, float] | None:
    """Return (random, human) score of an environment, by its id; None if it is no game of the table."""
    scores = score_table("atari_scores.csv").get(rom_of(env_id))
    return (scores["random"], scores["human"]) if scores else None


def human_normalised(score: float, random: float, human: float) -> float:
    """Return the percentage of the way from random play to the human (Mnih et al. 2015, Nature 518, figure 3)."""
    return 100 * (score - random) / (human - random)
