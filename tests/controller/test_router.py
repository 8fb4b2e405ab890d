from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from olmorl.controller.router import Router


def _router(*workers: str) -> Router:
    router = Router()
    for worker in workers:
        router.add(worker)
    return router


def test_the_least_loaded_worker_gets_the_next_group() -> None:
    router = _router("a", "b")
    assert [router.pick(8), router.pick(2), router.pick(2)] == ["a", "b", "b"]
    router.finished("a", 8)
    assert router.pick(1) == "a"


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.integers(1, 5))
def test_load_never_differs_by_more_than_one_group(groups: list[int], num_workers: int) -> None:
    router = _router(*(f"w{i}" for i in range(num_workers)))
    load = Counter({f"w{i}": 0 for i in range(num_workers)})
    for num_samples in groups:
        load[router.pick(num_samples)] += num_samples
    assert max(load.values()) - min(load.values()) <= max(groups)


def test_without_a_worker_there_is_nobody_to_pick_and_late_reports_of_a_removed_one_do_no_harm() -> None:
    router = _router("a")
    assert router.pick(4) == "a"
    router.remove("a")
    assert router.pick(4) is None
    router.finished("a", 4)
    router.add("b")
    assert router.pick(4) == "b"
