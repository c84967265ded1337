"""A network of the user's own, by `make_network` or by the name in `network.custom`: a module with a trunk and heads.

| part | takes | gives |
|---|---|---|
| `trunk` | observations [B, ...] as float32; images (uint8 [C, H, W]) scaled to 0..1 | features, anything |
| each of `heads` | the trunk's features | float32 [B, its number of outputs] |

A module with memory has an attribute `state_size`, a number S above 0. Its trunk takes a second argument, the state
[B, S], zeros where an episode begins, and gives a pair: the features, and the state after, [B, S].

An actor-critic has two heads: what the distribution of actions is made of, and the value, one output. A Q-network has
one: the value of each action.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from pala.config import Config, EnvConfig
from pala.networks.distributions import Distribution
from pala.networks.network import Network, blank_observations
from pala.system.errors import PalaError
from pala.system.names import import_named, named_call

MakeNetwork = Callable[[gymnasium.Space, tuple[int, ...]], nn.Module]
"""`(observation_space, num_outputs)` -> the module; `num_outputs`: of each head."""

_SOURCE = "'network.custom'"


def own_network(config: Config, make_network: MakeNetwork | None) -> MakeNetwork | None:
    """Return the user's own network, given from Python or named by the configuration; None: PALA's. Raises PalaError if
    both are given, or the name leads to none."""
    if not config.network.custom:
        return make_network
    if make_network is not None:
        raise PalaError(
            f"{_SOURCE} is '{config.network.custom}', but there is a 'make_network', too, given or kept by the run "
            "that continues; a run has one or the other."
        )
    return _named(config.network.custom)


def _named(text: str) -> MakeNetwork:
    name, arguments = named_call(text.strip(), _SOURCE, "`module:Name` or `module:Name(key=value)`")
    make = import_named(name, _SOURCE)

    def make_network(observation_space: gymnasium.Space, num_outputs: tuple[int, ...]) -> nn.Module:
        try:
            return cast(nn.Module, make(observation_space, num_outputs, **arguments))
        except Exception as error:  # it is the user's code: anything may happen
            raise PalaError(f"{_SOURCE}: '{text}' makes no network ({type(error).__name__}: {error}).") from error

    return make_network


class OwnNetwork(Network):
    """PALA's side of it. Raises PalaError for a module whose parts or outputs are not as above."""

    is_own = True

    def __init__(
        self,
        make_network: MakeNetwork,
        observation_space: gymnasium.Space,
        distribution: Distribution,
        num_outputs: tuple[int, ...],
        env: EnvConfig | None = None,
    ) -> None:
        super().__init__(observation_space, distribution, env)
        self.own = make_network(observation_space, num_outputs)
        self.state_size = _check_parts(self.own, len(num_outputs))
        self._check_outputs(observation_space, num_outputs)  # lazy modules have their parameters from here on
        for parameter in self.own.parameters():
            if parameter.dim() == 4:  # as `FlatParameters` lays them out, which the module's code has to stand
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self._check_outputs(observation_space, num_outputs)
        _check_values(self.own)
        self._check_rows(observation_space)

    @property
    def heads(self) -> list[nn.Linear]:
        return list(cast(Any, self.own).heads)

    def forward(self, observations: Tensor) -> list[Tensor]:
        """Return the outputs of all heads."""
        return self.outputs(observations)

    def _features(self, inputs: Tensor, state: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        trunk = cast(Any, self.own).trunk
        if state is None:
            features = trunk(inputs)
            return [_as_own(features) for _ in self.heads], None
        given = trunk(inputs, state)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Tensor)):
            raise TypeError(f"with 'state_size' its trunk must give (features, state), not {type(given).__name__}")
        features, after = given
        if after.shape != state.shape:
            raise ValueError(f"its trunk gives a state of shape {tuple(after.shape)}, not {tuple(state.shape)}")
        return [_as_own(features) for _ in self.heads], after.float()

    def _check_outputs(self, space: gymnasium.Space, num_outputs: tuple[int, ...]) -> None:
        observations = blank_observations(space, 2, torch.device("cpu"))
        with torch.no_grad(), _telling_of_failure():
            shapes = [tuple(outputs.shape) for outputs in self.outputs(observations)]
        wanted = [(2, number) for number in num_outputs]
        if shapes != wanted:
            raise PalaError(f"Your own network: its heads give {shapes} for two observations, not {wanted}.")

    def _check_rows(self, space: gymnasium.Space) -> None:
        """Raise PalaError if what is given for one observation depends on the others of its batch."""
        space = copy.deepcopy(space)  # whose random numbers are the environment's
        space.seed(0)
        drawn = torch.from_numpy(np.stack([space.sample() for _ in range(4)]))
        if drawn.is_floating_point():
            drawn = drawn.clamp(-1e3, 1e3)  # bounds may stand for none
        batch, other = drawn[:3], drawn[[0, 3, 2]]
        first, second, again = (self._two_steps(observations) for observations in (batch, other, batch))
        has_chance = not _are_alike(first, again)
        if not has_chance and not _are_alike(first[:, ::2], second[:, ::2]):
            raise PalaError(
                "Your own network: what it gives for one observation depends on the others of its batch, so the "
                "environments would mix. (torch.nn.LSTM, GRU and RNN take [batch, features] for one sequence: take "
                "LSTMCell, GRUCell or RNNCell, and 'state_size' for a memory, as docs/own_network.md shows; attention "
                "and normalisation must not go over the batch.)"
            )

    def _two_steps(self, observations: Tensor) -> Tensor:
        """Return all outputs of two steps, [2, B, numbers], with the same random numbers each time."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _telling_of_failure():
            torch.manual_seed(0)
            first, state = self.advance(observations, None)
            second, _ = self.advance(observations, state)
        return torch.stack([torch.cat(outputs, -1) for outputs in (first, second)])


def _as_own(features: Any) -> Any:
    """Return a copy for one head, which may work in place; floats as float32. What is made of no tensors stays."""
    if isinstance(features, Tensor):
        return features.to(torch.float32 if features.is_floating_point() else features.dtype, copy=True)
    if isinstance(features, dict):
        return {key: _as_own(part) for key, part in features.items()}
    if isinstance(features, (tuple, list)):
        parts = [_as_own(part) for part in features]
        return type(features)(*parts) if hasattr(features, "_fields") else type(features)(parts)
    return features


@contextlib.contextmanager
def _telling_of_failure() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # it is the user's code: anything may happen
        raise PalaError(f"Your own network fails ({type(error).__name__}: {error}).") from error


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def _check_values(own: nn.Module) -> None:
    if bad := next((name for name, p in own.named_parameters() if not bool(p.isfinite().all())), None):
        raise PalaError(
            f"Your own network: the parameter '{bad}' holds NaN or infinity, which ranks do not exchange and no "
            "checkpoint keeps; a mask can be a buffer with `persistent=False`."
        )


def _check_parts(own: object, num_heads: int) -> int:
    """Raise PalaError for a module without the parts that it must have; returns its `state_size`."""
    heads = getattr(own, "heads", None)
    if not isinstance(own, nn.Module) or not callable(getattr(own, "trunk", None)) or heads is None:
        raise PalaError(
            f"Your own network is a {type(own).__name__}, but must be a torch.nn.Module with a 'trunk' and 'heads'."
        )
    if not isinstance(heads, (nn.ModuleList, list, tuple)):
        raise PalaError("Your own network: 'heads' must be a torch.nn.ModuleList, of a single head as well.")
    if len(heads) != num_heads:
        raise PalaError(f"Your own network has {len(heads)} heads, but {num_heads} are needed, as in 'num_outputs'.")
    registered = set(map(id, own.parameters()))
    parts = [part for part in (own.trunk, *heads) if isinstance(part, nn.Module)]
    if any(id(parameter) not in registered for part in parts for parameter in part.parameters()):
        raise PalaError(
            "Your own network: its trunk or one of its heads is not registered with the module, and would never learn: "
            "make 'heads' a torch.nn.ModuleList."
        )
    if not any(p.requires_grad for p in own.parameters()):
        raise PalaError("Your own network has no parameters that learn (`requires_grad`).")
    other = next((name for name, p in own.named_parameters() if p.dtype != torch.float32), None)
    if other is not None:
        raise PalaError(
            f"Your own network: the parameter '{other}' is not float32, as all that ranks exchange must be."
        )
    kept = [name for name in own.state_dict() if name not in dict(own.named_parameters(remove_duplicate=False))]
    if kept:
        raise PalaError(
            f"Your own network: '{kept[0]}' is a buffer, which ranks do not exchange; use no running statistics (in "
            "the place of BatchNorm, LayerNorm), or register it with `persistent=False`."
        )
    size = getattr(own, "state_size", 0)
    if not isinstance(size, int) or size < 0:
        raise PalaError(f"Your own network: 'state_size' is {size!r}, but must be a whole number, 0 without a memory.")
    return size
