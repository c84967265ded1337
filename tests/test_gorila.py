"""Gorila's parts, each against a slow formula or torch's own: loss, filter, shards, roles, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from pala.config import GorilaConfig, NetworkConfig, from_table
from pala.gorila.dqn import DQN, LossFilter, Transitions, dqn_loss, epsilon_at, epsilon_greedy, targets
from pala.gorila.networks import QNetwork
from pala.gorila.roles import Roles, assign
from pala.gorila.shard import Shard, assemble, slices
from pala.networks.make import make_tape
from pala.networks.network import FlatParameters, blank_observations
from pala.networks.tape import AutogradTape, Tape
from pala.run.checkpoint import RankState
from pala.system.errors import PalaError
from support.gorila_ranks import begin_with

torch.set_num_threads(1)  # a second thread only costs time on tensors this small
CPU = torch.device("cpu")
ACTIONS, COUNT, GAMMA = 3, 6, 0.9
SPACES = {"vector": Box(-1, 1, (3,)), "image": Box(0, 255, (2, 36, 36), np.uint8)}
SMALL = NetworkConfig((4, 4, 4), conv_hidden=8, mlp_hidden=(8,))


def make_network(kind: str = "vector", seed: int = 0) -> QNetwork:
    torch.manual_seed(seed)
    return QNetwork(SPACES[kind], Discrete(ACTIONS), SMALL)


def tape_of(network: QNetwork, precision: str = "float32") -> Tape:
    """As training makes it: written out for images."""
    config = dataclasses.replace(SMALL, precision=precision)
    observations = blank_observations(SPACES["image" if network.is_image else "vector"], COUNT, CPU)
    tape = make_tape(network, config, 1, observations)
    tape.begin()
    return tape


def make_dqn(network: QNetwork, target: QNetwork, config: GorilaConfig, precision: str = "float32") -> DQN:
    flat, target_flat = FlatParameters(network, CPU), FlatParameters(target, CPU)
    tapes = tape_of(network, precision), tape_of(target, precision)
    return DQN(network.distribution, tapes[0], flat, tapes[1], target_flat, config)


def next_values(target_tape: Tape, batch: Transitions) -> torch.Tensor:
    return target_tape.peek(batch.next_observations)[0]


def make_batch(kind: str = "vector") -> Transitions:
    """Errors of both signs, small and beyond 1, and two ends."""
    space, generator = SPACES[kind], torch.Generator().manual_seed(1)
    space.seed(2)
    observations, following = torch.from_numpy(np.stack([space.sample() for _ in range(2 * COUNT)])).split(COUNT)
    actions = torch.randint(ACTIONS, (COUNT,), generator=generator)
    rewards = torch.tensor([-3.0, -0.5, 0.0, 0.25, 2.0, 5.0])
    return Transitions(observations, actions, rewards, following, torch.arange(COUNT) % 3 == 1)


# ---- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPACES)
def test_the_network_gives_a_value_for_each_action_and_lies_flat(kind):
    network, plain = make_network(kind), make_network(kind)
    flat = FlatParameters(network, CPU)
    values = network(make_batch(kind).observations)
    assert values.shape == (COUNT, ACTIONS)
    torch.testing.assert_close(values, plain(make_batch(kind).observations), rtol=1e-4, atol=1e-5)
    flat.data.zero_()
    assert not network(make_batch(kind).observations).any()


@pytest.mark.parametrize(("actions", "parameters"), [(4, 1_686_180), (18, 1_693_362)])
def test_dqns_network_has_as_many_parameters_as_its_layers(actions, parameters, monkeypatch):
    monkeypatch.setattr(torch.nn.init, "orthogonal_", lambda weight, gain: weight)  # slow at this size
    network = QNetwork(Box(0, 255, (4, 84, 84), np.uint8), Discrete(actions), NetworkConfig((32, 64, 64)))
    assert FlatParameters(network, CPU).data.numel() == parameters


def test_actions_that_are_not_discrete_are_refused():
    with pytest.raises(PalaError, match="DQN needs Discrete actions"):
        QNetwork(SPACES["vector"], Box(-1, 1, (2,)), SMALL)


# ---- targets and loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [False, True])
def test_targets_are_the_scalar_formula(double):
    online, target, batch = make_network(seed=3), make_network(seed=4), make_batch()
    values, target_values = online(batch.next_observations).tolist(), target(batch.next_observations).tolist()
    expected = []
    for i in range(COUNT):
        judge = values[i] if double else target_values[i]
        following = target_values[i][judge.index(max(judge))]
        expected.append(float(batch.rewards[i]) + (0.0 if batch.terminated[i] else GAMMA * following))
    tapes = tape_of(online), tape_of(target)
    assert targets(tapes[0], next_values(tapes[1], batch), batch, GAMMA, double).tolist() == pytest.approx(
        expected, rel=1e-5
    )
    other = targets(tapes[0], next_values(tapes[1], batch), batch, GAMMA, not double)
    assert not other.allclose(torch.tensor(expected))  # or the test could not tell the two apart


def test_what_follows_an_end_does_not_count_whatever_it_is():
    batch = make_batch()
    batch.next_observations[batch.terminated] = math.nan
    following = next_values(tape_of(make_network(seed=1)), batch)
    y = targets(tape_of(make_network()), following, batch, GAMMA, double=False)
    assert y[batch.terminated].equal(batch.rewards[batch.terminated])


def test_loss_and_gradient_of_a_case_done_by_hand():
    """Errors y - Q of 0.5 and -3: Huber's 0.125 and 2.5; their gradients by Q -0.5 and, clipped, 1; over two."""
    values = torch.tensor([[1.0, 2.0, 7.0], [4.0, 0.0, 7.0]], requires_grad=True)
    loss = dqn_loss(values, torch.tensor([1, 0]), torch.tensor([2.5, 1.0]))
    assert [term.item() for term in loss] == [1.3125, 1.75, 3.0]
    loss.total.backward()
    assert values.grad.tolist() == [[0.0, -0.25, 0.0], [0.5, 0.0, 0.0]]


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("double", [False, True])
def test_the_flat_gradient_is_that_of_the_clipped_error(kind, double):
    """Against autograd of the sum of (clipped error, taken as a constant) times -Q(s, a): DQN's own words."""
    network, target, batch = make_network(kind, 3), make_network(kind, 4), make_batch(kind)
    plain = copy.deepcopy(network)
    dqn = make_dqn(network, target, GorilaConfig(gamma=GAMMA, double_dqn=double))
    flat = dqn.flat
    flat.gradient.fill_(9.0)  # of an earlier minibatch
    loss = dqn.differentiate(batch, *dqn.next_values([batch]))
    chosen = plain(batch.observations)[torch.arange(COUNT), batch.actions]
    following = next_values(AutogradTape(target), batch)
    errors = targets(AutogradTape(plain), following, batch, GAMMA, double) - chosen.detach()
    assert (errors.abs() > 1).any()
    assert (errors.abs() < 1).any()
    (-(errors.clamp(-1, 1) * chosen).mean()).backward()
    for parameter, expected in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6)
    assert flat.gradient.norm() > 0.01
    assert float(loss.absolute_error) == pytest.approx(float(errors.abs().mean()), rel=1e-4)
    assert not dqn.target.gradient.any()
    assert not any(term.requires_grad for term in loss)
    first = flat.gradient.clone()
    with torch.no_grad():  # as an environment may leave it
        dqn.differentiate(batch, *dqn.next_values([batch]))  # the next minibatch
    assert flat.gradient.equal(first)


@pytest.mark.parametrize("double", [False, True])
def test_bfloat16_is_near_float32(double):
    network, target, batch = make_network("image", 3), make_network("image", 4), make_batch("image")
    config = GorilaConfig(gamma=GAMMA, double_dqn=double)
    found = []
    for precision in ("float32", "bfloat16"):
        dqn = make_dqn(network, target, config, precision)
        (following,) = dqn.next_values([batch])
        y = targets(dqn.tape, following, batch, GAMMA, double)
        loss = dqn.differentiate(batch, following)
        found.append((y, loss.total.reshape(1), dqn.flat.gradient.clone()))
    for exact, near in zip(*found, strict=True):
        assert near.dtype == torch.float32
        assert 0 < float((near - exact).norm() / exact.norm()) < 0.1


# ---- actions ---------------------------------------------------------------------------------------------------------


def test_epsilon_greedy_explores_as_often_as_epsilon_says():
    count, epsilon = 40_000, 0.3
    values = torch.tensor([0.0, 2.0, 1.0]).expand(count, 3)
    actions = epsilon_greedy(values, epsilon, torch.Generator().manual_seed(5))
    p = torch.tensor([epsilon / 3, 1 - epsilon * 2 / 3, epsilon / 3])
    assert ((actions.bincount(minlength=3) / count - p).abs() < 4 * (p * (1 - p) / count).sqrt()).all()


def test_epsilon_zero_is_greedy_and_epsilon_one_never_asks_the_network():
    values = torch.randn(500, ACTIONS, generator=torch.Generator().manual_seed(6))
    assert epsilon_greedy(values, 0.0, torch.Generator()).equal(values.argmax(-1))
    blind = [epsilon_greedy(v, 1.0, torch.Generator().manual_seed(7)) for v in (values, -values)]
    assert blind[0].equal(blind[1])


def test_epsilon_falls_linearly_once_learning_begins():
    config = GorilaConfig(min_replay_steps=1000, epsilon_decay_steps=200, epsilon_last=0.2)
    steps = [0, 999, 1000, 1050, 1100, 1200, 10**9]
    assert [epsilon_at(s, config) for s in steps] == pytest.approx([1, 1, 1, 0.8, 0.6, 0.2, 0.2])


# ---- the filter of losses --------------------------------------------------------------------------------------------


def filtered(losses, deviations: float = 3.0, horizon: int = 50) -> tuple[LossFilter, list[bool]]:
    loss_filter = LossFilter(deviations, horizon)
    return loss_filter, [loss_filter.accepts(float(loss)) for loss in losses]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=30))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_the_first_losses_have_their_plain_mean_and_deviation(losses):
    loss_filter, accepted = filtered(losses, horizon=30)
    assert all(accepted)
    assert loss_filter.mean == pytest.approx(np.mean(losses), abs=1e-9)
    assert math.sqrt(loss_filter.variance) == pytest.approx(np.std(losses), rel=1e-6, abs=1e-5)


def test_later_moments_are_exponential():
    losses = np.random.default_rng(8).uniform(1, 2, 200)
    loss_filter, _ = filtered(losses, horizon=20)
    weights = np.full(20, 1 / 20)
    for _ in losses[20:]:
        weights = np.append(weights * (1 - 1 / 20), 1 / 20)
    mean = weights @ losses
    assert loss_filter.mean == pytest.approx(mean)
    assert loss_filter.variance == pytest.approx(weights @ (losses - mean) ** 2)


def test_planted_outliers_are_discarded_and_normal_losses_are_not():
    losses = np.random.default_rng(9).uniform(1, 2, 1000)  # never above mean + 3 deviations, 2.37
    planted = [200, 201, 500, 900]
    losses[planted] = [3.0, 1e30, 50.0, 2.8]
    loss_filter, accepted = filtered(losses)
    assert np.flatnonzero(~np.array(accepted)).tolist() == planted
    assert (loss_filter.discarded, loss_filter.seen) == (len(planted), len(losses))


def test_losses_that_stay_high_are_accepted_after_a_while():
    _, accepted = filtered([*np.random.default_rng(10).uniform(1, 2, 300), *[100.0] * 300])
    assert not any(accepted[300:310])
    assert all(accepted[-100:])
    _, accepted = filtered([*[0.5] * 300, *[1.0] * 300])
    assert not accepted[300]
    assert all(accepted[-100:])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_discarded_and_leaves_the_moments(bad):
    for deviations in (0.0, 3.0):
        loss_filter, accepted = filtered([1.0, bad, 2.0], deviations)
        assert accepted == [True, False, True]
        assert (loss_filter.mean, loss_filter.seen, loss_filter.discarded) == (1.5, 2, 1)


def test_the_filter_can_be_off_and_goes_on_from_its_fields():
    losses = np.random.default_rng(11).lognormal(0, 2, 400)
    assert all(filtered(losses, deviations=0.0)[1])
    whole, accepted = filtered(losses)
    assert not all(accepted)
    restored = LossFilter(**dataclasses.asdict(filtered(losses[:150])[0]))
    assert [restored.accepts(float(loss)) for loss in losses[150:]] == accepted[150:]
    assert restored == whole


# ---- shards ----------------------------------------------------------------------------------------------------------

finite = st.floats(-1e3, 1e3, width=32)


def gradients_of_several_steps(size: int = 7, count: int = 5) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(12)) * torch.logspace(-4, 1, size)


def whole_shard(parameters: torch.Tensor, config: GorilaConfig) -> Shard:
    return Shard(begin_with(parameters), slice(None), config)


@given(st.integers(1, 10**9), st.integers(1, 200))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_slices_fill_the_vector_without_gap_or_overlap(num_parameters, num_shards):
    if num_shards > num_parameters:
        with pytest.raises(PalaError, match=f"has only {num_parameters} parameters"):
            slices(num_parameters, num_shards)
        return
    parts = slices(num_parameters, num_shards)
    assert len(parts) == num_shards
    assert [part.start for part in parts] + [num_parameters] == [0] + [part.stop for part in parts]
    lengths = [part.stop - part.start for part in parts]
    assert min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("optimiser", ["adagrad", "rmsprop"])
def test_the_optimisers_are_torchs(optimiser):
    """RMSprop with hardly any epsilon: torch's is outside the root."""
    config = GorilaConfig(
        optimiser=optimiser, adagrad_learning_rate=0.02,
        rmsprop_learning_rate=0.01, rmsprop_alpha=0.9, rmsprop_epsilon=1e-15,
    )  # fmt: skip
    shard, parameter = whole_shard(torch.ones(7), config), torch.nn.Parameter(torch.ones(7))
    torchs = {
        "adagrad": torch.optim.Adagrad([parameter], lr=0.02, eps=1e-5),
        "rmsprop": torch.optim.RMSprop([parameter], lr=0.01, alpha=0.9, eps=0),
    }[optimiser]
    for gradient in gradients_of_several_steps():
        assert shard.apply(gradient, shard.version)
        parameter.grad = gradient
        torchs.step()
    torch.testing.assert_close(shard.parameters, parameter.data)


def test_rmsprops_epsilon_is_under_the_root():
    config = GorilaConfig(optimiser="rmsprop", rmsprop_learning_rate=0.01, rmsprop_epsilon=4.0)
    shard = whole_shard(torch.zeros(1), config)
    shard.apply(torch.tensor([1e-3]), 0)
    assert float(shard.parameters) == pytest.approx(-0.01 * 1e-3 / 2, rel=1e-5)


@pytest.mark.slow
@given(st.data(), st.sampled_from(["adagrad", "rmsprop"]), st.integers(1, 80))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_sharded_updates_equal_the_unsharded_one_bit_for_bit(data, optimiser, size):
    config = GorilaConfig(optimiser=optimiser)
    vector = st.lists(finite, min_size=size, max_size=size).map(torch.tensor)
    start, gradients = data.draw(vector), data.draw(st.lists(vector, min_size=1, max_size=3))
    parts = slices(size, data.draw(st.integers(1, size)))
    whole = whole_shard(start, config)
    shards = [Shard(begin_with(start), part, config) for part in parts]
    for gradient in gradients:
        whole.apply(gradient, whole.version)
        for shard, part in zip(shards, parts, strict=True):
            shard.apply(gradient[part], shard.version)
    assert torch.cat([shard.parameters for shard in shards]).equal(whole.parameters)
    assert torch.cat([shard.squares for shard in shards]).equal(whole.squares)


def test_a_stale_gradient_is_discarded_and_counted():
    shard = whole_shard(torch.zeros(3), GorilaConfig(max_staleness_updates=2))
    gradient = torch.ones(3)
    assert [shard.apply(gradient, 0) for _ in range(5)] == [True, True, True, False, False]
    assert (shard.version, shard.stale, shard.not_finite) == (3, 2, 0)
    before = shard.parameters.clone()
    assert not shard.apply(gradient, 0)
    assert shard.parameters.equal(before)
    assert shard.apply(gradient, 1)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30], ids=["nan", "inf", "-inf", "overflow"])
@pytest.mark.parametrize("optimiser", ["adagrad", "rmsprop"])
def test_a_poisoned_gradient_is_discarded_and_counted(poison, optimiser):
    shard = whole_shard(torch.zeros(3), GorilaConfig(optimiser=optimiser))
    assert shard.apply(torch.ones(3), 0)
    parameters, squares = shard.parameters.clone(), shard.squares.clone()
    assert not shard.apply(torch.tensor([1.0, poison, 1.0]), 1)
    assert (shard.version, shard.stale, shard.not_finite) == (1, 0, 1)
    assert shard.parameters.equal(parameters)
    assert shard.squares.equal(squares)
    assert shard.apply(torch.ones(3), 1)


@pytest.mark.parametrize("optimiser", ["adagrad", "rmsprop"])
def test_a_shard_of_a_network_learns_what_it_is_taught(optimiser):
    """The parts together: one learner, two shards that own the network's parameters, a fixed minibatch, terminal."""
    network = make_network()
    flat = FlatParameters(network, CPU)
    config = GorilaConfig(optimiser=optimiser, adagrad_learning_rate=0.02, rmsprop_learning_rate=0.02)
    parts = slices(flat.data.numel(), 2)
    shards = [Shard(begin_with(flat.data), part, config) for part in parts]
    batch = make_batch()._replace(terminated=torch.ones(COUNT, dtype=torch.bool))
    tape, losses = tape_of(network), []
    dqn = DQN(network.distribution, tape, flat, tape, flat, config)
    for _ in range(300):
        losses.append(float(dqn.differentiate(batch, *dqn.next_values([batch])).total))
        for shard, part in zip(shards, parts, strict=True):
            shard.apply(flat.gradient[part], shard.version)
            flat.data[part] = shard.parameters
        tape.begin()
    assert losses[-1] < 0.2 * losses[0]


def test_a_shard_that_saved_before_the_others_copied_their_targets_copies_its_own() -> None:
    states = []
    for index, (version, num_targets) in enumerate([(10, 1), (9, 0)]):
        tensors = {name: torch.full((2,), value) for name, value in (("parameters", 1.0), ("squares", 2.0))}
        counters = {"shard": index, "num_shards": 2, "version": version, "num_targets": num_targets}
        counters["filter"] = dataclasses.asdict(LossFilter(5.0, 10))
        states.append(RankState(index, 2, 0, tensors | {"target": torch.full((2,), 3.0)}, {}, {"gorila": counters}))
    begin = assemble(states)
    assert begin.target.tolist() == [3.0, 3.0, 1.0, 1.0]
    assert (begin.version, begin.parameters.tolist(), begin.squares.tolist()) == (10, [1.0] * 4, [2.0] * 4)
    with pytest.raises(PalaError, match="hold no parameters of shard 1 of 2"):
        assemble(states[:1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"total_steps": 50_000}, "'total_steps' is 50000, but learning begins after 'gorila.min_replay_steps'"),
        ({"total_steps": 50_003}, r"\(50000\) and 'gorila.update_period_steps' \(4\), so nothing would be learned"),
        ({"gorila": {"parameters_period_updates": 102}}, "'gorila.parameters_period_updates' is 102, but gradients"),
    ],
)
def test_settings_by_which_little_would_be_learned_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(PalaError, match=sentence):
        from_table({"algorithm": "gorila"} | settings, "Preset")


def test_a_budget_of_one_minibatch_is_taken() -> None:
    assert from_table({"algorithm": "gorila", "total_steps": 50_004}, "Preset").total_steps == 50_004


# ---- roles -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from(["local", "global"]))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_bundled_ranks_do_everything(num_ranks, num_shards, replay):
    config = GorilaConfig(num_shards=num_shards, replay=replay)
    if num_shards > num_ranks:
        with pytest.raises(PalaError, match=f"'gorila.num_shards' is {num_shards}, .* the job has {num_ranks} rank"):
            assign(config, num_ranks)
        return
    roles = assign(config, num_ranks)
    everybody = tuple(range(num_ranks))
    assert roles.actors == roles.learners == roles.replays == everybody
    assert roles.shards == everybody[:num_shards]
    assert all(roles.replay_of(rank) == rank for rank in everybody)
    assert all(roles.sampled_by(rank, everybody) == ((rank,) if replay == "local" else everybody) for rank in everybody)


@st.composite
def separate(draw) -> tuple[GorilaConfig, int]:
    """A configuration of separate roles and the number of ranks that it asks for."""
    actors, learners, shards = (draw(st.integers(1, 12)) for _ in range(3))
    replay = draw(st.sampled_from(["local", "global"]))
    replays = draw(st.integers(1, actors)) if replay == "global" else 0
    config = GorilaConfig("separate", actors, learners, replays, shards, replay)
    return config, actors + learners + shards + replays


@given(separate())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_separate_ranks_have_one_role_each_and_counts_are_as_asked(case):
    config, num_ranks = case
    roles = assign(from_table({"gorila": dataclasses.asdict(config)}, "test").gorila, num_ranks)
    local = config.replay == "local"
    owners = [*roles.shards, *roles.learners, *roles.actors, *(() if local else roles.replays)]
    assert sorted(owners) == list(range(num_ranks))
    counts = (config.num_shards, config.num_learners, config.num_actors, len(roles.actors if local else roles.replays))
    assert tuple(map(len, (roles.shards, roles.learners, roles.actors, roles.replays))) == counts
    assert roles.shards[0] == 0


@given(separate(), st.data())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_every_replay_is_filled_and_sampled_and_every_learner_has_some_whoever_lives(case, data):
    roles = assign(*case)
    assert {roles.replay_of(actor) for actor in roles.actors} == set(roles.replays)
    learners, replays = (
        data.draw(st.just(ranks) | st.lists(st.sampled_from(ranks), min_size=1, unique=True))
        for ranks in (roles.learners, roles.replays)
    )
    sampled = [roles.sampled_by(learner, {*learners, *replays}) for learner in learners]
    assert all(sampled) and set().union(*sampled) == set(replays)
    if roles.replay_is_local and len(learners) <= len(replays):
        assert sum(map(len, sampled)) == len(replays), "shared out"


def test_a_small_job_by_hand():
    config = GorilaConfig("separate", num_actors=3, num_learners=2, num_replays=2, num_shards=1, replay="global")
    assert assign(config, 8) == Roles(
        shards=(0,), replays=(1, 2), learners=(3, 4), actors=(5, 6, 7), replay_is_local=False
    )
    assert [assign(config, 8).replay_of(actor) for actor in (5, 6, 7)] == [1, 2, 1]
    local = assign(GorilaConfig("separate", num_actors=3, num_learners=2), 6)
    assert [local.sampled_by(learner, range(6)) for learner in local.learners] == [(3, 5), (4,)]
    assert local.sampled_by(2, {2, 4, 5}) == (4, 5)
    assert [local.watched_by(rank) for rank in (0, 1, 3)] == [{1, 2, 3, 4, 5}, {0}, {0}]
    assert [assign(config, 8).watched_by(rank) for rank in (2, 6)] == [{0}, {0, 2}]


@pytest.mark.parametrize("num_ranks", [1, 5, 7, 100])
def test_roles_that_do_not_fill_the_ranks_are_refused(num_ranks):
    config = GorilaConfig("separate", num_actors=3, num_learners=1, num_shards=2)
    with pytest.raises(
        PalaError, match=rf"2 shards, 1 learner, 3 actors: 6 ranks, but the job has {num_ranks}; .*-np 6"
    ):
        assign(config, num_ranks)


# ---- mistakes --------------------------------------------------------------------------------------------------------

SEPARATE = {"roles": "separate", "num_actors": 2, "num_learners": 2}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (SEPARATE | {"num_learners": 0}, "'gorila.num_learners' is 0, but 'gorila.roles' is 'separate'"),
        (SEPARATE | {"num_actors": 0}, "'gorila.num_actors' is 0, but 'gorila.roles' is 'separate'"),
        (SEPARATE | {"replay": "global"}, "'gorila.num_replays' is 0, but 'gorila.roles' is 'separate'"),
        (SEPARATE | {"num_replays": 1}, "'gorila.num_replays' is 1, but 'gorila.replay' is 'local'"),
        (SEPARATE | {"replay": "global", "num_replays": 3}, "filled by actors of its own and 'gorila.num_actors' is 2"),
        ({"num_learners": 2}, "'gorila.num_learners' is 2, but 'gorila.roles' is 'bundled', in which every rank acts"),
        ({"num_shards": 0}, "'gorila.num_shards' is 0 but must lie between 1 and"),
        ({"min_replay_steps": 11, "replay_capacity_steps": 10}, "is 10, so learning would never begin"),
        ({"optimiser": "adagard"}, "must be one of 'adagrad', 'rmsprop'; did you mean 'adagrad'?"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(table, words):
    with pytest.raises(PalaError) as caught:
        from_table({"algorithm": "gorila", "gorila": table}, "Preset 'mine.toml'")
    assert str(caught.value).startswith("Preset 'mine.toml': ")
    assert words in str(caught.value)
