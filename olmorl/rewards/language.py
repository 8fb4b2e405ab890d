"""Which language a text is in. The same text always gives the same answer: the detector's dice are seeded."""

from functools import lru_cache

MAX_CHARACTERS = 5000  # tell a language as well as a megabyte does


@lru_cache(maxsize=1024)
def _candidates(text: str) -> tuple[tuple[str, float], ...]:
    from langdetect import DetectorFactory, LangDetectException, detect_langs

    DetectorFactory.seed = 0
    try:
        return tuple((found.lang, found.prob) for found in detect_langs(text))
    except LangDetectException:  # no letters
        return ()


def language_of(text: str) -> str | None:
    """Its code in lower case ("en", "zh-cn"); None where there is nothing to tell it by."""
    found = _candidates(text[:MAX_CHARACTERS])
    return found[0][0] if found else None


def is_english(text: str) -> bool:
    """Also of a text in capitals. A few words may be taken for several languages; English among them is enough."""
    return any(language == "en" for language, _ in _candidates(text[:MAX_CHARACTERS].lower()))
