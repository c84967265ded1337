"""All ranks and what is on its way between them: states of the explorer, and what can happen in each.

A state is a tuple of small numbers: one a rank, then three a pair of ranks, for what is on its way (small messages,
models, and models that are too late, each in the order in which they were sent), then how many rare faults there were.
What the numbers of ranks and messages stand for, and what comes of an event to one rank, is in `tables.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from operator import itemgetter
from typing import Any, NamedTuple

from explorer.rank import initial
from explorer.states import CURRENT, STALE, Case, Frozen, Mode, relabelled
from explorer.tables import BULK, LATE, SMALL, About, Step, Tables
from pala.exchange.budget import Stop
from pala.exchange.gossip.driver import make_protocol
from pala.exchange.gossip.messages import CREDITS, Kind

State = tuple[int, ...]
Label = tuple[Any, ...]
"""What happened: a word, the ranks that it happened to, and of random choices which."""

FAULTS = {
    "stop": "a rank finds the budget met, at any time",
    "signal": "a rank is told to end, at any time",
    "timer": "a waiting rank sends again at any time; else only where nothing of its own is on its way",
    "death": "ranks die; what is on its way from them may be lost, what is on its way to them is",
    "leave": "a rank is told to leave; it dies if another stays that has a model of use",
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
    {
        "stop",
        "signal",
        "death",
        "tell",
        "leave",
        "nan",
        "absence",
        "late",
        "garbled",
        "refused",
        "duplicate",
        "false-death",
    }
    | {"lose", "depart"}
)
"""Labels of what need not happen, ever."""
RARE = frozenset({"garbled", "refused", "duplicate"})
"""Faults of which each may leave one more model on its way: without a limit there would be no end to the states."""
_REPLIES = (*CREDITS, Kind.ANSWER)
_LANES = ("message", "model", "late model")


class Successor(NamedTuple):
    """What can come next."""

    label: Label
    state: State | None  # None: it cannot continue from there
    faults: tuple[str, ...]


class World(Tables):
    """The states of a case."""

    def __init__(self, case: Case, symmetry: bool = False) -> None:
        super().__init__(case)
        pairs = list(itertools.permutations(range(self.n), 2))
        self._pairs = {pair: self.n + 3 * k for k, pair in enumerate(pairs)}  # where a pair's lanes begin
        self._touching = [[at for pair, at in self._pairs.items() if r in pair] for r in range(self.n)]
        self._rare = (case.rare | RARE) & case.faults
        self._may_send_again = not case.faults <= NORMAL
        self._permutations = [self._permutation(p) for p in self._symmetries()] if symmetry else []

    # ---- states --------------------------------------------------------------------------------------------------

    def initial(self) -> list[State]:
        """Return where runs begin; resumed ones begin with unlike rounds and weights."""
        nothing, resumed = (0,) * (3 * len(self._pairs) + 1), "resume" in self._faults
        weights = [Fraction(2 * k + 1, self.n) if resumed else Fraction(1) for k in range(self.n)]
        states = []
        for begin in itertools.product(range(self.case.period if resumed else 1), repeat=self.n):
            ranks = [initial(self.case, k, begin[k], weights[k]) for k in range(self.n)]
            states.append(self.least((*map(self.rank_id, ranks), *nothing)))
        return list(dict.fromkeys(states))

    def mode(self, state: State, rank: int) -> Mode:
        """Return what that rank does."""
        return self._about[state[rank]].mode

    def has_ended(self, state: State) -> bool:
        """Whether all who live have."""
        return all(self.mode(state, r) >= Mode.ENDED for r in range(self.n))

    def least(self, state: State) -> State:
        """Return the one that stands for all that differ only by the ranks' numbers."""
        if not self._permutations:
            return state
        return min(state, *(permuted(state) for permuted in self._permutations))

    def faults_of(self, state: State) -> Iterator[str]:
        """Yield what must hold in every state and does not."""
        n, ranks = self.n, [self.ranks[i] for i in state[: self.n]]
        about = [self._about[i] for i in state[:n]]
        if not self._faults & {"duplicate", "false-death"}:
            for (sender, receiver), at in self._pairs.items():
                back = self._pairs[receiver, sender]
                lanes = state[at : at + 3], state[back : back + 3]
                key = "held", sender, state[receiver], lanes
                if self._recall(key, lambda: self._models_held(sender, self.ranks[state[receiver]], *lanes)) > 1:  # noqa: B023
                    yield f"process lock: rank {receiver} holds two models of rank {sender}"
        dead = any(rank.mode is Mode.DEAD for rank in ranks)
        if self.case.mixing == "push_sum" and not dead and "garbled" not in self._faults:
            held = sum(one.weight for one in about) + sum(letter.weight for rank in ranks for _, letter in rank.inbox)
            sent = (self.letters[k] for lane in state[n:-1] for k in self.lanes[lane])
            total = held + sum(letter.weight for letter in sent if letter.kind is Kind.MODEL)
            if total != n:
                yield f"push-sum weight: {total} of {n}"
        if self.case.updates:
            made = sum(rank.made for rank in ranks)
            known = max(one.known_steps for one in about if one.mode is not Mode.DEAD)
            if known > made:
                yield f"known steps that nobody made: {known} of {made}"

    def _models_held(self, sender: int, receiver: Frozen, there: State, back: State) -> int:
        """Count the models of one rank that another is to take in, and the credits for them on their way back."""
        if receiver.mode is Mode.DEAD:
            return 0
        coming = [self.letters[k] for lane in there for k in self.lanes[lane]]
        replies = [self.letters[k] for lane in back for k in self.lanes[lane] if self.letters[k].kind in _REPLIES]
        if self.case.by_pairs:  # one that is taken for an offer that could not be read may come on top
            return sum(x.number == CURRENT for x in coming if x.kind is Kind.OFFER) + sum(
                x.number == CURRENT for x in replies
            )
        held = sum(peer == sender for peer, _ in receiver.inbox)
        return sum(x.kind is Kind.MODEL for x in coming) + held + len(replies)

    # ---- what can happen -----------------------------------------------------------------------------------------

    def successors(self, state: State) -> list[Successor]:
        """Return all that can come next and is not the same."""
        found: list[Successor] = []
        about = [self._about[i] for i in state[: self.n]]
        last = self._last_of_use(about)
        for r in range(self.n):
            for word, event in about[r].events:
                if word in ("nan", "absence") and r in last and not (word == "absence" and "patience" in self._faults):
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
        """Let `event` happen to rank r, after what has already changed `before` into `since`."""
        since = before if since is None else since
        steps = self._step(since[r], event)
        for choice, step in enumerate(steps):
            if step.failed:
                found.append(Successor(label, None, step.faults))
                continue
            after = self._after(since, r, step)
            if after != before or step.faults:
                found.append(Successor((*label, f"choice {choice}") if len(steps) > 1 else label, after, step.faults))

    def _last_of_use(self, about: list[About]) -> list[int]:
        """Return the ranks to which nothing may happen that costs a model: the only one that has a model of use and
        was not told to leave, or if all were, all."""
        useful = [r for r in range(self.n) if about[r].useful]
        stay = [r for r in useful if not about[r].told]
        return useful if not stay else stay if len(stay) == 1 else []

    def _departs(self, found: list[Successor], state: State, about: list[About], r: int) -> None:
        """Let a rank that has left go, once all others that live have the news, if it still may."""
        others = [peer for peer in range(self.n) if peer != r and about[peer].mode is not Mode.DEAD]
        if not about[r].may_leave or any(state[self._pairs[r, peer] + SMALL] for peer in others):
            return
        if any(about[peer].mode is Mode.DEAD for peer in about[r].present):  # what it sent is lost, so it hears of it
            return
        # A rank that has left, too, keeps its model while it is there: it goes only when this holds for it as well.
        kept = any(about[peer].finite for peer in others)
        faults = () if kept else ("leave: no rank that stays has a model of use",)
        found.append(Successor(("depart", r), self._die(state, r), faults))

    def _deaths(self, found: list[Successor], state: State, about: list[About], last: list[int]) -> None:
        alive = [r for r in range(self.n) if about[r].mode is not Mode.DEAD]
        for r in alive:
            for peer in about[r].present:
                if about[peer].mode is Mode.DEAD:
                    self._happens(found, ("notice", r, peer), state, r, ("notice", peer))
                elif "false-death" in self._faults and peer != r:
                    self._happens(found, ("false-death", r, peer), state, r, ("notice", peer))
            if about[r].mode is Mode.LEFT:
                self._departs(found, state, about, r)
            elif "death" in self._faults and len(alive) > 1 and r not in last:
                found.append(Successor(("death", r), self._die(state, r), ()))

    def _messages(
        self, found: list[Successor], state: State, about: list[About], sender: int, receiver: int, at: int
    ) -> None:
        """Let the first message of each lane come, somehow."""
        for lane in range(3):
            if not state[at + lane]:
                continue
            first, *rest = self.lanes[state[at + lane]]
            letter, where = self.letters[first], (sender, receiver, _LANES[lane])
            without = list(state)
            without[at + lane] = self.lane_id(tuple(rest))
            if lane != SMALL:
                without[sender] = self._left(state[sender], receiver, letter.kind)
            taken = tuple(without)
            how = "late" if lane == LATE else ""
            self._happens(found, ("deliver", *where), state, receiver, ("deliver", sender, first, how), taken)
            if about[sender].mode is Mode.DEAD:
                found.append(Successor(("lose", *where), taken, ()))
            if lane == BULK and "late" in self._faults:
                without = list(state)
                without[at + lane] = self.lane_id(tuple(rest))
                without[at + LATE] = self._pushed(state[at + LATE], first)
                found.append(Successor(("late", *where), tuple(without), ()))
            event = "deliver", sender, first, "garbled"
            if lane == BULK and "garbled" in self._faults:
                self._happens(found, ("garbled", *where), state, receiver, event, taken)
            if lane == SMALL and "refused" in self._faults:
                self._happens(found, ("refused", *where), state, receiver, event, taken)
            if lane == SMALL and letter.kind is not Kind.STOP and "duplicate" in self._faults:
                event = "deliver", sender, first, ""
                self._happens(found, ("duplicate", *where), state, receiver, event)

    def _close(self, found: list[Successor], state: State) -> None:
        """Let each rank do what it does on its own when all have closed."""
        faults: list[str] = []
        for i in state[: self.n]:
            rank = self.ranks[i]
            if rank.mode in (Mode.LEFT, Mode.DEAD):
                continue
            for step in self._step(i, ("close",)):
                faults += step.faults
            about = self._about[i]
            is_met = about.stop is Stop.BUDGET and "stop" not in self._faults
            if is_met and about.known_steps < self.case.updates:
                faults.append(f"budget: rank {rank.number} ended at {about.known_steps} steps of {self.case.updates}")
        if faults:
            found.append(Successor(("close",), None, tuple(faults)))

    def _is_quiet(self, state: State, about: list[About], r: int) -> bool:
        """Return whether nothing is on its way to or from that rank, and all that it counts on live."""
        if not self._may_send_again or any(any(state[at : at + 3]) for at in self._touching[r]):
            return False
        if any(about[peer].mode is Mode.DEAD for peer in about[r].living):
            return False
        (step, *_) = self._step(state[r], ("advance",))
        return step.rank == state[r] and not step.letters

    def _after(self, state: State, r: int, step: Step) -> State:
        """Return what rank r's step makes of the state."""
        after = list(state)
        after[r] = step.rank
        for peer in step.closed:
            self._close_offer(after, r, peer)
        for peer, lane, letter in step.letters:
            if self._about[after[peer]].mode is Mode.DEAD:  # it is lost, and its memory free
                if lane == BULK:
                    after[r] = self._left(after[r], peer, self.letters[letter].kind)
            elif self.letters[letter].kind not in self._about[after[peer]].deaf_to:
                at = self._pairs[r, peer] + lane
                after[at] = self._pushed(after[at], letter)
        if deaf_to := self._about[step.rank].deaf_to:
            for peer in range(self.n):  # as if each came at its turn, at once
                if peer != r and after[self._pairs[peer, r]]:
                    after[self._pairs[peer, r]] = self._without(after[self._pairs[peer, r]], deaf_to)
        return tuple(after)

    def _without(self, lane: int, kinds: tuple[Kind, ...]) -> int:
        letters = self.lanes[lane]
        left = (letter for letter in letters if self.letters[letter].kind not in kinds)
        return self._recall(("without", lane, kinds), lambda: self.lane_id(tuple(left)))

    def _mark_old(self, state: State, r: int, old: bool) -> State:
        """Mark the models on their way to rank r: they were sent before it continues."""
        after = list(state)
        for (_, receiver), at in self._pairs.items():
            for lane in (at + BULK, at + LATE):
                if receiver == r and after[lane]:
                    letters = (self.letters[k]._replace(old=old) for k in self.lanes[after[lane]])
                    after[lane] = self.lane_id(tuple(map(self.letter_id, letters)))
        return tuple(after)

    def _die(self, state: State, r: int) -> State:
        after = list(state)
        for peer in range(self.n):
            if peer == r:
                continue
            at = self._pairs[peer, r]
            for lane in (BULK, LATE):
                for letter in self.lanes[after[at + lane]]:
                    after[peer] = self._left(after[peer], r, self.letters[letter].kind)
            after[at : at + 3] = 0, 0, 0
        after[r] = self.rank_id(Frozen(r, Mode.DEAD, self.ranks[state[r]].made))
        return tuple(after)

    def _close_offer(self, after: list[int], r: int, peer: int) -> None:
        """Let what is known or on its way of the offer that r had made to this peer be of no open offer."""
        after[peer] = self._closed(after[peer], r)
        there, back = self._pairs[r, peer], self._pairs[peer, r]
        for at, kinds in ((there, (Kind.OFFER,)), (back, _REPLIES)):
            for lane in range(at, at + 3):
                letters = [self.letters[k] for k in self.lanes[after[lane]]]
                if any(letter.number == CURRENT and letter.kind in kinds for letter in letters):
                    after[lane] = self.lane_id(tuple(
                        self.letter_id(x._replace(number=STALE) if x.number == CURRENT and x.kind in kinds else x)
                        for x in letters
                    ))  # fmt: skip

    # ---- symmetry ------------------------------------------------------------------------------------------------

    def _symmetries(self) -> list[tuple[int, ...]]:
        """Return how ranks may change their numbers without anything being different: around the ring, as all graphs
        are the same from every rank; in the complete graph in any way, if so few that all hear of the end at once. Not
        by the paired exchange, where the lower of two refuses; nor if messages count everybody's steps, or in groups,
        where the lowest leads."""
        n = self.n
        if self.case.by_pairs or self.case.updates or self.case.groups or self.case.protocol is not make_protocol:
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
                    tables[i] = self.rank_id(relabelled(self.ranks[i], numbers, self.case))
                ranks.append(tables[i])
            return (*ranks, *pick(state), state[-1])

        return permuted
