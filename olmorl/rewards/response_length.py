"""Rewards for length: the nearer to the wanted number of tokens, the better.

Where no token count is at hand (outside of a run), words are counted.
"""

from olmorl.rewards.verdict import Verdict, scored, unscorable

RANGE = 32768  # tokens off at which the reward is 0


def max_length(
    completion: str, ground_truth: object, prompt: str | None = None, *, num_tokens: int | None = None
) -> Verdict:
    """Too short counts like too long."""
    return _judge(completion, ground_truth, num_tokens, too_short_counts=True)


def up_to_max_length(
    completion: str, ground_truth: object, prompt: str | None = None, *, num_tokens: int | None = None
) -> Verdict:
    """Only what is over the wanted length counts."""
    return _judge(completion, ground_truth, num_tokens, too_short_counts=False)


def _judge(completion: str, ground_truth: object, num_tokens: int | None, *, too_short_counts: bool) -> Verdict:
    try:
        wanted = float(str(ground_truth))
    except ValueError:
        wanted = -1.0
    if not 0 <= wanted < float("inf"):
        return unscorable(f"the ground truth {ground_truth!r:.80} is no length")
    length = len(completion.split()) if num_tokens is None else num_tokens
    over = length - wanted
    off = abs(over) if too_short_counts else max(over, 0.0)
    return scored(max(0.0, 1.0 - off / RANGE), f"length {length}, wanted {wanted:g}")
