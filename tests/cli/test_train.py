"""The table at the end of a run."""

from olmorl.cli.train import format_summary


def test_summary() -> None:
    summary = {
        "exit_reason": "done",
        "steps": 1000,
        "eval_before": 0.4812345,
        "tokens_per_second": 12345.678,
        "waste": {"trained": 1_000_000, "stale": 0},
        "resumed": False,
        "eval_after": None,
    }
    assert format_summary(summary).splitlines() == [
        "exit_reason        done",
        "steps              1,000",
        "eval_before        0.4812",
        "tokens_per_second  12,346",
        "resumed            False",
        "tokens.trained     1,000,000",
    ]
    assert format_summary({}) == ""
