"""The request that a rank is given, and the result that it gives back. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pala.config import Config
from pala.run.hooks import NO_CALLBACKS, NO_CODE, Callbacks, UserCode
from pala.system.interrupt import Interrupt

if TYPE_CHECKING:
    from pala.evaluation.record import Evaluation


@dataclass(frozen=True)
class Result:
    """The outcome of a training, which `run_rank` and `pala.fit` return."""

    run: Path
    status: str
    """"completed"; "stopped" by a signal; "left" on a rank that others continued without; "spared" on a spare that was
    not needed."""
    global_steps: int
    signal: int | None  # number of the signal that stopped it
    leads: bool  # True on the lowest rank that lives
    exit_status: int  # for this rank's process
    stopped_early: bool = False
    """True if a callback ended training before its budget was met."""
    evaluation: Evaluation | None = None
    """The final policy's; None if it was left out ('evaluation.episodes' is 0) or could not be made, which the console
    and run.json say, and of a run that a signal stopped."""
    learning_curve: Path | None = None
    """The picture; None as above."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Outcome of the evaluation and of the learning curve: "done", or why not, as in `run.json`."""

    def __fspath__(self) -> str:
        """Return the run's folder: wherever PALA takes a run, its result will do."""
        return str(self.run)

    @property
    def departs(self) -> bool:
        """Whether this rank's process is to end at once: the others continue, or end, without it."""
        return self.status in ("left", "spared")


Conclude = Callable[[Result, Config, Interrupt], Result]
"""The first rank's work after training: takes the result, and returns it completed."""


@dataclass(frozen=True)
class Request:
    """One training, as it is asked for: the same on all ranks except for `callbacks` and `facts`."""

    config: Config
    code: UserCode = NO_CODE
    """Code given from Python; in a resumed run it wins over what the run was made with."""
    callbacks: Callbacks = NO_CALLBACKS
    resume: Path | None = None
    """Folder of the run to continue."""
    preset: str = ""
    """Beginning of a new run's name; by default, the environment's."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """For run.json, from the first rank."""
    trust_run: bool = False
    """Run the code that a resumed run names though it came from elsewhere (`user_code.py`)."""
    conclude: Conclude | None = None
    """Work of the first living rank at the very end, alone."""
