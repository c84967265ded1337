"""The live panel on a terminal, and in a notebook. Loads rich."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel as Box
from rich.table import Table

from pala.system.launcher import terminal_size
from pala.system.output import divert


def boxed(title: str, figures: Mapping[str, str]) -> Box:
    """Return the panel, to be drawn by rich. `figures`: label -> text, in the order shown."""
    table = Table.grid(padding=(0, 2))
    for label, text in figures.items():
        table.add_row(f"[bold]{label}[/bold]", text)
    return Box(table, title=escape(title), title_align="left")


class Panel:
    """A panel that stays in place. No thread refreshes it."""

    def __init__(self, title: str, size: tuple[int, int]) -> None:
        # The launcher's terminal decides; this process may only have a pipe.
        os.environ.setdefault("TERM", "xterm")
        self._title = title
        console = Console(file=sys.stdout, force_terminal=True, width=min(size[0], 100), height=size[1])
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()
        if terminal_size(2) is not None:
            divert(self._say)
        console.show_cursor(True)  # a launcher that ^C ends leaves no time to bring it back

    def show(self, figures: dict[str, str]) -> None:
        # Launchers pass on whole lines: an empty last one, which needs no end, keeps the lower border from lagging.
        self._live.update(Group(boxed(self._title, figures), ""), refresh=True)

    def _say(self, message: str) -> bool:
        """Print what this rank says above the panel, which would be drawn over it."""
        try:
            self._live.console.print(message, markup=False, highlight=False, soft_wrap=True)
        except (OSError, SystemExit, UnicodeError):
            return False
        return True

    def close(self) -> None:
        """Leave the last state on the screen."""
        divert(None)
        self._live.stop()


class CellPanel:
    """A panel in the output of a notebook's cell, which each state replaces."""

    def __init__(self, title: str) -> None:
        from IPython.display import DisplayHandle  # the notebook has it

        self._title, self._shown = title, DisplayHandle()
        self._shown.display(boxed(title, {}))

    def show(self, figures: dict[str, str]) -> None:
        self._shown.update(boxed(self._title, figures))

    def close(self) -> None:
        """Leave the last state in the cell."""
