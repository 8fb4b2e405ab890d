"""What a run holds for certain is compared with the GPUs it is to have, and the verdict comes first."""

import re
from pathlib import Path

import pytest

from olmorl.cli.main import run
from olmorl.config.load import load_config
from olmorl.controller.placement import Node, plan_placement
from olmorl.planner.memory import Holding, holdings

CONFIGS = Path(__file__).parents[2] / "configs"
QWEN = CONFIGS / "qwen3_8b_8gpus.toml"
PARAMETERS = 8.19e9  # of Qwen3-8B, by its name 8.2 B
KV = 2 * 36 * 8 * 128 * 2  # bytes of a token


def held(path: Path, *overrides: str, kind: str | None = "H100") -> list[Holding]:
    config, nodes = load_config(path, overrides), [Node("n", 96, 8, kind)]
    return holdings(config, plan_placement(config, nodes), nodes)


def test_bytes_are_those_of_the_model() -> None:
    engine, learner = held(QWEN)
    assert list(engine.parts.values()) == [pytest.approx(2 * PARAMETERS, rel=0.01), 262_144 * KV]
    assert learner.total == pytest.approx(16 * PARAMETERS / 4, rel=0.01) and learner.room == 80e9
    shards, _ = held(QWEN, "inference.tensor_parallel=2", "inference.workers=2")
    assert shards.total == pytest.approx(engine.total / 2)
    assert [one.room for one in held(CONFIGS / "math_1gpu.toml")] == [0.45 * 80e9, 0.55 * 80e9]
    small, _ = held(QWEN, "inference.quantization=int8", "inference.kv_cache_tokens=auto")
    assert small.parts["weights"] < 0.7 * engine.parts["weights"]
    assert small.parts["KV for the longest sequence"] == load_config(QWEN).max_model_tokens * KV


def test_sliding_layers_hold_their_window() -> None:
    """Of OLMo 3 a quarter of the layers see everything."""
    [engine, _] = held(
        CONFIGS / "olmo3_7b_think.toml", "inference.kv_cache_tokens=1000000", "inference.max_num_seqs=10"
    )
    a_token = 2 * 32 * 128 * 2
    assert engine.total - engine.parts["weights"] == 1_000_000 * 8 * a_token + 10 * 4096 * 24 * a_token


def test_a_kind_that_is_not_known_is_not_judged() -> None:
    assert held(QWEN, kind="TPU") == held(QWEN, kind=None) == []
    assert held(CONFIGS / "quickstart.toml", "inference.device=cpu", "learner.device=cpu") == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_fits_where_it_says(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"--cluster (\d+x\d+x\d+)", path.read_text())
    assert found
    assert run(["train", str(path), "--dry-run", "--cluster", f"{found[1]}:H100"]) == 0
    first, placement, *more = capsys.readouterr().out.splitlines()
    assert first == f"# it fits {found[1]}:H100" and placement.startswith("# placement: ")
    has_gpus = not found[1].endswith("x0")
    assert sum(line.startswith("# memory: ") and "H100" in line for line in more) == 2 * has_gpus


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learner.workers=1", r"holds 131 GB of .*, of 80 GB \(H100\): 51 GB too much; raise learner.workers to 2 or"),
        ("learner.shard_size=1", r"raise learner.shard_size to 2 or more"),
        ("inference.kv_cache_tokens=500000", r"16.4 GB of weights \+ 73.7 GB of KV .*lower inference.kv_cache_tokens"),
        ("model.path=qwen3-32b", r"a learner holds 131 GB"),
    ],
)  # fmt: skip
def test_what_is_too_large_is_said_at_once(override: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(QWEN), override, "--dry-run", "--cluster", "1x96x8:H100"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: it does not fit 1x96x8:H100: ") and re.search(says, err), err


def test_what_is_not_looked_at_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["train", str(QWEN), "--dry-run", "--cluster", "1x96x8"]) == 0
    assert "# memory: not looked at: no GPU of a kind that is known" in capsys.readouterr().out
    assert run(["train", str(QWEN), "model.path=nobody/nothing", "--dry-run", "--cluster", "1x96x8:H100"]) == 0
    assert "# memory: not looked at: model 'nobody/nothing' is no folder" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(["train", str(QWEN), "inference.device=cuda", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("# it does not fit this machine: this run needs ")
