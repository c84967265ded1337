"""What training does in ways of its own with A2C: actor-learners that exchange models or gradients."""

from __future__ import annotations

from torch import Tensor

from pala.a2c.agent import build_agent
from pala.a2c.learner import Learner
from pala.exchange.base import Exchange, ModelExchange
from pala.exchange.kinds import kind_of
from pala.exchange.make import check_placement, make_exchange
from pala.run import checkpoint
from pala.run.checkpoint import RankState
from pala.run.session import Training
from pala.transport.agreement import collectively


class A2CTraining(Training):
    """Every rank has a model of its own."""

    exchange: ModelExchange

    def _build_agent(self) -> None:
        collectively(self.comm, lambda: check_placement(self.comm, self.config.exchange))
        agent = build_agent(self.comm, self.config, self.envs)
        self.device, self.network, self.flat, self.tape, self.a2c = (
            agent.device, agent.network, agent.flat, agent.tape, agent.a2c
        )  # fmt: skip

    def _shared_tensors(self) -> list[Tensor]:
        return [self.flat.data, self.a2c.mean_square]

    def _restore(self) -> None:
        """From this rank's checkpoint, or from the average if the number of ranks changed. Collective."""
        own, first, lost = self._own_state()
        state = own or self._average(first, lost)
        self.flat.data.copy_(state.tensors["parameters"])
        self.a2c.mean_square.copy_(state.tensors["mean_square"])
        if kind_of(self.config.exchange).one_model and own is not None:
            self._begin_alike(own)
        self._seed_streams(round_=1)
        self._restore_counters(state, same_ranks=own is not None)
        self._restore_generator(own)

    def _average(self, first: RankState, lost: int) -> RankState:
        self._say_ranks_changed(
            first, lost,
            "every rank starts from the average of the ranks' parameters and of RMSprop's mean squares (independent "
            "learners: from the first's)",
        )  # fmt: skip
        states = collectively(self.comm, lambda: checkpoint.load_all(self.old, self.flat.signature))
        return checkpoint.average(states, independent=kind_of(self.config.exchange).policy == "first")

    def _begin_alike(self, state: RankState) -> None:
        """Ranks save at unlike times: all take over the model and counts of the one that came furthest. Collective."""
        updates = self.comm.allgather(state.counters["updates"])
        root = updates.index(max(updates))
        self._share_model(root)
        newest = self.comm.bcast(state.counters, root)
        state.counters |= {"updates": newest["updates"], "own_steps": newest["local_steps"][self.rank]}

    def _state_tensors(self) -> dict[str, Tensor]:
        return {"parameters": self.flat.data, "mean_square": self.a2c.mean_square}

    def _make_exchange(self) -> Exchange:
        return make_exchange(
            self.comm, self.flat.data, self.flat.signature, self.config, self.start, self.interrupt
        )  # fmt: skip

    def _make_loop(self) -> Learner:
        return Learner(
            self.config, self.rank, self.envs, self.tape, self.flat, self.a2c, self.exchange, self.generator,
            self.counters, self.interrupt,
        )  # fmt: skip
