"""A rank that is ready to train, to the end: it trains, averages, exports, and says how the run ended.

Functions that communicate say so. An error that one rank meets ends this rank, and the job if no other can outlive it
(`pala/comm/mpi_process.py`, `abort`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from signal import SIGTERM, Signals

import numpy as np
from torch import Tensor

from pala.comm.agreement import collectively
from pala.comm.base import Survivors
from pala.exchange.base import Exchange
from pala.exchange.budget import Stop
from pala.exchange.sleeping import Beginning
from pala.run import checkpoint
from pala.run.begin import env_seeds
from pala.run.hooks import Callback, Callbacks, Moment, asks_to_stop
from pala.run.job import Briefing
from pala.run.keeper import Keeper
from pala.run.loop import Loop
from pala.run.metrics import Record
from pala.run.records import Records
from pala.run.result import Conclude, Result
from pala.run.setup import Setup
from pala.system.errors import CollectiveError, EndError
from pala.system.interrupt import LEAVE, Interrupt
from pala.system.launcher import process_age_s
from pala.system.output import say
from pala.system.resources import on_cores

_LOOK_S = 0.1  # a rank that sleeps until the end looks at signals so often
_CALLBACKS = ("", *Callbacks._fields)


class Session:
    """A rank that is ready to train: everything has been saved and recorded once."""

    def __init__(self, setup: Setup, keeper: Keeper, records: Records, interrupt: Interrupt) -> None:
        self._keeper, self._records, self._interrupt = keeper, records, interrupt
        self._request, self._config, self._callbacks = setup.request, setup.config, setup.request.callbacks
        self._job, self._comm, self._envs, self._parts = setup.job, setup.job.comm, setup.envs, setup.parts
        self._segment, self._progress = setup.segment, setup.progress
        self._asked_to_stop = ""  # by which of the callbacks
        self._leads = self._comm.rank == 0  # at the end: whether no lower rank lives
        self._has_said_stop = False

    def run(self, exchange: Exchange | None = None) -> Result:
        """Train, then average, export and conclude. `exchange`: of a spare; None: all ranks make it. Collective."""
        try:
            if exchange is None:
                exchange = self._make_exchange()
            result = self._train(exchange)
            conclude = self._request.conclude
            return result if conclude is None or result.departs else self._conclude(result, exchange, conclude)
        except BaseException as error:
            if exchange is not None:
                exchange.abandon()
            # In this order: after a wait without success a thread may still be inside MPI.
            if isinstance(error, (CollectiveError, EndError)) or self._comm.is_alone():
                self._records.fail(error)
            raise

    def _make_exchange(self) -> Exchange:
        """The exchange of ranks that train from the beginning. Collective."""
        assert self._job.trainers is not None
        collectively(self._job.trainers, self._records.open_reporter)
        self._parts.before_training(self._segment.previous)
        if self._comm.rank == 0 and self._segment.previous is not None:
            checkpoint.remove_older(self._segment.previous)
        segment, start, flat = self._segment, self._progress.start, self._parts.flat
        told = Beginning(flat.data.numel(), flat.signature, start)
        is_locked, time_s = segment.identity is not None, self._progress.counters.time_s
        precision = self._parts.config.network.precision
        self._job.brief(Briefing(replace(segment, identity=None), is_locked, precision, time_s, told))
        may_stop = any(self._job.trainers.allgather(self._callbacks.may_stop))
        # From here to its close the exchange alone communicates: its thread may be inside MPI at any time.
        exchange: Exchange = self._parts.make_exchange(self._comm, start, self._interrupt)
        if may_stop:
            exchange.listen()
        return exchange

    def _train(self, exchange: Exchange) -> Result:
        loop = self._parts.make_loop(self._comm.rank, self._envs, exchange, self._progress, self._interrupt)
        began_s = self._request.began_s
        first_step_s = round(process_age_s() if began_s is None else time.perf_counter() - began_s, 2)
        self._records.note_later(message_bytes=exchange.message_bytes, seconds_to_first_step=first_step_s)
        stop = self._loop(loop, exchange)
        if stop is Stop.NONE:  # it has left
            self._records.resign()
            if self._comm.outlives_ranks and exchange.living:
                self._comm.depart()
                return Result(self._segment.run, "left", exchange.global_steps, None, False, 0)
            stop = self._stay(exchange) if self._comm.outlives_ranks else self._sit_out(exchange)
        end = exchange.close(self._job.patience_after(stop))
        early = self._who_stopped() if end is Stop.CALLBACK else ""
        if end.completes:
            self._check_learned(loop)
            final = exchange.final_parameters(self._job.patience_s)
            self._comm.with_survivors(
                lambda living: self._complete(exchange, final, living, early), self._job.patience_s, self._interrupt
            )
        else:
            self._keeper.save_if_changed(exchange)
            self._record_stop(exchange, end)  # once more: now all know who lives, one leads, and the steps are exact
        self._segment.check_folder()
        self._parts.after_training(self._comm, self._segment.path)
        self._records.saved()
        self._envs.close()  # not before: it is the user's code, and may not return
        status, signal = ("completed", None) if end.completes else ("stopped", self._signal(end))
        exit_status = 0 if signal is None else 128 + signal
        return Result(self._segment.run, status, exchange.global_steps, signal, self._leads, exit_status, early)

    def _who_stopped(self) -> str:
        """Whose callback ended training, in words, the same on all ranks. Collective."""

        def gather(survivors: Survivors) -> np.ndarray:
            said = np.zeros(self._comm.size, np.uint64)  # each rank's callback, counted from 1
            said[self._comm.rank] = _CALLBACKS.index(self._asked_to_stop)
            survivors.reduce(said, "max")
            return said

        said = self._comm.with_survivors(gather, self._job.patience_s, self._interrupt)
        ranks = np.flatnonzero(said)
        if not len(ranks):
            return "a callback of a rank that has died returned False"
        return f"{_CALLBACKS[int(said[ranks[0]])]} of rank {ranks[0]} returned False"

    def _check_learned(self, loop: Loop) -> None:
        """Collective. Raises EndError if no update was applied in this start, or ever: nothing was learned. Says so if
        none was tried."""

        def add_up(survivors: Survivors) -> tuple[np.ndarray, Sequence[int]]:
            begun, now = loop.began_with, loop.counters
            start = now.updates - begun.updates, now.applied - begun.applied
            made = now.local_steps - begun.local_steps
            counts = np.array([*start, now.updates, now.applied, made], np.int64)
            survivors.reduce(counts, "sum")
            return counts, survivors.members

        counts, members = self._comm.with_survivors(add_up, self._job.patience_s, self._interrupt)
        left_out = [tried for tried, applied in (counts[:2], counts[2:4]) if tried > 0 and applied == 0]
        if left_out:
            raise EndError(
                f"All {left_out[-1]:,} updates of all ranks were left out, because the loss or its gradient was not "
                "finite: nothing was learned. Look at the environment's rewards and observations, or at the learning "
                "rate."
            )
        # Of ranks that are gone the updates are not known.
        if counts[0] == 0 < counts[4] and len(members) == self._job.num_trainers and self._comm.rank == members[0]:
            why = "; see 'gorila.min_replay_steps', and 'rewards_not_finite' in its metrics"
            say(
                f"No rank made an update in the {counts[4]:,} steps of this start, so nothing was learned: the final "
                f"policy is the one that it began with{why if self._config.algorithm == 'gorila' else ''}."
            )

    def _sit_out(self, exchange: Exchange) -> Stop:
        """Wait for the end, which this MPI does not reach without every rank; returns why it ended."""
        say(
            f"[rank {self._comm.rank}] trains no more, but this MPI needs its process until the job ends; it sleeps. "
            "Open MPI 5 with `mpirun --with-ft ulfm` lets it go."
        )
        self._envs.close()
        while exchange.stop is Stop.NONE:
            if not exchange.living:  # perhaps all have left at the same time
                return self._stay(exchange)
            if self._interrupt.signal is not None:
                exchange.stop_now(Stop.SIGNAL)
            time.sleep(_LOOK_S)
        return exchange.stop

    def _stay(self, exchange: Exchange) -> Stop:
        """A rank was about to leave, but those who were to go on have died or left: nobody but it, or others like it,
        can say how the run ended. Returns why it ends."""
        exchange.stop_now(Stop.ALL_LEAVE)
        if exchange.stop is Stop.ALL_LEAVE:
            say(f"[rank {self._comm.rank}] was about to leave, but no other rank trains any more: the job ends.")
        return exchange.stop

    # ---- training: no collectives --------------------------------------------------------------------------------

    def _loop(self, loop: Loop, exchange: Exchange) -> Stop:
        """Train until the end, and save. Returns why it ended here."""

        def on_interval(records: list[Record]) -> None:
            self._records.write(records)
            self._lead_if_first(exchange)
            self._records.report(exchange.global_steps)
            self._call("on_interval", self._callbacks.on_interval, exchange, records)

        def updated(updates: int) -> None:
            if self._request.on_count is not None:
                self._request.on_count(updates)
            self._call("on_update", self._callbacks.on_update, exchange)

        seeds: np.ndarray = env_seeds(self._config.seed, self._comm.rank, self._segment, self._envs.num_envs)
        stop = loop.run(seeds, on_interval, lambda: self._keeper.keep(exchange, self._records.view), updated)
        # A full disk should not keep the ranks from the smaller file, the final policy, nor the others from going on.
        if stop.completes or stop is Stop.NONE:
            self._keeper.keep(exchange, self._records.view)
            self._lead_if_first(exchange)
        else:
            self._keeper.save(exchange)
            view = self._records.view
            self._record_stop(exchange, stop)  # at once: after a signal the launcher may not give much time
            self._keeper.judge(exchange, view)
        return stop

    def _call(
        self, name: str, callback: Callback | None, exchange: Exchange, records: list[Record] | None = None
    ) -> None:
        """One of the user's, which may end training."""
        if callback is None:
            return
        done, rank = self._progress.counters, self._comm.rank
        moment = Moment(rank, done.updates, done.local_steps, exchange.global_steps, done.time_s, records or ())
        has_left = rank in exchange.left  # then these are its last records, and the others go on
        if asks_to_stop(callback(moment)) and exchange.stop is Stop.NONE and not has_left:
            say(f"[rank {rank}] '{name}' returned False: training ends on all ranks.")
            self._asked_to_stop = name
            exchange.stop_now(Stop.CALLBACK)

    def _lead_if_first(self, exchange: Exchange) -> bool:
        return self._records.lead_if_first(exchange, exchange.living, self._progress.counters.time_s)

    def _signal(self, stop: Stop) -> Signals:
        """Which one ended training. Of a peer's nothing is known here but what it asks for."""
        return self._interrupt.signal or (LEAVE if stop is Stop.ALL_LEAVE else SIGTERM)

    def _record_stop(self, exchange: Exchange, stop: Stop) -> None:
        self._leads = self._lead_if_first(exchange)
        if not self._leads:
            self._records.resign()
            return
        signal = self._signal(stop).name
        if not self._has_said_stop:
            self._has_said_stop = True
            kept = "written to" if self._keeper.has_saved else "of before kept in"
            say(f"[rank {self._comm.rank}] {signal}: checkpoint {kept} '{self._segment.path}'.")
        self._records.end("stopped", global_steps=exchange.global_steps, signal=signal)

    # ---- what is written down ------------------------------------------------------------------------------------

    def _complete(self, exchange: Exchange, final: Tensor, survivors: Survivors, stopped_early: str) -> None:
        """Write the final policy, and then that the run is complete. The first of the living only."""
        self._leads = self._comm.rank == survivors.members[0]
        if not self._leads:  # also if it led while one who had left slept
            self._records.resign()
            return
        self._records.lead(exchange, survivors.members, self._progress.counters.time_s)
        self._keeper.export(final, exchange.global_steps)
        why = {"stopped_early": stopped_early} if stopped_early else {}
        self._records.end("completed", global_steps=exchange.global_steps, **why)

    def _conclude(self, result: Result, exchange: Exchange, conclude: Conclude) -> Result:
        """The first of the living concludes, while the others wait asleep: if it dies, the next one does. Collective,
        unless a signal stopped the run: then there is nothing to do that could be missed."""
        if result.signal is not None:
            if result.leads:
                conclude(result, self._config, self._interrupt)
            return result
        done: list[Result] = []

        def conclude_first(survivors: Survivors) -> None:
            time_s = self._progress.counters.time_s
            self._leads = self._records.lead_if_first(exchange, survivors.members, time_s)
            if self._leads and not done:
                with on_cores(self._job.host_cores):  # the other ranks sleep
                    done.append(conclude(result, self._config, self._interrupt))
                self._records.conclude(done[0].outcomes)

        limit_s = self._config.evaluation.timeout_s + self._job.patience_s
        self._comm.with_survivors(conclude_first, limit_s, self._interrupt)
        return replace(done[0] if done else result, leads=self._leads)
