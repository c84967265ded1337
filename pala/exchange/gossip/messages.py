"""The kinds of messages that gossip sends, and what each may hold. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from pala.exchange.wire import NOTHING, Sizes


class Kind(enum.IntEnum):
    """Purpose of a message."""

    MODEL = 1
    CREDIT = 2  # whoever receives this may send to its sender again
    STOP = 3  # training ends
    ASK_WHOLE = 4  # a credit from a rank that only a whole model can heal
    OFFER = 5  # of the paired exchange: a model that asks for an answer
    ANSWER = 6  # the model of who has moved towards an offer; its weight is the fraction that both move by
    LEAVE = 7  # its sender trains no more; these are its last steps
    JOIN = 8  # its sender, a spare, takes a place, and asks for a whole model


WITH_MODEL = (Kind.MODEL, Kind.OFFER, Kind.ANSWER)
WITHOUT_MODEL = tuple(kind for kind in Kind if kind not in WITH_MODEL)
NEWS = (Kind.STOP, Kind.LEAVE)
"""Kinds that are sent once, and must arrive."""


def gossip_sizes(model: Sizes, kinds: Iterable[Kind] = Kind) -> dict[Kind, Sizes]:
    """Return the numbers of bytes that a message of each of these kinds may have behind its counters, if models have
    these sizes."""
    return {kind: model if kind in WITH_MODEL else NOTHING for kind in kinds}
