"""The 49 games beside the published DQN and Gorila: `pala scores runs`.

    of some runs, or folders of runs      pala scores runs/pong-* runs/from-a-cluster
    with another place for the tables     pala scores runs --output results/gorila

Writes `scores.md`, `games.csv` (a line a game) and `runs.csv` (a line a run); docs/gorila.md explains them.

The published scores are of null-op starts (`pala/evaluation/dqn_gorila_noop_scores.csv`): random play, the human and
DQN of Mnih et al. 2015, Nature 518, and Gorila of Nair et al. 2015, arXiv 1507.04296, by way of the rldb transcription.
All scores are normalised by this table. In 34 games its human scores are others than dqn_zoo's, which normalise
`evaluation.json`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from pala.config import Config
from pala.config.influence import differences, phrase
from pala.evaluation.record import action_words, final_evaluation
from pala.evaluation.references import human_normalised, rom_of, score_table
from pala.report.page import Column, Page, table, write_texts
from pala.run import run_folder
from pala.system.command_line import exit_on_mistake, read_command
from pala.system.errors import PalaError
from pala.system.files import refuse_links
from pala.system.output import print_result
from pala.system.text import counted, csv_text, short_number

PUBLISHED = "dqn_gorila_noop_scores.csv"
_EPSILON, _NOOPS = 0.05, 30  # of DQN's evaluations (Mnih et al. 2015)
_ENV = (("max_episode_frames", 18_000), ("frame_skip", 4), ("repeat_action_probability", 0.0))  # the same
_AGENTS = {"dqn": "DQN", "gorila": "Gorila", "ours": "ours"}
Row = dict[str, Any]


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A completed run of Gorila on one of the games."""

    name: str
    rom: str
    config: Config
    last: dict[str, Any]  # the newest start, in run.json
    evaluation: dict[str, Any]  # of the final policy

    @property
    def actions(self) -> str:
        """The evaluation's choice of actions, in words."""
        return action_words(self.evaluation.get("greedy", False), self.evaluation.get("epsilon"))

    @property
    def protocol(self) -> str:
        """Differences of the evaluation from DQN's, in words."""
        found = self.evaluation
        alike = not found.get("greedy", False) and found.get("epsilon", _EPSILON) == _EPSILON
        noops = found.get("noop_max", _NOOPS)
        differing = [(key, value) for key, usual in _ENV if (value := getattr(self.config.env, key)) != usual]
        words = [self.actions] * (not alike) + [f"{noops} no-ops at most"] * (noops != _NOOPS)
        return ", ".join([*words, *(phrase(key, value) for key, value in differing)])

    def row(self) -> Row:
        """Return the run's line in runs.csv."""
        return {
            "game": self.rom,
            "run": self.name,
            "seed": self.config.seed,
            "ranks": self.last.get("ranks"),
            "steps": self.evaluation["global_steps"],
            "mean_return": self.evaluation["mean_return"],
            "standard_error": self.evaluation.get("standard_error"),
            "episodes": self.evaluation["episodes"],
            "actions": self.actions,
            "noop_max": self.evaluation.get("noop_max"),
            "git_commit": self.last.get("git_commit"),
            "git_dirty": self.last.get("git_dirty"),
        }


def read(folder: Path) -> Run | str:
    """Return a run, or why it does not count. Raises PalaError."""
    record = run_folder.read(folder)
    refuse_links(folder)
    config = run_folder.config_of(folder, record)
    if config.algorithm != "gorila":
        return f"trains '{config.algorithm}'"
    last, rom = record["segments"][-1], rom_of(config.env.id)
    if rom not in score_table(PUBLISHED) or run_folder.from_python(last).environment:
        return "plays none of the 49 games"
    if run_folder.from_python(last).network or config.network.custom:
        return "has a network of its own"
    if not record["completed"]:
        return "has not completed"
    evaluation = final_evaluation(folder, record)
    if evaluation is None:
        return "has no evaluation of its final policy; `pala evaluate` makes one"
    return Run(folder.name, rom, config, last, evaluation)


# ---- figures ---------------------------------------------------------------------------------------------------------


def game_rows(runs: Sequence[Run]) -> list[Row]:
    """Return the lines of games.csv, one for each of the 49 games; a value without a run is None."""
    rows = []
    for rom, published in score_table(PUBLISHED).items():
        own = [run.evaluation for run in runs if run.rom == rom]
        row: Row = {"game": rom, **published, "ours": _mean(own, "mean_return"), "runs": len(own) or None}
        row |= {"episodes": sum(found["episodes"] for found in own) or None, "steps": _mean(own, "global_steps")}
        row |= {f"{agent}_normalised": _normalised(row[agent], row) for agent in _AGENTS}
        rows.append(row)
    return rows


def _normalised(score: float | None, row: Row) -> float | None:
    return None if score is None else human_normalised(score, row["random"], row["human"])


def _mean(evaluations: Sequence[dict[str, Any]], key: str) -> float | None:
    return statistics.fmean(found[key] for found in evaluations) if evaluations else None


def summary(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return agent -> mean and median over games of the human-normalised score, in percent, if it has all games."""
    scores = {agent: [row[f"{agent}_normalised"] for row in rows] for agent in _AGENTS}
    return {
        agent: (statistics.fmean(values), statistics.median(values))
        for agent, values in scores.items()
        if values and None not in values
    }


# ---- the page --------------------------------------------------------------------------------------------------------


def markdown(runs: Sequence[Run], left_out: Sequence[str]) -> str:
    """Return the page of tables, and what limits them. `left_out`: the runs that do not count, and why."""
    rows = game_rows(runs)
    played = [row for row in rows if row["runs"]]
    page = Page("Gorila on the 49 games")
    page.add(
        f"{counted(len(runs), 'completed run')} of {len(played)} of the {len(rows)} games. docs/gorila.md explains the "
        "columns;\ngames.csv and runs.csv have all digits, and each run with its commit.",
        table(_GAMES, rows),
    )
    lead = "Human-normalised score over games, in percent."
    page.section("All games together", lead, table(_SUMMARY, _summary_rows(rows, played)))
    page.section("To bear in mind", "", "\n".join(f"- {note}" for note in _notes(rows, runs, left_out)))
    return page.text()


_GAMES: list[Column[Row]] = [
    Column("game", "game"),
    Column("random", "random", short_number),
    Column("human", "human", short_number),
    *(Column(name, agent, short_number) for agent, name in _AGENTS.items()),
    *(Column(count, count, ",.0f") for count in ("runs", "episodes", "steps")),
    *(Column(f"{name}, %", f"{agent}_normalised", ",.1f") for agent, name in _AGENTS.items()),
]
_SUMMARY: list[Column[Row]] = [
    Column("games", "games"),
    Column("agent", "agent"),
    Column("mean", "mean", ",.1f"),
    Column("median", "median", ",.1f"),
]


def _summary_rows(rows: Sequence[Row], played: Sequence[Row]) -> list[Row]:
    """Return rows of all games, and of those that were played if these are others."""
    groups = [rows] if len(played) in (0, len(rows)) else [rows, played]
    return [
        {"games": len(group), "agent": _AGENTS[agent], "mean": mean, "median": median}
        for group in groups
        for agent, (mean, median) in summary(group).items()
    ]


def _notes(rows: Sequence[Row], runs: Sequence[Run], left_out: Sequence[str]) -> list[str]:
    missing = [row["game"] for row in rows if not row["runs"]]
    differing: dict[str, list[str]] = {}
    odd: dict[str, list[str]] = {}
    for run in runs:
        odd.setdefault(run.protocol, []).append(f"`{run.name}`")
        differing.setdefault(_other_settings(run, runs[0]), []).append(f"`{run.name}`")
    return [
        *([f"Missing, {counted(len(missing), 'game')}: {', '.join(missing)}."] if missing else []),
        *(f"Left out: {why}." for why in left_out),
        *(f"Not evaluated as DQN was, but with {what}: {', '.join(of)}." for what, of in odd.items() if what),
        *(f"Other settings than `{runs[0].name}`, {what}: {', '.join(of)}." for what, of in differing.items() if what),
        "Scores are normalised by the random and human scores of this table (Mnih et al. 2015), not by dqn_zoo's, as "
        "in `evaluation.json`: the human ones differ in 34 games.",
        "DQN and Gorila: published scores of null-op starts (Mnih et al. 2015; Nair et al. 2015), not run here.",
    ]


def _other_settings(run: Run, other: Run) -> str:
    """Return in which settings a run differs from another, in words: ranks and budget too, but neither the game, the
    seed, nor what does not decide how it learns."""
    wanted = replace(other.config, env=replace(other.config.env, id=run.config.env.id))
    found = {key: pair[0] for key, pair in differences(run.config, wanted).items()}
    if "ranks" in run.last and run.last["ranks"] != other.last.get("ranks"):
        found["ranks"] = run.last["ranks"]
    if run.config.total_steps != other.config.total_steps:
        found["total_steps"] = run.config.total_steps
    return ", ".join(phrase(key, value) for key, value in found.items())


# ---- the program -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """Make the table of the 49 games from completed runs of Gorila."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders of runs, or folders of such folders."""
    output: Path = Path("results/gorila")
    """Folder of the tables; earlier ones there are replaced."""


def write(folders: Sequence[Path], output: Path) -> Path:
    """Read the runs and write the tables; returns the page's path. Raises PalaError."""
    if not folders:
        raise PalaError("Name runs, or folders of runs, such as `runs`; `--help` explains the options.")
    given = dict.fromkeys(folder.resolve() for folder in run_folder.runs_in(folders))
    found: dict[Path, Run | str] = {}
    for folder in given:
        try:
            found[folder] = read(folder)
        except PalaError as error:
            found[folder] = f"cannot be read ({str(error).rstrip('.')})"
    runs = sorted((run for run in found.values() if isinstance(run, Run)), key=lambda run: (run.rom, run.config.seed))
    faults = {folder: f"`{folder.name}` {why}" for folder, why in found.items() if isinstance(why, str)}
    if not runs:
        why = f": {next(iter(faults.values()))}" if faults else ""
        raise PalaError(f"There is no completed run of Gorila on one of the 49 games in the folders named{why}.")
    left_out = [why.replace(str(folder), folder.name) for folder, why in faults.items()]  # tables are published
    page, *_ = write_texts(
        output,
        {
            "scores.md": markdown(runs, left_out),
            "games.csv": csv_text(game_rows(runs)),
            "runs.csv": csv_text([run.row() for run in runs]),
        },
    )
    return page


@exit_on_mistake()
def main() -> None:
    """Run `pala scores`."""
    command = read_command("pala scores", sys.argv[1:], Command())
    print_result(str(write(command.runs, command.output)))
