"""The loop of one rank of Gorila, whatever its roles: act, learn what is due, or only answer others.

bundled:   act ──▶ replay ──minibatch──▶ gradient ──▶ shards ──parameters──▶ act …
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from pala.config import Config
from pala.exchange.budget import Stop
from pala.gorila.dqn import Loss, Transitions, epsilon_at
from pala.gorila.exchange import GorilaExchange
from pala.gorila.node import Node
from pala.gorila.replay import experience_of, reset_frames
from pala.run.loop import Loop, Means
from pala.run.metrics import Record
from pala.system.errors import PalaError

if TYPE_CHECKING:
    from pala.gorila.agent import GorilaAgent

_SHORT_S = 1.0  # a while without a look at the clock for logs and checkpoints
_MOST_NOT_FINITE = 100
_PATIENCE_S = 0.1  # of a learner that does not act
_MOST_AHEAD = 256  # transitions at hand, if one minibatch has not more


def most_at_hand(config: Config) -> int:
    """Return how many minibatches a learner may have at once."""
    return max(1, _MOST_AHEAD // config.gorila.minibatch_size)


class Worker(Loop):
    """One rank."""

    _exchange: GorilaExchange

    def __init__(self, agent: GorilaAgent, exchange: GorilaExchange) -> None:
        super().__init__(agent, exchange)
        self._config, self._rank = agent.config, agent.rank
        self._frame_stack = agent.frame_stack
        self._dqn = agent.dqn
        self._acts = agent.rank in exchange.roles.actors
        self._learns = agent.rank in exchange.roles.learners
        self._means = Means()
        self._ahead: deque[Transitions] = deque()  # minibatches to learn from
        self._next_values: deque[Tensor] = deque()  # the target network's, [N, A], for the first of them
        self._is_behind = False  # of an actor: more is to be learned before it plays on
        self._not_finite_in_a_row = 0
        self._logged_steps, self._logged_discarded = self.counters.local_steps, agent.dqn.filter.discarded

    def begin(self, observations: np.ndarray | None) -> None:
        self._dqn.tape.begin()
        self._dqn.target_tape.begin()
        if observations is not None:
            with self._exchange.node() as node:
                node.reset(reset_frames(observations, self._frame_stack))
            self._observations = self._to_device(observations)
        if self._learns:
            with self._exchange.node() as node:
                node.ask_for_batches()

    def _advance(self) -> None:
        if self._acts and not self._is_behind:
            self._act()
        if self._learns:
            self._is_behind = self._learn_what_is_due()
        if not (self._acts or self._learns):
            with self._exchanging():
                self._exchange.idle()

    @contextmanager
    def _node(self) -> Iterator[Node]:
        """Give the rank's node to the block, whose time is the exchange's."""
        with self._exchanging(), self._exchange.node() as node:
            yield node

    def _act(self) -> None:
        """Make one step of all environments."""
        with self._node() as node:
            changed = node.take_parameters(self._dqn.flat.data)
        with self._watch.section("inference"):
            if changed:
                self._dqn.tape.begin()
            actions = self._dqn.act(self._observations, self._epsilon(), self._generator)
            env_actions = self._dqn.distribution.to_env(actions).cpu().numpy()
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
        """Learn for a short while; return whether more is due."""
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
        """Take the minibatches that are due. A learner that samples its own replay alone takes several, since it gets
        nothing else by waiting; others wait for their turn."""
        with self._exchanging():
            batch = self._exchange.next_batch(patience_s)
            while batch is not None:
                self._ahead.append(Transitions(*(self._to_device(array) for array in batch)))
                may_go_on = self._exchange.samples_itself and len(self._ahead) < most_at_hand(self._config)
                batch = self._exchange.next_batch(0.0) if may_go_on else None

    def _see_to_messages(self) -> None:
        """Move messages on in the midst of an update: other learners wait for a shard's answer."""
        begin = time.perf_counter()
        self._exchange.poll()
        self._watch.move(time.perf_counter() - begin, "update", "exchange")

    def _learn(self) -> None:
        """Compute the gradient of the first minibatch at hand, and send it unless the filter discards it."""
        with self._node() as node:
            changed = node.take_parameters(self._dqn.flat.data)
            target_changed = node.take_target(self._dqn.target.data)
        with self._watch.section("update"):
            if changed:
                self._dqn.tape.begin()
            if target_changed:
                self._dqn.target_tape.begin()
            if target_changed or not self._next_values:
                self._next_values = deque(self._dqn.next_values(self._ahead))
                self._see_to_messages()
            batch, next_values = self._ahead.popleft(), self._next_values.popleft()
            loss = self._dqn.differentiate(batch, next_values, self._see_to_messages)
            accepted = self._judge(loss)
        if accepted:
            self._means.add(loss=loss.total, absolute_error=loss.absolute_error, action_value=loss.value)
            with self._exchanging():
                self._exchange.send_gradient(self._dqn.flat.gradient)
        elif not self._acts:  # an actor asks at its steps
            with self._node() as node:
                node.ask_for_parameters()

    def _judge(self, loss: Loss) -> bool:
        """Count the update and tell whether its gradient may be used. Raises PalaError if none is finite any more."""
        error = float(loss.absolute_error)
        finite = math.isfinite(error) and math.isfinite(float(self._dqn.flat.gradient.norm()))
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
        return self._dqn.filter.accepts(error if finite else math.nan)

    def _epsilon(self) -> float:
        return epsilon_at(self._exchange.global_steps, self._config.gorila)

    def _interval_figures(self, seconds: float) -> Record:
        steps, self._logged_steps = self.counters.local_steps - self._logged_steps, self.counters.local_steps
        loss_filter = self._dqn.filter
        discarded, self._logged_discarded = loss_filter.discarded - self._logged_discarded, loss_filter.discarded
        own = {
            "local_steps_per_s": steps / seconds,
            "epsilon": self._epsilon(),
            "gradients_filtered": discarded,
        }
        return self._means.take() | self._exchange.metrics() | own
