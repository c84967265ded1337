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
from pala.run.session import Result
from pala.system.errors import PalaError


def conclude(result: Result, config: Config) -> int:
    """Evaluate the final policy, draw the learning curve, and say where everything is. Returns the exit status: 130 if
    that was interrupted, else 0."""
    print(f"PALA  {result.status} after {result.global_steps:,} steps: {result.run}", flush=True)
    if result.signal is not None:
        print(f"      go on with: python -m pala.train --resume {result.run}")
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
            print(f"      {what}: {action()}", flush=True)
        except (PalaError, OSError) as error:
            print(f"      {what}: {error}", flush=True)
        except KeyboardInterrupt:
            print(f"      {what}: interrupted; `python -m pala.evaluate {result.run}` makes up for it", flush=True)
            return 130
    return 0


def _raise_interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _evaluate(run: Path, config: Config) -> str:
    settings = config.evaluation
    if settings.episodes == 0:
        return "left out ('evaluation.episodes' is 0)"
    print(f"      evaluation: plays {settings.episodes:,} episodes", flush=True)
    evaluation = evaluate(
        run, settings.episodes, settings.num_envs, settings.greedy, config.seed, threads=len(os.sched_getaffinity(0))
    )
    save(run, evaluation)
    return f"{evaluation} ({run / 'evaluation.json'})"


def _draw(run: Path) -> str:
    return str(plot([run], run / "learning_curve.png"))
