"""The engine that generates rollouts: continuous batching over a paged KV cache, exact logprobs, live weight updates.

Public names load on first use, so that policy modules (scheduler, allocator) import without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.explain import explain_sampling
    from inference.llm import LLM
    from olmorl.contract.generation import SamplingParams

_PUBLIC = {
    "LLM": "inference.llm",
    "SamplingParams": "olmorl.contract.generation",
    "explain_sampling": "inference.explain",
}
__all__ = ["LLM", "SamplingParams", "explain_sampling"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'inference' has no attribute {name!r}")
