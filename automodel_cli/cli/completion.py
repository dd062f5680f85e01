"""`completion bash|zsh|fish`: a script for the shell."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell completion script.

    It completes recipe names after -c, config keys and names of runs.

    \b
    bash   automodel completion bash > ~/.local/share/bash-completion/completions/automodel
    zsh    automodel completion zsh > "${fpath[1]}/_automodel"
    fish   automodel completion fish > ~/.config/fish/completions/automodel.fish
    """
    from click.shell_completion import get_completion_class

    generator = get_completion_class(shell)
    assert generator is not None, shell  # the choice above lists click's own
    click.echo(generator(ctx.find_root().command, {}, "automodel", "_AUTOMODEL_COMPLETE").source())
