"""Signals that end training, or have one rank leave it."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pala.system.output import log

_SECOND_S = 5.0  # after the first ^C another one does not wait for training to end
_told_forks: set[int] = set()  # processes, of which this may be one, that were sent ^C
_owner_heard = mmap.mmap(-1, 1)  # whether the process above was; its forks see it, too
LEAVE = signal.SIGUSR2  # asks a rank to leave a job that continues


def hangup() -> tuple[signal.Signals, ...]:
    """Return SIGHUP, which a terminal sends when it is closed; nothing where it is ignored, as under nohup."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


def _owner_hears_too() -> bool:
    """Return whether the process above a fork has heard ^C, or does so within a moment."""
    for _ in range(20):
        if _owner_heard[0]:
            return True
        time.sleep(0.01)
    return False


class Interrupt:
    """The signal that ends training: SIGTERM, SIGINT, SIGUSR1 or SIGHUP. Training looks at it every step and ends with
    a checkpoint. A second SIGINT, some seconds later, raises KeyboardInterrupt: perhaps an environment does not come
    back. SIGUSR2 asks this rank alone to leave; training looks at that after every update.

    Open MPI's mpirun kills its ranks 0.2 s after it has passed on SIGTERM or SIGINT. It only passes on SIGUSR1.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.leave_requested = False
        self._raises = False
        self._since_s = 0.0
        self._owner = 0  # the process whose signals are caught
        self._before: dict[signal.Signals, Any] = {}  # the handlers

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._owner:  # a fork, as an environment's, which does not look at `signal`
            # mpirun sends a rank's forks what it passes on to the rank. A first ^C that comes to the rank, too, is for
            # it, which ends them: a DataLoader's would else die under its batch.
            if number == signal.SIGINT and os.getpid() not in _told_forks and _owner_hears_too():
                _told_forks.add(os.getpid())
            elif number not in (signal.SIGUSR1, LEAVE):
                signal.signal(number, self._before[signal.Signals(number)])
                signal.raise_signal(number)
            return
        if number == LEAVE:
            self.leave_requested = True
            return
        if number == signal.SIGINT:
            _owner_heard[0] = 1
        if number != self.signal:
            self._since_s = time.monotonic()
        again = number == signal.SIGINT and time.monotonic() - self._since_s > _SECOND_S
        self.signal = signal.Signals(number)
        if self._raises or again:
            raise KeyboardInterrupt

    @contextmanager
    def raised_at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt when a signal comes inside the block, at its beginning if one came before. For code
        that does not look at `signal`."""
        try:
            self._raises = True
            if self.signal is not None:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    @contextmanager
    def installed(self) -> Iterator[Interrupt]:
        """Catch the signals inside the block and restore the previous handlers after it."""
        if threading.current_thread() is not threading.main_thread():  # which alone may catch signals
            yield self
            return
        caught = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *hangup(), LEAVE)
        self._owner, _owner_heard[0] = os.getpid(), 0
        self._before = {number: signal.getsignal(number) or signal.SIG_DFL for number in caught}
        previous = [signal.signal(number, self._on_signal) for number in caught]
        _caught.update(dict.fromkeys(caught, self._on_signal))
        self.leave_requested |= _take_early_leave()
        try:
            yield self
        finally:
            _caught.clear()
            for number, handler in zip(caught, previous, strict=True):
                if handler is not None:  # of a library, say a preloaded one: Python cannot give it back
                    signal.signal(number, handler)


@contextmanager
def raising_at_signals() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the first SIGTERM or SIGHUP inside the block, so that it cleans up; others are ignored
    from then on. Gives the signals that came. For a program that is no rank, in its main thread."""
    came: list[int] = []
    owner = os.getpid()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != owner:  # a fork, which has nothing to clean up
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not came:
            came.append(number)
            raise KeyboardInterrupt  # passes those who make environments again, which SystemExit does not

    is_main = threading.current_thread() is threading.main_thread()
    caught = [n for n in (signal.SIGTERM, *hangup()) if is_main and signal.getsignal(n) is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, on_signal)
    try:
        yield came
    finally:
        for number in caught:
            if signal.getsignal(number) is on_signal:  # else the program has its own way
                signal.signal(number, signal.SIG_DFL)


_told_early = False  # to leave, before an `Interrupt` was there to hear it


def _on_early_leave(number: int, frame: FrameType | None) -> None:
    global _told_early
    del number, frame
    _told_early = True


def note_leave() -> None:
    """Note from now on that this process is told to leave, for the `Interrupt` that is installed later; without a
    handler the signal would kill it. A handler of the user's stays. Call it early, on the main thread."""
    if signal.getsignal(LEAVE) in (signal.SIG_DFL, signal.SIG_IGN):  # ignored by who started it, for the same reason
        signal.signal(LEAVE, _on_early_leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [LEAVE])  # blocked, perhaps, by what started the launcher


def note_on_thread(way_out: str) -> None:
    """Say, where this is not the main thread, which alone may catch signals, what they do to training. `way_out`: what
    ends training otherwise, as a command."""
    if threading.current_thread() is not threading.main_thread():
        log(
            "Training runs in a thread, which hears no signals: SIGTERM or SIGUSR1 ends the process at once. Train in "
            f"the main thread; or catch the signal there, and {way_out}, which ends training."
        )


def _take_early_leave() -> bool:
    global _told_early
    told, _told_early = _told_early, False
    return told


_caught: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {}  # while an `Interrupt` is installed


def take_back_signals() -> None:
    """Take back the signals of an `Interrupt` that an environment's code has caught for itself since."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number, handler in _caught.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
            log(f"The environment's code had caught {number.name}, by which training is told to end: taken back.")
