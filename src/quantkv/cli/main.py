"""The commands. They raise for bad input, `Interrupted` with what is left to say after Ctrl-C; `app` makes one line of it."""

from __future__ import annotations

from typing import Annotated

import typer

from . import bench, calibrate, doctor, eval_command, formats, generate_command, html, options, plan, tune, warm_up_command

commands = typer.Typer(
    name="quantkv",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The KV cache of a language model at 2 to 8 bits: try it, measure what it costs, choose what to store.",
    epilog=f"Formats: {options.KV_HELP}",
)


def show_version(wanted: bool) -> None:
    """Print it and end."""
    if wanted:
        import quantkv

        print(f"quantkv {quantkv.__version__}")
        raise typer.Exit()


@commands.callback()
def shared(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """What all commands share."""


# In the order in which a newcomer needs them.
for command in (doctor, formats, plan, generate_command, eval_command, calibrate, tune, html, bench, warm_up_command):
    command.add_to(commands)
