"""Progress kept in the published runs of this folder: `python results/mixing/progress_kept.py`."""

from __future__ import annotations

from pathlib import Path

from pala.report.runs import published
from pala.run.metrics import progress_kept, read_run


def main() -> None:
    """Print a line for each run."""
    for run in published(Path(__file__).parent):
        intervals = [record for records in read_run(run) for record in records if record["type"] == "interval"]
        kept = progress_kept((r["own_movement"] for r in intervals), (r["movement"] for r in intervals))
        print(run.name, f"{kept:.2f}" if kept is not None else "nothing learned")


if __name__ == "__main__":
    main()
