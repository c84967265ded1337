"""All ranks and what is on its way between them: states of the explorer, and what can happen in each.

A state is a tuple of small numbers: one a rank, then three a pair of ranks, for what is on its way (small messages,
models, and models that are too late, each in the order in which they were sent), then how many rare faults there were.
What a number stands for is in the tables of `World`. One thing happens to one rank, so what comes of it is computed
once for each state of that *rank* and each event, by the real driver and protocol, and looked up from then on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from operator import itemgetter
from typing import Any, NamedTuple

from pala.exchange.budget import Stop
from pala.exchange.gossip.messages import Kind
from pala.simulate.explore_alike import NotAlikeError, simplest, simplest_letter, takes_no_model
from pala.simulate.explore_rank import LocalRank
from pala.simulate.explore_states import CURRENT, STALE, Case, Frozen, Letter, Mode, relabelled

State = tuple[int, ...]
Label = tuple[Any, ...]
"""What happened: a word, the ranks that it happened to, and of random choices which."""

FAULTS = {
    "stop": "a rank finds the budget met, at any time",
    "signal": "a rank is told to end, at any time",
    "timer": "a waiting rank sends again at any time; else only where nothing of its own is on its way",
    "death": "ranks die; what is on its way from them may be lost, what is on its way to them is",
    "leave": "a rank is told to leave, while another trains; then it dies",
    "nan": "an update makes a model NaN, while another rank's is not",
    "patience": "a rank's patience ends, at any time",
    "absence": "a rank is stopped for longer than its patience",
    "late": "a model takes longer than the patience to come; others overtake it",
    "garbled": "a model comes that cannot be read",
    "refused": "a message without a model comes that cannot be read",
    "duplicate": "a credit comes twice",
    "false-death": "a rank is told of the death of one that lives",
    "resume": "ranks begin in unlike rounds, with unlike weights",
}
"""What may happen besides updates and messages."""
NORMAL = frozenset({"stop", "signal", "timer", "resume"})
"""What costs no model: with nothing else, nobody should need to send again."""
UNFAIR = frozenset(
    {"stop", "signal", "death", "leave", "nan", "absence", "late", "garbled", "refused", "duplicate", "false-death"}
    | {"lose", "depart"}
)
"""Labels of what need not happen, ever."""
RARE = frozenset({"garbled", "refused", "duplicate"})
"""Faults of which each may leave one more model on its way: without a limit there would be no end to the states."""
_REPLIES = (Kind.CREDIT, Kind.ASK_WHOLE, Kind.ANSWER)
_SMALL, _BULK, _LATE = range(3)
_EMPTY = (0, 0, 0)
_LANES = ("message", "model", "late model")


class _Step(NamedTuple):
    """An outcome in numbers."""

    rank: int
    letters: tuple[tuple[int, int, int], ...]  # to whom, lane, letter
    closed: tuple[int, ...]
    faults: tuple[str, ...]
    failed: bool  # by an exception: it cannot go on from there


class _About(NamedTuple):
    """What is often asked of a rank."""

    mode: Mode
    present: tuple[int, ...]  # ranks that it takes to be alive
    living: tuple[int, ...]  # and to train
    useful: bool  # its model could heal others'
    gives_up: bool  # as `LocalRank.gives_up`
    deaf_to: tuple[Kind, ...]  # messages that change nothing in it, whatever happens
    events: tuple[tuple[str, tuple[Any, ...]], ...]  # what can happen to it alone


class Successor(NamedTuple):
    """What can come next."""

    label: Label
    state: State | None  # None: it cannot go on from there
    faults: tuple[str, ...]


class World:
    """The states of a case."""

    def __init__(self, case: Case, symmetry: bool = False, alike: bool = True) -> None:
        self.case, self.n = case, case.ranks
        self._live = [LocalRank(case, number) for number in range(self.n)]
        self.ranks: list[Frozen] = []
        self.letters: list[Letter] = []
        self.lanes: list[tuple[int, ...]] = [()]
        self._about: list[_About] = []
        self._rank_ids: dict[Frozen, int] = {}
        self._letter_ids: dict[Letter, int] = {}
        self._lane_ids: dict[tuple[int, ...], int] = {(): 0}
        self._steps: dict[Any, list[_Step]] = {}
        self._alike = alike
        self._same: list[list[Frozen]] = []  # of each rank state: those that it stands for
        self._like: list[list[Letter]] = []  # of each letter: those that it stands for
        self._events: list[list[Any]] = []  # of each rank state: what happened to it
        self._unchecked: list[tuple[Frozen, int, Any]] = []
        self._tidied: list[tuple[State, State]] = []  # states and what was made of them, to be checked
        self._memo: dict[Any, Any] = {}
        pairs = list(itertools.permutations(range(self.n), 2))
        self._pairs = {pair: self.n + 3 * k for k, pair in enumerate(pairs)}  # where a pair's lanes begin
        self._touching = [[at for pair, at in self._pairs.items() if r in pair] for r in range(self.n)]
        self._faults, self._rare = case.faults, (case.rare | RARE) & case.faults
        self._may_send_again = not case.faults <= NORMAL
        self._permutations = [self._permutation(p) for p in self._symmetries()] if symmetry else []

    # ---- states --------------------------------------------------------------------------------------------------

    def initial(self) -> list[State]:
        """Where runs begin; of resumed ones, each with other rounds and weights."""
        nothing = (0,) * (3 * len(self._pairs) + 1)
        rounds = range(max(1, self.case.period)) if "resume" in self._faults else range(1)
        states = []
        for begin in itertools.product(rounds, repeat=self.n):
            weights = (
                [Fraction(2 * k + 1, self.n) for k in range(self.n)]
                if "resume" in self._faults
                else [Fraction(1)] * self.n
            )
            ranks = [LocalRank(self.case, k, begin[k], weights[k]).save() for k in range(self.n)]
            states.append(self.canonical((*map(self._rank_id, ranks), *nothing)))
        return list(dict.fromkeys(states))

    def mode(self, state: State, rank: int) -> Mode:
        """What that rank does."""
        return self._about[state[rank]].mode

    def has_ended(self, state: State) -> bool:
        """Whether all who live have."""
        return all(self.mode(state, r) >= Mode.ENDED for r in range(self.n))

    def canonical(self, state: State) -> State:
        """The one that stands for all that differ only by what does not matter, or by the ranks' numbers."""
        if self._alike:
            state = self._tidy(state)
        if not self._permutations:
            return state
        return min(state, *(permuted(state) for permuted in self._permutations))

    def faults_of(self, state: State) -> Iterator[str]:
        """What must hold in every state and does not."""
        n, ranks = self.n, [self.ranks[i] for i in state[: self.n]]
        if not self._faults & {"duplicate", "false-death"}:
            for (sender, receiver), at in self._pairs.items():
                back = self._pairs[receiver, sender]
                lanes = state[at : at + 3], state[back : back + 3]
                key = "held", sender, state[receiver], lanes
                if self._recall(key, lambda: self._models_held(sender, self.ranks[state[receiver]], *lanes)) > 1:  # noqa: B023
                    yield f"process lock: rank {receiver} holds two models of rank {sender}"
        dead = any(rank.mode is Mode.DEAD for rank in ranks)
        if self.case.mixing == "push_sum" and not dead and "garbled" not in self._faults:
            held = sum(rank.weight + sum(letter.weight for _, letter in rank.inbox) for rank in ranks)
            sent = (self.letters[k] for lane in state[n:-1] for k in self.lanes[lane])
            total = held + sum(letter.weight for letter in sent if letter.kind is Kind.MODEL)
            if total != n:
                yield f"push-sum weight: {total} of {n}"
        if self.case.updates:
            made = sum(rank.made for rank in ranks)
            known = max(
                sum(dict(rank.budget)["local_steps"][1]) + dict(rank.budget)["base_steps"]
                for rank in ranks
                if rank.mode is not Mode.DEAD
            )
            if known > made:
                yield f"known steps that nobody made: {known} of {made}"

    def _models_held(self, sender: int, receiver: Frozen, there: State, back: State) -> int:
        """Models of one rank that another is to take in, and credits for them on their way back."""
        if receiver.mode is Mode.DEAD:
            return 0
        coming = [self.letters[k] for lane in there for k in self.lanes[lane]]
        replies = [self.letters[k] for lane in back for k in self.lanes[lane] if self.letters[k].kind in _REPLIES]
        if self.case.mixing == "paired":  # one that is taken for an offer that could not be read may come on top
            return sum(x.number == CURRENT for x in coming if x.kind is Kind.OFFER) + sum(
                x.number == CURRENT for x in replies
            )
        held = sum(peer == sender for peer, _ in receiver.inbox)
        return sum(x.kind is Kind.MODEL for x in coming) + held + len(replies)

    # ---- what can happen -----------------------------------------------------------------------------------------

    def successors(self, state: State) -> list[Successor]:
        """All that can come next and is not the same."""
        found: list[Successor] = []
        about = [self._about[i] for i in state[: self.n]]
        last = sum(rank.useful for rank in about) == 1  # whose model alone can still heal others
        for r in range(self.n):
            for word, event in about[r].events:
                if (
                    word in ("nan", "absence")
                    and last
                    and about[r].useful
                    and not (word == "absence" and "patience" in self._faults)
                ):
                    continue
                if word == "leave" and not self._may_leave(state, r, last and about[r].useful):
                    continue
                if word == "timer" and "timer" not in self._faults and not self._is_quiet(state, about, r):
                    continue
                since = state
                if word == "absence" or (word == "patience" and "absence" in self._faults and about[r].gives_up):
                    since = self._mark_old(state, r, word == "absence")
                self._happens(found, (word, r), state, r, event, since)
        self._deaths(found, state, about, last)
        for (sender, receiver), at in self._pairs.items():
            if state[at] or state[at + 1] or state[at + 2]:
                self._messages(found, state, about, sender, receiver, at)
        if not any(state[self.n : -1]) and self.has_ended(state):
            self._close(found, state)
        return self._rationed(found, state) if self._rare else found

    def _rationed(self, found: list[Successor], state: State) -> list[Successor]:
        """Rare faults come so many times in a run, and are counted."""
        is_rare = [successor.label[0] in self._rare for successor in found]
        if state[-1] == self.case.most_rare:
            return [successor for successor, rare in zip(found, is_rare, strict=True) if not rare]
        return [
            successor._replace(state=(*successor.state[:-1], state[-1] + 1)) if rare and successor.state else successor
            for successor, rare in zip(found, is_rare, strict=True)
        ]

    def _happens(
        self,
        found: list[Successor],
        label: Label,
        before: State,
        r: int,
        event: tuple[Any, ...],
        since: State | None = None,
    ) -> None:
        """To rank r, `event`, after what has already changed `before` into `since`."""
        since = before if since is None else since
        steps = self._step(since[r], event)
        for choice, step in enumerate(steps):
            if step.failed:
                found.append(Successor(label, None, step.faults))
                continue
            after = self._after(since, r, step)
            if after != before or step.faults:
                found.append(Successor((*label, f"choice {choice}") if len(steps) > 1 else label, after, step.faults))

    def _deaths(self, found: list[Successor], state: State, about: list[_About], last: bool) -> None:
        alive = [r for r in range(self.n) if about[r].mode is not Mode.DEAD]
        for r in alive:
            for peer in about[r].present:
                if about[peer].mode is Mode.DEAD:
                    self._happens(found, ("notice", r, peer), state, r, ("notice", peer))
                elif "false-death" in self._faults and peer != r:
                    self._happens(found, ("false-death", r, peer), state, r, ("notice", peer))
            if about[r].mode is Mode.LEFT:
                found.append(Successor(("depart", r), self._die(state, r), ()))
            elif "death" in self._faults and len(alive) > 1 and not (last and about[r].useful):
                found.append(Successor(("death", r), self._die(state, r), ()))

    def _messages(
        self, found: list[Successor], state: State, about: list[_About], sender: int, receiver: int, at: int
    ) -> None:
        """The first of each lane comes, somehow."""
        for lane in range(3):
            if not state[at + lane]:
                continue
            first, *rest = self.lanes[state[at + lane]]
            letter, where = self.letters[first], (sender, receiver, _LANES[lane])
            without = list(state)
            without[at + lane] = self._lane_id(tuple(rest))
            if lane != _SMALL:
                without[sender] = self._left(state[sender], receiver, letter.kind)
            taken = tuple(without)
            how = "late" if lane == _LATE else ""
            self._happens(found, ("deliver", *where), state, receiver, ("deliver", sender, first, how), taken)
            if about[sender].mode is Mode.DEAD:
                found.append(Successor(("lose", *where), taken, ()))
            if lane == _BULK and "late" in self._faults:
                without = list(state)
                without[at + lane] = self._lane_id(tuple(rest))
                without[at + _LATE] = self._pushed(state[at + _LATE], first)
                found.append(Successor(("late", *where), tuple(without), ()))
            event = "deliver", sender, first, "garbled"
            if lane == _BULK and "garbled" in self._faults:
                self._happens(found, ("garbled", *where), state, receiver, event, taken)
            if lane == _SMALL and "refused" in self._faults:
                self._happens(found, ("refused", *where), state, receiver, event, taken)
            if lane == _SMALL and letter.kind is not Kind.STOP and "duplicate" in self._faults:
                event = "deliver", sender, first, ""
                self._happens(found, ("duplicate", *where), state, receiver, event)

    def _close(self, found: list[Successor], state: State) -> None:
        """All have closed: what each then does on its own."""
        faults: list[str] = []
        for i in state[: self.n]:
            rank = self.ranks[i]
            if rank.mode in (Mode.LEFT, Mode.DEAD):
                continue
            for step in self._step(i, ("close",)):
                faults += step.faults
            budget = dict(rank.budget)
            known = sum(budget["local_steps"][1]) + budget["base_steps"]
            if (
                self.case.updates
                and budget["stop"] is Stop.BUDGET
                and not self._faults & {"stop"}
                and known < self.case.updates
            ):
                faults.append(f"budget: rank {rank.number} ended at {known} steps of {self.case.updates}")
        if faults:
            found.append(Successor(("close",), None, tuple(faults)))

    def _may_leave(self, state: State, r: int, is_last: bool) -> bool:
        """Another trains, which has a model of use."""
        others = (self.mode(state, peer) for peer in range(self.n) if peer != r)
        return not is_last and any(mode in (Mode.UPDATES, Mode.WAITS) for mode in others)

    def _is_quiet(self, state: State, about: list[_About], r: int) -> bool:
        """Nothing is on its way to or from that rank, and nobody it counts on is dead."""
        if not self._may_send_again or any(any(state[at : at + 3]) for at in self._touching[r]):
            return False
        if any(about[peer].mode is Mode.DEAD for peer in about[r].living):
            return False
        (step, *_) = self._step(state[r], ("advance",))
        return step.rank == state[r] and not step.letters

    def _after(self, state: State, r: int, step: _Step) -> State:
        """What rank r's step makes of the state."""
        after = list(state)
        after[r] = step.rank
        for peer in step.closed:
            self._close_offer(after, r, peer)
        for peer, lane, letter in step.letters:
            if self._about[after[peer]].mode is Mode.DEAD:  # it is lost, and its memory free
                if lane == _BULK:
                    after[r] = self._left(after[r], peer, self.letters[letter].kind)
            elif self.letters[letter].kind not in self._about[after[peer]].deaf_to:
                at = self._pairs[r, peer] + lane
                after[at] = self._pushed(after[at], letter)
        if deaf_to := self._about[step.rank].deaf_to:
            for peer in range(self.n):  # as if each came at its turn, at once
                if peer != r and after[self._pairs[peer, r]]:
                    after[self._pairs[peer, r]] = self._without(after[self._pairs[peer, r]], deaf_to)
        return tuple(after)

    def _tidy(self, state: State) -> State:
        """What is on its way as its receiver will take it: a claim, which `check_alike` proves."""
        after, is_new = None, False
        for (sender, receiver), at in self._pairs.items():
            lanes = state[at : at + 3]
            if lanes == _EMPTY:
                continue
            key = "tidy", sender, state[receiver], lanes
            if key not in self._memo:
                self._memo[key] = self._tidy_lanes(sender, self.ranks[state[receiver]], lanes)
                is_new |= self._memo[key] != lanes
            if self._memo[key] != lanes:
                after = after or list(state)
                after[at : at + 3] = self._memo[key]
        if not after:
            return state
        tidy = tuple(after)
        if is_new:
            self._tidied.append((state, tidy))
        return tidy

    def _tidy_lanes(self, sender: int, receiver: Frozen, lanes: tuple[int, ...]) -> tuple[int, ...]:
        """What is on its way from the sender: the news of the end are none to who knows; what comes too late is
        thrown away; so is the next model of this sender, if its receiver was away; and no model matters to who is alone
        and mixes no more."""
        if receiver.mode is Mode.DEAD:
            return lanes
        budget, stale = dict(receiver.budget), dict(receiver.protocol)["_stale"][1]
        letters = [[self.letters[k] for k in self.lanes[lane]] for lane in lanes]
        if budget["stop"] is not Stop.NONE:
            letters = [[x._replace(stop=Stop.NONE) if x.kind is not Kind.STOP else x for x in lane] for lane in letters]
        letters[_LATE] = [x._replace(old=True, finite=True, whole=True) for x in letters[_LATE]]
        if takes_no_model(receiver, self.case):
            letters[_BULK] = [x._replace(old=True, finite=True, whole=True) for x in letters[_BULK]]
        if sender in stale and all(x.kind is Kind.ANSWER for x in letters[_LATE]):
            first = next((k for k, x in enumerate(letters[_BULK]) if x.kind is not Kind.ANSWER), None)
            if first is not None:
                letters[_BULK][first] = self._as_stale(letters[_BULK][first])
        return tuple(self._lane_id(tuple(map(self._letter_id, lane))) for lane in letters)

    def _as_stale(self, letter: Letter) -> Letter:
        """Unless the receiver's patience ends before, nothing in it matters."""
        if "patience" in self._faults:
            return letter._replace(old=True)
        return letter._replace(old=True, finite=True, whole=True)

    def _without(self, lane: int, kinds: tuple[Kind, ...]) -> int:
        letters = self.lanes[lane]
        left = (letter for letter in letters if self.letters[letter].kind not in kinds)
        return self._recall(("without", lane, kinds), lambda: self._lane_id(tuple(left)))

    def _mark_old(self, state: State, r: int, old: bool) -> State:
        """The models on their way to rank r were sent before it goes on."""
        after = list(state)
        for (_, receiver), at in self._pairs.items():
            for lane in (at + _BULK, at + _LATE):
                if receiver == r and after[lane]:
                    letters = (self.letters[k]._replace(old=old) for k in self.lanes[after[lane]])
                    after[lane] = self._lane_id(tuple(map(self._letter_id, letters)))
        return tuple(after)

    def _die(self, state: State, r: int) -> State:
        after = list(state)
        for peer in range(self.n):
            if peer == r:
                continue
            at = self._pairs[peer, r]
            for lane in (_BULK, _LATE):
                for letter in self.lanes[after[at + lane]]:
                    after[peer] = self._left(after[peer], r, self.letters[letter].kind)
            after[at : at + 3] = 0, 0, 0
        after[r] = self._rank_id(Frozen(r, Mode.DEAD, self.ranks[state[r]].made, 0, False))
        return tuple(after)

    def _close_offer(self, after: list[int], r: int, peer: int) -> None:
        """What is known or on its way of the offer that r had made to this peer is of no offer any more."""
        after[peer] = self._changed(after[peer], ("stale", r))
        there, back = self._pairs[r, peer], self._pairs[peer, r]
        for at, kinds in ((there, (Kind.OFFER,)), (back, (Kind.ANSWER, Kind.CREDIT, Kind.ASK_WHOLE))):
            for lane in range(at, at + 3):
                letters = [self.letters[k] for k in self.lanes[after[lane]]]
                if any(letter.number == CURRENT and letter.kind in kinds for letter in letters):
                    after[lane] = self._lane_id(tuple(
                        self._letter_id(x._replace(number=STALE) if x.number == CURRENT and x.kind in kinds else x)
                        for x in letters
                    ))  # fmt: skip

    # ---- one rank ------------------------------------------------------------------------------------------------

    def _step(self, rank: int, event: tuple[Any, ...]) -> list[_Step]:
        """What comes of it, by the code that trains."""
        key = rank, event
        if key not in self._steps:
            self._happened(rank, event)
            self._steps[key] = self._played(self.ranks[rank], event)
        return self._steps[key]

    def _played(self, frozen: Frozen, event: tuple[Any, ...]) -> list[_Step]:
        if event[0] == "deliver" and isinstance(event[2], int):
            event = (*event[:2], self.letters[event[2]], event[3])
        steps = []
        for outcome in self._live[frozen.number].play(frozen, event):
            all_live = "false-death" in self._faults  # else what it sends to who is dead, as it knows, is lost
            present = range(self.n) if all_live else dict(outcome.rank.budget)["present"][1]
            letters = [(peer, x) for peer, x in outcome.letters if x.bulk or peer in present]
            letters.sort(key=itemgetter(0))  # only the order of those to one peer matters
            numbers = tuple((peer, _BULK if x.bulk else _SMALL, self._letter_id(x)) for peer, x in letters)
            rank = self._rank_id(outcome.rank)
            steps.append(_Step(rank, numbers, outcome.closed, outcome.faults, outcome.failed))
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

    def check_alike(self) -> None:
        """Whether ranks and messages that were taken to be alike are; what is on its way, with the first state of the
        others in which it was. Raises NotAlikeError."""
        while self._unchecked or self._tidied:
            if self._unchecked:
                frozen, rank, event = self._unchecked.pop()
                if not self._comes_the_same(frozen, rank, event):
                    raise NotAlikeError(f"{_differences(frozen, self.ranks[rank])}: unlike after {event}")
                continue
            state, tidy = self._tidied.pop()
            if unlike := self._follows(state) ^ self._follows(tidy):
                raise NotAlikeError(f"what is on its way: unlike after {min(str(label) for label, *_ in unlike)}")

    def _follows(self, state: State) -> set[tuple[Any, ...]]:
        """What is wrong with a state, and all that can come next and is not alike."""
        begin = self.canonical(state)
        found: set[tuple[Any, ...]] = {(fault,) for fault in self.faults_of(state)}
        for label, after, faults in self.successors(state):
            end = None if after is None else self.canonical(after)
            if end != begin or faults:
                found.add((label, end, faults))
        return found

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

    def _look_at(self, frozen: Frozen) -> _About:
        if frozen.mode is Mode.DEAD:
            return _About(Mode.DEAD, (), (), False, False, (), ())
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
        return _About(frozen.mode, present, living, useful, gives_up, deaf_to, tuple(events))

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

    # ---- symmetry ------------------------------------------------------------------------------------------------

    def _symmetries(self) -> list[tuple[int, ...]]:
        """Ranks may change their numbers so without anything being different: around the ring, as all graphs are the
        same from every rank; in the complete graph in any way, if so few that all hear of the end at once. Not by the
        paired exchange, where the lower of two refuses; nor if messages count everybody's steps."""
        n = self.n
        if self.case.mixing == "paired" or self.case.updates or self.case.protocol is not None:
            return []
        if self.case.topology == "complete" and n <= 3:
            return list(itertools.permutations(range(n)))[1:]
        return [tuple((r + shift) % n for r in range(n)) for shift in range(1, n)]

    def _permutation(self, numbers: tuple[int, ...]) -> Callable[[State], State]:
        """State -> the same with other numbers of ranks."""
        old = [numbers.index(r) for r in range(self.n)]
        lanes = [self._pairs[old[s], old[r]] + lane for s, r in self._pairs for lane in range(3)]
        pick, tables = itemgetter(*lanes), dict[int, int]()

        def permuted(state: State) -> State:
            ranks = []
            for r in old:
                i = state[r]
                if i not in tables:
                    tables[i] = self._rank_id(relabelled(self.ranks[i], numbers))
                ranks.append(tables[i])
            return (*ranks, *pick(state), state[-1])

        return permuted


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
