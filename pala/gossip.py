"""Gossip for any torch training loop: `pala.Gossip`.

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    with pala.Gossip(model, total_steps=1_000_000) as gossip:   # all ranks under mpirun; alone without it
        while gossip.goes_on:                                   # until the budget of all ranks is used, or a signal
            loss(model, next_batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
            gossip.after_update(steps=32)                       # send, receive, average
    # model is the average of the living ranks' models

Every rank runs the same script: `mpirun -np 4 python script.py`. Training of `pala train` goes through the same
exchange (`pala/exchange/gossip/exchange.py`), so deaths, staleness and messages that are refused are treated alike.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn

from pala.comm.agreement import collectively
from pala.comm.base import Communicator, rank_of_thread
from pala.config import A2CConfig, Config, ExchangeConfig, RunConfig, checked
from pala.config.catalogue import RULES
from pala.config.schema import CompressionName, MixingName, TopologyName
from pala.exchange.base import Setup, average_of_ranks
from pala.exchange.budget import ExchangeState, Stop
from pala.exchange.flat import FlatTensors, is_dense, named_tensors, share_tensors
from pala.exchange.gossip.exchange import GossipExchange
from pala.exchange.gossip.topology import DirectedGraph, PeerFunction, own_topology
from pala.exchange.make import check_size
from pala.exchange.momentum import Momentum
from pala.system.errors import CollectiveError, PalaError
from pala.system.interrupt import Interrupt, note_on_thread
from pala.system.launcher import Launch
from pala.system.output import log, one_sentence_for_mistakes, say_death
from pala.system.tables import shown
from pala.system.trace import Trace

State = Mapping[str, Any] | None
_CLOSE_S = 300.0  # how long a rank waits for the slowest where all meet in the block
_LEAST_LATE_UPDATES = 10  # a loop that looks at `goes_on` after several updates makes some after the end
_open: set[int] = set()  # ranks of this process, which are threads in tests, that are inside a block

Change = Literal["death", "leave", "heal"]


class Gossip:
    """Averages a model with those of other ranks while each trains on its own. A context manager, used once.

    From the block on the model's float32 tensors are views of one flat vector, except those in shared memory, which
    stay there; optimisers that were made before stay valid. Change tensors in place, as `load_state_dict` does;
    replacing a tensor or a module of the model is an error.

    What travels: all parameters, and the floating-point buffers of `state_dict`, such as BatchNorm's statistics, which
    are never compressed.
    """

    _flat: FlatTensors | None = None
    _exchange: GossipExchange | None = None  # none on a rank that is alone
    _momentum: Momentum | None = None
    _mean_move: Tensor | None = None  # momentum's
    _loaded: Mapping[str, Any] | None = None  # by `load_state_dict`
    _start = ExchangeState([])  # of the exchange
    _updates = 0
    _local_steps = 0
    _num_late = 0  # updates after training had ended
    _living: Sequence[int] = ()  # of whom `on_change` knows
    _heals = 0
    _has_said_not_finite = False
    _distance: float | None = None
    _has_left = False
    _has_ended = False  # all have met for the last time
    _is_after_block = False
    _is_mpi = False

    def __init__(
        self,
        model: nn.Module | Iterable[Tensor],
        *,
        total_steps: int,
        mixing: MixingName = "paired",
        topology: TopologyName | DirectedGraph | PeerFunction = "auto",
        compression: CompressionName = "none",
        max_staleness: int = 10,
        patience_s: float = 5.0,
        momentum: float = 0.0,
        every: int = 1,
        seed: int = 0,
        on_change: Callable[[Change, int], object] | None = None,
        trace: str | Path | None = None,
        comm: Communicator | None = None,
    ) -> None:
        """Name the model and how ranks exchange it; nothing happens before the block begins.

        `model`: a module, or tensors, of float32, bfloat16 or float16, all on one device. `total_steps`: the budget of
        all ranks together, in the unit of `after_update(steps=...)`. `topology`: a name, a networkx.DiGraph of ranks
        whose weights say how probably each peer is chosen, or a function (rank, living ranks, round) -> peers.
        `every`: updates of a rank from one exchange to the next. `seed`: seed of random peers. `on_change`: called
        with a kind and a rank after an update or average, in which this rank heard of it: `death`, `leave`, or `heal`
        if its own model was replaced by a peer's. `trace`: folder in which each of several ranks records its timeline
        (docs/timeline.md). `comm`: the ranks of a test. The others mean what they mean in training. Raises PalaError
        for settings or tensors that cannot be used.
        """
        if comm is None and Launch.detect().size > 1:
            one_sentence_for_mistakes()
        exchange = ExchangeConfig(
            topology=topology if isinstance(topology, str) else "auto",
            mixing=mixing,
            compression=compression,
            max_staleness=max_staleness,
            patience_s=patience_s,
        )
        a2c, run = A2CConfig(momentum=momentum), RunConfig(trace=trace is not None)
        try:
            self._settings = checked(Config(total_steps=total_steps, seed=seed, exchange=exchange, a2c=a2c, run=run))
        except PalaError as error:
            raise PalaError(_in_words_of_the_call(error)) from None
        by_pairs = RULES[mixing].by_pairs
        self._own_topology = None if isinstance(topology, str) else own_topology(topology, by_pairs)
        self._every = _whole_number("every", every)
        for name, value, fits, wanted in (
            ("on_change", on_change, callable(on_change), "a function of (kind, rank)"),
            ("trace", trace, isinstance(trace, str | os.PathLike), "a folder"),
            ("comm", comm, isinstance(comm, Communicator), "one that `pala.testing.run_ranks` gives"),
        ):
            if value is not None and not fits:
                raise PalaError(f"Gossip: '{name}' is {shown(value)} but must be {wanted}.")
        self._on_change = on_change
        self._trace_folder = Path(trace or "")
        self._trace: Trace | None = None
        self._named = named_tensors(model)
        self._module = model if isinstance(model, nn.Module) else None
        self._comm = comm
        self._interrupt = Interrupt()
        self._stack = ExitStack()

    # ---- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Gossip:
        """Start MPI if this is a rank of several, and give all ranks one model to begin with: rank 0's, or if some have
        loaded a state the average of theirs. Collective. Raises PalaError."""
        if self._flat is not None:
            raise PalaError("This Gossip was used before: make a new one for each block.")
        if self._comm is None:
            self._comm = rank_of_thread.get() or _ranks_of_mpi()
            self._is_mpi = self._comm is not None and rank_of_thread.get() is None
        if self._comm is not None:
            self._interrupt = self._comm.interrupt
        if rank_of_thread.get() is None and (self._comm is None or self._comm.rank == 0):
            note_on_thread("leave the loop")
        try:
            with self._stack:
                self._stack.enter_context(_alone_in_block(self._comm))
                self._stack.enter_context(self._interrupt.installed())
                self._begin(self._comm)
                self._stack = self._stack.pop_all()  # all went well: the handlers of signals stay until the block ends
        except CollectiveError:
            raise  # on every rank
        except BaseException as error:
            self._fail(error)  # the other ranks would wait for this one
            raise
        return self

    def _begin(self, comm: Communicator | None) -> None:
        """Make the model's flat vector, and begin the exchange. Collective."""
        self._flat = flat = FlatTensors(*self._named, self._module)
        check_size(flat.data)
        if self._settings.a2c.momentum:
            self._begin_momentum(flat)
        if comm is None or comm.size == 1:
            self._start = _start_of(1, [self._loaded])
            return
        self._living = range(comm.size)
        likeness = self._settings, self._every, self._own_topology and self._own_topology.likeness
        states = _begin_alike(comm, flat, likeness, self._loaded)
        if self._own_topology is not None:
            by_pairs = RULES[self._settings.exchange.mixing].by_pairs
            collectively(comm, partial(self._own_topology.check, comm.size, by_pairs))
        self._start = _start_of(comm.size, states)
        _share_model(comm, flat, [state is not None for state in states])
        flat.scatter()
        if self._module is not None:
            first = next((rank for rank, state in enumerate(states) if state is not None), 0)
            _share_buffers(comm, self._module, first)
        if self._settings.run.trace:
            from pala.comm.tracing import begin_trace

            self._trace = self._stack.enter_context(closing(begin_trace(comm, comm.bcast(self._trace_folder))))
        setup = Setup(comm, flat.data, self._settings, self._start, flat.signature, flat.num_exact)
        self._exchange = GossipExchange(setup, own_topology=self._own_topology)
        if self._trace is not None:
            self._exchange.record(self._trace)

    def _begin_momentum(self, flat: FlatTensors) -> None:
        settings, kept = self._settings.a2c, (self._loaded or {}).get("movement")
        self._mean_move = torch.zeros_like(flat.learned)
        if kept is not None:
            if not isinstance(kept, Tensor) or kept.shape != self._mean_move.shape:
                raise PalaError("Gossip: the state that was loaded is of another model.")
            self._mean_move.copy_(kept)
        self._momentum = Momentum(flat.learned, settings.momentum, self._mean_move)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Average the model over the living ranks. Collective.

        An exception inside the block ends this rank with its traceback; the other ranks continue where the job outlives
        its ranks (`mpirun --with-ft ulfm`), and end otherwise: they would wait for this one.
        """
        self._is_after_block = True
        with self._stack:
            if error is not None:
                self._fail(error)
            elif self._exchange is not None:
                try:
                    self._finish(self._exchange)
                except CollectiveError:
                    raise
                except BaseException as late:
                    self._fail(late)
                    raise

    def _finish(self, exchange: GossipExchange) -> None:
        assert self._flat is not None and self._comm is not None
        if self._has_left:
            if self._comm.outlives_ranks and exchange.living:
                self._leave(self._comm, exchange)
                return
            while not self._has_ended:  # this MPI needs every process until the job ends
                self._meet(exchange, None, None)
        if self._updates == 0 and exchange.stop is Stop.NONE:
            raise PalaError(
                f"[rank {self.rank}] the block of `pala.Gossip` has ended without one `after_update`: call it on every "
                "rank after each optimiser step."
            )
        if exchange.stop is Stop.NONE:  # the user's loop ended before the budget: training ends on all ranks
            exchange.stop_now(Stop.CALLBACK)
            steps = f"{exchange.global_steps:,} of {self._settings.total_steps:,} steps"
            log(f"[rank {self.rank}] left the block after {steps}, which ends training on all ranks.")
        if not self._has_ended:
            # Without a limit, as at the script's end: a rank may evaluate for long before it looks at `goes_on`.
            self._meet(exchange, None, "the end of the block")
        self._flat.check()
        self._flat.data.copy_(exchange.final_parameters(_CLOSE_S))
        self._flat.scatter()
        self._take_note(exchange)

    def _leave(self, comm: Communicator, exchange: GossipExchange) -> None:
        """End this rank, which the others take for dead: its process, or if it is a thread its part in the exchange."""
        comm.detach()
        self._stack.close()  # the trace is written
        if self._is_mpi:
            from pala.comm.mpi_process import leave_job

            leave_job()  # without MPI_Finalize
        exchange.abandon()

    def _meet(self, exchange: GossipExchange, timeout_s: float | None, where: str | None) -> bool:
        """Average with all living ranks; False if training has ended on any of them. Collective. `where`: as for
        `GossipExchange.average`."""
        assert self._flat is not None
        self._flat.check()
        self._flat.gather()
        self._has_ended = not exchange.average(timeout_s, where)
        self._flat.scatter()
        self._take_note(exchange)
        return not self._has_ended

    def _fail(self, error: BaseException) -> None:
        """End the job, or this rank alone where the others outlive it; of ranks that are threads, only its exchange."""
        if self._exchange is not None:
            self._exchange.abandon()
        if self._is_mpi:
            from pala.comm.mpi import MpiCommunicator
            from pala.comm.mpi_process import abort

            assert isinstance(self._comm, MpiCommunicator)
            abort(self._comm, error)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """Whether to continue: False once all ranks together have made `total_steps`, or a signal or another rank ended
        training. Raises PalaError before the block."""
        self._check_begun("goes_on")
        if self._interrupt.signal is not None:
            if self._exchange is not None and self._exchange.stop is Stop.NONE:
                self._exchange.stop_now(Stop.SIGNAL)
            return False
        if self._interrupt.leave_requested and not self._has_ended:
            self._interrupt.leave_requested = False
            self._has_left = self._exchange is None or self._exchange.leave()
        return not self._is_over()

    def _is_over(self) -> bool:
        """Return whether training has ended on this rank."""
        if self._has_left or self._exchange is None:
            return self._has_left or self.global_steps >= self._settings.total_steps
        return self._exchange.stop is not Stop.NONE

    def after_update(self, steps: int) -> None:
        """Send this rank's model and average in what peers sent, after an optimiser step. May wait, at most
        `max_staleness` exchanges behind and `patience_s` for a peer. Not collective.

        `steps`: share of the budget that this update counts. A model that is not finite is replaced by a peer's before
        it is sent or averaged. Raises PalaError if no other rank has one that is finite (a rank that is alone does not
        look), or if a tensor or a module was replaced.
        """
        flat = self._inside_block("after_update")
        steps = _whole_number("steps", steps)
        flat.check()
        if self._is_over():
            self._say_if_late()
        self._updates += 1
        self._local_steps += steps
        if self._momentum is not None:
            flat.gather()
            self._momentum.push_()
            flat.scatter()
        if self._exchange is not None and not (self._has_ended or self._has_left):
            self._exchange_model(self._exchange, flat, steps)
        if self._comm is not None:
            self._comm.on_count(self._updates)

    def _say_if_late(self) -> None:
        """Say once that the loop does not end: when it has made as many updates since the end as before."""
        self._num_late += 1
        if self._num_late == max(_LEAST_LATE_UPDATES, self._updates - self._num_late + 1):
            log(
                f"[rank {self.rank}] has made {self._num_late:,} updates since training ended: end the loop when "
                "`goes_on` is False."
            )

    def _exchange_model(self, exchange: GossipExchange, flat: FlatTensors, steps: int) -> None:
        if self._updates % self._every:
            exchange.count(steps)
            return
        if self._trace is not None:
            self._trace.lap("loop")
        flat.gather()
        if not exchange.after_unchecked_update(steps, self._is_finite) and exchange.stop is Stop.NONE:
            raise PalaError(
                f"[rank {self.rank}] the model is not finite, and no peer has sent one that is. Lower the "
                "learning rate."
            )
        flat.scatter()
        if self._trace is not None:
            self._trace.lap("exchange")
        self._take_note(exchange)

    def _is_finite(self) -> bool:
        """Return whether the model is finite; say it if it is not, the first time."""
        assert self._flat is not None
        is_finite = self._flat.is_finite()
        if not is_finite and not self._has_said_not_finite:
            self._has_said_not_finite = True
            log(
                f"[rank {self.rank}] the model is not finite after {self._updates:,} updates: it waits for a peer's, "
                "up to 300 s. If no rank has one, lower the learning rate. This is said once."
            )
        return is_finite

    def _take_note(self, exchange: GossipExchange) -> None:
        """Take note of what has happened since the last call: begin momentum again after a heal, print deaths on the
        lowest living rank, and call `on_change`."""
        heals, self._heals = exchange.heals - self._heals, exchange.heals
        before, self._living = self._living, exchange.living
        if heals and self._momentum is not None:
            self._momentum.restart()
        if heals and self._on_change is not None:
            self._on_change("heal", self.rank)
        if self._living is before:
            return
        for rank in sorted(set(before) - set(self._living)):
            kind: Change = "leave" if rank in exchange.left else "death"
            if kind == "death" and self.rank == min(self._living, default=-1):
                say_death(self.rank, rank, len(self._living))
            if self._on_change is not None:
                self._on_change(kind, rank)

    def average(self) -> bool:
        """Give all living ranks the average of their models, as for an evaluation between two updates. Collective:
        waits for the slowest rank, at most 300 s. Returns False if training has ended on any rank; then `goes_on` is
        False, too, and the end of the block averages. Raises EndError if the others do not come."""
        self._inside_block("average")
        if self._exchange is None:
            return self.goes_on
        return not self._has_ended and self._meet(self._exchange, _CLOSE_S, "`average()`")

    def _inside_block(self, name: str) -> FlatTensors:
        """Return the model's vector. Raises PalaError before and after the block."""
        if self._flat is None or self._is_after_block:
            raise PalaError(f"Gossip: call '{name}' inside the block `with pala.Gossip(...) as gossip:`.")
        return self._flat

    def _check_begun(self, name: str) -> None:
        """Raise PalaError before the block, which alone finds out how many ranks there are."""
        if self._flat is None:
            raise PalaError(
                f"Gossip: '{name}' is known from the beginning of the block `with pala.Gossip(...) as gossip:` on."
            )

    # ---- what there is to know ---------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of this rank, from 0. Raises PalaError before the block."""
        self._check_begun("rank")
        return 0 if self._comm is None else self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks that the job began with. Raises PalaError before the block."""
        self._check_begun("size")
        return 1 if self._comm is None else self._comm.size

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that live and train, as far as this rank knows; sorted. Raises PalaError before the block."""
        self._check_begun("living")
        return (0,) if self._exchange is None else tuple(self._exchange.living)

    @property
    def global_steps(self) -> int:
        """Steps of all ranks together, as far as this rank knows; exact after the block."""
        if self._exchange is not None:
            return self._exchange.global_steps
        before = (self._loaded or {}).get("global_steps", 0) if self._flat is None else self._start.global_steps
        return int(before) + self._local_steps

    @property
    def signal(self) -> Signals | None:
        """The signal that this rank received, or None: a script exits with 128 + its number."""
        return self._interrupt.signal

    def consensus_distance(self) -> float | None:
        """Return the L2 distance from this rank's model to those that came, sampled: measured at one of eight mixes
        before it, and averaged since the last call. None before the first. Not collective."""
        if self._exchange is not None:
            measured = self._exchange.metrics()["consensus_distance"]
            self._distance = self._distance if measured is None else measured
        return self._distance

    # ---- to continue later -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what `torch.save` keeps beside the model's and the optimiser's own: steps of all ranks, the round, and
        momentum's running mean. Not collective; a rank may load that of any other, of a job of any size."""
        state = self._start if self._exchange is None else self._exchange.state()
        movement = None if self._mean_move is None else self._mean_move.detach().cpu()
        return {"global_steps": self.global_steps, "round": state.round, "movement": movement}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, in the block that follows; load the model's before it, too. All
        ranks begin with the average of the models of those that loaded a state. Not collective. Raises PalaError."""
        if self._flat is not None:
            raise PalaError("Gossip: call 'load_state_dict' before the block.")
        numbers = [state.get(key) for key in ("global_steps", "round")] if isinstance(state, Mapping) else [None]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise PalaError(
                "Gossip: a state is what `state_dict` returned, with whole numbers as 'global_steps' and 'round', but "
                f"this one is {shown(state)}."
            )
        self._loaded = dict(state)


def _ranks_of_mpi() -> Communicator | None:
    """Start MPI where a launcher has started several ranks; else this process is alone and needs no MPI."""
    if Launch.detect().size == 1:
        return None
    from pala.comm.mpi_process import start_mpi

    return start_mpi()


@contextmanager
def _alone_in_block(comm: Communicator | None) -> Iterator[None]:
    """Raise PalaError if this rank is inside a block already: two exchanges would talk through one MPI."""
    key = id(comm) if rank_of_thread.get() is not None else 0
    if key in _open:
        raise PalaError(
            "Two blocks of `pala.Gossip` are open at once. For two models give one Gossip the tensors of both: "
            "`pala.Gossip([*first.parameters(), *second.parameters()], ...)`."
        )
    _open.add(key)
    try:
        yield
    finally:
        _open.discard(key)


def _in_words_of_the_call(error: PalaError) -> str:
    """Return the message of an error with the names of arguments in place of those of a configuration's keys."""
    return re.sub(r"'(?:exchange|a2c|run)\.(\w+)'", r"'\1'", str(error)).replace("Config: ", "Gossip: ", 1)


def _whole_number(name: str, value: SupportsIndex) -> int:
    """Return a number, numpy's also, as Python's. Raises PalaError if it is not whole, or less than 1."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool) or (number := operator.index(value)) < 1:
        raise PalaError(f"Gossip: '{name}' is {shown(value)} but must be a whole number, 1 or more.")
    return number


def _begin_alike(comm: Communicator, flat: FlatTensors, likeness: object, state: State) -> list[State]:
    """Return the states that ranks have loaded, by rank. Collective. Raises CollectiveError if a rank has another model
    or setting."""
    all_settings = comm.allgather(likeness)
    if other := [rank for rank, given in enumerate(all_settings) if given != all_settings[0]]:
        raise CollectiveError(f"Gossip of rank {other[0]} has other settings than rank 0: give all ranks the same.")
    signatures = comm.allgather((flat.signature, flat.data.numel()))
    if unlike := [rank for rank, signature in enumerate(signatures) if signature != signatures[0]]:
        raise CollectiveError(
            f"The model of rank {unlike[0]} has {signatures[unlike[0]][1]:,} numbers in tensors that are not those of "
            f"rank 0 ({signatures[0][1]:,} numbers): give all ranks a model of the same layout."
        )
    return comm.allgather(None if state is None else {key: state[key] for key in ("global_steps", "round")})


def _start_of(size: int, states: Sequence[State]) -> ExchangeState:
    """Return where an exchange of this many ranks begins: with the most that any loaded state knows."""
    loaded = [state for state in states if state is not None]
    steps = max((state["global_steps"] for state in loaded), default=0)
    return ExchangeState([0] * size, steps, max((state["round"] for state in loaded), default=0))


def _share_buffers(comm: Communicator, module: nn.Module, root: int) -> None:
    """Give all ranks the root's values of the buffers that do not travel, such as a random permutation. One that has
    another shape or type here is left alone, as are sparse ones and those of which elements share memory. Collective.
    """
    travel = {id(buffer) for _, buffer in named_tensors(module)[1]}
    others = {
        name: buffer
        for name, buffer in module.named_buffers()
        if id(buffer) not in travel and buffer.layout is torch.strided and not buffer.is_meta and is_dense(buffer)
    }
    mine = {name: buffer.detach().cpu() for name, buffer in others.items()}
    firsts = comm.allgather(mine if comm.rank == root else {})[root]
    for name, own in others.items():
        first = firsts.get(name)
        if first is not None and (first.shape, first.dtype) == (own.shape, own.dtype):
            first = first.to(own.device)
            if not torch.equal(first, own):
                own.detach().copy_(first)


def _share_model(comm: Communicator, flat: FlatTensors, has_loaded: Sequence[bool]) -> None:
    """Give all ranks the model to begin with: rank 0's, or the average of those that were loaded. Collective. Raises
    CollectiveError if it is not finite."""
    if any(has_loaded):
        counts = has_loaded[comm.rank]
        flat.data.copy_(average_of_ranks(comm, flat.data, 1.0, counts, _CLOSE_S))
    else:
        share_tensors(comm, [flat.data], flat.data)
    if name := flat.not_finite():
        raise CollectiveError(
            f"'{name}' of the model that all ranks begin with is not finite. A mask of infinities is a buffer for "
            "`register_buffer(..., persistent=False)`, which does not travel."
        )
