"""The recorder of a rank's timeline: what its time is spent on, and which messages it sends and receives.

Whoever records holds a `Trace`, or None where nothing is recorded. An event is 32 bytes, put into a buffer that lies
ready and is written a few times a minute: nothing is formatted while training runs. `pala trace` makes of it what
viewers open (`pala/report/timeline.py`).

| bytes of the file | content |
|---|---|
| first line | JSON: rank, host, its clock against that of rank 0 |
| then | events of 32 bytes (`EVENT`); an event of kind `NAME` gives a name to a number of later ones |

A file that has half of `MOST_BYTES` becomes the earlier one, and a new one is begun; of three, the oldest is deleted.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pala.system.errors import reason
from pala.system.files import json_text
from pala.system.output import log

NAME, SPAN, SENT, RECEIVED, MARK = range(5)
"""Kinds of events: a name, a part of the rank's time, a message sent or received, a moment."""

EVENT = struct.Struct("<BxHIIIdd")
"""Event: kind, number of its name, peer, round of a message, its bytes (received: microseconds that it took to come),
and begin and end, in seconds of the rank's own clock. Where there is no peer, that is `NOBODY`."""

_NAMING = struct.Struct("<BxH28s")
NOBODY = 0xFFFFFFFF
MOST_BYTES = 64 * 2**20
"""Size of the files that a rank keeps of one start, together; about two million events."""

_pack_into, _EVENT_BYTES = EVENT.pack_into, EVENT.size
_BUFFERED = 4096  # events
_BUFFER_BYTES = _BUFFERED * _EVENT_BYTES
_WRITE_EVERY_S = 5.0  # a rank that is killed loses the events since
_SHORTEST_S = 1e-5  # of a part of a rank's time: looks at messages that find none are shorter, and most of all parts


class Trace:
    """Records one rank's events. Any thread may record."""

    def __init__(self, path: Path, **facts: Any) -> None:
        """Begin the file. `facts`: the first line. Raises OSError, also if the file is there already."""
        self._path, self._facts = path, facts
        self._names: dict[str, int] = {}
        self._buffer = bytearray(_BUFFER_BYTES)
        self._used = 0  # bytes of the buffer
        self._lock = threading.Lock()
        self._has_failed = self._is_closed = False
        self._descriptor, self._size = -1, 0  # of the file: its whole events
        self._begin_file()
        self._lap_s = time.perf_counter()
        self._write_at_s = self._lap_s + _WRITE_EVERY_S

    # ---- what is recorded ----------------------------------------------------------------------------------------

    def span(self, name: str, begin_s: float, end_s: float) -> None:
        """Record a part of the rank's time, unless it is very short. Parts lie one in the other, or apart."""
        if end_s - begin_s >= _SHORTEST_S:
            self._put(SPAN, name, NOBODY, 0, 0, begin_s, end_s)

    def lap(self, name: str) -> None:
        """Record the time since the last lap."""
        now_s = time.perf_counter()
        self.span(name, self._lap_s, now_s)
        self._lap_s = now_s

    def sent(self, name: str, peer: int, round_: int, num_bytes: int, begin_s: float) -> None:
        """Record a message that has just been handed to the transport; its sender began to make it at `begin_s`."""
        self._put(SENT, name, peer, round_ & NOBODY, num_bytes, begin_s, time.perf_counter())

    def received(self, name: str, peer: int, round_: int, took_s: float, begin_s: float) -> None:
        """Record a message that has just been taken in. It was whole at `begin_s`, `took_s` after its first byte."""
        took_us = min(int(1e6 * took_s), NOBODY)
        self._put(RECEIVED, name, peer, round_ & NOBODY, took_us, begin_s, time.perf_counter())

    def mark(self, name: str, peer: int = NOBODY) -> None:
        """Record a moment."""
        now_s = time.perf_counter()
        self._put(MARK, name, peer, 0, 0, now_s, now_s)

    def close(self) -> None:
        """Write what is in the buffer. Nothing is recorded any more."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._write()
                if self._descriptor >= 0:
                    os.close(self._descriptor)

    # ---- within --------------------------------------------------------------------------------------------------

    def _put(self, kind: int, name: str, peer: int, round_: int, number: int, begin_s: float, end_s: float) -> None:
        with self._lock:
            if self._is_closed:
                return
            of_name = self._names.get(name)
            if of_name is None:
                of_name = self._names[name] = len(self._names)
                self._append(_named(of_name, name))
            place = self._used
            _pack_into(self._buffer, place, kind, of_name, peer, round_, number, begin_s, end_s)
            self._used = place = place + _EVENT_BYTES
            if place == _BUFFER_BYTES or end_s > self._write_at_s:
                self._write()

    def _append(self, event: bytes) -> None:
        self._buffer[self._used : self._used + _EVENT_BYTES] = event
        self._used += _EVENT_BYTES
        if self._used == _BUFFER_BYTES:
            self._write()

    def _write(self) -> None:
        """Write the buffer behind the last whole event: what a full disk has cut is written over."""
        data, self._used = memoryview(self._buffer)[: self._used], 0
        self._write_at_s = time.perf_counter() + _WRITE_EVERY_S
        try:
            if self._descriptor < 0 or self._size + len(data) > MOST_BYTES // 2:
                self._begin_file()
            self._size += _write_whole(self._descriptor, data, self._size)
        except OSError as error:
            if not self._has_failed:
                log(f"The timeline '{self._path}' cannot be written: {reason(error)}. Training continues.")
            self._has_failed = True
            if not self._is_closed:
                for name, number in self._names.items():  # some may have been in what is lost
                    self._append(_named(number, name))

    def _begin_file(self) -> None:
        """Begin a new file, and keep the one before as the earlier one."""
        if self._descriptor >= 0:
            os.replace(self._path, earlier(self._path))
            os.close(self._descriptor)
            self._descriptor = -1
        names = b"".join(_named(number, name) for name, number in self._names.items())
        begin = (json_text(self._facts) + "\n").encode() + names
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o666)
        try:
            self._size = _write_whole(descriptor, begin, 0)
        except OSError:
            os.close(descriptor)
            self._path.unlink()
            raise
        self._descriptor = descriptor


@contextmanager
def traced(trace: Trace | None, name: str) -> Iterator[None]:
    """Record the block as a part of the rank's time, if anything is recorded."""
    begin_s = time.perf_counter()
    try:
        yield
    finally:
        if trace is not None:
            trace.span(name, begin_s, time.perf_counter())


def earlier(path: Path) -> Path:
    """Return where the events before those of this file are."""
    return path.with_name(f"{path.stem}.earlier{path.suffix}")


def trace_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's events."""
    return folder / f"rank-{rank:04d}.trace"


def _write_whole(descriptor: int, data: bytes | memoryview, place: int) -> int:
    """Write all of the data there; return its size. Raises OSError if there was room for a part of it only."""
    if os.pwrite(descriptor, data, place) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return len(data)


def _named(number: int, name: str) -> bytes:
    return _NAMING.pack(NAME, number, name.encode()[:28])
