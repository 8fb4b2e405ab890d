"""`cluster.split = "auto"`: a run takes the planner's split of the GPUs it finds, or says why it cannot."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from olmorl.cli.main import run as command
from olmorl.cli.run_checks import check_split
from olmorl.config.load import load_config
from olmorl.contract.errors import ConfigError
from olmorl.controller import placement
from olmorl.controller.placement import Node, this_machine
from olmorl.controller.run import Run
from olmorl.planner.plan import candidates
from olmorl.planner.question import question_of
from olmorl.planner.split import split

CONFIG = str(Path(__file__).parents[2] / "configs" / "gsm8k.toml")
SMALL = (
    "model.path=Qwen/Qwen3-8B",
    "rollout.max_prompt_tokens=256",
    "rollout.max_response_tokens=128",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=2",
    "data.train=some.jsonl",
)
AUTO = (*SMALL, "cluster.split=auto")


def test_a_run_takes_the_best_plan_for_the_gpus_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["train", CONFIG, *AUTO, "--dry-run", "--cluster", "2x48x4:A100"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert command(["plan", CONFIG, *SMALL, "--gpus", "8", "--device", "a100", "--json", str(tmp_path / "p.json")]) == 0
    best = json.loads((tmp_path / "p.json").read_text())["best"]
    assert printed["cluster"]["split"] == "given"
    assert printed["inference"]["workers"] * best["tensor_parallel"] == best["inference_gpus"]
    assert printed["inference"]["max_num_seqs"] == best["slots"]
    assert printed["learner"]["workers"] == best["learner_gpus"]
    assert best["inference_gpus"] + best["learner_gpus"] == 8


def test_what_the_config_says_of_memory_stays(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[inference]\nkv_cache_tokens = 9999")
    assert split(load_config(tmp_path / "run.toml", AUTO), [Node("n", 48, 8, "H100")]).inference.kv_cache_tokens == 9999


def test_only_a_worker_of_one_gpu_measures_its_memory(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    config = load_config(tmp_path / "run.toml", AUTO)
    alone = split(config, [Node(f"n{i}", 6, 1, "H100") for i in range(8)]).inference
    assert (alone.tensor_parallel, alone.kv_cache_tokens) == (1, "auto")
    several = split(config, [Node("n", 48, 8, "H100")]).inference
    assert several.tensor_parallel > 1 and several.kv_cache_tokens == several.max_num_seqs * 384


def test_the_command_that_a_plan_prints_is_one_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """With the settings it was asked with, and each role on GPUs of its own though the config has them share one."""
    asked = (*SMALL, "data.system_prompt=Show it, in [steps].", "inference.gpu_share=0.4", "learner.gpu_share=0.6")
    assert command(["plan", CONFIG, *asked, "--gpus", "4", "--device", "h200"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:3] == ["olmorl", "train", CONFIG]
    assert command([*words[1:], "--dry-run", "--cluster", "1x64x4"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["data"]["system_prompt"] == "Show it, in [steps]."
    assert printed["model"]["path"] == "Qwen/Qwen3-8B" and printed["inference"]["gpu_share"] == 1


def test_one_gpu_with_both_roles_is_planned_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each takes longer beside the other, and an engine that was slowed down before stays so."""
    found = []
    for shares in ((), ("inference.gpu_share=0.5", "learner.gpu_share=0.5")):
        asked = (
            *SMALL,
            "model.path=Qwen/Qwen3-0.6B",
            "rollout.max_response_tokens=4096",
            *shares,
            "--as-given",
            "--json",
            str(tmp_path / "p.json"),
        )
        assert command(["plan", CONFIG, *asked]) == 0
        found.append(json.loads((tmp_path / "p.json").read_text()))
    (apart, shared), printed = found, capsys.readouterr().out
    assert "on 2 h100" in printed and "on 1 h100" in printed and "one device generates and trains" in printed
    assert apart["best"]["step_seconds"] < shared["best"]["step_seconds"] < 2.5 * apart["best"]["step_seconds"]
    assert (shared["best"]["inference_gpus"], shared["best"]["learner_gpus"]) == (1, 1)
    assert shared["sensitivity"]["engine steps 10 % shorter"] > 0
    two = ("inference.workers=2", "inference.gpu_share=0.25", "learner.gpu_share=0.5", "--as-given")
    assert command(["plan", CONFIG, *SMALL, *two]) == 2
    assert "one inference worker, and here are 2" in capsys.readouterr().err


def test_a_plan_for_a_run_that_would_plan_itself_is_the_one_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", CONFIG, *AUTO, "--gpus", "4", "--device", "h200"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command([*words[1:], "--dry-run", "--cluster", "1x64x8:H100"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["cluster"]["split"] == "given"
    assert (
        printed["inference"]["workers"] * printed["inference"]["tensor_parallel"] + printed["learner"]["workers"] == 4
    )


def test_a_split_that_cannot_be_is_refused_and_one_that_hardly_fits_is_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, told in (
        (("cluster.split=auto",), "gives no split, it has one planned; leave out --as-given"),
        (("inference.tensor_parallel=3",), "tensor_parallel = 3 does not divide the heads and features of qwen3-8b"),
    ):
        assert command(["plan", CONFIG, *SMALL, *wrong, "--as-given"]) == 2
        assert told in " ".join(capsys.readouterr().err.split())
    for settings, told in (
        (("inference.kv_cache_tokens=700000", "learner.workers=4"), ["has room for 377,"]),
        (("inference.kv_cache_tokens=70000",), ["training qwen3-8b takes at least 3 h100"]),
        (("inference.kv_cache_tokens=70000", "learner.workers=4"), []),
    ):
        assert command(["plan", CONFIG, *SMALL, *settings, "--as-given", "--json", str(tmp_path / "p.json")]) == 0
        doubts, said = json.loads((tmp_path / "p.json").read_text())["doubts"], capsys.readouterr().out
        assert len(doubts) == len(told) == said.count("beware: ")
        assert all(part in doubt for part, doubt in zip(told, doubts, strict=True))


def test_no_worker_is_wider_than_a_node() -> None:
    """Qwen3 32B fills an H100 but for some thousand tokens of KV."""
    config = load_config(CONFIG, [*AUTO, "model.path=Qwen/Qwen3-32B", "rollout.max_response_tokens=32768"])
    for node_size, degrees in ((8, {2, 4}), (2, {2}), (1, set())):
        question = question_of(config, num_devices=24, device_name="h100", node_size=node_size)
        assert {tensor_parallel for _, tensor_parallel, _ in candidates(question)} == degrees
    with pytest.raises(ConfigError, match="does not fit an inference worker of 1 h100"):
        split(config, [Node(f"n{i}", 8, 1, "H100") for i in range(24)])


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([Node("n", 8)], "divides GPUs, and there are none here; set inference.workers and learner.workers"),
        ([Node("n", 8, 4, "L40S")], "a100, h100, h200, b200; here are L40S"),
        ([Node("n", 8, 4, "GH200")], "a100, h100, h200, b200; here are GH200"),
        ([Node("n", 8, 4, "GB200")], "here are GB200"),
        ([Node("n", 8, 4, "A100-40G")], "here are A100-40G"),
        ([Node("n", 8, 4)], "here are unnamed"),
        ([Node("n", 8, 4, "H100"), Node("m", 8, 4, "A100")], "here are A100, H100"),
        ([Node("n", 8, 1, "H100")], "splits at least 2"),
        ([Node("n", 8, 2, "H100")], "training it takes at least 3 and generating at least 1"),
    ],
)
def test_what_cannot_be_split_is_said(nodes: list[Node], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        split(load_config(CONFIG, AUTO), nodes)


def test_what_the_split_breaks_is_said() -> None:
    config = load_config(CONFIG, [*AUTO, "learner.shard_size=64"])
    with pytest.raises(ConfigError, match=r"learner\.shard_size = 64 does not divide learner\.workers = "):
        split(config, [Node("n", 48, 8, "H100")])


def test_doctor_says_whether_there_is_anything_to_split() -> None:
    assert check_split([Node("n", 48, 8, "H100")]).what == "placement: as the planner splits 8 h100"
    assert check_split([Node("n", 48, 8, "A100-80G")]).what == "placement: as the planner splits 8 a100"
    assert check_split([Node("n", 48)]).status == "fail"


def test_a_run_by_hand_wants_counts() -> None:
    with pytest.raises(ConfigError, match=r"olmorl\.planner\.split\.split"):
        Run(load_config(CONFIG, AUTO))
    with pytest.raises(ConfigError, match="divides whole GPUs"):
        load_config(CONFIG, [*AUTO, "inference.gpu_share=0.4", "learner.gpu_share=0.6"])


@pytest.mark.parametrize(
    ("model", "kind"), [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100"), ("Tesla V100", "V100")]
)
def test_the_driver_names_the_gpus_of_this_machine(
    model: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text(f"Model: \t\t {model}\nIRQ: 16\n")
    monkeypatch.setattr(placement, "GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (this_machine().gpus, this_machine().gpu_type) == (1, kind)
