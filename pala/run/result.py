"""What a rank gives back at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """What `run_rank` returns."""

    run: Path
    status: str
    """"completed"; "stopped" by a signal; of a rank that others went on without, "left"; of a spare that nobody needed,
    "spared"."""
    global_steps: int
    signal: int | None  # number of the signal that stopped it
    leads: bool  # True on the lowest rank that lives

    @property
    def departs(self) -> bool:
        """Whether this rank's process is to end at once: the others go on, or end, without it."""
        return self.status in ("left", "spared")
