"""`pala.Gossip` in training loops of one's own: ranks as threads, and real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pala
from pala.comm.base import Received
from pala.exchange.flat import FlatTensors, named_tensors
from pala.exchange.gossip import exchange, models
from pala.exchange.gossip.driver import GossipDriver
from pala.gossip import Gossip
from pala.system.errors import PalaError
from pala.testing.faults import fail_at_message
from pala.testing.memory import MemoryCommunicator, run_ranks
from support import REPOSITORY
from support.gossip_loops import add, on_ranks, run_together, train, zeros
from support.mpi import Job, Launcher, assert_all_end


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4, 2))


def test_alone_it_only_counts() -> None:
    model, gossip, updates = train(None, total_steps=7)
    assert updates == gossip.global_steps == 7 and not gossip.goes_on
    assert (gossip.rank, gossip.size, list(gossip.living), gossip.signal) == (0, 1, [0], None)
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())


@pytest.mark.parametrize("compression", ["none", "bfloat16"])
def test_pairs_keep_the_progress_of_all_ranks(compression: str) -> None:
    """Their average at the end is the mean number of updates, wherever messages were under way."""
    results = on_ranks(3, lambda comm: train(comm, total_steps=300, compression=compression))
    mean = sum(updates for _, _, updates in results) / 3
    assert 300 <= 3 * mean <= 300 + 3 * 20
    for model, gossip, _ in results:
        assert gossip.global_steps == 3 * mean and list(gossip.living) == [0, 1, 2]
        for parameter in model.parameters():
            assert parameter.detach().numpy() == pytest.approx(mean, rel=1e-5 if compression == "none" else 1e-2)


def test_all_begin_with_the_first_ranks_values_and_end_with_one_model() -> None:
    def main(comm: MemoryCommunicator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(comm.rank)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # made before: stays valid
        images, labels = torch.randn(8, 3, 4, 4), torch.randint(2, (8,))
        with Gossip(model, total_steps=40 * 3, comm=comm) as gossip:
            first = [tensor.detach().clone() for tensor in model.parameters()]
            while gossip.goes_on:
                nn.functional.cross_entropy(model(images[..., :4, :4]), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                gossip.after_update(steps=1)
        floats = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
        return first, [tensor.detach().clone() for tensor in floats]

    results = on_ranks(3, main)
    for first, last in results[1:]:
        assert all(map(torch.equal, first, results[0][0]))
        assert all(map(torch.equal, last, results[0][1]))
    assert not any(
        torch.equal(before, after) for before, after in zip(results[0][0][:2], results[0][1][:2], strict=True)
    )


def test_a_block_hears_the_signals_of_its_communicator() -> None:
    def main(comm: MemoryCommunicator) -> bool:
        return train(comm, total_steps=20)[1]._interrupt is comm.interrupt

    assert on_ranks(2, main) == [True, True]


def test_a_model_that_is_not_finite_is_replaced_by_a_peers() -> None:
    def main(comm: MemoryCommunicator) -> nn.Module:
        model, updates = zeros(), 0
        with Gossip(model, total_steps=200, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                updates += 1
                if comm.rank == 1 and updates == 5:
                    model.get_parameter("weight").data.fill_(float("nan"))
                gossip.after_update(steps=1)
        return model

    for model in on_ranks(3, main):
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("large", [True, False])
def test_a_large_model_comes_on_the_transports_thread(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a small one on either: waking a thread takes longer than receiving it."""
    monkeypatch.setattr(exchange, "_LARGE_BYTES", 0 if large else 2**30)
    by = Counter[bool]()
    on_message = GossipDriver.on_message

    def note(driver: GossipDriver, message: Received) -> None:
        by[threading.current_thread().name.startswith("pala-memory-")] += 1
        on_message(driver, message)

    monkeypatch.setattr(GossipDriver, "on_message", note)

    def main(comm: MemoryCommunicator) -> int:
        return train(comm, total_steps=300)[1].global_steps

    for _ in range(1 if large else 50):  # which of two threads is first is a matter of luck
        assert min(on_ranks(2, main)) >= 300
        if by[False]:
            break
    assert by.total() > 20 and (by[False] == 0) == large


def test_a_model_is_looked_at_before_it_is_sent_or_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is not finite never leaves its rank, and is looked at less often than it is updated."""
    looks, sent, fill = [0], list[bool](), models.TensorModels.fill
    is_finite = FlatTensors.is_finite

    def look(flat: FlatTensors) -> bool:
        looks[0] += 1
        return is_finite(flat)

    def note(self: models.TensorModels, *arguments: Any) -> int:
        num_bytes = fill(self, *arguments)
        sent.append(bool(self._parameters.isfinite().all()))
        return num_bytes

    monkeypatch.setattr(FlatTensors, "is_finite", look)
    monkeypatch.setattr(models.TensorModels, "fill", note)

    def main(comm: MemoryCommunicator) -> int:
        model, updates = zeros(), 0
        with Gossip(model, total_steps=400, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                updates += 1
                if comm.rank == 0 and updates % 20 == 7:
                    model.get_parameter("weight").data.fill_(float("inf"))
                gossip.after_update(steps=1)
        return updates

    updates = sum(on_ranks(2, main))
    assert sent and all(sent)
    assert 0 < looks[0] < updates


def test_a_rank_that_dies_leaves_the_others_training() -> None:
    results = on_ranks(3, lambda comm: train(comm, total_steps=400), fail_at_message(1, 5))
    assert isinstance(results[1], BaseException)
    for rank in (0, 2):
        model, gossip, _ = results[rank]
        assert list(gossip.living) == [0, 2] and gossip.global_steps >= 400
        assert torch.equal(model.get_parameter("weight"), results[0][0].get_parameter("weight"))


def test_a_loop_that_ends_early_ends_all() -> None:
    def main(comm: MemoryCommunicator) -> int:
        model = zeros()
        with Gossip(model, total_steps=10**9, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                gossip.after_update(steps=1)
                if comm.rank == 2 and gossip.global_steps > 100:
                    break
        return gossip.global_steps

    assert len(set(on_ranks(3, main))) == 1


@pytest.mark.parametrize(
    ("outputs", "steps", "words"),
    [((2, 2, 3), (10, 10, 10), "rank 2"), ((2, 2, 2), (10, 10, 11), "rank 2 has other settings")],
)
def test_another_model_or_setting_on_one_rank_is_one_error_on_all(
    outputs: tuple[int, ...], steps: tuple[int, ...], words: str
) -> None:
    def main(comm: MemoryCommunicator) -> None:
        with Gossip(nn.Linear(3, outputs[comm.rank]), total_steps=steps[comm.rank], comm=comm):
            raise AssertionError("the block must not begin")

    for error in run_ranks(3, main):
        assert isinstance(error, PalaError) and words in str(error)


def test_an_exception_inside_the_block_is_raised_and_the_others_go_on() -> None:
    def main(comm: MemoryCommunicator) -> int:
        model = zeros()
        with Gossip(model, total_steps=200, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                if comm.rank == 0 and gossip.global_steps > 20:
                    raise ValueError("of the user's")
                gossip.after_update(steps=1)
        return gossip.global_steps

    first, *others = run_together(3, main)
    assert isinstance(first, ValueError)
    assert others[0] == others[1] >= 200


def test_a_tensor_that_is_replaced_is_an_error() -> None:
    model = zeros()
    with (
        pytest.raises(PalaError, match="'weight' of the model was added, removed or replaced"),
        Gossip(model, total_steps=5) as gossip,
    ):
        model.get_parameter("weight").data = torch.zeros(2, 3)
        gossip.after_update(steps=1)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (nn.Linear(2, 2).double(), {}, "only float32, bfloat16 and float16"),
        ([], {}, "no parameters"),
        (nn.Sequential(torch.jit.ScriptModule()), {}, "'0' of the model is a TorchScript module"),
        (nn.Linear(2, 2), {"total_steps": 0}, "total_steps"),
        (nn.Linear(2, 2), {"mixing": "median"}, "mixing"),
        (nn.Linear(2, 2), {"topology": "complete"}, "topology"),
        (nn.Linear(2, 2), {"max_staleness": -1}, "max_staleness"),
    ],
)
def test_a_mistake_is_one_sentence(model: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PalaError, match=words):
        Gossip(model, **{"total_steps": 10, **settings})


def test_numbers_may_be_numpys() -> None:
    _, gossip, updates = train(None, total_steps=np.int64(5), every=np.int32(2), seed=np.uint8(3))  # type: ignore[arg-type]
    assert updates == 5
    assert type(gossip.global_steps) is int
    with Gossip(zeros(), total_steps=64) as gossip:
        gossip.after_update(steps=np.int64(32))  # type: ignore[arg-type]
        assert type(gossip.global_steps) is int


def test_it_is_used_once_and_inside_its_block() -> None:
    gossip = Gossip(zeros(), total_steps=1)
    with pytest.raises(PalaError, match="inside the block"):
        gossip.after_update(steps=1)
    with gossip, pytest.raises(PalaError, match="'steps' is 0"):
        gossip.after_update(steps=0)
    with pytest.raises(PalaError, match="used before"), gossip:
        pass


def test_a_models_tensors_become_views_in_their_own_layout() -> None:
    model = network()
    images = torch.randn(2, 3, 4, 4)
    model.get_parameter("0.weight").data = model.get_parameter("0.weight").data.to(memory_format=torch.channels_last)
    before = model.eval()(images)
    flat = FlatTensors(*named_tensors(model))
    assert model.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(model(images), before)
    assert flat.num_exact == 8 and flat.data[-8:].tolist() == [0.0] * 4 + [1.0] * 4  # BatchNorm's mean and variance
    flat.data.zero_()
    assert not model.get_parameter("3.weight").any()
    assert pala.Gossip is Gossip


SCRIPT = """
import os, sys, torch, pala, pala.gossip
if sys.argv[1:] == ["fail at the start"] and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    pala.gossip.share_tensors = lambda *_: 1 / 0
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
with pala.Gossip(model, total_steps=2000) as gossip:
    while gossip.goes_on:
        if sys.argv[1:] == ["fail"] and gossip.rank == 1 and gossip.global_steps > 100:
            raise ValueError("of the user's")
        with torch.no_grad():
            model.weight += 0.01 * (gossip.rank + 1)
        gossip.after_update(steps=10)
print(f"rank {gossip.rank} of {gossip.size}: {gossip.global_steps} steps, {float(model.weight.sum()):.6f}")
"""


@pytest.mark.mpi
@pytest.mark.slow
def test_an_error_of_one_real_rank_ends_the_job_with_its_traceback(any_mpi: Launcher, tmp_path: Path) -> None:
    done = any_mpi.script(2, SCRIPT, tmp_path, "fail")
    assert done.status != 0 and "ValueError: of the user's" in done.output and "pala: rank 1 failed" in done.output
    done = any_mpi.script(2, SCRIPT, tmp_path, "fail at the start")
    assert done.status != 0 and "ZeroDivisionError" in done.output and "pala: rank 1 failed" in done.output


ENDING = """
import os, sys, time, torch, pala
what, model = sys.argv[1], torch.nn.Linear(2, 2)
def train():
    with pala.Gossip(model, total_steps=300) as gossip:
        while gossip.goes_on:
            if what == "all fail":
                raise ValueError("of all")
            if what == "die between" and gossip.rank == 1:
                os.kill(os.getpid(), 9)
            gossip.after_update(steps=10)
    return gossip.rank
def processor_s(pid):
    return sum(map(int, open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[11:13])) / os.sysconf("SC_CLK_TCK")
rank = train()
open(f"pid-{rank}.part", "w").write(str(os.getpid()))
os.rename(f"pid-{rank}.part", f"pid-{rank}")
if what == "evaluate" and rank == 0:
    while not os.path.exists("pid-1"):
        time.sleep(0.1)
    pid = int(open("pid-1").read())
    time.sleep(1)
    before_s = processor_s(pid)
    time.sleep(2)
    print("the other one", "spins" if processor_s(pid) - before_s > 1 else "sleeps", flush=True)
if what == "fail between" and rank == 1:
    raise ValueError("of one")
if what == "end before" and rank == 1:
    sys.exit()
if what.endswith(("between", "before")):
    train()
    print("trained twice")
"""
ULFM = ["--with-ft", "ulfm"]


def end(launcher: Launcher, options: list[str], what: str, cwd: Path, ranks: int = 2) -> Job:
    (cwd / "ending.py").write_text(ENDING)
    words = ["-np", str(ranks), str(launcher.folder / "python"), "ending.py", what]
    return launcher.start(*options, *words, cwd=cwd).wait(90)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("what", ["fail between", "end before"])
def test_a_rank_that_ends_before_a_block_of_the_others_ends_the_job(what: str, mpi: Launcher, tmp_path: Path) -> None:
    """All waited forever: it for the end of the others, and these for it."""
    for options in [[], ULFM] if mpi.name == "openmpi" else [[]]:
        done = end(mpi, options, what, tmp_path)
        assert done.status != 0 and "trained twice" not in done.output, done.output
        assert "[rank 1] the program has ended here, but rank 0 came to another block" in done.output, done.output
        assert done.output.count("ValueError: of one") == (what == "fail between"), done.output
        assert_all_end(tmp_path)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_rank_sleeps_at_its_end_while_another_evaluates(mpi: Launcher, tmp_path: Path) -> None:
    for options in [[], ULFM] if mpi.name == "openmpi" else [[]]:
        done = end(mpi, options, "evaluate", tmp_path)
        assert done.status == 0 and "the other one sleeps" in done.output, done.output
        (tmp_path / "pid-1").unlink()


@pytest.mark.mpi
@pytest.mark.slow
def test_an_error_of_all_ranks_is_seen_in_the_status(any_mpi: Launcher, tmp_path: Path) -> None:
    """Each took the other to continue, and ended as by a death, which mpirun forgives."""
    done = end(any_mpi, ULFM, "all fail", tmp_path)
    assert done.status == 1 and done.output.count("ValueError: of all") == 2, done.output
    assert_all_end(tmp_path)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_block_after_a_death_ends_the_job(any_mpi: Launcher, tmp_path: Path) -> None:
    """All find it in the same moment; when all of them aborted at once, mpirun hung."""
    done = end(any_mpi, ULFM, "die between", tmp_path, ranks=3)
    assert done.status == 1 and "pala: error: rank 0: another rank died" in done.output, done.output
    assert done.output.count("MPI_ABORT was invoked") == 1 and "sent help message" not in done.output, done.output
    assert_all_end(tmp_path)


LARGE = """
import torch, pala, pala.comm.data_proxy
pala.comm.data_proxy._MOST_BYTES = 1000  # bytes that are counted one by one, instead of 2**30
model = [torch.zeros(9_999)]
with pala.Gossip(model, total_steps=3000) as gossip:
    updates = 0
    while gossip.goes_on:
        model[0].add_(torch.arange(9_999).remainder(7))
        updates += 1
        gossip.after_update(steps=10)
    received = gossip._exchange._state.counts["models_received"]
expected = gossip.global_steps / 10 / gossip.size * torch.arange(9_999).remainder(7)
print(f"rank {gossip.rank}: {bool(torch.allclose(model[0], expected, rtol=1e-4))} {received > 0}")
"""


@pytest.mark.mpi
@pytest.mark.slow
def test_a_script_on_real_ranks_whose_messages_are_larger_than_mpi_counts(mpi: Launcher, tmp_path: Path) -> None:
    done = mpi.script(2, LARGE, tmp_path)
    lines = sorted(line for line in done.output.splitlines() if line.startswith("rank "))
    assert done.status == 0 and lines == [f"rank {rank}: True True" for rank in range(2)], done.output


DYING = """
import os, signal, sys, torch, pala
model = torch.nn.Linear(4, 3)
with pala.Gossip(model, total_steps=10**9, patience_s=1, on_change=lambda *change: print("told", *change)) as gossip:
    for epoch in range(6):
        for _ in range(20):
            with torch.no_grad():
                model.weight += gossip.rank
            gossip.after_update(steps=1)
        if gossip.rank == 1 and epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        assert gossip.average()
        print(f"epoch {epoch}: {float(model.weight.sum()):.6f}", flush=True)
print(f"ends {gossip.rank} {list(gossip.living)} {float(model.weight.sum()):.6f}", flush=True)
os._exit(0)
"""


@pytest.mark.mpi
@pytest.mark.slow
def test_the_living_average_after_a_death(any_mpi: Launcher, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    python = str(any_mpi.folder / "python")
    job = any_mpi.start("--with-ft", "ulfm", "-np", "3", python, "dying.py", cwd=tmp_path).wait()
    lines = [line for line in job.output.splitlines() if line.startswith(("epoch", "ends", "told"))]
    for epoch in range(6):
        values = {line for line in lines if line.startswith(f"epoch {epoch}:")}
        assert len(values) == 1, job.output
    assert sum(line.startswith("ends") for line in lines) == lines.count("told death 1") == 2, job.output


@pytest.mark.slow
def test_the_code_of_its_pages_runs(tmp_path: Path) -> None:
    pages = "".join((REPOSITORY / f"docs/{name}.md").read_text() for name in ("library", "library_faults"))
    blocks = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    assert len(blocks) == 4
    command = [sys.executable, "-c", "\n".join(blocks)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("0 10016 "), done.stderr


SIGNALLED = """
import os, signal, sys, torch, pala
model, updates, number = torch.nn.Linear(4, 3), 0, signal.Signals[sys.argv[1]]
with pala.Gossip(model, total_steps=10**9 if number == signal.SIGUSR1 else 20_000, patience_s=1) as gossip:
    while gossip.goes_on:
        updates += 1
        gossip.after_update(steps=10)
        if gossip.rank == 1 and updates == 50:
            os.kill(os.getpid(), number)
signalled = gossip.signal.name if gossip.signal else "none"
print(f"rank {gossip.rank} of {len(gossip.living)}, {signalled}: {float(model.weight.sum()):.6f} {gossip.global_steps}")
"""


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ranks", "signals"), [("SIGUSR1", 2, ["none", "SIGUSR1"]), ("SIGUSR2", 3, ["none"])]
)
def test_signals_to_a_real_rank(number: str, ranks: int, signals: list[str], any_mpi: Launcher, tmp_path: Path) -> None:
    """SIGUSR1 ends all; by SIGUSR2 it leaves, and its process waits for the others."""
    done = any_mpi.script(ranks, SIGNALLED, tmp_path, number)
    lines = sorted(line for line in done.output.splitlines() if line.startswith("rank "))
    assert done.status == 0 and len(lines) == ranks, done.output
    assert len({line.partition(":")[2] for line in lines}) == 1
    assert {line.partition(", ")[2].partition(":")[0] for line in lines} == set(signals)
    assert all("of 2," in line for line in lines if not line.startswith("rank 1"))
