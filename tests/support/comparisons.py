"""Presets of a comparison, and runs of one as they would be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pala.config import Config
from pala.lab.compare.plan import Plan
from pala.run import run_folder
from pala.run.metrics import MetricsWriter, Record, metrics_path

GAME = """
total_steps = 3000
[env]
id = "CartPole-v1"
num_envs = 4
[run]
log_interval_s = 0.2
checkpoint_interval_s = 0.5
tensorboard = false
[evaluation]
episodes = 2
"""

PRESET = """
name = "tiny"
ranks = [1, 2]
seeds = [1, 2]
launcher = "sh -c 'exit 3' {ranks}"
target_return = {Pole = 20}
[games]
Pole = "game.toml"
[train]
a2c.learning_rate = 1e-3
[variants.gossip]
[variants.none]
exchange.kind = "none"
"""


def plan_of(text: str = PRESET) -> Plan:
    Path("preset.toml").write_text(text)
    return Plan(Path("preset.toml"))


def make_run(
    folder: Path, config: Config, ranks: int, speed: float = 100.0, episodes: int = 250, completed: bool = True,
    score: float | None = 50.0, **facts: Any,
) -> Path:  # fmt: skip
    """A run whose returns rise from 0 by 0.1 an episode. Of each rank the first interval is slow."""
    (folder / "metrics").mkdir(parents=True)
    segment = {
        "segment": "s",
        "started": f"{folder.name} {speed}",
        "hosts": ["vm"] * ranks,
        "ranks": ranks,
        "git_commit": "a" * 40,
    }
    record = run_folder.RunRecord.begin(folder, config, segment | facts)
    end = config.total_steps / speed
    for rank in range(ranks):
        records: list[Record] = [stamp("start", 0, 0)]
        for i in range(rank, episodes, ranks):
            part = (i + 1) / episodes
            records.append(stamp("episode", end * part, config.total_steps * part) | {"return": i / 10})
        for i, factor in enumerate((0.1, 1.0, 1.0, 7.0)):
            records.append(stamp("interval", end * (i + 1) / 4, config.total_steps * (i + 1) / 4) | {
                "local_steps_per_s": factor * speed / ranks, "time_wait": 0.25, "memory_peak_bytes": 2**20,
                "staleness_updates": i, "consensus_distance_relative": None if i == 1 else 0.5,
                "own_movement": [1.0, 0.0], "movement": [1.0, -7.0] if rank else [0.5, 7.0],
            })  # fmt: skip
        MetricsWriter(metrics_path(folder, rank), rank).write(records)
    if completed:
        record.end("completed", global_steps=config.total_steps)
    if score is not None:
        evaluation = {"policy": "final", "global_steps": config.total_steps, "mean_return": score}
        facts = {"episodes": 2, "greedy": False, "standard_error": 1.0}
        (folder / "evaluation.json").write_text(json.dumps(evaluation | facts))
    return folder


def stamp(type_: str, time_s: float, steps: float) -> Record:
    return {"type": type_, "time_s": time_s, "local_steps": int(steps), "global_steps": int(steps), "segment": "s"}


def set_gone(run: Path, key: str, value: Any) -> None:
    """Let a run's record have a setting that is gone."""
    record, (name, _, own) = json.loads((run / "run.json").read_text()), key.partition(".")
    record["config"][name][own] = value
    (run / "run.json").write_text(json.dumps(record))


def section(page: str, title: str) -> str:
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]
