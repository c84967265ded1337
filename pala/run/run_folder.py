"""A run's folder and its record, `run.json`: what was run, with what, and whether it completed."""

from __future__ import annotations

import contextlib
import os
import reprlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pala.config import Config, from_table, to_table
from pala.run.hooks import UserCode
from pala.run.lock import LOCK, cannot_be_made, is_locked
from pala.run.provenance import now_utc
from pala.system.errors import PalaError, SaveError, reason
from pala.system.files import dated, read_json, refuse_links, write_json
from pala.system.tables import flatten, merged, shown

POLICY, BEST_POLICY = "policy.safetensors", "best_policy.safetensors"
CODE_ENDINGS = ("txt", "pkl")  # of a factory's name, and of a pickled one (`user_code.py`)
CODE_FILES = tuple(f"{what}.{ending}" for what in UserCode._fields for ending in CODE_ENDINGS)
_BEFORE_RECORD = (LOCK, *CODE_FILES)  # what is made before run.json, beside the folders
_FOLDERS_BEFORE_RECORD = ("metrics", "checkpoints")
_EARLIER_DEFAULTS: dict[str, Any] = {
    "a2c": {"momentum": 0.0, "rmsprop_bias_correction": False},
    "exchange": {"mixing": "uniform"},
    "network": {"background": 0.0, "precision": "float32"},
}
"""Settings of runs before version 0.2 whose `run.json` does not name them."""
_GONE: dict[str, Any] = {
    "a2c.gradient_clipping": "own",
    "a2c.learning_rate_most_scaling": None,
    "a2c.learning_rate_scaling": "none",
    "a2c.momentum_smoothing": 0.8,
    "exchange.exchanges_per_update": 1,
    "gorila.adagrad_epsilon": 1e-5,
    "gorila.epsilon_first": 1.0,
    "gorila.loss_filter_horizon_updates": 1000,
    "gorila.save_replay": None,
}
"""Settings that are gone, each with the value by which training is as it is today; None: any. A run with another value
is evaluated and drawn as any, but neither resumed nor compared."""


class FromPython(NamedTuple):
    """The code that a segment had from the user's own factories (`UserCode`)."""

    environment: bool
    network: bool


def from_python(segment: Mapping[str, Any]) -> FromPython:
    """Read from a segment of run.json. Those of early runs do not say: they had nothing."""
    return FromPython(bool(segment.get("python_environment")), bool(segment.get("python_network")))


def check_place(config: Config) -> None:
    """Raise PalaError for a folder that cannot be meant."""
    if config.run.dir.startswith("~"):
        raise PalaError(f"'run.dir' is '{config.run.dir}': write out what '~' stands for.")
    if "\0" in config.run.dir + config.run.name:
        raise PalaError("'run.dir' or 'run.name' holds a zero byte, which no name of a folder may.")


def own_name(run: Path, config: Config) -> str:
    """Return the name that a resumed run keeps: the given one, if that is empty or its folder's (as of a folder that
    was moved), else the name before."""
    return config.run.name if config.run.name in ("", run.resolve().name) else config_of(run).run.name


def create(config: Config, preset: str) -> Path:
    """Make the folder of a new run. Raises PalaError if it exists already or cannot be made.

    One that a job left before its run began (a full disk) is taken as if it were new.
    """
    name = config.run.name or dated(preset)
    check_place(config)
    parent = Path(config.run.dir)
    for number in range(1, 100):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            (path / "metrics").mkdir(exist_ok=True)
            return path
        except FileExistsError:
            if not os.path.lexists(path):
                raise cannot_be_made(path, f"'{parent}' is no folder, or a link to none") from None
            if config.run.name and _never_began(path):
                refuse_links(path)
                (path / "metrics").mkdir(exist_ok=True)
                return path
            if config.run.name:
                raise taken(path) from None
        except OSError as error:
            raise cannot_be_made(path, reason(error)) from None
    raise PalaError(f"Folder '{parent}' holds too many runs that began in this second.")


def taken(path: Path) -> PalaError:
    """Return why a new run cannot be made there."""
    other = "move it away: it holds no run to resume"
    if (path / "run.json").exists():
        other = f"continue it by `--resume {shlex.quote(str(path))}`, in Python `resume=`"
    return PalaError(
        f"Run folder '{path}' exists already; nothing is written over. Choose another 'run.name', or {other}."
    )


def _never_began(path: Path) -> bool:
    """Return whether a run's folder holds only what is made before its record."""
    try:
        return all(
            entry.name in _BEFORE_RECORD
            or (entry.name in _FOLDERS_BEFORE_RECORD and all(inner.is_dir() for inner in entry.rglob("*")))
            for entry in path.iterdir()
        )
    except OSError:
        return False


def set_aside(path: Path) -> None:
    """Give a run's folder another name if a job ended before it had begun a record there. Raises PalaError if it holds
    what no job has made."""
    if not path.exists() or (path / "run.json").exists():
        return
    try:
        ours = (*_BEFORE_RECORD, *_FOLDERS_BEFORE_RECORD, "tensorboard")
        if others := [entry.name for entry in path.iterdir() if entry.name not in ours and entry.name[:1] != "."]:
            raise PalaError(
                f"Folder '{path}' is not a run's, as it holds '{others[0]}'; choose another 'run.name', or move it "
                "away."
            )
        path.rename(path.with_name(dated(f"{path.name}-not-begun")))
    except OSError as error:
        raise PalaError(f"Run folder '{path}' cannot be given another name: {reason(error)}.") from None


def remove_unfinished(run: Path) -> None:
    """Delete what killed jobs have left of files that they were writing. Only while the folder is locked."""
    for left_over in (*run.rglob(".*.tmp"), *run.rglob(".*.new")):
        with contextlib.suppress(OSError):
            left_over.unlink()


def is_over(run: Path, earlier_segments: int, was_locked: bool = False) -> bool:
    """Return whether the job after `earlier_segments` segments is over: its record says so, and no rank of it lives, as
    far as the folder's lock tells. `was_locked`: it was seen to hold the lock. Then it is over when nobody holds it,
    whatever its record says: all its ranks may have been killed."""
    try:
        segments = read(run)["segments"]
    except PalaError:
        return False
    if len(segments) <= earlier_segments:
        return False
    last = segments[-1]
    locked = is_locked(run)
    if was_locked:
        return locked is False
    says_so = last["status"] != "running"
    if last["status"] == "completed":
        says_so = "conclusion" in last
    return says_so and not locked


def has_record(run: Path) -> bool:
    """Return whether a job has begun the run; False if the folder cannot be seen."""
    return os.path.exists(run / "run.json")  # noqa: PTH110  Path's may raise


def num_segments(run: Path) -> int:
    """Return how often the run was started; 0 without a record that can be read."""
    try:
        return len(read(run)["segments"])
    except PalaError:
        return 0


def last_written_s(run: Path) -> float:
    """Return when a rank's metrics were last written, by the file system's clock; 0 if there are none."""
    with contextlib.suppress(OSError):
        return max((file.stat().st_mtime for file in (run / "metrics").iterdir()), default=0.0)
    return 0.0


def folder_of(run: str | os.PathLike[str]) -> Path:
    """Return the folder of a run, which its user has named. Raises PalaError if that is no path."""
    if not isinstance(run, str | os.PathLike):
        raise PalaError(f"A run is named by its folder or its result, not by {shown(run)}.")
    return Path(run)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the record of a run. Raises PalaError if the folder is not a run's or the record is none."""
    file = folder_of(path) / "run.json"
    try:
        record = read_json(file)
    except FileNotFoundError:
        raise PalaError(f"'{file.parent}' is not a run's folder: {_instead(file.parent)}.") from None
    if (fault := _fault(record)) is not None:
        raise PalaError(f"'{file}' is not a run's record: {fault}.")
    return record


def _instead(path: Path) -> str:
    """Return what a folder without a record is, in words."""
    if not path.exists():
        return "it does not exist"
    return "it has no 'run.json'" if path.is_dir() else "it is a file"


def _fault(record: Any) -> str | None:
    """Return what the readers of a record would stumble over; None if nothing."""
    if not isinstance(record, dict):
        return "it holds no table"
    for key, kind in _RECORD.items():
        if not isinstance(record.get(key), kind):
            return f"'{key}' is {reprlib.repr(record[key]) if key in record else 'missing'}"
    segments = record["segments"]
    if not segments or not all(isinstance(segment, dict) for segment in segments):
        return "'segments' holds no segment, or something else"
    for number, segment in enumerate(segments):
        if missing := {"started", "status"} - segment.keys():
            return f"'{min(missing)}' of segment {number} is missing"
        for key in segment.keys() & _SEGMENT.keys():
            if not _SEGMENT[key](segment[key]):
                return f"'{key}' of segment {number} is {reprlib.repr(segment[key])}"
    return None


_RECORD = {"config": dict, "segments": list, "completed": bool}
_SEGMENT: dict[str, Callable[[Any], bool]] = {
    "started": lambda value: isinstance(value, str),
    "status": lambda value: isinstance(value, str),
    "segment": lambda value: isinstance(value, str),
    "ranks": lambda value: type(value) is int and 0 < value < 10**7,
    "parameters": lambda value: type(value) is int and 0 <= value < 2**63,
    "global_steps": lambda value: type(value) is int and 0 <= value < 2**63,
    "background": lambda value: type(value) in (int, float) and 0 <= value <= 1,
    "cores": lambda value: type(value) is int and 0 < value < 10**7,
    "hosts": lambda value: isinstance(value, list) and all(isinstance(host, str) for host in value),
    "lost_ranks": lambda value: isinstance(value, list),
    "versions": lambda value: isinstance(value, dict),
}


def config_of(path: str | os.PathLike[str], record: dict[str, Any] | None = None) -> Config:
    """Return the configuration that a run was made with: with those settings named that its PALA did not have, or had
    another default of, and without those that are gone. `record`: the run's record, if it has been read."""
    table = merged(_EARLIER_DEFAULTS, (record or read(path))["config"])
    for key in _GONE:
        section, name = key.split(".")
        if isinstance(table.get(section), dict):
            table[section] = {own: value for own, value in table[section].items() if own != name}
    return from_table(table, source=f"'{Path(path) / 'run.json'}'")


def with_kept_background(config: Config, path: Path) -> Config:
    """Return a run's configuration with a `network.background` of `auto` as the run has found it. Raises PalaError for
    another one than the run's."""
    record, asked = read(path), config.network.background
    kept = config_of(path, record).network.background
    if kept == "auto":
        kept = record["segments"][-1].get("background", 0.0)
    if asked not in ("auto", kept):
        raise PalaError(
            f"'network.background' is {asked:g}, but the network of run '{path}' has learned with {kept:g}; leave it "
            "out, or begin another run."
        )
    return replace(config, network=replace(config.network, background=kept))


def gone_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are gone and changed how this run was trained, by their full keys."""
    found = flatten(record["config"])
    return {
        key: found[key] for key, neutral in _GONE.items() if neutral is not None and found.get(key, neutral) != neutral
    }


def check_trains_as_before(path: Path, what: str = "continued") -> None:
    """Raise PalaError for a run that was trained with settings that are gone, which is not to be `what`."""
    record = read(path)
    if gone := gone_settings(record):
        settings = " and ".join(f"'{key}' {value!r}" for key, value in gone.items())
        commit = record["segments"][0].get("git_commit")
        raise PalaError(
            f"Run '{path}' was trained with {settings}, which PALA no longer has. It can be evaluated and drawn; to be "
            f"{what} it needs the PALA that began it{f' (commit {commit})' if commit else ''}."
        )


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """Return the folders that are runs, and the runs in the others. Raises PalaError if one holds none."""
    found: list[Path] = []
    for folder in folders:
        try:
            runs = [folder] if (folder / "run.json").exists() else sorted(f.parent for f in folder.glob("*/run.json"))
        except OSError as error:
            raise PalaError(f"'{folder}' cannot be read: {reason(error)}.") from None
        if not runs:
            why = "there is no 'run.json' in it or one level below" if folder.is_dir() else _instead(folder)
            raise PalaError(f"'{folder}' is no run and holds none: {why}.")
        found += runs
    return found


class RunRecord:
    """Writes `run.json`; one segment for each start. Only the lowest rank that lives has one."""

    def __init__(self, path: Path, record: dict[str, Any], check: Callable[[], None]) -> None:
        """`check` is called before each writing, and may raise; it does nothing for a folder that no other process can
        have made again."""
        self._file = path / "run.json"
        self._record = record
        self._check = check

    @classmethod
    def begin(
        cls, path: Path, config: Config, segment: dict[str, Any], check: Callable[[], None] = lambda: None
    ) -> RunRecord:
        """Make the record with a segment that starts. One before it that never said how it ended was lost."""
        earlier = read(path)["segments"] if (path / "run.json").exists() else []
        for old in earlier:
            if old["status"] == "running":
                old["status"] = "lost"
        begun = {"started": now_utc(), "ended": None, "status": "running"} | segment
        name = own_name(path, config) if earlier else config.run.name
        table = to_table(replace(config, run=replace(config.run, name=name)))
        text = {"format": 1, "completed": False, "config": table, "segments": [*earlier, begun]}
        record = cls(path, text, check)
        record._write(text)
        return record

    @classmethod
    def take_over(cls, path: Path, check: Callable[[], None] = lambda: None) -> RunRecord:
        """Take over the record of a segment that continues after the loss of the rank that kept it."""
        return cls(path, read(path), check)

    @property
    def segment(self) -> dict[str, Any]:
        """The last segment as it was last written."""
        return self._record["segments"][-1]

    def end(self, status: str, **facts: Any) -> None:
        """Say how the segment ended: `completed`, `stopped` (by a signal) or `failed`."""
        self._change(self.segment | {"ended": now_utc(), "status": status} | facts, status == "completed")

    def note(self, **facts: Any) -> None:
        """Add facts to the segment while it runs; None takes one back."""
        changed = {key: fact for key, fact in (self.segment | facts).items() if fact is not None or key not in facts}
        self._change(changed, self._record["completed"])

    def _change(self, segment: dict[str, Any], completed: bool) -> None:
        self._write(self._record | {"completed": completed, "segments": [*self._record["segments"][:-1], segment]})

    def _write(self, record: dict[str, Any]) -> None:
        """Write the record. What cannot be written is not remembered either: it can be tried again. Raises
        SaveError."""
        self._check()
        try:
            write_json(self._file, record, indent=2)
        except OSError as error:
            raise SaveError.of(error) from error
        self._record = record
