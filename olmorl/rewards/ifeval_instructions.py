"""The 25 kinds of instruction of IFEval, each a check of the response alone, named and parameterised as in its data.

A check raises ValueError for parameters that mean nothing.
"""

import json
import re
import string
from collections.abc import Callable, Sequence

from olmorl.rewards.answer_text import last_fenced
from olmorl.rewards.language import is_english, language_of

Check = Callable[..., bool]

CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
# From the first of a row of stops alone, and never back: "....x" would be gone through once for each of its dots.
SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]]*+(?=\s|$)|[。！？]+")
ABBREVIATION = re.compile(
    r"\b(?:mr|mrs|ms|dr|prof|st|jr|sr|vs|etc|inc|ltd|co|e\.g|i\.e|a\.m|p\.m|u\.s|no|fig|p\.s|p\.p\.s|[a-z])\.$", re.I
)
BULLET = re.compile(r"^[ \t]*(?:\*(?!\*)|-|•)[^\n]*$", re.MULTILINE)
HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")
TITLE = re.compile(r"<<([^\n<>]+)>>")
PLACEHOLDER = re.compile(r"\[[^\[\]\n]+\]")
SHOUTED = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")


def compare(count: int, wanted: int | float, relation: str) -> bool:
    wanted = int(wanted)
    match relation:
        case "at least":
            return count >= wanted
        case "less than":
            return count < wanted
        case "at most":
            return count <= wanted
        case "exactly":
            return count == wanted
        case "around":
            return abs(count - wanted) <= max(round(wanted * 0.1), 1)
    raise ValueError(f"{relation!r} is no relation")


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _listed(words: object) -> list[str]:
    """A text would be taken for a list of its letters."""
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{words!r:.80} is no list of texts")
    return list(words)


def keywords_exist(text: str, *, keywords: list[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in _listed(keywords))


def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return compare(text.lower().count(keyword.lower()), frequency, relation)


def forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    return not any(_has_word(text, word) for word in _listed(forbidden_words))


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compare(text.lower().count(letter.lower()), let_frequency, let_relation)


def response_language(text: str, *, language: str) -> bool:
    return language_of(text) == language.lower()


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return compare(count_sentences(text), num_sentences, relation)


def count_sentences(text: str) -> int:
    count, start = 0, 0
    for line in text.split("\n"):
        start = 0
        for end in SENTENCE_END.finditer(line):
            if end[0] == "." and ABBREVIATION.search(line, max(start, end.end() - 12), end.end()):
                continue
            if any(map(str.isalnum, line[start : end.start()])):
                count += 1
            start = end.end()
        if any(map(str.isalnum, line[start:])):
            count += 1
    return count


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Paragraphs are set off by ***."""
    return _count_parts(text, r"\s?\*\*\*\s?") == int(num_paragraphs)


def _count_parts(text: str, divider: str) -> int | None:
    """None: an empty one in the middle."""
    parts = [part.strip() for part in re.split(divider, text)]
    if parts and not parts[0]:
        parts.pop(0)
    if parts and not parts[-1]:
        parts.pop()
    return len(parts) if all(parts) else None


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    return compare(len(re.findall(r"\w+", text)), num_words, relation)


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are set off by an empty line."""
    paragraphs = [part.strip() for part in re.split(r"\n[ \t]*\n", text) if part.strip()]
    nth = int(nth_paragraph)
    if len(paragraphs) != int(num_paragraphs) or not 1 <= nth <= len(paragraphs):
        return False
    return _bare(paragraphs[nth - 1].split()[0]) == _bare(first_word)


def _bare(word: str) -> str:
    return word.strip(string.punctuation + "“”‘’").lower()


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(PLACEHOLDER.findall(text)) >= int(num_placeholders)


def postscript(text: str, *, postscript_marker: str) -> bool:
    letters = [re.escape(letter) for letter in postscript_marker if letter.isalnum()]
    if not letters:
        raise ValueError(f"{postscript_marker!r} is no marker of a postscript")
    marker = r"\.?\s?".join(letters)
    return re.search(rf"^[^\w\n]*{marker}\b\W*\w", text, re.IGNORECASE | re.MULTILINE) is not None


def number_bullets(text: str, *, num_bullets: int) -> bool:
    return len(BULLET.findall(text)) == int(num_bullets)


def constrained_response(text: str, *, options: Sequence[str] = CHOICES) -> bool:
    return any(option in text for option in _listed(options))


def number_highlights(text: str, *, num_highlights: int) -> bool:
    found = sum(bool((double or single).strip()) for double, single in HIGHLIGHT.findall(text))
    return found >= int(num_highlights)


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    heads = re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", text)
    return len(heads) >= int(num_sections)


def json_format(text: str) -> bool:
    try:
        json.loads((last_fenced(text) or "") if text.strip().startswith("```") else text)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    return any(found.strip() for found in TITLE.findall(text))


def two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    if _count_parts(text, r"\*{6}") != 2:
        return False
    first, second = filter(None, parts)
    return first != second


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return compare(sum(map(str.isupper, SHOUTED.findall(text))), capital_frequency, capital_relation)


def english_capital(text: str) -> bool:
    return text.isupper() and is_english(text)


def english_lowercase(text: str) -> bool:
    return text.islower() and is_english(text)


def no_comma(text: str) -> bool:
    return "," not in text


def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


INSTRUCTIONS: dict[str, Check] = {
    "keywords:existence": keywords_exist,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullets,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlights,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
