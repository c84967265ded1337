"""The timeline of a run as one file: `pala trace RUN`.

    whole                 pala trace runs/pong-...                           -> runs/pong-.../trace.json
    packed                pala trace RUN --output trace.json.gz
    a part of it          pala trace RUN --begin 60 --seconds 5
    a picture of a part   pala trace RUN --begin 60 --seconds 0.5 --output timeline.png

The run was trained with `--run.trace`, or the folder was named to `pala.Gossip(trace=...)`. https://ui.perfetto.dev and
chrome://tracing open the file: each rank has a row for its work, one for messages sent and one for messages received,
and an arrow for each message.
"""

from __future__ import annotations

import contextlib
import gzip
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, cast

import tyro

from pala.report.pictures import COLOURS, legend, new_figure, tidy, verbatim, write_picture
from pala.report.timeline import NEWS, Arrow, RankEvents, Timeline, read
from pala.system.command_line import check_least, exit_on_mistake, read_command
from pala.system.errors import PalaError, reason
from pala.system.files import json_text, open_atomically
from pala.system.output import print_result
from pala.system.text import counted
from pala.system.trace import MARK, RECEIVED, SENT, SPAN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS = {SPAN: "work", SENT: "messages sent", RECEIVED: "messages received"}
"""Rows of a rank, by the kind of event; the kind is the number of the row's thread."""

_MICROSECONDS = 1e6
_MOST_DRAWN = 20_000  # parts of time in a picture
_ORDER = ("environment", "inference", "update", "loop", "exchange", "wait")  # of colours; others share one
_WAIT, _OTHER = "#C8C8C8", "#56B4E9"


# ---- Chrome's format -------------------------------------------------------------------------------------------------


def chrome_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield a timeline's events in Chrome's trace event format. Times are in microseconds. A message is a flow from the
    slice of its sending to that of its receipt."""
    for rank in timeline.ranks:
        yield from _about(rank)
        for event in rank.events:
            yield from _slices(rank, event)
    for number, arrow in enumerate(timeline.arrows):
        flow = {"id": number, "cat": "message", "name": arrow.name}
        yield {"ph": "s", **flow, "pid": arrow.sender, "tid": SENT, "ts": _us(arrow.sent_s)}
        yield {"ph": "f", "bp": "e", **flow, "pid": arrow.receiver, "tid": RECEIVED, "ts": _us(arrow.received_s)}


def _about(rank: RankEvents) -> Iterator[dict[str, Any]]:
    """Yield the names of a rank and of its rows, and their order."""
    about: dict[str, Any] = {"ph": "M", "ts": 0, "pid": rank.rank}
    yield about | {"tid": 0, "name": "process_name", "args": {"name": f"rank {rank.rank} on {rank.host}"}}
    yield about | {"tid": 0, "name": "process_sort_index", "args": {"sort_index": rank.rank}}
    for row, name in ROWS.items():
        yield about | {"tid": row, "name": "thread_name", "args": {"name": name}}
        yield about | {"tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}


def _slices(rank: RankEvents, event: Any) -> Iterator[dict[str, Any]]:
    kind, name, begin = int(event["kind"]), rank.names[event["name"]], _us(event["begin"])
    if kind == MARK or (name in NEWS and kind != SENT):
        mark = rank.label(event) if kind == MARK else f"{name} of rank {event['peer']}"
        yield {"ph": "i", "s": "p", "name": mark, "pid": rank.rank, "tid": SPAN, "ts": begin}
    if kind == MARK:
        return
    length = round(_us(event["end"]) - begin, 3)  # of rounded ends: what lies in another slice stays in it
    drawn = {"ph": "X", "name": rank.label(event), "pid": rank.rank, "tid": kind, "ts": begin, "dur": length}
    if kind in (SENT, RECEIVED):
        number = {SENT: "bytes", RECEIVED: "took_us"}[kind]
        drawn["args"] = {"round": int(event["round"]), number: int(event["number"])}
    yield drawn


def _us(seconds: float) -> float:
    return round(_MICROSECONDS * float(seconds), 3)


def write_chrome(timeline: Timeline, output: Path) -> None:
    """Write a timeline in Chrome's format, packed if the name ends in `.gz`. Raises PalaError."""
    clocks = {f"rank {rank.rank}": rank.error_s for rank in timeline.ranks}
    about = json_text({"program": "PALA", "clock_error_s": clocks})
    try:
        with open_atomically(output) as file, contextlib.ExitStack() as stack:
            if output.suffix == ".gz":
                file = cast(BinaryIO, stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0)))
            file.write(f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":['.encode())
            for number, event in enumerate(chrome_events(timeline)):
                file.write(f"{',' * (number > 0)}\n{json_text(event)}".encode())
            file.write(b"\n]}\n")
    except OSError as error:
        raise PalaError(f"The timeline cannot be written to '{output}': {reason(error)}.") from None


# ---- a picture -------------------------------------------------------------------------------------------------------


def draw(timeline: Timeline, output: Path) -> None:
    """Draw a timeline: a row of coloured parts for each rank, and arrows for messages with a model. Raises
    PalaError."""
    num_parts = sum(len(rank.of_kind(SPAN)) for rank in timeline.ranks)
    if num_parts > _MOST_DRAWN:
        raise PalaError(
            f"The picture would hold {num_parts:,} parts of time: name a shorter one by `--begin` and `--seconds`."
        )
    figure = new_figure(11, 1.6 + 0.9 * len(timeline.ranks))
    axes = figure.subplots()
    begin_s = timeline.begin_s
    rows = {rank.rank: row for row, rank in enumerate(timeline.ranks)}
    names = _draw_parts(axes, timeline, begin_s)
    most = max((arrow.num_bytes for arrow in timeline.arrows), default=0)
    for arrow in timeline.arrows:
        if 2 * arrow.num_bytes > most:
            _draw_arrow(axes, arrow, rows, begin_s)
    for rank in timeline.ranks:
        for mark in rank.of_kind(MARK):
            axes.text(mark["begin"] - begin_s, rows[rank.rank], f" {verbatim(rank.label(mark))}", va="center")
            axes.plot([mark["begin"] - begin_s], [rows[rank.rank]], "kx")
    axes.set_yticks(list(rows.values()), [verbatim(f"rank {rank.rank}\n{rank.host}") for rank in timeline.ranks])
    axes.invert_yaxis()
    axes.set_xlim(0, max(timeline.end_s - begin_s, 1e-3))
    axes.set_xlabel(f"seconds, from {begin_s:g} s after the timeline's begin")
    tidy(axes, "x")
    for name, colour in names.items():
        axes.barh(0, 0, color=colour, label=verbatim(name))
    legend(figure, axes)
    write_picture(figure, output)


def _draw_parts(axes: Axes, timeline: Timeline, begin_s: float) -> dict[str, str]:
    """Draw all ranks' parts of time, the longest first; return the colour of each name."""
    names = {name for rank in timeline.ranks for name in {rank.names[e["name"]] for e in rank.of_kind(SPAN)}}
    known = [name for name in _ORDER if name in names]
    colours = {name: _WAIT if name == "wait" else COLOURS[_ORDER.index(name)] for name in known}
    colours |= dict.fromkeys(sorted(names.difference(known)), _OTHER)
    for row, rank in enumerate(timeline.ranks):
        parts = rank.of_kind(SPAN)
        axes.broken_barh(
            [(part["begin"] - begin_s, part["end"] - part["begin"]) for part in parts],
            (row - 0.3, 0.6),
            facecolors=[colours[rank.names[part["name"]]] for part in parts],
        )
    return colours


def _draw_arrow(axes: Axes, arrow: Arrow, rows: dict[int, int], begin_s: float) -> None:
    begin, end = rows.get(arrow.sender), rows.get(arrow.receiver)
    if begin is None or end is None:
        return
    edge = 0.3 if end > begin else -0.3
    axes.annotate(
        "",
        (arrow.received_s - begin_s, end - edge),
        (arrow.sent_s - begin_s, begin + edge),
        arrowprops={"arrowstyle": "-|>", "color": "black", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0},
    )


# ---- the program -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """Make one file of a run's timeline, for ui.perfetto.dev or chrome://tracing, or a picture."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folder of one run, or the one that `pala.Gossip(trace=...)` was given."""
    output: Path | None = None
    """File to write; otherwise RUN/trace.json. `.json.gz`: packed. Another format, as `.png` or `.svg`: a picture."""
    begin: float = 0.0
    """Leave out what ended before this time, in seconds from the begin of the timeline."""
    seconds: float = 0.0
    """Length of the part that is kept, from `--begin` on; 0: to the end."""


def summary(timeline: Timeline) -> str:
    """Return in a line what a timeline holds, and how far its clocks can be trusted."""
    ranks, seconds = counted(len(timeline.ranks), "rank"), timeline.end_s - timeline.begin_s
    size = f"{ranks}, {seconds:,.1f} s, {len(timeline.arrows):,} messages"
    clocks = f"clocks compared to {_MICROSECONDS * timeline.error_s:,.0f} us" if timeline.error_s else "one clock"
    if apart := [str(rank.rank) for rank in timeline.ranks if rank.error_s is None]:
        clocks += f"; rank {', '.join(apart)} by the time of day"
    if back := [arrow.sent_s - arrow.received_s for arrow in timeline.arrows if arrow.sent_s > arrow.received_s]:
        clocks += f"; {len(back):,} arrows point back, by {_MICROSECONDS * max(back):,.0f} us at most"
    return f"{size}; {clocks}"


@exit_on_mistake()
def main() -> None:
    """Run `pala trace`."""
    command = read_command("pala trace", sys.argv[1:], Command())
    if len(command.runs) != 1:
        raise PalaError("Name one folder, of a run that was trained with `--run.trace`.")
    check_least("begin", command.begin, 0)
    check_least("seconds", command.seconds, 0)
    (run,) = command.runs
    output = command.output or run / "trace.json"
    timeline = read(run)
    if command.begin or command.seconds:
        timeline = timeline.part(command.begin, command.seconds or timeline.end_s)
        if timeline.end_s <= timeline.begin_s:
            raise PalaError(f"'--begin' is {command.begin:g}, but the timeline ends after {timeline.end_s:.1f} s.")
    if output.suffix in ("", ".json", ".gz"):
        write_chrome(timeline, output)
    else:
        draw(timeline, output)
    print_result(f"{output}: {summary(timeline)}")
