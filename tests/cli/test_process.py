"""The command in its own process: streams, signals and a missing typer."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wsam.__main__ import main

WSAM = [sys.executable, "-m", "wsam"]


@pytest.mark.slow
def test_characters_that_the_encoding_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are printed as a question mark."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "argv", ["wsam", "toy", "--gamma", "0.6"])
    with pytest.raises(SystemExit) as error:
        main()
    assert not error.value.code
    stdout.flush()
    text = stdout.buffer.getvalue().decode("cp1252")
    assert "sharp minimum" in text
    assert "?" in text, "the table has a gamma, which cp1252 lacks"


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['wsam', '--help']\n"
        "from wsam.__main__ import main\n"
        "try: main()\n"
        "finally: sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: wsam" in done.stdout


def test_missing_typer() -> None:
    code = "import sys; sys.modules['typer'] = None; from wsam.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    message = "wsam: the command line needs typer: pip install 'wsam[lab,plots]'\n"
    assert done.stderr == message


def test_ctrl_c_during_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "wsam.cli", Interrupted())  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="130"):
        main()


@pytest.mark.skipif(os.name == "nt", reason="uses a POSIX shell")
@pytest.mark.parametrize(("words", "status"), [("--help | head -1", 0), ("--nope 2>&-", 2)])
def test_closed_streams(words: str, status: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m wsam {words}', sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == (status == 0)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c(tmp_path: Path) -> None:
    words = ["train", "--model", "mlp", "--epochs", "9999", "--device", "cpu"]
    words += ["--no-tensorboard", "--out", str(tmp_path)]
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([*WSAM, *words], stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stderr is not None
        assert "epochs" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        *_, last = process.stderr
    assert last.startswith("wsam: interrupted")
    assert process.returncode == 130
