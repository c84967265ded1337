"""The report of a simulation: tables and a picture. Pure, except `draw`, which writes a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pala.config.catalogue import TOPOLOGIES
from pala.report.page import Column, Form, Page, origin, table
from pala.report.panels import tidy_ranks
from pala.report.pictures import legend, line_look, new_figure, verbatim, write_picture
from pala.system.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]


def markdown(simulation: dict[str, Any]) -> str:
    """Return all tables, as readable in a terminal or a log as on a page."""
    options = simulation["options"]
    measured = simulation["measured"]
    rows = simulation["predictions"]
    most = max(options["ranks"])
    page = Page(f"Prediction: {measured['environment']} in {measured['precision']}, up to {most:,} ranks")
    page.add(_inputs(simulation))
    for straggler in sorted({row["straggler"] for row in rows}):
        title = "All ranks alike" if straggler == 1 else f"One rank {straggler:g} times slower"
        alike = [row for row in rows if row["straggler"] == straggler]
        reasons = dict.fromkeys(f"{row['method']}: {row['reason']}." for row in alike if "reason" in row)
        page.section(title, "", "\n\n".join([table(_columns(options), alike), *reasons]))
    return page.add(_notes(rows), origin(simulation)).text()


def _inputs(simulation: dict[str, Any]) -> str:
    options = simulation["options"]
    costs = simulation["costs"]
    measured = simulation["measured"]
    update_ms = [1e3 * quantile for quantile in costs["update_quantiles_s"]]
    send_ms, receive_ms, mix_ms = (1e3 * costs[f"{part}_s"] for part in ("send", "receive", "mix"))
    return (
        "Not measured but simulated: the protocol's own code on a virtual cluster, with costs measured on "
        f"{measured['cpu']} (commit {measured['git_commit']}, {measured['date']}).\n"
        f"Hosts of {options['ranks_per_host']} ranks with {counted(costs['threads'], 'core')} each, "
        f"one link of {options['bandwidth_gbit']:g} Gbit/s and {options['latency_us']:g} µs; seed {options['seed']}."
        f"{_groups(options)}\n"
        f"An update takes {min(update_ms):.1f} to {max(update_ms):.1f} ms; one rank without exchange makes "
        f"{simulation['one_rank_steps_per_s']:,.0f} steps/s. A model has {costs['model_bytes'] / 2**20:.2f} MiB; "
        f"{send_ms:.2f} ms to copy, {receive_ms:.2f} to receive, {mix_ms:.2f} to mix."
    )


def _groups(options: dict[str, Any]) -> str:
    group = options.get("group", 1)
    of_groups = f" Gossip goes between groups of {group} ranks, each with one model; "
    return of_groups + "its waiting and MB/s are between groups only." if group > 1 else ""


def _columns(options: dict[str, Any]) -> list[Column[Row]]:
    link_bytes_per_s = options["bandwidth_gbit"] * 1e9 / 8

    def simulated(title: str, value: Callable[[Row], float], form: Form) -> Column[Row]:
        """Return a column that is empty in rows that were not simulated."""
        return Column(title, lambda row: None if "reason" in row else value(row), form)

    return [
        Column("method", "method"),
        Column("ranks", "ranks"),
        Column("global steps/s", "steps_per_s", ",.0f"),
        Column("efficiency", "efficiency", ".3f"),
        Column("waiting", "wait_share", ".1%"),
        Column("models an update", "models_an_update", ".2f"),
        Column("distance", _distance),
        simulated("MB/s a rank", lambda row: row["bytes_per_s"] / row["ranks"] / 1e6, ".1f"),
        simulated("MB/s in all", lambda row: row["bytes_per_s"] / 1e6, ",.0f"),
        simulated("busiest link, MB/s", lambda row: row["busiest_link_bytes_per_s"] / 1e6, ",.0f"),
        simulated("its load", lambda row: row["busiest_link_bytes_per_s"] / link_bytes_per_s, ".0%"),
    ]


def _distance(row: dict[str, Any]) -> str:
    if row.get("distance") is None:
        return ""
    return f"{row['distance']:.2f}{' +' if row['distance_grows'] else ''}"


def _notes(rows: list[dict[str, Any]]) -> str:
    simulated = [row for row in rows if "reason" not in row]
    updates = sorted({row["updates_a_rank"] for row in simulated})
    longest = max(simulated, key=lambda row: row["seconds_to_simulate"])
    return (
        "Efficiency: steps/s over those of as many single ranks without exchange, none of them slow. Waiting: share of "
        "a rank's time. Distance: of a rank's model to the mean of all, root mean square, in lengths of one update's "
        "step, if steps are random and independent; + : it was still growing when the simulation ended.\n"
        f"{', '.join(map(str, updates))} updates a rank, the more ranks the fewer; the first quarter is not counted "
        "(with `allreduce` it is). "
        f"It took {sum(row['seconds_to_simulate'] for row in simulated):,.0f} s; the longest was {longest['method']} "
        f"with {longest['ranks']:,} ranks, {longest['seconds_to_simulate']:,.0f} s."
    )


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw(simulation: dict[str, Any], output: Path) -> None:
    """Draw efficiency over the number of ranks, without and with a slow rank. Raises PalaError."""
    rows = [row for row in simulation["predictions"] if "reason" not in row]
    stragglers = sorted({row["straggler"] for row in rows})
    figure = new_figure(6.6 * len(stragglers), 5.2)
    panels = figure.subplots(1, len(stragglers), sharey=True, squeeze=False)[0]
    for axes, straggler in zip(panels, stragglers, strict=True):
        _draw_efficiency(axes, [row for row in rows if row["straggler"] == straggler])
    panels[0].set_ylabel("efficiency: steps/s over those of\nas many single ranks, none of them slow")
    legend(figure, panels[-1])
    options, measured = simulation["options"], simulation["measured"]
    title = (
        f"Simulated, with costs measured on {measured['cpu']}: {measured['environment']}, {options['ranks_per_host']} "
        f"ranks a host, {options['bandwidth_gbit']:g} Gbit/s, {options['latency_us']:g} µs"
    )
    figure.suptitle(verbatim(title), fontsize=11)
    write_picture(figure, output)


def _draw_efficiency(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw a line a method, and above them what is possible: the speed of ranks that exchange nothing."""
    ranks, straggler = sorted({row["ranks"] for row in rows}), rows[0]["straggler"]
    possible = [(count - 1 + 1 / straggler) / count for count in ranks]
    axes.plot(ranks, possible, color="black", linewidth=0.8, linestyle=(0, (4, 4)), label="no exchange")
    for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        mine = [row for row in rows if row["method"] == method]
        label = f"gossip, {method}" if method in TOPOLOGIES else method
        axes.plot([row["ranks"] for row in mine], [row["efficiency"] for row in mine], label=label, **line_look(number))
    axes.set_title("all ranks alike" if straggler == 1 else f"one rank {straggler:g} times slower", fontsize=11)
    tidy_ranks(axes, ranks, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_ylim(0, 1.05)
