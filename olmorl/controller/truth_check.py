"""Can every prompt's ground truth be judged? Asked before anything expensive starts.

Each ground truth is shown to its verifier with an empty completion: a verifier that calls it unscorable would do so for
every completion. Nothing else is read from the verdict, for an empty completion may well be wrong, or too little for a
verifier of the user's.
"""

import asyncio
import logging
from collections.abc import Sequence

from olmorl.contract.errors import DataError
from olmorl.data.prompt import EncodedExample
from olmorl.rewards.pool import VerifierPool
from olmorl.rewards.verdict import VerifierJob

log = logging.getLogger(__name__)

SECONDS = 20.0
"""for the check in all; what is not checked by then is told of when a verdict on it comes"""
BATCH = 512  # ground truths asked about at once
SHOWN = 3


async def check_truths(
    pool: VerifierPool, examples: Sequence[EncodedExample], *, remap: dict[str, str], seconds: float = SECONDS
) -> None:
    """Raises DataError that names the first bad rows, their source lines, and what to do. A verifier that takes too
    long for all of them is asked about the first of each source."""
    rows = [(example, i) for example in _by_turns(examples) for i in range(len(example.checks))]
    checked = 0
    bad: list[tuple[EncodedExample, str, str]] = []

    async def check(example: EncodedExample, i: int) -> None:
        nonlocal checked
        job = _job(example, i, remap)
        [verdict] = await pool.score([job])
        checked += 1
        if verdict.status == "unscorable":
            bad.append((example, job.verifier, verdict.detail))

    try:
        async with asyncio.timeout(seconds):
            for start in range(0, len(rows), BATCH):
                await asyncio.gather(*(check(*row) for row in rows[start : start + BATCH]))
    except TimeoutError:
        log.warning(
            "checked %d of %d ground truths in %g s; the rest is judged as it comes", checked, len(rows), seconds
        )
    if bad:
        raise DataError(_describe(bad, checked))


def _by_turns(examples: Sequence[EncodedExample]) -> list[EncodedExample]:
    """The first row of each source, then the second, and so on."""
    counts: dict[str, int] = {}
    turns = []
    for example in examples:
        turns.append(counts.get(example.data_source, 0))
        counts[example.data_source] = turns[-1] + 1
    return [examples[i] for i in sorted(range(len(examples)), key=turns.__getitem__)]


def _job(example: EncodedExample, check: int, remap: dict[str, str]) -> VerifierJob:
    verifier, truth = example.checks[check]
    assert verifier is not None, f"{example.place} names no verifier"
    name = remap.get(verifier, verifier)
    return VerifierJob(verifier=name, completion="", ground_truth=truth, prompt=example.text, num_tokens=0)


def _describe(bad: Sequence[tuple[EncodedExample, str, str]], checked: int) -> str:
    lines = [f"{example.place}: verifier {name!r}: {detail}" for example, name, detail in bad[:SHOWN]]
    if len(bad) > SHOWN:
        lines.append(f"and {len(bad) - SHOWN:,} more")
    return "\n".join(
        [
            f"{len(bad):,} of {checked:,} ground truths cannot be judged by their verifier:",
            *lines,
            "Mend or remove these rows, or name another verifier: reward.verifier, or `verifier` of the data source",
        ]
    )
