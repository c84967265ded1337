"""The program `pala presets`: the presets that come with PALA, by family or by name."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from typing import Annotated

import tyro

from pala.config.presets import COMPARISONS, families, names
from pala.system.command_line import exit_on_mistake, read_command
from pala.system.errors import PalaError, nearest
from pala.system.output import print_result

_MOST_SHOWN = 12


@dataclass(frozen=True)
class Command:
    """Print which presets come with PALA: what each family is, or the names that contain some words, one a line."""

    words: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Words that all names contain. Without any the families are printed."""


@exit_on_mistake()
def main() -> None:
    """Run `pala presets`."""
    words = read_command("pala presets", sys.argv[1:], Command()).words
    if not words:
        print_result(_families())
        return
    known = names()
    every = [*known, *(f"{name} (of `pala compare`)" for name in names(COMPARISONS))]
    found = [line for line in every if all(word.lower() in line for word in words)]
    if not found:
        text = " ".join(words)
        raise PalaError(
            f"no preset's name contains '{text}'{nearest(text, known) or '; `pala presets` lists the families.'}"
        )
    print_result("\n".join(found))


def _families() -> str:
    """Return the presets of each family, and what they are."""
    blocks = [*families().values(), (names(COMPARISONS), "Comparisons: `pala compare NAME`.")]
    lines = []
    for members, what in blocks:
        more = f", and {len(members) - 4} more" if len(members) > _MOST_SHOWN else ""
        shown = ", ".join(members[: 4 if more else None]) + more
        lines += [
            *textwrap.wrap(shown, 100),
            *textwrap.wrap(what, 100, initial_indent="    ", subsequent_indent="    "),
        ]
    return "\n".join([*lines, "`pala presets WORD` lists all names with WORD."])


if __name__ == "__main__":
    main()
