"""`olmorl`: the commands, their help, and what becomes of an error.

Everything heavy is imported inside the command that needs it, so that help is instant.
"""

import logging
import signal
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from olmorl import __version__
from olmorl.cli import bench, quantize, rollout, serve
from olmorl.cli.option_checks import finite, refuse_together, slowdowns, writable
from olmorl.cli.shadowed import refuse_shadowed_packages
from olmorl.contract.errors import ConfigError, OlmoRLError

logger = logging.getLogger(__name__)

INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended

app = typer.Typer(
    help="Reinforcement learning for language models, built around generating rollouts.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help starts twice as fast and can be searched
    pretty_exceptions_enable=False,
)


app.add_typer(bench.app, name="bench")
app.command()(quantize.quantize)
app.command()(rollout.rollout)
app.command()(serve.serve)


class Colour(StrEnum):
    logprob = "logprob"
    version = "version"
    ratio = "ratio"
    none = "none"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"olmorl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; also after COMMAND.")] = False,
) -> None:
    if context.invoked_subcommand != "doctor":  # which reports it instead
        refuse_shadowed_packages()


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings laid over the file; later wins.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the placement; start nothing.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NODESxCPUSxGPUS[:KIND]",
            help="With --dry-run: place it there, such as 9x96x8:H100 (CPUs and GPUs of each node).",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the newest complete checkpoint of the run directory.")
    ] = False,
) -> None:
    """Train a model with RL, as CONFIG says."""
    from olmorl.cli import train as command

    if dry_run:
        command.print_plan(config, overrides or [], cluster)
    elif cluster is not None:
        raise ConfigError("--cluster describes a cluster for --dry-run; a run itself takes what cluster.address has")
    else:
        command.train(config, overrides or [], resume=resume)


@app.command(name="eval")
def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Hugging Face folder, hub id, or run directory (its newest export)."),
    ] = None,
    model_option: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The same, as an option.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Prompts with their answers; may be given several times. A run has its own eval.data."),
    ] = None,
    verifier: Annotated[
        list[str] | None, typer.Option(help="Name or my_module:my_function, in place of what the rows say.")
    ] = None,
    samples: Annotated[int | None, typer.Option("-k", "--n", min=1, help="Samples of each prompt.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts of each set.")] = None,
    temperature: Annotated[float | None, typer.Option(help="1 if not given; 0 is greedy.")] = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a response; 2048 if not given.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a response.")] = None,
    seed: int | None = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longer prompts are left out.")] = None,
    system_prompt: str | None = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Samples decoded at once.")] = None,
    kv_cache_tokens: int | None = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores if not given.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="Write the figures here.")] = None,
    samples_file: Annotated[
        Path | None, typer.Option("--samples", callback=writable, help="Write every sample here, as parquet.")
    ] = None,
) -> None:
    """avg@k and pass@k of a model, with standard errors."""
    if (model is None) == (model_option is None):
        raise ConfigError("name the model once: olmorl eval MODEL, or --model MODEL")
    from olmorl.cli import evaluate as command

    settings = {
        "eval.data": data or None,
        "reward.verifier": verifier or None,
        "eval.samples_per_prompt": samples,
        "eval.limit": limit,
        "eval.temperature": temperature,
        "eval.top_k": top_k,
        "eval.top_p": top_p,
        "eval.min_p": min_p,
        "eval.max_response_tokens": max_tokens,
        "sampling.stop": stop or None,
        "eval.seed": seed,
        "rollout.max_prompt_tokens": max_prompt_tokens,
        "data.system_prompt": system_prompt,
        "inference.device": device,
        "model.dtype": dtype,
        "inference.max_num_seqs": max_num_seqs,
        "inference.kv_cache_tokens": kv_cache_tokens,
        "inference.threads": threads,
    }
    command.evaluate(model or model_option or "", settings, json_file=json_file, samples_file=samples_file)


@app.command()
def plan(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file of the run; not with --check.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings laid over the file; later wins.")
    ] = None,
    as_given: Annotated[
        bool, typer.Option("--as-given", help="Only the split that CONFIG has, on as many devices as it takes.")
    ] = False,
    gpus: Annotated[int, typer.Option(help="Devices in all; not with --as-given.")] = 8,
    device: Annotated[str, typer.Option(help="a100, h100, h200 or b200.")] = "h100",
    shape: Annotated[str | None, typer.Option(help="Model shape by name, such as olmo3-7b; else model.path.")] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="Response lengths: a run directory, or a JSON list of numbers.")
    ] = None,
    mean_length: Annotated[float | None, typer.Option(help="Mean response, tokens; lengths are log-normal.")] = None,
    zero_variance: Annotated[float, typer.Option(min=0, max=0.99, help="Share of groups without signal.")] = 0.3,
    bench: Annotated[Path | None, typer.Option(help="JSON of `olmorl bench engine`: measured costs.")] = None,
    learner_bench: Annotated[Path | None, typer.Option(help="JSON of `olmorl bench learner`, likewise.")] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Dollars, of one device; a round price of --device if not given."),
    ] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN_DIR", help="Plan this run as it was, by both benchmarks, and say how far off that is."
        ),
    ] = None,
    sharing: Annotated[
        tuple[float, float],
        typer.Option(
            callback=slowdowns,
            help="With --check, of engine and learner on one machine: how much longer each takes beside the other.",
        ),
    ] = (1.0, 1.0),
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="Also write all plans here.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(callback=writable, help="Also draw them, as an HTML page.")] = None,
) -> None:
    """Which split of the devices serves a run best."""
    if (config is None) == (not check):
        raise ConfigError("give what is to be planned, CONFIG, or runs to compare plans with, --check RUN_DIR")
    refuse_together(context, "--as-given", "--gpus")
    refuse_together(context, "--lengths", "--mean-length")
    refuse_together(context, "config", "--sharing")
    refuse_together(
        context, "--check", "--as-given", "--gpus", "--device", "--shape", "--lengths", "--mean-length",
        "--zero-variance", "--price-per-hour", "--plot",
    )  # fmt: skip
    if config is None:
        from olmorl.cli.plan_check import plan_check

        plan_check(check or [], bench=bench, learner_bench=learner_bench, sharing=sharing, json_file=json_file)
        return
    from olmorl.cli.plan import plan as command

    command(
        config,
        overrides or [],
        as_given=as_given,
        gpus=gpus,
        device_name=device,
        shape=shape,
        lengths=lengths,
        mean_length=mean_length,
        zero_variance=zero_variance,
        bench=bench,
        learner_bench=learner_bench,
        price_per_hour=price_per_hour,
        json_file=json_file,
        plot=plot,
    )


@app.command()
def dashboard(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directory; more are laid over it.")],
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8080,
    host: Annotated[str, typer.Option(help="Where to listen; the page has no password.")] = "127.0.0.1",
) -> None:
    """Serve the live page of a run.

    Curves, utilisation, ledgers, rollouts.
    """
    from olmorl.cli.dashboard import serve

    serve(runs, host=host, port=port)


@app.command()
def inspect(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory.")],
    step: Annotated[int | None, typer.Option(help="Groups of this step; the newest if not given.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Groups of this prompt_id, over all steps.")] = None,
    colour: Annotated[
        Colour, typer.Option(help="What colours a token; ratio: the learner's probability over the engine's.")
    ] = Colour.logprob,
    limit: Annotated[int, typer.Option(help="Groups shown at most.", min=1)] = 8,
    of_eval: Annotated[
        bool, typer.Option("--eval", help="Of evaluations; a step is then the one that made the version.")
    ] = False,
) -> None:
    """Read rollouts, a group side by side."""
    from olmorl.cli.inspect import inspect as show

    show(run_dir, step=step, prompt=prompt, colour=colour.value, limit=limit, of="evals" if of_eval else "rollouts")


@app.command()
def replay(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory.")],
    rollout_id: Annotated[
        str, typer.Argument(metavar="ROLLOUT_ID", help="Of its rollouts; `olmorl inspect` shows them.")
    ],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; that of the run if not given.")] = None,
    step: Annotated[
        int | None, typer.Option(help="Of an evaluation's, the version; the newest that has it if not given.")
    ] = None,
) -> None:
    """Draw a rollout of a run again, or one of its evaluations.

    From its record and the weights of its versions; exit code 1 where a token comes out another.
    """
    from olmorl.cli.replay import replay

    raise typer.Exit(replay(run_directory, rollout_id, device=device, step=step))


@app.command()
def replay_schedule(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of a run with logging.schedule = true.")],
    attempt: Annotated[int | None, typer.Option(help="The newest if not given.")] = None,
    worker: Annotated[str | None, typer.Option(help="One engine, such as inference-0; all if not given.")] = None,
) -> None:
    """Do again what the engines of a run did.

    In one process; exit code 1 where a token comes out another.
    """
    from olmorl.cli.replay_schedule import replay

    raise typer.Exit(replay(run_directory, attempt=attempt, worker=worker))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="Also check what this run needs.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings laid over the file; later wins.")
    ] = None,
) -> None:
    """Look for what would keep a run from working here.

    Each finding comes with its fix.
    """
    from olmorl.cli.doctor import examine

    raise typer.Exit(examine(config, overrides or []))


def run(arguments: list[str]) -> int:
    """Run one command; the exit code. 0 done, 1 failed at run time, 2 usage or config error, 130 Ctrl-C."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if debug:
        logging.basicConfig(level=logging.INFO)
    try:
        app(arguments, prog_name="olmorl")
    except SystemExit as end:  # how typer ends: it has printed what was wrong with the usage
        if end.code == INTERRUPTED:
            print("interrupted", file=sys.stderr)
        return end.code if isinstance(end.code, int) else 1
    except OlmoRLError as error:
        _report(f"error: {error}", debug)
        return error.exit_code
    except OSError as error:  # a full disk, a missing right: the message of the system says it
        _report(f"error: {error}", debug)
        return 1
    except Exception as error:  # a bug: still one message, and a traceback for whoever asks
        logger.debug("the traceback of the error below", exc_info=True)
        hint = "" if debug else "\nThis is a bug in olmorl; --debug shows where."
        _report(f"error: {type(error).__name__}: {error}{hint}", debug)
        return 1
    return 0


def _report(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(message, file=sys.stderr)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill cleans up as Ctrl-C does
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
