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
    """"completed"; "stopped" by a signal; of a rank that others went on without, "left"; of a spare that nobody needed,
    "spared"."""
    global_steps: int
    signal: int | None  # number of the signal that stopped it
    leads: bool  # True on the lowest rank that lives
    exit_status: int  # for this rank's process
    stopped_early: str = ""
    """Whose callback ended training before its budget was met, as `run.json` has it; "" if none did."""
    evaluation: Evaluation | None = None
    """The final policy's; None if it was left out ('evaluation.episodes' is 0) or could not be made, which the console
    and run.json say, and of a run that a signal stopped."""
    learning_curve: Path | None = None
    """The picture; None as above."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """What became of both: "done", or why not, as `run.json` has it."""

    @property
    def departs(self) -> bool:
        """Whether this rank's process is to end at once: the others go on, or end, without it."""
        return self.status in ("left", "spared")


Conclude = Callable[[Result, Config, Interrupt], Result]
"""What the first rank does when training is over; the result, completed by what it gave."""


@dataclass(frozen=True)
class Request:
    """One training, as it is asked for: the same on all ranks except for `facts`."""

    config: Config
    code: UserCode = NO_CODE
    """What is given from Python; of a run that goes on, it wins over what the run was made with."""
    callbacks: Callbacks = NO_CALLBACKS
    resume: Path | None = None
    """Folder of the run that goes on."""
    preset: str = ""
    """What the name of a new run begins with; by default, the environment's."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """For run.json, from the first rank."""
    trust_run: bool = False
    """Run the code that a resumed run names though it came from elsewhere (`user_code.py`)."""
    began_s: float | None = None
    """When it was asked for, by `time.perf_counter`; None: when this process began."""
    on_count: Callable[[int], None] | None = None
    """Called with the number of updates of this rank, after each: where tests plant faults."""
    conclude: Conclude | None = None
    """What the first rank that lives does at the very end, alone."""
