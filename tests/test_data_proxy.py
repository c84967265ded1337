"""The data proxy without MPI: requests that end when the test says so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from pala.comm import data_proxy
from pala.comm.base import Bytes, Received, Receiver
from pala.comm.data_proxy import _BULK_TAG, _SMALL_TAG, DataProxy, _Receive, _Send
from pala.comm.threaded import ThreadedTransport
from pala.system.interrupt import Interrupt


class Request:
    done = False

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return self.done


class Listener(Receiver):
    dead = -1

    def __init__(self) -> None:
        self.heard: list[tuple[int, int, bool]] = []

    def on_message(self, message: Received) -> None:
        self.heard.append((message.source, len(message.data), message.bulk))

    def on_death(self, rank: int) -> None:
        self.dead = rank


def test_a_senders_messages_are_heard_in_the_order_in_which_they_began() -> None:
    """A small message is often complete before a large one that began earlier (MPI 4.1, section 3.7.4)."""
    proxy, listener = DataProxy.__new__(DataProxy), Listener()
    proxy._receiver, heard = listener, listener.heard
    begun = [(1, 1000, _SMALL_TAG), (1, 1, _SMALL_TAG), (2, 2, _SMALL_TAG), (3, 3000, _BULK_TAG), (3, 3, _SMALL_TAG)]
    receives = [_Receive(Request(), source, tag, np.zeros(size, np.uint8), 0.0) for source, size, tag in begun]
    proxy._receives = list(receives)
    for receive in receives[1:3] + receives[4:]:
        receive.request.done = True
    assert proxy._complete_receives()
    assert heard == [(2, 2, False), (3, 3, False)], "a model holds up no news: it takes long on a slow link"
    assert not proxy._complete_receives()
    receives[0].request.done = receives[3].request.done = True
    assert proxy._complete_receives()
    assert heard[2:] == [(1, 1000, False), (1, 1, False), (3, 3000, True)]
    assert not proxy._receives


def proxy_to_which_come(
    sources: Iterator[int], receives: list[_Receive], monkeypatch: pytest.MonkeyPatch
) -> tuple[DataProxy, Listener]:
    """Small messages from these sources, in this order, beside what is under way. Each has its number of bytes."""
    proxy, listener, sizes = DataProxy.__new__(DataProxy), Listener(), count()
    ThreadedTransport.__init__(proxy, "test", Interrupt())
    proxy._deaths, proxy._receiver = SimpleNamespace(look=lambda: ()), listener  # type: ignore[assignment]
    proxy._receives, proxy._sends = receives, []

    def start_receive() -> bool:
        if (source := next(sources, None)) is None:
            return False
        request, data = Request(), np.zeros(next(sizes), np.uint8)
        request.done = True
        proxy._receives.append(_Receive(request, source, _SMALL_TAG, data, 0.0))  # type: ignore[arg-type]
        return True

    monkeypatch.setattr(proxy, "_start_receive", start_receive)
    return proxy, listener


def test_peers_that_send_faster_than_is_heard_keep_nothing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's send is over when its receipt begins, and its actor then makes the next: so few may be begun."""
    proxy, listener = proxy_to_which_come(iter([1, 2] * 500), [], monkeypatch)
    sent: list[int] = []
    monkeypatch.setattr(proxy, "_send_now", lambda peer, packet, bulk: sent.append(len(listener.heard)))
    monkeypatch.setattr(listener, "on_message", lambda message: (
        proxy.send(message.source, Bytes(message.data)), Listener.on_message(listener, message)
    ))  # fmt: skip
    assert proxy._poll() and 0 < len(listener.heard) < 100 and not proxy._receives
    assert len(sent) == len(listener.heard), "answers leave at once"
    while proxy._poll():
        pass
    assert [size for _, size, _ in listener.heard] == list(range(1000))


def test_peers_that_stop_while_they_send_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = [_Receive(Request(), 1, _SMALL_TAG, np.zeros(9, np.uint8), 0.0) for _ in range(500)]  # type: ignore[arg-type]
    proxy, listener = proxy_to_which_come(iter([2]), stopped, monkeypatch)
    assert proxy._poll() and listener.heard == [(2, 0, False)]


def test_a_death_is_heard_of_before_what_was_lost_with_it_counts_as_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that leaves could think that the dead one continues."""
    proxy, listener, packet = DataProxy.__new__(DataProxy), Listener(), SimpleNamespace(pending=1)
    ThreadedTransport.__init__(proxy, "test", Interrupt())
    looks: list[set[int]] = [set(), {3}]  # it dies between the look at deaths and the look at what is sent
    proxy._deaths, proxy._receiver = SimpleNamespace(look=lambda: looks.pop(0)), listener  # type: ignore[assignment]
    proxy._receives, proxy._sends = [], [_Send(Request(), packet)]  # type: ignore[arg-type]
    proxy._num_pending = 1
    monkeypatch.setattr(proxy, "_start_receive", lambda: False)
    monkeypatch.setattr(data_proxy, "_test", lambda request: data_proxy._Fate.LOST)
    monkeypatch.setattr(proxy, "_has_left", lambda packet: listener.heard.append((listener.dead, 0, False)))
    assert proxy._poll() and listener.heard == [(3, 0, False)]
