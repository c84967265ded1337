"""Draw docs/panel.svg, the panel that a training shows: `python docs/draw_panel.py`.

Its figures are those of a run of results/peers/, as its metrics had them after five minutes.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from pala.report.runs import published
from pala.run.console import Figures
from pala.run.metrics import metrics_path, read_run
from pala.run.panel import boxed
from pala.run.run_folder import config_of
from pala.run.view import RunView
from pala.system.files import json_text

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS, RUN, AFTER_S = REPOSITORY / "results" / "peers", "paired-Breakout-2-1", 300.0
_COLUMNS = 88


def figures(run: Path, after_s: float) -> dict[str, str]:
    """Return what the console of a run showed after some seconds of training."""
    ranks = read_run(run)
    with TemporaryDirectory() as folder:
        metrics_path(Path(folder), 0).parent.mkdir()
        for rank, records in enumerate(ranks):
            lines = [json_text(record) + "\n" for record in records if record["time_s"] <= after_s]
            metrics_path(Path(folder), rank).write_text("".join(lines))
        view = RunView(Path(folder), len(ranks))
        shown = Figures(view, config_of(run).total_steps)
        view.refresh()
        shown.refresh(view.last[0]["global_steps"])
        return shown.texts()


def picture() -> str:
    """Return the panel as SVG, which loads no font from elsewhere."""
    (run,) = (run for run in published(RESULTS) if run.name == RUN)
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(boxed(f"PALA  runs/{RUN}  2 ranks", figures(run, AFTER_S)))
    svg = console.export_svg(title="pala train -n 2 breakout", unique_id="panel")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    Path(__file__).with_name("panel.svg").write_text(picture())
