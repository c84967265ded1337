"""One turn of a rank's loop (`run/loop.py`): environments, learn, exchange, log. The file to read first.

    act ──▶ rollout ──▶ A2C update ──flat parameters──▶ exchange ──flat parameters──▶ act …
                          └─ its gradient, where the exchange averages that

The loop sends nothing and calls no MPI: `exchange` does, the one object in which the kinds of exchange differ. Of other
ranks the loop knows how many models they hold, and whose gradient has spoilt a mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from pala.a2c.learning_rate import learning_rate
from pala.a2c.movement import Movement
from pala.a2c.update import Loss, Rollout, UpdateResult
from pala.envs.vector import Step
from pala.exchange.base import ModelExchange
from pala.exchange.budget import Stop
from pala.networks.distributions import masked
from pala.run.loop import Loop, Means
from pala.run.metrics import Record
from pala.system.errors import EndError, PalaError
from pala.system.output import log

if TYPE_CHECKING:
    from pala.a2c.agent import A2CAgent

_MOST_SKIPPED_UPDATES = 100


class Learner(Loop):
    """The loop of one actor-learner."""

    _exchange: ModelExchange

    def __init__(self, agent: A2CAgent, exchange: ModelExchange) -> None:
        super().__init__(agent, exchange)
        self._config, self._rank = agent.config, agent.rank
        self._a2c = agent.a2c
        self._tape, self._flat = agent.a2c.tape, agent.a2c.flat
        self._normalization = agent.a2c.normalization
        self._means, self._logged = Means(), self.began_with  # of the interval; what was done before it
        self._skipped_in_a_row = 0
        self._own_left_out = 0  # updates whose gradient was not finite by this rank's own fault
        self._movement = Movement(agent.a2c.learned)
        config = agent.config
        self._ends_alone = not (config.exchange_kind.averages_gradients or config.exchange.has_groups)

    def begin(self, observations: np.ndarray | None) -> None:
        assert observations is not None, "every rank of A2C acts"
        self._look(observations)
        self._tape.forget()
        if self._masks is not None and self._rank == 0:
            log("Action masks: the environment says which actions it allows, and no other is taken.")
        if self._normalization is not None:
            self._normalization.reset()

    def _look(self, observations: np.ndarray) -> None:
        """Take what the environments show before their next step."""
        masks = self._envs.action_masks
        self.observations = self._to_device(observations)
        self._masks = None if masks is None else self._to_device(masks)

    def _advance(self) -> None:
        """Play a rollout and make an update."""
        loss = self.differentiate()
        if loss is None:
            return
        with self._exchanging():
            goes_on = self._exchange.average_gradient(self._flat.gradient)
        if goes_on:
            self._finish_update(self.step(loss))
            self._on_update(self.counters.updates)

    def differentiate(self) -> Loss | None:
        """Play a rollout and compute the gradient of its loss; return None if training ends meanwhile."""
        rollout, bootstrap_B = self._play()
        if self._is_to_end:
            return None
        with self._watch.section("update"):
            return self._a2c.differentiate(rollout, bootstrap_B)

    @property
    def _is_to_end(self) -> bool:
        """Whether this rank ends in the midst of a rollout: a signal came, or training has ended elsewhere, and a long
        rollout must not make the others wait. Synchronous ranks end together, after an update."""
        return self._interrupt.signal is not None or (self._ends_alone and self._exchange.stop is not Stop.NONE)

    def step(self, loss: Loss) -> UpdateResult:
        """Make one step along the gradient, and count it."""
        with self._watch.section("update"):
            result = self._a2c.step(loss, self._learning_rate())
        self.counters.updates += 1
        self.counters.local_steps += self._config.steps_per_update
        self.counters.applied += result.applied
        if result.applied:
            self._means.add(
                loss_policy=result.loss.policy,
                loss_value=result.loss.value,
                entropy=result.loss.entropy,
                gradient_norm=result.gradient_norm,
            )
        return result

    def _play(self) -> tuple[Rollout, Tensor]:
        """Play `rollout_steps` steps in all environments, fewer if training ends; return them, and V after the last one
        [B]."""
        rollout, distribution = Rollout(), self._a2c.distribution
        with self._watch.section("inference"):
            self._tape.begin()
        for t in range(self._config.a2c.rollout_steps):
            with self._watch.section("inference"):
                if self._normalization is not None:
                    self._normalization.observe(self.observations)
                policy_output, value = self._tape.forward(self.observations)
                policy_output = masked(policy_output, self._masks)
                actions = distribution.sample(policy_output, self._generator, masks=self._masks)
                env_actions = distribution.to_env(actions).cpu().numpy()
            with self._watch.section("environment"):
                step = self._envs.step(env_actions)
            with self._watch.section("inference"):
                rollout.policy_outputs.append(policy_output)
                rollout.values.append(value.squeeze(-1))
                rollout.actions.append(actions)
                ended = step.terminated | step.truncated | step.failed
                rollout.ended.append(self._to_device(ended.astype(np.float32)))
                rollout.rewards.append(self._rewards(step, rollout.ended[-1], rollout.values[-1]))
                self._look(step.observations)
                if self._tape.remembers and (began := step.began).any():
                    self._tape.forget(self._to_device(began))
            for episode in step.episodes:
                self._records.append(self._stamp("episode", (t + 1) * self._envs.num_envs) | episode.record())
            with self._watch.section("exchange"):
                self._exchange.between_steps()
            if self._is_to_end:
                break
        with self._watch.section("inference"):
            return rollout, self._value(self.observations)

    def _rewards(self, step: Step, ended_B: Tensor, values_B: Tensor) -> Tensor:
        """Return the rewards [B]; where a time limit cut the episode, add the discounted value of what would have
        followed.

        Where an environment failed, return V of the observation before: the step then has an advantage of exactly 0,
        moves nothing but the entropy, and what came before it is bootstrapped by that V.
        """
        rewards_B = self._to_device(step.rewards)
        if self._normalization is not None:
            rewards_B = self._normalization.rewards(rewards_B, ended_B)
        if step.truncated.any():
            truncated_B = self._to_device(step.truncated)
            value = self._value(self._to_device(step.final_observations), truncated_B)
            rewards_B[truncated_B] += self._config.a2c.gamma * value
        if step.failed.any():
            failed_B = self._to_device(step.failed)
            rewards_B[failed_B] = values_B[failed_B].to(rewards_B.dtype)
        return rewards_B

    def _value(self, observations: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return V of observations of all environments, or of some `rows`, bool [B], for bootstrapping."""
        _, value = self._tape.peek(observations, rows)
        return value.squeeze(-1)

    def _finish_update(self, result: UpdateResult) -> None:
        """Pass the parameters through the exchange, and deal with an update that was not finite.

        | step | parameters | the exchange | then |
        |---|---|---|---|
        | made | finite | leaves or mixes them | nothing |
        | left out | finite | leaves or mixes them | it is told |
        | either | finite | puts another model in their place | movement and momentum restart |
        | left out | not finite | puts a finite model in their place | the mean squares restart, too |
        | left out | not finite | has none | training ends, as after 100 steps left out |
        """
        healthy = result.applied or bool(self._flat.data.isfinite().all())
        self._skipped_in_a_row = 0 if result.applied else self._skipped_in_a_row + 1
        if healthy:
            self._movement.note_own_step()
        with self._exchanging():
            heals = self._exchange.heals
            finite = self._exchange.after_update(self._config.steps_per_update, healthy)
        if healthy and self._exchange.heals == heals:
            self._movement.note_exchange()
        else:
            self._movement.restart()
            self._a2c.restart_momentum()
            if not healthy and finite:
                self._a2c.restart_mean_square()
        if not result.applied:
            self._report_left_out(healthy, finite)

    def _report_left_out(self, healthy: bool, finite: bool) -> None:
        """Report that an update was left out, unless another rank is to blame, which reports it. If this rank cannot
        continue, raises PalaError, or EndError where the others cannot continue without it."""
        where, fault = f"[rank {self._rank}] update {self.counters.updates}", ""
        culprits = ", ".join(map(str, self._exchange.culprits))
        if not culprits:
            self._own_left_out += 1
            if self._own_left_out.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...
                so_far = f" {self._own_left_out:,} were so far; the next line comes after as many more."
                so_far *= self._own_left_out > 1
                log(f"{where}: the loss or its gradient is not finite; the update is left out.{so_far}")
        if not healthy and finite:
            log(f"{where}: the parameters were not finite either; they are replaced by what the peers sent.")
        elif not finite and self._exchange.stop is Stop.NONE:
            fault = f"{where}: the parameters are not finite and there is no peer to recover from. {_ADVICE}"
        if not fault and self._skipped_in_a_row >= _MOST_SKIPPED_UPDATES:
            whose = f"rank {culprits} has given " if culprits else ""
            fault = f"{where}: {whose}no finite gradient for {_MOST_SKIPPED_UPDATES} updates. {_ADVICE}"
        if fault:
            raise (PalaError if self._config.exchange_kind.outlives_ranks else EndError)(fault)

    @property
    def _num_models(self) -> int:
        """Number of models that are mixed; 1: none are."""
        return self._exchange.num_models if self._config.exchange_kind.coupling == 1 else 1

    def _learning_rate(self) -> float:
        """Return the rate of this update. Ranks that died do not count."""
        config = self._config
        rate = learning_rate(config, self._num_models)
        if warmup := config.a2c.learning_rate_warmup_updates:
            rate *= min(1.0, (self._a2c.num_squares + 1) / warmup)
        if config.a2c.learning_rate_decay == "linear":
            rate *= max(0.0, 1 - self._exchange.global_steps / config.total_steps)
        return rate

    def _interval_figures(self, seconds: float) -> Record:
        before, now = self._logged, replace(self.counters)
        self._logged = now
        exchange = self._exchange.metrics()
        own, moved = self._movement.take()
        distance, norm = exchange.get("consensus_distance"), float(self._a2c.learned.norm())
        return {
            **self._means.take(),
            **exchange,
            "updates_skipped": (now.updates - before.updates) - (now.applied - before.applied),
            "local_steps_per_s": (now.local_steps - before.local_steps) / seconds,
            "learning_rate": self._learning_rate(),
            "own_movement": own,
            "movement": moved,
            "consensus_distance_relative": distance / norm if distance is not None and norm > 0 else None,
        }


_ADVICE = "Resume from the last checkpoint with a smaller 'a2c.learning_rate', or look at the environment's rewards."
