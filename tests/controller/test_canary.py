import numpy as np

from olmorl.controller.canary import canary_sequences
from olmorl.controller.compose import Inputs


def test_rows_are_cut_from_the_prompts_laid_end_to_end() -> None:
    request = canary_sequences([np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)], count=2, length=2)
    assert request is not None
    assert [row.tolist() for row in request.sequences] == [[1, 2], [3, 4]]


def test_too_few_tokens_are_repeated() -> None:
    request = canary_sequences([np.array([1, 2, 3], np.int32)], count=2, length=4)
    assert request is not None
    assert [row.tolist() for row in request.sequences] == [[1, 2, 3, 1], [2, 3, 1, 2]]
    assert all(row.dtype == np.int32 and row.flags.c_contiguous for row in request.sequences)


def test_none_when_off() -> None:
    assert canary_sequences([np.array([1], np.int32)], count=0, length=4) is None


def test_a_run_has_as_many_as_its_config_says(inputs: Inputs) -> None:
    assert inputs.canary is not None
    assert {row.shape for row in inputs.canary.sequences} == {(32,)} and len(inputs.canary.sequences) == 4
