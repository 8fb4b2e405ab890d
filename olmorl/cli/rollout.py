"""`olmorl rollout`: samples of a model for a file of prompts."""

from pathlib import Path
from typing import Annotated, Any

import typer

from olmorl.cli.engine_options import with_engine_options


@with_engine_options
def rollout(
    *,
    engine: dict[str, Any],
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
    verifier_workers: Annotated[int, typer.Option(help="Processes that score.")] = 1,
    verifier_timeout: Annotated[float, typer.Option(help="Seconds for one verdict.")] = 30.0,
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
        engine=EngineConfig(model=model, **engine),
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
        seed=engine["seed"],
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
