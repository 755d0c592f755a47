"""`python -m wsam` and the `wsam` command."""

import io
import sys


def main() -> None:
    """Run the command line, or print what to install if typer or rich is missing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print ? for what the encoding lacks
            stream.reconfigure(errors="replace")
    try:
        from wsam.cli import run

        run()
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit(f"wsam: the command line needs {error.name}: pip install 'wsam[lab,plots]'")
    except KeyboardInterrupt:  # during imports; later, `run` handles it
        sys.exit(130)


if __name__ == "__main__":
    main()
