"""The greys of 57 Atari games under random play: python results/backgrounds/games.py > results/backgrounds/games.md"""

from __future__ import annotations

import numpy as np

from pala.config import EnvConfig
from pala.envs.vector import make_atari
from pala.evaluation.references import score_table
from pala.system.text import table

ENVIRONMENTS, STEPS, LOOK_EVERY = 4, 40, 4


def pixels_of(game: str) -> np.ndarray:
    """Return the stacked frames of the first steps, as the network sees them. `game`: as its ROM."""
    name = "".join(word.capitalize() for word in game.split("_"))
    envs = make_atari(EnvConfig(f"ALE/{name}-v5", num_envs=ENVIRONMENTS), 1)
    generator = np.random.default_rng(0)
    frames = [envs.reset(seed=0)[0]]
    for step in range(STEPS):
        frame = envs.step(generator.integers(envs.single_action_space.n, size=ENVIRONMENTS))[0]
        if step % LOOK_EVERY == 0:
            frames.append(frame)
    envs.close()
    return np.stack(frames)


def main() -> None:
    """Print a line for each game."""
    rows = []
    for game in score_table("atari_scores.csv"):
        pixels = pixels_of(game)
        values, counts = np.unique(pixels, return_counts=True)
        rows.append((int(np.median(pixels)), game, int(values[counts.argmax()]), float(pixels.mean())))
    header = ["game", "median", "commonest", "mean"]
    print(table(header, [[game, str(m), str(common), f"{mean:.0f}"] for m, game, common, mean in sorted(rows)]))
    print(f"\nThe median is 0 in {sum(row[0] == 0 for row in rows)} of {len(rows)} games.")


if __name__ == "__main__":
    main()
