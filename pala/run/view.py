"""A run as its metrics files show it during training, for the rank that leads."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pala.run.metrics import Record, Tail, metrics_path
from pala.system.errors import PalaError
from pala.system.output import log

MEAN_OF = 100  # whole episodes
Ended = tuple[float, float, float]  # an episode: time, return, length (NaN: not known)


class _Episodes:
    """A rank's episodes in the order of time, at 24 bytes each: a resume reads all of a run."""

    def __init__(self) -> None:
        self._columns = array("d"), array("d"), array("d")
        self._times = self._columns[0]

    def __len__(self) -> int:
        return len(self._times)

    def append(self, episode: Ended) -> None:
        """Add the newest episode."""
        for column, value in zip(self._columns, episode, strict=True):
            column.append(value)

    def drop_after(self, time_s: float) -> None:
        """Forget the episodes that ended after `time_s`."""
        first = bisect_right(self._times, time_s)
        for column in self._columns:
            del column[first:]

    def last(self) -> Iterator[Ended]:
        """Return the newest episodes that a mean may be of."""
        return zip(*(column[-MEAN_OF:] for column in self._columns), strict=True)

    def first_after(self, time_s: float) -> Iterator[Ended]:
        """Return the oldest of those that ended later that a mean may be of."""
        first = bisect_right(self._times, time_s)
        return zip(*(column[first : first + MEAN_OF] for column in self._columns), strict=True)


class RunView:
    """A run as its metrics files show it during training."""

    def __init__(self, run: Path, ranks: int) -> None:
        self._tails = [Tail(metrics_path(run, rank)) for rank in range(ranks)]
        self._episodes: deque[Ended] = deque(maxlen=MEAN_OF)
        self.last: list[Record] = [{} for _ in range(ranks)]
        self._before: list[Record] = [{} for _ in range(ranks)]
        self.living: Sequence[int] = range(ranks)
        self.num_episodes = 0
        self._watched_s, self._since = 0.0, list[float]()  # and the returns of the first 100 episodes after that
        self._unreadable: set[int] = set()

    def refresh(self) -> None:
        """Read the new records of all ranks."""
        fresh: list[_Episodes] = []
        for rank, tail in enumerate(self._tails):
            mine = _Episodes()
            try:
                for record in tail.read():
                    if record["type"] == "episode":
                        length = record.get("length_steps")
                        mine.append((record["time_s"], record["return"], math.nan if length is None else length))
                    elif record["type"] == "start":  # what was made after the checkpoint before it was lost
                        mine.drop_after(record["time_s"])
                        self._before[rank], self.last[rank] = {}, {}
                    elif record["type"] == "interval":
                        self._before[rank], self.last[rank] = self.last[rank], record
                        self.num_episodes += record.get("episodes_left_out") or 0
            except PalaError as error:  # training does not depend on what is shown of it
                if rank not in self._unreadable:
                    log(f"{error} Training continues.")
                self._unreadable.add(rank)
            fresh.append(mine)
        self.num_episodes += sum(map(len, fresh))
        self._episodes.extend(_in_order(mine.last() for mine in fresh))
        since = _in_order(mine.first_after(self._watched_s) for mine in fresh)
        self._since = [*self._since, *(r for _, r, _ in since)][:MEAN_OF]

    @property
    def mean_return(self) -> float | None:
        """Mean unclipped return of the last 100 whole episodes of all ranks."""
        return sum(r for _, r, _ in self._episodes) / len(self._episodes) if self._episodes else None

    def watch(self, time_s: float) -> None:
        """Take `mean_since` from now on of episodes that end after this training time."""
        self._watched_s, self._since = time_s, []

    @property
    def mean_since(self) -> float | None:
        """Mean unclipped return of the first 100 whole episodes after the time that is watched; None before they are
        there."""
        return sum(self._since) / MEAN_OF if len(self._since) == MEAN_OF else None

    @property
    def mean_length(self) -> float | None:
        """Mean length of the same episodes, in steps."""
        lengths = [length for _, _, length in self._episodes if not math.isnan(length)]
        return sum(lengths) / len(lengths) if lengths else None

    def mean(self, key: str) -> float | None:
        """Return the mean of a key over the ranks' last intervals; None where none has it."""
        values = [self.last[rank][key] for rank in self.living if self.last[rank].get(key) is not None]
        return sum(values) / len(values) if values else None

    def total(self, key: str) -> float:
        """Return the sum of a key over the ranks' last intervals."""
        return sum(self.last[rank].get(key) or 0 for rank in self.living)

    @property
    def has_learned_throughout(self) -> bool:
        """Gorila: whether some rank learned in the last interval and already in the one before it."""
        both = [(self._before[rank].get("loss"), self.last[rank].get("loss")) for rank in self.living]
        return any(before is not None and last is not None for before, last in both)

    @property
    def global_steps_per_s(self) -> float:
        """Speed of all ranks; one that has no record yet counts as the others' mean."""
        return (self.mean("local_steps_per_s") or 0) * len(self.living)


def _in_order(of_ranks: Iterable[Iterator[Ended]]) -> list[Ended]:
    """Return the episodes of all ranks in the order of time."""
    return sorted((episode for mine in of_ranks for episode in mine), key=lambda episode: episode[:2])
