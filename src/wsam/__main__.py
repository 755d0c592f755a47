"""`python -m wsam` and the `wsam` command."""

import io
import os
import sys


def main() -> None:
    """Run the command line, or print what to install if typer or rich is missing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by `2>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper):  # print ? for what the encoding lacks
            stream.reconfigure(errors="replace")
    try:
        from wsam.cli import run

        run()
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit(f"wsam: the command line needs {error.name}: pip install 'wsam[lab,plots]'")
    except KeyboardInterrupt:  # during imports; later, `run` handles it
        print("wsam: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
