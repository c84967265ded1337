"""The tables of choices: kinds of exchange, mixing rules, topologies, each with one row a choice. Pure: no torch, no
MPI.

Programs ask a row instead of comparing names. `pala/exchange/` makes what the rows describe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pala.config.schema import ExchangeConfig

ACTOR_CRITIC = ("a2c",)
"""Algorithms that play rollouts and exchange models: they read the sections `a2c` and `exchange`."""

_NO_GROUPS: Mapping[str, tuple[Any, ...]] = {"group": (1,)}
_WHOLE_MODELS: Mapping[str, tuple[Any, ...]] = {"compression": ("none",), **_NO_GROUPS}


@dataclass(frozen=True)
class ExchangeKind:
    """A way of training on several ranks: a value of `exchange.kind`."""

    name: str
    made_by: str = ""
    """Module and class of its `ModelExchange`, loaded where a run names it; none of a kind that an algorithm makes."""
    allows: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field of `ExchangeConfig` -> its only allowed values; any value of a field that is not here."""
    default_topology: str = "random"
    """The topology that `auto` stands for."""
    independent: bool = False
    """The ranks tell each other nothing while they train: the upper bound of the others' speed. The run's policy is
    then the model of the first rank that lives and has trained; of kinds that mix, the mean of all ranks' models; of
    the others there is one model."""
    one_host: bool = False
    """All ranks must be on one host."""
    outlives_ranks: bool = False
    """The others continue when a rank dies, where MPI is fault-tolerant."""
    replaces_ranks: bool = False
    """A spare rank can take the place of one that died, as `job/rank.py` (asleep) and the algorithm's agent make it."""
    of_algorithm: bool = False
    """An algorithm's only kind: it does not read `exchange`."""
    averages_gradients: bool = False
    """All ranks make each update together, by the mean of their gradients, and hold the same model after it."""

    @property
    def coupling(self) -> int:
        """Closeness of the ranks' models: 0 unrelated, 1 mixed, 2 equal. A resumed rank continues from its own
        checkpoint only if the models were at least as close there."""
        return 2 if self.averages_gradients else 0 if self.independent else 1


_KINDS = (
    ExchangeKind("gossip", "pala.exchange.gossip.exchange:GossipExchange", outlives_ranks=True, replaces_ranks=True),
    ExchangeKind(
        "shared_memory",
        "pala.exchange.shared_memory:SharedMemory",
        one_host=True,
        default_topology="ring",
        allows={"topology": ("auto", "ring", "complete"), **_WHOLE_MODELS},
    ),
    ExchangeKind("allreduce", "pala.exchange.allreduce:AllReduce", averages_gradients=True, allows=_WHOLE_MODELS),
    # Allows gossip's settings without reading them: the benchmark measures it beside gossip, with the same ones. Not
    # groups, whose ranks would be expected to hold one model.
    ExchangeKind("none", "pala.exchange.none:NoExchange", independent=True, outlives_ranks=True, allows=_NO_GROUPS),
)
KINDS: Mapping[str, ExchangeKind] = {kind.name: kind for kind in _KINDS}

GORILA = ExchangeKind("gorila", of_algorithm=True, outlives_ranks=True, replaces_ranks=True)
"""The row of an algorithm that has an exchange of its own, and does not read `exchange`."""


@dataclass(frozen=True)
class MixingRule:
    """A value of `exchange.mixing`: the weights of models in an average.

    A mix of a rank's own model x, whose weight is w, with models m that carry weights v is

        x <- (w x + sum of v m) / (w + sum of v).

    | rule | a copy carries | w | |
    |---|---|---|---|
    | `uniform` | 1 | 1 | x <- (x + sum of k models) / (1 + k), the rule of GALA and PALA |
    | `push_sum` | w / (k + 1), if k are sent | what it kept and got | all weights add up to the number of ranks |
    | `paired` | 1 | 1 | not averaged: both ranks of a pair move by the same amount (`paired.py`) |

    Push-sum: Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", 2019, arXiv
    1811.10792. Here the optimiser steps the de-biased model itself (there, the step is divided by the weight), so that
    a rank's learning rate does not depend on how often it was sent to.
    """

    name: str
    of_whole_models: bool = False
    """The weights belong to whole models: no codec may send parts."""
    by_pairs: bool = False
    """Ranks exchange two at a time: not with a topology that sends to several, but several times an update if asked."""
    protocol: str = "pala.exchange.gossip.one_way:OneWay"
    """Module and class of the `GossipProtocol` by which its models travel; loaded where a run mixes by this rule."""

    def share(self, own: float, copies: int) -> float:
        """Return what a model of weight `own`, and each of `copies` copies of it that leave now, weigh from then on."""
        return own / (copies + 1) if self.of_whole_models else 1.0

    def counted(self, carried: float) -> float:
        """Return what a model that carries this weight counts: 1, whatever a run had before, where weights stay."""
        return carried if self.of_whole_models else 1.0

    def gained(self, own: float, carried: float) -> float:
        """Return the weight `own` with that of models that were mixed into this rank's, or thrown away: none is
        lost."""
        return own + carried if self.of_whole_models else own


_RULES = (
    MixingRule("uniform"),
    MixingRule("push_sum", of_whole_models=True),
    MixingRule("paired", by_pairs=True, protocol="pala.exchange.gossip.paired:Paired"),
)
RULES: Mapping[str, MixingRule] = {rule.name: rule for rule in _RULES}


@dataclass(frozen=True)
class Topology:
    """A value of `exchange.topology`: the peers of each rank in each round, as a pure function.

    All are regular: when every living rank is in the same round, every rank receives exactly as many models as it
    sends, so the mixing matrix is doubly stochastic and averaging keeps the mean.

    | topology | peers in a round | spread |
    |---|---|---|
    | `random` | one: all shift by the same random offset | variance halves a round, in expectation |
    | `ring` | one: the next rank | shrinks with cos(pi/n), slow for many ranks |
    | `exponential` | one: the rank 1, 2, 4, ... further on | exact mean after log2 n rounds if n is a power of two |
    | `complete` | everybody | exact mean after one round |

    In `random`, each peer is uniformly random, and every rank receives exactly one model a round. `exponential` is the
    one-peer exponential graph of Ying et al. 2021 (arXiv 2110.13363). A user's own: `exchange/gossip/topology.py`.
    """

    name: str
    offset: Callable[[int, int, int], int] | None = None
    """(number of living ranks, round, seed) -> how much further on the one peer is, the same for all ranks; None: a
    rank sends to everybody."""

    @property
    def to_all(self) -> bool:
        """Whether a rank sends to all others in each round, not to one."""
        return self.offset is None

    def out_peers(self, rank: int, living: Sequence[int], round_: int, seed: int) -> tuple[int, ...]:
        """Return the ranks to which `rank` sends in its round `round_`. `living`: sorted ranks, `rank` among them."""
        n = len(living)
        if n == 1:
            return ()
        if self.offset is None:
            return tuple(peer for peer in living if peer != rank)
        return (living[(living.index(rank) + self.offset(n, round_, seed)) % n],)


def _random(n: int, round_: int, seed: int) -> int:
    return 1 + random_bits(seed, round_) % (n - 1)


def _ring(n: int, round_: int, seed: int) -> int:
    return 1


def _exponential(n: int, round_: int, seed: int) -> int:
    return 1 << (round_ % (n - 1).bit_length())


def random_bits(seed: int, number: int) -> int:
    """Return splitmix64 of (seed, number): 64 bits, cheap, stateless, equal on every rank."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


_TOPOLOGIES = (
    Topology("random", _random),
    Topology("ring", _ring),
    Topology("exponential", _exponential),
    Topology("complete"),
)
TOPOLOGIES: Mapping[str, Topology] = {topology.name: topology for topology in _TOPOLOGIES}


def kind_of(exchange: ExchangeConfig) -> ExchangeKind:
    """Return the row of a configuration's `exchange.kind`."""
    return KINDS[exchange.kind]
