"""The start of a rank that trains: `start` with all others; `start_spare` alone, in the place of one that is gone.

    Request ──▶ Agent (environments, network, optimiser) ──▶ Run (folder, lock, records) ──▶ Exchange ──▶ Training

An error that one rank meets while all ranks start is raised on all of them, so none waits forever.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pala.algorithms import ALGORITHMS
from pala.comm.agreement import collectively, from_first
from pala.comm.base import Communicator
from pala.config import Config
from pala.envs.vector import Envs
from pala.exchange.base import Exchange
from pala.exchange.budget import StartState
from pala.job.header import describe, header
from pala.job.job import Job, RunInfo
from pala.job.request import Request, Result
from pala.job.training import Training, failing
from pala.run import checkpoint, run_folder, user_code
from pala.run.agent import Agent, build_envs
from pala.run.hooks import UserCode
from pala.run.run import Run, locked_too, note_failure, open_run
from pala.system.errors import CollectiveError, EndError, PalaError, reason
from pala.system.output import log, print_result

if TYPE_CHECKING:
    from pala.exchange.sleeping import Sleeping
    from pala.system.trace import Trace


def start(job: Job, request: Request) -> Result:
    """Start a rank that trains from the beginning, and train. Collective."""
    comm = job.trainers
    assert comm is not None, "a spare sleeps"
    with job.telling_of_failure():
        here = _working_directory()
        code = _code_of(comm, request)
        job.notes.stage(f"makes the environments ({request.config.env.id})")
        envs = build_envs(comm, request.config, job.threads, code.make_env)
        config, resume = _settled(comm, request, code, envs, here)
        with envs:
            job.notes.stage("makes the network")
            continued = config
            if resume is not None:
                continued = from_first(comm, lambda: run_folder.with_kept_background(config, resume))
            agent = ALGORITHMS[config.algorithm].build(comm, continued, envs, code.make_network)
            is_own = code.make_network is not None or config.network.custom
            if comm.rank == 0 and is_own and len(envs.observation_space.shape or ()) == 3:
                log("The network is your own: autograd makes its passes, not those that are written out for PALA's.")
            job.notes.stage("makes the run's folder, or reads the last checkpoint")
            with open_run(comm, config, resume, request.preset or config.env.short_id, job.hosts) as run:
                with run.removed_if_nobody_starts():
                    _begin(job, comm, request, code, agent, run)
                if comm.rank == 0 and config.run.console != "none":
                    print_result(header(job, agent, run))
                job.notes.stage("begins the exchange with the other ranks")
                if not agent.acts:  # it needed their spaces alone
                    envs.close()
                with failing(job, run):
                    exchange = _make_exchange(job, comm, request, agent, run)
                return Training(job, request, run, agent, exchange).run()


def _begin(job: Job, comm: Communicator, request: Request, code: UserCode, agent: Agent[Any], run: Run) -> None:
    """Begin or continue the run: the agent's weights, the games, the first checkpoint, the first records. Collective.
    Raises CollectiveError."""
    agent.begin(comm, run)
    job.notes.stage("begins the games")
    # A mistake that the first reset or step shows is one of the start.
    collectively(comm, lambda: agent.reset_envs(run, try_out=True))
    job.notes.stage("makes the first checkpoint")
    # A run that cannot save should fail now.
    collectively(comm, lambda: agent.save(run, exchange=None))
    # Not before the checkpoints were found to fit it: a resume that is refused changes nothing.
    from_first(comm, lambda: user_code.keep(run.folder, code))
    user_code.trust_own(run.folder)
    run.start_metrics(agent.counters, agent.start.global_steps)
    run.start_record(comm, describe(job, request, code, agent, run))


def _code_of(comm: Communicator, request: Request) -> UserCode:
    """Return the code that the run gets from Python: what is given; in a resumed run, for what is not, what it was made
    with. Collective."""
    if request.resume is None:
        return request.code
    resume = request.resume

    def check() -> None:
        """Check on rank 0 alone, which looks at the folder's links and decides about trust."""
        run_folder.check_trains_as_before(resume)
        user_code.check_trust(resume, run_folder.config_of(resume), request.trust_run, request.code)

    from_first(comm, check)
    return collectively(comm, lambda: user_code.load(resume, request.code))


def _settled(
    comm: Communicator, request: Request, code: UserCode, envs: Envs, here: Path | None
) -> tuple[Config, Path | None]:
    """Return the configuration as run.json will have it, and the folder of the run to continue: with absolute paths
    where the working directory may change, and with the name of an environment made in Python. Collective."""
    config, resume = request.config, request.resume
    may_leave = any(comm.allgather(_may_leave(here, config, code) or request.callbacks.may_stop))
    if may_leave and here is not None:
        config = replace(config, run=replace(config.run, dir=str(here / config.run.dir)))
        resume = here / resume if resume is not None else None
    if code.make_env is None:
        return config, resume
    if comm.rank == 0 and resume is not None and code.make_env is not request.code.make_env:
        before = run_folder.config_of(resume).env.id
        if config.env.id != before:
            log(
                f"'env.id' is '{config.env.id}', but the run keeps an environment made in Python, '{before}', which "
                "wins."
            )
    return replace(config, env=replace(config.env, id=envs.name)), resume


def _may_leave(here: Path | None, config: Config, code: UserCode) -> bool:
    """Return whether the working directory is no longer this one, or code of the user's will run, which may change
    it."""
    is_named = ":" in config.env.id or config.env.wrappers or config.network.custom
    is_given = code.make_env is not None or code.make_network is not None
    return bool(is_named or is_given) or _working_directory() != here


def _working_directory() -> Path | None:
    """Return the folder as the shell names it, which may be a link that leads elsewhere on another host. None if it has
    been deleted."""
    try:
        here = Path.cwd()
    except OSError:
        return None
    named = Path(os.environ.get("PWD", ""))
    with suppress(OSError):  # it may name a folder that is gone
        if named.is_absolute() and named.samefile(here):
            return named
    return here


def _make_exchange(job: Job, trainers: Communicator, request: Request, agent: Agent[Any], run: Run) -> Exchange:
    """Tell the spares of the run, and make the exchange of ranks that train from the beginning. Collective."""
    collectively(trainers, lambda: run.open_reporter(agent.start.global_steps))
    agent.before_training(run.previous)
    if job.comm.rank == 0 and run.previous is not None:
        checkpoint.remove_older(run.previous)
    beginning = StartState(agent.flat.data.numel(), agent.flat.signature, agent.start)
    job.tell_run(RunInfo(
        run.folder, run.segment, run.previous, run.config, run.identity is not None,
        agent.config.network, agent.counters.time_s, beginning,
    ))  # fmt: skip
    may_stop = any(trainers.allgather(request.callbacks.may_stop))
    trace: Trace | None = None
    if run.config.run.trace:
        from pala.comm.tracing import begin_trace

        trace = begin_trace(trainers, run.trace_folder)
    # From here to its close the exchange alone communicates: its thread may be inside MPI at any time.
    exchange: Exchange = agent.make_exchange(job.comm)
    if trace is not None:
        exchange.record(trace)
    if may_stop:
        exchange.listen()
    return exchange


def start_spare(job: Job, request: Request, info: RunInfo, began_s: float, sleeping: Sleeping) -> Result | None:
    """Start a spare that is needed: build, ask others for a model, train. Returns None if training ended before.
    `began_s`: when training began, by `time.perf_counter`. Raises PalaError if it cannot; the others continue without
    it."""
    from pala.comm.alone import Alone

    alone, rank = Alone(job.comm.host), job.comm.rank
    run = Run(info.folder, info.segment, info.previous, info.config, rank, job.hosts)
    with ExitStack() as stack:
        try:
            # Before all else: what fails is then told to the record of this run alone.
            stack.enter_context(locked_too(run, info.is_locked))
            code = user_code.load(run.folder, request.code)  # this job has kept it, or judged it
            envs = stack.enter_context(build_envs(alone, request.config, job.threads, code.make_env))
            alike = replace(run.config, network=info.network)
            agent = ALGORITHMS[alike.algorithm].build(alone, alike, envs, code.make_network, sleeping)
            is_needed = sleeping.until_needed()  # still: to build took a while
            exchange = agent.wake_exchange(job.comm, sleeping) if is_needed else None
            if exchange is None:
                return None
            log(f"[rank {rank}] takes the place of a rank that is gone.")
            agent.begin_late(run, exchange.state(), time.perf_counter() - began_s)
            agent.reset_envs(run)
            run.start_metrics(agent.counters, agent.start.global_steps)
            if run.config.run.trace:
                _record_late(run, exchange, job.comm.host)
        except Exception as error:
            _give_up(job, sleeping, run, error)
            if isinstance(error, CollectiveError):  # of this rank alone
                raise PalaError(f"rank {rank}, a spare, cannot take a place: {error}") from None
            raise
        if not agent.acts:
            envs.close()
        return Training(job, request, run, agent, exchange).run()


def _record_late(run: Run, exchange: Exchange, host: str) -> None:
    """Begin the timeline of a spare that has taken a place; one that cannot be written stops no training."""
    from pala.comm.tracing import open_trace

    try:
        exchange.record(open_trace(run.trace_folder, run.rank, host, clock=None))
    except (OSError, PalaError) as error:
        log(f"[rank {run.rank}] its timeline cannot be written: {reason(error)}. It trains.")


def _give_up(job: Job, sleeping: Sleeping, run: Run, error: Exception) -> None:
    """End the transport of a spare that fails by this error. If the job ends with it, note why in run.json."""
    sleeping.transport.abandon()  # before `is_alone`, which asks MPI
    if isinstance(error, EndError) or job.comm.is_alone():
        note_failure(run.folder, run.segment.name, job.comm.rank, error, check=run.check_folder)
