"""The loop of one rank of Gorila, whatever its roles: act, learn what is due, or only answer others.

bundled:   act ──▶ replay ──minibatch──▶ gradient ──▶ shards ──parameters──▶ act …
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pala.exchange.budget import Stop
from pala.gorila.dqn import Transitions, differentiate, epsilon_at, epsilon_greedy
from pala.gorila.exchange import GorilaExchange
from pala.gorila.replay import experience_of, reset_frames
from pala.run.loop import Loop, Means
from pala.run.metrics import Record
from pala.system.errors import PalaError
from pala.system.interrupt import Interrupt

if TYPE_CHECKING:
    from pala.config import Config
    from pala.gorila.parts import GorilaParts

_SHORT_S = 1.0  # a while without a look at the clock for logs and checkpoints
_MOST_NOT_FINITE = 100
_PATIENCE_S = 0.1  # of a learner that does not act
_MOST_AHEAD = 256  # transitions at hand, if one minibatch has not more


def minibatches_at_hand(config: Config) -> int:
    """So many a learner of its own replay has at once, where each rank learns: what a step of its environments pays
    for."""
    paid = config.env.num_envs // config.gorila.update_period_steps
    return max(1, min(paid, _most_at_hand(config)))


def _most_at_hand(config: Config) -> int:
    return max(1, _MOST_AHEAD // config.gorila.minibatch_size)


class Worker(Loop):
    """One rank."""

    _exchange: GorilaExchange

    def __init__(self, parts: GorilaParts, exchange: GorilaExchange, interrupt: Interrupt) -> None:
        super().__init__(parts, exchange, interrupt)
        self._rank, self._config = parts.rank, parts.config
        self._envs, self._frame_stack = parts.envs, parts.frame_stack
        roles = exchange.roles
        self._acts, self._learns = parts.rank in roles.actors, parts.rank in roles.learners
        self._tape, self._flat, self._target_tape, self._target = (
            parts.tape, parts.flat, parts.target_tape, parts.target
        )  # fmt: skip
        self._actions, self._filter = parts.network.distribution, parts.filter
        self._means = Means()
        self._ahead: deque[Transitions] = deque()  # minibatches to learn from
        self._next_values: deque[Tensor] = deque()  # the target network's, [N, A], for the first of them
        self._is_behind = False  # of an actor: more is to be learned before it plays on
        self._not_finite_in_a_row = 0
        self._logged_steps, self._logged_discarded = self.counters.local_steps, self._filter.discarded

    def reset(self, env_seeds: np.ndarray) -> None:
        self._tape.begin()
        self._target_tape.begin()
        if self._acts:
            observations = self._envs.reset(env_seeds)
            self._exchange.reset(reset_frames(observations, self._frame_stack))
            self._observations = self._to_device(observations)
        if self._learns:
            self._exchange.ask_for_batches()

    def _advance(self) -> None:
        if self._acts and not self._is_behind:
            self._act()
        if self._learns:
            self._is_behind = self._learn_what_is_due()
        if not (self._acts or self._learns):
            with self._exchanging():
                self._exchange.idle()

    def _act(self) -> None:
        """One step of all environments."""
        with self._exchanging():
            changed = self._exchange.take_parameters(self._flat.data)
        with self._watch.section("inference"):
            if changed:
                self._tape.begin()
            (values,) = self._tape.peek(self._observations)
            actions = epsilon_greedy(values, self._epsilon(), self._generator)
            env_actions = self._actions.to_env(actions).cpu().numpy()
        with self._watch.section("environment"):
            step = self._envs.step(env_actions)
        with self._watch.section("inference"):
            self._observations = self._to_device(step.observations)
            experience = experience_of(actions.cpu().numpy(), step, self._frame_stack)
        self.counters.local_steps += self._envs.num_envs
        for episode in step.episodes:
            self._records.append(self._stamp("episode") | episode.record())
        with self._exchanging():
            self._exchange.stepped(self._envs.num_envs, experience)

    def _learn_what_is_due(self) -> bool:
        """For a short while; True if more is due."""
        until = time.perf_counter() + _SHORT_S
        patience_s = 0.0 if self._acts else _PATIENCE_S
        while time.perf_counter() < until and self._exchange.stop is Stop.NONE and self._interrupt.signal is None:
            if not self._ahead:
                self._read_ahead(patience_s)
            if not self._ahead:
                return False
            self._learn()
            self._on_update(self.counters.updates)
        return True

    def _read_ahead(self, patience_s: float) -> None:
        """Take what is due: a learner that samples its own replay alone gets nothing else by waiting. Others wait for
        their turn."""
        with self._exchanging():
            batch = self._exchange.next_batch(patience_s)
            while batch is not None:
                self._ahead.append(Transitions(*(self._to_device(array) for array in batch)))
                may_go_on = self._exchange.samples_itself and len(self._ahead) < _most_at_hand(self._config)
                batch = self._exchange.next_batch(0.0) if may_go_on else None

    def _look_ahead(self) -> None:
        """The target network's values for all minibatches at hand, which stay right until it changes; in one pass if
        that is faster."""
        batches = [batch.next_observations for batch in self._ahead]
        if self._target_tape.joins and len(batches) > 1:
            (values,) = self._target_tape.peek(torch.cat(batches))
            self._next_values = deque(values.split([len(batch) for batch in batches]))
        else:
            self._next_values = deque(self._target_tape.peek(batch)[0] for batch in batches)
        self._see_to_messages()

    def _see_to_messages(self) -> None:
        """In the midst of an update: other learners wait for a shard's answer."""
        begin = time.perf_counter()
        self._exchange.poll()
        self._watch.move(time.perf_counter() - begin, "update", "exchange")

    def _learn(self) -> None:
        """One gradient, of the first minibatch at hand."""
        with self._exchanging():
            changed = self._exchange.take_parameters(self._flat.data)
            target_changed = self._exchange.take_target(self._target.data)
        with self._watch.section("update"):
            if changed:
                self._tape.begin()
            if target_changed:
                self._target_tape.begin()
            if target_changed or not self._next_values:
                self._look_ahead()
            loss = differentiate(
                self._tape, self._next_values.popleft(), self._flat, self._ahead.popleft(), self._config.gorila,
                self._see_to_messages,
            )  # fmt: skip
            error = float(loss.absolute_error)
            finite = math.isfinite(error) and math.isfinite(float(self._flat.gradient.norm()))
            accepted = self._filter.accepts(error if finite else math.nan)
        self.counters.updates += 1
        self.counters.applied += finite
        self._not_finite_in_a_row = 0 if finite else self._not_finite_in_a_row + 1
        if self._not_finite_in_a_row >= _MOST_NOT_FINITE:
            raise PalaError(
                f"[rank {self._rank}] update {self.counters.updates}: no finite loss and gradient for "
                f"{_MOST_NOT_FINITE} updates. "
                "Resume from the last checkpoint with a smaller learning rate, or look at the environment's "
                "rewards and observations."
            )
        if not accepted:
            if not self._acts:  # who acts asks at its steps
                with self._exchanging():
                    self._exchange.ask_for_parameters()
            return
        self._means.add(loss=loss.total, absolute_error=loss.absolute_error, action_value=loss.value)
        with self._exchanging():
            self._exchange.send_gradient(self._flat.gradient)

    def _epsilon(self) -> float:
        return epsilon_at(self._exchange.global_steps, self._config.gorila)

    def _interval_figures(self, seconds: float) -> Record:
        steps, self._logged_steps = self.counters.local_steps - self._logged_steps, self.counters.local_steps
        discarded = self._filter.discarded - self._logged_discarded
        self._logged_discarded = self._filter.discarded
        return self._means.take() | self._exchange.metrics() | {
            "local_steps_per_s": steps / seconds,
            "epsilon": self._epsilon(),
            "gradients_filtered": discarded,
        }  # fmt: skip
