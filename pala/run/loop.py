"""The training loop that both algorithms share: when to end, log and save, and where the time goes.

A loop sends nothing and calls no MPI; its `exchange` does.
"""

from __future__ import annotations

import abc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pala.exchange.base import Exchange
from pala.exchange.budget import Stop
from pala.run.agent import Agent
from pala.run.metrics import SECTIONS, Record
from pala.system.trace import Trace

_MOST_EPISODES = 1000  # records of an interval: of short episodes they would take gigabytes


class Stopwatch:
    """Seconds in named sections since the last `split`; the rest is `other`."""

    def __init__(self, trace: Trace | None = None) -> None:
        self._trace = trace
        self._begin = time.perf_counter()
        self._seconds = dict.fromkeys(SECTIONS, 0.0)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self._seconds[name] += end - begin
            if self._trace is not None:
                self._trace.span(name, begin, end)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count some of `source`'s time under `target` instead."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def split(self) -> tuple[float, dict[str, float]]:
        """Return (seconds since the last split, fraction of them in each section; the fractions sum to 1)."""
        now = time.perf_counter()
        total, self._begin = now - self._begin, now
        seconds, self._seconds = self._seconds, dict.fromkeys(SECTIONS, 0.0)
        seconds["other"] = max(0.0, total - sum(seconds.values()))
        return total, {name: value / sum(seconds.values()) for name, value in seconds.items()}


def nothing_on_update(updates: int) -> None:
    """Do nothing after an update, unless something else is asked for."""


class Loop(abc.ABC):
    """The loop of one rank."""

    def __init__(self, agent: Agent[Any], exchange: Exchange) -> None:
        self._run, self._device = agent.config.run, agent.device
        self._exchange, self._interrupt = exchange, exchange.interrupt
        self.counters, self._generator = agent.counters, agent.generator
        self._on_update: Callable[[int], None] = nothing_on_update
        self.began_with = replace(agent.counters)
        self._watch = Stopwatch(exchange.trace)
        self._records: list[Record] = []
        self._begin = time.perf_counter() - self.counters.time_s
        self._envs, self._logged_failures = agent.envs, 0

    def run(
        self,
        observations: np.ndarray | None,
        on_interval: Callable[[list[Record]], None],
        save: Callable[[], None],
        on_update: Callable[[int], None] = nothing_on_update,
    ) -> Stop:
        """Train to the end, by the budget, a signal, a callback or because all leave; returns why, or NONE if this rank
        has left.

        `observations`: as in `begin`. `on_interval` gets the new records every `log_interval_s`, `save` is called every
        `checkpoint_interval_s`, `on_update` gets the number of updates that this rank has made after each of them.
        """
        self._on_update = on_update
        self.begin(observations)
        self._watch.split()
        now = time.perf_counter()
        next_log, next_save = now + self._run.log_interval_s, now + self._run.checkpoint_interval_s
        is_logged = False
        while self._exchange.stop is Stop.NONE:
            self._advance()
            is_logged = False
            if self._interrupt.signal is not None:
                self._exchange.stop_now(Stop.SIGNAL)
                break
            if self._interrupt.leave_requested:
                self._interrupt.leave_requested = False
                if self._exchange.leave():
                    break
            now = time.perf_counter()
            if now >= next_log:
                on_interval(self.take_records())
                is_logged = True
                next_log = time.perf_counter() + self._run.log_interval_s  # a slow file system may take longer
            if now >= next_save:
                self.counters.time_s = time.perf_counter() - self._begin  # no earlier than the records that were made
                save()
                next_save = time.perf_counter() + self._run.checkpoint_interval_s
        if not is_logged:
            on_interval(self.take_records())
        return self._exchange.stop

    @abc.abstractmethod
    def begin(self, observations: np.ndarray | None) -> None:
        """Begin with the first observations, [B, *obs]; None: this rank does not act."""

    @abc.abstractmethod
    def _advance(self) -> None:
        """Train for a short while."""

    @abc.abstractmethod
    def _interval_figures(self, seconds: float) -> Record:
        """Return the algorithm's part of the interval record, for the seconds since the last."""

    def _stamp(self, type_: str, steps_since_update: int = 0) -> Record:
        """Return the keys that every record has."""
        self.counters.time_s = time.perf_counter() - self._begin
        return {
            "type": type_,
            "time_s": round(self.counters.time_s, 3),
            "local_steps": self.counters.local_steps + steps_since_update,
            "global_steps": self._exchange.global_steps,
        }

    def take_records(self) -> list[Record]:
        """Return the episodes since the last call, of many an even sample, and one interval record."""
        seconds, fractions = self._watch.split()
        failures, self._logged_failures = self._envs.num_failures - self._logged_failures, self._envs.num_failures
        record = {
            **self._stamp("interval"),
            **self._interval_figures(seconds),
            "updates": self.counters.updates,
            "memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "env_failures": failures,
            "episodes_left_out": max(0, len(self._records) - _MOST_EPISODES),
        }
        record |= {f"time_{name}": round(fraction, 4) for name, fraction in fractions.items()}
        ended, self._records = self._records, []
        for key in {key for episode in ended for key in episode if key.startswith("info_")}:
            record[key] = sum(episode[key] for episode in ended) / len(ended)
        if len(ended) > _MOST_EPISODES:
            ended = [ended[i * len(ended) // _MOST_EPISODES] for i in range(_MOST_EPISODES)]
        return [*ended, record]

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Count the time of the block as the exchange's, and what it waited as waiting."""
        waited_s = self._exchange.waited_s
        with self._watch.section("exchange"):
            yield
        self._watch.move(self._exchange.waited_s - waited_s, "exchange", "wait")

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


class Means:
    """Means of the figures of updates since they were last taken; tensors are read only then."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._count = 0

    def add(self, **figures: Tensor | float) -> None:
        """Count one update."""
        self._count += 1
        for key, value in figures.items():
            self._sums[key] = self._sums.get(key, 0.0) + value

    def take(self) -> dict[str, float]:
        """Return the means; then begin again."""
        means = {key: float(value) / self._count for key, value in self._sums.items()}
        self._sums, self._count = {}, 0
        return means
