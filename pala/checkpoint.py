"""Checkpoints and exported policies: safetensors files, written atomically, checked by CRC when read. No pickle.

A run's `checkpoints/` has one folder for each start of the run (a *segment*: `segment-000`, after a resume
`segment-001`, ...), with two generations of a file for each rank. A rank writes alone: no rank waits for another.
"""

from __future__ import annotations

import json
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

from pala.errors import PalaError
from pala.files import write_atomically
from pala.runtime import say

_FORMAT = 1


@dataclass
class RankState:
    """What one rank needs to go on."""

    rank: int
    ranks: int
    signature: int  # of the network's layout
    parameters: Tensor  # flat float32
    mean_square: Tensor  # flat float32, RMSprop's
    random_states: dict[str, Tensor]  # generator name -> uint8
    counters: dict[str, Any]  # JSON: updates, time, the exchange's state


def _rank_path(folder: Path, rank: int, previous: bool = False) -> Path:
    return folder / f"rank-{rank:04d}{'.previous' if previous else ''}.safetensors"


def save_rank(folder: Path, state: RankState) -> None:
    """Write a rank's checkpoint and keep the one before it. Raises OSError and then leaves both as they were."""
    tensors = {"parameters": state.parameters.detach().cpu(), "mean_square": state.mean_square.detach().cpu()}
    tensors |= {f"random.{name}": value for name, value in state.random_states.items()}
    header = {"rank": state.rank, "ranks": state.ranks, "signature": state.signature, "counters": state.counters}
    data = _pack(tensors, header)
    path = _rank_path(folder, state.rank)
    fresh = path.with_name(f".{path.name}.new")
    write_atomically(fresh, data)
    if path.exists():
        os.replace(path, _rank_path(folder, state.rank, previous=True))
    os.replace(fresh, path)


def load_rank(folder: Path, rank: int, signature: int) -> RankState:
    """A rank's newest readable checkpoint. Raises PalaError if neither generation can be read."""
    faults = []
    for path in (_rank_path(folder, rank), _rank_path(folder, rank, previous=True)):
        try:
            state = _read_rank(path)
        except PalaError as error:
            faults.append(str(error))
            continue
        if state.signature != signature:
            raise PalaError(
                f"Checkpoint '{path}' is of another network ({state.parameters.numel()} parameters); resume with the "
                "environment and the network sizes that it was made with."
            )
        if faults:
            say(f"[rank {rank}] {faults[0]} The one before it is used.")
        return state
    raise PalaError(" ".join(faults))


def load_all(folder: Path, signature: int) -> list[RankState]:
    """The checkpoints of all ranks of a segment, but for those that died: theirs are old."""
    first = load_rank(folder, 0, signature)
    states = [first, *(load_rank(folder, rank, signature) for rank in range(1, first.ranks))]
    lost = {rank for state in states for rank in state.counters.get("lost", [])}
    return [state for state in states if state.rank not in lost]


def average(states: list[RankState], independent: bool = False) -> RankState:
    """One state from many, for another number of ranks.

    Kept: the parameters, averaged with their push-sum weights; RMSprop's mean squares, averaged; all steps made.
    Not kept: each rank's random streams. A rank whose parameters are not finite is left out; raises PalaError if
    that leaves none. Of `independent` learners (exchange `none`), whose average means nothing, rank 0's are taken.
    """
    known = np.max([state.counters["local_steps"] for state in states], axis=0)
    states = [state for state in states[: 1 if independent else None] if bool(state.parameters.isfinite().all())]
    if not states:
        raise PalaError("The checkpoints of all ranks hold parameters that are not finite; nothing can be resumed.")
    weights = [state.counters["weight"] for state in states]
    parameters = sum(w * state.parameters for w, state in zip(weights, states, strict=True))
    mean_square = sum(w * state.mean_square for w, state in zip(weights, states, strict=True))
    assert isinstance(parameters, Tensor) and isinstance(mean_square, Tensor)
    counters = dict(states[0].counters)
    counters["base_steps"] = states[0].counters["base_steps"] + int(known.sum())
    total = sum(weights)
    return RankState(0, 1, states[0].signature, parameters / total, mean_square / total, {}, counters)


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
        return _read_rank(path).ranks
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
    return _unpack(path)


def _pack(tensors: dict[str, Tensor], header: dict[str, Any]) -> bytes:
    crcs = {name: _crc(tensor) for name, tensor in tensors.items()}
    text = json.dumps({"format": _FORMAT, "crc32": crcs} | header)
    return safetensors_bytes(tensors, {"pala": text, "crc32": _text_crc(text)})


def _unpack(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            header = json.loads(metadata["pala"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise PalaError(f"Checkpoint '{path}' does not exist.") from None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise PalaError(f"Checkpoint '{path}' cannot be read ({error}).") from None
    if header.get("format") != _FORMAT:
        raise PalaError(f"Checkpoint '{path}' has format {header.get('format')}; this version reads {_FORMAT}.")
    header_is_whole = metadata.get("crc32") == _text_crc(metadata["pala"])
    if not header_is_whole or header.get("crc32") != {name: _crc(tensor) for name, tensor in tensors.items()}:
        raise PalaError(f"Checkpoint '{path}' is damaged: a checksum does not fit.")
    return tensors, header


def _read_rank(path: Path) -> RankState:
    tensors, header = _unpack(path)
    try:
        random_states = {k.removeprefix("random."): v for k, v in tensors.items() if k.startswith("random.")}
        return RankState(
            header["rank"], header["ranks"], header["signature"], tensors["parameters"], tensors["mean_square"],
            random_states, header["counters"],
        )  # fmt: skip
    except KeyError as error:
        raise PalaError(f"Checkpoint '{path}' lacks {error}.") from None


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(torch.as_tensor(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _text_crc(text: str) -> str:
    return str(zlib.crc32(text.encode()))
