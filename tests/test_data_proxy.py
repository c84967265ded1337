"""The data proxy without MPI: requests that end when the test says so."""

from __future__ import annotations

import numpy as np

from pala.transport.base import Received, Receiver
from pala.transport.data_proxy import _BULK_TAG, _SMALL_TAG, DataProxy, _Receive


class Request:
    done = False

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return self.done


class Listener(Receiver):
    def __init__(self) -> None:
        self.heard: list[tuple[int, int, bool]] = []

    def on_message(self, message: Received) -> None:
        self.heard.append((message.source, len(message.data), message.bulk))

    def on_death(self, rank: int) -> None: ...


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
