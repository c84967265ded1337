"""PALA's exchange: the gossip driver as the learner sees it, and what all ranks do together at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pala.comm.base import Communicator
from pala.config import Config
from pala.exchange.base import ModelExchange, agree_on_end, average_of_ranks
from pala.exchange.budget import ExchangeState, Stop, budget_of
from pala.exchange.gossip.driver import GossipDriver
from pala.exchange.gossip.exact import make_codec_with_exact
from pala.exchange.gossip.messages import gossip_sizes
from pala.exchange.gossip.models import TensorModels
from pala.exchange.gossip.protocols import PROTOCOLS, make_protocol
from pala.exchange.gossip.sleeping import SleepingGossip
from pala.exchange.wire import Wire
from pala.system.errors import PalaError
from pala.system.interrupt import LEAVE, Interrupt
from pala.system.output import say
from pala.system.waiting import LongWait

_LOOK_S = 0.1  # a waiting rank looks at its clock and at signals so often
_GIVE_UP_AFTER_S = 300.0  # without a model of one's own; peers send a whole one when their updates end


class Gossip(ModelExchange):
    """Sends this rank's model to a peer after each update and averages in what peers sent."""

    def __init__(
        self, comm: Communicator, parameters: Tensor, signature: int, config: Config, start: ExchangeState | None,
        interrupt: Interrupt, slept: SleepingGossip | None = None, num_exact: int = 0,
    ) -> None:  # fmt: skip
        """`parameters`: flat, mixed in place, touched only on the learner's thread, between two rollouts; the last
        `num_exact` are never rounded or left out. `start`: None for a spare that is needed, which goes on with what it
        `slept` by, and has to `take_place`. Collective, but for a spare."""
        self._comm, self._parameters, self._interrupt = comm, parameters, interrupt
        self._exchanges_between_steps = config.exchange.exchanges_per_update > 1
        self._stays = False  # it was told to leave, and has told others, but is there at the end
        self._has_updated = False  # before, its moments know nothing, and half of that would go to a peer
        self._goes_on = start is not None and start.global_steps > 0  # with what an earlier start has trained
        codec = make_codec_with_exact(config.exchange, parameters, num_exact)
        sizes = gossip_sizes(codec.sizes, PROTOCOLS[config.exchange.mixing].kinds)
        wire = Wire(comm.size, parameters.numel(), signature, sizes)
        models = TensorModels(parameters, codec, wire)
        self.message_bytes = wire.most_bytes
        if slept is not None:
            self._driver, self._transport, self._protocol = slept.driver, slept.transport, slept.driver.protocol
            self._driver.wake(models, codec.whole_every)
            return
        assert start is not None
        budget = budget_of(comm, config, start)
        self._protocol = make_protocol(config, budget, start.round, start.weight, codec.whole_every)
        self._transport = comm.open_transport()
        self._driver = GossipDriver(self._protocol, self._transport, models)
        self._driver.start()

    @property
    def global_steps(self) -> int:
        return self._protocol.budget.global_steps

    @property
    def living(self) -> Sequence[int]:
        return self._protocol.living

    @property
    def left(self) -> Collection[int]:
        return self._protocol.budget.left

    @property
    def joining(self) -> Collection[int]:
        return self._protocol.budget.joining

    @property
    def stop(self) -> Stop:
        self._transport.raise_failure()
        return self._protocol.budget.stop

    def stop_now(self, reason: Stop) -> None:
        self._driver.settle()  # perhaps a signal broke off a rollout
        self._driver.end(reason)

    @property
    def heals(self) -> int:
        return self._driver.heals

    def take_place(self) -> bool:
        """A rank that has slept trains from now on, with a peer's model, which is waited for. False if training ends
        before it comes. Raises PalaError if nobody has one any more. Not collective."""
        self._driver.take_place()
        with self._driver.lock:
            if not self._driver.advance():
                self._wait()
            if not self._protocol.has_model and self._protocol.budget.left:
                self._wait_for_the_end()
        if self._protocol.has_model:
            return True
        if self.stop is Stop.NONE:
            raise PalaError(
                f"[rank {self._comm.rank}] no rank is left that has a model; go on from the last checkpoint by "
                "`--resume`."
            )
        return False

    def leave(self) -> bool:
        rank, budget = self._comm.rank, self._protocol.budget
        if budget.stop is Stop.NONE and list(self.living) != [rank]:
            self._transport.wait_until_sent(self._protocol.rules.patience_s, self._interrupt)
            self._driver.leave()
            self._transport.wait_until_sent(self._protocol.rules.patience_s, self._interrupt)
            if self.living and budget.stop is Stop.NONE:
                say(f"[rank {rank}] leaves ({LEAVE.name}); {len(self.living)} go on.")
                return True
            # Training has ended meanwhile, or others were told to leave at the same time, who may stay as well: who
            # does, all learn when they close.
            self._stays = True
        if budget.stop is Stop.NONE:
            say(f"[rank {rank}] was told to leave ({LEAVE.name}), but no other rank trains: the job ends.")
            self._driver.end(Stop.ALL_LEAVE)
        return False

    def after_update(self, steps: int, healthy: bool) -> bool:
        self._has_updated = True
        mixes = self._driver.counts["mixes"]
        with self._driver.lock:
            self._driver.finish_update(steps, healthy)
            if not self._driver.advance():
                self._wait()
            mixed = self._driver.counts["mixes"] > mixes
        self._transport.poll()  # off with the model and the credit
        return mixed or healthy

    def between_steps(self) -> None:
        self._transport.poll()
        if self._exchanges_between_steps and self._has_updated and self._driver.between_steps():
            self._transport.poll()  # off with the answers

    def close(self, timeout_s: float) -> Stop:
        self._transport.close(timeout_s, self._interrupt)
        self._driver.finish()
        budget = self._protocol.budget
        has_left = self._protocol.has_left and not self._stays
        end = agree_on_end(self._comm, budget.stop, budget.local_steps, timeout_s, self._interrupt, has_left)
        for rank in set(budget.living) - set(end.living):
            budget.peer_died(rank)
        budget.stayed(end.stayed)
        budget.news(end.local_steps, end.stop)
        return end.stop

    def abandon(self) -> None:
        self._transport.abandon()

    def final_parameters(self, timeout_s: float) -> Tensor:
        # A model that was never trained, or is as old as the time that this rank was away, or has left, counts only if
        # all are.
        trained = self._has_updated or self._goes_on or self.heals > 0
        fresh = trained and self._protocol.has_model and not self._protocol.has_left
        weight = self._protocol.mixing.weight
        return average_of_ranks(self._comm, self._parameters, weight, fresh, timeout_s, self._interrupt)

    def metrics(self) -> dict[str, Any]:
        driver = self._driver
        with driver.lock:
            counts = driver.counts + self._protocol.counts
            driver.counts, self._protocol.counts = Counter(), Counter()
            distances, driver.distances = driver.distances, []
            weight = self._protocol.mixing.weight
        consensus = float(torch.stack(distances).mean()) if distances else None
        return {"consensus_distance": consensus, "push_sum_weight": weight} | {key: counts[key] for key in _COUNTS}

    def state(self) -> ExchangeState:
        with self._driver.lock:
            budget = self._protocol.budget
            steps, weight = budget.local_steps.tolist(), self._protocol.mixing.weight
            return ExchangeState(steps, budget.base_steps, self._protocol.round, weight, budget.lost)

    def _wait_for_the_end(self) -> None:
        """Those who trained may all have been told to leave in the same moment: then they stay, and end the job. With
        the lock held, which is given up meanwhile."""
        give_up_s = time.perf_counter() + self._protocol.rules.patience_s
        while self.stop is Stop.NONE and self._interrupt.signal is None and time.perf_counter() < give_up_s:
            self._driver.wait(_LOOK_S)

    def _wait(self) -> None:
        """Until a mix is due, a peer's whole model can stand in for this rank's own, or training ends. With the lock
        held, which is given up meanwhile."""
        begin, wait = time.perf_counter(), LongWait(self._comm.rank, "a model from a peer")
        self._transport.hurry(True)
        while True:
            self._driver.wait(_LOOK_S)
            self._transport.raise_failure()
            if self._interrupt.signal is not None:
                self._driver.end(Stop.SIGNAL)
            if self._driver.advance():
                break
            wait.look()
            if wait.took_s >= _GIVE_UP_AFTER_S and not self._protocol.healthy:
                if not self._has_updated:
                    raise PalaError(
                        f"[rank {self._comm.rank}] takes a place, but no peer has sent it a model for "
                        f"{_GIVE_UP_AFTER_S:.0f} s: none answers. Resume from the last checkpoint."
                    )
                raise PalaError(
                    f"[rank {self._comm.rank}] has no model of its own that is finite, and no peer has sent one for "
                    f"{_GIVE_UP_AFTER_S:.0f} s. Resume from the last checkpoint, perhaps with a smaller learning rate."
                )
        self._transport.hurry(False)
        self.waited_s += time.perf_counter() - begin


_COUNTS = (
    "staleness_updates", "mixes", "models_sent", "bytes_sent", "models_received", "models_mixed", "models_refused",
    "models_stale", "sends_without_buffer", "waits_given_up",
)  # fmt: skip
