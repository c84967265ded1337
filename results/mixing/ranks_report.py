"""Tables and a picture of what ranks.py found: python results/mixing/ranks_report.py results/mixing/ranks.jsonl.gz

Writes ranks_table.md and ranks.png beside this file.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from pala.report.pictures import COLOURS, new_figure, tidy, write_picture
from pala.system.text import table

HERE = Path(__file__).parent
COLUMNS = {  # key: (heading, form)
    "mean_return": ("mean return", ",.0f"),
    "gradient_cosine_between": ("gradient cosine between ranks", ".3f"),
    "gradient_cosine_within": ("within a rank", ".3f"),
    "gradient_signal": ("gradient signal", ".3f"),
    "policy_kl": ("policy KL, nats", ".4f"),
    "policy_disagreement": ("actions that differ", ".3f"),
    "distance": ("relative distance", ".4f"),
    "entropy": ("entropy, nats", ".2f"),
    "models_mixed": ("models mixed an update", ".2f"),
    "staleness": ("most updates without mix", ".0f"),
}
PANELS = ("mean_return", "gradient_cosine_between", "policy_kl", "distance")


def lines_of(path: Path) -> list[bytes]:
    """Of a file that may be packed."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()


def main() -> None:
    """Read all rows, write the table and the picture."""
    rows = [json.loads(line) for file in sys.argv[1:] for line in lines_of(Path(file))]
    if len(kinds := {(row["ranks"], row["segments"], row["asked_steps"]) for row in rows}) > 1:
        sys.exit(f"The files are not of one experiment: ranks, segments and steps are {sorted(kinds)}.")
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    (HERE / "ranks_table.md").write_text(make_table(rows, variants) + "\n")
    draw(rows, variants)


def values(rows: list[dict[str, Any]], variant: str, key: str, first: int, last: int) -> list[float]:
    """Values of the variant's segments `first` to `last`, over all seeds."""
    return [
        row[key]
        for row in rows
        if row["variant"] == variant and first <= row["segment"] <= last and row[key] is not None
    ]


def make_table(rows: list[dict[str, Any]], variants: list[str]) -> str:
    """Medians (ranges) over seeds and the second half of the segments."""
    segments = max(row["segment"] for row in rows)
    lines = []
    for variant in variants:
        seeds = len({row["seed"] for row in rows if row["variant"] == variant})
        cells = [variant, str(seeds)]
        for key, (_, form) in COLUMNS.items():
            found = values(rows, variant, key, segments // 2 + 1, segments)
            spread = f" ({min(found):{form}} to {max(found):{form}})" if found else ""
            cells.append(f"{statistics.median(found):{form}}{spread}" if found else "")
        lines.append(cells)
    return table(("variant", "seeds", *(heading for heading, _ in COLUMNS.values())), lines)


def draw(rows: list[dict[str, Any]], variants: list[str]) -> None:
    """One panel a measure, over steps; a line is the mean over seeds."""
    figure = new_figure(12, 7.5)
    for axes, key in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for number, variant in enumerate(variants):
            own = [row for row in rows if row["variant"] == variant]
            points = []
            for segment in sorted({row["segment"] for row in own}):
                there = [row for row in own if row["segment"] == segment and row[key] is not None]
                if there:
                    points.append([statistics.fmean(row[what] for row in there) for what in ("steps", key)])
            axes.plot(
                *zip(*points, strict=True), label=variant, color=COLOURS[number % len(COLOURS)],
                linestyle="-" if number < len(COLOURS) else "--", marker=".",
            )  # fmt: skip
        if key in ("policy_kl", "distance"):
            axes.set_yscale("symlog", linthresh=1e-3 if key == "distance" else 1e-2)
            axes.set_ylim(bottom=0)
        axes.set_xlabel("environment steps of all ranks")
        axes.set_ylabel(COLUMNS[key][0])
        tidy(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    write_picture(figure, HERE / "ranks.png")


if __name__ == "__main__":
    main()
