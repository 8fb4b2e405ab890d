"""`olmorl serve`: an OpenAI-compatible server over one engine."""

from typing import Annotated

import typer


def serve(
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
    dtype: str = "float32",
    device: str = "cpu",
    max_num_seqs: Annotated[int, typer.Option(help="Samples decoded at once.")] = 64,
    kv_cache_tokens: int = 65536,
    block_size: int = 16,
    max_tokens_per_step: int = 2048,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and answer; the model's own if not given.")] = None,
    prefix_caching: bool = True,
    kernels: Annotated[str, typer.Option(help="auto, or torch: the definitions, uncompiled.")] = "auto",
    deterministic: Annotated[bool, typer.Option(help="Bitwise the same in any batch, or an error.")] = False,
    quantization: Annotated[str | None, typer.Option(help="int8, int4, or as the model is.")] = None,
    quantize_head: Annotated[
        bool, typer.Option("--quantize-head", help="The head in the precision of --quantization too.")
    ] = False,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto: the model's; int8: a quarter of float32.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of requests that give none.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores if not given.")] = None,
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
    config = EngineConfig(
        model=model,
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
        kv_cache_tokens=kv_cache_tokens,
        block_size=block_size,
        max_tokens_per_step=max_tokens_per_step,
        max_model_len=max_model_len,
        prefix_caching=prefix_caching,
        kernels=kernels,  # type: ignore[arg-type]
        deterministic=deterministic,
        quantization=quantization,  # type: ignore[arg-type]
        quantize_head=quantize_head,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        seed=seed,
        threads=threads,
    )
    run(config, options)
