"""The documentation site: what is made from the code holds everything, and the site can be built without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import draw_panel
import mkdocs_hooks
import pala
from metric_table import METRICS
from pala.config import Config, to_table
from pala.system.tables import flatten, keys
from support import REPOSITORY

UNREACHABLE = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https", "HTTP", "HTTPS")}


def test_every_key_of_the_configuration_is_told_with_its_default_and_meaning() -> None:
    page = (REPOSITORY / "docs" / "options.md").read_text()
    assert page == mkdocs_hooks.configuration(), "python docs/mkdocs_hooks.py writes it again"
    rows = {line.split("`")[1]: line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| `")}
    assert list(rows) and set(rows) == set(keys(Config)) == set(flatten(to_table(Config())))
    assert all(len(cells) >= 5 and cells[-1].strip() for cells in rows.values())
    assert rows["a2c.gamma"][1:4] == ["float", "`0.99`", "0 to 1"]
    assert rows["gorila.rmsprop_alpha"][-1].rstrip().endswith('Not read if `gorila.optimiser` is `"adagrad"`.')
    assert 'Read by `exchange.kind` `"gossip"`.' in rows["exchange.mixing"][-1]
    assert "[GALA] Assran et al. 2019" in page
    assert rows["network.conv_channels"][1:3] == ["list of 3 ints", "`[32, 64, 32]`"]
    assert '`"sync"`, `"async"`' in rows["env.vectorization"][1]


def test_every_exported_name_is_told_with_its_signature_and_docstring() -> None:
    page = (REPOSITORY / "docs" / "api.md").read_text()
    assert page == mkdocs_hooks.api(), "python docs/mkdocs_hooks.py writes it again"
    assert [line[9:-1] for line in page.splitlines() if line.startswith("## ")] == pala.__all__
    assert "def after_update(self, steps: int)" in page and "None\n\n" not in page


def test_the_tables_of_the_metrics_page_are_those_of_the_code() -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    assert page.count("<!-- end -->") == len(mkdocs_hooks.TABLES)
    assert mkdocs_hooks.with_tables(page) == page, "python docs/mkdocs_hooks.py writes them again"
    assert all(f"| `{metric.name}` | " in page for metric in METRICS)
    assert len({(m.name, m.algorithms) for m in METRICS}) == len(METRICS)


def test_the_table_of_presets_is_that_of_their_files() -> None:
    page = (REPOSITORY / "docs" / "presets.md").read_text()
    assert mkdocs_hooks.with_presets(page) == page, "python docs/mkdocs_hooks.py writes it again"
    assert "| `gala/…` | `total_steps = 40000000`, " in page and "`quickstart`" in page


def test_links_lead_to_where_pages_are_on_the_site() -> None:
    def led(link: str, uri: str) -> str:
        return mkdocs_hooks.with_links(link, uri)

    assert led("[a](docs/gorila.md#roles)", "index.md") == "[a](gorila.md#roles)"
    assert led("[a](../README.md#how-it-works)", "architecture.md") == "[a](index.md#how-it-works)"
    assert led("[a](../../docs/simulate.md)", "results/mixing/README.md") == "[a](../../simulate.md)"
    assert led("![a b](results/pong/learning_curves.png)", "index.md") == "![a b](results/pong/learning_curves.png)"
    assert led("![a](docs/panel.svg)", "index.md") == led("![a](panel.svg)", "metrics.md") == "![a](panel.svg)"
    assert led("[`a`](../pala/train.py) [b](https://x.org)", "architecture.md") == "`a` [b](https://x.org)"


def test_the_picture_of_the_panel_is_what_a_run_shows() -> None:
    picture = (REPOSITORY / "docs" / "panel.svg").read_text()
    assert picture == draw_panel.picture(), "python docs/draw_panel.py draws it again"
    assert "steps/s" in picture and "url(" not in picture.replace("url(#", "")


@pytest.mark.slow
def test_the_site_is_built_without_a_network(tmp_path: Path) -> None:
    """Warnings, as of links that lead nowhere, fail it."""
    pytest.importorskip("mkdocs", reason="the site needs the extra: pip install -c constraints.txt -e .[docs]")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPOSITORY, env=os.environ | UNREACHABLE, text=True, timeout=240, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "compare.html", "contributing.html", "results/pong/compare.html"} <= set(pages)
    assert all(f"<code>{key}</code>" in pages["options.html"] for key in keys(Config))
    assert all(f"<code>{metric.name}</code>" in pages["metrics.html"] for metric in METRICS)
    assert all(name in pages["api.html"] for name in pala.__all__)
    assert (tmp_path / "results" / "pong" / "learning_curves.png").exists()
    for name, page in pages.items():
        assert 'src="http' not in page and 'rel="stylesheet" href="http' not in page, f"{name} loads from elsewhere"
