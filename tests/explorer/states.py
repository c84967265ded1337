"""What a state of the explorer holds of a rank and of a message: comparable, and without live objects."""

from __future__ import annotations

import copy
import enum
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pala.config.catalogue import RULES, TOPOLOGIES
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.canonical import FIRST_ROUND, OFFER
from pala.exchange.gossip.driver import GossipDriver, make_protocol
from pala.exchange.gossip.messages import WITH_MODEL, Kind
from pala.exchange.gossip.paired import ANY
from pala.exchange.gossip.process_lock import ProcessLock
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.gossip.state import GossipState, Rules

AGAIN_S, PATIENCE_S = 1.0, 1000.0
CURRENT, STALE = OFFER, OFFER + 1
"""All that matters of the number in a reply: it means `ANY` offer, the one that is open, or one that is open no more. A
later offer never gets the number of an earlier one, so what is stale stays stale."""
_MANY_STEPS = 1 << 62


class Mode(enum.IntEnum):
    """What a rank's learner does."""

    FOLLOWS = 0  # in a group of which another gossips
    UPDATES = 1
    WAITS = 2
    ENDED = 3
    LEFT = 4
    DEAD = 5


@dataclass(frozen=True)
class Case:
    """What is explored."""

    ranks: int = 2
    topology: str = "random"
    mixing: str = "uniform"
    max_staleness: int = 1
    faults: frozenset[str] = frozenset()
    updates: int = 0
    """The budget in updates of all ranks together; 0: none, and by the fault `stop` any rank may find the budget met at
    any time. Steps are only ever compared with the budget, so that covers whatever the counters say."""
    whole_every: int = 1
    snapshots: int = 2
    rare: frozenset[str] = frozenset()
    """Of the faults, those that come at most `most_rare` times in a run, together; damage and doubles always do."""
    most_rare: int = 2
    groups: tuple[int, ...] = ()
    """Group of each rank, which hold one model; none: each has its own. What happens inside a group is in `groups.py`;
    here the next one leads when it hears that the leader is dead, or has left."""
    protocol: Callable[[Rules], GossipProtocol] = make_protocol
    driver: type[GossipDriver] = GossipDriver

    @property
    def by_pairs(self) -> bool:
        """Whether ranks exchange two at a time."""
        return RULES[self.mixing].by_pairs

    @property
    def has_clock(self) -> bool:
        """Whether a patience can end."""
        return not self.faults.isdisjoint({"patience", "absence"})

    @cached_property
    def rules(self) -> Rules:
        """What the ranks keep to."""
        return Rules(
            self.topology,
            self.max_staleness,
            seed=0,
            whole_every=self.whole_every,
            again_s=AGAIN_S,
            patience_s=PATIENCE_S if self.has_clock else math.inf,
            mixing=self.mixing,
        )

    @cached_property
    def gossip(self) -> GossipProtocol:
        """The protocol of all ranks."""
        return self.protocol(self.rules)

    def new_state(self, rank: int, round_: int = 0, weight: Any = 1.0) -> GossipState:
        """Return what a rank knows at the beginning."""
        budget = StepBudget(rank, self.ranks, self.updates or _MANY_STEPS, groups=self.groups)
        return self.gossip.new_state(budget, weight, round_)

    @cached_property
    def _example(self) -> GossipState:
        return self.new_state(0)

    def thaw(self, values: tuple[Any, ...]) -> GossipState:
        """Return the state that `freeze` made these values of."""
        return _thaw(self._example, values)

    @property
    def period(self) -> int:
        """Rounds that are so far apart have the same peers, however many ranks live."""
        if self.topology != "exponential":
            return 1
        return math.lcm(*((n - 1).bit_length() for n in range(2, self.ranks + 1)))

    @cached_property
    def first_rounds(self) -> list[int]:
        """Rounds of the random graph, one for each possible set of offsets of what one event may begin: one round, or,
        where a rank that must wait for each mix owes for several, as many as there are ranks. The explorer takes any of
        them at each step: whatever the seed, what a run can do is among that."""
        if self.topology != "random" or self.ranks == 2:
            return []
        num_rounds = self.ranks if self.max_staleness == 0 else 1
        num_choices = math.lcm(*range(1, self.ranks)) ** num_rounds  # the offsets are the rests of one number
        offset = TOPOLOGIES["random"].offset
        assert offset is not None
        found: dict[tuple[int, ...], int] = {}
        round_ = FIRST_ROUND
        while len(found) < num_choices:
            offsets = tuple(offset(n, round_ + k, 0) for k in range(num_rounds) for n in range(2, self.ranks + 1))
            found.setdefault(offsets, round_)
            round_ += 1
        return sorted(found.values())


class Letter(NamedTuple):
    """A message on its way, with what is known of its model."""

    kind: Kind
    number: int = ANY  # of the offer that it is or answers
    weight: Any = 1.0
    stop: Stop = Stop.NONE
    steps_by_rank: tuple[int, ...] = ()
    whole: bool = True
    finite: bool = True
    old: bool = False  # it was sent to a rank that was away then

    @property
    def bulk(self) -> bool:
        """Whether it holds a model."""
        return self.kind in WITH_MODEL


class Snapshot(NamedTuple):
    """A snapshot in use."""

    to: tuple[tuple[int, Kind], ...]  # that it has not left for
    offered_to: int = -1
    is_old: bool = False  # sent longer ago than the patience
    answer: Any = None  # the fraction in the answer to it
    before_heal: bool = False


class Frozen(NamedTuple):
    """A rank, comparable."""

    number: int
    mode: Mode
    made: int  # updates, if they are counted
    since_mix: int = 0  # updates; counted here, and not by the protocol
    excused: bool = False  # its patience has ended since its last mix
    state: tuple[Any, ...] = ()  # of its protocol, frozen
    snapshots: tuple[Snapshot, ...] = ()
    num_snapshots: int = 0
    finite: bool = True
    old: bool = False
    inbox: tuple[tuple[int, Letter], ...] = ()


def freeze(state: GossipState | StepBudget) -> tuple[Any, ...]:
    """Return the values of all fields, comparable. Orders are dropped where nothing but messages to different peers
    follows them."""
    return tuple(_frozen(getattr(state, field.name)) for field in fields(state))


def _frozen(value: Any) -> Any:
    if isinstance(value, StepBudget):
        return freeze(value)
    if isinstance(value, ProcessLock):
        return tuple(value.held_since_s.items())
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    if isinstance(value, set):
        return tuple(sorted(value))
    if isinstance(value, (list, range)):
        return tuple(value)
    return tuple(value.tolist()) if isinstance(value, np.ndarray) else value


def _thaw(example: Any, values: tuple[Any, ...]) -> Any:
    """Return an object like the example with these values."""
    made = copy.copy(example)
    for field, value in zip(fields(example), values, strict=True):
        setattr(made, field.name, _thawed(getattr(example, field.name), value))
    return made


def _thawed(example: Any, value: Any) -> Any:
    if isinstance(example, StepBudget):
        return _thaw(example, value)
    if isinstance(example, ProcessLock):
        return ProcessLock(dict(value))
    if isinstance(example, Counter):
        return Counter(dict(value))
    if isinstance(example, dict):
        return dict(value)
    if isinstance(example, (list, range)):
        return list(value)
    if isinstance(example, set):
        return set(value)
    return np.array(value, np.uint64) if isinstance(example, np.ndarray) else value


def relabelled(frozen: Frozen, numbers: tuple[int, ...], case: Case) -> Frozen:
    """Return the same rank where rank r is called numbers[r]; of one-way rules without counts of steps."""
    number = numbers[frozen.number]
    if frozen.mode is Mode.DEAD:
        return frozen._replace(number=number)
    s = case.thaw(frozen.state)
    budget = s.budget
    budget.rank = number
    budget.present = sorted(numbers[peer] for peer in budget.present)
    budget.living = sorted(numbers[peer] for peer in budget.living)
    budget.left = {numbers[peer] for peer in budget.left}
    budget.asleep = {numbers[peer] for peer in budget.asleep}
    for name in ("silent", "stale", "wants_whole", "stayers", "leavers"):
        setattr(s, name, {numbers[peer] for peer in getattr(s, name)})
    s.owed = [numbers[peer] for peer in s.owed]
    s.to_mix = {numbers[peer]: weight for peer, weight in s.to_mix.items()}
    held = sorted((since_s, numbers[peer]) for peer, since_s in s.lock.held_since_s.items())
    s.lock.held_since_s = {peer: since_s for since_s, peer in held}
    snapshots = (
        snapshot._replace(to=tuple(sorted((numbers[peer], kind) for peer, kind in snapshot.to)))
        for snapshot in frozen.snapshots
    )
    inbox = sorted((numbers[sender], letter) for sender, letter in frozen.inbox)
    return frozen._replace(number=number, state=freeze(s), snapshots=tuple(sorted(snapshots)), inbox=tuple(inbox))
