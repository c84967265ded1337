"""One rank from start to end, with either algorithm: build, train, export, record. Everything runs on every rank.

    environments ──▶ parts (network, optimiser) ──▶ segment (folders) ──▶ progress ──▶ records ──▶ exchange ──▶ loop

Functions that communicate say so. An error that one rank meets while all ranks start is raised on all of them, so none
waits for ever; a later error ends this rank, and the job if no other can
outlive it (`pala/transport/mpi_process.py`, `abort`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pala.a2c import parts as a2c
from pala.config import Config, to_table
from pala.envs import Envs
from pala.exchange.base import Exchange
from pala.exchange.budget import Stop
from pala.exchange.kinds import kind_of
from pala.exchange.sleeping import Beginning, Sleeping
from pala.gorila import parts as gorila
from pala.networks.own import MakeNetwork
from pala.run import checkpoint, run_folder, user_code
from pala.run.begin import begin, env_seeds, joined, make_generator, open_segment
from pala.run.checkpoint import RankState
from pala.run.header import header
from pala.run.hooks import Callback, Callbacks, Moment, UserCode, asks_to_stop
from pala.run.job import Briefing, Job
from pala.run.loop import Counters, Loop, Progress
from pala.run.metrics import Record
from pala.run.parts import Parts, build_envs
from pala.run.records import Records, note_failure
from pala.run.request import Request
from pala.run.result import Conclude, Conclusion, Result
from pala.run.run_folder import BEST_POLICY, POLICY
from pala.run.segment import Segment
from pala.system.errors import CollectiveError, EndError, PalaError, reason
from pala.system.runtime import LEAVE, Interrupt, on_cores, process_age_s, say, tell
from pala.transport.agreement import collectively
from pala.transport.alone import Alone
from pala.transport.base import Communicator, Survivors

_LOOK_S = 0.1  # a rank that sleeps until the end looks at signals so often
# Collective; last, what a spare has slept by.
_BUILD: dict[str, Callable[[Communicator, Config, Envs, MakeNetwork | None, Any], Parts[Any]]] = {
    "a2c": a2c.build, "gorila": gorila.build,
}  # fmt: skip
_CALLBACKS = ("", *Callbacks._fields)


def train(job: Job, request: Request, interrupt: Interrupt) -> Result:
    """What `run_rank` does on a rank that trains from the beginning. Collective."""
    comm, config = job.trainers, request.config
    assert comm is not None, "a spare stands by"
    with job.telling_of_failure():
        code = request.code
        if request.resume is not None:
            code = _load_code(comm, request.resume, code, request.trust_run)
        envs = build_envs(comm, config, job.threads, code.make_env)
        if comm.rank == 0 and code.make_env is not request.make_env:
            _say_of_env(request)
        request = _completed(request, code, envs)
        config = request.config
        with envs:
            parts = _BUILD[config.algorithm](comm, config, envs, code.make_network, None)
            if comm.rank == 0 and code.make_network is not None and len(envs.observation_space.shape or ()) == 3:
                say("The network is your own: autograd makes its passes, not those that are written out for PALA's.")
            with open_segment(comm, config, request.resume, request.preset or config.env.short_id) as segment:
                with segment.removed_if_nobody_starts(comm.rank):
                    progress = begin(comm, config.seed, parts, segment, job.spares)
                    setup = Setup(job, request, envs, parts, segment, progress)
                    # A run that cannot save should fail now.
                    collectively(comm, lambda: setup.save(exchange=None))
                    # Not before the checkpoints were found to fit it: a resume that is refused changes nothing.
                    collectively(comm, lambda: user_code.keep(segment.run, config, code) if comm.rank == 0 else None)
                    records = setup.open_records()
                    records.begin(comm, setup.described())
                if comm.rank == 0 and config.run.console != "none":
                    tell(setup.header())
                if not parts.acts:  # it needed their spaces alone
                    envs.close()
                session = Session(setup, records, interrupt)
                return session.run(session.begin)


def _load_code(comm: Communicator, run: Path, given: UserCode, trust_run: bool) -> UserCode:
    """What a run was made with from Python, as far as it is not given anew. Rank 0 alone judges whose it is: other
    hosts may lack the user's home. Collective."""

    def check() -> None:
        if comm.rank == 0:
            user_code.check_trust(run, run_folder.config_of(run), trust_run, given)

    collectively(comm, check)
    return collectively(comm, lambda: user_code.load(run, given))


def _say_of_env(request: Request) -> None:
    """The factory that the run keeps wins over an id that is given anew."""
    assert request.resume is not None
    before, given = run_folder.config_of(request.resume).env.id, request.config.env.id
    if given != before:
        say(f"'env.id' is '{given}', but the run keeps an environment made in Python, '{before}', which wins.")


def _completed(request: Request, code: UserCode, envs: Envs) -> Request:
    """With the code that is in use. An environment's factory has won over the id that the settings name."""
    env = request.config.env if code.make_env is None else replace(request.config.env, id=envs.name)
    return replace(request, config=replace(request.config, env=env), **code._asdict())


def take_place(
    job: Job, request: Request, briefing: Briefing, began_s: float, sleeping: Sleeping, interrupt: Interrupt
) -> Result | None:
    """What a spare does when it is needed: build, ask others for a model, train. None if training ended before.
    `began_s`: when training began, by `time.perf_counter`. Raises PalaError if it cannot; others go on without it."""
    alone, rank = Alone(job.comm.host), job.comm.rank
    config = request.config
    with ExitStack() as stack:
        try:
            # This job has kept or judged it.
            code = user_code.load(briefing.segment.run, request.code)
            envs = stack.enter_context(build_envs(alone, config, job.threads, code.make_env))
            request = _completed(request, code, envs)
            config = request.config
            parts = _BUILD[config.algorithm](alone, config, envs, code.make_network, sleeping)
        except CollectiveError as error:  # of this rank alone
            raise PalaError(f"rank {rank}, a spare, cannot take a place: {error}") from None
        segment = stack.enter_context(joined(briefing.segment, briefing.is_locked))
        try:
            is_needed = sleeping.until_needed()  # still: to build took a while
            exchange = parts.take_place(job.comm, sleeping, interrupt) if is_needed else None
        except PalaError as error:
            sleeping.transport.abandon()  # who is alone is asked of MPI
            if isinstance(error, EndError) or job.comm.is_alone():
                note_failure(segment, rank, error)
            raise
        if exchange is None:
            return None
        say(f"[rank {rank}] takes the place of a rank that is gone.")
        counters = Counters(time_s=time.perf_counter() - began_s)
        progress = Progress(counters, make_generator(config.seed, rank, parts, segment), exchange.state())
        setup = Setup(job, request, envs, parts, segment, progress)
        records = setup.open_records()
        if not parts.acts:
            envs.close()
        session = Session(setup, records, interrupt)
        return session.run(lambda: exchange)


@dataclass(frozen=True)
class Setup:
    """All that a rank trains with, made."""

    job: Job
    request: Request
    """With the code that is in use, and the environment's name."""
    envs: Envs
    parts: Parts[Any]
    segment: Segment
    progress: Progress

    @property
    def config(self) -> Config:
        """Of the request."""
        return self.request.config

    def save(self, exchange: Exchange | None) -> bool:
        """This rank's checkpoint; False if its tensors are not finite, and the one before is kept. `exchange`: None
        before training. Not collective. Raises OSError, and EndError if the run's folder is another job's by now."""
        self.segment.check_folder()
        rank = self.job.comm.rank
        tensors, numbers = self.parts.state(exchange)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            say(f"[rank {rank}] its parameters or optimiser's state are not finite: the checkpoint before is kept.")
            return False
        counted = self.progress.counters
        counters = {
            "updates": counted.updates, "applied": counted.applied, "own_steps": counted.local_steps,
            "time_s": counted.time_s, "spares": self.job.spares,
        } | (exchange.state() if exchange is not None else self.progress.start)._asdict() | numbers  # fmt: skip
        streams = {"actions": self.progress.generator.get_state()}
        state = RankState(rank, self.job.comm.size, self.parts.flat.signature, tensors, streams, counters)
        checkpoint.save_rank(self.segment.path, state)
        return True

    def open_records(self) -> Records:
        """Begin this rank's metrics."""
        job, counters = self.job, self.progress.counters
        first: Record = {
            "type": "start", "segment": self.segment.path.name, "rank": job.comm.rank, "ranks": job.num_trainers,
            "time_s": round(counters.time_s, 3), "local_steps": counters.local_steps,
            "global_steps": self.progress.start.global_steps,
        }  # fmt: skip
        return Records(job.comm.rank, job.hosts, self.config, self.segment, first)

    def described(self) -> dict[str, Any]:
        """What run.json says of a segment when it begins."""
        job, request, parts = self.job, self.request, self.parts
        return {
            **request.facts, "threads_per_rank": job.threads, "environment": self.envs.name,
            "python_environment": request.make_env is not None, "python_network": request.make_network is not None,
            "ranks": job.num_trainers, "cores": job.cores, "resumed": self.segment.previous is not None,
            **job.comm.facts(), "device": str(parts.device), "seed": self.config.seed,
            "parameters": parts.flat.data.numel(),
        }  # fmt: skip

    def header(self) -> str:
        """The first lines of the console."""
        job, parts, made = self.job, self.parts, self.progress.start.global_steps
        hosts, num_learned = job.hosts[: job.num_trainers], parts.flat.num_learned
        return header(self.config, self.segment.run, hosts, job.threads, str(parts.device), num_learned, made)


class _Held(NamedTuple):
    """A policy that may be the best, in the host's memory."""

    policy: dict[str, Tensor]
    header: dict[str, Any]


class Session:
    """A rank that is ready to train: everything has been saved and recorded once."""

    def __init__(self, setup: Setup, records: Records, interrupt: Interrupt) -> None:
        self._setup, self._records, self._interrupt = setup, records, interrupt
        self._request, self._config, self._callbacks = setup.request, setup.config, setup.request.callbacks
        self._job, self._comm, self._envs, self._parts = setup.job, setup.job.comm, setup.envs, setup.parts
        self._segment, self._progress = setup.segment, setup.progress
        self._asked_to_stop = ""  # by which of the callbacks
        self._leads = self._comm.rank == 0  # at the end: whether no lower rank lives
        self._has_said_stop = False
        self._has_saved = False  # the newest state
        self._best: float | None = None  # mean return of the best policy so far; None: not looked for yet
        self._held: _Held | None = None
        self._saved_lost: Sequence[int] = ()  # ranks that the newest checkpoint calls lost

    def run(self, make_exchange: Callable[[], Exchange]) -> Result:
        """Train, then average, export and conclude. Collective."""
        exchange: Exchange | None = None
        try:
            exchange = make_exchange()
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

    def begin(self) -> Exchange:
        """The exchange of ranks that train from the beginning. Collective."""
        assert self._job.trainers is not None
        collectively(self._job.trainers, self._records.open_reporter)
        self._parts.before_training(self._segment.previous)
        if self._comm.rank == 0 and self._segment.previous is not None:
            checkpoint.remove_older(self._segment.previous)
        segment, start, flat = self._segment, self._progress.start, self._parts.flat
        told = Beginning(flat.data.numel(), flat.signature, start)
        is_locked, time_s = segment.identity is not None, self._progress.counters.time_s
        self._job.brief(Briefing(replace(segment, identity=None), is_locked, time_s, told))
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
            # Who took another for gone that stayed has saved that.
            if not self._has_saved or list(exchange.state().lost) != list(self._saved_lost):
                self._save_or_say(exchange)
            self._record_stop(exchange, end)  # once more: now all know who lives, one leads, and the steps are exact
        self._segment.check_folder()
        self._parts.after_training(self._comm, self._segment.path)
        self._records.saved()
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
        """Collective. Raises EndError if no update was applied in this start, or ever: nothing was learned."""

        def add_up(survivors: Survivors) -> np.ndarray:
            begun, now = loop.began_with, loop.counters
            start = now.updates - begun.updates, now.applied - begun.applied
            counts = np.array([*start, now.updates, now.applied], np.int64)
            survivors.reduce(counts, "sum")
            return counts

        counts = self._comm.with_survivors(add_up, self._job.patience_s, self._interrupt)
        left_out = [tried for tried, applied in (counts[:2], counts[2:]) if tried > 0 and applied == 0]
        if left_out:
            raise EndError(
                f"All {left_out[-1]:,} updates of all ranks were left out, because the loss or its gradient was not "
                "finite: nothing was learned. Look at the environment's rewards and observations, or at the learning "
                "rate."
            )

    def _sit_out(self, exchange: Exchange) -> Stop:
        """Wait for the end, which this MPI does not reach without every rank; returns why it ended."""
        say(
            f"[rank {self._comm.rank}] trains no more, but this MPI needs its process until the job ends; it sleeps. "
            "Open MPI 5 with `mpirun --with-ft ulfm` lets it go."
        )
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
        stop = loop.run(seeds, on_interval, lambda: self._save_all(exchange), updated)
        # A full disk should not keep the ranks from the smaller file, the final policy, nor the others from going on.
        if stop.completes or stop is Stop.NONE:
            self._save_all(exchange)
            self._lead_if_first(exchange)
        else:
            self._save(exchange)
            self._record_stop(exchange, stop)  # at once: after a signal the launcher may not give much time
        self._envs.close()
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
        time_s = self._progress.counters.time_s
        return self._records.lead_if_first(exchange.living, time_s, exchange.left, exchange.joining)

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
            kept = "written to" if self._has_saved else "of before kept in"
            say(f"[rank {self._comm.rank}] {signal}: checkpoint {kept} '{self._segment.path}'.")
        self._records.end("stopped", global_steps=exchange.global_steps, signal=signal)

    def _save(self, exchange: Exchange) -> None:
        self._has_saved = False
        self._has_saved = self._setup.save(exchange)
        if self._has_saved:
            self._saved_lost = exchange.state().lost

    def _save_or_say(self, exchange: Exchange) -> None:
        try:
            self._save(exchange)
        except OSError as error:
            say(
                f"[rank {self._comm.rank}] no checkpoint could be written: {reason(error)}. The one before is "
                "kept; the job goes on."
            )

    def _save_all(self, exchange: Exchange) -> None:
        self._save_or_say(exchange)
        try:
            self._keep_if_best(exchange)
        except OSError as error:
            say(f"[rank {self._comm.rank}] the best policy could not be written: {reason(error)}. The job goes on.")

    def _keep_if_best(self, exchange: Exchange) -> None:
        """If this rank leads: export the policy that it holds from an earlier checkpoint, if the first 100 episodes
        that ended after that were better than those after any other; and hold the present one. Episodes that ended
        before say nothing of it: it may have fallen apart just now. Not of independent learners, whose mean says little
        of one."""
        view, parts, held = self._records.view, self._parts, self._held
        is_of_many = self._config.algorithm == "a2c" and kind_of(self._config.exchange).independent
        if view is None or not parts.acts or (is_of_many and self._job.num_trainers > 1):
            return
        value = view.mean_since
        if held is not None and value is None:
            return
        file = self._segment.run / BEST_POLICY
        if self._best is None:  # perhaps an earlier start, or a rank that led before, has kept one
            before = (checkpoint.policy_header(file) or {}).get("mean_return")
            self._best = before if isinstance(before, float) and math.isfinite(before) else -math.inf
        policy = {name: tensor.detach().cpu().clone() for name, tensor in parts.network.state_dict().items()}
        is_finite = bool(parts.flat.data.isfinite().all())
        self._held = _Held(policy, self._header(exchange)) if is_finite else None
        view.watch(self._progress.counters.time_s)
        if held is not None and value is not None and value > self._best:
            checkpoint.save_policy(file, held.policy, held.header | {"mean_return": value})
            self._best = value

    # ---- what is written down ------------------------------------------------------------------------------------

    def _header(self, exchange: Exchange) -> dict[str, Any]:
        """Of a policy that is exported now."""
        return {
            "config": to_table(self._config), "environment": self._envs.name, "global_steps": exchange.global_steps,
            "ranks": self._job.num_trainers, "signature": self._parts.flat.signature,
        }  # fmt: skip

    def _complete(self, exchange: Exchange, final: Tensor, survivors: Survivors, stopped_early: str) -> None:
        """Write the final policy, and then that the run is complete. The first of the living only."""
        self._leads = self._comm.rank == survivors.members[0]
        if not self._leads:  # also if it led while one who had left slept
            self._records.resign()
            return
        self._records.lead(survivors.members, self._progress.counters.time_s, exchange.left, exchange.joining)
        self._segment.check_folder()
        self._parts.flat.data.copy_(final)
        policy = dict(self._parts.network.state_dict())
        checkpoint.save_policy(self._segment.run / POLICY, policy, self._header(exchange))
        why = {"stopped_early": stopped_early} if stopped_early else {}
        self._records.end("completed", global_steps=exchange.global_steps, **why)

    def _conclude(self, result: Result, exchange: Exchange, conclude: Conclude) -> Result:
        """The first of the living concludes, while the others wait asleep: if it dies, the next one does. Collective,
        unless a signal stopped the run: then there is nothing to do that could be missed."""
        if result.signal is not None:
            if result.leads:
                conclude(result, self._config, self._interrupt)
            return result
        done: list[Conclusion] = []

        def conclude_first(survivors: Survivors) -> None:
            time_s = self._progress.counters.time_s
            self._leads = self._records.lead_if_first(survivors.members, time_s, exchange.left, exchange.joining)
            if self._leads and not done:
                with on_cores(self._job.host_cores):  # the other ranks sleep
                    done.append(conclude(result, self._config, self._interrupt))
                self._records.conclude(done[0].outcomes)

        limit_s = self._config.evaluation.timeout_s + self._job.patience_s
        self._comm.with_survivors(conclude_first, limit_s, self._interrupt)
        result = replace(result, leads=self._leads, exit_status=done[0].exit_status if done else 0)
        return replace(result, evaluation=done[0].evaluation, learning_curve=done[0].learning_curve) if done else result
