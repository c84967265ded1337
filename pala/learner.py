"""The loop of one rank: environments, learn, exchange, log. The file to read first.

    act ──▶ rollout ──▶ A2C update ──flat parameters──▶ exchange ──flat parameters──▶ act …
                          └─ its gradient, where the exchange averages that

The loop knows nothing of ranks, peers or MPI; `exchange` is the one object in which the variants differ.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pala.a2c import A2C, Rollout, UpdateResult
from pala.config import Config
from pala.envs import Envs
from pala.errors import PalaError
from pala.exchange.base import Exchange
from pala.exchange.budget import Stop
from pala.metrics import Record, Stopwatch
from pala.networks import FlatParameters
from pala.runtime import Interrupt, say
from pala.tape import Tape

_MOST_SKIPPED_UPDATES = 100


@dataclass
class Counters:
    """What a rank has done so far; a resumed rank goes on from its checkpoint."""

    updates: int = 0
    local_steps: int = 0
    time_s: float = 0.0  # training time of all segments


class Learner:
    """One actor-learner."""

    def __init__(
        self, config: Config, rank: int, envs: Envs, tape: Tape, flat: FlatParameters, a2c: A2C,
        exchange: Exchange, generator: torch.Generator, counters: Counters, interrupt: Interrupt,
    ) -> None:  # fmt: skip
        self._config, self._rank, self._envs, self._tape, self._flat = config, rank, envs, tape, flat
        self._a2c, self._exchange, self._generator = a2c, exchange, generator
        self.counters, self._interrupt = counters, interrupt
        self._device = flat.data.device
        self._watch = Stopwatch()
        self._records: list[Record] = []
        self._begin = time.perf_counter() - counters.time_s
        self._interval = _Interval()
        self._skipped_in_a_row = 0

    def run(self, env_seeds: np.ndarray, on_interval: Callable[[list[Record]], None], save: Callable[[], None]) -> Stop:
        """Train until the budget is met or a signal comes; returns which.

        `on_interval` gets the new records every `log_interval_s`, `save` is called every `checkpoint_interval_s`.
        """
        self._observations = self._to_device(self._envs.reset(env_seeds))
        self._watch.split()
        next_log, next_save = (time.perf_counter() + s for s in self._periods())
        while self._exchange.stop is Stop.NONE:
            rollout, bootstrap_B = self._play()
            if self._interrupt.signal is not None:
                self._exchange.stop_now(Stop.SIGNAL)
                break
            result = self._learn(rollout, bootstrap_B)
            if result is None:
                break
            self._share(result)
            now = time.perf_counter()
            if now >= next_log:
                on_interval(self._take_records())
                next_log = now + self._config.run.log_interval_s
            if now >= next_save:
                save()
                next_save = now + self._config.run.checkpoint_interval_s
        on_interval(self._take_records())
        return self._exchange.stop

    def _play(self) -> tuple[Rollout, Tensor]:
        """`rollout_steps` steps of all environments, and V after the last one [B]."""
        rollout, distribution = Rollout(), self._tape.distribution
        with self._watch.section("inference"):
            self._tape.begin()
        for t in range(self._config.a2c.rollout_steps):
            with self._watch.section("inference"):
                policy_output, value = self._tape.forward(self._observations)
                actions = distribution.sample(policy_output, self._generator)
                env_actions = distribution.to_env(actions).cpu().numpy()
            with self._watch.section("environment"):
                step = self._envs.step(env_actions)
            with self._watch.section("inference"):
                rollout.policy_outputs.append(policy_output)
                rollout.values.append(value)
                rollout.actions.append(actions)
                rollout.rewards.append(self._rewards(step.rewards, step.truncated, step.final_observations))
                rollout.ended.append(self._to_device((step.terminated | step.truncated).astype(np.float32)))
                self._observations = self._to_device(step.observations)
            for episode in step.episodes:
                what = {"return": episode.episode_return, "length_steps": episode.length_steps}
                self._records.append(self._stamp("episode", (t + 1) * self._envs.num_envs) | what)
            with self._watch.section("exchange"):
                self._exchange.between_steps()
            if self._interrupt.signal is not None:
                break
        with self._watch.section("inference"):
            return rollout, self._tape.value(self._observations)

    def _rewards(self, rewards: np.ndarray, truncated: np.ndarray, final_observations: np.ndarray) -> Tensor:
        """Rewards [B]; where a time limit cut the episode, with the discounted value of what would have followed."""
        rewards_B = self._to_device(rewards)
        if truncated.any():
            value = self._tape.value(self._to_device(final_observations))
            rewards_B[self._to_device(truncated)] += self._config.a2c.gamma * value
        return rewards_B

    def _learn(self, rollout: Rollout, bootstrap_B: Tensor) -> UpdateResult | None:
        """One update; None if training ends and it is left out."""
        with self._watch.section("update"):
            loss = self._a2c.differentiate(rollout, bootstrap_B)
        with self._exchanging():
            goes_on = self._exchange.average_gradient(self._flat.gradient)
        if not goes_on:
            return None
        with self._watch.section("update"):
            result = self._a2c.step(loss, self._learning_rate())
        self.counters.updates += 1
        self.counters.local_steps += self._config.steps_per_update
        self._interval.add(result)
        return result

    def _share(self, result: UpdateResult) -> None:
        """Pass the parameters through the exchange, and deal with an update that was not finite."""
        healthy = result.applied or bool(self._flat.data.isfinite().all())
        self._skipped_in_a_row = 0 if result.applied else self._skipped_in_a_row + 1
        with self._exchanging():
            finite = self._exchange.after_update(self._config.steps_per_update, healthy)
        if result.applied:
            return
        where = f"[rank {self._rank}] update {self.counters.updates}"
        say(f"{where}: the loss or its gradient is not finite; the update is left out.")
        if not healthy and finite:
            self._a2c.mean_square.zero_()
            say(f"{where}: the parameters were not finite either; they are replaced by what the peers sent.")
        elif not finite and self._exchange.stop is Stop.NONE:
            raise PalaError(f"{where}: the parameters are not finite and there is no peer to recover from. {_ADVICE}")
        if self._skipped_in_a_row >= _MOST_SKIPPED_UPDATES:
            raise PalaError(f"{where}: no finite gradient for {_MOST_SKIPPED_UPDATES} updates. {_ADVICE}")

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Count the time of the block as the exchange's, and what it waited as waiting."""
        waited_s = self._exchange.waited_s
        with self._watch.section("exchange"):
            yield
        self._watch.move(self._exchange.waited_s - waited_s, "exchange", "wait")

    def _learning_rate(self) -> float:
        config = self._config
        if config.a2c.learning_rate_decay == "none":
            return config.a2c.learning_rate
        return config.a2c.learning_rate * max(0.0, 1 - self._exchange.global_steps / config.total_steps)

    def _stamp(self, type_: str, steps_since_update: int = 0) -> Record:
        """The keys that every record has."""
        self.counters.time_s = time.perf_counter() - self._begin
        return {
            "type": type_,
            "time_s": round(self.counters.time_s, 3),
            "local_steps": self.counters.local_steps + steps_since_update,
            "global_steps": self._exchange.global_steps,
        }

    def _take_records(self) -> list[Record]:
        """The episodes since the last call and one interval record."""
        seconds, fractions = self._watch.split()
        interval, self._interval = self._interval, _Interval()
        exchange = self._exchange.metrics()
        distance, norm = exchange.get("consensus_distance"), float(self._flat.data.norm())
        record = self._stamp("interval") | interval.means() | exchange | {
            "local_steps_per_s": interval.updates * self._config.steps_per_update / seconds,
            "updates": self.counters.updates,
            "learning_rate": self._learning_rate(),
            "consensus_distance_relative": distance / norm if distance is not None and norm > 0 else None,
            "memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }  # fmt: skip
        record |= {f"time_{name}": round(fraction, 4) for name, fraction in fractions.items()}
        records, self._records = [*self._records, record], []
        return records

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)

    def _periods(self) -> tuple[float, float]:
        return self._config.run.log_interval_s, self._config.run.checkpoint_interval_s


_ADVICE = "Resume from the last checkpoint with a smaller 'a2c.learning_rate', or look at the environment's rewards."


class _Interval:
    """Sums of the updates between two records; tensors are read only when the record is made."""

    def __init__(self) -> None:
        self.updates = 0
        self._skipped = 0
        self._sums: dict[str, Any] = {}

    def add(self, result: UpdateResult) -> None:
        """Count one update."""
        self.updates += 1
        if not result.applied:
            self._skipped += 1
            return
        values = {
            "loss_policy": result.loss.policy,
            "loss_value": result.loss.value,
            "entropy": result.loss.entropy,
            "gradient_norm": result.gradient_norm,
        }
        for key, value in values.items():
            self._sums[key] = self._sums.get(key, 0.0) + value

    def means(self) -> dict[str, Any]:
        """Means over the applied updates."""
        applied = self.updates - self._skipped
        means = {key: float(value) / applied for key, value in self._sums.items()}
        return means | {"updates_skipped": self._skipped}
