"""The network and its flat storage: the same numbers as an ordinary network, in one vector."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, Text, Tuple
from torch import nn

from pala.config import NetworkConfig
from pala.networks.network import ActorCritic, FlatParameters
from pala.system.errors import PalaError

torch.set_num_threads(1)  # a second thread only costs time on tensors this small
CPU = torch.device("cpu")
FRAMES = Box(0, 255, (4, 44, 44), np.uint8)
VECTOR = Box(-1, 1, (3,))
# Orthogonal first weights of GALA's size take a second to make.
SMALL = NetworkConfig((8, 16, 8), conv_hidden=16, background=0.0)


def pair(observations: Box = FRAMES) -> tuple[ActorCritic, ActorCritic, FlatParameters]:
    """(ordinary network, equal network with flat parameters, these)."""
    torch.manual_seed(0)
    plain = ActorCritic(observations, Discrete(4), SMALL)
    flattened = copy.deepcopy(plain)
    return plain, flattened, FlatParameters(flattened, CPU)


def frames(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, *FRAMES.shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("actions", "parameters"), [(4, 865_413), (18, 872_595)])
def test_galas_network_has_as_many_parameters_as_published(actions, parameters, monkeypatch):
    monkeypatch.setattr(nn.init, "orthogonal_", lambda weight, gain: weight)  # slow at this size, and only counted here
    network = ActorCritic(Box(0, 255, (4, 84, 84), np.uint8), Discrete(actions), NetworkConfig(background=0.0))
    assert FlatParameters(network, CPU).data.numel() == parameters


def test_flattening_keeps_values_and_makes_views():
    plain, network, flat = pair()
    assert all(a.equal(b) for a, b in zip(plain.parameters(), network.parameters(), strict=True))
    assert list(plain.state_dict()) == list(network.state_dict())
    flat.data.fill_(2.0)
    flat.gradient.fill_(3.0)
    for parameter in network.parameters():
        assert (parameter == 2).all()
        assert (parameter.grad == 3).all()


def test_parameters_fill_the_vector_without_gap_or_overlap():
    _, network, flat = pair()
    for tensor in network.parameters():
        tensor.data += 1
        tensor.grad += 1
    _, _, before = pair()
    assert flat.data.equal(before.data + 1)
    assert (flat.gradient == 1).all()


def test_convolutions_are_channels_last():
    _, network, _ = pair()
    weights = [module.weight for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert len(weights) == 3
    for tensor in [*weights, *(weight.grad for weight in weights)]:
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()


@pytest.mark.parametrize("observations", [FRAMES, VECTOR], ids=["frames", "vector"])
def test_flat_network_computes_what_the_plain_one_does(observations):
    plain, network, flat = pair(observations)
    batch = frames(3) if observations is FRAMES else torch.randn(3, 3)
    (policy, value), (flat_policy, flat_value) = plain(batch), network(batch)
    assert policy.shape == (3, 4)
    assert value.shape == (3,)
    torch.testing.assert_close(flat_policy, policy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flat_value, value, rtol=1e-4, atol=1e-5)
    for model in (plain, network):
        output, values = model(batch)
        (output.square().sum() + values.sum()).backward()
    for a, b in zip(plain.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)
    norm = nn.utils.get_total_norm(parameter.grad for parameter in plain.parameters())
    assert float(flat.gradient.norm()) == pytest.approx(float(norm), rel=1e-3)


def test_frames_are_scaled_to_one_and_left_as_they_are():
    network = ActorCritic(FRAMES, Discrete(4), SMALL)
    batch = frames(2)
    before, seen = batch.clone(), []
    network.trunk.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    network(batch)
    assert batch.equal(before)
    torch.testing.assert_close(seen[0], before / 255)


def test_signature_tells_layouts_apart():
    def signature(observations: Box = FRAMES, actions: int = 4, config: NetworkConfig | None = None) -> int:
        network = ActorCritic(observations, Discrete(actions), config or SMALL)
        return FlatParameters(network, CPU).signature

    assert signature() == signature()
    wide, other = NetworkConfig((8, 16, 16), 16, background=0.0), NetworkConfig(mlp_hidden=(32, 64))
    others = [signature(actions=6), signature(config=wide), signature(VECTOR), signature(VECTOR, config=other)]
    assert len({signature(), *others}) == 5


def test_initial_weights_are_orthogonal_with_the_named_gains():
    network = ActorCritic(FRAMES, Discrete(4), SMALL)
    layers = [module for module in network.trunk if hasattr(module, "weight")]
    gains = [math.sqrt(2)] * 4 + [0.01, 1.0]
    for layer, gain in zip([*layers, network.policy_head, network.value_head], gains, strict=True):
        rows = layer.weight.detach().flatten(1)
        torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)), rtol=0, atol=1e-5 * gain**2)
        assert not layer.bias.any()


def test_box_actions_have_a_learned_deviation():
    network = ActorCritic(VECTOR, Box(-1, 1, (2, 3)), SMALL)
    assert network(torch.zeros(5, 3))[0].shape == (5, 6)
    assert "distribution.log_std" in dict(network.named_parameters())


@pytest.mark.parametrize(
    ("observations", "actions", "words"),
    [
        (VECTOR, Tuple((Discrete(2), Discrete(2))), "Actions"),
        (VECTOR, Text(3), "Actions"),
        (Discrete(3), Discrete(2), "Observations"),
        (Box(0, 255, (84, 84, 3), np.uint8), Discrete(2), "under 7 pixels"),
    ],
)
def test_other_spaces_are_refused(observations, actions, words):
    with pytest.raises(PalaError, match=words):
        ActorCritic(observations, actions, SMALL)
