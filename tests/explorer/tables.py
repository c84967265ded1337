"""What ranks and messages of the explorer's states are, in numbers, and what comes of an event to one rank.

One thing happens to one rank, so what comes of it is computed once for each state of that *rank* and each event, by the
real driver and protocol, and looked up from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from explorer.rank import play
from explorer.states import CURRENT, STALE, Case, Frozen, Letter, Mode, freeze
from pala.exchange.budget import Stop
from pala.exchange.gossip.messages import CREDITS, Kind
from pala.exchange.gossip.state import GossipState

SMALL, BULK, LATE = range(3)
"""The lanes from one rank to another: messages without a model, models, and models that are too late."""


class Step(NamedTuple):
    """An outcome in numbers."""

    rank: int
    letters: tuple[tuple[int, int, int], ...]  # to whom, lane, letter
    closed: tuple[int, ...]
    faults: tuple[str, ...]
    failed: bool  # by an exception: it cannot continue from there


class About(NamedTuple):
    """What is often asked of a rank."""

    mode: Mode
    present: tuple[int, ...]  # ranks that it takes to be alive
    living: tuple[int, ...]  # and to train
    useful: bool  # its model could heal others'
    finite: bool  # its model is, and is not old
    told: bool  # to leave
    may_leave: bool
    gives_up: bool  # as `LocalRank.gives_up`
    stop: Stop
    known_steps: int  # of all ranks
    weight: Any  # of its model
    deaf_to: tuple[Kind, ...]  # messages that change nothing in it, whatever happens
    events: tuple[tuple[str, tuple[Any, ...]], ...]  # what can happen to it alone


class Tables:
    """The numbers of a case, which grow as states are found."""

    def __init__(self, case: Case) -> None:
        self.case, self.n = case, case.ranks
        self.ranks: list[Frozen] = []
        self.letters: list[Letter] = []
        self.lanes: list[tuple[int, ...]] = [()]
        self._about: list[About] = []
        self._faults = case.faults
        self._rank_ids: dict[Frozen, int] = {}
        self._letter_ids: dict[Letter, int] = {}
        self._lane_ids: dict[tuple[int, ...], int] = {(): 0}
        self._memo: dict[Any, Any] = {}

    def _step(self, rank: int, event: tuple[Any, ...]) -> list[Step]:
        """Return what comes of it, by the code that trains."""
        return self._recall(("step", rank, event), lambda: self._played(self.ranks[rank], event))

    def _played(self, frozen: Frozen, event: tuple[Any, ...]) -> list[Step]:
        if event[0] == "deliver":
            event = (*event[:2], self.letters[event[2]], event[3])
        steps = []
        for outcome in play(self.case, frozen, event):
            all_live = "false-death" in self._faults  # else what it sends to who is dead, as it knows, is lost
            present = range(self.n) if all_live else outcome.present
            letters = [(peer, x) for peer, x in outcome.letters if x.bulk or peer in present]
            letters.sort(key=itemgetter(0))  # only the order of those to one peer matters
            numbers = tuple((peer, BULK if x.bulk else SMALL, self.letter_id(x)) for peer, x in letters)
            rank = self.rank_id(outcome.rank)
            steps.append(Step(rank, numbers, outcome.closed, outcome.faults, outcome.failed))
        return list(dict.fromkeys(steps))

    def rank_id(self, frozen: Frozen) -> int:
        """Return the number of a rank's state."""
        number = self._rank_ids.setdefault(frozen, len(self.ranks))
        if number == len(self.ranks):
            self.ranks.append(frozen)
            self._about.append(self._look_at(frozen))
        return number

    def _look_at(self, frozen: Frozen) -> About:
        if frozen.mode is Mode.DEAD:
            return About(Mode.DEAD, (), (), False, False, False, False, False, Stop.NONE, 0, 0, (), ())
        s, f = self.case.thaw(frozen.state), self._faults
        budget, away = s.budget, s.now_s < 0
        is_old = (away or s.returning) and "patience" not in f
        return About(
            frozen.mode,
            tuple(budget.present),
            tuple(budget.living),
            useful=frozen.mode is not Mode.LEFT and frozen.finite and not is_old,
            finite=frozen.finite and not is_old,
            told=s.leaves,
            may_leave=s.may_leave and budget.stop is Stop.NONE,
            gives_up=frozen.mode is Mode.WAITS and s.healthy and "patience" in f,
            stop=budget.stop,
            known_steps=budget.global_steps,
            weight=s.weight,
            deaf_to=self._ignores(frozen.mode, budget.stop),
            events=tuple(self._events(frozen, s, away)),
        )

    def _events(self, frozen: Frozen, s: GossipState, away: bool) -> list[tuple[str, tuple[Any, ...]]]:
        """Return what can happen to a rank alone."""
        events: list[tuple[str, tuple[Any, ...]]] = []
        mode, f = frozen.mode, self._faults
        if mode is Mode.UPDATES:
            events += [("finish", ("finish", False))] + [("nan", ("finish", True))] * ("nan" in f)
            if "leave" in f and len(s.living) > 1 and not s.leaves:
                events.append(("tell", ("tell",)))
            if s.leaves and s.may_leave and not any(snapshot.to for snapshot in frozen.snapshots):
                events.append(("leave", ("leave",)))
        if mode is Mode.FOLLOWS:
            events.append(("follow", ("follow",)))
        if mode is Mode.WAITS:
            events += [("advance", ("advance",)), ("timer", ("timer",))]
        if mode is Mode.LEFT and s.budget.stop is Stop.NONE and not s.may_leave:
            events.append(("stay", ("stop", Stop.ALL_LEAVE)))
        if mode is not Mode.LEFT and s.budget.stop is Stop.NONE:
            reasons = (("stop", Stop.BUDGET), ("signal", Stop.SIGNAL))
            events += [(word, ("stop", reason)) for word, reason in reasons if word in f]
        if mode not in (Mode.ENDED, Mode.LEFT) and self.case.has_clock:
            if away:
                events.append(("tick", ("tick",)))
            else:
                events += [("patience", ("patience",))] * ("patience" in f)
                if "absence" in f and s.patience_s < math.inf:  # in its first update it cannot tell
                    events.append(("absence", ("absence",)))
        return events

    def _ignores(self, mode: Mode, stop: Stop) -> tuple[Kind, ...]:
        """Return the kinds of messages that cannot change a rank in this mode. News of the end, unless it brings steps,
        are none to a rank that knows. A rank that sends no more models needs no credit of the one-way rules, except to
        know who is silent, until it has ended."""
        if stop is Stop.NONE or self.case.updates:
            return ()
        if self.case.by_pairs or (self.case.has_clock and mode is not Mode.ENDED):
            return Kind.STOP, Kind.JOIN
        return Kind.STOP, Kind.JOIN, *CREDITS

    def _left(self, rank: int, peer: int, kind: Kind) -> int:
        """Return that rank after a model has left it: its snapshot may be filled again."""
        if self._about[rank].mode is Mode.DEAD:
            return rank
        return self._recall(("left", rank, peer, kind), lambda: self.rank_id(_left(self.ranks[rank], peer, kind)))

    def _closed(self, rank: int, sender: int) -> int:
        """Return that rank after the sender's offer has been closed: what it knows of it is of none that is open."""
        return self._recall(("closed", rank, sender), lambda: self.rank_id(self._stale(self.ranks[rank], sender)))

    def _stale(self, frozen: Frozen, sender: int) -> Frozen:
        if frozen.mode is Mode.DEAD:
            return frozen
        s = self.case.thaw(frozen.state)
        if s.offer_numbers.get(sender) == CURRENT:
            s.offer_numbers[sender] = STALE
        return frozen._replace(state=freeze(s))

    def letter_id(self, letter: Letter) -> int:
        """Return the number of a message."""
        number = self._letter_ids.setdefault(letter, len(self.letters))
        if number == len(self.letters):
            self.letters.append(letter)
        return number

    def lane_id(self, letters: tuple[int, ...]) -> int:
        """Return the number of messages one behind the other."""
        number = self._lane_ids.setdefault(letters, len(self.lanes))
        if number == len(self.lanes):
            self.lanes.append(letters)
        return number

    def _pushed(self, lane: int, letter: int) -> int:
        """Return the lane with the letter behind the others; but a rank does not ask again what is still to leave."""
        if self.letters[letter].kind is Kind.JOIN and letter in self.lanes[lane]:
            return lane
        return self._recall(("push", lane, letter), lambda: self.lane_id((*self.lanes[lane], letter)))

    def _recall(self, key: Any, compute: Callable[[], Any]) -> Any:
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]


def _left(frozen: Frozen, peer: int, kind: Kind) -> Frozen:
    snapshots = list(frozen.snapshots)
    for k, snapshot in enumerate(snapshots):
        if (peer, kind) in snapshot.to:
            to = list(snapshot.to)
            to.remove((peer, kind))
            snapshots[k] = snapshot._replace(to=tuple(to))
            if not to and snapshot.offered_to < 0:
                del snapshots[k]
            break
    return frozen._replace(snapshots=tuple(sorted(snapshots)))
