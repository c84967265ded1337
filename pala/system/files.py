"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pala.system.errors import PalaError, reason


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a neighbour, flush to the disk, then rename: a reader sees the old file or the new one, whole.

    So does one after a crash of the machine. Raises OSError, and then the old file is as it was.
    """
    with open_atomically(path) as file:
        file.write(data)


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write a value as JSON, as `write_atomically` does."""
    write_atomically(path, (json_text(value, indent) + "\n").encode())


@contextlib.contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its place whole when the block ends: `write_atomically` for what is too large as bytes."""
    # A pipe or a device, `/dev/stdout` too, is for all programs: root's file would take its place.
    if os.path.realpath(path.parent) == "/dev" or (path.exists() and not (path.is_file() or path.is_dir())):
        raise OSError(f"'{path}' is a pipe or a device, not a file")
    neighbour = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # several may write at once
    try:
        with os.fdopen(os.open(neighbour, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(neighbour, path)
    except BaseException as error:  # ^C is none of the Exceptions
        with contextlib.suppress(OSError):  # a file system that was made read-only
            neighbour.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, os.fspath(neighbour)):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # a full disk names no file
        raise
    sync_folder(path.parent)


def open_to_read(path: Path) -> BinaryIO:
    """Open a regular file. Raises OSError for a folder, and for a pipe or a device, which might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would be waited for
    return _regular(descriptor, path, "rb")


def open_to_append(path: Path) -> BinaryIO:
    """Open a file to read and append to; it is made if it is not there. Raises OSError, also for a symbolic or hard
    link: in a folder that came from elsewhere it could lead to any file of the user's."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError:
        if path.is_symlink():
            raise OSError("it is a link, and links are not written through") from None
        raise
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError("it is a hard link, and links are not written through")
    return _regular(descriptor, path, "ab+")


def refuse_links(folder: Path) -> None:
    """Raise PalaError if anything below a folder is a symbolic or hard link, or neither a file nor a folder.

    Every program that works in a run's folder calls this first. A folder that came from elsewhere may hold links to
    the user's files: what is written or deleted there would change them, and what is read could be published. The
    folder itself may be reached over a link.
    """
    waiting = [folder]
    try:
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # a job that is at work here has renamed it
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(status.st_mode):
                            waiting.append(Path(entry.path))
                        else:
                            _refuse_link(entry.path, status)
    except OSError as error:
        raise PalaError(f"'{folder}' cannot be read: {reason(error)}.") from None


def _refuse_link(path: str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:  # some file systems count none
        return
    if stat.S_ISLNK(status.st_mode):
        what = "is a link"
    elif stat.S_ISREG(status.st_mode):
        what = "is a hard link: the file has another name, perhaps elsewhere"
    else:
        what = "is a pipe or a device, not a file"
    raise PalaError(
        f"'{path}' {what}. A run's folder may hold none: remove it, or put a copy of the file in its place."
    )


def append_lines(path: Path, lines: str) -> None:
    """Append whole lines. If the last line there has no end (a full disk, a killed rank), they begin on a new one.
    Raises OSError."""
    with open_to_append(path) as file:
        is_cut = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        file.write(("\n" * is_cut + lines).encode())


def _regular(descriptor: int, path: Path, mode: str) -> BinaryIO:
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise OSError(f"'{path}' is {'a folder' if stat.S_ISDIR(kind) else 'a pipe or a device'}, not a file")
    file: BinaryIO = open(descriptor, mode)  # type: ignore[assignment]  # noqa: SIM115
    return file


def read_json(path: Path, last_line: bool = False) -> Any:
    """Return what a JSON file holds, or its last line. Raises FileNotFoundError, and PalaError for any other fault."""
    try:
        with open_to_read(path) as file:
            data = file.read()
        return json.loads(data.splitlines()[-1] if last_line else data)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"'{path}' does not exist") from None
    except RecursionError:
        raise PalaError(f"'{path}' cannot be read: it is nested too deeply.") from None
    except (OSError, ValueError, IndexError, MemoryError) as error:
        raise PalaError(f"'{path}' cannot be read: {reason(error)}.") from None


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON that every reader takes, on one line unless indented. A number that is not finite is
    null."""
    style: dict[str, Any] = {"indent": indent, "separators": (",", ":") if indent is None else None, "allow_nan": False}
    try:
        return json.dumps(value, **style)
    except ValueError:
        return json.dumps(_finite(value), **style)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_number(value: Any) -> bool:
    """Return True for a number that any arithmetic can take: an integer in a JSON file may have any length."""
    return type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


def dated(name: str) -> str:
    """Return a name with the local time, to the second."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def make_output_folder(output: Path | None, what: str) -> Path:
    """Make a folder for a program's output, by default `runs/WHAT-TIME`. Raises PalaError if it exists already."""
    path = output or Path("runs") / dated(what)
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise PalaError(f"'{path}' exists already; nothing is written over. Choose another '--output'.") from None
    except OSError as error:
        raise PalaError(f"The folder '{path}' cannot be made: {reason(error)}; see '--output'.") from None
    return path


def check_output_file(output: Path) -> None:
    """Raise PalaError if a program cannot write its `--output` to this file, before it works for it."""
    folder = output.absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise PalaError(f"'--output': nothing can be written into '{folder}'; name a file in a folder that is there.")
    if output.is_dir():
        raise PalaError(f"'--output': '{output}' is a folder; name a file.")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it outlives a crash of the machine.

    Not every file system can. An error does not concern the caller: the file is whole and has its name already.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
