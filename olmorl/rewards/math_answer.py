r"""Mathematical answers: what a completion says, and whether it equals the truth.

The answer is the last \boxed{}, else what stands behind "####", else the last expression. Plain quantities are compared
as numbers, equal texts as texts; only the rest goes through math-verify's parser.
"""

import functools
import logging
import re
from collections.abc import Callable

from olmorl.rewards.answer_text import last_boxed, last_tagged, without_thoughts
from olmorl.rewards.cpu_alarm import Overrun, cpu_limit
from olmorl.rewards.quantity import agree, read_quantity
from olmorl.rewards.verdict import Verdict, scored, unscorable

PARSER_SECONDS = 5.0  # of CPU time for one comparison
MAX_PARSED = 2000  # characters; nothing longer is an answer, and a parser takes long over it
HASHES = re.compile(r"####[ \t]*([^\n]*)")
SAID = re.compile(r"answer(?:\s+is|\s*:|\s*=)(?:\s*:)?[ \t*]*([^\n]*)", re.IGNORECASE)
MINERVA = re.compile(r"final answer is:?(.{0,500}?)I hope it is correct", re.IGNORECASE)
# Dollars enclose mathematics when no space is inside them and no digit follows: "$5 and $7" is money.
SEGMENT = re.compile(
    r"\$\$(?P<a>[^$]{1,500})\$\$|\$(?P<b>[^\s$](?:[^$\n]{0,300}[^\s$\\])?)\$(?!\d)"
    r"|\\\((?P<c>[^\n]{1,300}?)\\\)|\\\[(?P<d>[^\]]{1,500}?)\\\]"
)
LAST_NUMBER = re.compile(
    r"(?:(?<![\w)\]}%])[-−+])?[$€£]?(?:\d+ \d+/\d+|\d+/\d+|\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:\s?(?:\\?%))?"
)
# Space counts between digits alone: "1 2" is not 12.
BRACKETED = re.compile(r"\\left|\\right|\\[,;:! ]|\s(?!\d)|(?<!\d)\s|[$`]|\\(?:text|mathrm|textbf|mathbf|mbox)(?=\{)")


def find_answer(completion: str) -> str | None:
    text = without_thoughts(completion)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    tagged = last_tagged(text)
    text = (text if tagged is None else tagged).strip()
    if read_quantity(text):
        return text
    if hashes := HASHES.findall(text):
        return _clean(hashes[-1])
    text = text.replace("\\$", "")
    if said := SAID.findall(text):
        return _last_expression(said[-1]) or _clean(said[-1])
    found = _last_expression(text)
    return text if found is None and tagged is not None else found


def _last_expression(text: str) -> str | None:
    segment = None
    for segment in SEGMENT.finditer(text):  # noqa: B007
        pass
    if segment is not None:
        content = next(group for group in segment.groups() if group is not None).strip()
        return content.rpartition("=")[2].strip() if re.search(r"\d\s*=", content) else content
    number = None
    for number in LAST_NUMBER.finditer(text):  # noqa: B007
        pass
    if number is None:
        return None
    found = number[0]
    if "," in found and read_quantity(found) is None:  # "1,2,3" is three numbers
        return found.rpartition(",")[2]
    return found


def _clean(text: str) -> str:
    return text.strip().strip("*`").rstrip(".").strip()


def read_truth(ground_truth: object) -> list[str]:
    """The right answers, any of which will do."""
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    spelled = [str(t) for t in truths if isinstance(t, str | int | float) and not isinstance(t, bool)]
    return [truth for truth in map(_read_one_truth, spelled) if truth]


@functools.lru_cache(maxsize=4096)
def _read_one_truth(text: str) -> str:
    text = text.strip()
    boxed = last_boxed(text)
    if boxed is None and (hashes := HASHES.findall(text)):
        boxed = hashes[-1]
    text = (text if boxed is None else boxed).strip()
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text.strip("$").strip()
    return text


class MathVerifier:
    """`math`."""

    find_answer: Callable[[str], str | None] = staticmethod(find_answer)

    def __init__(self) -> None:
        import math_verify  # takes a third of a second

        self._library = math_verify
        for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils", "math_verify"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns that its own alarm is off
        self._parse_truth = functools.lru_cache(maxsize=4096)(self._parse)

    def __call__(self, completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
        truths = read_truth(ground_truth)
        if not truths:
            return unscorable(f"the ground truth {ground_truth!r:.80} is no answer")
        answer = self.find_answer(completion)
        if answer is None or not answer.strip():
            return scored(0.0, "no answer in the completion")
        detail = f"answer {answer[:80]!r}"
        try:
            return scored(float(any(self.equal(answer, truth) for truth in truths)), detail)
        except Overrun:
            return Verdict(status="timeout", detail=f"{detail}: not compared within {PARSER_SECONDS:g} s of CPU time")

    def equal(self, answer: str, truth: str) -> bool:
        """Raises Overrun."""
        a, b = read_quantity(answer), read_quantity(truth)
        if a is not None and b is not None:
            return agree(a, b)
        if _letters(answer) == _letters(truth):
            return True
        if len(answer) > MAX_PARSED or len(truth) > MAX_PARSED:
            return False
        with cpu_limit(PARSER_SECONDS):
            gold = self._parse_truth(truth)
            target = self._parse(answer)
            return bool(gold and target and self._library.verify(gold, target, timeout_seconds=None))

    def _parse(self, text: str) -> list:
        text = text.strip().strip("$").replace("\\$", "").replace("−", "-")
        return self._library.parse(f"${text}$", parsing_timeout=None) or self._library.parse(text, parsing_timeout=None)


class StrictMathVerifier(MathVerifier):
    """`strict_math`: the answer must stand in Minerva's phrase."""

    @staticmethod
    def find_answer(completion: str) -> str | None:
        text = without_thoughts(completion)
        found = MINERVA.findall(text) if "I hope it is correct" in text else []
        if not found:
            return None
        answer = _clean(found[-1])
        return last_boxed(answer) or answer.strip("$").strip()


def _letters(text: str) -> str:
    """What two spellings of one text share: no spacing, no case, no \\text{}, no dollar signs; "(B)" is "b"."""
    text = BRACKETED.sub("", text.strip(" *")).replace("dfrac", "frac").replace("tfrac", "frac").rstrip(".").casefold()
    bare = re.fullmatch(r"[({\[]*([a-z0-9]+)[)}\]]*\.?", text)
    return bare[1] if bare else text
