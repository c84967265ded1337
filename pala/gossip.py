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

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from signal import Signals
from types import TracebackType

from torch import Tensor, nn

from pala.comm.base import Communicator
from pala.config import Config, ExchangeConfig, RunConfig, checked
from pala.config.schema import CompressionName, MixingName, TopologyName
from pala.exchange.budget import ExchangeState, Stop
from pala.exchange.flat import FlatTensors, named_tensors, share_tensors
from pala.exchange.gossip.exchange import GossipExchange
from pala.system.errors import CollectiveError, PalaError
from pala.system.interrupt import Interrupt
from pala.system.launcher import Launch
from pala.system.trace import Trace

_CLOSE_S = 300.0  # how long a rank waits at the end for the slowest, as in training
_LOOK_S = 0.1  # a rank that has left and cannot end yet looks this often whether training is over


class Gossip:
    """Averages a model with those of other ranks while each trains on its own. A context manager, used once.

    Inside the block the model's parameters are views of one flat float32 vector: optimisers that were made before stay
    valid, and in-place changes, such as `load_state_dict`, are fine; replacing a parameter's tensor is an error.
    Floating-point buffers, such as BatchNorm's statistics, travel with the parameters and are never compressed; other
    buffers do not travel. All ranks begin with rank 0's values.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Tensor],
        *,
        total_steps: int,
        mixing: MixingName = "paired",
        topology: TopologyName = "auto",
        compression: CompressionName = "none",
        max_staleness: int = 10,
        patience_s: float = 5.0,
        seed: int = 0,
        trace: str | Path | None = None,
        comm: Communicator | None = None,
    ) -> None:
        """Name the model and how ranks exchange it; nothing happens before the block begins.

        `model`: a module, or tensors, float32 and all on one device. `total_steps`: the budget of all ranks together,
        in the unit of `after_update(steps=...)`. `seed`: seed of the random topology, equal on all ranks. `trace`:
        folder in which each of several ranks records its timeline (docs/timeline.md). `comm`: the ranks of a test
        (`pala.testing`); by default those of MPI. The other settings are those of `exchange` in training. Raises
        PalaError for settings or tensors that cannot be used.
        """
        exchange = ExchangeConfig(
            topology=topology,
            mixing=mixing,
            compression=compression,
            max_staleness=max_staleness,
            patience_s=patience_s,
        )
        run = RunConfig(trace=trace is not None)
        self._settings = checked(Config(total_steps=total_steps, seed=seed, exchange=exchange, run=run))
        self._trace_folder = Path(trace or "")
        self._trace: Trace | None = None
        self._named = named_tensors(model)
        self._comm = comm
        self._interrupt = Interrupt()
        self._stack = ExitStack()
        self._flat: FlatTensors | None = None
        self._exchange: GossipExchange | None = None  # none on a rank that is alone
        self._local_steps = 0
        self._has_left = False
        self._is_mpi = False

    # ---- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Gossip:
        """Start MPI if this is a rank of several, and give all ranks rank 0's values. Collective. Raises PalaError."""
        if self._flat is not None:
            raise PalaError("This Gossip was used before: make a new one for each block.")
        if self._comm is None:
            self._comm = _ranks_of_mpi()
            self._is_mpi = self._comm is not None
        self._flat = flat = FlatTensors(*self._named)
        self._stack.enter_context(self._interrupt.installed())
        if self._comm is None or self._comm.size == 1:
            return self
        comm = self._comm
        with self._stack:
            try:
                _begin_alike(comm, flat, self._settings)
                if self._settings.run.trace:
                    from pala.comm.tracing import begin_trace

                    self._trace = self._stack.enter_context(closing(begin_trace(comm, comm.bcast(self._trace_folder))))
                self._exchange = GossipExchange(
                    comm,
                    flat.data,
                    flat.signature,
                    self._settings.exchange,
                    ExchangeState([0] * comm.size),
                    self._interrupt,
                    total_steps=self._settings.total_steps,
                    seed=self._settings.seed,
                    num_exact=flat.num_exact,
                )
                if self._trace is not None:
                    self._exchange.record(self._trace)
            except CollectiveError:
                raise  # on every rank
            except BaseException as error:
                self._fail(error)  # the other ranks would wait for this one
                raise
            self._stack = self._stack.pop_all()  # all went well: the handlers of signals stay until the block ends
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Average the model over the living ranks. Collective.

        An exception inside the block ends this rank with its traceback; the other ranks continue where the job outlives
        its ranks (`mpirun --with-ft ulfm`), and end otherwise: they would wait for this one.
        """
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
                self._comm.detach()
                from pala.comm.mpi_process import leave_job

                leave_job()  # the others take this rank for dead, so its process must end without MPI_Finalize
            while exchange.stop is Stop.NONE and exchange.living and self._interrupt.signal is None:
                time.sleep(_LOOK_S)  # this MPI needs every process until the job ends
        if exchange.stop is Stop.NONE:  # the user's loop ended before the budget: training ends on all ranks
            exchange.stop_now(Stop.CALLBACK)
        exchange.close(_CLOSE_S)
        self._flat.data.copy_(exchange.final_parameters(_CLOSE_S))

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
        training."""
        if self._interrupt.signal is not None:
            if self._exchange is not None and self._exchange.stop is Stop.NONE:
                self._exchange.stop_now(Stop.SIGNAL)
            return False
        if self._exchange is None:
            return self._local_steps < self._settings.total_steps
        if self._interrupt.leave_requested:
            self._interrupt.leave_requested = False
            self._has_left = self._exchange.leave()
        return not self._has_left and self._exchange.stop is Stop.NONE

    def after_update(self, steps: int) -> None:
        """Send this rank's model and average in what peers sent, after an optimiser step. May wait, at most
        `max_staleness` updates behind and `patience_s` for a peer.

        `steps`: share of the budget that this update counts. A model that is not finite is replaced by a peer's. Raises
        PalaError if there is no finite model, or if a tensor of the model was replaced.
        """
        if self._flat is None:
            raise PalaError("Gossip: call 'after_update' inside the block `with pala.Gossip(...) as gossip:`.")
        if type(steps) is not int or steps < 1:
            raise PalaError(f"Gossip: 'steps' is {steps!r} but must be a whole number, 1 or more.")
        self._flat.check_views()
        self._local_steps += steps
        if self._exchange is None:
            return
        if self._trace is not None:
            self._trace.lap("loop")
        healthy = math.isfinite(float(self._flat.data.sum()))
        if not self._exchange.after_update(steps, healthy) and self._exchange.stop is Stop.NONE:
            raise PalaError(
                f"[rank {self.rank}] the model is not finite, and no peer has sent one that is. Lower the "
                "learning rate."
            )
        if self._trace is not None:
            self._trace.lap("exchange")

    # ---- what there is to know ---------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return 0 if self._comm is None else self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks that the job began with."""
        return 1 if self._comm is None else self._comm.size

    @property
    def living(self) -> Sequence[int]:
        """Ranks that live and train, as far as this rank knows; sorted."""
        return (0,) if self._exchange is None else self._exchange.living

    @property
    def global_steps(self) -> int:
        """Steps of all ranks together, as far as this rank knows; exact after the block."""
        return self._local_steps if self._exchange is None else self._exchange.global_steps

    @property
    def signal(self) -> Signals | None:
        """The signal that ended training on this rank, if one did: a script exits with 128 + its number."""
        return self._interrupt.signal


def _ranks_of_mpi() -> Communicator | None:
    """Start MPI where a launcher has started several ranks; else this process is alone and needs no MPI."""
    if Launch.detect().size == 1:
        return None
    from pala.comm.mpi_process import start_mpi
    from pala.system.output import one_sentence_for_mistakes

    one_sentence_for_mistakes()
    return start_mpi()


def _begin_alike(comm: Communicator, flat: FlatTensors, settings: Config) -> None:
    """Give all ranks rank 0's values. Collective. Raises CollectiveError if a rank has another model or setting."""
    all_settings = comm.allgather(settings)
    if other := [rank for rank, given in enumerate(all_settings) if given != all_settings[0]]:
        raise CollectiveError(f"Gossip of rank {other[0]} has other settings than rank 0: give all ranks the same.")
    signatures = comm.allgather((flat.signature, flat.data.numel()))
    if unlike := [rank for rank, signature in enumerate(signatures) if signature != signatures[0]]:
        raise CollectiveError(
            f"The model of rank {unlike[0]} has {signatures[unlike[0]][1]:,} numbers in tensors that are not those of "
            f"rank 0 ({signatures[0][1]:,} numbers): give all ranks a model of the same layout."
        )
    share_tensors(comm, [flat.data], flat.data)
