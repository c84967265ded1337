"""Write the tables of this folder's README.md from its .jsonl files: `python results/library/report.py`.

Each table stands between two comments that name it. A table without data says so.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

HERE = Path(__file__).resolve().parent
WARM_UP = 5  # updates of a job that do not count, as bench.py says
UNITS = {"classifier": "images", "ppo": "steps", "stable_baselines3": "steps"}
NONE_YET = "Not measured yet."

Line = dict[str, Any]


def lines_of(name: str) -> list[Line]:
    """Read a file of JSON lines; empty if there is none."""
    path = HERE / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A table whose first `words` columns are words and whose others are numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) if rows else NONE_YET


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, and the least and the most."""
    if not values:
        return "-"
    middle = f"{median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def examples() -> str:
    """Scores at equal steps of all ranks, and the time of the whole command."""
    runs: dict[tuple[str, int], dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines_of("examples.jsonl"):
        runs[line["example"], line["budget"]][line["ranks"]].append(line)
    rows = []
    for (name, budget), by_ranks in sorted(runs.items()):
        digits = 4 if name == "classifier" else 1
        for ranks, found in sorted(by_ranks.items()):
            each = ", ".join(f"{line['score']:.{digits}f}" for line in sorted(found, key=lambda line: line["seed"]))
            middle = f"{median(line['score'] for line in found):.{digits}f}"
            took = spread([line["took_s"] for line in found])
            rows.append([f"`gossip_{name}.py`", f"{budget:,} {UNITS[name]}", str(ranks), middle, each, took])
    return table(["example", "budget of all ranks", "ranks", "median score", "each seed, from 1", "seconds"], rows, 2)


def key(case: Line) -> tuple[int, int, str, str]:
    """What a case is of, except for its library."""
    return case["parameters"], case["ranks"], case["network"], case["fault"]


def counted(line: Line) -> list[float]:
    """Milliseconds of a job's updates, without the first ones."""
    return [1e3 * value for value in line["update_s"][WARM_UP:]]


def added() -> str:
    """What an exchange adds to an update: a job's median and mean less those of `none` in the same round."""
    jobs = {(key(line["case"]), line["case"]["library"], line["round"]): line for line in lines_of("bench.jsonl")}
    rows = []
    for case in sorted({case for case, library, _ in jobs if library == "none"}, key=_order):
        rounds = sorted(number for of, library, number in jobs if of == case and library == "none")
        alone = {number: counted(jobs[case, "none", number]) for number in rounds}
        cells = [f"{case[0] // 10**6}", str(case[1]), case[2], spread([median(values) for values in alone.values()])]
        for library in ("gossip", "ddp"):
            found = {n: counted(jobs[case, library, n]) for n in rounds if (case, library, n) in jobs}
            medians = [median(values) - median(alone[n]) for n, values in found.items() if values]
            means = [mean(values) - mean(alone[n]) for n, values in found.items() if values]
            cells += [spread(medians), spread(means)]
        rows.append([*cells, str(len(rounds))])
    head = ["million parameters", "ranks", "network", "`none`, ms"]
    for library in ("gossip", "DDP"):
        head += [f"{library} adds, median, ms", "mean, ms"]
    return table([*head, "rounds"], rows, 0)


def exchange(name: str) -> str:
    """What ways to exchange add to an update, less that of `none` in the same round."""
    jobs: dict[tuple[int, str], dict[int, Line]] = defaultdict(dict)
    for line in lines_of(name):
        case = line["case"]
        way = ["DDP" if case["library"] == "ddp" else case["library"]]
        way += [f"`every={case['every']}`"] if case["every"] > 1 else []
        way += [f"`{case['compression']}`"] if case["compression"] != "none" else []
        jobs[case["ranks"], ", ".join(way)][line["round"]] = line
    rows = []
    for (ranks, way), lines in jobs.items():
        alone = jobs.get((ranks, "none"), {})
        pairs = [(line, alone[number]) for number, line in lines.items() if counted(line) and number in alone]
        medians = [median(counted(line)) - median(counted(none)) for line, none in pairs]
        means = [mean(counted(line)) - mean(counted(none)) for line, none in pairs]
        cpu = [1e3 * (line["cpu_s"] - none["cpu_s"]) for line, none in pairs]
        mixes = [line["mixes"] for line, _ in pairs]
        if way != "none" and pairs:
            rows.append([way, str(ranks), spread(medians), spread(means), spread(cpu), spread(mixes, 2)])
            rows[-1].append(str(len(pairs)))
    head = ["exchange", "ranks", "adds, median, ms", "mean, ms", "processor time, ms"]
    return table([*head, "mixes an update", "rounds"], rows, 1)


def faults() -> str:
    """Rank 0's updates beside a rank that is slow or killed."""
    by_case: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines_of("bench.jsonl"):
        if line["case"]["fault"] != "none":
            by_case[(*key(line["case"]), line["case"]["library"])].append(line)
    rows = []
    for case, lines in sorted(by_case.items(), key=lambda item: (item[0][3], *_order(item[0]), item[0][4] != "gossip")):
        parameters, ranks, network, fault, library = case
        medians = [median(counted(line)) for line in lines if counted(line)]
        means = [mean(counted(line)) for line in lines if counted(line)]
        longest = [max(counted(line)) for line in lines if counted(line)]
        ended = "; ".join(sorted({line["ended"].replace("|", "/")[:40] for line in lines}))
        made = spread([len(line["update_s"]) for line in lines], 0)
        where = [fault, f"{parameters // 10**6}", str(ranks), network, library]
        rows.append([*where, spread(medians), spread(means), spread(longest), made, ended, str(len(lines))])
    head = [
        "fault",
        "million parameters",
        "ranks",
        "network",
        "library",
        "median update, ms",
        "mean, ms",
        "longest, ms",
    ]
    return table([*head, "updates", "ended by", "rounds"], rows, 5)


def _order(case: Sequence[Any]) -> tuple[Any, ...]:
    return (["host", "1gbit", "100mbit"].index(case[2]), case[0], case[1])


def made_by(name: str) -> str:
    """Commits, versions, machine and load of the jobs in this file."""
    lines = lines_of(name)
    if not lines:
        return NONE_YET
    commits = ", ".join(sorted({line["commit"][:10] for line in lines}))
    versions = "; ".join(sorted({", ".join(f"{k} {v}" for k, v in line["versions"].items()) for line in lines}))
    machine = "; ".join(sorted({f"{line['cpu']}, {line['cores']} cores" for line in lines}))
    loads = [line["load_1min_before"] for line in lines]
    return (
        f"{len(lines)} jobs of commit {commits}, {min(line['date'] for line in lines)} to "
        f"{max(line['date'] for line in lines)}; {machine}; {versions}. Load before each job, the one before it "
        f"included: {min(loads)} to {max(loads)}."
    )


TABLES: dict[str, Callable[[], str]] = {
    "examples": examples,
    "added": added,
    "faults": faults,
    "exchange": partial(exchange, "exchange.jsonl"),
    "gpu": partial(exchange, "gpu.jsonl"),
    "made by": partial(made_by, "bench.jsonl"),
    "exchange made by": partial(made_by, "exchange.jsonl"),
    "gpu made by": partial(made_by, "gpu.jsonl"),
}


def main() -> None:
    """Put each table in its place."""
    page = HERE / "README.md"
    text = page.read_text()
    for name, make in TABLES.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert place.search(text) is not None, f"README.md has no place for '{name}'"
        made = make()
        text = place.sub(lambda found, made=made: f"{found[1]}\n{made}\n\n{found[2]}", text)
    page.write_text(text)


if __name__ == "__main__":
    main()
