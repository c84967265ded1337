"""What each kind of exchange needs and gives: one row for each value of `exchange.kind`. Pure: no torch, no MPI.

Programs ask here instead of comparing names; `make.py` makes the exchanges themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pala.exchange.gossip.mixing import RULES

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
    then the model of the first rank that lives; of the other kinds, the mean of all ranks' models."""
    one_host: bool = False
    """All ranks must be on one host."""
    outlives_ranks: bool = False
    """The others go on when a rank dies, where MPI is fault-tolerant."""
    replaces_ranks: bool = False
    """A spare rank can take the place of one that died."""
    one_model: bool = False
    """All ranks hold the same model after every update, so a resumed run begins with the same on all."""

    @property
    def coupling(self) -> int:
        """How close the ranks' models are: 0 unrelated, 1 mixed, 2 the same. Ranks go on from models of their own only
        where those are as close."""
        return 2 if self.one_model else 0 if self.independent else 1


_MODEL_AGE_UPDATES = 0.5  # of a model when it is mixed, on one host; on slow links more, and less is kept


def kept_by_mixing(exchange: ExchangeConfig, ranks: int) -> float:
    """The share of the ranks' steps that mixing leaves them on one host: 1 / (1 + f d), where a mix takes the fraction
    f of models that are d updates old. Measured by `python -m pala.simulate progress` and by a run's *progress kept*.
    """
    if RULES[exchange.mixing].by_pairs:
        return 1.0
    others = ranks - 1 if exchange.graph == "complete" else min(1, ranks - 1)
    return 1 / (1 + _MODEL_AGE_UPDATES * others / (1 + others))


def learning_rate_factor(exchange: ExchangeConfig, ranks: int) -> float:
    """By how much `ranks` learners step further than one alone, if `a2c.learning_rate_scaling` is `ranks`.

    A batch of N learners allows steps √N times as long (Malladi et al. 2022, arXiv 2205.10287), and GALA multiplies by
    √N. RMSprop divides by the size of a rank's own gradient, which noise makes √N times that of the mean of N: so where
    every rank divides by itself, the same rate gives steps √N shorter, and mixing may take back a part of them.
    """
    kind = kind_of(exchange)
    if kind.independent:
        return 1.0
    return math.sqrt(ranks) if kind.one_model else ranks / kept_by_mixing(exchange, ranks)


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
        ExchangeKind("allreduce", one_model=True, reads=(), allows=_WHOLE_MODELS),
        # Allows gossip's settings without reading them: the benchmark measures it beside gossip, with the same ones.
        ExchangeKind("none", independent=True, outlives_ranks=True, reads=()),
    )
}  # fmt: skip


GORILA = ExchangeKind("gorila", outlives_ranks=True, replaces_ranks=True, reads=())
"""What stands for an exchange where the algorithm has one of its own, and does not read `exchange`."""


def kind_of(config: ExchangeConfig) -> ExchangeKind:
    """The row of a configuration's `exchange.kind`."""
    return KINDS[config.kind]
