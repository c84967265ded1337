"""What one rank does after training, alone and without MPI, with all cores of its host."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pala.config import Config
from pala.evaluation.play import evaluate
from pala.evaluation.record import save
from pala.plot import plot
from pala.run.result import Result
from pala.system.errors import PalaError
from pala.system.runtime import tell


def conclude(result: Result, config: Config) -> int:
    """Evaluate the final policy, draw the learning curve, and say where everything is. Returns the exit status: 130 if
    that was interrupted, else 0."""
    tell(f"PALA  {result.status} after {result.global_steps:,} steps: {result.run}")
    if result.signal is not None:
        tell(f"      go on with: python -m pala.train --resume {result.run}")
        return 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _raise_interrupt)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the other ranks are gone: use all cores
    last_words: list[tuple[str, Callable[[], str]]] = [
        ("evaluation", lambda: _evaluate(result.run, config)),
        ("learning curve", lambda: _draw(result.run)),
    ]
    for what, action in last_words:
        try:
            tell(f"      {what}: {action()}")
        except (PalaError, OSError) as error:
            tell(f"      {what}: {error}")
        except KeyboardInterrupt:
            tell(f"      {what}: interrupted; `python -m pala.evaluate {result.run}` makes up for it")
            return 130
    return 0


def _raise_interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _evaluate(run: Path, config: Config) -> str:
    settings = config.evaluation
    if settings.episodes == 0:
        return "left out ('evaluation.episodes' is 0)"
    tell(f"      evaluation: plays {settings.episodes:,} episodes")
    evaluation = evaluate(
        run, settings.episodes, settings.num_envs, settings.greedy, config.seed, threads=len(os.sched_getaffinity(0))
    )
    save(run, evaluation)
    return f"{evaluation} ({run / 'evaluation.json'})"


def _draw(run: Path) -> str:
    return str(plot([run], run / "learning_curve.png"))
