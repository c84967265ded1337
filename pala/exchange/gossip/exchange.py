"""PALA's exchange: the gossip driver as the learner sees it, and what all ranks do together at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pala.exchange.base import ModelExchange, Setup, agree_on_end, average_of_ranks
from pala.exchange.budget import ExchangeState, Stop, budget_of
from pala.exchange.flat import is_finite
from pala.exchange.gossip.codecs import make_codec
from pala.exchange.gossip.driver import GossipDriver, make_protocol
from pala.exchange.gossip.messages import gossip_sizes
from pala.exchange.gossip.models import TensorModels
from pala.exchange.gossip.state import Rules
from pala.exchange.wire import Wire
from pala.system.errors import PalaError
from pala.system.interrupt import LEAVE
from pala.system.output import log
from pala.system.text import named
from pala.system.trace import Trace
from pala.system.waiting import LongWait, wait_asleep

if TYPE_CHECKING:
    from pala.exchange.gossip.sleeping import SleepingGossip
    from pala.exchange.gossip.topology import Peers

_LOOK_S = 0.1  # between two looks of a waiting rank at its clock and at signals
_ASK_AGAIN_S = 2.0  # who stays: a question or its reply may have been damaged
_SAY_AT_ASK = 4  # the question in vain at which users are told; ranks as fast as this one have made 4 updates by then
_LARGE_BYTES = 2**22  # of a message: it takes a millisecond or more to receive and check
_GIVE_UP_AFTER_S = 300.0  # of a rank without a model of use; peers send it a whole one when their updates end


class GossipExchange(ModelExchange):
    """The exchange that sends this rank's model to a peer after each update, and mixes in what peers sent."""

    def __init__(
        self,
        setup: Setup,
        *,
        own_topology: Peers | None = None,
        slept: SleepingGossip | None = None,
        groups: Sequence[int] = (),
    ) -> None:
        """Send and hear from now on. Collective, except for a spare.

        `own_topology`: a user's, in place of the named one. `slept`: what a spare that is needed has slept by, with
        which it continues; it has to `join`. `groups`: see `StepBudget`."""
        super().__init__(setup)
        comm, parameters, config, start, signature, num_exact = setup
        self._polls_between_steps = False
        self._average_met_the_end = False  # `average` found that another rank has ended, and closed the exchange
        self._stays = False  # this rank has told others that it leaves, but is there at the end
        self._asks_again_s = 0.0  # when a rank that was told to leave asks again who stays
        self._num_asks = 0  # of this question
        self._has_updated = False  # before, its running moments are empty, and must not be averaged into a peer's
        self._is_resumed = slept is None and start.global_steps > 0  # with what an earlier start has trained
        codec = make_codec(config.exchange, parameters, num_exact)
        protocol = make_protocol(Rules.of(config, codec.whole_every, own_topology))
        wire = Wire(comm.size, parameters.numel(), signature, gossip_sizes(codec.sizes, protocol.kinds))
        models = TensorModels(parameters, codec, wire)
        self.message_bytes = wire.most_bytes
        if slept is not None:
            self.driver, self._transport = slept.driver, slept.transport
            self.driver.wake(models, codec.whole_every)
        else:
            budget = budget_of(comm, start, config.total_steps, config.run.spares, groups)
            state = protocol.new_state(budget, start.weight, start.round)
            self._transport = comm.open_transport()
            self.driver = GossipDriver(protocol, state, self._transport, models)
            self.driver.start()
        self._patience_s = protocol.rules.patience_s
        self._state = self.driver.state

    @property
    def global_steps(self) -> int:
        return self._state.budget.global_steps

    @property
    def living(self) -> Sequence[int]:
        return self._state.living

    @property
    def left(self) -> Collection[int]:
        return self._state.budget.left

    @property
    def joining(self) -> Collection[int]:
        return self._state.budget.joining

    @property
    def stop(self) -> Stop:
        self._transport.raise_failure()
        return self._state.budget.stop

    def record(self, trace: Trace) -> None:
        super().record(trace)
        self.driver.trace = trace

    def stop_now(self, reason: Stop) -> None:
        self.driver.end(reason)

    @property
    def heals(self) -> int:
        return self.driver.heals

    def join(self) -> bool:
        """Train from now on, after sleep, with a peer's model, which is waited for. False if training ends before it
        comes. Raises PalaError if no rank has one any more. Not collective."""
        self.driver.join()
        with self.driver.lock:
            if not self.driver.advance():
                self._wait()
            if not self._state.has_model and self._state.budget.left:
                self._wait_for_the_end()
        if self._state.has_model:
            return True
        if self.stop is Stop.NONE:
            raise PalaError(
                f"[rank {self._comm.rank}] no rank is left that has a model; continue from the last checkpoint by "
                "`--resume`."
            )
        return False

    def leave(self) -> bool:
        rank, budget = self._comm.rank, self._state.budget
        if budget.stop is Stop.NONE and list(self.living) != [rank]:
            if not self._is_assured():
                self.interrupt.leave_requested = True  # tried again after the next update
                return False
            self.driver.leave()
            self._transport.wait_until_sent(self._patience_s)
            self._ask_once_more()
            if self._may_leave() and budget.stop is Stop.NONE:
                log(f"[rank {rank}] leaves ({LEAVE.name}); {len(self.living)} continue.")
                return True
            # Training has ended meanwhile, or others were told to leave at the same time and may stay as well:
            # `close` settles which ranks stayed.
            self._stays = True
        if budget.stop is Stop.NONE:
            others = [other for other in self.living if other != rank]
            why = f"{named(others)} reported no usable model" if others else "no other rank trains"
            log(f"[rank {rank}] was told to leave ({LEAVE.name}), but {why}: the job ends.")
            self.driver.end(Stop.ALL_LEAVE)
        return False

    def _may_leave(self) -> bool:
        """Return whether another rank, which stays, has a model of use."""
        return self._state.may_leave

    def _may_hear_who_stays(self) -> bool:
        """Return whether a rank trains that may yet say that it has a model of use."""
        return bool(self._state.living)

    def _is_assured(self) -> bool:
        """Return whether this rank may leave, and nothing of its models is on its way; if not, ask who stays."""
        if self._may_leave():
            self._transport.wait_until_sent(self._patience_s)
            return self._may_leave()
        if time.monotonic() > self._asks_again_s:
            self._asks_again_s = time.monotonic() + _ASK_AGAIN_S
            self.driver.wish_to_leave()
            self._num_asks += 1
            others = [rank for rank in self.living if rank != self._comm.rank]
            if self._num_asks == _SAY_AT_ASK and others:
                log(
                    f"[rank {self._comm.rank}] was told to leave ({LEAVE.name}) and waits for {named(others)}: it "
                    "trains until one of the others has reported a usable model, as ranks do after an update. Look "
                    "whether they still train. SIGUSR1 ends the whole job, with a checkpoint."
                )
        return False

    def after_update(self, steps: int, healthy: bool) -> bool:
        return self._finish_update(steps, lambda: healthy)

    def after_unchecked_update(self, steps: int, is_finite: Callable[[], bool]) -> bool:
        """Do as `after_update`, for a model that nobody has looked at. `is_finite`, which takes a pass over it, is
        called only if the model may be sent or mixed now; until then it counts as finite."""
        return self._finish_update(steps, lambda: self.driver.protocol.is_idle(self._state) or is_finite())

    def _finish_update(self, steps: int, is_healthy: Callable[[], bool]) -> bool:
        self._has_updated = True
        mixes = self.driver.counts["mixes"]
        with self.driver.lock:  # nothing comes between the look and the exchange
            healthy = is_healthy()
            self.driver.finish_update(steps, healthy)
            if not self.driver.advance():
                self._wait()
            mixed = self.driver.counts["mixes"] > mixes
        self._let_messages_move()
        return mixed or healthy

    def between_steps(self) -> None:
        self._polls_between_steps = True
        self._transport.poll()

    def count(self, steps: int) -> None:
        """Count an update, from `steps` steps, after which this rank exchanges nothing."""
        self._has_updated = True
        with self.driver.lock:
            budget = self._state.budget
            budget.add_steps(steps)
            if budget.stop is not Stop.NONE:
                self.driver.end(budget.stop)
        self._let_messages_move()

    def _let_messages_move(self) -> None:
        """Send what is to be sent and receive what has come, after an update.

        A large model is left to the transport's thread, so that the learner continues while it comes: a model of 10
        million parameters takes 10 to 20 ms, the thread's waking up 0.1 ms. Not where the learner polls between the
        steps of a rollout: most have come by then."""
        if self.message_bytes < _LARGE_BYTES or self._polls_between_steps:
            self._transport.poll()
        else:
            self._transport.poll_soon()

    def average(self, timeout_s: float | None, where: str | None) -> bool:
        """Give all living ranks the average of their models, and let them continue. Collective: returns False if
        another rank has come to the end instead; then the exchange is closed here, too.

        `where`: the place in the user's code, for messages; None if a long wait is expected."""
        meeting = self._transport.meeting(where)
        with self.driver.lock:  # what is answered meanwhile must be of use
            self._state.healthy = self._state.healthy and is_finite(self._parameters)

        def all_are_here() -> bool:
            self._transport.raise_failure()
            if self.interrupt.signal is not None:
                self.driver.end(Stop.SIGNAL)
            if not self._state.has_left:
                self.driver.advance()  # answer those that are not here yet: they may have to wait for it
            return meeting.have_come()

        wait_asleep(all_are_here, timeout_s, self.interrupt, wait=meeting.wait)
        self.driver.be_quiet()
        self._transport.pause(timeout_s)
        self.driver.restart()
        if self._agree(timeout_s) is not Stop.NONE:
            self._transport.free()
            self._average_met_the_end = True
            return False
        self.driver.heals += not is_finite(self._parameters)
        self._parameters.copy_(self.final_parameters(timeout_s))
        self.driver.averaged()
        self._transport.start(self.driver)
        return True

    def close(self, timeout_s: float) -> Stop:
        if not self._average_met_the_end:
            self._transport.close(timeout_s)
            self.driver.finish()
            self._agree(timeout_s)
        return self._state.budget.stop

    def _agree(self, timeout_s: float | None) -> Stop:
        """Agree with the living ranks on the end, and on everyone's steps. Collective."""
        budget = self._state.budget
        has_left = self._state.has_left and not self._stays
        end = agree_on_end(self._comm, budget.stop, budget.steps_by_rank, timeout_s, has_left)
        for rank in set(budget.living) - set(end.living):
            budget.peer_died(rank)
        if end.stop is not Stop.NONE:
            budget.stayed(end.stayed)
        budget.agreed(end.steps_by_rank, end.stop)
        return end.stop

    def abandon(self) -> None:
        self._transport.abandon()

    def final_parameters(self, timeout_s: float | None) -> Tensor:
        weight = self._state.weight
        return average_of_ranks(self._comm, self._parameters, weight, self._is_fresh, timeout_s)

    def metrics(self) -> dict[str, Any]:
        driver = self.driver
        with driver.lock:
            counts = driver.counts + self._state.counts
            driver.counts, self._state.counts = Counter(), Counter()
            distances = list(driver.distances)
            driver.distances.clear()
            weight = self._state.weight
        consensus = float(torch.stack(distances).mean()) if distances else None
        return {"consensus_distance": consensus, "push_sum_weight": weight} | {key: counts[key] for key in _COUNTS}

    def state(self) -> ExchangeState:
        with self.driver.lock:
            return self._state.kept()

    @property
    def _is_fresh(self) -> bool:
        """Whether this rank's model counts in the final average. One that was never trained, or is as old as the time
        that this rank was away, or has left, counts only if all are so."""
        trained = self._has_updated or self._is_resumed or self.heals > 0
        return trained and self._state.has_model and not self._state.has_left

    def _wait_for_the_end(self) -> None:
        """Wait while those who trained may all have been told to leave in the same moment: then they stay, and end the
        job. With the lock held, which is given up meanwhile."""
        self._wait_with_patience(lambda: False)

    def _ask_once_more(self) -> None:
        """Ask those who train who stays, if all that this rank counted on have left in the same moment."""
        if self._may_leave() or not self._may_hear_who_stays():
            return
        self.driver.wish_to_leave()
        with self.driver.lock:
            self._wait_with_patience(lambda: self._may_leave() or not self._may_hear_who_stays())
        self._transport.wait_until_sent(self._patience_s)

    def _wait_with_patience(self, done: Callable[[], bool]) -> None:
        """Wait until `done()` or the end, but not for longer than a silent rank is waited for. With the lock held,
        which is given up meanwhile."""
        wait = LongWait()

        def is_over() -> bool:
            ends = self.stop is not Stop.NONE or self.interrupt.signal is not None
            return ends or done() or wait.took_s >= self._patience_s

        wait_asleep(is_over, None, self.interrupt, _LOOK_S, wait, self.driver.wait)

    def _wait(self) -> None:
        """Wait until a mix is due, a peer's whole model can stand in for this rank's own, or training ends. With the
        lock held, which is given up meanwhile."""
        why = "" if self._state.healthy else ", as its own is not finite"
        begin, wait = time.perf_counter(), LongWait(self._comm.rank, f"a model from a peer{why}")
        self._transport.hurry(True)
        self.driver.wait(_LOOK_S)  # it has just looked
        wait_asleep(lambda: self._may_continue(wait), None, self.interrupt, _LOOK_S, wait, self.driver.wait)
        self._transport.hurry(False)
        self._waited_since(begin)

    def _may_continue(self, wait: LongWait) -> bool:
        """Look whether the next update may begin. Raises PalaError if no model comes for a rank that has none."""
        self._transport.raise_failure()
        if self.interrupt.signal is not None:
            self.driver.end(Stop.SIGNAL)
        if self.driver.advance():
            return True
        if wait.took_s < _GIVE_UP_AFTER_S or self._state.healthy:
            return False
        if not self._has_updated:
            raise PalaError(
                f"[rank {self._comm.rank}] takes a place, but no peer has sent it a model for "
                f"{_GIVE_UP_AFTER_S:.0f} s: none answers. Resume from the last checkpoint."
            )
        raise PalaError(
            f"[rank {self._comm.rank}] has no model of its own that is finite, and no peer has sent one for "
            f"{_GIVE_UP_AFTER_S:.0f} s. Resume from the last checkpoint, perhaps with a smaller learning rate."
        )


_COUNTS = (
    "staleness_updates",
    "mixes",
    "models_sent",
    "bytes_sent",
    "models_received",
    "models_mixed",
    "models_refused",
    "models_stale",
    "sends_without_buffer",
    "waits_given_up",
)
