"""Compressed models: the arithmetic against loops over the parameters, refusals, consensus, healing, exchanges in
pairs."""

from __future__ import annotations

import itertools
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pala.comm.base import Packet, Received, Receiver, Transport
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.codecs import BFloat16, Held, Part, TopK
from pala.exchange.gossip.driver import GossipDriver, make_protocol
from pala.exchange.gossip.messages import Kind
from pala.exchange.gossip.models import SendBuffer, TensorModels
from pala.exchange.gossip.state import Rules
from pala.exchange.wire import Format, Message, Refusal
from pala.system import blocks
from support.helpers import slow_but_for
from support.nodes import COMPRESSIONS, CPU, PARAMETERS, RANKS, Node

reproducible = settings(derandomize=True, deadline=None, max_examples=150)

cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: pinned memory and the side stream need one"
)
devices = pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=cuda)], ids=["cpu", "cuda"])


def normal(seed: int, scale: float = 1.0, device: torch.device = CPU) -> torch.Tensor:
    return (scale * torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(seed))).to(device)


def part_of(data: np.ndarray, node: Node) -> dict[int, float]:
    """What a TOP_K message says, read by hand."""
    body = data[node.wire.control_bytes :].tobytes()
    count = len(body) // 8
    return dict(
        zip(struct.unpack(f"<{count}i", body[: 4 * count]), struct.unpack(f"<{count}f", body[4 * count :]), strict=True)
    )


def part(node: Node, indices: list[int], values: list[float]) -> np.ndarray:
    """A TOP_K message, written by hand."""
    data = np.zeros(node.wire.control_bytes, np.uint8)
    steps = np.zeros(RANKS, np.uint64)
    node.wire.encode(Message(Kind.MODEL, 3, 0, 1.0, Stop.NONE, steps, Format.TOP_K), data)
    body = np.array(indices, "<i4").tobytes() + np.array(values, "<f4").tobytes()
    return np.concatenate([data, np.frombuffer(body, np.uint8)])


# ---- bfloat16 --------------------------------------------------------------------------------------------------------


def rounded(value: float) -> float:
    """The nearest float with 8 bits of precision, ties to even, by integer arithmetic. For normal numbers."""
    if value == 0:
        return value
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)  # Python's round is half to even


@reproducible
@given(st.lists(st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100), min_size=1, max_size=60))
def test_bfloat16_rounds_to_the_nearest_and_arrives(values) -> None:
    values = [value if abs(value) > 1e-30 else 0.0 for value in values]
    sender = Node(torch.tensor(values), "bfloat16")
    receiver = Node(torch.zeros(len(values)), "bfloat16")
    data = sender.message()
    assert len(data) == sender.wire.control_bytes + 2 * len(values)
    receiver.take_in(data)
    receiver.codec.heal(receiver.parameters)
    assert receiver.parameters.tolist() == [rounded(value) for value in values]


def test_bfloat16_ties_go_to_even() -> None:
    ties = torch.tensor([1 + 1 / 256, 1 + 3 / 256, -1 - 1 / 256, 1 + 1 / 256 + 2**-20])
    receiver = Node(torch.zeros(4), "bfloat16")
    receiver.take_in(Node(ties, "bfloat16").message())
    receiver.codec.heal(receiver.parameters)
    assert receiver.parameters.tolist() == [1.0, 1 + 4 / 256, -1.0, 1 + 2 / 256]


@devices
@pytest.mark.parametrize("block", [blocks._BLOCK, 7])
@pytest.mark.parametrize("num_models", [1, 2, 4])
def test_bfloat16_mixes_the_difference_of_rounded_models(
    num_models: int, block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and in blocks of which the last is shorter."""
    monkeypatch.setattr(blocks, "_BLOCK", block)
    receiver = Node(normal(0, device=device), "bfloat16")
    models = [normal(seed + 1) for seed in range(num_models)]
    for _ in range(3):
        own = receiver.parameters.tolist()
        for model in models:
            receiver.take_in(Node(model, "bfloat16").message())
        fraction = num_models / (1 + num_models)
        distance = receiver.mix()
        moves = [sum(rounded(float(m[i])) for m in models) / num_models - rounded(own[i]) for i in range(PARAMETERS)]
        expected = [x + fraction * move for x, move in zip(own, moves, strict=True)]
        np.testing.assert_allclose(receiver.parameters.cpu().numpy(), expected, rtol=1e-5, atol=1e-6)
        assert float(distance) == pytest.approx(math.sqrt(sum(move**2 for move in moves)), rel=1e-4)


def test_small_steps_are_not_lost_in_rounding() -> None:
    """Two ranks learn the same and mix after each step. Steps are a hundredth of the rounded grid's width; mixing
    rounded models plainly would hold both at the grid."""
    first, second = Node(torch.full((PARAMETERS,), 0.05), "bfloat16"), Node(torch.full((PARAMETERS,), 0.05), "bfloat16")
    step, steps = 2.4e-6, 500
    plain = 0.05
    for _ in range(steps):
        for node in (first, second):
            node.parameters += step
        messages = first.message(), second.message()
        first.take_in(messages[1])
        second.take_in(messages[0])
        for node in (first, second):
            node.mix()
        plain = (plain + step + rounded(plain + step)) / 2
    for node in (first, second):
        np.testing.assert_allclose(node.parameters.numpy(), 0.05 + steps * step, atol=2e-6)
    assert abs(plain - 0.05) < 0.2 * steps * step, "the naive rule would do as well"


def test_bfloat16_exchanges_keep_the_mean_and_bring_models_together() -> None:
    first, second = Node(normal(0), "bfloat16"), Node(normal(1), "bfloat16")
    mean = (first.parameters + second.parameters) / 2
    for _ in range(30):
        messages = first.message(), second.message()
        first.take_in(messages[1])
        second.take_in(messages[0])
        for node in (first, second):
            node.mix()
    torch.testing.assert_close((first.parameters + second.parameters) / 2, mean, atol=1e-6, rtol=0)
    assert bool(((first.parameters - second.parameters).abs() <= mean.abs() * 2**-7 + 1e-3).all())


# ---- top_k: what is sent ---------------------------------------------------------------------------------------------


@devices
def test_top_k_sends_what_changed_most_since_it_was_last_sent(device: torch.device) -> None:
    node = Node(normal(0, device=device), "top_k", fraction=0.2)
    most, reference = math.ceil(0.2 * PARAMETERS), node.parameters.tolist()
    random = torch.Generator().manual_seed(1)
    for _ in range(20):
        node.parameters += torch.randn(PARAMETERS, generator=random).to(device)
        now = node.parameters.tolist()
        largest = sorted(range(PARAMETERS), key=lambda i: -abs(np.float32(now[i]) - np.float32(reference[i])))[:most]
        sent = part_of(node.message(), node)
        assert list(sent) == sorted(largest)
        for i, value in sent.items():
            assert value == now[i]
            reference[i] = now[i]


def test_nothing_that_did_not_change_is_sent() -> None:
    node = Node(normal(0), "top_k", fraction=0.4)
    assert part_of(node.message(), node) == {}
    node.parameters[7] += 1
    assert list(part_of(node.message(), node)) == [7]
    assert part_of(node.message(), node) == {}


def test_equal_changes_are_never_too_many_and_all_are_sent_in_time() -> None:
    node = Node(torch.zeros(PARAMETERS), "top_k", fraction=0.1)
    node.parameters += 1
    sent = [list(part_of(node.message(), node)) for _ in range(9)]
    assert max(len(part) for part in sent) == math.ceil(0.1 * PARAMETERS)
    assert sorted(itertools.chain(*sent)) == list(range(PARAMETERS))


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.3])
def test_the_threshold_of_a_large_model_is_near_the_true_one(fraction: float) -> None:
    size, random = 200_000, torch.Generator().manual_seed(0)
    node, twin = (Node(torch.zeros(size), "top_k", fraction=fraction) for _ in range(2))
    change = torch.randn(size, generator=random) * torch.rand(size, generator=random) ** 3
    node.parameters += change
    twin.parameters += change
    data = node.message()
    most, sent = math.ceil(fraction * size), part_of(data, node)
    assert (data == twin.message()).all(), "the choice is not deterministic"
    assert 0.3 * most < len(sent) <= most
    assert len(sent) > 0.85 * most or fraction < 0.05
    largest = set(change.abs().topk(most).indices.tolist())
    assert set(sent) <= largest, "something was sent before something that changed more"


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("places", [slice(3, 4), slice(PARAMETERS // 2, None), slice(None)])
def test_a_part_of_a_model_that_is_not_finite_is_refused(poison: float, places: slice) -> None:
    """A rank that believes itself healthy: what is broken is sent first, and peers see it."""
    node = Node(normal(0), "top_k", fraction=0.1)
    node.parameters += normal(1, 0.01)
    node.parameters[places] = poison
    refusal = Node(normal(0), "top_k", fraction=0.1).receive(node.message())
    assert isinstance(refusal, Refusal) and "NaN or infinity" in refusal.reason
    node.parameters.copy_(normal(2))  # healed
    for _ in range(15):
        last = node.message()
    assert part_of(last, node) == {}, "the poison is still in the reference"


# ---- top_k: what is taken in -----------------------------------------------------------------------------------------


parts = st.lists(
    st.dictionaries(st.integers(0, PARAMETERS - 1), st.floats(-100, 100, width=32), max_size=5)
    | st.lists(st.floats(-100, 100, width=32), min_size=PARAMETERS, max_size=PARAMETERS),
    max_size=5,
)


@pytest.mark.slow
@devices
@settings(reproducible, max_examples=60)
@given(rounds=st.lists(parts, min_size=1, max_size=4))
def test_each_parameter_is_mixed_with_what_came_of_it(rounds, device: torch.device) -> None:
    node = Node(normal(0, device=device), "top_k", fraction=0.125)
    for models in rounds:
        own = node.parameters.tolist()
        for model in models:
            if isinstance(model, dict):
                data = part(node, sorted(model), [model[i] for i in sorted(model)])
            else:
                data = Node(torch.tensor(model), "top_k", fraction=0.125).message(whole=True)
            node.take_in(data)
        distance = node.mix()
        squares = 0.0
        for i in range(PARAMETERS):
            came = [m[i] for m in models if not isinstance(m, dict) or i in m]
            assert float(node.parameters[i]) == pytest.approx(
                (own[i] + sum(came)) / (1 + len(came)), rel=1e-5, abs=1e-4
            )
            assert came or float(node.parameters[i]) == own[i]
            squares += (sum(came) / len(came) - own[i]) ** 2 if came else 0.0
        assert float(distance) == pytest.approx(math.sqrt(squares), rel=1e-4, abs=1e-3)


GOOD = ([3, 4, 40], [1.0, 2.0, 3.0])


@devices
@pytest.mark.parametrize(
    ("indices", "values", "reason"),
    [
        ([3, 4, 41], [1.0, 2.0, 3.0], "do not exist"), ([-1, 4, 40], [1.0, 2.0, 3.0], "do not exist"),
        ([3, 4, 2**31 - 1], [1.0, 2.0, 3.0], "do not exist"), ([3, -(2**31), 40], [1.0, 2.0, 3.0], "do not rise"),
        ([3, 3, 40], [1.0, 2.0, 3.0], "do not rise"), ([4, 3, 40], [1.0, 2.0, 3.0], "do not rise"),
        ([3, 77, 40], [1.0, 2.0, 3.0], "do not rise"),
        ([3, 4, 40], [1.0, float("nan"), 3.0], "NaN or infinity"),
        ([3, 4, 40], [1.0, float("inf"), -float("inf")], "NaN or infinity"),
        ([1, 2, 3, 4, 5, 6], [1.0] * 6, "bytes"), ([1, 2], [1.0] * 3, "bytes"), ([1, 2, 3], [1.0] * 2, "bytes"),
    ],
)  # fmt: skip
def test_a_part_with_a_fault_is_refused(indices, values, reason: str, device: torch.device) -> None:
    node = Node(normal(0, device=device), "top_k", fraction=0.1)  # at most 5
    refusal = node.receive(part(node, indices, values))
    assert isinstance(refusal, Refusal) and reason in refusal.reason
    node.take_in(part(node, *GOOD))
    node.mix()
    expected = normal(0)
    for i, value in zip(*GOOD, strict=True):
        expected[i] = (expected[i] + value) / 2
    torch.testing.assert_close(node.parameters.cpu(), expected)


@pytest.mark.parametrize("of", COMPRESSIONS)
@pytest.mark.parametrize("run", COMPRESSIONS)
def test_only_the_formats_of_the_run_are_accepted(of: str, run: str) -> None:
    sender, receiver = Node(normal(0), of), Node(normal(1), run)
    sender.parameters[:3] += 1
    for whole in (False, True):
        data = sender.message(whole)
        decoded = receiver.wire.decode(data)
        is_whole = len(data) == receiver.wire.control_bytes + 4 * PARAMETERS
        allowed = of == run or ({of, run} == {"none", "top_k"} and is_whole)
        assert isinstance(decoded, Message if allowed else Refusal)
        assert allowed or "format" in decoded.reason


@pytest.mark.slow
@settings(reproducible, max_examples=400)
@given(st.sampled_from(COMPRESSIONS), st.data())
def test_any_damage_gives_a_message_or_a_refusal(compression: str, data: st.DataObject) -> None:
    sender, receiver = Node(normal(0), compression), Node(normal(1), compression)
    sender.parameters += normal(2)
    bytes_ = sender.message(data.draw(st.booleans()))
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(bytes_) - 1), st.integers(0, 255)), max_size=4)
    ):
        bytes_[place] = value
    bytes_ = bytes_[: data.draw(st.integers(0, len(bytes_)) | st.just(len(bytes_)))]
    outcome = receiver.receive(bytes_)
    assert isinstance(outcome, (Message, Refusal))
    if isinstance(outcome, Message) and outcome.kind is Kind.MODEL:
        receiver.inbox.add(1.0)
        receiver.mix()
        assert bool(receiver.parameters.isfinite().all())


def test_when_parts_would_be_longer_models_go_whole() -> None:
    for fraction in (0.5, 1.0):
        node = Node(normal(0), "top_k", fraction=fraction)
        node.parameters += 1
        assert isinstance(node.wire.decode(node.message()), Message)
        assert len(node.message()) == node.wire.most_bytes == node.wire.control_bytes + 4 * PARAMETERS


# ---- top_k: many ranks -----------------------------------------------------------------------------------------------


def gossip(nodes: list[Node], updates: int, learn: float = 0.0, whole: bool = True) -> None:
    """Each update, every rank sends to a random other, and all mix what came. `whole`: now and then a whole model."""
    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    every = nodes[0].codec.whole_every
    for update in range(updates):
        for node in nodes:
            node.parameters += learn * torch.randn(PARAMETERS, generator=generator)
        shift = random.integers(1, len(nodes))
        for i, node in enumerate(nodes):
            is_turn = (update + i * every // len(nodes)) % every == 0
            nodes[(i + shift) % len(nodes)].take_in(node.message(whole and is_turn))
        for node in nodes:
            node.mix()


def spread(nodes: list[Node]) -> float:
    models = torch.stack([node.parameters for node in nodes])
    return float((models - models.mean(0)).norm())


@pytest.mark.parametrize("ranks", slow_but_for([2, 3, 8], 3))
@pytest.mark.slow
def test_ranks_that_send_only_parts_come_to_agree(ranks: int) -> None:
    """They begin equal, learn each its own way, and then only gossip. What each parameter still moves halves with each
    message, so that many ranks stop a little apart: whole models, or learning, bring the rest."""
    nodes = [Node(normal(0), "top_k", 0.1, rank=rank, ranks=ranks) for rank in range(ranks)]
    for i, node in enumerate(nodes):
        node.parameters += normal(i + 1)
    apart, mean = spread(nodes), torch.stack([node.parameters for node in nodes]).mean(0)
    gossip(nodes, 600, whole=False)
    assert spread(nodes) < (0.01 if ranks < 8 else 0.15) * apart
    assert float((nodes[0].parameters - mean).norm()) < apart, "they agree on something else"


@pytest.mark.slow
def test_whole_models_reach_what_no_longer_changes() -> None:
    """After a resume each rank's reference is its own model: nothing has changed, and yet they differ."""
    nodes = [Node(normal(i), "top_k", 0.1, rank=i) for i in range(RANKS)]
    apart = spread(nodes)
    gossip(nodes, 600)
    assert spread(nodes) < 1e-4 * apart


@pytest.mark.slow
def test_parts_hold_learning_ranks_together() -> None:
    nodes, loners = ([Node(normal(0), "top_k", 0.1, rank=i) for i in range(RANKS)] for _ in range(2))
    gossip(nodes, 300, learn=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        for node in loners:
            node.parameters += 0.1 * torch.randn(PARAMETERS, generator=generator)
    assert spread(nodes) < 0.5 * spread(loners)


class Posted(Transport):
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, np.ndarray]] = []

    def start(self, receiver: Receiver) -> None:
        pass

    def now_s(self) -> float:
        return 0.0

    def send(self, peer: int, packet: Packet, bulk: bool = False) -> None:
        self.sent.append((peer, packet.data.copy()))


@pytest.mark.parametrize("own_memory", [False, True])
@devices
def test_a_rank_that_is_not_finite_is_healed_by_a_whole_model_only(device: torch.device, own_memory: bool) -> None:
    """By its driver: the part is given back with a request for a whole model, and leaves no trace. `own_memory`: the
    transport receives into memory of its own."""
    node, peer = (Node(normal(seed, device=device), "top_k", rank=seed) for seed in range(2))
    node.parameters[5], node.parameters[6] = float("nan"), float("inf")
    peer.parameters += 1
    protocol = make_protocol(Rules("random", 10))
    posted, models = Posted(), TensorModels(node.parameters, node.codec, node.wire)
    driver = GossipDriver(protocol, protocol.new_state(StepBudget(0, RANKS, 10**9)), posted, models)
    driver.start()

    def deliver(data: np.ndarray) -> None:
        memory = data.copy() if own_memory else driver.memory_for(len(data))
        assert memory is not None
        memory[:] = data
        driver.on_message(Received(1, memory, bulk=True, took_s=0.0))

    deliver(peer.message())
    driver.finish_update(1, healthy=False)
    assert not driver.advance()
    ((to, asked),) = posted.sent
    posted.sent.clear()
    assert to == 1 and node.wire.decode(asked).kind is Kind.ASK_WHOLE and posted.sent == []
    deliver(peer.message(whole=True))
    assert driver.advance() and driver.counts["mixes"] == 1
    torch.testing.assert_close(node.parameters, peer.parameters)
    assert node.wire.decode(posted.sent.pop()[1]).kind is Kind.CREDIT
    deliver(part(node, *GOOD))  # the sum is empty again; it says that it is rank 3's
    assert driver.state.counts["models_refused"] == 1 and len(posted.sent) == 1
    deliver(peer.message(whole=True))
    driver.finish_update(1, healthy=True)
    before = node.parameters.clone()
    assert driver.advance()
    torch.testing.assert_close(node.parameters, (before + peer.parameters) / 2)


@cuda
def test_a_part_is_taken_on_the_device_before_the_next_update() -> None:
    """The copy into pinned memory is of the values as they were, not as the next kernel or tensor left them."""
    device, size = torch.device("cuda"), 1_000_000
    node = Node(torch.zeros(size, device=device), "top_k", fraction=0.05)
    assert isinstance(node.codec, TopK) and node.send._block.is_pinned()
    for step in range(1, 6):
        node.parameters.fill_(step)
        header = Message(Kind.MODEL, 0, 0, 1.0, Stop.NONE, np.zeros(RANKS, np.uint64))
        node.send.fill(header, node.codec.pack(node.parameters, whole=False))
        node.parameters.fill_(-1.0)
        clutter = [torch.full((50_000,), -1.0, device=device) for _ in range(8)]
        while not node.send.ready():
            pass
        sent = part_of(node.send.data, node)
        assert len(sent) == 50_000 and set(sent.values()) == {float(step)} and len(clutter) == 8


# ---- the paired exchange ---------------------------------------------------------------------------------------------


def rounded_as(compression: str, values: torch.Tensor) -> np.ndarray:
    """float64, as they arrive."""
    numbers = [rounded(value) if compression == "bfloat16" else value for value in values.tolist()]
    return np.array(numbers, np.float64)


def paired_node(seed: int, compression: str, device: torch.device = CPU) -> Node:
    """The reference of `top_k` is the same on all ranks; a part holds five parameters."""
    node = Node(normal(0, device=device), compression, rank=seed % RANKS)
    node.parameters += normal(seed + 100, device=device)
    return node


def header(node: Node, kind: Kind = Kind.OFFER) -> Message:
    return Message(kind, node.rank, 1, 1.0, Stop.NONE, np.zeros(node.wire.num_ranks, np.uint64))


def offer_of(node: Node, whole: bool) -> tuple[np.ndarray, Held, list[int]]:
    """(its bytes, what stays with the sender, the parameters that it holds)."""
    node.send.fill(header(node), node.codec.pack(node.parameters, whole))
    while not node.send.ready():
        pass
    data = node.send.data.copy()
    size = node.wire.control_bytes + node.parameters.numel() * (2 if isinstance(node.codec, BFloat16) else 4)
    return data, node.send.held, list(range(PARAMETERS)) if len(data) == size else list(part_of(data, node))


def answer_of(node: Node, part_: Part) -> np.ndarray:
    buffer = SendBuffer(node.wire, node.parameters.device)
    buffer.fill(header(node, Kind.ANSWER), node.codec.pack_part(node.parameters, part_))
    while not buffer.ready():
        pass
    return buffer.data.copy()


@devices
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("num_offers", [1, 3])
def test_offers_pull_by_their_differences_in_what_they_hold(
    compression: str, whole: bool, num_offers: int, device: torch.device
) -> None:
    node, fraction = paired_node(9, compression, device), 1 / (1 + num_offers)
    for measure in (True, False):
        own = node.parameters.clone()
        own_rounded, change, count = rounded_as(compression, own), np.zeros(PARAMETERS), np.zeros(PARAMETERS)
        for seed in range(num_offers):
            peer = paired_node(seed, compression, device)
            theirs, (data, _, held) = rounded_as(compression, peer.parameters), offer_of(peer, whole)
            node.take_in(data)
            change[held] += theirs[held] - own_rounded[held]
            count[held] += 1
            assert len(held) == (5 if compression == "top_k" and not whole else PARAMETERS)
        distance = node.codec.pull(node.parameters, fraction, measure)
        expected = own.cpu().numpy().astype(np.float64) + fraction * change
        np.testing.assert_allclose(node.parameters.cpu().numpy(), expected, atol=2e-6)
        assert (distance is None) != measure
        mean = change / np.maximum(count, 1)  # of what came of each parameter
        assert distance is None or float(distance) == pytest.approx(np.linalg.norm(mean), rel=1e-4)


@devices
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_an_answer_moves_by_its_difference_from_the_offer(
    compression: str, in_place: bool, whole: bool, device: torch.device
) -> None:
    node, peer = (paired_node(seed, compression, device) for seed in (1, 2))
    offered = rounded_as(compression, node.parameters)
    data, held_offer, held = offer_of(node, whole)
    assert isinstance(peer.receive(data), Message)
    node.parameters += 0.1 * normal(3, device=device)  # it has learned since
    before = node.parameters.cpu().numpy().astype(np.float64)
    answer = answer_of(peer, peer.codec.staged_part())
    assert len(answer) == len(data)
    assert isinstance(node.receive(answer), Message) and node.codec.check_answer(held_offer) is None
    change = node.codec.difference(held_offer, in_place)
    node.receive(Node(normal(5), compression, rank=3).message(whole=True))  # what comes next leaves it as it is
    node.codec.move(node.parameters, change, 0.25)
    expected = before.copy()
    expected[held] += 0.25 * (rounded_as(compression, peer.parameters) - offered)[held]
    np.testing.assert_allclose(node.parameters.cpu().numpy(), expected, atol=1e-6)
    left = sorted(set(range(PARAMETERS)) - set(held))
    assert (node.parameters.cpu().numpy()[left] == before[left].astype(np.float32)).all()


def test_answers_that_wait_have_memory_of_their_own_and_bfloat16s_is_used_again() -> None:
    node = paired_node(1, "bfloat16")
    _, offer, _ = offer_of(node, True)
    places, expected = list[int](), node.parameters.clone()
    for _ in range(3):
        changes = []
        for seed in (2, 3):  # two answers come in one update
            peer = paired_node(seed, "bfloat16")
            assert isinstance(node.receive(answer_of(peer, None)), Message)
            changes.append(node.codec.difference(offer, in_place=False))
            expected += 0.25 * changes[-1].values.clone()
        assert changes[0].values.data_ptr() != changes[1].values.data_ptr()
        for change in changes:
            node.codec.move(node.parameters, change, 0.25)
        places.append(changes[1].values.data_ptr())
    torch.testing.assert_close(node.parameters, expected)
    assert places[2] in places[:2] or changes[0].values.data_ptr() in places[:2]


@settings(reproducible, max_examples=60)
@given(
    compression=st.sampled_from(COMPRESSIONS), whole=st.booleans(), scale=st.sampled_from([1e-3, 1.0, 1e3]),
    fraction=st.floats(0.05, 0.5), seed=st.integers(0, 1000),
)  # fmt: skip
def test_an_exchange_keeps_the_sum_of_the_two_models(
    compression: str, whole: bool, scale: float, fraction: float, seed: int
) -> None:
    """To rounding, whatever both learn between offer, answer and move."""
    first, second = (paired_node(seed + rank, compression) for rank in range(2))
    for node in (first, second):
        node.parameters *= scale
    learned = [scale * normal(seed + 7 + i) for i in range(2)]
    total = sum(x.double() for x in (first.parameters, second.parameters, *learned))
    apart = float((first.parameters - second.parameters).norm())
    data, offer, _ = offer_of(first, whole)
    second.take_in(data)
    answer = answer_of(second, second.codec.staged_part())
    second.codec.pull(second.parameters, fraction, measure=False)
    second.parameters += learned[1]
    first.parameters += learned[0]
    assert isinstance(first.receive(answer), Message)
    first.codec.move(first.parameters, first.codec.difference(offer, in_place=True), fraction)
    torch.testing.assert_close(first.parameters.double() + second.parameters, total, atol=2e-6 * scale, rtol=1e-6)
    closer = first.parameters - learned[0] - (second.parameters - learned[1])
    assert float(closer.norm()) < apart, "they did not come closer"


@pytest.mark.parametrize(
    ("indices", "fits"), [([3, 4, 40], True), ([3, 4, 39], False), ([3, 4], False), ([3, 4, 5, 40], False), ([], False)]
)
def test_an_answer_with_other_parameters_than_the_offer_is_refused(indices: list[int], fits: bool) -> None:
    node = Node(normal(0), "top_k", fraction=0.1)
    node.parameters[[3, 4, 40]] += 1
    _, offer, held = offer_of(node, whole=False)
    assert held == [3, 4, 40]
    assert isinstance(node.receive(part(node, indices, [1.0] * len(indices))), Message)
    refusal = node.codec.check_answer(offer)
    assert (refusal is None) == fits
    assert fits or (refusal is not None and "other parameters than the offer" in refusal.reason)


@pytest.mark.parametrize("whole", [True, False])
def test_an_answer_is_whole_only_if_the_offer_was(whole: bool) -> None:
    node, peer = (paired_node(seed, "top_k") for seed in (1, 2))
    _, offer, _ = offer_of(node, whole)
    node.receive(peer.message(whole=not whole))
    assert isinstance(node.codec.check_answer(offer), Refusal)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_two_drivers_exchange_as_the_formula_says(compression: str) -> None:
    """From an offer to the move, by messages alone; a second answer to the same offer, and a forged one, change
    nothing."""
    nodes = [paired_node(rank, compression) for rank in range(2)]
    posts = [Posted(), Posted()]
    drivers = []
    for node, posted in zip(nodes, posts, strict=True):
        protocol = make_protocol(Rules("ring", 10, whole_every=node.codec.whole_every, mixing="paired"))
        state = protocol.new_state(StepBudget(node.rank, RANKS, 10**9))
        drivers.append(GossipDriver(protocol, state, posted, TensorModels(node.parameters, node.codec, node.wire)))
        drivers[-1].start()

    def update(rank: int) -> None:
        drivers[rank].finish_update(1, healthy=True)
        assert drivers[rank].advance()

    def deliver(data: np.ndarray, source: int, receiver: int) -> None:
        memory = drivers[receiver].memory_for(len(data))
        assert memory is not None
        memory[:] = data
        drivers[receiver].on_message(Received(source, memory, bulk=True, took_s=0.0))

    first, second = (node.parameters.clone() for node in nodes)
    difference = rounded_as(compression, second) - rounded_as(compression, first)
    update(0)
    ((to, offer),) = posts[0].sent
    held = list(part_of(offer, nodes[0])) if nodes[0].wire.decode(offer).format is Format.TOP_K else range(PARAMETERS)
    moves = np.zeros(PARAMETERS)
    moves[list(held)] = 0.5 * difference[list(held)]
    assert to == 1
    deliver(offer, 0, 1)
    assert nodes[1].parameters.equal(second), "before the end of its update"
    update(1)
    (to, answer), *_ = posts[1].sent
    assert to == 0
    np.testing.assert_allclose(nodes[1].parameters.numpy(), second.numpy() - moves, atol=2e-6)
    for _ in range(2):
        deliver(answer, 1, 0)
    assert nodes[0].parameters.equal(first)
    update(0)
    np.testing.assert_allclose(nodes[0].parameters.numpy(), first.numpy() + moves, atol=2e-6)
    deliver(answer, 1, 0)
    assert drivers[0].state.counts["models_received"] == 1 and len(posts[0].sent) == 2
