"""Which protocol a configuration needs, and its rules. Loads neither torch nor MPI."""

from __future__ import annotations

from collections.abc import Mapping

from pala.config import Config
from pala.exchange.budget import StepBudget
from pala.exchange.gossip.mixing import RULES
from pala.exchange.gossip.paired import PairedProtocol
from pala.exchange.gossip.protocol import GossipProtocol, Rules
from pala.system.seeding import derive

PROTOCOLS: Mapping[str, type[GossipProtocol]] = {
    name: PairedProtocol if rule.by_pairs else GossipProtocol for name, rule in RULES.items()
}
"""By the names of `exchange.mixing`."""


def make_protocol(config: Config, budget: StepBudget, round_: int, weight: float, whole_every: int) -> GossipProtocol:
    """A rank's, at the beginning. `whole_every`: the codec's."""
    exchange = config.exchange
    seed = int(derive(config.seed, 0, "topology")[0])
    rules = Rules(
        exchange.graph, exchange.max_staleness, seed, whole_every, patience_s=exchange.patience_s,
        exchanges_per_update=exchange.exchanges_per_update,
    )  # fmt: skip
    return PROTOCOLS[exchange.mixing](budget, RULES[exchange.mixing](weight), rules, round_)
