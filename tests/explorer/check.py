"""Thousands of schedules against what must hold in every one: `python tests/explorer check`.

python tests/explorer check --schedules 10000
python tests/explorer check --first 4711 --schedules 1       one again, as a failure says it
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from explorer.faulty_cluster import Schedule
from explorer.schedules import InvariantError, MakeProtocol, check, schedule
from pala.exchange.gossip.driver import make_protocol
from pala.system.command_line import read_command
from pala.system.errors import PalaError
from pala.system.resources import usable_cores

_BATCH = 50
_PROGRESS_S = 30.0


@dataclass(frozen=True)
class Command:
    """Try the gossip protocol on schedules drawn at random: 2 to 64 ranks, any topology and mixing rule, delays,
    stragglers, faults."""

    schedules: int = 2000
    """How many."""
    first: int = 0
    """Number of the first; a schedule is drawn from its number alone."""
    processes: int = 0
    """That try them side by side; 0: one a core."""


@dataclass(frozen=True)
class Tried:
    """What came of some schedules."""

    schedules: int = 0
    events: int = 0  # of the virtual clusters
    faults: Counter[str] = field(default_factory=Counter)  # schedules by what went wrong in them on purpose
    failure: str | None = None


def run(arguments: list[str]) -> None:
    """Run the program. Raises PalaError if a schedule fails."""
    command = read_command("tests/explorer check", arguments, Command())
    if command.schedules < 1 or command.first < 0 or command.processes < 0:
        raise PalaError("'--schedules' must be at least 1, '--first' and '--processes' at least 0.")
    begin_s = said_s = time.perf_counter()
    held = Tried()
    try:
        for held in try_in_batches(range(command.first, command.first + command.schedules), command.processes):
            if held.failure is not None:
                raise PalaError(held.failure)
            if (now_s := time.perf_counter()) > said_s + _PROGRESS_S:
                print(f"{held.schedules:,} of {command.schedules:,} schedules held", flush=True)
                said_s = now_s
    except KeyboardInterrupt:
        print(f"Interrupted. Continue with --first {command.first + held.schedules}.")
        raise
    finally:
        if held.failure is None and held.schedules:
            minutes = (time.perf_counter() - begin_s) / 60
            faults = ", ".join(f"{count:,} with {fault}" for fault, count in sorted(held.faults.items()))
            pace = f"{held.schedules / minutes:,.0f} a minute, {held.events:,} events"
            print(f"{held.schedules:,} schedules held ({pace}): {faults}.")


def try_in_batches(numbers: range, processes: int = 0, protocol: MakeProtocol = make_protocol) -> Iterator[Tried]:
    """Try the schedules of these numbers, in batches side by side, up to the first failure. Yields what came of all so
    far after each batch."""
    batches = [numbers[i : i + _BATCH] for i in range(0, len(numbers), _BATCH)]
    processes = min(processes or usable_cores(), len(batches))
    sofar = Tried()
    context = multiprocessing.get_context("spawn")
    # Not multiprocessing's Pool: to leave one with tasks in it ends workers by force, which was seen to wait forever.
    with ProcessPoolExecutor(processes, context, _follow_the_parent) as pool:
        try:
            for tried in pool.map(partial(try_all, protocol=protocol), batches):
                schedules, events = sofar.schedules + tried.schedules, sofar.events + tried.events
                sofar = Tried(schedules, events, sofar.faults + tried.faults, tried.failure)
                yield sofar
                if tried.failure is not None:
                    return
        finally:  # also if ^C comes before all of them are handed out
            pool.shutdown(wait=False, cancel_futures=True)


def _follow_the_parent() -> None:
    """Leave ^C to it, and end with it, however that ends: a worker that waits for tasks would do so forever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=[parent.sentinel], daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _faults(scenario: Schedule) -> dict[str, list[float]]:
    """When they begin: what comes after the end went wrong in no training."""
    return {
        "deaths": [*scenario.deaths.values()],
        "leaves": [*scenario.leaves.values()],
        "spares": [0.0] * (scenario.spares > 0),
        "stops": [begin for begin, _ in scenario.stops.values()],
        "NaN": [begin for begin, _ in scenario.poison.values()],
        "cut links": [scenario.cut_s[0]] * (scenario.cut_at > 0),
    }


def try_all(numbers: range, protocol: MakeProtocol = make_protocol) -> Tried:
    events, faults = 0, Counter[str]()
    for count, number in enumerate(numbers):
        scenario = schedule(number)
        try:
            cluster = check(scenario, protocol)
        except Exception as error:
            what = str(error) if isinstance(error, InvariantError) else f"{type(error).__name__}: {error}"
            sentence = (
                f"Schedule {number} ({scenario.size} ranks, {scenario.topology}, {scenario.mixing}): {what}. "
                f"Again: python tests/explorer check --first {number} --schedules 1"
            )
            return Tried(count + 1, events, faults, sentence)
        events += cluster.num_events
        kinds = {kind: min(begins, default=math.inf) < cluster.ended_s for kind, begins in _faults(scenario).items()}
        faults[" and ".join(kind for kind, present in kinds.items() if present) or "no faults"] += 1
    return Tried(len(numbers), events, faults, None)
