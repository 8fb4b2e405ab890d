"""All prompts of a run in memory: read, rendered, tokenised and length-filtered once, at the start."""

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from olmorl.contract.errors import DataError
from olmorl.data.dialect import Example, read_example
from olmorl.data.prompt import EncodedExample
from olmorl.data.rows import read_rows
from olmorl.data.tokenizer import PromptEncoder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptSet:
    examples: tuple[EncodedExample, ...]
    num_too_long: int
    """rows left out because they exceed the prompt limit"""

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def verifiers(self) -> tuple[str | None, ...]:
        """Every verifier the rows name; None among them if a row names none."""
        return tuple(dict.fromkeys(example.verifier for example in self.examples))

    @property
    def fingerprint(self) -> str:
        """Changes when a kept prompt, its order or its ground truth changes: a cursor is of no use then."""
        crc = 0
        for example in self.examples:
            crc = zlib.crc32(example.token_ids.data, crc)
            crc = zlib.crc32(repr(example.ground_truth).encode(), crc)
        return f"{len(self.examples)}-{crc:08x}"


def load_prompts(files: Sequence[str], *, encoder: PromptEncoder, max_prompt_tokens: int) -> PromptSet:
    """Read `files` in order. Prompts longer than `max_prompt_tokens` are left out, counted and said.

    Raises DataError for what cannot be read, and when nothing is left.
    """
    rows: list[Example] = []
    places: list[str] = []
    texts: list[str] = []
    for file in files:
        for place, row in read_rows(file):
            example = read_example(row, place=place, file=file)
            rows.append(example)
            places.append(place)
            texts.append(encoder.render(example.prompt, place=place))
    examples = tuple(
        EncodedExample(
            index=index,
            token_ids=token_ids,
            text=text,
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            verifier=row.verifier,
        )
        for index, (row, text, token_ids) in enumerate(zip(rows, texts, encoder.encode(texts), strict=True))
    )
    for place, encoded in zip(places, examples, strict=True):
        if not len(encoded.token_ids):
            raise DataError(f"{place}: the tokenizer makes no token of the prompt {encoded.text!r}")
    kept = tuple(example for example in examples if len(example.token_ids) <= max_prompt_tokens)
    names = ", ".join(files)
    if not kept:
        shortest = min(len(example.token_ids) for example in examples)
        raise DataError(
            f"{names}: all {len(examples)} prompts are longer than {max_prompt_tokens} tokens (the shortest has "
            f"{shortest}); raise rollout.max_prompt_tokens"
        )
    if len(kept) < len(examples):
        log.warning(
            "%s: %d of %d prompts are longer than %d tokens and are left out",
            names,
            len(examples) - len(kept),
            len(examples),
            max_prompt_tokens,
        )
    return PromptSet(kept, len(examples) - len(kept))
