"""One rank of the explorer: training's own driver and protocol, between two states that can be compared.

`LocalRank` makes live objects of a frozen state, lets one thing happen to them, and freezes them again. What is left
out of a frozen state, or made alike in it, must not matter to anything that can happen later; each place says why.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple, cast

from pala.comm.base import Packet, Received, Receiver, Transport
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.driver import _Snapshot
from pala.exchange.gossip.messages import Kind
from pala.exchange.gossip.mixing import RULES
from pala.exchange.gossip.protocol import GossipProtocol, Rules
from pala.exchange.gossip.protocols import PROTOCOLS
from pala.lab.simulate.explore_models import SymbolicModels, SymbolicPacket
from pala.lab.simulate.explore_states import (
    AGAIN_S,
    ANY,
    CURRENT,
    FIRST_ROUND,
    NO_PATIENCE_S,
    PATIENCE_S,
    STALE,
    Case,
    Frozen,
    Letter,
    Mode,
    Snapshot,
    freeze_fields,
    thaw_fields,
)

_OLD_S = 2 * PATIENCE_S
_MANY_STEPS = 1 << 62
_NOT_OF_PROTOCOL = {"budget", "mixing", "rules", "rank", "size", "lock", "counts", "_has_put_off"}
_NOT_OF_BUDGET = {"rank", "size", "budget_steps"}
"""Attributes that are not frozen: they never change, are frozen by themselves, or only count."""


class Outcome(NamedTuple):
    """What one thing that happened to a rank led to."""

    rank: Frozen
    letters: tuple[tuple[int, Letter], ...]  # to whom
    closed: tuple[int, ...]  # peers to which the offer that was open is open no more
    faults: tuple[str, ...]
    failed: bool  # by an exception


class _Outbox(Transport):
    """Keeps what is sent, and says what time it is."""

    def __init__(self) -> None:
        self.now, self.sent = 0.0, list[tuple[int, Letter]]()

    def start(self, receiver: Receiver) -> None:
        pass

    def now_s(self) -> float:
        return self.now

    def send(self, peer: int, packet: Packet, bulk: bool = False) -> None:
        assert isinstance(packet, SymbolicPacket) and packet.data is not None
        packet.pending += 1
        packet.to.append((peer, packet.data.kind))
        self.sent.append((peer, packet.data))


class LocalRank:
    """The live objects of one rank, and what can happen to them."""

    def __init__(self, case: Case, number: int, round_: int = 0, weight: Fraction = Fraction(1)) -> None:
        self._case, self.number, self._rounds = case, number, case.first_rounds or [-1]
        patience_s = PATIENCE_S if case.has_clock else NO_PATIENCE_S
        rules = Rules(
            case.topology, case.max_staleness, seed=0, whole_every=case.whole_every, again_s=AGAIN_S,
            patience_s=patience_s, exchanges_per_update=case.exchanges_per_update,
        )  # fmt: skip
        budget = StepBudget(number, case.ranks, case.updates or _MANY_STEPS)
        protocol = (case.protocol or PROTOCOLS[case.mixing])(budget, RULES[case.mixing](weight), rules, round_)  # type: ignore[arg-type]
        self._transport, self.models = _Outbox(), SymbolicModels()
        self.driver = case.driver(protocol, self._transport, self.models, case.snapshots, report=lambda sentence: None)
        self.protocol = protocol
        self.models.offered = lambda: list(self._open_packets().values())
        self._mode, self._made, self._since_mix, self._excused = Mode.UPDATES, 0, 0, False
        self.driver.start()

    # ---- what can happen -----------------------------------------------------------------------------------------

    def play(self, frozen: Frozen, event: tuple[Any, ...]) -> list[Outcome]:
        """All that can come of an event (a method's name, then its arguments) in a state."""
        outcomes: list[Outcome] = []
        for round_ in self._rounds:
            self.load(frozen)
            if round_ >= 0:
                self.protocol.round = round_
            models, before = self.models, self._open_packets()
            kept = [peer for peer, packet in before.items() if packet.answer is not None]
            failed = True
            try:
                getattr(self, event[0])(*event[1:])
                failed = False
            except Exception as error:
                models.faults.append(f"{type(error).__name__}: {error}")
            if models.mixes:
                self._since_mix, self._excused = 0, False
            closed = [peer for peer in before if not self._is_still_open(peer)]
            forgotten = [peer for peer in kept if peer in closed and before[peer] not in models.moved]
            if forgotten and not models.healed:
                models.faults.append(f"sum of all models: forgot the answer of rank {forgotten[0]}")
            if len(self.protocol.living) == 1:  # no model is fresher than its own, or than one of the dead
                models.faults = [fault for fault in models.faults if not fault.startswith("stale")]
            began_a_round = self.protocol.round != round_
            outcome = self._outcome(tuple(sorted(closed)))._replace(failed=failed)
            if outcome not in outcomes:
                outcomes.append(outcome)
            if not began_a_round:
                break
        return outcomes

    def finish(self, poison: bool) -> None:
        """An update. `poison`: it makes the model NaN, which the rank sees after its next one."""
        healthy = self.models.finite
        self.models.finite &= not poison
        self._since_mix += len(self.protocol.living) > 1
        self._made += self._case.updates > 0
        self.driver.finish_update(int(self._case.updates > 0), healthy)
        if self._case.exchanges_per_update > 1 and not self.models.settled:
            self.models.faults.append("sum of all models: moves that were owed are not made")
        alone = len(self.protocol.living) == 1
        if self._since_mix > self._case.max_staleness + 1 and not (self._excused or alone):
            self.models.faults.append(f"staleness: {self._since_mix} updates on its own")
        self.advance()

    def step(self) -> None:
        """Between two steps of a rollout."""
        self.models.in_rollout = True
        self.driver.between_steps()
        self.models.in_rollout = False

    def advance(self) -> None:
        if self.driver.advance():
            self._mode = Mode.UPDATES if self.protocol.budget.stop is Stop.NONE else Mode.ENDED
        else:
            self._mode = Mode.WAITS

    def deliver(self, sender: int, letter: Letter, how: str) -> None:
        data = None if how == "garbled" else (sender, letter, self._case.ranks)
        self.driver.on_message(Received(sender, data, letter.bulk, 0.0, how == "late"))

    def notice(self, dead: int) -> None:
        self.driver.on_death(dead)

    def stop(self, reason: Stop) -> None:
        self.driver.end(reason)

    def leave(self) -> None:
        """Told to, after an update; nothing of its models is on its way."""
        self.driver.leave()
        self._mode = Mode.LEFT

    def timer(self) -> None:
        """A waiting rank has waited long enough to send again."""
        self._transport.now += 2 * AGAIN_S
        self.advance()

    def patience(self) -> None:
        """So long goes by, in which nothing comes and the rank is there."""
        self._excused |= self._mode is Mode.WAITS
        if self.gives_up:
            self._mark_old(False)
        for _ in range(2):
            self._transport.now += 0.6 * PATIENCE_S
            self.driver.on_tick()

    def absence(self) -> None:
        """The rank is stopped for so long, and goes on: no clock has been looked at yet."""
        self._transport.now += _OLD_S
        self._mark_old(True)

    @property
    def gives_up(self) -> bool:
        """Whether the end of its patience lets it go on with the model that it has, and take whatever comes."""
        return self._mode is Mode.WAITS and self.protocol.healthy

    @property
    def _is_done(self) -> bool:
        return self._mode in (Mode.ENDED, Mode.LEFT)

    def _mark_old(self, old: bool) -> None:
        models = self.models
        models.old = old
        models.inbox = {sender: letter._replace(old=old) for sender, letter in models.inbox.items()}

    def tick(self) -> None:
        self.driver.on_tick()

    def close(self) -> None:
        """All ranks have ended, and nothing is on its way."""
        self.driver.finish()

    def _open_packets(self) -> dict[int, SymbolicPacket]:
        """The packets of the offers that are open or answered."""
        return {peer: cast(SymbolicPacket, offer.packet) for peer, offer in self.driver._offers.items()}

    def _is_still_open(self, peer: int) -> bool:
        """The offer that was open when the step began."""
        offer = self.driver._offers.get(peer)
        return offer is not None and offer.packet.data.number == CURRENT

    def _outcome(self, closed: tuple[int, ...]) -> Outcome:
        offers, faults, sent = self._open_packets(), self.models.faults, self._transport.sent
        open_ = [peer for peer in offers if peer not in self.protocol.silent and offers[peer].answer is None]
        if len(open_) > 1 and any(letter.kind is Kind.OFFER for _, letter in sent):
            faults.append(f"second offer: to ranks {open_}")
        damaged = self._case.most_rare if "garbled" in self._case.faults else 0
        if self.driver.num_snapshots_held > max(self._case.snapshots, 2 * self._case.ranks) + damaged:
            faults.append(f"memory for {self.driver.num_snapshots_held} snapshots")
        if set(self.models.inbox) != set(self.protocol._inbox):
            faults.append(f"inbox: models of {sorted(self.models.inbox)}, counted {sorted(self.protocol._inbox)}")
        open_or_answered = {*getattr(self.protocol, "_offers", ()), *getattr(self.protocol, "_answers", ())}
        if set(offers) != open_or_answered:
            faults.append(f"offers: kept those to {sorted(offers)}, open or answered {sorted(open_or_answered)}")
        if any(peer == self.number for peer, _ in sent):
            faults.append("sent a message to itself")
        letters = tuple((peer, self._numbered(peer, letter)) for peer, letter in sent if peer != self.number)
        return Outcome(self.save(), letters, closed, tuple(faults), False)

    def _numbered(self, peer: int, letter: Letter) -> Letter:
        """The letter with what matters of its number: whether its offer is the open one. The numbers of one-way models
        and their credits are never read."""
        offers = getattr(self.protocol, "_offers", None)
        if offers is None:
            return letter._replace(number=ANY)
        if letter.kind is Kind.OFFER:
            is_open = peer in offers and offers[peer].number == letter.number
            return letter._replace(number=CURRENT if is_open else STALE)
        return letter if letter.kind in (Kind.ANSWER, Kind.CREDIT, Kind.ASK_WHOLE) else letter._replace(number=ANY)

    # ---- frozen and live -----------------------------------------------------------------------------------------

    def save(self) -> Frozen:
        """What it is now."""
        p = self.protocol
        self._forget()
        fields, budget = freeze_fields(p, _NOT_OF_PROTOCOL), freeze_fields(p.budget, _NOT_OF_BUDGET)
        lock = sorted(p.lock._held_since_s.items(), key=lambda held: (held[1], held[0]))
        peer_of = {id(snapshot): peer for peer, snapshot in self.driver._offers.items()}
        snapshots = [self._freeze_snapshot(s, peer_of.get(id(s), -1)) for s in self.driver._snapshots]
        snapshots = sorted(s for s in snapshots if s.to or s.offered_to >= 0)  # those that are free are all alike
        num_snapshots = len(self.driver._snapshots)
        if self._case.mixing == "paired" or self._is_done:  # the same: how many are free does not matter
            num_snapshots = max(len(snapshots), self._case.snapshots)
        models = self.models
        inbox = sorted(
            (peer, x._replace(stop=Stop.NONE, local_steps=(), number=ANY)) for peer, x in models.inbox.items()
        )
        return Frozen(
            self.number, self._mode, self._made, self._since_mix, self._excused, fields, budget, tuple(lock),
            p.mixing.weight, tuple(snapshots), num_snapshots, models.finite, models.old, tuple(inbox),
        )  # fmt: skip

    def load(self, frozen: Frozen) -> None:
        """Be that."""
        p, driver, models = self.protocol, self.driver, self.models
        thaw_fields(p, frozen.protocol, _NOT_OF_PROTOCOL)
        thaw_fields(p.budget, frozen.budget, _NOT_OF_BUDGET)
        p.lock._held_since_s = dict(frozen.lock)
        p.mixing.weight = frozen.weight
        p.counts.clear()
        driver.counts.clear()
        driver.distances.clear()
        driver._complained_of.clear()  # only what is said of it
        driver._num_asked = 0  # only whether a distance is measured
        driver._replies.clear()  # they leave at once
        driver._offers.clear()
        driver._snapshots.clear()
        for snapshot in frozen.snapshots:
            packet = SymbolicPacket(Letter(Kind.OFFER, CURRENT))
            packet.to, packet.pending = list(snapshot.to), len(snapshot.to)
            packet.answer, packet.before_heal = snapshot.answer, snapshot.before_heal
            peers = tuple(peer for peer, _ in snapshot.to)
            live = _Snapshot(packet, -_OLD_S if snapshot.is_old else 0.0, peers, is_offer=snapshot.offered_to >= 0)
            if snapshot.offered_to >= 0:
                driver._offers[snapshot.offered_to] = live
            driver._snapshots.append(live)
        while len(driver._snapshots) < frozen.num_snapshots:
            driver._snapshots.append(_Snapshot(models.new_snapshot()))
        models.finite, models.old, models.inbox = frozen.finite, frozen.old, dict(frozen.inbox)
        self._mode, self._made, self._since_mix = frozen.mode, frozen.made, frozen.since_mix
        self._excused, self._transport.now, self._transport.sent = frozen.excused, 0.0, []
        models.begin_step()

    def _freeze_snapshot(self, snapshot: Any, offered_to: int) -> Snapshot:
        packet: SymbolicPacket = snapshot.packet
        to = () if self._is_done else tuple(sorted(packet.to))  # it fills no more
        # The paired exchange takes more memory when there is none, however old what is on its way is.
        is_old = self._case.mixing != "paired" and self._age(snapshot.sent_s) > PATIENCE_S
        return Snapshot(to, offered_to, is_old, packet.answer, packet.before_heal)

    def _age(self, time_s: float) -> float:
        return self._transport.now - time_s

    def _forget(self) -> None:
        """Make alike what does not matter."""
        p, case = self.protocol, self._case
        self._forget_times(p)
        # Rounds matter by their peers, and as numbers of offers (see CURRENT).
        p.round = FIRST_ROUND + (p.round - FIRST_ROUND) % case.period
        for offer in getattr(p, "_offers", {}).values():
            offer.number = CURRENT
        p._num_sends %= case.whole_every
        p.staleness = min(p.staleness, case.max_staleness + 1)  # only compared with the bound
        self._since_mix = 0 if self._excused else min(self._since_mix, case.max_staleness + 2)  # the same
        between_steps = case.exchanges_per_update > 1
        if self._mode is Mode.UPDATES and not p._debts_stay and not between_steps:
            p._owed.clear()  # what is owed now is dropped at the end of the update
        if hasattr(p, "_num_offers"):  # only compared with the most, in the middle of a rollout
            goes_on = between_steps and not self._is_done and p.budget.stop is Stop.NONE
            p._num_offers = min(p._num_offers, case.exchanges_per_update) if goes_on else 0
        # Added to what is in the inbox, which must be something, and compared with the models of a round ...
        a_round, most = case.ranks - 1 if case.topology == "complete" else 1, case.ranks
        cap = a_round - 1
        if case.max_staleness == 0:  # ... or divided by them: a number of rounds, of which the last ones leave a debt
            cap = a_round * (most + case.period) - 1
            p._rounds_due = _least(p._rounds_due, most, case.period)
        p._num_rejected = _least(p._num_rejected, cap, a_round * case.period if case.max_staleness == 0 else 1)
        if p.budget.stop is not Stop.NONE:  # it sends no models of its own, and never waits
            p._owed.clear()
            p._wants_whole.clear()
            p._gave_up = self._excused = False
            p.staleness = self._since_mix = 0
            if not case.has_clock:  # by whose age a peer is silent
                p.lock._held_since_s.clear()
        if self._is_done:  # nor does it mix, but at the close
            p.lock._held_since_s.clear()
            p._num_rejected, p._rounds_due, p.round = 0, 1, FIRST_ROUND

    def _forget_times(self, p: GossipProtocol) -> None:
        """Times are only ever compared with the patience, or with the time until a rank sends again, each of which goes
        by in one event: what is older stays older, and what is younger is as if it had just been."""
        p.lock._held_since_s = {
            peer: -_OLD_S if self._age(since_s) > PATIENCE_S else 0.0
            for peer, since_s in p.lock._held_since_s.items()
        }  # fmt: skip
        if not p._between_updates:  # the next look at the clock sets them so
            p._waits_since_s = p._sent_again_s = math.inf
        if p._waits_since_s != math.inf:
            p._waits_since_s = -_OLD_S if self._age(p._waits_since_s) > PATIENCE_S else 0.0
            p._sent_again_s = -2 * AGAIN_S if self._age(p._sent_again_s) > AGAIN_S else 0.0
        p._now_s = -_OLD_S if self._age(p._now_s) > PATIENCE_S else 0.0
        # Updates and transfers are taken to be short, so after the first update patience is as set. Longer ones would
        # make it longer; here it may end at any time, or never.
        p._resumed_s = p._transfer_s = 0.0
        p._update_s = math.inf if p._update_s == math.inf else 0.0


def _least(count: int, cap: int, period: int) -> int:
    """The least number that is `count` up to the cap, and beyond it the same as `count` modulo the period."""
    return count if count <= cap else cap + (count - cap) % period
