"""Run folders from elsewhere, damaged or hostile: no file outside is touched, no code runs untrusted."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest

import pala
from pala.config import EnvConfig
from pala.doctor import facts
from pala.doctor.watchdog import Watchdog
from pala.evaluation import evaluate as evaluate_program
from pala.evaluation import play as play_program
from pala.evaluation import video
from pala.evaluation.scoring import Acting, evaluate
from pala.evaluation.video import record_video
from pala.job.rank import run_rank
from pala.job.request import Request
from pala.lab import scores as scores_program
from pala.lab.compare import __main__ as compare_program
from pala.networks.network import ActorCritic
from pala.report import draw_timeline as trace_program
from pala.report import plot as plot_program
from pala.report import runs
from pala.run import checkpoint, run_folder, user_code
from pala.run.hooks import UserCode
from pala.run.lock import is_locked, lock_folder, who_trains
from pala.run.metrics import MetricsWriter, Tail, metrics_path
from pala.run.view import RunView
from pala.system.errors import CollectiveError, PalaError
from pala.system.files import write_atomically
from pala.system.output import log, print_result
from pala.system.search_path import refuse_another_pala
from pala.testing.memory import run_ranks
from pala.train import parse
from support import REPOSITORY
from support.checkpoints import read_state
from support.comparisons import GAME, PRESET
from support.environments import Sparkle
from support.helpers import contents, slow_but_for
from support.memory_jobs import configure, gorila, train
from support.policies import CARTPOLE, make_run, network_of

EPISODE = {"type": "episode", "time_s": 1.0, "local_steps": 5, "global_steps": 5, "return": 5.0, "length_steps": 5}


def as_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process has trained no run."""
    monkeypatch.setattr(user_code, "_own_runs", set())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A completed run of one rank."""
    folder = make_run(tmp_path / "run", CARTPOLE, network_of(CARTPOLE))
    (folder / "metrics").mkdir()
    MetricsWriter(metrics_path(folder, 0), 0).write([EPISODE, EPISODE | {"time_s": 2.0}])
    return folder


# ---- the programs ----------------------------------------------------------------------------------------------------


def main_of(program: Any, *arguments: str) -> Callable[[Path], object]:
    def start(run: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["program", *(a.format(run=run, folder=run.parent) for a in arguments)])
            program.main()

    return start


def resume(run: Path) -> None:
    """What `python -m pala.train --resume` does."""
    command = parse(["--resume", str(run), "--trust-run"])
    config = replace(command.config, total_steps=80)
    request = Request(config, resume=run, trust_run=True)
    result = run_ranks(1, lambda comm: run_rank(comm, request))[0]
    if isinstance(result, BaseException):
        raise result


PROGRAMS: dict[str, Callable[[Path], object]] = {
    "resume": resume,
    "evaluate": main_of(evaluate_program, "{run}", "--episodes", "1", "--trust-run"),
    "play": main_of(play_program, "{run}", "--episodes", "1", "--trust-run"),
    "plot": main_of(plot_program, "{run}"),
    "trace": main_of(trace_program, "{run}"),
    "compare": main_of(
        compare_program, "{folder}/preset.toml", "--report-only", "--add", "{run}", "--output", "{folder}/out"
    ),
    "scores": main_of(scores_program, "{run}", "--output", "{folder}/out"),
}


class Window:
    """One that nobody sees."""

    def __init__(self, title: str) -> None:
        pass

    def show(self, picture: np.ndarray, frames_per_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.fixture(params=PROGRAMS)
def says(
    request: pytest.FixtureRequest, own_handlers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Callable[[Path], str]:
    """Start a program with a run's path; the one error message by which it ends, or nothing."""
    for program in (evaluate_program, play_program):
        monkeypatch.setattr(program, "prepare", lambda threads: None)
    monkeypatch.setattr(video, "Window", Window)
    (tmp_path / "game.toml").write_text(GAME)
    (tmp_path / "preset.toml").write_text(PRESET.replace('"game.toml"', f'"{tmp_path}/game.toml"'))

    def start(run: Path) -> str:
        try:
            PROGRAMS[request.param](run)
        except SystemExit as exit_:
            if not exit_.code:
                return ""
            said = capsys.readouterr().err
            assert exit_.code == 2 and said.startswith("pala: error: ") and said.count("\n") == 1, said
            return str(said)
        except PalaError as error:
            return str(error)
        return ""

    return start


# ---- links -----------------------------------------------------------------------------------------------------------

FILES = (
    ".lock", "run.json", "metrics/rank-0000.jsonl", "checkpoints/segment-000/rank-0000.safetensors",
    "policy.safetensors", "evaluation.json", "evaluations.jsonl", "learning_curve.png", "make_env.txt",
    "tensorboard/events", ".evaluation.json.1.tmp",
)  # fmt: skip
FOLDERS = ("metrics", "checkpoints", "checkpoints/segment-000", "tensorboard")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed run with all files that a run may have."""
    folder = tmp_path_factory.mktemp("made")
    train(1, configure(folder, steps=40)).ended_well()
    run = folder / "r"
    (run / "tensorboard").mkdir(exist_ok=True)
    for name in FILES:
        (run / name).touch()
    (run / "make_env.txt").write_text("own:make")
    return run


@pytest.fixture
def whole(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


@pytest.mark.parametrize("kind", slow_but_for(["hard link", "symbolic link", "dead link", "pipe"], "hard link"))
@pytest.mark.slow
def test_no_program_takes_a_run_with_a_file_of_elsewhere(
    kind: str, whole: Path, tmp_path: Path, says: Callable[[Path], str]
) -> None:
    victim = tmp_path / "victim"
    for name in FILES:
        file = whole / name
        before = file.read_bytes()
        file.unlink()
        victim.write_bytes(before)
        if kind == "hard link":
            os.link(victim, file)
        elif kind == "pipe":
            os.mkfifo(file)
        else:
            file.symlink_to(victim if kind == "symbolic link" else tmp_path / "nowhere" / "file")
        said = says(whole)
        assert name in said, said
        assert victim.read_bytes() == before and not (tmp_path / "nowhere").exists()
        file.unlink()
        file.write_bytes(before)


@pytest.mark.slow
def test_no_program_takes_a_run_with_a_folder_of_elsewhere(
    whole: Path, made: Path, tmp_path: Path, says: Callable[[Path], str]
) -> None:
    for name in FOLDERS:
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        other = shutil.copytree(made, tmp_path / "other")
        before = contents(other)
        shutil.move(whole / name, tmp_path / "aside")
        (whole / name).symlink_to(os.path.relpath(other / name, (whole / name).parent))
        said = says(whole)
        assert name in said, said
        assert contents(other) == before
        (whole / name).unlink()
        shutil.move(tmp_path / "aside", whole / name)


@pytest.mark.parametrize("kind", ["hard link", "symbolic link"])
def test_no_lock_nor_metrics_go_to_a_file_of_elsewhere(kind: str, tmp_path: Path, capsys: Any) -> None:
    """A job's own look at what it opens, after the programs' look at the whole run."""
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("as it was")
    (folder / "metrics").mkdir(parents=True)
    for file in (folder / ".lock", metrics_path(folder, 0)):
        (os.link if kind == "hard link" else os.symlink)(victim, file)
    with pytest.raises(PalaError, match=r"\.lock' cannot be opened \(it is a"):
        lock_folder(folder)
    assert is_locked(folder) is None
    MetricsWriter(metrics_path(folder, 0), 0).write([{"type": "interval", "time_s": 1.0}])
    assert "it is a" in capsys.readouterr().err
    assert victim.read_text() == "as it was"


def test_a_new_run_is_not_made_in_a_folder_with_links(tmp_path: Path) -> None:
    """One that seems to be left by a job that never began."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "checkpoints").symlink_to(tmp_path / "outside")
    with pytest.raises(PalaError, match="checkpoints' is a link"):
        run_folder.create(configure(tmp_path, steps=40), "r")
    assert not list((tmp_path / "outside").iterdir()) and not (tmp_path / "r" / "metrics").exists()


@pytest.mark.slow
def test_a_runs_folder_may_itself_be_reached_over_a_link(whole: Path, tmp_path: Path) -> None:
    (whole / "make_env.txt").unlink()
    (whole / ".evaluation.json.1.tmp").unlink()
    (whole / "evaluation.json").unlink()
    (whole / "evaluations.jsonl").unlink()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(whole)
    resume(tmp_path / "runs" / "mine")
    assert run_folder.read(whole)["segments"][-1]["status"] == "completed"
    runs.read(tmp_path / "runs" / "mine")


def test_a_link_in_the_place_of_an_unfinished_file_is_not_followed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: "guessed")
    (run / ".evaluation.json.guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(run / "evaluation.json", b"new")
    assert victim.read_text() == "as it was"


# ---- modules ---------------------------------------------------------------------------------------------------------


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    pala = [str(Path(sys.executable).with_name("pala"))] if arguments[0] == "pala" else [sys.executable, *arguments]
    arguments = arguments[1:] if arguments[0] == "pala" else ()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "agg",
    }  # fmt: skip
    return subprocess.run([*pala, *arguments], cwd=cwd, capture_output=True, text=True, env=environment, timeout=300)


HARM = "import pathlib\npathlib.Path({mark!r}).touch()\nraise ImportError\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "program"),
    [
        *(("python -m", name) for name in ("evaluate", "plot", "trace", "scores", "train --resume")),
        ("pala", "plot"),
    ],
)
def test_no_program_finds_a_module_in_the_working_directory(
    start: str, program: str, whole: Path, tmp_path: Path
) -> None:
    """torch looks for `dill`, others for others; the working directory is the run, or holds one of that name.

    `python -m` puts it on the path before any program begins; `pala` never does, whatever the program.
    """
    mark = tmp_path / "it ran"
    (whole / "make_env.txt").unlink()
    beside = tmp_path / "beside"
    named = shutil.copytree(whole, beside / "dill")
    names = ("own", "pyarrow", "IPython", "tensorboard", "pandas", "pickle", "socket", "numpy")
    for folder in (whole, beside):
        for name in names:
            (folder / f"{name}.py").write_text(HARM.format(mark=str(mark)))
            (folder / name).mkdir(exist_ok=True)
    (whole / "dill.py").write_text(HARM.format(mark=str(mark)))
    (named / "__init__.py").write_text(HARM.format(mark=str(mark)))
    words = program.split()
    words = ["pala", *words] if start == "pala" else ["-m", "pala", *words]
    more = {
        "evaluate": ["--episodes", "1"],
        "train --resume": ["--env.vectorization", "async", "--total-steps", "200"],
    }.get(program, [])
    is_the_run = program == "evaluate"  # the working directory; of the others it holds what that would
    for folder, cwd in (("dill", beside), (".", whole))[: 1 + is_the_run]:
        ended = python(*words, folder, *more, cwd=cwd)
        assert not mark.exists(), ended.stderr
        assert "Traceback" not in ended.stderr, ended.stderr


def named_run(run: Path, env_id: str) -> Path:
    (run / "make_env.txt").unlink()
    record = json.loads((run / "run.json").read_text())
    record["config"]["env"]["id"] = env_id
    (run / "run.json").write_text(json.dumps(record))
    return run


@pytest.mark.slow
def test_a_module_that_is_named_is_found_in_the_working_directory_once_it_is_trusted(
    whole: Path, tmp_path: Path
) -> None:
    named_run(whole, "own_of_attack:Own-v0")
    (tmp_path / "own_of_attack.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Own-v0', CartPoleEnv, max_episode_steps=50)\n"
    )
    ended = python("pala", "evaluate", "run", "--episodes", "1", cwd=tmp_path)
    assert ended.returncode == 2 and "add `--trust-run`" in ended.stderr, ended.stderr
    assert not list(tmp_path.glob("__pycache__"))
    for words in (["pala", "evaluate"], ["-m", "pala", "evaluate"]):
        ended = python(*words, "run", "--episodes", "1", "--trust-run", cwd=tmp_path)
        assert ended.returncode == 0 and "mean return" in ended.stdout, ended.stderr


@pytest.mark.slow
def test_the_doctor_finds_no_module_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "it ran"
    for name in ("mpi4py", "signal", "select"):
        (tmp_path / f"{name}.py").write_text(HARM.format(mark=str(mark)))
    monkeypatch.chdir(tmp_path)
    with Watchdog(0):
        pass
    (tmp_path / "pala.py").touch()
    assert "take for PALA" in facts.try_mpirun("mpirun")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pala.py", "pala/__init__.py"])
@pytest.mark.slow
def test_processes_of_pala_are_not_started_beside_another_pala(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refuse_another_pala()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(PalaError, match=f"holds '{name}', which Python would take for PALA"):
        refuse_another_pala()
    ended = python("pala", "train", "-n", "1", "quickstart", cwd=tmp_path)
    assert ended.returncode == 2 and "take for PALA" in ended.stderr, ended.stderr


def test_the_checkout_that_pala_was_installed_from_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its path has a space, or leads through a link."""
    checkout, link = tmp_path / "my work", tmp_path / "link"
    (checkout / "pala").mkdir(parents=True)
    (checkout / "pala/__init__.py").touch()
    link.symlink_to(checkout)
    monkeypatch.chdir(checkout)
    for url in (checkout.as_uri(), link.as_uri()):
        installed = SimpleNamespace(read_text=lambda name, url=url: json.dumps({"url": url}))
        monkeypatch.setattr("importlib.metadata.distribution", lambda name, installed=installed: installed)
        refuse_another_pala()
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: SimpleNamespace(read_text=lambda name: None))
    with pytest.raises(PalaError, match="take for PALA"):
        refuse_another_pala()


# ---- sizes and text --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_network_that_needs_terabytes_is_told(whole: Path, own_handlers: None, monkeypatch: Any, capsys: Any) -> None:
    (whole / "make_env.txt").unlink()
    record = json.loads((whole / "run.json").read_text())
    record["config"]["network"]["mlp_hidden"] = [10**6, 10**6]
    (whole / "run.json").write_text(json.dumps(record))
    monkeypatch.setattr(evaluate_program, "prepare", lambda threads: None)
    with pytest.raises(SystemExit) as exit_:
        PROGRAMS["evaluate"](whole)
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and said.startswith("pala: error: ") and said.count("\n") == 1, said
    assert "memory" in said
    with pytest.raises(PalaError, match="memory"):
        resume(whole)


def test_a_terminal_is_not_controlled_by_a_runs_text(capsys: Any) -> None:
    for words in (log, print_result):
        words("\x1b]0;title\x07 a\x9b2J b\x7f c\rd\x08\ttab é\nline")
        out, err = capsys.readouterr()
        assert (out + err) == "\\x1b]0;title\\x07 a\\x9b2J b\\x7f c\\rd\\x08\ttab é\nline\n"


# ---- code of the user's ----------------------------------------------------------------------------------------------


def five_steps() -> Sparkle:
    """A factory that other processes can import, as any module's."""
    return Sparkle("rgb_array")


def keep(folder: Path, make_env: Callable[[], Any]) -> None:
    user_code.keep(folder, UserCode(make_env))


def load(folder: Path, trust_run: bool = False) -> Any:
    return user_code.load_trusted(folder, CARTPOLE, trust_run).make_env


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def local_factory() -> Callable[[], Sparkle]:
    return lambda: Sparkle("rgb_array")


def test_a_factory_that_can_be_imported_is_kept_by_its_name(tmp_path: Path) -> None:
    for make_env, name in ((five_steps, "five_steps"), (Sparkle, "Sparkle")):
        keep(tmp_path, make_env)
        assert names_in(tmp_path) == ["make_env.txt"]
        assert (tmp_path / "make_env.txt").read_text() == f"{make_env.__module__}:{name}"
        assert load(tmp_path, trust_run=True) is make_env


@pytest.mark.parametrize("where", ["__main__", "by value"])
def test_a_factory_that_others_cannot_import_is_pickled(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "__main__":
        monkeypatch.setattr(five_steps, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], "five_steps", five_steps, raising=False)
    else:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        keep(tmp_path, five_steps)
    finally:
        if where != "__main__":
            cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert (tmp_path / "make_env.pkl").exists() and not (tmp_path / "make_env.txt").exists()


@pytest.mark.parametrize("factory", [five_steps, local_factory()], ids=["name", "pickle"])
def test_code_is_loaded_by_request_or_by_the_job_that_kept_it(
    factory: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(tmp_path) is None
    keep(tmp_path, factory)
    with pytest.raises(
        PalaError, match=r"make_env.(txt' \(a name|pkl' \(a pickle)\)\. .* add `--trust-run` \(from Python"
    ):
        load(tmp_path)
    assert isinstance(load(tmp_path, trust_run=True)(), Sparkle)
    user_code.trust_own(tmp_path)
    assert isinstance(load(tmp_path)(), Sparkle)
    as_another_process(monkeypatch)
    with pytest.raises(PalaError, match="--trust-run"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["os:abort", "http.server:test", "pala.none:name", "pala.run.user_code:NO", "../x:y", "x", "", ":", "a:b:c"],
)
def test_a_name_leads_to_nothing_but_a_factory(name: str, tmp_path: Path) -> None:
    (tmp_path / "make_env.txt").write_text(name)
    with pytest.raises(PalaError, match=r"make_env\.txt' names"):
        load(tmp_path, trust_run=True)


def test_a_name_wins_over_a_pickle_and_takes_its_place(tmp_path: Path) -> None:
    keep(tmp_path, local_factory())
    keep(tmp_path, five_steps)
    assert names_in(tmp_path) == ["make_env.txt"]
    (tmp_path / "make_env.pkl").write_bytes(cloudpickle.dumps(local_factory()))
    assert load(tmp_path, trust_run=True) is five_steps
    keep(tmp_path, local_factory())
    assert names_in(tmp_path) == ["make_env.pkl"]


@pytest.mark.parametrize(
    ("key", "value", "asks"),
    [
        ("env.wrappers", ("FlattenObservation",), False),
        ("env.wrappers", ("RescaleObservation(min_obs=-1, max_obs=1)",), True),
        ("env.wrappers", ("harm:Wrapper",), True),
        ("env.id", "ALE/Pong-v5", False),
        ("env.id", "harm:Pong-v0", True),
        ("env.id", "FrozenLake-v1(map_name='8x8')", True),
        ("network.custom", "harm:Network", True),
    ],
)
def test_names_in_the_configuration_are_asked_for(key: str, value: Any, asks: bool, tmp_path: Path) -> None:
    section, name = key.split(".")
    config = replace(CARTPOLE, **{section: replace(getattr(CARTPOLE, section), **{name: value})})
    user_code.check_trust(tmp_path, config, trust_run=True)
    if not asks:
        user_code.check_trust(tmp_path, config, trust_run=False)
        return
    with pytest.raises(PalaError, match=rf"brings code along, '{key}' .* add `--trust-run`"):
        user_code.check_trust(tmp_path, config, trust_run=False)


def test_what_is_given_is_not_loaded_from_the_run(tmp_path: Path) -> None:
    (tmp_path / "make_env.pkl").write_bytes(b"harm")
    given = UserCode(five_steps)
    user_code.check_trust(tmp_path, CARTPOLE, trust_run=False, given=given)
    assert user_code.load(tmp_path, given) == given


def test_a_new_run_leaves_out_what_was_planted_under_its_name(tmp_path: Path) -> None:
    """A folder in which no run began is taken as if it were new."""
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "make_env.pkl").write_bytes(b"harm")
    assert train(1, configure(tmp_path, steps=100)).record["completed"]
    assert not list(folder.glob("make_env*"))


def python_run(folder: Path) -> Path:
    """A run as version 1 left it: with a pickle alone."""
    network = ActorCritic(Sparkle.observation_space, Sparkle.action_space, CARTPOLE.network)
    made = make_run(folder, replace(CARTPOLE, env=EnvConfig(id="ALE/Pong-v5")), network)
    (made / "make_env.pkl").write_bytes(cloudpickle.dumps(local_factory()))
    return made


def test_an_old_run_is_evaluated_when_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate_program, "prepare", lambda threads: None)
    folder = python_run(tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["evaluate", str(folder)])
    with pytest.raises(SystemExit):
        evaluate_program.main()
    assert "add `--trust-run`" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["evaluate", str(folder), "--trust-run"])
    evaluate_program.main()
    assert "mean return 5" in capsys.readouterr().out
    with pytest.raises(PalaError, match="add `--trust-run`"):
        record_video(folder, tmp_path / "video.mp4", Acting())
    assert evaluate(folder, 1, 1, Acting(trust_run=True)).returns == [5]


def test_a_run_that_was_made_in_python_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a question by the process that made it; by others, and later, if it is trusted."""
    config = configure(tmp_path, steps=40)

    def session(total_steps: int, **options: Any) -> list[Any]:
        request = Request(replace(config, total_steps=total_steps), **options)
        return run_ranks(2, lambda comm: run_rank(comm, request))

    folder = tmp_path / "r"
    assert [result.status for result in session(40, code=UserCode(local_factory()))] == ["completed"] * 2
    assert [result.status for result in session(80, resume=folder)] == ["completed"] * 2
    as_another_process(monkeypatch)
    for error in session(120, resume=folder):
        assert isinstance(error, CollectiveError) and "add `--trust-run`" in str(error)
    assert [result.status for result in session(120, resume=folder, trust_run=True)] == ["completed"] * 2


def test_an_id_that_a_kept_environment_wins_over_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = configure(tmp_path, steps=40)
    run_ranks(1, lambda comm: run_rank(comm, Request(config, UserCode(local_factory()))))
    folder = tmp_path / "r"
    kept = run_folder.config_of(folder).env.id
    capfd.readouterr()
    for given in (kept, "Acrobot-v1"):
        request = Request(replace(config, env=replace(config.env, id=given), total_steps=80), resume=folder)
        run_ranks(1, lambda comm, request=request: run_rank(comm, request))
        assert ("'env.id' is 'Acrobot-v1', but the run keeps" in capfd.readouterr().err) == (given != kept)
    assert run_folder.config_of(folder).env.id == kept


@pytest.mark.parametrize(("version", "is_told"), [("3.99.1", True), (platform.python_version(), False)])
def test_a_pickle_of_another_python_is_told(
    version: str, is_told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = configure(tmp_path, steps=40)
    run_ranks(1, lambda comm: run_rank(comm, Request(config, UserCode(local_factory()))))
    file = tmp_path / "r" / "run.json"
    record = json.loads(file.read_text())
    record["segments"][-1]["versions"] = {"python": version}
    file.write_text(json.dumps(record))
    capfd.readouterr()
    pala.load_policy(tmp_path / "r")
    assert ("keeps 'make_env.pkl', which Python 3.99.1 has written" in capfd.readouterr().err) == is_told


def test_packed_metrics_are_not_gone_on_with(tmp_path: Path) -> None:
    """What they hold would be hidden by the new file beside them."""
    config = configure(tmp_path, steps=40)
    run_ranks(1, lambda comm: run_rank(comm, Request(config)))
    folder, config = tmp_path / "r", replace(config, total_steps=80)
    file = metrics_path(folder, 0)
    plain = file.read_bytes()
    file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(plain))
    file.unlink()
    request = Request(config, resume=folder)
    (error,) = run_ranks(1, lambda comm: run_rank(comm, request))
    assert isinstance(error, CollectiveError) and "are packed" in str(error) and "`gunzip` them first" in str(error)
    file.write_bytes(plain)
    (made,) = run_ranks(1, lambda comm: run_rank(comm, request))
    assert made.status == "completed" and metrics_path(folder, 0).read_bytes().startswith(plain)


def test_training_takes_the_option_with_a_resume(run: Path) -> None:
    assert parse(["--resume", str(run), "--trust-run"]).trust_run
    assert not parse(["--resume", str(run)]).trust_run


# ---- code in other files ---------------------------------------------------------------------------------------------


class Harm:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.slow
def test_no_file_of_a_run_but_the_environment_executes_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "harm was done"
    pickle.loads(pickle.dumps(Harm(mark)))
    assert mark.exists()
    mark.unlink()
    base = tmp_path / "base"
    config = gorila(base, steps=200)
    config = replace(config, gorila=replace(config.gorila, num_shards=1))
    train(1, config).ended_well()
    train(1, replace(configure(base, steps=40), run=replace(config.run, name="a2c"))).ended_well()
    for made in (base / "r", base / "a2c"):
        (made / "evaluation.json").write_text("{}")
        (made / "evaluations.jsonl").write_text("{}\n")
        (made / "make_env.txt").write_text("x")
        files = [file for file in sorted(made.rglob("*")) if file.is_file()]
        assert len(files) > 8
        (made / "make_env.txt").unlink()
        for number, file in enumerate(files):
            folder = tmp_path / f"{made.name}-{number}"
            shutil.copytree(made, folder)
            # First the file alone: beside the pickle, `evaluate` and a resume are refused before they open others.
            for bad in (folder / file.relative_to(made), folder / "make_env.pkl"):
                bad.write_bytes(pickle.dumps(Harm(mark)))
                as_another_process(monkeypatch)  # this one may have resumed the run
                open_everywhere(folder, mark)


def open_everywhere(folder: Path, mark: Path) -> None:
    preset = folder.parent / "preset.toml"
    (folder.parent / "game.toml").write_text(GAME)
    preset.write_text(PRESET.replace('"game.toml"', f'"{folder.parent}/game.toml"'))
    readers: list[Callable[[], object]] = [
        lambda: evaluate(folder, 1, 1, Acting()),
        lambda: plot_program.read(folder),
        lambda: scores_program.read(folder),
        lambda: checkpoint.global_steps(folder),
        lambda: who_trains(folder),
        lambda: compare_program.compare(
            compare_program.Command(preset, add=(folder,), report_only=True, output=folder / "out")
        ),
        lambda: resumed(folder),
    ]
    for reader in readers:
        try:
            reader()
        except PalaError as error:
            assert "\n" not in str(error)
        assert not mark.exists(), folder


def resumed(folder: Path) -> None:
    """As `--resume` does, but for the training itself."""
    config = parse(["--resume", str(folder)]).config
    steps = checkpoint.global_steps(folder) + 1
    least = config.gorila.min_replay_steps + config.gorila.update_period_steps
    config = replace(config, total_steps=max(steps, least if config.algorithm == "gorila" else 1))
    for result in run_ranks(1, lambda comm: run_rank(comm, Request(config, resume=folder))):
        if isinstance(result, BaseException):
            raise result


def test_a_module_that_a_run_names_is_imported_by_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", replace(CARTPOLE, env=EnvConfig(id="harm_of_a_run:Name-v0")))
    (tmp_path / "harm_of_a_run.py").write_text("raise ImportError('its code ran')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def film(trust_run: bool = False) -> None:
        record_video(folder, tmp_path / "video.mp4", Acting(trust_run=trust_run))

    for program in (film, lambda: evaluate(folder, 1, 1, Acting())):
        with pytest.raises(PalaError, match=r"brings code along, 'env.id' \['harm_of_a_run:Name-v0'\].*--trust-run"):
            program()
    with pytest.raises(PalaError, match="its code ran"):
        film(trust_run=True)


def test_an_evaluation_of_checkpoints_does_not_hide_the_final_one(run: Path) -> None:
    """It may have been begun while the run trained, and be done after it has completed."""
    from pala.evaluation import record

    evaluate_and_save(run)
    final = (run / "evaluation.json").read_bytes()
    found = evaluate(run, 1, 1, Acting())
    record.save(run, replace(found, policy="mean of checkpoints of 2 ranks"))
    assert (run / "evaluation.json").read_bytes() == final
    assert len((run / "evaluations.jsonl").read_text().splitlines()) == 2


def evaluate_and_save(run: Path) -> None:
    from pala.evaluation import record

    record.save(run, evaluate(run, 1, 1, Acting()))


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    train(1, configure(tmp_path, steps=40)).ended_well()
    folder = checkpoint.newest_segment(tmp_path / "r")
    for file in folder.iterdir():
        state = read_state(file)
        state.tensors = {name: state.tensors["parameters"].clone() for name in ("parameters", "squares", "target")}
        checkpoint.save_rank(folder, state)
    (result,) = train(1, configure(tmp_path, steps=80), resume=tmp_path / "r").results
    assert isinstance(result, CollectiveError) and "of another algorithm" in str(result)
    (tmp_path / "r" / "policy.safetensors").unlink()
    with pytest.raises(PalaError, match="of another algorithm"):
        evaluate(tmp_path / "r", 1, 1, Acting())


# ---- damaged files ---------------------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


RECORDS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "nested": (lambda record: nested(100_000), "it is nested too deeply"),
    "nested less": (lambda record: json.dumps(record).replace('"seed": 1', f'"seed": {nested(900)}'), "seed"),
    "nothing": (lambda record: "", "cannot be read"),
    "half": (lambda record: json.dumps(record)[:200], "cannot be read"),
    "a list": (lambda record: [record], "it holds no table"),
    "a number": (lambda record: 7, "it holds no table"),
    "no completed": (lambda record: {k: v for k, v in record.items() if k != "completed"}, "'completed' is missing"),
    "completed perhaps": (lambda record: record | {"completed": "perhaps"}, "'completed' is 'perhaps'"),
    "no config": (lambda record: {k: v for k, v in record.items() if k != "config"}, "'config' is missing"),
    "another config": (lambda record: record | {"config": {"colour": 1}}, "unknown key 'colour'"),
    "no segment": (lambda record: record | {"segments": []}, "'segments' holds no segment"),
    "segments of numbers": (lambda record: record | {"segments": [1]}, "'segments' holds no segment"),
    "no start": (lambda record: record | {"segments": [{"status": "completed"}]}, "'started' of segment 0 is missing"),
    "many ranks": (
        lambda record: record | {"segments": [record["segments"][0] | {"ranks": 10**400}]},
        "'ranks' of segment 0 is 1000",
    ),
    "no ranks": (
        lambda record: record | {"segments": [record["segments"][0] | {"ranks": None}]}, "'ranks' of segment 0 is None"
    ),
}  # fmt: skip


def is_slow(program: str, fault: str) -> bool:
    """Two faults show often that the programs which take longest to start read a record as the others do."""
    return program in ("compare", "resume", "play") and fault not in ("half", "no segment")


@pytest.mark.parametrize(
    ("says", "fault"),
    [
        pytest.param(program, fault, marks=[pytest.mark.slow] * is_slow(program, fault))
        for program in PROGRAMS
        for fault in RECORDS
    ],
    indirect=["says"],
)
@pytest.mark.slow
def test_a_damaged_record_is_told(fault: str, run: Path, says: Callable[[Path], str]) -> None:
    make, words = RECORDS[fault]
    made = make(json.loads((run / "run.json").read_text()))
    (run / "run.json").write_text(made if isinstance(made, str) else json.dumps(made))
    said = says(run)
    assert words in said and "run.json" in said and len(said) < 700 + len(str(run))


LINES = {
    "list": "[1, 2]", "number": "7", "null": "null", "text": '"x"', "nested": nested(100_000), "empty": "{}",
    "no type": '{"time_s": 1}', "strange type": '{"type": [1], "time_s": 1}', "no time": '{"type": "interval"}',
    "no steps": '{"type": "interval", "time_s": 1, "consensus_distance": 0.5}',
    "late": '{"type": "interval", "time_s": NaN, "global_steps": 1}', "huge": json.dumps(EPISODE | {"return": 10**400}),
    "no return": '{"type": "episode", "time_s": 1, "global_steps": 1}',
    "text for a number": '{"type": "interval", "time_s": 1, "global_steps": 1, "consensus_distance": "far"}',
    "half of a sketch": '{"type": "interval", "time_s": 1, "global_steps": 1, "own_movement": [1.0]}',
    "unlike sketches": '{"type": "interval", "time_s": 1, "global_steps": 1, "own_movement": [1], "movement": [1, 2]}',
    "list for a number": '{"type": "interval", "time_s": 1, "global_steps": 1, "mixes": [1]}', "bytes": "\udcff\udcfe{",
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_lines_that_are_no_records_are_left_out_and_said(line: str, run: Path, capsys: Any) -> None:
    file = metrics_path(run, 0)
    file.write_bytes(LINES[line].encode(errors="surrogateescape") + b"\n" + file.read_bytes())
    assert len(plot_program.read(run).returns) == 2
    assert capsys.readouterr().err == f"Metrics '{file}': a line that is no record left out, line 1 first.\n"
    view = RunView(run, 1)
    view.refresh()
    view.refresh()
    assert view.num_episodes == 2 and view.total("mixes") == 0 and view.mean_return == 5
    assert capsys.readouterr().err.count("\n") == 1, "once"


def test_a_damaged_packed_file_is_told(run: Path) -> None:
    file = run / "metrics" / "rank-0001.jsonl.gz"
    whole = gzip.compress(b"".join(json.dumps(EPISODE | {"return": i / 7}).encode() + b"\n" for i in range(500)))
    for data in (
        whole[: len(whole) // 2],
        whole[:5],
        whole[:-1],
        b"",
        b"text",
        whole[:100] + b"\xff" * 9 + whole[109:],
    ):
        file.write_bytes(data)
        if data == b"":
            assert list(Tail(file).read()) == []
            continue
        with pytest.raises(PalaError, match=r"rank-0001.jsonl.gz' cannot be read, or are damaged"):
            plot_program.read(run)


def test_training_goes_on_beside_metrics_that_cannot_be_read(run: Path, capsys: Any) -> None:
    (run / "metrics" / "rank-0001.jsonl").mkdir()
    view = RunView(run, 2)
    view.refresh()
    view.refresh()
    assert view.num_episodes == 2
    assert capsys.readouterr().err.count("is a folder, not a file. Training continues.") == 1


@pytest.mark.timeout(30)
@pytest.mark.slow
def test_many_starts_that_lead_nowhere_take_no_time(run: Path) -> None:
    """Each start drops what came after it: looked through again each time, this would take a minute."""
    start = {"type": "start", "time_s": 3.0, "segment": "segment-000"}
    metrics_path(run, 0).write_text((json.dumps(start) + "\n" + json.dumps(EPISODE | {"time_s": 2.0}) + "\n") * 20_000)
    assert len(plot_program.read(run).returns) == 20_000


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"policy": "final"}', nested(100_000),
                                  '{"policy": [], "global_steps": "x", "mean_return": 1, "episodes": 1}'])  # fmt: skip
def test_a_damaged_evaluation_is_told(text: str, run: Path) -> None:
    from pala.evaluation.record import final_evaluation

    for name in ("evaluation.json", "evaluations.jsonl"):
        (run / name).write_text(text)
        with pytest.raises(PalaError, match=r"cannot be read") as raised:
            final_evaluation(run, run_folder.read(run))
        assert str(run) in str(raised.value)
        (run / name).unlink()


# ---- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_path_that_is_no_runs_folder_is_told(tmp_path: Path, says: Callable[[Path], str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "run.json").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "run.json")
    (tmp_path / "empty").mkdir()
    for name, words in {
        "nowhere": "does not exist", "file": "it is a file", "empty": "no 'run.json'",
        "folder": "is a folder, not a file", "pipe": "is a pipe or a device, not a file", "\0": "", "x" * 300: "",
    }.items():  # fmt: skip
        said = says(tmp_path / name)
        assert words in said and len(said) < 900, said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_told(run: Path, says: Callable[[Path], str]) -> None:
    run.chmod(0)
    try:
        assert "Permission denied" in says(run)
    finally:
        run.chmod(0o755)


def test_a_file_that_may_not_be_read_is_told(
    run: Path, says: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever the user is."""
    really = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("run.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    said = says(run)
    assert "Permission denied" in said and str(run / "run.json") in said
