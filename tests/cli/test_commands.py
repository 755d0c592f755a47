"""Promises of all commands: help, errors in one line, JSON output, and no partial files.

The commands are found by walking the application, so a new one is tested, too.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import COMMANDS, GROUPS, ROOT, error_of, wsam_command
from reporting import StopAfter

from wsam.cli import _files, _options
from wsam.cli._app import VERBS
from wsam.cli._app import _install_hint as install_hint
from wsam.lab import records
from wsam.lab.checkpoint import save_state
from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.methods import METHODS
from wsam.sweep import InProcess, Processes

RUN = Run(data="digits", model="mlp", method="wsam", epochs=1, train_limit=100, test_limit=50)
ONE_CELL = "--smoke --only ResNet18/WSAM/CIFAR-10 --seeds 0 --epochs 1 --device cpu"
TRAIN = "--model mlp --epochs 1 --train-limit 100 --test-limit 50 --device cpu --no-tensorboard"

# A quick use of every command but OTHERS. {run} is a record, {runs} its folder, {page} a page with a
# table, {out} a new folder.
QUICK = {
    "bounds convex": "",
    "bounds generalization": "",
    "bounds nonconvex": "",
    "compare": "--model mlp --train-limit 200 --test-limit 100 --methods sam --seeds 2 --trials 1 "
    "--epochs 2 --budget 300s --device cpu --workers 1 --out {out}",
    "curvature": "{run} --samples 50 --density --density-steps 5 --device cpu --out {out}",
    "directions": "--gamma 0 --out {out}",
    "landscape": "{run} --samples 50 --points 3 --device cpu --out {out}",
    "paper list": "",
    "paper page": "{page}",
    "paper run": f"cifar {ONE_CELL} --out {{out}}",
    "paper table": "cifar --plot {out}/cifar.png",
    "report": "{runs} --out {out}/report.html",
    "sweep": f"cifar {ONE_CELL} --workers 1 --out {{out}}",
    "train": f"{TRAIN} --out {{out}}",
}
OTHERS = {"bench", "demo", "toy"}  # their own tests read their JSON output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a finished run."""
    folder = tmp_path_factory.mktemp("runs")
    train(RUN, folder, ExecutionConfig(device="cpu", keep_weights=True))
    return records.record_path(folder, RUN)


# --- help --------------------------------------------------------------------------------------


def test_help() -> None:
    """Every command describes its options and has an example that parses."""
    for name in (*COMMANDS, *GROUPS):
        text = wsam_command(*name.split(), "-h").stdout
        found = re.search(r"Examples?: (.*)", text, re.DOTALL)
        assert found, f"wsam {name} --help has no example"
        for example in " ".join(found.group(1).split()).split("; "):
            assert example.startswith(f"wsam {name}".strip())
            assert "Usage: wsam" in wsam_command(*shlex.split(example)[1:], "--help").stdout
    for command in COMMANDS.values():
        for parameter in command.params:
            assert parameter.help, f"{command.name} {parameter.name} has no help"


def test_groups_list_their_commands() -> None:
    for name in GROUPS:
        text = wsam_command(*name.split(), "--help").stdout
        lines = text.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
        summaries = dict(line.split(maxsplit=1) for line in lines)
        assert summaries
        if not name:
            assert tuple(summaries) == VERBS
            assert set(VERBS) == set(ROOT.commands)
        for summary in summaries.values():
            assert summary.endswith("."), f"{summary!r} is truncated"
            assert not summary.endswith("...")
        alone = wsam_command(*name.split(), status=2)
        assert "Commands:" in alone.stdout + alone.stderr


def test_the_help_lists_every_method() -> None:
    assert tuple(METHODS) == _options.METHODS
    for verb in ("train", "compare"):
        words = set(re.findall(r"\w+", wsam_command(verb, "--help").stdout))
        assert words >= METHODS.keys(), verb


def test_version() -> None:
    assert re.match(r"wsam \d", wsam_command("--version").stdout)


# --- errors ------------------------------------------------------------------------------------


def test_unknown_options_commands_and_missing_arguments() -> None:
    for name, command in COMMANDS.items():
        line = error_of(*name.split(), "--nope")
        assert "no such option: --nope" in line
        assert f"(see wsam {name} --help)" in line
        if any(parameter.required for parameter in command.params):
            assert "missing argument" in error_of(*name.split())
    for name in GROUPS:
        assert "no such command 'nope'" in error_of(*name.split(), "nope")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("toy --gamma x", "invalid value for '--gamma': "),
        ("bounds convex -T x", "invalid value for '--steps' / '-T': "),
        (
            "train --schedule step",
            "'step' is not one of 'cosine', 'constant', 'warmup-cosine' (see wsam train",
        ),
        ("sweep --model mlp", "settings of a run are values of the grid, as --grid model=mlp (see"),
        ("sweep cifar --gpus nan", "invalid value for '--gpus': "),
        ("compare --executor slurm --address auto", "--address needs --executor ray"),
        ("report missing", "missing holds no records"),
        (f"report {__file__}", "is a file: pass its folder"),
        ("report . --out .", "'.' is a directory"),
    ],
)
def test_wrong_values(words: str, message: str) -> None:
    assert message in error_of(*words.split())


def test_install_hint() -> None:
    error = ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.pyplot")
    assert install_hint(error) == "this needs matplotlib: pip install 'wsam[plots]'"
    with pytest.raises(ModuleNotFoundError):
        install_hint(ModuleNotFoundError("No module named 'wsam.nope'", name="wsam.nope"))


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("sklearn", "train --device cpu --no-tensorboard"),
        ("tensorboard", "train --device cpu --tensorboard"),
    ],
)
def test_missing_library(
    library: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [*sys.modules, library]:
        if name.split(".")[0] == library:
            monkeypatch.setitem(sys.modules, name, None)
    assert error_of(*words.split()) == f"wsam: this needs {library}: pip install 'wsam[lab]'\n"
    assert not list(tmp_path.rglob("lock")), "an error leaves the run unclaimed"


# --- output ------------------------------------------------------------------------------------


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files but locks."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def quick_words(name: str, run: Path, folder: Path) -> list[str]:
    page = folder / "page.md"
    page.write_text("<!-- wsam paper table cifar -->\nold\n<!-- end -->\n")
    places = {"run": run, "runs": run.parent, "page": page, "out": folder / "new" / "out"}
    return [*name.split(), *shlex.split(QUICK[name].format(**places)), "--json"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in {"compare", "sweep"} else name
        for name in COMMANDS
        if name not in OTHERS
    ],
)
def test_json_output(name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = quick_words(name, run, tmp_path)
    found = json.loads(wsam_command(*words).stdout)
    if "{out}" in QUICK[name]:
        assert files_in(tmp_path / "new")
        listed = found.get("files") if isinstance(found, dict) else None
        assert listed is None or (listed and all(Path(file).is_file() for file in listed))
        assert not list(tmp_path.rglob(f"{_files.UNFINISHED}*"))


@pytest.mark.parametrize("name", ["directions", "paper page", "report", "train"])
def test_ctrl_c_leaves_no_partial_file(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted when the first file gets its final name."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    words = quick_words(name, run, tmp_path)
    before = files_in(tmp_path)
    monkeypatch.setattr(Path, "replace", interrupt)
    output = wsam_command(*words, status=130)
    assert (output.stdout, output.stderr) == ("", "wsam: interrupted\n")
    assert files_in(tmp_path) == before


def test_staged_files_appear_together(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"

    def fail_halfway(error: BaseException) -> None:
        with _files.staged(folder) as staging:
            (staging / "one").write_text("hal")
            raise error

    with pytest.raises(KeyboardInterrupt):
        fail_halfway(KeyboardInterrupt())
    assert not list(folder.iterdir())
    (folder / "one").write_text("old")
    with pytest.raises(ValueError, match="no"):
        fail_halfway(ValueError("no"))
    assert [path.name for path in folder.iterdir()] == ["one"]
    assert (folder / "one").read_text() == "old"
    with _files.staged(folder) as staging:
        (staging / "one").write_text("new")
        (staging / "two").write_text("new")
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]
    assert (folder / "one").read_text() == "new"


# --- Ctrl-C --------------------------------------------------------------------------------------

RESUMABLE = "wsam: interrupted; run the same command again to resume"


@pytest.mark.parametrize("seconds", [0, 60])
def test_interrupted_training_can_be_resumed_from_a_checkpoint(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wsam.cli._options.make_callbacks", lambda quiet: [StopAfter()])
    words = f"{TRAIN} --epochs 3 --checkpoint-seconds {seconds} --out {tmp_path}"
    printed = wsam_command("train", *words.split(), status=130).stderr
    assert printed == f"{'wsam: interrupted' if seconds else RESUMABLE}\n"


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("paper run cifar", True),
        ("sweep cifar", True),
        ("sweep cifar", False),
        ("sweep rho --optuna", True),
        ("demo", True),
    ],
)
def test_interrupted_runs_can_be_resumed(
    words: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the command's own runs count, not those of other commands in the folder."""

    def interrupted(executor: Any, jobs: Any) -> Iterator[Any]:
        job = next(iter(jobs))
        run = job.run if own else job.run.replace(seed=99)
        save_state(records.work_folder(job.out, run) / "checkpoints" / "000001.pt", {})
        raise KeyboardInterrupt
        yield

    for executor in (InProcess, Processes):
        monkeypatch.setattr(executor, "run", interrupted)
    if "optuna" in words:
        pytest.importorskip("optuna")
    smoke = [] if words == "demo" else ["--smoke", "--device", "cpu"]
    printed = wsam_command(*words.split(), *smoke, "--out", tmp_path, status=130).stderr
    assert printed.splitlines()[-1] == (RESUMABLE if own else "wsam: interrupted")
