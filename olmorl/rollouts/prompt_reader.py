"""Prompts of a source one after the other, encoded some at a time: memory does not grow with the source."""

import gzip
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from olmorl.config.data_sections import PROCEDURAL, SourceSection
from olmorl.contract.errors import ConfigError, DataError
from olmorl.data.dialect import Example, assign_verifiers
from olmorl.data.prompt import Check, Prompt
from olmorl.data.source import read_source
from olmorl.data.tokenizer import PromptEncoder

CHUNK = 256  # prompts encoded together

FullReward = Callable[[Sequence[Check]], float]


class PromptReader:
    """A prompt's index is its row, whatever is left out; its epoch is 0."""

    def __init__(
        self,
        source: SourceSection,
        *,
        encoder: PromptEncoder,
        max_prompt_tokens: int,
        verifiers: Sequence[str] | None,
        scored: bool,
        full_reward: FullReward = lambda checks: 1.0,
    ) -> None:
        """`verifiers` take the place of what rows name. Without `scored` rows need no answers. `full_reward` is what a
        row's verifiers give at most."""
        self._source = source
        self._encoder = encoder
        self._max_tokens = max_prompt_tokens
        self._verifiers = verifiers
        self._scored = scored
        self._full_reward = full_reward
        self.num_read = 0
        self.num_too_long = 0

    def __iter__(self) -> Iterator[Prompt]:
        """Raises DataError at the row at fault."""
        rows = read_source(self._source, needs_answer=self._scored)
        while chunk := list(itertools.islice(rows, CHUNK)):
            yield from self._encode(chunk)
        if not self.num_read:
            raise DataError(f"{self._source.path}: the source holds no rows")

    def _encode(self, chunk: list[tuple[str, Example]]) -> Iterator[Prompt]:
        texts = [self._encoder.render(example.prompt, place=place) for place, example in chunk]
        for (place, example), text, token_ids in zip(chunk, texts, self._encoder.encode(texts), strict=True):
            index = self.num_read
            self.num_read += 1
            if not len(token_ids):
                raise DataError(f"{place}: the tokenizer makes no token of the prompt {text!r}")
            if len(token_ids) > self._max_tokens:
                self.num_too_long += 1
                continue
            checks = example.checks
            if self._verifiers is not None:
                checks = assign_verifiers(checks, self._verifiers, place=place)
            yield Prompt(
                index=index,
                token_ids=token_ids,
                text=text,
                checks=checks,
                data_source=example.data_source,
                epoch=0,
                position=index,
                full_reward=self._full_reward(checks),
            )


def count_rows(source: SourceSection) -> int | None:
    """How many prompts there will be, where that is to be had at once; None where it is not."""
    path = Path(source.path)
    rows: int | None = None
    if path.is_file() and path.name.endswith((".jsonl", ".jsonl.gz")):
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            rows = sum(1 for line in file if line.strip())
    elif path.is_file() and path.suffix == ".parquet":
        rows = pq.read_metadata(path).num_rows
    if source.limit is not None:
        return source.limit if rows is None else min(rows, source.limit)
    return rows


def named_verifiers(source: SourceSection) -> Iterator[str | None]:
    """Of every row: one pass over the source."""
    for _, example in read_source(source):
        yield from (check.verifier for check in example.checks)


def full_rewards(
    source: SourceSection, *, verifiers: Sequence[str] | None, full_reward: FullReward
) -> Callable[[int], float]:
    """Of the prompt of a row, by its number. Where rows name their verifiers (`verifiers` is None) the source is read
    as far as is asked for, also beyond its limit, which may have been larger when the row was answered."""
    if verifiers is not None:
        constant = full_reward([Check(verifier, None) for verifier in verifiers])
        return lambda _row: constant
    limit = source.limit if source.path.startswith(PROCEDURAL) else None
    examples = read_source(source.model_copy(update={"limit": limit}))
    known = array("d")

    def of_row(row: int) -> float:
        while len(known) <= row:
            found = next(examples, None)
            if found is None:
                raise ConfigError(f"cannot resume: the output has samples of prompt {row}, which {source.path} lacks")
            known.append(full_reward(found[1].checks))
        return known[row]

    return of_row
