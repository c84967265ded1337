"""Ranks as threads: collectives that a death does not block, messages in order, faults by script."""

from __future__ import annotations

import sys
import threading
import time
from itertools import pairwise
from signal import SIGUSR1

import numpy as np
import pytest

from pala.comm.agreement import collectively
from pala.comm.base import Bytes, Packet, Received, Receiver, Survivors
from pala.comm.threaded import ThreadedTransport
from pala.system.errors import CollectiveError, EndError, PalaError
from pala.system.interrupt import Interrupt
from pala.testing.faults import corrupt, drop, fail_at, fail_at_message, signal_at, stop_at
from pala.testing.memory import Killed, MemoryCommunicator, run_ranks
from support.helpers import wait_for

PATIENCE_S = 5.0


class Listener(Receiver):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.heard: list[Received] = []
        self.deaths: list[int] = []
        self.ticked_s: list[float] = []
        self.memory = np.zeros(100, np.uint8)

    def on_message(self, message: Received) -> None:
        self.heard.append(message._replace(data=bytes(message.data)))

    def on_death(self, rank: int) -> None:
        self.deaths.append(rank)

    def on_tick(self) -> None:
        self.ticked_s.append(time.monotonic())

    def memory_for(self, num_bytes: int) -> np.ndarray:
        return self.memory

    def of(self, source: int, bulk: bool) -> list[bytes]:
        return [m.data for m in self.heard if m.source == source and m.bulk == bulk]


def packet(*values: int) -> Bytes:
    return Bytes(np.array(values, np.uint8))


# ---- collectives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_collectives(size: int) -> None:
    def main(comm: MemoryCommunicator) -> None:
        comm.barrier()
        assert comm.allgather({"rank": comm.rank}) == [{"rank": rank} for rank in range(size)]
        root = size - 1
        assert comm.bcast(["from", comm.rank], root) == ["from", root]
        array = np.full(3, comm.rank, np.float32)
        comm.bcast_array(array, root)
        assert array.tolist() == [root] * 3
        for how, expected in (("sum", sum(range(size))), ("max", size - 1)):
            array = np.array([comm.rank, 1], np.float64)
            barrier = comm.ibarrier()
            wait_for(barrier)
            comm.reduce(array, how)
            assert array.tolist() == [expected, size if how == "sum" else 1]
        block = comm.share_memory(size, range(size))
        block.data[comm.rank] = comm.rank
        comm.barrier()
        assert block.data.tolist() == list(range(size))

    assert run_ranks(size, main) == [None] * size


def test_what_is_gathered_is_each_ranks_own() -> None:
    def main(comm: MemoryCommunicator) -> list[list[int]]:
        everybodys = comm.allgather([comm.rank])
        everybodys[0].append(comm.rank)
        comm.barrier()
        return everybodys

    assert run_ranks(3, main) == [[[0, rank], [1], [2]] for rank in range(3)]


def test_a_fault_of_one_rank_is_everybodys() -> None:
    def main(comm: MemoryCommunicator) -> None:
        def action() -> None:
            if comm.rank == 1:
                raise PalaError("it is broken")

        collectively(comm, action)

    errors = run_ranks(3, main)
    assert [type(error) for error in errors] == [CollectiveError] * 3
    assert {str(error) for error in errors} == {"Rank 1: it is broken"}


@pytest.mark.parametrize("deaths", [[], [0], [3], [1, 2]])
def test_the_living_agree_without_the_dead(deaths: list[int]) -> None:
    """Also if one dies in the action that they do together: then they do it again."""

    def main(comm: MemoryCommunicator) -> tuple[list[int], float]:
        if comm.rank in deaths[:1]:
            comm.die()

        def action(survivors: Survivors) -> tuple[list[int], float]:
            if comm.rank in deaths[1:]:
                comm.die()
            array = np.array([10.0**comm.rank])
            survivors.reduce(array, "sum")
            return list(survivors.members), float(array[0])

        return comm.with_survivors(action, PATIENCE_S)

    results = run_ranks(4, main)
    living = [rank for rank in range(4) if rank not in deaths]
    assert [results[rank] for rank in living] == [(living, sum(10.0**rank for rank in living))] * len(living)
    assert all(isinstance(results[rank], Killed) for rank in deaths)


def test_who_needs_all_ranks_hears_that_one_is_dead() -> None:
    def main(comm: MemoryCommunicator) -> None:
        if comm.rank == 1:
            comm.die()
        wait_for(lambda: bool(comm.deaths().look()))
        with pytest.raises(EndError, match="Rank 1 has died, and this 'exchange"):
            comm.deaths().end_if_any()
        barrier = comm.ibarrier()
        with pytest.raises(EndError, match="Rank 1 has died"):
            barrier()
        with pytest.raises(EndError, match="died while the job was starting or ending"):
            comm.allgather(0)
        assert comm.is_alone() == (comm.size == 2)

    killed, *others = run_ranks(2, main)[::-1]
    assert isinstance(killed, Killed) and others == [None]


def test_a_rank_that_does_not_come_is_waited_for_so_long_and_no_longer() -> None:
    has_waited = threading.Event()

    def main(comm: MemoryCommunicator) -> None:
        if comm.rank == 0:
            with pytest.raises(EndError, match="did not answer within 0 s"):
                comm.with_survivors(lambda living: None, 0.05)
            has_waited.set()
        assert has_waited.wait(60)

    assert run_ranks(2, main) == [None, None]


# ---- messages --------------------------------------------------------------------------------------------------------


def test_messages_come_in_order_and_nothing_is_left_when_all_have_closed() -> None:
    def main(comm: MemoryCommunicator) -> Listener:
        transport, listener = comm.open_transport(), Listener()
        transport.start(listener)
        packets = []
        for number in range(50):
            for peer in range(comm.size):
                if peer != comm.rank:
                    packets += [packet(comm.rank, number)]
                    transport.send(peer, packets[-1], bulk=number % 3 == 0)
            if comm.rank == 1:
                transport.poll()
        transport.close(PATIENCE_S)
        assert not any(p.pending for p in packets)
        return listener

    for rank, listener in enumerate(run_ranks(3, main)):
        for source in {0, 1, 2} - {rank}:
            for bulk in (False, True):
                numbers = [n for n in range(50) if (n % 3 == 0) == bulk]
                assert listener.of(source, bulk) == [bytes([source, n]) for n in numbers]
        assert len(listener.heard) == 100 and listener.deaths == []


def test_what_was_sent_may_be_changed_when_it_has_left() -> None:
    def main(comm: MemoryCommunicator) -> list[bytes]:
        transport, listener = comm.open_transport(), Listener()
        transport.start(listener)
        mine = packet(1)
        if comm.rank == 0:
            for number in range(10):
                mine.data[0] = number
                transport.send(1, mine, bulk=True)
                wait_for(lambda: mine.pending == 0)
        transport.close(PATIENCE_S)
        return listener.of(0, bulk=True)

    assert run_ranks(2, main)[1] == [bytes([number]) for number in range(10)]


def test_bulk_messages_are_lost_and_damaged_by_script() -> None:
    def main(comm: MemoryCommunicator) -> Listener:
        transport, listener = comm.open_transport(), Listener()
        transport.start(listener)
        mine = [packet(number) for number in range(4)]
        for p in mine:
            transport.send(1 - comm.rank, p, bulk=True)
            transport.send(1 - comm.rank, packet(100))
        transport.close(PATIENCE_S)
        assert not any(p.pending for p in mine)
        return listener

    first, second = run_ranks(2, main, [drop(0, 1, 2), corrupt(0, 1, 4)])
    assert second.of(0, True) == [bytes([n]) for n in (0, 2, 255 - 3)]
    assert first.of(1, True) == [bytes([n]) for n in range(4)]
    assert len(first.of(1, False)) == len(second.of(0, False)) == 4


def test_a_death_is_heard_of_and_what_was_under_way_is_given_up() -> None:
    def main(comm: MemoryCommunicator) -> Listener:
        transport, listener = comm.open_transport(), Listener()
        transport.start(listener)
        if comm.rank == 2:
            comm.be_stopped_until(time.monotonic() + 0.2)
            comm.on_count(3)  # dies
        stuck = packet(7)
        transport.send(2, stuck)
        wait_for(lambda: listener.deaths == [2])
        wait_for(lambda: stuck.pending == 0)
        if comm.rank == 1:
            transport.send(0, packet(1))
        transport.close(PATIENCE_S)
        return listener

    first, second, third = run_ranks(3, main, [fail_at(2, update=3)])
    assert isinstance(third, Killed)
    assert (first.of(1, False), second.heard) == ([b"\x01"], [])


def test_a_rank_can_die_in_the_middle_of_its_messages() -> None:
    def main(comm: MemoryCommunicator) -> Listener:
        transport, listener = comm.open_transport(), Listener()
        transport.start(listener)
        if comm.rank == 0:
            for number in range(10):
                transport.send(1, packet(number))
                transport.poll()
        wait_for(lambda: listener.deaths == [0])
        transport.close(PATIENCE_S)
        return listener

    killed, listener = run_ranks(2, main, [fail_at_message(0, 4)])
    assert isinstance(killed, Killed)
    assert listener.of(0, False) == [bytes([n]) for n in range(len(listener.heard))] and len(listener.heard) <= 3


def test_a_stopped_rank_neither_works_nor_answers() -> None:
    def main(comm: MemoryCommunicator) -> tuple[list[float], float]:
        transport, listener = comm.open_transport(), Listener()
        begin_s, mine = time.monotonic(), packet(1)
        comm.barrier()
        transport.start(listener)
        comm.on_count(1)
        if comm.rank == 0:
            wait_for(lambda: comm.world.stopped_until_s[1] > 0)
            time.sleep(0.15)
            transport.send(1, mine)
            wait_for(lambda: mine.pending == 0)
        took_s = time.monotonic() - begin_s
        transport.close(PATIENCE_S)
        ticks = [0.0, *(at - begin_s for at in listener.ticked_s if at > begin_s)]
        return ticks, took_s

    (_, took_s), (ticks, stopped_s) = run_ranks(2, main, [stop_at(1, update=1, seconds=0.5)])
    assert took_s > 0.45 and stopped_s > 0.45
    assert max(after - before for before, after in pairwise(ticks)) > 0.35


def test_a_signal_comes_by_script() -> None:
    def main(comm: MemoryCommunicator) -> object:
        comm.on_count(5)
        return comm.interrupt.signal

    assert run_ranks(2, main, [signal_at(1, update=4)]) == [None, SIGUSR1]


def test_what_ends_the_transports_thread_is_raised_in_the_learners() -> None:
    class Broken(Listener):
        def on_message(self, message: Received) -> None:
            raise ValueError("the planted fault")

    def main(comm: MemoryCommunicator) -> None:
        transport = comm.open_transport()
        transport.start(Broken() if comm.rank == 0 else Listener())
        if comm.rank == 1:
            transport.send(0, packet(1))
        transport.close(PATIENCE_S)

    broken, other = run_ranks(2, main)
    assert isinstance(broken, ValueError) and other is None


class Sent(ThreadedTransport):
    """Keeps what leaves."""

    def __init__(self) -> None:
        super().__init__("sent", Interrupt())
        self.left: list[Packet] = []

    def _send_now(self, peer: int, packet: Packet, bulk: bool) -> None:
        self.left.append(packet)

    def _poll(self) -> bool:
        return self._empty_outboxes()

    def _poll_until_closed(self) -> None:
        pass


def test_copies_that_leave_on_another_thread_are_counted() -> None:
    """One packet goes to several peers: while the learner's thread sends it to one, it leaves for another."""
    transport, shared, switch_s = Sent(), packet(1), sys.getswitchinterval()
    count = 20_000

    def leave() -> None:
        for _ in range(count):
            transport._has_left(shared)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=leave) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(2 * count):
            transport.send(1, shared)
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch_s)
    assert shared.pending == 0


def test_no_collective_beside_an_open_transport() -> None:
    """Its thread may be inside MPI, which then hung ranks at their start (seen with Open MPI)."""

    def main(comm: MemoryCommunicator) -> None:
        transport = comm.open_transport()
        transport.start(Listener())
        try:
            comm.barrier()
        finally:
            transport.close(PATIENCE_S)

    refused = run_ranks(2, main)
    assert all(isinstance(error, AssertionError) and "a transport is open" in str(error) for error in refused)
