"""Plots: running means, quartiles, groups of seeds, labels, and the picture."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pala.config import A2CConfig, Config, EnvConfig, ExchangeConfig
from pala.evaluation.references import reference_of, score_table
from pala.report.curves import Curve, curve_of, learning_curve, mean_of, running_mean
from pala.report.panels import Line, draw_evaluations, draw_references
from pala.report.pictures import line_look, new_figure, verbatim
from pala.report.plot import _draw_many, _draw_one, _grouped, main, plot, read
from pala.run import run_folder
from pala.run.metrics import MetricsWriter, Record, metrics_path
from pala.system.errors import PalaError

CONFIG = Config(env=EnvConfig(id="ALE/Pong-v5"))
RING = ExchangeConfig(topology="ring")
NONE = ExchangeConfig(kind="none")


def make_run(
    path: Path, config: Config = CONFIG, ranks: int = 2, episodes: int = 40, end_s: float = 600,
    score: float | None = None,
) -> Path:  # fmt: skip
    """A run whose returns are its seed and whose ranks report in turn; evaluated if it has a score."""
    (path / "metrics").mkdir(parents=True)
    record = run_folder.RunRecord.begin(path, config, {"ranks": ranks})
    if score is not None:
        record.end("completed", global_steps=100)
        facts = {"policy": "final", "global_steps": 100, "mean_return": score, "standard_error": 0.5, "episodes": 3}
        (path / "evaluation.json").write_text(json.dumps(facts))
    for rank in range(ranks):
        records: list[Record] = []
        for i in range(rank, episodes, ranks):
            stamp: Record = {"time_s": end_s * i / episodes, "local_steps": 100 * i, "global_steps": 100 * ranks * i}
            records.append({"type": "episode", "return": float(config.seed), "length_steps": 100} | stamp)
            distance = None if i == rank or config.exchange.kind == "none" else 1.0
            records.append({"type": "interval", "consensus_distance": distance} | stamp)
        MetricsWriter(metrics_path(path, rank), rank).write(records)
    return path


def test_a_name_of_another_locale_can_be_drawn() -> None:
    """In an ASCII locale its letters come as bytes; the picture then failed."""
    assert verbatim(os.fsencode("café").decode("ascii", "surrogateescape")) == "café"
    assert verbatim("\udcff$") == "\ufffd\\$"


def test_running_mean_grows_to_its_window() -> None:
    assert running_mean(np.array([1.0, 2.0, 3.0, 4.0]), 2).tolist() == [1.0, 1.5, 2.5, 3.5]


def test_a_curve_is_in_the_order_of_its_axis_and_thin() -> None:
    curve = curve_of(np.array([3.0, 1.0, 2.0]), np.array([30.0, 10.0, 20.0]), window=2, banded=True)
    assert curve.x.tolist() == [1, 2, 3]
    assert curve.y.tolist() == [10, 15, 25]
    assert curve.low.tolist() == [10, 12.5, 22.5]
    assert curve.high.tolist() == [10, 17.5, 27.5]
    assert len(curve_of(np.arange(10_000.0), np.zeros(10_000), 100).x) <= 500


def test_a_curve_begins_with_enough_episodes() -> None:
    def begin(episodes: int) -> float:
        return float(learning_curve(np.arange(episodes) + 1.0, np.zeros(episodes)).x[0])

    assert begin(2000) == 100
    assert begin(300) == 30, "a tenth of a run of few"
    assert begin(5) == begin(1) == 1


def test_every_game_of_the_table_has_its_references() -> None:
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    ids = {spec.kwargs["game"]: id_ for id_, spec in gymnasium.registry.items() if id_.startswith("ALE/")}
    assert reference_of("ALE/Pong-v5") == (-20.7, 14.6) and reference_of("CartPole-v1") is None
    assert [game for game in score_table("atari_scores.csv") if reference_of(ids[game]) is None] == []


def test_a_reference_that_is_far_away_is_named_and_not_drawn() -> None:
    panel = new_figure(4, 3).subplots()
    panel.plot([0, 1], [-21.0, -20.0])
    draw_references(panel, (-20.7, 14.6))
    assert [line.get_label() for line in panel.lines[1:]] == ["random play: −20.7", "human: 14.6 (above the panel)"]  # noqa: RUF001
    assert panel.get_ylim()[1] < -19
    panel = new_figure(4, 3).subplots()
    panel.plot([0, 1], [-21.0, 0.0])
    draw_references(panel, (-20.7, 14.6))
    assert panel.get_ylim()[1] > 14.6


def test_lines_are_told_apart_in_grey() -> None:
    looks = [line_look(number) for number in range(28)]
    assert len({(look["color"], look["linestyle"]) for look in looks}) == 28
    for first, second in itertools.pairwise(looks):
        assert all(first[key] != second[key] for key in ("color", "linestyle", "marker"))


@pytest.mark.slow
def test_evaluations_stand_beside_the_ends(tmp_path: Path) -> None:
    def marks(*runs: Path) -> dict[str, list[float]]:
        loaded = [read(run) for run in runs]
        figure = _draw_one(loaded[0]) if len(runs) == 1 else _draw_many(_grouped(loaded, "preset"))
        panel = figure.axes[0]
        assert panel.get_ylim()[0] < 3 and panel.get_ylim()[1] > 10.5
        shown = [bars.lines[0] for bars in panel.containers]
        _, labels = panel.get_legend_handles_labels()
        named = next(label for label in labels if label.startswith("evaluation"))
        return {named: [float(y) for line in shown for y in np.asarray(line.get_ydata())]}

    a, b = (make_run(tmp_path / f"s{s}", replace(CONFIG, seed=s), score=float(4 * s + 2)) for s in (1, 2))
    ring = make_run(tmp_path / "ring", replace(CONFIG, exchange=RING, seed=2), score=10.0)
    assert marks(b) == {"evaluation, ± standard error": [10]}
    assert marks(a, b) == {"evaluation, mean and range of runs": [8]}
    assert marks(a, b, ring) == {"evaluation, mean and range of runs; of one ± standard error": [8, 10]}


@pytest.mark.slow
def test_a_mean_that_ends_before_its_runs_is_explained(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / str(s), replace(CONFIG, seed=s), end_s=600 * s) for s in (1, 2)]
    steps, time = _draw_many(_grouped([read(path) for path in paths], "preset")).axes
    assert "ends with the shortest of its runs" in time.get_xlabel() and "\n" not in steps.get_xlabel()


@pytest.mark.parametrize("names", [["a", "b"], ["name " * 12], [f"{'name ' * 12} {n}" for n in range(12)]])
@pytest.mark.slow
def test_a_legend_leaves_the_panels_room(names: list[str], tmp_path: Path) -> None:
    """A legend of many rows once took the room of the label of the y axis, which was cut."""
    runs = [read(make_run(tmp_path / name)) for name in names]
    figure = _draw_many({run.path.name: [run] for run in runs})
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width or len(names) == 1
    for box in (figure.axes[0].yaxis.label.get_window_extent(), legend.get_window_extent()):
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1


def test_the_mean_of_curves_covers_what_they_share() -> None:
    curves = [Curve(x, y, y, y) for x, y in ((np.array([0.0, 10.0]), np.zeros(2)), (np.array([5.0, 20.0]), np.ones(2)))]
    mean = mean_of(curves)
    assert (mean.x[0], mean.x[-1]) == (5, 10)
    assert (set(mean.y), set(mean.low), set(mean.high)) == ({0.5}, {0.0}, {1.0})
    assert len(mean_of([curves[0], Curve(np.array([11.0, 12.0]), np.ones(2), np.ones(2), np.ones(2))]).x) == 0


def test_all_ranks_are_read(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "a", ranks=2, episodes=40))
    assert len(run.returns) == 40
    assert len(run.distances) == 38
    assert run.is_atari


def test_one_run_makes_a_picture(tmp_path: Path) -> None:
    path = plot([make_run(tmp_path / "a")])
    assert path == tmp_path / "a" / "learning_curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


def test_a_line_without_length_has_a_marker(tmp_path: Path) -> None:
    """That of one episode, and of two that end together with equal returns."""
    made = [read(make_run(tmp_path / f"{n}", replace(CONFIG, seed=n), episodes=n)) for n in (1, 2)]
    one, two = (replace(run, steps=0 * run.steps, time_s=0 * run.time_s, reference=None) for run in made)
    for figure in (_draw_one(one), _draw_many({"one": [one], "two": [two]}), _draw_many({"both": [one, two]})):
        lines = [line for line in figure.axes[0].lines if len(np.asarray(line.get_xdata()))]
        assert lines and all(line.get_marker() not in ("", "None") for line in lines)
        assert all(line.get_markevery() is None for line in lines)


def test_the_panel_of_distances_is_for_gossip(tmp_path: Path) -> None:
    gossip = _draw_one(read(make_run(tmp_path / "a")))
    alone = _draw_one(read(make_run(tmp_path / "b", replace(CONFIG, exchange=NONE))))
    assert [len(figure.axes) for figure in (gossip, alone)] == [3, 2]
    assert gossip.axes[0].get_xlabel() == "environment steps of all ranks (1 step = 4 frames)"
    assert gossip.axes[1].get_xlabel() == "training time (minutes)"
    assert np.asarray(gossip.axes[1].lines[0].get_xdata())[-1] == pytest.approx(9.75)


@pytest.mark.slow
def test_seeds_are_merged_and_settings_told_apart(tmp_path: Path) -> None:
    seeds = [make_run(tmp_path / f"s{s}", replace(CONFIG, seed=s)) for s in (1, 2, 6)]
    ring = make_run(tmp_path / "ring", replace(CONFIG, exchange=RING))
    groups = _grouped([read(path) for path in (*seeds, ring)], "preset")
    assert {label: len(runs) for label, runs in groups.items()} == {
        "topology random (mean and range of 3 seeds)": 3, "topology ring": 1,
    }  # fmt: skip
    figure = _draw_many(groups)
    mean = next(line for line in figure.axes[0].lines if str(line.get_label()).startswith("topology random"))
    assert set(np.asarray(mean.get_ydata())) == {3.0}
    path = plot([*seeds, ring], tmp_path / "all.png")
    assert path.stat().st_size > 20_000


def test_labels(tmp_path: Path) -> None:
    def labels(*configs: Config, group_by: str = "preset") -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        runs = [read(make_run(folder / f"run-{i}", config)) for i, config in enumerate(configs)]
        return list(_grouped(runs, "preset" if group_by == "preset" else "none"))

    faster = replace(CONFIG, a2c=A2CConfig(learning_rate=1e-3))
    assert labels(CONFIG, faster) == ["learning rate auto", "learning rate 0.001"]
    assert labels(CONFIG, replace(CONFIG, exchange=NONE)) == ["exchange gossip", "exchange none"]
    assert labels(CONFIG, replace(CONFIG, seed=2), group_by="none") == ["seed 1", "seed 2"]
    assert labels(CONFIG, CONFIG, group_by="none") == ["run-0", "run-1"]
    assert labels(CONFIG, CONFIG) == ["run-0 (mean and range of 2 runs)"]
    assert labels(CONFIG, Config(env=EnvConfig(id="CartPole-v1"))) == ["Pong-v5", "CartPole-v1"]
    everything = Config(total_steps=1, env=EnvConfig(num_envs=1), a2c=A2CConfig(rollout_steps=1, gamma=0.5))
    assert labels(CONFIG, everything) == ["run-0", "run-1"]


def test_the_number_of_ranks_tells_runs_apart(tmp_path: Path) -> None:
    runs = [read(make_run(tmp_path / str(ranks), ranks=ranks)) for ranks in (1, 4)]
    assert list(_grouped(runs, "preset")) == ["1 rank", "4 ranks"]


def test_settings_that_are_gone_tell_runs_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(seed), replace(CONFIG, seed=seed)) for seed in (1, 2)]
    record = json.loads((runs[1] / "run.json").read_text())
    record["config"]["exchange"]["exchanges_per_update"] = 4
    (runs[1] / "run.json").write_text(json.dumps(record))
    assert len(_grouped([read(run) for run in runs], "preset")) == 2


def test_how_long_a_job_may_wait_does_not_tell_runs_apart(tmp_path: Path) -> None:
    patient = replace(CONFIG, seed=2, run=replace(CONFIG.run, start_timeout_s=600))
    runs = [read(make_run(tmp_path / str(config.seed), config)) for config in (CONFIG, patient)]
    assert list(_grouped(runs, "preset")) == ["1 (mean and range of 2 seeds)"]


@pytest.mark.slow
def test_names_are_not_read_as_markup(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("_hidden", "cost$x_$y")]
    figure = _draw_many(_grouped([read(run) for run in runs], "none"))
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == [" _hidden", r"cost\$x_\$y"]
    for name, drawn in (("several.png", runs), ("one.png", runs[1:])):
        assert plot(drawn, tmp_path / name, group_by="none").stat().st_size > 20_000


def test_a_network_from_python_tells_runs_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / name) for name in ("ours", "own")]
    record = run_folder.RunRecord.take_over(runs[1])
    record.note(python_network=True)
    assert len(_grouped([read(run) for run in runs], "preset")) == 2
    run_folder.RunRecord.take_over(runs[0]).note(python_network=True, parameters=7)
    assert len(_grouped([read(run) for run in runs], "preset")) == 2 and not capsys.readouterr().err
    record.note(parameters=7)
    assert len(_grouped([read(run) for run in runs], "preset")) == 1
    assert "2 runs whose network came from Python are drawn as one: code is not compared" in capsys.readouterr().err


def test_equal_scores_are_marked_though_their_mean_is_rounded() -> None:
    """The mean of three times 0.7 is not 0.7."""
    runs: list[Any] = [SimpleNamespace(evaluation={"mean_return": score}, end=lambda *_: 1.0) for score in (0.7, 0.1)]
    panel = new_figure(4, 3).subplots()
    draw_evaluations(panel, "steps", 1.0, [Line("", line_look(0), [run] * 3) for run in runs])
    assert len(panel.containers) == 3, "one of them is the legend's"


def test_errors_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, empty = make_run(tmp_path / "a"), make_run(tmp_path / "b", episodes=0)
    with pytest.raises(PalaError, match="has no whole episode yet"):
        plot([empty, empty], tmp_path / "x.png")
    assert plot([run, empty], tmp_path / "x.png").exists()
    assert f"Run '{empty}' has no whole episode yet" in (said := capsys.readouterr().err) and "left out" in said
    with pytest.raises(PalaError, match="at least one run"):
        plot([])
    with pytest.raises(PalaError, match="cannot be written"):
        plot([run], tmp_path / "x.nonsense")
    monkeypatch.setattr("sys.argv", ["plot", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "is not a run's folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pipe_or_a_device_does_not_become_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root `--output /dev/null` would."""
    run, pipe, link = make_run(tmp_path / "a"), tmp_path / "null", tmp_path / "stdout"
    os.mkfifo(pipe)
    with pytest.raises(PalaError, match=r"'.*null' is a pipe or a device"):
        plot([run], pipe)
    assert pipe.is_fifo()
    link.symlink_to(tmp_path / "file")
    real = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path, **how: "/dev" if path == tmp_path else real(path, **how))
    with pytest.raises(PalaError, match=r"'.*stdout' is a pipe or a device"):
        plot([run], link)
    assert link.is_symlink()


@pytest.mark.slow
def test_a_run_that_is_named_twice_is_drawn_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    assert plot([run, tmp_path / "a/../a", run]) == tmp_path / "a" / "learning_curve.png"


@pytest.mark.slow
def test_the_program_names_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(make_run(tmp_path / name)) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["plot", *runs, "--group-by", "none"])
    main()
    assert capsys.readouterr().out.strip() == "learning_curves.png"
    assert (tmp_path / "learning_curves.png").stat().st_size > 20_000
