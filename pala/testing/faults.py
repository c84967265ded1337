"""Faults by script, for ranks that are threads of one process (`memory.run_ranks`). n counts from 1."""

from __future__ import annotations

import time
from collections.abc import Callable
from signal import SIGUSR1, Signals
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pala.testing.memory import MemoryCommunicator


class ToRank(NamedTuple):
    """Something that happens to a rank when it has made its n-th update, or is about to send its n-th message, of any
    kind."""

    rank: int
    when: Literal["update", "message"]
    n: int
    happens: Callable[[MemoryCommunicator], None]


class OnTheWay(NamedTuple):
    """Something that happens to the n-th bulk message from one rank to another."""

    sender: int
    receiver: int
    n: int
    becomes: Callable[[np.ndarray], np.ndarray | None]
    """uint8 [bytes] -> the bytes that arrive; None if the message is lost."""


Fault = ToRank | OnTheWay


def fail_at(rank: int, update: int) -> Fault:
    """Let the rank die as if killed, between two updates."""
    return ToRank(rank, "update", update, lambda comm: comm.die())


def fail_at_message(rank: int, n: int) -> Fault:
    """Let the rank die as if killed, instead of sending its n-th message; also ranks that make no updates send some."""
    return ToRank(rank, "message", n, lambda comm: comm.die())


def stop_at(rank: int, update: int, seconds: float) -> Fault:
    """Suspend the rank for a while, as by SIGSTOP: neither its learner nor its transport does anything."""
    return ToRank(rank, "update", update, lambda comm: comm.be_stopped_until(time.monotonic() + seconds))


def stop_at_message(rank: int, n: int, seconds: float = 1e6) -> Fault:
    """Suspend the rank when it is about to send its n-th message; if nothing else is said, until it is alone."""
    return ToRank(rank, "message", n, lambda comm: comm.be_stopped_until(time.monotonic() + seconds))


def signal_at(rank: int, update: int, signal: Signals = SIGUSR1) -> Fault:
    """Send the rank a signal that asks it to end."""
    return ToRank(rank, "update", update, lambda comm: setattr(comm.interrupt, "signal", signal))


def leave_at(rank: int, update: int) -> Fault:
    """Send the rank the signal by which it leaves a job that continues."""
    return ToRank(rank, "update", update, lambda comm: setattr(comm.interrupt, "leave_requested", True))


def drop(sender: int, receiver: int, n: int) -> Fault:
    """Lose the n-th bulk message between the two."""
    return OnTheWay(sender, receiver, n, lambda data: None)


def corrupt(sender: int, receiver: int, n: int) -> Fault:
    """Invert every bit of the n-th bulk message between the two."""
    return OnTheWay(sender, receiver, n, np.invert)
