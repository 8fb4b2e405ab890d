"""Scoring, checkpoints and export of one rank."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from learner.checkpoint import export_hugging_face
from learner.pack import pack
from learner.trainer import Trainer, pick_device
from olmorl.contract.errors import ConfigError, WorkerError
from olmorl.contract.training import LearnerConfig, RankBatch, ScoreRequest, TrainSample

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_rank")


def batch_of(samples: list[TrainSample], version: int) -> RankBatch:
    return pack(samples, version=version, num_ranks=1, tokens_per_micro_batch=64)[0]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().full_tensor() for n, p in trainer.policy.hugging_face_parameters().items()}


def transformers_scores(folder: str, sequences: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    scores = []
    for sequence in sequences:
        tokens = torch.from_numpy(sequence.astype(np.int64))
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        scores.append(logprobs.gather(-1, tokens[1:, None])[:, 0].numpy())
    return scores


def test_scores_are_raw_logprobs_in_any_run_of_sequences(
    config: LearnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    sequences = tuple(rng.integers(3, 23, n).astype(np.int32) for n in (2, 30, 9, 2, 45))
    trainer = Trainer(replace(config, temperature=0.5), device=CPU)
    expected = transformers_scores(config.model, sequences)
    for limit in (1, 40, 8192):
        monkeypatch.setattr("learner.trainer.SCORED_TOKENS", limit)
        scores = trainer.score(ScoreRequest(sequences=sequences))
        assert [len(s) for s in scores] == [len(s) - 1 for s in sequences]
        np.testing.assert_allclose(np.concatenate(scores), np.concatenate(expected), atol=1e-4)


def test_scoring_leaves_no_whole_and_no_old_weights_behind(
    config: LearnerConfig, samples: list[TrainSample], tmp_path: Path
) -> None:
    request = ScoreRequest(sequences=(np.arange(3, 20, dtype=np.int32),))
    trainer = Trainer(config, device=CPU)
    start = trainer.score(request)[0]
    assert all(isinstance(parameter, DTensor) for parameter in trainer.policy.parameters())
    trainer.save(str(tmp_path / "start"))
    trainer.finish_save()
    trainer.train_step(batch_of(samples, 0))
    assert np.abs(trainer.score(request)[0] - start).max() > 1e-4
    trainer.load(str(tmp_path / "start"))
    np.testing.assert_array_equal(trainer.score(request)[0], start)


def test_a_resumed_run_continues_bit_for_bit(config: LearnerConfig, samples: list[TrainSample], tmp_path: Path) -> None:
    config = replace(config, schedule="cosine", total_steps=6, warmup_steps=2, eps=1e-8, lr=1e-3)
    whole = Trainer(config, device=CPU)
    for version in range(2):
        whole.train_step(batch_of(samples, version))
    whole.save(str(tmp_path / "checkpoint"))
    tail = [whole.train_step(batch_of(samples, version)).metrics for version in (2, 3)]

    whole.finish_save()  # only now: the copy was taken before the steps above

    resumed = Trainer(config, device=CPU)
    assert resumed.load(str(tmp_path / "checkpoint")) == 2
    assert [resumed.train_step(batch_of(samples, version)).metrics for version in (2, 3)] == tail
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


def test_a_folder_that_is_no_checkpoint_is_refused(config: LearnerConfig, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="not a whole learner checkpoint"):
        Trainer(config, device=CPU).load(str(tmp_path))


@pytest.mark.parametrize("cut", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("left", [None, 0, 1000])
def test_a_checkpoint_that_was_cut_short_is_named(
    config: LearnerConfig, tmp_path: Path, cut: str, left: int | None
) -> None:
    trainer = Trainer(config, device=CPU)
    trainer.save(str(tmp_path / "learner"))
    trainer.finish_save()
    file = tmp_path / "learner" / cut
    content = file.read_bytes()
    file.unlink()
    if left is not None:
        file.write_bytes(content[:left])
    with pytest.raises(WorkerError, match=r"learner.* no .metadata|learner cannot be read.* the checkpoint before"):
        trainer.load(str(tmp_path / "learner"))


@pytest.mark.parametrize("family", ["olmo2", "llama_tied", "olmo3"])
def test_the_export_loads_in_transformers_and_says_the_same(
    config: LearnerConfig,
    samples: list[TrainSample],
    model_folder: Callable[[str], str],
    tmp_path: Path,
    family: str,
) -> None:
    trainer = Trainer(replace(config, model=model_folder(family)), device=CPU)
    trainer.train_step(batch_of(samples, 0))
    target = tmp_path / "export" / "step_000001"
    trainer.export(str(target))
    trainer.export(str(target))  # again: replaces the folder as a whole

    request = ScoreRequest(sequences=(np.arange(3, 20, dtype=np.int32),))
    np.testing.assert_allclose(
        trainer.score(request)[0], transformers_scores(str(target), request.sequences)[0], atol=1e-5
    )
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (target / name).read_bytes() == (Path(model_folder(family)) / name).read_bytes()
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_large_model_is_exported_in_shards(config: LearnerConfig, tmp_path: Path) -> None:
    trainer = Trainer(config, device=CPU)
    target = tmp_path / "shards"
    export_hugging_face(trainer.policy, target, source=config.model, dtype="float32", max_shard_bytes=20_000)
    shards = {path.name for path in target.glob("*.safetensors")}
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(shards) > 2 and set(index["weight_map"].values()) == shards
    request = ScoreRequest(sequences=(np.arange(3, 20, dtype=np.int32),))
    scores = transformers_scores(str(target), request.sequences)
    np.testing.assert_allclose(trainer.score(request)[0], scores[0], atol=1e-5)


def test_a_failed_save_is_told_when_it_is_waited_for(
    config: LearnerConfig, samples: list[TrainSample], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    trainer = Trainer(config, device=CPU)
    trainer.save(str(tmp_path / "file" / "checkpoint"))
    trainer.train_step(batch_of(samples, 0))
    with pytest.raises(WorkerError, match="checkpoint"):
        trainer.finish_save()
    trainer.save(str(tmp_path / "checkpoint"))
    trainer.finish_save()
    assert trainer.load(str(tmp_path / "checkpoint")) == 1


def test_bad_settings_are_refused(config: LearnerConfig) -> None:
    with pytest.raises(ConfigError, match="'float8'"):
        Trainer(replace(config, dtype="float8"), device=CPU)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            pick_device("cuda", rank=0)
