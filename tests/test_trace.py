"""Timelines: what ranks record, what is made of it, and what a damaged or foreign one can do."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pala
from pala.comm.tracing import Clock, compare_clocks, open_trace
from pala.config import Config
from pala.report import draw_timeline, timeline
from pala.report.draw_timeline import chrome_events, draw, summary, write_chrome
from pala.report.timeline import RankEvents, Timeline, read
from pala.system import trace as recorder
from pala.system.errors import CollectiveError, PalaError
from pala.system.trace import MARK, RECEIVED, SENT, SPAN, Trace, earlier, trace_path
from pala.testing.faults import Fault, corrupt, drop, fail_at
from pala.testing.memory import MemoryCommunicator, run_ranks
from support import REPOSITORY
from support.helpers import CARTPOLE, slow_but_for
from support.memory_jobs import both, configure, gorila, leave_at, slow_until_joined, stop_when, train, with_spares
from support.standing_ranks import StandingRanks

pytestmark = pytest.mark.often(
    "test_a_message_that_is_refused_is_marked",
    "test_gossip_in_a_loop_of_ones_own_records_into_a_folder",
    "test_the_newest_events_are_kept_when_there_are_too_many",
    "test_all_ranks_or_none_record",
    "test_a_file_that_is_no_timeline_is_named",
    "test_a_folder_without_a_timeline_is_told",
)

Event = dict[str, Any]
FACTS = {"format": 1, "rank": 0, "host": "here", "offset_s": 0.0, "error_s": 0.0, "clock_s": 5.0, "unix_s": 1e9}


def begin(folder: Path, rank: int = 0, **facts: Any) -> Trace:
    folder.mkdir(exist_ok=True)
    return Trace(trace_path(folder, rank), **FACTS | {"rank": rank} | facts)


def tracing(config: Config) -> Config:
    return replace(config, run=replace(config.run, trace=True))


def trained(ranks: int, config: Config, *faults: Fault, **how: Any) -> tuple[Path, Timeline]:
    job = train(ranks, tracing(config), faults, **how)
    return job.run, read(job.run)


def names_of(rank: RankEvents, kind: int = SPAN) -> Counter[str]:
    return Counter(rank.names[event["name"]] for event in rank.of_kind(kind))


def chrome(timeline: Timeline, folder: Path) -> list[Event]:
    """The events of the file that is made of a timeline, each of which has what its kind must have."""
    write_chrome(timeline, folder / "out.json")
    whole = json.loads((folder / "out.json").read_text())
    assert set(whole) == {"displayTimeUnit", "otherData", "traceEvents"}
    events: list[Event] = whole["traceEvents"]
    needed = {"X": {"dur"}, "M": {"args"}, "s": {"id", "cat"}, "f": {"id", "cat", "bp"}, "i": {"s"}}
    for event in events:
        assert event.keys() >= {"ph", "pid", "tid", "ts", "name"} | needed[event["ph"]], event
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0 and isinstance(event["name"], str)
        assert type(event["pid"]) is int and type(event["tid"]) is int
    return events


def assert_slices_lie_in_each_other_or_apart(events: list[Event]) -> None:
    """Viewers leave out what begins in one slice of a row and ends in another."""
    open_until: dict[tuple[int, int], list[float]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        ends = open_until.setdefault((event["pid"], event["tid"]), [])
        while ends and ends[-1] <= event["ts"] + 1e-3:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + 1e-3, event
        ends.append(end)


def assert_flows_match(events: list[Event]) -> int:
    """Each begins and ends once, in a slice of the row for it; returns how many there are."""
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys() and len(begins) == sum(e["ph"] == "s" for e in events)
    slices = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    for number, flow in begins.items():
        assert flow["name"] == ends[number]["name"] and flow["pid"] != ends[number]["pid"]
        assert {(e["pid"], e["tid"], e["ts"]) for e in (flow, ends[number])} <= slices
        assert flow["tid"] == SENT and ends[number]["tid"] == RECEIVED and ends[number]["bp"] == "e"
    return len(begins)


# ---- trainings -------------------------------------------------------------------------------------------------------

KINDS = ["uniform", "paired", "allreduce", "shared_memory", "none", "gorila"]


@pytest.mark.parametrize("kind", slow_but_for(KINDS, "uniform", "gorila"))
def test_a_training_has_a_timeline_of_each_rank(kind: str, tmp_path: Path) -> None:
    config = gorila(tmp_path) if kind == "gorila" else configure(tmp_path, kind)
    if kind in ("uniform", "paired"):
        config = configure(tmp_path, "gossip", mixing=kind)
    _, timeline = trained(2, config)
    assert [rank.rank for rank in timeline.ranks] == [0, 1]
    for rank in timeline.ranks:
        assert names_of(rank).keys() >= {"environment", "inference", "update", "checkpoint", "metrics", "close"}
        assert rank.error_s == 0, "threads have one clock"
    events = chrome(timeline, tmp_path)
    assert_slices_lie_in_each_other_or_apart(events)
    messages = {"uniform": "MODEL", "paired": "OFFER", "gorila": "PARAMETERS"}
    assert (assert_flows_match(events) > 0) == (kind in messages)
    assert messages.get(kind) in {None, *(arrow.name for arrow in timeline.arrows)}
    assert all(arrow.sent_s <= arrow.received_s for arrow in timeline.arrows)
    if kind == "allreduce":
        assert any("wait" in names_of(rank) for rank in timeline.ranks)


def marks_of(timeline: Timeline, folder: Path) -> set[tuple[str, int]]:
    return {(event["name"], event["pid"]) for event in chrome(timeline, folder) if event["ph"] == "i"}


def test_a_rank_that_leaves_is_marked(tmp_path: Path) -> None:
    _, timeline = trained(3, configure(tmp_path, steps=2000), on_count=leave_at(2, update=10))
    assert marks_of(timeline, tmp_path) >= {("LEAVE of rank 2", 0), ("LEAVE of rank 2", 1)}
    assert names_of(timeline.ranks[2])["update"] > 10


def test_a_message_that_is_refused_is_marked(tmp_path: Path) -> None:
    _, timeline = trained(2, configure(tmp_path), corrupt(0, 1, n=2))
    assert marks_of(timeline, tmp_path) == {("refused a message of rank 0", 1)}


def test_a_message_that_is_lost_has_no_arrow(tmp_path: Path) -> None:
    _, timeline = trained(2, configure(tmp_path, "gossip", mixing="uniform"), drop(0, 1, n=3))
    sent = names_of(timeline.ranks[0], SENT)["MODEL"]
    came = [arrow for arrow in timeline.arrows if (arrow.name, arrow.sender) == ("MODEL", 0)]
    assert len(came) == sent - 1 == names_of(timeline.ranks[1], RECEIVED)["MODEL"]
    assert all(arrow.sent_s <= arrow.received_s for arrow in timeline.arrows)


def test_a_death_is_marked(tmp_path: Path) -> None:
    _, timeline = trained(3, configure(tmp_path, steps=2000), fail_at(2, update=10))
    for rank in timeline.ranks[:2]:
        assert [rank.label(mark) for mark in rank.of_kind(MARK)] == ["death of rank 2"]
    assert marks_of(timeline, tmp_path) == {("death of rank 2", 0), ("death of rank 2", 1)}


def test_a_spare_that_takes_a_place_has_one_by_the_time_of_day(tmp_path: Path) -> None:
    config = with_spares(tmp_path, spares=1)
    stop = both(slow_until_joined(2), stop_when(1, 2, updates=20))
    _, timeline = trained(3, config, fail_at(0, update=5), on_count=stop)
    ranks = {rank.rank: rank for rank in timeline.ranks}
    assert ranks[1].error_s == 0 and ranks[2].error_s is None
    assert "rank 2 by the time of day" in summary(timeline)
    assert names_of(ranks[2]).keys() >= {"environment", "update"}
    assert any({arrow.sender, arrow.receiver} == {1, 2} and arrow.name == "ANSWER" for arrow in timeline.arrows)


def test_a_resumed_run_has_a_timeline_of_each_start(tmp_path: Path) -> None:
    job = train(1, tracing(configure(tmp_path, steps=100)))
    first = read(job.run)
    job.resume(1, steps=200)
    assert {path.name for path in (job.run / "trace").iterdir()} == {"segment-000", "segment-001"}
    assert read(job.run).end_s != first.end_s
    assert read(job.run / "trace" / "segment-000").end_s == first.end_s


OFF = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from support.memory_jobs import configure, train
from pala.system import trace
trace.Trace = None
assert train(2, configure(Path(sys.argv[1]), steps=100)).ended_well()
assert not [name for name in sys.modules if name in ("pala.comm.tracing", "pala.report.timeline")]
"""


def test_without_it_there_is_no_file_and_nothing_is_loaded(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", OFF, tmp_path], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*trace*"))


UNIFORM = ("--exchange.mixing", "uniform")


@pytest.mark.mpi
def test_messages_of_real_ranks_come_after_they_were_sent(standing: StandingRanks, tmp_path: Path) -> None:
    arguments = [*CARTPOLE, "--total-steps", "6000", "--run.name", "r", "--run.trace", *UNIFORM]
    done = standing.train(2, *arguments, cwd=tmp_path)
    assert done.status == 0, done.output
    timeline = read(tmp_path / "runs/r")
    assert [rank.error_s for rank in timeline.ranks] == [0, 0] and len({rank.host for rank in timeline.ranks}) == 1
    events = chrome(timeline, tmp_path)
    assert_slices_lie_in_each_other_or_apart(events)
    assert assert_flows_match(events) > 0
    by_pair = Counter((arrow.sender, arrow.receiver) for arrow in timeline.arrows if arrow.name == "MODEL")
    assert by_pair.keys() == {(0, 1), (1, 0)}
    assert all(arrow.sent_s <= arrow.received_s for arrow in timeline.arrows)


# ---- a loop of one's own ---------------------------------------------------------------------------------------------


def loop(comm: MemoryCommunicator, folder: str | Path | None) -> None:
    model = torch.nn.Linear(3, 2)
    with pala.Gossip(model, total_steps=200, comm=comm, trace=folder) as gossip:
        while gossip.goes_on:
            time.sleep(0.0005)
            gossip.after_update(steps=1)


def test_gossip_in_a_loop_of_ones_own_records_into_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "of" / "mine"
    assert run_ranks(2, lambda comm: loop(comm, folder)) == [None, None]
    timeline = read(folder)
    assert all(names_of(rank).keys() <= {"loop", "exchange", "wait"} for rank in timeline.ranks)
    assert all(names_of(rank)["loop"] > 10 for rank in timeline.ranks)
    assert {arrow.name for arrow in timeline.arrows} >= {"OFFER", "ANSWER"}
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for result in run_ranks(2, lambda comm: loop(comm, folder)):
        assert isinstance(result, CollectiveError) and "exists already, and no timeline is written over" in str(result)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for result in run_ranks(2, lambda comm: loop(comm, tmp_path / "file" / "folder")):
        assert isinstance(result, CollectiveError) and "No trace can be written into " in str(result)


def test_all_ranks_or_none_record(tmp_path: Path) -> None:
    for result in run_ranks(2, lambda comm: loop(comm, tmp_path if comm.rank else None)):
        assert isinstance(result, CollectiveError) and "other settings" in str(result)


# ---- clocks ----------------------------------------------------------------------------------------------------------


def test_clocks_that_differ_are_compared_within_bounds_that_hold() -> None:
    def main(comm: MemoryCommunicator) -> Clock:
        return compare_clocks(comm, lambda: time.perf_counter() + 1000.0 * comm.rank)

    for rank, clock in enumerate(run_ranks(3, main)):
        assert abs(clock.offset_s + 1000.0 * rank) <= clock.error_s + 1e-9
        assert (clock.error_s == 0) == (rank == 0)


def test_messages_of_hosts_with_other_clocks_come_after_they_were_sent(tmp_path: Path) -> None:
    """The second host's clock shows 100 s more."""
    first, second = begin(tmp_path), begin(tmp_path, 1, offset_s=-100.0, error_s=1e-4)
    now_s = time.perf_counter()
    first._put(SENT, "MODEL", 1, 7, 64, now_s, now_s + 0.001)
    second._put(RECEIVED, "MODEL", 0, 7, 10, now_s + 100.002, now_s + 100.003)
    second._put(RECEIVED, "MODEL", 0, 8, 10, now_s + 100.002, now_s + 100.003)  # its begin is not known
    for one in (first, second):
        one.close()
    timeline = read(tmp_path)
    (arrow,) = timeline.arrows
    assert (arrow.sender, arrow.receiver, arrow.num_bytes) == (0, 1, 64)
    assert arrow.received_s - arrow.sent_s == pytest.approx(0.002, abs=1e-6)
    assert "clocks compared to 200 us" in summary(timeline)


# ---- the recorder ----------------------------------------------------------------------------------------------------


def test_what_is_recorded_is_read_and_very_short_parts_are_left_out(tmp_path: Path) -> None:
    trace = begin(tmp_path)
    trace.span("update", 5.0, 5.5)
    trace.span("update", 5.5, 5.5 + 1e-6)
    trace.span("wait", 5.1, 5.2)
    trace.mark("death", 3)
    trace.close()
    trace.span("update", 6.0, 7.0)  # too late
    (rank,) = read(tmp_path).ranks
    assert names_of(rank) == {"update": 1, "wait": 1}
    assert [rank.label(event) for event in rank.of_kind(MARK)] == ["death of rank 3"]
    assert list(rank.of_kind(SPAN)["end"] - rank.of_kind(SPAN)["begin"]) == pytest.approx([0.5, 0.1])


@pytest.mark.parametrize("cut", [1, 31])
def test_a_torn_last_event_is_left_out(cut: int, tmp_path: Path) -> None:
    trace = begin(tmp_path)
    for second in range(3):
        trace.span("update", float(second), second + 0.5)
    trace.close()
    file = trace_path(tmp_path, 0)
    file.write_bytes(file.read_bytes()[:-cut])
    assert names_of(read(tmp_path).ranks[0]) == {"update": 2}


def test_the_newest_events_are_kept_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_BYTES", 4 * recorder._BUFFERED * recorder.EVENT.size)
    trace, num_events = begin(tmp_path), 10 * recorder._BUFFERED
    for second in range(num_events):
        trace.span(f"part {second % 3}", float(second), second + 0.5)
    trace.close()
    sizes = [path.stat().st_size for path in (trace_path(tmp_path, 0), earlier(trace_path(tmp_path, 0)))]
    assert len(list(tmp_path.iterdir())) == 2 and sum(sizes) <= recorder.MOST_BYTES + 1000
    (rank,) = read(tmp_path).ranks
    assert num_events > len(rank.events) >= 2 * recorder._BUFFERED - 10
    assert rank.events["begin"][-1] - rank.events["begin"][0] == len(rank.events) - 1, "none between is missing"
    assert names_of(rank).keys() == {"part 0", "part 1", "part 2"}


@pytest.mark.parametrize("is_missing", [False, True])  # for a moment it is
def test_a_file_that_is_begun_while_a_timeline_is_read_loses_no_events(
    is_missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_BYTES", 4 * recorder._BUFFERED * recorder.EVENT.size)
    trace, files_of, file, aside = begin(tmp_path), timeline._files_of, trace_path(tmp_path, 0), tmp_path / "aside"

    def record(num_events: int) -> None:
        for second in range(num_events):
            trace.span("part", float(second), second + 0.5)

    def listed(folder: Path) -> list[Path]:
        if aside.exists():
            aside.rename(file)
        files = files_of(folder)
        if not earlier(file).exists():
            record(2 * recorder._BUFFERED)
            assert earlier(file).exists()
            if is_missing:
                file.rename(aside)
        return files

    record(recorder._BUFFERED)
    monkeypatch.setattr(timeline, "_files_of", listed)
    (rank,) = read(tmp_path).ranks
    assert len(rank.events) > 2 * recorder._BUFFERED - 10


def test_a_timeline_whose_files_go_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_files_of", lambda folder: [folder / "gone"])
    with pytest.raises(PalaError, match="changes while it is read"):
        read(tmp_path)


@pytest.mark.parametrize("fails", ["at once", "in the midst"])
def test_a_full_disk_loses_events_and_no_more(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    trace, pwrite = begin(tmp_path), os.pwrite

    def full(descriptor: int, data: Any, place: int) -> int:
        if fails == "at once":
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, bytes(data)[:40], place)

    trace.span("update", 1.0, 2.0)
    monkeypatch.setattr(os, "pwrite", full)
    trace._write()
    trace._write()
    monkeypatch.setattr(os, "pwrite", pwrite)
    trace.span("update", 3.0, 4.0)
    trace.close()
    assert capsys.readouterr().err.count("cannot be written: No space left on device. Training continues.") == 1
    (rank,) = read(tmp_path).ranks
    assert names_of(rank) == {"update": 1} and rank.events["end"][0] == 1.0


# ---- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run_program(monkeypatch: pytest.MonkeyPatch, own_handlers: None) -> Callable[..., None]:
    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["pala trace", *map(str, arguments)])
        draw_timeline.main()

    return run


def test_one_command_makes_a_file_a_packed_one_or_a_picture(
    tmp_path: Path, run_program: Callable[..., None], capsys: Any
) -> None:
    assert run_ranks(2, lambda comm: loop(comm, tmp_path / "t")) == [None, None]
    run_program(tmp_path / "t")
    run_program(tmp_path / "t", "--output", tmp_path / "packed.json.gz")
    run_program(tmp_path / "t", "--output", tmp_path / "part.json", "--begin", "0.02", "--seconds", "0.02")
    run_program(tmp_path / "t", "--output", tmp_path / "picture.png")
    plain = (tmp_path / "t" / "trace.json").read_bytes()
    assert gzip.decompress((tmp_path / "packed.json.gz").read_bytes()) == plain
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    whole, part = (json.loads(text)["traceEvents"] for text in (plain, (tmp_path / "part.json").read_bytes()))
    slices = [event for event in part if event["ph"] == "X"]
    assert 0 < len(slices) < sum(event["ph"] == "X" for event in whole)
    assert all(e["ts"] + e["dur"] >= 0.02e6 - 1e-3 and e["ts"] <= 0.04e6 + 1e-3 for e in slices)
    assert_flows_match(part)
    assert "2 ranks, " in capsys.readouterr().out
    assert "Format 'nonsense' is not supported" in says(run_program, capsys, tmp_path / "t", "--output", "a.nonsense")
    assert not Path("a.nonsense").exists(), "it held JSON"


def test_a_picture_of_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = begin(tmp_path)
    for second in range(3):
        trace.span("update", float(second), second + 0.5)
    trace.close()
    monkeypatch.setattr(draw_timeline, "_MOST_DRAWN", 2)
    with pytest.raises(PalaError, match="would hold 3 parts of time: name a shorter one"):
        draw(read(tmp_path), tmp_path / "a.png")


# ---- damaged and foreign ones ----------------------------------------------------------------------------------------


def says(run_program: Callable[..., None], capsys: Any, *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        run_program(*arguments)
    said: str = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("pala: error: ") and said.count("\n") == 1, said
    return said


def test_a_folder_without_a_timeline_is_told(tmp_path: Path, run_program: Callable[..., None], capsys: Any) -> None:
    assert "is not a run's folder" in says(run_program, capsys, tmp_path)
    job = train(1, configure(tmp_path / "runs", steps=50))
    assert "holds no timeline: `--run.trace` records that of a run" in says(run_program, capsys, job.run)
    assert "Name one folder" in says(run_program, capsys)
    begin(tmp_path).close()
    assert "has no events yet" in says(run_program, capsys, tmp_path)


@pytest.mark.parametrize("kind", ["hard link", "symbolic link", "pipe"])
def test_what_leads_elsewhere_is_refused(
    kind: str, tmp_path: Path, run_program: Callable[..., None], capsys: Any
) -> None:
    folder, victim = tmp_path / "t", tmp_path / "victim"
    begin(folder, 1).close()
    victim.write_text("as it was")
    link = trace_path(folder, 0)
    if kind == "pipe":
        os.mkfifo(link)
    else:
        (os.link if kind == "hard link" else os.symlink)(victim, link)
    assert "rank-0000.trace' is a" in says(run_program, capsys, folder)
    with pytest.raises(PalaError, match="exists already"):
        open_trace(folder, 0, "here", None)
    assert victim.read_text() == "as it was" and not (folder / "trace.json").exists()


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\n", b"[]\n", b"\xff\n", b"[" * 100_000, json.dumps(FACTS | {"format": 2}).encode() + b"\n",
        json.dumps(FACTS | {"rank": -1}).encode() + b"\n", json.dumps(FACTS | {"host": None}).encode() + b"\n",
        json.dumps(FACTS | {"clock_s": 1e300}).encode() + b"\n", json.dumps(FACTS | {"error_s": None}).encode() + b"\n",
        b'{"format":1,"rank":0,"host":"h","offset_s":NaN,"error_s":0,"clock_s":1,"unix_s":1}\n',
    ],
)  # fmt: skip
def test_a_file_that_is_no_timeline_is_named(
    line: bytes, tmp_path: Path, run_program: Callable[..., None], capsys: Any
) -> None:
    trace_path(tmp_path, 0).write_bytes(line + bytes(64))
    assert "rank-0000.trace' is no timeline of a rank" in says(run_program, capsys, tmp_path)


def test_a_file_larger_than_any_is_refused(tmp_path: Path, run_program: Callable[..., None], capsys: Any) -> None:
    begin(tmp_path).close()
    os.truncate(trace_path(tmp_path, 0), recorder.MOST_BYTES + 1000)
    assert "is no timeline of a rank" in says(run_program, capsys, tmp_path)


def test_any_bytes_give_valid_json_or_one_error(tmp_path: Path) -> None:
    """Events of all kinds, with bytes changed by chance."""
    trace = begin(tmp_path / "t")
    trace.span("update", 1.0, 2.0)
    trace.mark("death", 1)
    trace.sent('"}]\n', 1, 3, 4, 1.0)
    trace.received("\ud7ff\x00é" * 20, 1, 3, 0.5, 1.0)
    trace.close()
    file, chance, good = trace_path(tmp_path / "t", 0), random.Random(1), 0
    first, events = file.read_bytes().split(b"\n", 1)
    for _ in range(200):
        changed = bytearray(events)
        for _ in range(chance.randrange(8)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        file.write_bytes(first + b"\n" + changed)
        try:
            timeline = read(tmp_path / "t")
        except PalaError as error:
            assert "no events" in str(error)
            continue
        for event in chrome_events(timeline):
            json.dumps(event, allow_nan=False)
        good += 1
    assert good > 100
