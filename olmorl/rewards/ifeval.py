"""Does the response follow its instructions, all of them checkable by program?

`ifeval` gives the share that is followed, as open-instruct does; `ifeval_strict` 1 for all of them, else 0, as its
report says. `ifeval_old` reads the older data, which names one function for each row.
"""

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from olmorl.rewards.answer_text import tagged_or_whole
from olmorl.rewards.ifeval_instructions import INSTRUCTIONS
from olmorl.rewards.verdict import Verdict, scored, unscorable


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    arguments: dict[str, object]


def ifeval(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    return _judge(completion, ground_truth, all_or_nothing=False)


def ifeval_strict(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    return _judge(completion, ground_truth, all_or_nothing=True)


def ifeval_old(completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
    try:
        instructions = [read_function(ground_truth)]
    except ValueError as error:
        return unscorable(str(error))
    return _follow(completion, instructions, all_or_nothing=True)


def _judge(completion: str, ground_truth: object, *, all_or_nothing: bool) -> Verdict:
    try:
        instructions = read_instructions(ground_truth)
    except ValueError as error:
        return unscorable(str(error))
    return _follow(completion, instructions, all_or_nothing=all_or_nothing)


def _follow(completion: str, instructions: Sequence[Instruction], *, all_or_nothing: bool) -> Verdict:
    text = tagged_or_whole(completion).strip()
    failed = []
    for instruction in instructions:
        try:
            followed = INSTRUCTIONS[instruction.name](text, **instruction.arguments)
        except (
            TypeError,
            ValueError,
            OverflowError,
            AttributeError,
        ) as error:  # what arguments of a wrong kind or number lead to
            return unscorable(f"{instruction.name} with {instruction.arguments!r:.200}: {error}")
        if not followed or not text:
            failed.append(instruction.name)
    share = 1.0 - len(failed) / len(instructions)
    detail = f"not followed: {', '.join(failed)}" if failed else ""
    return scored(float(not failed) if all_or_nothing else share, detail)


def read_instructions(ground_truth: object) -> list[Instruction]:
    """A dict {instruction_id: [...], kwargs: [...]}, a list of one, or either as JSON or Python text. Raises
    ValueError."""
    value = _parse(ground_truth)
    if isinstance(value, list | tuple) and len(value) == 1:
        value = _parse(value[0])
    if not isinstance(value, dict):
        raise ValueError(f"the ground truth {ground_truth!r:.120} is no instructions of IFEval")
    names = value.get("instruction_id") or value.get("instruction_id_list")
    arguments = value.get("kwargs")
    if not isinstance(names, list) or not names or not isinstance(arguments, list) or len(names) != len(arguments):
        raise ValueError(f"the ground truth {ground_truth!r:.120} needs as many kwargs as instruction_id")
    instructions = []
    for name, given in zip(names, arguments, strict=True):
        if name not in INSTRUCTIONS:
            raise ValueError(f"{name!r} is no instruction of IFEval")
        if given is not None and not isinstance(given, dict):
            raise ValueError(f"{given!r:.80} are no kwargs")
        instructions.append(Instruction(name, {k: v for k, v in (given or {}).items() if v is not None}))
    return instructions


OLD_FUNCTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}),
    "verify_keyword_frequency": ("keywords:frequency", {"word": "keyword", "N": "frequency"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}),
    "verify_letter_frequency": ("keywords:letter_frequency", {"letter": "letter", "N": "let_frequency"}),
    "validate_response_language": ("language:response_language", {"language": "language"}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}),
    "validate_word_constraint": ("length_constraints:number_words", {"N": "num_words", "quantifier": "relation"}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"N": "num_sentences", "quantifier": "relation"},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "first_word": "first_word", "i": "nth_paragraph"},
    ),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}),
    "validate_title": ("detectable_format:title", {}),
    "validate_choice": ("detectable_format:constrained_response", {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"N": "num_highlights"}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"N": "num_sections", "section_splitter": "section_spliter"},
    ),
    "validate_json_format": ("detectable_format:json_format", {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}),
    "validate_two_responses": ("combination:two_responses", {}),
    "validate_uppercase": ("change_case:english_capital", {}),
    "validate_lowercase": ("change_case:english_lowercase", {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"N": "capital_frequency", "quantifier": "capital_relation"},
    ),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}
"""function of the older data -> instruction, and its arguments under their new names"""
EXACTLY = {"verify_keyword_frequency": "relation", "verify_letter_frequency": "let_relation"}
"""functions that ask for a number, no more and no less; the name of what says so"""


def read_function(ground_truth: object) -> Instruction:
    """{"func_name": ..., arguments...}, also as JSON or Python text. Raises ValueError."""
    value = _parse(ground_truth)
    function = value.get("func_name") if isinstance(value, dict) else None
    if function not in OLD_FUNCTIONS or not isinstance(value, dict):
        raise ValueError(f"the ground truth {ground_truth!r:.120} names no function of the older IFEval data")
    name, renamed = OLD_FUNCTIONS[function]
    arguments = {new: value.get(old) for old, new in renamed.items()}
    if missing := [old for old, new in renamed.items() if arguments[new] is None]:
        raise ValueError(f"{function} lacks {', '.join(missing)}")
    if function in EXACTLY:
        arguments[EXACTLY[function]] = "exactly"
    if function == "validate_choice" and value.get("options"):
        options = value["options"]
        arguments["options"] = re.split(r"\s*[,/|]\s*", options) if isinstance(options, str) else options
    return Instruction(name, arguments)


def _parse(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
