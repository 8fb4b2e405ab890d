"""Exports load elsewhere and say the same, and one that cannot be written leaves nothing that looks like one."""

import json
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config

from learner.export import export_hugging_face
from learner.kept_weights import write_weights
from learner.loader import load_sharded
from learner.trainer import Trainer, make_mesh
from olmorl.contract.errors import WorkerError
from olmorl.contract.training import LearnerConfig, ScoreRequest, TrainSample
from tests.learner.conftest import DEEPSEEK, SHAPE, batch_of, in_ranks, transformers_scores

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_rank")


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
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in target.iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}, "whoever may read one file may read all"
    assert len(shards) > 2 and set(index["weight_map"].values()) == shards
    request = ScoreRequest(sequences=(np.arange(3, 20, dtype=np.int32),))
    scores = transformers_scores(str(target), request.sequences)
    np.testing.assert_allclose(trainer.score(request)[0], scores[0], atol=1e-5)


def test_what_is_no_parameter_is_exported_too(config: LearnerConfig, tmp_path: Path) -> None:
    """The bias that balances the experts of DeepSeek is a buffer."""
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(**DEEPSEEK))
    (bias,) = (buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    bias.copy_(torch.tensor([3.0, -1.0, 2.0, 0.5]))
    model.save_pretrained(tmp_path / "model")
    trainer = Trainer(replace(config, model=str(tmp_path / "model")), device=CPU)
    trainer.export(str(tmp_path / "export"))
    request = ScoreRequest(sequences=(np.arange(3, 20, dtype=np.int32),))
    scores = transformers_scores(str(tmp_path / "export"), request.sequences)
    np.testing.assert_allclose(trainer.score(request)[0], scores[0], atol=1e-5)


def test_a_head_of_its_own_stays_one(config: LearnerConfig, model_folder: Callable[[str], str], tmp_path: Path) -> None:
    """Some checkpoints have one though their config ties it: transformers takes it then, others go by the config."""
    model = tmp_path / "model"
    shutil.copytree(model_folder("llama_tied"), model)
    weights = load_file(model / "model.safetensors") | {"lm_head.weight": torch.randn(23, 32)}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    trainer = Trainer(replace(config, model=str(model)), device=CPU)
    trainer.export(str(tmp_path / "export"))
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == weights.keys()
    assert json.loads((tmp_path / "export" / "config.json").read_text())["tie_word_embeddings"] is False


SMALL_EXPERTS = SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OF_EXPERT = ("model.layers.1.mlp.experts.3.gate_proj.weight", "model.layers.1.mlp.gate.weight")
OF_MIXTRAL = ("model.layers.1.block_sparse_moe.experts.3.w1.weight", "model.layers.1.block_sparse_moe.gate.weight")
EXPERTS = {
    "qwen2_moe": (SMALL_EXPERTS | {"shared_expert_intermediate_size": 24}, OF_EXPERT),
    "qwen3_moe": (SMALL_EXPERTS | {"head_dim": 8}, OF_EXPERT),
    "olmoe": (SMALL_EXPERTS, OF_EXPERT),
    "mixtral": (SHAPE | {"num_local_experts": 4}, OF_MIXTRAL),
    "phimoe": (SHAPE | {"num_local_experts": 4}, OF_MIXTRAL),
}


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("max_shard_bytes", [20_000, 10**9])
def test_experts_go_by_the_names_of_the_hub(
    config: LearnerConfig, tmp_path: Path, family: str, max_shard_bytes: int
) -> None:
    """Which is what vLLM reads; transformers fuses them when it loads."""
    settings, names = EXPERTS[family]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    model.save_pretrained(tmp_path / "model")
    trainer = Trainer(replace(config, model=str(tmp_path / "model")), device=CPU)
    target = tmp_path / "export"
    export_hugging_face(trainer.policy, target, source=config.model, dtype="float32", max_shard_bytes=max_shard_bytes)

    shards = list(target.glob("*.safetensors"))
    ours = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    theirs = load_file(tmp_path / "model" / "model.safetensors")
    assert ours.keys() == theirs.keys() and set(names) < ours.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, msg=name)
    for shard in shards:
        assert shard.stat().st_size < max_shard_bytes + 4096, "a part of a fused tensor counts as itself alone"
    request = ScoreRequest(sequences=(np.arange(3, 20, dtype=np.int32),))
    scores = transformers_scores(str(target), request.sequences)
    np.testing.assert_allclose(trainer.score(request)[0], scores[0], atol=1e-5)


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A disk of 64 KB."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def short_files(folder: Path) -> Iterator[None]:
    """No file may have more than 20 KB."""
    folder.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("disk", "reason"), [(full_disk, "No space left on device"), (short_files, "File too large")])
def test_what_does_not_fit_is_said_and_removed(
    config: LearnerConfig, tmp_path: Path, disk: Callable[[Path], AbstractContextManager[None]], reason: str
) -> None:
    trainer = Trainer(config, device=CPU)
    folder = tmp_path / "disk"
    with disk(folder):
        with pytest.raises(WorkerError, match=rf"^the export {folder}/export .*{reason}.* takes 0.1 MB, {folder} has"):
            trainer.export(str(folder / "export"))
        with pytest.raises(WorkerError, match=rf"^{folder}/kept.safetensors was not written: .*{reason}"):
            write_weights(folder / "kept.safetensors", [("w", torch.ones(100_000))])
        assert list(folder.iterdir()) == []
        (folder / "export").mkdir()
        (folder / "export" / "config.json").write_text("an older one")
        with pytest.raises(WorkerError):
            trainer.export(str(folder / "export"))
        assert [path.name for path in folder.iterdir()] == ["export"]
        assert (folder / "export" / "config.json").read_text() == "an older one"


def export_refused(model: str, target: str) -> str:
    policy = load_sharded(model, make_mesh(CPU, shard_size=None), compute_dtype=torch.float32)
    try:
        export_hugging_face(policy, Path(target), source=model, dtype="float32")
    except WorkerError as error:
        return str(error)
    return ""


def test_every_rank_says_why(model_folder: Callable[[str], str], tmp_path: Path) -> None:
    """None waits for the one that writes."""
    (tmp_path / "file").touch()
    one, two = in_ranks(2, export_refused, model_folder("olmo2"), str(tmp_path / "file" / "export"))
    assert one == two and "Not a directory" in one
