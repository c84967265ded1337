"""Progress kept in runs: `python results/mixing/progress_kept.py results/mixing/progress_kept/*`."""

from __future__ import annotations

import sys
from pathlib import Path

from pala.run.metrics import progress_kept, read_run


def main() -> None:
    """Print a line for each run named on the command line."""
    for run in map(Path, sys.argv[1:]):
        intervals = [record for records in read_run(run) for record in records if record["type"] == "interval"]
        kept = progress_kept((r["own_movement"] for r in intervals), (r["movement"] for r in intervals))
        print(run.name, f"{kept:.2f}" if kept is not None else "nothing learned")


if __name__ == "__main__":
    main()
