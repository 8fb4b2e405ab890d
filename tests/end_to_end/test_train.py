"""One short run of the quickstart, looked at from all sides; then the variants that need a run of their own."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from olmorl import Run
from olmorl.cli.main import run as cli
from olmorl.config.load import load_config
from olmorl.metrics.names import is_declared
from olmorl.metrics.rollout_log import read_rollouts
from olmorl.rewards import score

pytestmark = pytest.mark.timeout(600)  # several runs in one test, on whatever machine

STEPS = 6
CHECKPOINT_EVERY = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, command_in: Callable[[Path], Any]) -> Any:
    command = command_in(tmp_path_factory.mktemp("train"))
    out, err = command.run(
        f"run.steps={STEPS}",
        f"checkpoint.every={CHECKPOINT_EVERY}",
        "checkpoint.keep_versions=2",
        "logging.schedule=true",
        "logging.wandb=offline",
        "inference.kv_cache_tokens=112",  # holds the longest sample, but not three: some are preempted
    )
    assert "finished" in out and f"step {STEPS}/{STEPS}" in err
    assert f"a Hugging Face folder: {command.directory}/export/step_{STEPS:06d}\n" in out
    directory, steps, starting, evaluating, *_ = err.splitlines()
    assert directory == f"run directory: {command.directory}"
    assert steps == f"{STEPS} steps of 4 prompts x 4 samples, from 4,000 prompts"
    assert starting.startswith("starting 1 inference x cpu, 1 learner x cpu") and starting.endswith("logs/attempt_1")
    assert evaluating == "evaluation set heldout: 16 prompts, k = 1"
    for role, peak in command.summary()["peaks"].items():
        assert f"peak of a device of {role}: {peak}\n" in err and "(measured float32 product" in peak
    assert "Traceback" not in err and "never retrieved" not in err and "pending" not in err, err
    command.assert_nothing_left()
    return command


def test_the_run_directory_holds_what_was_promised(finished: Any, checks: Any) -> None:
    directory = finished.directory
    checks.one_row_a_step(finished, STEPS)
    config = tomllib.loads((directory / "config.toml").read_text())
    assert config["run"]["steps"] == STEPS and config["rollout"]["prompts_per_step"] == 4
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == ["latest", "step_000004", "step_000006"]
    assert (directory / "checkpoints" / "latest").resolve().name == "step_000006"
    assert all((directory / "checkpoints" / name / "COMPLETE").exists() for name in ("step_000004", "step_000006"))
    logs = sorted(p.name for p in (directory / "logs" / "attempt_1").iterdir())
    assert logs == ["inference-0.log", "learner-0.log", "schedule"]
    summary = finished.summary()
    assert (summary["exit_reason"], summary["steps"]) == ("finished", STEPS)
    assert 0 <= summary["eval_before"] <= 1 and 0 <= summary["eval_after"] <= 1
    assert summary["reward_first"] is not None and summary["tokens_per_second"] > 0


def test_metrics_go_by_their_names(finished: Any) -> None:
    first, *rows = finished.metrics()
    for row in [first, *rows]:
        assert [name for name in row if not is_declared(name)] == []
        assert row["sync/stall_seconds"] < 0.5
    for row in rows:
        for name in (
            "progress/epoch",
            "reward/mean",
            "reward/chain_sums/mean",
            "rollout/entropy",
            "off_policy/version_lag_max",
            "loss/policy",
            "optim/grad_norm",
            "throughput/trained_tokens_per_second",
            "throughput/learner_mfu",
            "time/train",
        ):
            assert name in row, (row["progress/step"], name)
        assert row["off_policy/version_lag_max"] <= 4, "beyond the window"
    assert [row["progress/step"] for row in rows if "eval/heldout/avg_at_k" in row] == [STEPS]
    assert "eval/heldout/avg_at_k" in first


def test_wandb_has_the_same_names_and_values(finished: Any, wandb_history: Any) -> None:
    """Read back from the file that wandb keeps offline; a table of samples is in the row of its evaluation."""
    history = wandb_history(finished.directory)
    assert [row["progress/step"] for row in history] == [row["_step"] for row in history] == list(range(STEPS + 1))
    table = "eval/heldout/samples/"
    assert [row["progress/step"] for row in history if f"{table}nrows" in row] == [0, STEPS]
    for ours, theirs in zip(finished.metrics(), history, strict=True):
        own = {name: value for name, value in theirs.items() if not name.startswith(("_", table))}
        assert own == ours and own.keys() == {name for name in own if is_declared(name)}


def test_engine_and_learner_hold_one_model_after_every_update(finished: Any, checks: Any) -> None:
    checks.canary(finished)


def test_every_sample_has_one_fate(finished: Any, checks: Any) -> None:
    checks.one_fate_each(finished)
    rows, waste = finished.rollouts(), finished.summary()["waste"]
    assert waste["lost"] == 0 and waste["eval"] > 0  # what is under way at the end may have drawn nothing yet
    trained = {step: sum(r.fate == "trained" for r in rows if r.step == step) for step in range(1, STEPS + 1)}
    assert set(trained.values()) == {16}


def test_rollouts_tell_how_each_sample_came_about(finished: Any) -> None:
    rows = finished.rollouts()
    for row in rows:
        assert len(row.token_ids) == len(row.logprobs) == len(row.loss_mask) > 0
        assert [start for _, start, _ in row.version_spans] == [0, *(end for *_, end in row.version_spans[:-1])]
        assert row.version_spans[-1][2] == len(row.token_ids)
        assert row.version_spans[-1][0] < row.step
        assert row.t_admitted <= row.t_first_token <= row.t_finished
        assert row.worker == "inference-0" and row.attempt == 1


def test_evaluations_are_kept_sample_by_sample(finished: Any) -> None:
    """Each with the version that answered, and so that the figures can be made again."""
    first, *_, last = finished.metrics()
    for version, metrics in ((0, first), (STEPS, last)):
        rows = read_rollouts(finished.directory / "evals" / f"step_{version:06d}.parquet")
        assert [row.prompt_id for row in rows] == [f"heldout/0_{i}" for i in range(16)]
        assert {span[0] for row in rows for span in row.version_spans} == {version}
        assert np.mean([row.reward for row in rows]) == pytest.approx(metrics["eval/heldout/avg_at_k"])
        error = np.std([row.reward for row in rows], ddof=1) / 4
        assert metrics["eval/heldout/avg_at_k_stderr"] == pytest.approx(error)
    assert finished.summary()["eval"]["heldout"]["version"] == STEPS
    assert len(list((finished.directory / "evals").iterdir())) == 2


def test_rewards_are_those_of_the_verifier(finished: Any) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(finished.directory / "export" / f"step_{STEPS:06d}")
    for row in finished.rollouts()[::7]:
        prompt = tokenizer.decode(row.prompt_token_ids, skip_special_tokens=True)
        truth = str(sum(map(int, prompt.rstrip("=").split("+"))))
        assert row.prompt is not None and row.prompt.endswith(prompt) and json.loads(row.ground_truth) == truth
        assert f"label {truth}" in row.verdict_detail or row.verdict_detail == "no number in the completion"
        assert tokenizer.decode(row.token_ids, skip_special_tokens=True) == row.text
        assert score("gsm8k", completion=row.text, ground_truth=truth).reward == row.reward


def test_the_export_loads_in_transformers_and_is_what_was_trained(finished: Any) -> None:
    """And the one in the last checkpoint: the same bits, under transformers' names."""
    folder = finished.directory / "export" / f"step_{STEPS:06d}"
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(load_config(finished.directory / "config.toml").model.path)
    moved = [not torch.equal(a, b) for a, b in zip(exported.parameters(), start.parameters(), strict=True)]
    assert all(moved), "training left a tensor as it was"
    saved = load_checkpoint(finished.directory / "checkpoints" / f"step_{STEPS:06d}" / "learner", exported)
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, saved[name]), name


def load_checkpoint(folder: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a learner's checkpoint, by their Hugging Face names."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    names = {
        name: next(key for key in stored if key.endswith(name) and "optim" not in key) for name in model.state_dict()
    }
    state = {key: torch.empty_like(model.state_dict()[name]) for name, key in names.items()}
    dcp.load(state, storage_reader=FileSystemReader(folder))
    return {name: state[key] for name, key in names.items()}


def test_what_the_engine_did_can_be_done_again(finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With the weights of each version, and evaluations between the training prompts."""
    assert cli(["replay-schedule", str(finished.directory), "--worker", "inference-0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("inference-0: identical: ") and f"{STEPS + 1} updates" in out
    assert cli(["replay-schedule", str(finished.directory), "--attempt", "2"]) == 2


def test_a_rollout_can_be_drawn_again(finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the model, the checkpoint of version 4 and the last two versions the weights are there; of 1 to 3 none."""
    kept = sorted(path.name for path in (finished.directory / "weights").iterdir())
    assert kept == [f"step_00000{version}.safetensors" for version in (5, 6)]
    rows = finished.rollouts()
    needs = {row.rollout_id: {version for _, version, _ in row.kv_events} for row in rows}
    kinds = {row.rollout_id: [kind for _, _, kind in row.kv_events] for row in rows}
    there = [row for row in rows if not needs[row.rollout_id] & {1, 2, 3}]
    across = [row for row in there if len(row.version_spans) > 1]
    assert any(4 in needs[row.rollout_id] for row in across), "the checkpoint is not read"
    across.sort(key=lambda row: 4 not in needs[row.rollout_id])
    preempted = [row for row in there if "recompute" in kinds[row.rollout_id]]
    assert across and preempted, "the run has none that lived through it"
    for row in (*across[:3], *preempted[:3], there[-1]):
        assert cli(["replay", str(finished.directory), row.rollout_id]) == 0
        out = capsys.readouterr().out
        assert f"{row.rollout_id} of step {row.step}" in out and f"identical: {len(row.token_ids)} tokens" in out, out

    for version in (0, STEPS):  # the ids are the same
        row = read_rollouts(finished.directory / "evals" / f"step_{version:06d}.parquet")[3]
        assert cli(["replay", str(finished.directory), row.rollout_id, "--step", str(version)]) == 0
        out = capsys.readouterr().out
        assert f"{row.rollout_id} of the evaluation of version {version}, 1 version" in out, out
        assert f"identical: {len(row.token_ids)} tokens" in out, out
    assert cli(["replay", str(finished.directory), row.rollout_id, "--step", "3"]) == 2
    assert f"no rollout '{row.rollout_id}' of step 3;" in capsys.readouterr().err

    gone = next(row for row in rows if 2 in {version for version, _, _ in row.version_spans})
    assert cli(["replay", str(finished.directory), gone.rollout_id]) == 2
    err = capsys.readouterr().err
    assert "no longer kept" in err and "2" in err.partition("version ")[2] and "checkpoint.keep_versions = 2" in err
    assert cli(["replay", str(finished.directory), "nobody"]) == 2
    assert "has no rollout 'nobody'" in capsys.readouterr().err


def test_the_learners_logprobs_of_what_it_trained_are_kept(finished: Any) -> None:
    """Their ratios are the ones that the step's metrics are made of."""
    metrics = {row["progress/step"]: row for row in finished.metrics()}
    for step in range(1, STEPS + 1):
        rows = [row for row in finished.rollouts() if row.step == step]
        assert all(len(row.learner_logprobs) == (len(row.token_ids) if row.fate == "trained" else 0) for row in rows)
        ratios = np.concatenate([np.exp(r.learner_logprobs - r.logprobs) for r in rows if r.fate == "trained"])
        assert ratios.mean() == pytest.approx(metrics[step]["off_policy/importance_ratio_mean"], rel=1e-4)
        assert ratios.max() == pytest.approx(metrics[step]["off_policy/importance_ratio_max"], rel=1e-4)


def test_a_plan_stands_beside_the_run(finished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own samples are what is measured, so the order of magnitude at least is known."""
    model, rows = load_config(finished.directory / "config.toml").model.path, finished.rollouts()
    prompts = sorted({(r.t_admitted, r.prompt_id) for r in rows})
    samples = [
        {
            "prompt": r.prompt_token_ids.tolist(), "tokens": r.token_ids.tolist(), "max_tokens": len(r.token_ids),
            "group": prompts.index((r.t_admitted, r.prompt_id)), "logprobs": r.logprobs.tolist(),
            "advantage": r.advantage or 0.0,
        }
        for r in rows
    ]  # fmt: skip
    (tmp_path / "load.json").write_text(json.dumps(samples))
    (tmp_path / "batch.json").write_text(json.dumps([s for r, s in zip(rows, samples, strict=True) if r.step == 4]))
    engine, learner, out = (str(tmp_path / name) for name in ("engine.json", "learner.json", "out.json"))
    load, batch = ["--workload", str(tmp_path / "load.json")], ["--batch", str(tmp_path / "batch.json")]
    slots = ["--max-num-seqs", "3", "--kv-cache-tokens", "2048"]
    assert cli(["bench", "engine", "--model", model, *load, *slots, "--threads", "1", "--json", engine]) == 0
    assert cli(["bench", "learner", "--model", model, *batch, "--steps", "2", "--threads", "1", "--json", learner]) == 0
    capsys.readouterr()
    check = ["plan", "--check", str(finished.directory)]
    assert cli(check) == 2 and "--bench and --learner-bench" in capsys.readouterr().err
    assert cli([*check, "--bench", engine, "--learner-bench", learner, "--json", out]) == 0
    assert "median error" in capsys.readouterr().out
    found = json.loads(Path(out).read_text())
    (told,) = found["runs"]
    measured, planned = told["measured"], told["planned"]
    last = finished.metrics()[4:]
    assert told["name"] == "run" and measured["steps"] == planned["steps"] == len(last) == STEPS - 3
    assert measured["step_seconds"] == pytest.approx(sum(row["time/step"] for row in last) / len(last))
    for name in ("tokens_per_second", "trained_tokens_per_second", "step_seconds", "train_seconds"):
        assert 1 / 8 < planned[name] / measured[name] < 8, name
    off = abs(planned["tokens_per_second"] / measured["tokens_per_second"] - 1)
    assert found["median_errors"]["tokens_per_second_off"] == pytest.approx(off)
    short = ["plan", "--check", str(tmp_path), "--bench", engine, "--learner-bench", learner]
    assert cli(short) == 2 and "config.toml" in capsys.readouterr().err


@pytest.mark.soak
def test_a_run_whose_engine_and_learner_disagree_does_not_train(command: Any) -> None:
    _, err = command.run("run.steps=2", "sync.parity_tolerance=1e-12", code=1)
    assert "engine and learner disagree about the raw logprobs" in err and "Likely: " in err
    assert command.metrics() == [] and command.summary()["steps"] == 0


def test_a_finished_run_is_resumed_from_its_summary(finished: Any) -> None:
    before = sorted(finished.directory.rglob("*"))
    out, err = finished.run(f"run.steps={STEPS}", f"checkpoint.every={CHECKPOINT_EVERY}", "--resume")
    assert f"eval_after {finished.summary()['eval_after']:.4g}" in re.sub(" +", " ", out)
    assert "is finished already" in err
    assert sorted(finished.directory.rglob("*")) == before, "it began another attempt"


def test_a_run_is_not_overwritten(finished: Any) -> None:
    _, err = finished.run("run.steps=3", code=2)
    assert err.count("\n") == 1 and "already holds a run; continue it with --resume" in err
    assert finished.summary()["steps"] == STEPS


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_drain_with_two_engines(command: Any, checks: Any, ranks: int) -> None:
    """No sample runs across an update; both engines work, and map the learner's weights; two ranks train what one
    would."""
    settings = ["sync.mode=drain", "sync.transport=ipc", "inference.workers=2", f"learner.workers={ranks}"]
    command.run("run.steps=3", "rollout.async_steps=1", *settings)
    command.assert_nothing_left()
    rows = command.rollouts()
    assert {len(row.version_spans) for row in rows} == {1}, "a sample ran across an update"
    assert {row.worker for row in rows} == {"inference-0", "inference-1"}
    checks.one_row_a_step(command, 3)
    checks.one_fate_each(command)
    checks.canary(command)
    assert all(row["sync/stall_seconds"] > 0 for row in command.metrics())
    exported = AutoModelForCausalLM.from_pretrained(command.directory / "export" / "step_000003")
    assert all(torch.isfinite(parameter).all() for parameter in exported.parameters())


def test_the_loop_is_a_library(tmp_path: Path, command_in: Callable[[Path], Any], checks: Any) -> None:
    command = command_in(tmp_path)
    settings = ["run.steps=2", "checkpoint.every=1", f"run.output_dir={tmp_path / 'outputs'}", "logging.console=false"]
    config = load_config(command.config, [*command.small, *settings])
    with Run(config) as run:
        run.start()
        for step in range(config.run.steps):
            batch = run.next_batch()
            assert (batch.version, len(batch.groups)) == (step, 4)
            metrics = run.train_step(batch)
            assert np.isfinite(metrics["loss/policy"]) and run.version == step + 1
            run.publish()
            run.checkpoint()
    command.directory.joinpath("checkpoints", "step_000002", "COMPLETE").read_text()
    state = json.loads((command.directory / "checkpoints" / "step_000001" / "driver.json").read_text())
    assert state["step"] == 1 and state["again"] + state["finished"]
    checks.one_row_a_step(command, 2)
    run.close()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("settings", "mean", "of_canary"),
    [
        (("inference.quantization=int8", "inference.quantize_head=true", "inference.speculative=suffix"), 0.05, 0.1),
        (("inference.quantization=int4", "inference.kv_cache_dtype=int8", "inference.speculative=suffix"), 0.1, 1.0),
    ],
    ids=["int8", "int4 and int8 KV"],
)
def test_quantised_rollouts_train(
    command: Any, checks: Any, settings: tuple[str, ...], mean: float, of_canary: float
) -> None:
    """Quantised anew at every update: what was sent is what came, and engine and learner differ by the precision.

    Guesses at the next tokens change nothing of that. `mean` is for what was sampled; the canary is prompts laid end to
    end, which no model would say, and there 4 bits may cost what the parity gate lets pass.
    """
    command.run("run.steps=3", *settings)
    checks.one_row_a_step(command, 3)
    checks.one_fate_each(command)
    for step, row in enumerate(command.metrics()):
        assert row["canary/checksum_ok"] == 1
        assert 1e-4 < row["canary/logprob_abs_diff_mean"] < of_canary, "no less than the bits cost, and no more"
        mismatches = [value for name, value in row.items() if re.fullmatch(r"age/\d+/mismatch", name)]
        assert (step == 0) == (not mismatches) and all(abs(value) < mean for value in mismatches)
    for row in command.metrics()[1:]:
        assert 0 <= row["off_policy/capped_fraction"] < 0.1 and row["throughput/inference_mbu"] > 0
    assert any(row.get("engine/draft_acceptance", 0) > 0 for row in command.metrics())
