"""Scoring, checkpoints and export of one rank."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from learner.model import PolicyModel
from learner.trainer import Trainer, pick_device
from olmorl.contract.errors import ConfigError, WorkerError
from olmorl.contract.training import LearnerConfig, ScoreRequest, TrainSample
from tests.learner.conftest import batch_of, transformers_scores

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_rank")


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().full_tensor() for n, p in trainer.policy.hugging_face_parameters().items()}


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


def test_a_resumed_run_decays_as_its_own_config_says(
    config: LearnerConfig, samples: list[TrainSample], tmp_path: Path
) -> None:
    """Learning rate and schedule are taken from the config at every step; the rest of AdamW must not lag behind."""
    before = Trainer(config, device=CPU)
    before.train_step(batch_of(samples, 0))
    before.save(str(tmp_path / "checkpoint"))
    before.finish_save()
    changed = replace(config, weight_decay=0.25, betas=(0.7, 0.8), eps=1e-5)
    resumed = Trainer(changed, device=CPU)
    resumed.load(str(tmp_path / "checkpoint"))
    groups = resumed.state.optimizer.param_groups
    assert [(group["weight_decay"], group["betas"], group["eps"]) for group in groups] == [
        (0.25, (0.7, 0.8), 1e-5),
        (0.0, (0.7, 0.8), 1e-5),
    ]


def test_a_checkpoint_before_the_first_step_changes_nothing(
    config: LearnerConfig, samples: list[TrainSample], tmp_path: Path
) -> None:
    """As when the first batches carry no signal: AdamW has no state to save yet, and must not take that for a step."""
    config = replace(config, eps=1e-8, lr=1e-3)
    plain, saved, resumed = (Trainer(config, device=CPU) for _ in range(3))
    saved.save(str(tmp_path / "checkpoint"))
    saved.finish_save()
    resumed.load(str(tmp_path / "checkpoint"))
    for trainer in (plain, saved, resumed):
        trainer.train_step(batch_of(samples, 0))
    torch.testing.assert_close(weights(saved), weights(plain), rtol=0, atol=0)
    torch.testing.assert_close(weights(resumed), weights(plain), rtol=0, atol=0)


def test_no_device_ever_holds_the_whole_model(config: LearnerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers move one by one, as they are sharded: a model of 32B in float32 is larger than a GPU."""

    def refuse(*_: object) -> None:
        raise AssertionError("the whole model is moved")

    monkeypatch.setattr(PolicyModel, "to", refuse)
    Trainer(config, device=CPU)


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


def test_a_failed_save_is_told_when_it_is_waited_for(
    config: LearnerConfig, samples: list[TrainSample], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    trainer = Trainer(config, device=CPU)
    trainer.save(str(tmp_path / "file" / "checkpoint"))
    trainer.train_step(batch_of(samples, 0))
    with pytest.raises(WorkerError, match=r"^the checkpoint .* was not written: [^\n]*Not a directory[^\n]*$"):
        trainer.finish_save()
    trainer.save(str(tmp_path / "checkpoint"))
    trainer.finish_save()
    assert trainer.load(str(tmp_path / "checkpoint")) == 1


def test_bad_settings_are_refused(config: LearnerConfig) -> None:
    with pytest.raises(ConfigError, match="'float8'"):
        Trainer(replace(config, dtype="float8"), device=CPU)
    with pytest.raises(ConfigError, match=r"float16 .* set model.dtype = 'bfloat16'"):
        Trainer(replace(config, dtype="float16"), device=CPU)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            pick_device("cuda", rank=0)
