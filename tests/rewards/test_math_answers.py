"""Pairs of a completion and a truth, each with the right verdict."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from olmorl.rewards import math_answer
from olmorl.rewards.answer_text import last_boxed, last_fenced, last_tagged
from olmorl.rewards.gsm8k import gsm8k
from olmorl.rewards.math_answer import MathVerifier, StrictMathVerifier, find_answer
from olmorl.rewards.quantity import read_quantity

GSM8K = Path(os.environ.get("OLMORL_TEST_GSM8K", ""))

# (completion, truth); "~" in front of the truth: it is not this
NUMBERS = r"""
\boxed{72} | 72
\boxed{72} | ~73
The answer is 72. | 72
The answer is 72. | ~7
the answer is: **72** | 72
Answer: 72 | 72
#### 72 | 72
#### 72 | ~-72
so it is 72 | 72
72 | 72
72.0 | 72
72.5 | ~72
\boxed{072} | 72
\boxed{+72} | 72
\boxed{.5} | 0.5
\boxed{0.50} | .5
\boxed{1e3} | 1000
\boxed{3\times10^{4}} | 30000
\boxed{3 \times 10^{-2}} | 0.03
\boxed{3\cdot 10^4} | 30000
\boxed{3\times10^{4}} | ~3000
first 5, then 72 | 72
first 5, then 72 | ~5
12 + 60 = 72 | 72
$12+60=72$ | 72
$12+60=72$ | ~12
I count 1, 2, 3 | 3
no idea | ~72
 | ~0
... | ~0
\boxed{} | ~0
\boxed{ } | ~0
<think>\boxed{3}</think> \boxed{72} | 72
<think>\boxed{72}</think> no idea | ~72
<think>I guess 3</think>72 | 72
<answer>72</answer> | 72
<think>5</think><answer> 72 </answer> | 72
\boxed{3} no, \boxed{72} | 72
\boxed{3} no, \boxed{72} | ~3
\boxed{\boxed{72}} | 72
\boxed{x = \boxed{72}} | 72
\fbox{72} | 72
\boxed 72 | 72
\boxed{72 | 72
\boxed{72}} | 72
$\boxed{72}$. | 72
\[ \boxed{72} \] | 72
"""
SIGNS = r"""
\boxed{-5} | -5
\boxed{-5} | ~5
\boxed{5} | ~-5
\boxed{−5} | -5
\boxed{–5} | -5
\boxed{- 5} | -5
x = -5 | -5
10 - 4 | 4
it fell by 3 to -8 | -8
(4) - 3 | 3
\boxed{-\frac{3}{4}} | -0.75
\boxed{\frac{-3}{4}} | -0.75
\boxed{-3/4} | -\frac34
\boxed{\frac{3}{-4}} | -\frac34
\boxed{\frac{-3}{-4}} | \frac34
\boxed{-0} | 0
\boxed{-(-5)} | 5
"""
SEPARATORS = r"""
\boxed{1,234} | 1234
\boxed{1234} | 1,234
\boxed{1{,}234} | 1234
\boxed{1\,234} | 1234
\boxed{1 234} | 1234
\boxed{1,234,567.5} | 1234567.5
\boxed{12,34,567} | 1234567
\boxed{1,234} | ~234
\boxed{1,234} | ~1
\boxed{1,23} | ~123
\boxed{1\!,\!234} | 1234
about 1,234 people | 1234
#### 1,000,000 | 1000000
1,2,3 | 3
1,2,3 | ~123
"""
MONEY = r"""
\boxed{\$18} | 18
\boxed{$18} | 18
\boxed{18} | \$18
it costs $18 | 18
it costs $5 and then $18 | 18
it costs $5 and then $18 | ~5
it costs \$18. | 18
#### $18 | 18
#### 18 dollars | 18
\boxed{€18} | 18
\boxed{£1,018.50} | 1018.5
\boxed{18 dollars} | 18
\boxed{18} | 18 dollars
-$18 | -18
$-18$ | -18
The profit is $18$ dollars | 18
He pays $5, she pays $13, so the answer is $18. | 18
\boxed{\text{\$}18} | 18
\boxed{18.00} | $18
\boxed{18.01} | ~$18
"""
PERCENT = r"""
\boxed{50\%} | 50
\boxed{50\%} | 50\%
\boxed{50} | 50\%
\boxed{50%} | 50 %
\boxed{0.5} | 50\%
\boxed{50\%} | 0.5
\boxed{50\%} | ~5
\boxed{5\%} | ~50\%
\boxed{0.5\%} | ~50\%
#### 50% | 50
so 50 percent | 50
\boxed{50\text{ percent}} | 50
\boxed{12.5\%} | \frac{1}{8}
"""
FRACTIONS = r"""
\boxed{\frac{1}{2}} | 0.5
\boxed{\frac12} | 1/2
\boxed{\dfrac{1}{2}} | \frac{1}{2}
\boxed{\tfrac12} | 0.5
\boxed{1/2} | \frac{2}{4}
\boxed{2/4} | 1/2
\boxed{\frac{1}{3}} | ~0.333
\boxed{0.333} | ~\frac13
\boxed{\frac{1}{3}} | ~\frac{1}{2}
\boxed{1\frac{1}{2}} | 1.5
\boxed{1\frac12} | \frac32
\boxed{1 1/2} | 3/2
\boxed{-1\frac{1}{2}} | -1.5
\boxed{2\frac{1}{2}} | ~1
the answer is 3/4 | 0.75
so it is $\frac{3}{4}$ | 3/4
so it is \(\frac{3}{4}\) | 3/4
so it is \[\frac{3}{4}\] | 3/4
so 1/2 | ~2
\boxed{\frac{1}{0}} | ~0
\boxed{\frac{10}{5}} | 2
\boxed{\frac{\pi}{2}} | \pi/2
\boxed{\frac{x}{2}} | 0.5x
"""
UNITS = r"""
\boxed{10\text{ cm}} | 10
\boxed{10 cm} | 10 cm
\boxed{10} | 10\text{ cm}
\boxed{10\text{ cm}} | ~10\text{ m}
\boxed{10\,\mathrm{cm}^2} | 10
\boxed{10\text{ cm}^2} | 10\mbox{ cm}^2
\boxed{10 m/s} | 10
\boxed{10 km/h} | 10\text{ km/h}
\boxed{45^\circ} | 45
\boxed{45^{\circ}} | 45^\circ
\boxed{45°} | 45
\boxed{45 degrees} | 45^\circ
\boxed{3 apples} | 3
\boxed{3 apples} | ~4
\boxed{1 hour} | 1 hours
#### 5 hours | 5
he has 12 eggs | 12
he has 12 eggs. | ~1
\boxed{5'} | 5
\boxed{10 m} | 10
\boxed{10m} | 10
\boxed{10m/s} | 10
\boxed{5^2} | 25
\boxed{5^2} | ~5
\boxed{25} | 5^2
\boxed{2^3} | 8
\boxed{3x} | 3x
\boxed{3x} | ~3
\boxed{3} | ~3x
\boxed{4i} | ~4
\boxed{6xy} | ~6
\boxed{24t^3} | 24t^{3}
\boxed{24} | ~24t^3
\boxed{1 2} | ~1
\boxed{1 2} | ~12
\boxed{2*3} | 6
\boxed{2*3} | ~23
"""
LATEX = r"""
\boxed{\sqrt{8}} | 2\sqrt2
\boxed{2\sqrt{2}} | \sqrt{8}
\boxed{\sqrt{2}} | ~\sqrt{3}
\boxed{\frac{\sqrt{2}}{2}} | \frac{1}{\sqrt{2}}
\boxed{\sqrt[3]{27}} | 3
\boxed{2^{10}} | 1024
\boxed{\pi} | \pi
\boxed{2\pi} | ~\pi
\boxed{3!} | 6
\boxed{\binom{4}{2}} | 6
\boxed{x^2+2x+1} | (x+1)^2
\boxed{(x+1)^2} | 1+2x+x^2
\boxed{x^2+1} | ~x^2-1
\boxed{a+b} | b+a
\boxed{x=5} | 5
\boxed{5} | x=5
\boxed{x = -2} | ~2
\boxed{y=2x+3} | y=3+2x
\boxed{\left(\frac{1}{2}\right)} | \frac12
\boxed{e^{2}\cdot e} | e^3
\boxed{\log_2 8} | 3
\boxed{\sin(\pi/2)} | 1
\boxed{|{-3}|} | 3
\boxed{\infty} | \infty
\boxed{-\infty} | ~\infty
\boxed{3+4i} | 4i+3
\boxed{3+4i} | ~3-4i
\boxed{7\pmod{11}} | ~8
\boxed{\begin{pmatrix}1\\2\end{pmatrix}} | \begin{pmatrix}1\\2\end{pmatrix}
\boxed{\begin{pmatrix}1\\2\end{pmatrix}} | ~\begin{pmatrix}2\\1\end{pmatrix}
\boxed{\left\lfloor 3.7 \right\rfloor} | 3
\boxed{\text{72}} | 72
"""
COLLECTIONS = r"""
\boxed{\{1,2\}} | \{2,1\}
\boxed{\{1,2\}} | \{1,2\}
\boxed{\{1,2\}} | ~\{1,3\}
\boxed{\{1,2\}} | ~\{1,2,3\}
\boxed{\{1, 2, 3\}} | \{3,2,1\}
\boxed{1,2} | 1, 2
\boxed{1, 2} | 1,2
\boxed{1,2,3} | ~1,2
\boxed{(3,-4)} | (3,-4)
\boxed{(3,4)} | ~(4,3)
\boxed{(3,-4)} | ~(3,4)
\boxed{\left( 3, \frac{\pi}{2} \right)} | (3,\frac{\pi}{2})
\boxed{[0,1)} | [0,1)
\boxed{[0,1]} | ~[0,1)
\boxed{(0,1)} | (0, 1)
\boxed{\left[0,1\right)} | [0,1)
\boxed{(-\infty,2]} | (-\infty, 2]
\boxed{(1,2)\cup(3,4)} | (1,2) \cup (3,4)
\boxed{(1,2)\cup(3,4)} | ~(1,2)\cup(3,5)
\boxed{x>3} | x > 3
\boxed{x>3} | ~x<3
\boxed{\emptyset} | \emptyset
\boxed{2:3} | 2:3
"""
WORDS = r"""
\boxed{\text{(B)}} | B
\boxed{B} | (B)
\boxed{(b)} | B
\boxed{\textbf{(B)}} | B
\boxed{A} | ~B
\boxed{\text{even}} | even
\boxed{\text{Even}} | even
\boxed{\text{odd}} | ~even
\boxed{\text{Tuesday}} | Tuesday
\boxed{yes} | Yes
\boxed{no} | ~Yes
the answer is seventy-two | ~72
"""
DIGITS = r"""
\boxed{٧٢} | 72
٧٢ | 72
\boxed{７２} | 72
\boxed{७२} | 72
\boxed{৭২} | 72
\boxed{٧٢} | ~73
\boxed{72} | ٧٢
答案是72 | 72
答案是 72。 | 72
Die Antwort ist 72 | 72
"""


def pairs(*tables: str) -> list[tuple[str, str, float]]:
    found = []
    for table in tables:
        for line in table.strip("\n").splitlines():
            completion, truth = line.rsplit(" | ", 1)
            found.append((completion, truth.removeprefix("~"), float(not truth.startswith("~"))))
    return found


MATH = pairs(NUMBERS, SIGNS, SEPARATORS, MONEY, PERCENT, FRACTIONS, UNITS, LATEX, COLLECTIONS, WORDS, DIGITS)


@pytest.fixture(scope="module")
def math() -> MathVerifier:
    return MathVerifier()


def test_the_table_is_long() -> None:
    assert len(MATH) >= 200 and len(set(MATH)) == len(MATH)


@pytest.mark.parametrize(("completion", "truth", "reward"), MATH)
def test_math(math: MathVerifier, completion: str, truth: str, reward: float) -> None:
    verdict = math(completion, truth)
    assert (verdict.status, verdict.reward) == ("scored", reward), verdict.detail


def test_the_quick_way_and_the_parser_agree(math: MathVerifier) -> None:
    """What is decided as numbers here, math-verify decides likewise."""
    compared = 0
    for completion, truth, reward in MATH:
        answer, wanted = read_quantity(find_answer(completion) or ""), read_quantity(truth)
        if answer is None or wanted is None or any((q.percent or q.unit) for q in (answer, wanted)):
            continue
        parsed = [math._parse(f"\\frac{{{q.value.numerator}}}{{{q.value.denominator}}}") for q in (wanted, answer)]
        assert all(parsed) and math._library.verify(*parsed, timeout_seconds=None) == bool(reward), (completion, truth)
        compared += 1
    assert compared > 100


def test_truths_of_all_kinds(math: MathVerifier) -> None:
    assert math("\\boxed{7}", 7).reward == math("\\boxed{7}", 7.0).reward == 1.0
    assert math("\\boxed{7}", ["6", "7"]).reward == 1.0
    assert math("\\boxed{7}", ["6", "8"]).reward == 0.0
    assert math("\\boxed{7}", "work\n#### 7").reward == math("\\boxed{7}", "so $\\boxed{7}$").reward == 1.0
    assert gsm8k("0.00001", 1e-05).reward == gsm8k("1" + "0" * 20, 1e20).reward == 1.0
    assert gsm8k("5", 1e-05).reward == gsm8k("20", 1e20).reward == 0.0
    assert math("7", "").status == math("7", "  ").status == math("7", []).status == "unscorable"


def test_strict_math_wants_the_phrase() -> None:
    strict = StrictMathVerifier()
    assert strict("Final Answer: The final answer is $7$. I hope it is correct.", "7").reward == 1.0
    assert strict("Final Answer: The final answer is $\\boxed{7}$. I hope it is correct.", "7").reward == 1.0
    assert strict("Final Answer: The final answer is 8. I hope it is correct.", "7").reward == 0.0
    assert strict("\\boxed{7}", "7").reward == 0.0


def test_a_comparison_that_takes_too_long_is_a_timeout(math: MathVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answer, "PARSER_SECONDS", 0.3)
    start = time.process_time()
    verdict = math("\\boxed{9^{9^{9^{9}}}}", "1")
    assert verdict.status == "timeout" and verdict.reward is None and time.process_time() - start < 5
    assert math("\\boxed{\\sqrt{4}}", "2").reward == 1.0


def test_math_in_a_thread_needs_no_alarm(math: MathVerifier) -> None:
    rewards: list[float | None] = []
    thread = threading.Thread(target=lambda: rewards.append(math("\\boxed{\\sqrt{9}}", "3").reward))
    thread.start()
    thread.join()
    assert rewards == [1.0]


MEGABYTES = ["\\boxed{" * 150_000, "\\boxed{1}" * 110_000, "$" * 10**6, "1 " * 500_000, "<answer>" * 120_000,
             "answer is " * 100_000, "#### " * 200_000, "\\(" * 500_000, "x" * 10**6, "1" * 10**6, "1," * 500_000,
             "1/" * 500_000, "\\boxed{" + "1" * 10**6 + "}", "{" * 10**6, "```\n" * 250_000, "```" * 300_000,
             "final answer is " * 60_000, "\\[" * 500_000,
             "final answer is" + " " * 10**6 + "y\nI hope it is correct"]  # fmt: skip


@pytest.mark.parametrize("text", MEGABYTES, ids=lambda text: text[:10])
@pytest.mark.timeout(20)
def test_a_megabyte_is_no_trouble(math: MathVerifier, text: str) -> None:
    start = time.process_time()
    assert math(text, "7").reward == 0.0
    assert StrictMathVerifier.find_answer(text) is None
    last_fenced(text)
    assert time.process_time() - start < 8


def test_where_answers_stand() -> None:
    assert last_boxed("\\boxed{a{b}c}") == "a{b}c"
    assert last_boxed("\\boxed{\\{1\\}}") == "\\{1\\}"
    assert last_boxed("\\boxed{1} \\boxed{2") == "1"
    assert last_boxed("box") is None
    assert last_tagged("<answer>1</answer> <ANSWER>2</Answer>") == "2"
    assert last_tagged("<answer>1") is last_tagged("1</answer>") is None
    assert last_fenced("a\n```python\nx\n```\nb\n```\ny\nz\n```") == "y\nz"
    assert last_fenced("```py\nx = 1") == "x = 1"
    assert last_fenced("none") is None


@pytest.mark.skipif(not GSM8K.is_file(), reason="OLMORL_TEST_GSM8K names no gsm8k_train.jsonl")
def test_every_solution_of_gsm8k_is_right_for_its_own_answer_alone(math: MathVerifier) -> None:
    lines = GSM8K.read_text().splitlines()
    for line in lines:
        solution = json.loads(line)["answer"]
        label = solution.rpartition("####")[2].strip()
        for verifier in (math, gsm8k):
            assert verifier(solution, label).reward == 1.0, solution
            assert verifier(solution, label + "1").reward == 0.0, solution
    assert len(lines) == 7473
