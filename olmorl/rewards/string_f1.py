"""How much of the words of answer and truth is the same: the F1 of question answering, best over the truths."""

import string
import unicodedata
from collections import Counter

from olmorl.rewards.answer_text import last_tagged, tagged_or_whole
from olmorl.rewards.string_match import labels, read_list
from olmorl.rewards.verdict import Verdict, scored, unscorable

ARTICLES = {"a", "an", "the"}
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
FORMAT_REWARD = 0.1  # for <finish> tags around a wrong answer


def string_f1(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    truths = labels(ground_truth)
    if not any(map(words, truths)):
        return unscorable(f"the ground truth {ground_truth!r:.80} holds no words")
    answer = tagged_or_whole(completion)
    return scored(max(f1(answer, truth) for truth in truths), f"answer {answer.strip()[:80]!r}")


def search_f1(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    """Of the text of the last <finish> tags. The truth is a text, a list, or JSON of a list."""
    truths = labels(read_list(ground_truth))
    if not any(map(words, truths)):
        return unscorable(f"the ground truth {ground_truth!r:.80} holds no words")
    answer = last_tagged(completion, "finish")
    if answer is None:
        return scored(0.0, "no <finish> tags")
    return scored(max(FORMAT_REWARD, *(f1(answer, truth) for truth in truths)), f"answer {answer.strip()[:80]!r}")


def f1(answer: str, truth: str) -> float:
    given, wanted = Counter(words(answer)), Counter(words(truth))
    shared = (given & wanted).total()
    return 2 * shared / (given.total() + wanted.total()) if shared else 0.0


def words(text: str) -> list[str]:
    text = unicodedata.normalize("NFKC", text).casefold().translate(WITHOUT_PUNCTUATION)
    return [word for word in text.split() if word not in ARTICLES]
