"""Scores nothing: for rows whose reward comes from elsewhere, e.g. an environment."""

from olmorl.rewards.verdict import Verdict, scored


def passthrough(completion: str, ground_truth: object = None, prompt: str | None = None) -> Verdict:
    return scored(0.0)
