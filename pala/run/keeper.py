"""What a rank keeps of a run: its checkpoint; if it leads, the best policy so far; and the final one. Nothing here is
collective."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pala.config import ENV_LEARNING, ENV_OPERATION, EnvConfig, to_table
from pala.exchange.base import Exchange
from pala.run import checkpoint
from pala.run.checkpoint import RankState
from pala.run.run_folder import BEST_POLICY, POLICY
from pala.run.setup import Setup
from pala.run.view import RunView
from pala.system.errors import SaveError, reason
from pala.system.files import json_text
from pala.system.output import say

# Settings without effect on the returns of a policy, which are of whole games, unclipped.
_NO_EFFECT_ON_RETURNS = (*ENV_OPERATION, *ENV_LEARNING)


class Exported(NamedTuple):
    """A policy that is written, or may be."""

    tensors: dict[str, Tensor]
    header: dict[str, Any]


class Keeper:
    """Saves a rank's checkpoints and, if it leads, the best and the final policy."""

    def __init__(self, setup: Setup) -> None:
        self._job, self._config, self._environment = setup.job, setup.config, setup.envs.name
        self._parts, self._segment, self._progress = setup.parts, setup.segment, setup.progress
        self._best = BestPolicy(setup.segment.run / BEST_POLICY)
        self.has_saved = False  # the newest state
        self._saved_lost: Sequence[int] = ()  # ranks that the newest checkpoint calls lost

    def keep(self, exchange: Exchange, view: RunView | None) -> None:
        """Save, and judge the policy held from an earlier checkpoint by `view`, if this rank leads. What cannot be
        written is said; the job goes on."""
        self.save_or_say(exchange)
        self.judge(exchange, view)

    def judge(self, exchange: Exchange, view: RunView | None) -> None:
        """The second half of `keep`."""
        try:
            self._judge(exchange, view)
        except OSError as error:
            self._say(f"the best policy could not be written: {reason(error)}. The job goes on.")

    def save_if_changed(self, exchange: Exchange) -> None:
        """As at an end for which the rank has saved; who took another for gone that stayed has saved that."""
        if not self.has_saved or list(exchange.state().lost) != list(self._saved_lost):
            self.save_or_say(exchange)

    def save_or_say(self, exchange: Exchange) -> None:
        """As `save`, but a file that cannot be written is only said."""
        try:
            self.save(exchange)
        except OSError as error:
            self._say(f"no checkpoint could be written: {reason(error)}. The one before is kept; the job goes on.")

    def save(self, exchange: Exchange | None) -> None:
        """This rank's checkpoint; if its tensors are not finite, the one before is kept. `exchange`: None before
        training. Raises SaveError, and EndError if the run's folder is another job's by now."""
        self.has_saved = False
        self._segment.check_folder()
        tensors, numbers = self._parts.state(exchange)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            self._say("its parameters or optimiser's state are not finite: the checkpoint before is kept.")
            return
        counted = self._progress.counters
        state = exchange.state() if exchange is not None else self._progress.start
        counters = {
            "updates": counted.updates, "applied": counted.applied, "own_steps": counted.local_steps,
            "time_s": counted.time_s, "spares": self._job.spares,
        } | state._asdict() | numbers  # fmt: skip
        streams = {"actions": self._progress.generator.get_state()}
        rank, ranks, signature = self._job.comm.rank, self._job.comm.size, self._parts.flat.signature
        try:
            checkpoint.save_rank(self._segment.path, RankState(rank, ranks, signature, tensors, streams, counters))
        except OSError as error:
            raise SaveError.of(error) from error
        self.has_saved, self._saved_lost = True, state.lost

    def export(self, final: Tensor, global_steps: int) -> None:
        """Write the final policy, of these parameters, which the network has from now on. Raises SaveError, and
        EndError if the run's folder is another job's by now."""
        self._segment.check_folder()
        self._parts.flat.data.copy_(final)
        policy = dict(self._parts.network.state_dict())
        try:
            checkpoint.save_policy(self._segment.run / POLICY, policy, self._header(global_steps))
        except OSError as error:
            raise SaveError.of(error) from error

    def _say(self, text: str) -> None:
        say(f"[rank {self._job.comm.rank}] {text}")

    def _judge(self, exchange: Exchange, view: RunView | None) -> None:
        """Not of independent learners, whose mean says little of one."""
        is_independent = self._config.exchange_kind.independent and self._job.num_trainers > 1
        if view is None or not self._parts.acts or is_independent:
            return
        header = self._header(exchange.global_steps)
        self._best.judge(view, self._progress.counters.time_s, header, self._present)

    def _present(self) -> dict[str, Tensor] | None:
        """A copy of the policy, in the host's memory; None if it is not finite."""
        if not bool(self._parts.flat.data.isfinite().all()):
            return None
        return {name: tensor.detach().cpu().clone() for name, tensor in self._parts.network.state_dict().items()}

    def _header(self, global_steps: int) -> dict[str, Any]:
        """Of a policy that is exported now."""
        return {
            "config": to_table(self._config), "environment": self._environment, "global_steps": global_steps,
            "ranks": self._job.num_trainers, "signature": self._parts.flat.signature,
        }  # fmt: skip


class BestPolicy:
    """The policy of the checkpoint after which training went best, judged by the first 100 episodes that ended after
    it. Episodes that ended before say nothing of it: it may have fallen apart just then."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._value: float | None = None  # mean return of the best so far; None: not looked for yet
        self._held: Exported | None = None

    def judge(
        self, view: RunView, now_s: float, header: dict[str, Any], present: Callable[[], dict[str, Tensor] | None]
    ) -> None:
        """Write the policy that is held, if it was better than any other; and hold the present one. Nothing, as long as
        too few episodes have ended since one is held. `header`: of the present one. Raises OSError."""
        held, value = self._held, view.mean_since
        if held is not None and value is None:
            return
        if self._value is None:
            kept = kept_best(self._file, header)
            self._value = kept["mean_return"] if kept is not None else -math.inf
        tensors = present()
        self._held = Exported(tensors, header) if tensors is not None else None
        view.watch(now_s)
        if held is not None and value is not None and value > self._value:
            checkpoint.save_policy(self._file, held.tensors, held.header | {"mean_return": value})
            self._value = value


def kept_best(file: Path, header: dict[str, Any]) -> dict[str, Any] | None:
    """The header of the best policy that an earlier start has kept, or a rank that led before; None if it was of
    another environment than the policy of `header`, whose returns tell nothing of this one's."""
    kept = checkpoint.policy_header(file) or {}
    value = kept.get("mean_return")
    if not isinstance(value, float) or not math.isfinite(value) or _played(kept) != _played(header):
        return None
    return kept


def _played(header: dict[str, Any]) -> object:
    """What a policy's returns are of, as JSON has it. The header may be of any file."""
    config = header.get("config")
    env = config.get("env") if isinstance(config, dict) else None
    if isinstance(env, dict):
        whole = asdict(EnvConfig()) | env  # an early one lacks what has been added since
        env = {key: value for key, value in whole.items() if key not in _NO_EFFECT_ON_RETURNS}
    return json.loads(json_text([header.get("environment"), env]))
