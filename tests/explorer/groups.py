"""Every order of events inside a group of ranks that hold one model: who leads, who dies, leaves and ends, and when.

The ranks run training's own `GroupedGossip` and `GroupMemory`, between two states that can be compared. One step of a
rank goes up to its next wait or announcement. What it announces is seen by the others in a step of its own, so that a
rank may die, and others may act, between what a word announces and the word. Gossip between groups is not in it: at
each update of the leader a mix comes or does not. `explore` has that (`Case.groups`).

Must hold, in every state:

- one rank acts as leader, the lowest that lives and has not left, and no living two ever did so for the same update;
- all that make an update make it with the same mean, of the gradients of those that count, and with the same numbers
  of learners, models and steps; and hold the same model after it;
- nobody waits forever: where nothing can happen but faults, all that live have ended, after the same update, or left.
  Each step brings a rank further in its updates, or in what it knows, so no run is endless.
"""

from __future__ import annotations

import enum
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from explorer.explore import Explored, Violation
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.state import GossipState
from pala.exchange.group_memory import GroupMemory
from pala.exchange.grouped import GroupedGossip
from pala.system.errors import PalaError
from pala.system.interrupt import Interrupt

_MIX = 1000.0  # by which a mix moves the model


class Phase(enum.IntEnum):
    """What a rank does next."""

    PLAYS = 0  # a rollout; then it arrives, or ends
    WAITS_FOR_DECISION = 1
    TAKES_DECISION = 2
    REDUCES = 3
    WAITS_FOR_MEAN = 4
    UPDATES = 5
    WAITS_FOR_MODEL = 6
    TAKES_MODEL = 7
    CLOSES = 8
    ENDED = 9
    LEFT = 10
    DEAD = 11


class Values(NamedTuple):
    """What makes a member's exchange differ from another's. How many mixes there were is in the model."""

    members: tuple[int, ...]
    update: int
    made: tuple[int, ...]
    trained_by: tuple[int, ...]
    known_steps: int
    end: Stop
    all_end: bool
    gossips: bool
    signal: Any
    present: tuple[int, ...]
    left: tuple[int, ...]
    stop: Stop
    steps: tuple[int, ...]
    model: tuple[float, ...]
    gradient: tuple[float, ...]


class Rank(NamedTuple):
    """A member of the group, comparable."""

    phase: Phase
    values: Values
    announces: tuple[tuple[str, str, int], ...] = ()  # what others do not see yet: row, word, value


class Update(NamedTuple):
    """What has been seen of an update of the group."""

    decided_by: tuple[int, ...] = ()
    published_by: tuple[int, ...] = ()
    made_with: Any = None  # the mean, and all else that changes a step
    model: Any = None  # after it


class State(NamedTuple):
    """The group, comparable."""

    ranks: tuple[Rank, ...]
    memory: bytes
    updates: tuple[Update, ...]
    faults: int  # that have happened


class Event(NamedTuple):
    """Something that can happen."""

    label: str  # ranks by their numbers
    happens: Callable[[], State]
    """Returns what comes of it, perhaps the same state. Raises WrongError, or what the code that is explored raises."""
    is_fault: bool = False  # it need not happen, ever


@dataclass(frozen=True)
class Case:
    """What is explored."""

    members: int = 2
    updates: int = 2
    """The budget in updates of all members together is `members` times as many."""
    faults: frozenset[str] = frozenset()
    """Any of death, leave, signal and callback."""
    most_faults: int = 1
    hears: frozenset[str] = frozenset()
    """What comes from other groups: news of steps, or of the end (stop)."""
    member: type[Member] | None = None


class WrongError(Exception):
    """Something that must hold does not."""


class _Memory(GroupMemory):
    """The memory of a group as one rank sees it."""

    def __init__(self, comm: Any, case: Case) -> None:
        super().__init__(comm, range(case.members), case.members)  # a slice of the mean has a parameter
        self.announced: list[tuple[str, str, int]] = []
        self.acts: list[tuple[str, int]] = []

    def _announce(self, row: np.void, word: str, value: int) -> None:
        if row[word] != value:
            name = next((str(rank) for rank, own in self.members.items() if own is row), "head")
            self.announced.append((name, word, int(value)))

    def make_seen(self, row: str, word: str, value: int) -> None:
        """Let the others see what was announced."""
        (self.head if row == "head" else self.members[int(row)])[word] = value

    def decide(self, update: int, *decision: Any) -> None:
        self.acts.append(("decided_by", update))
        super().decide(update, *decision)

    def publish(self, update: int, *published: Any) -> None:
        self.acts.append(("published_by", update))
        super().publish(update, *published)


class _Driver:
    """Stands in for gossip between groups."""

    lock = nullcontext()
    heals = 0

    def __init__(self, state: GossipState, parameters: torch.Tensor) -> None:
        self.mixes, self._state, self._parameters = False, state, parameters
        self.counts, self.num_mixes = Counter[str](), 0
        self.begin = self.settle = self.finish_update = lambda *given: None

    def advance(self) -> bool:
        if self.mixes:
            self._parameters += _MIX
            self.counts["mixes"] += 1
            self.num_mixes += 1
        return True

    def end(self, reason: Stop) -> None:
        self._state.budget.stop_now(reason)

    def leave(self) -> None:
        self._state.budget.rank_left(self._state.budget.rank)


class Member(GroupedGossip):
    """The live exchange of a member: training's, but for what it communicates by. Beside the group there is one rank
    more, a group of its own, which lives."""

    def __init__(self, case: Case, number: int, share_memory: Callable[..., Any]) -> None:
        n = case.members
        self._comm: Any = SimpleNamespace(rank=number, size=n + 1, share_memory=share_memory)
        self._groups = (0,) * n + (1,)
        self._memory: _Memory = _Memory(self._comm, case)
        self.model, self.brought = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self._parameters, self.gradient = torch.from_numpy(self.model), torch.from_numpy(self.brought)
        budget = StepBudget(number, n + 1, n * case.updates, groups=self._groups)
        self._state = GossipState(budget)
        self._state.stayers.add(n)  # the other group's has said that it stays
        self._asks_again_s = math.inf
        self._transport: Any = SimpleNamespace(
            poll=lambda: None, raise_failure=lambda: None, wait_until_sent=lambda patience_s: None
        )
        self.interrupt, self._patience_s, self._stays = Interrupt(), 1.0, False
        self.driver: Any = _Driver(self._state, self._parameters)
        self._average_met_the_end = self._has_closed = False
        self._num_published = 0
        self._members = range(n)
        self._update, self._made = 0, np.zeros(n + 1, np.uint64)
        self._trained_by, self._known_steps = range(n + 1), 0
        self._end, self._all_end, self._gossips = Stop.NONE, False, number == 0

    def values(self) -> Values:
        """Return what it is now."""
        budget = self._state.budget
        return Values(
            tuple(self._members),
            self._update,
            tuple(self._made.tolist()),
            tuple(self._trained_by),
            self._known_steps,
            self._end,
            self._all_end,
            self._gossips,
            self.interrupt.signal,
            tuple(budget.present),
            tuple(sorted(budget.left)),
            budget.stop,
            tuple(budget.steps_by_rank.tolist()),
            tuple(self.model.tolist()),
            tuple(self.brought.tolist()),
        )

    def take(self, rank: Rank) -> None:
        """Become what these values say, with nothing done yet."""
        values, budget = rank.values, self._state.budget
        self.phase = rank.phase
        self._members, self._update, self._trained_by = values.members, values.update, values.trained_by
        self._made = np.array(values.made, np.uint64)
        self._known_steps = values.known_steps
        self._end, self._all_end, self._gossips = values.end, values.all_end, values.gossips
        self.interrupt.signal = values.signal
        budget.present, budget.left, budget.stop = values.present, set(values.left), values.stop
        budget.stayed(())  # count the living again
        budget.steps_by_rank, budget.sum_steps = np.array(values.steps, np.uint64), sum(values.steps)
        self.model[:], self.brought[:] = values.model, values.gradient
        self._num_published = self.driver.num_mixes
        self._memory.announced, self._memory.acts = [], []

    # ---- what a rank does up to its next wait or announcement: training's loop, in steps ----------------------------

    def plays(self) -> Phase:
        if self.interrupt.signal is not None:
            self.stop_now(Stop.SIGNAL)
        if self.stop is Stop.NONE:
            self.gradient[:] = self.brings(self._comm.rank, self._update + 1)
            self._arrive(self.gradient)
            return Phase.WAITS_FOR_DECISION
        if self._all_end:
            return Phase.ENDED
        self._arrive_at_end()
        return Phase.CLOSES

    def brings(self, rank: int, update: int) -> float:
        """Return what every element of the gradient is that a rank brings to an update; all means are exact."""
        return 60.0 * 2**rank + 60.0 * update

    def waits_for_decision(self) -> Phase:
        return Phase.TAKES_DECISION if self._decide_if_leader() else Phase.WAITS_FOR_DECISION

    def takes_decision(self) -> Phase:
        if not self._take_decision():
            return Phase.PLAYS
        return Phase.REDUCES if len(self._members) > 1 else Phase.UPDATES

    def reduces(self) -> Phase:
        self._memory.reduce_slice(self._update, self._comm.rank, self._members)
        return Phase.WAITS_FOR_MEAN

    def waits_for_mean(self) -> Phase:
        return Phase.UPDATES if self._complete_mean() else Phase.WAITS_FOR_MEAN

    def updates(self) -> Phase:
        if len(self._members) > 1:
            self.gradient.copy_(self._memory.mean)
        self._parameters += self.gradient
        learners = self.num_learners, self.num_models, self.global_steps
        self.made_with = (tuple(self.gradient.tolist()), tuple(self._members), learners)
        self._count(1)
        return Phase.WAITS_FOR_MODEL

    def waits_for_model(self) -> Phase:
        return Phase.TAKES_MODEL if self._gossip_if_leader(True) else Phase.WAITS_FOR_MODEL

    def takes_model(self) -> Phase:
        self._take_published(True)
        return Phase.PLAYS

    def closes(self) -> Phase:
        return Phase.ENDED if self._decide_if_leader() else Phase.CLOSES


_NOTHING = Values((), 0, (), (), 0, Stop.NONE, False, False, None, (), (), Stop.NONE, (), (), ())
_AT_WORK = frozenset(Phase) - {Phase.ENDED, Phase.LEFT, Phase.DEAD}


class Group:
    """The states of a case: where runs begin, and what can come next in each."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._block = SimpleNamespace(data=np.zeros(0, np.uint8), fence=lambda: None)
        self._live = [(case.member or Member)(case, rank, self._share) for rank in range(case.members)]
        self._words = self._block.data

    def _share(self, num_bytes: int, among: Sequence[int]) -> Any:
        """Return the memory of all, which the first rank makes."""
        if not len(self._block.data):
            self._block.data = np.zeros(num_bytes, np.uint8)
        return self._block

    def initial(self) -> State:
        """Return the only state in which runs begin."""
        ranks = tuple(Rank(Phase.PLAYS, live.values()) for live in self._live)
        return State(ranks, bytes(len(self._words)), (), 0)

    def events(self, state: State) -> Iterator[Event]:
        """Yield what can happen."""
        for r, rank in enumerate(state.ranks):
            if rank.announces:
                yield Event(f"{r}'s word is seen", partial(self._is_seen, state, r))
            elif rank.phase in _AT_WORK:
                yield Event(f"{r} {rank.phase.name.lower()}", partial(self._step, state, r, mixes=False))
                if rank.phase is Phase.WAITS_FOR_MODEL:
                    yield Event(f"{r} mixes, if it leads", partial(self._step, state, r, mixes=True))
            if rank.phase in _AT_WORK:
                yield from self._hears(state, r)
            if rank.phase is not Phase.DEAD and state.faults < self.case.most_faults:
                yield from self._faults(state, r)

    def _hears(self, state: State, r: int) -> Iterator[Event]:
        """Yield what this rank may be told of by its data proxy."""

        def hears(what: str, tell: Callable[[StepBudget], None]) -> Event:
            return Event(f"{r} hears {what}", partial(self._told, state, r, tell))

        knows = state.ranks[r].values
        for other, rank in enumerate(state.ranks):
            if rank.phase is Phase.DEAD and other in knows.present:
                yield hears(f"that {other} is dead", partial(StepBudget.peer_died, peer=other))
            if rank.phase is Phase.LEFT and other not in knows.left:
                yield hears(f"that {other} has left", partial(StepBudget.rank_left, rank=other))
        reasons = {rank.values.stop for rank in state.ranks} - {Stop.NONE}
        if "stop" in self.case.hears:
            reasons.add(Stop.CALLBACK)
        for reason in sorted(reasons) if knows.stop is Stop.NONE else ():
            yield hears(f"of the end, {reason.name}", partial(StepBudget.stop_now, reason=reason))
        if "news" in self.case.hears and not knows.steps[-1]:
            steps = np.zeros(self.case.members + 1, np.uint64)
            steps[-1] = 1
            yield hears("of another group's step", partial(StepBudget.merge, steps_by_rank=steps, stop=Stop.NONE))

    def _faults(self, state: State, r: int) -> Iterator[Event]:
        faults, rank = self.case.faults, state.ranks[r]
        if "death" in faults:
            yield Event(f"{r} dies", partial(self._put, state, r, Rank(Phase.DEAD, _NOTHING), fault=True), True)
        if "signal" in faults and rank.phase in _AT_WORK and rank.values.signal is None:
            yield Event(f"{r} gets a signal", partial(self._do, state, r, _signal, fault=True), True)
        if rank.phase is Phase.PLAYS and not rank.announces and rank.values.end is Stop.NONE:
            if "callback" in faults:
                yield Event(f"{r}'s callback ends", partial(self._do, state, r, _callback, fault=True), True)
            if "leave" in faults and rank.values.update > 0:
                yield Event(f"{r} leaves", partial(self._do, state, r, _leave, fault=True), True)

    # ---- what comes of it ------------------------------------------------------------------------------------------

    def _step(self, state: State, r: int, mixes: bool) -> State:
        def act(live: Member) -> Phase:
            live.driver.mixes = mixes
            return getattr(live, state.ranks[r].phase.name.lower())()

        after = self._do(state, r, act)
        return after._replace(updates=self._seen(after, r, self._live[r], state.ranks[r].phase))

    def _told(self, state: State, r: int, tell: Callable[[StepBudget], None]) -> State:
        def act(live: Member) -> Phase:
            tell(live._state.budget)
            return live.phase

        return self._do(state, r, act)

    def _do(self, state: State, r: int, act: Callable[[Member], Phase], fault: bool = False) -> State:
        """Let a rank do something, by training's code."""
        live, rank = self._live[r], state.ranks[r]
        self._words[:] = np.frombuffer(state.memory, np.uint8)
        live.take(rank)
        phase = act(live)
        after = Rank(phase, live.values(), (*rank.announces, *live._memory.announced))
        updates = self._with_acts(state, r, live)
        return self._put(state._replace(memory=self._words.tobytes(), updates=updates), r, after, fault)

    def _put(self, state: State, r: int, rank: Rank, fault: bool = False) -> State:
        ranks = (*state.ranks[:r], rank, *state.ranks[r + 1 :])
        return self._forgotten(state._replace(ranks=ranks, faults=state.faults + fault))

    def _is_seen(self, state: State, r: int) -> State:
        (first, *rest), rank = state.ranks[r].announces, state.ranks[r]
        self._words[:] = np.frombuffer(state.memory, np.uint8)
        self._live[r]._memory.make_seen(*first)
        return self._put(state._replace(memory=self._words.tobytes()), r, rank._replace(announces=tuple(rest)))

    # ---- what must hold --------------------------------------------------------------------------------------------

    def _with_acts(self, state: State, r: int, live: Member) -> tuple[Update, ...]:
        """Return what is known of all updates after what a rank has just done as a leader. Raises WrongError."""
        updates = [*state.updates, *[Update()] * (live._update + 1 - len(state.updates))]
        for act, number in live._memory.acts:
            self._check_leader(state, r, act, number, getattr(updates[number - 1], act))
            updates[number - 1] = updates[number - 1]._replace(**{act: (*getattr(updates[number - 1], act), r)})
        return tuple(updates)

    def _seen(self, state: State, r: int, live: Member, before: Phase) -> tuple[Update, ...]:
        """Return what is known of all updates after a rank's step from that phase. Raises WrongError."""
        updates, of_this = [*state.updates], state.updates[live._update - 1]
        if before is Phase.UPDATES:
            brought = [live.brings(rank, live._update) for rank in live._members]
            if live.made_with[0] != (sum(brought) / len(brought),) * self.case.members:
                raise WrongError(f"rank {r} has a mean of {live.made_with[0]}, not that of {live._members}")
            if of_this.made_with not in (None, live.made_with):
                raise WrongError(f"rank {r} makes update {live._update} with {live.made_with}, not {of_this.made_with}")
            updates[live._update - 1] = of_this._replace(made_with=live.made_with)
        if before is Phase.TAKES_MODEL:
            model = tuple(live._parameters.tolist())
            if of_this.model not in (None, model):
                raise WrongError(f"rank {r} has the model {model} after update {live._update}, not {of_this.model}")
            updates[live._update - 1] = of_this._replace(model=model)
        return tuple(updates)

    def _forgotten(self, state: State) -> State:
        """Return the state without what was seen of updates that all have made."""
        if not state.updates:
            return state
        made = min((rank.values.update for rank in state.ranks if rank.phase in _AT_WORK), default=0)
        updates = (Update(),) * min(made - 1, len(state.updates)) + state.updates[max(made - 1, 0) :]
        return state._replace(updates=updates)

    def _check_leader(self, state: State, r: int, act: str, update: int, others: Sequence[int]) -> None:
        living = [other for other in others if state.ranks[other].phase is not Phase.DEAD]
        if living:
            raise WrongError(f"two leaders: update {update} is {act} ranks {living[0]} and {r}")
        lower = [other for other in range(r) if state.ranks[other].phase not in (Phase.DEAD, Phase.LEFT)]
        if lower:
            raise WrongError(f"two leaders: rank {r} acts as one, though rank {lower[0]} lives")

    def check_end(self, state: State) -> None:
        """Check a state in which nothing can happen but faults. Raises WrongError."""
        waiting = [r for r, rank in enumerate(state.ranks) if rank.phase in _AT_WORK]
        if waiting:
            raise WrongError(f"deadlock: ranks {waiting} wait forever")
        ended = [rank.values for rank in state.ranks if rank.phase is Phase.ENDED]
        if len({values.made[:-1] for values in ended}) > 1:
            raise WrongError(f"members ended with unlike steps: {[values.made for values in ended]}")
        if len({values.model for values in ended}) > 1:
            raise WrongError(f"members ended with unlike models: {[values.model for values in ended]}")


def _signal(live: Member) -> Phase:
    live.interrupt.signal = 15  # type: ignore[assignment]
    return live.phase


def _callback(live: Member) -> Phase:
    live.stop_now(Stop.CALLBACK)
    return Phase.PLAYS


def _leave(live: Member) -> Phase:
    return Phase.LEFT if live.leave() else Phase.PLAYS


# ---- all runs, and some ----------------------------------------------------------------------------------------------


def explore(case: Case, most_states: int = 10**6) -> Explored:
    """Search all states, breadth first, up to the first that is wrong."""
    group = Group(case)
    states, came_by = [group.initial()], [(-1, "")]
    index, found, k = {states[0]}, Explored(), 0
    with _quiet():
        while k < len(states) <= most_states and not found.violations:
            label, goes_on = "", False
            try:
                for label, happens, is_fault in group.events(states[k]):
                    after = happens()
                    found.transitions += after != states[k]
                    goes_on |= after != states[k] and not is_fault
                    if after not in index:
                        index.add(after)
                        states.append(after)
                        came_by.append((k, label))
                if not goes_on:
                    label = ""
                    group.check_end(states[k])
            except (AssertionError, PalaError, WrongError) as error:
                found.violations.append(Violation(str(error), _trace(came_by, k, label)))
            k += 1
    found.states, found.finished = len(states), k == len(states)
    return found


def _trace(came_by: Sequence[tuple[int, str]], k: int, last: str) -> tuple[str, ...]:
    """Return how state k was come to, and what happened last, if something did."""
    steps = []
    while k > 0:
        k, label = came_by[k]
        steps.append(label)
    return (*reversed(steps), *[last] * bool(last))


def walk(case: Case, seed: int, late: float = 0.95) -> State:
    """Follow one run, drawn at random, to its end, and return that. `late`: the share of steps at which no fault may
    happen. Raises WrongError, or what the code raises."""
    draw, group = random.Random(seed), Group(case)
    state = group.initial()
    with _quiet():
        while True:
            events = list(group.events(state))
            draw.shuffle(events)
            after = state
            if draw.random() > late:
                after = next((event.happens() for event in events if event.is_fault), state)
            ordinary = (event.happens() for event in events if not event.is_fault)
            if after == state:
                after = next((after for after in ordinary if after != state), state)
            if after == state:
                group.check_end(state)
                return state
            state = after


@contextmanager
def _quiet() -> Iterator[None]:
    """Print nothing of what ranks tell people."""
    with mock.patch("pala.exchange.grouped.log"), mock.patch("pala.exchange.gossip.exchange.log"):
        yield
