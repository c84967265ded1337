"""The lock of a run's folder: one job at a time, and none that died keeps it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pala.comm.alone import Alone
from pala.config import Config, RunConfig, to_table
from pala.job.rank import run_rank
from pala.job.request import Request
from pala.run import provenance, run_folder
from pala.run.lock import check_identity, join_lock, lock_folder, lock_identity, supervised, who_trains
from pala.run.run import Run
from pala.system.errors import PalaError
from pala.system.files import write_json
from support.helpers import CARTPOLE, record_of, wait_for
from support.mpi import Launcher, ranks_in
from support.standing_ranks import StandingRanks


def test_a_second_job_is_refused_while_any_rank_of_the_first_lives(tmp_path: Path) -> None:
    assert who_trains(tmp_path) is None
    first = lock_folder(tmp_path)
    others = [join_lock(tmp_path) for _ in range(2)]
    assert first is not None
    for file in (first, *others):
        with pytest.raises(PalaError, match=rf"Another job works in folder '.*' \(process {os.getpid()} on .+\)"):
            lock_folder(tmp_path)
        assert f"process {os.getpid()} on " in (who_trains(tmp_path) or "")
        file.close()
    assert who_trains(tmp_path) is None
    again = lock_folder(tmp_path)
    assert again is not None
    again.close()


def named(folder: Path) -> Config:
    return Config(run=RunConfig(dir=str(folder), name="r"))


@pytest.mark.parametrize("left", [(), ("metrics",), ("metrics", "checkpoints/segment-000")])
def test_a_folder_whose_run_never_began_does_not_keep_its_name(left: tuple[str, ...], tmp_path: Path) -> None:
    """A disk that was full just then left it; neither the name nor `--resume` was of any use."""
    run = tmp_path / "r"
    run.mkdir()
    for name in left:
        (run / name).mkdir(parents=True)
    (run / ".lock").write_text("process 1 on elsewhere")
    assert run_folder.create(named(tmp_path), "") == run
    assert (run / "metrics").is_dir()


@pytest.mark.parametrize(
    "kept",
    [
        "run.json", "metrics/rank-0000.jsonl", "checkpoints/segment-000/rank-0000.safetensors", "make_env.py",
        "code.tar", "metrics/mine",
    ],
)  # fmt: skip
def test_a_folder_with_anything_of_a_run_is_never_written_over(kept: str, tmp_path: Path) -> None:
    (tmp_path / "r" / kept).parent.mkdir(parents=True)
    (tmp_path / "r" / kept).touch()
    with pytest.raises(PalaError, match="exists already; nothing is written over"):
        run_folder.create(named(tmp_path), "")


@pytest.mark.parametrize("name", ["", "r"])
def test_a_folder_of_runs_that_is_a_link_to_nothing_is_told(name: str, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "not-mounted")
    with pytest.raises(PalaError, match=r"cannot be made: '.*/runs' is no folder, or a link to none; see 'run.dir'"):
        run_folder.create(Config(run=RunConfig(dir=str(tmp_path / "runs"), name=name)), "pong")


def test_a_lock_that_cannot_be_looked_at_does_not_say_that_a_job_is_over(tmp_path: Path, monkeypatch) -> None:
    run = run_folder.create(Config(run=RunConfig(dir=str(tmp_path), name="r")), "pong")
    run_folder.RunRecord.begin(run, Config(), {})
    assert not run_folder.is_over(run, 0, was_locked=True)  # whose lock was deleted
    lock_folder(run).close()
    assert run_folder.is_over(run, 0, was_locked=True) and not run_folder.is_over(run, 0)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    assert not run_folder.is_over(run, 0, was_locked=True)


@pytest.mark.parametrize(
    ("settings", "words"), [({"dir": "~/runs"}, "write out what '~' stands for"), ({"name": "a\0b"}, "a zero byte")]
)
def test_a_name_that_would_surprise_is_refused(settings: dict[str, str], words: str, tmp_path: Path) -> None:
    config = Config(run=RunConfig(**{"dir": str(tmp_path)} | settings))  # type: ignore[arg-type]
    with pytest.raises(PalaError, match=words):
        run_folder.create(config, "pong")


def test_what_killed_saves_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = ["run.json", "checkpoints/segment-000/rank-0000.safetensors", "metrics/rank-0000.jsonl", "notes.tmp"]
    segment = "checkpoints/segment-000"
    left = [".run.json.17.tmp", f"{segment}/.rank-0000.safetensors.17.tmp", f"{segment}/.rank-0001.safetensors.new"]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    run_folder.remove_unfinished(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)


def test_a_refused_job_changes_nothing(tmp_path: Path) -> None:
    first = lock_folder(tmp_path)
    assert first is not None
    before = (tmp_path / ".lock").read_bytes()
    with pytest.raises(PalaError):
        lock_folder(tmp_path)
    who_trains(tmp_path)
    assert (tmp_path / ".lock").read_bytes() == before
    join_lock(tmp_path).close()
    first.close()


def test_who_only_asks_makes_no_lock(tmp_path: Path) -> None:
    """A job whose lock was deleted would take a second one for another job's, and end."""
    kept = lock_folder(tmp_path)
    (tmp_path / ".lock").unlink()
    assert who_trains(tmp_path) is None
    check_identity(tmp_path, lock_identity(kept))
    kept.close()


def test_a_killed_process_keeps_no_lock(tmp_path: Path) -> None:
    source = "import sys, time, pathlib\nfrom pala.run.lock import lock_folder\n"
    source += "kept = lock_folder(pathlib.Path(sys.argv[1]))\nprint('locked', flush=True)\ntime.sleep(60)\n"
    other = subprocess.Popen([sys.executable, "-c", source, tmp_path], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "locked\n"
    with pytest.raises(PalaError, match=f"process {other.pid} on"):
        lock_folder(tmp_path)
    other.kill()
    other.communicate()
    file = lock_folder(tmp_path)
    assert file is not None
    file.close()


RIVAL = """
import sys
from pathlib import Path
from pala.config import Config, RunConfig
from pala.run.lock import lock_folder
from pala.system import errors
run, wins = Path(sys.argv[1]), 0
print("ready", flush=True)
sys.stdin.readline()
for _ in range(300):
    try:
        with lock_folder(run):
            (run / "owner").touch(exist_ok=False)
            (run / "owner").unlink()
            wins += 1
    except errors.PalaError:
        continue
print(wins)
"""


def test_of_two_jobs_that_start_at_once_one_at_most_goes_on(tmp_path: Path) -> None:
    """Also when one comes in while the other turns its exclusive lock into a shared one."""
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", RIVAL, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for job in jobs:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()
    wins = [int(job.communicate(timeout=60)[0]) for job in jobs]  # two owners at a time would have raised
    assert all(job.returncode == 0 for job in jobs) and sum(wins) > 0


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_once(code: int, tmp_path: Path, monkeypatch, capsys) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert lock_folder(tmp_path) is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"cannot be locked ({os.strerror(code)})" in said
    assert who_trains(tmp_path) is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_job_that_was_stopped_is_over_with_and_without_locks(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run_folder.RunRecord.begin(tmp_path, Config(), {})
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    assert not run_folder.is_over(tmp_path, 0)
    record.end("stopped")
    assert run_folder.is_over(tmp_path, 0) and not run_folder.is_over(tmp_path, 1)


@pytest.mark.parametrize("folder", ["/proc", "/proc/none", "file", "file/runs"])
def test_who_supervises_is_told_at_once_where_no_run_can_be(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The job would find it, but seconds later, and no lock is to blame."""
    (tmp_path / "file").touch()
    run = tmp_path / folder / "r"
    with pytest.raises(PalaError, match=f"Run folder '{run}' cannot be made: .*; see 'run.dir'"), supervised(run):
        pass
    assert not capsys.readouterr().err


def test_where_there_are_no_locks_a_supervisor_says_so_and_works(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with supervised(tmp_path / "r"):
        assert "make sure that no other process supervises the run" in capsys.readouterr().err


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_host_that_does_not_see_the_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(PalaError, match=r"cannot use run folder .* \(No such file or directory .*\)\. All hosts need"):
        join_lock(tmp_path / "elsewhere")


def test_names_of_files_are_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the folder's path, an old home in Latin-1, say, and of what was changed."""
    home = tmp_path / os.fsdecode("été".encode("latin-1"))
    home.mkdir()
    (home / "file").write_text("committed\n")
    commit_all(home)
    monkeypatch.chdir(home)
    facts = provenance.provenance()
    assert len(facts["project_git_commit"]) == 40 and facts["project_git_dirty"] is False
    run_folder.RunRecord.begin(home, Config(), facts | {"ranks": 1})
    assert run_folder.read(home)["segments"][0]["project_git_commit"] == facts["project_git_commit"]


def test_a_changed_tree_is_recorded_but_not_for_new_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "pala" / "provenance.py", tmp_path / "results" / "table.md"]
    for file in files:
        file.parent.mkdir()
        file.write_text("committed\n")
    commit_all(tmp_path)
    monkeypatch.setattr(provenance, "__file__", str(files[0]))
    (tmp_path / "untracked").write_text("new\n")
    files[1].write_text("made again\n")
    assert provenance.provenance()["git_dirty"] is False
    git = provenance._git
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "_git", lambda *words: None if words[1] == "status" else git(*words))
        assert provenance.provenance()["git_dirty"] is True  # for all that is known
    files[0].write_text("changed\n")
    assert provenance.provenance()["git_dirty"] is True


def commit_all(folder: Path) -> None:
    """Make a repository of a folder."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "Begin"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)


def test_the_commit_of_a_repository_that_pala_is_installed_in_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored, installed = tmp_path / ".gitignore", tmp_path / ".venv" / "provenance.py"
    ignored.write_text(".venv\n")
    commit_all(tmp_path)
    ignored.write_text(".venv\nruns\n")
    installed.parent.mkdir()
    installed.touch()
    monkeypatch.setattr(provenance, "__file__", str(installed))
    facts = provenance.provenance()
    assert (facts["git_commit"], facts["git_dirty"]) == (None, False)


def test_the_commit_of_the_project_that_uses_pala_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the repository around the working directory, unless it is PALA's own."""
    file, folder = tmp_path / "agent.py", tmp_path / "runs"
    file.write_text("committed\n")
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert not [key for key in provenance.provenance() if key.startswith("project")]  # no repository yet
    commit_all(tmp_path)
    facts = provenance.provenance()
    assert len(facts["project_git_commit"]) == 40 and facts["project_git_dirty"] is False
    assert facts["project_git_commit"] != facts["git_commit"]
    file.write_text("changed\n")
    assert provenance.provenance()["project_git_dirty"] is True
    monkeypatch.chdir(Path(provenance.__file__).parents[1])
    assert not [key for key in provenance.provenance() if key.startswith("project")]


def test_a_completion_that_could_not_be_written_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics").mkdir()
    config = Config(run=RunConfig(console="none", tensorboard=False))
    run = Run(tmp_path, tmp_path / "segment-000", None, config, 0, ["here"])
    run.start_record(Alone("here"), {})

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_json", full)
        run.saved()  # only reported
        with pytest.raises(OSError, match="No space left") as caught:
            run.end("completed")
    run.fail(caught.value)
    record = record_of(tmp_path)
    assert record["segments"][0]["status"] == "failed" and not record["completed"]


@pytest.mark.mpi
@pytest.mark.slow
def test_two_jobs_in_one_folder(any_mpi: Launcher, standing: StandingRanks, tmp_path: Path) -> None:
    """The second is refused with a sentence, the first does not notice; when all its ranks are killed, another may."""
    arguments = [*CARTPOLE, "--run.name", "r", "--run.checkpoint-interval-s", "1"]
    run = tmp_path / "runs" / "r"
    job = any_mpi.start_train(2, *arguments, "--total-steps", "100000000", cwd=tmp_path)
    wait_for(lambda: (run / "run.json").exists() or job.process.poll() is not None, what="training")
    second = standing.train(2, "--resume", str(run), cwd=tmp_path)
    assert second.status == 2 and second.output.count("pala: error:") == 1 and "Traceback" not in second.output
    assert f"Another job works in folder '{run}' (process " in second.output
    assert job.process.poll() is None
    assert len(record_of(run)["segments"]) == len(list((run / "checkpoints").iterdir())) == 1
    ranks = ranks_in(tmp_path)
    assert len(ranks) == 2
    for pid in ranks:
        with suppress(ProcessLookupError):  # mpirun ends the second when it sees the first one's death
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: who_trains(run) is None, what="the end of their locks")
    third = standing.train(2, "--resume", str(run), "--total-steps", "1", cwd=tmp_path)
    assert third.status == 0 and record_of(run)["completed"] and len(record_of(run)["segments"]) == 2, third.output
    job.wait()


def test_a_run_is_supervised_from_inside_its_folder(tmp_path, monkeypatch):
    (tmp_path / "r").mkdir()
    monkeypatch.chdir(tmp_path / "r")
    with supervised(Path()):
        assert (tmp_path / ".r.supervisor").exists()
        with pytest.raises(PalaError, match="Another supervisor works on run"), supervised(tmp_path / "r"):
            pass


def test_a_run_of_before_keeps_the_defaults_of_then(tmp_path: Path) -> None:
    """What its record does not name meant something else."""

    def config_of(table: dict[str, Any]) -> Config:
        return run_folder.config_of(tmp_path, {"config": table})

    gone = {"learning_rate_scaling": "none", "learning_rate_most_scaling": 4.0}
    then = config_of({"a2c": {"learning_rate": 1e-3} | gone, "gorila": {"save_replay": True}})
    assert (then.a2c.momentum, then.a2c.rmsprop_bias_correction, then.exchange.mixing) == (0.0, False, "uniform")
    assert then.network.precision == "float32" and then.a2c.learning_rate == 1e-3
    now = Config()
    assert config_of(to_table(now)) == now


def test_a_run_with_settings_that_are_gone_is_evaluated_and_not_resumed(tmp_path: Path) -> None:
    segment = {"started": "", "status": "completed", "git_commit": "816108e3"}
    record: dict[str, Any] = {"completed": True, "config": to_table(Config()), "segments": [segment]}
    record["config"]["exchange"]["exchanges_per_update"] = 1
    record["config"]["gorila"]["save_replay"] = True
    write_json(tmp_path / "run.json", record)
    run_folder.check_trains_as_before(tmp_path)
    record["config"]["exchange"]["exchanges_per_update"] = 4
    record["config"]["a2c"]["learning_rate_scaling"] = "ranks"
    write_json(tmp_path / "run.json", record)
    assert run_folder.config_of(tmp_path) == Config()
    what = "'a2c.learning_rate_scaling' 'ranks' and 'exchange.exchanges_per_update' 4, which PALA no longer has"
    with pytest.raises(PalaError, match=rf"{what}\. .*\(commit 816108e3\)"):
        run_folder.check_trains_as_before(tmp_path)
    with pytest.raises(PalaError, match=what):
        run_rank(Alone("here"), Request(Config(), resume=tmp_path))
