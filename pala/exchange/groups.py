"""Groups of ranks: which rank is in which. Pure: no torch, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pala.system.errors import PalaError
from pala.system.text import counted, named

_MOST_SHOWN = 8


def groups_of(hosts: Sequence[str], size: int | Literal["host"]) -> list[int]:
    """Return each rank's group, numbered by their first ranks, if a group has `size` ranks of one host.

    `hosts`: of each rank. The ranks of a host, in their order, fill its groups; the last may be smaller. So no group
    ever spans hosts, in whatever order a launcher places ranks on them."""
    on_host: dict[str, int] = {}
    keys: list[tuple[str, int]] = []
    for host in hosts:
        place = on_host[host] = on_host.get(host, -1) + 1
        keys.append((host, 0 if size == "host" else place // size))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def members_of(groups: Sequence[int]) -> list[list[int]]:
    """Return the ranks of every group, rising."""
    members: list[list[int]] = [[] for _ in range(max(groups) + 1)]
    for rank, group in enumerate(groups):
        members[group].append(rank)
    return members


def check_groups(hosts: Sequence[str], size: int | Literal["host"]) -> None:
    """Raise PalaError if groups of `size` ranks would have to span hosts, of which none has as many."""
    names = list(dict.fromkeys(hosts))
    if size == "host" or len(names) == 1 or any(hosts.count(name) >= size for name in names):
        return
    where = [(name, [rank for rank, host in enumerate(hosts) if host == name]) for name in names]
    shown = "; ".join(f"{named(ranks)} on {name}" for name, ranks in where[:_MOST_SHOWN])
    most = max(len(ranks) for _, ranks in where)
    raise PalaError(
        f"'exchange.group' is {size}, but a group lies on one host, and none has as many ranks: {shown}"
        f"{'; …' * (len(where) > _MOST_SHOWN)}. Set it to {most}, or to 'host'."
    )


def described(groups: Sequence[int]) -> str:
    """Return who is in which group, in words for people."""
    members = members_of(groups)
    shown = "; ".join(named(ranks) for ranks in members[:_MOST_SHOWN]) + "; …" * (len(members) > _MOST_SHOWN)
    return f"{counted(len(members), 'group')}, each with one model: {shown}"
