r"""Plain quantities read without a parser: a number or fraction, perhaps with a currency, a percent sign or a unit.

"$1,234.50", "1\,234 \text{ cm}", "-\frac{3}{4}", "2 1/2", "45^\circ", "٧٢". What is more than that is None here and
the business of a parser, a thousand times slower.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}")  # the second: India
DIGITS = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
FRACTION = re.compile(
    r"""(?P<sign>[-+]?)
    (?:(?P<whole>\d+)\ ?(?=[\\\d]))?
    (?:\\frac\{(?P<a>-?\d+)\}\{(?P<b>\d+)\}|\\frac(?P<c>\d)(?P<d>\d)|(?P<e>\d+)\ ?/\ ?(?P<f>\d+))""",
    re.VERBOSE,
)
NUMBER = re.compile(rf"(?P<sign>[-+]?) ?(?P<digits>{DIGITS})\.?(?!\d)")
CURRENCY = re.compile(r"\\?[$€£¥₹]")
POWER_OF_TEN = re.compile(r" ?(?:\\times|\\cdot|[x×*·]) ?10\^(?:\{(-?\d{1,3})\}|(-?\d{1,2}))|[eE]([-+]?\d{1,3})(?!\w)")
UNIT = re.compile(r"(?:[a-z°'](?:[a-z°%/.' -]|\^?\{?[23]\}?|[²³])*)?", re.IGNORECASE)
VARIABLE = re.compile(r"[a-ln-z](?!/?[A-Za-z])|x|pi(?![a-z])")  # right behind a number: 3x, 4i, 24t^3, but not 3m
SPACES = re.compile(r"\\[,;:! ]|\\q?quad|~|\s+")
WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname|mbox|textit)\s*\{([^{}]*)\}")
DEGREE = re.compile(r"\^ ?\{? ?\\circ ?\}?|\\degree")
MAX_LENGTH = 200  # characters; a longer text is no plain quantity


@dataclass(frozen=True, slots=True)
class Quantity:
    value: Fraction
    percent: bool = False
    unit: str = ""


def read_quantity(text: str) -> Quantity | None:
    if len(text) > MAX_LENGTH:
        return None
    text = _plain(text)
    found = _read_fraction(text) or _read_number(text)
    if found is None:
        return None
    value, rest = found
    if VARIABLE.match(rest):
        return None
    rest = rest.strip().rstrip(".")
    percent = rest.startswith(("%", "\\%", "percent"))
    if percent:
        rest = rest.removeprefix("\\").removeprefix("%").removeprefix("percent").lstrip()
    if not UNIT.fullmatch(rest):
        return None
    return Quantity(value, percent, _unit(rest))


def agree(a: Quantity, b: Quantity) -> bool:
    """50 % agrees with 50 and with 0.5, where only one of both says percent; a missing unit agrees with any."""
    if a.unit and b.unit and a.unit != b.unit:
        return False
    if a.value == b.value:
        return True
    if a.percent == b.percent:
        return False
    return a.value == b.value / 100 if b.percent else a.value / 100 == b.value


def _plain(text: str) -> str:
    text = WRAPPED.sub(r" \1", text)
    text = text.replace("{,}", ",").replace("\\left", "").replace("\\right", "")
    text = text.replace("−", "-").replace("–", "-").replace("dfrac", "frac").replace("tfrac", "frac").replace("，", ",")
    text = DEGREE.sub("°", text)
    text = CURRENCY.sub("", SPACES.sub(" ", text)).strip(" *_`")
    return text.removeprefix("(").removesuffix(")") if re.fullmatch(r"\(-?[\d.,]+\)", text) else text


def _read_fraction(text: str) -> tuple[Fraction, str] | None:
    match = FRACTION.match(text)
    if match is None:
        return None
    over, under = match["a"] or match["c"] or match["e"], match["b"] or match["d"] or match["f"]
    if int(under) == 0:
        return None
    value = Fraction(int(over), int(under))
    if match["whole"]:
        value += int(match["whole"])
    return (-value if match["sign"] == "-" else value), text[match.end() :]


def _read_number(text: str) -> tuple[Fraction, str] | None:
    match = NUMBER.match(text)
    if match is None:
        return None
    digits, rest = match["digits"], text[match.end() :]
    whole = digits.partition(".")[0]
    if "," in digits:
        if not GROUPED.fullmatch(whole):
            return None  # several numbers
        digits = digits.replace(",", "")
    else:  # groups set off by spaces: 1 234 567
        while len(whole) <= 3 and "." not in digits and (group := re.match(r" (\d{3})(?=[ .]|$)", rest)):
            digits, rest = digits + group[1], rest[group.end() :]
    value = Fraction(digits)
    if power := POWER_OF_TEN.match(rest):
        value *= Fraction(10) ** int(power[1] or power[2] or power[3])
        rest = rest[power.end() :]
    return (-value if match["sign"] == "-" else value), rest


def _unit(rest: str) -> str:
    rest = re.sub(r"[\s.{}]", "", rest).lower().replace("²", "^2").replace("³", "^3")
    rest = {"dollars": "", "dollar": "", "euros": "", "euro": "", "degrees": "°", "degree": "°"}.get(rest, rest)
    return rest.removesuffix("s") if len(rest) > 2 else rest
