"""The data proxy without MPI: requests that end when the test says so."""

from __future__ import annotations

import numpy as np

from pala.transport.data_proxy import _CONTROL_TAG, _MODEL_TAG, DataProxy, _Receive


class Request:
    done = False

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return self.done


def test_a_senders_messages_are_heard_in_the_order_in_which_they_began() -> None:
    """A small message is often complete before a large one that began earlier (MPI 4.1, section 3.7.4)."""
    heard: list[tuple[int, int]] = []
    proxy = DataProxy.__new__(DataProxy)
    proxy._on_message = lambda source, data, took_s, too_late: heard.append((source, len(data)))
    begun = [(1, 1000, _CONTROL_TAG), (1, 1, _CONTROL_TAG), (2, 2, _CONTROL_TAG), (3, 3000, _MODEL_TAG), (3, 3, 2)]
    receives = [_Receive(Request(), source, tag, np.zeros(size, np.uint8), 0.0) for source, size, tag in begun]
    proxy._receives = list(receives)
    for receive in receives[1:3] + receives[4:]:
        receive.request.done = True
    assert proxy._complete_receives()
    assert heard == [(2, 2), (3, 3)], "a model holds up no news: it takes long on a slow link"
    assert not proxy._complete_receives()
    receives[0].request.done = True
    assert proxy._complete_receives()
    assert heard[2:] == [(1, 1000), (1, 1)]
    assert proxy._receives == [receives[3]]
