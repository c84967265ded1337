"""`pala.Gossip` used wrongly: one clear error, and no rank that waits forever."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pala import gossip as gossip_module
from pala.comm.base import Communicator
from pala.gossip import Gossip
from pala.system import output, waiting
from pala.system.errors import EndError, PalaError
from pala.testing import Killed, fail_at, leave_at, run_ranks
from pala.testing.memory import MemoryCommunicator
from support import REPOSITORY
from support.gossip_loops import add, on_ranks, run_together, train, zeros
from support.mpi import Launcher
from support.standing_ranks import StandingRanks


def test_two_blocks_at_a_time() -> None:
    first, second = Gossip(zeros(), total_steps=5), Gossip(zeros(), total_steps=5)
    with first, pytest.raises(PalaError, match="open at once"), second:
        raise AssertionError("the second block must not begin")
    with Gossip(zeros(), total_steps=5) as gossip:  # one after the other
        assert gossip.goes_on


def test_two_blocks_at_a_time_on_ranks() -> None:
    def main(comm: MemoryCommunicator) -> None:
        with Gossip(zeros(), total_steps=5, comm=comm), Gossip(zeros(), total_steps=5, comm=comm):
            raise AssertionError("the second block must not begin")

    for error in run_ranks(2, main):
        assert isinstance(error, PalaError) and "open at once" in str(error)


def replace_data(model: nn.Linear) -> None:
    model.weight.data = torch.zeros(2, 3)


def replace_parameter(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.zeros(2, 3))


def reshape(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.view(3, 2)


def to_half(model: nn.Linear) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [replace_data, replace_parameter, reshape, to_half])
def test_a_tensor_that_is_replaced_or_changes_its_shape(change: Callable[[nn.Linear], None]) -> None:
    """The rank that does so ends with an error, the others continue."""

    def main(comm: MemoryCommunicator) -> int:
        model = nn.Linear(3, 2)
        with Gossip(model, total_steps=200, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                if comm.rank == 1 and gossip.global_steps > 20:
                    change(model)
                gossip.after_update(steps=1)
        return gossip.global_steps

    first, error, last = run_together(3, main)
    assert isinstance(error, PalaError) and "'weight' of the model was added, removed or replaced" in str(error)
    assert first == last >= 200


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("'1.0'", lambda model: model[1].__setitem__(0, nn.Linear(2, 2))),
        ("'2'", lambda model: model.append(nn.Linear(2, 2))),
        ("'1.0'", lambda model: model[1].__delitem__(0)),
        ("'1.scale'", lambda model: setattr(model[1], "scale", nn.Parameter(torch.zeros(1)))),
        ("'0.bias'", lambda model: setattr(model[0], "bias", None)),
    ],
)
def test_a_module_or_tensor_that_is_replaced_added_or_removed(
    name: str, change: Callable[[nn.Sequential], None]
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2)))
    with Gossip(model, total_steps=2) as gossip:
        gossip.after_update(steps=1)
        change(model)
        with pytest.raises(PalaError, match=rf"{name} of the model was added, removed or replaced"):
            gossip.after_update(steps=1)


def test_a_tensor_that_is_replaced_is_named_with_its_module() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(PalaError, match=r"'0\.weight' of the model"), Gossip(model, total_steps=5) as gossip:
        model[0].weight = nn.Parameter(torch.zeros(2, 3))
        gossip.after_update(steps=1)


def test_a_bfloat16_tensor_that_changes_its_shape() -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    with pytest.raises(PalaError, match="'bias' of the model"), Gossip(model, total_steps=5) as gossip:
        model.bias.data = torch.zeros(1, 2, dtype=torch.bfloat16)
        gossip.after_update(steps=1)


def test_a_block_without_updates() -> None:
    def main(comm: MemoryCommunicator) -> int:
        model = zeros()
        with Gossip(model, total_steps=10**9, comm=comm) as gossip:
            for _ in range(100 if comm.rank == 0 else 0):
                add(model)
                gossip.after_update(steps=1)
        return gossip.global_steps

    first, error = run_ranks(2, main)
    assert first == 100 and isinstance(error, PalaError) and "ended without one `after_update`" in str(error)


def test_another_model_or_type_of_settings_on_one_rank() -> None:
    def every(comm: MemoryCommunicator) -> None:
        with Gossip(zeros(), total_steps=10, every=1 + comm.rank, comm=comm):
            raise AssertionError("the block must not begin")

    for error in run_ranks(2, every):
        assert isinstance(error, PalaError) and "rank 1 has other settings" in str(error)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ([torch.zeros(2, dtype=torch.int64)], {}, "of type torch.int64"),
        ([3.0], {}, "is a float"),
        (torch.optim.SGD([torch.zeros(1)]), {}, "The model is a SGD: give a torch module"),
        (nn.LazyLinear(2), {}, "call the model once"),
        ([tensor := torch.zeros(3), tensor.view(3)], {}, "'tensor 1' and 'tensor 0' .* same memory"),
        (torch.zeros(2, 3), {}, "The model is one tensor: give it in a list"),
        (zeros(), {"every": 0}, "'every' is 0"),
        (zeros(), {"every": True}, "'every' is True"),
        (zeros(), {"on_change": 3}, "'on_change' is 3 but must be a function of"),
        (zeros(), {"trace": 3}, "'trace' is 3 but must be a folder"),
        (zeros(), {"comm": 3}, "'comm' is 3 but must be one"),
        (zeros(), {"momentum": 1.0}, "momentum"),
        (zeros(), {"topology": 3}, "'topology' is 3, but must be one of 'auto', 'random'"),
        (zeros(), {"topology": "star"}, "^Gossip: 'topology' is 'star'"),
        (zeros(), {"topology": "complete"}, "'mixing' is 'paired', .* but 'topology' is 'complete'"),
    ],
)
def test_a_mistake_is_one_sentence(model: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PalaError, match=words):
        Gossip(model, **{"total_steps": 10, **settings})


def test_a_mistake_in_a_setting_is_raised_at_the_door() -> None:
    with pytest.raises(PalaError) as raised:
        Gossip(zeros(), total_steps=10, topology="ringg")  # type: ignore[arg-type]
    assert len(raised.traceback) == 2 and raised.value.__suppress_context__


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ranks print to standard error."""
    said: list[str] = []
    for module in (gossip_module, waiting, output):
        monkeypatch.setattr(module, "log", said.append)
    return said


def test_average_on_one_rank_only_names_the_others(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_module, "_CLOSE_S", 1.0)
    monkeypatch.setattr(waiting, "SAY_S", 0.3)

    over = threading.Event()

    def main(comm: MemoryCommunicator) -> None:
        with Gossip(zeros(), total_steps=10**9, comm=comm) as gossip:
            gossip.after_update(steps=1)
            if comm.rank == 1:
                try:
                    gossip.average()
                finally:
                    over.set()
            over.wait()

    results = run_ranks(4, main, faults=[fail_at(3, update=1)])
    error = results[1]
    assert isinstance(error, EndError) and "--resume" not in str(error)
    assert "has waited 1 s at `average()`, to which ranks 0, 2 did not come" in str(error)
    waits = [line for line in lines if "at `average()` for" in line]
    assert re.fullmatch(r"\[rank 1\] has waited \d s at `average\(\)` for ranks 0, 2\.", waits[0])
    assert all(line.startswith("[rank 1]") for line in waits)


def test_a_model_that_is_not_finite_is_said_once(lines: list[str]) -> None:
    def main(comm: MemoryCommunicator) -> None:
        model, updates = zeros(), 0
        with Gossip(model, total_steps=200, comm=comm) as gossip:
            while gossip.goes_on:
                updates += 1
                add(model)
                if comm.rank == 1 and updates in (5, 10):
                    model.weight.data.fill_(float("nan"))
                gossip.after_update(steps=1)

    on_ranks(3, main)
    (line,) = [line for line in lines if "not finite" in line]
    assert re.match(r"\[rank 1\] the model is not finite after \d+ updates: it waits for a peer's", line)


def test_a_death_is_printed_once(lines: list[str]) -> None:
    results = on_ranks(3, lambda comm: train(comm, total_steps=400), fail_at(0, update=5))
    assert isinstance(results[0], Killed)
    assert lines == ["[rank 1] rank 0 has died; 2 continue."]


def test_a_loop_that_leaves_early_says_it_once(lines: list[str]) -> None:
    def main(comm: MemoryCommunicator) -> None:
        model = zeros()
        with Gossip(model, total_steps=10**9, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                gossip.after_update(steps=1)
                if comm.rank == 1 and gossip.global_steps > 50:
                    break

    on_ranks(3, main)
    (line,) = lines
    assert line.startswith("[rank 1] left the block after ") and "of 1,000,000,000 steps" in line


@pytest.mark.parametrize(("size", "updates", "said"), [(1, 39, 0), (1, 60, 1), (2, 200, 2)])
def test_a_loop_that_ignores_the_end_says_it_once(size: int, updates: int, said: int, lines: list[str]) -> None:
    def main(comm: MemoryCommunicator) -> None:
        model = zeros()
        with Gossip(model, total_steps=20 * size, comm=comm) as gossip:
            for _ in range(updates):
                add(model)
                gossip.after_update(steps=1)

    on_ranks(size, main)
    assert len(lines) == said and all("updates since training ended" in line for line in lines)


def test_what_is_called_outside_the_block() -> None:
    """Before it nobody knows how many ranks there are: each would take itself for rank 0 of 1."""
    gossip = Gossip(zeros(), total_steps=1)
    with pytest.raises(PalaError, match="call 'average' inside the block"):
        gossip.average()
    for name in ("rank", "size", "living", "goes_on"):
        with pytest.raises(PalaError, match=f"'{name}' is known from the beginning of the block"):
            getattr(gossip, name)
    with gossip:
        gossip.after_update(steps=1)
    assert (gossip.rank, gossip.size, gossip.living, gossip.goes_on) == (0, 1, (0,), False)
    for action in (gossip.average, lambda: gossip.after_update(steps=1)):
        with pytest.raises(PalaError, match="inside the block"):
            action()


@pytest.mark.mpi
@pytest.mark.slow
def test_a_mistake_in_a_setting_is_one_sentence_on_real_ranks(any_mpi: Launcher, tmp_path: Path) -> None:
    script = "import torch, pala; pala.Gossip(torch.nn.Linear(1, 1), total_steps=1, every=0)"
    done = any_mpi.script(2, script, tmp_path)
    assert done.status != 0 and "pala: error: Gossip: 'every' is 0" in done.output and "Traceback" not in done.output


ALONE = """
import sys
for name in ("mpi4py", "mpi4py.MPI"):
    sys.modules[name] = None  # as if it were not installed
import torch, pala
model = torch.nn.Linear(2, 2)
with pala.Gossip(model, total_steps=6, on_change=print) as gossip:
    while gossip.goes_on:
        gossip.after_update(steps=2)
    assert gossip.average() is False
print(gossip.global_steps, gossip.size)
"""


@pytest.mark.slow
def test_alone_it_needs_no_mpi() -> None:
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "6 1\n"), done.stderr


def test_gossip_in_a_thread_says_that_it_hears_no_signals(capsys: pytest.CaptureFixture[str]) -> None:
    """A signal ended all ranks without a word, and mpirun with status 0."""
    thread = threading.Thread(target=train, args=(None,), kwargs={"total_steps": 3})
    thread.start()
    thread.join()
    said = capsys.readouterr().err
    assert said.count("runs in a thread, which hears no signals") == 1 and "leave the loop" in said
    train(None, total_steps=3)
    on_ranks(2, lambda comm: train(comm, total_steps=3))  # ranks of tests are threads
    assert "signals" not in capsys.readouterr().err


def test_changes_are_told() -> None:
    def main(comm: MemoryCommunicator) -> list[tuple[str, int]]:
        told: list[tuple[str, int]] = []
        comm.outlives_ranks = False  # so a rank that leaves waits for the end
        model, updates = zeros(), 0
        with Gossip(
            model, total_steps=900, comm=comm, on_change=lambda kind, rank: told.append((kind, rank))
        ) as gossip:
            while gossip.goes_on:
                add(model)
                updates += 1
                if comm.rank == 0 and updates == 8:
                    model.weight.data.fill_(float("nan"))
                gossip.after_update(steps=1)
        return told

    results = on_ranks(4, main, fail_at(2, update=4), leave_at(3, update=6))
    assert isinstance(results[2], BaseException)
    assert sorted(results[0]) == [("death", 2), ("heal", 0), ("leave", 3)]
    assert sorted(results[1]) == [("death", 2), ("leave", 3)]


SCRIPT = """
import torch, pala
model = torch.nn.Linear(3, 2)
with pala.Gossip(model, total_steps=10**9, patience_s=1) as gossip:
    while gossip.goes_on:
        if gossip.rank == 1 and gossip.global_steps > 100:
            model.weight = torch.nn.Parameter(torch.zeros(2, 3))
        gossip.after_update(steps=1)
"""


@pytest.mark.mpi
@pytest.mark.slow
def test_a_mistake_of_a_real_rank_ends_the_job(any_mpi: Launcher, tmp_path: Path) -> None:
    done = any_mpi.script(2, SCRIPT, tmp_path)
    assert done.status != 0 and done.output.count("pala: error: [rank 1]") + done.output.count("pala: error: '") == 1
    assert "'weight' of the model" in done.output and "Traceback" not in done.output


def average_in_the_midst(comm: Communicator) -> tuple[float, int, int]:
    model, averaged = zeros(), 0
    with Gossip(model, total_steps=10**9, patience_s=1, comm=comm) as gossip:
        while gossip.goes_on:
            gossip.after_update(steps=1)
            if gossip.global_steps > 200:
                break
            averaged += gossip.average()
            add(model, gossip.rank)
    return float(model.weight.sum()), gossip.global_steps, averaged


@pytest.mark.mpi
@pytest.mark.slow
def test_real_ranks_average_in_the_midst(standing: StandingRanks, tmp_path: Path) -> None:
    ends = standing.run(3, average_in_the_midst, cwd=tmp_path).values
    assert len({end[:2] for end in ends}) == 1 and min(end[2] for end in ends) > 10, ends


AVERAGE = """
import time, torch, pala, pala.gossip, pala.system.waiting as waiting
waiting.TELL_S, waiting.SAY_S, pala.gossip._CLOSE_S = 0.2, 1.0, 60.0
with pala.Gossip(torch.nn.Linear(3, 2), total_steps=10**9) as gossip:
    for sleep_s in (3, 60):  # late, and never
        gossip.after_update(steps=1)
        if gossip.rank == 2:
            time.sleep(sleep_s)
        gossip.average()
        print(f"rank {gossip.rank} has averaged", flush=True)
        pala.gossip._CLOSE_S = 3.0
"""


@pytest.mark.mpi
@pytest.mark.slow
def test_a_real_rank_that_waits_for_an_average_names_the_others(any_mpi: Launcher, tmp_path: Path) -> None:
    """First for one that is late, then for one that does not come."""
    done = any_mpi.script(3, AVERAGE, tmp_path)
    before = done.output.partition("has averaged")[0]
    assert re.search(r"\[rank 0\] has waited \d s at `average\(\)` for rank 2\.", before), done.output
    assert done.status != 0 and done.output.count(" has averaged") == 3, done.output
    assert "at `average()`, to which rank 2 did not come" in done.output


def test_a_loop_finds_its_rank_by_itself() -> None:
    def own_loop(comm: MemoryCommunicator) -> int:
        return train(None, total_steps=60)[1].size

    assert on_ranks(3, own_loop) == [3, 3, 3]


def test_a_state_of_another_model_on_one_rank() -> None:
    """The others hear that this one does not come."""

    def main(comm: MemoryCommunicator) -> None:
        gossip = Gossip(zeros(), total_steps=10, momentum=0.5, comm=comm)
        if comm.rank == 1:
            gossip.load_state_dict({"global_steps": 1, "round": 1, "movement": torch.zeros(3)})
        with gossip:
            raise AssertionError("the block must not begin")

    first, second = run_ranks(2, main)
    assert isinstance(second, PalaError) and "is of another model" in str(second)
    assert isinstance(first, PalaError) and "rank 1 died" in str(first)
