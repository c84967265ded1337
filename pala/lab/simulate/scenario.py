"""A virtual cluster's properties, and what happens to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pala.config import Config
from pala.system.errors import PalaError

Range = tuple[float, float]


@dataclass(frozen=True)
class Scenario:
    """One simulated run. Times are seconds of the virtual clock; a range is drawn from uniformly."""

    size: int
    topology: str = "random"
    mixing: str = "uniform"
    max_staleness: int = 10
    budget_steps: int = 100
    steps_per_update: int = 1
    seed: int = 0
    update_s: Range = (0.8, 1.2)
    """One update, with the environment steps before it."""
    slowness: tuple[float, ...] = ()
    """A factor of `update_s` for each rank; empty: 1 for all."""
    pause_probability: float = 0.0
    """Probability that an update also takes `pause_s`."""
    pause_s: Range = (5.0, 50.0)
    model_s: Range = (0.05, 0.3)
    """A model on its way."""
    control_s: Range = (0.01, 0.1)
    """A credit or a stop on its way; it may overtake a model."""
    wake_s: Range = (0.0, 0.01)
    """Time until a waiting rank looks at what has come."""
    again_s: float = 10.0
    """Time until a waiting rank sends once more."""
    patience_s: float = 1e9
    """Time until a waiting rank continues, a peer is left out, and a rank that was away takes peers' models for its
    own. By default never: patience would hide a deadlock."""
    send_buffers: int = 2
    """Snapshots that a rank can have on their way, if the peers that they went to answer."""
    spares: int = 0
    """Number of ranks, the last ones, that sleep until one that trains is dead."""
    wake_up_s: Range = (1.0, 5.0)
    """Time from when a spare hears that it is needed until it can train."""
    leaves: Mapping[int, float] = field(default_factory=dict)
    """Rank -> time at which it is told to leave, which it does after its next update, if others train."""
    deaths: Mapping[int, float] = field(default_factory=dict)
    """Rank -> time of its death."""
    death_notice_s: Range = (0.0, 2.0)
    """Time until a peer hears of a death."""
    death_loss: float = 0.5
    """Probability that a message on its way from a dying rank is lost; one to it always is."""
    stops: Mapping[int, Range] = field(default_factory=dict)
    """Rank -> times at which it is stopped and continues (SIGSTOP, SIGCONT)."""
    cut_s: Range = (0.0, 0.0)
    """Times between which the links are cut between the ranks below `cut_at` and the others; what was sent comes after
    that."""
    cut_at: int = 0
    poison: Mapping[int, Range] = field(default_factory=dict)
    """Ranks whose every update between these two times makes their model NaN."""
    whole_every: int = 1
    """One of this number of sends carries a whole model. A part heals nobody; in all else it counts here as a model."""


def timed_in_updates(scenario: Scenario, delay: float) -> Scenario:
    """Return a scenario whose unit of time is one update, and whose models are on their way for `delay` of them."""
    return replace(
        scenario,
        update_s=(0.95, 1.05),
        model_s=(0.9 * delay, 1.1 * delay),
        control_s=(0.09 * delay, 0.11 * delay),
        wake_s=(0.0, 0.001),
        again_s=20.0 + 5 * delay,
    )


def check_simulated(config: Config) -> None:
    """Raise PalaError for settings of training that simulated ranks cannot have."""
    exchange = config.exchange
    if config.algorithm != "a2c":
        raise PalaError(f"'--algorithm' is '{config.algorithm}', but A2C only is simulated.")
    if exchange.kind == "shared_memory" or exchange.compression != "none" or exchange.has_groups:
        raise PalaError(
            "Simulated ranks exchange whole models, one each: leave 'exchange.compression' and 'exchange.group' out, "
            "and 'exchange.kind' 'shared_memory'."
        )
