"""The end of a job, after training: evaluation and learning curve.

The first rank does this alone and without MPI, with all cores that the ranks of its host may use; the others sleep.
"""

from __future__ import annotations

import math
import os
import shlex
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from pala.config import Config
from pala.evaluation.record import Evaluation, save
from pala.evaluation.scoring import Acting, evaluate
from pala.job.request import Result
from pala.report.plot import plot
from pala.run import checkpoint, run_folder, user_code
from pala.run.best_policy import kept_best
from pala.run.tensorboard import FOLDER, TensorBoard
from pala.run.view import MEAN_OF
from pala.system.errors import PalaError, reason
from pala.system.interrupt import Interrupt
from pala.system.output import SUPERVISED, log, print_result
from pala.system.resources import usable_cores


def conclude(result: Result, config: Config, interrupt: Interrupt) -> Result:
    """Evaluate the final policy, draw the learning curve, and say where everything is. The exit status is 128 + the
    signal if one interrupted that, also one that came before it began; else that of the result."""
    early = " (a callback returned False)" * result.stopped_early
    print_result(f"PALA  {result.status} after {result.global_steps:,} steps{early}: {result.run}")
    if result.signal is not None:
        print_result(f"      continue with: {_resume_command(result.run, config)}")
        return result
    final_tasks, trust = _FinalTasks(result.run, config), user_code.trust_option(result.run, config)
    tasks: list[tuple[str, Callable[[], str]]] = [
        ("evaluation", final_tasks.evaluate),
        ("learning curve", final_tasks.draw),
    ]
    if config.evaluation.episodes == 0:
        print_result("      evaluation: left out ('evaluation.episodes' is 0)")
        del tasks[0]
    outcomes, status = {}, result.exit_status
    for what, task in tasks:
        try:
            with interrupt.raised_at_once():
                said = task()
            outcomes[what] = "done"
        except (PalaError, OSError) as error:
            outcomes[what] = str(error)
            said = f"{outcomes[what].rstrip('.')}; {_later(what, result.run, trust)}"
        except Exception as error:  # of the user's environment, say: the next rank would fail as well
            log(traceback.format_exc())
            outcomes[what] = f"failed ({type(error).__name__}: {error})"
            said = f"{outcomes[what]}; {_later(what, result.run, trust)}"
        except KeyboardInterrupt:
            assert interrupt.signal is not None
            print_result(f"      {what}: interrupted; {_later(what, result.run, trust)}")
            outcomes[what], status = f"interrupted by {interrupt.signal.name}", 128 + interrupt.signal
            break
        print_result(f"      {what}: {said}")
    if config.run.trace:
        print_result(f"      timeline: `pala trace {shlex.quote(str(result.run))}` makes it")
    _name_best(result.run, final_tasks.evaluation, trust)
    return replace(
        result,
        exit_status=status,
        outcomes=outcomes,
        evaluation=final_tasks.evaluation,
        learning_curve=final_tasks.learning_curve,
    )


def _name_best(run: Path, evaluation: Evaluation | None, trust: str) -> None:
    """Print where the best policy of the training is, if there is one that did better than the final one scored."""
    final = checkpoint.policy_header(run / run_folder.POLICY)
    best = kept_best(run / run_folder.BEST_POLICY, final) if final is not None else None
    scored = evaluation.mean_return if evaluation is not None else -math.inf
    if best is not None and best["mean_return"] > scored:
        found = (
            f"mean return {best['mean_return']:g} over the {MEAN_OF} episodes of training that ended after "
            f"{best['global_steps']:,} steps"
        )
        print_result(f"      best policy: {found}; `pala evaluate {shlex.quote(str(run))} --best{trust}` scores it")


def _later(what: str, run: Path, trust: str) -> str:
    """Return words for the command that does later a task that was not done."""
    options = shlex.quote(str(run)) + (trust if what == "evaluation" else "")
    return f"`pala {'evaluate' if what == 'evaluation' else 'plot'} {options}` makes up for it"


def _resume_command(run: Path, config: Config) -> str:
    """Return words for the command that resumes a stopped run as it was started, spares included."""
    resume = user_code.resume_option(run, config)
    if os.environ.get(SUPERVISED):
        return f"the command that started it, with `{resume}` in place of the preset"
    ranks = run_folder.read(run)["segments"][-1]["ranks"]
    return f"pala train {f'-n {ranks} ' * (ranks + config.run.spares > 1)}{resume}"


class _FinalTasks:
    """The tasks after training, and their results."""

    def __init__(self, run: Path, config: Config) -> None:
        self._run, self._config = run, config
        self.evaluation: Evaluation | None = None
        self.learning_curve: Path | None = None

    def evaluate(self) -> str:
        """Score the policy, on all cores that this thread may use; return words for it."""
        settings, threads = self._config.evaluation, torch.get_num_threads()
        print_result(f"      evaluation: plays {settings.episodes:,} episode{'s' * (settings.episodes > 1)}")
        acting = Acting(settings.greedy, self._config.seed, usable_cores(), trust_run=True)  # this job has written it
        try:
            evaluation = evaluate(self._run, settings.episodes, settings.num_envs, acting, settings.timeout_s)
        finally:
            torch.set_num_threads(threads)
        self.evaluation = evaluation
        try:
            save(self._run, evaluation)
        except PalaError as error:
            raise PalaError(f"{evaluation}. {error}") from None
        if self._config.run.tensorboard:
            self._to_tensorboard(evaluation)
        return f"{evaluation} ({self._run / 'evaluation.json'})"

    def _to_tensorboard(self, evaluation: Evaluation) -> None:
        try:
            board = TensorBoard(self._run / FOLDER)
            board.add_evaluation(evaluation)
            board.close()
        except Exception as error:  # as in training (`console.py`)
            log(f"TensorBoard's files cannot be written: {reason(error)}.")

    def draw(self) -> str:
        """Draw the learning curve; returns where."""
        self.learning_curve = plot([self._run], self._run / "learning_curve.png")
        return str(self.learning_curve)
