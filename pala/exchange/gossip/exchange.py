"""PALA's exchange: protocol, wire and data proxy put together. The only room that knows all three.

Two threads meet here under one lock: the learner's, which counts updates, sends, waits and mixes between its updates,
and the data proxy's, which brings messages when the learner's does not fetch them between two steps. Each holds the
lock for well under a millisecond.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from pala.config import ExchangeConfig
from pala.exchange.base import ExchangeState, ModelExchange, agree_on_end, average_of_ranks
from pala.exchange.budget import Stop
from pala.exchange.gossip.codecs import ReceiveBuffer, SendBuffer, make_payload
from pala.exchange.gossip.protocol import GossipProtocol
from pala.exchange.wire import Format, Kind, Message, Refusal, Wire, gossip_sizes
from pala.system.errors import PalaError
from pala.system.runtime import Interrupt, say
from pala.transport.data_proxy import DataProxy

_SEND_BUFFERS = 2
_COMPLAIN_AFTER_S = 60.0
_MIXES_A_MEASUREMENT = 8  # a measurement of the consensus distance costs as much as a mix


class Gossip(ModelExchange):
    """Sends this rank's model to a peer after each update and averages in what peers sent."""

    def __init__(
        self, comm: MPI.Comm, parameters: Tensor, signature: int, config: ExchangeConfig,
        budget_steps: int, seed: int, start: ExchangeState, interrupt: Interrupt,
    ) -> None:  # fmt: skip
        """`parameters`: flat, mixed in place, touched only inside `after_update`. Collective."""
        self._comm, self._parameters, self._interrupt = comm, parameters, interrupt
        payload = make_payload(config, parameters)
        self._protocol = GossipProtocol(
            comm.rank, comm.size, topology=config.graph, mixing=config.mixing, max_staleness=config.max_staleness,
            budget_steps=budget_steps, seed=seed, local_steps=start.local_steps, base_steps=start.base_steps,
            round_=start.round, weight=start.weight, whole_every=payload.whole_every, patience_s=config.patience_s,
        )  # fmt: skip
        self._wire = Wire(comm.size, parameters.numel(), signature, gossip_sizes(payload.sizes))
        self.message_bytes = self._wire.most_bytes
        self._inbox = ReceiveBuffer(self._wire, payload, parameters.device)
        self._make_send_buffer = partial(SendBuffer, self._wire, payload, parameters.device)
        self._send_buffers = [self._make_send_buffer() for _ in range(_SEND_BUFFERS)]
        self._changed = threading.Condition()
        self._proxy = DataProxy(
            comm, self._inbox, self._on_message, self._on_death, self._on_tick,
            lambda: self._protocol.transfer_patience_s,
        )  # fmt: skip
        self._counts: Counter[str] = Counter()
        self._refused_peers: set[int] = set()
        self._distances: list[Tensor] = []
        self._protocol.clock(time.monotonic())
        self._protocol.take()  # the first update begins
        self._proxy.start()

    # ---- the learner's thread ------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        return self._protocol.global_steps

    @property
    def living(self) -> Sequence[int]:
        return self._protocol.living

    @property
    def stop(self) -> Stop:
        self._proxy.raise_failure()
        return self._protocol.stop

    def stop_now(self, reason: Stop) -> None:
        with self._changed:
            self._protocol.stop_now(reason)
            self._tell_stop()

    def after_update(self, steps: int, healthy: bool) -> bool:
        with self._changed:
            self._protocol.clock(time.monotonic())
            self._protocol.update_finished(steps, healthy)
            self._tell_stop()
            self._send_owed()
            self._wait()
            self._counts["staleness_updates"] = max(self._counts["staleness_updates"], self._protocol.staleness)
            finite = self._mix() or healthy
        self._proxy.poll()  # off with the model and the credit
        return finite

    def between_steps(self) -> None:
        self._proxy.poll()

    def close(self, timeout_s: float) -> Stop:
        with self._changed:
            self._tell_stop()  # after the barrier that the proxy closes with, nothing may be sent
        self._proxy.close(timeout_s, self._interrupt)
        p = self._protocol
        if (mix := p.take(everything=True)) is not None:
            self._inbox.mix_into(self._parameters, mix.fraction)
        end = agree_on_end(self._comm, p.stop, p.local_steps, timeout_s, self._interrupt)
        for rank in set(p.living) - set(end.living):
            p.peer_died(rank)
        p.news(end.local_steps, end.stop)
        return end.stop

    def final_parameters(self, timeout_s: float) -> Tensor:
        # A model as old as the time that this rank was away counts only if all are.
        weight = self._protocol.weight * (1.0 if self._protocol.has_model else 1e-9)
        return average_of_ranks(self._comm, self._parameters, weight, timeout_s, self._interrupt)

    def metrics(self) -> dict[str, Any]:
        with self._changed:
            counts, self._counts = self._counts, Counter()
            distances, self._distances = self._distances, []
            weight = self._protocol.weight
            counts["waits_given_up"] = self._protocol.waits_given_up
            self._protocol.waits_given_up = 0
        consensus = float(torch.stack(distances).mean()) if distances else None
        return {"consensus_distance": consensus, "push_sum_weight": weight} | {key: counts[key] for key in _COUNTS}

    def state(self) -> ExchangeState:
        with self._changed:
            p = self._protocol
            lost = [rank for rank in range(p.size) if rank not in p.living]
            return ExchangeState([int(s) for s in p.local_steps], p.base_steps, p.round, p.weight, lost)

    def _send_owed(self) -> None:
        peers = self._protocol.sendable()
        if not peers:
            return
        buffer = self._free_buffer()
        if buffer is None:
            self._counts["sends_without_buffer"] += 1
            return
        whole, weight = self._protocol.whole_is_due(peers), self._protocol.sent(peers)
        buffer.peers = peers
        buffer.fill(self._message(Kind.MODEL, weight), self._parameters, whole)
        for peer in peers:
            self._proxy.send_model(peer, buffer)
        self._counts["models_sent"] += len(peers)
        self._counts["bytes_sent"] += len(peers) * len(buffer.bytes)

    def _free_buffer(self) -> SendBuffer | None:
        """One that has left; a new one if peers that do not answer hold all."""
        free = next((b for b in self._send_buffers if b.pending == 0), None)
        if free is not None and len(self._send_buffers) > _SEND_BUFFERS:  # some were made while peers did not answer
            surplus = [b for b in self._send_buffers if b.pending == 0 and b is not free]
            for buffer in surplus[: len(self._send_buffers) - _SEND_BUFFERS]:
                self._send_buffers.remove(buffer)
        if free is None:
            silent = self._protocol.silent
            if all(not silent.isdisjoint(b.peers) for b in self._send_buffers):
                self._send_buffers.append(free := self._make_send_buffer())
        return free

    def _wait(self) -> None:
        """Until a mix is due, a peer's whole model can stand in for this rank's own, or training ends."""
        p = self._protocol
        if not p.must_wait:
            return
        begin = time.perf_counter()
        complain = begin + _COMPLAIN_AFTER_S
        self._proxy.hurry(True)
        while p.must_wait:
            self._drop_parts()
            self._changed.wait(0.1)
            self._proxy.raise_failure()
            if self._interrupt.signal is not None:
                p.stop_now(Stop.SIGNAL)
                self._tell_stop()
            p.clock(time.monotonic())
            self._send_owed()
            if (now := time.perf_counter()) >= complain:
                say(f"[rank {p.rank}] has waited {now - begin:.0f} s for a model from a peer")
                complain = now + _COMPLAIN_AFTER_S
                if not p.healthy:
                    raise PalaError(
                        f"[rank {p.rank}] its parameters are not finite and no peer has sent finite ones for "
                        f"{_COMPLAIN_AFTER_S:.0f} s. Resume from the last checkpoint with a smaller learning rate."
                    )
        self._proxy.hurry(False)
        self.waited_s += time.perf_counter() - begin

    def _drop_parts(self) -> None:
        """Make room for a whole model."""
        if senders := self._protocol.drop_parts():
            self._inbox.clear()
            if self._protocol.healthy:
                self._counts["models_stale"] += len(senders)
            for sender in senders:
                self._send_control(sender, Kind.ASK_WHOLE)

    def _mix(self) -> bool:
        """Mix what is due; True if something was."""
        had_model = self._protocol.has_model
        mix = self._protocol.take()
        if mix is None:
            return False
        measure = self._counts["mixes"] % _MIXES_A_MEASUREMENT == 0
        distance = self._inbox.mix_into(self._parameters, mix.fraction, measure)
        if distance is not None and had_model:
            self._distances.append(distance)
        self._counts["mixes"] += 1
        self._counts["models_mixed"] += len(mix.senders)
        for sender in mix.senders:
            self._return_credit(sender)
        return True

    # ---- either thread, with the lock held -----------------------------------------------------------------------

    def _message(self, kind: Kind, weight: float = 1.0) -> Message:
        p = self._protocol
        return Message(kind, p.rank, p.round, weight, p.stop, p.local_steps)

    def _send_control(self, peer: int, kind: Kind) -> None:
        data = np.zeros(self._wire.control_bytes, np.uint8)
        self._wire.encode(self._message(kind), data)
        self._proxy.send_control(peer, data)

    def _return_credit(self, peer: int) -> None:
        self._send_control(peer, Kind.CREDIT)

    def _tell_stop(self) -> None:
        for peer in self._protocol.tell_stop():
            self._send_control(peer, Kind.STOP)

    # ---- whichever thread polls the data proxy -------------------------------------------------------------------

    def _on_tick(self) -> None:
        """However long the learner takes for a step or a checkpoint: it is not away as long as this comes."""
        with self._changed:
            self._protocol.clock(time.monotonic())

    def _on_death(self, peer: int) -> None:
        with self._changed:
            self._protocol.peer_died(peer)
            self._tell_stop()
            self._changed.notify_all()

    def _on_message(self, source: int, data: np.ndarray, took_s: float, too_late: bool) -> None:
        message = self._wire.decode(data)
        refusal = message if isinstance(message, Refusal) else None
        if isinstance(message, Message):
            if message.sender != source:
                refusal = Refusal(f"it says it comes from rank {message.sender}")
            elif message.kind is Kind.MODEL and not too_late:
                refusal = self._inbox.check(message, len(data))
        with self._changed:
            if isinstance(message, Message) and message.sender == source:
                self._protocol.news(message.local_steps, message.stop)
            if refusal is not None:
                self._refuse(source, message, refusal)
            elif isinstance(message, Message):
                self._accept(source, message, took_s, too_late)
            self._tell_stop()
            self._changed.notify_all()

    def _accept(self, source: int, message: Message, took_s: float, too_late: bool) -> None:
        if message.kind in (Kind.CREDIT, Kind.ASK_WHOLE):
            self._protocol.credit_returned(source, wants_whole=message.kind is Kind.ASK_WHOLE)
        elif message.kind is Kind.MODEL and (self._protocol.is_stale(source, took_s) or too_late):
            self._give_back(source, message)
        elif message.kind is Kind.MODEL:
            whole = message.format is not Format.TOP_K
            self._inbox.add(self._protocol.model_received(source, message.weight, whole))
            self._counts["models_received"] += 1

    def _give_back(self, source: int, message: Message) -> None:
        """What was sent, or should have come, while this rank or its sender was away."""
        self._counts["models_stale"] += 1
        self._protocol.model_refused(message.weight)
        if self._protocol.stop is Stop.NONE:
            self._send_control(source, Kind.CREDIT if self._protocol.has_model else Kind.ASK_WHOLE)

    def _refuse(self, source: int, message: Message | Refusal, refusal: Refusal) -> None:
        self._counts["models_refused"] += 1
        if source not in self._refused_peers:
            self._refused_peers.add(source)
            say(
                f"[rank {self._comm.rank}] refused a model from rank {source}: {refusal.reason}. "
                "Later ones are only counted."
            )
        if isinstance(message, Message) and message.kind is Kind.MODEL:
            self._protocol.model_refused(message.weight)
        if self._protocol.stop is Stop.NONE:  # later nobody needs a credit, and this rank may have closed
            self._return_credit(source)


_COUNTS = (
    "staleness_updates", "mixes", "models_sent", "bytes_sent", "models_received", "models_mixed", "models_refused",
    "models_stale", "sends_without_buffer", "waits_given_up",
)  # fmt: skip
