"""`olmorl serve`: an OpenAI-compatible server over one engine."""

from typing import Annotated, Any

import typer

from olmorl.cli.engine_options import with_engine_options


@with_engine_options
def serve(
    *,
    engine: dict[str, Any],
    model: Annotated[str, typer.Option(help="Hugging Face folder or hub id.")],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OLMORL_API_KEY", help="Wanted by every route but /health; opens those of operators."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; --model if not given.")
    ] = None,
    max_samples: Annotated[int, typer.Option(help="Samples held, running and waiting; beyond them: 429.")] = 1024,
    max_body_mb: Annotated[float, typer.Option(help="Largest request; beyond it: 413.")] = 8.0,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds after which a request ends with what it has.")
    ] = 600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that running requests get after SIGTERM.")] = 60.0,
) -> None:
    """Serve a model over HTTP, in the protocol of OpenAI's API."""
    from inference.server.options import ServerOptions
    from inference.server.serve import serve as run
    from olmorl.contract.generation import EngineConfig

    options = ServerOptions(
        host=host,
        port=port,
        api_key=api_key,
        model_name=served_model_name,
        max_samples=max_samples,
        max_body_bytes=int(max_body_mb * (1 << 20)),
        request_seconds=request_timeout,
        drain_seconds=drain_timeout,
    )
    run(EngineConfig(model=model, **engine), options)
