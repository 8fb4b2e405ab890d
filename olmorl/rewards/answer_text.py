"""Where in a completion the answer stands: behind the thoughts, in tags, in the last fenced block, in a box."""

import re

ANSWER_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
FINISH_TAGS = re.compile(r"<finish>(.*?)</finish>", re.DOTALL | re.IGNORECASE)
FENCE = re.compile(r"```[^\S\n]*([\w+#.-]*)[^\n]*\n(.*?)```", re.DOTALL)
BOX = re.compile(r"\\f?boxed\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def without_thoughts(text: str) -> str:
    """What stands behind the last </think>; all of it where there is none."""
    return text.rpartition("</think>")[2]


def last_tagged(text: str, tags: re.Pattern[str] = ANSWER_TAGS) -> str | None:
    found = tags.findall(text)
    return found[-1] if found else None


def tagged_or_whole(text: str) -> str:
    """The text of the last <answer> tags behind the thoughts, or else all that stands there."""
    text = without_thoughts(text)
    tagged = last_tagged(text)
    return text if tagged is None else tagged


def last_fenced(text: str) -> str | None:
    """The code of the last fenced block; one that no fence closes counts, for a completion may end early."""
    blocks = FENCE.findall(text + "\n```" if text.count("```") % 2 else text)
    return blocks[-1][1] if blocks else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} that closes; of nested ones the outermost."""
    content = None
    end = 0
    for match in BOX.finditer(text):
        if match.start() < end:  # inside the box before
            continue
        close = _closing_brace(text, match.end())
        if close is not None:
            content, end = text[match.end() : close], close
    return content


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for match in BRACE.finditer(text, start):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if not depth:
                return match.start()
    return None


