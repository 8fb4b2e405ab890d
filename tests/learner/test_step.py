"""One training step against a plain, slow, unpacked reference written from the formula."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner.batch_file import load_batch
from learner.model import decoder_layers
from learner.pack import pack, unpack
from learner.trainer import Trainer
from olmorl.contract.errors import WorkerError
from olmorl.contract.training import LearnerConfig, RankBatch, StepReport, TrainSample
from olmorl.metrics.names import is_declared

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_rank")


@dataclass(frozen=True)
class Reference:
    """What a slow step came to: its last loss and the mean of its gradient norms over optimizer steps."""

    model: PreTrainedModel
    losses: list[float]
    norms: list[float]


def load(config: LearnerConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32, attn_implementation="eager")


def trained_logprobs(model: PreTrainedModel, sample: TrainSample, temperature: float) -> list[torch.Tensor]:
    """Of each trained token, one by one."""
    tokens = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.token_ids]).astype(np.int64))
    logprobs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
    start = len(sample.prompt_token_ids)
    return [logprobs[start + t - 1, tokens[start + t]] for t in np.flatnonzero(sample.loss_mask)]


def sample_loss(
    config: LearnerConfig,
    current: list[torch.Tensor],
    old: list[float],
    reference: list[float],
    sample: TrainSample,
) -> torch.Tensor:
    """Summed over the trained tokens of one sample, from the formulas."""
    behaviour = sample.logprobs[sample.loss_mask].tolist()
    total = torch.zeros((), dtype=torch.float64)
    log_q = [c - o for c, o in zip(current, old, strict=True)]
    if config.objective == "gspo" and log_q:
        log_q = [sum(log_q) / len(log_q)] * len(log_q)
    for c, lq, o, b, r in zip(current, log_q, old, behaviour, reference, strict=True):
        ratio = math.exp(o - b)
        rho = min(ratio, config.importance_cap)
        if config.importance_band and not config.importance_band[0] <= ratio <= config.importance_band[1]:
            rho = 0.0
        q = lq.exp()
        if config.objective == "cispo":
            gain = min(q.item(), 1 + config.clip_high) * sample.advantage * c
        else:
            clipped = q.clamp(1 - config.clip_low, 1 + config.clip_high)
            gain = torch.minimum(q * sample.advantage, clipped * sample.advantage)
        total = total - rho * gain
        if config.kl_beta > 0:
            d = c - r
            kl = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[config.kl_estimator]
            total = total + config.kl_beta * kl
    return total


def reference_steps(config: LearnerConfig, batches: list[list[TrainSample]]) -> Reference:
    """Optimizer steps on `batches` in turn, config.epochs times: sample by sample, transformers alone."""
    model, losses, norms = load(config), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, eps=config.eps, weight_decay=0.0)
    samples = [sample for batch in batches for sample in batch]
    with torch.no_grad():
        old = {id(s): [x.item() for x in trained_logprobs(model, s, config.temperature)] for s in samples}
    for batch in batches * config.epochs:
        count = config.loss_denominator or sum(int(s.loss_mask.sum()) for s in batch)
        loss = torch.zeros((), dtype=torch.float64)
        for s in batch:
            current = trained_logprobs(model, s, config.temperature)
            loss = loss + sample_loss(config, current, old[id(s)], old[id(s)], s) / count
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item())
        losses.append(loss.item())
        optimizer.step()
    return Reference(model, losses, norms)


def run_step(
    config: LearnerConfig, samples: list[TrainSample], tokens_per_micro_batch: int = 64
) -> tuple[Trainer, StepReport]:
    trainer = Trainer(config, device=CPU)
    (batch,) = pack(samples, version=0, num_ranks=1, tokens_per_micro_batch=tokens_per_micro_batch)
    return trainer, trainer.train_step(batch)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().full_tensor() for n, p in trainer.policy.hugging_face_parameters().items()}


def assert_equal_models(trainer: Trainer, reference: Reference) -> None:
    ours = weights(trainer)
    for name, parameter in reference.model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-5, atol=2e-6, msg=name)


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
    reference = reference_steps(config, [samples])
    trainer, report = run_step(config, samples, tokens_per_micro_batch)
    assert report.stepped and report.version == trainer.version == 1
    assert report.metrics["loss/policy"] == pytest.approx(reference.losses[0], rel=1e-5)
    assert report.metrics["optim/grad_norm"] == pytest.approx(reference.norms[0], rel=1e-5)
    assert reference.norms[0] > config.max_grad_norm, "the case must exercise the clip"
    assert_equal_models(trainer, reference)


SWITCHES: dict[str, dict] = {
    "plain": {},
    "gspo": {"objective": "gspo"},
    "cispo": {"objective": "cispo"},
    "icepop": {"importance_band": (0.5, 1.5)},
    "k1": {"kl_beta": 0.5, "kl_estimator": "k1"},
    "k2": {"kl_beta": 0.5, "kl_estimator": "k2"},
    "k3": {"kl_beta": 0.5, "kl_estimator": "k3"},
    "constant": {"loss_denominator": 77.0},
    "all": {"objective": "gspo", "importance_band": (0.2, 3.0), "kl_beta": 0.1, "loss_denominator": 31.0},
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize(("mini_batches", "epochs"), [(1, 1), (3, 2)])
def test_every_switch_equals_its_reference(
    config: LearnerConfig, samples: list[TrainSample], switch: str, mini_batches: int, epochs: int
) -> None:
    config = replace(config, epochs=epochs, lr=0.2, **SWITCHES[switch])
    cuts = [len(samples) * i // mini_batches for i in range(mini_batches + 1)]
    reference = reference_steps(config, [samples[begin:end] for begin, end in pairwise(cuts)])
    trainer = Trainer(config, device=CPU)
    (batch,) = pack(samples, version=0, num_ranks=1, tokens_per_micro_batch=64, num_mini_batches=mini_batches)
    report = trainer.train_step(batch)
    assert (trainer.state.reference is None) == (config.kl_beta == 0)
    assert report.stepped and report.version == 1, "however many optimizer steps, one version"
    assert len(reference.losses) == mini_batches * epochs
    assert report.metrics["optim/grad_norm"] == pytest.approx(np.mean(reference.norms), rel=1e-5)
    lengths = [len(sample.token_ids) for sample in samples]
    for sample, old in zip(samples, unpack([batch], [report.old_logprobs], lengths), strict=True):
        expected = np.where(sample.loss_mask, raw_response_logprobs(config, sample), np.nan)
        np.testing.assert_allclose(old, expected, atol=1e-5, err_msg="of the policy before the first step")
    if mini_batches > 1 and config.objective == "grpo":
        assert report.metrics["loss/clip_fraction"] > 0, "the case must exercise the clip"
    assert_equal_models(trainer, reference)


@pytest.mark.parametrize("order", [[10, 3, 7, 0, 5, 1, 9, 2, 8, 4, 6], list(range(10, -1, -1))])
def test_the_order_of_samples_changes_nothing(
    config: LearnerConfig, samples: list[TrainSample], order: list[int]
) -> None:
    straight, _ = run_step(config, samples)
    shuffled, _ = run_step(config, [samples[i] for i in order], 41)
    torch.testing.assert_close(weights(shuffled), weights(straight), rtol=1e-5, atol=1e-6)


def test_activation_checkpointing_changes_nothing(config: LearnerConfig, samples: list[TrainSample]) -> None:
    plain, _ = run_step(config, samples)
    checkpointed = Trainer(replace(config, activation_checkpointing=True), device=CPU)
    calls: list[nn.Module] = []
    for layer in decoder_layers(checkpointed.policy):
        layer.mlp.register_forward_hook(lambda mlp, *_: calls.append(mlp))
    (batch,) = pack(samples, version=0, num_ranks=1, tokens_per_micro_batch=64)
    checkpointed.train_step(batch)
    torch.testing.assert_close(weights(plain), weights(checkpointed), rtol=1e-6, atol=1e-7)
    assert len(calls) == 2 * 2 * len(batch.micro_batches), "each of two layers computes twice"


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
    advantage = np.concatenate([np.full(int(s.loss_mask.sum()), s.advantage) for s in samples])
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
        "off_policy/importance_weight_mean": np.minimum(ratio, 2.0).mean(),
        "off_policy/capped_fraction": (ratio > 2.0).mean(),
        "off_policy/banned_fraction": 0.0,
        "age/0/token_share": (lag == 0).mean(),
        "age/1/token_share": (lag == 1).mean(),
        "age/0/mismatch": np.abs(logprobs - behaviour)[lag == 0].mean(),
        "age/1/mismatch": np.abs(logprobs - behaviour)[lag == 1].mean(),
        "age/1/loss": -(np.minimum(ratio, 2.0) * advantage)[lag == 1].mean(),
        "mismatch/logprob_abs_diff_mean": np.abs(diff).mean(),
        "mismatch/logprob_abs_diff_max": np.abs(diff).max(),
        "mismatch/kl": (np.exp(diff) - 1 - diff).mean(),
        "optim/lr": 0.05,
        "optim/skipped_steps": 0.0,
    }
    assert {name: report.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert 0 < report.metrics["rollout/entropy"] < math.log(23)
    assert report.num_tokens == sum(len(micro.token_ids) for micro in batch.micro_batches)
    assert report.flops > 0 and report.peak_bytes > 1 << 20
    assert all(is_declared(name) for name in report.metrics)


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
    config: LearnerConfig, samples: list[TrainSample], tmp_path: Path
) -> None:
    def batch(version: int, *, broken: bool) -> RankBatch:
        first = replace(samples[0], advantage=math.nan if broken else 1.0)
        return pack([first, *samples[1:]], version=version, num_ranks=1, tokens_per_micro_batch=64)[0]

    config = replace(config, nonfinite_dir=str(tmp_path / "kept"))
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
    files = sorted(Path(config.nonfinite_dir).iterdir())
    assert [file.name for file in files] == [f"step_{v:06d}_rank_0.npz" for v in (0, 1, 3, 4, 5)]
    assert_equal_batches(load_batch(files[2]), batch(3, broken=True))


def test_passes_over_one_broken_batch_are_one_step(config: LearnerConfig, samples: list[TrainSample]) -> None:
    """Else a single broken sample would end a run with three epochs."""
    trainer = Trainer(replace(config, epochs=4, nonfinite_dir=None), device=CPU)
    broken = [replace(samples[0], advantage=math.nan), *samples[1:]]
    for version in (0, 1):
        (batch,) = pack(broken, version=version, num_ranks=1, tokens_per_micro_batch=64)
        report = trainer.train_step(batch)
        assert not report.stepped and report.metrics["optim/skipped_steps"] == 4 * (version + 1)
    (batch,) = pack(broken, version=2, num_ranks=1, tokens_per_micro_batch=64, num_mini_batches=2)
    assert trainer.train_step(batch).stepped, "its other half is whole"
    for version in (3, 4):
        (batch,) = pack(broken, version=version, num_ranks=1, tokens_per_micro_batch=64)
        trainer.train_step(batch)
    (batch,) = pack(broken, version=5, num_ranks=1, tokens_per_micro_batch=64)
    with pytest.raises(WorkerError, match="3 training steps in a row were not finite"):
        trainer.train_step(batch)


def test_a_broken_batch_that_cannot_be_kept_is_left_out_all_the_same(
    config: LearnerConfig, samples: list[TrainSample], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    broken = [replace(samples[0], advantage=math.nan)]
    _, report = run_step(replace(config, nonfinite_dir=str(tmp_path / "file" / "kept")), broken)
    assert not report.stepped and "could not be kept" in caplog.text


def assert_equal_batches(one: RankBatch, two: RankBatch) -> None:
    assert one.version == two.version and len(one.mini_batches) == len(two.mini_batches)
    for a, b in zip(one.mini_batches, two.mini_batches, strict=True):
        assert a.num_loss_tokens == b.num_loss_tokens
        for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
            for field in fields(x):
                np.testing.assert_array_equal(getattr(x, field.name), getattr(y, field.name))


def test_old_logprobs_are_those_of_one_epoch_also_beside_a_mini_batch_without_signal(
    config: LearnerConfig, samples: list[TrainSample]
) -> None:
    silent = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in samples[:5]]
    mixed = [*silent, *samples[5:]]
    (batch,) = pack(mixed, version=0, num_ranks=1, tokens_per_micro_batch=64, num_mini_batches=2)
    report = Trainer(replace(config, epochs=2), device=CPU).train_step(batch)
    assert len(report.old_logprobs) == sum(int(s.loss_mask.sum()) for s in mixed)


def test_one_bad_mini_batch_is_left_out_alone(config: LearnerConfig, samples: list[TrainSample]) -> None:
    first = replace(samples[0], advantage=math.nan)
    (batch,) = pack([first, *samples[1:]], version=0, num_ranks=1, tokens_per_micro_batch=64, num_mini_batches=2)
    trainer = Trainer(config, device=CPU)
    report = trainer.train_step(batch)
    assert report.stepped and report.metrics["optim/skipped_steps"] == 1
    (good,) = pack(samples[5:], version=0, num_ranks=1, tokens_per_micro_batch=64)
    alone = Trainer(config, device=CPU)
    alone.train_step(good)
    torch.testing.assert_close(weights(trainer), weights(alone), rtol=1e-5, atol=1e-6)


def test_a_batch_of_another_version_is_refused(config: LearnerConfig, samples: list[TrainSample]) -> None:
    trainer = Trainer(config, device=CPU)
    (batch,) = pack(samples, version=3, num_ranks=1, tokens_per_micro_batch=64)
    with pytest.raises(WorkerError, match="version 3 reached a learner that holds 0"):
        trainer.train_step(batch)
