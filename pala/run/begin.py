"""How a rank begins: in the run's folder, locked against other jobs, with the same weights as all others or with what
the checkpoints hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from pala.comm.agreement import collectively, from_first
from pala.comm.base import Communicator
from pala.config import Config
from pala.exchange.budget import ExchangeState
from pala.run import checkpoint, run_folder, user_code
from pala.run.checkpoint import RankState
from pala.run.lock import join_lock, lock_folder, lock_identity
from pala.run.loop import Counters, Progress
from pala.run.metrics import packed_alone
from pala.run.parts import Parts, Saved
from pala.run.segment import Segment
from pala.system.errors import CollectiveError, PalaError, reason
from pala.system.output import say
from pala.system.seeding import derive


@contextmanager
def open_segment(comm: Communicator, config: Config, resume: Path | None, preset: str) -> Iterator[Segment]:
    """Make the folders and lock the run's, on every rank, until the block ends. Collective.

    A new run's is named after `preset`, unless the configuration says how.
    """
    lock: BinaryIO | None = None  # held on every rank, so that the folder stays locked while any of them lives

    def make() -> tuple[Segment, bool]:
        nonlocal lock
        run = resume if resume is not None else run_folder.create(config, preset)
        if resume is not None and (name := run_folder.own_name(run, config)) != config.run.name:
            say(
                f"'run.name' ('{config.run.name}') is not used: the run goes on in its folder as '{name}'. For another "
                "run that begins as it is, copy the folder and resume the copy."
            )
        lock = lock_folder(run)  # before anything in it is changed
        if lock is not None:
            run_folder.remove_unfinished(run)
        if resume is not None:
            (run / "metrics").mkdir(exist_ok=True)  # a copy of a run may lack it
        if resume is not None and (packed := packed_alone(run, comm.size + config.run.spares)) is not None:
            raise PalaError(
                f"The metrics '{packed}' are packed, and training would begin a new file beside them, which would hide "
                "what they hold: `gunzip` them first."
            )
        if resume is None:
            user_code.forget(run)  # of a job that never began
        previous = checkpoint.newest_segment(run) if resume is not None else None
        segment = Segment(run, checkpoint.new_segment(run), previous)
        return segment, lock is not None

    def join() -> None:
        nonlocal lock
        if is_locked and comm.rank != 0:
            lock = join_lock(segment.run)

    try:
        segment, is_locked = from_first(comm, make)
        with segment.removed_if_nobody_starts(comm.rank):
            collectively(comm, join)
        yield replace(segment, identity=lock_identity(lock))
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):  # of a network file system that is gone: the real outcome is another
                lock.close()


@contextmanager
def joined(segment: Segment, is_locked: bool) -> Iterator[Segment]:
    """Keep the run's folder locked, if it is, on a rank that comes later than others, until the block ends. Raises
    PalaError if it cannot see the folder."""
    with join_lock(segment.run) if is_locked else contextlib.nullcontext() as lock:
        yield replace(segment, identity=lock_identity(lock))


def initial_progress(comm: Communicator, seed: int, parts: Parts[Any], segment: Segment, spares: int) -> Progress:
    """Give the parts what they begin with; how far this rank is. `spares`: that follow the ranks of `comm`.
    Collective."""
    signatures = comm.allgather(parts.flat.signature)
    if unlike := [rank for rank, signature in enumerate(signatures) if signature != signatures[0]]:
        raise CollectiveError(
            f"The network of rank {unlike[0]} is not that of rank 0, with which it would exchange parameters: give all "
            "ranks the same network, whose buffers come out the same each time, and environments with the same spaces."
        )
    generator = make_generator(seed, comm.rank, parts, segment)
    if segment.previous is None:
        parts.share(comm)
        return Progress(Counters(), generator, ExchangeState([0] * (comm.size + spares)))
    saved = Saved.find(comm, segment.previous, parts.flat, parts.coupling)
    restored = parts.restore(comm, saved)
    if saved.own is not None:
        _restore_generator(comm.rank, generator, saved.own)
    counters, start = _restore_counters(comm, restored, same_ranks=saved.own is not None)
    return Progress(counters, generator, start._replace(local_steps=[*start.local_steps, *[0] * spares]))


def make_generator(seed: int, rank: int, parts: Parts[Any], segment: Segment) -> torch.Generator:
    """The random stream that a rank's actions are drawn from. torch's global one, which dropout draws from, gets a seed
    of this rank's as well."""
    torch.manual_seed(int(derive(seed, rank, f"torch {_purpose(segment)}")[0]))
    generator = torch.Generator(parts.device)
    generator.manual_seed(int(derive(seed, rank, f"actions {_purpose(segment)}")[0]))
    return generator


def env_seeds(seed: int, rank: int, segment: Segment, num_envs: int) -> np.ndarray:
    """One for each of a rank's environments, int32; new ones in each segment."""
    return derive(seed, rank, f"environments {_purpose(segment)}", num_envs)


def _purpose(segment: Segment) -> str:
    """Random streams of a resumed run are new."""
    return f"segment {segment.path.name}" if segment.previous is not None else ""


def _restore_generator(rank: int, generator: torch.Generator, own: RankState) -> None:
    saved = own.random_states.get("actions")
    if saved is None:
        return
    try:
        if saved.numel() == generator.get_state().numel():
            generator.set_state(saved)
        elif rank == 0:
            say("The checkpoint is of another kind of device: the random streams of actions are new.")
    except (RuntimeError, TypeError) as error:
        say(f"[rank {rank}] The checkpoint's random stream cannot be used ({reason(error)}): that of actions is new.")


def _restore_counters(comm: Communicator, c: dict[str, Any], same_ranks: bool) -> tuple[Counters, ExchangeState]:
    """From what `Parts.restore` gives. Push-sum weights are scaled so that their sum is the number of ranks again.
    Collective."""
    own_steps, applied = c["own_steps"] if same_ranks else 0, c["applied"]
    counters = Counters(c["updates"], own_steps, c["time_s"], applied)
    weight = c["weight"] if same_ranks else 1.0
    weight *= comm.size / sum(comm.allgather(weight))
    known = comm.allgather(c["own_steps"]) if same_ranks else [0] * comm.size
    return counters, ExchangeState(known, c["base_steps"], c["round"], weight)
