"""`olmorl replay-schedule`: do again what the engines of a run did, and say whether it came out the same."""

from pathlib import Path

from olmorl.contract.errors import ConfigError


def replay(run_directory: Path, *, attempt: int | None, worker: str | None) -> int:
    """Every recorded engine of the attempt, or one of them; the exit code."""
    from inference.replay import replay_schedule

    attempts = sorted(run_directory.glob("logs/attempt_*/schedule"), key=lambda p: int(p.parent.name.split("_")[1]))
    if attempt is not None:
        attempts = [folder for folder in attempts if folder.parent.name == f"attempt_{attempt}"]
    files = sorted(attempts[-1].glob(f"{worker or '*'}.jsonl")) if attempts else []
    if not files:
        what = f"attempt {attempt}" if attempt is not None else "any attempt"
        raise ConfigError(
            f"{run_directory} holds no schedule of {worker or 'an engine'} in {what}; a run records one with "
            "logging.schedule = true"
        )
    diverged = False
    for file in files:
        report = replay_schedule(file)
        diverged = diverged or report.divergence is not None
        print(f"{file.stem}: {report}")
    return 1 if diverged else 0
