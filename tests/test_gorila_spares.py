"""Gorila's spares in whole trainings, on threads: ranks that die or leave are replaced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from test_memory import (
    ENDLESS,
    GORILA,
    SEPARATE,
    Trained,
    gorila,
    leave_at,
    own_steps,
    ranks_in,
    stop_when,
    stopped_well,
    train,
)

from pala.config import Config, GorilaConfig
from pala.system.errors import EndError
from pala.transport.faults import Fault, fail_at, fail_at_message
from pala.transport.memory import Killed

BUNDLED = replace(GORILA, num_shards=1)
FEW = replace(SEPARATE, num_shards=1, num_learners=1, num_actors=2)  # ranks: shard, learner, 2 actors
REMOTE = replace(FEW, replay="global", num_replays=1)  # ranks: shard, replay, learner, 2 actors


def with_spares(folder: Path, spares: int, config: GorilaConfig = BUNDLED, steps: int = ENDLESS) -> Config:
    plain = gorila(folder, config, steps)
    return replace(plain, env=replace(plain.env, id="Paced-v0"), run=replace(plain.run, spares=spares))


# ---- whole trainings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [1, 2])
def test_a_spare_takes_the_place_of_a_bundle(dead: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    job = train(4, with_spares(tmp_path, 1), [fail_at(dead, 5)], on_update=stop_when(3, updates=20))
    assert stopped_well(job, but_for=[dead]) and isinstance(job.results[dead], Killed)
    assert ranks_in(job, "lost_ranks") == [dead] and ranks_in(job, "joined_ranks") == [3]
    assert job.total("gradients_sent", rank=3) >= 19 and own_steps(job.states())[3] > 60
    assert job.total("messages_refused") == 0
