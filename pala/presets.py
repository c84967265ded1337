"""The program `pala presets`: the names of the presets that come with PALA."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from pala.config.presets import COMPARISONS, names
from pala.system.command_line import exit_on_mistake, read_command
from pala.system.errors import PalaError, nearest
from pala.system.output import print_result


@dataclass(frozen=True)
class Command:
    """Print the names of the presets that come with PALA, one a line."""

    words: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Only names that contain all of these."""


@exit_on_mistake()
def main() -> None:
    """Run `pala presets`."""
    words = read_command("pala.presets", sys.argv[1:], Command()).words
    known = names()
    every = [*known, *(f"{name} (of `pala compare`)" for name in names(COMPARISONS))]
    found = [line for line in every if all(word.lower() in line for word in words)]
    if not found:
        text = " ".join(words)
        raise PalaError(f"no preset's name contains '{text}'{nearest(text, known) or '; without it all are listed.'}")
    print_result("\n".join(found))


if __name__ == "__main__":
    main()
