"""A virtual cluster: gossip's own driver and protocol on a simulated network, with models that are small vectors.

What happens to the ranks (delays, packets that overtake each other, stragglers, pauses, deaths, poison) is drawn from
the seed. What they do is the code that training runs.

    cluster = VirtualCluster(Scenario(size=8, topology="ring", max_staleness=3, seed=17))
    cluster.run()
    assert not cluster.stuck and not cluster.violations
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from pala.config.catalogue import RULES
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.driver import GossipDriver, make_protocol
from pala.exchange.gossip.messages import Kind
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.gossip.state import Rules
from pala.lab.simulate.scenario import Scenario
from pala.lab.simulate.vector_models import Sent, VectorModels, is_finite
from pala.lab.simulate.virtual_network import OnItsWay, VirtualNetwork, VirtualTransport

Learn = Callable[[int, np.ndarray], None]


class Rank:
    """One virtual rank: its driver, its model, and what is known of it from outside."""

    def __init__(self, driver: GossipDriver, models: VectorModels) -> None:
        self.driver = driver
        self.state = driver.state
        self.models = models
        self.number = driver.state.rank
        self.waiting = self.ended = self.timer_set = self.wake_set = False
        self.asleep = self.waking = False  # of a spare: it does not train yet; it is needed
        self.since_mix = 0  # updates since the last mix, counted here and not by the protocol
        self.wait_began_s = 0.0
        self.longest_wait_s = self.waited_since_mix_s = 0.0
        self.staleness: list[int] = []  # since_mix at the end of each update
        self.updates_after_budget = 0

    @property
    def model(self) -> np.ndarray:
        """The rank's present model."""
        return self.models.model


class VirtualCluster(VirtualNetwork):
    """`scenario.size` ranks on one clock. `run` plays the scenario to its end; the attributes say what happened."""

    def __init__(
        self,
        scenario: Scenario,
        models: np.ndarray | None = None,
        *,
        learn: Learn | None = None,
        observe: Callable[[VirtualCluster], None] | None = None,
        protocol: Callable[[Rules], GossipProtocol] = make_protocol,
        driver: type[GossipDriver] = GossipDriver,
    ) -> None:
        """`models`: [size, parameters], by default each rank's number; `learn(rank, model)` changes a model in place at
        each update; `observe(self)` is called after each event; `protocol` and `driver` let tests plant a
        bug."""
        super().__init__(scenario)
        s = scenario
        self._learn = learn
        self._protocol = protocol
        self._driver = driver
        self.observe = partial(observe, self) if observe is not None else None
        models = np.arange(s.size, dtype=np.float64)[:, None] if models is None else models
        self.global_steps = 0
        self.lost_weight = 0.0  # push-sum weight that the dead took with them
        self.violations: list[str] = []  # of the process lock, the staleness bound, or of what may heal
        self.all_well_from_s = float("inf")  # from then on no patience should have to end
        self.budget_met_s = self.budget_known_s = float("inf")  # in truth; by the first rank
        self.ended_s = 0.0  # when a rank last ended training: `run` continues until the last timer has rung
        self.models_lost = False  # a rank was killed that had the last model of use
        self.last_gone_s = 0.0  # when a rank last died, or went: a spare that is told to leave first takes its place
        self.unseen_steps: list[int] = []  # when the budget was met, steps that each rank did not know of
        self._not_taken_in: dict[tuple[int, int], float] = {}  # sender and receiver of a model -> when it was sent
        self.ranks = [self._make_rank(number, models[number].copy()) for number in range(s.size)]
        for rank in self.ranks:
            rank.driver.start()
            rank.asleep = rank.number >= s.size - s.spares
            if not rank.asleep:
                self._start_update(rank)
        for number, time_s in s.deaths.items():
            self._at(time_s, self._kill, number)

    def _make_rank(self, number: int, model: np.ndarray) -> Rank:
        s = self.scenario
        rules = Rules(
            s.topology,
            s.max_staleness,
            s.seed,
            s.whole_every,
            again_s=s.again_s,
            patience_s=s.patience_s,
            mixing=s.mixing,
        )
        protocol = self._protocol(rules)
        budget = StepBudget(number, s.size, s.budget_steps, spares=s.spares)
        state = protocol.new_state(budget, weight=float(number < s.size - s.spares))

        def keeps_own() -> bool:
            """Return whether it waited for a fresh model in vain, or all who trained with it are dead."""
            trained = range(s.size - s.spares)
            alone = all(peer == number or peer not in trained for peer in state.living)
            return alone or state.counts["waits_given_up"] > 0

        models = VectorModels(model, self, s.stops.get(number, (0.0, 0.0)), keeps_own)
        transport = VirtualTransport(self, number)
        driver = self._driver(protocol, state, transport, models, s.send_buffers, report=lambda sentence: None)
        return Rank(driver, models)

    @property
    def living(self) -> list[Rank]:
        """Ranks that did not die."""
        return [rank for rank in self.ranks if rank.number not in self.dead]

    @property
    def stuck(self) -> list[int]:
        """Ranks that neither ended nor died by the time that `run` played to: a deadlock, if that was late enough."""
        return [rank.number for rank in self.living if not rank.ended]

    @property
    def overshoot_steps(self) -> int:
        """Steps made by all ranks beyond the budget."""
        return self.global_steps - self.scenario.budget_steps

    @property
    def models_sent(self) -> int:
        """Models that all ranks have sent."""
        return sum(rank.driver.counts["models_sent"] for rank in self.ranks)

    @property
    def total_weight(self) -> float:
        """Sum of the push-sum weights of the living, in their inboxes and on the way."""
        held = sum((rank.state.weight + rank.models.inbox_weight for rank in self.living), 0.0)
        return held + sum((_weight(on_its_way) for on_its_way in self.on_their_way.values()), 0.0)

    @property
    def sum_of_models(self) -> np.ndarray:
        """Over all ranks, the dead as they were, with the moves that they owe to answers that were sent, and without
        what only one rank of a pair may do: heal, and move when the other is dead or has healed. Paired exchanges do
        not change it."""
        all_models = [rank.models for rank in self.ranks]
        owed = [move for models in all_models for move in models.owed.values()]
        return np.add.reduce([models.model - models.unmatched for models in all_models] + owed)

    @property
    def mean_model(self) -> np.ndarray:
        """Over all ranks, the dead as they were. Moves that are owed to answers on their way count as made."""
        by_pairs = RULES[self.scenario.mixing].by_pairs
        total = self.sum_of_models if by_pairs else np.sum([rank.model for rank in self.ranks], 0)
        return np.asarray(total / len(self.ranks))

    # ---- a rank ----------------------------------------------------------------------------------------------------

    def _start_update(self, rank: Rank) -> None:
        s = self.scenario
        factor = s.slowness[rank.number] if s.slowness else 1.0
        pause_s = self._draw(s.pause_s) if self._random.random() < s.pause_probability else 0.0
        took_s = self._draw(s.update_s) * factor + pause_s
        self._at(self.now + took_s, self._finish_update, rank)

    def _look_in_sleep(self, rank: Rank) -> None:
        """Let a spare that sleeps look at what it has heard."""
        if rank.state.budget.stop is not Stop.NONE:
            rank.ended = True
        elif rank.state.budget.is_needed and not rank.waking:
            rank.waking = True
            self._after(self.scenario.wake_up_s, self._join, rank)

    def _join(self, rank: Rank) -> None:
        if rank.number in self.dead or rank.ended:
            return
        rank.asleep = False
        rank.waiting = True
        rank.wait_began_s = self.now
        rank.driver.join()
        self._advance(rank)

    def _finish_update(self, rank: Rank) -> None:
        if rank.number in self.dead or self.is_stopped(rank.number, self._finish_update, rank):
            return
        model = rank.model
        healthy = is_finite(model)  # before this update, so the update was applied
        if healthy and self._learn is not None:
            self._learn(rank.number, model)
        begin_s, end_s = self.scenario.poison.get(rank.number, (0.0, 0.0))
        if begin_s <= self.now < end_s:
            model[:] = np.nan
        rank.waiting, rank.wait_began_s = True, self.now
        rank.driver.finish_update(self.scenario.steps_per_update, healthy)
        self._count_update(rank)
        self._advance(rank)

    def _let_go(self, rank: Rank) -> None:
        """Let a rank leave if another still has a model of use, as `GossipExchange.leave` does."""
        if rank.number in self.dead:
            return
        if rank.state.may_leave or rank.state.budget.stop is not Stop.NONE:
            rank.driver.leave()
            rank.ended = True
            self._at(self.now + self.scenario.control_s[1], self._go, rank)  # when all have the news
        else:
            self._start_update(rank)

    def _go(self, rank: Rank, waited_s: float = 0.0) -> None:
        again_s, budget = self.scenario.again_s, rank.state.budget
        if rank.number in self.dead:
            return
        if not self.dead.isdisjoint(budget.present):  # its news cannot arrive there, so it hears of the death first
            self._at(self.now + self.scenario.control_s[1], self._go, rank, waited_s)
        elif rank.state.may_leave:
            self.die(rank.number)
        elif budget.living and budget.stop is Stop.NONE and waited_s < min(self.scenario.patience_s, 10 * again_s):
            rank.driver.wish_to_leave()
            self._at(self.now + again_s, self._go, rank, waited_s + again_s)
        else:  # all that it counted on are gone as well
            rank.driver.end(Stop.ALL_LEAVE)

    def _advance(self, rank: Rank) -> None:
        models, mixes = rank.models, rank.models.mixes
        if not rank.driver.advance():
            self._set_timer(rank)
            return
        rank.waiting = False
        waited_s = self.now - rank.wait_began_s
        rank.longest_wait_s = max(rank.longest_wait_s, waited_s)
        rank.waited_since_mix_s = max(rank.waited_since_mix_s, waited_s)
        if models.mixes > mixes or len(rank.state.living) == 1:
            rank.since_mix, rank.waited_since_mix_s = 0, 0.0
        self.violations += [f"at {self.now} s rank {rank.number} {fault}" for fault in models.faults]
        models.faults.clear()
        if rank.state.budget.stop is not Stop.NONE:
            rank.ended, self.ended_s = True, self.now
        elif self._is_told(rank) and self._may_leave(rank):
            longest_s = self.scenario.model_s[1] + self.scenario.control_s[1]
            self._at(self.now + longest_s, self._let_go, rank)  # when all that it has sent has come
        elif not rank.state.has_model:  # alone: a real rank ends with an error
            self.die(rank.number)
        else:
            self._start_update(rank)

    def _is_told(self, rank: Rank) -> bool:
        """Return whether this rank was told to leave, and others train."""
        return self.now >= self.scenario.leaves.get(rank.number, math.inf) and len(rank.state.living) > 1

    def _may_leave(self, rank: Rank) -> bool:
        """Return whether another has a model of use; if not, ask again."""
        if not rank.state.may_leave:
            rank.driver.wish_to_leave()
        return rank.state.may_leave

    def _wake(self, rank: Rank) -> None:
        rank.wake_set = False
        if rank.waiting and rank.number not in self.dead and not self.is_stopped(rank.number, self._wake, rank):
            self._advance(rank)

    def _wake_soon(self, rank: Rank) -> None:
        if rank.waiting and not rank.wake_set:
            rank.wake_set = True
            self._after(self.scenario.wake_s, self._wake, rank)

    def _set_timer(self, rank: Rank) -> None:
        if not rank.timer_set:
            rank.timer_set = True
            self._at(self.now + 1.001 * self.scenario.again_s, self._timer_rang, rank)

    def _timer_rang(self, rank: Rank) -> None:
        """Let a rank look at its clock, and set its timer again while it waits."""
        if rank.number in self.dead or self.is_stopped(rank.number, self._timer_rang, rank):
            return
        rank.timer_set = False
        self._wake(rank)

    # ---- the network -----------------------------------------------------------------------------------------------

    def sent(self, rank: int) -> None:
        self._wake_soon(self.ranks[rank])

    def overwritten(self, on_its_way: OnItsWay) -> None:
        self.violations.append(f"rank {on_its_way.sender} wrote over a message on its way at {self.now} s")

    def heard(self, rank: int) -> None:
        self._notice_budget(self.ranks[rank])
        if self.ranks[rank].asleep:
            self._look_in_sleep(self.ranks[rank])
        self._wake_soon(self.ranks[rank])

    def lost(self, on_its_way: OnItsWay) -> None:
        self.lost_weight += _weight(on_its_way)

    def post(self, on_its_way: OnItsWay) -> None:
        pair, kind = (on_its_way.sender, on_its_way.receiver), on_its_way.data.message.kind
        if kind in (Kind.MODEL, Kind.OFFER):
            if pair in self._not_taken_in:
                self.violations.append(
                    f"process lock: at {self.now} s rank {pair[0]} sent to {pair[1]}, which holds its last model"
                )
            if kind is Kind.OFFER and self._has_open_offer(pair[0]):
                self.violations.append(f"at {self.now} s rank {pair[0]} made a second offer")
            self._not_taken_in[pair] = self.now
        elif kind in (Kind.ANSWER, Kind.CREDIT, Kind.ASK_WHOLE, Kind.LEAVE, Kind.JOIN):
            self._not_taken_in.pop(pair[::-1], None)
        if kind is Kind.ANSWER:
            self._owe(on_its_way)
        super().post(on_its_way)

    def _owe(self, on_its_way: OnItsWay) -> None:
        """Note the move that the receiver owes to this answer, if its offer is still open."""
        message, model = on_its_way.data
        receiver = self.ranks[on_its_way.receiver]
        offer = receiver.driver.offer_to(on_its_way.sender)
        if offer is not None:
            receiver.models.owe(offer, message.weight * (model - offer.data.model))

    def _has_open_offer(self, rank: int) -> bool:
        """Return whether the rank has an open offer to a peer that lives, as far as it knows, and is not silent."""
        state = self.ranks[rank].state
        return any(
            self.now - sent_s < 0.999 * state.patience_s
            for (sender, receiver), sent_s in self._not_taken_in.items()
            if sender == rank and receiver in state.living
        )

    def _kill(self, rank: int) -> None:
        self.die(rank)
        useful = [r for r in self.living if not r.asleep and r.state.has_model and np.isfinite(r.model).all()]
        self.models_lost |= not useful

    def die(self, rank: int) -> None:
        if rank in self.dead:
            return
        self.last_gone_s = self.now
        self.lost_weight += self.ranks[rank].state.weight + self.ranks[rank].models.inbox_weight
        super().die(rank)

    def _hear_of_death(self, rank: int, dead: int) -> None:
        """Let `rank` expect nothing of the dead from then on, even if it is on its way."""
        if rank not in self.dead:
            driver, models = self.ranks[rank].driver, self.ranks[rank].models
            offer = driver.offer_to(dead)
            if offer is not None and offer.change is None:
                models.take_for_lost(offer)
        super()._hear_of_death(rank, dead)

    # ---- counts ----------------------------------------------------------------------------------------------------

    def _count_update(self, rank: Rank) -> None:
        alone = len(rank.state.living) == 1
        rank.since_mix += not alone
        rank.staleness.append(rank.since_mix)
        if (
            rank.since_mix > self.scenario.max_staleness + 1
            and not alone
            and (rank.waited_since_mix_s < self.scenario.patience_s or self.now > self.all_well_from_s)
        ):
            self.violations.append(
                f"staleness: at {self.now} s rank {rank.number} made {rank.since_mix} updates on its own"
            )
        rank.updates_after_budget += self.global_steps >= self.scenario.budget_steps
        self.global_steps += self.scenario.steps_per_update
        if self.overshoot_steps >= 0 and not self.unseen_steps:
            self.budget_met_s = self.now
            self.unseen_steps = [self.scenario.budget_steps - r.state.budget.global_steps for r in self.ranks]
        self._notice_budget(rank)

    def _notice_budget(self, rank: Rank) -> None:
        if rank.state.budget.stop is not Stop.NONE:
            self.budget_known_s = min(self.budget_known_s, self.now)


def _weight(on_its_way: OnItsWay) -> float:
    """Return the push-sum weight that a packet carries."""
    sent: Sent = on_its_way.data
    return sent.message.weight if sent.model is not None else 0.0
