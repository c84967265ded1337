"""Checkpoints and exported policies (`tensor_file.py` has their format), written atomically.

A run's `checkpoints/` has one folder for each start of the run (a *segment*: `segment-000`, after a resume
`segment-001`, ...), with two generations of a file for each rank. A rank writes alone: no rank waits for another. Kept
are the newest segment and the one that it continued from.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pala.run import run_folder
from pala.run.tensor_file import header_of, pack, unpack
from pala.system.errors import PalaError
from pala.system.files import sync_folder, write_atomically
from pala.system.output import log

OF_ANOTHER_ALGORITHM = "The checkpoints are of another algorithm than the run; its 'run.json' or they were changed."
_COUNTERS = {
    *("updates", "applied", "local_steps", "time_s"),
    *("steps_by_rank", "base_steps", "round", "weight", "lost", "spares"),
}
_IN_FILES = {"local_steps": "own_steps", "steps_by_rank": "local_steps"}  # counters that files call otherwise
_STREAM = "random."


@dataclass
class RankState:
    """The state from which one rank continues."""

    rank: int
    ranks: int
    signature: int  # of the network's layout
    tensors: dict[str, Tensor]  # flat float32, all of one length; which: as the algorithm's `Agent.state` says
    random_states: dict[str, Tensor]  # generator name -> uint8
    counters: dict[str, Any]
    """JSON: the rank's `Counters`, the fields of `ExchangeState`, `spares`, and what the algorithm's `Agent.state`
    adds."""

    @property
    def num_trainers(self) -> int:
        """Ranks that are not spares: they begin, and all of them have saved."""
        return self.ranks - int(self.counters["spares"])


def rank_path(folder: Path, rank: int, previous: bool = False) -> Path:
    """Return the path of a rank's checkpoint in a segment's folder, or of the one before it."""
    return folder / f"rank-{rank:04d}{'.previous' if previous else ''}.safetensors"


def _generations(folder: Path, rank: int) -> tuple[Path, Path]:
    """Return the paths of a rank's checkpoint, and of the one before it."""
    return rank_path(folder, rank), rank_path(folder, rank, previous=True)


def save_rank(folder: Path, state: RankState) -> None:
    """Write a rank's checkpoint and keep the one before it. Raises OSError, and then the newest one is as it was."""
    tensors = {name: tensor.detach().cpu() for name, tensor in state.tensors.items()}
    tensors |= {f"{_STREAM}{name}": value for name, value in state.random_states.items()}
    counters = {_IN_FILES.get(name, name): value for name, value in state.counters.items()}
    header = {"rank": state.rank, "ranks": state.ranks, "signature": state.signature, "counters": counters}
    data = pack(tensors, header)
    path, previous = _generations(folder, state.rank)
    fresh = path.with_name(f".{path.name}.new")
    write_atomically(fresh, data)
    if has_one := path.exists():
        os.replace(path, previous)
    try:
        os.replace(fresh, path)
    except OSError:
        if has_one:
            os.replace(previous, path)
        raise
    sync_folder(folder)


def load_rank(folder: Path, rank: int, signature: int, ranks: int | None = None) -> RankState:
    """Return a rank's newest readable checkpoint, which must be of a job of `ranks` ranks; None: of any number. Raises
    PalaError if neither generation can be read."""
    faults = []
    for path in _generations(folder, rank):
        try:
            state = read_rank(path, signature)
            _check_owner(path, state, rank, ranks)
        except AnotherNetworkError:
            raise
        except PalaError as error:
            faults.append(str(error))
            continue
        if faults:
            log(f"[rank {rank}] {faults[0]} The one before it is used.")
        return state
    raise PalaError(
        f"{' '.join(faults)} If the run has an earlier segment, move '{folder}' away to continue from that one."
    )


def _check_owner(path: Path, state: RankState, rank: int, ranks: int | None) -> None:
    if state.rank != rank or ranks not in (None, state.ranks):
        expected = f"rank {rank}" if ranks is None else f"rank {rank} of {ranks}"
        raise PalaError(f"Checkpoint '{path}' is rank {state.rank}'s of {state.ranks} ranks, not that of {expected}.")


def has_spares(folder: Path, first: RankState) -> bool:
    """Return whether a spare of the job has saved there: it took a place. `first`: of one of its ranks."""
    spares = range(first.num_trainers, first.ranks)
    return any(path.exists() for rank in spares for path in _generations(folder, rank))


def load_all(folder: Path, signature: int, whole: bool = True) -> list[RankState]:
    """Return the checkpoints of all ranks of a segment, except those that died: theirs are old, and only their steps
    count. As `load_rank`. Not `whole`: without tensors, which are checked, but could take more memory together than a
    rank has in training."""

    def load(rank: int, ranks: int | None) -> RankState:
        state = load_rank(folder, rank, signature, ranks)
        return state if whole else replace(state, tensors={}, random_states={})

    first = load(0, None)
    states, faults = {0: first}, {}
    for rank in range(1, first.ranks):
        if rank >= first.num_trainers and not any(path.exists() for path in _generations(folder, rank)):
            continue  # a spare that nobody needed
        try:
            states[rank] = load(rank, first.ranks)
        except PalaError as error:
            faults[rank] = error
    lost = {rank for state in states.values() for rank in state.counters["lost"]}
    if lost.issuperset(states):  # they took each other for dead: none of them is
        lost = set()
    known = np.max([state.counters["steps_by_rank"] for state in states.values()], axis=0)
    for state in states.values():
        state.counters["steps_by_rank"] = known.tolist()
    for rank, fault in faults.items():
        if rank not in lost:
            raise fault
    return [state for rank, state in states.items() if rank not in lost]


def global_steps(run: Path) -> int:
    """Return the steps of all ranks up to the newest checkpoints of a run, as far as they can be read; 0 if there are
    none."""
    try:
        folder = newest_segment(run)
    except PalaError:
        return 0
    found = []
    for path in folder.glob("rank-*.safetensors"):
        with contextlib.suppress(PalaError):
            found.append(_read_head(path))
    alike = [state for state in found if state.ranks == found[0].ranks]  # a file of elsewhere may be among them
    return int(joint_counters(alike)["base_steps"]) if alike else 0


def joint_counters(states: list[RankState]) -> dict[str, Any]:
    """Return the counters that all ranks of another job begin with: the steps of all as those of an earlier run, and
    how long they trained."""
    known = np.max([state.counters["steps_by_rank"] for state in states], axis=0)  # a rank may know its own alone
    base_steps = states[0].counters["base_steps"] + int(known.sum())
    return {"base_steps": base_steps, "time_s": max(state.counters["time_s"] for state in states)}


def newest_segment(run: Path) -> Path:
    """Return the folder of the newest segment in which every rank has saved. Raises PalaError if there is none."""
    for folder in sorted((run / "checkpoints").glob("segment-*"), key=_segment_number, reverse=True):
        ranks = _ranks_of(folder)
        if ranks and all(any(path.exists() for path in _generations(folder, rank)) for rank in range(ranks)):
            return folder
    raise PalaError(f"Run '{run}' has no checkpoint in '{run / 'checkpoints'}'.")


def _segment_number(folder: Path) -> int:
    number = folder.name.removeprefix("segment-")
    return int(number) if number.isdecimal() else -1


def _ranks_of(segment: Path) -> int:
    """Return the number of ranks that save in it, as rank 0's newest readable file says; 0 if it has no file, 1 if all
    are damaged, which `load_rank` says."""
    files = _generations(segment, 0)
    for file in files:
        with contextlib.suppress(PalaError):
            return _read_head(file).num_trainers
    return int(any(file.exists() for file in files))


def new_segment(run: Path) -> Path:
    """Make the folder of a new segment. Only one rank may do so."""
    number = 1 + max((_segment_number(folder) for folder in (run / "checkpoints").glob("segment-*")), default=-1)
    folder = run / "checkpoints" / f"segment-{number:03d}"
    folder.mkdir(parents=True)
    return folder


def remove_older(segment: Path) -> None:
    """Remove the segments before this one, which a start has continued from and saved a new one: nothing reads them any
    more. One that cannot be removed stays; it only takes room."""
    for folder in segment.parent.glob("segment-*"):
        if 0 <= _segment_number(folder) < _segment_number(segment):
            shutil.rmtree(folder, ignore_errors=True)


def save_policy(path: Path, named: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Export named parameters (ordinary layout, as `state_dict`) with a JSON header. Those that share their memory, as
    of a module with two names, are written once for each name."""
    copies = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in named.items()}
    write_atomically(path, pack(copies, header))


def policy_header(path: Path) -> dict[str, Any] | None:
    """Return the header of an exported policy; None if there is none that can be read."""
    try:
        return header_of(path)
    except PalaError:
        return None


def load_policy(path: Path, wanted: Mapping[str, Tensor] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (named parameters, header) of an exported policy; its shapes must be those `wanted`. Raises PalaError."""
    named, header = unpack(path)
    if not isinstance(header.get("global_steps"), int) or any(t.dtype != torch.float32 for t in named.values()):
        raise PalaError(f"'{path}' is not a policy that PALA exported.")
    for name in sorted(named.keys() | wanted.keys()) if wanted is not None else ():
        should, found = (list(of[name].shape) if name in of else "missing" for of in (wanted or {}, named))
        if should != found:
            raise AnotherNetworkError(
                f"Policy '{path}' is of another network than its run's settings and environment give: '{name}' "
                f"should be {should} and is {found}."
            )
    return named, header


class AnotherNetworkError(PalaError):
    """A sound file, of another network: an older checkpoint would be no better."""


def read_rank(path: Path, signature: int) -> RankState:
    """Read a rank's file. `signature`: of the network."""
    tensors, header = unpack(path)
    streams = {k.removeprefix(_STREAM): v for k, v in tensors.items() if k.startswith(_STREAM)}
    state = _state_of(path, header, {k: v for k, v in tensors.items() if not k.startswith(_STREAM)}, streams)
    if state.signature != signature:
        raise AnotherNetworkError(
            f"Checkpoint '{path}' is of another network; resume with the algorithm, environment{_made_with(path)} and "
            "network sizes that it was made with, and if the network is your own and draws its buffers from torch, "
            "with its seed."
        )
    return state


def _made_with(path: Path) -> str:
    """Return the environment of a checkpoint's run in brackets; empty if its record does not name it."""
    with contextlib.suppress(PalaError):
        record = run_folder.read(path.parent.parent.parent)
        if not run_folder.from_python(record["segments"][-1]).environment:
            return f" ({run_folder.config_of(path, record).env.id})"
    return ""


def _read_head(path: Path) -> RankState:
    """Read it without its tensors, of which nothing is checked."""
    return _state_of(path, header_of(path), {}, {})


def _state_of(path: Path, header: dict[str, Any], tensors: dict[str, Tensor], streams: dict[str, Tensor]) -> RankState:
    names = {there: here for here, there in _IN_FILES.items()}
    try:
        counters = {names.get(name, name): value for name, value in header["counters"].items()}
        state = RankState(header["rank"], header["ranks"], header["signature"], tensors, streams, counters)
    except KeyError as error:
        raise PalaError(f"Checkpoint '{path}' lacks {error}.") from None
    if missing := _COUNTERS - counters.keys():
        raise PalaError(f"Checkpoint '{path}' lacks '{min(missing)}'.")
    return state
