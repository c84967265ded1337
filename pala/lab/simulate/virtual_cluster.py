"""A virtual cluster: gossip's own driver and protocol on a simulated network, with models that are small vectors.

How long all things take is drawn from the seed. What the ranks do is the code that training runs.

    cluster = VirtualCluster(Scenario(size=8, topology="ring", seed=17), np.zeros((8, 1)), learn)
    cluster.run()

Ranks that die, stop or hold NaN are in the tests' subclass, `tests/explorer/faulty_cluster.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.driver import GossipDriver, make_protocol
from pala.exchange.gossip.state import Rules
from pala.lab.simulate.scenario import Scenario
from pala.lab.simulate.vector_models import VectorModels
from pala.lab.simulate.virtual_network import VirtualNetwork, VirtualTransport

Learn = Callable[[int, np.ndarray], None]


class Rank:
    """One virtual rank: its driver, and its model."""

    def __init__(self, driver: GossipDriver, models: VectorModels) -> None:
        self.driver = driver
        self.state = driver.state
        self._models = models
        self.number = driver.state.rank
        self.waiting = self.timer_set = self.wake_set = False
        self.has_mixed = False  # at the end of its last update

    @property
    def model(self) -> np.ndarray:
        """The rank's present model."""
        return self._models.model


class VirtualCluster(VirtualNetwork):
    """`scenario.size` ranks on one clock. `run` plays the scenario to its end; the attributes say what happened."""

    def __init__(self, scenario: Scenario, models: np.ndarray, learn: Learn) -> None:
        """`models`: [size, parameters]; `learn(rank, model)` changes a model in place at each update."""
        super().__init__(scenario)
        self._learn = learn
        self.global_steps = 0
        self.ended_s = 0.0  # when a rank last ended training: `run` continues until the last timer has rung
        self.ranks: Sequence[Rank] = [self._make_rank(number, model.copy()) for number, model in enumerate(models)]
        for rank in self.ranks:
            rank.driver.start()
            self._start_update(rank)

    def _make_rank(self, number: int, model: np.ndarray) -> Rank:
        s = self.scenario
        rules = Rules(s.topology, s.max_staleness, s.seed, again_s=s.again_s, patience_s=s.patience_s, mixing=s.mixing)
        protocol = make_protocol(rules)
        state = protocol.new_state(StepBudget(number, s.size, s.budget_steps))
        models = VectorModels(model)
        driver = GossipDriver(protocol, state, VirtualTransport(self, number), models, report=lambda sentence: None)
        return Rank(driver, models)

    @property
    def models_sent(self) -> int:
        """Models that all ranks have sent."""
        return sum(rank.driver.counts["models_sent"] for rank in self.ranks)

    @property
    def mean_model(self) -> np.ndarray:
        """Mean over all ranks, at the end. In paired exchanges a rank's move by an answer that has come counts as made,
        since its peer has moved."""
        moves = [
            fraction * rank.driver.offer_to(peer).change
            for rank in self.ranks
            for peer, fraction in rank.state.answers.items()
        ]
        return np.asarray(np.add.reduce([rank.model for rank in self.ranks] + moves) / len(self.ranks))

    def _start_update(self, rank: Rank) -> None:
        s = self.scenario
        factor = s.slowness[rank.number] if s.slowness else 1.0
        self._random.random()  # once decided on a pause; without it published simulations would not repeat
        self._at(self.now + self._draw(s.update_s) * factor, self._finish_update, rank)

    def _finish_update(self, rank: Rank) -> None:
        self._learn(rank.number, rank.model)
        rank.waiting = True
        rank.driver.finish_update(self.scenario.steps_per_update, healthy=True)
        self.global_steps += self.scenario.steps_per_update
        self._advance(rank)

    def _advance(self, rank: Rank) -> None:
        mixes = rank.driver.num_mixes
        if not rank.driver.advance():
            self._set_timer(rank)
            return
        rank.waiting, rank.has_mixed = False, rank.driver.num_mixes > mixes
        if rank.state.budget.stop is not Stop.NONE:
            self.ended_s = self.now
        else:
            self._continue(rank)

    def _continue(self, rank: Rank) -> None:
        """Let a rank do what follows an update: the next one."""
        self._start_update(rank)

    def _wake(self, rank: Rank) -> None:
        rank.wake_set = False
        if rank.waiting:
            self._advance(rank)

    def _set_timer(self, rank: Rank) -> None:
        if not rank.timer_set:
            rank.timer_set = True
            self._at(self.now + 1.001 * self.scenario.again_s, self._timer_rang, rank)

    def _timer_rang(self, rank: Rank) -> None:
        """Let a rank look at its clock, and set its timer again while it waits."""
        rank.timer_set = False
        self._wake(rank)

    def notice(self, rank: int) -> None:
        one = self.ranks[rank]
        if one.waiting and not one.wake_set:
            one.wake_set = True
            self._after(self.scenario.wake_s, self._wake, one)
