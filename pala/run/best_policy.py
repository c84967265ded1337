"""The best policy of a run so far, which the rank that leads keeps. Nothing here is collective."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from pala.config import EnvConfig, facts_of
from pala.run import checkpoint
from pala.run.view import RunView
from pala.system.files import json_text

_NO_EFFECT_ON_RETURNS = [key for key, facts in facts_of(EnvConfig).items() if not facts.changes_returns]


class BestPolicy:
    """The policy of the checkpoint after which training went best, judged by the first 100 episodes that ended after
    it. Episodes that ended before say nothing of it: it may have fallen apart just then."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._value: float | None = None  # mean return of the best so far; None: not looked for yet
        self._held: tuple[dict[str, Tensor], dict[str, Any]] | None = None  # that may be written, and its header

    def judge(
        self, view: RunView, now_s: float, header: dict[str, Any], present: Callable[[], dict[str, Tensor] | None]
    ) -> None:
        """Write the policy that is held, if it was better than any other; and hold the present one. Nothing, as long as
        too few episodes have ended since one is held. `header`: header of the present one. Raises OSError."""
        held, value = self._held, view.mean_since
        if held is not None and value is None:
            return
        if self._value is None:
            kept = kept_best(self._file, header)
            self._value = kept["mean_return"] if kept is not None else -math.inf
        now = present()
        self._held = (now, header) if now is not None else None
        view.watch(now_s)
        if held is not None and value is not None and value > self._value:
            tensors, its_header = held
            checkpoint.save_policy(self._file, tensors, its_header | {"mean_return": value})
            self._value = value


def kept_best(file: Path, header: dict[str, Any]) -> dict[str, Any] | None:
    """Return the header of the best policy that an earlier start has kept, or a rank that led before; None if it was of
    another environment than the policy of `header`, whose returns tell nothing of this one's."""
    kept = checkpoint.policy_header(file) or {}
    value = kept.get("mean_return")
    if not isinstance(value, float) or not math.isfinite(value) or _played(kept) != _played(header):
        return None
    return kept


def _played(header: dict[str, Any]) -> object:
    """Return the environment that a policy's returns are of, as JSON has it. The header may be of any file."""
    config = header.get("config")
    env = config.get("env") if isinstance(config, dict) else None
    if isinstance(env, dict):
        whole = asdict(EnvConfig()) | env  # an early one lacks what has been added since
        env = {key: value for key, value in whole.items() if key not in _NO_EFFECT_ON_RETURNS}
    return json.loads(json_text([header.get("environment"), env]))
