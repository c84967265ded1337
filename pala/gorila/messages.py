"""The kinds of messages that Gorila sends. Pure."""

from __future__ import annotations

import enum


class Kind(enum.IntEnum):
    """The purpose of a message."""

    STOP = 3  # training ends
    GRADIENT = 5  # of a shard's slice, computed with the parameters of version `round`
    GRADIENT_AND_FETCH = 6  # the same, to be answered by PARAMETERS
    FETCH = 7  # asks a shard for PARAMETERS
    PARAMETERS = 8  # a shard's slice, of version `round`
    FETCH_TARGET = 9  # asks a shard for TARGET
    TARGET = 10  # a shard's slice of the target network, the `round`-th
    RESET = 11  # the first frames of an actor's environments; numbered as a step
    EXPERIENCE = 12  # one step of an actor's environments, its `round`-th
    SAMPLE = 13  # asks for BATCH
    BATCH = 14  # a minibatch of transitions
    PING = 15  # that it is received shows that its receiver answers
    LEAVE = 16  # its sender, told to go, does nothing more; these are its last steps


ABOUT_MEMBERS = (Kind.STOP, Kind.PING, Kind.LEAVE)
"""Messages about who is there, with nothing behind the counters; all that a rank that sleeps sends and takes."""
