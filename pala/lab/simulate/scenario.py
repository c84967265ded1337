"""A virtual cluster's properties."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    own. By default never."""


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
