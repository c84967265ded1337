"""What the first rank does after training, alone and without MPI, with all cores of its host; the others sleep."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from pala.config import Config
from pala.evaluation.play import evaluate
from pala.evaluation.record import save
from pala.plot import plot
from pala.run.result import Conclusion, Result
from pala.run.tensorboard import FOLDER, TensorBoard
from pala.system.errors import PalaError
from pala.system.runtime import Interrupt, say, tell


def conclude(result: Result, config: Config, interrupt: Interrupt) -> Conclusion:
    """Evaluate the final policy, draw the learning curve, and say where everything is. The exit status is 128 + the
    signal if one interrupted that, also one that came before it began; else that of the result."""
    tell(f"PALA  {result.status} after {result.global_steps:,} steps: {result.run}")
    if result.signal is not None:
        tell(f"      go on with: python -m pala.train --resume {result.run}")
        return Conclusion(result.exit_status, {})
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the other ranks sleep: use all cores
    last_words: list[tuple[str, Callable[[], str]]] = [
        ("evaluation", lambda: _evaluate(result.run, config)),
        ("learning curve", lambda: _draw(result.run)),
    ]
    outcomes = {}
    for what, action in last_words:
        try:
            with interrupt.raised_at_once():
                said = action()
            outcomes[what] = "done"
        except (PalaError, OSError) as error:
            said = outcomes[what] = str(error)
        except Exception as error:  # of the user's environment, say: the next rank would meet it as well
            say(traceback.format_exc())
            said = outcomes[what] = f"failed ({type(error).__name__}: {error})"
        except KeyboardInterrupt:
            assert interrupt.signal is not None
            tell(f"      {what}: interrupted; `python -m pala.evaluate {result.run}` makes up for it")
            outcomes[what] = f"interrupted by {interrupt.signal.name}"
            return Conclusion(128 + interrupt.signal, outcomes)
        tell(f"      {what}: {said}")
    return Conclusion(result.exit_status, outcomes)


def _evaluate(run: Path, config: Config) -> str:
    settings = config.evaluation
    if settings.episodes == 0:
        return "left out ('evaluation.episodes' is 0)"
    tell(f"      evaluation: plays {settings.episodes:,} episodes")
    evaluation = evaluate(
        run, settings.episodes, settings.num_envs, settings.greedy, config.seed,
        threads=len(os.sched_getaffinity(0)), timeout_s=settings.timeout_s,
        trust_run=True,  # this job itself has written it
    )  # fmt: skip
    save(run, evaluation)
    if config.run.tensorboard:
        board = TensorBoard(run / FOLDER)
        board.add_evaluation(evaluation)
        board.close()
    return f"{evaluation} ({run / 'evaluation.json'})"


def _draw(run: Path) -> str:
    return str(plot([run], run / "learning_curve.png"))
