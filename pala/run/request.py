"""What a rank is asked to do. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pala.config import Config
from pala.run.hooks import NO_CALLBACKS, NO_CODE, Callbacks, UserCode
from pala.run.result import Conclude


@dataclass(frozen=True)
class Request:
    """One training, as it is asked for: the same on all ranks but for `facts`."""

    config: Config
    code: UserCode = NO_CODE
    """What is given from Python, and where a run goes on, what it was made with."""
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
