"""The books close for any history, and any token counted twice or never is found."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.metrics.ledger import BINS, LedgerError, WasteLedger
from olmorl.metrics.names import is_declared

HISTORY = st.lists(st.tuples(st.sampled_from(BINS), st.integers(0, 1000)))


def fill(ledger: WasteLedger, history: list[tuple[str, int]]) -> int:
    for bin, tokens in history:
        ledger.add(bin, tokens)  # type: ignore[arg-type]
    return sum(tokens for bin, tokens in history if bin != "lost")


@given(HISTORY, st.integers(0, 100))
def test_books_close(history: list[tuple[str, int]], pending: int) -> None:
    ledger = WasteLedger()
    received = fill(ledger, history)
    ledger.check(received + pending, pending_tokens=pending)
    assert sum(ledger.totals().values()) - ledger.totals()["lost"] == ledger.settled_tokens == received


@given(HISTORY, st.integers(-50, 50).filter(bool))
def test_a_wrong_sum_is_found(history: list[tuple[str, int]], error: int) -> None:
    ledger = WasteLedger()
    received = fill(ledger, history)
    with pytest.raises(LedgerError, match=re.escape(f"({error:+d} missing")):
        ledger.check(received + error)


@given(HISTORY, HISTORY)
def test_drain_gives_what_came_since(first: list[tuple[str, int]], second: list[tuple[str, int]]) -> None:
    ledger = WasteLedger()
    fill(ledger, first)
    one = ledger.drain()
    fill(ledger, second)
    two = ledger.drain()
    assert {f"waste/{bin}": one[f"waste/{bin}"] + two[f"waste/{bin}"] for bin in BINS} == {
        f"waste/{bin}": tokens for bin, tokens in ledger.totals().items()
    }
    assert all(is_declared(name) for name in one)


def test_a_ledger_only_grows() -> None:
    with pytest.raises(AssertionError, match="only grows"):
        WasteLedger().add("stale", -1)
    with pytest.raises(AssertionError, match="no bin 'wasted'"):
        WasteLedger().add("wasted", 1)  # type: ignore[arg-type]
