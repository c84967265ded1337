"""How a rank starts to train, from the beginning or in the place of one that is gone. Everything runs on every rank.

    environments ──▶ parts (network, optimiser) ──▶ segment (folders) ──▶ progress ──▶ records ──▶ session

An error that one rank meets while all ranks start is raised on all of them, so none waits for ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pala.a2c import parts as a2c
from pala.comm.agreement import collectively, from_first
from pala.comm.alone import Alone
from pala.comm.base import Communicator
from pala.config import Config
from pala.envs.vector import Envs
from pala.exchange.sleeping import Sleeping
from pala.gorila import parts as gorila
from pala.networks.own import MakeNetwork
from pala.run import run_folder, user_code
from pala.run.begin import initial_progress, joined, make_generator, open_segment
from pala.run.hooks import UserCode
from pala.run.job import Briefing, Job
from pala.run.keeper import Keeper
from pala.run.loop import Counters, Progress
from pala.run.parts import Parts, build_envs
from pala.run.records import note_failure
from pala.run.request import Request
from pala.run.result import Result
from pala.run.segment import Segment
from pala.run.session import Session
from pala.run.setup import Setup
from pala.system.errors import CollectiveError, EndError, PalaError
from pala.system.interrupt import Interrupt
from pala.system.output import say, tell

# Collective; last, what a spare has slept by.
_BUILD: dict[str, Callable[[Communicator, Config, Envs, MakeNetwork | None, Any], Parts[Any]]] = {
    "a2c": a2c.build, "gorila": gorila.build,
}  # fmt: skip


def train(job: Job, request: Request, interrupt: Interrupt) -> Result:
    """What `run_rank` does on a rank that trains from the beginning. Collective."""
    comm, given = job.trainers, request.code
    assert comm is not None, "a spare stands by"
    with job.telling_of_failure():
        here = _working_directory()
        if request.resume is not None:
            request = replace(request, code=_load_code(comm, request.resume, given, request.trust_run))
        code = request.code
        envs = build_envs(comm, request.config, job.threads, code.make_env)
        if any(comm.allgather(_may_leave(here, request))) and here is not None:
            request = _as_seen_from(here, request)
        if comm.rank == 0 and code.make_env is not given.make_env:
            _say_of_env(request)
        request = _as_played(request, envs)
        config = request.config
        with envs:
            parts = _BUILD[config.algorithm](comm, config, envs, code.make_network, None)
            is_own = code.make_network is not None or config.network.custom
            if comm.rank == 0 and is_own and len(envs.observation_space.shape or ()) == 3:
                say("The network is your own: autograd makes its passes, not those that are written out for PALA's.")
            with open_segment(comm, config, request.resume, request.preset or config.env.short_id) as segment:
                with segment.removed_if_nobody_starts(comm.rank):
                    progress = initial_progress(comm, config.seed, parts, segment, job.spares)
                    setup = Setup(job, request, envs, parts, segment, progress)
                    keeper = Keeper(setup)
                    # A run that cannot save should fail now.
                    collectively(comm, lambda: keeper.save(exchange=None))
                    # Not before the checkpoints were found to fit it: a resume that is refused changes nothing.
                    from_first(comm, lambda: user_code.keep(segment.run, config, code))
                    records = setup.open_records()
                    records.begin(comm, setup.described())
                if comm.rank == 0 and config.run.console != "none":
                    tell(setup.header())
                if not parts.acts:  # it needed their spaces alone
                    envs.close()
                return Session(setup, keeper, records, interrupt).run()


def _load_code(comm: Communicator, run: Path, given: UserCode, trust_run: bool) -> UserCode:
    """What a run was made with from Python, as far as it is not given anew. Rank 0 alone judges whose it is: other
    hosts may lack the user's home. Collective."""

    from_first(comm, lambda: user_code.check_trust(run, run_folder.config_of(run), trust_run, given))
    return collectively(comm, lambda: user_code.load(run, given))


def _working_directory() -> Path | None:
    """As the shell names it, which may be a link that leads elsewhere on another host. None if it has been deleted."""
    try:
        here = Path.cwd()
    except OSError:
        return None
    named = Path(os.environ.get("PWD", ""))
    with suppress(OSError):  # it may name a folder that is gone
        if named.is_absolute() and named.samefile(here):
            return named
    return here


def _may_leave(here: Path | None, request: Request) -> bool:
    """Whether the working directory is no longer this one, or code of the user's will run, which may change it."""
    code, callbacks, config = request.code, request.callbacks, request.config
    is_named = ":" in config.env.id or config.env.wrappers or config.network.custom
    is_given = code.make_env is not None or code.make_network is not None or callbacks.may_stop
    return bool(is_named or is_given) or _working_directory() != here


def _as_seen_from(here: Path, request: Request) -> Request:
    """With absolute paths of what was meant to be below this folder."""
    run = replace(request.config.run, dir=str(here / request.config.run.dir))
    resume = here / request.resume if request.resume is not None else None
    return replace(request, resume=resume, config=replace(request.config, run=run))


def _say_of_env(request: Request) -> None:
    """The factory that the run keeps wins over an id that is given anew."""
    assert request.resume is not None
    before, given = run_folder.config_of(request.resume).env.id, request.config.env.id
    if given != before:
        say(f"'env.id' is '{given}', but the run keeps an environment made in Python, '{before}', which wins.")


def _as_played(request: Request, envs: Envs) -> Request:
    """An environment's factory wins over the id that the settings name."""
    if request.code.make_env is None:
        return request
    return replace(request, config=replace(request.config, env=replace(request.config.env, id=envs.name)))


def take_place(
    job: Job, request: Request, briefing: Briefing, began_s: float, sleeping: Sleeping, interrupt: Interrupt
) -> Result | None:
    """What a spare does when it is needed: build, ask others for a model, train. None if training ended before.
    `began_s`: when training began, by `time.perf_counter`. Raises PalaError if it cannot; others go on without it."""
    alone, rank = Alone(job.comm.host), job.comm.rank
    with ExitStack() as stack:
        segment = briefing.segment
        try:
            # Before all else: what fails is then told to the record of this run alone.
            segment = stack.enter_context(joined(segment, briefing.is_locked))
            # This job has kept it, or judged it.
            request = replace(request, code=user_code.load(segment.run, request.code))
            envs = stack.enter_context(build_envs(alone, request.config, job.threads, request.code.make_env))
            request = _as_played(request, envs)
            config = request.config
            alike = replace(config, network=replace(config.network, precision=briefing.precision))
            parts = _BUILD[config.algorithm](alone, alike, envs, request.code.make_network, sleeping)
            is_needed = sleeping.until_needed()  # still: to build took a while
            exchange = parts.take_place(job.comm, sleeping, interrupt) if is_needed else None
            if exchange is None:
                return None
            say(f"[rank {rank}] takes the place of a rank that is gone.")
            counters = Counters(time_s=time.perf_counter() - began_s)
            progress = Progress(counters, make_generator(config.seed, rank, parts, segment), exchange.state())
            setup = Setup(job, request, envs, parts, segment, progress)
            session = Session(setup, Keeper(setup), setup.open_records(), interrupt)
        except Exception as error:
            _give_up(job, sleeping, segment, error)
            if isinstance(error, CollectiveError):  # of this rank alone
                raise PalaError(f"rank {rank}, a spare, cannot take a place: {error}") from None
            raise
        if not parts.acts:
            envs.close()
        return session.run(exchange)


def _give_up(job: Job, sleeping: Sleeping, segment: Segment, error: Exception) -> None:
    """This spare ends by the error. If the job ends with it, run.json says why."""
    sleeping.transport.abandon()  # who is alone is asked of MPI
    if isinstance(error, EndError) or job.comm.is_alone():
        note_failure(segment, job.comm.rank, error)
