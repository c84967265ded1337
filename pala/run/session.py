"""One rank from start to end, with either algorithm: build, train, export, record. Everything runs on every rank.

    environments ──▶ parts (network, optimiser) ──▶ segment (folders) ──▶ progress ──▶ records ──▶ exchange ──▶ loop

Functions that communicate say so. An error that one rank meets while all ranks start is raised on all of them, so none
waits for ever; a later error ends this rank, and the job if no other can
outlive it (`pala/transport/mpi_process.py`, `abort`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

import numpy as np
from torch import Tensor

from pala.a2c import parts as a2c
from pala.config import Config, to_table
from pala.envs import Envs, MakeEnv
from pala.exchange.base import Exchange
from pala.exchange.budget import Stop
from pala.gorila import parts as gorila
from pala.run import checkpoint, run_folder
from pala.run.begin import begin, env_seeds
from pala.run.checkpoint import RankState
from pala.run.loop import Loop, Progress, nothing_on_update
from pala.run.metrics import Record
from pala.run.parts import Parts, build_envs
from pala.run.records import Records
from pala.run.segment import Segment, open_segment
from pala.system.errors import CollectiveError, EndError
from pala.system.runtime import Interrupt, process_age_s, say
from pala.transport.agreement import check_agreement, collectively, cores_per_rank
from pala.transport.base import Communicator, Living

_PATIENCE_S = 300.0  # for the slowest rank at the end
_LOOK_S = 0.1  # a rank that sleeps until the end looks at signals so often
_BUILD: dict[str, Callable[[Communicator, Config, Envs], Parts[Any]]] = {  # collective
    "a2c": a2c.build, "gorila": gorila.build,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What `run_session` gives back on every rank."""

    run: Path
    status: str  # "completed", "stopped" by a signal; of a rank that others go on without, "left"
    global_steps: int
    signal: int | None  # number of the signal that stopped it
    leads: bool  # True on the lowest rank that lives


def run_session(
    comm: Communicator, config: Config, make_env: MakeEnv | None = None, resume: Path | None = None, preset: str = "",
    facts: dict[str, Any] | None = None, on_update: Callable[[int], None] = nothing_on_update,
    interrupt: Interrupt | None = None,
) -> Result:  # fmt: skip
    """Train on all ranks of `comm`. Collective.

    `resume`: the run's folder; `preset`: what a new one's name begins with; `facts`: for run.json; `on_update(updates)`
    is called after each update of this rank; `interrupt`: in place of the process's signals.
    """
    with (interrupt or Interrupt()).installed() as interrupt:
        check_agreement(comm, config)
        cores = cores_per_rank(comm)
        threads = config.run.threads or cores
        if make_env is None and resume is not None:
            make_env = collectively(comm, lambda: run_folder.load_make_env(resume))
        envs = build_envs(comm, config, threads, make_env)
        description = (facts or {}) | {"threads_per_rank": threads, "python_environment": make_env is not None}
        try:
            parts = _BUILD[config.algorithm](comm, config, envs)
            with open_segment(comm, config, resume, preset or config.env.id.split("/")[-1], make_env) as segment:
                with segment.removed_if_nobody_starts(comm.rank):
                    progress = begin(comm, config.seed, parts, segment)
                    # A run that cannot save should fail now.
                    collectively(comm, lambda: save(comm, parts, progress, segment, exchange=None))
                    records = _open_records(comm, config, parts, progress, segment, description)
                return Session(comm, config, envs, parts, segment, progress, records, interrupt).run(on_update)
        except CollectiveError:
            envs.close()
            raise


def save(
    comm: Communicator, parts: Parts[Any], progress: Progress, segment: Segment, exchange: Exchange | None
) -> None:
    """This rank's checkpoint, unless its tensors are not finite; `exchange`: None before training. Not collective.
    Raises OSError."""
    tensors, numbers = parts.state(exchange)
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        say(f"[rank {comm.rank}] its parameters are not finite: the checkpoint before is kept.")
        return
    counted = progress.counters
    counters = {
        "updates": counted.updates, "own_steps": counted.local_steps, "time_s": counted.time_s,
    } | (exchange.state() if exchange is not None else progress.start)._asdict() | numbers  # fmt: skip
    streams = {"actions": progress.generator.get_state()}
    state = RankState(comm.rank, comm.size, parts.flat.signature, tensors, streams, counters)
    checkpoint.save_rank(segment.path, state)


def _open_records(
    comm: Communicator, config: Config, parts: Parts[Any], progress: Progress, segment: Segment,
    description: dict[str, Any],
) -> Records:  # fmt: skip
    """Say in all files that the segment begins. Collective."""
    counters, start = progress.counters, progress.start
    first: Record = {
        "type": "start", "segment": segment.path.name, "rank": comm.rank, "ranks": comm.size,
        "time_s": round(counters.time_s, 3), "local_steps": counters.local_steps,
        "global_steps": start.base_steps + sum(start.local_steps),
    }  # fmt: skip
    description |= {
        "ranks": comm.size, "resumed": segment.is_resumed, "segment": segment.path.name, **comm.facts(),
        "device": str(parts.device), "seed": config.seed, "parameters": parts.flat.data.numel(),
    }  # fmt: skip
    return Records(comm, config, segment.run, first, description)


class Session:
    """A rank that is ready to train: everything has been saved and recorded once."""

    def __init__(
        self, comm: Communicator, config: Config, envs: Envs, parts: Parts[Any], segment: Segment, progress: Progress,
        records: Records, interrupt: Interrupt,
    ) -> None:  # fmt: skip
        self._comm, self._config, self._envs, self._parts = comm, config, envs, parts
        self._segment, self._progress, self._records, self._interrupt = segment, progress, records, interrupt
        self._leads = comm.rank == 0  # at the end: whether no lower rank lives

    def run(self, on_update: Callable[[int], None]) -> Result:
        """Train, then average and export. Collective."""
        try:
            return self._train(on_update)
        except BaseException as error:
            if self._comm.is_alone() or isinstance(error, (CollectiveError, EndError)):
                self._records.end("failed")
            raise

    def _train(self, on_update: Callable[[int], None]) -> Result:
        collectively(self._comm, self._records.open_reporter)
        self._parts.before_training(self._comm.rank, self._segment.previous)
        exchange: Exchange = self._parts.make_exchange(self._comm, self._progress.start, self._interrupt)
        loop = self._parts.make_loop(self._comm.rank, self._envs, exchange, self._progress, self._interrupt)
        self._records.note(message_bytes=exchange.message_bytes, seconds_to_first_step=round(process_age_s(), 2))
        stop = self._loop(loop, exchange, on_update)
        if stop is Stop.NONE:  # it has left
            self._records.resign()
            if self._comm.outlives_ranks:
                self._comm.depart()
                return Result(self._segment.run, "left", exchange.global_steps, None, False)
            stop = self._sit_out(exchange)
        if exchange.close(_PATIENCE_S) is Stop.BUDGET:
            final = exchange.final_parameters(_PATIENCE_S)
            self._comm.among_the_living(
                lambda living: self._complete(exchange, final, living), _PATIENCE_S, self._interrupt
            )
        elif stop is Stop.BUDGET:  # a peer got a signal before the news reached it
            stop = Stop.SIGNAL
            self._record_stop(exchange)
        self._parts.after_training(self._comm, self._segment.path)
        status, signal = ("completed", None) if stop is Stop.BUDGET else ("stopped", self._signal)
        return Result(self._segment.run, status, exchange.global_steps, signal, self._leads)

    def _sit_out(self, exchange: Exchange) -> Stop:
        """Wait for the end, which this MPI does not reach without every rank; returns why it ended."""
        say(
            f"[rank {self._comm.rank}] trains no more, but this MPI needs its process until the job ends; it sleeps. "
            "Open MPI 5 with `mpirun --with-ft ulfm` lets it go."
        )
        while exchange.stop is Stop.NONE:
            if self._interrupt.signal is not None:
                exchange.stop_now(Stop.SIGNAL)
            time.sleep(_LOOK_S)
        return exchange.stop

    # ---- training: no collectives --------------------------------------------------------------------------------

    def _loop(self, loop: Loop, exchange: Exchange, on_update: Callable[[int], None]) -> Stop:
        """Train until the end, and save. Returns why it ended here."""

        def on_interval(records: list[Record]) -> None:
            self._records.write(records)
            self._lead_if_first(exchange)
            self._records.report(exchange.global_steps)

        seeds: np.ndarray = env_seeds(self._config.seed, self._comm.rank, self._segment, self._envs.num_envs)
        stop = loop.run(seeds, on_interval, lambda: self._save_or_say(exchange), on_update)
        self._envs.close()
        if stop is Stop.BUDGET:  # a full disk should not keep the ranks from the smaller file, the final policy
            self._save_or_say(exchange)
        else:
            self._save(exchange)
        self._lead_if_first(exchange)
        if stop is Stop.SIGNAL:
            self._record_stop(exchange)  # at once: after a signal the launcher may not give much time
        return stop

    def _lead_if_first(self, exchange: Exchange) -> bool:
        return self._records.lead_if_first(exchange.living, self._progress.counters.time_s, exchange.left)

    @property
    def _signal(self) -> Signals:
        return self._interrupt.signal or SIGTERM  # a peer's signal stops all

    def _record_stop(self, exchange: Exchange) -> None:
        self._leads = self._lead_if_first(exchange)
        if self._leads:
            say(f"[rank {self._comm.rank}] {self._signal.name}: checkpoint written to '{self._segment.path}'.")
        self._records.end("stopped", global_steps=exchange.global_steps, signal=self._signal.name)

    def _save(self, exchange: Exchange) -> None:
        save(self._comm, self._parts, self._progress, self._segment, exchange)

    def _save_or_say(self, exchange: Exchange) -> None:
        try:
            self._save(exchange)
        except OSError as error:
            say(
                f"[rank {self._comm.rank}] no checkpoint could be written: {error}. The one before is kept; the job "
                "goes on."
            )

    # ---- what is written down ------------------------------------------------------------------------------------

    def _complete(self, exchange: Exchange, final: Tensor, living: Living) -> None:
        """Write the final policy, and then that the run is complete. The first of the living only."""
        self._leads = self._comm.rank == living.members[0]
        if not self._leads:
            return
        self._records.lead(living.members, self._progress.counters.time_s, exchange.left)
        self._parts.flat.data.copy_(final)
        header = {
            "config": to_table(self._config), "global_steps": exchange.global_steps, "ranks": self._comm.size
        }  # fmt: skip
        policy = dict(self._parts.network.state_dict())
        checkpoint.save_policy(self._segment.run / "policy.safetensors", policy, header)
        self._records.end("completed", global_steps=exchange.global_steps)
