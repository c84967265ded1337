"""The exceptions that are meant for the user."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

_LONGEST = 200  # names are compared up to here: it takes the square of their length


class PalaError(Exception):
    """A mistake or a fault that the user can act on.

    The message is a full sentence that names the file, key, rank or peer and says what to do.
    `pala.train` and the other programs print it without a traceback and end with status 2.
    """

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows of it, in place of a traceback."""
        return [f"pala: error: {self}"]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `"; did you mean 'x'?"` for the known name closest to `name`, or an empty string if none is as alike as
    `cutoff`, in [0, 1]."""
    matches = difflib.get_close_matches(name[:_LONGEST], list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def reason(error: Exception) -> str:
    """Return why something failed, in words; an error of the system without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    return f"{error.strerror} ('{name}')" if name is not None else error.strerror


class SaveError(OSError):
    """A fault in writing a file of the run. What was written before is kept."""

    @classmethod
    def of(cls, error: OSError) -> SaveError:
        """Make the error for a run's file."""
        return cls(*error.args, *([error.filename] if error.filename is not None else []))


class EndError(PalaError):
    """An error that ends the whole job, though other ranks live: they do not answer, cannot continue without a rank
    that is gone, or have the same fault."""


class CollectiveError(PalaError):
    """A PalaError that every rank has raised together: one of them prints it, and none needs to be aborted."""
