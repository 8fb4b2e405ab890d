"""What is said when Ray itself does not start."""

import re
from pathlib import Path

import pytest
import ray

from olmorl.contract.errors import PlacementError
from olmorl.controller.cluster import Cluster


def test_a_machine_too_busy_for_ray_is_no_bug_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own words, of ray/_private/node.py; only an overloaded machine brings them out of the real one."""

    def init(**_: object) -> None:
        raise Exception(
            "The current node timed out during startup. This could happen because some of the raylet failed"
        )

    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(PlacementError, match=re.escape("Ray did not start here")),
        Cluster(address=None, cpus=1, log_dir=tmp_path),
    ):
        pass


def test_ray_s_other_errors_are_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise RuntimeError("of another kind")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RuntimeError, match="of another kind"), Cluster(address=None, cpus=1, log_dir=tmp_path):
        pass
