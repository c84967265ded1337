"""The check that ranks reach each other by the addresses that MPI has chosen, before anything else is sent.

Open MPI takes every network of a host for usable, and sends in turn over those that both ends seem to share. An address
that two hosts have, as that of docker0, leads a host to itself, and the first message waits forever. So each host
sends short messages and a long one to others, with a limit. The addresses of all are told through the launcher, which
has connections of its own.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from mpi4py import MPI

from pala.system.errors import EndError
from pala.system.interrupt import Interrupt
from pala.system.output import log
from pala.system.text import named
from pala.system.waiting import LongWait, wait_asleep

if TYPE_CHECKING:
    from pala.comm.mpi import MpiCommunicator

_ASK_S, _LIMIT_S = 10.0, 60.0  # after these the addresses are compared; the job ends
_TAG = 3
_SHORT_BYTES, _NUM_SHORT = 8, 8  # Open MPI takes networks in turn: more messages than a host has of them
_LONG_BYTES = 2**20  # is cut, and sent over all at once
_MOST_PEERS = 16  # hosts that a host tries
_NAME_BYTES = 64
_CHOSEN = {"OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"}  # networks, by the user
_GET_FLAGS, _GET_ADDRESS, _UP = 0x8913, 0x8915, 1  # netdevice(7)


def check_reach(comm: MpiCommunicator) -> None:
    """Raise EndError if hosts do not reach each other, with the network's name if an address is on two of them.
    Collective."""
    _publish(comm)
    hosts = _hosts(comm)
    first = [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
    if comm.rank in first:
        _exchange(comm, peers_of(first.index(comm.rank), first), hosts)
    _wait(comm, comm.mpi.Ibarrier().Test, lambda: "the check of other hosts")


def peers_of(place: int, ranks: Sequence[int]) -> list[int]:
    """Return whom the rank at this place of `ranks` tries: all others, or 16 spread evenly, so that each that is tried
    tries back."""
    size = len(ranks)
    longest = size // 2
    num = max(1, min(longest, _MOST_PEERS // 2))
    distances = [(number + 1) * longest // num for number in range(num)]
    peers = {ranks[(place + sign * distance) % size] for distance in distances for sign in (1, -1)}
    return sorted(peers - {ranks[place]})


def _hosts(comm: MpiCommunicator) -> list[str]:
    mine = comm.host.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    names = bytearray(_NAME_BYTES * comm.size)
    request = comm.mpi.Iallgather(bytearray(mine), names)
    _wait(comm, request.Test, lambda: "the first message of other ranks")
    parts = [names[_NAME_BYTES * rank : _NAME_BYTES * (rank + 1)] for rank in range(comm.size)]
    return [bytes(part).rstrip(b"\0").decode(errors="replace") for part in parts]


def _exchange(comm: MpiCommunicator, peers: Sequence[int], hosts: Sequence[str]) -> None:
    """Send to these ranks what they send to this one, and wait until all has come."""
    sizes = [*[_SHORT_BYTES] * _NUM_SHORT, _LONG_BYTES]
    sent = {size: bytearray(size) for size in set(sizes)}
    under_way: dict[int, list[MPI.Request]] = {}
    for peer in peers:
        taken = [comm.mpi.Irecv(bytearray(size), peer, _TAG) for size in sizes]
        under_way[peer] = taken + [comm.mpi.Isend(sent[size], peer, _TAG) for size in sizes]

    def all_have_come() -> bool:
        for peer in list(under_way):
            if MPI.Request.Testall(under_way[peer]):
                del under_way[peer]
        return not under_way

    def whom() -> str:
        return ", ".join(f"rank {peer} on {hosts[peer]}" for peer in under_way)

    _wait(comm, all_have_come, whom)


def _wait(comm: MpiCommunicator, done: Callable[[], bool], whom: Callable[[], str]) -> None:
    """Wait asleep. Raises EndError a minute after all ranks have come to the check, or earlier if the reason is found.
    Ranks that have started MPI themselves may come late."""
    wait, ask_s, limit_s = LongWait(), _ASK_S, _LIMIT_S

    def is_over() -> bool:
        nonlocal ask_s, limit_s
        if done():
            return True
        if wait.took_s > ask_s:
            log(f"[rank {comm.rank}] has waited {wait.took_s:.0f} s for {whom()}.")
            told = _published(comm) if comm.rank == 0 else []
            ask_s = wait.took_s + _LIMIT_S if _late(told) else math.inf
            if not _late(told) and (fault := shared_address(told)):
                raise EndError(fault)
        if wait.took_s > limit_s:
            if late := _late(_published(comm)):
                if comm.rank == 0:
                    log(f"[rank 0] has waited {wait.took_s:.0f} s for {named(late)}.")
                limit_s = wait.took_s + _LIMIT_S
            else:
                raise EndError(_not_reached(comm, whom()))
        return False

    wait_asleep(is_over, None, Interrupt(), wait=wait)


def _not_reached(comm: MpiCommunicator, whom: str) -> str:
    networks = ", ".join(f"{name} {address}" for name, address in addresses().items())
    return (
        f"rank {comm.rank} on {comm.host} has heard nothing for {_LIMIT_S:.0f} s from {whom}: hosts do not reach each "
        f"other by the addresses that MPI has chosen. This host's are {networks}. Name the network that all hosts "
        "share, as by `export OMPI_MCA_btl_tcp_if_include=10.0.0.0/16` (Open MPI) or `mpiexec -iface eth0` (MPICH), "
        "and look for firewalls."
    )


# ---- addresses -------------------------------------------------------------------------------------------------------


def addresses() -> dict[str, str]:
    """Return this host's IPv4 addresses by the names of their networks, without those that lead to itself."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode())
                flags = struct.unpack_from("H", fcntl.ioctl(asked, _GET_FLAGS, request), 16)[0]
                address = socket.inet_ntoa(fcntl.ioctl(asked, _GET_ADDRESS, request)[20:24])
                if flags & _UP and not address.startswith("127."):
                    found[name] = address
    return found


class Told(NamedTuple):
    """A rank's message through the launcher."""

    host: str
    networks: Mapping[str, str]  # its host's addresses, by the names of its networks


def shared_address(told: Sequence[Told | None]) -> str:
    """Return an error message about an address that two hosts have; empty if there is none, or if the user has chosen
    the networks. `told`: by rank."""
    if not _CHOSEN.isdisjoint(os.environ):
        return ""
    owners: dict[str, dict[str, str]] = {}
    for of_rank in filter(None, told):
        for name, address in of_rank.networks.items():
            owners.setdefault(address, {}).setdefault(of_rank.host, name)
    shared = {address: names for address, names in owners.items() if len(names) > 1}
    if not shared:
        return ""
    address, names = next(iter(shared.items()))
    first, second = list(names)[:2]
    others = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
    left_out = ",".join(["lo", *sorted({name for of_host in shared.values() for name in of_host.values()})])
    return (
        f"hosts {first} and {second} both have the address {address} ({names[first]}){others}, by which MPI sends, so "
        f"that a message for one comes to the other: `export OMPI_MCA_btl_tcp_if_exclude={left_out}` before the start "
        "leaves that network out."
    )


def _name(rank: int) -> str:
    return f"pala {os.environ.get('PMIX_NAMESPACE', '')} {rank}"


def _publish(comm: MpiCommunicator) -> None:
    """Tell the launcher this host's addresses, if it has a place for them: Open MPI's mpirun has."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return
    told = " ".join([comm.host, *(f"{name}={address}" for name, address in addresses().items())])
    with suppress(MPI.Exception):
        MPI.Publish_name(_name(comm.rank), told[: MPI.MAX_PORT_NAME - 1])


def _published(comm: MpiCommunicator) -> list[Told | None]:
    """Return what each rank has told; None of one that has not come yet. Empty without Open MPI."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return []
    found: list[Told | None] = [None] * comm.size
    for rank in range(comm.size):
        with suppress(MPI.Exception):
            host, *networks = MPI.Lookup_name(_name(rank)).split(" ")
            found[rank] = Told(host, dict(network.split("=", 1) for network in networks if "=" in network))
    return found


def _late(told: Sequence[Told | None]) -> list[int]:
    """Return the ranks that have not come yet; none if no rank could tell anything."""
    return [rank for rank, of_rank in enumerate(told) if of_rank is None] if any(told) else []
