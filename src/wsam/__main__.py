"""`python -m wsam` and the `wsam` command."""

import sys


def main() -> None:
    """Run the command line, or say what to install where its libraries are missing."""
    try:
        from wsam.cli import run

        run()
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit(f"wsam: the command line needs {error.name}: pip install 'wsam[lab,plots]'")
    except KeyboardInterrupt:  # while modules are imported; `run` handles it afterwards
        print("wsam: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
