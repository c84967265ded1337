"""Watch a run's policy play: `pala play runs/pong-...`.

    until the window is closed     pala play RUN
    the most probable actions      pala play RUN --greedy

The window needs pygame (`pip install pygame-ce`) and a display. Escape closes it. As a file:
`pala evaluate RUN --video FILE.mp4 --episodes 0`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pala.run import run_folder
from pala.system.command_line import exit_on_mistake, read_command
from pala.system.errors import PalaError
from pala.system.output import print_result
from pala.system.resources import prepare

_PROGRAM = "pala play"
_THREADS = 1  # one environment, one observation at a time


@dataclass(frozen=True)
class Command:
    """Watch a run's policy play, in a window."""

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """Folder of the run."""
    episodes: int = 0
    """Episodes that the window shows; 0: until it is closed."""
    greedy: bool = False
    """The most probable action instead of a sampled one; Gorila: no random actions."""
    seed: int = 0
    """Equal seeds give equal episodes."""
    best: bool = False
    """Not the final policy, but the one of the checkpoint after which 100 training episodes had the best mean."""
    trust_run: bool = False
    """Run the code that the run names or holds (environment, network, wrappers), though it came from elsewhere."""


@exit_on_mistake()
def main() -> None:
    """Run `pala play`."""
    command = read_command(_PROGRAM, sys.argv[1:], Command())
    if command.run is None:
        raise PalaError("Name the folder of the run to watch; `--help` explains the options.")
    run_folder.read(command.run)  # before torch, whose loading takes seconds
    prepare(_THREADS)
    from pala.evaluation.scoring import Acting
    from pala.evaluation.video import Window, filmed, words_of

    acting = Acting(command.greedy, command.seed, _THREADS, command.trust_run, command.best)
    told = 0
    with (
        contextlib.closing(Window(f"PALA  {command.run}")) as window,
        filmed(command.run, command.episodes, acting) as film,
    ):
        for picture in itertools.chain(film.pictures, [None]):  # the last episode ends without a picture
            for episode in film.ended[told:]:
                print_result(words_of(episode))
            told = len(film.ended)
            if picture is None or not window.show(picture, film.frames_per_s):
                break
