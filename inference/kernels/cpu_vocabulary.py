"""One pass over a block of the vocabulary for a panel of rows: sums of exponentials, and which tokens can still win.

A token's noise costs two logarithms, but nearly all tokens are ruled out by less. With w the uniform of a token and
E = -log1p(-w) >= w its exponential noise, x - log(E) can only reach the best score b so far if w <= exp(x - b); the
exponential is there anyway, for the sum. Only tokens that pass are looked at exactly, by the caller.

Lanes are the rows of a panel. Written in LLVM's terms because the sums must stay in registers.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.kernels.cpu_ir import loop
from inference.kernels.cpu_tile import LANES

_F, _I = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
_I64 = ir.IntType(64)


@intrinsic
def block_max(typing_context, logits, step, count, highest):  # type: ignore[no-untyped-def]
    """highest = max(highest, logits), lane by lane, over `count` >= 1 tokens; NaN is passed over."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        logits, step, count, highest = args
        (found,) = loop(
            builder,
            count,
            [_load(builder, highest)],
            lambda v, state: [_larger(builder, _load(builder, _row(builder, logits, step, v)), state[0])],
        )
        _store(builder, found, highest)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def block_sums(  # type: ignore[no-untyped-def]
    typing_context, logits, step, count, first_id, words, temperatures, highest, bounds, sums, hits, scaled
):
    """sums += exp(x - highest) for x = logits / temperatures; bit j of `hits[v]` tells that w <= bound * exp(...).

    `words` are two uint32 a lane, [2, lane]. `sums` holds those of logits / temperature, with `scaled` 1 behind them
    those of the logits themselves; `highest` likewise.
    """
    is_scaled = bool(scaled.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        logits, step, count, first_id, words, temperatures, highest, bounds, sums, hits = args[:10]
        first_word, second_word = _load(builder, words, _I), _load(builder, _after(builder, words), _I)
        heat, top, bound = (_load(builder, a) for a in (temperatures, highest, bounds))
        raw_top = _load(builder, _after(builder, highest)) if is_scaled else top

        def visit(v: Any, state: list[Any]) -> list[Any]:
            raw = _load(builder, _row(builder, logits, step, v))
            x = builder.fdiv(raw, heat) if is_scaled else raw
            mass = _exp(builder, builder.fsub(x, top))
            token = builder.trunc(builder.add(first_id, v), ir.IntType(32))
            uniform = _uniform(builder, _hash(builder, token, first_word, second_word))
            hit = builder.fcmp_unordered("<=", uniform, builder.fmul(mass, bound))
            at = builder.inttoptr(builder.add(hits, builder.mul(v, _int(LANES // 8))), ir.IntType(LANES).as_pointer())
            builder.store(builder.bitcast(hit, ir.IntType(LANES)), at)
            added = [builder.fadd(state[0], mass)]
            if is_scaled:
                added.append(builder.fadd(state[1], _exp(builder, builder.fsub(raw, raw_top))))
            return added

        zero = _splat(0.0)
        places = [sums, _after(builder, sums)] if is_scaled else [sums]
        for total, place in zip(loop(builder, count, [zero] * len(places), visit), places, strict=True):
            _store(builder, builder.fadd(_load(builder, place), total), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10, scaled), generate


def _hash(builder: Any, token: Any, first_word: Any, second_word: Any) -> Any:
    """`inference.noise.hash_tokens`"""
    start = builder.mul(token, ir.Constant(ir.IntType(32), 0x9E3779B1))
    x = builder.add(_broadcast(builder, start), first_word)
    x = builder.xor(x, builder.lshr(x, _splat(16, _I)))
    x = builder.add(builder.mul(x, _splat(0x85EBCA6B, _I)), second_word)
    x = builder.xor(x, builder.lshr(x, _splat(13, _I)))
    x = builder.mul(x, _splat(0xC2B2AE35, _I))
    return builder.xor(x, builder.lshr(x, _splat(16, _I)))


def _uniform(builder: Any, bits: Any) -> Any:
    """A little less than `inference.noise` has it, never more: 24 of the bits, for which every machine has a vector."""
    floats = builder.sitofp(builder.lshr(bits, _splat(8, _I)), _F)
    return builder.fmul(floats, _splat(2.0**-24))


def _exp(builder: Any, x: Any) -> Any:
    """`inference.kernels.cpu_math.exp`"""
    x = builder.select(builder.fcmp_ordered("<", x, _splat(-87.0)), _splat(-87.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, _splat(88.0)), _splat(88.0), x)
    floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_F, [_F]), f"llvm.floor.v{LANES}f32")
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_F, [_F] * 3), f"llvm.fma.v{LANES}f32")
    whole = builder.call(floor, [builder.call(fused, [x, _splat(1.44269504), _splat(0.5)])])
    r = builder.call(fused, [whole, _splat(-0.693359375), x])
    r = builder.call(fused, [whole, _splat(2.12194440e-4), r])
    p = _splat(1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = builder.call(fused, [p, r, _splat(term)])
    p = builder.call(fused, [builder.fmul(p, r), r, builder.fadd(r, _splat(1.0))])
    power = builder.shl(builder.add(builder.fptosi(whole, _I), _splat(127, _I)), _splat(23, _I))
    return builder.fmul(p, builder.bitcast(power, _F))


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _row(builder: Any, base: Any, step: Any, index: Any) -> Any:
    return builder.add(base, builder.shl(builder.mul(index, step), _int(2)))


def _after(builder: Any, address: Any) -> Any:
    return builder.add(address, _int(4 * LANES))


def _load(builder: Any, address: Any, kind: Any = _F) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _splat(value: float, kind: Any = _F) -> Any:
    return ir.Constant(kind, [value] * LANES)


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def _broadcast(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_I, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_I, [0] * LANES))
