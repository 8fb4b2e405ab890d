"""Buckets cover every byte once, and a checksum says the same whatever the buckets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmorl.contract.weights import ALIGNMENT, TensorSpec, combine_checksums, plan_buckets, tensor_checksum

SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=st.text("abcdef.", min_size=1, max_size=6),
        shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
        dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    ),
    unique_by=lambda spec: spec.name,
    max_size=12,
)


@given(specs=SPECS, bucket_bytes=st.integers(1, 4096))
def test_buckets_hold_every_tensor_once_in_order_and_apart(specs: list[TensorSpec], bucket_bytes: int) -> None:
    manifest = plan_buckets(specs, bucket_bytes=bucket_bytes)
    assert list(manifest.tensors) == specs
    for index, bucket in enumerate(manifest.buckets):
        assert bucket.index == index
        assert bucket.num_bytes <= bucket_bytes or len(bucket.tensors) == 1
        end = 0
        for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            assert offset % ALIGNMENT == 0 and offset >= end
            end = offset + spec.num_bytes
        assert end <= bucket.num_bytes


def test_a_name_that_repeats_is_refused() -> None:
    spec = TensorSpec("w", (2,), "float32")
    with pytest.raises(ValueError, match="'w' appears twice"):
        plan_buckets([spec, spec])


def test_checksum_is_of_the_content_and_knows_names_and_shapes() -> None:
    a, b = TensorSpec("a", (4,), "float32"), TensorSpec("b", (2, 2), "float32")
    data = np.arange(16, dtype=np.uint8)
    sums = {"a": tensor_checksum(data), "b": tensor_checksum(data)}
    whole = combine_checksums(sums, [a, b])
    assert whole == combine_checksums(sums, [b, a])
    assert whole != combine_checksums(sums | {"a": tensor_checksum(data[::-1].copy())}, [a, b])
    assert whole != combine_checksums(sums, [TensorSpec("a", (2, 2), "float32"), b])
