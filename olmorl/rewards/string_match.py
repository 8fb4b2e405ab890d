"""Exact match of text, after what never carries meaning is taken off: case, spacing, Unicode forms, a final stop.

Signs and inner punctuation stay: "-5" is not "5".
"""

import re
import unicodedata

from olmorl.rewards.verdict import Verdict, scored, unscorable

ANSWER_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
WRAPPING = " \t\n\"'`*"


def string_match(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    """Compares the text of the last <answer> tags, or else the whole completion, with one right answer or a list."""
    labels = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    wanted = {normalize(str(label)) for label in labels} - {""}
    if not wanted:
        return unscorable(f"the ground truth {ground_truth!r:.80} holds no text")
    tagged = ANSWER_TAGS.findall(completion)
    answer = normalize(tagged[-1] if tagged else completion)
    return scored(float(answer in wanted), f"answer {answer[:80]!r}")


def normalize(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.strip(WRAPPING).rstrip(".!?").strip(WRAPPING)
