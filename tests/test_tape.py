"""The hand-written passes against the plain network and autograd."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from pala.config import NetworkConfig
from pala.gorila.networks import QNetwork
from pala.networks import conv_tape as conv_tape_module
from pala.networks.conv_tape import ConvTape, blocks
from pala.networks.graphed_tape import GraphedTape, cuda_graph
from pala.networks.make import make_tape
from pala.networks.network import ActorCritic, FlatParameters, Network, channels_last
from pala.networks.tape import AutogradTape, Tape
from pala.system.errors import PalaError

torch.backends.cudnn.allow_tf32 = False  # which would round bytes that one path divides by 255, and the other not
torch.set_num_threads(1)  # a second thread only costs time on tensors this small
STEPS, ENVS = 3, 4
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
]
BOX = Box(-1, 1, (2,))


def make_network(
    shape=(4, 48, 52), actions=Discrete(5), device="cpu", kind=ActorCritic  # noqa: B008
) -> tuple[Network, FlatParameters]:  # fmt: skip
    torch.manual_seed(0)
    network = kind(Box(0, 255, shape, np.uint8), actions, NetworkConfig((8, 16, 8), 16, background=0.0))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))  # biases too
    return network, FlatParameters(network, torch.device(device))


def frames(shape=(4, 48, 52), device="cpu", count=STEPS, seed=1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, ENVS, *shape), dtype=torch.uint8, generator=generator).to(device)


def conv_tape(network: Network, precision: str = "float32", observations: torch.Tensor | None = None) -> ConvTape:
    example = frames()[0] if observations is None else observations
    return ConvTape(network.trunk, network.heads, precision, STEPS, example)


def run(tape: Tape, flat: FlatParameters, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs of all passes side by side, flat gradient of a random function of them)."""
    tape.begin()
    return through([*map(tape.forward, observations)], tape, flat)


def through(passes: list, tape: Tape, flat: FlatParameters) -> tuple[torch.Tensor, torch.Tensor]:
    """What `run` returns of these passes."""
    outputs = torch.stack([torch.cat(of_heads, -1) for of_heads in passes])
    gradient = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(7)).to(outputs.device)
    flat.gradient.zero_()
    tape.backward(gradient.split([output.shape[-1] for output in passes[0]], -1))
    return outputs, flat.gradient.clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "actions"),
    [(ActorCritic, Discrete(5)), (ActorCritic, BOX), (QNetwork, Discrete(5))], ids=["discrete", "box", "values"],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(4, 48, 52), (1, 36, 36), (2, 43, 40), (3, 40, 37), (2, 19, 22)])
def test_written_out_passes_are_the_plain_networks(shape, kind, actions, device):
    network, flat = make_network(shape, actions, device, kind)
    observations = frames(shape, device)
    outputs, gradient = run(conv_tape(network, observations=observations[0]), flat, observations)
    expected, expected_gradient = run(AutogradTape(network), flat, observations)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-5 * float(gradient.norm()))
    trained = sum(p.numel() for name, p in network.named_parameters() if not name.startswith("distribution"))
    assert (gradient != 0).sum() > 0.5 * trained


@pytest.mark.parametrize("written_out", [True, False])
def test_large_values_keep_their_precision_in_bfloat16(written_out):
    """A value of 1000 is not rounded to a multiple of 4."""
    network, _ = make_network()
    with torch.no_grad():
        network.value_head.bias.fill_(1001.0)
        network.value_head.weight.zero_()
    config = NetworkConfig(precision="bfloat16", passes="auto" if written_out else "autograd")
    tape = make_tape(network, config, STEPS, frames()[0])
    tape.begin()
    for _, value in (tape.forward(frames()[0]), tape.peek(frames()[1])):
        assert (value == 1001).all()


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_near_float32_and_returns_float32(device):
    network, flat = make_network(device=device)
    observations = frames(device=device)
    expected, expected_gradient = run(AutogradTape(network), flat, observations)
    for tape in (conv_tape(network, "bfloat16", observations[0]), AutogradTape(network, "bfloat16")):
        outputs, gradient = run(tape, flat, observations)
        assert outputs.dtype == gradient.dtype == torch.float32
        assert 0 < float((outputs - expected).norm() / expected.norm()) < 0.02
        assert 0 < float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 0.2
        assert float(torch.cosine_similarity(gradient, expected_gradient, dim=0)) > 0.98
    assert flat.data.dtype == torch.float32


@pytest.mark.parametrize("low", [273, -60, 0])
def test_in_bfloat16_images_far_from_zero_keep_what_tells_them_apart(low):
    """What is 20 to 25 above the lower bound gives outputs that differ as they should, not only a mean that fits."""
    torch.manual_seed(0)
    network = ActorCritic(
        Box(low, low + 47, (3, 40, 40), np.float32), Discrete(5), NetworkConfig((8, 16, 8), 16, background=0.0)
    )
    images = low + 20 + 5 * torch.rand(8, 3, 40, 40)
    tape = make_tape(network, NetworkConfig(precision="bfloat16"), STEPS, images)
    tape.begin()
    found, expected = (torch.cat(outputs, 1).detach() for outputs in (tape.peek(images), network.outputs(images)))
    apart = expected - expected.mean(0)
    assert float((found - found.mean(0) - apart).norm()) < 0.2 * float(apart.norm())
    assert isinstance(tape, ConvTape)


def test_in_bfloat16_a_background_costs_the_written_out_passes_no_precision():
    """Grey frames with a few other pixels: the first layer's gradient is as near to float32's as autograd's, in the
    median of twelve networks. Where rounded weights met the grey itself, it was twice as far."""
    space, errors = Box(0, 255, (4, 48, 52), np.uint8), {"auto": [], "autograd": []}
    for seed in range(12):
        torch.manual_seed(seed)
        network = ActorCritic(space, Discrete(5), NetworkConfig((8, 16, 8), 16, background=87 / 255))
        flat, conv1 = FlatParameters(network, torch.device("cpu")), slice(network.trunk.conv1.weight.numel())
        observations = torch.full((STEPS, ENVS, 4, 48, 52), 87, dtype=torch.uint8)
        observations[:, :, :, 10:14] = frames(seed=seed + 1)[:, :, :, 10:14]
        expected = run(AutogradTape(network), flat, observations)[1][conv1]
        for passes, found in errors.items():
            tape = make_tape(network, NetworkConfig(precision="bfloat16", passes=passes), STEPS, observations[0])
            gradient = run(tape, flat, observations)[1][conv1]
            found.append(float((gradient - expected).norm() / expected.norm()))
    assert statistics.median(errors["auto"]) < 1.4 * statistics.median(errors["autograd"]), errors


def test_a_new_rollout_sees_new_parameters_and_forgets_the_old_passes():
    network, flat = make_network()
    tape, plain = conv_tape(network), AutogradTape(network)
    run(tape, flat, frames())
    flat.data.mul_(1.1)
    observations = frames(count=2, seed=2)  # fewer than there is room for
    for got, expected in zip(run(tape, flat, observations), run(plain, flat, observations), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * float(expected.norm()))


@pytest.mark.parametrize("written_out", [True, False])
def test_peeks_are_not_kept_and_of_any_number(written_out):
    network, flat = make_network()
    tape = conv_tape(network) if written_out else AutogradTape(network)
    observations = frames()
    before = run(tape, flat, observations)
    tape.begin()
    first = tape.forward(observations[0])
    for count in (1, ENVS):
        for seen, kept in zip(tape.peek(observations[0][:count]), first, strict=True):
            torch.testing.assert_close(seen, kept[:count], rtol=1e-4, atol=1e-5)
            assert not seen.requires_grad
    after = through([first, *map(tape.forward, observations[1:])], tape, flat)
    assert after[0].equal(before[0])
    torch.testing.assert_close(after[1], before[1])


@pytest.mark.parametrize("written_out", [True, False])
def test_backward_forgets_the_passes_and_leaves_the_weights(written_out):
    """While the parameters stay, as many passes again need no `begin`."""
    network, flat = make_network()
    tape = conv_tape(network) if written_out else AutogradTape(network)
    before = run(tape, flat, frames())
    after = through([*map(tape.forward, frames())], tape, flat)
    assert after[0].equal(before[0])
    torch.testing.assert_close(after[1], before[1])


def test_outputs_stay_when_later_passes_are_made():
    network, _ = make_network()
    for tape in (conv_tape(network), AutogradTape(network)):
        tape.begin()
        outputs = tape.forward(frames()[0])
        copies = [output.clone() for output in outputs]
        tape.forward(frames()[1])
        for output, copy in zip(outputs, copies, strict=True):
            assert output.equal(copy)
            assert not output.requires_grad


def test_channels_last_is_the_same_images_in_another_order():
    images = frames()[0]
    turned = channels_last(images)
    assert turned.equal(images)
    assert turned.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("side", "shape"), [(2, (3, 5, 6)), (4, (2, 11, 8)), (4, (1, 4, 4))])
def test_blocks_are_the_pixels_of_each_block(side, shape):
    """Also of images that lie otherwise in memory."""
    images = frames(shape, count=1)[0]
    last = np.empty((*images.shape[:1], *images.shape[2:], images.shape[1]), np.uint8)
    last[...] = np.moveaxis(images.numpy(), 1, -1)
    for lying in (images, torch.from_numpy(np.moveaxis(last, -1, 1))):  # its channels' stride is 1, also of one channel
        turned = blocks(lying, side)
        assert turned.is_contiguous(memory_format=torch.channels_last)
        count, channels, height, width = images.shape
        assert turned.shape == (count, channels * side**2, height // side, width // side)
        for c, y, x in np.ndindex(channels, height // side * side, width):
            channel = (c * side + y % side) * side + x % side
            assert turned[:, channel, y // side, x // side].equal(images[:, c, y, x])


@pytest.mark.parametrize(("side", "kernel", "shape"), [(2, 4, (3, 19, 22)), (4, 8, (2, 43, 40))])
def test_a_convolution_over_blocks_is_that_over_pixels_with_its_gradient(side, kernel, shape):
    images, layer = frames(shape, count=1)[0], torch.nn.Conv2d(shape[0], 5, kernel, side).double()
    of_blocks = conv_tape_module._weight_of_blocks(layer.weight, side)
    expected = layer(images.double())
    found = torch.nn.functional.conv2d(blocks(images, side).double(), of_blocks, layer.bias)
    torch.testing.assert_close(found, expected)
    assert conv_tape_module._weight_of_pixels(of_blocks, side).equal(layer.weight)
    example = frames((4, 48, 52))[0]
    first = torch.nn.Conv2d(4, 8, 8, 4)
    assert conv_tape_module._block_side(first, example) == 4
    assert conv_tape_module._block_side(first, example[..., :50]) == 1
    assert conv_tape_module._block_side(first, example.float()) == 1
    assert conv_tape_module._block_side(torch.nn.Conv2d(4, 8, 3, 2), example) == 1


@pytest.mark.parametrize("shape", [(2, 20, 20), (4, 48, 52)])
def test_in_bfloat16_blocks_give_what_pixels_give(shape, monkeypatch):
    """To the rounding of bfloat16, which is far finer than any wrong pixel."""
    network, flat = make_network(shape)
    observations = frames(shape)
    outputs, gradient = run(conv_tape(network, "bfloat16", observations[0]), flat, observations)
    monkeypatch.setattr(conv_tape_module, "_block_side", lambda layer, images: 1)
    expected, expected_gradient = run(conv_tape(network, "bfloat16", observations[0]), flat, observations)
    torch.testing.assert_close(outputs, expected, rtol=0.02, atol=0.01)
    assert float((gradient - expected_gradient).norm()) <= 0.02 * float(expected_gradient.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_a_graphed_tape_is_the_tape_it_was_made_from(device):
    """On a CPU the graphs are replaced by calls: what is copied where is tested, the capture itself is not."""
    network, flat = make_network(device=device)
    tape = conv_tape(network)
    capture = cuda_graph if device == "cuda" else lambda function: function
    graphed = GraphedTape(tape, torch.zeros_like(frames(device=device)[0]), STEPS, capture)
    for seed in (1, 2):
        flat.data.mul_(1.05)
        observations = frames(device=device, seed=seed)
        for got, expected in zip(
            run(graphed, flat, observations), run(AutogradTape(network), flat, observations), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * float(expected.norm()))
        batches = (observations[0], observations[1], observations[1][:2])
        seen, expected = ([tape.peek(batch) for batch in batches] for tape in (graphed, AutogradTape(network)))
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [ActorCritic, QNetwork])
def test_each_tape_is_for_what_it_can_do(kind):
    (image, _), observations = make_network(kind=kind), frames()[0]
    vector = kind(Box(-1, 1, (3,)), Discrete(2), NetworkConfig())
    assert isinstance(make_tape(image, NetworkConfig(precision="float32"), STEPS, observations), ConvTape)
    assert isinstance(
        make_tape(image, NetworkConfig(precision="float32", passes="autograd"), STEPS, observations), AutogradTape
    )
    assert isinstance(make_tape(vector, NetworkConfig(precision="float32"), STEPS, observations), AutogradTape)
    with pytest.raises(PalaError, match="would round vector observations"):
        make_tape(vector, NetworkConfig(precision="bfloat16"), STEPS, observations)
