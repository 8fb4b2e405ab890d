"""Where in a completion the answer stands: behind the thoughts, in tags, in the last fenced block, in a box.

Every search is a single pass: a completion may be a megabyte of opening tags.
"""

import re

BOX_OR_BRACE = re.compile(r"\\f?box(?:ed)?\s*\{|\\.|[{}]", re.DOTALL)
BARE_BOX = re.compile(r"\\f?boxed\s+([^\s{}$\\]+)")


def without_thoughts(text: str) -> str:
    """What stands behind the last </think>; all of it where there is none."""
    return text.rpartition("</think>")[2]


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """The text between the last pair of <tag> and </tag>."""
    found, start = None, None
    for match in re.finditer(rf"<(/?){tag}>", text, re.IGNORECASE):
        if not match[1]:
            start = match.end()
        elif start is not None:
            found, start = text[start : match.start()], None
    return found


def tagged_or_whole(text: str) -> str:
    """The text of the last <answer> tags behind the thoughts, or else all that stands there."""
    text = without_thoughts(text)
    tagged = last_tagged(text)
    return text if tagged is None else tagged


def last_fenced(text: str) -> str | None:
    """The code of the last fenced block; one that no fence closes counts, for a completion may end early."""
    block: str | None = None
    lines: list[str] | None = None
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            if lines is None:
                lines = []
            else:
                block, lines = "\n".join(lines), None
        elif lines is not None:
            lines.append(line)
    return "\n".join(lines) if lines else block


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} that closes; of boxes in a box the inner one. Also of `\boxed 7`."""
    if "box" not in text:
        return None
    found: str | None = None
    open_braces: list[tuple[bool, int, list[str]]] = []  # is it a box, where does it begin, the last box inside
    for match in BOX_OR_BRACE.finditer(text):
        token = match[0]
        if token == "}" and open_braces:
            is_box, start, inside = open_braces.pop()
            if is_box and not inside:
                inside = [text[start : match.start()]]
            if is_box:
                found = inside[-1]
            if inside and open_braces:
                open_braces[-1][2][:] = inside
        elif token == "{" or "box" in token:
            open_braces.append((token != "{", match.end(), []))
    if found is None:
        bare = BARE_BOX.findall(text)
        return bare[-1] if bare else None
    return found
