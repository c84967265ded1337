"""A run as its metrics files show it during training, for the rank that leads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from pala.run.metrics import Record, Tail, metrics_path
from pala.system.errors import PalaError
from pala.system.output import log

MEAN_OF = 100  # whole episodes
Ended = tuple[float, float, float]  # an episode: time, return, length (NaN: not known)


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
        fresh: list[list[Ended]] = []
        for rank, tail in enumerate(self._tails):
            mine: list[Ended] = []
            try:
                for record in tail.read():
                    if record["type"] == "episode":
                        length = record.get("length_steps")
                        mine.append((record["time_s"], record["return"], math.nan if length is None else length))
                    elif record["type"] == "start":  # what was made after the checkpoint before it was lost
                        while mine and mine[-1][0] > record["time_s"]:
                            mine.pop()
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
        newest = sorted((episode for mine in fresh for episode in mine), key=lambda episode: episode[:2])
        self._episodes.extend(newest)
        self._since.extend(r for time_s, r, _ in newest if time_s > self._watched_s)
        del self._since[MEAN_OF:]

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
