"""Training in a notebook: the example is executed by a kernel of Jupyter, as a user's would be, but for fewer steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "notebook.ipynb"
STOPPED = """
import os, signal

def interrupt(moment):  # as Jupyter's button does
    if moment.updates == 20:
        os.kill(os.getpid(), signal.SIGINT)

stopped = pala.fit(replace(config, total_steps=10**7), on_update=interrupt)
print(stopped.status, pala.fit(config, resume=stopped.run).status)
"""
MISTAKEN = "pala.fit(pala.Config(env=EnvConfig('CartPool-v1')))"


def texts(outputs: list[Any], kind: str) -> list[str]:
    """The plain text of a cell's outputs of one type."""
    return [output["data"]["text/plain"] for output in outputs if output["output_type"] == kind]


def printed(outputs: list[Any]) -> str:
    """The text that a cell has printed."""
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


@pytest.mark.slow
def test_the_notebook_trains_and_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel that is replaced in place, results, a training interrupted and continued, and a mistake in one line."""
    import nbformat  # of the extra `test`
    from nbclient import NotebookClient

    for variable in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # or the kernel leaves its file descriptors as they are
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = {cell.id: cell for cell in notebook.cells}
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before it is committed"
    few = {
        "200_000": "4_000",
        "300_000": "5_000",
        "num_envs=8)": "num_envs=8), run=pala.config.RunConfig(log_interval_s=0.1)",
    }
    for cell in notebook.cells:
        cell.source = re.sub("|".join(map(re.escape, few)), lambda found: few[found[0]], cell.source)
    stopped, mistaken = (nbformat.v4.new_code_cell(source) for source in (STOPPED, MISTAKEN))
    mistaken.metadata["tags"] = ["raises-exception"]
    notebook.cells += [stopped, mistaken]
    shown: list[str] = []

    class Watching(NotebookClient):
        def process_message(self, msg: Any, *others: Any) -> Any:
            if msg["msg_type"] == "update_display_data":
                shown.append(msg["content"]["data"]["text/plain"])
            return super().process_message(msg, *others)

    Watching(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    trained = cells["train"].outputs
    (panel,) = texts(trained, "display_data")
    assert "4,000 of 4,000 (100.0%)" in panel and "steps/s" in panel and "mean of the last 100" in panel
    assert shown[0] != panel and "of 4,000 (" in shown[0] and panel in shown
    assert "4,000 steps over all ranks" in printed(trained) and "learning curve: " in printed(trained)
    assert "steps/s" not in printed(trained)
    assert "mean return" in printed(cells["curve"].outputs)
    assert any("image/png" in output.get("data", {}) for output in cells["curve"].outputs)
    (actions,) = texts(cells["act"].outputs, "execute_result")
    assert re.fullmatch(r"array\(\[[01], [01], [01], [01]\]\)", actions)
    assert "5,000 of 5,000 (100.0%)" in texts(cells["longer"].outputs, "display_data")[0]
    assert printed(stopped.outputs).endswith("stopped completed\n")
    (error,) = [output for output in mistaken.outputs if output["output_type"] == "error"]
    assert "Traceback" not in printed(mistaken.outputs), "a line about a long start is all that may stand before it"
    assert error["ename"] in ("PalaError", "CollectiveError")
    (line,) = error["traceback"]
    assert line.startswith("pala: error: ") and "CartPool-v1" in line
