"""A long run with random faults: `python tests/long_run.py FOLDER [--ranks 4] [--spares 0] [--hosts 1] [--seed 1] --
[arguments of pala.train]`.

Starts a training run in FOLDER and disturbs it until it is complete: ranks are stopped and continue (SIGSTOP, SIGCONT),
now and then one is killed, and now and then all of them; on virtual hosts (root) the last host's link is cut and
mended. When half of the ranks are left, or none, the run is ended and resumed with all. Writes what was done
(`faults.jsonl`) and, every few seconds, what each rank, spares with them, holds of memory, files and threads
(`samples.jsonl`). Not a test: results/reliability/README.md says how it came out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.mpi import pids_of_ranks

sys.path.append(str(Path(__file__).parent.parent / "launch"))
from virtual_hosts import VirtualHosts

_STOP_EVERY_S, _STOPPED_S = 15.0, (0.5, 20.0)
_KILL_EVERY_S, _KILL_ALL_SHARE = 200.0, 0.2
_CUT_EVERY_S, _CUT_S = 60.0, (0.5, 20.0)
_SAMPLE_EVERY_S = 5.0


class LongRun:
    """One run, its job of the moment, and the faults."""

    def __init__(
        self, folder: Path, ranks: int, spares: int, hosts: VirtualHosts | None, seed: int, arguments: list[str]
    ) -> None:
        self.folder, self.ranks, self.spares, self.hosts = folder, ranks, spares, hosts
        self._random, self._begin = random.Random(seed), time.monotonic()
        self._mend_at = math.inf  # of the link, if it is cut
        self._faults = open(folder / "faults.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end of the process
        self._samples = open(folder / "samples.jsonl", "a", buffering=1)  # noqa: SIM115
        self._output = open(folder / "output.log", "ab")  # noqa: SIM115
        self.job = self._start(["--run.dir", ".", "--run.name", "run", "--run.spares", str(spares), *arguments])

    def go(self) -> None:
        """Until the run is complete."""
        next_stop, next_kill, next_sample = (self._soon(s) for s in (_STOP_EVERY_S, _KILL_EVERY_S, 0.0))
        next_cut = self._soon(_CUT_EVERY_S)
        stopped: dict[int, float] = {}
        while not self.is_complete():
            now, alive = time.monotonic(), self._training()
            for pid in [pid for pid, until in stopped.items() if now >= until]:
                self._signal(pid, signal.SIGCONT)
                del stopped[pid]
            if now >= next_sample:
                self._sample(alive)
                next_sample = now + _SAMPLE_EVERY_S
            if alive and now >= next_stop:
                rank = self._random.choice(list(alive))
                seconds = self._random.uniform(*_STOPPED_S)
                self._note("stop", rank, seconds=round(seconds, 1))
                self._signal(alive[rank], signal.SIGSTOP)
                stopped[alive[rank]] = now + seconds
                next_stop = self._soon(_STOP_EVERY_S)
            if alive and now >= next_kill:
                all_ = self._random.random() < _KILL_ALL_SHARE
                for rank in list(alive) if all_ else [self._random.choice(list(alive))]:
                    self._note("kill", rank)
                    self._signal(alive[rank], signal.SIGKILL)
                next_kill = self._soon(_KILL_EVERY_S)
            if now >= self._mend_at:
                self._mend()
            elif self.hosts is not None and self._mend_at == math.inf and alive and now >= next_cut:
                seconds = self._random.uniform(*_CUT_S)
                self._note("cut", seconds=round(seconds, 1))
                self.hosts.set_link(self.hosts.num_hosts - 1, up=False)
                self._mend_at, next_cut = now + seconds, self._soon(_CUT_EVERY_S) + seconds
            if self.job.poll() is not None or (alive and len(alive) <= self.ranks // 2 and not stopped):
                self._resume()
            time.sleep(0.1)
        self.job.wait()
        self._note("complete")

    def end(self) -> None:
        """The job, if it still runs."""
        self._mend()
        if self.job.poll() is None:
            os.killpg(self.job.pid, signal.SIGKILL)
            self.job.wait()

    def is_complete(self) -> bool:
        """By the run's own record."""
        record = self._record()
        return record is not None and record["completed"]

    def _mend(self) -> None:
        if self.hosts is not None:
            self.hosts.set_link(self.hosts.num_hosts - 1, up=True)
        self._mend_at = math.inf

    def _resume(self) -> None:
        self._mend()
        if self.job.poll() is None:
            self._note("end")
            self.job.send_signal(signal.SIGUSR1)
        status = self.job.wait()
        if self._record() is None:
            raise SystemExit(f"The run did not begin: see '{self._output.name}'.")
        if not self.is_complete():
            self._note("resume", status=status)
            self.job = self._start(["--resume", "run"])

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        size, train = self.ranks + self.spares, [sys.executable, "-m", "pala.train", *arguments]
        command, environment = ["mpirun", "--with-ft", "ulfm", "-np", str(size), *train], dict[str, str]()
        if self.hosts is not None:
            command, environment = self.hosts.mpirun(["--with-ft", "ulfm", *train], size // self.hosts.num_hosts)
        return subprocess.Popen(
            command, env=os.environ | environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=self._output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def _training(self) -> dict[int, int]:
        """Process of each rank that is alive, once all have begun to train."""
        record = self._record()
        if self.job.poll() is not None or record is None or record["segments"][-1]["status"] != "running":
            return {}
        segment = record["segments"][-1]["segment"]
        if len(list((self.folder / "run/checkpoints" / segment).glob("rank-????.safetensors"))) < self.ranks:
            return {}
        return pids_of_ranks(self.folder)

    def _record(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError):
            return json.loads((self.folder / "run/run.json").read_text())
        return None

    def _sample(self, alive: dict[int, int]) -> None:
        for rank, pid in alive.items():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text().split()
                memory, threads = (int(status[status.index(key) + 1]) for key in ("VmRSS:", "Threads:"))
                files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
                self._write(self._samples, rank=rank, pid=pid, memory_kib=memory, files=files, threads=threads)

    def _soon(self, mean_s: float) -> float:
        return time.monotonic() + self._random.uniform(0.5, 1.5) * mean_s

    def _note(self, what: str, rank: int | None = None, **facts: Any) -> None:
        self._write(self._faults, what=what, **({} if rank is None else {"rank": rank}), **facts)

    def _write(self, file: Any, **facts: Any) -> None:
        file.write(json.dumps({"time_s": round(time.monotonic() - self._begin, 1)} | facts) + "\n")

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Disturb a training run until it is complete.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1, help="virtual ones; 1: none, and no link is cut")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("arguments", nargs="+", help="of pala.train, after --")
    options = parser.parse_args()
    if (options.ranks + options.spares) % options.hosts:
        parser.error(f"{options.ranks} ranks and {options.spares} spares do not fill {options.hosts} hosts evenly")
    options.folder.mkdir(parents=True)
    cores = len(os.sched_getaffinity(0))  # all hosts have all of them: ranks and spares are not spread evenly
    with VirtualHosts(options.hosts, cores_per_host=cores) if options.hosts > 1 else contextlib.nullcontext() as hosts:
        run = (options.folder.resolve(), options.ranks, options.spares, hosts, options.seed, options.arguments)
        long_run = LongRun(*run)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
        try:
            long_run.go()
        finally:
            long_run.end()


if __name__ == "__main__":
    main()
