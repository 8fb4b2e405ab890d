"""One training step against a plain, slow, unpacked reference written from the formula."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner.pack import pack
from learner.trainer import Trainer
from olmorl.contract.errors import WorkerError
from olmorl.contract.training import LearnerConfig, RankBatch, StepReport, TrainSample

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_rank")


def reference_step(config: LearnerConfig, samples: list[TrainSample]) -> tuple[PreTrainedModel, float, float]:
    """Model after one step, its loss and its gradient norm: sample by sample, token by token, transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32, attn_implementation="eager")
    total = torch.zeros((), dtype=torch.float64)
    count = sum(int(s.loss_mask.sum()) for s in samples)
    for sample in samples:
        tokens = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.token_ids]).astype(np.int64))
        logprobs = (model(tokens[None]).logits[0] / config.temperature).log_softmax(-1)
        for t, trained in enumerate(sample.loss_mask):
            if trained:
                position = len(sample.prompt_token_ids) + t
                logprob = logprobs[position - 1, tokens[position]]
                rho = min(math.exp(logprob.item() - float(sample.logprobs[t])), config.importance_cap)
                q = (logprob - logprob.detach()).exp()
                clipped = q.clamp(1 - config.clip_low, 1 + config.clip_high)
                total = total - rho * torch.minimum(q * sample.advantage, clipped * sample.advantage)
    loss = total / count
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, eps=config.eps, weight_decay=0.0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    return model, loss.item(), norm.item()


def run_step(
    config: LearnerConfig, samples: list[TrainSample], tokens_per_micro_batch: int = 64
) -> tuple[Trainer, StepReport]:
    trainer = Trainer(config, device=CPU)
    (batch,) = pack(samples, version=0, num_ranks=1, tokens_per_micro_batch=tokens_per_micro_batch)
    return trainer, trainer.train_step(batch)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().full_tensor() for n, p in trainer.policy.hugging_face_parameters().items()}


@pytest.mark.parametrize("family", ["olmo2", "llama_tied", "olmo3"])
@pytest.mark.parametrize("tokens_per_micro_batch", [1, 64, 100_000])
def test_equals_the_reference(
    config: LearnerConfig,
    samples: list[TrainSample],
    model_folder: Callable[[str], str],
    family: str,
    tokens_per_micro_batch: int,
) -> None:
    config = replace(config, model=model_folder(family), temperature=0.9)
    model, loss, norm = reference_step(config, samples)
    trainer, report = run_step(config, samples, tokens_per_micro_batch)
    assert report.stepped and report.version == trainer.version == 1
    assert report.metrics["loss/policy"] == pytest.approx(loss, rel=1e-5)
    assert report.metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > config.max_grad_norm, "the case must exercise the clip"
    ours = weights(trainer)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_activation_checkpointing_changes_nothing(config: LearnerConfig, samples: list[TrainSample]) -> None:
    plain, _ = run_step(config, samples)
    checkpointed, _ = run_step(replace(config, activation_checkpointing=True), samples)
    torch.testing.assert_close(weights(plain), weights(checkpointed), rtol=1e-6, atol=1e-7)


def test_bfloat16_keeps_float32_weights(config: LearnerConfig, samples: list[TrainSample]) -> None:
    exact, exact_report = run_step(config, samples)
    trainer, report = run_step(replace(config, dtype="bfloat16"), samples)
    assert all(w.dtype == torch.float32 for w in weights(trainer).values())
    assert report.metrics["optim/grad_norm"] == pytest.approx(exact_report.metrics["optim/grad_norm"], rel=0.1)
    torch.testing.assert_close(weights(trainer), weights(exact), rtol=0, atol=3e-3)


def test_metrics_say_what_the_tokens_say(config: LearnerConfig, samples: list[TrainSample]) -> None:
    trainer = Trainer(config, device=CPU)
    logprobs = np.concatenate([raw_response_logprobs(config, s)[s.loss_mask] for s in samples])
    behaviour = np.concatenate([s.logprobs[s.loss_mask] for s in samples])
    lag = -np.concatenate([s.token_versions[s.loss_mask] for s in samples])
    (batch,) = pack(samples, version=0, num_ranks=1, tokens_per_micro_batch=50)
    report = trainer.train_step(batch)
    ratio = np.exp(logprobs - behaviour)
    diff = (logprobs - behaviour)[lag == 0]
    expected = {
        "loss/clip_fraction": 0.0,
        "off_policy/version_lag_mean": lag.mean(),
        "off_policy/version_lag_max": 1.0,
        "off_policy/importance_ratio_mean": ratio.mean(),
        "off_policy/importance_ratio_max": ratio.max(),
        "off_policy/capped_fraction": (ratio > 2.0).mean(),
        "mismatch/logprob_abs_diff_mean": np.abs(diff).mean(),
        "mismatch/logprob_abs_diff_max": np.abs(diff).max(),
        "mismatch/kl": (np.exp(diff) - 1 - diff).mean(),
        "optim/lr": 0.05,
        "optim/skipped_steps": 0.0,
    }
    assert {name: report.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert 0 < report.metrics["rollout/entropy"] < math.log(23)
    assert report.num_tokens == sum(len(s.prompt_token_ids) + len(s.token_ids) for s in samples)
    assert report.flops > 0


def raw_response_logprobs(config: LearnerConfig, sample: TrainSample) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.token_ids]).astype(np.int64))
    with torch.no_grad():
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, tokens[1:, None])[len(sample.prompt_token_ids) - 1 :, 0].numpy()


def test_mismatch_is_silent_without_tokens_of_the_trained_version(
    config: LearnerConfig, samples: list[TrainSample]
) -> None:
    old = [replace(s, token_versions=np.full_like(s.token_versions, -1)) for s in samples]
    _, report = run_step(config, old)
    assert not any(name.startswith("mismatch/") for name in report.metrics)
    assert report.metrics["off_policy/version_lag_mean"] == 1.0


@pytest.mark.parametrize("micro_batches", [0, 1])
def test_no_signal_no_step_but_a_new_version(
    config: LearnerConfig, samples: list[TrainSample], micro_batches: int
) -> None:
    trainer = Trainer(config, device=CPU)
    before = weights(trainer)
    silent = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in samples] * micro_batches
    (batch,) = pack(silent, version=0, num_ranks=1, tokens_per_micro_batch=10_000)
    report = trainer.train_step(batch)
    assert (report.stepped, report.version, trainer.version) == (False, 1, 1)
    assert all(math.isfinite(value) for value in report.metrics.values())
    torch.testing.assert_close(weights(trainer), before, rtol=0, atol=0)


def test_steps_that_are_not_finite_are_left_out_then_stop_the_run(
    config: LearnerConfig, samples: list[TrainSample]
) -> None:
    def batch(version: int, *, broken: bool) -> RankBatch:
        first = replace(samples[0], advantage=math.nan if broken else 1.0)
        return pack([first, *samples[1:]], version=version, num_ranks=1, tokens_per_micro_batch=64)[0]

    trainer = Trainer(config, device=CPU)
    start = weights(trainer)
    for version in (0, 1):
        report = trainer.train_step(batch(version, broken=True))
        assert not report.stepped and report.metrics["optim/skipped_steps"] == version + 1
    torch.testing.assert_close(weights(trainer), start, rtol=0, atol=0)
    report = trainer.train_step(batch(2, broken=False))
    assert report.stepped and report.metrics["optim/skipped_steps"] == 2
    for version in (3, 4):
        trainer.train_step(batch(version, broken=True))
    with pytest.raises(WorkerError, match="3 training steps in a row were not finite"):
        trainer.train_step(batch(5, broken=True))


def test_a_batch_of_another_version_is_refused(config: LearnerConfig, samples: list[TrainSample]) -> None:
    trainer = Trainer(config, device=CPU)
    (batch,) = pack(samples, version=3, num_ranks=1, tokens_per_micro_batch=64)
    with pytest.raises(WorkerError, match="version 3 reached a learner that holds 0"):
        trainer.train_step(batch)
