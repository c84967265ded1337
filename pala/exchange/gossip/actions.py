"""Actions: requests of the protocol to its driver. Pure."""

from __future__ import annotations

from typing import NamedTuple

from pala.exchange.wire import Message


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
