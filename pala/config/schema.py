"""The whole configuration: frozen dataclasses, each field with its default, its facts, its meaning, unit and source.

A fact is a range, or who reads a setting, or what it decides (`facts.py`). No other file lists all settings.

A configuration is made in three layers, the later over the earlier: the defaults below, a preset file (TOML,
`configs/`), and dotted options on the command line (`--a2c.learning-rate 1e-3`). An unknown key or a value of the
wrong type is a `PalaError` that names the file, the key and the nearest known key.

Sources: [GALA] Assran et al. 2019, arXiv 1906.04585, and its released settings; [PALA] the PALA paper and its
released settings; [A3C] Mnih et al. 2016, arXiv 1602.01783; [DQN] Mnih et al. 2015, Nature 518; [Gorila] Nair et al.
2015, arXiv 1507.04296.
"Steps" are agent decisions; one Atari step is `frame_skip` emulator frames. `local_` is one rank, `global_` all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pala.config.catalogue import ACTOR_CRITIC, GORILA, ExchangeKind, kind_of
from pala.config.facts import section, setting


@dataclass(frozen=True)
class EnvConfig:
    """The environments of a rank."""

    id: str = "ALE/Pong-v5"
    """Gymnasium id; `module:id` imports the module first. Ids that begin with `ALE/` get the Atari settings of this
    section; all others ignore them, and may have arguments: `FrozenLake-v1(is_slippery=False)`."""
    num_envs: int = setting(16, between=(1, 1e6), changes_returns=False)
    """Environments a rank [GALA: 16]."""
    wrappers: tuple[str, ...] = ()
    """Other than Atari: Gymnasium wrappers around each environment, the innermost first: `FlattenObservation`,
    `RescaleObservation(min_obs=-1, max_obs=1)`, `my_module:MyWrapper`."""
    reset_options: str = setting("", games="others")
    """Other than Atari: the `options` of each reset, as keys with plain values: `low=-0.1, high=0.1` is `{"low": -0.1,
    "high": 0.1}`."""
    episode_info: tuple[str, ...] = setting((), decides="nothing", changes_returns=False)
    """Other than Atari: numbers in the `info` of an episode's last step that are recorded with it, such as
    `is_success`: in metrics, TensorBoard and evaluations."""
    vectorization: Literal["sync", "async"] = setting("sync", games="others", changes_returns=False)
    """Other than Atari: step the environments in this process, or each in a (spawned) process of its own. With `async`
    a script calls `pala.fit` or `pala.evaluate_policy` below `if __name__ == "__main__":`, because each process
    imports the script."""
    restarts: int = setting(3, between=(0, 1e6), decides="nothing", changes_returns=False)
    """Failures of one environment in a row, without a whole episode in between, after which a new one takes its place;
    the next one ends the rank (docs/failing_environments.md)."""
    clip_rewards: Literal["auto", "sign", "none"] = setting("auto", changes_returns=False)
    """Rewards that the learner sees: the sign of each [DQN] or the reward itself. `auto`: sign for Atari, none for
    others. Reported returns are never clipped."""
    normalize_observations: bool = False
    """Vector observations: less their running mean, over their running deviation (docs/environments.md). A2C only."""
    normalize_rewards: bool = False
    """Show the learner rewards over the running deviation of the discounted return. A2C only."""
    image_layout: Literal["auto", "channels_first", "channels_last"] = setting("auto", games="others")
    """Other than Atari: which axis of an image has its channels. `auto`: by its shape (docs/spaces.md)."""
    terminal_on_life_loss: bool = setting(True, games="atari", changes_returns=False)
    """Atari: a lost life ends the return in training, though the game continues [GALA]. Reports count whole games."""
    frame_skip: int = setting(4, between=(1, 1000), games="atari")
    """Atari: emulator frames a step, each with the same action; the last two are max-pooled [DQN]."""
    frame_stack: int = setting(4, between=(1, 1000), games="atari")
    """Atari: frames an observation holds [DQN]."""
    noop_max: int = setting(30, between=(0, 1e6), games="atari", evaluation_may_differ=True)
    """Atari: an episode begins with up to this many no-ops [DQN]."""
    fire_on_reset: bool = setting(True, games="atari")
    """Atari: an episode begins with FIRE in games that need it. After a lost life it is not pressed."""
    repeat_action_probability: float = setting(0.0, between=(0, 1), games="atari", evaluation_may_differ=True)
    """Atari: probability that the emulator repeats the last action ("sticky actions"). [GALA: 0]."""
    full_action_space: bool = setting(False, games="atari")
    """Atari: all 18 actions instead of the game's own."""
    max_episode_frames: int = setting(108_000, between=(1, 1e9), games="atari", evaluation_may_differ=True)
    """Atari: emulator frames after which an episode is truncated; 30 minutes of play are usual today."""
    max_episode_steps: int = setting(0, between=(0, 1e12), games="others")
    """Other than Atari: steps after which an episode is truncated; 0: the environment alone ends it. Returns are of
    episodes that end."""

    @property
    def short_id(self) -> str:
        """The id without module, namespace and arguments; run folders are named after it."""
        return self.id.partition("(")[0].split(":")[-1].split("/")[-1]

    @property
    def is_atari(self) -> bool:
        """Whether the id is that of an Atari game. An environment made in Python wins over the id."""
        return self.id.startswith("ALE/")


Precision = Literal["float32", "bfloat16", "auto"]


@dataclass(frozen=True)
class NetworkConfig:
    """The network of either algorithm. Images get convolutions, vectors an MLP (docs/spaces.md)."""

    conv_channels: tuple[int, int, int] = setting((32, 64, 32), between=(1, 1e6), own_network=False)
    """Channels of the three convolutions, 8x8/4, 4x4/2, 3x3/1 [GALA: 32, 64, 32; DQN: 32, 64, 64]; of images under
    36 pixels they are smaller."""
    conv_hidden: int = setting(512, between=(1, 1e6), own_network=False)
    """Units of the linear layer behind the convolutions [GALA, DQN: 512]."""
    mlp_hidden: tuple[int, ...] = setting((64, 64), between=(1, 1e6), games="others", own_network=False)
    """Units of each hidden layer (tanh) for vector observations; A2C: policy and value apart. Ours."""
    background: float | Literal["auto"] = setting("auto", between=(0, 1), algorithms=ACTOR_CRITIC, own_network=False)
    """Grey, from 0 to 1, that the network takes for black in images: a grey background can stop the first layer's
    filters for good. `auto`: the median pixel of an environment's first frame, found when a run starts, and then kept.
    0: none [GALA]. Ours (results/backgrounds/)."""
    memory: Literal["none", "lstm", "gru"] = setting("none", own_network=False)
    """A memory of 256 units behind each trunk: an LSTM [A3C], or a GRU (docs/masks_and_memory.md). Autograd makes its
    passes, back to the first step of a rollout (`a2c.rollout_steps`). A2C only."""
    precision: Precision = "auto"
    """Precision of activations and of the weights they meet, in training; heads, parameters, optimiser and evaluation
    are float32. bfloat16 is faster where the processor or GPU has its instructions, and several times slower elsewhere:
    `auto` takes it for images where all ranks have them, and float32 otherwise. On a GPU convolutions in float32 are
    torch's, by default in TF32. Ours."""
    passes: Literal["auto", "autograd"] = setting("auto", own_network=False)
    """Forward and backward passes: `auto` uses hand-written ones for images, as CUDA graphs on a GPU; `autograd` leaves
    all to torch. Equal up to rounding."""
    custom: str = ""
    """A network of your own in place of these: `module:Name` or `module:Name(width=256)` with plain values, a class or
    function `(observation_space, num_outputs)` -> torch module with `trunk` and `heads` (docs/own_network.md). The
    widths above and `passes` are then not read. Ours."""


@dataclass(frozen=True)
class A2CConfig:
    """Advantage actor-critic [A3C], synchronous within a rank."""

    rollout_steps: int = setting(5, between=(1, 1e6))
    """Steps of each environment between two updates [GALA: 5; PALA: 20]."""
    gamma: float = setting(0.99, between=(0, 1))
    """Discount a step [GALA]."""
    gae_lambda: float = setting(1.0, between=(0, 1))
    """Lambda of generalised advantage estimation (arXiv 1506.02438). 1 gives plain n-step returns [GALA]."""
    learning_rate: float | Literal["auto"] = setting("auto", between=(0, 1e6))
    """Step size of RMSprop. `auto`: 7e-4, GALA's for one learner; where N models are mixed (gossip, `shared_memory`),
    N/2 times that, at least 1 and at most 2 times. Ours (docs/learning.md)."""
    learning_rate_decay: Literal["none", "linear"] = setting("none", follows_budget=("linear",))
    """`linear`: falls to 0 at the end of the budget of global steps [GALA: none]."""
    learning_rate_warmup_updates: int = setting(0, between=(0, 1e9))
    """A rank's first updates, over which the rate rises in equal steps. A spare that takes a place and a rank that was
    poisoned begin so, too. 0: none [GALA]. Ours (results/mixing/)."""
    momentum: float = setting(0.5, between=(0, 0.999))
    """Quasi-global momentum (arXiv 2102.04761): a rank moves by its own step and by this multiple of the running mean
    of its model's moves, exchange included (decay 0.8 an update). The mean of the models goes 1 / (1 - momentum) times
    as far; the noise of a rank's own step grows hardly at all. 0 turns it off. With models that are under way for
    several updates 0.75 learns badly, or nothing. Ours (results/mixing/)."""
    rmsprop_alpha: float = setting(0.99, between=(0, 0.999999))
    """Decay of the mean square an update [GALA]."""
    rmsprop_epsilon: float = setting(1e-5, between=(1e-15, 1))
    """Keeps the division finite [GALA: 1e-5]."""
    rmsprop_bias_correction: bool = True
    """Divide the mean squares, which begin at 0, by 1 - alpha^t at the t-th update, as Adam does (arXiv 1412.6980,
    section 3). Without it [GALA] the first step is 10 times as long as the rate says, 1 / sqrt(1 - alpha), and can ruin
    the network."""
    rmsprop_epsilon_inside_root: bool = False
    """False: g / (sqrt(v) + eps), as PyTorch and [GALA]. True: g / sqrt(v + eps), as TensorFlow."""
    value_coefficient: float = setting(0.5, between=(0, 1e6))
    """Weight of the value loss, the mean squared advantage [GALA]."""
    entropy_coefficient: float = setting(0.01, between=(0, 1e6))
    """Weight of the policy's entropy [GALA]."""
    max_gradient_norm: float = setting(0.5, between=(0, 1e9))
    """The gradient's global L2 norm is clipped to this; 0 turns clipping off [GALA]."""


TopologyName = Literal["auto", "random", "ring", "exponential", "complete"]
MixingName = Literal["uniform", "push_sum", "paired"]
CompressionName = Literal["none", "bfloat16", "top_k"]


@dataclass(frozen=True)
class ExchangeConfig:
    """The exchange between ranks."""

    kind: Literal["gossip", "shared_memory", "allreduce", "none"] = "gossip"
    """`gossip`: PALA. `shared_memory`: GALA-A2C, on one host. `allreduce`: synchronous A2C, gradients averaged at each
    update. `none`: independent learners."""
    topology: TopologyName = setting("auto", kinds=("gossip", "shared_memory"))
    """The peers that a rank sends to: a new random one each round; the next rank; the rank 1, 2, 4, … further on; all.
    `auto`: random; with `shared_memory`, ring [GALA]."""
    mixing: MixingName = setting("paired", kinds=("gossip",))
    """`paired`: two ranks move towards each other by the same amount, so that no rank's learning is taken back, however
    old the models are (docs/how_gossip_works.md). `uniform`: x <- (x + sum of models) / (1 + k) [GALA, PALA].
    `push_sum`: weighted so that skipped messages do not bias the mean (arXiv 1811.10792)."""
    max_staleness: int = setting(10, between=(0, 1e9), kinds=("gossip", "shared_memory"))
    """Updates a rank may make since its last mix before it must wait for a peer; 0 waits after every update. Ours;
    [GALA] calls it sync_freq: 100 million, never, in its example."""
    patience_s: float = setting(5.0, between=(0.5, 1e6), kinds=("gossip",))
    """Seconds after which a rank continues without a model that it waits for, and leaves out a silent peer until that
    answers; at least five of the rank's own updates. Ours."""
    compression: CompressionName = setting("none", kinds=("gossip",))
    """The part of a model that is sent, for slow links. `none`: all, float32 [GALA, PALA]. `bfloat16`: all, rounded,
    half the bytes (ours). `top_k`: what changed most since it was last sent (parallel Sarsa, Grounds & Kudenko)."""
    group: int | Literal["host"] = setting(1, between=(1, 1e6), kinds=("gossip",))
    """Ranks of one host that hold one model: their gradients are averaged at each update, and the first of them gossips
    for all (docs/exchanges.md). `host`: all ranks of a host; 1: no groups. Ours, after SGP's all-reduce in a node."""
    top_k_fraction: float = setting(
        0.05, between=(1e-9, 1), kinds=("gossip",), unless={"exchange.compression": ("none", "bfloat16")}
    )
    """`top_k`: the most parameters a message holds, as a fraction of all; from 0.5 on models go whole. Ours."""

    @property
    def has_groups(self) -> bool:
        """Whether ranks of a host may hold one model."""
        return self.group != 1

    @property
    def graph(self) -> str:
        """The topology, with `auto` decided."""
        return kind_of(self).default_topology if self.topology == "auto" else self.topology


@dataclass(frozen=True)
class GorilaConfig:
    """Gorila: DQN whose actors, learners, replay and parameter server are roles that ranks take [Gorila]."""

    roles: Literal["bundled", "separate"] = "bundled"
    """`bundled`: every rank acts, learns and holds replay [Gorila]; the first `num_shards` ranks serve parameters too
    (ours). `separate`: a rank has one role, and the four numbers below add up to the number of ranks."""
    num_actors: int = setting(0, between=(0, 1e6))
    """Ranks that play, if `separate`."""
    num_learners: int = setting(0, between=(0, 1e6))
    """Ranks that compute gradients, if `separate`."""
    num_replays: int = setting(0, between=(0, 1e6))
    """Ranks that hold replay, if `separate` and `replay` is global; each needs an actor that fills it."""
    num_shards: int = setting(1, between=(1, 1e6))
    """Ranks that serve parameters, each a slice of all [Gorila: 31]."""
    replay: Literal["local", "global"] = "local"
    """`local`: steps stay on their actor's rank, whose learner samples them (`separate`: learners share out the
    actors) [Gorila]. `global`: every learner samples from all ranks that hold replay [Gorila]."""
    replay_capacity_steps: int = setting(1_000_000, between=(1, 1e12))
    """Steps that the replay holds over all ranks, 7 KB each for Atari; the oldest are overwritten [DQN: 1 M; Gorila:
    1 M a bundle]. Over all ranks is ours: more ranks on a host need no more memory."""
    min_replay_steps: int = setting(50_000, between=(1, 1e12))
    """Steps over all ranks before learning begins [DQN], also after a resume. Each replay waits for its own share of
    them."""
    minibatch_size: int = setting(32, between=(1, 1e6))
    """Transitions sampled for one gradient [DQN]."""
    update_period_steps: int = setting(4, between=(1, 1e9))
    """Environment steps over all ranks for each gradient over all learners, who wait rather than learn more often
    [DQN: 4]."""
    patience_s: float = setting(60.0, between=(1, 1e6))
    """Seconds after which a rank that takes in no message (stopped, or behind a link that is cut) counts as silent. An
    actor plays on without a silent replay; the job ends if a shard, or all who have another role, are silent. Ours;
    longer than gossip's, which never ends a job."""
    parameters_period_updates: int = setting(1, between=(1, 1e9))
    """Gradients of a learner between two fetches of parameters; an actor's rank without learner: as many times
    `update_period_steps` of its steps [Gorila: 1, and waits for them]."""
    gamma: float = setting(0.99, between=(0, 1))
    """Discount a step [DQN]."""
    double_dqn: bool = False
    """The online network chooses the next action that the target network values (van Hasselt et al. 2016)."""
    target_period_updates: int = setting(60_000, between=(1, 1e12))
    """Server updates between two copies of the parameters to the target network [Gorila: 60,000; DQN: 10,000]."""
    optimiser: Literal["adagrad", "rmsprop"] = "adagrad"
    """Optimiser of the server: AdaGrad [Gorila]; RMSprop, not centred [DQN: centred]."""
    adagrad_learning_rate: float = setting(1e-2, between=(0, 1e6), unless={"gorila.optimiser": ("rmsprop",)})
    """Step size of AdaGrad. Ours; not tuned (docs/gorila.md)."""
    rmsprop_learning_rate: float = setting(2.5e-4, between=(0, 1e6), unless={"gorila.optimiser": ("adagrad",)})
    """Step size of RMSprop [DQN]."""
    rmsprop_alpha: float = setting(0.95, between=(0, 0.999999), unless={"gorila.optimiser": ("adagrad",)})
    """Decay of the mean square an update [DQN]."""
    rmsprop_epsilon: float = setting(1e-5, between=(1e-15, 1), unless={"gorila.optimiser": ("adagrad",)})
    """Added to the mean square, under the root [DQN: 0.01 for gradients summed over 32 transitions; here they are
    averaged, so 0.01 / 32²]."""
    max_staleness_updates: int = setting(100, between=(0, 1e12))
    """A shard discards gradients computed with parameters older than this number of its updates [Gorila]. The number is
    ours; usual are, for each learner, up to twice `parameters_period_updates` and the minibatches that a step of its
    environments pays for."""
    loss_filter_deviations: float = setting(5.0, between=(0, 1e6))
    """A learner discards gradients whose mean absolute error is more than this number of standard deviations above the
    running mean ("several" [Gorila]); 0 discards none. The number is ours, and so is that mean and deviation remember
    1,000 gradients, before which none is discarded."""
    epsilon_last: float = setting(0.1, between=(0, 1))
    """Probability of a random action after `epsilon_decay_steps`; until learning begins it is 1 [DQN, Gorila]."""
    epsilon_decay_steps: int = setting(1_000_000, between=(1, 1e12))
    """Steps over all ranks, since learning began, in which epsilon falls linearly [DQN: 1 M "frames", which the
    released code counts in steps]."""


@dataclass(frozen=True)
class RunConfig:
    """The run's folder, and how often it is written to."""

    dir: str = "runs"
    """Folder in which the run's own folder is made. An existing run is never written over."""
    name: str = ""
    """Name of the run's folder; empty: preset (or environment) and the time of the start."""
    device: str = setting("auto", decides="speed")
    """`cpu`, `cuda` (ranks of a node take its GPUs in turn), `cuda:0` (shared), or `auto`."""
    threads: int = setting(0, between=(0, 4096), decides="speed")
    """Threads a rank, for torch and Atari alike; 0: the rank's share of the cores that it may use, no more
    than a container's quota or Slurm's allocation has."""
    console: Literal["auto", "panel", "lines", "none"] = "auto"
    """Output of the lowest rank that lives: a live panel on a terminal or in a notebook, lines in a log file."""
    spares: int = setting(0, between=(0, 1e6), decides="speed")
    """Number of the job's ranks, the last ones, that do not train but sleep until another dies, and then take its
    place. With `exchange.kind` `gossip` or Gorila, and where a job outlives its ranks (docs/reliability.md)."""
    start_timeout_s: float = setting(300.0, between=(1, 1e6))
    """Seconds in which all ranks must have come up, or `pala train -n` ends the job: a rank that ends before MPI
    has begun leaves the others waiting. A cold file system of a cluster takes minutes."""
    log_interval_s: float = setting(5.0, between=(0.1, 86400))
    """Seconds between two records of the metrics, and two lines in a log file."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    checkpoint_interval_s: float = setting(120.0, between=(0.1, 1e7))
    """Seconds between two checkpoints of a rank."""
    trace: bool = False
    """Record each rank's timeline: where its time goes, and each message (`pala trace RUN`, docs/timeline.md)."""


@dataclass(frozen=True)
class EvaluationConfig:
    """The evaluation at the end of training, and the defaults of `pala evaluate`."""

    episodes: int = setting(30, between=(0, 1e6))
    """Whole episodes; 0 leaves the evaluation out."""
    num_envs: int = setting(16, between=(1, 1e4))
    """Episodes played at the same time."""
    max_episode_steps: int = setting(100_000, between=(1, 1e12), games="others")
    """Other than Atari: steps after which an episode is cut, for environments without an end. Ours."""
    greedy: bool = False
    """The most probable action instead of a sampled one [PALA and GALA sample]; Gorila: never a random one."""
    epsilon: float = setting(0.05, between=(0, 1), evaluation_may_differ=True, algorithms=("gorila",))
    """Gorila: probability of a random action instead of the best, unless `greedy` [DQN, Gorila: 0.05]."""
    timeout_s: float = setting(14400.0, between=(1, 1e6))
    """Seconds after which the evaluation at the end of training is given up; the run is complete all the same."""

    @property
    def episodes_by_hand(self) -> int:
        """Episodes of an evaluation that is asked for by hand: 100 where training makes none."""
        return self.episodes or 100


@dataclass(frozen=True)
class Config:
    """Everything that decides a run, except the number of ranks, which is mpirun's."""

    algorithm: Literal["a2c", "gorila"] = "a2c"
    """`a2c`: actor-learners, as the sections `a2c` and `exchange` say. `gorila`: DQN with a parameter server,
    as the section `gorila` says."""
    total_steps: int = setting(2_500_000, between=(1, 1e14))
    """Budget of environment steps over all ranks; of Atari 10 million frames [GALA: 40 M]. Ours."""
    seed: int = setting(1, between=(0, 2**63 - 1))
    """All random streams derive from (seed, rank, purpose)."""
    env: EnvConfig = section(EnvConfig)
    network: NetworkConfig = section(NetworkConfig)
    a2c: A2CConfig = section(A2CConfig, algorithms=ACTOR_CRITIC)
    exchange: ExchangeConfig = section(ExchangeConfig, algorithms=ACTOR_CRITIC)
    gorila: GorilaConfig = section(GorilaConfig, algorithms=("gorila",))
    run: RunConfig = section(RunConfig, decides="nothing")
    evaluation: EvaluationConfig = section(EvaluationConfig, decides="nothing")

    @property
    def steps_per_update(self) -> int:
        """Environment steps of one rank of an actor-critic between two updates."""
        return self.env.num_envs * self.a2c.rollout_steps

    @property
    def exchange_kind(self) -> ExchangeKind:
        """The row of the catalogue that says how the ranks learn together."""
        return GORILA if self.algorithm == "gorila" else kind_of(self.exchange)
