"""A micro-batch on its device, with the trained tokens picked out of it.

Shapes: N tokens of a micro-batch, R trained tokens of it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.attention import DocumentLayout
from learner.model import PolicyModel
from olmorl.contract.training import MicroBatch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    token_ids_N: Tensor
    position_ids_N: Tensor
    layout: DocumentLayout
    scored_R: Tensor
    context_R: Tensor
    """the token that each trained one is predicted from: the one before it, or the last of the prompt"""
    sample_R: Tensor
    behaviour_logprobs_R: Tensor
    advantages_R: Tensor
    versions_R: Tensor
    spans: tuple[tuple[int, int], ...]
    """(tokens of the parent, own tokens) of each document; none for an empty micro-batch, whose token is nobody's"""

    @classmethod
    def of(cls, micro: MicroBatch, *, device: torch.device) -> "DeviceBatch":
        """An empty micro-batch becomes one token that is not trained: the collectives need a forward to run in."""
        empty = len(micro.token_ids) == 0
        token_ids = np.zeros(1, np.int64) if empty else micro.token_ids.astype(np.int64)
        position_ids = np.zeros(1, np.int64) if empty else micro.position_ids.astype(np.int64)
        scored = np.flatnonzero(micro.loss_mask)
        sample = np.searchsorted(micro.document_starts, scored, side="right") - 1
        starts, parents = micro.document_starts, micro.parents
        context = np.where(scored == starts[sample], starts[parents[sample] + 1], scored).astype(np.int64) - 1
        layout = DocumentLayout.from_starts(
            np.array([0, 1]) if empty else starts, parents=None if empty else parents, device=device
        )

        def send(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            token_ids_N=send(token_ids),
            position_ids_N=send(position_ids),
            layout=layout,
            scored_R=send(scored),
            context_R=send(context),
            sample_R=send(sample),
            behaviour_logprobs_R=send(micro.behaviour_logprobs[scored]),
            advantages_R=send(micro.advantages[scored]),
            versions_R=send(micro.token_versions[scored]),
            spans=() if empty else layout.spans,
        )

    def logprobs(self, policy: PolicyModel, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Of the trained tokens, and the entropy at each."""
        return policy(
            self.token_ids_N,
            self.position_ids_N,
            self.layout,
            scored_R=self.scored_R,
            context_R=self.context_R,
            temperature=temperature,
        )
