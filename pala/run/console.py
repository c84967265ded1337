"""The console of the rank that leads: a live panel on a terminal or in a notebook, else one line every few seconds.
Made from metrics files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pala.config import Config, to_table
from pala.config.influence import settings_that_matter
from pala.run.entropy_watch import EntropyWatch
from pala.run.metrics import SECTIONS
from pala.run.tensorboard import FOLDER, TensorBoard
from pala.run.view import RunView
from pala.system.errors import reason
from pala.system.launcher import terminal_size
from pala.system.output import log, print_result
from pala.system.tables import flatten
from pala.system.text import counted, duration

if TYPE_CHECKING:
    from pala.run.panel import CellPanel, Panel  # rich


def _number(value: float | None, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(value)


class Figures:
    """The figures that the console shows, from the view of the run and the steps that this rank knows of."""

    def __init__(self, view: RunView, budget_steps: int) -> None:
        self._view, self.budget_steps = view, budget_steps
        self.global_steps = 0

    def refresh(self, global_steps: int) -> None:
        """Read the files; `global_steps` is what this rank's exchange knows."""
        self._view.refresh()
        self.global_steps = min(global_steps, self.budget_steps)

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at the speed of the last interval; None before there is one that tells. Gorila first fills
        its replay, which is faster than to learn."""
        view, speed = self._view, self._view.global_steps_per_s
        if not speed or (view.mean("epsilon") is not None and not view.has_learned_throughout):
            return None
        return (self.budget_steps - self.global_steps) / speed

    def texts(self) -> dict[str, str]:
        """Label -> text, in the order shown."""
        view, speed = self._view, self._view.global_steps_per_s
        share, left_s = self.global_steps / self.budget_steps, self.left_s
        episodes, failures = view.num_episodes, view.total("env_failures")
        return {
            "steps": f"{self.global_steps:,} of {self.budget_steps:,} ({share:.1%})",
            "eta": "-" if left_s is None else duration(left_s),
            "steps/s": f"{speed:,.0f}",
            "return": f"{_number(view.mean_return, '{:.2f}')} (mean of {'the last 100 of ' * (episodes > 100)}"
            f"{counted(episodes, 'episode')})" + f", {failures:.0f} failures of environments" * (failures > 0),
            **(self._server() if view.mean("epsilon") is not None else self._exchange()),
            "time": " ".join(f"{name} {_number(view.mean('time_' + name), '{:.0%}')}" for name in SECTIONS),
        }

    def _exchange(self) -> dict[str, str]:
        """Return the figures that A2C has."""
        view = self._view
        relative = view.mean("consensus_distance_relative")
        mixes = view.total("mixes")
        staleness = max((view.last[rank].get("staleness_updates") or 0 for rank in view.living), default=0)
        skipped = view.total("updates_skipped")
        value_loss = f"value loss {_number(view.mean('loss_value'), '{:.4f}')}"
        return {
            "learning": f"entropy {_number(view.mean('entropy'), '{:.3f}')}, {value_loss}"
            + f", {skipped:.0f} updates skipped" * (skipped > 0),
            "consensus": f"{_number(view.mean('consensus_distance'), '{:.3f}')} ({_number(relative, '{:.2%}')})",
            "staleness": f"{counted(staleness, 'update')} at most, {mixes:.0f} mixes",
        }

    def _server(self) -> dict[str, str]:
        """Return the figures that Gorila has."""
        view = self._view
        by_shards = sum(view.mean(f"gradients_{why}") or 0 for why in ("stale", "not_finite"))  # each has its slice
        discarded = view.total("gradients_filtered") + by_shards
        return {
            "server": f"{_number(view.mean('server_updates'), '{:,.0f}')} updates, {discarded:.0f} gradients discarded",
            "replay": f"{view.total('replay_transitions'):,.0f} transitions",
            "epsilon": _number(view.mean("epsilon"), "{:.3f}"),
        }


class Lines:
    """One line each time, without control characters."""

    def show(self, figures: dict[str, str]) -> None:
        """Show the figures: label -> text, in this order."""
        print_result(" | ".join(f"{label} {text}" for label, text in figures.items()))

    def close(self) -> None:
        """Close the output; there is nothing to restore."""


def make_console(kind: str, title: str) -> Lines | Panel | CellPanel | None:
    """Make a panel or lines; `auto` takes a panel in a notebook and where the job's output reaches a terminal."""
    size = terminal_size() if kind in ("auto", "panel") else None
    if kind == "none":
        return None
    ipython = sys.modules.get("IPython")
    if kind != "lines" and ipython is not None and hasattr(ipython.get_ipython(), "kernel"):  # else of a terminal
        from pala.run.panel import CellPanel

        return CellPanel(title)
    is_dumb = os.environ.get("TERM", "xterm").lower() in ("dumb", "unknown")  # on which rich draws nothing
    if kind == "panel" or (kind == "auto" and size is not None and not is_dumb):
        from pala.run.panel import Panel  # only the rank that draws one loads rich

        return Panel(title, size or (100, 40))
    return Lines()


class Reporter:
    """Reads the metrics files of all ranks and feeds console and TensorBoard; one rank has it."""

    def __init__(self, run: Path, ranks: int, config: Config, begin_steps: int | None = None) -> None:
        """`ranks`: number of those that train at first; `begin_steps`: steps of all ranks at the start, after which
        earlier jobs' events in TensorBoard do not count; None for a rank that continues another one's: all count."""
        self.view = RunView(run, ranks + config.run.spares)
        self.view.living = range(ranks)
        self._figures = Figures(self.view, config.total_steps)
        self._entropy = EntropyWatch(config.total_steps, begin_steps)
        title = f"PALA  {run}  {counted(ranks, 'rank')}"
        self._console: Lines | Panel | CellPanel | None = None
        with self._losing_the_console():
            self._console = make_console(config.run.console, title)
        self._tensorboard: TensorBoard | None = None
        if config.run.tensorboard:
            with self._losing_tensorboard():
                self._tensorboard = TensorBoard(run / FOLDER, begin_steps)
                self._tensorboard.describe({"ranks": ranks} | settings_that_matter(flatten(to_table(config))))

    def report(self, global_steps: int) -> dict[str, Any]:
        """Read what is new, show it and return it."""
        self._figures.refresh(global_steps)
        texts = self._figures.texts()
        with self._losing_the_console():
            if self._console is not None:
                self._console.show(texts)
        if said := self._entropy.look(self.view.mean("entropy"), global_steps):
            log(said)
        with self._losing_tensorboard():
            if self._tensorboard is not None:
                self._tensorboard.add(self.view, global_steps)
        return texts

    def close(self) -> None:
        """Give the terminal back and flush."""
        with self._losing_the_console():
            if self._console is not None:
                self._console.close()
        with self._losing_tensorboard():
            if self._tensorboard is not None:
                self._tensorboard.close()

    @contextmanager
    def _losing_the_console(self) -> Iterator[None]:
        """Continue training without the console where it cannot be written: its terminal is gone; where a pipe's reader
        is, rich ends the program."""
        try:
            yield
        except (OSError, SystemExit, UnicodeError):
            self._console = None

    @contextmanager
    def _losing_tensorboard(self) -> Iterator[None]:
        """Continue training without TensorBoard's files, a copy of the metrics, if they cannot be written."""
        try:
            yield
        except Exception as error:  # TensorFlow, where it is installed, has errors of its own for a full disk
            log(f"TensorBoard's files cannot be written any more: {reason(error)}. Training continues.")
            self._tensorboard = None
