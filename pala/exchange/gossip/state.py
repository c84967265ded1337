"""State of one rank's gossip, as a value, and the rules that all ranks keep to. Pure.

The protocol's events (`protocol.py`) change a `GossipState` in place. Whoever wants to look at a rank, keep a part of
it, compare two or begin from another one needs nothing else: there is no other memory behind it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pala.config.catalogue import RULES, TOPOLOGIES
from pala.exchange.budget import ExchangeState, StepBudget
from pala.exchange.gossip.process_lock import ProcessLock
from pala.system.seeding import derive

if TYPE_CHECKING:
    from pala.config import Config
    from pala.exchange.gossip.topology import Peers


@dataclass(frozen=True)
class Rules:
    """Rules that all ranks of a run keep to."""

    topology: str
    max_staleness: int
    seed: int = 0
    """Seed of the random topology."""
    whole_every: int = 1
    """Number of sends of which one must carry the whole model; the others may carry a part. Prime: otherwise in the
    exponential graph, whose rounds repeat, some ranks might get no whole model at all."""
    again_s: float = 2.0
    """Seconds until a waiting rank sends its model once more."""
    patience_s: float = 5.0
    """Seconds that others may keep a rank waiting; longer if its own updates take long."""
    mixing: str = "uniform"
    own_topology: Peers | None = None
    """A user's own, in place of the named one."""

    @classmethod
    def of(cls, config: Config, whole_every: int, own_topology: Peers | None = None) -> Rules:
        """Return the rules of a run. `whole_every`: the codec's."""
        return cls(
            config.exchange.graph,
            config.exchange.max_staleness,
            int(derive(config.seed, 0, "topology")[0]),
            whole_every,
            patience_s=config.exchange.patience_s,
            mixing=config.exchange.mixing,
            own_topology=own_topology,
        )

    @property
    def peers(self) -> Peers:
        """The topology."""
        return self.own_topology or TOPOLOGIES[self.topology]

    @property
    def debts_stay(self) -> bool:
        """Whether a model that is owed is still owed after the next update."""
        return self.max_staleness == 0 and not RULES[self.mixing].by_pairs

    @property
    def in_step(self) -> bool:
        """Whether the two ranks of a pair make each update from one model."""
        return RULES[self.mixing].by_pairs and self.max_staleness == 0


class Offer(NamedTuple):
    """A model of this rank that a peer is to answer, in the paired exchange."""

    number: int  # as the reply says it
    void: bool = False  # of a model that has been replaced since
    of_earlier_update: bool = False  # made before the last update ended; noted where ranks go in step


@dataclass(slots=True, eq=False)
class GossipState:
    """One rank's numbers, and sets and dicts of numbers. From `offers` to `refusing` they are the paired
    exchange's; the last three are of ranks that leave.

    | time | set when | what follows |
    |---|---|---|
    | `waits_since_s` | a rank begins to wait | after `patience_s` it gives up, and continues without a mix |
    | `sent_again_s` | then, and when it sends again | after `again_s` it sends its model once more |
    | `asks_again_s` | it takes a place, or has waited `again_s` to heal | it asks for a whole model, each `again_s` |
    | `lock.held_since_s` | a model leaves | after `patience_s` its receiver is silent |
    | `now_s` | a look at the clock | if the next is `patience_s` later, this rank was away |

    The first three are infinite otherwise.
    """

    budget: StepBudget
    weight: float = 1.0  # of this rank's model
    round: int = 0
    num_sends: int = 0  # of models
    lock: ProcessLock = field(default_factory=ProcessLock)
    staleness: int = 0  # updates since the last mix
    healthy: bool = True  # this rank's model is finite
    silent: set[int] = field(default_factory=set)  # peers that have held a model of this rank for too long
    counts: Counter[str] = field(default_factory=Counter)  # for the metrics; whoever reads them may empty it
    owed: list[int] = field(default_factory=list)  # peers that this rank's model is to be sent to
    rounds_due: int = 1  # of sending, at the end of the next update
    to_mix: dict[int, float] = field(default_factory=dict)  # models that came: sender -> its weight in the mix
    whole_came: bool = False  # of the models in the inbox, one is whole
    num_rejected: int = 0  # models since the last mix
    wants_whole: set[int] = field(default_factory=set)  # peers that could do nothing with a part
    now_s: float = -math.inf  # when the clock was last looked at
    update_began_s: float = math.nan
    update_s: float = math.inf  # what an update usually takes
    patience_s: float = math.inf  # how long others may keep this rank waiting: longer if its own updates take long
    transfer_s: float = 0.0  # what a model usually takes to come
    between_updates: bool = False
    has_put_off: bool = False  # a send of this update, since there was no memory for it
    waits_since_s: float = math.inf
    sent_again_s: float = math.inf
    gave_up: bool = False  # waited in vain: continues without a mix until a model comes
    returning: bool = False  # it was away, and has taken no peer's model since
    asks_again_s: float = math.inf  # when a rank that takes a place, or waits to heal, asks for a model
    num_asked: int = 0  # times that it has asked
    stale: set[int] = field(default_factory=set)  # peers whose next model may be as old as that of a rank that was away
    offers: dict[int, Offer] = field(default_factory=dict)  # to peers that have not replied
    answers: dict[int, float] = field(default_factory=dict)  # that came: the fraction to move by
    only_late_answers: bool = False  # each is to an offer of an earlier update
    offer_numbers: dict[int, int] = field(default_factory=dict)  # of the offers to mix, by sender; replies repeat them
    refusing: set[int] = field(default_factory=set)  # peers that have refused this rank's last offer to them
    leaves: bool = False  # told to leave; it does when another rank has said that it has a model of use, and stays
    stayers: set[int] = field(default_factory=set)  # ranks that have said so
    leavers: set[int] = field(default_factory=set)  # ranks that were told to leave, and wait for this one's reply

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.budget.rank

    @property
    def living(self) -> Sequence[int]:
        """Ranks that live and train, as far as known here; sorted."""
        return self.budget.living

    @property
    def has_left(self) -> bool:
        """True of a rank that trains no more, though others do."""
        return self.budget.rank in self.budget.left

    @property
    def transfer_patience_s(self) -> float:
        """Time that a model may be under way: longer on a slow link."""
        return max(self.patience_s, 5 * self.transfer_s)

    @property
    def has_model(self) -> bool:
        """False of a rank whose own model is of no use: not finite, or as old as the time that it was away."""
        return self.healthy and not self.returning

    @property
    def may_leave(self) -> bool:
        """True of a rank that was told to leave, and does not take the last model of use along."""
        return not self.stayers.isdisjoint(self.living)

    def kept(self) -> ExchangeState:
        """Return what a checkpoint keeps of it."""
        budget = self.budget
        return ExchangeState(budget.steps_by_rank.tolist(), budget.base_steps, self.round, self.weight, budget.lost)
