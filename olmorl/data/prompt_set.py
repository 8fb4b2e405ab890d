"""All prompts of a run in memory: read, rendered, tokenised and length-filtered once, at the start."""

import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from olmorl.config.data_sections import SourceSection
from olmorl.contract.errors import DataError
from olmorl.data.dialect import assign_verifiers
from olmorl.data.mixture import Share, shares_per_epoch
from olmorl.data.prompt import Check, EncodedExample
from olmorl.data.source import read_source, source_name
from olmorl.data.tokenizer import PromptEncoder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptSet:
    examples: tuple[EncodedExample, ...]
    """source by source"""
    shares: tuple[Share, ...]

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def num_too_long(self) -> int:
        return sum(share.num_too_long for share in self.shares)

    @property
    def verifiers(self) -> tuple[str | None, ...]:
        """Every verifier the rows name; None among them if a row names none."""
        return tuple(dict.fromkeys(check.verifier for example in self.examples for check in example.checks))

    @property
    def environments(self) -> tuple[str, ...]:
        """Every environment the rows name."""
        return tuple(dict.fromkeys(example.environment for example in self.examples if example.environment))

    @property
    def fingerprint(self) -> str:
        """Changes with any kept prompt, their order, ground truths and mixture: a cursor is of no use then."""
        crc = 0
        for example in self.examples:
            crc = zlib.crc32(example.token_ids.data, crc)
            for check in example.checks:
                crc = zlib.crc32(repr(check.ground_truth).encode("utf-8", "surrogatepass"), crc)
        if any(share.size != share.per_epoch for share in self.shares):
            crc = zlib.crc32(repr([(share.size, share.per_epoch) for share in self.shares]).encode(), crc)
        return f"{len(self.examples)}-{crc:08x}"


def load_prompts(
    sources: Sequence[SourceSection | str],
    *,
    encoder: PromptEncoder,
    max_prompt_tokens: int,
    verifiers: Sequence[str] | None = None,
    environment: str | None = None,
    full_reward: Callable[[Sequence[Check]], float] = lambda checks: 1.0,
) -> PromptSet:
    """Read `sources` in order. Prompts longer than `max_prompt_tokens` are left out, counted and said. `verifiers` and
    `environment` take the place of what rows and sources say. `full_reward` is what a row's verifiers give at most.

    Raises DataError for what cannot be read, and when nothing is left of a source.
    """
    sections = [SourceSection(path=source) if isinstance(source, str) else source for source in sources]
    examples: list[EncodedExample] = []
    sizes: list[int] = []
    too_long: list[int] = []
    first = 0
    for section in sections:
        encoded = _encode_source(section, first=first, encoder=encoder, verifiers=verifiers, full_reward=full_reward)
        if environment is not None:
            encoded = [replace(example, environment=environment) for example in encoded]
        first += len(encoded)
        kept = _keep_short(section, encoded, max_prompt_tokens)
        sizes.append(len(kept))
        too_long.append(len(encoded) - len(kept))
        examples += kept
    shares = [
        Share(name=source_name(section), size=size, per_epoch=count, num_too_long=left_out)
        for section, size, count, left_out in zip(
            sections, sizes, shares_per_epoch(sections, sizes), too_long, strict=True
        )
    ]
    return PromptSet(tuple(examples), tuple(shares))


def check_lengths(examples: Iterable[EncodedExample], *, samples_per_prompt: int) -> None:
    """Raises DataError for a row that says how long its responses are, but not of as many as are drawn."""
    for example in examples:
        if example.lengths is not None and len(example.lengths) != samples_per_prompt:
            raise DataError(
                f"{example.place}: the row says how long {len(example.lengths)} responses are, but "
                f"{samples_per_prompt} are drawn"
            )


def _encode_source(
    source: SourceSection,
    *,
    first: int,
    encoder: PromptEncoder,
    verifiers: Sequence[str] | None,
    full_reward: Callable[[Sequence[Check]], float],
) -> list[EncodedExample]:
    places: list[str] = []
    texts: list[str] = []
    checks: list[tuple[Check, ...]] = []
    names: list[str] = []
    environments: list[str | None] = []
    lengths: list[tuple[int, ...] | None] = []
    for place, row in read_source(source):
        places.append(place)
        texts.append(encoder.render(row.prompt, place=place))
        checks.append(row.checks if verifiers is None else assign_verifiers(row.checks, verifiers, place=place))
        names.append(row.data_source)
        environments.append(row.environment)
        lengths.append(row.lengths)
    if not places:
        raise DataError(f"{source.path}: the source holds no rows")
    encoded = encoder.encode(texts)
    for place, text, token_ids in zip(places, texts, encoded, strict=True):
        if not len(token_ids):
            raise DataError(f"{place}: the tokenizer makes no token of the prompt {text!r}")
    return [
        EncodedExample(
            index=first + i,
            token_ids=token_ids,
            text=texts[i],
            checks=checks[i],
            data_source=names[i],
            place=places[i],
            environment=environments[i],
            lengths=lengths[i],
            full_reward=full_reward(checks[i]),
        )
        for i, token_ids in enumerate(encoded)
    ]


def _keep_short(
    source: SourceSection, examples: Sequence[EncodedExample], max_prompt_tokens: int
) -> list[EncodedExample]:
    kept = [example for example in examples if len(example.token_ids) <= max_prompt_tokens]
    if not kept:
        shortest = min(len(example.token_ids) for example in examples)
        raise DataError(
            f"{source.path}: all {len(examples)} prompts are longer than {max_prompt_tokens} tokens (the shortest has "
            f"{shortest}); raise rollout.max_prompt_tokens"
        )
    if len(kept) < len(examples):
        log.warning(
            "%s: %d of %d prompts are longer than %d tokens and are left out",
            source.path,
            len(examples) - len(kept),
            len(examples),
            max_prompt_tokens,
        )
    return kept
