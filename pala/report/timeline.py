"""The timelines that ranks have recorded (`pala/system/trace.py`), read and brought to one clock: that of rank 0.

Files may come from elsewhere, and may be cut anywhere: what no rank can have written is left out or refused.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pala.run import run_folder
from pala.run.metrics import is_later
from pala.system.errors import PalaError, reason
from pala.system.files import is_number, open_to_read, refuse_links
from pala.system.trace import EVENT, MARK, MOST_BYTES, NAME, NOBODY, RECEIVED, SENT, SPAN

EVENTS = np.dtype(
    [
        ("kind", "u1"),
        ("", "u1"),
        ("name", "<u2"),
        ("peer", "<u4"),
        ("round", "<u4"),
        ("number", "<u4"),
        ("begin", "<f8"),
        ("end", "<f8"),
    ]
)
"""`EVENT` of `pala/system/trace.py`."""
assert EVENTS.itemsize == EVENT.size

_MOST_RANKS = 10**7
_LONGEST_S = 1e10  # of a clock; what shows more is damaged
_LONGEST_LINE = 2**16
_MOST_BACKWARDS_S = 0.1  # by which a message may come before it was sent, as clocks that drift have it
NEWS = ("LEAVE", "JOIN")
"""Messages that also mark a moment: their sender leaves, or takes a place."""


@dataclass(frozen=True)
class RankEvents:
    """One rank's events. In their order of begin; of those that begin together, the longest first."""

    rank: int
    host: str
    error_s: float | None  # of its clock; None: the time of day was taken for equal on all hosts
    names: Sequence[str]
    events: np.ndarray  # EVENTS [E]; seconds since the timeline's begin

    def of_kind(self, kind: int) -> np.ndarray:
        """Return the events of a kind: EVENTS [K]."""
        return self.events[self.events["kind"] == kind]

    def label(self, event: Any) -> str:
        """Return an event in words."""
        name, joined = self.names[event["name"]], {SENT: "to", RECEIVED: "from", MARK: "of rank"}
        to_or_from = joined.get(int(event["kind"]))
        return name if to_or_from is None or event["peer"] == NOBODY else f"{name} {to_or_from} {event['peer']}"


class Arrow(NamedTuple):
    """A message from rank to rank."""

    name: str
    sender: int
    sent_s: float
    receiver: int
    received_s: float
    num_bytes: int


@dataclass(frozen=True)
class Timeline:
    """All ranks' events, and the messages between them."""

    ranks: Sequence[RankEvents]
    arrows: Sequence[Arrow]
    begin_s: float
    end_s: float

    @property
    def error_s(self) -> float:
        """The most by which two clocks may differ that were compared."""
        return 2 * max((rank.error_s or 0.0 for rank in self.ranks), default=0.0)

    def part(self, begin_s: float, seconds: float) -> Timeline:
        """Return the events of a part of it, and the messages that were sent and received then."""
        end_s = min(begin_s + seconds, self.end_s)
        ranks = [
            replace(rank, events=rank.events[(rank.events["end"] >= begin_s) & (rank.events["begin"] <= end_s)])
            for rank in self.ranks
        ]
        arrows = [a for a in self.arrows if begin_s <= a.sent_s <= end_s and begin_s <= a.received_s <= end_s]
        return Timeline(ranks, arrows, begin_s, end_s)


# ---- reading ---------------------------------------------------------------------------------------------------------


class _File(NamedTuple):
    """One file's content, in the rank's own time."""

    facts: dict[str, Any]
    names: dict[int, str]
    events: np.ndarray


def read(folder: Path) -> Timeline:
    """Read the timeline of a run's newest start that has one, or of a folder that `pala.Gossip` wrote. Raises
    PalaError."""
    files = _read_files(folder)
    noon_s = _noon(file.facts for file in files)
    of_ranks: dict[int, list[_File]] = defaultdict(list)
    for file in files:
        file.events["begin"] += _shift(file.facts, noon_s)
        file.events["end"] += _shift(file.facts, noon_s)
        of_ranks[file.facts["rank"]].append(file)
    begin_s = min((float(file.events["begin"].min()) for file in files if len(file.events)), default=math.nan)
    if math.isnan(begin_s):
        raise PalaError(f"The timeline in '{folder}' has no events yet; they are written every few seconds.")
    ranks = [_joined(of_ranks[rank], begin_s) for rank in sorted(of_ranks)]
    end_s = max(float(rank.events["end"].max()) for rank in ranks if len(rank.events))
    return Timeline(ranks, match(ranks), 0.0, end_s)


def _read_files(folder: Path) -> list[_File]:
    """Read the files of a timeline; once more if a rank that still trains has begun a new file meanwhile. Raises
    PalaError."""
    files: list[_File] = []
    for _ in range(2):
        with suppress(FileNotFoundError):
            paths = _files_of(folder)
            begun = [path.stat().st_ino for path in paths]
            files = [_read_file(path) for path in paths]
            if [path.stat().st_ino for path in _files_of(folder)] == begun:
                break
    if not files:
        raise PalaError(f"The timeline in '{folder}' changes while it is read: give the command again.")
    return files


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a timeline; refuses a folder with links. Raises PalaError if there is none."""
    own = folder
    is_folder = os.path.isdir(folder)  # noqa: PTH112  of any length
    if not is_folder or (folder / "run.json").exists() or not any(folder.glob("rank-*.trace")):
        run_folder.config_of(folder)  # it may be no run, or damaged
        refuse_links(folder)
        for start in (folder / "trace").glob("segment-*"):
            own = start if own == folder or is_later(start.name, own.name) else own
    else:
        refuse_links(folder)
    files = sorted(own.glob("rank-*.trace"))
    if not files:
        raise PalaError(
            f"'{folder}' holds no timeline: `--run.trace` records that of a run, `pala.Gossip(trace=...)` that of your "
            "own loop."
        )
    return files


def _read_file(path: Path) -> _File:
    """Read a file up to its last whole event. Raises FileNotFoundError, and PalaError if it is no timeline."""
    try:
        with open_to_read(path) as file:
            line = file.readline(_LONGEST_LINE)
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except (OSError, MemoryError) as error:
        raise PalaError(f"'{path}' cannot be read: {reason(error)}.") from None
    facts = _facts_of(line)
    if facts is None or len(data) > MOST_BYTES:
        raise PalaError(f"'{path}' is no timeline of a rank, or damaged: move it away.")
    events = np.frombuffer(data[: len(data) - len(data) % EVENT.size], EVENTS)
    names: dict[int, str] = {}
    for event in events[events["kind"] == NAME]:
        names[int(event["name"])] = event.tobytes()[4:].rstrip(b"\0").decode(errors="replace")
    with np.errstate(invalid="ignore"):
        is_whole = (
            np.isin(events["kind"], (SPAN, SENT, RECEIVED, MARK))
            & np.isin(events["name"], list(names))
            & ((events["peer"] < _MOST_RANKS) | (events["peer"] == NOBODY))
            & (np.abs(events["begin"]) < _LONGEST_S)
            & (np.abs(events["end"]) < _LONGEST_S)
            & (events["begin"] <= events["end"])
        )
    return _File(facts, names, events[is_whole])


def _facts_of(line: bytes) -> dict[str, Any] | None:
    """Return what a file's first line says; None if it is none."""
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or facts.get("format") != 1 or not isinstance(facts.get("host"), str):
        return None
    if type(facts.get("rank")) is not int or not 0 <= facts["rank"] < _MOST_RANKS:
        return None
    clocks: list[Any] = [facts.get(key) for key in ("clock_s", "unix_s")]
    if facts.get("offset_s") is not None:
        clocks += [facts["offset_s"], facts.get("error_s")]
    return facts if all(is_number(value) and abs(value) < _LONGEST_S for value in clocks) else None


def _noon(all_facts: Iterable[dict[str, Any]]) -> float:
    """Return when rank 0's clock showed 0, by the time of day; as good as the hosts' agreement on that."""
    known = [f["unix_s"] - f["clock_s"] - f["offset_s"] for f in all_facts if f.get("offset_s") is not None]
    return known[0] if known else 0.0


def _shift(facts: dict[str, Any], noon_s: float) -> float:
    """Return what is added to a rank's clock to get rank 0's."""
    offset_s = facts.get("offset_s")
    return float(facts["unix_s"] - facts["clock_s"] - noon_s if offset_s is None else offset_s)


def _joined(files: Sequence[_File], begin_s: float) -> RankEvents:
    """Put a rank's files together: each numbers the names itself."""
    names: dict[str, int] = {}
    for file in files:
        own = np.zeros(2**16, np.uint16)
        for number, name in file.names.items():
            own[number] = names.setdefault(name, len(names))
        file.events["name"] = own[file.events["name"]]
        for moment in ("begin", "end"):
            file.events[moment] -= begin_s
    events = np.concatenate([file.events for file in files])
    facts = files[0].facts
    error_s = None if facts.get("offset_s") is None else float(facts["error_s"])
    return RankEvents(
        facts["rank"], facts["host"], error_s, list(names), events[np.lexsort((-events["end"], events["begin"]))]
    )


# ---- messages --------------------------------------------------------------------------------------------------------


def match(ranks: Sequence[RankEvents]) -> list[Arrow]:
    """Return the messages of which both ends are known, in the order in which they came. Between two ranks, those of
    one kind and round come in the order in which they were sent."""
    sent: dict[tuple[Any, ...], deque[Any]] = defaultdict(deque)
    for rank in ranks:
        for event in rank.of_kind(SENT):
            sent[rank.rank, int(event["peer"]), rank.names[event["name"]], int(event["round"])].append(event)
    arrows = []
    for rank in ranks:
        for event in rank.of_kind(RECEIVED):
            name, sender = rank.names[event["name"]], int(event["peer"])
            waiting = sent.get((sender, rank.rank, name, int(event["round"])))
            if waiting and waiting[0]["begin"] <= event["begin"] + _MOST_BACKWARDS_S:
                begin = waiting.popleft()
                sent_s, received_s = float(begin["begin"]), float(event["begin"])
                arrows.append(Arrow(name, sender, sent_s, rank.rank, received_s, int(begin["number"])))
    return sorted(arrows, key=lambda arrow: arrow.received_s)
