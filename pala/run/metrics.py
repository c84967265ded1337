"""One append-only metrics file a rank (JSON lines). Files are the truth: console, TensorBoard and plots read them.

Keys and units: docs/metrics.md. A record has a `type`: `start` (of a segment), `episode` or `interval`. A resumed run
continues in the same file; records of steps that were lost with the crash are dropped by the reader.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from pala.system.errors import PalaError, reason
from pala.system.files import append_lines, is_number, json_text, open_to_read
from pala.system.output import log

Record = dict[str, Any]
SECTIONS = ("environment", "inference", "update", "exchange", "wait", "other")
"""Parts of a rank's time: fields `time_SECTION`, which sum to 1."""

_NO_RETURN = b'"return":null'  # an episode whose return is not finite, which no figure can take in


def metrics_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's metrics file."""
    return run / "metrics" / f"rank-{rank:04d}.jsonl"


def metrics_files(run: Path) -> list[Path]:
    """Return the metrics of a run's ranks, in their order; of a file that is there packed, too, the plain one."""
    found = {
        path.name.removesuffix(".gz"): path for path in sorted((run / "metrics").glob("rank-*.jsonl*"), reverse=True)
    }
    return [path for name, path in sorted(found.items()) if name.endswith(".jsonl")]


def packed_alone(run: Path, ranks: int) -> Path | None:
    """Return a metrics file of the first `ranks` ranks that is there packed only, if there is any."""
    plain = [metrics_path(run, rank) for rank in range(ranks)]
    packed = (path.with_name(f"{path.name}.gz") for path in plain if not path.exists())
    return next((path for path in packed if path.exists()), None)


class MetricsWriter:
    """Appends records. A full disk is reported once; training continues, and the file too as soon as it can."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._failed = False

    def write(self, records: list[Record]) -> None:
        """Append the records, each a line."""
        text = "".join(json_text(record) + "\n" for record in records)
        try:
            append_lines(self._path, text)
        except OSError as error:
            if not self._failed:
                why = reason(error)
                log(f"[rank {self._rank}] metrics cannot be written to '{self._path}': {why}. Training continues.")
            self._failed = True
        else:
            self._failed = False


class Tail:
    """Reads what has been appended to a metrics file (or .gz) since the last call; a line without its end waits.

    A line that is no record (cut by a full disk, or damaged) is left out, which is said once.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._num_lines = self._left_out = self._first_left_out = 0

    def read(self) -> Iterator[Record]:
        """Yield the new whole records. Raises PalaError if the file is damaged, or none."""
        left_out = self._left_out
        try:
            with open_to_read(self._path) as plain, _unpacked(plain, self._path) as file:
                yield from self._records(file)
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, EOFError, zlib.error, MemoryError) as error:
            raise PalaError(f"Metrics '{self._path}' cannot be read, or are damaged: {reason(error)}.") from None
        if self._left_out > 0 and left_out == 0:
            lines = f"{self._left_out} lines that are" if self._left_out > 1 else "a line that is"
            log(f"Metrics '{self._path}': {lines} no record left out, line {self._first_left_out} first.")

    def _records(self, file: BinaryIO) -> Iterator[Record]:
        file.seek(self._offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            self._num_lines += 1
            record = _record_of(line)
            if record is not None:
                yield record
            elif line.strip() and _NO_RETURN not in line:
                self._left_out += 1
                self._first_left_out = self._first_left_out or self._num_lines


def _unpacked(file: BinaryIO, path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(file, "rb")) if path.suffix == ".gz" else file


def _record_of(line: bytes) -> Record | None:
    """Return what a line holds: an object with a type, finite times and steps, and numbers; None if it is no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("type"), str) or record["type"] not in _NEEDED:
        return None
    for key, value in record.items():
        if key in _TEXTS:
            is_right = isinstance(value, str)
        elif key in _SKETCHES:
            is_right = value is None or (isinstance(value, list) and all(map(is_number, value)))
        elif key in _STAMPS:
            is_right = is_number(value) and math.isfinite(value)
        else:
            is_right = value is None or isinstance(value, bool) or is_number(value)
        if not is_right:
            return None
    sketches = {None if (sketch := record.get(key)) is None else len(sketch) for key in _SKETCHES}
    is_whole = all(record.get(key) is not None for key in _NEEDED[record["type"]])
    return record if is_whole and len(sketches) == 1 else None


_TEXTS, _SKETCHES, _STAMPS = (
    ("type", "segment"),
    ("own_movement", "movement"),
    ("time_s", "local_steps", "global_steps"),
)
_NEEDED: dict[str, tuple[str, ...]] = {
    "start": ("time_s", "segment"),
    "episode": ("time_s", "global_steps", "return"),
    "interval": ("time_s", "global_steps"),
}


def _without_lost(tail: Tail) -> list[Record]:
    """Return the records of a rank without those that were made after a checkpoint and lost with a crash."""
    kept: list[Record] = []
    for record in tail.read():
        while record["type"] == "start" and kept and kept[-1]["time_s"] > record["time_s"]:
            kept.pop()  # they are in the order of time
        kept.append(record)
    return kept


def read_run(run: Path) -> list[list[Record]]:
    """Return every rank's records that count. Left out are those lost with a crash after a checkpoint, and those that a
    later segment, begun without their rank, did not continue from. Raises PalaError if a file is damaged."""
    ranks = [_without_lost(Tail(path)) for path in metrics_files(run)]
    starts = [record for records in ranks for record in records if record["type"] == "start"]
    starts.sort(key=lambda start: start["time_s"], reverse=True)
    begins = {start["segment"]: start["time_s"] for start in starts}  # the earliest, which comes last
    return [_gone_on_from(records, begins) for records in ranks]


def _gone_on_from(records: list[Record], begins: dict[str, float]) -> list[Record]:
    """Return a rank's records, each only if it is no younger than the later segments that began without this rank."""
    own = {
        r["segment"] for r in records if r["type"] == "start" and (r.get("rank") or 0) < (r.get("ranks") or math.inf)
    }
    kept, until_s = [], math.inf
    for record in records:
        if record["type"] == "start":
            later = (segment for segment in begins if is_later(segment, record["segment"]) and segment not in own)
            until_s = min((begins[segment] for segment in later), default=math.inf)
        if record["time_s"] <= until_s:
            kept.append(record)
    return kept


def is_later(segment: str, other: str) -> bool:
    """Return whether a segment's name, "segment-012", is of a later one; from 1,000 on they are longer."""
    return (len(segment), segment) > (len(other), other)


def progress_kept(own: Iterable[Sequence[float]], moved: Iterable[Sequence[float]]) -> float | None:
    """Return how far the mean of the models went along the mean of the ranks' own steps, over the length of that: 1 if
    no exchange took anything back. Sketches of any number of ranks and intervals; None if nothing was learned.
    """
    learned, went = np.sum(list(own), 0), np.sum(list(moved), 0)
    length = float(np.dot(learned, learned))
    return float(np.dot(went, learned)) / length if length > 0 else None
