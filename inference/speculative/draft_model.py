"""Drafts by a small model of the same vocabulary, which draws as the large one will: with the same rules and noise.

With one noise for both, the two draws are equal with sum over x of 1 / (sum over y of max(p(y)/p(x), q(y)/q(x))), which
is 1 where q = p and nearly the sum of min(p, q) elsewhere; what the large model draws does not depend on it.

Keys and values of the draft model lie under the block numbers of the large one's, in pools of its own: prefixes that
are shared or copied need nothing more. How many tokens of a sample they hold is counted apart, from the moment it
enters the batch, for nobody drafts while the batch is full. Writing into a shared block is no fault here: what stands
there is a function of the same tokens.

Suffixes: T tokens, R rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from inference.gpu_sampling import new_gpu_sampler
from inference.model.decoder import Decoder
from inference.request import Request, Sequence
from inference.runner import Runner, RunnerConfig
from inference.sampler import SamplingTable, sample
from inference.scheduler import StepPlan
from inference.speculative.acceptance import Acceptance
from inference.speculative.speculation import Speculation
from inference.staged_update import stage_tensors
from inference.stats import CostModel, EngineStats
from inference.step_batch import BlockTable, make_batch

_LEAST = 0.4
"""a token that is less likely to be reached and right is not worth a step of the draft model"""
Chunk = tuple[Sequence, int, int]
"""a sequence, its first token to compute, and how many"""


@dataclass(slots=True)
class _Drafting:
    """What is known of one sample."""

    acceptance: Acceptance = field(default_factory=lambda: Acceptance(least=_LEAST))
    num_computed: int = 0
    """leading tokens whose keys and values the draft model has in the sample's blocks"""


class DraftModel(Speculation):
    def __init__(
        self,
        decoder: Decoder,
        runner: RunnerConfig,
        *,
        max_draft: int,
        step_tokens: int,
        max_tokens_per_step: int,
        costs: CostModel,
        totals: EngineStats,
    ) -> None:
        """What the draft model computes is added to `totals`, by its `costs`."""
        super().__init__(max_draft=max_draft, step_tokens=step_tokens)
        self.decoder = decoder
        self._runner = Runner(decoder, runner)
        self._gpu_sampler = new_gpu_sampler(decoder)
        self._block_size = runner.block_size
        self._max_tokens = max_tokens_per_step
        self._costs = costs
        self._totals = totals

    @torch.inference_mode()
    def update_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """All or nothing, between two steps; WeightUpdateError names what is wrong. Keys and values are kept: they cost
        guesses at worst."""
        staged = stage_tensors(named, self.decoder.specs, device=self.decoder.device)
        for name, tensor in self.decoder.tensors.items():
            tensor.copy_(staged.tensors[name])

    def open(self, request: Request) -> None:
        for sequence in request.sequences:
            sequence.drafting = _Drafting()

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        drafting: _Drafting = sequence.drafting
        return [0] * drafting.acceptance.length(0, most)

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        drafting: _Drafting = sequence.drafting
        drafting.acceptance.observe(0, drafted, accepted)
        drafting.num_computed = min(drafting.num_computed, len(sequence.token_ids) - 1)

    def complete(self, plan: StepPlan, table: BlockTable, sampling: SamplingTable) -> None:
        """Draws the drafts, a token of each at a time."""
        self._runner.copy_blocks(plan.copies, [])
        for sequence in plan.entered:
            if sequence.drafting is not None:
                sequence.drafting.num_computed = 0
        lengths = {id(s): len(s.draft) for s, _ in plan.chunks if s.draft}
        drafting = [s for s, _ in plan.chunks if s.draft]
        for sequence in drafting:
            sequence.draft = []
        if drafting:
            self._catch_up(drafting, table)
        while drafting:
            chunks = [(s, s.drafting.num_computed, _missing(s)) for s in drafting]
            hidden_TM = self._run(chunks, table)
            ends, end = [], 0
            for _, _, count in chunks:
                end += count
                ends.append(end - 1)
            logits_RV = self._runner.logits(hidden_TM, ends, [])
            self._totals.spend(self._costs.head(len(ends)))
            batch = sampling.batch(drafting, behind_drafts=True)
            drawn = sample(logits_RV, batch, self.decoder.team, self._gpu_sampler)
            for sequence, token in zip(drafting, drawn.token_ids_R.tolist(), strict=True):
                sequence.draft.append(token)
            drafting = [s for s in drafting if len(s.draft) < lengths[id(s)]]

    def _catch_up(self, sequences: list[Sequence], table: BlockTable) -> None:
        """All but the last token of each, piece by piece, where they are more than one step may compute."""
        if sum(map(_missing, sequences)) <= self._max_tokens:
            return
        for sequence in sequences:
            while (missing := _missing(sequence) - 1) > 0:
                self._run([(sequence, sequence.drafting.num_computed, min(missing, self._max_tokens))], table)

    def _run(self, chunks: list[Chunk], table: BlockTable) -> torch.Tensor:
        """[T, M], and what the chunks computed is counted as there."""
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        ends: list[int] = []
        for sequence, start, count in chunks:
            ahead = start - len(sequence.token_ids)
            known = sequence.token_ids[start : start + count] if ahead < 0 else sequence.draft[ahead : ahead + count]
            tokens += known
            positions += range(start, start + count)
            rows += [sequence.row] * count
            ends.append(len(tokens))
            sequence.drafting.num_computed += count
        batch = make_batch(tokens, positions, rows, ends, table.table_RW, block_size=self._block_size)
        self._totals.spend(self._costs.body(batch))
        return self._runner.run(batch)


def _missing(sequence: Sequence) -> int:
    drafting: _Drafting = sequence.drafting
    return len(sequence.token_ids) + len(sequence.draft) - drafting.num_computed
