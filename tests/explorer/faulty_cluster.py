"""A virtual cluster to which faults happen, and which counts and checks what the ranks do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pala.comm.base import Received
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.driver import GossipDriver, Opened, make_protocol
from pala.exchange.gossip.messages import CREDITS, Kind
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.gossip.state import GossipState, Rules
from pala.exchange.wire import NOT_FINITE, Format, Message
from pala.lab.simulate.scenario import Range, Scenario
from pala.lab.simulate.vector_models import Sent, VectorModels, VectorPacket
from pala.lab.simulate.virtual_cluster import Learn, Rank, VirtualCluster
from pala.lab.simulate.virtual_network import OnItsWay, VirtualTransport


@dataclass(frozen=True)
class Schedule(Scenario):
    """A scenario with faults. Without patience, which would hide a deadlock, unless it is given."""

    pause_probability: float = 0.0
    """Probability that an update also takes `pause_s`."""
    pause_s: Range = (5.0, 50.0)
    send_buffers: int = 2
    """Snapshots that a rank can have on their way, if the peers that they went to answer."""
    spares: int = 0
    """Number of ranks, the last ones, that sleep until one that trains is dead."""
    wake_up_s: Range = (1.0, 5.0)
    """Time from when a spare hears that it is needed until it can train."""
    leaves: Mapping[int, float] = field(default_factory=dict)
    """Rank -> time at which it is told to leave, which it does after its next update, if others train."""
    deaths: Mapping[int, float] = field(default_factory=dict)
    """Rank -> time of its death."""
    death_notice_s: Range = (0.0, 2.0)
    """Time until a peer hears of a death."""
    death_loss: float = 0.5
    """Probability that a message on its way from a dying rank is lost; one to it always is."""
    stops: Mapping[int, Range] = field(default_factory=dict)
    """Rank -> times at which it is stopped and continues (SIGSTOP, SIGCONT)."""
    cut_s: Range = (0.0, 0.0)
    """Times between which the links are cut between the ranks below `cut_at` and the others; what was sent comes after
    that."""
    cut_at: int = 0
    poison: Mapping[int, Range] = field(default_factory=dict)
    """Ranks whose every update between these two times makes their model NaN."""
    whole_every: int = 1
    """One of this number of sends carries a whole model. A part heals nobody; in all else it counts here as a model."""


class FaultyModels(VectorModels):
    """A rank's model, which may be NaN or a part, and what is known from outside of how it is mixed."""

    def __init__(self, model: np.ndarray, cluster: FaultyCluster, state: GossipState) -> None:
        super().__init__(model)
        self._cluster, self._state = cluster, state
        self._stopped = cluster.schedule.stops.get(state.rank, (0.0, 0.0))
        self.oldest_mixed_s = 0.0  # greatest age of a model when it was mixed, but for time in which its own aged, too
        self.faults: list[str] = []  # what must not be done with models
        self.heals = 0
        self.owed: dict[VectorPacket, np.ndarray] = {}  # offers that were answered -> the moves due to them
        self.unmatched = np.zeros_like(model)  # by which this rank alone has moved, or its peers alone have
        self._filled_after: dict[VectorPacket, int] = {}  # heals before a snapshot was filled
        self._came: list[OnItsWay] = []  # what is in the inbox

    def fill(self, snapshot: VectorPacket, message: Message, whole: bool) -> int:
        self._filled_after[snapshot] = self.heals
        self.owed.pop(snapshot, None)
        return super().fill(snapshot, message if whole else message._replace(format=Format.TOP_K), whole)

    def open(self, received: Received, offer: VectorPacket | None = None) -> Opened:
        opened, model = super().open(received, offer), received.data.model
        return opened if model is None or np.isfinite(model).all() else Opened(opened.message, NOT_FINITE)

    def add(self, weight: float) -> None:
        super().add(weight)
        self._came.append(self._cluster.delivering)

    def clear(self) -> None:
        super().clear()
        self._came = []

    def keep(self, offer: VectorPacket) -> None:
        super().keep(offer)
        if offer.data is None or self._cluster.delivering.data.message.round != offer.data.message.round:
            self.faults.append("took the answer to another offer")

    def move(self, offer: VectorPacket, fraction: float) -> None:
        if self._is_void(offer):
            self.faults.append("moved by what its model was before it was healed")
        self.owed.pop(offer, None)
        super().move(offer, fraction)

    def heal(self) -> None:
        if not any(came.data.message.format.is_whole for came in self._came):
            self.faults.append("was healed by a part of a model")
        self.heals += 1
        if self._cluster.now >= self._stopped[0]:
            self._stopped = 0.0, 0.0  # its own model is no excuse
        old = self.model
        super().heal()
        self.unmatched += self.model - old
        for offer in list(self.owed):
            self.take_for_lost(offer)

    def owe(self, offer: VectorPacket, move: np.ndarray) -> None:
        """Note the move that is due since a peer has answered this rank's offer, and moved."""
        self.owed[offer] = move
        if self._is_void(offer):
            self.take_for_lost(offer)

    def take_for_lost(self, offer: VectorPacket) -> None:
        """Give up the move due to this offer, if there is one."""
        if offer in self.owed:
            self.unmatched -= self.owed.pop(offer)

    def _is_void(self, offer: VectorPacket) -> bool:
        """Return whether the offer is of a model that has been healed since."""
        return self._filled_after[offer] < self.heals

    def _replace(self, model: np.ndarray) -> None:
        age_s = self._cluster.now - min((came.time_s for came in self._came), default=math.inf)
        begin_s, end_s = self._stopped
        if self._cluster.now >= end_s > begin_s:  # the first since it continues
            age_s -= (end_s - begin_s) if self._keeps_its_own() else 0.0
            self._stopped = 0.0, 0.0
        self.oldest_mixed_s = max(self.oldest_mixed_s, age_s)
        super()._replace(model)

    def _keeps_its_own(self) -> bool:
        """Return whether it waited for a fresh model in vain, or all who trained with it are dead."""
        state, trained = self._state, self._cluster.trained
        alone = all(peer == state.rank or peer not in trained for peer in state.living)
        return alone or state.counts["waits_given_up"] > 0


class FaultyRank(Rank):
    """A rank, and what is known of it from outside."""

    def __init__(self, driver: GossipDriver, models: FaultyModels, asleep: bool) -> None:
        super().__init__(driver, models)
        self.models = models
        self.asleep, self.waking = asleep, False  # of a spare: it does not train yet; it is needed
        self.ended = False
        self.since_mix = 0  # updates since the last mix, counted here and not by the protocol
        self.wait_began_s = 0.0
        self.longest_wait_s = self.waited_since_mix_s = 0.0
        self.updates_after_budget = 0


class FaultyCluster(VirtualCluster):
    """Ranks to which faults happen; the attributes say what they did, and what was wrong in it."""

    ranks: Sequence[FaultyRank]
    delivering: OnItsWay  # what its receiver is being told of

    def __init__(
        self,
        schedule: Schedule,
        models: np.ndarray | None = None,
        *,
        learn: Learn = lambda rank, model: None,
        protocol: Callable[[Rules], GossipProtocol] = make_protocol,
        driver: type[GossipDriver] = GossipDriver,
    ) -> None:
        """`models`: by default each rank's number; `protocol` and `driver` let tests plant a bug."""
        self.schedule, self._protocol, self._driver = schedule, protocol, driver
        self.trained = range(schedule.size - schedule.spares)  # ranks that train from the beginning
        self.dead: set[int] = set()
        self.lost_weight = 0.0  # push-sum weight that the dead took with them
        self.violations: list[str] = []  # of the process lock, the staleness bound, or of what may heal
        self.all_well_from_s = math.inf  # from then on no patience should have to end
        self.budget_met_s = self.budget_known_s = math.inf  # in truth; by the first rank
        self.models_lost = False  # a rank was killed that had the last model of use
        self.last_gone_s = 0.0  # when a rank last died, or went: a spare that is told to leave first takes its place
        self.unseen_steps: list[int] = []  # when the budget was met, steps that each rank did not know of
        self._not_taken_in: dict[tuple[int, int], float] = {}  # sender and receiver of a model -> when it was sent
        models = np.arange(schedule.size, dtype=np.float64)[:, None] if models is None else models
        super().__init__(schedule, models, learn)
        for number, time_s in schedule.deaths.items():
            self._at(time_s, self._kill, number)

    def _make_rank(self, number: int, model: np.ndarray) -> FaultyRank:
        s = self.schedule
        rules = Rules(s.topology, s.max_staleness, s.seed, s.whole_every, s.again_s, s.patience_s, s.mixing)
        protocol = self._protocol(rules)
        budget = StepBudget(number, s.size, s.budget_steps, spares=s.spares)
        state = protocol.new_state(budget, weight=float(number in self.trained))
        models = FaultyModels(model, self, state)
        transport = VirtualTransport(self, number)
        driver = self._driver(protocol, state, transport, models, s.send_buffers, report=lambda sentence: None)
        return FaultyRank(driver, models, asleep=number not in self.trained)

    @property
    def living(self) -> list[FaultyRank]:
        """Ranks that did not die."""
        return [rank for rank in self.ranks if rank.number not in self.dead]

    @property
    def stuck(self) -> list[int]:
        """Ranks that neither ended nor died before `run` ended: a deadlock."""
        return [rank.number for rank in self.living if not rank.ended]

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

    # ---- a rank ----------------------------------------------------------------------------------------------------

    def _start_update(self, rank: Rank) -> None:
        if self.ranks[rank.number].asleep:
            return
        s = self.schedule
        factor = s.slowness[rank.number] if s.slowness else 1.0
        pause_s = self._draw(s.pause_s) if self._random.random() < s.pause_probability else 0.0
        took_s = self._draw(s.update_s) * factor + pause_s
        self._at(self.now + took_s, self._finish_update, rank)

    def _finish_update(self, rank: Rank) -> None:
        if rank.number in self.dead or self._is_stopped(rank.number, self._finish_update, rank):
            return
        one, model = self.ranks[rank.number], rank.model
        healthy = bool(np.isfinite(model).all())  # before this update, so the update was applied
        if healthy:
            self._learn(rank.number, model)
        begin_s, end_s = self.schedule.poison.get(rank.number, (0.0, 0.0))
        if begin_s <= self.now < end_s:
            model[:] = np.nan
        one.waiting, one.wait_began_s = True, self.now
        one.driver.finish_update(self.schedule.steps_per_update, healthy)
        self._count_update(one)
        self._advance(rank)

    def _advance(self, rank: Rank) -> None:
        super()._advance(rank)
        one = self.ranks[rank.number]
        if not one.waiting:
            one.ended = one.state.budget.stop is not Stop.NONE
            self._count_wait(one)

    def _continue(self, rank: Rank) -> None:
        if self._leaves(rank):
            longest_s = self.schedule.model_s[1] + self.schedule.control_s[1]
            self._at(self.now + longest_s, self._let_go, self.ranks[rank.number])  # when all that it has sent has come
        elif not rank.state.has_model:  # alone: a real rank ends with an error
            self._die(rank.number)
        else:
            self._start_update(rank)

    def _wake(self, rank: Rank) -> None:
        if rank.number in self.dead or (rank.waiting and self._is_stopped(rank.number, self._wake, rank)):
            rank.wake_set = False
        else:
            super()._wake(rank)

    def _timer_rang(self, rank: Rank) -> None:
        if rank.number not in self.dead and not self._is_stopped(rank.number, self._timer_rang, rank):
            super()._timer_rang(rank)

    def _is_stopped(self, rank: int, handler: Callable[..., None], *arguments: Any) -> bool:
        """Put a call off until the rank continues, if the rank is stopped now. A dead rank holds nothing up."""
        if rank in self.dead or not self.schedule.stops:
            return False
        begin_s, end_s = self.schedule.stops.get(rank, (0.0, 0.0))
        if stopped := begin_s <= self.now < end_s:
            self._at(end_s, handler, *arguments)
        return stopped

    # ---- who joins and who leaves ----------------------------------------------------------------------------------

    def _look_in_sleep(self, rank: FaultyRank) -> None:
        """Let a spare that sleeps look at what it has heard."""
        if rank.state.budget.stop is not Stop.NONE:
            rank.ended = True
        elif rank.state.budget.is_needed and not rank.waking:
            rank.waking = True
            self._after(self.schedule.wake_up_s, self._join, rank)

    def _join(self, rank: FaultyRank) -> None:
        if rank.number in self.dead or rank.ended:
            return
        rank.asleep, rank.waiting, rank.wait_began_s = False, True, self.now
        rank.driver.join()
        self._advance(rank)

    def _leaves(self, rank: Rank) -> bool:
        """Return whether this rank was told to leave, and another that trains has a model of use; if not, ask again."""
        if self.now < self.schedule.leaves.get(rank.number, math.inf) or len(rank.state.living) == 1:
            return False
        if not rank.state.may_leave:
            rank.driver.wish_to_leave()
        return rank.state.may_leave

    def _let_go(self, rank: FaultyRank) -> None:
        """Let a rank leave if another still has a model of use, as `GossipExchange.leave` does."""
        if rank.number in self.dead:
            return
        if rank.state.may_leave or rank.state.budget.stop is not Stop.NONE:
            rank.driver.leave()
            rank.ended = True
            self._at(self.now + self.schedule.control_s[1], self._go, rank)  # when all have the news
        else:
            self._start_update(rank)

    def _go(self, rank: Rank, waited_s: float = 0.0) -> None:
        again_s, budget = self.schedule.again_s, rank.state.budget
        if rank.number in self.dead:
            return
        if not self.dead.isdisjoint(budget.present):  # its news cannot arrive there, so it hears of the death first
            self._at(self.now + self.schedule.control_s[1], self._go, rank, waited_s)
        elif rank.state.may_leave:
            self._die(rank.number)
        elif budget.living and budget.stop is Stop.NONE and waited_s < min(self.schedule.patience_s, 10 * again_s):
            rank.driver.wish_to_leave()
            self._at(self.now + again_s, self._go, rank, waited_s + again_s)
        else:  # all that it counted on are gone as well
            rank.driver.end(Stop.ALL_LEAVE)

    # ---- the network -----------------------------------------------------------------------------------------------

    def post(self, on_its_way: OnItsWay) -> None:
        pair, kind = (on_its_way.sender, on_its_way.receiver), on_its_way.data.message.kind
        if kind in (Kind.MODEL, Kind.OFFER):
            if pair in self._not_taken_in:
                self._blame(pair[0], f"broke the process lock: rank {pair[1]} holds its last model")
            if kind is Kind.OFFER and self._has_open_offer(pair[0]):
                self._blame(pair[0], "made a second offer")
            self._not_taken_in[pair] = self.now
        elif kind in (Kind.ANSWER, *CREDITS, Kind.LEAVE, Kind.JOIN):
            self._not_taken_in.pop(pair[::-1], None)
        if kind is Kind.ANSWER:
            self._owe(on_its_way)
        super().post(on_its_way)

    def _deliver(self, ticket: int) -> None:
        on_its_way = self.on_their_way.get(ticket)
        if on_its_way is None:  # lost with its sender
            return
        sender, receiver = on_its_way.sender, on_its_way.receiver
        (begin_s, end_s), cut_at = self.schedule.cut_s, self.schedule.cut_at
        if begin_s <= self.now < end_s and (sender < cut_at) != (receiver < cut_at):
            if ticket % 2:  # not even its announcement has come: nobody can tell how old it will be
                self.on_their_way[ticket] = on_its_way._replace(time_s=end_s)
            self._at(end_s + self._draw(self.schedule.control_s), self._deliver, ticket)
            return
        if self._is_stopped(receiver, self._deliver, ticket):
            return
        if on_its_way.bulk and ticket % 2 and self._is_stopped(sender, self._deliver, ticket):
            return  # some packets need their sender to the end, some do not
        super()._deliver(ticket)

    def _receive(self, on_its_way: OnItsWay, took_s: float) -> None:
        if on_its_way.receiver in self.dead:
            self.lost_weight += _weight(on_its_way)
            return
        self.delivering = on_its_way
        went_on_s = self.schedule.stops.get(on_its_way.receiver, (0.0, 0.0))[1]
        if on_its_way.time_s < went_on_s <= self.now:  # it cannot tell what came while it was stopped
            took_s = self.now - went_on_s
        super()._receive(on_its_way, took_s)

    def notice(self, rank: int) -> None:
        self._notice_budget(self.ranks[rank])
        if self.ranks[rank].asleep:
            self._look_in_sleep(self.ranks[rank])
        super().notice(rank)

    # ---- deaths ----------------------------------------------------------------------------------------------------

    def _kill(self, rank: int) -> None:
        self._die(rank)
        useful = [r for r in self.living if not r.asleep and r.state.has_model and np.isfinite(r.model).all()]
        self.models_lost |= not useful

    def _die(self, rank: int) -> None:
        """Let a rank die. Some of what it has sent is lost; the others hear of it after a while."""
        if rank in self.dead:
            return
        self.dead.add(rank)
        self.last_gone_s = self.now
        self.lost_weight += self.ranks[rank].state.weight + self.ranks[rank].models.inbox_weight
        for ticket, on_its_way in list(self.on_their_way.items()):
            if on_its_way.sender == rank and self._random.random() < self.schedule.death_loss:
                del self.on_their_way[ticket]
                self.lost_weight += _weight(on_its_way)
        for peer in range(self.schedule.size):
            if peer not in self.dead:
                self._after(self.schedule.death_notice_s, self._hear_of_death, peer, rank)

    def _hear_of_death(self, rank: int, dead: int) -> None:
        """Let `rank` expect nothing of the dead from then on, even if it is on its way."""
        if rank in self.dead:
            return
        driver, models = self.ranks[rank].driver, self.ranks[rank].models
        offer = driver.offer_to(dead)
        if offer is not None and offer.change is None:
            models.take_for_lost(offer)
        driver.on_death(dead)
        self.notice(rank)

    # ---- counts and checks -----------------------------------------------------------------------------------------

    def _count_update(self, rank: FaultyRank) -> None:
        alone = len(rank.state.living) == 1
        rank.since_mix += not alone
        if (
            rank.since_mix > self.schedule.max_staleness + 1
            and not alone
            and (rank.waited_since_mix_s < self.schedule.patience_s or self.now > self.all_well_from_s)
        ):
            self._blame(rank.number, f"made {rank.since_mix} updates on its own, beyond its staleness")
        rank.updates_after_budget += self.global_steps >= self.schedule.budget_steps
        self.global_steps += self.schedule.steps_per_update
        if self.global_steps >= self.schedule.budget_steps and not self.unseen_steps:
            self.budget_met_s = self.now
            self.unseen_steps = [self.schedule.budget_steps - r.state.budget.global_steps for r in self.ranks]
        self._notice_budget(rank)

    def _count_wait(self, rank: FaultyRank) -> None:
        """Count the wait that has ended, and note what was wrong in it."""
        waited_s = self.now - rank.wait_began_s
        rank.longest_wait_s = max(rank.longest_wait_s, waited_s)
        rank.waited_since_mix_s = max(rank.waited_since_mix_s, waited_s)
        if rank.has_mixed or len(rank.state.living) == 1:
            rank.since_mix, rank.waited_since_mix_s = 0, 0.0
        while rank.models.faults:
            self._blame(rank.number, rank.models.faults.pop(0))

    def _blame(self, rank: int, fault: str) -> None:
        self.violations.append(f"at {self.now} s rank {rank} {fault}")

    def _notice_budget(self, rank: Rank) -> None:
        if rank.state.budget.stop is not Stop.NONE:
            self.budget_known_s = min(self.budget_known_s, self.now)

    def _has_open_offer(self, rank: int) -> bool:
        """Return whether the rank has an open offer to a peer that lives, as far as it knows, and is not silent."""
        state = self.ranks[rank].state
        return any(
            self.now - sent_s < 0.999 * state.patience_s
            for (sender, receiver), sent_s in self._not_taken_in.items()
            if sender == rank and receiver in state.living
        )

    def _owe(self, on_its_way: OnItsWay) -> None:
        """Note the move that the receiver owes to this answer, if its offer is still open."""
        message, model = on_its_way.data
        receiver = self.ranks[on_its_way.receiver]
        offer = receiver.driver.offer_to(on_its_way.sender)
        if offer is not None:
            receiver.models.owe(offer, message.weight * (model - offer.data.model))


def _weight(on_its_way: OnItsWay) -> float:
    """Return the push-sum weight that a packet carries."""
    sent: Sent = on_its_way.data
    return sent.message.weight if sent.model is not None else 0.0
