"""The pages: links lead somewhere, and pages that are named are linked."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pala.config import Config, to_table
from pala.report.runs import published
from pala.supervise import read_options
from pala.system.files import read_json
from pala.system.tables import flatten
from pala.train import Command, parse
from support import REPOSITORY
from support.memory_jobs import configure, train

GUIDES = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
WRITTEN = [page for page in (REPOSITORY / "results").rglob("*.md") if page.name not in ("compare.md", "benchmark.md")]
PAGES = [*REPOSITORY.glob("*.md"), *GUIDES[1:], *WRITTEN]


def prose(page: Path) -> str:
    """A page without its indented and fenced code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"^ {4}(?! *[-*] ).*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", prose(page)):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_anchors_lead_to_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", prose(page)):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_pages_that_are_named_are_linked(page: Path) -> None:
    without_links = re.sub(r"\[[^\]]*\]\([^)]*\)", "", prose(page))
    assert re.findall(r"docs/\w+\.md", without_links) == []


def figures(text: str) -> set[str]:
    """Return the numbers that have three digits or more which are not zeros at an end."""
    text = re.sub(r"\]\([^)]*\)|arXiv [\d.]+|`[^`]*`", "", text)
    found = re.findall(r"(?<![\w.,])(?:\d{1,3}(?:,\d{3})+|\d+\.\d+)(?![\w,.]*\d)", text)
    return {number for number in found if len(re.sub(r"\D", "", number).strip("0")) >= 3}


def test_a_figure_stands_on_one_page() -> None:
    """Two pages that give the same measurement contradict each other, once one of them is changed."""
    pages = [page for page in GUIDES if page.name not in ("README.md", "options.md", "api.md")]  # a summary; generated
    of = {page.name: figures(prose(page)) for page in pages}
    twice = {(a, b): of[a] & of[b] for a, b in itertools.combinations(of, 2) if of[a] & of[b]}
    assert not twice
    assert figures("0.987, 12,345 or 1,000; Python 3.10, `0.123`, 0.95") == {"0.987", "12,345"}


def test_commands_that_are_requeued_trust_the_code_that_they_name() -> None:
    lines = [line for page in GUIDES for line in page.read_text().splitlines()]
    own = r"--(env\.id \S+:|env\.wrappers|network\.custom)"
    requeued = [line for line in lines if re.search(r"preemptible\.sbatch|--continue", line) and re.search(own, line)]
    assert requeued and not [line for line in requeued if "--trust-run" not in line]


SOURCES = [f"/{file.relative_to(REPOSITORY)}" for top in ("pala", "tests", "launch", "docs", "examples", "configs")
           for file in (REPOSITORY / top).rglob("*.*")]  # fmt: skip


@pytest.mark.parametrize("page", [*GUIDES, REPOSITORY / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|sh|sbatch|toml))`", page.read_text()))
    assert [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in SOURCES)] == []


def test_the_table_of_packages_names_each_package_and_program() -> None:
    table = (REPOSITORY / "docs/architecture.md").read_text().partition("\n| package |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([\w./]+)`", "".join(line.split("|")[1] for line in table.splitlines()[1:])))
    below = {f"{folder.parent.name}/": folder for folder in (REPOSITORY / "pala").glob("*/__init__.py")}
    programs = {file.name for file in (REPOSITORY / "pala").glob("[a-z]*.py")}
    instruments = {f"lab/{file.parent.name}/" for file in (REPOSITORY / "pala/lab").glob("*/__init__.py")} | {
        f"lab/{file.name}" for file in (REPOSITORY / "pala/lab").glob("[a-z]*.py")
    }
    assert named == set(below) - {"lab/"} | programs | instruments


COMMAND = r"(?:python -m pala\.|(?<=^ {4})pala )([.\w]+(?: (?:learn|progress|predict)\b)?)([^\n#`&]*)"


def options_by_program() -> dict[str, set[str]]:
    """The options that the pages give to each program, in code and in prose."""
    found: dict[str, set[str]] = {}
    for page in GUIDES:
        for program, rest in re.findall(COMMAND, page.read_text(), re.MULTILINE):
            found.setdefault(f"-m pala {program}", set()).update(
                re.findall(r"(?<!\S)--[a-z][\w.-]*", rest.partition(" -- ")[0])
            )
        for program, rest in re.findall(r"python (tests/explorer \w+)([^\n#`&]*)", page.read_text()):
            found.setdefault(program, set()).update(re.findall(r"(?<!\S)--[a-z][\w.-]*", rest))
    return {program: options for program, options in found.items() if options}


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
@pytest.mark.slow
def test_python_and_trainings_of_the_pages_are_understood(page: Path) -> None:
    """Compile the blocks of Python, and read the commands that train, with their presets."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, str(page), "exec")
    for command in re.findall(r"^ {4}pala train ([^\n#]*)", page.read_text(), re.MULTILINE):
        if not re.search(r"--resume|\b[a-z_]+\.(toml|txt)\b", command):  # those need a run, or a file
            assert parse(read_options(shlex.split(command))[1]).config.total_steps


def test_the_examples_of_the_help_train() -> None:
    """What `pala train --help` begins with: each example is read, and each usual option is one."""
    words = inspect.getdoc(Command) or ""
    examples = re.findall(r"^ {4}pala train ([^\n#]*)", words, re.MULTILINE)
    assert len(examples) == 4
    for example in examples:
        if "--resume" not in example:
            assert parse(read_options(shlex.split(example))[1]).config.total_steps
    usual = re.findall(r"--([a-z][\w.-]*)", words.partition("Usual options:")[2].partition("`")[0])
    assert len(usual) == 8
    for option in usual:
        value = Config()
        for name in option.rstrip(".").replace("-", "_").split("."):
            value = getattr(value, name)


HELP = """
import contextlib, io, json, runpy, sys
printed = {}
for program in sys.argv[1:]:
    where, *arguments = program.removeprefix("-m ").split()
    sys.argv = [where, *arguments, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        if program.startswith("-m "):
            runpy.run_module(where, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(where, run_name="__main__")
    printed[program] = out.getvalue()
print(json.dumps(printed))
"""


@pytest.mark.slow
def test_options_that_the_pages_give_exist() -> None:
    """All programs in one process: most of their time is that of imports. `pala train -n 4` takes the options of
    `pala.supervise` too."""
    command = [sys.executable, "-c", HELP, *options_by_program(), "-m pala.supervise"]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=REPOSITORY)
    printed = json.loads(done.stdout)
    printed["-m pala train"] += printed["-m pala.supervise"]
    for program, given in options_by_program().items():
        assert given - set(re.findall(r"--[a-z][\w.-]*", printed[program])) == set(), program


KEYS = set(flatten(to_table(Config())))
SECTIONS = "|".join({key.partition(".")[0] for key in KEYS if "." in key})
OTHERS = {"env.spec"}  # gymnasium's


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_keys_that_the_pages_name_are_of_the_configuration(page: Path) -> None:
    """As options, whose yes and no is `--run.no-tensorboard`, and in prose, where `run.json` is a file."""
    text = page.read_text()
    options = {name.replace("-", "_") for name in re.findall(r"--([a-z]\w*\.[\w-]+)", text)}
    options = {option.replace(".no_", ".") if option not in KEYS else option for option in options}
    named = set(re.findall(rf"`((?:{SECTIONS})\.(?!json\b|py\b)\w+)", text))
    assert (options | named) - KEYS - OTHERS == set()


def rows_of_faults(page: str) -> list[list[str]]:
    """Return the cells of each row of the page's tables whose last column names tests."""
    tables = re.findall(r"^\|.*\| shown by \|\n\|[-|]+\n((?:\|.*\n)+)", (REPOSITORY / "docs" / page).read_text(), re.M)
    return [row.strip("|").split("|") for table in tables for row in table.splitlines()]


@pytest.mark.parametrize(("page", "least"), [("faults.md", 55), ("gorila_reference.md", 10)])
def test_tests_that_the_tables_of_faults_name_exist(page: str, least: int) -> None:
    files = [file.read_text() for file in (REPOSITORY / "tests").glob("*.py")]
    names = {name for text in files for name in re.findall(r"def (test_\w+)", text)}
    rows = rows_of_faults(page)
    assert len([row for row in rows if "`" in row[-1]]) >= least
    for name in (name for row in rows for name in re.findall(r"`([\w.]+)`", row[-1])):
        file = REPOSITORY / "tests" / name
        assert file.exists() if name.endswith(".py") else any(name in test for test in names), name


def test_cells_of_the_table_of_faults_are_short() -> None:
    assert [cell for row in rows_of_faults("faults.md") for cell in row if len(cell.split()) > 25] == []


@pytest.mark.slow
def test_the_runs_record_is_on_its_page(tmp_path: Path) -> None:
    """Each key of a start's entry in run.json, today's or of a published run, and no other."""
    section = (REPOSITORY / "docs/run_folder.md").read_text().partition("## run.json")[2]
    told = {key for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    job = train(2, configure(tmp_path, steps=50))
    runs = (run for folder in (REPOSITORY / "results").iterdir() for run in published(folder))
    made = [job.segment, *(segment for run in runs for segment in read_json(run / "run.json")["segments"])]
    found = set[str]().union(*made)
    assert found <= told
    writers = "training.py", "header.py", "run.py", "run_folder.py", "provenance.py", "mpi.py", "base.py"
    source = "".join(file.read_text() for file in (REPOSITORY / "pala").rglob("*.py") if file.name in writers)
    project = {f"project_{key}" for key in ("git_commit", "git_dirty")}
    assert [key for key in told - found - project if f'"{key}"' not in source and f"{key}=" not in source] == []
