"""The messages that gossip sends, and what its protocol asks the driver to do: its actions. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

from pala.exchange.wire import NOTHING, Message, Sizes


class Kind(enum.IntEnum):
    """Purpose of a message."""

    MODEL = 1
    CREDIT = 2  # whoever receives this may send to its sender again
    STOP = 3  # training ends
    ASK_WHOLE = 4  # a credit from a rank that only a whole model can heal
    OFFER = 5  # of the paired exchange: a model that asks for an answer
    ANSWER = 6  # the model of a rank that has moved towards an offer; its weight is the fraction that both move by
    LEAVE = 7  # its sender trains no more; these are its last steps
    JOIN = 8  # its sender, a spare that takes a place or a rank that waits to heal, asks for a whole model
    WISH = 9  # its sender was told to leave, and asks who has a model of use
    STAY = 10  # the reply to that, of a rank that has one
    CROSSED = 11  # a refusal of an offer, by a rank whose own offer to that peer is on the way, and will do


WITH_MODEL = (Kind.MODEL, Kind.OFFER, Kind.ANSWER)
WITHOUT_MODEL = tuple(kind for kind in Kind if kind not in WITH_MODEL)
CREDITS = (Kind.CREDIT, Kind.ASK_WHOLE, Kind.CROSSED)
"""Kinds that free the process lock. To an offer each is a refusal."""
NEWS = (Kind.STOP, Kind.LEAVE)
"""Kinds that are sent once, and must arrive."""


def gossip_sizes(model: Sizes, kinds: Iterable[Kind] = Kind) -> dict[Kind, Sizes]:
    """Return the numbers of bytes that a message of each of these kinds may have behind its counters, if models have
    these sizes."""
    return {kind: model if kind in WITH_MODEL else NOTHING for kind in kinds}


# ---- actions ---------------------------------------------------------------------------------------------------------


class SendModel(NamedTuple):
    """Take a snapshot of this rank's model and send it to these peers. An offer's snapshot is kept until `Move` or
    `Close`; an answer holds those parameters that the offer from its peer held."""

    message: Message
    peers: tuple[int, ...]
    whole: bool  # not only a part of it


class SendControl(NamedTuple):
    """Send a message without a model."""

    message: Message
    peer: int


class Accept(NamedTuple):
    """Add the model that has just come to the inbox."""

    weight: float  # what it counts


class Clear(NamedTuple):
    """Forget the models in the inbox."""


class Mix(NamedTuple):
    """x <- (own_weight x + sum of weight m) / (own_weight + sum of weight), over the inbox's models m. Empties it."""

    own_weight: float
    num_models: int


class Pull(NamedTuple):
    """x <- x + fraction sum of (m - x), over the inbox's models m, which are offers. Empties it."""

    fraction: float
    num_models: int


class Keep(NamedTuple):
    """The model that has just come answers the offer to this peer: keep the difference, m - s."""

    peer: int


class Move(NamedTuple):
    """x <- x + fraction (m - s), where m answered the offer s to this peer; forget the offer."""

    peer: int
    fraction: float


class Close(NamedTuple):
    """Forget the offer to this peer, and its answer if it came."""

    peer: int


class Heal(NamedTuple):
    """x <- sum of weight m / sum of weight: this rank's own model is of no use. Empties the inbox."""

    num_models: int


class Wait(NamedTuple):
    """Do not begin the next update: ask again when something has come, or time has passed."""


class GoOn(NamedTuple):
    """The next update may begin."""


Action = SendModel | SendControl | Accept | Clear | Mix | Pull | Keep | Move | Close | Heal | Wait | GoOn
