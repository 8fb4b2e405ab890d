"""`olmorl rollout`: samples of a model for a file of prompts."""

from pathlib import Path
from typing import Annotated

import typer


def rollout(
    model: Annotated[str, typer.Option(help="Hugging Face folder or hub id.")],
    prompts: Annotated[
        str, typer.Option(help="jsonl, json or parquet file, data set folder, hub id or reasoning_gym:TASK.")
    ],
    out: Annotated[Path, typer.Option(help="Ends in .jsonl or .parquet; further files are NAME-00001.jsonl, ...")],
    n: Annotated[int, typer.Option("-n", "--n", help="Samples of each prompt.")] = 1,
    verifier: Annotated[
        list[str] | None,
        typer.Option(help="Name or my_module:my_function, may be repeated; auto: each row's own. None: no scores."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Engines, each a process of a Ray cluster.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Complete an output that was broken off.")] = False,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to join; RAY_ADDRESS, else one is started here.")
    ] = None,
    rows_per_file: int = 100_000,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts.")] = None,
    split: Annotated[str, typer.Option(help="Of a Hugging Face data set.")] = "train",
    subset: Annotated[str | None, typer.Option(help="Of a Hugging Face data set.")] = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    chat_template: Annotated[
        bool | None, typer.Option("--chat-template/--no-chat-template", help="Applied if the model has one.")
    ] = None,
    system_prompt: str | None = None,
    temperature: float = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    max_tokens: int = 1024,
    min_tokens: int = 0,
    stop: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    stop_token_ids: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same samples.")] = 0,
    verifier_workers: Annotated[int, typer.Option(help="Processes that score.")] = 1,
    verifier_timeout: Annotated[float, typer.Option(help="Seconds for one verdict.")] = 30.0,
    dtype: Annotated[str, typer.Option(help="auto: float32 on CPU, bfloat16 on CUDA.")] = "auto",
    device: Annotated[str, typer.Option(help="auto: cuda where there is one.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Samples decoded at once by one engine.")] = 64,
    kv_cache_tokens: int = 65536,
    block_size: int = 16,
    max_tokens_per_step: int = 2048,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and answer; the model's own if not given.")] = None,
    prefix_caching: bool = True,
    kernels: Annotated[str, typer.Option(help="auto, or torch: the definitions, uncompiled.")] = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bitwise the same in any batch, or an error.")
    ] = False,
    quantization: Annotated[str | None, typer.Option(help="int8, int4, or as the model is.")] = None,
    quantize_head: Annotated[
        bool, typer.Option("--quantize-head", help="The head in the precision of --quantization too.")
    ] = False,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto: the model's; int8: a quarter of float32.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of an engine; its share of the cores if not given.")
    ] = None,
) -> None:
    """Sample a model on a file of prompts, n times each.

    They are scored if asked. Prompts that do not fit the model are left out and counted. A broken output is completed
    with --resume: what is missing is sampled as an unbroken run would have.
    """
    from olmorl.cli.train import format_summary
    from olmorl.config.data_sections import SourceSection
    from olmorl.contract.errors import ConfigError
    from olmorl.contract.generation import EngineConfig, SamplingParams
    from olmorl.rollouts.job import RolloutJob
    from olmorl.rollouts.run import run_rollout

    try:
        params = SamplingParams(
            n=n,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(stop_token_ids or ()),
            ignore_eos=ignore_eos,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    job = RolloutJob(
        engine=EngineConfig(
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
        ),
        prompts=SourceSection(
            path=prompts,
            split=split,
            subset=subset,
            limit=limit,
            prompt_column=prompt_column,
            answer_column=answer_column,
        ),
        out=out,
        params=params,
        seed=seed,
        verifier=tuple(verifier) if verifier else None,
        verifier_workers=verifier_workers,
        verifier_timeout=verifier_timeout,
        workers=workers,
        address=address,
        resume=resume,
        rows_per_file=rows_per_file,
        apply_chat_template=chat_template,
        system_prompt=system_prompt,
    )
    print(format_summary(run_rollout(job)))
