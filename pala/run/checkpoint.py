"""Checkpoints and exported policies: safetensors files, written atomically, checked by CRC when read. No pickle.

A run's `checkpoints/` has one folder for each start of the run (a *segment*: `segment-000`, after a resume
`segment-001`, ...), with two generations of a file for each rank. A rank writes alone: no rank waits for another.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from pala.system.errors import PalaError
from pala.system.files import sync_folder, write_atomically
from pala.system.runtime import say

_FORMAT = 1
_MOST_HEADER_BYTES = 4 << 20  # counters of 100,000 ranks fit
_COUNTS = ("updates", "own_steps", "base_steps", "round")


_CONTENTS = (
    {"parameters", "mean_square"},  # A2C: of the whole network; RMSprop's mean squares
    {"parameters", "squares", "target"},  # Gorila: a shard's slices; the optimiser's squares; the target network
    set[str](),  # Gorila: a rank that serves no shard
)


@dataclass
class RankState:
    """What one rank needs to go on."""

    rank: int
    ranks: int
    signature: int  # of the network's layout
    tensors: dict[str, Tensor]  # flat float32, all of one length; which: `_CONTENTS`
    random_states: dict[str, Tensor]  # generator name -> uint8
    counters: dict[str, Any]  # JSON: updates, time, the exchange's state

    @property
    def trainers(self) -> int:
        """Ranks that are not spares: they begin, and all of them have saved."""
        return self.ranks - int(self.counters.get("spares", 0))


def _rank_path(folder: Path, rank: int, previous: bool = False) -> Path:
    return folder / f"rank-{rank:04d}{'.previous' if previous else ''}.safetensors"


def save_rank(folder: Path, state: RankState) -> None:
    """Write a rank's checkpoint and keep the one before it. Raises OSError and then leaves both as they were."""
    tensors = {name: tensor.detach().cpu() for name, tensor in state.tensors.items()}
    tensors |= {f"random.{name}": value for name, value in state.random_states.items()}
    header = {"rank": state.rank, "ranks": state.ranks, "signature": state.signature, "counters": state.counters}
    data = _pack(tensors, header)
    path = _rank_path(folder, state.rank)
    fresh = path.with_name(f".{path.name}.new")
    write_atomically(fresh, data)
    if path.exists():
        os.replace(path, _rank_path(folder, state.rank, previous=True))
    os.replace(fresh, path)
    sync_folder(folder)


def load_rank(folder: Path, rank: int, signature: int, ranks: int | None = None) -> RankState:
    """A rank's newest readable checkpoint, which must be of a job of so many `ranks`; None: of any number.

    Raises PalaError if neither generation can be read.
    """
    faults = []
    for path in (_rank_path(folder, rank), _rank_path(folder, rank, previous=True)):
        try:
            state = _read_rank(path)
            _check_owner(path, state, rank, ranks)
        except PalaError as error:
            faults.append(str(error))
            continue
        if state.signature != signature:
            raise PalaError(
                f"Checkpoint '{path}' is of another network; resume with the algorithm, environment and network sizes "
                "that it was made with."
            )
        if faults:
            say(f"[rank {rank}] {faults[0]} The one before it is used.")
        return state
    raise PalaError(
        f"{' '.join(faults)} If the run has an earlier segment, move '{folder}' away to go on from that one."
    )


def _check_owner(path: Path, state: RankState, rank: int, ranks: int | None) -> None:
    if state.rank != rank or ranks not in (None, state.ranks):
        expected = f"rank {rank}" if ranks is None else f"rank {rank} of {ranks}"
        raise PalaError(f"Checkpoint '{path}' is rank {state.rank}'s of {state.ranks} ranks, not that of {expected}.")


def load_all(folder: Path, signature: int) -> list[RankState]:
    """The checkpoints of all ranks of a segment, but for those that died: theirs are old."""
    first = load_rank(folder, 0, signature)
    states, faults = {0: first}, {}
    for rank in range(1, first.ranks):
        if rank >= first.trainers and not _rank_path(folder, rank).exists():
            continue  # a spare that nobody needed
        try:
            states[rank] = load_rank(folder, rank, signature, first.ranks)
        except PalaError as error:
            faults[rank] = error
    lost = {rank for state in states.values() for rank in state.counters.get("lost", [])}
    if len(lost) == first.ranks:  # they took each other for dead: none of them is
        lost = set()
    for rank, fault in faults.items():
        if rank not in lost:
            raise fault
    return [state for rank, state in states.items() if rank not in lost]


def global_steps(run: Path) -> int:
    """Steps of all ranks up to the newest checkpoints of a run, as far as they can be read; 0 if there are none."""
    try:
        folder = newest_segment(run)
    except PalaError:
        return 0
    states = []
    for path in folder.glob("rank-*.safetensors"):
        with contextlib.suppress(PalaError):
            states.append(_read_rank(path))
    return max((s.counters["base_steps"] + sum(s.counters["local_steps"]) for s in states), default=0)


def average(states: list[RankState], independent: bool = False) -> RankState:
    """One state from many, for another number of ranks.

    Of A2C. Kept: the parameters, averaged with their push-sum weights; RMSprop's mean squares, averaged; all steps
    made. Not kept: each rank's random streams. A rank whose parameters are not finite is left out; raises PalaError if
    that leaves none. Of `independent` learners (exchange `none`), whose average means nothing, rank 0's are taken.
    """
    counters = joint_counters(states)
    states = [
        state for state in states[: 1 if independent else None] if bool(state.tensors["parameters"].isfinite().all())
    ]
    if not states:
        raise PalaError("The checkpoints of all ranks hold parameters that are not finite; nothing can be resumed.")
    weights = [state.counters["weight"] for state in states]
    tensors = {
        name: sum((w * state.tensors[name] for w, state in zip(weights, states, strict=True)), torch.zeros(()))
        / sum(weights)
        for name in states[0].tensors
    }
    return RankState(0, 1, states[0].signature, tensors, {}, counters)


def joint_counters(states: list[RankState]) -> dict[str, Any]:
    """The first state's counters, with the steps of all as those of an earlier run with other ranks."""
    known = np.max([state.counters["local_steps"] for state in states], axis=0)
    return states[0].counters | {"base_steps": states[0].counters["base_steps"] + int(known.sum())}


def newest_segment(run: Path) -> Path:
    """The folder of the newest segment in which every rank has saved. Raises PalaError if there is none."""
    for folder in sorted((run / "checkpoints").glob("segment-*"), key=_segment_number, reverse=True):
        files = [_rank_path(folder, 0, previous) for previous in (False, True)]
        ranks = next((_ranks_of(file) for file in files if file.exists()), 0)
        if ranks and all(
            any(_rank_path(folder, rank, previous).exists() for previous in (False, True)) for rank in range(ranks)
        ):
            return folder
    raise PalaError(f"Run '{run}' has no checkpoint in '{run / 'checkpoints'}'.")


def _segment_number(folder: Path) -> int:
    number = folder.name.removeprefix("segment-")
    return int(number) if number.isdigit() else -1


def _ranks_of(path: Path) -> int:
    try:
        return _read_rank(path).trainers
    except PalaError:
        return 1  # damaged: `load_rank` falls back or says so


def new_segment(run: Path) -> Path:
    """Make the folder of a new segment. Only one rank may do so."""
    number = 1 + max((_segment_number(folder) for folder in (run / "checkpoints").glob("segment-*")), default=-1)
    folder = run / "checkpoints" / f"segment-{number:03d}"
    folder.mkdir(parents=True)
    return folder


def save_policy(path: Path, named: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Export named parameters (ordinary layout, as `state_dict`) with a JSON header."""
    write_atomically(path, _pack({k: v.detach().cpu().contiguous() for k, v in named.items()}, header))


def load_policy(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(named parameters, header) of an exported policy. Raises PalaError."""
    named, header = _unpack(path)
    if not isinstance(header.get("global_steps"), int) or any(
        tensor.dtype != torch.float32 for tensor in named.values()
    ):
        raise PalaError(f"'{path}' is not a policy that PALA exported.")
    return named, header


def _pack(tensors: dict[str, Tensor], header: dict[str, Any]) -> bytes:
    crcs = {name: _crc(tensor) for name, tensor in tensors.items()}
    text = json.dumps({"format": _FORMAT, "crc32": crcs, "layout": _layout(tensors)} | header)
    return safetensors_bytes(tensors, {"pala": text, "crc32": _text_crc(text)})


def _unpack(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Believes nothing: any bytes give what was packed, or a PalaError."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            header = _header(path, metadata["pala"], metadata.get("crc32"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise PalaError(f"Checkpoint '{path}' does not exist.") from None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise PalaError(f"Checkpoint '{path}' cannot be read ({error}).") from None
    layout = _layout(tensors)  # of which the checksums say nothing
    crcs = {name: _crc(tensor) for name, tensor in tensors.items()}
    if header.get("crc32") != crcs or header.get("layout", layout) != layout:  # the first files have no layout
        raise PalaError(f"Checkpoint '{path}' is damaged: a checksum does not fit.")
    return tensors, header


def _header(path: Path, text: str, crc: str | None) -> dict[str, Any]:
    """The checked header. Its own checksum stays as it is in every format, so that the format can be believed."""
    if crc != _text_crc(text):
        raise PalaError(f"Checkpoint '{path}' is damaged: a checksum does not fit.")
    if len(text) > _MOST_HEADER_BYTES:  # before it is parsed: a few bytes of JSON can take a hundred of memory
        raise PalaError(f"Checkpoint '{path}' cannot be read (a header of {len(text)} bytes).")
    try:
        header = json.loads(text)
    except RecursionError:
        header = None
    version = header.get("format") if isinstance(header, dict) else None
    if not isinstance(version, int):
        raise PalaError(f"Checkpoint '{path}' cannot be read (its header is none of PALA's).")
    if version != _FORMAT:
        age, what = ("a newer", "update PALA") if version > _FORMAT else ("an older", "use that version")
        raise PalaError(
            f"Checkpoint '{path}' was written by {age} version of PALA (format {version}; this one reads {_FORMAT}): "
            f"{what}."
        )
    return header


def _read_rank(path: Path) -> RankState:
    tensors, header = _unpack(path)
    try:
        random_states = {k.removeprefix("random."): v for k, v in tensors.items() if k.startswith("random.")}
        flat = {name: tensor for name, tensor in tensors.items() if not name.startswith("random.")}
        state = RankState(
            header["rank"], header["ranks"], header["signature"], flat, random_states, header["counters"]
        )  # fmt: skip
    except KeyError as error:
        raise PalaError(f"Checkpoint '{path}' lacks {error}.") from None
    if not (_are_vectors(state) and _are_counters(state)):
        raise PalaError(f"Checkpoint '{path}' cannot be read (what it holds is not a rank's state).")
    return state


def _are_vectors(state: RankState) -> bool:
    """True if the tensors are what `save_rank` writes: flat, alike, of the right types."""
    flat, streams = state.tensors.values(), state.random_states.values()
    return (
        set(state.tensors) in _CONTENTS
        and len({tensor.numel() for tensor in flat}) <= 1
        and all(tensor.dtype == torch.float32 and tensor.dim() == 1 for tensor in flat)
        and all(stream.dtype == torch.uint8 and stream.dim() == 1 for stream in streams)
    )


def _are_counters(state: RankState) -> bool:
    """True if the numbers beside them are, too."""
    counters = state.counters
    if not (isinstance(counters, dict) and counters.keys() >= {*_COUNTS, "time_s", "weight", "local_steps"}):
        return False
    steps, weight, lost = counters["local_steps"], counters["weight"], counters.get("lost", [])
    spares = counters.get("spares", 0)
    counts = [state.rank, state.ranks, state.signature, spares, *(counters[name] for name in _COUNTS)]
    return (
        isinstance(steps, list)
        and all(type(count) is int and 0 <= count < 2**64 for count in [*counts, *steps])
        and state.rank < state.ranks == len(steps)
        and spares < state.ranks
        and all(type(number) in (int, float) and math.isfinite(number) for number in (weight, counters["time_s"]))
        and weight > 0
        and isinstance(lost, list)
        and all(type(rank) is int and 0 <= rank < state.ranks and rank != state.rank for rank in lost)
    )


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(torch.as_tensor(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _layout(tensors: dict[str, Tensor]) -> dict[str, list[Any]]:
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}


def _text_crc(text: str) -> str:
    return str(zlib.crc32(text.encode()))
