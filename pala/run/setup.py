"""What a rank trains with, and how it is described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pala.config import Config
from pala.envs.vector import Envs
from pala.run.header import header
from pala.run.job import Job
from pala.run.loop import Progress
from pala.run.metrics import Record
from pala.run.parts import Parts
from pala.run.records import Records
from pala.run.request import Request
from pala.run.segment import Segment


@dataclass(frozen=True)
class Setup:
    """All that a rank trains with, made."""

    job: Job
    request: Request
    """With the code that is in use, and the environment's name."""
    envs: Envs
    parts: Parts[Any]
    segment: Segment
    progress: Progress

    @property
    def config(self) -> Config:
        """Of the request."""
        return self.request.config

    def open_records(self) -> Records:
        """Begin this rank's metrics."""
        job, counters = self.job, self.progress.counters
        first: Record = {
            "type": "start", "segment": self.segment.path.name, "rank": job.comm.rank, "ranks": job.num_trainers,
            "time_s": round(counters.time_s, 3), "local_steps": counters.local_steps,
            "global_steps": self.progress.start.global_steps,
        }  # fmt: skip
        return Records(job.comm.rank, job.hosts, self.config, self.segment, first)

    def described(self) -> dict[str, Any]:
        """What run.json says of a segment when it begins."""
        job, request, parts = self.job, self.request, self.parts
        return {
            **request.facts, "threads_per_rank": job.threads, "environment": self.envs.name,
            "python_environment": request.code.make_env is not None,
            "python_network": request.code.make_network is not None,
            "ranks": job.num_trainers, "cores": job.cores, "resumed": self.segment.previous is not None,
            **job.comm.facts(), "device": str(parts.device), "precision": parts.config.network.precision,
            "seed": self.config.seed,
            "parameters": parts.flat.data.numel(),
        }  # fmt: skip

    def header(self) -> str:
        """The first lines of the console."""
        job, parts, made = self.job, self.parts, self.progress.start.global_steps
        hosts, num_learned = job.hosts[: job.num_trainers], parts.flat.num_learned
        return header(parts.config, self.segment.run, hosts, job.threads, str(parts.device), num_learned, made)
