"""What `pala.Gossip` exchanges: types, buffers, momentum, every k updates, averages, and states to continue from."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pala import gossip as gossip_module
from pala.comm.threaded import TICK_S
from pala.exchange.base import average_of_ranks
from pala.exchange.flat import FlatTensors, named_tensors
from pala.exchange.gossip import driver, exchange
from pala.gossip import Gossip
from pala.system.errors import PalaError
from pala.testing import Fault, fail_at, fail_at_message, leave_at, run_ranks, signal_at
from pala.testing.memory import MemoryCommunicator
from support.gossip_loops import add, on_ranks, train, zeros


class Mixed(nn.Module):
    """A weight in bfloat16, one in float32, and buffers of which two travel."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.high = nn.Parameter(torch.zeros(2))
        for name, buffer in (
            ("mean", torch.zeros(2)),
            ("low_mean", torch.zeros(1, dtype=torch.bfloat16)),
            ("count", torch.zeros(1, dtype=torch.int64)),
        ):
            self.register_buffer(name, buffer)
        self.register_buffer("mask", torch.tensor([float("-inf")]), persistent=False)


def test_the_rule_of_buffers() -> None:
    parameters, buffers = named_tensors(Mixed())
    assert [name for name, _ in parameters] == ["low", "high"]
    assert [name for name, _ in buffers] == ["mean", "low_mean"]


def test_rounding_loses_no_small_move() -> None:
    """256 moves of less than half of bfloat16's last bit add up; a vector of bfloat16 would stay where it is."""
    model = Mixed()
    nn.init.ones_(model.low)
    flat = FlatTensors(*named_tensors(model))
    for _ in range(256):
        flat.gather()
        flat.data[:3] += 2.0**-10
        flat.scatter()
    assert flat.data[:3].tolist() == [1.25] * 3 == model.low.tolist()
    with torch.no_grad():
        model.low += 0.5  # an optimiser's step
    flat.gather()
    assert flat.data[:3].tolist() == [1.75] * 3
    assert model.low.dtype == torch.bfloat16


def test_a_rounded_tensor_that_is_reset_keeps_nothing_of_its_old_value() -> None:
    model = Mixed()
    flat = FlatTensors(*named_tensors(model))
    for value in (0.0, 1.0, float("nan"), 2.0):
        flat.data[:3] = 1001.9  # the last bit is 4
        flat.scatter()
        nn.init.constant_(model.low, value)
        flat.gather()
        assert flat.data[:3].equal(torch.full((3,), value)) or value != value


@pytest.mark.parametrize("compression", ["none", "bfloat16", "top_k"])
def test_types_may_be_mixed(compression: str) -> None:
    def main(comm: MemoryCommunicator) -> tuple[float, list[Tensor]]:
        model, updates = Mixed(), 0
        with torch.no_grad():
            model.low.fill_(comm.rank)
        with Gossip(model, total_steps=90, compression=compression, comm=comm) as gossip:  # type: ignore[arg-type]
            assert model.low.tolist() == [0.0] * 3  # rank 0's
            while gossip.goes_on:
                add(model, 1 / 64)
                model.get_buffer("count").add_(1)
                updates += 1
                gossip.after_update(steps=1)
        assert int(model.get_buffer("count")) == updates and model.low.dtype == torch.bfloat16
        return updates / 64, [model.low.detach(), model.high.detach()]

    results = on_ranks(3, main)
    mean = sum(progress for progress, _ in results) / 3
    for _, (low, high) in results:
        assert torch.equal(low, results[0][1][0]) and torch.equal(high, results[0][1][1])
        if compression == "none":  # the others lose a little
            assert low.tolist() == pytest.approx([mean] * 3, rel=1e-2)
            assert high.tolist() == pytest.approx([mean] * 2, rel=1e-5)


@pytest.mark.parametrize("before", [True, False])
def test_a_shared_model_stays_shared(before: bool) -> None:
    """Who opened it before the block sees what is learned; one that is shared inside the block trains, too."""

    def main(comm: MemoryCommunicator) -> None:
        model = zeros()
        if before:
            model.share_memory()
        opened = model.get_parameter("weight").detach()
        with Gossip(model, total_steps=60, momentum=0.5, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                gossip.after_update(steps=1)
                model.share_memory()
        weight = model.get_parameter("weight").detach()
        assert weight.is_shared() and float(weight.sum()) > 0
        assert not before or opened.equal(weight)

    on_ranks(2, main)


def test_a_shared_tensor_is_taken_over_exactly() -> None:
    tensor = torch.full((2,), 1e8).share_memory_()
    flat = FlatTensors(*named_tensors([tensor]))
    tensor.fill_(1.0)
    flat.gather()
    assert flat.data.tolist() == [1.0, 1.0] == tensor.tolist()


def test_a_tensor_that_becomes_float32_keeps_its_values() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    flat = FlatTensors(*named_tensors(model))
    nn.init.ones_(model.float().weight)
    flat.gather()
    assert flat.data.tolist() == [1.0] == model.weight[0].tolist()


def test_a_list_of_tensors() -> None:
    def main(comm: MemoryCommunicator) -> list[float]:
        tensors = [torch.full((2,), float(comm.rank)), torch.zeros(3, 1)]
        with Gossip(tensors, total_steps=30, comm=comm) as gossip:
            while gossip.goes_on:
                for tensor in tensors:
                    tensor += 1
                gossip.after_update(steps=1)
        return [*tensors[0].tolist(), *tensors[1].flatten().tolist()]

    results = on_ranks(2, main)
    assert results[0] == results[1] and len(set(results[0])) == 1 and results[0][0] > 0


@pytest.mark.parametrize("every", [1, 3])
def test_an_exchange_each_k_updates(every: int) -> None:
    """The budget is counted after each update all the same, and no progress is lost."""

    def main(comm: MemoryCommunicator) -> tuple[int, float, int, int]:
        model, updates = zeros(), 0
        with Gossip(model, total_steps=120, every=every, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                updates += 1
                before = gossip.global_steps
                gossip.after_update(steps=2)
                assert gossip.global_steps >= before + 2
            assert gossip._exchange is not None
            sent = gossip._exchange.driver.counts["models_sent"]
        return updates, float(model.get_parameter("bias").detach()[0]), gossip.global_steps, sent

    results = on_ranks(2, main)
    updates = [result[0] for result in results]
    assert results[0][2] == results[1][2] == 2 * sum(updates) and sum(updates) >= 60
    assert results[0][1] == results[1][1] == pytest.approx(sum(updates) / 2, rel=1e-6)
    assert 0 < sum(result[3] for result in results) <= 2 * sum(updates) // every + 2


def test_momentum_goes_further() -> None:
    """Alone, steps of 1 with momentum 0.5 go 2 each in the end: 1 / (1 - momentum)."""
    model = zeros()
    with Gossip(model, total_steps=200, momentum=0.5) as gossip:
        while gossip.goes_on:
            add(model)
            before = float(model.get_parameter("bias").detach()[0]) - 1
            gossip.after_update(steps=1)
    assert float(model.get_parameter("bias").detach()[0]) - before == pytest.approx(2.0, rel=1e-4)


def test_an_average_in_the_midst() -> None:
    def main(comm: MemoryCommunicator) -> list[float]:
        model, seen = zeros(), []
        with Gossip(model, total_steps=10**6, mixing="push_sum" if comm.size == 4 else "paired", comm=comm) as gossip:
            for epoch in range(4):
                for _ in range(5 + comm.rank):
                    add(model)
                    gossip.after_update(steps=1)
                assert gossip.average(), epoch
                seen.append(float(model.get_parameter("bias").detach()[0]))
        return seen

    for size in (3, 4):
        results = on_ranks(size, main)
        assert all(result == results[0] for result in results)
        progress = 5 + (size - 1) / 2
        if size == 3:
            assert results[0] == pytest.approx([progress * epoch for epoch in (1, 2, 3, 4)], rel=1e-5)


def test_a_rank_that_waits_for_an_average_answers_the_slower_ones() -> None:
    """They may have to wait for an answer before they can come; without it they give up after 5 s."""

    def main(comm: MemoryCommunicator) -> int:
        model = zeros()
        with Gossip(model, total_steps=10**6, max_staleness=2, comm=comm) as gossip:
            for _ in range(3):
                for _ in range(30):
                    add(model)
                    time.sleep(0.002 * comm.rank)
                    gossip.after_update(steps=1)
                assert gossip.average()
            assert gossip._exchange is not None
            return gossip._exchange.metrics()["waits_given_up"]

    assert on_ranks(2, main) == [0, 0]


def test_an_average_heals_a_model_that_is_not_finite() -> None:
    def main(comm: MemoryCommunicator) -> tuple[list[tuple[str, int]], float]:
        told: list[tuple[str, int]] = []
        model = zeros()
        with Gossip(
            model, total_steps=10**6, momentum=0.5, comm=comm, on_change=lambda *change: told.append(change)
        ) as gossip:
            for _ in range(5):
                add(model)
                gossip.after_update(steps=1)
            if comm.rank == 0:
                nn.init.constant_(model.get_parameter("weight"), float("nan"))
            assert gossip.average()
            add(model)
            gossip.after_update(steps=1)
            assert gossip._flat is not None and gossip._flat.is_finite()
        return told, float(model.get_parameter("bias").detach()[0])

    first, second = on_ranks(2, main)
    assert first[0] == [("heal", 0)] and second[0] == [] and first[1] == second[1]


def test_distances_that_are_never_asked_for_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_MOST_DISTANCES", 1)

    def main(comm: MemoryCommunicator) -> int:
        _, gossip, _ = train(comm, total_steps=400)
        assert gossip._exchange is not None
        return len(gossip._exchange.driver.distances)

    assert on_ranks(2, main) == [1, 1]


def test_variances_stay_above_zero() -> None:
    """They fall from 1 to 0.0025 within a few exchanges."""

    def main(comm: MemoryCommunicator) -> float:
        draw = torch.Generator().manual_seed(comm.rank)
        model, lowest = nn.BatchNorm1d(1), 1.0
        with Gossip(model, total_steps=400, every=20, comm=comm) as gossip:
            while gossip.goes_on:
                model(0.05 * torch.randn(64, 1, generator=draw))
                gossip.after_update(steps=1)
                lowest = min(lowest, float(model.running_var))  # type: ignore[arg-type]
        return lowest

    assert min(on_ranks(2, main)) > 0


def test_an_optimiser_from_before_the_block_fits_tensors_of_any_layout() -> None:
    """Fused kernels pair a tensor's numbers with the optimiser's by their order in memory."""

    def trained(inside: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        model.weight = nn.Parameter(torch.rand(3, 4).t())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
        inputs = torch.randn(8, 3)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()

        step()
        with Gossip(model, total_steps=3) if inside else nullcontext() as gossip:
            for _ in range(3):
                step()
                if gossip is not None:
                    gossip.after_update(steps=1)
        return model.weight.detach().clone()

    assert torch.allclose(trained(True), trained(False))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("compression", ["none", "top_k"])
def test_torchs_default_type_does_not_matter(default: torch.dtype, compression: str) -> None:
    def main(comm: MemoryCommunicator) -> torch.dtype:
        model = zeros().float()
        train(comm, total_steps=40, model=model, compression=compression)
        return model.get_parameter("weight").dtype

    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert on_ranks(2, main) == [torch.float32] * 2
    finally:
        torch.set_default_dtype(before)


def test_buffers_that_do_not_travel_begin_as_rank_0s() -> None:
    def main(comm: MemoryCommunicator) -> tuple[list[int], list[float], list[float]]:
        model = zeros()
        model.register_buffer("order", torch.randperm(5, generator=torch.Generator().manual_seed(comm.rank)))
        model.register_buffer("mask", torch.full((2,), float(comm.rank)).to(torch.bfloat16), persistent=False)
        model.register_buffer("own", torch.full((1 + comm.rank,), float(comm.rank)), persistent=False)
        train(comm, total_steps=20, model=model)
        return [model.get_buffer(name).tolist() for name in ("order", "mask", "own")]  # type: ignore[return-value]

    first, second = on_ranks(2, main)
    assert first[:2] == second[:2] and (first[2], second[2]) == ([0.0], [1.0, 1.0])


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_tensor_that_is_replaced_is_seen_before_an_average(at_the_end: bool) -> None:
    def main(comm: MemoryCommunicator) -> None:
        model = zeros()
        with Gossip(model, total_steps=10**6, comm=comm) as gossip:
            gossip.after_update(steps=1)
            model.load_state_dict(zeros().state_dict(), assign=True)
            if not at_the_end:
                gossip.average()

    with pytest.raises(PalaError, match="'weight' of the model was added, removed or replaced"):
        on_ranks(2, main)


def test_the_end_of_the_block_waits_for_a_rank_that_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_module, "_CLOSE_S", 0.2)

    def main(comm: MemoryCommunicator) -> float:
        model = zeros()
        with Gossip(model, total_steps=40, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                gossip.after_update(steps=1)
                if comm.rank == 0:
                    time.sleep(1.0)  # as an evaluation
        return float(model.get_parameter("bias").detach()[0])

    first, second = on_ranks(2, main)
    assert first == second > 0


def test_an_average_that_meets_the_end() -> None:
    """Ranks make unlike numbers of updates, so some are at the end while others want to average."""

    def main(comm: MemoryCommunicator) -> tuple[list[bool], float, int]:
        model, averaged, updates = zeros(), [], 0
        with Gossip(model, total_steps=100, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                updates += 1
                gossip.after_update(steps=1)
                if updates % (7 + comm.rank) == 0:
                    averaged.append(gossip.average())
                    if not averaged[-1]:
                        assert not gossip.goes_on and not gossip.average()
        return averaged, float(model.get_parameter("bias").detach()[0]), gossip.global_steps

    results = on_ranks(3, main)
    assert len({result[1:] for result in results}) == 1
    assert all(all(averaged[:-1]) for averaged, _, _ in results)
    assert len({sum(averaged) for averaged, _, _ in results}) == 1


def averaging(comm: MemoryCommunicator, epochs: int = 6, **settings: Any) -> list[float]:
    """Average after each ten updates; return what the model was then, and at the end."""
    model, seen = zeros(), []
    with Gossip(model, total_steps=10**6, patience_s=0.5, comm=comm, **settings) as gossip:
        for epoch in range(epochs):
            for _ in range(10):
                if not gossip.goes_on:
                    break
                add(model, 1.0 + comm.rank)
                gossip.after_update(steps=1)
            if not gossip.average():
                break
            seen.append(float(model.get_parameter("bias").detach()[0]))
            assert epoch < epochs
    return [*seen, float(model.get_parameter("bias").detach()[0])]


def test_a_rank_that_has_averaged_for_long_was_not_away(monkeypatch: pytest.MonkeyPatch) -> None:
    patience_s = 0.5

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(1.2 * patience_s)
        return average_of_ranks(*arguments)

    monkeypatch.setattr(exchange, "average_of_ranks", slow)

    def main(comm: MemoryCommunicator) -> int:
        model = zeros()
        with Gossip(model, total_steps=10**6, patience_s=patience_s, comm=comm) as gossip:
            for _ in range(5):
                add(model)
                gossip.after_update(steps=1)
            assert gossip.average()
            time.sleep(2 * TICK_S)  # its thread looks at the clock
            add(model)
            gossip.after_update(steps=1)
            assert gossip._exchange is not None
            return gossip._exchange.metrics()["waits_given_up"]

    assert on_ranks(2, main) == [0, 0]


@pytest.mark.parametrize("mixing", ["uniform", "paired"])
@pytest.mark.parametrize("faults", [(fail_at(1, 25),), (fail_at(1, 20), fail_at(2, 20)), (fail_at_message(1, 3),)])
def test_the_living_average_without_the_dead(faults: tuple[Fault, ...], mixing: str) -> None:
    results = run_ranks(4, lambda comm: averaging(comm, mixing=mixing), faults)
    living = [result for result in results if not isinstance(result, BaseException)]
    assert len(living) == 4 - len(faults)
    assert all(result == living[0] for result in living) and len(living[0]) == 7


def test_a_rank_that_has_left_takes_part_in_averages() -> None:
    def main(comm: MemoryCommunicator) -> list[float]:
        comm.outlives_ranks = False  # so it waits for the end
        return averaging(comm)

    results = on_ranks(3, main, leave_at(2, 15))
    assert results[0] == results[1] and len(results[0]) == 7
    assert results[2][-1] == results[0][-1]


def test_a_rank_that_leaves_a_job_that_outlives_it_returns_with_its_own_model() -> None:
    def main(comm: MemoryCommunicator) -> tuple[float, int]:
        model = zeros()
        with Gossip(model, total_steps=300, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                gossip.after_update(steps=1)
        return float(model.weight.detach().sum()), gossip.global_steps

    staying, also_staying, left = run_ranks(3, main, [leave_at(2, 10)])
    assert staying == also_staying and staying[1] >= 300 > left[1]


def test_updates_after_a_rank_has_left_change_nothing() -> None:
    """A loop may look at `goes_on` after several updates."""

    def main(comm: MemoryCommunicator) -> tuple[int, float]:
        comm.outlives_ranks = False  # so it waits for the end
        model = zeros()
        with Gossip(model, total_steps=300, comm=comm) as gossip:
            while gossip.goes_on:
                add(model)
                gossip.after_update(steps=1)
            before = gossip.global_steps
            if gossip._has_left:
                gossip.after_update(steps=1000)
            after = gossip.global_steps
        return after - before if comm.rank == 2 else 0, float(model.get_parameter("bias").detach()[0])

    results = on_ranks(3, main, leave_at(2, 10))
    assert results[2][0] < 1000 and len({end for _, end in results}) == 1


def test_updates_without_an_exchange_count_as_training() -> None:
    """Rank 1 makes fewer than its first exchange is due after; the average has its part."""

    def main(comm: MemoryCommunicator) -> float:
        model = zeros()
        with Gossip(model, total_steps=10**6, every=30, comm=comm) as gossip:
            for _ in range(30 - 10 * comm.rank):
                add(model, 1.0 + comm.rank)
                gossip.after_update(steps=1)
            assert gossip.average()
        return float(model.get_parameter("bias").detach()[0])

    assert on_ranks(2, main) == [35.0, 35.0]


def test_a_rank_that_is_alone_leaves_too() -> None:
    with Gossip(zeros(), total_steps=100) as gossip:
        while gossip.goes_on:
            gossip.after_update(steps=1)
            gossip._interrupt.leave_requested = gossip.global_steps == 5
    assert gossip.global_steps == 5 and not gossip.goes_on


def test_a_signal_to_a_rank_ends_those_that_average() -> None:
    results = on_ranks(3, averaging, signal_at(1, 25))
    assert len({tuple(result) for result in results}) == 1 and len(results[0]) == 3


def test_the_distance_to_the_others_is_told() -> None:
    def main(comm: MemoryCommunicator) -> float | None:
        model = zeros()
        with Gossip(model, total_steps=200, mixing="uniform", comm=comm) as gossip:
            assert gossip.consensus_distance() is None
            while gossip.goes_on:
                add(model, comm.rank)
                gossip.after_update(steps=1)
            assert gossip.consensus_distance() == gossip.consensus_distance()
            return gossip.consensus_distance()

    distances = on_ranks(2, main)
    assert all(distance is not None and distance > 0 for distance in distances)


def test_a_state_is_loaded_by_another_number_of_ranks(tmp_path: Any) -> None:
    def train(comm: MemoryCommunicator, total_steps: int, load: bool) -> tuple[float, int, int]:
        model, updates, file = zeros(), 0, tmp_path / f"{comm.rank % 2}.pt"
        gossip = Gossip(model, total_steps=total_steps, momentum=0.25, comm=comm)
        if load:
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            gossip.load_state_dict(saved["gossip"])
        with gossip:
            begin = float(model.get_parameter("bias").detach()[0])
            while gossip.goes_on:
                add(model)
                updates += 1
                gossip.after_update(steps=1)
            if not load:
                with torch.no_grad():
                    model.get_parameter("bias").fill_(10.0 * (comm.rank + 1))  # each its own
                torch.save({"model": model.state_dict(), "gossip": gossip.state_dict()}, file)
        return begin, updates, gossip.global_steps

    first = on_ranks(2, lambda comm: train(comm, 40, load=False))
    second = on_ranks(4, lambda comm: train(comm, 100, load=True))
    assert {begin for begin, _, _ in second} == {15.0}  # the average of those that were loaded
    assert second[0][2] == min(result[2] for result in first) + sum(result[1] for result in second) or (
        40 <= second[0][2] - sum(result[1] for result in second) <= first[0][2]
    )
    assert second[0][2] >= 100


def test_a_state_is_loaded_alone() -> None:
    gossip = Gossip(zeros(), total_steps=10)
    gossip.load_state_dict({"global_steps": 7, "round": 3})
    with gossip:
        updates = 0
        while gossip.goes_on:
            updates += 1
            gossip.after_update(steps=1)
        with pytest.raises(PalaError, match="before the block"):
            gossip.load_state_dict({})
    assert updates == 3 and gossip.state_dict()["global_steps"] == 10


@pytest.mark.parametrize(
    "state",
    [
        5,
        {"global_steps": 7},
        {"global_steps": "x", "round": 0},
        {"global_steps": -5, "round": 0},
        {"global_steps": 7, "round": 0, "movement": 3},
    ],
)
def test_what_is_no_state_is_told(state: Any) -> None:
    gossip = Gossip(zeros(), total_steps=10, momentum=0.5)
    with pytest.raises(PalaError, match=r"'global_steps' and 'round'|of another model"):
        gossip.load_state_dict(state)
        gossip.__enter__()


def test_a_model_that_is_not_finite_does_not_begin() -> None:
    def main(comm: MemoryCommunicator) -> None:
        model = Mixed()
        model.get_buffer("mean").fill_(float("inf"))
        with Gossip(model, total_steps=10, comm=comm):
            raise AssertionError("the block must not begin")

    for error in run_ranks(2, main):
        assert isinstance(error, PalaError) and "'mean' of the model" in str(error) and "persistent=False" in str(error)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("compression", ["none", "bfloat16", "top_k"])
def test_on_a_gpu(compression: Any) -> None:
    def main(comm: MemoryCommunicator) -> tuple[int, Tensor]:
        model, updates = Mixed().to("cuda"), 0
        with Gossip(model, total_steps=90, compression=compression, momentum=0.1, comm=comm) as gossip:
            while gossip.goes_on:
                add(model, 1 / 64)
                updates += 1
                gossip.after_update(steps=1)
                if updates % 10 == 0:
                    gossip.average()
        assert model.low.dtype == torch.bfloat16 and model.high.is_cuda
        return updates, model.high.detach().cpu()

    results = on_ranks(3, main)
    assert all(torch.equal(high, results[0][1]) and high.isfinite().all() for _, high in results)
