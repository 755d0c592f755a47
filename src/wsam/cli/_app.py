"""The typer application that every verb's file registers itself with."""

import typer

app = typer.Typer(
    name="wsam",
    help="Sharpness-aware training: train, measure and see flat minima.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Example: wsam demo",
)


def _version(wanted: bool) -> None:
    if wanted:
        from wsam import __version__

        print(f"wsam {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    """Sharpness-aware training: train, measure and see flat minima."""
