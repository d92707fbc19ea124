"""`octavo serve`: the OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path

from octavo.cli.options import EngineOptions, ModelArgument, ServerOptions
from octavo.cli.terminal import find_model
from octavo.errors import ConfigError
from octavo.weights.locate import DEFAULT_MODEL


def serve(engine: EngineOptions, server: ServerOptions, model: ModelArgument = DEFAULT_MODEL) -> None:
    """Serve a model with the OpenAI API.

    Examples: octavo serve; octavo serve ./my-model --port 9000; octavo serve org/name --max-num-seqs 16.
    """
    server.check()
    for name in server.served_model_name or ():
        # `--served-model-name alpha ./model` takes the path for a second name; nobody means that.
        if model == DEFAULT_MODEL and Path(name).exists():
            raise ConfigError(
                f"{name} was read as a value of --served-model-name; put the model first: serve {name} ..."
            )
    engine.config(model, Path(model))  # refuse bad options before a download
    config = engine.config(model, find_model(model))

    from octavo.server.serve import serve as run_server
    from octavo.server.settings import ServerSettings

    settings = ServerSettings(
        host=server.host,
        port=server.port,
        served_model_names=tuple(server.served_model_name or ()),
        api_key=server.api_key,
        allowed_origins=tuple(server.allowed_origins or ()),
        drain_timeout_s=server.drain_timeout_s,
        stall_timeout_s=server.stall_timeout_s,
    )
    run_server(config, settings, log_level=engine.log_level.upper())
