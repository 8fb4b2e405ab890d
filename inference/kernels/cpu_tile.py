"""A register-blocked product of a few weight rows with a few vectors of tokens, written in LLVM's own terms.

Matrix libraries are made for large products; a decode step multiplies by 1 to 64 tokens, and there they reach half of
what the core can do. Here a weight is broadcast and a vector of tokens loaded, so that neither needs repacking: weights
stay as the checkpoint has them, tokens lie in panels of `LANES`.

Every output element is summed over the input features in their order, in chains of `PART`, whatever the shape of the
block it was computed in. A token's result is therefore bitwise the same alone and in any batch.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.kernels.cpu_ir import F32, I64, broadcast, integer, offset, prefetch
from inference.kernels.cpu_target import NAME, has

LANES = 16  # tokens of a panel: neighbours in memory
WIDE = 16 if has("avx512f") else 8  # floats of a vector register
FULL_RATE = WIDE == 16 and NAME != "znver4"  # which computes the two halves in turn

LONG_ROW = 1 << 14  # bytes; a block of longer ones, fetched ahead, would push the present one out of the cache
PART = 192  # input features summed in one chain; longer chains lose digits, shorter ones time


@intrinsic(prefer_literal=True)
def product(  # type: ignore[no-untyped-def]
    typing_context,
    weights,
    weight_step,
    count,
    tokens,
    token_step,
    token_panel,
    out,
    out_step,
    out_panel,
    num_blocks,
    after,
    rows,
    vectors,
    lanes,
):
    """`num_blocks` blocks of `rows` outputs for `vectors` vectors of `lanes` tokens; addresses, and steps in floats.

    While a block is computed the weights of the next are asked for, in the last block those at `after`; nothing is
    where `after` is 0. The hardware follows one row, and rows end before that pays.
    """
    shape = [t.literal_value for t in (rows, vectors, lanes)]
    signature = types.void(*[types.int64] * 11, rows, vectors, lanes)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        weights, weight_step, count, tokens, token_step, token_panel, out, out_step, out_panel, blocks, after = args[
            :11
        ]
        parts = builder.sdiv(builder.add(count, integer(PART - 1)), integer(PART))
        with cgutils.for_range(builder, blocks) as row_loop, cgutils.for_range(builder, parts) as part_loop:
            first, skip = builder.mul(row_loop.index, integer(shape[0])), builder.mul(part_loop.index, integer(PART))
            left = builder.sub(count, skip)
            size = builder.select(builder.icmp_signed("<", left, integer(PART)), left, integer(PART))
            block = offset(builder, weights, builder.mul(first, weight_step))
            following = offset(builder, block, builder.mul(weight_step, integer(shape[0])))
            is_last = builder.icmp_signed("==", builder.add(row_loop.index, integer(1)), blocks)
            following = builder.select(is_last, after, following)
            following = builder.select(builder.icmp_signed("==", after, integer(0)), block, following)
            _tile(
                builder,
                shape,
                (offset(builder, block, skip), weight_step, size),
                (offset(builder, tokens, builder.mul(skip, token_step)), token_step, token_panel),
                (offset(builder, out, builder.mul(first, out_step)), out_step, out_panel),
                wanted=[(offset(builder, following, builder.mul(skip, integer(shape[0]))), integer(shape[0]))],
                adds=builder.icmp_signed(">", part_loop.index, integer(0)),
            )
        return _context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def accumulate(  # type: ignore[no-untyped-def]
    typing_context, weights, weight_step, count, tokens, token_step, out, out_step, wanted, rows, vectors, lanes, resume
):
    """One block over adjacent vectors; with `resume` 1 its sums go on from what `out` holds.

    From each of the addresses `wanted` (a tuple), `count` cache lines are asked for meanwhile.
    """
    shape = [t.literal_value for t in (rows, vectors, lanes)]
    resumes = bool(resume.literal_value)
    signature = types.void(*[types.int64] * 7, wanted, rows, vectors, lanes, resume)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        weights, weight_step, count, tokens, token_step, out, out_step = args[:7]
        lines = [(address, integer(16)) for address in cgutils.unpack_tuple(builder, args[7])]
        panel = integer(LANES)
        _tile(
            builder,
            shape,
            (weights, weight_step, count),
            (tokens, token_step, panel),
            (out, out_step, panel),
            wanted=lines,
            resume=resumes,
        )
        return _context.get_dummy_value()

    return signature, generate


def _tile(
    builder: Any,
    shape: list[int],
    weights: Any,
    tokens: Any,
    out: Any,
    *,
    wanted: list[tuple[Any, Any]],
    resume: bool = False,
    adds: Any = None,
) -> None:
    """`wanted`: addresses to prefetch from, and how many floats further each next one is.

    Sums start from what `out` holds with `resume`; they are added to it, when done, where `adds` holds at run time.
    """
    rows, vectors, lanes = shape
    vector = ir.VectorType(F32, lanes)
    module = builder.module
    fused = cgutils.get_or_insert_function(module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32")
    weight_rows = [
        builder.inttoptr(offset(builder, weights[0], builder.mul(weights[1], integer(r))), F32.as_pointer())
        for r in range(rows)
    ]
    token_vectors = [builder.inttoptr(p, F32.as_pointer()) for p in _vectors(builder, tokens[0], tokens[2], shape)]
    out_vectors = [
        [builder.inttoptr(p, vector.as_pointer()) for p in _vectors(builder, start, out[2], shape)]
        for start in (offset(builder, out[0], builder.mul(out[1], integer(r))) for r in range(rows))
    ]
    zero = ir.Constant(vector, [0.0] * lanes)
    starts = [[builder.load(p, align=4) if resume else zero for p in row] for row in out_vectors]

    entry, body, done = builder.block, builder.append_basic_block("sum"), builder.append_basic_block("store")
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(I64)
    index.add_incoming(integer(0), entry)
    sums = [[builder.phi(vector) for _ in range(vectors)] for _ in range(rows)]
    for address, step in wanted:
        prefetch(builder, offset(builder, address, builder.mul(index, step)))
    at = builder.mul(index, tokens[1])
    xs = [builder.load(builder.bitcast(builder.gep(p, [at]), vector.as_pointer()), align=4) for p in token_vectors]
    results = []
    for r in range(rows):
        w = broadcast(builder, builder.load(builder.gep(weight_rows[r], [index]), align=4), vector)
        results.append([builder.call(fused, [w, x, total]) for x, total in zip(xs, sums[r], strict=True)])
    following_index = builder.add(index, integer(1))
    index.add_incoming(following_index, body)
    for r in range(rows):
        for v in range(vectors):
            sums[r][v].add_incoming(starts[r][v], entry)
            sums[r][v].add_incoming(results[r][v], body)
    builder.cbranch(builder.icmp_signed("<", following_index, weights[2]), body, done)
    builder.position_at_end(done)
    for r in range(rows):
        for v in range(vectors):
            result = results[r][v]
            if adds is not None:
                result = builder.fadd(result, builder.select(adds, builder.load(out_vectors[r][v], align=4), zero))
            builder.store(result, out_vectors[r][v], align=4)


def _vectors(builder: Any, start: Any, panel: Any, shape: list[int]) -> list[Any]:
    """Addresses of the vectors of a block: along a panel, then in the next."""
    _, vectors, lanes = shape
    each = LANES // lanes
    return [
        offset(builder, start, builder.add(builder.mul(panel, integer(v // each)), integer(v % each * lanes)))
        for v in range(vectors)
    ]
