"""One rank from start to end, with either algorithm: build, train, export, record. Everything runs on every rank.

Functions that communicate say so. An error that one rank meets while all ranks start is raised on all of them, so none
waits for ever; an error later ends the job through `MPI_Abort` (`pala.train`).
"""

from __future__ import annotations

import abc
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM, Signals
from typing import IO, Any

import cloudpickle
import torch
from torch import Tensor, nn

from pala.a2c.agent import build_envs
from pala.config import Config, to_table
from pala.envs import MakeEnv
from pala.exchange.base import Exchange, ExchangeState
from pala.exchange.budget import Stop
from pala.exchange.make import flat_checksum
from pala.networks.network import FlatParameters
from pala.run import checkpoint, run_folder
from pala.run.checkpoint import RankState
from pala.run.console import Reporter
from pala.run.loop import Counters, Loop
from pala.run.metrics import MetricsWriter, Record, metrics_path
from pala.system.errors import CollectiveError, PalaError
from pala.system.files import write_atomically
from pala.system.runtime import Interrupt, process_age_s, say
from pala.system.seeding import derive
from pala.transport.agreement import collectively, cores_per_rank
from pala.transport.base import Communicator, Living

_PATIENCE_S = 300.0  # for the slowest rank at the end


@dataclass(frozen=True)
class Result:
    """What `train` gives back on every rank."""

    run: Path
    status: str  # "completed", or "stopped" by a signal
    global_steps: int
    signal: int | None  # number of the signal that stopped it
    leads: bool  # True on the lowest rank that lives


class Training(abc.ABC):
    """The parts of one rank, made in order: network and environments, folder, records, exchange, loop.

    What the algorithms do in ways of their own is abstract here.
    """

    device: torch.device
    network: nn.Module
    flat: FlatParameters
    exchange: Exchange
    loop: Loop

    def __init__(self, comm: Communicator, config: Config, make_env: MakeEnv | None, interrupt: Interrupt) -> None:
        self.comm, self.config, self.make_env, self.interrupt = comm, config, make_env, interrupt
        self.rank, self.size = comm.rank, comm.size
        cores = cores_per_rank(comm)
        self.threads = config.run.threads or cores
        self.record: run_folder.RunRecord | None = None
        self.is_first = self.rank == 0  # at the end: of the ranks that live
        self.reporter: Reporter | None = None
        self.lock: IO[str] | None = None  # of the run's folder: held on every rank until the end

    # ---- start-up: collective ------------------------------------------------------------------------------------

    def build(self, resume: Path | None) -> None:
        """Environments, network, optimiser. Collective."""
        if self.make_env is None and resume is not None:
            self.make_env = collectively(self.comm, lambda: run_folder.load_make_env(resume))
        self.envs = build_envs(self.comm, self.config, self.threads, self.make_env)
        self._build_agent()
        self.generator = torch.Generator(self.device)
        self.counters = Counters()
        self.start = ExchangeState([0] * self.size, 0, 0, 1.0)

    def open_folder(self, resume: Path | None, preset: str) -> None:
        """Rank 0 makes the folders of the run and of this segment; all learn their names. Collective."""

        def make() -> tuple[Path, Path | None, Path, bool] | None:
            if self.rank != 0:
                return None
            run = resume if resume is not None else run_folder.create(self.config, preset)
            self.lock = run_folder.lock(run)  # before anything in it is changed
            old = checkpoint.newest_segment(run) if resume is not None else None
            segment = checkpoint.new_segment(run)
            if self.make_env is not None:
                write_atomically(run / "make_env.pkl", cloudpickle.dumps(self.make_env))
            return run, old, segment, self.lock is not None

        def join() -> None:
            if locked and self.rank != 0:
                self.lock = run_folder.join_lock(self.folder)

        self.folder, self.old_segment, self.segment, locked = self.comm.bcast(collectively(self.comm, make))
        collectively(self.comm, join)

    def begin(self, resume: Path | None) -> None:
        """Equal weights on all ranks, or those of the checkpoints; a first checkpoint. Collective."""
        if resume is None:
            self._seed_streams(round_=0)
            self._share_model(root=0)
        else:
            assert self.old_segment is not None
            self.old = self.old_segment
            self._restore()
        collectively(self.comm, self.save)  # a run that cannot save should fail now

    def _seed_streams(self, round_: int) -> None:
        purpose = f"segment {self.segment.name}" if round_ else ""
        self.generator.manual_seed(int(derive(self.config.seed, self.rank, f"actions {purpose}")[0]))
        self.env_seeds = derive(self.config.seed, self.rank, f"environments {purpose}", self.envs.num_envs)

    def _share_model(self, root: int) -> None:
        """Everybody gets this rank's tensors, the parameters checked by checksum. Collective."""
        for tensor in self._shared_tensors():
            host = tensor.cpu().numpy()
            self.comm.broadcast(host, root)
            tensor.copy_(torch.from_numpy(host))
        checksums = self.comm.allgather(flat_checksum(self.flat.data))
        wrong = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[root]]
        if wrong:
            raise CollectiveError(
                f"Rank {wrong[0]} began with other weights than rank {root}: its memory or link is faulty."
            )

    def _own_state(self) -> tuple[RankState | None, RankState, int]:
        """(this rank's checkpoint if the job has all its old ranks again, else None; rank 0's; ranks that had died).
        Collective."""
        first = collectively(self.comm, lambda: checkpoint.load_rank(self.old, 0, self.flat.signature))
        if first.ranks != self.size:
            return None, first, 0
        own = collectively(self.comm, lambda: checkpoint.load_rank(self.old, self.rank, self.flat.signature, self.size))
        lost = max(self.comm.allgather(len(own.counters.get("lost", []))))
        return (own if lost == 0 else None), first, lost

    def _say_ranks_changed(self, had: RankState, lost: int, what: str) -> None:
        """Rank 0 says what the ranks begin with when they are not those of before."""
        if self.rank == 0:
            text = f"had lost {lost} ranks" if lost else f"had {had.ranks} ranks and now has {self.size}"
            say(f"The run {text}: {what}; the steps made count; random streams are new.")

    def _restore_generator(self, state: RankState | None) -> None:
        saved = state.random_states.get("actions") if state is not None else None
        if saved is None:
            return
        if saved.numel() == self.generator.get_state().numel():
            self.generator.set_state(saved)
        elif self.rank == 0:
            say("The checkpoint is of another kind of device: the random streams of actions are new.")

    def _restore_counters(self, state: RankState, same_ranks: bool) -> None:
        """Collective: push-sum weights are scaled so that their sum is the number of ranks again."""
        c = state.counters
        self.counters = Counters(c["updates"], c["own_steps"] if same_ranks else 0, c["time_s"])
        weight = c["weight"] if same_ranks else 1.0
        weight *= self.size / sum(self.comm.allgather(weight))
        known = self.comm.allgather(c["own_steps"]) if same_ranks else [0] * self.size
        self.start = ExchangeState(known, c["base_steps"], c["round"], weight)

    def open_records(self, facts: dict[str, Any], resume: Path | None) -> None:
        """run.json, metrics, console. Collective."""
        self.hosts = self.comm.allgather(self.comm.host)
        self.metrics = MetricsWriter(metrics_path(self.folder, self.rank), self.rank)
        self.metrics.write([{
            "type": "start", "segment": self.segment.name, "rank": self.rank, "ranks": self.size,
            "time_s": round(self.counters.time_s, 3), "local_steps": self.counters.local_steps,
            "global_steps": self.start.base_steps + sum(self.start.local_steps),
        }])  # fmt: skip

        def open_on_rank_0() -> None:
            if self.rank == 0:
                segment = facts | self._description(resume)
                self.record = run_folder.RunRecord.begin(self.folder, self.config, segment)
                self.reporter = self._make_reporter()

        collectively(self.comm, open_on_rank_0)

    def _make_reporter(self) -> Reporter:
        run = self.config.run
        return Reporter(self.folder, self.size, self.config.total_steps, run.console, run.tensorboard)

    def _description(self, resume: Path | None) -> dict[str, Any]:
        return {
            "ranks": self.size, "hosts": self.hosts, "resumed": resume is not None, "segment": self.segment.name,
            **self.comm.facts(), "device": str(self.device), "threads_per_rank": self.threads,
            "seed": self.config.seed, "parameters": self.flat.data.numel(),
            "python_environment": self.make_env is not None,
        }  # fmt: skip

    # ---- training: no collectives --------------------------------------------------------------------------------

    def run(self) -> Result:
        """Train, then average and export."""
        self.exchange = self._make_exchange()
        self.loop = self._make_loop()
        if self.record is not None:
            self.record.note(message_bytes=self.exchange.message_bytes, seconds_to_first_step=round(process_age_s(), 2))
        stop = self.loop.run(self.env_seeds, self._on_interval, self._save_or_say)
        self.envs.close()
        if stop is Stop.BUDGET:  # a full disk should not keep the ranks from the smaller file, the final policy
            self._save_or_say()
        else:
            self.save()
        self._lead_if_first()
        if stop is Stop.SIGNAL:
            self._record_stop()  # at once: after a signal the launcher may not give much time
        if self.exchange.close(_PATIENCE_S) is Stop.BUDGET:
            final = self.exchange.final_parameters(_PATIENCE_S)
            self.comm.among_the_living(lambda living: self._complete(final, living), _PATIENCE_S, self.interrupt)
        elif stop is Stop.BUDGET:  # a peer got a signal before the news reached it
            stop = Stop.SIGNAL
            self._record_stop()
        self._save_at_end()
        status, signal = ("completed", None) if stop is Stop.BUDGET else ("stopped", self._signal())
        return Result(self.folder, status, self.exchange.global_steps, signal, leads=self.is_first)

    def _signal(self) -> Signals:
        return self.interrupt.signal or SIGTERM  # a peer's signal stops all

    def _record_stop(self) -> None:
        self._lead_if_first()
        self.is_first = self._leads
        if self.is_first:
            say(f"[rank {self.rank}] {self._signal().name}: checkpoint written to '{self.segment}'.")
        self.record_end("stopped", global_steps=self.exchange.global_steps, signal=self._signal().name)

    def _on_interval(self, records: list[Record]) -> None:
        self.metrics.write(records)
        self._lead_if_first()
        if self.reporter is not None:
            self.reporter.report(self.exchange.global_steps)

    @property
    def _leads(self) -> bool:
        return self.rank == self.exchange.living[0]

    def _lead_if_first(self) -> None:
        """The lowest rank that lives keeps run.json and the console, whichever that is by now. Not collective."""
        if not self._leads:
            return
        try:
            self._lead(self.exchange.living)
        except (OSError, PalaError) as error:  # a full disk: the next interval tries again
            say(f"[rank {self.rank}] 'run.json' cannot be written: {error}. Training goes on.")

    def _lead(self, living: Sequence[int]) -> None:
        """Raises OSError, PalaError if run.json cannot be written, or read after the death of who kept it."""
        if self.record is None:
            self.record, self.reporter = run_folder.RunRecord.take_over(self.folder), self._make_reporter()
        lost = {entry["rank"]: entry for entry in self.record.segment.get("lost_ranks", [])}
        fresh = [rank for rank in range(self.size) if rank not in living and rank not in lost]
        if fresh:
            now_s = round(self.counters.time_s, 3)
            entries = [{"rank": rank, "host": self.hosts[rank], "noticed_s": now_s} for rank in fresh]
            self.record.note(lost_ranks=sorted([*lost.values(), *entries], key=lambda entry: entry["rank"]))
            for rank in fresh:
                say(f"[rank {self.rank}] rank {rank} on {self.hosts[rank]} has died; {len(living)} go on.")
        if self.reporter is not None:
            self.reporter.view.living = living

    def save(self) -> None:
        """This rank's checkpoint, unless its tensors are not finite. Not collective. Raises OSError."""
        tensors = self._state_tensors()
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            say(f"[rank {self.rank}] its parameters are not finite: the checkpoint before is kept.")
            return
        exchange = self.exchange.state() if hasattr(self, "exchange") else self.start
        counters = {
            "updates": self.counters.updates, "own_steps": self.counters.local_steps, "time_s": self.counters.time_s,
        } | exchange._asdict() | self._state_counters()  # fmt: skip
        streams = {"actions": self.generator.get_state()}
        state = RankState(self.rank, self.size, self.flat.signature, tensors, streams, counters)
        checkpoint.save_rank(self.segment, state)

    def _save_or_say(self) -> None:
        try:
            self.save()
        except OSError as error:
            say(f"[rank {self.rank}] no checkpoint could be written: {error}. The one before is kept; the job goes on.")

    # ---- the end -------------------------------------------------------------------------------------------------

    def _complete(self, final: Tensor, living: Living) -> None:
        """Write the final policy, and then that the run is complete. The first of the living only."""
        self.is_first = self.rank == living.members[0]
        if not self.is_first:
            return
        self._lead(living.members)
        self.flat.data.copy_(final)
        header = {"config": to_table(self.config), "global_steps": self.exchange.global_steps, "ranks": self.size}
        checkpoint.save_policy(self.folder / "policy.safetensors", dict(self.network.state_dict()), header)
        self.record_end("completed", global_steps=self.exchange.global_steps)

    def abandon(self) -> None:
        """Every rank failed to start: free the environments; rank 0 takes away what it made for this start."""
        if hasattr(self, "envs"):
            self.envs.close()
        if self.rank == 0 and hasattr(self, "segment") and self.record is None:
            shutil.rmtree(self.segment if self.old_segment is not None else self.folder, ignore_errors=True)
        self.record_end("failed")

    def record_end(self, status: str, **facts: Any) -> None:
        """Close console and TensorBoard, and say in run.json how it ended. Rank 0 only; others do nothing."""
        if self.reporter is not None:
            self.reporter.close()
            self.reporter = None
        if self.record is None:
            return
        try:
            self.record.end(status, **facts)
        except OSError as error:
            if status == "completed":  # what nobody recorded did not happen: the job must not end well
                raise
            say(f"run.json cannot be written: {error}.")

    # ---- what the algorithms do in ways of their own ---------------------------------------------------------------

    @abc.abstractmethod
    def _build_agent(self) -> None:
        """Set `device`, `network` and `flat`, and what else learns. Collective."""

    @abc.abstractmethod
    def _shared_tensors(self) -> list[Tensor]:
        """What all ranks begin with alike."""

    @abc.abstractmethod
    def _restore(self) -> None:
        """Go on from the checkpoints in `old`. Collective."""

    @abc.abstractmethod
    def _state_tensors(self) -> dict[str, Tensor]:
        """Flat tensors for this rank's checkpoint."""

    def _state_counters(self) -> dict[str, Any]:
        """Numbers for this rank's checkpoint."""
        return {}

    def _save_at_end(self) -> None:  # noqa: B027  most have nothing more
        """What is saved only once, when all else is. Collective."""

    @abc.abstractmethod
    def _make_exchange(self) -> Exchange:
        """Collective."""

    @abc.abstractmethod
    def _make_loop(self) -> Loop: ...
