"""The hand-written passes against the plain network and autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from pala.config import NetworkConfig
from pala.conv_tape import ConvTape
from pala.errors import PalaError
from pala.graphed_tape import GraphedTape, cuda_graph
from pala.networks import ActorCritic, FlatParameters, channels_last
from pala.tape import AutogradTape, Tape, make_tape

torch.set_num_threads(1)  # a second thread only costs time on tensors this small
STEPS, ENVS = 3, 4
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
]
BOX = Box(-1, 1, (2,))


def make_network(shape=(4, 48, 52), actions=Discrete(5), device="cpu") -> tuple[ActorCritic, FlatParameters]:  # noqa: B008
    torch.manual_seed(0)
    network = ActorCritic(Box(0, 255, shape, np.uint8), actions, NetworkConfig((8, 16, 8), 16))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))  # biases too
    return network, FlatParameters(network, torch.device(device))


def frames(shape=(4, 48, 52), device="cpu", count=STEPS, seed=1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, ENVS, *shape), dtype=torch.uint8, generator=generator).to(device)


def run(tape: Tape, flat: FlatParameters, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs of all passes side by side, flat gradient of a random function of them)."""
    tape.begin()
    outputs = [torch.cat([policy, value[:, None]], 1) for policy, value in map(tape.forward, observations)]
    generator = torch.Generator().manual_seed(7)
    by_output = torch.randn(len(observations), *outputs[0].shape, generator=generator).to(flat.data.device)
    flat.gradient.zero_()
    tape.backward(by_output[..., :-1], by_output[..., -1])
    return torch.stack(outputs), flat.gradient.clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("actions", [Discrete(5), BOX], ids=["discrete", "box"])
@pytest.mark.parametrize("shape", [(4, 48, 52), (1, 36, 36), (3, 40, 37)])
def test_written_out_passes_are_the_plain_networks(shape, actions, device):
    network, flat = make_network(shape, actions, device)
    observations = frames(shape, device)
    outputs, gradient = run(ConvTape(network, "float32", STEPS, ENVS), flat, observations)
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
    assert (tape.forward(frames()[0])[1] == 1001).all()
    assert (tape.value(frames()[1]) == 1001).all()


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_near_float32_and_returns_float32(device):
    network, flat = make_network(device=device)
    observations = frames(device=device)
    expected, expected_gradient = run(AutogradTape(network), flat, observations)
    for tape in (ConvTape(network, "bfloat16", STEPS, ENVS), AutogradTape(network, "bfloat16")):
        outputs, gradient = run(tape, flat, observations)
        assert outputs.dtype == gradient.dtype == torch.float32
        assert 0 < float((outputs - expected).norm() / expected.norm()) < 0.02
        assert 0 < float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 0.2
        assert float(torch.cosine_similarity(gradient, expected_gradient, dim=0)) > 0.98
    assert flat.data.dtype == torch.float32


def test_a_new_rollout_sees_new_parameters_and_forgets_the_old_passes():
    network, flat = make_network()
    tape, plain = ConvTape(network, "float32", STEPS, ENVS), AutogradTape(network)
    run(tape, flat, frames())
    flat.data.mul_(1.1)
    observations = frames(count=2, seed=2)  # fewer than there is room for
    for got, expected in zip(run(tape, flat, observations), run(plain, flat, observations), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * float(expected.norm()))


def test_bootstrap_values_are_not_kept_and_of_any_number():
    network, flat = make_network()
    tape = ConvTape(network, "float32", STEPS, ENVS)
    before = run(tape, flat, frames())

    tape.begin()
    observations = frames()
    first = tape.forward(observations[0])
    for count in (1, ENVS):
        torch.testing.assert_close(tape.value(observations[0][:count]), first[1][:count], rtol=1e-4, atol=1e-5)
    outputs = [first, *map(tape.forward, observations[1:])]
    assert torch.stack([policy for policy, _ in outputs]).equal(before[0][..., :-1])
    by_output = torch.randn(before[0].shape, generator=torch.Generator().manual_seed(7))
    tape.backward(by_output[..., :-1], by_output[..., -1])
    torch.testing.assert_close(flat.gradient, before[1])


def test_outputs_stay_when_later_passes_are_made():
    network, _ = make_network()
    for tape in (ConvTape(network, "float32", STEPS, ENVS), AutogradTape(network)):
        tape.begin()
        policy, value = tape.forward(frames()[0])
        copies = policy.clone(), value.clone()
        tape.forward(frames()[1])
        assert policy.equal(copies[0])
        assert value.equal(copies[1])
        assert not policy.requires_grad


def test_channels_last_is_the_same_images_in_another_order():
    images = frames()[0]
    turned = channels_last(images)
    assert turned.equal(images)
    assert turned.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("device", DEVICES)
def test_a_graphed_tape_is_the_tape_it_was_made_from(device):
    """On a CPU the graphs are replaced by calls: what is copied where is tested, the capture itself is not."""
    network, flat = make_network(device=device)
    tape = ConvTape(network, "float32", STEPS, ENVS)
    capture = cuda_graph if device == "cuda" else lambda function: function
    graphed = GraphedTape(tape, torch.zeros_like(frames(device=device)[0]), STEPS, capture)
    for seed in (1, 2):
        flat.data.mul_(1.05)
        observations = frames(device=device, seed=seed)
        for got, expected in zip(
            run(graphed, flat, observations), run(AutogradTape(network), flat, observations), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * float(expected.norm()))
        values = [graphed.value(batch) for batch in (observations[0], observations[1], observations[1][:2])]
        expected = [AutogradTape(network).value(batch) for batch in (observations[0], observations[1])]
        torch.testing.assert_close(torch.cat(values), torch.cat([*expected, expected[1][:2]]), rtol=1e-4, atol=1e-5)


def test_each_tape_is_for_what_it_can_do():
    (image, _), observations = make_network(), frames()[0]
    vector = ActorCritic(Box(-1, 1, (3,)), Discrete(2), NetworkConfig())
    assert isinstance(make_tape(image, NetworkConfig(), STEPS, observations), ConvTape)
    assert isinstance(make_tape(image, NetworkConfig(passes="autograd"), STEPS, observations), AutogradTape)
    assert isinstance(make_tape(vector, NetworkConfig(), STEPS, observations), AutogradTape)
    with pytest.raises(PalaError, match="would round vector observations"):
        make_tape(vector, NetworkConfig(precision="bfloat16"), STEPS, observations)
    for network in (image, vector):
        with pytest.raises(PalaError, match=r"'network.passes' is 'cuda_graph'"):
            make_tape(network, NetworkConfig(passes="cuda_graph"), STEPS, observations)
