"""One rank of gossip, step by step: its protocol and its state, what comes to it, and what it does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.driver import make_protocol
from pala.exchange.gossip.messages import Action, GoOn, Heal, Kind, Mix, SendControl, SendModel, Wait
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.gossip.state import GossipState, Rules
from pala.exchange.wire import Format, Message


class Rank:
    """A protocol with the state that its driver would hold: what is no attribute of the state is an event."""

    def __init__(self, protocol: GossipProtocol, state: GossipState) -> None:
        self.protocol, self.state = protocol, state

    def __getattr__(self, name: str) -> Any:
        if name in GossipState.__slots__ or hasattr(GossipState, name):
            return getattr(self.state, name)
        return partial(getattr(self.protocol, name), self.state)


def protocol(
    rank: int = 0, size: int = 3, *, mixing: str = "uniform", budget_steps: int = 10**9, steps_by_rank=None,
    base_steps: int = 0, round_: int = 0, weight: float = 1.0, make: Callable[[Rules], GossipProtocol] = make_protocol,
    spares: int = 0, **rules,
) -> Rank:  # fmt: skip
    """One rank that has begun its first update at 0 s; by default of a ring, with `max_staleness` 1."""
    budget = StepBudget(rank, size, budget_steps, steps_by_rank, base_steps, spares)
    made = make(Rules(**{"topology": "ring", "max_staleness": 1, "mixing": mixing} | rules))
    p = Rank(made, made.new_state(budget, weight, round_))
    p.start(0.0)
    return p


def message(p: Rank, kind: Kind, sender: int, weight: float = 1.0, whole: bool = True) -> Message:
    """What `sender` may send to p."""
    format_ = Format.FLOAT32 if whole else Format.TOP_K
    return Message(kind, sender, 0, weight, Stop.NONE, np.zeros(p.budget.size, np.uint64), format_)


def model_came(p: Rank, sender: int, weight: float = 1.0, whole: bool = True, **how) -> list[Action]:
    return p.message_came(message(p, Kind.MODEL, sender, weight, whole), **how)


def credit_came(p: Rank, sender: int, kind: Kind = Kind.CREDIT) -> None:
    assert p.message_came(message(p, kind, sender)) == []


def sent_to(actions: list[Action]) -> tuple[int, ...]:
    """The peers that a model goes to."""
    return tuple(peer for action in actions if isinstance(action, SendModel) for peer in action.peers)


def told(actions: list[Action]) -> list[tuple[Kind, int]]:
    """Messages without a model: what, and to whom."""
    return [(action.message.kind, action.peer) for action in actions if isinstance(action, SendControl)]


def mixed(actions: list[Action]) -> Mix | Heal | None:
    """The mix among the actions, if there is one."""
    return next((action for action in actions if isinstance(action, (Mix, Heal))), None)


def waits(actions: list[Action]) -> bool:
    assert isinstance(actions[-1], (Wait, GoOn)) and not any(isinstance(a, (Wait, GoOn)) for a in actions[:-1])
    return isinstance(actions[-1], Wait)


def update(p: Rank, now_s: float = 0.0, steps: int = 1, healthy: bool = True) -> list[Action]:
    """An update is finished; what follows."""
    return p.update_finished(now_s, steps, healthy) + p.advance(now_s)
