"""The ground truth is a regular expression that must be found in the completion."""

import re

from olmorl.rewards.verdict import Verdict, scored, unscorable


def regex(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    """Flags go into the pattern, e.g. "(?i)". A pattern that runs away is ended by the verdict's deadline."""
    if not isinstance(ground_truth, str):
        return unscorable(f"the ground truth {ground_truth!r:.80} is no regular expression")
    try:
        pattern = re.compile(ground_truth)
    except (re.error, OverflowError, RecursionError) as error:
        return unscorable(f"the ground truth is a broken regular expression: {error}")
    return scored(float(pattern.search(completion) is not None))
