"""Weights in int8 and int4: what the bytes mean, compiled products against integers, updates against cold loads."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from inference import LLM, SamplingParams
from inference.kernels.compiling import exact
from inference.kernels.cpu_dot import DOT, PAIRS, SUPPORTED
from inference.kernels.cpu_linear import linear
from inference.kernels.cpu_math import address
from inference.kernels.cpu_quantized_rows import product, quantize_panels
from inference.kernels.cpu_team import Team, new_signals
from inference.kernels.cpu_tile import LANES
from inference.quantization import int4, int8
from inference.quantization.formats import FORMATS
from inference.staged_update import stage_tensors
from olmorl.contract.errors import ConfigError, WeightUpdateError
from olmorl.contract.weights import plan_buckets

SAMPLED = SamplingParams(n=2, max_tokens=30, seed=4, ignore_eos=True)
INT8: dict[str, Any] = {"quantization": "int8", "max_num_seqs": 8, "kv_cache_tokens": 2048}
WITH_HEAD = INT8 | {"quantize_head": True}
INT4 = INT8 | {"quantization": "int4"}
INT4_WITH_HEAD = INT4 | {"quantize_head": True}
INT8_KV: dict[str, Any] = {"kv_cache_dtype": "int8", "max_num_seqs": 8, "kv_cache_tokens": 2048}
every_precision = pytest.mark.parametrize(
    "options",
    [INT8, WITH_HEAD, INT4, INT4_WITH_HEAD],
    ids=["int8, head in float", "head in int8", "int4, head in float", "head in int4"],
)
every_format = pytest.mark.parametrize("name", FORMATS)
needs_avx2 = pytest.mark.skipif(not SUPPORTED, reason="needs AVX2")
PROMPTS = [[1, 10, 2, 11], [3, 3, 3], [5, 4, 3, 2, 1, 0, 7], [9]]


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def moved(folder: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: w + torch.randn(w.shape, generator=generator) * 0.05 for n, w in weights_of(folder).items()}


# What the bytes mean


def test_int8_rows_by_hand() -> None:
    rows = int8.quantize_rows(torch.tensor([[0.5, -1.0, 0.25, 0.1, 1.27], [0.0, 0.0, 0.0, 0.0, 0.0]]))
    assert rows.shape == (2, 8 + 8)
    assert rows[0, :8].tolist() == [50, -100, 25, 10, 127, 0, 0, 0]  # scale 0.01, and up to a multiple of 4
    assert rows[0, 8:12].contiguous().view(torch.float32).item() == pytest.approx(0.01)
    assert rows[0, 12:].contiguous().view(torch.int32).item() == -128 * (50 - 100 + 25 + 10 + 127)
    assert rows[1, :8].tolist() == [0] * 8 and rows[1, 12:].tolist() == [0] * 4
    assert int8.dequantize_rows(rows, 5)[0].tolist() == pytest.approx([0.5, -1.0, 0.25, 0.1, 1.27])


def test_int4_rows_by_hand() -> None:
    """Two groups, the second of two weights: what is missing there counts as 0, and so does the group's range."""
    weight = torch.arange(32) % 16 * 0.25 - 1
    rows = int4.quantize_rows(torch.cat([weight, torch.tensor([3.0, 7.5])])[None])
    assert rows.shape == (1, 48) and rows.dtype == torch.uint8  # 2 x (16 + 4), up to a multiple of 16
    # low halves 0 to 3, high halves 4 to 7; then 8 to 11 and 12 to 15
    assert rows[0, :16].tolist() == [0x40, 0x51, 0x62, 0x73, 0xC8, 0xD9, 0xEA, 0xFB] * 2
    assert rows[0, 16:32].tolist() == [6, 15] + [0] * 14
    assert rows[0, 32:40].view(torch.bfloat16).tolist() == [-1.0, 0.25, 0.0, 0.5]  # minimum, scale
    assert rows[0, 40:].tolist() == [0] * 8
    assert int4.dequantize_rows(rows, 34)[0].tolist() == [*weight.tolist(), 3.0, 7.5]


@pytest.mark.parametrize(("name", "lost"), [("int8", (0.002, 0.01)), ("int4", (0.05, 0.1))])
def test_a_product_equals_that_of_what_the_bytes_stand_for(name: str, lost: tuple[float, float]) -> None:
    """The dense model of the same rounded weights and rounded tokens, in float64."""
    torch.manual_seed(0)
    weight_NK, x_TK, bias_N = torch.randn(37, 150), torch.randn(9, 150) * 3, torch.randn(37)
    form = FORMATS[name]  # type: ignore[index]
    rows_NB = form.quantize_rows(weight_NK)
    assert rows_NB.shape == (37, form.row_bytes(150)) and rows_NB.dtype == form.dtype
    scale_T1 = x_TK.abs().amax(1, keepdim=True) / 32639
    dense_NK = form.dequantize_rows(rows_NB, 150)
    dense_TN = (torch.round(x_TK / scale_T1) * scale_T1).double() @ dense_NK.double().T + bias_N
    torch.testing.assert_close(form.linear(x_TK, rows_NB, bias_N).double(), dense_TN, atol=1e-3, rtol=1e-4)
    error = ((dense_NK - weight_NK).norm() / weight_NK.norm()).item()
    assert lost[0] < error < lost[1], "of normal weights, 8 bits lose about half a percent, 4 bits about seven"


# Compiled products


@exact
def _layer(  # type: ignore[no-untyped-def]
    thread, threads, signals, bits, weight, num_rows, num_features, x, quantized, scales, sums, out, tokens
):
    panel, piece, none, lanes = np.int64(num_features * LANES), np.int64(0), np.int64(0), np.int64(LANES)
    into, each, totals = address(quantized), address(scales), address(sums)
    quantize_panels(thread, threads, bits, address(x), panel, num_features, into, each, totals, tokens)
    linear(
        thread, threads, signals, piece, bits, weight, none, num_rows, num_features, into, none, each, totals,
        address(out), lanes, np.int64(num_rows * LANES), tokens, none,
    )  # fmt: skip


def compiled_linear(x_TK: torch.Tensor, rows_NB: torch.Tensor) -> torch.Tensor:
    tokens, features = x_TK.shape
    panels, groups = -(-tokens // LANES), -(-features // int4.GROUP)
    x = np.zeros((panels, features, LANES), np.float32)
    for t in range(tokens):
        x[t // LANES, :, t % LANES] = x_TK[t].numpy()
    quantized, sums = np.zeros((panels, 2, groups * 8, LANES), np.int32), np.zeros((panels, groups, LANES), np.float32)
    scales, out = np.zeros((panels, LANES), np.float32), np.zeros((panels, len(rows_NB), LANES), np.float32)
    bits = 8 if rows_NB.dtype == torch.int8 else 4
    Team(1).run(
        _layer,
        new_signals(1),
        bits,
        rows_NB.data_ptr(),
        len(rows_NB),
        features,
        x,
        quantized,
        scales,
        sums,
        out,
        tokens,
    )
    return torch.from_numpy(np.stack([out[t // LANES, :, t % LANES] for t in range(tokens)]))


@needs_avx2
@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    tokens=st.integers(1, 100),
    outputs=st.integers(1, 90),
    features=st.integers(1, 70),
    magnitude=st.sampled_from([1e-35, 1e-3, 1.0, 1e30]),
    seed=st.integers(0, 2**32),
)
def test_compiled_products_are_bitwise_those_of_torch(
    name: str, tokens: int, outputs: int, features: int, magnitude: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_TK = torch.randn(tokens, features, generator=generator) * magnitude
    form = FORMATS[name]  # type: ignore[index]
    rows_NB = form.quantize_rows(torch.randn(outputs, features, generator=generator))
    assert torch.equal(compiled_linear(x_TK, rows_NB), form.linear(x_TK, rows_NB, None))


@exact
def _pairs(bits, weight, words, count, x, scales, sums, out, rows):  # type: ignore[no-untyped-def]
    one, none = np.int64(LANES), np.int64(0)
    product(bits, weight, words, count, x, scales, sums, out, one, none, rows // 3, 0, 3, 1, 8, PAIRS)


@exact
def _bytes(bits, weight, words, count, x, scales, sums, out, rows):  # type: ignore[no-untyped-def]
    one, none = np.int64(LANES), np.int64(0)
    product(bits, weight, words, count, x, scales, sums, out, one, none, rows // 3, 0, 3, 1, 8, DOT)


@needs_avx2
@pytest.mark.parametrize("kernel", [_pairs, _bytes], ids=["pairs", "bytes"])
@pytest.mark.parametrize("extreme", [False, True])
def test_every_instruction_sums_int8_exactly(kernel: Callable[..., None], extreme: bool) -> None:
    """Against numpy's int64, also where 16-bit sums of two products would have saturated."""
    quads, rows, lanes = 600, 6, 8
    rng = np.random.default_rng(0)
    w, u = rng.integers(-127, 128, (rows, quads * 4)), rng.integers(0, 256, (2, quads, LANES, 4))
    if extreme:
        w, u = np.sign(w + 0.5).astype(int) * 127, np.full_like(u, 255)
    tail = np.concatenate([np.ones((rows, 1), np.float32).view(np.int32), -128 * w.sum(1)[:, None]], 1).astype(np.int32)
    weight = np.concatenate([w.astype(np.int8), tail.view(np.int8)], axis=1)
    tokens, scales, out = u.astype(np.uint8), np.ones(LANES, np.float32), np.zeros((rows, LANES), np.float32)
    kernel(8, weight.ctypes.data, quads + 2, quads, *(a.ctypes.data for a in (tokens, scales, scales, out)), rows)
    high, low = (np.einsum("rk,kl->rl", w, (p - 128).transpose(0, 2, 1).reshape(-1, LANES)) for p in u)
    expected = high.astype(np.float32) * 256 + low.astype(np.float32)
    np.testing.assert_array_equal(out[:, :lanes], expected[:, :lanes])


@needs_avx2
@pytest.mark.parametrize("kernel", [_pairs, _bytes], ids=["pairs", "bytes"])
@pytest.mark.parametrize("extreme", [False, True])
def test_every_instruction_sums_int4_exactly(kernel: Callable[..., None], extreme: bool) -> None:
    """One group, whose scale is 1 and minimum -8: the sum of (w - 8) x."""
    rows, lanes = 6, 8
    rng = np.random.default_rng(0)
    w, u = rng.integers(0, 16, (rows, 32)), rng.integers(-128, 128, (2, 8, LANES, 4))
    if extreme:
        w, u = np.full_like(w, 15), np.full_like(u, -128)
    halves = w.reshape(rows, 4, 2, 4)
    tail = torch.tensor([[-8.0, 1.0]] * rows).bfloat16().view(torch.uint8).numpy()
    nibbles = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, 16).astype(np.uint8)
    weight = np.concatenate([nibbles, tail], axis=1)
    x_KL = (256 * u[0] + u[1]).transpose(0, 2, 1).reshape(32, LANES)
    tokens, scales, sums = u.astype(np.int8), np.ones(LANES, np.float32), x_KL.sum(0).astype(np.float32)
    out = np.full((rows, LANES), np.nan, np.float32)
    kernel(4, weight.ctypes.data, 5, 1, *(a.ctypes.data for a in (tokens, scales, sums, out)), rows)
    np.testing.assert_array_equal(out[:, :lanes], ((w - 8) @ x_KL)[:, :lanes])


@needs_avx2
@every_format
def test_what_is_not_finite_stays_so_and_to_itself(name: str) -> None:
    torch.manual_seed(1)
    form = FORMATS[name]  # type: ignore[index]
    rows_NB, x_TK = form.quantize_rows(torch.randn(20, 30)), torch.randn(5, 30)
    clean = compiled_linear(x_TK, rows_NB)
    x_TK[1, 7], x_TK[3, 2] = float("nan"), float("inf")
    for found in (compiled_linear(x_TK, rows_NB), form.linear(x_TK, rows_NB, None)):
        assert not found[1].isfinite().any() and not found[3].isfinite().any()
        assert torch.equal(found[[0, 2, 4]], clean[[0, 2, 4]])


# The engine


@every_precision
def test_compiled_engine_and_torch_twin_score_alike(model_folder: str, options: dict[str, Any]) -> None:
    """Their norms differ in the last digit, so now and then a token's byte by one: near, and far nearer than float."""
    sequences = [np.arange(21, dtype=np.int64), np.array([4, 4, 10, 2, 2, 2, 19])]
    compiled, twin, dense = (
        np.concatenate(LLM(model_folder, **kind).score(sequences))
        for kind in (options, options | {"kernels": "torch"}, {})
    )
    between, lost = np.abs(compiled - twin), np.abs(twin - dense)
    assert 0.002 < lost.mean() < (0.1 if "int8" in options.values() else 1), "neither is float32"
    assert np.median(between) < 3e-5 and between.mean() < lost.mean() / 4


@every_precision
def test_an_engine_scores_as_the_dense_model_that_its_rows_stand_for(
    model_folder: str, options: dict[str, Any]
) -> None:
    """Only tokens are rounded beside that, to 16 bits."""
    plain = options | {"quantization": None, "quantize_head": False}
    quantized, dense = LLM(model_folder, **options), LLM(model_folder, **plain)
    decoder, meant = quantized.engine.decoder, {}
    for name, shard in decoder.shards.items():
        stored = decoder.tensors[name]
        rounded = stored.dtype != torch.float32
        form = FORMATS[options["quantization"]]
        meant[name] = form.dequantize_rows(stored, shard.shape[1]) if rounded else stored.clone()
    dense.update_weights(meant.items(), version=1)
    sequences = [np.arange(21, dtype=np.int64), np.array([4, 4, 10, 2, 2, 2, 19])]
    for one, other in zip(quantized.score(sequences), dense.score(sequences), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


@every_precision
def test_a_request_alone_and_in_a_batch_is_bitwise_the_same(model_folder: str, options: dict[str, Any]) -> None:
    together = LLM(model_folder, deterministic=True, **options).generate(PROMPTS, SAMPLED)
    alone = LLM(model_folder, deterministic=True, max_tokens_per_step=2, **options)
    for prompt, output in zip(PROMPTS, together, strict=True):
        for sample, one in zip(output.samples, alone.generate([prompt], SAMPLED)[0].samples, strict=True):
            assert (sample.token_ids, sample.logprobs) == (one.token_ids, one.logprobs)


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest, model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "untied":
        return model_folder
    folder = tmp_path_factory.mktemp("tied")
    for path in Path(model_folder).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = weights_of(model_folder)
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def folder_with(weights: dict[str, torch.Tensor], like: str, folder: Path) -> str:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Path(like) / name).read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    "options",
    [INT8, WITH_HEAD, INT4, INT4_WITH_HEAD, INT8_KV, INT4_WITH_HEAD | INT8_KV],
    ids=["int8", "head in int8", "int4", "head in int4", "int8 KV", "int4 and int8 KV"],
)
def test_an_update_equals_a_cold_load_bit_for_bit(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    updated = LLM(model, **options)
    addresses = {name: tensor.data_ptr() for name, tensor in updated.engine.decoder.tensors.items()}
    updated.add_request(PROMPTS[0], SAMPLED)
    for _ in range(5):
        updated.step()
    updated.update_weights(moved(model, 1).items(), version=1)
    while updated.has_unfinished():
        updated.step()
    cold = LLM(folder_with(moved(model, 1), model, tmp_path), **options)
    for name, tensor in cold.engine.decoder.tensors.items():
        assert torch.equal(tensor, updated.engine.decoder.tensors[name]), name
    assert {name: tensor.data_ptr() for name, tensor in updated.engine.decoder.tensors.items()} == addresses
    old, new = (
        [(s.token_ids, s.logprobs) for out in llm.generate(PROMPTS, SAMPLED) for s in out.samples]
        for llm in (updated, cold)
    )
    assert old == new
    assert updated.weights_checksum() == cold.weights_checksum()


@pytest.mark.parametrize("options", [WITH_HEAD, INT4_WITH_HEAD], ids=["int8", "int4"])
def test_checksums_are_those_of_the_weights_as_they_came(model: str, options: dict[str, Any]) -> None:
    dense, quantized = LLM(model), LLM(model, **options)
    assert quantized.weights_checksum() == dense.weights_checksum()
    for llm in (dense, quantized):
        llm.update_weights(moved(model, 2).items(), version=1)
    assert quantized.weights_checksum() == dense.weights_checksum()
    assert quantized.engine.decoder.specs == dense.engine.decoder.specs, "what travels does not depend on the engine"


@pytest.mark.parametrize("options", [INT8, INT4], ids=["int8", "int4"])
def test_a_bad_update_leaves_the_rows_as_they_were(model_folder: str, options: dict[str, Any]) -> None:
    llm = LLM(model_folder, **options)
    before = {name: tensor.clone() for name, tensor in llm.engine.decoder.tensors.items()}
    checksum = llm.weights_checksum()
    weights = moved(model_folder, 3)
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    with pytest.raises(WeightUpdateError, match=r"down_proj.*not finite"):
        llm.update_weights(weights.items(), version=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in llm.engine.decoder.tensors.items())
    assert llm.weights_checksum() == checksum


@pytest.mark.parametrize("options", [INT8, INT4], ids=["int8", "int4"])
def test_only_rows_are_staged_and_no_bucket_is_kept(model_folder: str, options: dict[str, Any]) -> None:
    """The receiver's own staging, bucket by bucket, equals that of `update_weights`."""
    from inference.staged_update import StagedUpdate
    from inference.weight_receiver import WeightReceiver

    decoder = LLM(model_folder, **options).engine.decoder
    receiver = WeightReceiver(decoder.specs, device=decoder.device, weights=decoder.tensors, hold=decoder.hold)
    weights, staged = moved(model_folder, 5), StagedUpdate({})
    for bucket in plan_buckets(decoder.specs, bucket_bytes=8192).buckets:
        data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            data[offset : offset + spec.num_bytes] = weights[spec.name].reshape(-1).view(torch.uint8)
        receiver._stage(bucket, data, staged)
    expected = stage_tensors(weights.items(), decoder.specs, device=decoder.device, hold=decoder.hold)
    assert staged.tensors.keys() == expected.tensors.keys() == decoder.tensors.keys()
    for name, tensor in staged.tensors.items():
        assert torch.equal(tensor, expected.tensors[name]) and tensor.dtype == decoder.tensors[name].dtype
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "a bucket lives on behind it"
    assert staged.checksums == expected.checksums
    name = "model.layers.0.mlp.up_proj.weight"
    assert staged.checksums[name] == xxhash.xxh3_64_intdigest(weights[name].numpy().tobytes())


@pytest.mark.parametrize("options", [WITH_HEAD, INT4_WITH_HEAD], ids=["int8", "int4"])
def test_two_threads_compute_what_one_does(model_folder: str, options: dict[str, Any]) -> None:
    def tokens(threads: int) -> list[Any]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            llm = LLM(model_folder, **options)
        finally:
            torch.set_num_threads(before)
        assert llm.engine.decoder.team is not None and llm.engine.decoder.team.threads == threads
        llm.engine.decoder.compiled._flops_per_thread = 1.0  # type: ignore[union-attr]
        return [(s.token_ids, s.logprobs) for out in llm.generate(PROMPTS * 5, SAMPLED) for s in out.samples]

    alone = threading.active_count()
    assert tokens(1) == tokens(2) and threading.active_count() >= alone


def test_wrong_settings_are_named(model_folder: str) -> None:
    with pytest.raises(ConfigError, match="quantization is 'int3'; it must be None or one of 'int8', 'int4'"):
        LLM(model_folder, quantization="int3")
    with pytest.raises(ConfigError, match="quantize_head is True, but quantization is None"):
        LLM(model_folder, quantize_head=True)
    with pytest.raises(ConfigError, match="computes on one device; tensor_parallel_size is 2, set it to 1"):
        LLM(model_folder, tensor_parallel_size=2, **INT8)
    with pytest.raises(ConfigError, match="a schedule keeps whole weights"):
        LLM(model_folder, schedule_dir="schedule", **INT8)
