"""GSM8K: the last number of the completion equals the label.

A number is read with its sign, decimals and thousands separators; `$` before it and `%` behind it do not matter.
Equality is of values: 72, 72.0 and +72 agree.
"""

import re
from decimal import Decimal

from olmorl.rewards.verdict import Verdict, scored, unscorable

# A sign belongs to the number unless something to subtract from stands before it: "5-3" ends in 3, "= -3" in -3.
NUMBER = re.compile(r"(?:(?<![\w)\]}%])(?P<sign>[-−+]))?\$?(?P<digits>\d+(?:,\d+)*(?:\.\d+)?|\.\d+)")
# Commas count where they group digits (also by twos, as in India); in "1,2,3" they separate three numbers.
GROUPED = re.compile(r"\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?")


def gsm8k(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    label = read_label(ground_truth)
    if label is None:
        return unscorable(f"the ground truth {ground_truth!r:.80} holds no number")
    answer = last_number(completion)
    if answer is None:
        return scored(0.0, "no number in the completion")
    return scored(float(answer == label), f"answer {str(answer)[:80]}, label {str(label)[:80]}")


def read_label(ground_truth: object) -> Decimal | None:
    """Of a text or a number, or of a list that holds one of them alone."""
    if isinstance(ground_truth, list | tuple) and len(ground_truth) == 1:
        ground_truth = ground_truth[0]
    if isinstance(ground_truth, str):
        return last_number(ground_truth)
    if not isinstance(ground_truth, int | float) or isinstance(ground_truth, bool):
        return None
    label = Decimal(str(ground_truth))  # which reads 1e-05; in a text that would be two numbers
    return label if label.is_finite() else None


def last_number(text: str) -> Decimal | None:
    last = None
    for match in NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    digits, negative = last["digits"], last["sign"] in ("-", "−")
    if "," in digits and not GROUPED.fullmatch(digits):
        digits, negative = digits.rpartition(",")[2], False
    value = Decimal(digits.replace(",", ""))
    return value.copy_negate() if negative else value
