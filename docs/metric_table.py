"""The fields of the metrics files, with their units: what docs/metrics.md is made of, and what tests hold records to.

A field with the same name may mean something else in the other algorithm. No torch, no MPI.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pala.config.catalogue import ACTOR_CRITIC


class Metric(NamedTuple):
    """A field of a record."""

    name: str
    record: Literal["every", "start", "episode", "interval"]
    algorithms: tuple[str, ...]  # that write it; none: all
    role: str  # Gorila: on which ranks it is
    unit: str  # empty: a plain number, a list of them, or a name
    meaning: str

    def is_of(self, algorithm: str) -> bool:
        """Return whether this algorithm writes it."""
        return not self.algorithms or algorithm in self.algorithms


_ALL: tuple[str, ...] = ()
_GORILA = ("gorila",)

METRICS = (
    Metric("type", "every", _ALL, "", "", "`start`, `episode` or `interval`"),
    Metric("time_s", "every", _ALL, "", "s", "training time since the run began, over all segments"),
    Metric("local_steps", "every", _ALL, "", "steps",
        "of this rank since the run began, or was resumed with another number of ranks",
    ),
    Metric("global_steps", "every", _ALL, "", "steps",
        "as far as this rank knows, never more than were made. `exchange.kind none`: this rank's times the number of "
        "ranks",
    ),
    Metric("segment", "start", _ALL, "", "", "name of its folder in `checkpoints/`"),
    Metric("rank", "start", _ALL, "", "", "number of the rank, from 0"),
    Metric("ranks", "start", _ALL, "", "ranks", "ranks that train, without spares"),
    Metric("return", "episode", _ALL, "", "score",
        "sum of the unclipped rewards of the whole episode; null, and left out, if it was not finite",
    ),
    Metric("length_steps", "episode", _ALL, "", "steps", "length of the whole episode"),
    Metric("info_KEY", "episode", _ALL, "", "",
        "the number KEY of its last info (`env.episode_info`), or null; in the interval's record the mean",
    ),
    Metric("episodes_left_out", "interval", _ALL, "", "episodes",
        "ended episodes without a record: an interval keeps at most 1,000, evenly sampled",
    ),
    Metric("env_failures", "interval", _ALL, "", "",
        "times that one of its environments failed and was made again (`env.restarts`); the episodes are left out",
    ),
    Metric("local_steps_per_s", "interval", _ALL, "", "steps/s",
        "speed of this rank; the sum over ranks is the speed of the job",
    ),
    Metric("updates", "interval", ACTOR_CRITIC, "", "",
        "of this rank since the run began, with skipped ones; after a change of the number of ranks it continues from "
        "the first rank's",
    ),
    Metric("updates_skipped", "interval", ACTOR_CRITIC, "", "",
        "left out in this interval because the gradient was not finite",
    ),
    Metric("loss_policy", "interval", ACTOR_CRITIC, "", "",
        "the policy's term of the loss before its coefficient",
    ),
    Metric("loss_value", "interval", ACTOR_CRITIC, "", "reward²",
        "the value's term of the loss before its coefficient",
    ),
    Metric("entropy", "interval", ACTOR_CRITIC, "", "nat", "of the policy, before its coefficient"),
    Metric("gradient_norm", "interval", ACTOR_CRITIC, "", "", "L2 norm of the gradient before clipping"),
    Metric("learning_rate", "interval", ACTOR_CRITIC, "", "", "at the time of the record"),
    Metric("consensus_distance", "interval", ACTOR_CRITIC, "", "",
        "L2 distance between this rank's parameters and the mean of the models that it mixes in (`top_k`: over "
        "the parameters that came; `bfloat16`: both rounded). One mix in eight is measured, with `paired` only "
        "where this rank answers; null without one",
    ),
    Metric("consensus_distance_relative", "interval", ACTOR_CRITIC, "", "",
        "`consensus_distance` divided by the L2 norm of this rank's parameters",
    ),
    Metric("own_movement", "interval", ACTOR_CRITIC, "", "",
        "sketch (32 sums) of this rank's own steps; with `movement` it gives *progress kept* "
        "(`pala/a2c/movement.py`)",
    ),
    Metric("movement", "interval", ACTOR_CRITIC, "", "",
        "the same of how this rank's parameters moved in all",
    ),
    Metric("staleness_updates", "interval", ACTOR_CRITIC, "", "updates",
        "the most updates this rank made since its last mix",
    ),
    Metric("push_sum_weight", "interval", ACTOR_CRITIC, "", "", "this rank's weight (1 under `uniform`)"),
    Metric("mixes", "interval", ACTOR_CRITIC, "", "", "times this rank mixed"),
    Metric("models_sent", "interval", ACTOR_CRITIC, "", "", "models sent to peers"),
    Metric("models_received", "interval", ACTOR_CRITIC, "", "",
        "models that came from peers (not counted by `shared_memory`)",
    ),
    Metric("models_mixed", "interval", ACTOR_CRITIC, "", "", "peers' models that were mixed in"),
    Metric("bytes_sent", "interval", _ALL, "", "bytes",
        "of the models sent, headers included; Gorila: of all messages",
    ),
    Metric("models_refused", "interval", ACTOR_CRITIC, "", "",
        "messages that were rejected (not finite, of the wrong size or network, or sent too often)",
    ),
    Metric("models_stale", "interval", ACTOR_CRITIC, "", "",
        "not mixed because this rank or the sender was away meanwhile",
    ),
    Metric("waits_given_up", "interval", ACTOR_CRITIC, "", "",
        "times that this rank's patience ended and it continued without a mix",
    ),
    Metric("sends_without_buffer", "interval", ACTOR_CRITIC, "", "",
        "sends that waited because both send buffers were in use (`shared_memory`: sends skipped because the last one "
        "was unread)",
    ),
    Metric("group", "interval", ACTOR_CRITIC, "", "",
        "number of this rank's group, with `exchange.group`; only its leader sends and mixes",
    ),
    Metric("group_ranks", "interval", ACTOR_CRITIC, "", "ranks", "ranks of that group at its last update"),
    Metric("memory_peak_bytes", "interval", _ALL, "", "bytes", "peak resident memory of this process"),
    Metric("time_environment", "interval", _ALL, "", "fraction", "stepping environments"),
    Metric("time_inference", "interval", _ALL, "", "fraction",
        "forward passes (for acting and learning) and copies to the device",
    ),
    Metric("time_update", "interval", _ALL, "", "fraction",
        "loss, backward pass, optimiser; Gorila: the gradient",
    ),
    Metric("time_exchange", "interval", _ALL, "", "fraction",
        "snapshots, mixing, bookkeeping; `allreduce`: the reduction; Gorila: replay, gradients and parameters, a "
        "shard's work for others",
    ),
    Metric("time_wait", "interval", _ALL, "", "fraction",
        "for a peer because of the staleness bound; `allreduce`: for the slowest rank; Gorila: for a minibatch, a "
        "shard's answer or a message",
    ),
    Metric("time_other", "interval", _ALL, "", "fraction",
        "the rest: logging, checkpoints. The six sum to 1",
    ),
    Metric("updates", "interval", _GORILA, "learner", "",
        "minibatches whose gradient was computed since the run began, filtered ones included",
    ),
    Metric("loss", "interval", _GORILA, "learner", "reward²",
        "Huber loss of the temporal-difference error",
    ),
    Metric("absolute_error", "interval", _GORILA, "learner", "reward",
        "mean absolute temporal-difference error",
    ),
    Metric("action_value", "interval", _GORILA, "learner", "reward", "mean value of the sampled actions"),
    Metric("gradients_sent", "interval", _GORILA, "learner", "", "gradients sent to the shards"),
    Metric("gradients_filtered", "interval", _GORILA, "learner", "",
        "discarded: the error was far above its running mean, or something was not finite",
    ),
    Metric("parameters_received", "interval", _GORILA, "learner, actor", "",
        "slices from shards on other ranks",
    ),
    Metric("server_updates", "interval", _GORILA, "shard", "", "gradients applied since the run began"),
    Metric("gradients_stale", "interval", _GORILA, "shard", "",
        "slices discarded because their parameters were too many updates old",
    ),
    Metric("gradients_not_finite", "interval", _GORILA, "shard", "",
        "slices discarded because they held NaN or infinity",
    ),
    Metric("replay_transitions", "interval", _GORILA, "replay", "", "transitions that can be sampled"),
    Metric("rewards_not_finite", "interval", _GORILA, "replay", "",
        "left out because an environment failed in them: their reward is NaN",
    ),
    Metric("minibatches_owed", "interval", _GORILA, "replay", "",
        "minibatches that may be sampled and that no learner has taken",
    ),
    Metric("epsilon", "interval", _GORILA, "all", "", "probability of a random action"),
    Metric("steps_not_sent", "interval", _GORILA, "actor", "steps",
        "played while its replay was silent or dead, and lost",
    ),
    Metric("messages_refused", "interval", _GORILA, "all", "",
        "of the wrong size or network",
    ),
)  # fmt: skip
"""Every field that training writes, in the order in which docs/metrics.md shows them."""
