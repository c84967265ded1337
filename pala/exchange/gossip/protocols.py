"""Which protocol a mixing rule needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pala.exchange.gossip.mixing import RULES
from pala.exchange.gossip.paired import PairedProtocol
from pala.exchange.gossip.protocol import GossipProtocol

PROTOCOLS: Mapping[str, type[GossipProtocol]] = dict.fromkeys(RULES, GossipProtocol) | {"paired": PairedProtocol}
"""By the names of `exchange.mixing`."""
