"""What each kind of exchange needs and gives: one row for each value of `exchange.kind`. Pure: no torch, no MPI.

Programs ask here instead of comparing names; `make.py` makes the exchanges themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pala.config import ExchangeConfig

_WHOLE_MODELS: Mapping[str, tuple[str, ...]] = {"mixing": ("uniform",), "compression": ("none",)}


@dataclass(frozen=True)
class ExchangeKind:
    """A way of training on several ranks."""

    name: str
    reads: tuple[str, ...]
    """Fields of `ExchangeConfig`, other than `kind`, that decide how a run goes."""
    allows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Field of `ExchangeConfig` -> its only allowed values; any value of a field that is not here."""
    default_topology: str = "random"
    """What the topology `auto` stands for."""
    independent: bool = False
    """The ranks tell each other nothing while they train: the upper bound of the others' speed. The run's policy is
    then the model of the first rank that lives and has trained; of kinds that mix, the mean of all ranks' models; of
    the others there is one model."""
    one_host: bool = False
    """All ranks must be on one host."""
    outlives_ranks: bool = False
    """The others go on when a rank dies, where MPI is fault-tolerant."""
    replaces_ranks: bool = False
    """A spare rank can take the place of one that died, as `run/rank.py` (asleep) and the algorithm's parts make it."""
    averages_gradients: bool = False
    """All ranks make each update together, by the mean of their gradients, and hold the same model after it."""

    @property
    def coupling(self) -> int:
        """How close the ranks' models are: 0 unrelated, 1 mixed, 2 the same. Ranks go on from models of their own only
        where those are as close."""
        return 2 if self.averages_gradients else 0 if self.independent else 1


KINDS: Mapping[str, ExchangeKind] = {
    kind.name: kind
    for kind in (
        ExchangeKind(
            "gossip", outlives_ranks=True, replaces_ranks=True,
            reads=(
                "topology", "mixing", "exchanges_per_update", "max_staleness", "patience_s", "compression",
                "top_k_fraction",
            ),
        ),
        ExchangeKind(
            "shared_memory", one_host=True, default_topology="ring", reads=("topology", "max_staleness"),
            allows={"topology": ("auto", "ring", "complete"), **_WHOLE_MODELS},
        ),
        ExchangeKind("allreduce", averages_gradients=True, reads=(), allows=_WHOLE_MODELS),
        # Allows gossip's settings without reading them: the benchmark measures it beside gossip, with the same ones.
        ExchangeKind("none", independent=True, outlives_ranks=True, reads=()),
    )
}  # fmt: skip


GORILA = ExchangeKind("gorila", outlives_ranks=True, replaces_ranks=True, reads=())
"""What stands for an exchange where the algorithm has one of its own, and does not read `exchange`."""


def kind_of(config: ExchangeConfig) -> ExchangeKind:
    """The row of a configuration's `exchange.kind`."""
    return KINDS[config.kind]
