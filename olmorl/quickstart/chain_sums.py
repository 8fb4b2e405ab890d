"""Chain sums: `7+5+9=` is answered by running sums and then the result, `7+5=12;12+9=21;21`.

A problem is a pure function of seed, split and index. The two splits cannot meet: a hash of the terms decides which
one they belong to.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]
TERMS = (5, 8)
DIGITS = (1, 9)
HELD_OUT_SHARE = 4  # one tuple of terms in so many


@dataclass(frozen=True, slots=True)
class Problem:
    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return "+".join(map(str, self.terms)) + "="

    @property
    def ground_truth(self) -> str:
        return str(sum(self.terms))


def problem(seed: int, split: Split, index: int) -> Problem:
    rng = random.Random(f"chain-sums/{seed}/{split}/{index}")
    while True:
        terms = tuple(rng.randint(*DIGITS) for _ in range(rng.randint(*TERMS)))
        if _is_held_out(terms) == (split == "held_out"):
            return Problem(terms)


def distinct_problems(seed: int, split: Split) -> Iterator[Problem]:
    """Problems in the order of their index, none twice."""
    seen: set[Problem] = set()
    index = 0
    while True:
        found = problem(seed, split, index)
        index += 1
        if found not in seen:
            seen.add(found)
            yield found


def worked_answer(terms: tuple[int, ...], rng: random.Random, *, give_up: float) -> str:
    """Running sums and the result. Before each step but the first the writer gives up with probability `give_up`
    and presents what it has: the demonstrations of a weak policy, which can add but does not always care to."""
    total, steps = terms[0], []
    for number, term in enumerate(terms[1:]):
        if number > 0 and rng.random() < give_up:
            break
        steps.append(f"{total}+{term}={total + term}")
        total += term
    return ";".join([*steps, str(total)])


def _is_held_out(terms: tuple[int, ...]) -> bool:
    digest = hashlib.sha256("+".join(map(str, terms)).encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0
