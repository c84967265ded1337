"""The comparison: plans, mathematics against slow formulas, reports of planted runs, and one as a user starts it."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from pala.config import A2CConfig, Config, EvaluationConfig, ExchangeConfig, NetworkConfig, RunConfig, from_table
from pala.config.influence import differences
from pala.lab.compare import __main__ as compare_program
from pala.lab.compare import execute, measures, pictures
from pala.lab.compare.__main__ import Command, compare
from pala.lab.compare.collect import Made, copies_in, keep, load, made_in, without_paths
from pala.lab.compare.execute import Task, chosen
from pala.lab.compare.measures import Comparison
from pala.lab.compare.notes import not_begun, notes
from pala.lab.compare.plan import Cell, Plan, Planned, options
from pala.report.runs import ARCHIVE, published
from pala.run import run_folder
from pala.run.metrics import metrics_path
from pala.system.command_line import read_command
from pala.system.errors import PalaError
from pala.train import parse
from support.comparisons import GAME, PRESET, make_run, plan_of, section, set_gone
from support.helpers import record_of, slow_among, wait_for, write_paced
from support.mpi import Job, Launcher, processes_in, ranks_in


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a preset of a comparison and of its game."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.toml").write_text(GAME)
    (tmp_path / "preset.toml").write_text(PRESET)
    return tmp_path


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of a report's time."""
    monkeypatch.setattr(pictures, "draw", lambda comparison, folder: [])


def task_of(planned: Planned, results: Path) -> Task | None:
    """Return what a run needs, beside what is in the results now."""
    return execute.task_of(planned, made_in(results))


def plant(plan: Plan, speeds: dict[str, Sequence[float]], **facts: Any) -> None:
    """All runs of a plan; `speeds`: of a variant, by seed."""
    for run in plan.runs:
        speed = speeds[run.cell.variant][run.config.seed - 1] * run.cell.ranks
        make_run(run.folder, run.config, run.cell.ranks, speed, score=40.0 + 10 * run.config.seed, **facts)


def report(*arguments: Path, preset: str = "preset.toml") -> tuple[str, list[dict[str, str]]]:
    """The page and the rows of runs.csv."""
    assert compare(Command(Path(preset), report_only=True, add=arguments)) == []
    with open("results/tiny/runs.csv") as file:
        return Path("results/tiny/compare.md").read_text(), list(csv.DictReader(file))


def cells_of(page: str, title: str) -> list[list[str]]:
    """The rows of a section's table."""
    lines = [line for line in section(page, title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_disturbances_meet_all_variants_alike(there: Path) -> None:
    names = [run.folder.name for run in plan_of().runs]
    assert names[:5] == ["gossip-Pole-1-1", "none-Pole-1-1", "gossip-Pole-2-1", "none-Pole-2-1", "gossip-Pole-1-2"]
    assert len(names) == 8


def test_settings_come_in_layers(there: Path) -> None:
    plan = plan_of(PRESET + "a2c.gamma = 0.9\nranks = [2]\ntotal_steps = 7000\n")
    gossip, none = plan.config_of(Cell("gossip", "Pole", 1)), plan.config_of(Cell("none", "Pole", 2))
    assert (gossip.a2c.learning_rate, gossip.a2c.gamma, gossip.total_steps) == (1e-3, 0.99, 3000)
    assert (none.a2c.learning_rate, none.a2c.gamma, none.total_steps) == (1e-3, 0.9, 7000)
    assert [run.cell for run in plan.runs if run.cell.variant == "none"] == [Cell("none", "Pole", 2)] * 2


def test_two_runs_of_one_name_are_refused(there: Path) -> None:
    """Names may hold a hyphen, which stands between variant and game as well."""
    Path("other.toml").write_text(GAME.replace("CartPole", "Acrobot"))
    text = PRESET.replace('Pole = "game.toml"', 'Pole = "game.toml"\nfast-Pole = "other.toml"')
    with pytest.raises(PalaError, match=r"would both have the name 'gossip-fast-Pole-1-1'"):
        plan_of(text + "[variants.gossip-fast]\na2c.gamma = 0.5\n")


def test_a_variant_may_be_of_some_games(there: Path) -> None:
    Path("other.toml").write_text(GAME.replace("CartPole", "Acrobot"))
    text = PRESET.replace('Pole = "game.toml"', 'Pole = "game.toml"\nBot = "other.toml"')
    plan = plan_of(text + 'games = ["Bot"]\n')
    assert {(run.cell.variant, run.cell.game) for run in plan.runs} == {
        ("gossip", "Pole"), ("gossip", "Bot"), ("none", "Bot"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seeds =", "seed =", "unknown key 'seed'; did you mean 'seeds'?"),
        ("[games]", "[variants.x]", "'games' is missing"),
        ('"game.toml"', '"gmae.toml"', "Preset 'gmae.toml' does not exist; did you mean 'game.toml'?"),
        ("{Pole = 20}", "{Pol = 20}", "'target_return.Pol' is of no game; did you mean 'Pole'?"),
        ("exchange.kind", "exchange.knd", "[variants.none]: unknown key 'exchange.knd'; did you mean 'exchange.kind'?"),
        ("a2c.learning_rate = 1e-3", "seed = 5", "'train.seed' is given by the comparison itself"),
        ("[games]", '[slurm]\noptions = ["-A", "me"]\n[games]', "'slurm.options' has 'me'"),
        ("[1, 2]", "[0, 2]", "'ranks' has a number below 1"),
        ("[1, 2]", "2", "'ranks' is 2 (int) but must be of type"),
        ('name = "tiny"', 'name = "a/b"', "'a/b' cannot name a folder"),
        ("[variants.gossip]", "[variants.gossip]\nranks = 2", "'ranks' is 2 (int)"),
        ("[variants.gossip]", '[variants.gossip]\ngames = ["Pol"]', "'variants.gossip.games' has 'Pol', no game; did"),
    ],
)
def test_mistakes_in_a_preset_are_told(there: Path, old: str, new: str, words: str) -> None:
    assert old in PRESET
    with pytest.raises(PalaError) as caught:
        plan_of(PRESET.replace(old, new, 1))
    assert words in str(caught.value)


def test_the_command_line_makes_the_settings(there: Path) -> None:
    wanted = Config(
        total_steps=5, seed=3, network=NetworkConfig(mlp_hidden=(7, 8), conv_channels=(1, 2, 3)),
        a2c=A2CConfig(learning_rate=1.5e-7, rmsprop_epsilon_inside_root=True),
        exchange=ExchangeConfig(kind="none"), run=RunConfig(dir="a b", name="x", tensorboard=False),
        evaluation=EvaluationConfig(greedy=True),
    )  # fmt: skip
    assert parse(options(wanted, Config())).config == wanted
    assert options(wanted, wanted) == []
    dashed = Config(run=RunConfig(name="-x"))  # of a variant `-x`
    assert parse(options(dashed, Config())).config == dashed


def test_only_what_decides_a_run_differs() -> None:
    none = Config(exchange=ExchangeConfig(kind="none"))
    other = replace(none, seed=2, total_steps=1, run=RunConfig(threads=8), exchange=ExchangeConfig("none", "ring"))
    assert differences(none, other) == {}
    assert differences(Config(), Config(exchange=ExchangeConfig(topology="ring"))) == {
        "exchange.topology": ("random", "ring")
    }
    in_float32, in_bfloat16, in_either = (
        Config(network=NetworkConfig(precision=precision)) for precision in ("float32", "bfloat16", "auto")
    )
    assert differences(in_bfloat16, in_either) == differences(in_float32, in_either) == {}
    assert differences(in_either, in_bfloat16) == {"network.precision": ("auto", "bfloat16")}
    assert differences(in_float32, in_bfloat16) == {"network.precision": ("float32", "bfloat16")}


def test_a_run_is_another_by_what_decides_it() -> None:
    config = Config(evaluation=EvaluationConfig(episodes=0))
    decayed = replace(config, a2c=replace(config.a2c, learning_rate_decay="linear"))

    def status(config: Config, wanted: Config, **segment: Any) -> tuple[str, str]:
        made = Made(Path("r"), {"completed": True, "segments": [{"ranks": 2} | segment]}, config)
        return made.status(Planned(Cell("v", "g", 2), "g.toml", wanted, ""))[:2]

    alike = replace(config, run=RunConfig(threads=8, name="x"))
    assert status(alike, config) == status(replace(config, network=NetworkConfig(precision="float32")), config)
    assert status(alike, config) == ("complete", "")
    assert status(replace(config, total_steps=1), config) == ("resume", "")
    assert status(config, replace(config, total_steps=1)) == ("longer", "total_steps")
    assert status(decayed, replace(decayed, total_steps=1)) == ("other", "total_steps")
    assert status(config, config, ranks=3) == ("other", "ranks")
    assert status(replace(config, seed=2), config) == ("other", "seed")
    assert status(config, config, python_network=True) == ("other", "network")
    assert status(config, config, python_environment=True) == ("other", "env.id")
    ring = replace(config, exchange=ExchangeConfig(topology="ring"))
    assert status(config, ring) == ("other", "exchange.topology")


# ---- what a run still needs ------------------------------------------------------------------------------------------


def only_run(there: Path, **train: Any) -> Planned:
    settings = "".join(f"{key} = {value}\n" for key, value in train.items())
    text = PRESET.replace("[train]", f"[train]\n{settings}").replace("[1, 2]", "[1]")
    return plan_of(text).runs[0]


def test_what_a_run_still_needs(there: Path) -> None:
    results, planned = Path("results/tiny"), only_run(there)
    new = task_of(planned, results)
    assert new is not None and new.what == "train" and new.words[:3] == ["sh", "-c", "exit 3"]
    assert parse(new.words[new.words.index("pala.train") + 1 :]).config == planned.config
    make_run(planned.folder, planned.config, 1, score=None)
    unscored = task_of(planned, results)
    assert unscored is not None and unscored.words[2:5] == ["pala", "evaluate", "runs/tiny/gossip-Pole-1-1"]
    shutil.rmtree(planned.folder)
    make_run(planned.folder, planned.config, 1)
    assert task_of(planned, results) is None
    longer = task_of(only_run(there, total_steps=9000), results)
    assert longer is not None and longer.words[-4:] == ["--resume", str(planned.folder), "--total-steps", "9000"]
    shutil.rmtree(planned.folder)
    make_run(planned.folder, planned.config, 1, completed=False)
    stopped = task_of(planned, results)
    assert stopped is not None and stopped.words[-2:] == ["--resume", str(planned.folder)]


def test_a_run_is_started_with_its_spares(there: Path) -> None:
    """Also where it continues: in its record they are not among the ranks."""
    planned = plan_of(PRESET.replace("[variants.gossip]", "[variants.gossip]\nrun.spares = 2")).runs[0]
    for what in ("train", "resume"):
        task = task_of(planned, Path("results/tiny"))
        assert task is not None and task.what == what and planned.cell.ranks == 1
        assert task.words[:4] == ["sh", "-c", "exit 3", "3"]
        if what == "train":
            make_run(planned.folder, planned.config, 1, completed=False)


def test_a_run_in_the_results_is_not_made_again(
    there: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = only_run(there)
    make_run(planned.folder, planned.config, 1)
    report()
    shutil.rmtree("runs")
    assert task_of(planned, Path("results/tiny")) is None
    published = {path: path.stat().st_mtime_ns for path in Path("results").rglob("*")}
    assert (
        compare(Command(Path("preset.toml"), only=("gossip",))) == []
    )  # as in a fresh clone: it says how to make them again
    assert "`--output results/mine`" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path("results").rglob("*")} == published


def archive_runs(results: Path) -> None:
    """Put the copies of runs into the archive, as published results have them."""
    with tarfile.open(results / ARCHIVE, "w:xz") as archive:
        archive.add(results / "runs", "runs")
    shutil.rmtree(results / "runs")


@pytest.mark.slow
def test_archived_runs_count_as_copies(there: Path, no_pictures: None) -> None:
    """The page made of them is the same; runs that are new are put beside the archive."""
    results = Path("results/tiny")
    plan = plan_of(PRESET.replace("[1, 2]", "[1]"))
    first, second = plan.runs
    make_run(first.folder, first.config, 1)
    before = report()
    archive_runs(results)
    assert report() == before and [path.name for path in results.glob("runs/*")] == [first.folder.name]
    shutil.rmtree("runs")
    shutil.rmtree(results / "runs")
    assert report() == before and not (results / "runs").exists()
    assert task_of(first, results) is None and task_of(second, results) is not None
    other = make_run(there / "cluster" / first.folder.name, first.config, 1, hosts=["node1"])
    assert [row["run"] for row in report(other)[1]] == [first.folder.name, f"{first.folder.name}-2"]


@pytest.mark.parametrize("kind", ["symbolic", "hard", "outside"])
def test_an_archive_with_links_or_places_outside_is_refused(there: Path, kind: str) -> None:
    member = tarfile.TarInfo("../run.json" if kind == "outside" else "runs/a/run.json")
    if kind != "outside":
        member.type, member.linkname = (tarfile.SYMTYPE if kind == "symbolic" else tarfile.LNKTYPE), "/etc/passwd"
    with tarfile.open(there / ARCHIVE, "w:xz") as archive:
        archive.addfile(member)
    with pytest.raises(PalaError, match=rf"holds '{member.name}', which is no plain file"):
        published(there)
    (there / ARCHIVE).write_bytes(b"no archive")
    with pytest.raises(PalaError, match="cannot be unpacked"):
        published(there)


def test_a_variant_may_have_seeds_of_its_own(there: Path) -> None:
    plan = plan_of(PRESET.replace("[variants.none]", "[variants.none]\nseeds = [2, 7]"))
    assert {run.config.seed for run in plan.runs if run.cell.variant == "gossip"} == {1, 2}
    assert {run.config.seed for run in plan.runs if run.cell.variant == "none"} == {2, 7}


def test_variants_that_differ_in_their_budget_take_runs_by_the_names_of_copies(there: Path, no_pictures: None) -> None:
    """A run that was prolonged keeps the name that it was begun with in its record."""
    short, long = plan_of(PRESET.replace("[1, 2]", "[1]") + "[variants.long]\ntotal_steps = 9000\n").runs[::2]
    for folder, config in ((short.folder, short.config), (long.folder.name, long.config)):
        own = replace(config, run=replace(config.run, name=short.config.run.name))
        make_run(Path("results/tiny/runs") / Path(folder).name, own, 1)
    plan = plan_of(PRESET.replace("[1, 2]", "[1]") + "[variants.long]\ntotal_steps = 9000\n")
    assert [load(run, plan).cell.variant for run in copies_in(Path("results/tiny"))] == ["gossip", "long"]
    assert task_of(short, Path("results/tiny")) is None and task_of(long, Path("results/tiny")) is None


def test_a_run_in_the_results_counts_under_whatever_name(there: Path, no_pictures: None) -> None:
    """One that was added, or made again and stored beside the first; but none of a variant that learns alike."""
    results = Path("results/tiny")
    gossip, threads = plan_of(PRESET.replace("[1, 2]", "[1]") + "[variants.threads]\nrun.threads = 2\n").runs[::2]
    assert (gossip.cell.variant, threads.cell.variant) == ("gossip", "threads")
    own, old = (replace(gossip.config, run=replace(gossip.config.run, name=n)) for n in ("mine", "before-Pole-1-1"))
    for name, config, complete in (
        ("gossip-Pole-1-1-2", gossip.config, {gossip}), ("again", threads.config, {threads}),
        ("mine", own, {gossip, threads}), ("before-Pole-1-1", old, {gossip, threads}),  # of a variant that was renamed
    ):  # fmt: skip
        make_run(results / "runs" / name, config, 1)
        assert {run for run in (gossip, threads) if task_of(run, results) is None} == complete
        shutil.rmtree(results)


@pytest.mark.slow
def test_variants_may_differ_in_what_learning_does_not_depend_on(there: Path, no_pictures: None) -> None:
    plan = plan_of(PRESET.replace("[1, 2]", "[1]") + "[variants.threads]\nrun.threads = 2\n")
    plant(plan, {"gossip": [1.0], "none": [1.0], "threads": [1.0]})
    assert [cells[2] for cells in cells_of(report()[0], "Scores")] == ["gossip", "none", "threads"]


@pytest.mark.slow
def test_a_run_that_ended_with_fewer_ranks_does_not_stop_the_others(
    there: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(PRESET.replace("sh -c 'exit 3' {ranks}", "true {ranks}"))
    make_run(plan.runs[2].folder, plan.runs[2].config, 1)  # of 2 ranks
    assert compare(Command(Path("preset.toml"), only=("gossip",)))[0] == plan.runs[2]
    said = capsys.readouterr().out
    assert "gossip Pole, 2 ranks, seed 1: FAILED. Run 'runs/tiny/gossip-Pole-2-1' last ran with 1 ranks, not 2" in said
    assert "0 of 4 runs are complete" in said and "gossip Pole, 1 rank, seed 1: starts" in said


def test_a_page_says_how_it_is_made_again_where_it_lies(there: Path, no_pictures: None) -> None:
    planned = only_run(there)
    make_run(planned.folder, planned.config, 1)
    for folder, output in (("results/tiny", ""), ("my results", " --output 'my results'")):
        assert compare(Command(Path("preset.toml"), report_only=True, output=Path(folder))) == []
        page = section((Path(folder) / "compare.md").read_text(), "How it was made")
        file = f"{folder}/preset.toml"
        assert f"    pala compare {shlex.quote(file)} --report-only{output}\n" in page


def test_a_run_that_is_shorter_than_one_of_the_results_is_refused(there: Path, no_pictures: None) -> None:
    """It would be trained, and not reported."""
    long = only_run(there, total_steps=9000)
    make_run(long.folder, long.config, 1)
    report()
    shutil.rmtree("runs")
    short = only_run(there)
    with pytest.raises(PalaError, match=r"'total_steps' 9,000, and the comparison now asks for 3,000: of two runs"):
        task_of(short, Path("results/tiny"))
    assert task_of(only_run(there, **{"a2c.gamma": 0.5}), Path("results/tiny")) is not None


def test_a_run_that_a_callback_ended_early_takes_no_longer_runs_place(there: Path, no_pictures: None) -> None:
    """Of two budgets the larger one counts only if more of it was made."""
    whole = only_run(there)
    make_run(whole.folder, whole.config, 1)
    early = make_run(there / "early" / "e", replace(whole.config, total_steps=500), 1)
    record = json.loads((early / "run.json").read_text())
    record["config"]["total_steps"] = 9000
    (early / "run.json").write_text(json.dumps(record))
    _, rows = report(early)
    assert whole.folder.name in [row["run"] for row in rows]


@pytest.mark.slow
def test_networks_from_python_are_told_apart_by_their_parameters(there: Path, no_pictures: None) -> None:
    config = only_run(there).config
    for name, parameters in (("a", 10), ("b", 20), ("c", 20)):
        seeded = replace(config, seed=ord(name))
        make_run(there / "mine" / name, seeded, 1, python_network=True, parameters=parameters)
    _, rows = report(there / "mine")
    assert sorted(row["variant"] for row in rows) == [
        f"gossip (network from Python, {parameters} parameters)" for parameters in (10, 20, 20)
    ]


def test_another_evaluation_is_refused(there: Path, no_pictures: None) -> None:
    planned = only_run(there)
    evaluation = replace(planned.config.evaluation, max_episode_steps=7)
    make_run(planned.folder, replace(planned.config, evaluation=evaluation), 1)
    with pytest.raises(PalaError, match=r"was made with 'evaluation.max_episode_steps' 7, but the comparison now asks"):
        task_of(planned, Path("results/tiny"))


def test_runs_with_settings_that_are_gone_are_not_those_of_today(
    there: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is to be made is refused, one given by `--add`, too; copies in the results are left out, and named."""
    plan = plan_of()
    plant(plan, {"gossip": (2000, 2000), "none": (1000, 1000)})
    report()
    old = plan.runs[0].folder
    set_gone(old, "exchange.exchanges_per_update", 4)
    with pytest.raises(PalaError, match=r"with 'exchange.exchanges_per_update' 4, which .* to be compared it needs"):
        task_of(plan.runs[0], Path("results/tiny"))
    with pytest.raises(PalaError, match="to be compared it needs"):
        report(old)
    set_gone(Path("results/tiny/runs") / old.name, "exchange.exchanges_per_update", 4)
    _, rows = report()
    assert len(rows) == 7
    assert f"Trained with settings that are gone, and left out: {old.name}." in capsys.readouterr().err


def test_a_run_in_the_results_that_was_made_otherwise_is_no_hindrance(there: Path, no_pictures: None) -> None:
    """A run of another's cluster may have the name of one that is planned here."""
    other = only_run(there, **{"a2c.gamma": 0.5})
    make_run(other.folder, other.config, 1)
    report()
    shutil.rmtree("runs")
    task = task_of(only_run(there), Path("results/tiny"))
    assert task is not None and task.what == "train"


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"a2c.gamma": 0.5}, "'a2c.gamma' 0.99, but the comparison now asks for 0.5"),
        ({"total_steps": 100}, "'total_steps' 3000, but the comparison now asks for 100"),
    ],
)
def test_a_run_made_otherwise_is_not_mixed_in(there: Path, train: dict[str, Any], words: str) -> None:
    planned = only_run(there)
    make_run(planned.folder, planned.config, 1)
    with pytest.raises(PalaError) as caught:
        task_of(only_run(there, **train), Path("results/tiny"))
    assert words in str(caught.value)


def test_a_longer_budget_is_no_longer_decay(there: Path) -> None:
    """A learning rate that has fallen to 0 would have been another with the longer budget."""
    decay = {"a2c.learning_rate_decay": '"linear"'}
    planned = only_run(there, **decay)
    make_run(planned.folder, planned.config, 1)
    with pytest.raises(PalaError, match="'total_steps' 3000, but the comparison now asks for 9000"):
        task_of(only_run(there, **decay, total_steps=9000), Path("results/tiny"))


def test_a_part_is_chosen_by_name(there: Path) -> None:
    plan = plan_of()
    assert {run.cell.variant for run in chosen(plan, ["none"])} == {"none"}
    assert len(chosen(plan, ["Pole"])) == 8
    with pytest.raises(PalaError, match=r"'--only gosip' is no variant and no game; there are gossip, none, Pole\."):
        chosen(plan, ["gosip"])


def test_a_part_that_is_not_named_is_not_taken_for_all() -> None:
    for words in (["pong", "--only"], ["pong", "--only", "--report-only"]):
        with pytest.raises(PalaError, match="'--only' names nothing"):
            read_command("pala compare", words, Command())


def test_jobs_that_fail_do_not_stop_the_others(
    there: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither does one that ends well without a run that is complete. What is there is reported."""
    plan = plan_of(PRESET.replace("exchange.kind", 'launcher = "true"\nexchange.kind'))
    make_run(plan.runs[0].folder, plan.runs[0].config, 1)
    failed = compare(Command(Path("preset.toml")))
    assert failed == plan.runs[1:]
    said = capsys.readouterr().out
    assert "1 of 8 runs are complete" in said and "8/8  none Pole, 2 ranks, seed 2: FAILED. The job ended, but" in said
    assert "failed with status 3" in said
    assert "1 completed run of 1 begun" in Path("results/tiny/compare.md").read_text()


def test_a_folder_that_is_no_run_does_not_stop_the_others(
    there: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of()
    plan.runs[0].folder.mkdir(parents=True)
    (plan.runs[0].folder / "notes.txt").write_text("mine")
    make_run(plan.runs[1].folder, plan.runs[1].config, 1)
    assert len(compare(Command(Path("preset.toml")))) == 7
    assert "FAILED" in capsys.readouterr().out and (plan.runs[0].folder / "notes.txt").exists()


def test_results_that_cannot_be_written_are_told_before_training(there: Path) -> None:
    Path("notes.md").write_text("mine")
    with pytest.raises(PalaError, match=r"'notes.md/runs' cannot be made: .*Give another '--output'"):
        compare(Command(Path("preset.toml"), output=Path("notes.md")))
    assert not Path("runs").exists()


def test_a_run_of_the_wrong_number_of_ranks_is_not_called_complete(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = only_run(there)
    make_run(planned.folder, planned.config, 3)
    assert compare(Command(Path("preset.toml"), dry_run=True, only=(planned.cell.variant,))) == []
    said = capsys.readouterr()
    assert "last ran with 3 ranks, not 1" in said.err and "Nothing is missing" not in said.out


def test_missing_runs_are_named_by_their_seeds(there: Path) -> None:
    plan = plan_of(PRESET.replace("seeds = [1, 2]", "seeds = [1, 2, 5]"))
    here = [SimpleNamespace(cell=run.cell, seed=2) for run in plan.runs if run.cell.variant == "none"]
    (said,) = not_begun(plan, here)  # type: ignore[arg-type]
    assert "none Pole, 1 rank, seeds 1, 5" in said and "gossip Pole, 1 rank, seeds 1, 2, 5" in said
    (said,) = not_begun(plan_of(PRESET.replace("seeds = [1, 2]", "seeds = [3]")), [])
    assert "none Pole, 1 rank, seed 3" in said


@pytest.mark.slow
def test_a_preset_that_starts_nothing_says_so(
    there: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the page names what was not given."""
    plan = plan_of(PRESET.replace("[variants.gossip]", "[variants.gossip]\nranks = []"))
    for dry_run in (False, True):
        with pytest.raises(PalaError, match="starts no run of what was asked for; give those made elsewhere"):
            compare(Command(Path("preset.toml"), only=("gossip",), dry_run=dry_run))
    plant(plan, {"none": (90.0, 80.0)})
    compare(Command(Path("preset.toml"), only=("gossip",), add=(plan.runs[0].folder,), dry_run=True))
    assert "starts no run of what was asked for; what `--add` gives would be reported" in capsys.readouterr().out
    assert not Path("results").exists()
    page, _ = report()
    assert "Asked for by the preset, but not there: any run of gossip." in page


def test_a_dry_run_of_a_report_is_a_mistake(there: Path) -> None:
    with pytest.raises(PalaError, match="Give only one of --report-only, --dry-run"):
        compare(Command(Path("preset.toml"), report_only=True, dry_run=True))


def test_a_dry_run_may_be_cut_short(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `head`, which has gone when the commands are printed."""
    plan_of()
    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=Mock(side_effect=BrokenPipeError)))
    monkeypatch.setattr("os.dup2", lambda *descriptors: None)
    assert compare(Command(Path("preset.toml"), dry_run=True)) == []


def test_a_dry_run_does_nothing(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_of()
    assert compare(Command(Path("preset.toml"), dry_run=True, only=("none",))) == []
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(" -m pala.train game.toml " in line and "kind none" in line for line in lines)
    assert sorted(path.name for path in there.iterdir()) == ["game.toml", "preset.toml"]


# ---- mathematics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 13))
def test_interquartile_mean(size: int) -> None:
    values = np.random.default_rng(size).normal(size=size)
    inner = sorted(values)
    for _ in range(size // 4):
        inner = inner[1:-1]
    assert float(measures.interquartile_mean(values)) == pytest.approx(sum(inner) / len(inner))


def test_the_bootstrap_covers_what_it_should() -> None:
    generator = np.random.default_rng(1)
    intervals = [measures.bootstrap_interval([generator.normal(size=30)]) for _ in range(200)]
    assert 0.88 <= np.mean([low <= 0 <= high for low, high in intervals]) <= 0.98


def test_the_bootstrap_keeps_strata_apart() -> None:
    """Drawn from all together, the share of each would vary."""
    strata = [np.full(4, 1.0), np.full(4, 5.0)]
    assert measures.bootstrap_interval(strata) == (3.0, 3.0)
    low, high = measures.bootstrap_interval([np.concatenate(strata)])
    assert low < 3 < high


def test_a_target_is_reached_by_a_whole_window() -> None:
    returns = np.random.default_rng(2).normal(np.linspace(0, 3, 400), 1)
    slow = next(i for i in range(99, 400) if returns[i - 99 : i + 1].mean() >= 1.5)
    assert measures.first_at_least(returns, 1.5) == slow
    assert measures.first_at_least(returns, 9.0) is None
    assert measures.first_at_least(np.full(99, 10.0), 1.5) is None
    assert measures.first_at_least(np.full(100, 10.0), 1.5) == 99


def test_runs_that_never_reach_the_target_come_last() -> None:
    assert measures.median_reached([3.0, None, 1.0]) == 3.0
    assert measures.median_reached([None, None, 1.0]) is None
    assert measures.median_reached([2.0, None]) is None
    assert measures.median_reached([2.0, 4.0]) == 3.0


def test_a_run_whose_number_of_ranks_changed_has_no_speed(there: Path, no_pictures: None) -> None:
    planned = only_run(there)
    make_run(planned.folder, planned.config, 2, speed=100.0)
    assert [row["steps_per_s"] for row in report()[1]] == ["100.0"]
    record = json.loads((planned.folder / "run.json").read_text())
    record["segments"].append(record["segments"][0] | {"ranks": 1})
    (planned.folder / "run.json").write_text(json.dumps(record))
    page, rows = report()
    assert [row["steps_per_s"] for row in rows] == [""]
    assert f"resumed with another number of ranks, so without a speed: `{planned.folder.name}`" in page


def test_efficiency_is_speed_a_rank() -> None:
    assert measures.efficiencies({2: 100.0, 8: 300.0}) == {2: 1.0, 8: 0.75}


def test_the_first_interval_of_each_start_is_left_out() -> None:
    kinds = ["start", "interval", "interval", "episode", "start", "interval", "episode", "interval"]
    records = [{"type": kind, "place": place} for place, kind in enumerate(kinds)]
    assert [record["place"] for record in measures.settled(records)] == [2, 7]
    assert [record["place"] for record in measures.settled(records[:2])] == [1]


def test_paths_of_the_machine_are_left_out() -> None:
    text = '"command": "python -m pala.train /srv/a.b/configs/pong.toml --run.dir=/scratch/x", "dir": "/data/y/runs"'
    assert without_paths(text) == '"command": "python -m pala.train pong.toml --run.dir=x", "dir": "runs"'
    quoted = '"command": "train --run.dir \'/home/jane doe/my runs/x=1,2\'", "dir": "/home/jos\\u00e9/runs"'
    assert without_paths(quoted) == '"command": "train --run.dir \'x=1,2\'", "dir": "runs"'
    assert without_paths("--add=/data/a,/data/b /x=/y/z") == "--add=a,b x=z"
    kept = '"ALE/Pong-v5" "configs/pong.toml" "1/2" "https://example.org/a" "a / b"'
    assert without_paths(kept) == kept


# ---- the report ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_the_report_says_of_planted_runs(there: Path, no_pictures: None) -> None:
    plan = plan_of()
    plant(plan, {"gossip": (90.0, 160.0), "none": (100.0, 200.0)})
    page, rows = report()
    assert cells_of(page, "Scores")[0][:6] == ["Pole", "1", "gossip", "2", "3,000", "55.0 [50.0, 60.0]"]
    assert cells_of(page, "Speed")[2] == ["Pole", "2", "gossip", "250 (180-320)", "0.850 (0.800-0.900)", "25.0%", "1"]
    assert [row[-2:] for row in cells_of(page, "Scaling")] == [["1.00", "1"]] * 4
    assert [row[2:] for row in cells_of(page, "What was exchanged")] == [["gossip", "0.75", "0.5000", "2.0", "3"]]
    # The mean of 100 episodes is i / 10 - 4.95, so 20 at the first i >= 249.5, and there are 250.
    assert cells_of(page, "The way to a target return")[0][3:] == ["20.0", "0 of 2", "not reached", "not reached"]
    first = next(row for row in rows if row["run"] == "gossip-Pole-2-1")
    assert float(first["steps_per_s"]) == 180 and float(first["training_score"]) == pytest.approx(19.95)
    page, _ = report(preset=str(write_preset(PRESET.replace("Pole = 20", "Pole = 10"))))
    # At i = 150 of 250 episodes, so after 151 / 250 of 3000 steps and, at 100 and 200 steps/s, of 30 and 15 s.
    assert cells_of(page, "The way to a target return")[1][3:] == ["10.0", "2 of 2", "1,812", "0.2"]
    assert "hosts" not in section(page, "To bear in mind")
    assert "learning" in section(page, "To bear in mind") and "intervals of one game go from the lowest run" in page


def test_speed_is_compared_with_its_like(there: Path, no_pictures: None) -> None:
    """Among several variants without exchange, the one that is otherwise the same counts."""
    small = "network.mlp_hidden = [8]\n"
    text = PRESET.replace("[1, 2]", "[2]", 1).replace("[1, 2]", "[1]")
    plan = plan_of(text + f'[variants.small]\n{small}[variants.small-none]\n{small}exchange.kind = "none"\n')
    plant(plan, {"gossip": (90, 90), "none": (100, 100), "small": (150, 150), "small-none": (300, 300)})
    page, _ = report()
    ratios = {row[2]: row[4] for row in cells_of(page, "Speed")}
    assert ratios == {"gossip": "0.900", "none": "", "small": "0.500", "small-none": ""}


@pytest.mark.slow
def test_what_was_disturbed_is_not_compared_over_time(there: Path) -> None:
    plan = plan_of(PRESET.replace("[1, 2]", "[1, 2]\nundisturbed = false", 1))
    plant(plan, {"gossip": (90.0, 160.0), "none": (100.0, 200.0)})
    (there / "results/tiny").mkdir(parents=True)
    (there / "results/tiny/scaling.png").touch()  # of an earlier report
    page, rows = report()
    assert {row["steps_per_s"] for row in rows} == {row["time_wait"] for row in rows} == {""}
    assert "time_s" not in Path("results/tiny/curves.csv").read_text()
    assert "## Speed" not in page and "## Scaling" not in page and not Path("results/tiny/scaling.png").exists()
    assert cells_of(page, "The way to a target return")[0][3:] == ["20.0", "0 of 2", "not reached"]
    assert "what depends on time is left out" in section(page, "To bear in mind")
    assert cells_of(page, "Scores")


def test_variants_on_different_numbers_of_ranks_are_drawn_side_by_side(there: Path) -> None:
    def titles(*cells: tuple[str, int]) -> list[str]:
        runs = [SimpleNamespace(cell=Cell(variant, "Pole", ranks)) for variant, ranks in cells]
        return list(pictures._rows(runs))  # type: ignore[arg-type]

    assert titles(("dqn", 1), ("gorila", 2), ("gorila", 4)) == ["Pole"]
    assert titles(("dqn", 2), ("gorila", 2), ("gorila", 4)) == ["Pole, 2 ranks", "Pole, 4 ranks"]
    assert titles(("gorila", 1)) == ["Pole, 1 rank"]


@pytest.mark.slow
def test_ranks_beyond_cores_and_the_upper_bound_are_named(there: Path) -> None:
    plan = plan_of(PRESET.replace("ranks = [1, 2]", "ranks = [1, 2, 4]"))
    plant(plan, {"gossip": (90.0, 80.0), "none": (100.0, 100.0)}, cores=2)
    figure = pictures.draw_scaling(Comparison.of(plan.preset, [load(run.folder, plan) for run in plan.runs]))
    assert figure is not None
    speed, efficiency = figure.axes[:2]
    labels = efficiency.get_legend_handles_labels()[1]
    assert labels[0] == "gossip" and "upper bound" in labels[1] and labels[2:] == [
        "speed in proportion to ranks", "more ranks than cores",
    ]  # fmt: skip
    (shade,) = speed.patches
    assert isinstance(shade, Rectangle) and 2 < shade.get_x() < 4


def test_variants_look_by_their_place_and_those_that_are_drawn_are_first(there: Path) -> None:
    plan = plan_of('drawn = ["none"]\n' + PRESET)
    comparison = Comparison.of(plan.preset, [])
    assert [comparison.place(variant) for variant in ("none", "gossip")] == [0, 1]


def test_only_the_variants_that_are_named_are_drawn(there: Path) -> None:
    plan = plan_of(PRESET)
    with pytest.raises(PalaError, match=r"'drawn' names 'gosip', no variant.*gossip"):
        plan_of('drawn = ["gosip"]\n' + PRESET)
    first, *others = plan.preset.variants
    plan = plan_of(f'drawn = ["{first}"]\n' + PRESET)
    plant(plan, dict.fromkeys(plan.preset.variants, (90.0, 80.0)))
    comparison = Comparison.of(plan.preset, [load(run.folder, plan) for run in plan.runs])
    figure = pictures._learning_curves(comparison)
    assert figure is not None
    names = [text.get_text() for part in figure.subfigs for legend in part.legends for text in legend.get_texts()]
    assert any(name.startswith(first) for name in names) and not any(name.startswith(tuple(others)) for name in names)
    assert f"The learning curves leave out {', '.join(f'`{name}`' for name in others)} (`drawn`)." in notes(comparison)


def test_names_of_variants_are_not_read_as_formulas(there: Path) -> None:
    """A run that is added is named by its settings, which may hold any text."""
    plan = plan_of(PRESET)
    runs = [make_run(there / "mine" / str(ranks), plan.runs[0].config, ranks) for ranks in (1, 2)]
    for run in runs:
        record = json.loads((run / "run.json").read_text())
        record["config"]["network"]["custom"] = "_m:$^$"
        (run / "run.json").write_text(json.dumps(record))
    _, rows = report(there / "mine")
    assert "$^$" in rows[0]["variant"]
    for name in ("learning_curves", "final_scores", "scaling"):
        assert Path(f"results/tiny/{name}.png").exists()


def write_preset(text: str) -> Path:
    Path("other.toml").write_text(text)
    return Path("other.toml")


@pytest.mark.slow
def test_auc_is_the_mean_of_the_curve(there: Path, no_pictures: None) -> None:
    plant(plan_of(), {"gossip": (90.0, 80.0), "none": (100.0, 100.0)})
    _, rows = report()
    means = [np.mean([i / 10 for i in range(max(0, k - 99), k + 1)]) for k in range(250)]
    steps = np.array([3000 * (k + 1) / 250 for k in range(250)]).astype(int)
    heights, places = np.concatenate([means[:1], means]), np.concatenate([[0], steps])
    slow = ((heights[1:] + heights[:-1]) / 2 * np.diff(places)).sum() / 3000
    assert float(rows[0]["auc"]) == pytest.approx(slow, abs=0.05)


@pytest.mark.slow
def test_the_report_can_be_made_again_from_the_results_alone(there: Path) -> None:
    plant(plan_of(PRESET.replace("seeds = [1, 2]", "seeds = [1]")), {"gossip": (90.0, 80.0), "none": (100.0, 100.0)})
    report()
    made = {path: path.read_bytes() for path in Path("results").rglob("*") if path.is_file()}
    assert {path.name for path in made} >= {"learning_curves.png", "final_scores.png", "scaling.png", "curves.csv"}
    shutil.rmtree("runs")
    report(preset="results/tiny/preset.toml")
    assert {path: path.read_bytes() for path in Path("results").rglob("*") if path.is_file()} == made


@pytest.mark.slow
def test_runs_made_elsewhere_are_added_once(there: Path, no_pictures: None) -> None:
    plan = plan_of()
    mine = plan.runs[0]
    make_run(mine.folder, mine.config, 1)
    same_name = make_run(there / "cluster" / mine.folder.name, mine.config, 1, speed=200.0, hosts=["node1"])
    other = from_table({"total_steps": 3000, "env": {"id": "CartPole-v1", "num_envs": 4}}, "test")
    make_run(there / "cluster" / "mine", other, 4)
    for _ in range(2):
        page, rows = report(same_name.parent)
        assert [row["run"] for row in rows] == ["gossip-Pole-1-1", "gossip-Pole-1-1-2", "mine"]
    assert [row["variant"] for row in rows] == ["gossip", "gossip", "gossip (learning rate auto)"]
    assert "Do not compare speeds over unlike hosts." in section(page, "To bear in mind")


def test_a_run_that_is_added_by_a_link_as_well_counts_once(there: Path, no_pictures: None) -> None:
    run = plan_of().runs[0]
    make_run(run.folder, run.config, 1)
    Path("link").symlink_to(run.folder)
    _, rows = report(Path("link"), run.folder)
    assert [row["run"] for row in rows] == [run.folder.name]


def test_runs_of_a_sweep_that_begin_in_the_same_second_are_not_one(there: Path, no_pictures: None) -> None:
    """Each setting has a folder, in which its run has the same name."""
    config = plan_of().runs[0].config
    for rate in (1e-3, 5e-3):
        command = f"python -m pala.train '/home/jos\u00e9/my runs/game.toml' --a2c.learning-rate {rate}"
        begun = {"started": "now", "command": command}
        make_run(there / f"rate-{rate}" / "r", replace(config, a2c=A2CConfig(learning_rate=rate)), 1, **begun)
    for _ in range(2):
        _, rows = report(there / "rate-0.001", there / "rate-0.005")
        named = [(row["run"], row["variant"]) for row in rows]
        assert named == [("r", "gossip"), ("r-2", "gossip (learning rate 0.005)")]


def test_a_run_made_again_for_more_steps_replaces_the_shorter_one(there: Path, no_pictures: None) -> None:
    short, long = only_run(there), only_run(there, total_steps=9000)
    make_run(short.folder, short.config, 1, score=10.0)
    report()
    shutil.rmtree("runs")
    make_run(long.folder, long.config, 1, speed=200.0)
    page, rows = report()
    assert [(row["run"], row["global_steps"]) for row in rows] == [("gossip-Pole-1-1-2", "9000")]
    assert cells_of(page, "Scores")[0][3:6] == ["1", "9,000", "50.0"]
    assert "Left out for a longer run of the same seed: `gossip-Pole-1-1`" in page


@pytest.mark.slow
def test_variants_may_differ_in_budget_alone(there: Path, no_pictures: None) -> None:
    plan = plan_of(PRESET + "[variants.gossip_long]\ntotal_steps = 9000\n")
    for run in plan.runs:
        make_run(run.folder, run.config, run.cell.ranks)
    page, rows = report()
    assert all(row["run"].startswith(f"{row['variant']}-Pole-") for row in rows) and len(rows) == len(plan.runs)
    assert "Runs differ in budget; runs.csv has each." in page
    assert {row["budget"] for row in rows} == {"3000", "9000"}


def test_a_rate_that_decays_with_another_budget_is_another_training(there: Path) -> None:
    config = plan_of(PRESET.replace("[train]\n", "[train]\na2c.learning_rate_decay = 'linear'\n")).runs[0].config
    assert not differences(config, replace(config, seed=9))
    assert list(differences(config, replace(config, total_steps=9000))) == ["total_steps"]


def test_an_earlier_state_of_a_run_does_not_replace_a_later_one(there: Path, no_pictures: None) -> None:
    mine = plan_of().runs[0]
    make_run(mine.folder, mine.config, 1)
    early = make_run(there / "early" / mine.folder.name, mine.config, 1, completed=False)
    _, rows = report(early)
    assert [row["completed"] for row in rows] == ["True"]


def test_a_longer_run_that_was_interrupted_does_not_replace_a_completed_one(there: Path, no_pictures: None) -> None:
    mine = plan_of().runs[0]
    make_run(mine.folder, mine.config, 1)
    report()
    longer = replace(mine.config, total_steps=2 * mine.config.total_steps)
    run_folder.RunRecord.begin(mine.folder, longer, {"started": "later", "ranks": 1})
    _, rows = report()
    assert [row["completed"] for row in rows] == ["True"]


def test_a_run_that_was_evaluated_otherwise_is_evaluated_again(there: Path) -> None:
    mine = plan_of().runs[0]
    make_run(mine.folder, mine.config, 1)
    assert task_of(mine, Path("results")) is None
    greedy = replace(mine.config, evaluation=replace(mine.config.evaluation, greedy=True))
    task = task_of(replace(mine, config=greedy), Path("results"))
    assert task is not None and task.what == "evaluate" and task.command[-1] == "--greedy"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("undisturbed = false", "undisturbed = true", "other work ran during its runs"),
        ("undisturbed = true", "undisturbed = false", None),
        ('launcher = "slow -np {ranks}"', "", "runs of gossip, none had another 'launcher'"),
    ],
)
@pytest.mark.slow
def test_runs_made_under_other_conditions_are_not_reported_as_if(
    before: str, after: str, said: str | None, there: Path, no_pictures: None
) -> None:
    launcher = next(line for line in PRESET.splitlines() if line.startswith("launcher"))
    first = plan_of(PRESET.replace(launcher, before)).runs[0]
    make_run(first.folder, first.config, 1)
    report()
    plan_of(PRESET.replace(launcher, after))
    if said is None:
        report()
    else:
        with pytest.raises(PalaError, match=f"{said}.*another 'name'"):
            report()


def test_a_run_without_a_place_is_not_copied(there: Path) -> None:
    plan_of()
    foreign = make_run(there / "foreign", Config(), 1)
    with pytest.raises(PalaError, match=r"plays 'ALE/Pong-v5', which is none of the games"):
        report(foreign)
    assert not Path("results").exists()
    with pytest.raises(PalaError, match=r"'nowhere' is no run and holds none"):
        report(Path("nowhere"))


@pytest.mark.slow
def test_what_is_not_alike_is_told(there: Path, no_pictures: None) -> None:
    plan = plan_of(PRESET.replace("[1, 2]", "[1]", 1))
    dead = [{"rank": 0, "host": "vm", "noticed_s": 1.0}]
    odd = {"git_commit": "b" * 40, "git_dirty": True, "threads_per_rank": 7, "lost_ranks": dead, "joined_ranks": dead}
    for run, more in zip(plan.runs, ({}, odd, {"score": None}, {"completed": False}), strict=True):
        log = replace(run.config.run, log_interval_s=30.0 if more is odd else 5.0)
        make_run(run.folder, replace(run.config, run=log), 1, **more)
    page, rows = report()
    said = section(page, "To bear in mind")
    for words in (
        "Not completed, so in the learning curves alone: `none-Pole-1-2`; without an evaluation of the final policy: "
        "`gossip-Pole-1-2`.",
        "Runs differ in commits, threads, log interval; runs.csv has each. Do not compare speeds over unlike threads.",
        "Lost ranks, so without a speed: `none-Pole-1-1`; spares took places: `none-Pole-1-1`.",
        "A variant has a single run",
    ):  # fmt: skip
        assert words in said
    facts = ("commits", "threads", "log_interval")
    odd_row = next(row for row in rows if row["run"] == "none-Pole-1-1")
    assert [odd_row[fact] for fact in facts] == [f"{'b' * 10} (changed)", "7 a rank", "30 s"]
    assert f"- commit: {'a' * 10} | {'b' * 10} (changed)" in page
    assert [row["completed"] for row in rows] == ["True", "True", "True", "False"]
    assert [row[3] for row in cells_of(page, "Scores")] == ["2", "1"]
    assert [row["steps_per_s"] == "" for row in rows] == [run["lost_ranks"] == "1" for run in rows]


@pytest.mark.slow
def test_jobs_on_other_hosts_of_a_cluster_are_not_called_another_machine(there: Path, no_pictures: None) -> None:
    for run in plan_of().runs:
        make_run(run.folder, run.config, run.cell.ranks, hosts=[f"node{run.config.seed}"])
    page, rows = report()
    assert "Runs differ in hosts; runs.csv has each. Do not compare speeds over unlike hosts." in page
    assert {row["hosts"] for row in rows} == {"node1", "node2"}


def test_a_run_without_a_place_is_told_before_anything_is_trained(there: Path) -> None:
    plan = plan_of()
    foreign = make_run(there / "foreign", Config(), 1)
    with pytest.raises(PalaError, match=r"plays 'ALE/Pong-v5', which is none of the games"):
        compare(Command(Path("preset.toml"), add=(foreign,)))
    assert not plan.runs[0].folder.exists()


def test_a_copy_of_a_record_without_paths_is_the_same_to_the_byte(there: Path) -> None:
    planned = only_run(there)
    run = make_run(planned.folder, planned.config, planned.cell.ranks)
    keep(run, Path("results/tiny/runs"))
    assert (Path("results/tiny/runs") / run.name / "run.json").read_bytes() == (run / "run.json").read_bytes()


def test_a_run_is_copied_under_its_own_name_from_within(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = only_run(there)
    run = make_run(planned.folder, planned.config, planned.cell.ranks)
    monkeypatch.chdir(run)
    keep(Path(), there / "copies")
    assert [copy.name for copy in (there / "copies").iterdir()] == [run.name]


def test_of_sketches_of_unlike_lengths_no_progress_is_told(there: Path) -> None:
    """A run that continued by another version of PALA, say."""
    planned = only_run(there)
    make_run(planned.folder, planned.config, planned.cell.ranks)
    run = load(planned.folder, plan_of())
    assert run.progress_kept is not None
    longer = {"own_movement": [1.0, 0.0, 2.0], "movement": [1.0, 0.0, 2.0]}
    mixed = replace(run, ranks=[[*records, records[-1] | longer] for records in run.ranks])
    assert mixed.progress_kept is None


@pytest.mark.slow
def test_paths_in_arguments_of_what_is_played_are_kept(there: Path, no_pictures: None) -> None:
    """They decide which game a run plays; the machine's other folders are left out."""
    (there / "game.toml").write_text(GAME.replace("CartPole-v1", "Ant-v5(xml_file='/data/go1/scene.xml')"))
    plan = plan_of()
    for run in plan.runs:
        make_run(run.folder, replace(run.config, run=replace(run.config.run, dir="/home/jane/runs")), run.cell.ranks)
    _, rows = report()
    assert {row["game"] for row in rows} == {"Pole"} and {row["variant"] for row in rows} == {"none", "gossip"}
    shutil.rmtree("runs")
    assert all(task_of(run, Path("results/tiny")) is None for run in plan.runs)
    assert not [file for file in Path("results/tiny").glob("runs/*/run.json") if "/home/jane" in file.read_text()]


@pytest.mark.parametrize("fact", ["python_network", "python_environment"])
def test_a_run_of_ones_own_code_is_not_the_planned_one(fact: str, there: Path) -> None:
    plan = plan_of()
    planned = plan.runs[0]
    own = make_run(Path("results/tiny/runs") / "own", planned.config, planned.cell.ranks, **{fact: True})
    task = task_of(planned, Path("results/tiny"))
    assert task is not None and task.what == "train"
    assert load(own, plan).cell != planned.cell


def test_a_game_that_an_environment_of_ones_own_plays_is_not_atari(there: Path) -> None:
    """Its id is that of the game, but a step may be any number of frames, and published scores are of PALA's."""
    (there / "game.toml").write_text(GAME.replace("CartPole-v1", "ALE/Pong-v5"))
    plan = plan_of()
    pala, own = (
        load(make_run(there / name, plan.runs[0].config, 1, python_environment=name == "own"), plan)
        for name in ("pala", "own")
    )
    assert (pala.frame_skip, pala.reference) == (4, (-20.7, 14.6)) and pala.normalised is not None
    assert (own.frame_skip, own.reference, own.normalised) == (1, None, None)
    assert own.cell.variant == f"{pala.cell.variant} (environment from Python)"


ATARI = PRESET.replace('Pole = "game.toml"', 'Pong = "a.toml"\nBreakout = "b.toml"').replace("Pole = 20", "Pong = 1")


@pytest.mark.slow
def test_several_games_are_put_together_by_human_scores(there: Path, no_pictures: None) -> None:
    for name, game in (("a", "Pong"), ("b", "Breakout")):
        (there / f"{name}.toml").write_text(
            f'total_steps = 3000\n[env]\nid = "ALE/{game}-v5"\n[evaluation]\nepisodes = 2'
        )
    plan = plan_of(ATARI)
    human = {"Pong": 14.6, "Breakout": 30.5}
    for run in plan.runs:
        make_run(run.folder, run.config, run.cell.ranks, score=human[run.cell.game])
    page, rows = report()
    assert [row[3] for row in cells_of(page, "All games together")] == ["100 % [100 %, 100 %]"] * 4
    assert {row["game"] for row in rows} == set(human)


@pytest.mark.parametrize(("variants", "seeds"), slow_among([(1, 1), (3, 3)], 3))
@pytest.mark.slow
def test_curves_of_any_number(there: Path, variants: int, seeds: int) -> None:
    text = PRESET.replace("seeds = [1, 2]", f"seeds = {list(range(1, seeds + 1))}").replace("[1, 2]", "[1]")
    text += '[variants.ring]\nexchange.topology = "ring"\n' * (variants > 1)
    plan = plan_of(text)
    for run in plan.runs:
        if variants > 1 or run.cell.variant == "gossip":
            make_run(run.folder, run.config, 1)
    report()
    with open("results/tiny/curves.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["runs"] for row in rows} == {str(seeds)}
    assert len({row["variant"] for row in rows}) == variants
    assert Path("results/tiny/learning_curves.png").stat().st_size > 10_000


# ---- as a user starts it ---------------------------------------------------------------------------------------------

REAL = """
name = "tiny"
seeds = [1]
[games]
Pole = "game.toml"
[train]
total_steps = 3000
[variants.none]
exchange.kind = "none"
[variants.gossip]
total_steps = 8_000
[variants.broken]
env.num_envs = 1
launcher = "mpirun -np {ranks} no-such-program"
"""


@pytest.mark.mpi
@pytest.mark.slow
def test_a_comparison_that_is_interrupted_goes_on(
    any_mpi: Launcher, there: Path, no_pictures: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    Path("preset.toml").write_text(REAL)
    Path("game.toml").write_text(GAME.replace("CartPole-v1", "Paced-v0"))
    (none,) = (planned for planned in Plan(Path("preset.toml")).runs if planned.cell.variant == "none")
    make_run(none.folder, none.config, 2)
    paced = write_paced(there, step_s=0.002)  # a run takes eight seconds: it is not over before it is stopped

    def start(*arguments: str) -> Job:
        python = str(any_mpi.folder / "python")
        return any_mpi.start_command([python, "-m", "pala", "compare", "preset.toml", *arguments], cwd=there, env=paced)

    stopped, run = start("--only", "none", "gossip"), there / "runs" / "tiny" / "gossip-Pole-2-1"
    metrics = metrics_path(run, 1)
    try:
        wait_for(lambda: metrics.exists() and "interval" in metrics.read_text(), 120, what="training")
    except AssertionError as error:
        stopped.process.terminate()  # its output is complete when it has ended
        raise AssertionError(f"{error}\n{stopped.wait().output}") from None
    for pid in processes_in(there):  # as a scheduler does
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    assert stopped.wait().status == 143, stopped.output
    assert "The same command continues later." in stopped.output
    assert (record_of(run)["completed"], record_of(run)["segments"][-1]["status"]) == (False, "stopped")
    assert ranks_in(there) == []
    (there / "free").touch()
    done = start().wait()
    assert done.status == 1, done.output
    assert "1 of 3 runs are complete" in done.output and "none Pole, 2 ranks, seed 1: starts" not in done.output
    assert "gossip Pole, 2 ranks, seed 1: continues" in done.output and done.output.count("FAILED") == 1
    assert len(record_of(run)["segments"]) == 2 and record_of(run)["completed"]
    page = (there / "results" / "tiny" / "compare.md").read_text()
    assert "2 completed runs of 2 begun" in page and "Resumed; pauses do not count as time: `gossip-Pole-2-1`" in page
    monkeypatch.setattr(sys, "argv", ["pala compare", "preset.toml", "--only", "none", "gossip"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        compare_program.main()
    said = capsys.readouterr().out
    assert not ended.value.code, said
    assert "2 of 2 runs are complete" in said and "starts" not in said
    assert str(there) not in "".join(file.read_text() for file in (there / "results").rglob("*.json"))


DEAF = """
trap 'touch told' USR1
trap '' TERM INT
setsid sleep 1000 &
touch begun
while :; do sleep .1; done
"""


@pytest.mark.slow
def test_a_second_interrupt_kills_a_job_that_is_about_to_end(there: Path, any_mpi: Launcher) -> None:
    """The first is to let it write its checkpoint."""
    (there / "deaf.sh").write_text(DEAF)
    (there / "preset.toml").write_text(PRESET.replace("sh -c 'exit 3'", "sh deaf.sh"))
    python = str(any_mpi.folder / "python")
    job = any_mpi.start_command([python, "-m", "pala", "compare", "preset.toml"], cwd=there)
    for awaited in ("begun", "told"):
        wait_for(lambda file=there / awaited: file.exists() or job.process.poll() is not None, what=awaited)
        assert job.process.poll() is None, job.wait().output
        job.process.send_signal(signal.SIGINT)
    assert job.wait(30).status == 128 + signal.SIGINT and "Stopping;" in job.output, job.output
    wait_for(lambda: processes_in(there) == [os.getpid()], 30, "the end of all but this process")


@pytest.mark.slow
def test_a_mistake_is_one_sentence(there: Path, any_mpi: Launcher) -> None:
    done = subprocess.run(
        [any_mpi.folder / "python", "-m", "pala", "compare", "preset.tml"], capture_output=True, text=True, timeout=60,
        env=any_mpi.environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "pala: error: Preset 'preset.tml' does not exist; did you mean 'preset.toml'?\n"
