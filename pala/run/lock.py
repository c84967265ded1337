"""The locks of a run's folder: one job at a time works in it, and one supervisor. No process that died keeps one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pala.run.provenance import now_utc
from pala.system.errors import EndError, PalaError, reason
from pala.system.files import open_to_append, open_to_read
from pala.system.output import log

LOCK = ".lock"  # says who holds it; means nothing while nobody does


def lock_folder(run: Path) -> BinaryIO | None:
    """Keep other jobs out of a folder, a run's or a comparison's, until the file that is returned is closed, or this
    process ends.

    For rank 0; the others then `join_lock`, so that the folder stays locked while any of them lives. The kernel (of a
    network file system, its server) lets go when a process ends, however it ends: there is no stale lock, but
    that a server may keep a dead host's for minutes.

    Raises PalaError if another job works in the folder. Where the file system has no locks, says so and returns None.
    """
    try:
        file = open_to_append(run / LOCK)  # the lock lasts as long as it is open
    except OSError as error:
        raise PalaError(
            f"No job can work in folder '{run}': its '{LOCK}' cannot be opened ({reason(error)})."
        ) from None
    try:
        _lock_for_one(file)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # not atomic: another job may come in between, and wins
    except BlockingIOError:
        file.close()
        raise PalaError(
            f"Another job works in folder '{run}' ({_holder(run / LOCK)}), and two would mix their files. Wait for "
            "its end or stop it, then give this command again."
        ) from None
    except OSError as error:
        file.close()
        log(f"Folder '{run}' cannot be locked ({reason(error)}): see to it that no other job works in it.")
        return None
    return file


def _lock_for_one(file: BinaryIO) -> None:
    """Lock an open file for this process alone, and say so in it. Raises OSError, BlockingIOError if another has it."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with contextlib.suppress(OSError):  # a full disk: the text is for people only
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {now_utc()}".encode())
        file.flush()


def cannot_be_made(path: Path, why: str) -> PalaError:
    """Return the error of a run whose folder cannot be made."""
    return PalaError(f"Run folder '{path}' cannot be made: {why}; see 'run.dir'.")


class SupervisedError(PalaError):
    """Another supervisor works on the run: on this host, or perhaps on one that is dead."""

    def __init__(self, run: Path, holder: str) -> None:
        super().__init__(
            f"Another supervisor works on run '{run}' ({holder}). Wait for its end or stop it, then give this command "
            "again."
        )
        self.is_here = f" on {platform.node()}, since" in holder


@contextlib.contextmanager
def supervised(run: Path) -> Iterator[None]:
    """Keep other supervisors away from a run, whose folder may not be there yet, until the block ends or this process
    does: by a file beside the folder. Raises SupervisedError if another supervises it, and PalaError if the folder is
    not there and cannot be made.
    """
    folder = run.resolve()
    path = folder.with_name(f".{folder.name}.supervisor")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _locked_file(path)
    except BlockingIOError:
        raise SupervisedError(run, _holder(path)) from None
    except OSError as error:
        # A fault of the lock, as where there are none, names no file.
        if error.filename is not None and not os.path.lexists(folder):
            raise cannot_be_made(run, reason(error)) from None
        log(f"'{path}' cannot be locked ({reason(error)}): make sure that no other process supervises the run.")
        yield
        return
    with file:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def _locked_file(path: Path) -> BinaryIO:
    """Return a file that this process has locked; it may be deleted as long as it is. Raises OSError."""
    while True:
        file = open_to_append(path)
        try:
            _lock_for_one(file)
            with contextlib.suppress(FileNotFoundError):  # deleted, perhaps in just this moment
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()  # who had it before has just deleted it


def lock_identity(lock: BinaryIO | None) -> tuple[int, int] | None:
    """Return (device, inode) of the lock file: they differ if the folder was deleted and made again."""
    if lock is None:
        return None
    status = os.fstat(lock.fileno())
    return status.st_dev, status.st_ino


def check_identity(run: Path, identity: tuple[int, int] | None) -> None:
    """Raise EndError if another folder, which another job has locked, has taken the place of the one of this identity;
    None: of any."""
    try:
        status = (run / LOCK).stat()
    except OSError:  # deleted, or it does not answer: what is written to it fails by itself
        return
    if identity is not None and identity != (status.st_dev, status.st_ino):
        raise EndError(
            f"Run folder '{run}' was deleted while this job trained, and another job works in a new one of that name "
            f"({_holder(run / LOCK)}): this job ends here, and has written nothing to it."
        )


def join_lock(run: Path) -> BinaryIO:
    """Share the lock that rank 0 holds. Raises PalaError if this rank cannot see the same folder."""
    try:
        file = open_to_read(run / LOCK)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        raise PalaError(
            f"host {platform.node()} cannot use run folder '{run}' as rank 0's host does ({reason(error)}). All hosts "
            "need one common file system; 'run.dir' must be on it."
        ) from None
    return file


def who_trains(run: Path) -> str | None:
    """Return what the job that has this folder locked says of itself; None if there is none, or no locks."""
    return _holder(run / LOCK) if is_locked(run) else None


def is_locked(run: Path) -> bool | None:
    """Return whether a process has the folder locked; None where that cannot be told (no lock file, no locks,
    no access)."""
    lock = run / LOCK
    try:
        if not lock.exists():  # who only asks makes none: a rank whose file was deleted would take it for another job's
            return None
        with open_to_append(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _holder(lock: Path) -> str:
    try:
        with open_to_read(lock) as file:
            return file.read(200).decode(errors="replace") or "it does not say which"
    except OSError:
        return "it is ending"
