"""The typer application that every verb's file registers itself with."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

ORDER = (
    # See it, train, look at what came of it.
    *("demo", "train", "report", "curvature", "landscape"),
    # Many runs, and the paper's.
    *("sweep", "paper", "bench"),
    # What the method does, on paper.
    *("toy", "directions", "bounds"),
)
"""The verbs as a newcomer needs them."""


class InOrder(TyperGroup):
    """Lists its verbs in `ORDER`; typer's own order is that of our imports, groups last."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


class WithArguments(TyperCommand):
    """A verb whose help names arguments as one writes them: FILE..., not {FILE}... <list[Path]>."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words after the verb in the line of its usage."""
        return [
            piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Describe arguments and options."""
        parameters: list[Any] = self.params
        for parameter in parameters:
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = _no_type  # typer has no option for it
        super().format_options(ctx, formatter)


def _no_type(ctx: Any) -> None:  # noqa: ARG001 (as typer calls it)
    return None


app = typer.Typer(
    name="wsam",
    cls=InOrder,
    help="Sharpness-aware training: train, measure and see flat minima.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
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
