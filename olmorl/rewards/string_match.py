"""Exact match of text, after what never carries meaning is taken off: case, spacing, Unicode forms, a final stop.

Signs and inner punctuation stay: "-5" is not "5".
"""

import json
import unicodedata

from olmorl.rewards.answer_text import last_tagged, tagged_or_whole, without_thoughts
from olmorl.rewards.verdict import Verdict, scored, unscorable

WRAPPING = " \t\n\"'`*"
FLAN_PHRASE = "the answer is:"


def string_match(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    """Compares the text of the last <answer> tags, or else the whole completion, with one right answer or a list."""
    return _compare(tagged_or_whole(completion), ground_truth)


def string_matcher(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    """As `string_match`, but the tags must be there."""
    return _compare(last_tagged(completion), ground_truth)


def flan(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    """Compares what stands behind the last "The answer is:"."""
    start = completion.lower().rfind(FLAN_PHRASE)
    return _compare(None if start < 0 else completion[start + len(FLAN_PHRASE) :], ground_truth)


def puzzle(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    """As `string_match`, and spacing and punctuation between words, brackets and quotes do not matter either."""
    wanted = {_only_words(label) for label in labels(ground_truth)} - {""}
    if not wanted:
        return unscorable(f"the ground truth {ground_truth!r:.80} holds no text")
    answer = _only_words(tagged_or_whole(completion))
    return scored(float(answer in wanted), f"answer {answer[:80]!r}")


def search_match(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    """Compares the text of the last <finish> tags, which must be there."""
    return _compare(last_tagged(completion, "finish"), read_list(ground_truth))


def labels(ground_truth: object) -> list[str]:
    values = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    return [str(value) for value in values if isinstance(value, str | int | float)]


def read_list(ground_truth: object) -> object:
    """What search data has as JSON of a list."""
    try:
        listed = isinstance(ground_truth, str) and ground_truth.lstrip().startswith("[")
        return json.loads(str(ground_truth)) if listed else ground_truth
    except (ValueError, RecursionError):
        return ground_truth


def normalize(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.strip(WRAPPING).rstrip(".!?").strip(WRAPPING)


def _only_words(text: str) -> str:
    text = unicodedata.normalize("NFKC", without_thoughts(text)).casefold()
    return " ".join("".join(c if c.isalnum() or c in "+-" else " " for c in text).split())


def _compare(answer: str | None, ground_truth: object) -> Verdict:
    wanted = {normalize(label) for label in labels(ground_truth)} - {""}
    if not wanted:
        return unscorable(f"the ground truth {ground_truth!r:.80} holds no text")
    if answer is None:
        return scored(0.0, "no answer where it was asked for")
    answer = normalize(answer)
    return scored(float(answer in wanted), f"answer {answer[:80]!r}")
