"""Metrics files, and what is made of them: the view of a run, the console, TensorBoard."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import pty
import re
import resource
import shutil
import struct
import subprocess
import sys
import termios
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pala.config import Config, RunConfig, from_table, load_preset
from pala.exchange.budget import ExchangeState
from pala.job.header import header, note_on_unused
from pala.run import console, tensorboard
from pala.run.console import Figures, Lines, Reporter, make_console
from pala.run.loop import Stopwatch
from pala.run.metrics import SECTIONS, MetricsWriter, Record, Tail, metrics_path, read_run
from pala.run.panel import Panel
from pala.run.tensorboard import TensorBoard
from pala.run.view import RunView
from pala.system.files import json_text
from pala.system.output import log


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics").mkdir()
    return tmp_path


def write(run: Path, *records: Record, rank: int = 0) -> None:
    MetricsWriter(metrics_path(run, rank), rank).write(list(records))


def start(steps: int, time_s: float | None = None, segment="segment-000") -> Record:
    time_s = float(steps) if time_s is None else time_s
    return {"type": "start", "time_s": time_s, "local_steps": steps, "global_steps": steps, "segment": segment}


def episode(steps: int, time_s: float | None = None, return_: float = 0.0) -> Record:
    return start(steps, time_s) | {"type": "episode", "return": return_}


def interval(**values: object) -> Record:
    return {"type": "interval", "time_s": 0.0, "local_steps": 0, "global_steps": 0} | values


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_tail_reads_each_record_once(run):
    tail = Tail(metrics_path(run, 0))
    assert list(tail.read()) == []
    write(run, start(0), episode(1, return_=-0.1))
    assert list(tail.read()) == [start(0), episode(1, return_=-0.1)]
    write(run, episode(2))
    assert list(tail.read()) == [episode(2)]
    assert list(tail.read()) == []


def test_a_line_waits_for_its_end(run):
    """Whatever the place at which a reader meets the file, it gets whole records and all of them."""
    data = "".join(json.dumps(episode(n)) + "\n" for n in range(3)).encode()
    for cut in range(len(data) + 1):
        path = metrics_path(run, cut)
        path.write_bytes(data[:cut])
        tail = Tail(path)
        first = list(tail.read())
        assert len(first) == data[:cut].count(b"\n")
        path.write_bytes(data)
        assert [*first, *tail.read()] == [episode(n) for n in range(3)]


def test_a_cut_line_costs_no_other_record(run):
    """A rank was killed, or the disk was full, in the middle of a line; the run continues behind it."""
    write(run, episode(10))
    with metrics_path(run, 0).open("a") as file:
        file.write('{"type":"episode","lo')
    write(run, start(10), episode(20))
    assert read_run(run) == [[episode(10), start(10), episode(20)]]


def test_a_resumed_run_drops_what_was_lost(run):
    write(run, start(0), episode(10), episode(20), episode(30))
    write(run, start(20), episode(25), episode(40))  # crashed after 30, the checkpoint was made at 20
    write(run, start(15), episode(16))  # and again, from an older one
    assert read_run(run) == [[start(0), episode(10), start(15), episode(16)]]


def test_a_run_resumed_with_other_ranks_drops_nothing_before_its_start(run):
    """Then each rank counts its own steps from 0 again, but time continues."""
    records = [start(0), episode(10), start(0, time_s=12.0), episode(5, time_s=17.0)]
    write(run, *records)
    assert read_run(run) == [records]


def test_a_run_is_read_rank_by_rank(run):
    for rank in (0, 1, 11, 2):
        write(run, start(rank), rank=rank)
    assert read_run(run) == [[start(0)], [start(1)], [start(2)], [start(11)]]


def test_of_a_file_that_is_there_packed_and_unpacked_the_plain_one_is_read(run):
    """As `gzip -k` leaves it, or a copy of a run that was unpacked and continues."""
    write(run, start(0), episode(10))
    write(run, start(1), rank=1)
    plain = metrics_path(run, 0)
    plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    shutil.copy(plain, plain.with_name(f"{plain.name}~"))
    write(run, episode(20))
    assert read_run(run) == [[start(0), episode(10), episode(20)], [start(1)]]


def test_of_ranks_that_are_gone_only_what_the_newest_segment_began_from(run):
    """Three ranks, resumed with two from a checkpoint at 12 s: what rank 2 did later is lost."""
    for rank in range(3):
        write(run, start(0), episode(10), episode(20), rank=rank)
    for rank in range(2):
        write(run, start(0, 12.0, "segment-001"), rank=rank)
    kept = [[r["time_s"] for r in records] for records in read_run(run)]
    assert kept == [[0.0, 10.0, 12.0], [0.0, 10.0, 12.0], [0.0, 10.0]]


@pytest.mark.parametrize("joins", [False, True])
def test_what_was_lost_with_fewer_ranks_stays_lost_when_there_are_more(run, joins):
    """Three ranks, then two from a checkpoint at 12 s, whom the third may join as a spare, then three from 30 s."""
    for rank in range(3):
        write(run, start(0), episode(10), episode(20), rank=rank)
    for rank in range(2):
        write(run, start(0, 12.0, "segment-001"), rank=rank)
    joined = [start(0, 25.0, "segment-001") | {"rank": 2, "ranks": 2}, episode(28)] if joins else []
    write(run, *joined, rank=2)
    for rank in range(3):
        write(run, start(0, 30.0, "segment-002") | {"rank": rank, "ranks": 3}, episode(40), rank=rank)
    kept = [[r["time_s"] for r in records] for records in read_run(run)]
    assert kept == [[0, 10, 12, 30, 40], [0, 10, 12, 30, 40], [0, 10, *([25, 28] * joins), 30, 40]]


@contextlib.contextmanager
def room_for(path, more_bytes):
    """No file may grow beyond what this one has and so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_segments_are_in_the_order_of_their_numbers(run):
    """Ranks 0 and 1 began segment 1000 from a checkpoint at 12 s, without rank 2."""
    for rank in range(3):
        write(run, start(0, 0.0, "segment-999"), episode(10), episode(20), rank=rank)
    for rank in range(2):
        write(run, start(0, 12.0, "segment-1000"), rank=rank)
    assert [[r["time_s"] for r in records] for records in read_run(run)] == [[0, 10, 12], [0, 10, 12], [0, 10]]


def test_a_full_disk_is_said_once_and_training_goes_on(run, capsys):
    path = metrics_path(run, 3)
    writer = MetricsWriter(path, 3)
    writer.write([start(0)])
    whole = path.stat().st_size
    with room_for(path, 10):
        for _ in range(3):
            writer.write([episode(1)])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "[rank 3]" in said and "File too large" in said and str(path) in said
    assert path.stat().st_size == whole + 10, "a part of a record was written"
    writer.write([start(2)])
    assert read_run(run) == [[start(0), start(2)]]
    with room_for(path, 10):
        writer.write([start(3)])
    assert "[rank 3]" in capsys.readouterr().err, "it is said again"


# ---- the view --------------------------------------------------------------------------------------------------------


def test_the_mean_is_over_the_last_100_episodes_of_all_ranks(run):
    """Two ranks end their episodes in turn; the view reads them in pieces."""
    view, returns = RunView(run, ranks=2), [float(n * n % 97) for n in range(260)]
    assert view.mean_return is None
    for begin, end in ((0, 40), (40, 45), (45, 260)):
        for rank in range(2):
            mine = [episode(n, float(n), returns[n]) for n in range(begin, end) if n % 2 == rank]
            write(run, *mine, rank=rank)
        view.refresh()
        recent = returns[max(0, end - 100) : end]
        assert view.mean_return == pytest.approx(sum(recent) / len(recent))
        assert view.num_episodes == end


@pytest.mark.slow
def test_a_long_history_is_read_in_little_memory(run):
    """As a resume does, and who keeps the record after the first rank's death."""
    lines = [json_text(episode(n, n / 100, float(n % 7))) + "\n" for n in range(50_000)]
    metrics_path(run, 0).write_text("".join(lines) + json_text(start(0) | {"time_s": 490.0}) + "\n")
    view = RunView(run, ranks=1)
    tracemalloc.start()
    view.refresh()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert view.num_episodes == 49_001 and view.mean_return == pytest.approx(3, abs=0.1)
    assert peak_bytes < 50_000 * 250, "bytes an episode"


def test_the_view_leaves_out_what_was_lost_with_a_crash(run):
    """The other rank had saved later."""
    for rank, saved_s in enumerate((10.0, 20.0)):
        mine = [episode(n, float(n), 7.0) for n in range(30)]
        write(run, *mine, interval(entropy=9.0), start(0) | {"time_s": saved_s}, episode(40, 40.0, 1.0), rank=rank)
    view = RunView(run, ranks=2)
    view.refresh()
    assert view.num_episodes == 11 + 1 + 21 + 1 and view.mean("entropy") is None
    assert view.mean_return == pytest.approx((32 * 7 + 2) / 34)


def test_the_view_keeps_each_ranks_last_interval(run):
    view = RunView(run, ranks=3)
    assert view.mean("entropy") is None
    assert view.total("mixes") == 0
    write(run, interval(entropy=9.0, mixes=9), interval(entropy=1.0, mixes=2), rank=0)
    write(run, interval(entropy=2.0, mixes=None), rank=1)
    write(run, start(0), rank=2)
    view.refresh()
    assert view.mean("entropy") == 1.5
    assert view.total("mixes") == 2


def test_the_stopwatchs_fractions_sum_to_one():
    watch = Stopwatch()
    for name in ("environment", "update", "environment", "exchange"):
        with watch.section(name):
            time.sleep(0.005)
    time.sleep(0.005)
    watch.move(0.004, "exchange", "wait")
    seconds, fractions = watch.split()
    assert tuple(fractions) == SECTIONS
    assert sum(fractions.values()) == pytest.approx(1)
    assert seconds >= 0.025
    assert fractions["environment"] * seconds >= 0.01
    assert fractions["wait"] * seconds == pytest.approx(0.004)
    assert fractions["other"] * seconds >= 0.005
    assert fractions["inference"] == 0


def test_a_split_begins_again():
    watch = Stopwatch()
    with watch.section("update"):
        time.sleep(0.002)
    watch.split()
    time.sleep(0.001)
    assert watch.split()[1]["other"] == 1


def test_a_section_counts_when_it_fails():
    watch = Stopwatch()
    with pytest.raises(ZeroDivisionError), watch.section("update"):
        raise ZeroDivisionError
    assert watch.split()[1]["update"] > 0


# ---- the console -----------------------------------------------------------------------------------------------------

EXAMPLE = interval(
    local_steps_per_s=500.0, mixes=6, staleness_updates=4, consensus_distance=0.25, consensus_distance_relative=0.01,
    loss_policy=-0.5, loss_value=0.75, entropy=1.5, gradient_norm=2.0, learning_rate=7e-4,
    **{f"time_{name}": share for name, share in zip(SECTIONS, (0.4, 0.3, 0.2, 0.05, 0.03, 0.02), strict=True)},
)  # fmt: skip


def figures(run: Path) -> dict[str, str]:
    write(run, episode(1, 1.0, -20.0) | {"length_steps": 300}, EXAMPLE, rank=0)
    write(run, episode(1, 2.0, -15.0), EXAMPLE | {"staleness_updates": 9}, rank=1)
    console_figures = Figures(RunView(run, ranks=2), budget_steps=4_000_000)
    console_figures.refresh(global_steps=400_000)
    return console_figures.texts()


def test_figures_say_how_the_run_goes(run):
    assert figures(run) == {
        "steps": "400,000 of 4,000,000 (10.0%)",
        "eta": "60 min",
        "steps/s": "1,000",
        "return": "-17.50 (mean of 2 episodes)",
        "learning": "entropy 1.500, value loss 0.7500",
        "consensus": "0.250 (1.00%)",
        "staleness": "9 updates at most, 12 mixes",
        "time": "environment 40% inference 30% update 20% exchange 5% wait 3% other 2%",
    }


def test_updates_that_were_skipped_and_failures_of_environments_are_shown(run):
    write(run, EXAMPLE | {"updates_skipped": 2, "env_failures": 1}, rank=0)
    write(run, EXAMPLE | {"updates_skipped": 1, "env_failures": 4}, rank=1)
    console_figures = Figures(RunView(run, ranks=2), budget_steps=4_000_000)
    console_figures.refresh(global_steps=400_000)
    shown = console_figures.texts()
    assert shown["learning"] == "entropy 1.500, value loss 0.7500, 3 updates skipped"
    assert shown["return"] == "- (mean of 0 episodes), 5 failures of environments"


def test_figures_of_nothing_are_dashes(run):
    console_figures = Figures(RunView(run, ranks=2), budget_steps=100)
    console_figures.refresh(global_steps=120)
    shown = console_figures.texts()
    assert shown["steps"] == "100 of 100 (100.0%)"
    assert (shown["eta"], shown["consensus"]) == ("-", "- (-)")


def test_the_time_that_is_left_is_told_of_gorila_when_it_has_learned_for_a_whole_interval(run):
    shortly, told = Figures(RunView(run, ranks=2), budget_steps=400_000), []
    gorila = interval(local_steps_per_s=500.0, epsilon=1.0)
    for more in ({}, {"loss": 0.5}, {"loss": 0.25}):
        write(run, gorila | more, rank=0)
        write(run, gorila | more, rank=1)
        shortly.refresh(200_000)
        told.append(shortly.texts()["eta"])
    assert told == ["-", "-", "3 min"]


def test_the_first_lines_say_what_is_trained(tmp_path):
    def header_of(preset, steps_made, cores=6, hosts=("node1", "node1", "node2"), group=1, less=0.0):
        job = SimpleNamespace(hosts=list(hosts), num_trainers=len(hosts), threads=2, cores=cores)
        config = load_preset(preset)
        config = replace(config, exchange=replace(config.exchange, group=group))
        flat = SimpleNamespace(num_learned=866_439)
        agent = SimpleNamespace(
            config=config,
            start=ExchangeState([steps_made]),
            device="cpu",
            flat=flat,
            network=SimpleNamespace(background=less),
        )
        return header(job, agent, SimpleNamespace(folder=Path("runs/r")))

    text = header_of("pong", steps_made=1000)
    for words in ("runs/r", "3 ranks on 2 hosts (node1, node2)", "gossip", "866,439 parameters, auto, on cpu"):
        assert words in text
    assert "learning rate 0.00105 = 1.5 x 0.0007 for 3 models, momentum 0.5" in text
    assert "--exchange.group" not in text
    words = "for 9 models, momentum 0.5\n      9 models may learn less from a step than"
    assert f"{words} 2: try `--exchange.group 5` " in header_of("pong", 0, cores=9, hosts=["a"] * 9)
    assert f"{words} 3: try `--exchange.group host` " in header_of("pong", 0, cores=9, hosts=[*"aabbbbccc"])
    assert "--exchange.group" not in header_of("pong", 0, hosts=[*"abcdefghi"])
    assert "learning rate 0.0007 = 1 x 0.0007 for 1 model, momentum 0.5" in header_of("allreduce/pong", 0)
    grouped = header_of("pong", 0, hosts=["a"] * 6, group=2)
    assert "3 groups, each with one model" in grouped and "learning rate 0.00105 = 1.5 x 0.0007 for 3 models" in grouped
    assert "learning rate 0.0014\n" in header_of("gala/pong", 0)
    assert "2,500,000 steps over all ranks, 1,000 of them made before" in text
    done = header_of("pong", steps_made=2_500_160)
    assert "and 2,500,160 were made before: none is left to train (a larger `--total-steps` continues)" in done
    assert "learning begins after 50,000" in header_of("gorila/pong", 0)
    assert "learning begins" not in header_of("gorila/pong", 60_000)
    assert "share" not in header_of("pong", 0, cores=3)
    assert "\n      3 ranks share 2 cores\n" in header_of("pong", 0, cores=2)
    assert "background" not in text and "images less their background, 0.34\n" in header_of("pong", 0, less=87 / 255)


def test_settings_that_nothing_reads_are_told():
    before = load_preset("pong")
    assert note_on_unused(before, before) == ""
    changed = replace(before, exchange=replace(before.exchange, kind="allreduce", max_staleness=0))
    note = "'exchange.max_staleness': set, but nothing reads it in this run (A2C, exchange allreduce, ALE/Pong-v5)."
    assert note_on_unused(changed, before) == note, "the preset's own settings of gossip were not set in vain"
    assert note_on_unused(replace(changed, exchange=replace(changed.exchange, kind="gossip")), before) == ""
    other = replace(before, env=replace(before.env, id="CartPole-v1", frame_skip=2, num_envs=3))
    assert note_on_unused(other, before).startswith("'env.frame_skip': set, but nothing reads it")
    vector = replace(before, env=replace(before.env, vectorization="async"))
    assert note_on_unused(vector, before).startswith("'env.vectorization': set, but nothing reads it"), (
        "ale-py has its own"
    )
    wide = replace(before, network=replace(before.network, mlp_hidden=(9,)))
    assert note_on_unused(wide, before).startswith("'network.mlp_hidden': set, but nothing reads it"), "an Atari game"
    dqn = replace(before, algorithm="gorila", a2c=replace(before.a2c, gamma=0.9, entropy_coefficient=0.1))
    assert note_on_unused(dqn, before).startswith("'a2c.gamma', 'a2c.entropy_coefficient': set, but nothing reads them")


@pytest.mark.parametrize(
    ("key", "value", "without", "read_with"),
    [
        ("evaluation.epsilon", 0.1, {}, {"algorithm": "gorila"}),
        ("exchange.top_k_fraction", 0.1, {}, {"exchange.compression": "top_k"}),
        (
            "gorila.rmsprop_alpha", 0.9, {"algorithm": "gorila"},
            {"gorila.optimiser": "rmsprop", "algorithm": "gorila"},
        ),
        (
            "gorila.adagrad_learning_rate", 0.1, {"gorila.optimiser": "rmsprop", "algorithm": "gorila"},
            {"algorithm": "gorila"},
        ),
    ],
)  # fmt: skip
def test_settings_that_need_another_are_told_without_it(key, value, without, read_with):
    def config(settings):
        return from_table(nested(settings), "here")

    assert note_on_unused(config(without | {key: value}), config(without)).startswith(f"'{key}': set, but nothing")
    assert note_on_unused(config(read_with | {key: value}), config(read_with)) == ""


def nested(settings):
    """Dotted keys as the tables of a preset."""
    table = {}
    for key, value in settings.items():
        *section, name = key.split(".")
        (table.setdefault(section[0], {}) if section else table)[name] = value
    return table


def test_what_is_not_finite_is_null(run, capsys):
    """JSON has no NaN. An episode without a return is left out without a word."""
    write(run, episode(1, 1.0, float("nan")), interval(loss_policy=float("inf"), own_movement=None), rank=0)
    for line in metrics_path(run, 0).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
    (record,) = [record for record in read_run(run)[0] if record["type"] != "start"]
    assert record["loss_policy"] is None and not capsys.readouterr().err
    assert json_text({"a": (1.0, float("-inf")), "b": [{"c": float("nan")}]}) == '{"a":[1.0,null],"b":[{"c":null}]}'


def test_lines_are_plain(run, capsys):
    lines = Lines()
    for _ in range(2):
        lines.show(figures(run))
    lines.close()
    first, second, end = capsys.readouterr().out.split("\n")
    assert first.startswith("steps 400,000 of 4,000,000 (10.0%) | eta 60 min |")
    assert first.isprintable()
    assert second.isprintable()
    assert end == ""


def test_the_panel_stays_in_place(run, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    panel, shown = Panel("PALA  runs/[lr=1e-3]  2 ranks", (90, 30)), figures(run)
    for _ in range(2):
        panel.show(shown)
    panel.close()
    out = capsys.readouterr().out
    assert "\x1b[1A" in out  # up, over the panel drawn before
    assert "\x1b[2K" not in out[out.rindex("╰") :]  # the last one is left on the screen
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out).replace("\r", "\n")
    assert max(len(line) for line in text.split("\n")) <= 90
    assert "PALA  runs/[lr=1e-3]  2 ranks" in text
    for label, value in shown.items():
        assert re.search(rf"{label} +{re.escape(value.split(',')[0])}", text)


def shown_by_a_terminal(text: str) -> list[str]:
    """The lines of its screen, as far as rich's panels go: up, erase, and back to the first column."""
    screen, line = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", text):
        if part == "\n":
            line += 1
            screen += [""] * (line == len(screen))
        elif part == "\x1b[1A":
            line -= 1
        elif part == "\x1b[2K":
            screen[line] = ""
        elif part != "\r" and part[0] != "\x1b":
            screen[line] += part
    return [each.rstrip() for each in screen if each.strip()]


def test_what_a_rank_says_stays_above_its_panel(run, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("pala.run.panel.terminal_size", lambda stream: (90, 30))
    panel, shown = Panel("PALA", (90, 30)), figures(run)
    panel.show(shown)
    log("[rank 0] rank 3 on [vm] has died; 2 continue.")
    panel.show(shown)
    panel.close()
    log("later")
    out, err = capsys.readouterr()
    first, *others = shown_by_a_terminal(out)
    assert first == "[rank 0] rank 3 on [vm] has died; 2 continue." and err == "later\n"
    assert others[0].startswith("╭") and others[-1].startswith("╰") and sum("steps/s" in each for each in others) == 1


def test_the_dead_have_no_part_in_the_staleness(run):
    figures(run)
    console_figures = Figures(RunView(run, ranks=2), budget_steps=4_000_000)
    console_figures._view.living = [0]
    console_figures.refresh(global_steps=400_000)
    assert console_figures.texts()["staleness"] == "4 updates at most, 6 mixes"


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(console, "terminal_size", lambda: (80, 24))
    assert type(make_console("auto", "title")) is Lines


@pytest.mark.parametrize(
    ("kind", "size", "shown"),
    [
        ("auto", None, Lines),
        ("auto", (80, 24), Panel),
        ("lines", (80, 24), Lines),
        ("panel", None, Panel),
        ("none", (80, 24), type(None)),
    ],
)
def test_the_console_is_a_panel_where_there_is_a_terminal(kind, size, shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "terminal_size", lambda: size)
    made = make_console(kind, "title")
    assert type(made) is shown
    if made is not None:
        made.close()


def test_tensorboard_reads_what_was_written(run):
    figures(run)
    view, board = RunView(run, ranks=2), TensorBoard(run / "tensorboard")
    board.add(view, 1000)
    view.refresh()
    board.add(view, 2000)
    board.describe({"a2c.gamma": 0.99, "env.id": "ALE/Pong-v5", "network.mlp_hidden": (64, 64), "ranks": 2})
    board.close()
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    (hparams,) = [data for tag, data in events.PluginTagToContent("hparams").items() if "session_start" in tag]
    assert b"ALE/Pong-v5" in hparams and b"(64, 64)" in hparams and b"a2c.gamma" in hparams
    values = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert values.pop("speed/global_steps_per_s") == [(1000, 0), (2000, 1000)]
    assert {step for [(step, _)] in values.values()} == {2000}  # nothing was there to be written at 1000
    assert {tag: pytest.approx(value) for tag, [(_, value)] in values.items()} == {
        "return/mean_of_last_100_episodes": -17.5, "length/mean_of_last_100_episodes": 300.0,
        "loss/policy": -0.5, "loss/value": 0.75, "loss/entropy": 1.5,
        "update/gradient_norm": 2.0, "update/learning_rate": 7e-4,
        "exchange/consensus_distance": 0.25, "exchange/consensus_distance_relative": 0.01,
        "exchange/staleness_updates": 6.5,
        "time/environment": 0.4, "time/inference": 0.3, "time/update": 0.2,
        "time/exchange": 0.05, "time/wait": 0.03, "time/other": 0.02,
    }  # fmt: skip


def reporter_of(run: Path, shown: str, tensorboard: bool = False) -> Reporter:
    shows: Any = shown
    return Reporter(run, 2, Config(total_steps=4_000_000, run=RunConfig(console=shows, tensorboard=tensorboard)))


def test_the_reporter_feeds_both(run, capsys):
    figures(run)
    reporter = reporter_of(run, "lines", tensorboard=True)
    reporter.report(global_steps=400_000)
    reporter.close()
    assert capsys.readouterr().out.startswith("steps 400,000 of 4,000,000")
    assert EventAccumulator(str(run / "tensorboard")).Reload().Scalars("loss/policy")[0].step == 400_000


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), SystemExit(1)])
def test_without_its_terminal_training_goes_on(run, monkeypatch, error):
    """One that is gone gives EIO; rich ends the program when a pipe's reader is gone."""

    def broken(*_):
        raise error

    monkeypatch.setattr(Panel, "show", broken)
    monkeypatch.setattr(Panel, "close", broken)
    for close_at_once in (True, False):
        reporter = reporter_of(run, "panel")
        if not close_at_once:
            assert reporter.report(400_000)["steps"].startswith("400,000")
            assert reporter.report(500_000)
        reporter.close()
    monkeypatch.setattr(Panel, "__init__", broken)
    reporter_of(run, "panel").report(400_000)


def test_without_tensorboards_files_training_goes_on(run, monkeypatch, capsys):
    """Also if they cannot be made, as by a rank that takes the lead while the disk is full."""

    def full(*_):
        raise OSError(28, "No space left on device")

    for broken in ("__init__", "add"):
        with monkeypatch.context() as patch:
            patch.setattr(TensorBoard, broken, full)
            reporter = reporter_of(run, "none", tensorboard=True)
            for _ in range(2):
                assert reporter.report(400_000)
            reporter.close()
        assert capsys.readouterr().err.count("cannot be written any more: No space left on device. Training") == 1


@pytest.mark.parametrize("when", ["at once", "later"])
def test_tensorboards_thread_prints_no_traceback(run, when, monkeypatch, capsys):
    """The fault reaches who makes the files, or adds the next value."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_):
        raise OSError(28, "No space left on device")

    figures(run)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest's own prints nothing
    tensorboard._hide_full_disk.cache_clear()
    if when == "at once":
        monkeypatch.setattr(RecordWriter, "write", full)
    reporter = reporter_of(run, "none", tensorboard=True)
    monkeypatch.setattr(RecordWriter, "write", full)
    reporter.report(400_000)
    reporter.close()
    said = capsys.readouterr().err
    assert said.count("cannot be written any more: No space left on device. Training") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(("begin", "kept"), [(2000, [1000, 2000]), (0, []), (None, [1000, 2000, 3000])])
def test_tensorboard_forgets_what_was_lost(run, begin, kept):
    """Of a run that continues from so many steps; another rank that leads has lost nothing."""
    figures(run)
    view = RunView(run, ranks=2)
    view.refresh()
    for begins_at, steps in ((0, (1000, 2000, 3000)), (begin, (2500, 3500))):
        board = TensorBoard(run / "tensorboard", begins_at)
        for step in steps:
            board.add(view, step)
        board.close()
        # Readers go by the files' names, which within one second end in a counter: "10" comes before "9".
        time.sleep(1.0)
    events = EventAccumulator(str(run / "tensorboard")).Reload().Scalars("loss/policy")
    assert [event.step for event in events] == [*kept, 2500, 3500]


# ---- the terminal ----------------------------------------------------------------------------------------------------

ASK = "import sys; from pala.system.launcher import terminal_size; sys.stderr.write(str(terminal_size()))"


def terminal_seen(stdout: int, *launcher: str) -> str:
    """What a rank, started by `launcher`, says of the terminal when the job's output goes to `stdout`."""
    done = subprocess.run(
        [*launcher, sys.executable, "-c", ASK], stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
        text=True, timeout=30, check=True, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    return done.stderr


@pytest.fixture
def terminal():
    """A pseudo-terminal of 81 columns and 25 lines."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 81, 0, 0))
    yield slave
    os.close(master)
    os.close(slave)


def launcher(folder: Path, script: str) -> str:
    """An executable whose process is called mpirun."""
    path = folder / "mpirun"
    path.write_text(script)
    path.chmod(0o755)
    return str(path)


def test_a_terminal_is_seen_and_a_pipe_or_file_is_none(terminal, tmp_path):
    assert terminal_seen(terminal) == "(81, 25)"
    assert terminal_seen(subprocess.PIPE) == "None"
    with (tmp_path / "log").open("w") as file:
        assert terminal_seen(file.fileno()) == "None"


def test_a_terminal_without_a_size_is_none(terminal):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    assert terminal_seen(terminal) == "None"


def test_the_launchers_output_decides(terminal, tmp_path):
    """A rank on a pipe under a launcher on a terminal (MPICH), and the other way round (Open MPI)."""
    assert terminal_seen(terminal, launcher(tmp_path, '#!/bin/sh\n"$@" | cat\n')) == "(81, 25)"
    on_terminal = "import pty, subprocess, sys; subprocess.run(sys.argv[1:], stdout=pty.openpty()[1], check=True)"
    assert terminal_seen(subprocess.PIPE, launcher(tmp_path, f"#!{sys.executable}\n{on_terminal}\n")) == "None"


def test_what_is_watched_is_the_first_hundred_episodes_after_a_time(tmp_path: Path) -> None:
    metrics_path(tmp_path, 0).parent.mkdir()
    writer, view = MetricsWriter(metrics_path(tmp_path, 0), 0), RunView(tmp_path, 1)
    view.watch(10.0)
    for begin, mean in ((0, None), (60, 60.5), (120, 60.5)):
        writer.write([episode(0) | {"time_s": float(n), "return": float(n)} for n in range(begin, begin + 60)])
        view.refresh()
        assert view.mean_since == mean, "of 11 to 110"
    view.watch(200.0)
    assert view.mean_since is None
