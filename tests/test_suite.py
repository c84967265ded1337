"""Gorila's 49 games: their presets, the jobs of the Slurm script, and the table of planted runs."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pala.config import Config, EnvConfig, GorilaConfig, load_preset, presets
from pala.envs.vector import atari_rom
from pala.evaluation.references import score_table
from pala.lab import scores
from pala.run import run_folder
from pala.system.errors import PalaError
from support import REPOSITORY
from support.helpers import wait_for
from support.mpi import catches

PUBLISHED = score_table(scores.PUBLISHED)

# ---- the presets -----------------------------------------------------------------------------------------------------


def test_there_is_a_preset_for_each_game() -> None:
    assert [name for name in presets.names() if name.startswith("gorila/")] == [f"gorila/{rom}" for rom in PUBLISHED]
    assert len(PUBLISHED) == 49


@pytest.mark.parametrize("rom", PUBLISHED)
def test_every_preset_trains_gorila_on_its_game(rom: str) -> None:
    config = load_preset(f"gorila/{rom}")
    assert (config.algorithm, atari_rom(config.env.id)) == ("gorila", rom)  # which knows the ROMs that ale-py brings


def test_the_jobs_are_all_games_of_each_seed(tmp_path: Path) -> None:
    """The script as it is shipped, but with one that prints its arguments where `preemptible.sbatch` would be."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    (tmp_path / "launch/slurm").mkdir(parents=True)
    (tmp_path / "launch/slurm/preemptible.sbatch").write_text('echo "$@"')
    jobs = []
    for task in (0, 48, 49, 146):
        ids = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_JOB_ID": "7", "PATH": "/usr/bin:/bin"}
        script = ["bash", REPOSITORY / "launch/slurm/gorila_suite.sbatch", "--total-steps", "9"]
        jobs.append(subprocess.run(script, env=ids, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    assert jobs == [
        f"gorila/{game} --seed {seed} --run.name gorila-{game}-seed-{seed}-7 --total-steps 9\n"
        for game, seed in (("alien", 1), ("zaxxon", 1), ("alien", 2), ("zaxxon", 3))
    ]


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "requeued"),
    [
        ({"PALA_SHORTEST_TURN_S": "0"}, "7"),
        ({"PALA_SHORTEST_TURN_S": "0", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "48"}, "7_48"),
        ({}, None),
    ],
)
def test_a_job_requeues_itself_and_not_its_array(
    variables: dict[str, str], requeued: str | None, tmp_path: Path
) -> None:
    """An array's last task has the number of the array. A job whose time is over as it begins would be requeued for
    ever."""
    programs = {
        "bin/scontrol": 'echo "$*" >>asked',
        "launch/train.sh": "trap 'exit 3' TERM; touch begun; for _ in {1..600}; do sleep 0.1; done",
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    script = str(REPOSITORY / "launch/slurm/preemptible.sbatch")
    with subprocess.Popen(
        ["bash", script, "pong"], cwd=tmp_path, env=environment | variables, stderr=subprocess.PIPE, text=True
    ) as job:
        wait_for(lambda: (tmp_path / "begun").exists() and catches(job.pid, signal.SIGUSR1), what="the job")
        job.send_signal(signal.SIGUSR1)
        said = job.communicate(timeout=60)[1]
    assert job.returncode == 3 and ("is not requeued. If it was the time limit" in said) == (requeued is None)
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == (f"requeue {requeued}\n" if requeued else "")


def make_run(
    folder: Path, rom: str, score: float | None, steps: int = 100_000, completed: bool = True,
    game: dict[str, Any] = {}, from_python: bool = False, **settings: Any,  # noqa: B006
) -> None:  # fmt: skip
    config = Config(**{"algorithm": "gorila", "total_steps": steps} | settings)  # type: ignore[arg-type]
    if rom:
        config = replace(config, env=replace(load_preset(f"gorila/{rom}").env, **game))
    folder.mkdir(parents=True)
    facts = {"ranks": 4, "git_commit": "a" * 40, "python_environment": from_python}
    record = run_folder.RunRecord.begin(folder, config, facts)
    if completed:
        record.end("completed", global_steps=steps)
    if score is not None:
        evaluation = {"policy": "final", "global_steps": steps, "mean_return": score, "standard_error": 1.0}
        (folder / "evaluation.json").write_text(json.dumps(evaluation | {"episodes": 30}))


def written(*folders: Path, output: Path) -> tuple[str, dict[str, dict[str, str]]]:
    """The page, and games.csv by game."""
    page = scores.write(folders, output).read_text()
    with open(output / "games.csv") as file:
        return page, {row["game"]: row for row in csv.DictReader(file)}


def cells(page: str, begin: str) -> list[list[str]]:
    """The lines of tables that begin with this cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [line for line in lines if line[0] == begin]


def test_the_published_scores_give_the_known_means() -> None:
    """Which were computed from them elsewhere: a figure that changed would be seen here."""
    rows = scores.game_rows([])
    assert scores.summary(rows) == {
        "dqn": (pytest.approx(241.1, abs=0.05), pytest.approx(93.5, abs=0.05)),
        "gorila": (pytest.approx(495.2, abs=0.05), pytest.approx(96.4, abs=0.05)),
    }
    assert sum(row["gorila"] > row["dqn"] for row in rows) == 31
    zoo = score_table("atari_scores.csv")
    assert sum(any(zoo[rom][key] != row[key] for key in zoo[rom]) for rom, row in PUBLISHED.items()) == 34


def test_runs_stand_beside_the_published_scores(tmp_path: Path) -> None:
    """Pong twice, 9.3 is the human of this table (not 14.6, dqn_zoo's), and Breakout at random."""
    make_run(tmp_path / "runs/a", "pong", 9.3 - 3)
    make_run(tmp_path / "runs/b", "pong", 9.3 + 3, seed=2)
    make_run(tmp_path / "runs/c", "breakout", 1.7)
    page, games = written(tmp_path / "runs", tmp_path / "runs/a", output=tmp_path / "results")
    assert "3 completed runs of 2 of the 49 games" in page
    assert cells(page, "pong") == [
        ["pong", "-20.7", "9.3", "18.9", "18.3", "9.3", "2", "60", "100,000", "132.0", "130.0", "100.0"]
    ]
    assert cells(page, "49") == [["49", "DQN", "241.1", "93.5"], ["49", "Gorila", "495.2", "96.4"]]
    dqn, gorila, ours = cells(page, "2")
    assert ours == ["2", "ours", "50.0", "50.0"]
    assert (dqn[2], gorila[2]) == ("729.6", "730.3")  # of 132.0 and 1,327.2; of 130.0 and 1,330.6
    assert [row for row in games.values() if row["ours"]] == [games["breakout"], games["pong"]]
    assert float(games["pong"]["ours_normalised"]) == pytest.approx(100)
    assert "Missing, 47 games: alien, " in page
    with open(tmp_path / "results/runs.csv") as file:
        runs = [(row["run"], row["seed"], row["ranks"], row["mean_return"]) for row in csv.DictReader(file)]
    assert runs == [("c", "1", "4", "1.7"), ("a", "1", "4", "6.300000000000001"), ("b", "2", "4", "12.3")]


@pytest.mark.slow
def test_the_whole_suite_needs_no_second_mean(tmp_path: Path) -> None:
    """A player as good as the human in every game."""
    for rom, row in PUBLISHED.items():
        make_run(tmp_path / "runs" / rom, rom, row["human"])
    page, _ = written(tmp_path / "runs", output=tmp_path)
    assert [row[1:] for row in cells(page, "49")][2:] == [["ours", "100.0", "100.0"]]
    assert "Missing" not in page and "Left out" not in page and "Other settings" not in page


@pytest.mark.parametrize(
    ("rom", "facts", "why"),
    [
        ("pong", {"algorithm": "a2c"}, "trains 'a2c'"),
        ("", {"env": EnvConfig(id="CartPole-v1")}, "plays none of the 49 games"),
        ("", {"env": EnvConfig(id="ALE/Tetris-v5")}, "plays none of the 49 games"),
        ("pong", {"from_python": True}, "plays none of the 49 games"),
        ("pong", {"completed": False}, "has not completed"),
        ("pong", {"score": None}, "has no evaluation of its final policy"),
    ],
)
@pytest.mark.slow
def test_what_does_not_count_is_told(rom: str, facts: dict[str, Any], why: str, tmp_path: Path) -> None:
    odd, counting = tmp_path / "odd", tmp_path / "counting"
    make_run(odd, rom, **{"score": 5.0} | facts)
    with pytest.raises(PalaError, match=f"no completed run of Gorila on one of the 49 games .*: `odd` {why}"):
        scores.write([odd], tmp_path / "tables")
    assert not (tmp_path / "tables").exists()
    make_run(counting, "alien", 5.0)
    make_run(tmp_path / "old", "pong", 5.0)
    record = (tmp_path / "old/run.json").read_text()
    (tmp_path / "old/run.json").write_text(record.replace('"gorila"', '"unknown"'))  # as of another version of PALA
    page, games = written(odd, counting, tmp_path / "old", output=tmp_path)
    assert f"- Left out: `odd` {why}" in page and "1 completed run of 1 of" in page
    assert "- Left out: `old` cannot be read (" in page and "unknown" in page and str(tmp_path) not in page
    assert [name for name, row in games.items() if row["ours"]] == ["alien"]


def test_another_protocol_is_told(tmp_path: Path) -> None:
    for name, facts in (("usual", {"epsilon": 0.05}), ("greedy", {"greedy": True, "epsilon": 0.0})):
        make_run(tmp_path / name, "pong", 5.0)
        file = tmp_path / name / "evaluation.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"greedy": False, "noop_max": 30} | facts))
    make_run(tmp_path / "longer", "pong", 5.0, game={"max_episode_frames": 108_000, "repeat_action_probability": 0.25})
    page, _ = written(*(tmp_path / name for name in ("usual", "greedy", "longer")), output=tmp_path / "tables")
    assert "Not evaluated as DQN was, but with greedy actions: `greedy`." in page and page.count("Not evaluated") == 2
    other = "max episode frames 108000, repeat action probability 0.25"
    assert f"Not evaluated as DQN was, but with {other}: `longer`." in page


def test_other_settings_are_told(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/a", "alien", 5.0)
    make_run(tmp_path / "runs/b", "pong", 5.0, steps=200_000, gorila=GorilaConfig(adagrad_learning_rate=0.5))
    make_run(tmp_path / "runs/c", "krull", 5.0)
    record = json.loads((tmp_path / "runs/c/run.json").read_text())
    record["segments"][-1]["ranks"] = 1
    (tmp_path / "runs/c/run.json").write_text(json.dumps(record))
    page, _ = written(tmp_path / "runs", output=tmp_path)
    assert "- Other settings than `a`, adagrad learning rate 0.5, total steps 200000: `b`." in page
    assert "- Other settings than `a`, 1 rank: `c`." in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((), "Name runs, or folders of runs"), (("nowhere",), "'nowhere' is no run and holds none")],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["scores", *arguments])
    with pytest.raises(SystemExit) as exit_:
        scores.main()
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and words in said and said.count("\n") == 1
