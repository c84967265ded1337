"""What ranks and messages of the explorer's states are, in numbers, and what comes of an event to one rank.

One thing happens to one rank, so what comes of it is computed once for each state of that *rank* and each event, by the
real driver and protocol, and looked up from then on. Of ranks and messages that are alike (`explore_alike.py`) one
stands for all; that they are is checked by playing what happened to the one with the others, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from pala.exchange.budget import Stop
from pala.exchange.gossip.messages import Kind
from pala.lab.simulate.explore_alike import NotAlikeError, simplest, simplest_letter
from pala.lab.simulate.explore_rank import LocalRank
from pala.lab.simulate.explore_states import CURRENT, STALE, Case, Frozen, Letter, Mode

SMALL, BULK, LATE = range(3)
"""The lanes from one rank to another: messages without a model, models, and models that are too late."""


class Step(NamedTuple):
    """An outcome in numbers."""

    rank: int
    letters: tuple[tuple[int, int, int], ...]  # to whom, lane, letter
    closed: tuple[int, ...]
    faults: tuple[str, ...]
    failed: bool  # by an exception: it cannot go on from there


class About(NamedTuple):
    """What is often asked of a rank."""

    mode: Mode
    present: tuple[int, ...]  # ranks that it takes to be alive
    living: tuple[int, ...]  # and to train
    useful: bool  # its model could heal others'
    gives_up: bool  # as `LocalRank.gives_up`
    deaf_to: tuple[Kind, ...]  # messages that change nothing in it, whatever happens
    events: tuple[tuple[str, tuple[Any, ...]], ...]  # what can happen to it alone


class Tables:
    """The numbers of a case, which grow as states are found."""

    def __init__(self, case: Case, alike: bool) -> None:
        self.case, self.n = case, case.ranks
        self.ranks: list[Frozen] = []
        self.letters: list[Letter] = []
        self.lanes: list[tuple[int, ...]] = [()]
        self._about: list[About] = []
        self._faults = case.faults
        self._live = [LocalRank(case, number) for number in range(self.n)]
        self._rank_ids: dict[Frozen, int] = {}
        self._letter_ids: dict[Letter, int] = {}
        self._lane_ids: dict[tuple[int, ...], int] = {(): 0}
        self._steps: dict[Any, list[Step]] = {}
        self._alike = alike
        self._same: list[list[Frozen]] = []  # of each rank state: those that it stands for
        self._like: list[list[Letter]] = []  # of each letter: those that it stands for
        self._events: list[list[Any]] = []  # of each rank state: what happened to it
        self._unchecked: list[tuple[Frozen, int, Any]] = []
        self._memo: dict[Any, Any] = {}

    def _step(self, rank: int, event: tuple[Any, ...]) -> list[Step]:
        """What comes of it, by the code that trains."""
        key = rank, event
        if key not in self._steps:
            self._happened(rank, event)
            self._steps[key] = self._played(self.ranks[rank], event)
        return self._steps[key]

    def _played(self, frozen: Frozen, event: tuple[Any, ...]) -> list[Step]:
        if event[0] == "deliver" and isinstance(event[2], int):
            event = (*event[:2], self.letters[event[2]], event[3])
        steps = []
        for outcome in self._live[frozen.number].play(frozen, event):
            all_live = "false-death" in self._faults  # else what it sends to who is dead, as it knows, is lost
            present = range(self.n) if all_live else dict(outcome.rank.budget)["present"][1]
            letters = [(peer, x) for peer, x in outcome.letters if x.bulk or peer in present]
            letters.sort(key=itemgetter(0))  # only the order of those to one peer matters
            numbers = tuple((peer, BULK if x.bulk else SMALL, self._letter_id(x)) for peer, x in letters)
            rank = self._rank_id(outcome.rank)
            steps.append(Step(rank, numbers, outcome.closed, outcome.faults, outcome.failed))
        return list(dict.fromkeys(steps))

    def _rank_id(self, frozen: Frozen) -> int:
        if frozen in self._rank_ids:
            return self._rank_ids[frozen]
        kept = simplest(frozen, self.case) if self._alike else frozen
        if kept != frozen:
            number = self._rank_ids[frozen] = self._rank_id(kept)
            if self._look_at(frozen) != self._about[number]:
                raise NotAlikeError(f"{_differences(frozen, kept)}: they are not asked the same")
            self._same[number].append(frozen)
            self._unchecked += [(frozen, number, event) for event in self._events[number]]
            return number
        number = self._rank_ids[frozen] = len(self.ranks)
        self.ranks.append(frozen)
        self._same.append([])
        self._events.append([])
        self._about.append(self._look_at(frozen))
        return number

    def _happened(self, rank: int, event: tuple[Any, ...]) -> None:
        """Notes that the same has to come of it for all that are like that rank."""
        self._events[rank].append(event)
        self._unchecked += [(frozen, rank, event) for frozen in self._same[rank]]
        if event[0] == "deliver" and self._like[event[2]]:
            self._unchecked.append((self.ranks[rank], rank, event))

    def _comes_the_same(self, frozen: Frozen, rank: int, event: Any) -> bool:
        """Whether the same comes of the event to a rank like that one. What comes of closing is never looked at."""
        if event[0] in _CHANGES:
            word, *rest = event
            key = word, rank, *rest
            return self._rank_id(_CHANGES[word](frozen, *rest)) == self._memo[key]
        expected = self._steps[rank, event]
        if event[0] == "close":
            return [step.faults for step in self._played(frozen, event)] == [step.faults for step in expected]
        if event[0] == "deliver":
            letters = (self.letters[event[2]], *self._like[event[2]])
            return all(self._played(frozen, (*event[:2], x, event[3])) == expected for x in letters)
        return self._played(frozen, event) == expected

    def _look_at(self, frozen: Frozen) -> About:
        if frozen.mode is Mode.DEAD:
            return About(Mode.DEAD, (), (), False, False, (), ())
        p, budget, f = dict(frozen.protocol), dict(frozen.budget), self._faults
        away = p["_now_s"] < 0
        events: list[tuple[str, tuple[Any, ...]]] = []
        if frozen.mode is Mode.UPDATES:
            events += [("finish", ("finish", False))] + [("nan", ("finish", True))] * ("nan" in f)
            events += [("step", ("step",))] * (self.case.exchanges_per_update > 1)
            if "leave" in f and len(budget["living"][1]) > 1 and not any(s.to for s in frozen.snapshots):
                events.append(("leave", ("leave",)))
        if frozen.mode is Mode.WAITS:
            events += [("advance", ("advance",)), ("timer", ("timer",))]
        if frozen.mode is not Mode.LEFT and budget["stop"] is Stop.NONE:
            events += [
                (word, ("stop", stop)) for word, stop in (("stop", Stop.BUDGET), ("signal", Stop.SIGNAL)) if word in f
            ]
        if frozen.mode not in (Mode.ENDED, Mode.LEFT) and self.case.has_clock:
            if away:
                events.append(("tick", ("tick",)))
            else:
                events += [("patience", ("patience",))] * ("patience" in f)
                if "absence" in f and p["patience_s"] < math.inf:  # in its first update it cannot tell
                    events.append(("absence", ("absence",)))
        is_old = (away or p["_returning"]) and "patience" not in f
        useful = frozen.mode is not Mode.LEFT and frozen.finite and not is_old
        gives_up = frozen.mode is Mode.WAITS and p["healthy"] and "patience" in f
        deaf_to = self._deaf_to(frozen.mode, budget["stop"])
        present, living = budget["present"][1], budget["living"][1]
        return About(frozen.mode, present, living, useful, gives_up, deaf_to, tuple(events))

    def _deaf_to(self, mode: Mode, stop: Stop) -> tuple[Kind, ...]:
        """News of the end, unless it brings steps, are none to who knows. Who sends no more models needs no credit of
        the one-way rules, but to know who is silent, until it has ended."""
        if stop is Stop.NONE or self.case.updates:
            return ()
        if self.case.mixing == "paired" or (self.case.has_clock and mode is not Mode.ENDED):
            return (Kind.STOP,)
        return Kind.STOP, Kind.CREDIT, Kind.ASK_WHOLE

    def _left(self, rank: int, peer: int, kind: Kind) -> int:
        """A model has left that rank: its snapshot may be filled anew."""
        if self._about[rank].mode is Mode.DEAD:
            return rank
        return self._changed(rank, ("left", peer, kind))

    def _changed(self, rank: int, event: tuple[Any, ...]) -> int:
        """By what happens to others."""
        key = event[0], rank, *event[1:]
        if key not in self._memo:
            self._happened(rank, event)
            self._memo[key] = self._rank_id(_CHANGES[event[0]](self.ranks[rank], *event[1:]))
        return self._memo[key]

    def _letter_id(self, letter: Letter) -> int:
        if letter in self._letter_ids:
            return self._letter_ids[letter]
        kept = simplest_letter(letter, self.case) if self._alike else letter
        if kept != letter:
            number = self._letter_ids[letter] = self._letter_id(kept)
            self._like[number].append(letter)
            self._unchecked += [
                (x, rank, e)
                for rank, e in self._steps
                if e[0] == "deliver" and e[2] == number
                for x in (self.ranks[rank], *self._same[rank])
            ]
            return number
        number = self._letter_ids[letter] = len(self.letters)
        self.letters.append(letter)
        self._like.append([])
        return number

    def _lane_id(self, letters: tuple[int, ...]) -> int:
        if letters not in self._lane_ids:
            self._lane_ids[letters] = len(self.lanes)
            self.lanes.append(letters)
        return self._lane_ids[letters]

    def _pushed(self, lane: int, letter: int) -> int:
        return self._recall(("push", lane, letter), lambda: self._lane_id((*self.lanes[lane], letter)))

    def _recall(self, key: Any, compute: Callable[[], int]) -> int:
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def _check_ranks(self) -> None:
        """Whether ranks and messages that were taken to be alike are. Raises NotAlikeError."""
        while self._unchecked:
            frozen, rank, event = self._unchecked.pop()
            if not self._comes_the_same(frozen, rank, event):
                raise NotAlikeError(f"{_differences(frozen, self.ranks[rank])}: unlike after {event}")


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


def _stale(frozen: Frozen, sender: int) -> Frozen:
    """What it knows of that sender's offer is of none that is open."""
    fields = []
    for name, value in frozen.protocol:
        if name == "_numbers":
            numbers = ((peer, STALE if peer == sender and number == CURRENT else number) for peer, number in value[1])
            value = "dict", tuple(numbers)
        fields.append((name, value))
    return frozen._replace(protocol=tuple(fields))


_CHANGES: dict[str, Callable[..., Frozen]] = {"left": _left, "stale": _stale}
"""What happens to others and changes a rank."""


def _differences(one: Frozen, other: Frozen) -> str:
    """In words."""
    a, b = ({**x._asdict(), **dict(x.protocol), **dict(x.budget)} for x in (one, other))
    names = (name for name in a if name not in ("protocol", "budget") and a[name] != b[name])
    return f"rank {one.number}, " + ", ".join(f"{name} {a[name]} and {b[name]}" for name in names)
