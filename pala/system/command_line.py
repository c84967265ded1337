"""The command line of every program: it is read into a dataclass, and a mistake ends in one error message."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import itertools
import math
import re
import signal
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeVar

import tyro

from pala.system.errors import PalaError, nearest, reason
from pala.system.interrupt import raising_at_signals
from pala.system.launcher import speaks
from pala.system.output import check_printed, log, open_closed_streams, print_result
from pala.system.search_path import refuse_deleted_folder

C = TypeVar("C")
_TRUTHS = ("true", "false", "1", "0", "yes", "no", "on", "off")


def read_command(program: str, arguments: list[str], default: C) -> C:
    """Return the command line laid over `default`, an instance of the program's `Command`. Raises PalaError.

    `program`: how it is called, as `pala plot`. `--help` is printed, on rank 0 only, and ends the program.
    """
    refuse_deleted_folder()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            _check_switches(arguments, {f"--{name}" for name in _options(default, bool)})
            _check_lists(arguments, {f"--{name}" for name in _options(default, tuple) if "." not in name})
            arguments = _without_exponents(arguments, {name.rpartition(".")[2] for name in _options(default, int)})
            words = inspect.getdoc(type(default))  # all of it: tyro itself takes the first paragraph
            return tyro.cli(type(default), args=arguments, default=default, prog=_called(program), description=words)
    except SystemExit as exit_:
        if not exit_.code:  # --help
            if speaks():
                print_result(printed.getvalue().rstrip("\n"))
            raise
        raise PalaError(f"the command line was not understood.\n{printed.getvalue()}") from None


def check_choices(option: str, values: Iterable[str], known: Collection[str]) -> None:
    """Raise PalaError if one of an option's values is not known."""
    for value in values:
        if value not in known:
            raise PalaError(f"'--{option}': '{value}' is none of {', '.join(known)}{nearest(value, known) or '.'}")


def check_least(option: str, value: float, least: float) -> None:
    """Raise PalaError if an option's value is below `least`, infinite or NaN."""
    if not least <= value < math.inf:
        raise PalaError(f"'--{option}' is {value:g} but must be a number of at least {least}.")


def _called(program: str) -> str:
    """Return how the user called the program: by its module, or by `pala`."""
    return sys.argv[0] if sys.argv[0].startswith("pala ") else program


def _options(command: Any, kind: type, section: str = "") -> list[str]:
    """Return the names of all options whose value is of a kind, as bool or int: `total-steps`, `a2c.rollout-steps`."""
    names = []
    for field in dataclasses.fields(command):
        value, name = getattr(command, field.name, None), field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            flattened = name in ("config", "conditions")  # tyro.conf.arg(name="")
            names += _options(value, kind, "" if flattened else f"{section}{name}.")
        elif type(value) is kind:
            names.append(section + name)
    return names


def _check_switches(arguments: list[str], switches: set[str]) -> None:
    """Raise PalaError for a switch with a value, which would be taken for something else."""
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument.replace("_", "-").partition("=")
        name = re.sub(r"^--(.*\.)?no-", r"--\1", name)
        if name in switches and (value if equals else following).lower() in _TRUTHS:
            negative = re.sub(r"^--(.*\.)?", r"--\1no-", name)
            raise PalaError(f"'{name}' is a switch and takes no value: write `{name}` or `{negative}`.")


def _check_lists(arguments: list[str], lists: set[str]) -> None:
    """Raise PalaError for an option that takes values and has none: it would be taken for its default, or for all."""
    for argument, following in itertools.pairwise([*arguments, "--"]):
        if argument.replace("_", "-") in lists and following.startswith("--"):
            raise PalaError(f"'{argument}' names nothing.")


def _without_exponents(arguments: list[str], integers: set[str]) -> list[str]:
    """Return the arguments with integers written out: `1e6` -> `1000000`. A fraction stays as it is."""
    joined: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if not equals and joined:
            option, value = joined[-1], argument
        if option.startswith("--") and option[2:].rpartition(".")[2].replace("_", "-") in integers:
            with contextlib.suppress(ValueError, OverflowError):
                if "e" in value.lower() and float(value).is_integer():
                    argument = f"{option}={int(float(value))}" if equals else str(int(float(value)))
        joined.append(argument)
    return joined


@contextlib.contextmanager
def exit_on_mistake(*mistakes: type[Exception]) -> Iterator[None]:
    """End a program that uses no MPI with status 2 after a PalaError, or one of `mistakes`, and print its message. ^C
    ends it with status 130; SIGTERM and SIGHUP end it in the same way, with theirs. None leaves a traceback or an
    unfinished file."""
    expected: tuple[type[Exception], ...] = (PalaError, *mistakes)
    open_closed_streams()
    with raising_at_signals() as came:
        try:
            yield
            check_printed()
        except expected as error:
            log(f"pala: error: {reason(error)}")
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(128 + (came[0] if came else signal.SIGINT))
