"""Where every generated token ended, so that nothing is wasted unseen.

Each token that the driver received ends in exactly one bin; what engines counted and nobody received is `lost`, and
what an attempt received beyond the checkpoint that the next one began with is `rolled_back`. The sums must close, and
`check` says by how much they do not.
"""

from collections.abc import Mapping
from typing import Literal, get_args

Bin = Literal[
    "trained", "zero_variance", "surplus", "stale", "truncated", "aborted", "eval", "error", "rolled_back", "lost"
]
BINS: tuple[Bin, ...] = get_args(Bin)


class LedgerError(RuntimeError):
    """Tokens were counted twice or not at all: a bug in the run, never in its input."""


class WasteLedger:
    """The books of a run along its surviving checkpoints, in tokens; an attempt begins with those of its checkpoint."""

    def __init__(self, before: Mapping[Bin, int] | None = None) -> None:
        self._totals: dict[Bin, int] = dict.fromkeys(BINS, 0) | dict(before or {})
        self._drained = dict(self._totals)

    def add(self, bin: Bin, tokens: int) -> None:
        assert bin in self._totals, f"no bin {bin!r}; there are {', '.join(BINS)}"
        assert tokens >= 0, f"{tokens} tokens for {bin}: a ledger only grows"
        self._totals[bin] += tokens

    def totals(self) -> dict[Bin, int]:
        return dict(self._totals)

    @property
    def settled_tokens(self) -> int:
        """Received tokens that have found their bin."""
        return sum(tokens for bin, tokens in self._totals.items() if bin != "lost")

    def drain(self) -> dict[str, float]:
        """`waste/<bin>`: tokens added since the last drain."""
        step = {f"waste/{bin}": float(self._totals[bin] - self._drained[bin]) for bin in BINS}
        self._drained = dict(self._totals)
        return step

    def check(self, received_tokens: int, *, pending_tokens: int = 0) -> None:
        """Raise unless received = settled + pending (received, but their group's fate is still open)."""
        accounted = self.settled_tokens + pending_tokens
        if accounted != received_tokens:
            books = ", ".join(f"{bin} {tokens}" for bin, tokens in self._totals.items() if tokens)
            raise LedgerError(
                f"the waste ledger does not close: {received_tokens} tokens received, {accounted} accounted for "
                f"({received_tokens - accounted:+d} missing; {books or 'all bins empty'}; pending {pending_tokens})"
            )
