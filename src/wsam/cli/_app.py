"""The typer application that every verb's file registers itself with."""

import typer

app = typer.Typer(
    name="wsam",
    help="Sharpness-aware training: train, measure and see flat minima.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
