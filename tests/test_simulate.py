"""The simulation: determinism, limits that are known without it, formulas, and what is made of a benchmark's file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pala.lab.simulate import methods, predict, report
from pala.lab.simulate.costs import Costs, control_bytes, costs_of
from pala.lab.simulate.gossip import Cluster, GossipCluster, Link, Prediction, predict_gossip
from pala.lab.simulate.gossip import measured as played
from pala.lab.simulate.groups import group_costs, of_groups
from pala.lab.simulate.methods import halving_doubling_s, predict_allreduce, ring_s
from pala.system.errors import PalaError
from support import REPOSITORY
from support.benchmarks import canned, canned_job

MODEL_BYTES = 4_000_000
COSTS = Costs(
    tuple(np.linspace(0.07, 0.09, 21)), steps_per_update=80, rollout_steps=5, acting_share=0.6, send_s=5e-4,
    receive_s=6e-4, mix_s=3e-4, protocol_s=(28e-6, 3e-8), model_bytes=MODEL_BYTES, max_staleness=10,
    mixing="uniform", threads=1,
)  # fmt: skip
FREE = replace(COSTS, update_quantiles_s=(0.1, 0.1), send_s=0.0, receive_s=0.0, mix_s=0.0, protocol_s=(0.0, 0.0))
INFINITE = {"latency_s": 0.0, "bandwidth_bytes_per_s": float("inf")}
METHODS: dict[str, Callable[[Cluster, Costs], Prediction]] = {
    name: lambda cluster, costs, method=method: method(cluster, costs, 1) for name, method in methods.METHODS.items()
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pala.lab.simulate.gossip._MOST_UPDATES_A_RANK", 60)


def efficiency(prediction: Prediction, cluster: Cluster, costs: Costs) -> float:
    return prediction.steps_per_s / (cluster.ranks * costs.steps_per_s)


# ---- what is known without it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_same_from_the_same_seed(method: str) -> None:
    cluster = Cluster(5, ranks_per_host=2, straggler=2.0)
    assert METHODS[method](cluster, COSTS) == METHODS[method](cluster, COSTS)


@pytest.mark.slow
def test_another_seed_gives_another_run() -> None:
    cluster = Cluster(5, ranks_per_host=2)
    assert predict_gossip("random", cluster, COSTS, 1) != predict_gossip("random", cluster, COSTS, 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [2, 9])
@pytest.mark.slow
def test_where_nothing_costs_anything_nothing_is_lost(method: str, ranks: int) -> None:
    cluster = Cluster(ranks, ranks_per_host=4, **INFINITE)
    prediction = METHODS[method](cluster, FREE)
    assert efficiency(prediction, cluster, FREE) == pytest.approx(1, abs=1e-6)
    assert prediction.wait_share == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_all_wait_for_a_straggler_by_allreduce_and_nobody_by_gossip() -> None:
    cluster = Cluster(64, straggler=4.0, **INFINITE)
    assert efficiency(predict_allreduce(cluster, FREE, 1), cluster, FREE) == pytest.approx(1 / 4)
    cluster = Cluster(64, straggler=4.0)
    others = 63 * COSTS.steps_per_s
    for topology in ("random", "exponential", "ring"):
        prediction = played(GossipCluster(cluster, COSTS, topology, 1), 10, 60)
        assert 0.95 * others < prediction.steps_per_s < 64 * COSTS.steps_per_s


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_prediction_lasts_as_long_as_the_updates_of_a_rank_that_is_not_slow(ranks: int) -> None:
    cluster = GossipCluster(Cluster(ranks, straggler=4.0, **INFINITE), FREE, "ring", 1)
    played(cluster, 2, 8)
    assert cluster.now == pytest.approx(8 * FREE.update_s * (4 if ranks == 1 else 1))


def test_who_must_mix_after_each_update_waits_for_the_straggler() -> None:
    """A ring with staleness 0 goes round at the slow rank's pace."""
    cluster = Cluster(8, straggler=4.0, **INFINITE)
    prediction = predict_gossip("ring", cluster, replace(FREE, max_staleness=0), 1)
    assert efficiency(prediction, cluster, FREE) < 1 / 3.9 and prediction.wait_share > 0.6


# ---- the network and the cores ---------------------------------------------------------------------------------------


def test_messages_on_one_link_go_one_after_another() -> None:
    link = Link(bytes_per_s=100.0)
    assert link.carry(1.0, 50) == (1.0, 1.5)
    assert link.carry(1.2, 100) == (1.5, 2.5)
    assert link.carry(9.0, 100) == (9.0, 10.0)
    assert (link.carried_bytes(9.25), link.carried_bytes(11.0)) == (175, 250)


def in_phase(cluster: GossipCluster) -> GossipCluster:
    """The cluster with all ranks' first updates begun at once, as at the start of a job."""
    cluster._events = [event for event in cluster._events if event[2] != cluster._finish_update]
    cluster._phases[:] = 1.0
    for rank in cluster.ranks:
        cluster._start_update(rank)
    return cluster


def deliveries(cluster: Cluster, costs: Costs, until_s: float) -> list[tuple[float, int, int]]:
    """When each model was received, by whom and from whom."""
    seen = []

    class Watched(GossipCluster):
        def _take_in(self, ticket: int) -> None:
            message = self.on_their_way[ticket]
            seen.append((self.now, message.sender, message.receiver))
            super()._take_in(ticket)

    in_phase(Watched(cluster, costs, "ring", 1)).play_until(until_s)
    return seen


def test_a_message_is_seen_between_two_steps() -> None:
    """Updates of 100 ms, of which five steps are the first half. Rank 0's first model is announced at its end, 100 ms,
    when rank 1 begins its next update and looks."""
    seen = deliveries(Cluster(2, **INFINITE), replace(FREE, acting_share=0.5), 0.95)
    assert seen[0] == pytest.approx((0.1, 0, 1))
    assert all(round(1000 * time_s) % 100 in (0, 10, 20, 30, 40, 50) for time_s, _, _ in seen)


def test_a_slow_link_delays_a_model_by_its_length() -> None:
    """In step, two hosts: announced at 100 ms, let go at 100 + latency, and sent for 1 s; seen at the next look."""
    link = {"latency_s": 0.002, "bandwidth_bytes_per_s": MODEL_BYTES / 1.0}
    costs = replace(FREE, acting_share=1.0, max_staleness=100)  # looks every 20 ms, and never waits
    first = deliveries(Cluster(2, ranks_per_host=1, **link), costs, 2.0)[0]
    # announced 102 -> seen 120; answered 122 -> seen 140; sent 140 to 1142 ms -> seen 1160
    assert first[0] == pytest.approx(1.160)


def test_what_was_sent_was_received_or_is_on_its_way() -> None:
    for topology in ("random", "complete"):
        cluster = GossipCluster(Cluster(12, ranks_per_host=3, bandwidth_bytes_per_s=1e8), COSTS, topology, 3)
        for time_s in (0.5, 1.0, 3.0):
            cluster.play_until(time_s)
            received = sum(rank.state.counts["models_received"] for rank in cluster.ranks)
            models = [(one.sender, one.receiver) for one in cluster.on_their_way.values() if one.bulk]
            assert received + len(models) == cluster.models_sent > 0
            assert len(models) == len({*models}), "process lock: two models to one peer"


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 7, 8, 100])
def test_allreduce_step_by_step(hosts: int) -> None:
    num_bytes, latency_s, rate = 1000.0, 0.01, 500.0
    steps = [num_bytes / hosts] * (2 * (hosts - 1))
    assert ring_s(hosts, num_bytes, latency_s, rate) == pytest.approx(sum(latency_s + s / rate for s in steps))
    steps, vector, group = [], num_bytes, 1
    while 2 * group <= hosts:
        group, vector = 2 * group, vector / 2
        steps += [vector, vector]  # halved on the way in, doubled on the way out
    steps += [num_bytes, num_bytes] if group < hosts else []
    slow = sum(latency_s + s / rate for s in steps)
    assert halving_doubling_s(hosts, num_bytes, latency_s, rate) == pytest.approx(slow)


@pytest.mark.slow
def test_a_ring_is_further_apart_than_random_peers_and_still_drifts() -> None:
    ring, random = (played(GossipCluster(Cluster(64), COSTS, topology, 1), 20, 100) for topology in ("ring", "random"))
    assert ring.distance is not None and random.distance is not None
    assert ring.distance > 2 * random.distance > 1 and ring.distance_grows and not random.distance_grows


# ---- from a benchmark's file to tables -------------------------------------------------------------------------------


def measured(ranks: int = 2, **launched: Any) -> dict[str, Any]:
    """A benchmark.json with the figures that are read here."""
    job = canned_job(ranks)
    job["message_bytes"] = dict.fromkeys(job["exchanges"], MODEL_BYTES + 128)
    job["of_ranks"] = [rank | {"host": launched.get("host", "h{}").format(i)} for i, rank in enumerate(job["of_ranks"])]
    for round_ in job["rounds"]:
        round_["model_us"] = [{"send": 500.0, "receive": 600.0, "mix": 300.0}] * ranks
        for row in round_["training"]:
            figures = {"update_quantiles_s": [0.06, 0.08, 0.12], "updates": 30}
            row["ranks"] = [rank | figures for rank in row["ranks"]]
            for rank in row["ranks"]:
                rank["time"] |= {"environment": 0.25, "inference": 0.35, "update": 0.4}
    result = canned(job)
    result["options"] |= {"launcher": launched.get("launcher", "mpirun -np {ranks}")}
    return result


def test_costs_come_from_training_without_exchange() -> None:
    costs = costs_of(measured(host="h"), Path("b.json"))
    assert costs.steps_per_s == pytest.approx(1100)  # the median of none's rounds
    assert (costs.send_s, costs.receive_s, costs.mix_s) == pytest.approx((5e-4, 6e-4, 3e-4))
    assert costs.acting_share == pytest.approx(0.6) and costs.model_bytes == MODEL_BYTES
    assert costs.steps_per_update == 80
    low, middle, high = costs.update_quantiles_s
    assert (middle / low, high / low) == pytest.approx((8 / 6, 12 / 6))
    assert control_bytes(2) == 128 and control_bytes(9) == 192


def test_ranks_are_beside_each_other_on_their_own_host_alone() -> None:
    """One rank on each of two machines of a core."""
    benchmark = measured()
    benchmark["machine"]["cores"] = 1
    assert costs_of(benchmark, Path("b.json")).threads == 1
    for together in ({"host": "h"}, {"launcher": "python launch/virtual_hosts.py --hosts 2 --"}):
        benchmark = measured(**together)
        benchmark["machine"]["cores"] = 1
        with pytest.raises(PalaError, match="no job has a core for each rank"):
            costs_of(benchmark, Path("b.json"))


@pytest.mark.slow
def test_a_group_waits_for_its_slowest_and_sends_for_all() -> None:
    cluster = Cluster(32, ranks_per_host=8, **INFINITE)
    spread = replace(FREE, update_quantiles_s=(0.01, 0.02, 0.03))
    assert group_costs(spread, 1) == spread and of_groups(cluster, 1) == cluster
    grouped = group_costs(spread, 4)
    mean_s = np.random.default_rng(1).uniform(0.01, 0.03, (100_000, 4)).max(axis=1).mean()
    assert grouped.steps_per_update == 4 * spread.steps_per_update
    drawn = grouped.draw(np.linspace(0, 1, 10_001)).mean()
    assert drawn == pytest.approx(mean_s, rel=0.01) and grouped.update_quantiles_s[-1] == 0.03
    alone = predict_gossip("random", cluster, FREE, 1)
    together = predict_gossip("random", of_groups(cluster, 4), group_costs(FREE, 4), 1)
    assert together.steps_per_s == pytest.approx(alone.steps_per_s, rel=0.01)
    assert together.bytes_per_s < 0.3 * alone.bytes_per_s


@pytest.mark.slow
def test_predictions_as_a_user_starts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = tmp_path / "benchmark.json.gz", tmp_path / "out"
    file.write_bytes(gzip.compress(json.dumps(measured(host="h")).encode()))  # as in results/
    options = ["--ranks", "2", "8", "80", "--methods", "ring", "allreduce", "--ranks-per-host", "4", "--group", "4"]
    predict.run(["--benchmark", str(file), "--output", str(output), *options])
    printed = capsys.readouterr().out
    for expected in (
        "ring: not two or more groups of 4 ranks.", "One rank 4 times slower",
        "| ring      |    80 |", "| allreduce |    80 |",
    ):  # fmt: skip
        assert expected in printed, expected
    assert "groups of 4 ranks, each with one model; its waiting and MB/s are between groups only." in printed
    result = json.loads((output / "simulation.json").read_text())
    assert len(result["predictions"]) == 2 * 2 * 3 and result["options"]["seed"] == 1 and result["versions"]
    blank = [row for row in result["predictions"] if "reason" in row]
    assert len(blank) == 2 and all("steps_per_s" not in row for row in blank)
    assert (output / "simulation.md").read_text() in printed
    assert (output / "simulation.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Name the measured costs: `--benchmark FILE`"),
        (["--ranks"], "'--ranks' names nothing"),
        (["--ranks", "1"], "'--ranks' has 1 but every number must lie between 2 and 10000"),
        (["--ranks", "20000"], "'--ranks' has 20000 but"),
        (["--methods", "gosip"], "'--methods': 'gosip' is none of random"),
        (["--latency-us", "inf"], "'--latency-us' is inf but must be a number of at least 0"),
        (["--seed", "-1"], "'--seed' is -1 but must be a number of at least 0"),
        (["--bandwidth-gbit", "0"], "'--bandwidth-gbit' is 0 but must lie above 0"),
        (["--nonsense"], "the command line was not understood"),
        (["--benchmark", "none.json"], "'none.json' does not exist"),
        (["--benchmark", "text.json"], "'text.json' is not a benchmark.json of `pala benchmark`"),
        (
            ["--benchmark", "cut.json.gz"],
            "'cut.json.gz' is not a benchmark.json",
        ),
        (["--benchmark", "old.json"], "'old.json' lacks the times of single updates and models"),
        (["--benchmark", "top_k.json"], "'top_k.json' was measured with top_k"),
        (["--benchmark", "slow.json"], "'slow.json' was measured with '--slowdown 4'"),
        (["--methods", "ring", "--ranks", "4", "--group", "4"], "nothing to simulate: not two or more groups"),
        (
            ["--benchmark", "rounded.json", "--methods", "allreduce"],
            "to simulate: not from costs of 'bfloat16'",
        ),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.json").write_text("no JSON")
    Path("cut.json.gz").write_bytes(gzip.compress(b"{}")[:15])
    Path("old.json").write_text(json.dumps(canned(canned_job(1))))
    top_k = measured(host="h")
    top_k["config"]["exchange"]["compression"] = "top_k"
    Path("top_k.json").write_text(json.dumps(top_k))
    rounded = measured(host="h")
    rounded["config"]["exchange"]["compression"] = "bfloat16"
    Path("rounded.json").write_text(json.dumps(rounded))
    good = measured(host="h")
    Path("slow.json").write_text(json.dumps(good | {"options": good["options"] | {"slowdown": 4.0}}))
    with pytest.raises(PalaError) as caught:
        predict.run(arguments)
    assert sentence in str(caught.value)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_slow_rank_is_not_waited_for_longer_than_the_patience() -> None:
    cluster = Cluster(2, straggler=200.0, **INFINITE)
    in_step = replace(FREE, max_staleness=0)
    patient, impatient = (
        played(GossipCluster(cluster, replace(in_step, patience_s=s), "ring", 1), 0, 400).steps_per_s
        for s in (1e9, 5.0)
    )
    assert impatient > 5 * patient


def test_who_waits_no_more_takes_a_message_where_it_looks_next() -> None:
    """It was on its way while its receiver waited, and came in the middle of an update."""
    seen: list[float] = []
    cluster = in_phase(GossipCluster(Cluster(2, ranks_per_host=1), FREE, "ring", 1))
    cluster.ranks[1].waiting = True
    cluster._at_poll(1, 0.05, lambda ticket: seen.append(cluster.now), 0)
    cluster.ranks[1].waiting = False
    cluster.play_until(0.09)
    assert seen and seen[0] > 0.05 + 1e-6


def test_a_published_prediction_is_drawn_with_methods_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    file = REPOSITORY / "results/simulation/predict/simulation.json.gz"
    simulation = json.loads(gzip.decompress(file.read_bytes()))
    drawn = list[Any]()
    monkeypatch.setattr(report, "write_picture", lambda figure, output: drawn.append(figure))
    report.draw(simulation, file.with_suffix(".png"))
    for axes in drawn[0].axes:
        labels = [line.get_label() for line in axes.lines]
        assert {"server", "servers", "shared_memory", "gossip, random"} <= {*labels} and len(labels) == 9
    assert "| servers " in report.markdown(simulation)
