"""What a state of the explorer holds of a rank and of a message: comparable, and without live objects."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from pala.exchange.budget import Stop
from pala.exchange.gossip import topology as graph
from pala.exchange.gossip.driver import GossipDriver
from pala.exchange.gossip.messages import WITH_MODEL, Kind
from pala.exchange.gossip.paired import _Offer
from pala.exchange.gossip.protocol import GossipProtocol

AGAIN_S, PATIENCE_S, NO_PATIENCE_S = 1.0, 1000.0, 1e9
ANY, CURRENT, STALE = 0, 1, 2
"""All that matters of the number in a reply: it means any offer, the one that is open, or one that is open no more. A
later offer never gets the number of an earlier one, so what is stale stays stale. Rounds begin above these."""
FIRST_ROUND = 3
_PLAIN = (bool, int, float, Stop)
"""Types of attributes that are frozen as they are."""
_OF_PEERS = {"silent", "present", "living", "left", "_asleep", "_owed", "_inbox", "_stale", "_wants_whole"}
"""Attributes of protocol and budget that hold ranks' numbers."""


class Mode(enum.IntEnum):
    """What a rank's learner does."""

    UPDATES = 0
    WAITS = 1
    ENDED = 2
    LEFT = 3
    DEAD = 4


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
    exchanges_per_update: int = 1
    snapshots: int = 2
    rare: frozenset[str] = frozenset()
    """Of the faults, those that come at most `most_rare` times in a run, together; damage and doubles always do."""
    most_rare: int = 2
    protocol: type[GossipProtocol] | None = None
    driver: type[GossipDriver] = GossipDriver

    @property
    def has_clock(self) -> bool:
        """Whether a patience can end."""
        return not self.faults.isdisjoint({"patience", "absence"})

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
        found: dict[tuple[int, ...], int] = {}
        round_ = FIRST_ROUND
        while len(found) < num_choices:
            offsets = tuple(
                graph.OFFSETS["random"](n, round_ + k, 0) for k in range(num_rounds) for n in range(2, self.ranks + 1)
            )
            found.setdefault(offsets, round_)
            round_ += 1
        return sorted(found.values())


class Letter(NamedTuple):
    """A message on its way, with what is known of its model."""

    kind: Kind
    number: int = ANY  # of the offer that it is or answers
    weight: Any = 1.0
    stop: Stop = Stop.NONE
    local_steps: tuple[int, ...] = ()
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
    since_mix: int  # updates; counted here, and not by the protocol
    excused: bool  # its patience has ended since its last mix
    protocol: tuple[tuple[str, Any], ...] = ()
    budget: tuple[tuple[str, Any], ...] = ()
    lock: tuple[tuple[int, float], ...] = ()
    weight: Any = 1.0
    snapshots: tuple[Snapshot, ...] = ()
    num_snapshots: int = 0
    finite: bool = True
    old: bool = False
    inbox: tuple[tuple[int, Letter], ...] = ()


_NAME = itemgetter(0)


def freeze_fields(object_: Any, without: set[str]) -> tuple[tuple[str, Any], ...]:
    """All attributes of an object but those named: comparable, in the order of their names."""
    fields = sorted([item for item in vars(object_).items() if item[0] not in without], key=_NAME)
    return tuple([(name, value if type(value) in _PLAIN else _freeze(value)) for name, value in fields])


def thaw_fields(object_: Any, fields: tuple[tuple[str, Any], ...], without: set[str]) -> None:
    """Give the object these attributes, and no others but those of `without`."""
    attributes = vars(object_)
    if len(attributes) > len(fields) + len(without):
        for name in set(attributes).difference(without, (name for name, _ in fields)):
            del attributes[name]
    for name, value in fields:
        attributes[name] = _thaw(value) if type(value) is tuple else value


def _freeze(value: Any) -> Any:
    """Orders are dropped where nothing but messages to different peers follows them."""
    if isinstance(value, dict):
        return "dict", tuple(sorted((key, _freeze(item)) for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return "set", tuple(sorted(value))
    if isinstance(value, (list, range)):
        return "list", tuple(value)
    if isinstance(value, np.ndarray):
        return "array", tuple(int(item) for item in value)
    if isinstance(value, _Offer):
        return "offer", (value.number, value.void, value.is_late)
    return value


def _thaw(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, items = value
    if kind == "dict":
        return {key: _thaw(item) for key, item in items}
    if kind == "array":
        return np.array(items, np.uint64)
    return _Offer(*items) if kind == "offer" else {"set": set, "list": list}[kind](items)


def relabelled(frozen: Frozen, numbers: tuple[int, ...]) -> Frozen:
    """The same rank where rank r is called numbers[r]; of one-way rules without counts of steps."""
    if frozen.mode is Mode.DEAD:
        return frozen._replace(number=numbers[frozen.number])
    fields = []
    for name, value in (*frozen.protocol, *frozen.budget):
        if name in _OF_PEERS:
            kind, items = value
            if kind == "dict":
                value = kind, tuple(sorted((numbers[peer], item) for peer, item in items))
            else:
                peers = tuple(numbers[peer] for peer in items)
                value = kind, peers if name == "_owed" else tuple(sorted(peers))
        fields.append((name, value))
    num = len(frozen.protocol)
    lock = tuple(sorted(((numbers[peer], since) for peer, since in frozen.lock), key=lambda held: (held[1], held[0])))
    snapshots = (
        snapshot._replace(to=tuple(sorted((numbers[peer], kind) for peer, kind in snapshot.to)))
        for snapshot in frozen.snapshots
    )
    return frozen._replace(
        number=numbers[frozen.number], protocol=tuple(fields[:num]), budget=tuple(fields[num:]), lock=lock,
        snapshots=tuple(sorted(snapshots)),
        inbox=tuple(sorted((numbers[sender], letter) for sender, letter in frozen.inbox)),
    )  # fmt: skip
