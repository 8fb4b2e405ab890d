"""Who gets a draft, and how long: what the engine asks for before a step, and tells after it.

Few live samples leave a device waiting for memory, and judging a few tokens more costs little. So drafts fill a step up
to the number of tokens that costs about what one costs, and where as many samples run, there are none. This class
shares that room out; where a draft comes from is its subclasses' matter, and this one has none. No torch here.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from inference.request import Request, Sequence

if TYPE_CHECKING:
    from inference.sampler import SamplingTable
    from inference.scheduler import StepPlan
    from inference.step_batch import BlockTable


class Speculation:
    def __init__(self, *, max_draft: int = 0, step_tokens: int = 0) -> None:
        """`max_draft`: tokens guessed for one sample, 0 for none. `step_tokens`: what a step may grow to by them."""
        self.max_draft = max_draft
        self.step_tokens = step_tokens

    def applies(self, num_running: int) -> bool:
        """Whether the next step may have drafts, for which the tokens of the last one must be known."""
        return self.max_draft > 0 and num_running < self.step_tokens

    def propose(self, running: list[Sequence]) -> None:
        """A draft for each that has nothing to compute but the token it drew last; what one leaves, others may use."""
        if not self.applies(len(running)):
            return
        spare = self.step_tokens - len(running)
        for left, sequence in zip(range(len(running), 0, -1), running, strict=True):
            decodes = sequence.num_output > 0 and len(sequence.token_ids) == sequence.num_computed + 1
            ahead = sequence.max_tokens - sequence.num_tokens - 1  # one more is drawn behind the draft
            most = min(self.max_draft, ahead, spare // left)
            if sequence.drafting is not None and decodes and not sequence.in_flight and most > 0:
                sequence.draft = self.draft(sequence, most)
                spare -= len(sequence.draft)

    def open(self, request: Request) -> None:
        """`request` joins the engine; only what is opened gets drafts."""

    def close(self, request: Request) -> None:
        """All samples of `request`, which was opened, are finished; whoever keeps them keeps nothing else."""
        for sequence in request.sequences:
            sequence.drafting = None

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        """At most `most` tokens, or as many zeros that `complete` replaces."""
        raise NotImplementedError

    def complete(self, plan: "StepPlan", table: "BlockTable", sampling: "SamplingTable") -> None:
        """The step is planned, its blocks are there: whatever a draft still needs."""

    def update_weights(self, named: Iterable[tuple[str, Any]]) -> None:
        """Of a draft model, in place. Raises ValueError where there is none."""
        raise ValueError("there is no draft model whose weights could be updated; see speculative = 'model'")

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """So many tokens of its draft were right; `sequence` has them already."""
        raise NotImplementedError
