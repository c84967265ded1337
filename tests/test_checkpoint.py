"""Checkpoints: read back bit for bit or refused with a sentence, and never half written."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pala.a2c.averaging import average_of
from pala.run import checkpoint, tensor_file
from pala.run.checkpoint import RankState, load_all, load_policy, load_rank, save_policy, save_rank
from pala.system.errors import PalaError, reason
from pala.system.files import write_json
from support.checkpoints import SIGNATURE, file_of, load_state, make_state, same


def test_a_state_is_read_back_bit_for_bit(tmp_path):
    state = make_state(rank=3, ranks=5)
    state.tensors["parameters"][:4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    save_rank(tmp_path, state)
    assert same(load_state(tmp_path, 3), state)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0003.safetensors"]


def test_a_restored_generator_goes_on_where_it_was(tmp_path):
    generator, state = torch.Generator().manual_seed(5), make_state()
    torch.rand(3, generator=generator)
    state.random_states = {"actions": generator.get_state()}
    save_rank(tmp_path, state)
    expected = torch.rand(3, generator=generator)
    generator.set_state(load_state(tmp_path).random_states["actions"])
    assert torch.rand(3, generator=generator).equal(expected)


def test_nothing_is_pickled(tmp_path):
    """A header of JSON, then the bytes of the tensors and nothing else."""
    state = make_state()
    save_rank(tmp_path, state)
    data = file_of(tmp_path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tensors = [*state.tensors.values(), *state.random_states.values()]
    assert sorted(header) == ["__metadata__", "mean_square", "parameters", "random.actions"]
    assert len(data) == 8 + length + sum(tensor.nbytes for tensor in tensors)
    assert all(tensor.numpy().tobytes() in data for tensor in tensors)


def disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_earlier_checkpoint(failing, tmp_path, monkeypatch):
    save_rank(tmp_path, make_state(fill=1.0))
    save_rank(tmp_path, make_state(fill=2.0))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, failing, disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_rank(tmp_path, make_state(fill=3.0))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.undo()
    save_rank(tmp_path, make_state(fill=3.0))
    assert load_state(tmp_path).tensors["parameters"][0] == 3


@pytest.mark.parametrize("failing", ["fsync", "replace", "open"])
def test_a_file_that_cannot_be_written_is_named(failing, tmp_path, monkeypatch):
    """By its own name: a full disk names none, a folder that is read-only the file beside it."""
    real = os.open

    def fail(path: object, *_: object) -> int:
        if str(path).endswith(".tmp"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, *_)

    monkeypatch.setattr(os, failing, fail if failing == "open" else disk_full)
    with pytest.raises(OSError, match=f"'{tmp_path}/run.json'$") as caught:
        write_json(tmp_path / "run.json", {})
    assert reason(caught.value).endswith(f" ('{tmp_path}/run.json')")


def test_a_last_rename_that_fails_leaves_the_newest_checkpoint(tmp_path, monkeypatch):
    save_rank(tmp_path, make_state(fill=1.0))
    save_rank(tmp_path, make_state(fill=2.0))
    real, failed = os.replace, []

    def replace(source: Path, target: Path) -> None:
        if Path(source).name == ".rank-0000.safetensors.new" and not failed and Path(target) == file_of(tmp_path):
            failed.append(source)
            disk_full()
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space left"):
        save_rank(tmp_path, make_state(fill=3.0))
    assert failed and load_state(tmp_path).tensors["parameters"][0] == 2
    assert file_of(tmp_path).exists()


def test_a_spare_that_trained_is_found_by_the_checkpoint_before_its_last(tmp_path):
    """Its job ended between the two renames of a save."""
    for rank in range(3):
        state = make_state(rank, 3, fill=float(rank))
        state.counters["spares"] = 1
        save_rank(tmp_path, state)
    os.replace(file_of(tmp_path, 2), tmp_path / "rank-0002.previous.safetensors")
    assert [state.rank for state in load_all(tmp_path, SIGNATURE)] == [0, 1, 2]


def test_a_crash_at_any_rename_leaves_a_checkpoint(tmp_path, monkeypatch):
    """The process may die before each of the renames of a save; what is loaded is the old state or the new one."""
    real, loaded = os.replace, []
    for crash_at in range(4):
        folder = tmp_path / str(crash_at)
        folder.mkdir()
        save_rank(folder, make_state(fill=1.0))
        calls = iter(range(99))

        def replace(source: Path, target: Path, calls=calls, crash_at=crash_at) -> None:
            if next(calls) == crash_at:
                raise KeyboardInterrupt
            real(source, target)

        monkeypatch.setattr(os, "replace", replace)
        try:
            save_rank(folder, make_state(fill=2.0))
        except KeyboardInterrupt:
            monkeypatch.setattr(os, "replace", real)
        loaded.append(float(load_state(folder).tensors["parameters"][0]))
        monkeypatch.undo()
    assert loaded == [1, 1, 1, 2]


@pytest.mark.slow
def test_every_flipped_bit_is_noticed(tmp_path):
    """A damaged file is refused or, where the bit meant nothing, read as it was; never read as something else."""
    state = make_state()
    save_rank(tmp_path, state)
    data = bytearray(file_of(tmp_path).read_bytes())
    refused = 0
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        file_of(tmp_path).write_bytes(data)
        data[bit // 8] ^= 1 << bit % 8
        try:
            read = load_state(tmp_path)
        except PalaError:
            refused += 1
        else:
            assert same(read, state), f"bit {bit % 8} of byte {bit // 8}"
    assert refused > 0.9 * len(data) * 8


def test_a_file_truncated_anywhere_is_refused(tmp_path):
    save_rank(tmp_path, make_state())
    whole = file_of(tmp_path).read_bytes()
    for kept in range(len(whole)):
        file_of(tmp_path).write_bytes(whole[:kept])
        with pytest.raises(PalaError, match=r"rank-0000.safetensors' cannot be read"):
            load_state(tmp_path)
    for extra in (b"\0", whole):
        file_of(tmp_path).write_bytes(whole + extra)
        with pytest.raises(PalaError, match=r"rank-0000.safetensors' cannot be read"):
            load_state(tmp_path)


def test_another_ranks_file_is_refused(tmp_path, capsys):
    """Copied over, or of a job with another number of ranks; the one before it is used."""
    for rank in (0, 1):
        save_rank(tmp_path, make_state(rank, 2))
    file_of(tmp_path).write_bytes(file_of(tmp_path, 1).read_bytes())
    with pytest.raises(PalaError, match=r"rank-0000.safetensors' is rank 1's of 2 ranks, not that of rank 0\."):
        load_all(tmp_path, SIGNATURE)
    save_rank(tmp_path, make_state(0, 3))
    with pytest.raises(PalaError, match=r"rank-0000.safetensors' is rank 0's of 3 ranks, not that of rank 0 of 2\."):
        load_state(tmp_path, ranks=2)
    with pytest.raises(PalaError, match=r"rank-0001.safetensors' is rank 1's of 2 ranks, not that of rank 1 of 3\."):
        load_all(tmp_path, SIGNATURE)
    for fill in (1.0, 2.0):
        save_rank(tmp_path, make_state(0, 2, fill=fill))
    file_of(tmp_path).write_bytes(file_of(tmp_path, 1).read_bytes())
    assert load_all(tmp_path, SIGNATURE)[0].tensors["parameters"][0] == 1
    assert "is rank 1's of 2 ranks" in capsys.readouterr().err


def test_no_crash_of_the_machine_undoes_a_rename(tmp_path, monkeypatch):
    """After the renames the folder is flushed too; a file system that cannot is no fault."""
    synced: list[bool] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        if synced[-1]:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save_rank(tmp_path, make_state(fill=1.0))
    assert synced == [False, True, True]  # the file, its neighbour's name, its own
    assert load_state(tmp_path).tensors["parameters"][0] == 1


def test_the_steps_of_the_newest_checkpoints(tmp_path):
    assert checkpoint.global_steps(tmp_path) == 0
    for steps in (100, 200):
        segment = checkpoint.new_segment(tmp_path)
        for rank in range(2):
            save_rank(segment, make_state(rank, 2, steps=steps))
    assert checkpoint.global_steps(tmp_path) == 1000 + 200 + 200, "each knows its own best"
    for file in segment.iterdir():
        file.write_bytes(b"nonsense")
    assert checkpoint.global_steps(tmp_path) == 0


def test_the_steps_of_ranks_that_know_their_own_alone(tmp_path):
    """As independent learners do."""
    segment = checkpoint.new_segment(tmp_path)
    for rank, own in enumerate(([100, 0], [0, 200])):
        state = make_state(rank, 2)
        save_rank(segment, replace(state, counters=state.counters | {"base_steps": 7, "steps_by_rank": own}))
    assert checkpoint.global_steps(tmp_path) == 7 + 300


def test_a_damaged_file_falls_back_to_the_one_before(tmp_path, capsys):
    save_rank(tmp_path, make_state(fill=1.0))
    save_rank(tmp_path, make_state(fill=2.0))
    assert load_state(tmp_path).tensors["parameters"][0] == 2
    assert capsys.readouterr().err == ""
    data = bytearray(file_of(tmp_path).read_bytes())
    data[-1] ^= 1
    file_of(tmp_path).write_bytes(data)
    assert load_state(tmp_path).tensors["parameters"][0] == 1
    said = capsys.readouterr().err
    assert "[rank 0]" in said
    assert "is damaged: a checksum does not fit. The one before it is used." in said


def test_a_file_that_is_renamed_while_it_is_opened_falls_back_to_the_one_before(tmp_path, monkeypatch):
    """As a rank that saves does to one who reads; safetensors opens it twice, the second time by torch."""
    segment = checkpoint.new_segment(tmp_path)
    for fill in (1.0, 2.0):
        save_rank(segment, make_state(fill=fill))
    from_file = torch.UntypedStorage.from_file

    def late(path, *options, **more):
        if str(path) == str(file_of(segment)):
            file_of(segment).unlink()
        return from_file(path, *options, **more)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", late)
    assert checkpoint.newest_segment(tmp_path) == segment
    assert load_state(segment).tensors["parameters"][0] == 1


def test_files_of_another_kind_are_refused(tmp_path, monkeypatch):
    with pytest.raises(PalaError, match=r"rank-0000.safetensors' does not exist"):
        load_state(tmp_path)
    save_file({"parameters": torch.zeros(3)}, file_of(tmp_path))
    with pytest.raises(PalaError, match="cannot be read"):
        load_state(tmp_path)
    save_policy(file_of(tmp_path), {"parameters": torch.zeros(3)}, {})
    with pytest.raises(PalaError, match="lacks"):
        load_state(tmp_path)
    monkeypatch.setattr(tensor_file, "_FORMAT", 99)
    save_rank(tmp_path, make_state())
    monkeypatch.undo()
    with pytest.raises(PalaError, match=r"by a newer version of PALA \(format 99; this one reads 2\): update"):
        load_policy(file_of(tmp_path))
    with pytest.raises(PalaError, match=r"rank-0000.safetensors' was written by a newer version"):
        load_state(tmp_path)
    monkeypatch.setattr(tensor_file, "_FORMAT", 0)
    save_rank(tmp_path, make_state())
    monkeypatch.undo()
    with pytest.raises(PalaError, match=r"by an older version of PALA \(format 0; this one reads 2\): use that"):
        load_policy(file_of(tmp_path))
    save_rank(tmp_path, make_state())
    with pytest.raises(PalaError, match="is not a policy that PALA exported"):
        load_policy(file_of(tmp_path))


def test_another_network_is_refused(tmp_path):
    save_rank(tmp_path, make_state())
    with pytest.raises(PalaError, match="is of another network"):
        load_rank(tmp_path, 0, SIGNATURE - 1)


def averaged(folder: Path, states: list[RankState], first_only: bool = False) -> RankState:
    for state in states:
        save_rank(folder, state)
    average, number = average_of(folder, SIGNATURE, first_only)
    assert number == len(states)
    return average


def test_average_is_the_weighted_mean_and_counts_all_steps(tmp_path):
    """Steps: 1000 of an earlier run, and of each rank what it says of itself (the others know less)."""
    states = [make_state(rank, 3, steps=100 * (rank + 1), weight=weight) for rank, weight in enumerate((0.5, 1.5, 2.0))]
    result = averaged(tmp_path, states)
    for name in ("parameters", "mean_square"):
        columns = zip(*(state.tensors[name].tolist() for state in states), strict=True)
        expected = [(0.5 * a + 1.5 * b + 2.0 * c) / 4.0 for a, b, c in columns]
        assert result.tensors[name].tolist() == pytest.approx(expected, abs=1e-6)
    assert result.counters["base_steps"] == 1000 + 100 + 200 + 300
    assert result.random_states == {}
    states = load_all(tmp_path, SIGNATURE, whole=False)
    assert not any(state.tensors or state.random_states for state in states)


def test_of_a_lost_rank_only_the_steps_count(tmp_path):
    """Also where nobody else knows of them, as without exchange."""
    for rank in range(3):
        state = make_state(rank, 3, steps=100 * (rank + 1))
        state.counters["steps_by_rank"] = [state.counters["local_steps"] if r == rank else 0 for r in range(3)]
        state.counters["lost"] = [] if rank == 2 else [2]
        save_rank(tmp_path, state)
    states = load_all(tmp_path, SIGNATURE)
    assert [state.rank for state in states] == [0, 1]
    assert averaged(tmp_path, states).counters["base_steps"] == 1000 + 100 + 200 + 300


def test_average_leaves_out_ranks_that_are_not_finite(tmp_path):
    poisoned = [make_state(rank, 3, fill=float("nan")) for rank in range(3)]
    healthy = make_state(1, 3, fill=2.0, steps=100)
    result = averaged(tmp_path, [poisoned[0], healthy, poisoned[2]])
    assert (result.tensors["parameters"] == 2).all()
    assert result.counters["base_steps"] == 1000 + 10 + 100 + 10
    assert averaged(tmp_path, [poisoned[0], healthy, poisoned[2]], first_only=True).rank == 1
    with pytest.raises(PalaError, match="not finite"):
        averaged(tmp_path, poisoned)


def test_load_all_wants_every_rank(tmp_path):
    save_rank(tmp_path, make_state(0, 2))
    with pytest.raises(PalaError, match=r"rank-0001.safetensors' does not exist"):
        load_all(tmp_path, SIGNATURE)


def test_the_newest_segment_is_the_last_with_a_checkpoint(tmp_path):
    with pytest.raises(PalaError, match="has no checkpoint"):
        checkpoint.newest_segment(tmp_path)
    segments = [checkpoint.new_segment(tmp_path) for _ in range(3)]
    assert [segment.name for segment in segments] == ["segment-000", "segment-001", "segment-002"]
    for segment in segments[:2]:
        save_rank(segment, make_state())
    save_rank(segments[2], make_state(rank=1, ranks=2))  # rank 0 did not get that far
    assert checkpoint.newest_segment(tmp_path) == segments[1]


def test_segments_that_nothing_goes_on_from_are_removed(tmp_path):
    """Not what others have put beside them."""
    segments = [checkpoint.new_segment(tmp_path) for _ in range(4)]
    kept = segments[1].with_name("segment-before-the-change")
    kept.mkdir()
    checkpoint.remove_older(segments[2])
    assert sorted(segments[0].parent.iterdir()) == [*segments[2:], kept]
    assert checkpoint.new_segment(tmp_path).name == "segment-004"


def test_a_policy_is_exported_with_its_header(tmp_path):
    weight = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    header = {"config": {"a2c": {"gamma": 0.99}}, "global_steps": 123}
    save_policy(tmp_path / "policy.safetensors", {"weight": weight, "bias": torch.ones(4)}, header)
    named, read = load_policy(tmp_path / "policy.safetensors")
    assert sorted(named) == ["bias", "weight"]
    assert named["weight"].equal(weight)
    assert named["weight"].is_contiguous()
    assert header.items() <= read.items()
    with pytest.raises(PalaError, match="does not exist"):
        load_policy(tmp_path / "other.safetensors")


def test_a_rank_that_never_saved_what_it_learned_is_left_out(tmp_path):
    """It was killed before its first checkpoint; the other was not."""
    states = [make_state(0, 2), make_state(1, 2)]
    nothing = {"updates": 0, "applied": 0, "num_squares": 0}
    states[0].counters |= nothing | {"time_s": 0.0}
    states[0].tensors = {name: torch.full((6,), 99.0) for name in states[0].tensors}
    for first_only in (False, True):
        result = averaged(tmp_path, states, first_only)
        assert result.tensors["parameters"].equal(states[1].tensors["parameters"])
        assert (result.rank, result.counters["updates"], result.counters["time_s"]) == (1, 7, 1.25)
    states[1].counters |= nothing
    assert not averaged(tmp_path, states).tensors["parameters"].equal(states[1].tensors["parameters"])


def test_states_with_and_without_momentum_are_not_averaged(tmp_path):
    states = [make_state(0, 2), make_state(1, 2)]
    states[0].tensors["movement"] = torch.zeros(6)
    with pytest.raises(PalaError, match="some are with momentum, some without"):
        averaged(tmp_path, states)
