"""A comparison as jobs of Slurm: what is submitted, when, and what the last job says. The commands of Slurm are scripts
that note what they are asked; `test_slurm.py` has the real ones."""

from __future__ import annotations

import itertools
import shlex
import shutil
from pathlib import Path

import pytest

from pala.lab.compare.__main__ import Command, compare
from pala.lab.compare.execute import chosen
from pala.lab.compare.plan import Plan
from pala.lab.compare.slurm import unfinished
from pala.supervise import read_options
from pala.system.command_line import read_command
from pala.system.errors import PalaError
from pala.train import parse
from support import REPOSITORY
from support.comparisons import GAME, PRESET, make_run, section

SLURM = """
[slurm]
ranks_per_node = 2
options = ["--time=1:00:00"]
[variants.shared_memory]
exchange.kind = "shared_memory"
"""
SCRIPTS = {
    "squeue": "cat queue",
    "scancel": 'echo "scancel $*" >> asked',
    # Numbers from 1 on; nobody may have more than `limit` jobs.
    "sbatch": """
number=$(cat asked 2>/dev/null | grep -c '^sbatch' || true)
if [ -e limit ] && [ "$number" -ge "$(cat limit)" ]; then echo "sbatch: error: too many jobs" >&2; exit 1; fi
echo "sbatch $*" >> asked
echo $((number + 1))
""",
}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a preset and a Slurm in which nothing waits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.toml").write_text(GAME)
    write_preset()
    for name, text in SCRIPTS.items():
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\n{text}")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for variable in ("SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT", "SLURM_JOB_QOS"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "queue").touch()
    (tmp_path / "launch/slurm").mkdir(parents=True)
    (tmp_path / "launch/slurm/several_nodes.sbatch").touch()
    return tmp_path


def write_preset(ranks: str = "[1, 2, 3, 4]", launcher: str = "") -> Plan:
    """Three variants, one seed, two ranks a node."""
    text = PRESET.replace("ranks = [1, 2]", f"ranks = {ranks}").replace("seeds = [1, 2]", "seeds = [1]")
    text = text.replace("launcher = \"sh -c 'exit 3' {ranks}\"\n", launcher) + SLURM
    Path("preset.toml").write_text(text)
    return Plan(Path("preset.toml"))


def submit(**how: bool) -> list[str]:
    """The runs whose job was not taken."""
    return [run.folder.name for run in compare(Command(Path("preset.toml"), submit=True, **how))]


def asked() -> list[str]:
    """What Slurm has been asked for since the last look."""
    lines = Path("asked").read_text().splitlines() if Path("asked").exists() else []
    Path("asked").unlink(missing_ok=True)
    return lines


def names(commands: list[str]) -> list[str]:
    return [word.partition("=")[2] for line in commands for word in line.split() if word.startswith("--job-name=")]


def test_the_report_of_a_part_asks_for_that_part(there: Path) -> None:
    assert [run.folder.name for run in compare(Command(Path("preset.toml"), only=("none",), submit=True))] == []
    *jobs, report = asked()
    assert all("none" in name for name in names(jobs)) and "--gather" in report and "--only none" in report
    plan = Plan(Path("preset.toml"))
    assert {run.cell.variant for run, _ in unfinished(chosen(plan, ("none",)), Path("results/tiny"))} == {"none"}


def test_each_of_two_parts_has_a_report_of_its_own(there: Path) -> None:
    """Neither judges a run that nobody has asked for."""
    compare(Command(Path("preset.toml"), only=("gossip",), submit=True))
    *jobs, _ = asked()
    waiting = [f"{number + 1}|{there}|{name}" for number, name in enumerate(names(jobs))]
    Path("queue").write_text("\n".join([*waiting, f"99|{there}|pala-tiny-report"]) + "\n")
    compare(Command(Path("preset.toml"), only=("none",), submit=True))
    lines = asked()
    report = next(line for line in lines if "--gather" in line)
    assert "--only none" in report and "afterany:1:" in report
    assert not any("scancel" in line for line in lines)


def test_the_report_has_all_that_is_added(there: Path) -> None:
    for folder in ("here", "there"):
        planned = Plan(Path("preset.toml")).runs[0]
        make_run(there / folder, planned.config, planned.cell.ranks)
    compare(Command(Path("preset.toml"), submit=True, add=(Path("here"), Path("there"))))
    words = shlex.split(asked()[-1].partition("--wrap=exec ")[2])
    command = read_command("pala compare", words[words.index("compare") + 1 :], Command())
    assert command.gather and command.add == (Path("here"), Path("there"))


def test_a_job_has_room_for_spares(there: Path) -> None:
    plan = write_preset(ranks="[3]")
    text = Path("preset.toml").read_text().replace("[variants.gossip]", "[variants.gossip]\nrun.spares = 2", 1)
    Path("preset.toml").write_text(text)
    assert plan.preset.slurm.ranks_per_node == 2
    compare(Command(Path("preset.toml"), submit=True, only=("gossip",)))
    (job, _) = asked()
    assert "--nodes=3 --ntasks-per-node=2 " in job and ".sbatch -n 3 --continue " in job


def test_the_example_of_a_sweep_is_a_job_for_each_rate_and_seed(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not compare(Command(REPOSITORY / "examples/learning_rates.toml", submit=True, dry_run=True))
    jobs = capsys.readouterr().out.splitlines()
    assert all("--nodes=1 --ntasks-per-node=4 --time=04:00:00 launch" in job for job in jobs)
    trained = [parse(read_options(shlex.split(job.partition(".sbatch ")[2]))[1]).config for job in jobs]
    rates = itertools.product((1, 2), (3e-4, 7e-4, 1.4e-3, 2.8e-3))
    assert [(config.seed, config.a2c.learning_rate) for config in trained] == list(rates)


def test_each_run_is_a_job_of_its_own_size(
    there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_PARTITION", "cpu")  # where the job runs that submits the others
    assert submit() == []
    *jobs, report = asked()
    sizes = {name: " ".join(line.split()[7:11]) for name, line in zip(names(jobs), jobs, strict=True)}
    assert sizes["pala-tiny-gossip-Pole-1-1"] == "--nodes=1 --ntasks-per-node=1 --time=1:00:00 launch/slurm/" \
        "several_nodes.sbatch"  # fmt: skip
    assert sizes["pala-tiny-none-Pole-4-1"].startswith("--nodes=2 --ntasks-per-node=2 ")
    uneven = next(line for line in jobs if "gossip-Pole-3-1" in line)
    assert "--nodes=2 --ntasks-per-node=2 " in uneven and ".sbatch -n 3 --continue game.toml " in uneven
    assert [name for name in names(jobs) if "shared" in name] == [f"pala-tiny-shared_memory-Pole-{n}-1" for n in (1, 2)]
    assert all("--partition=cpu" in line for line in (*jobs, report)) and len(jobs) == 10
    assert all("--requeue" in line for line in jobs), "they continue, where the script's own jobs would begin again"
    assert "--time=1:00:00" in report and "--only" not in report
    assert f"--dependency=afterany:{':'.join(str(n + 1) for n in range(10))} " in report
    said = capsys.readouterr()
    assert "`shared_memory` is for one node: left out with 3 and 4 ranks, which span nodes of 2 ranks" in said.err
    assert "gossip Pole, 3 ranks, seed 1: job 7" in said.out


def test_a_run_of_ones_own_environment_continues_when_it_is_requeued(there: Path) -> None:
    """What its folder names is trusted, as the preset names it."""
    Path("game.toml").write_text(GAME.replace("CartPole-v1", "my_envs:Grid-v0"))
    assert submit() == []
    *jobs, _ = asked()
    assert jobs and all(" --continue --trust-run game.toml " in job for job in jobs)


def test_what_waits_or_runs_is_not_submitted_again(there: Path) -> None:
    plan = write_preset("[1, 2]")
    make_run(plan.runs[0].folder, plan.runs[0].config, 1)
    make_run(plan.runs[1].folder, plan.runs[1].config, 1, completed=False)
    Path("queue").write_text(
        f"71|{there}|pala-tiny-none-Pole-2-1\n72|{there}|pala-tiny-report\n"
        "73|/another/clone|pala-tiny-gossip-Pole-2-1\nslurm says|something\n"
    )
    assert submit() == []
    *jobs, report, cancelled = asked()
    assert names(jobs) == [f"pala-tiny-{run}-1" for run in (
        "none-Pole-1", "shared_memory-Pole-1", "gossip-Pole-2", "shared_memory-Pole-2",
    )]  # fmt: skip
    assert " --resume runs/tiny/none-Pole-1-1" in jobs[0] and "--continue" not in jobs[0]
    assert "--dependency=afterany:71:1:2:3:4 " in report and cancelled == "scancel --state=PENDING 72"
    waiting = [f"{n}|{there}|{name}\n" for n, name in enumerate([*names(jobs), *names([report])], 1)]
    Path("queue").write_text(f"71|{there}|pala-tiny-none-Pole-2-1\n{''.join(waiting)}")
    assert submit() == [] and asked() == []


def test_jobs_of_another_cluster_are_looked_for_there(there: Path) -> None:
    Path("preset.toml").write_text(Path("preset.toml").read_text().replace('"--time=1:00:00"', '"--clusters=b"'))
    for name in ("squeue", "scancel"):
        script = there / "bin" / name
        script.write_text(script.read_text().replace("#!/bin/sh\n", f'#!/bin/sh\necho "{name} $*" >> words\n'))
    Path("queue").write_text(f"CLUSTER: b\n72|{there}|pala-tiny-report\n")
    assert submit() == []
    queued, cancelled = Path("words").read_text().splitlines()
    assert queued.startswith("squeue --clusters=b --user=") and cancelled == "scancel --clusters=b --state=PENDING 72"


def test_a_variant_with_a_folder_of_its_own_gets_it(there: Path) -> None:
    Path("preset.toml").write_text(Path("preset.toml").read_text() + 'run.dir = "elsewhere"\n')
    assert submit() == []
    assert Path("elsewhere/tiny").is_dir()


def test_what_slurm_does_not_take_is_told(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_preset("[1]")
    Path("limit").write_text("2")
    with pytest.raises(PalaError, match="`sbatch` failed with status 1: sbatch: error: too many jobs"):
        submit()  # not even the last job
    assert "shared_memory Pole, 1 rank, seed 1: NOT SUBMITTED. `sbatch` failed" in capsys.readouterr().out
    assert len(asked()) == 2


@pytest.mark.slow
def test_the_last_job_names_what_failed(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_preset("[1, 2]")
    make_run(plan.runs[0].folder, plan.runs[0].config, 1)
    make_run(plan.runs[1].folder, plan.runs[1].config, 1, completed=False)
    make_run(plan.runs[2].folder, plan.runs[2].config, 1, score=None)
    plan.runs[1].log.touch()
    failed = compare(Command(Path("preset.toml"), gather=True))
    assert failed == plan.runs[1:]
    said = capsys.readouterr().out
    assert "none Pole, 1 rank, seed 1: FAILED. It is not complete; its last start is 'running' in its record." in said
    assert "Its output: 'runs/tiny/none-Pole-1-1.log'." in said
    assert "shared_memory Pole, 1 rank, seed 1: FAILED. It is trained, but not evaluated." in said
    assert "gossip Pole, 2 ranks, seed 1: FAILED. It has not begun." in said
    limits = section(Path("results/tiny/compare.md").read_text(), "To bear in mind")
    assert "not there: gossip Pole, 2 ranks, seed 1; none Pole, 2 ranks, seed 1; shared_memory Pole" in limits


@pytest.mark.slow
def test_nothing_is_submitted_when_all_runs_are_there(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is made at once."""
    plan = write_preset("[1]")
    for run in plan.runs:
        make_run(run.folder, run.config, 1)
    assert submit() == [] and asked() == [] and Path("results/tiny/compare.md").exists()


def test_mistakes_are_told(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PalaError, match="only one of --report-only, --submit"):
        submit(report_only=True)
    monkeypatch.setenv("PATH", "/nowhere")
    write_preset(launcher='launcher = "aprun -n {ranks}"\n')
    with pytest.raises(PalaError, match=r"'launcher' is 'aprun -n \{ranks\}', but jobs of Slurm start their ranks by"):
        submit()
    shutil.rmtree("launch")
    with pytest.raises(PalaError, match="submit from PALA's repository"):
        submit()
