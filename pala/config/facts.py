"""Facts of a setting beside its type and meaning: its range, what reads it, and what it decides.

The facts stand at the field, in `schema.py`: `gamma: float = setting(0.99, between=(0, 1))`. What holds for a whole
section stands at the section, and a field of it may say otherwise.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

T = TypeVar("T")
_FACTS = "facts"  # key of a field's metadata


@dataclass(frozen=True)
class Facts:
    """Facts of one setting."""

    between: tuple[float, float] | None = None
    """Lowest and highest value; in a list, of each item. Every number has them."""

    # Who reads it: everybody, unless one of these says otherwise.
    algorithms: tuple[str, ...] | None = None
    """Algorithms that read it; None: all."""
    kinds: tuple[str, ...] | None = None
    """Kinds of exchange that read it; None: all."""
    games: Literal["all", "atari", "others"] = "all"
    """Games that read it: PALA's own Atari games, or all others."""
    own_network: bool = True
    """Whether a run reads it whose network is the user's own."""
    unless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Another setting, with its dotted key -> values of it with which a run does not read this one."""

    # What it decides.
    decides: Literal["learning", "speed", "nothing"] = "learning"
    """`learning`: how a run learns, and how fast. `speed`: how fast alone. `nothing`: only what is shown and kept."""
    follows_budget: tuple[Any, ...] = ()
    """Values of it that change over the budget: runs of unlike budgets then differ from their first update on."""
    changes_returns: bool = True
    """Whether reported returns of a policy, of whole games and unclipped, depend on it: of an environment's setting."""
    evaluation_may_differ: bool = False
    """Whether an evaluation may set it otherwise than the run did."""


def setting(default: T, **facts: Any) -> T:
    """Return a dataclass's field with a default and `Facts`."""
    Facts(**facts)  # a mistyped fact is an error where it stands
    made: T = dataclasses.field(default=default, metadata={_FACTS: facts})
    return made


def section(cls: type[T], **facts: Any) -> T:
    """Return a dataclass's field that holds a section, with `Facts` of all its settings."""
    Facts(**facts)
    made: T = dataclasses.field(default_factory=cls, metadata={_FACTS: facts})
    return made


@cache
def facts_of(cls: type) -> dict[str, Facts]:
    """Return the facts of every setting of a configuration's class, by dotted key."""
    return {key: Facts(**facts) for key, facts in _collect(cls, "", {})}


def _collect(cls: Any, prefix: str, of_section: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    hints = typing.get_type_hints(cls)
    for each in dataclasses.fields(cls):
        facts = of_section | each.metadata.get(_FACTS, {})
        if dataclasses.is_dataclass(hints[each.name]):
            yield from _collect(hints[each.name], f"{prefix}{each.name}.", facts)
        else:
            yield prefix + each.name, facts
