"""Models to bytes and back: nothing is lost, nothing is believed, and mixing is the formula."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pala.config.catalogue import RULES
from pala.exchange.budget import Stop
from pala.exchange.gossip.codecs import Float32, Packed
from pala.exchange.gossip.messages import WITH_MODEL, Kind, gossip_sizes
from pala.exchange.gossip.models import ReceiveBuffer, SendBuffer
from pala.exchange.wire import Message, Refusal, Wire

RANKS, PARAMETERS, SIGNATURE = 5, 37, 0xFEDCBA9876543210
CPU = torch.device("cpu")
GOSSIPED = tuple(Kind)
reproducible = settings(derandomize=True, deadline=None, max_examples=200)

cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: pinned memory and the side stream need one"
)
devices = pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=cuda)], ids=["cpu", "cuda"])


def wire(ranks: int = RANKS, parameters: int = PARAMETERS, signature: int = SIGNATURE) -> Wire:
    return Wire(ranks, parameters, signature, gossip_sizes(Float32(torch.zeros(parameters)).sizes))


def send_buffer(of: Wire | None = None, device: torch.device = CPU) -> SendBuffer:
    return SendBuffer(of or wire(), device)


def packed(parameters: torch.Tensor) -> Packed:
    return Float32(parameters).pack(parameters, whole=True)


def receive_buffer(device: torch.device = CPU) -> ReceiveBuffer:
    return ReceiveBuffer(wire(), Float32(torch.zeros(PARAMETERS, device=device)), device)


def message(kind: Kind = Kind.MODEL, **changes) -> Message:
    whole = Message(kind, 3, 12, 1.0, Stop.NONE, np.arange(RANKS, dtype=np.uint64))
    return whole._replace(**changes)


def encoded(of: Message, parameters: torch.Tensor | None = None) -> np.ndarray:
    """The bytes that go over the network."""
    if of.kind not in WITH_MODEL:
        return wire().encoded(of)
    buffer = send_buffer()
    buffer.fill(of, packed(torch.zeros(PARAMETERS) if parameters is None else parameters))
    return buffer.data


def receive(into: ReceiveBuffer, data: np.ndarray) -> Refusal | None:
    """As the transport and the driver do: bytes into the one receive buffer, then the check."""
    into.data[:] = data
    decoded = wire().decode(into.data)
    assert isinstance(decoded, Message)
    return into.check(decoded, len(data))


# ---- headers ---------------------------------------------------------------------------------------------------------


@reproducible
@given(
    kind=st.sampled_from(GOSSIPED),
    sender=st.integers(0, RANKS - 1),
    round_=st.integers(0, 2**64 - 1),
    weight=st.floats(min_value=5e-324, max_value=RANKS),
    stop=st.sampled_from(Stop),
    steps=st.lists(st.integers(0, 2**48), min_size=RANKS, max_size=RANKS),
)
def test_what_is_encoded_is_decoded(kind, sender, round_, weight, stop, steps) -> None:
    sent = Message(kind, sender, round_, weight, stop, np.array(steps, np.uint64))
    received = wire().decode(encoded(sent))
    assert isinstance(received, Message)
    assert received[:5] == sent[:5]
    assert received.steps_by_rank.dtype == np.uint64 and received.steps_by_rank.tolist() == steps


@pytest.mark.parametrize("ranks", [1, 2, 7, 8, 9, 100])
def test_counters_of_any_number_of_ranks_fit_before_the_parameters(ranks: int) -> None:
    of = wire(ranks, 1, 0)
    assert of.control_bytes % 64 == 0 and 64 + 8 * ranks <= of.control_bytes < 64 + 8 * ranks + 64
    buffer = send_buffer(of)
    steps = np.arange(ranks, dtype=np.uint64) + np.uint64(2**47)
    buffer.fill(message(sender=0, steps_by_rank=steps), packed(torch.tensor([1.5])))
    assert of.decode(buffer.data).steps_by_rank.tolist() == steps.tolist()
    assert buffer.data[-4:].view(np.float32)[0] == 1.5


def test_parameters_arrive_bit_for_bit() -> None:
    parameters = torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(0))
    parameters[:4] = torch.tensor([0.0, -0.0, 1e-45, 3.4e38])
    data = encoded(message(), parameters)
    assert data[wire().control_bytes :].tobytes() == parameters.numpy().tobytes()
    into = receive_buffer()
    assert receive(into, data) is None
    into.add(1.0)
    mixed = torch.zeros(PARAMETERS)
    into.codec.heal(mixed)
    assert torch.equal(mixed, parameters)


HEADER = "<4sHBBBxxxIIQQdQ"
FIELDS = ["magic", "version", "kind", "format", "stop", "sender", "ranks", "round", "signature", "weight", "parameters"]
GOOD = [b"PALA", 2, 1, 1, 0, 3, RANKS, 12, SIGNATURE, 1.0, PARAMETERS]


def with_field(name: str, value: object) -> np.ndarray:
    data = encoded(message()).copy()
    values = [value if field == name else good for field, good in zip(FIELDS, GOOD, strict=True)]
    data[: struct.calcsize(HEADER)] = np.frombuffer(struct.pack(HEADER, *values), np.uint8)
    return data


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("magic", b"PILA", "begins with"), ("version", 1, "version 1"),
        ("format", 0, "format is 0"), ("format", 2, "format is 2"), ("format", 3, "format is 3"),
        ("kind", 0, "kind"), ("kind", 7, "kind"), ("kind", 2, "bytes"), ("stop", 9, "stop"),
        ("sender", RANKS, "rank"), ("ranks", RANKS + 1, "rank"), ("ranks", 2, "rank"),
        ("signature", SIGNATURE + 1, "another network"), ("parameters", PARAMETERS + 1, "another network"),
        ("weight", 0.0, "weight"), ("weight", -1.0, "weight"), ("weight", float("nan"), "weight"),
        ("weight", float("inf"), "weight"), ("weight", RANKS + 1.0, "weight"),
    ],
)  # fmt: skip
def test_a_header_with_one_wrong_field_is_refused(name: str, value: object, reason: str) -> None:
    assert isinstance(wire().decode(with_field(name, dict(zip(FIELDS, GOOD, strict=True))[name])), Message)
    refusal = wire().decode(with_field(name, value))
    assert isinstance(refusal, Refusal) and reason in refusal.reason


@pytest.mark.parametrize("steps", [2**48 + 1, 2**63, 2**64 - 1])
def test_impossible_counters_are_refused(steps: int) -> None:
    """One flipped bit must not end training for all, nor the sum over ranks wrap around."""
    counters = np.zeros(RANKS, np.uint64)
    counters[2] = steps
    refusal = wire().decode(encoded(message(steps_by_rank=counters)))
    assert isinstance(refusal, Refusal) and f"a rank made {steps} steps" in refusal.reason


def test_other_networks_and_other_numbers_of_ranks_are_refused() -> None:
    data = encoded(message())
    others = [
        wire(signature=SIGNATURE ^ 1), wire(parameters=PARAMETERS - 1), wire(RANKS + 1), wire(RANKS - 1)
    ]  # fmt: skip
    assert all(isinstance(other.decode(data), Refusal) for other in others)


def test_truncated_and_oversized_messages_are_refused() -> None:
    for kind in GOSSIPED:
        data = encoded(message(kind))
        assert isinstance(wire().decode(data), Message)
        for length in {*range(0, len(data), 7), len(data) - 1}:
            assert isinstance(wire().decode(data[:length]), Refusal), length
        for extra in (1, 64, wire().most_bytes):
            assert isinstance(wire().decode(np.concatenate([data, np.zeros(extra, np.uint8)])), Refusal), extra


@settings(reproducible, max_examples=1000)
@given(st.binary(max_size=1000))
@example(b"")
@example(b"PALA")
@example(bytes(1000))
@example(b"\xff" * 1000)
@pytest.mark.slow
def test_any_bytes_give_a_message_or_a_refusal(data: bytes) -> None:
    assert isinstance(wire().decode(np.frombuffer(data, np.uint8)), Refusal)


@pytest.mark.slow
def test_any_damage_to_a_message_gives_a_message_or_a_refusal() -> None:
    random = np.random.default_rng(0)
    whole = [encoded(message(kind, weight=0.25)) for kind in GOSSIPED]
    outcomes = {Message: 0, Refusal: 0}
    for _ in range(5000):
        data = whole[random.integers(len(whole))].copy()
        for _ in range(random.integers(1, 4)):
            data[random.integers(min(len(data), 120))] = random.choice([0, 1, 2, 127, 128, 255, random.integers(256)])
        if random.random() < 0.2:
            data = data[: random.integers(len(data) + 1)]
        decoded = wire().decode(data)
        outcomes[type(decoded)] += 1
        if isinstance(decoded, Message):
            assert decoded.sender < RANKS and decoded.steps_by_rank.shape == (RANKS,) and 0 < decoded.weight < RANKS + 1
        else:
            assert decoded.reason
    assert outcomes[Message] > 500 and outcomes[Refusal] > 500


# ---- poison ----------------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, PARAMETERS // 2, PARAMETERS - 1])
def test_a_model_that_is_not_finite_is_refused(poison: float, place: int, device: torch.device) -> None:
    parameters = torch.ones(PARAMETERS)
    parameters[place] = poison
    into = receive_buffer(device)
    refusal = receive(into, encoded(message(), parameters))
    assert isinstance(refusal, Refusal) and "NaN or infinity" in refusal.reason
    assert receive(into, encoded(message())) is None, "a refused model spoils the buffer for the next"


@devices
def test_infinities_of_both_signs_are_refused(device: torch.device) -> None:
    parameters = torch.ones(PARAMETERS)
    parameters[3], parameters[9] = float("inf"), float("-inf")
    assert receive(receive_buffer(device), encoded(message(), parameters)) is not None


@devices
@pytest.mark.parametrize("sign", [1, -1])
def test_a_finite_model_whose_sum_overflows_is_accepted(sign: int, device: torch.device) -> None:
    parameters = torch.full((PARAMETERS,), sign * 3e38)
    assert not parameters.sum().isfinite()
    assert receive(receive_buffer(device), encoded(message(), parameters)) is None
    parameters[::2] *= -1  # partial sums overflow to both sides
    assert receive(receive_buffer(device), encoded(message(), parameters)) is None


# ---- mixing ----------------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("mixing", ["uniform", "push_sum"])
@pytest.mark.parametrize("num_models", [1, 2, 4])
def test_mixing_is_the_weighted_mean(mixing: str, num_models: int, device: torch.device) -> None:
    random = np.random.default_rng(num_models)
    models = random.normal(size=(num_models + 1, PARAMETERS)).astype(np.float32)  # the first is the receiver's
    weights = random.uniform(0.1, 1, size=num_models + 1)
    rule = RULES[mixing]
    parameters, into = torch.from_numpy(models[0].copy()).to(device), receive_buffer(device)
    for sender in range(1, num_models + 1):
        assert receive(into, encoded(message(sender=sender), torch.from_numpy(models[sender]))) is None
        into.add(rule.counted(weights[sender]))
    distance = into.codec.mix(parameters, rule.counted(weights[0]))

    row_of_W = weights / weights.sum() if mixing == "push_sum" else np.full(num_models + 1, 1 / (num_models + 1))
    np.testing.assert_allclose(parameters.cpu().numpy(), row_of_W @ models, atol=1e-6)
    mean = row_of_W[1:] @ models[1:] / row_of_W[1:].sum()
    assert float(distance) == pytest.approx(np.linalg.norm(mean - models[0]), rel=1e-5)


@devices
def test_the_sum_is_empty_after_a_mix(device: torch.device) -> None:
    into, parameters = receive_buffer(device), torch.zeros(PARAMETERS, device=device)
    for value in (1.0, 5.0):
        receive(into, encoded(message(), torch.full((PARAMETERS,), value)))
        into.add(0.5)
        into.codec.mix(parameters, own_weight=0.5)
    assert torch.allclose(parameters, torch.tensor(2.75, device=device))  # ((0 + 1)/2 + 5)/2


@devices
def test_any_sequence_of_models_refusals_and_mixes_follows_the_formula(device: torch.device) -> None:
    random = np.random.default_rng(0)
    own = random.normal(size=PARAMETERS)
    parameters = torch.from_numpy(own.astype(np.float32)).to(device)
    into, models, weights = receive_buffer(device), [], []
    for _ in range(400):
        action = random.integers(4)
        model = random.normal(size=PARAMETERS).astype(np.float32)
        if action == 0:
            model[random.integers(PARAMETERS)] = random.choice([np.nan, np.inf])
            assert receive(into, encoded(message(), torch.from_numpy(model))) is not None
        elif action < 3:
            weight = float(random.choice([1.0, 0.5, 0.25, random.uniform(0.01, 2)]))
            assert receive(into, encoded(message(), torch.from_numpy(model))) is None
            into.add(weight)
            models.append(model)
            weights.append(weight)
        elif models:
            own_weight, heals = float(random.uniform(0.05, 3)), bool(random.integers(2))
            mean = np.average(models, axis=0, weights=weights)
            distance = None
            if heals:
                into.codec.heal(parameters)
            else:
                distance = into.codec.mix(parameters, own_weight, measure=bool(random.integers(2)))
            assert distance is None or float(distance) == pytest.approx(np.linalg.norm(mean - own), rel=1e-4)
            own = mean if heals else (own_weight * own + sum(weights) * mean) / (own_weight + sum(weights))
            np.testing.assert_allclose(parameters.cpu().numpy(), own, atol=1e-5)
            models, weights = [], []


@devices
def test_parameters_that_are_not_finite_are_healed(device: torch.device) -> None:
    into = receive_buffer(device)
    parameters = torch.full((PARAMETERS,), float("nan"), device=device)
    parameters[0] = float("inf")
    for value, weight in ((1.0, 1.0), (4.0, 2.0)):
        receive(into, encoded(message(), torch.full((PARAMETERS,), value)))
        into.add(weight)
    into.codec.heal(parameters)
    assert torch.equal(parameters, torch.full((PARAMETERS,), 3.0, device=device))


# ---- snapshots -------------------------------------------------------------------------------------------------------


def payload(buffer: SendBuffer) -> np.ndarray:
    return buffer.data[wire().control_bytes :].view(np.float32)


def test_a_snapshot_is_a_copy() -> None:
    parameters, steps = torch.arange(PARAMETERS, dtype=torch.float32), np.zeros(RANKS, np.uint64)
    first, second = send_buffer(), send_buffer()
    first.fill(message(steps_by_rank=steps), packed(parameters))
    parameters += 1
    steps += np.uint64(1)
    second.fill(message(steps_by_rank=steps), packed(parameters))
    assert first.ready() and second.ready()
    np.testing.assert_array_equal(payload(first), np.arange(PARAMETERS))
    np.testing.assert_array_equal(payload(second), np.arange(PARAMETERS) + 1)
    assert wire().decode(first.data).steps_by_rank.sum() == 0
    assert wire().decode(second.data).steps_by_rank.sum() == RANKS


def test_a_decoded_message_does_not_hang_on_the_receive_buffer() -> None:
    data = encoded(message()).copy()
    decoded = wire().decode(data)
    data[:] = 255
    assert decoded.steps_by_rank.tolist() == list(range(RANKS))


@cuda
def test_a_snapshot_is_taken_on_a_stream_of_its_own_before_the_next_update() -> None:
    """`fill` returns while the GPU is busy; the copy is of the parameters as they were, not as the next kernel left
    them; and it lies in pinned memory."""
    device, num_parameters = torch.device("cuda"), 4_000_000
    large = wire(parameters=num_parameters)
    buffer = send_buffer(large, device)
    assert buffer._block.is_pinned()
    parameters = torch.zeros(num_parameters, device=device)
    busy = torch.randn(4096, 4096, device=device)
    for step in range(5):
        for _ in range(20):
            busy = busy @ busy.clamp(-1e-3, 1e-3)
        parameters.fill_(step)
        buffer.fill(message(), packed(parameters))
        was_ready_at_once = buffer.ready()
        parameters.fill_(-1.0)
        while not buffer.ready():
            pass
        assert (buffer.data[large.control_bytes :].view(np.float32) == step).all()
        assert step == 0 or not was_ready_at_once, "fill waited for the GPU"


@cuda
def test_the_mean_has_left_pinned_memory_for_the_gpu_when_mix_returns() -> None:
    """The next model overwrites it, though the GPU may still be busy with what came before."""
    device = torch.device("cuda")
    into = receive_buffer(device)
    blocks = [into._block]
    parameters, busy = torch.zeros(PARAMETERS, device=device), torch.randn(4096, 4096, device=device)
    for models in (4, 1):
        parameters.zero_()
        for value in range(1, models + 1):
            assert receive(into, encoded(message(sender=value), torch.full((PARAMETERS,), float(value)))) is None
            into.add(1.0)
            blocks.append(into._block)
        assert all(block.is_pinned() for block in blocks)
        for _ in range(20):
            busy = busy @ busy.clamp(-1e-3, 1e-3)
        into.codec.mix(parameters, own_weight=1.0)
        for block in blocks:
            block.fill_(255)
        expected = sum(range(models + 1)) / (models + 1)
        torch.testing.assert_close(parameters, torch.full((PARAMETERS,), expected, device=device))


def test_models_lie_where_every_instruction_may_take_them() -> None:
    """At a multiple of 64 bytes, as torch's own memory: numpy's begins 16 behind."""
    for _ in range(5):
        assert send_buffer().data.ctypes.data % 64 == 0 and receive_buffer().data.ctypes.data % 64 == 0
