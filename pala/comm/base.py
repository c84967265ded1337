"""The interface between PALA and what carries its messages from rank to rank.

| part | MPI | threads of one process | simulated |
|---|---|---|---|
| `Communicator` | `mpi.py` | `pala/testing/memory.py` | - |
| `Transport` | `data_proxy.py` | `pala/testing/memory_transport.py` | `pala/lab/simulate/virtual_network.py` |

A `Communicator` is for collectives, at the start and the end; exchanges that need every rank use it while training
runs, too. A `Transport` is for messages from rank to rank, while training runs.

Three words say how a rank ends. `close`: all ranks end together. `leave`: this rank goes and the others continue.
`abandon`: this rank has failed and waits for nothing.

Nothing in this package knows what a message means. Nothing outside it calls MPI, except the doctor.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from pala.system.errors import EndError
from pala.system.interrupt import Interrupt
from pala.system.waiting import LongWait

if TYPE_CHECKING:  # a rank starts MPI before it loads numpy, whose threads are counted when it is loaded
    import numpy as np

T = TypeVar("T")
Reduction = Literal["sum", "max"]


# ---- messages --------------------------------------------------------------------------------------------------------


class Packet(Protocol):
    """A message to be sent, perhaps to several peers: bytes, or in a simulated network any object."""

    pending: int
    """Copies that have not left yet. While there are any, the transport reads the bytes, and the sender must keep
    them."""

    @property
    def data(self) -> Any:
        """The message as uint8 [bytes]; in a simulated network any object that its receivers take."""

    def ready(self) -> bool:
        """Return False while its bytes are still being copied from a GPU."""


class Bytes:
    """A packet that is ready, with memory of its own: uint8 [bytes]."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.pending = data, 0

    def ready(self) -> bool:
        return True


class Received(NamedTuple):
    """A message that has come."""

    source: int
    data: Any  # what the packet held; bytes are the receiver's until its next bulk message
    bulk: bool
    took_s: float  # from when the receiver first saw it until it was whole
    too_late: bool = False  # it took longer than `Receiver.patience_s`, and its memory had been given up; a transport
    # that receives into memory of its own needs no such thing: `took_s` tells


class Meeting(NamedTuple):
    """A wait for all living ranks, while messages come and go."""

    have_come: Callable[[], bool]
    wait: LongWait
    """The wait to look at, which tells and says that it takes long."""


class Receiver(abc.ABC):
    """The side that a transport reports to. Calls come from whichever thread polls, one at a time."""

    @abc.abstractmethod
    def on_message(self, message: Received) -> None:
        """Take a message, in the order in which its sender sent those of its kind (bulk or not)."""

    @abc.abstractmethod
    def on_death(self, rank: int) -> None:
        """Note that a rank has died; what was under way to or from it is lost."""

    def on_tick(self) -> None:  # noqa: B027  most need none
        """Note that this rank is not suspended. Called about ten times a second, however long the learner is busy."""

    @property
    def patience_s(self) -> float:
        """Longest time that a bulk message may take to come before the next one may overtake it."""
        return float("inf")

    def memory_for(self, num_bytes: int) -> np.ndarray | None:
        """Return memory for the next bulk message, uint8 [num_bytes], or None, and then the transport uses its own.

        Asked once a message. Nothing else is written there until `on_message` returns."""
        return None

    def give_up_memory(self) -> None:  # noqa: B027
        """Never use again what `memory_for` returned last: a message that is too late still writes to it."""


class Transport(abc.ABC):
    """Messages of one rank. To make, pause, free and close one is collective, and so is `meeting`. Only `pause`,
    `close` and `wait_until_sent` wait."""

    @abc.abstractmethod
    def start(self, receiver: Receiver) -> None:
        """Report messages and deaths to `receiver` from now on."""

    @abc.abstractmethod
    def now_s(self) -> float:
        """Return the time of a clock that only goes forward."""

    @abc.abstractmethod
    def send(self, peer: int, packet: Packet, bulk: bool = False) -> None:
        """Send `packet.data` soon. `packet.pending` rises by one now, and falls by one when the copy has left, or
        cannot. `bulk`: a large message; a receiver takes in one of these at a time. Any thread."""

    def poll(self) -> None:  # noqa: B027  a simulated network has nothing to poll
        """Send and receive what can move now, without waiting. The learner's thread, without any lock held."""

    def poll_soon(self) -> None:
        """Let the transport's own thread do as `poll` soon, while the learner's continues. The learner's thread,
        without any lock held."""
        self.poll()

    def wait_until_sent(self, patience_s: float) -> None:  # noqa: B027
        """Wait until everything that was to be sent has left, a signal comes, or `patience_s` is over, as when a peer
        is stopped. The learner's thread, without any lock held."""

    def hurry(self, waiting: bool) -> None:  # noqa: B027
        """Set whether this rank's learner is waiting for a message. Any thread."""

    def meeting(self, where: str | None) -> Meeting:
        """Begin to wait for all living ranks, while messages come and go. `where`: as for `WaitForRanks`.
        Collective."""
        return Meeting(lambda: True, LongWait())

    def pause(self, timeout_s: float | None) -> None:  # noqa: B027
        """Do as `close`, but `start` may follow. Meanwhile the communicator may be used. Collective."""

    def free(self) -> None:  # noqa: B027
        """Give back what a paused transport holds: it will not start again. Collective."""

    def close(self, timeout_s: float) -> None:  # noqa: B027
        """Receive what is still coming until every living rank has closed; the receiver sends nothing any more.
        Collective.

        Raises EndError if the others have not closed after `timeout_s` seconds, or soon after a signal.
        """

    def abandon(self) -> None:  # noqa: B027
        """End the transport's thread on this rank, which has failed; what is under way is lost. Not collective."""

    def raise_failure(self) -> None:  # noqa: B027
        """Raise in the caller's thread what ended the transport's own."""


# ---- collectives -----------------------------------------------------------------------------------------------------


class Deaths(abc.ABC):
    """The set of ranks that have died, as far as this rank has been told. A rank that has ended is not among them, but
    no rank waits for it any more. Not collective."""

    ranks: set[int]

    @abc.abstractmethod
    def look(self) -> set[int]:
        """Return the ranks that died since the last look."""

    def end_if_any(self) -> None:
        """Raise EndError if a rank has died, for an exchange that needs every rank."""
        self.look()
        if self.ranks:
            raise EndError(
                f"Rank {', '.join(map(str, sorted(self.ranks)))} has died, and this 'exchange.kind' cannot continue "
                "without it; the job ends here. Continue from the last checkpoint by `--resume`."
            )


class SharedBlock(abc.ABC):
    """Memory that ranks of one host see."""

    data: np.ndarray  # uint8 [bytes]

    @abc.abstractmethod
    def fence(self) -> None:
        """Make earlier writes visible to others before later ones."""


class Survivors(abc.ABC):
    """The living ranks, inside `Communicator.with_survivors`, whose time limit holds here, too. Every method is
    collective among them."""

    members: Sequence[int]
    """Their ranks, rising."""

    @abc.abstractmethod
    def reduce(self, array: np.ndarray, how: Reduction) -> None:
        """Reduce the array in place to the sum or maximum over all members, element by element; the wait sleeps."""


class Communicator(abc.ABC):
    """The ranks of one job. Every method says whether it is collective; a collective one waits asleep for the slowest.

    From the start of a transport to its pause or end the transport alone communicates: meanwhile only `facts`, `detach`
    and `outlives_ranks` may be called."""

    rank: int
    size: int
    interrupt: Interrupt
    """This rank's signals. One of them ends waits over MPI, after a while, by an EndError."""
    host: str
    """Name of the host that this rank is on."""

    def on_count(self, updates: int) -> None:  # noqa: B027
        """Note that this rank has made this number of updates: in tests faults by script happen then."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""

    @abc.abstractmethod
    def allgather(self, value: T) -> list[T]:
        """Return every rank's value, by rank. Collective."""

    @abc.abstractmethod
    def bcast(self, value: T, root: int = 0) -> T:
        """Return the root's value. Collective."""

    @abc.abstractmethod
    def bcast_array(self, array: np.ndarray, root: int = 0) -> None:
        """Overwrite the array with the root's. Collective."""

    @abc.abstractmethod
    def first(self, size: int) -> Communicator | None:
        """Return a communicator of the first ranks, with the same numbers; None on the others. Collective."""

    @abc.abstractmethod
    def ibarrier(self) -> Callable[[], bool]:
        """Begin a barrier and return a function that says, without waiting, whether all ranks have come. Collective.
        Both raise EndError if a rank has died."""

    @abc.abstractmethod
    def reduce(self, array: np.ndarray, how: Reduction) -> None:
        """Reduce the array in place to the sum or maximum over all ranks. The wait may spin, so call `barrier` first.
        Collective. Raises EndError if a rank has died."""

    @abc.abstractmethod
    def with_survivors(self, action: Callable[[Survivors], T], timeout_s: float | None) -> T:
        """Run `action(survivors)`, in which ranks may communicate, and return its value when all living ranks are done.

        If a rank dies meanwhile, all others run it again without that rank. So it may run several times, and each time
        all ranks have the same members. Collective for the living. Raises EndError when the others do not come, or are
        not done, within `timeout_s` (None: no limit), or soon after a signal."""

    @abc.abstractmethod
    def deaths(self) -> Deaths:
        """Return a new watch over deaths. Not collective."""

    @abc.abstractmethod
    def is_alone(self) -> bool:
        """Return True if the job ends when this rank does: no other lives, or none would outlive it. Not collective."""

    @property
    @abc.abstractmethod
    def outlives_ranks(self) -> bool:
        """True if the others continue when a rank ends before them."""

    def detach(self) -> None:  # noqa: B027
        """Leave the job. The others are told of it as of a death, and continue: only where they outlive this rank,
        whose process must end without another call of this communicator. Not collective."""

    @abc.abstractmethod
    def open_transport(self) -> Transport:
        """Open the transport of this communicator. Collective."""

    @abc.abstractmethod
    def share_memory(self, num_bytes: int, among: Sequence[int]) -> SharedBlock:
        """Return memory, all zeros, that the ranks `among` share, this one too, as long as one of them lives.
        Collective. Raises PalaError if there is too little of it, or none in common."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return run.json's facts of the library below: `mpi`, `mpi_standard`, `mpi_thread_level`. Not collective."""


rank_of_thread: ContextVar[Communicator | None] = ContextVar("rank_of_thread", default=None)
"""The rank that this thread is, where ranks are threads of one process (`pala.testing`)."""
