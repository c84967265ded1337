"""The policy of a run, and how it acts."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Dict, Discrete, MultiDiscrete, Tuple
from gymnasium.vector.utils import batch_space, iterate
from torch import Tensor, nn

from pala.algorithms import ALGORITHMS
from pala.config import Config
from pala.envs.masks import joined
from pala.envs.spaces import Inputs
from pala.envs.vector import Envs, make_envs
from pala.gorila.dqn import epsilon_greedy
from pala.networks.distributions import masked
from pala.networks.network import FlatParameters, Network, blank_observations
from pala.networks.own import MakeNetwork
from pala.run import checkpoint, run_folder, user_code
from pala.run.run_folder import BEST_POLICY, POLICY
from pala.system.errors import PalaError, reason
from pala.system.files import write_atomically
from pala.system.seeding import torch_weights
from pala.system.text import counted


@dataclass
class Policy:
    """A network with the parameters of a run, on the CPU, and how it acts."""

    network: Network
    inputs: Inputs  # from the environment's observations to the network's
    action_space: gymnasium.Space
    global_steps: int  # of training, over all ranks
    source: str  # "final", "best", or of which checkpoints
    epsilon: float | None
    """Probability of a random action, of a Q-network; None: actions are sampled from a policy."""
    state: Tensor | None = None
    """Memory of the environments, float32 [B, S], which can be kept and set again; None: nothing is remembered."""
    _generator: torch.Generator = field(init=False, default_factory=torch.Generator, repr=False)

    @property
    def observation_space(self) -> gymnasium.Space:
        """The space of one observation, as the environment gives it."""
        return self.inputs.original

    def act(self, observations: Any, greedy: bool = False, action_masks: Any = None) -> Any:
        """Return actions for one observation or a batch of them, as the environment takes them.

        `observations`: one as the environment that the run was trained on gives it, or a batch as Gymnasium's vector
        environments do: arrays with one dimension more, in a dict or tuple where the observation is one. Returns one
        action, or an array of B, [B, *action], of the action space's dtype. `greedy`: the most probable action
        instead of a sampled one; of Gorila never a random one. `action_masks`: 1 where an action is allowed and 0 where
        not, [A] or [B, A], as the environment's `info["action_mask"]` (docs/masks_and_memory.md); None: every action is
        allowed. A policy with memory remembers what it saw until `reset`; then and without memory nothing is kept from
        call to call but the random stream. Raises PalaError for observations or masks of another shape or type, and for
        observations that are not finite.
        """
        batch, is_single = self._batch(observations)
        if not np.isfinite(batch).all():
            raise PalaError("Observations hold NaN or infinity, for which no policy was trained.")
        masks = None if action_masks is None else self._masks(action_masks, len(batch), is_single)
        actions = self.actions(batch, masks, greedy)
        return actions[0] if is_single else actions

    def actions(self, observations: np.ndarray, action_masks: np.ndarray | None, greedy: bool) -> np.ndarray:
        """Return what `act` does, [B] or [B, K], for what the network gets, [B, *obs]. `action_masks`: bool [B, A].
        Raises PalaError if other environments are remembered."""
        if self.state is not None and len(self.state) != len(observations):
            raise PalaError(
                f"The policy remembers {counted(len(self.state), 'environment')}, but there are {len(observations)} "
                "observations; call `policy.reset()` before it plays others."
            )
        distribution = self.network.distribution
        with torch.no_grad():
            masks = None if action_masks is None else torch.from_numpy(action_masks)
            seen = torch.from_numpy(np.ascontiguousarray(observations))
            (outputs, *_), self.state = self.network.advance(seen, self.state)
            if self.epsilon is None:
                actions = distribution.sample(masked(outputs, masks), self._generator, greedy, masks)
            else:
                actions = epsilon_greedy(outputs, 0.0 if greedy else self.epsilon, self._generator)
            env_actions: np.ndarray = distribution.to_env(actions).numpy()
            return env_actions

    def seed(self, seed: int) -> None:
        """Seed the samples that `act` draws from now on."""
        self._generator.manual_seed(seed)

    def reset(self, began: Any = None) -> None:
        """Begin episodes: forget what was seen in environments that `began` one, bool [B]; None: in all. Policies
        without memory have nothing to forget."""
        if began is None:
            self.state = None
        elif self.state is not None:
            self.state = self.state.masked_fill(torch.from_numpy(np.asarray(began, bool)).unsqueeze(-1), 0.0)

    def export(self, file: str | Path, action_masks: bool = False) -> None:
        """Write the network as a program of torch, for use without PALA: `torch.export.load(file).module()` takes a
        batch of any size of what the network gets (`inputs.space`; `inputs.encode` makes it), and gives the heads'
        outputs: the logits of Discrete actions or the means of a Box, and the value; of Gorila the actions' values.
        `action_masks`: the program also takes `action_masks=`, bool [B, A], and gives logits of -inf where they are
        False. Of a policy with memory it also takes `state=`, [B, S], zeros where an episode begins, and gives the
        state after, last. Raises PalaError."""
        two = blank_observations(self.inputs.space, 2, torch.device("cpu"))  # torch takes one for a constant
        network = copy.deepcopy(self.network)
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)  # no views of the flat parameters
        more: dict[str, Tensor] = {}
        if self.network.state_size:
            more["state"] = torch.zeros(2, self.network.state_size)
        if action_masks:
            self._check_can_be_masked()
            more["action_masks"] = torch.ones(2, self.network.distribution.num_outputs, dtype=torch.bool)
        module = _Program(network) if more else network
        program = io.BytesIO()
        try:
            size = {0: torch.export.Dim("batch")}
            sizes = {"observations": size} | dict.fromkeys(more, size)
            torch.export.save(torch.export.export(module, (two,), more, dynamic_shapes=sizes), program)
        except Exception as error:  # torch's tracing of the user's own network: anything may happen
            raise PalaError(f"The network cannot be exported ({type(error).__name__}: {error}).") from error
        try:
            write_atomically(Path(file), program.getvalue())
        except OSError as error:
            raise PalaError(f"'{file}' cannot be written: {reason(error)}.") from None

    def _check_can_be_masked(self) -> None:
        if self.epsilon is not None:
            raise PalaError("A policy of Gorila takes no action masks: it was trained without.")
        if not isinstance(self.action_space, (Discrete, MultiDiscrete)):
            raise PalaError(
                f"The policy's actions are {self.action_space}, and only Discrete and MultiDiscrete ones can be masked."
            )

    def _masks(self, action_masks: Any, count: int, is_single: bool) -> np.ndarray:
        """Return the masks as bool [B, A], each of which allows an action. Raises PalaError."""
        self._check_can_be_masked()
        try:
            flat, starts = joined(action_masks, self.action_space)
        except ValueError as error:
            raise PalaError(f"Action masks are not as they should be: {error}.") from None
        masks = flat[None] if is_single else flat
        if masks.ndim != 2 or len(masks) != count:
            wanted = flat.shape[-1:] if is_single else (count, flat.shape[-1])
            raise PalaError(f"Action masks are of shape {flat.shape}, but must be {wanted}, as the observations are.")
        if not np.logical_or.reduceat(masks, starts, -1).all():
            raise PalaError("An action mask allows no action; at least one must be allowed.")
        return masks

    def _batch(self, observations: Any) -> tuple[np.ndarray, bool]:
        """Return the network's input, [B, ...], and whether a single observation was given."""
        is_single = _is_single(self.observation_space, observations)
        if self.inputs.is_identity:
            return (np.asarray(observations)[None] if is_single else np.asarray(observations)), is_single
        shape = self.inputs.space.shape or ()
        each = [observations] if is_single else iterate(batch_space(self.observation_space), observations)
        try:
            encoded = [self.inputs.encode(observation) for observation in each]
        except (IndexError, ValueError) as error:
            raise PalaError(f"Observations are not of {self.observation_space} ({error}).") from None
        return (np.stack(encoded) if encoded else np.empty((0, *shape), self.inputs.space.dtype)), is_single


class _Program(nn.Module):
    """An actor-critic with a memory or masks, for an export."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, observations: Tensor, state: Tensor | None = None, action_masks: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the masked policy outputs, the value [B], and the state after."""
        (policy_output, value), after = self.network.advance(observations, state)
        outputs = masked(policy_output, action_masks), value.squeeze(-1)
        return outputs if after is None else (*outputs, after)


def _is_single(space: gymnasium.Space, observations: Any) -> bool:
    """Return whether it is one observation of this space; False: a batch. Raises PalaError if it is neither."""
    if isinstance(space, (Dict, Tuple)):
        parts = space.spaces if isinstance(space, Dict) else dict(enumerate(space.spaces))
        try:
            single = [_is_single(part, observations[key]) for key, part in parts.items()]
            return all(single)
        except (KeyError, IndexError, TypeError):
            raise PalaError(f"Observations are {type(observations).__name__}, but the policy takes {space}.") from None
    try:
        given = np.asarray(observations)
    except ValueError as error:
        raise PalaError(
            f"Observations are no array ({error}), but the policy takes {space.shape} or a batch; `env.reset()` gives "
            "a pair, of which the first is the observation."
        ) from None
    is_single = given.shape == space.shape
    if not is_single and given.shape[1:] != space.shape:
        raise PalaError(f"Observations are of shape {given.shape}, but the policy takes {space.shape} or a batch.")
    if space.dtype is not None and not np.can_cast(given.dtype, space.dtype, "same_kind"):
        raise PalaError(f"Observations are {given.dtype}, but the policy takes {space.dtype}.")
    return is_single


def policy_of(run: Path, seed: int = 0, trust_run: bool = False, best: bool = False) -> Policy:
    """Return the policy of a run, as `pala.load_policy` does."""
    config = run_folder.config_of(run)
    run = run.absolute()  # an environment may change the working directory
    make_env, make_network = user_code.load_trusted(run, config, trust_run)
    with make_envs(replace(config.env, num_envs=1, vectorization="sync"), 1, make_env) as envs:  # for its spaces
        policy = load_policy(run, config, envs, make_network, best)
    policy.seed(seed)
    return policy


def load_policy(
    run: Path, config: Config, envs: Envs, make_network: MakeNetwork | None = None, best: bool = False
) -> Policy:
    """Return a completed run's final policy, or the one in its ranks' newest checkpoints; or the `best` that was kept
    while it trained. Raises PalaError."""
    algorithm, config = ALGORITHMS[config.algorithm], run_folder.with_kept_background(config, run)
    with torch_weights(config.seed):  # as in training: buffers that are not saved are alike
        network = algorithm.make_network(envs.observation_space, envs.action_space, config, make_network)
    network.eval()
    flat = FlatParameters(network, torch.device("cpu"))
    file = run / (BEST_POLICY if best else POLICY)
    if best and not file.exists():
        raise PalaError(
            f"Run '{run}' has no '{BEST_POLICY}': one is kept with the checkpoints, when 100 episodes have ended after "
            "it, but not of independent learners ('exchange.kind' 'none'), nor where the first rank does not play "
            "('gorila.roles' 'separate')."
        )
    if file.exists() and (best or run_folder.read(run)["completed"]):  # a resumed run still has its earlier policy
        named, header = checkpoint.load_policy(file, network.state_dict())
        if header.get("signature") != flat.signature:
            raise PalaError(
                f"Policy '{file}' is of a network with other buffers than those that are made now; draw "
                "them from torch, or with a generator that the call itself seeds."
            )
        network.load_state_dict(named)
        steps, source = header["global_steps"], "best" if best else "final"
    else:
        steps, source = algorithm.load_parameters(checkpoint.newest_segment(run), config, flat)
    if not flat.data.isfinite().all():
        raise PalaError(f"The policy of run '{run}' ({source}) has parameters that are not finite numbers.")
    return Policy(network, envs.inputs, envs.action_space, steps, source, algorithm.epsilon(config))
