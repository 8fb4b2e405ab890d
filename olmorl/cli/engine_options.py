"""The options of an engine: one list for every command that starts one.

A command marked `with_engine_options` has them behind its own, and gets what they were given as `engine`, the keywords
of `EngineConfig` but for the model.
"""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from olmorl.contract.errors import ConfigError


def _options(
    *,
    dtype: Annotated[str, typer.Option(help="auto: float32 on CPU, bfloat16 on CUDA.")] = "auto",
    device: Annotated[str, typer.Option(help="auto: cuda where there is one.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Samples decoded at once.")] = 64,
    kv_cache_tokens: Annotated[int, typer.Option(help="What all of them together may hold.")] = 65536,
    block_size: int = 16,
    max_tokens_per_step: int = 2048,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and answer; the model's own if not given.")] = None,
    prefix_caching: bool = True,
    batching: Annotated[
        str, typer.Option(help="continuous, or static: the baseline on the same kernels.")
    ] = "continuous",
    kernels: Annotated[str, typer.Option(help="auto, triton, or torch: the definitions, uncompiled.")] = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bitwise the same in any batch, or an error.")
    ] = False,
    quantization: Annotated[str | None, typer.Option(help="int8, int4, or as the model is.")] = None,
    quantize_head: Annotated[
        bool, typer.Option("--quantize-head", help="The head in the precision of --quantization too.")
    ] = False,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto: the model's; int8: a quarter of float32.")] = "auto",
    speculative: Annotated[
        str | None, typer.Option(help="suffix: guess tokens from what a prompt's samples have said; model: by another.")
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="Of --speculative model.")] = None,
    speculative_tokens: Annotated[int, typer.Option(help="Guessed at once for one sample, at most.")] = 7,
    speculative_step_tokens: Annotated[
        int,
        typer.Option(
            help="What a step may grow to by guesses; with so many samples running, none is made. 0: measured."
        ),
    ] = 16,
    overlap: Annotated[
        bool | None, typer.Option(help="Launch a step before the last one's tokens are read; on a GPU if not given.")
    ] = None,
    cuda_graphs: Annotated[bool | None, typer.Option(help="Replay decode steps; on a GPU if not given.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Devices the model is divided among.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same samples.")] = 0,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of an engine; its share of the cores if not given.")
    ] = None,
) -> None:
    raise NotImplementedError("a list, not to be called")


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    own = inspect.signature(command)
    options = inspect.signature(_options).parameters

    def run(**given: Any) -> None:
        engine = {name: given.pop(name) for name in options}
        command(**given, engine=_resolved(engine))

    parameters = [parameter for name, parameter in own.parameters.items() if name != "engine"]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = own.replace(parameters=[*parameters, *options.values()])  # type: ignore[attr-defined]
    return run


def _resolved(engine: dict[str, Any]) -> dict[str, Any]:
    """With the device that `auto` stands for on this machine."""
    from olmorl.controller.placement import count_gpus

    device = engine["device"]
    if device == "auto":
        device = "cuda" if count_gpus() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {device!r}; it must be auto, cpu or cuda")
    return engine | {"device": device}
