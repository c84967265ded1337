"""Hostile bytes from both sources: messages from peers, and files. They are taken as what they are, or refused cleanly.

`PALA_FUZZ_TIMES=30 python -m pytest -m "" --timeout 0 -k "fuzz or any_messages or any_bytes_are" tests` tries so many
times as many, about 95,000, new ones each time; without it each test tries the same ones every time.
"""

from __future__ import annotations

import gzip
import json
import math
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pala.comm.base import Packet, Received, Receiver, Transport
from pala.config import ExchangeConfig
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.codecs import make_codec
from pala.exchange.gossip.driver import GossipDriver, make_protocol
from pala.exchange.gossip.messages import WITH_MODEL, WITHOUT_MODEL, Kind, SendModel, gossip_sizes
from pala.exchange.gossip.models import TensorModels
from pala.exchange.gossip.state import Rules
from pala.exchange.wire import Format, Message, Refusal, Wire
from pala.lab.compare.collect import load
from pala.lab.compare.plan import Plan
from pala.report import plot
from pala.report.curves import curve_of
from pala.run import checkpoint
from pala.run.metrics import metrics_path
from pala.run.view import RunView
from pala.system.errors import PalaError
from support.checkpoints import file_of, load_state, make_state, same
from support.comparisons import GAME, plan_of
from support.comparisons import make_run as make_compared_run
from support.fuzzing import TIMES, damaged, damages, fuzz
from support.helpers import memory_growth_below, slow_but_for
from support.nodes import COMPRESSIONS, PARAMETERS, RANKS, Node

MOST_GROWTH_KIB = (3000 if TIMES else 300) << 10  # inputs have a few hundred kilobytes; Hypothesis keeps much of all


@pytest.fixture(autouse=True)
def neither_unpickling_nor_much_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, never)
    with memory_growth_below(MOST_GROWTH_KIB):
        yield


# ---- messages --------------------------------------------------------------------------------------------------------

HEADER = "<4sHBBBxxxIIQQdQ"
FIELDS = ["magic", "version", "kind", "format", "stop", "sender", "ranks", "round", "signature", "weight", "parameters"]
CONTROL = 128
own = torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(0))


def extremes(bits: int) -> st.SearchStrategy[int]:
    middle = st.sampled_from([1, 2, 3, 4, RANKS - 1, RANKS, RANKS + 1, PARAMETERS, PARAMETERS + 1])
    return (
        st.sampled_from([0, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1]) | middle | st.integers(0, 2**bits - 1)
    )


weights = st.sampled_from([0.0, -0.0, 5e-324, 1.0, RANKS * (1 + 1e-9), RANKS * (1 + 3e-9), 1e308, -1.0]) | st.floats()
changed_fields = st.one_of(
    st.tuples(st.just("magic"), st.binary(min_size=4, max_size=4)),
    st.tuples(st.just("version"), extremes(16)),
    st.tuples(st.sampled_from(["kind", "format", "stop"]), extremes(8)),
    st.tuples(st.sampled_from(["sender", "ranks"]), extremes(32)),
    st.tuples(st.sampled_from(["round", "signature", "parameters"]), extremes(64)),
    st.tuples(st.just("weight"), weights),
)
special = st.sampled_from([np.nan, np.inf, -np.inf, 3.4028235e38, -3.4028235e38, 1e-45, -0.0])
values = st.lists(special | st.floats(width=32), max_size=PARAMETERS + 1)
indices = st.one_of(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8),
    st.lists(st.integers(-1, PARAMETERS), max_size=8),
    st.lists(st.integers(0, PARAMETERS - 1), max_size=8).map(sorted),
    st.lists(st.integers(0, PARAMETERS - 1), max_size=8, unique=True).map(sorted),
)


def with_fields(data: bytes, changes: dict[str, Any]) -> bytes:
    fields = dict(zip(FIELDS, struct.unpack_from(HEADER, data), strict=True)) | changes
    return struct.pack(HEADER, *fields.values()) + data[struct.calcsize(HEADER) :]


@st.composite
def messages(draw: st.DrawFn, valid: dict[str, bytes]) -> bytes:
    """Noise, or a message with other bytes, fields, floats or indices, which then may be valid or not."""
    kinds = ["noise", "bytes", "fields", "counters", "floats", "indices", "indices", "fields and bytes"]
    how = draw(st.sampled_from(kinds))
    if how == "noise":
        return draw(st.binary(max_size=400))
    data = valid[draw(st.sampled_from(sorted(valid)))]
    if how == "indices":
        chosen = draw(indices)
        numbers = draw(st.lists(st.floats(-2, 2, width=32) | special, min_size=len(chosen), max_size=len(chosen)))
        data = with_fields(data[:CONTROL], {"kind": Kind.MODEL, "format": Format.TOP_K})
        return data + np.array(chosen, "<i4").tobytes() + np.array(numbers, "<f4").tobytes()
    if how == "floats":
        numbers = np.array(draw(values), "<f4").tobytes()
        at = CONTROL + 4 * draw(st.integers(0, PARAMETERS))
        return (data[:at] + numbers + data[at + len(numbers) :])[: draw(st.sampled_from([len(data), None]))]
    if how == "counters":
        steps = draw(st.lists(extremes(64) | extremes(49), min_size=1, max_size=RANKS))
        return damaged(data, [("write", 64 / len(data), struct.pack(f"<{len(steps)}Q", *steps))])
    if "fields" in how:
        data = with_fields(data, dict(draw(st.lists(changed_fields, min_size=1, max_size=2))))
    return damaged(data, draw(damages)) if "bytes" in how else data


def is_valid(data: bytes, node: Node) -> bool:
    """What the wire's tables say of these bytes, written a second time."""
    if len(data) < CONTROL:
        return False
    of = dict(zip(FIELDS, struct.unpack_from(HEADER, data), strict=True))
    expected = {
        "magic": b"PALA",
        "version": 2,
        "ranks": RANKS,
        "signature": SIGNATURE_ON_WIRE,
        "parameters": PARAMETERS,
    }
    if any(of[name] != value for name, value in expected.items()):
        return False
    if of["kind"] not in range(1, 12) or of["stop"] not in range(5) or of["sender"] >= RANKS:
        return False
    if not 0 < of["weight"] <= RANKS * (1 + 1e-9):
        return False
    if max(struct.unpack_from(f"<{RANKS}Q", data, 64)) > 2**48:
        return False
    body = data[CONTROL:]
    if of["kind"] not in (1, 5, 6):
        return of["format"] == 1 and body == b""
    if of["format"] not in node.codec.sizes or len(body) not in node.codec.sizes[Format(of["format"])]:
        return False
    if of["format"] == 1:
        return bool(np.isfinite(np.frombuffer(body, "<f4")).all())
    if of["format"] == 2:
        return bool(np.isfinite((np.frombuffer(body, "<u2").astype("<u4") << 16).view("<f4")).all())
    rising = np.frombuffer(body[: len(body) // 2], "<i4").astype(np.int64)
    within = all(0 <= index < PARAMETERS for index in rising) and bool((np.diff(rising) > 0).all())
    return within and bool(np.isfinite(np.frombuffer(body[len(body) // 2 :], "<f4")).all())


SIGNATURE_ON_WIRE = 0xFEDCBA9876543210


def offer(node: Node, data: bytes) -> Message | Refusal:
    """As the transport and the driver do: into the one buffer, then the header, then the check, then the sum."""
    if len(data) > len(node.inbox.data):
        return node.wire.decode(np.frombuffer(data, np.uint8))
    node.inbox.data[: len(data)] = np.frombuffer(data, np.uint8)
    message = node.wire.decode(node.inbox.data[: len(data)])
    if isinstance(message, Message) and message.kind in WITH_MODEL:
        refusal = node.inbox.check(message, len(data))
        if refusal is not None:
            return refusal
        node.inbox.add(1.0)
    return message


def valid_messages(compression: str) -> dict[str, bytes]:
    sender = Node(own, compression)
    sender.parameters += 1
    found = {"whole": sender.message(whole=True).tobytes(), "part": sender.message().tobytes()}
    found |= {kind.name: with_fields(found["whole"], {"kind": kind}) for kind in (Kind.OFFER, Kind.ANSWER)}
    steps = np.arange(RANKS, dtype=np.uint64)
    for kind in WITHOUT_MODEL:
        found[kind.name] = sender.wire.encoded(Message(kind, 1, 2, 1.0, 0, steps)).tobytes()
    return found


@pytest.mark.parametrize("compression", slow_but_for(COMPRESSIONS, "none"))
def test_a_message_is_taken_as_it_is_or_refused_without_a_trace(compression: str) -> None:
    """A twin that never saw the refused message has the same model, to the last bit, after the next mix."""
    valid = valid_messages(compression)
    seen: dict[bool, int] = {True: 0, False: 0}

    @fuzz(250)
    @given(messages(valid), st.booleans())
    def check(data: bytes, first: bool) -> None:
        node, twin = Node(own, compression), Node(own, compression)
        before = [] if first else ["whole"]
        for name in before:
            assert isinstance(offer(node, valid[name]), Message) and isinstance(offer(twin, valid[name]), Message)
        outcome = offer(node, data)
        seen[isinstance(outcome, Message)] += 1
        assert isinstance(outcome, Message) == is_valid(data, node), outcome
        assert node.parameters.numpy().tobytes() == own.numpy().tobytes()
        if isinstance(outcome, Message):
            again = np.zeros(CONTROL, np.uint8)
            node.wire.encode(outcome, again)
            assert struct.unpack_from(HEADER, again.tobytes()) == struct.unpack_from(HEADER, data)
            assert again.tobytes()[64 : 64 + 8 * RANKS] == data[64 : 64 + 8 * RANKS]
            return
        assert outcome.reason
        for one in (node, twin):
            assert isinstance(offer(one, valid["whole"]), Message)
            one.mix()
        assert node.parameters.numpy().tobytes() == twin.parameters.numpy().tobytes()

    check()
    assert min(seen.values()) > 0.03 * sum(seen.values()), f"too much of one kind: {seen}"


# ---- the protocol behind them ----------------------------------------------------------------------------------------


class Outbox(Transport):
    """Keeps what is sent until a test takes it, and has a clock that the test moves."""

    def __init__(self) -> None:
        self.clock_s, self.sent = 0.0, list[tuple[int, Packet, bool]]()

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def now_s(self) -> float:
        return self.clock_s

    def send(self, peer: int, packet: Packet, bulk: bool = False) -> None:
        packet.pending += 1
        self.sent.append((peer, packet, bulk))

    def take(self, peers: set[int]) -> None:
        """What is on its way to these has left."""
        for peer, packet, _ in self.sent:
            packet.pending -= peer in peers
        self.sent = [entry for entry in self.sent if entry[0] not in peers]


class Gossiping:
    """Rank 0 of five with everything but a network, as training drives it."""

    def __init__(self, mixing: str, compression: str, max_staleness: int) -> None:
        config = ExchangeConfig(mixing=mixing, compression=compression, top_k_fraction=0.1)  # type: ignore[arg-type]
        self.parameters, self.transport = own.clone(), Outbox()
        codec = make_codec(config, self.parameters)
        protocol = make_protocol(Rules("random", max_staleness, whole_every=codec.whole_every, mixing=mixing))
        self.wire = Wire(RANKS, PARAMETERS, SIGNATURE_ON_WIRE, gossip_sizes(codec.sizes, protocol.kinds))
        self.models = TensorModels(self.parameters, codec, self.wire)
        self.state = protocol.new_state(StepBudget(0, RANKS, 10**6))
        self.complaints: list[str] = []
        self.driver = GossipDriver(protocol, self.state, self.transport, self.models, report=self.complaints.append)
        self.driver.start()
        self.waits = False

    def go_on(self) -> None:
        """An update, or what follows from what came while it waits."""
        if not self.waits:
            self.driver.finish_update(1, bool(self.parameters.isfinite().all()))
        self.waits = not self.driver.advance()

    @property
    def refused(self) -> int:
        counts = self.driver.counts + self.state.counts
        return counts["models_refused"] + counts["models_stale"]

    def hear(self, source: int, data: bytes, bulk: bool, took_s: float, late: bool) -> None:
        block = self.models.memory_for(len(data)) if bulk else None
        received = np.frombuffer(data, np.uint8).copy()
        if block is not None:
            block[:] = received
            received = block
        message, before = self.wire.decode(received), self.refused
        self.driver.on_message(Received(source, received, bulk, took_s, late))
        if isinstance(message, Refusal) or message.sender != source:
            assert self.refused > before, "a refusal that nobody counts"

    def check(self) -> None:
        """What any messages, in any order, must leave as it is."""
        assert len(self.driver.snapshots) <= 2 + 6 * RANKS, "memory grows"
        assert len(self.transport.sent) <= 2 + 20 * RANKS, "what is sent piles up"
        assert len(self.state.to_mix) < RANKS and len(self.state.owed) <= 2 * RANKS
        assert len(self.complaints) <= RANKS
        assert 0 < self.state.weight < math.inf


def test_who_takes_nothing_may_leave_all_the_same() -> None:
    node = Gossiping("uniform", "none", max_staleness=1)
    node.go_on()  # how long an update takes says what is long
    model = Message(Kind.MODEL, 0, 1, 1.0, Stop.NONE, node.state.budget.steps_by_rank)
    while not node.driver._takes_nothing(1):
        node.transport.clock_s += 1e6
        node.driver._send_model(SendModel(model, (1,), whole=True))
    leave = gossip_messages(paired=False, compression="none")["LEAVE"]
    node.hear(1, leave, bulk=False, took_s=0.0, late=False)
    assert 1 not in node.state.living and node.refused == 0


def gossip_messages(paired: bool, compression: str) -> dict[str, bytes]:
    """One of each kind, from rank 1."""
    sender = Node(own + 1, compression)
    whole, part = sender.message(whole=True).tobytes(), sender.message().tobytes()
    found = {}
    for kind in ("OFFER", "ANSWER") if paired else ("MODEL",):
        weight = 0.5 if kind == "ANSWER" else 1.0
        fields = {"kind": Kind[kind], "sender": 1, "round": 1, "weight": weight}
        found |= {f"{kind} {size}": with_fields(data, fields) for size, data in (("whole", whole), ("part", part))}
    for kind in WITHOUT_MODEL:
        found[kind.name] = sender.wire.encoded(Message(kind, 1, 1, 1.0, 0, np.zeros(RANKS, np.uint64))).tobytes()
    return found


@st.composite
def sequences(draw: st.DrawFn, valid: dict[str, bytes]) -> list[tuple[Any, ...]]:
    """What happens to a rank: updates, time, deaths, messages that leave, and ones that come, most of them of some use
    but at the wrong time, some damaged."""
    peers, rounds = st.integers(1, RANKS - 1), st.integers(0, 6)
    names = [name for name in sorted(valid) if name != "STOP"] * 4 + ["STOP"]

    def message() -> tuple[Any, ...]:
        name, sender = draw(st.sampled_from(names)), draw(peers)
        data = with_fields(valid[name], {"sender": sender, "round": draw(rounds)})
        bulk, took_s, late = len(data) > CONTROL, 0.0, False
        if draw(st.integers(0, 3)) == 0:
            data = draw(messages(valid))
            claimed = data[16] % RANKS if len(data) > 16 else 0
            sender = draw(st.sampled_from([sender, claimed or sender]))  # no transport brings a rank its own messages
            bulk = draw(st.booleans())
        elif draw(st.integers(0, 5)) == 0:
            took_s, late = draw(st.sampled_from([(0.0, True), (100.0, True), (100.0, False)]))
        return "message", sender, data, bulk, took_s, late

    happenings = []
    for _ in range(draw(st.integers(1, 25))):
        how = draw(st.sampled_from(["message"] * 6 + ["continue"] * 4 + ["take", "time", "death"]))
        if how == "message":
            happenings.append(message())
        else:
            happenings.append((how, draw(peers), draw(st.sampled_from([0.1, 1.0, 3.0, 6.0, 100.0]))))
    return happenings


@pytest.mark.parametrize("compression", slow_but_for(COMPRESSIONS, "none"))
@pytest.mark.parametrize("mixing", ["uniform", "push_sum", "paired"])
@pytest.mark.slow
def test_any_sequence_of_messages_ends_in_refusals(mixing: str, compression: str) -> None:
    if (mixing, compression) == ("push_sum", "top_k"):
        pytest.skip("not allowed together")
    valid = gossip_messages(mixing == "paired", compression)

    @fuzz(40)
    @given(sequences(valid), st.sampled_from([0, 1, 10]), st.booleans())
    def check(happenings: list[tuple[Any, ...]], max_staleness: int, taken: bool) -> None:
        node = Gossiping(mixing, compression, max_staleness)
        for how, *facts in happenings:
            if how == "message":
                node.hear(*facts)
            elif how == "continue":
                node.go_on()
            elif how == "take":
                node.transport.take({facts[0]})
            elif how == "death":
                node.driver.on_death(facts[0])
            else:
                node.transport.clock_s += facts[1]
                node.driver.on_tick()
            if taken:
                node.transport.take(set(range(RANKS)))
            node.check()
        node.driver.end(Stop.BUDGET)
        node.driver.finish()

    check()


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("mixing", slow_but_for(["uniform", "push_sum", "paired"], "uniform"))
@pytest.mark.slow
def test_a_flood_of_messages_takes_no_memory(mixing: str, taken: bool) -> None:
    """From a peer that waits for nothing, and takes what is sent to it, or nothing."""
    valid, node = gossip_messages(mixing == "paired", "none"), Gossiping(mixing, "none", 0)
    names = [name for name in sorted(valid) if name != "STOP"]
    for number in range(3000):
        data = valid[names[number % 7 % len(names)]] if number % 5 else bytes(len(valid[names[0]]))
        data = with_fields(data, {"round": number // 10}) if number % 5 else data
        node.hear(1, data, len(data) > CONTROL, 0.0, False)
        node.go_on()
        node.transport.clock_s += 0.1
        node.driver.on_tick()
        if taken:
            node.transport.take({1})
        node.transport.take({2, 3, 4})
        node.check()


def test_a_second_model_on_one_credit_is_refused() -> None:
    valid, node = gossip_messages(False, "none"), Gossiping("uniform", "none", 10)
    for _ in range(3):
        node.hear(1, valid["MODEL whole"], True, 0.0, False)
    assert (node.state.counts["models_received"], node.refused) == (1, 2)
    node.go_on()
    torch.testing.assert_close(node.parameters, own + 0.5)


def test_an_answer_moves_a_rank_by_no_more_than_half() -> None:
    valid, node = gossip_messages(True, "none"), Gossiping("paired", "none", 10)
    node.go_on()
    ((peer, _, _),) = node.transport.sent
    answer = with_fields(valid["ANSWER whole"], {"sender": peer, "weight": 4.0})
    node.hear(peer, answer, True, 0.0, False)
    node.go_on()
    assert node.refused == 1 and node.parameters.equal(own)


@pytest.mark.parametrize(
    ("mixing", "kind"), [("uniform", Kind.OFFER), ("uniform", Kind.ANSWER), ("paired", Kind.MODEL)]
)
def test_a_model_of_another_mixing_gives_its_credit_back(mixing: str, kind: Kind) -> None:
    """Else its sender would wait for that forever."""
    name = "OFFER whole" if mixing == "paired" else "MODEL whole"
    data = with_fields(gossip_messages(mixing == "paired", "none")[name], {"kind": kind})
    node = Gossiping(mixing, "none", 10)
    node.hear(1, data, True, 0.0, False)
    ((peer, packet, _),) = node.transport.sent
    reply = node.wire.decode(packet.data)
    assert node.refused == 1 and peer == 1 and isinstance(reply, Message) and reply.kind is Kind.CREDIT


# ---- files -----------------------------------------------------------------------------------------------------------


odd_numbers = st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63, 2**64, 2**200, 1.5, 1e308, True, None, "1", [], {}])


@st.composite
def files(draw: st.DrawFn, whole: bytes) -> bytes:
    """Noise, a file with other bytes, or one whose header has another length."""
    how = draw(st.sampled_from(["noise", "bytes", "bytes", "bytes", "length"]))
    if how == "noise":
        return draw(st.binary(max_size=300))
    if how == "bytes":
        return damaged(whole, draw(damages))
    length = draw(st.sampled_from([2**64 - 1, 2**63, 2**40, len(whole), len(whole) - 8]) | extremes(64))
    return length.to_bytes(8, "little") + whole[8:]


@pytest.mark.slow
def test_a_checkpoint_is_read_as_it_was_or_refused(tmp_path: Path) -> None:
    state, file = make_state(0, 2), file_of(tmp_path)
    checkpoint.save_rank(tmp_path, state)
    whole = file.read_bytes()

    @fuzz(400)
    @given(files(whole))
    def check(data: bytes) -> None:
        file.write_bytes(data)
        try:
            read = load_state(tmp_path)
        except PalaError as error:
            assert str(file) in str(error)
            return
        assert same(read, state)

    check()


def test_a_damaged_checkpoint_never_hides_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for fill in (1.0, 2.0):
        checkpoint.save_rank(tmp_path, make_state(0, 2, fill=fill))
    file = file_of(tmp_path)
    whole = file.read_bytes()

    @fuzz(100)
    @given(files(whole))
    def check(data: bytes) -> None:
        file.write_bytes(data)
        read = load_state(tmp_path)
        is_new = same(read, make_state(0, 2, fill=2.0))
        assert is_new or same(read, make_state(0, 2, fill=1.0))
        assert is_new != ("The one before it is used." in capsys.readouterr().err)

    check()


@pytest.mark.slow
def test_a_policy_is_read_as_it_was_or_refused(tmp_path: Path) -> None:
    file, named = tmp_path / "policy.safetensors", {"weight": torch.ones(2, 3), "bias": torch.arange(2.0)}
    checkpoint.save_policy(file, named, {"global_steps": 5, "config": {"a": 1}})
    whole = file.read_bytes()

    @fuzz(250)
    @given(files(whole))
    def check(data: bytes) -> None:
        file.write_bytes(data)
        try:
            read, header = checkpoint.load_policy(file)
        except PalaError as error:
            assert str(file) in str(error)
            return
        assert header["global_steps"] == 5 and read.keys() == named.keys()
        assert all(read[name].equal(tensor) for name, tensor in named.items())

    check()


# ---- records and metrics ---------------------------------------------------------------------------------------------

odd_texts = st.sampled_from(["", "completed", "\0", "\ud800", "x" * 3000, "ALE/Pong-v5", "a:b-v0"]) | st.text(
    max_size=4
)
odd_floats = st.sampled_from([math.nan, math.inf, -math.inf, -1e300, 1e-320, 0.5])
odd_values = st.recursive(
    odd_numbers | odd_floats | odd_texts | st.sampled_from([10**400, -(2**63), 2**63]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_texts, inner, max_size=2),
    max_leaves=4,
)


def places_in(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something in it: keys and indices, one after the other."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, of in inner for found in places_in(of, (*place, key)))]


@st.composite
def altered(draw: st.DrawFn, whole: Any) -> bytes:
    """JSON with other values, without some, nested, or with other bytes."""
    text = json.dumps(whole)
    for _ in range(draw(st.integers(1, 2))):
        changed = json.loads(text)
        *parents, last = draw(st.sampled_from(places_in(changed)[1:] or [(0,)]))
        inner = changed
        for key in parents:
            inner = inner[key]
        if draw(st.integers(0, 3)) == 0:
            del inner[last]
        else:
            inner[last] = draw(odd_values)
        text = json.dumps(changed)
    how = draw(st.sampled_from(["values"] * 6 + ["bytes", "nested"]))
    if how == "nested":
        depth = draw(st.sampled_from([10, 200, 900, 950, 1000, 100_000]))
        text = text.replace(draw(st.sampled_from(["1", "true", '"completed"', "null"])), "[" * depth + "]" * depth, 1)
    data = text.encode(errors="surrogatepass")
    return damaged(data, draw(damages)) if how == "bytes" else data


def measure(run: Path, plan: Plan) -> None:
    """What the programs compute of a run's files, but for pictures."""
    drawn = plot.read(run)
    curve_of(drawn.steps, drawn.returns, 100, banded=True)
    plot._grouped([drawn, drawn], "preset")
    loaded = load(run, plan)
    figures = loaded.steps_per_s, loaded.training_s, loaded.mean("time_wait"), loaded.most("staleness_updates")
    assert all(figure is None or isinstance(figure, (int, float)) for figure in figures)
    assert isinstance(loaded.count("lost_ranks"), int) and loaded.training_score is not None
    loaded.reaches(3.0)
    loaded.auc(100.0)


def measured(run: Path, plan: Plan) -> bool:
    """False if that was refused with a sentence."""
    try:
        with np.errstate(all="ignore"):
            measure(run, plan)
    except PalaError as error:
        assert len(str(error)) < 4000 + len(str(run))
        return False
    return True


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Plan]:
    """A run, and a comparison that it is of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.toml").write_text(GAME)
    plan = plan_of()
    run = plan.runs[0].folder
    make_compared_run(run, plan.runs[0].config, 2, episodes=20)
    assert measured(run, plan)
    return run, plan


@pytest.mark.slow
def test_any_record_of_a_run_is_read_or_refused(compared: tuple[Path, Plan]) -> None:
    run, plan = compared
    file = run / "run.json"
    whole = json.loads(file.read_text())
    seen = {True: 0, False: 0}

    @fuzz(150)
    @given(altered(whole))
    def check(data: bytes) -> None:
        file.write_bytes(data)
        seen[measured(run, plan)] += 1

    check()
    assert min(seen.values()) > 0.02 * sum(seen.values()), seen


@pytest.mark.slow
def test_any_evaluation_is_read_or_refused(compared: tuple[Path, Plan]) -> None:
    run, plan = compared
    whole = json.loads((run / "evaluation.json").read_text())

    @fuzz(60)
    @given(altered(whole), st.sampled_from(["evaluation.json", "evaluations.jsonl"]))
    def check(data: bytes, name: str) -> None:
        (run / "evaluation.json").unlink(missing_ok=True)
        (run / name).write_bytes(data)
        measured(run, plan)

    check()


@pytest.mark.slow
def test_any_metrics_are_read_or_refused(compared: tuple[Path, Plan], capsys: pytest.CaptureFixture[str]) -> None:
    """Also packed, and by the view of a training that continues beside them."""
    run, plan = compared
    file = metrics_path(run, 1)
    lines = file.read_bytes().splitlines()
    records = [json.loads(line) for line in lines]
    sizes = st.sampled_from(["plain", "packed", "damaged"])

    @fuzz(150)
    @given(st.sampled_from(range(len(lines))), st.data(), sizes, st.booleans())
    def check(number: int, data: st.DataObject, how: str, first: bool) -> None:
        line = data.draw(altered(records[number]))
        text = b"\n".join([*lines[:number], line, *lines[number + 1 :]]) + b"\n"
        for name in (file, file.with_name(f"{file.name}.gz")):
            name.unlink(missing_ok=True)
        if how == "plain":
            file.write_bytes(text)
            view = RunView(run, 2)
            view.refresh()
            assert view.num_episodes <= 20 and view.total("staleness_updates") is not None
        else:
            packed = gzip.compress(text)
            packed = damaged(packed, data.draw(damages)) if how == "damaged" else packed
            file.with_name(f"{file.name}.gz").write_bytes(packed)
        assert measured(run, plan) or how == "damaged"
        capsys.readouterr()

    check()
