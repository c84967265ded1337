"""A run as its files have it: what learning curves and comparisons are drawn from. Loads numpy alone."""

from __future__ import annotations

import atexit
import functools
import lzma
import os
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from pala.config import Config
from pala.evaluation.record import final_evaluation
from pala.evaluation.references import reference_of
from pala.run import run_folder
from pala.run.metrics import Record, read_run
from pala.system.errors import PalaError, reason
from pala.system.files import refuse_links

Axis = Literal["steps", "time"]

ARCHIVE = "runs.tar.xz"  # of a folder of results: its runs, each as `runs/NAME`


@dataclass(frozen=True)
class RunData:
    """The content of a run's folder. E episodes, rank after rank."""

    path: Path
    config: Config
    record: dict[str, Any]  # run.json
    evaluation: dict[str, Any] | None  # of the final policy
    is_atari: bool  # PALA's own; a game that a user's environment plays has frames and scores of its own
    reference: tuple[float, float] | None  # scores of random play and of a human; None where nobody published them
    training_s: float  # over all segments; pauses between them do not count
    steps: np.ndarray  # [E] of all ranks, at an episode's end
    time_s: np.ndarray  # [E] of training, at an episode's end
    returns: np.ndarray  # [E] unclipped

    @property
    def last(self) -> dict[str, Any]:
        """The run's newest segment."""
        last: dict[str, Any] = self.record["segments"][-1]
        return last

    @property
    def frame_skip(self) -> int:
        """Emulator frames a step."""
        return self.config.env.frame_skip if self.is_atari else 1

    @property
    def end_steps(self) -> float:
        """Steps of all ranks at its end so far."""
        return max(float(self.steps.max(initial=0)), self.last.get("global_steps", 0))

    def over(self, axis: Axis, seconds: float) -> np.ndarray:
        """Return [E] where on an axis the episodes ended; `seconds` are in a unit of time."""
        return self.steps if axis == "steps" else self.time_s / seconds

    def end(self, axis: Axis, seconds: float) -> float:
        """Return where on an axis the run ended."""
        return self.end_steps if axis == "steps" else self.training_s / seconds


def config_as_computed(folder: Path, record: dict[str, Any]) -> Config:
    """Return a run's settings, with what `auto` of `network.precision` has meant in its last start. `record`: the run's
    record. Raises PalaError."""
    config, last = run_folder.config_of(folder, record), record["segments"][-1]
    if config.network.precision != "auto" or "precision" not in last:
        return config
    return replace(config, network=replace(config.network, precision=last["precision"]))


def read(folder: Path) -> tuple[RunData, list[list[Record]]]:
    """Read a run and every rank's records, which take much memory. Raises PalaError if it is no run, or damaged."""
    record = run_folder.read(folder)
    refuse_links(folder)
    ranks = read_run(folder)
    config = config_as_computed(folder, record)
    episodes = [(r["global_steps"], r["time_s"], r["return"]) for rank in ranks for r in rank if r["type"] == "episode"]
    steps, time_s, returns = np.array(episodes, np.float64).reshape(-1, 3).T
    training_s = max((rank[-1]["time_s"] for rank in ranks if rank), default=0.0)
    is_atari = config.env.is_atari and not run_folder.from_python(record["segments"][-1]).environment
    data = RunData(
        folder,
        config,
        record,
        final_evaluation(folder, record),
        is_atari,
        reference_of(config.env.id) if is_atari else None,
        training_s,
        steps,
        time_s,
        returns,
    )
    return data, ranks


def published(results: Path) -> list[Path]:
    """Return the runs in the archive of a folder of results, unpacked where this process leaves nothing behind.

    There are none without an archive. Raises PalaError.
    """
    archive = results / ARCHIVE
    if not os.path.isfile(archive):  # noqa: PTH113  of any length
        return []
    unpacked = _unpacked(archive.resolve(), archive.stat().st_mtime_ns)
    return sorted(file.parent for file in unpacked.glob("runs/*/run.json"))


@functools.cache
def _unpacked(archive: Path, changed_ns: int) -> Path:
    """Unpack the plain files of an archive, once for each time `changed_ns` of its last change."""
    temporary = TemporaryDirectory(prefix="pala-results-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name)
    try:
        with tarfile.open(archive, "r:xz") as members:
            for member in members:
                name = PurePosixPath(member.name)
                content = members.extractfile(member) if member.isfile() else None
                if name.is_absolute() or ".." in name.parts or not (content or member.isdir()):
                    raise PalaError(f"'{archive}' holds '{member.name}', which is no plain file in its folder.")
                if content is not None:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(content.read())
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
        raise PalaError(f"'{archive}' cannot be unpacked: {reason(error)}.") from None
    return folder
