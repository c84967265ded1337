"""Thousands of schedules against what must hold in every one: `python -m pala.simulate check`.

python -m pala.simulate check --schedules 10000
python -m pala.simulate check --first 4711 --schedules 1       one again, as a failure says it
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

from pala.exchange.gossip.protocol import GossipProtocol
from pala.simulate.schedules import InvariantError, check, schedule
from pala.system.command_line import read_command
from pala.system.errors import PalaError

_BATCH = 50


@dataclass(frozen=True)
class Command:
    """Try the gossip protocol on schedules drawn at random: 2 to 64 ranks, any topology, delays, stragglers, faults."""

    schedules: int = 2000
    """How many."""
    first: int = 0
    """Number of the first; a schedule is drawn from its number alone."""
    processes: int = 0
    """That try them side by side; 0: one a core."""


@dataclass(frozen=True)
class Tried:
    """What came of some schedules."""

    schedules: int
    events: int  # of the virtual clusters
    faults: Counter[str]  # schedules by what went wrong in them on purpose
    failure: str | None


def run(arguments: list[str]) -> None:
    """The program. Raises PalaError if a schedule fails."""
    command = read_command("pala.simulate check", arguments, Command())
    if command.schedules < 1 or command.first < 0 or command.processes < 0:
        raise PalaError("'--schedules' must be at least 1, '--first' and '--processes' at least 0.")
    begin = time.perf_counter()
    tried = try_all(range(command.first, command.first + command.schedules), command.processes)
    minutes = (time.perf_counter() - begin) / 60
    if tried.failure is not None:
        raise PalaError(tried.failure)
    faults = ", ".join(f"{count:,} with {fault}" for fault, count in sorted(tried.faults.items()))
    pace = f"{tried.schedules / minutes:,.0f} a minute, {tried.events:,} events"
    print(f"{tried.schedules:,} schedules held ({pace}): {faults}.")


def try_all(numbers: range, processes: int = 0, protocol: type[GossipProtocol] = GossipProtocol) -> Tried:
    """Try the schedules of these numbers, in batches side by side, up to the first failure."""
    batches = [numbers[i : i + _BATCH] for i in range(0, len(numbers), _BATCH)]
    processes = min(processes or len(os.sched_getaffinity(0)), len(batches))
    schedules, events, faults = 0, 0, Counter[str]()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for tried in pool.imap(partial(_try, protocol=protocol), batches):
            schedules, events, faults = schedules + tried.schedules, events + tried.events, faults + tried.faults
            if tried.failure is not None:
                return Tried(schedules, events, faults, tried.failure)
    return Tried(schedules, events, faults, None)


def _try(numbers: range, protocol: type[GossipProtocol]) -> Tried:
    events, faults = 0, Counter[str]()
    for count, number in enumerate(numbers):
        scenario = schedule(number)
        try:
            cluster = check(scenario, protocol)
        except (InvariantError, AssertionError) as error:
            sentence = (
                f"Schedule {number} ({scenario.size} ranks, {scenario.topology}): {error}. "
                f"Again: python -m pala.simulate check --first {number} --schedules 1"
            )
            return Tried(count + 1, events, faults, sentence)
        events += cluster.num_events
        kinds = {
            "deaths": scenario.deaths, "stops": scenario.stops, "NaN": scenario.poison, "cut links": scenario.cut_at,
        }  # fmt: skip
        faults[" and ".join(kind for kind, present in kinds.items() if present) or "no faults"] += 1
    return Tried(len(numbers), events, faults, None)
