"""Training on a rank that is ready for it, to the end: the loop, then the phases in which all ranks that live end.

Functions that communicate say so. An error that one rank meets ends this rank, and the job if no other can outlive it
(`pala/comm/mpi_process.py`, `abort`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from signal import SIGTERM, Signals
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from pala.algorithms import ALGORITHMS
from pala.comm.base import Survivors
from pala.exchange.base import Exchange
from pala.exchange.budget import Stop
from pala.job.job import Job
from pala.job.request import Conclude, Request, Result
from pala.run.agent import Agent
from pala.run.hooks import Callback, Moment, asks_to_stop
from pala.run.loop import Loop
from pala.run.metrics import Record
from pala.run.run import Run
from pala.run.run_folder import BEST_POLICY
from pala.run.view import RunView
from pala.system.errors import CollectiveError, EndError, reason
from pala.system.interrupt import LEAVE
from pala.system.output import log
from pala.system.resources import on_cores
from pala.system.trace import traced

if TYPE_CHECKING:
    from pala.run.best_policy import BestPolicy

_LOOK_S = 0.1  # between two looks at signals of a rank that sleeps until the end


@contextmanager
def failing(job: Job, run: Run, exchange: Exchange | None = None) -> Iterator[None]:
    """End the exchange of a rank that fails inside the block, and say in run.json why the run ends, if it does."""
    try:
        yield
    except BaseException as error:
        if exchange is not None:
            exchange.abandon()
        # In this order: after a wait without success a thread may still be inside MPI.
        if isinstance(error, (CollectiveError, EndError)) or job.comm.is_alone():
            run.fail(error)
        raise


class Training:
    """Training on a rank on which everything has been saved and recorded once."""

    def __init__(self, job: Job, request: Request, run: Run, agent: Agent[Any], exchange: Exchange) -> None:
        self._job, self._comm, self._interrupt = job, job.comm, job.comm.interrupt
        self._request, self._callbacks = request, request.callbacks
        self._run = run
        self._agent = agent
        self._exchange = exchange
        self._best: BestPolicy | None = None  # from the first checkpoint on
        self._began_with = replace(agent.counters)
        self._stop = Stop.NONE  # why training ends: as this rank has it; after `close`, as all have agreed
        self._leads = self._comm.rank == 0  # at the end: whether no lower rank lives
        self._has_said_stop = False

    def run(self) -> Result:
        """Train, then go through the phases of the end. Collective."""
        trace = self._exchange.trace
        with failing(self._job, self._run, self._exchange), closing(trace) if trace is not None else nullcontext():
            loop = self._agent.make_loop(self._exchange)
            self._stop = self._train(loop)
            if self._stop is Stop.NONE:  # it has left
                self._run.stop_leading()
                if self._comm.outlives_ranks and self._exchange.living:
                    self._comm.detach()
                    return Result(self._run.folder, "left", self._exchange.global_steps, None, False, 0)
                self._stop = self._cancel_leaving() if self._comm.outlives_ranks else self._sleep_until_end()
            with traced(trace, "close"):
                self._stop = self._exchange.close(self._patience_s())  # as all have agreed
                self._run.report(self._exchange.global_steps)
            if self._stop.completes:
                self._check_learned()
                with traced(trace, "average"):
                    final = self._exchange.final_parameters(self._patience_s())
                with traced(trace, "export"):
                    self._export(final)
            else:
                with traced(trace, "save"):
                    self._save_once_more()
            self._run.saved()
            self._agent.envs.close()  # not before: it is the user's code, and may not return
            return self._conclude()

    # ---- training: no collectives --------------------------------------------------------------------------------

    def _train(self, loop: Loop) -> Stop:
        """Train until the end, and save. Returns why it ended here."""
        run, exchange = self._run, self._exchange
        self._job.notes.end()

        def on_interval(records: list[Record]) -> None:
            with traced(exchange.trace, "metrics"):
                run.write(records)
                self._lead_if_first()
                if not exchange.stop.completes:
                    run.report(exchange.global_steps)
                elif run.view is not None:  # shown after `close`: by then the other ranks have written their last
                    run.view.refresh()
            self._call("on_interval", self._callbacks.on_interval, records)

        def on_update(updates: int) -> None:
            self._comm.on_count(updates)
            self._call("on_update", self._callbacks.on_update)

        stop = loop.run(self._agent.first_observations, on_interval, self._keep, on_update)
        # With a full disk there may be room for the final policy, which is smaller; and other ranks may continue.
        if stop.completes or stop is Stop.NONE:
            self._keep()
            self._lead_if_first()
        else:
            self._agent.save(run, exchange)
            view = run.view
            self._record_stop(stop)  # at once: after a signal the launcher may not give much time
            self._judge(view)
        return stop

    def _keep(self) -> None:
        """Save, and judge the policy held from an earlier checkpoint, if this rank leads. What cannot be written is
        reported; the job continues."""
        with traced(self._exchange.trace, "checkpoint"):
            self._save_or_say()
            self._judge(self._run.view)

    def _save_or_say(self) -> None:
        """Save, or say why no file can be written."""
        try:
            self._agent.save(self._run, self._exchange)
        except OSError as error:
            kept = "The one before is kept; the job continues."
            if not os.path.lexists(self._run.folder):
                kept = (
                    f"Run folder '{self._run.folder}' was deleted, and all that was kept of this run with it: put it "
                    "back, or end the job by SIGUSR1."
                )
            self._say(f"no checkpoint could be written: {reason(error)}. {kept}")

    def _judge(self, view: RunView | None) -> None:
        """Judge the policy that is held, by what the rank that leads sees of the run. Independent learners have none:
        their mean says little of one."""
        agent = self._agent
        is_independent = agent.config.exchange_kind.independent and self._job.num_trainers > 1
        if view is None or not agent.acts or is_independent:
            return
        header = agent.policy_header(self._run, self._exchange.global_steps)
        if self._best is None:
            from pala.run.best_policy import BestPolicy

            self._best = BestPolicy(self._run.folder / BEST_POLICY)
        try:
            self._best.judge(view, agent.counters.time_s, header, agent.policy)
        except OSError as error:
            self._say(f"the best policy could not be written: {reason(error)}. The job continues.")

    def _call(self, name: str, callback: Callback | None, records: list[Record] | None = None) -> None:
        """Call one of the user's functions, which may end training."""
        if callback is None:
            return
        exchange = self._exchange
        done = self._agent.counters
        rank = self._comm.rank
        moment = Moment(rank, done.updates, done.local_steps, exchange.global_steps, done.time_s, records or ())
        has_left = rank in exchange.left  # then these are its last records, and the others continue
        if asks_to_stop(callback(moment)) and exchange.stop is Stop.NONE and not has_left:
            self._say(f"'{name}' returned False: training ends on all ranks.")
            exchange.stop_now(Stop.CALLBACK)

    def _lead_if_first(self) -> bool:
        return self._run.lead_if_first(self._exchange, self._exchange.living, self._agent.counters.time_s)

    def _record_stop(self, stop: Stop) -> None:
        """Say that the run is stopped, on the rank that leads."""
        self._leads = self._lead_if_first()
        if not self._leads:
            self._run.stop_leading()
            return
        signal = self._signal(stop).name
        if not self._has_said_stop:
            self._has_said_stop = True
            kept = "written to" if self._agent.saved_lost is not None else "of before kept in"
            self._say(f"{signal}: checkpoint {kept} '{self._run.segment}'.")
        self._run.end("stopped", global_steps=self._exchange.global_steps, signal=signal)

    def _signal(self, stop: Stop) -> Signals:
        """Return the signal that ended training. Of a peer's nothing is known here but what it asks for."""
        return self._interrupt.signal or (LEAVE if stop is Stop.ALL_LEAVE else SIGTERM)

    def _say(self, text: str) -> None:
        log(f"[rank {self._comm.rank}] {text}")

    # ---- a rank that has left, but must stay -----------------------------------------------------------------------

    def _sleep_until_end(self) -> Stop:
        """Wait for the end, which this MPI does not reach without every rank; returns why it ended."""
        self._say(
            "trains no more, but this MPI needs its process until the job ends; it sleeps. "
            "Open MPI 5 with `mpirun --with-ft ulfm` lets it go."
        )
        self._agent.envs.close()
        while self._exchange.stop is Stop.NONE:
            if not self._exchange.living:  # perhaps all have left at the same time
                return self._cancel_leaving()
            if self._interrupt.signal is not None:
                self._exchange.stop_now(Stop.SIGNAL)
            time.sleep(_LOOK_S)
        return self._exchange.stop

    def _cancel_leaving(self) -> Stop:
        """Stay, since the ranks that were to continue have died or left: only this rank, or others like it, can report
        how the run ended. Returns why it ends."""
        self._exchange.stop_now(Stop.ALL_LEAVE)
        if self._exchange.stop is Stop.ALL_LEAVE:
            self._say("was about to leave, but no other rank trains any more: the job ends.")
        return self._exchange.stop

    # ---- the end, in phases: each is collective ----------------------------------------------------------------------

    def _patience_s(self, takes_s: float = 0.0) -> float:
        """Return how long a phase waits for the slowest rank: what it may take itself, and the job's patience."""
        return takes_s + self._job.patience_after(self._stop)

    def _export(self, final: Tensor) -> None:
        """Write the final policy, and then that the run is complete, on the first rank that lives. `final`: the
        average of the ranks that live, float32 [parameters]."""

        def on_first(survivors: Survivors) -> None:
            self._leads = self._comm.rank == survivors.members[0]
            if not self._leads:  # perhaps it led while a lower rank, which had left, slept
                self._run.stop_leading()
                return
            agent = self._agent
            run = self._run
            steps = self._exchange.global_steps
            run.lead(self._exchange, survivors.members, agent.counters.time_s)
            agent.export(run, final, agent.policy_header(run, steps))
            run.end("completed", global_steps=steps, stopped_early=self._stop is Stop.CALLBACK)

        self._comm.with_survivors(on_first, self._patience_s())

    def _save_once_more(self) -> None:
        """Save what is known by now of a run that is stopped, and record it: all know who lives, one leads, and the
        steps are exact. A rank that was taken for gone, and stayed, has saved that."""
        saved_lost = self._agent.saved_lost
        if saved_lost is None or list(self._exchange.state().lost) != list(saved_lost):
            self._save_or_say()
        self._record_stop(self._stop)

    def _conclude(self) -> Result:
        """Return the result, concluded by the first of the living while the others wait asleep: if it dies, the next
        one does. Not collective if a signal stopped the run: then there is nothing to do that could be missed."""
        status, signal = ("completed", None) if self._stop.completes else ("stopped", self._signal(self._stop))
        exit_status = 0 if signal is None else 128 + signal
        result = Result(
            self._run.folder,
            status,
            self._exchange.global_steps,
            signal,
            self._leads,
            exit_status,
            self._stop is Stop.CALLBACK,
        )
        conclude = self._request.conclude
        if conclude is None:
            return result
        if signal is not None:
            if self._leads:
                conclude(result, self._run.config, self._interrupt)
            return result
        done: list[Result] = []
        self._comm.with_survivors(
            lambda survivors: self._conclude_first(survivors, conclude, result, done),
            self._patience_s(self._run.config.evaluation.timeout_s),
        )
        return replace(done[0] if done else result, leads=self._leads)

    def _conclude_first(self, survivors: Survivors, conclude: Conclude, result: Result, done: list[Result]) -> None:
        """Conclude on the first rank that lives, if it has not."""
        self._leads = self._run.lead_if_first(self._exchange, survivors.members, self._agent.counters.time_s)
        if self._leads and not done:
            with on_cores(self._job.host_cores):  # the other ranks sleep
                done.append(conclude(result, self._run.config, self._interrupt))
            self._run.conclude(done[0].outcomes)

    def _check_learned(self) -> None:
        """Raise EndError if no update was applied in this start, or ever: nothing was learned. Say so if none was
        tried. Collective."""

        def add_up(survivors: Survivors) -> tuple[np.ndarray, Sequence[int]]:
            begun, now = self._began_with, self._agent.counters
            start = now.updates - begun.updates, now.applied - begun.applied
            made = now.local_steps - begun.local_steps
            counts = np.array([*start, now.updates, now.applied, made], np.int64)
            survivors.reduce(counts, "sum")
            return counts, survivors.members

        counts, members = self._comm.with_survivors(add_up, self._patience_s())
        left_out = [tried for tried, applied in (counts[:2], counts[2:4]) if tried > 0 and applied == 0]
        if left_out:
            raise EndError(
                f"All {left_out[-1]:,} updates of all ranks were left out, because the loss or its gradient was not "
                "finite: nothing was learned. Look at the environment's rewards and observations, or at the learning "
                "rate."
            )
        # Of ranks that are gone the updates are not known.
        if counts[0] == 0 < counts[4] and len(members) == self._job.num_trainers and self._comm.rank == members[0]:
            log(
                f"No rank made an update in the {counts[4]:,} steps of this start, so nothing was learned: the final "
                f"policy is the one that it began with{ALGORITHMS[self._run.config.algorithm].why_nothing_was_learned}."
            )
