"""What all programs do alike: read the command line into a dataclass, and end with one sentence after a mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import tyro

from pala.system.errors import PalaError
from pala.system.runtime import Launch, say

C = TypeVar("C")


def read_command(program: str, arguments: list[str], default: C) -> C:
    """The command line over `default`, an instance of the program's `Command`. Raises PalaError.

    `program` is its module, as in `python -m pala.plot`. `--help` is printed, on rank 0 only, and ends the program.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            arguments = _without_exponents(arguments, _integers(default))
            return tyro.cli(type(default), args=arguments, default=default, prog=_called(program))
    except SystemExit as exit_:
        if not exit_.code:  # --help
            if Launch.detect().rank == 0:
                print(printed.getvalue(), end="")
            raise
        raise PalaError(f"the command line was not understood.\n{printed.getvalue()}") from None


def _called(program: str) -> str:
    """As the user called it: by its module, or by the one command for all programs."""
    return sys.argv[0] if sys.argv[0].startswith("pala ") else f"python -m {program}"


def _integers(command: Any) -> set[str]:
    """Last parts of the names of all options that are integers: `total-steps`, `seed`."""
    names = set()
    for field in dataclasses.fields(command):
        value = getattr(command, field.name, None)
        if dataclasses.is_dataclass(value):
            names |= _integers(value)
        elif type(value) is int:
            names.add(field.name.replace("_", "-"))
    return names


def _without_exponents(arguments: list[str], integers: set[str]) -> list[str]:
    """`--total-steps 1e6` -> `--total-steps 1000000`, and so for all integers; a fraction stays as it is."""
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
    """Around a program that uses no MPI: a PalaError, or one of `mistakes`, is printed as its sentence and ends it with
    status 2; ^C ends it with status 130. Neither leaves a traceback."""
    expected: tuple[type[Exception], ...] = (PalaError, *mistakes)
    try:
        yield
    except expected as error:
        say(f"pala: error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
