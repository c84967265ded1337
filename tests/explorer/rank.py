"""One rank of the explorer: training's own driver and protocol, between two states that can be compared.

`play` makes live objects of a frozen state, lets one thing happen to them, and freezes them again. What is left out of
a frozen state, or made alike in it, must not matter to anything that can happen later: of the protocol's state
`canonical` says that, of the rest `LocalRank.freeze`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple, cast

from explorer.models import SymbolicModels, SymbolicPacket
from explorer.states import AGAIN_S, CURRENT, PATIENCE_S, STALE, Case, Frozen, Letter, Mode, Snapshot, freeze
from pala.comm.base import Packet, Received, Receiver, Transport
from pala.exchange.budget import Stop
from pala.exchange.gossip import driver as gossip
from pala.exchange.gossip.canonical import canonical
from pala.exchange.gossip.messages import CREDITS, Kind
from pala.exchange.gossip.paired import ANY

_OLD_S = 2 * PATIENCE_S


class Outcome(NamedTuple):
    """What one thing that happened to a rank led to."""

    rank: Frozen
    letters: tuple[tuple[int, Letter], ...]  # to whom
    closed: tuple[int, ...]  # peers to which the offer that was open is open no more
    faults: tuple[str, ...]
    failed: bool  # by an exception
    present: tuple[int, ...]  # ranks that it takes to be alive


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


def initial(case: Case, number: int, round_: int, weight: Fraction) -> Frozen:
    """Return a rank in its first update."""
    state = case.new_state(number, round_, weight)
    case.gossip.start(state, 0.0)
    canonical(state, case.rules, 0.0, has_ended=False, period=case.period)
    mode = Mode.UPDATES if number in state.budget.leaders else Mode.FOLLOWS
    return Frozen(number, mode, 0, state=freeze(state), num_snapshots=case.snapshots)


def play(case: Case, frozen: Frozen, event: tuple[Any, ...]) -> list[Outcome]:
    """Return all that can come of an event (a method's name, then its arguments) in a state."""
    outcomes: list[Outcome] = []
    for round_ in case.first_rounds or [-1]:
        rank = LocalRank(case, frozen)
        if round_ >= 0:
            rank.state.round = round_
        outcome = rank.after(event)
        if outcome not in outcomes:
            outcomes.append(outcome)
        if rank.last_round == round_:  # it began none: any other would do the same
            break
    return outcomes


class LocalRank:
    """The live objects of one rank, and what can happen to them, once."""

    def __init__(self, case: Case, frozen: Frozen) -> None:
        self._case, self.number = case, frozen.number
        self._mode, self._made = frozen.mode, frozen.made
        self._since_mix, self._excused = frozen.since_mix, frozen.excused
        self.state = case.thaw(frozen.state)
        self.last_round = self.state.round  # when the event has ended
        self._transport = _Outbox()
        self.models = SymbolicModels(frozen.finite, frozen.old, dict(frozen.inbox))
        self.models.offered = lambda: list(self._open_packets().values())
        self.driver = case.driver(
            case.gossip, self.state, self._transport, self.models, case.snapshots, report=lambda sentence: None
        )
        self._thaw_snapshots(frozen)

    def _thaw_snapshots(self, frozen: Frozen) -> None:
        snapshots = self.driver.snapshots
        snapshots.clear()
        for snapshot in frozen.snapshots:
            packet = SymbolicPacket(Letter(Kind.OFFER, CURRENT))
            packet.to, packet.pending = list(snapshot.to), len(snapshot.to)
            packet.answer, packet.before_heal = snapshot.answer, snapshot.before_heal
            peers = tuple(peer for peer, _ in snapshot.to)
            sent_s = -_OLD_S if snapshot.is_old else 0.0
            snapshots.append(gossip.Snapshot(packet, sent_s, peers, is_offer=snapshot.offered_to >= 0))
            if snapshot.offered_to >= 0:
                self.driver.offers[snapshot.offered_to] = snapshots[-1]
        while len(snapshots) < frozen.num_snapshots:
            snapshots.append(gossip.Snapshot(self.models.new_snapshot()))

    def after(self, event: tuple[Any, ...]) -> Outcome:
        """Let it happen."""
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
        if len(self.state.budget.leaders) == 1:  # no model is fresher than its own, or than one of the dead
            models.faults = [fault for fault in models.faults if not fault.startswith("stale")]
        self.last_round = self.state.round
        return self._outcome(tuple(sorted(closed)), failed)

    # ---- what can happen -----------------------------------------------------------------------------------------

    def finish(self, poison: bool) -> None:
        """Make an update. `poison`: it makes the model NaN, which the rank sees after its next one."""
        healthy = self.models.finite
        self.models.finite &= not poison
        self._since_mix += len(self.state.budget.leaders) > 1
        self._made += self._case.updates > 0
        self.driver.finish_update(int(self._case.updates > 0), healthy)
        alone = len(self.state.budget.leaders) == 1
        if self._since_mix > self._case.max_staleness + 1 and not (self._excused or alone):
            self.models.faults.append(f"staleness: {self._since_mix} updates on its own")
        self.advance()

    def follow(self) -> None:
        """Make an update that the group's leader gossips after. Lead from then on if there is none."""
        if self.number in self.state.budget.leaders:
            self.driver.begin()
            self.finish(poison=False)
        elif self.state.budget.stop is not Stop.NONE:
            self._mode = Mode.ENDED

    def advance(self) -> None:
        if self.driver.advance():
            self._mode = Mode.UPDATES if self.state.budget.stop is Stop.NONE else Mode.ENDED
        else:
            self._mode = Mode.WAITS

    def deliver(self, sender: int, letter: Letter, how: str) -> None:
        data = None if how == "garbled" else (sender, letter, self._case.ranks)
        self.driver.on_message(Received(sender, data, letter.bulk, 0.0, how == "late"))

    def notice(self, dead: int) -> None:
        self.driver.on_death(dead)

    def stop(self, reason: Stop) -> None:
        self.driver.end(reason)

    def tell(self) -> None:
        """Tell it to leave."""
        self.driver.wish_to_leave()

    def leave(self) -> None:
        """Leave as it was told to, after an update; nothing of its models is on its way."""
        self.driver.leave()
        self._mode = Mode.LEFT

    def timer(self) -> None:
        """Let a waiting rank have waited long enough to send again."""
        self._transport.now += 2 * AGAIN_S
        self.advance()

    def patience(self) -> None:
        """Let so much time go by, in which nothing comes and the rank is there."""
        self._excused |= self._mode is Mode.WAITS
        if self.gives_up:
            self._mark_old(False)
        for _ in range(2):
            self._transport.now += 0.6 * PATIENCE_S
            self.driver.on_tick()

    def absence(self) -> None:
        """Stop the rank for longer than its patience, and let it continue: it has looked at no clock yet."""
        self._transport.now += _OLD_S
        self._mark_old(True)

    @property
    def gives_up(self) -> bool:
        """Whether the end of its patience lets it continue with the model that it has, and take whatever comes."""
        return self._mode is Mode.WAITS and self.state.healthy

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
        """Close: all ranks have ended, and nothing is on its way."""
        self.driver.finish()

    def _open_packets(self) -> dict[int, SymbolicPacket]:
        """Return the packets of the offers that are open or answered."""
        return {peer: cast(SymbolicPacket, offer.packet) for peer, offer in self.driver.offers.items()}

    def _is_still_open(self, peer: int) -> bool:
        """Whether the offer is open that was when the event began."""
        packet = self._open_packets().get(peer)
        return packet is not None and packet.data is not None and packet.data.number == CURRENT

    def _outcome(self, closed: tuple[int, ...], failed: bool) -> Outcome:
        offers, faults, sent = self._open_packets(), self.models.faults, self._transport.sent
        open_ = [peer for peer in offers if peer not in self.state.silent and offers[peer].answer is None]
        if len(open_) > 1 and any(letter.kind is Kind.OFFER for _, letter in sent):
            faults.append(f"second offer: to ranks {open_}")
        damaged = self._case.most_rare if "garbled" in self._case.faults else 0
        if len(self.driver.snapshots) > max(self._case.snapshots, 2 * self._case.ranks) + damaged:
            faults.append(f"memory for {len(self.driver.snapshots)} snapshots")
        if set(self.models.inbox) != set(self.state.to_mix):
            faults.append(f"inbox: models of {sorted(self.models.inbox)}, counted {sorted(self.state.to_mix)}")
        open_or_answered = {*self.state.offers, *self.state.answers}
        if set(offers) != open_or_answered:
            faults.append(f"offers: kept those to {sorted(offers)}, open or answered {sorted(open_or_answered)}")
        if any(peer == self.number for peer, _ in sent):
            faults.append("sent a message to itself")
        letters = tuple((peer, self._numbered(peer, letter)) for peer, letter in sent if peer != self.number)
        return Outcome(self.freeze(), letters, closed, tuple(faults), failed, tuple(self.state.budget.present))

    def _numbered(self, peer: int, letter: Letter) -> Letter:
        """Return the letter with what matters of its number: whether its offer is the open one. The numbers of one-way
        models and their credits are never read."""
        if not self._case.by_pairs:
            return letter._replace(number=ANY)
        if letter.kind is Kind.OFFER:
            offer = self.state.offers.get(peer)
            is_open = offer is not None and offer.number == letter.number
            return letter._replace(number=CURRENT if is_open else STALE)
        return letter if letter.kind in (Kind.ANSWER, *CREDITS) else letter._replace(number=ANY)

    # ---- frozen --------------------------------------------------------------------------------------------------

    def freeze(self) -> Frozen:
        """Return what the rank is now."""
        case, state, models, driver = self._case, self.state, self.models, self.driver
        canonical(state, case.rules, self._transport.now, self._is_done, case.period)
        if self._excused:
            self._since_mix = 0
        self._since_mix = min(self._since_mix, case.max_staleness + 2)  # only compared with the bound
        if state.budget.stop is not Stop.NONE:
            self._since_mix, self._excused = 0, False
        peer_of = {id(snapshot): peer for peer, snapshot in driver.offers.items()}
        snapshots = [self._freeze_snapshot(s, peer_of.get(id(s), -1)) for s in driver.snapshots]
        snapshots = sorted(s for s in snapshots if s.to or s.offered_to >= 0)  # those that are free are all alike
        num_snapshots = len(driver.snapshots)
        if case.by_pairs or self._is_done:  # the same: how many are free does not matter
            num_snapshots = max(len(snapshots), case.snapshots)
        inbox = sorted(
            (peer, letter._replace(stop=Stop.NONE, steps_by_rank=(), number=ANY))
            for peer, letter in models.inbox.items()
        )
        return Frozen(
            self.number,
            self._mode,
            self._made,
            self._since_mix,
            self._excused,
            freeze(state),
            tuple(snapshots),
            num_snapshots,
            models.finite,
            models.old,
            tuple(inbox),
        )

    def _freeze_snapshot(self, snapshot: gossip.Snapshot, offered_to: int) -> Snapshot:
        packet = cast(SymbolicPacket, snapshot.packet)
        to = () if self._is_done else tuple(sorted(packet.to))  # it fills no more
        # The paired exchange takes more memory when there is none, however old what is on its way is.
        is_old = not self._case.by_pairs and self._transport.now - snapshot.sent_s > PATIENCE_S
        return Snapshot(to, offered_to, is_old, packet.answer, packet.before_heal)
