"""TensorBoard's files of a run, a copy of what metrics and evaluation say; one rank writes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pala.run.metrics import SECTIONS
from pala.run.view import RunView

if TYPE_CHECKING:
    from pala.evaluation.record import Evaluation

FOLDER = "tensorboard"


class TensorBoard:
    """Event files of the whole run: scalars against global steps, and hyperparameters."""

    _TAGS: ClassVar[dict[str, str]] = {
        "mean_return": "return/mean_of_last_100_episodes",
        "mean_length": "length/mean_of_last_100_episodes",
        "loss_policy": "loss/policy",
        "loss_value": "loss/value",
        "entropy": "loss/entropy",
        "loss": "loss/dqn",
        "absolute_error": "loss/absolute_error",
        "action_value": "value/action_value",
        "epsilon": "update/epsilon",
        "server_updates": "update/server_updates",
        "gradient_norm": "update/gradient_norm",
        "learning_rate": "update/learning_rate",
        "updates_skipped": "update/skipped",
        "consensus_distance": "exchange/consensus_distance",
        "consensus_distance_relative": "exchange/consensus_distance_relative",
        "staleness_updates": "exchange/staleness_updates",
    }

    def __init__(self, folder: Path, begin_steps: int | None = None) -> None:
        """`begin_steps`: steps of all ranks; events of later steps were lost with an earlier job. None: all count."""
        from torch.utils.tensorboard import SummaryWriter  # by the first rank alone, and only where it is asked for

        _hide_full_disk()
        self._writer = SummaryWriter(str(folder), purge_step=None if begin_steps is None else begin_steps + 1)

    def add(self, view: RunView, global_steps: int) -> None:
        """Add one value for each tag: means over ranks of their last intervals."""
        values: dict[str, float | None] = {tag: view.mean(key) for key, tag in self._TAGS.items()}
        values[self._TAGS["mean_return"]], values[self._TAGS["mean_length"]] = view.mean_return, view.mean_length
        values["speed/global_steps_per_s"] = view.global_steps_per_s
        values |= {f"time/{name}": view.mean(f"time_{name}") for name in SECTIONS}
        told = {key for record in view.last for key in record if key.startswith("info_")}
        values |= {f"episode/{key.removeprefix('info_')}": view.mean(key) for key in told}
        self._write(values, global_steps)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add what an evaluation found."""
        found = {
            key: getattr(evaluation, key) for key in ("mean_return", "mean_length_steps", "human_normalised_score")
        }
        self._write({f"evaluation/{key}": value for key, value in found.items()}, evaluation.global_steps)

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Add the run's hyperparameters, of which TensorBoard makes a table of all runs, with two results beside
        them."""
        plain = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in settings.items()
        }
        results = dict.fromkeys((self._TAGS["mean_return"], "evaluation/mean_return"), 0.0)
        from torch.utils.tensorboard.summary import hparams

        experiment, begin, _ = hparams(plain, results)
        for summary in (experiment, begin):
            self._writer._get_file_writer().add_summary(summary)

    def _write(self, values: Mapping[str, float | None], global_steps: int) -> None:
        now = time.time()
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, global_steps, walltime=now)

    def close(self) -> None:
        """Flush the events."""
        self._writer.close()


@cache
def _hide_full_disk() -> None:
    """Print no traceback, from now on, when a thread of TensorBoard's cannot write: it passes its OSError on to who
    adds the next value, and that is reported."""
    usual = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        is_tensorboards = type(arguments.thread).__module__.startswith("tensorboard.")
        if not (is_tensorboards and isinstance(arguments.exc_value, OSError)):
            usual(arguments)

    threading.excepthook = hook
