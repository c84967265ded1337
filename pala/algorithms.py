"""The algorithms, and all that the rest of PALA asks of one: a row for each.

A row loads its algorithm when it is asked, and neither numpy nor torch before.
"""

from __future__ import annotations

import abc
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from pala.comm.base import Communicator
from pala.config import Config
from pala.system.text import counted

if TYPE_CHECKING:
    import gymnasium

    from pala.envs.vector import Envs
    from pala.exchange.budget import StartState
    from pala.exchange.sleeping import Sleeping
    from pala.networks.network import FlatParameters, Network
    from pala.networks.own import MakeNetwork
    from pala.run.agent import Agent


class Algorithm(abc.ABC):
    """A way to learn."""

    build_by: str
    """`module:function` that `build` calls; the two below likewise."""
    sleep_by: str
    network_by: str
    why_nothing_was_learned = ""
    """The place to look at if no rank made an update."""

    @abc.abstractmethod
    def method(self, config: Config) -> str:
        """Return the method's name for people."""

    def step_length(self, config: Config, num_models: int) -> str:
        """Return the learning rate where ranks hold `num_models` models, and the momentum, for the console; empty:
        nothing is said."""
        return ""

    def note_on_begin(self, config: Config) -> str:
        """Return words for the console if a new run does not learn at once; else empty."""
        return ""

    def build(
        self,
        comm: Communicator,
        config: Config,
        envs: Envs,
        make_network: MakeNetwork | None = None,
        sleeping: Any = None,
    ) -> Agent[Any]:
        """Build what learns on a rank. `sleeping`: of a spare that is needed, what it has slept by. Collective."""
        agent: Agent[Any] = resolve_name(self.build_by)(comm, config, envs, make_network, sleeping)
        return agent

    def sleep(self, comm: Communicator, config: Config, begin: StartState) -> Sleeping:
        """Make what a spare sleeps by. Loads no torch. Collective."""
        sleeping: Sleeping = resolve_name(self.sleep_by)(comm, config, begin)
        return sleeping

    def make_network(
        self, observations: gymnasium.Space, actions: gymnasium.Space, config: Config, own: MakeNetwork | None
    ) -> Network:
        """Make the network for these spaces, or the user's own. Raises PalaError."""
        network: Network = resolve_name(self.network_by)(observations, actions, config, own)
        return network

    @abc.abstractmethod
    def load_parameters(self, segment: Path, config: Config, flat: FlatParameters) -> tuple[int, str]:
        """Put the policy of a segment's checkpoints into `flat`. Returns its global steps and where it is from, in
        words. Raises PalaError."""

    def epsilon(self, config: Config) -> float | None:
        """Return the probability of a random action in an evaluation; None: actions are sampled from a policy."""
        return None


class _A2C(Algorithm):
    build_by = "pala.a2c.agent:build"
    sleep_by = "pala.exchange.gossip.sleeping:SleepingGossip"
    network_by = "pala.networks.make:actor_critic"

    def method(self, config: Config) -> str:
        exchange = config.exchange
        mixing = f" ({exchange.mixing})" * (exchange.kind == "gossip")
        return f"A2C, exchange {exchange.kind}{mixing}"

    def step_length(self, config: Config, num_models: int) -> str:
        from pala.a2c.learning_rate import ONE_LEARNER, learning_rate

        rate, a2c = learning_rate(config, num_models), config.a2c
        times = f" = {rate / ONE_LEARNER:g} x {ONE_LEARNER:g} for {counted(num_models, 'model')}"
        words = f"learning rate {rate:g}{times * (a2c.learning_rate == 'auto')}"
        return f"{words}, momentum {a2c.momentum:g}" if a2c.momentum else words

    def load_parameters(self, segment: Path, config: Config, flat: FlatParameters) -> tuple[int, str]:
        """Take the weighted mean of the ranks' parameters; of independent learners the first's."""
        from pala.a2c.averaging import average_of

        first_only = config.exchange_kind.independent
        state, number = average_of(segment, flat.signature, first_only)
        flat.data.copy_(state.tensors["parameters"])
        ranks = counted(number, "rank")
        words = f"checkpoint of rank {state.rank} of {ranks}" if first_only else f"mean of checkpoints of {ranks}"
        return state.counters["base_steps"], words


class _Gorila(Algorithm):
    build_by = "pala.gorila.agent:build"
    sleep_by = "pala.gorila.sleeping:SleepingGorila"
    network_by = "pala.gorila.networks:q_network"
    why_nothing_was_learned = "; see 'gorila.min_replay_steps', and 'rewards_not_finite' in its metrics"

    def method(self, config: Config) -> str:
        return "Gorila DQN"

    def note_on_begin(self, config: Config) -> str:
        return f"; learning begins after {config.gorila.min_replay_steps:,}"

    def load_parameters(self, segment: Path, config: Config, flat: FlatParameters) -> tuple[int, str]:
        """Put the shards' parameters together."""
        from pala.gorila.shard import assemble
        from pala.run import checkpoint

        states = checkpoint.load_all(segment, flat.signature)
        flat.data.copy_(assemble(states).parameters)
        return checkpoint.joint_counters(states)["base_steps"], f"checkpoints of {counted(len(states), 'rank')}"

    def epsilon(self, config: Config) -> float | None:
        return config.evaluation.epsilon


ALGORITHMS: dict[str, Algorithm] = {"a2c": _A2C(), "gorila": _Gorila()}
"""By `Config.algorithm`."""
