"""Each instruction of IFEval with responses that follow it and responses that do not."""

import json

import pytest

from olmorl.rewards.ifeval import OLD_FUNCTIONS, ifeval, ifeval_old, ifeval_strict
from olmorl.rewards.ifeval_instructions import INSTRUCTIONS, count_sentences

GERMAN = "Der Hund läuft schnell über die große Straße und bellt den Briefträger an."
FRENCH = "Le chien traverse la rue et aboie après le facteur, comme tous les matins."
ENGLISH = "The dog runs across the street and barks at the postman every single morning."

CASES: dict[str, tuple[dict, list[str], list[str]]] = {
    "keywords:existence": (
        {"keywords": ["tree", "C++"]},
        ["A Tree in C++.", "c++ trees"],
        ["A tree in C.", "", "no"],
    ),
    "keywords:frequency": (
        {"keyword": "tree", "frequency": 2, "relation": "at least"},
        ["tree tree", "Tree, TREE and tree"],
        ["tree", ""],
    ),
    "keywords:forbidden_words": (
        {"forbidden_words": ["bad", "ugly"]},
        ["a badge is good", "nothing here"],
        ["This is BAD.", "ugly"],
    ),
    "keywords:letter_frequency": (
        {"letter": "q", "let_frequency": 2, "let_relation": "less than"},
        ["one q", "none"],
        ["Q and q", "qqq"],
    ),
    "language:response_language": ({"language": "de"}, [GERMAN], [ENGLISH, FRENCH, "123"]),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two.", "One! Two? Three", "Dr. Smith came. He left."],
        ["One.", "Dr. Smith came", "It cost 3.50 dollars."],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***"],
        ["a", "a\n***\nb\n***\nc", "a\n***\n***\nb"],
    ),
    "length_constraints:number_words": (
        {"num_words": 4, "relation": "less than"},
        ["one two three", "a"],
        ["one two three four", "a b c d e"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        ["Hello.\n\nWeekend it is.", 'Hello.\n\n"weekend", he said'],
        ["Weekend.\n\nHello", "Hello.\n\nThe weekend", "Weekend"],
    ),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2},
        ["[name] of [address]", "[a] [b] [c]"],
        ["[name]", "[] []", "none"],
    ),
    "detectable_content:postscript": (
        {"postscript_marker": "P.S."},
        ["Hi\n\nP.S. More.", "Hi\np. s. more", "Hi\nPS: more"],
        ["Hi", "Hi P.P.S", "Hi\nP.S."],
    ),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        ["* a\n* b", "text\n- a\n  - b\nmore"],
        ["* a", "* a\n* b\n* c", "**bold**\n* a"],
    ),
    "detectable_format:constrained_response": (
        {},
        ["My answer is yes.", "I think: My answer is maybe."],
        ["Yes.", "My answer is perhaps."],
    ),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and *b*"],
        ["*a*", "**", "* a\n* b"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "Section 1 x Section 2 y Section 3 z"],
        ["Section 1\na", "a\nb", "Subsection 1 Subsection 2"],
    ),
    "detectable_format:json_format": (
        {},
        ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', "[]"],
        ["{a: 1}", "so: {}", "```json\nno\n```"],
    ),
    "detectable_format:title": ({}, ["<<Joy>>\ntext", "text <<a b>>"], ["Joy", "<Joy>", "<< >>", "<<>>"]),
    "combination:two_responses": (
        {},
        ["a\n******\nb", "******\na\n******\nb"],
        ["a", "a\n******\na", "a\n******\nb\n******\nc", "a\n***\nb"],
    ),
    "combination:repeat_prompt": (
        {"prompt_to_repeat": "Write a poem."},
        ["Write a poem. Roses...", "  write a POEM.\nRoses"],
        ["Roses... Write a poem.", "Write a pome."],
    ),
    "startend:end_checker": (
        {"end_phrase": "Any questions?"},
        ["So. Any questions?", 'So. "any QUESTIONS?"'],
        ["Any questions? No.", "So."],
    ),
    "startend:quotation": ({}, ['"All of it."', ' "a" '], ["All", '"a', 'a"', '"']),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["THIS IS it", "I AM"],
        ["This Is it", "ONE word"],
    ),
    "change_case:english_capital": ({}, [ENGLISH.upper()], [ENGLISH, ENGLISH.lower(), GERMAN.upper()]),
    "change_case:english_lowercase": ({}, [ENGLISH.lower()], [ENGLISH, ENGLISH.upper(), GERMAN.lower()]),
    "punctuation:no_comma": ({}, ["no comma here."], ["a, b"]),
}


def truth(*names: str) -> str:
    return json.dumps([{"instruction_id": list(names), "kwargs": [CASES[name][0] or None for name in names]}])


def test_there_are_25() -> None:
    assert len(INSTRUCTIONS) == 25 and set(CASES) == set(INSTRUCTIONS)
    assert {name for name, _ in OLD_FUNCTIONS.values()} == set(INSTRUCTIONS)


@pytest.mark.parametrize("name", CASES)
def test_instruction(name: str) -> None:
    _, followed, not_followed = CASES[name]
    for text, reward in [(t, 1.0) for t in followed] + [(t, 0.0) for t in not_followed]:
        verdict = ifeval(text, truth(name))
        assert (verdict.status, verdict.reward) == ("scored", reward), (text, verdict.detail)


def test_partial_and_all_or_nothing() -> None:
    both = truth("punctuation:no_comma", "detectable_format:title")
    assert ifeval("<<a>> b", both).reward == ifeval_strict("<<a>> b", both).reward == 1.0
    assert (ifeval("b", both).reward, ifeval_strict("b", both).reward) == (0.5, 0.0)
    assert ifeval("b", both).detail == "not followed: detectable_format:title"
    assert ifeval("", truth("punctuation:no_comma")).reward == 0.0


def test_thoughts_and_tags_are_no_part_of_the_response() -> None:
    assert ifeval("<think>a, b</think>fine", truth("punctuation:no_comma")).reward == 1.0
    assert ifeval("a, b <answer>fine</answer>", truth("punctuation:no_comma")).reward == 1.0


def test_spellings_of_the_ground_truth() -> None:
    entry = {"instruction_id": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]}
    old = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    for spelled in (entry, [entry], str([entry]), repr(entry), json.dumps(entry), [json.dumps(entry)], old):
        assert ifeval("fine", spelled).reward == 1.0


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ("text", "no instructions"),
        (None, "no instructions"),
        ([], "no instructions"),
        ({"instruction_id": [], "kwargs": []}, "as many kwargs"),
        ({"instruction_id": ["punctuation:no_comma"], "kwargs": []}, "as many kwargs"),
        ({"instruction_id": ["punctuation:no_coma"], "kwargs": [None]}, "no_coma"),
        ({"instruction_id": ["punctuation:no_comma"], "kwargs": [3]}, "no kwargs"),
        ({"instruction_id": ["punctuation:no_comma"], "kwargs": [{"x": 1}]}, "unexpected keyword"),
        ({"instruction_id": ["keywords:existence"], "kwargs": [None]}, "keywords"),
        ({"instruction_id": ["keywords:existence"], "kwargs": [{"keywords": [3]}]}, "no list of texts"),
        ({"instruction_id": ["keywords:existence"], "kwargs": [{"keywords": "apple"}]}, "no list of texts"),
        (
            {
                "instruction_id": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "rather"}],
            },
            "no relation",
        ),
    ],
)
def test_a_truth_that_means_nothing_is_unscorable(bad: object, word: str) -> None:
    verdict = ifeval("text", bad)
    assert verdict.status == "unscorable" and word in verdict.detail


@pytest.mark.parametrize(
    ("truth", "yes", "no"),
    [
        ({"func_name": "verify_keywords", "keyword_list": ["a", "b"]}, "a b", "a"),
        ({"func_name": "verify_keyword_frequency", "word": "tree", "N": 2}, "tree tree", "tree tree tree"),
        ({"func_name": "verify_letter_frequency", "letter": "q", "N": 1}, "q", "qq"),
        ({"func_name": "validate_word_constraint", "N": 10, "quantifier": "around"}, "a " * 11, "a " * 12),
        ({"func_name": "validate_word_constraint", "N": 2, "quantifier": "at most"}, "a b", "a b c"),
        ({"func_name": "validate_paragraphs", "N": 2, "first_word": "b", "i": 2}, "a\n\nb", "b\n\na"),
        ({"func_name": "validate_choice", "options": "red, blue"}, "blue", "green"),
        ({"func_name": "validate_uppercase", "N": None}, ENGLISH.upper(), ENGLISH),
        ({"func_name": "validate_no_commas"}, "a", "a,"),
    ],
)
def test_older_data(truth: dict, yes: str, no: str) -> None:
    for spelled in (truth, json.dumps(truth), repr(truth)):
        assert ifeval_old(yes, spelled).reward == 1.0
        assert ifeval_old(no, spelled).reward == 0.0


def test_older_data_that_means_nothing_is_unscorable() -> None:
    for bad in ({"func_name": "nope"}, {}, None, "x", {"func_name": "verify_keywords"}):
        assert ifeval_old("x", bad).status == "unscorable"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One", 1),
        ("One. Two! Three?", 3),
        ("Really?! Yes...", 2),
        ("e.g. this, i.e. that. Done.", 2),
        ("Mr. A. B. Cee came.", 1),
        ("At 3.5 it broke.", 1),
        ("a\nb\nc", 3),
        ("你好。再见！", 2),
        ('He said "Go." She went.', 2),
    ],
)
def test_count_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    "text", ["*" * 10**6, "<" * 10**6, "[" * 10**6, " \n" * 500_000, ". " * 500_000, "a. " * 300_000]
)
@pytest.mark.timeout(60)
def test_a_megabyte_is_no_trouble(text: str) -> None:
    for name, (arguments, _, _) in CASES.items():
        INSTRUCTIONS[name](text, **arguments)
