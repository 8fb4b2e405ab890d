"""What a run says of where it begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from olmorl.controller.announce import announce
from olmorl.controller.compose import Inputs
from olmorl.controller.run_directory import RunDirectory


@pytest.mark.parametrize(
    ("attempt", "resumed_from", "said"),
    [
        (1, "", "prompts\n"),
        (2, "step_000020", "prompts, going on from step_000020\n"),
        (2, "", "prompts, from the start: attempt 1 left no complete checkpoint\n"),
    ],
)
def test_where_it_begins(
    quickstart_config: Callable[..., Any],
    inputs: Inputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    attempt: int,
    resumed_from: str,
    said: str,
) -> None:
    directory = RunDirectory(tmp_path)
    announce(quickstart_config(), inputs, directory=directory, where="here", attempt=attempt, resumed_from=resumed_from)
    assert said in capsys.readouterr().err
