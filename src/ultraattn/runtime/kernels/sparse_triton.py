"""The Triton kernels of `sparse`: attention over lists of tiles, forward and backward.

Addresses of chunks stand in tables of int64, from the first tensor of their kind, with the strides
by head and by row: chunks lie in many buffers, and one launch reads them all. Those of inputs count
in units of `align` elements, so that the compiler knows that rows begin at multiples of 16 bytes.
Scores are kept in base 2. A program of `forward` and `dq` does one tile of queries and the key
tiles of its list, first those that need no mask; a program of `dkv` one tile of keys and the query
tiles of its lists, one list for each query head of its group.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (Triton reads the annotations of its kernels.)
from __future__ import annotations

from ultraattn.runtime.tritons import kernel, tl

BIAS = 2**62
"""Added to numbers of a table on their way, so that all are of one type: odd, and of 64 bits."""


@kernel(any_value=("values",))
def write(table, values, count: tl.constexpr):
    """Writes numbers, each sent as 2 x + 1 + BIAS."""
    for i in tl.static_range(count):
        tl.store(table + i, (values[i] - 4611686018427387905) >> 1)


@kernel
def _visible(patterns, bits, at, row, column, tile_major: tl.constexpr, tile_minor: tl.constexpr):
    """The pattern of a partial tile: bool (tile_major, tile_minor)."""
    words: tl.constexpr = tile_minor // 32
    which = tl.load(patterns + at)
    base = bits + (which * tile_major + row) * words
    word = tl.broadcast_to(tl.load(base)[:, None], [tile_major, tile_minor])
    for w in tl.static_range(1, words):
        word = tl.where((column >= 32 * w)[None, :], tl.load(base + w)[:, None], word)
    return ((word >> (column & 31)[None, :]) & 1) != 0


@kernel
def _minor(
    table, entries, at, head, same, also, tile: tl.constexpr, slots: tl.constexpr,
    alike: tl.constexpr,
):  # fmt: skip
    """Where the two tensors of a minor tile begin, their row strides, its chunk and its tile.

    Where all chunks have the row strides `same` and `also`, the compiler takes from the loop what
    depends on them alone.
    """
    entry = tl.load(entries + at)
    chunk, number = entry >> 16, entry & 65535
    slot = table + chunk * slots
    row = (number * tile).to(tl.int64)
    if alike:
        one, two = same, also
    else:
        one, two = tl.load(slot + 2), tl.load(slot + 5)
    first = tl.load(slot) + head * tl.load(slot + 1) + row * one
    second = tl.load(slot + 3) + head * tl.load(slot + 4) + row * two
    return first, one, second, two, chunk, number


@kernel
def _rows(base, offset, stride, row, on, live, dim, align: tl.constexpr, whole: tl.constexpr,
          even: tl.constexpr):  # fmt: skip
    """A tile (rows, width), zero outside."""
    offset, stride = offset * align, stride * align
    at = base + offset + (row * stride)[:, None] + on[None, :]
    if whole and even:
        return tl.load(at)
    if even:
        return tl.load(at, mask=(row < live)[:, None], other=0.0)
    if whole:
        return tl.load(at, mask=(on < dim)[None, :], other=0.0)
    return tl.load(at, mask=(row < live)[:, None] & (on < dim)[None, :], other=0.0)


@kernel
def _columns(base, offset, stride, row, on, live, dim, align: tl.constexpr, whole: tl.constexpr,
             even: tl.constexpr):  # fmt: skip
    """A tile (width, rows), zero outside."""
    offset, stride = offset * align, stride * align
    at = base + offset + (row * stride)[None, :] + on[:, None]
    if whole and even:
        return tl.load(at)
    if even:
        return tl.load(at, mask=(row < live)[None, :], other=0.0)
    if whole:
        return tl.load(at, mask=(on < dim)[:, None], other=0.0)
    return tl.load(at, mask=(row < live)[None, :] & (on < dim)[:, None], other=0.0)


@kernel
def _forward_sweep(
    acc, total, highest, queries, k, v, minors, entries, patterns, bits, lengths, first, count,
    head, factor, row, on, on_v, dim, dim_v, same, also,
    tile_major: tl.constexpr, tile_minor: tl.constexpr, slots: tl.constexpr, align: tl.constexpr,
    even: tl.constexpr, even_v: tl.constexpr, positive: tl.constexpr, precision: tl.constexpr,
    alike: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    low = float("-inf")
    column = tl.arange(0, tile_minor)
    k_at, k_r, v_at, v_r, chunk, number = _minor(
        minors, entries, first, head, same, also, tile_minor, slots, alike
    )
    for i in range(count):
        live = tile_minor
        if masked:
            live = tl.load(lengths + chunk) - number * tile_minor
        some_k = _columns(k, k_at, k_r, column, on, live, dim, align, not masked, even)
        scores = tl.dot(queries, some_k, input_precision=precision)
        some_v = _rows(v, v_at, v_r, column, on_v, live, dim_v, align, not masked, even_v)
        step = factor
        if not positive:
            scores = scores * factor
            step = 1.0
        if masked:
            seen = _visible(patterns, bits, first + i, row, column, tile_major, tile_minor)
            scores = tl.where(seen, scores, low)
        higher = tl.maximum(highest, tl.max(scores, 1) * step)
        shift = higher
        if masked:
            shift = tl.where(higher == low, 0.0, higher)
        weights = tl.exp2(scores * step - shift[:, None])
        fade = tl.exp2(highest - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(some_v.dtype), some_v, acc, input_precision=precision)
        highest = higher
        k_at, k_r, v_at, v_r, chunk, number = _minor(
            minors,
            entries,
            first + i + 1,
            head,
            same,
            also,
            tile_minor,
            slots,
            alike,
        )
    return acc, total, highest


@kernel(any_value=("majors_count", "minors_count"))
def forward(
    q, k, v, out, lse, table, minors, work, records, entries, patterns, bits, lengths,
    majors_count, minors_count, group, factor, dim, dim_v, same, also,
    width: tl.constexpr, width_v: tl.constexpr,
    tile_major: tl.constexpr, tile_minor: tl.constexpr, align: tl.constexpr,
    positive: tl.constexpr, precision: tl.constexpr, even: tl.constexpr, even_v: tl.constexpr,
    alike: tl.constexpr,
):  # fmt: skip
    """O and LSE. A major is (q, stride by head, by row; out, .., ..; lse, by head)."""
    program, b = tl.program_id(0), tl.program_id(1)
    record = records + tl.load(work + 2 * program) * 7
    h = tl.load(work + 2 * program + 1).to(tl.int64)
    top, live = tl.load(record + 1), tl.load(record + 2)
    slot = table + (b * majors_count + tl.load(record)) * 8
    minors += b * minors_count * 6
    row = tl.arange(0, tile_major)
    on, on_v = tl.arange(0, width), tl.arange(0, width_v)
    start = top.to(tl.int64)
    q_r = tl.load(slot + 2)
    q_at = tl.load(slot) + h * tl.load(slot + 1) + start * q_r
    queries = _rows(q, q_at, q_r, row, on, live, dim, align, False, even)
    acc = tl.zeros([tile_major, width_v], tl.float32)
    total = tl.zeros([tile_major], tl.float32)
    highest = tl.full([tile_major], float("-inf"), tl.float32)
    acc, total, highest = _forward_sweep(
        acc, total, highest, queries, k, v, minors, entries, patterns, bits, lengths,
        tl.load(record + 3), tl.load(record + 4), h // group, factor, row, on, on_v, dim, dim_v,
        same, also, tile_major, tile_minor, 6, align, even, even_v, positive, precision,
        alike, False,
    )  # fmt: skip
    acc, total, highest = _forward_sweep(
        acc, total, highest, queries, k, v, minors, entries, patterns, bits, lengths,
        tl.load(record + 5), tl.load(record + 6), h // group, factor, row, on, on_v, dim, dim_v,
        same, also, tile_major, tile_minor, 6, align, even, even_v, positive, precision,
        alike, True,
    )  # fmt: skip
    divisor = tl.where(total == 0, 1.0, total)
    o_r = tl.load(slot + 5)
    at = tl.load(slot + 3) + h * tl.load(slot + 4) + start * o_r
    at = out + at + (row * o_r)[:, None] + on_v[None, :]
    inside = (row < live)[:, None] & (on_v < dim_v)[None, :]
    tl.store(at, (acc / divisor[:, None]).to(out.dtype.element_ty), mask=inside)
    natural = (highest + tl.log2(divisor)) * 0.6931471805599453
    at = lse + tl.load(slot + 6) + h * tl.load(slot + 7) + start
    tl.store(at + row, natural, mask=row < live)


@kernel(any_value=("count", "heads", "length"))
def prepare(
    lse, delta, shifts, centres, table, chunks, count, heads, length, tile: tl.constexpr
):  # fmt: skip
    """Packs base-2 LSEs (+inf for rows that see nothing) and deltas of all query chunks.

    A chunk is (lse, by head; delta, by head; first packed row); `chunks` lists, for every tile of
    packed rows, (chunk, first row, rows, first head, last head + 1).
    """
    line = chunks + tl.program_id(0) * 5
    h, b = tl.program_id(1), tl.program_id(2)
    top, live = tl.load(line + 1), tl.load(line + 2)
    if (h >= tl.load(line + 3)) & (h < tl.load(line + 4)):
        slot = table + (b * count + tl.load(line)) * 5
        row = top + tl.arange(0, tile)
        inside = tl.arange(0, tile) < live
        at = tl.load(slot) + h * tl.load(slot + 1)
        shift = tl.load(lse + at + row, mask=inside, other=float("-inf"))
        at = tl.load(slot + 2) + h * tl.load(slot + 3)
        centre = tl.load(delta + at + row, mask=inside, other=0.0)
        dead = shift == float("-inf")
        to = (b * heads + h).to(tl.int64) * length + tl.load(slot + 4) + row
        shift = tl.where(dead, float("inf"), shift * 1.4426950408889634)
        tl.store(shifts + to, shift)
        tl.store(centres + to, tl.where(dead, 0.0, centre))


@kernel
def _dq_sweep(
    acc, queries, grads, shift, centre, k, v, minors, entries, patterns, bits, lengths, first,
    count, head, factor, row, on, on_v, dim, dim_v, same, also,
    tile_major: tl.constexpr, tile_minor: tl.constexpr, slots: tl.constexpr, align: tl.constexpr,
    even: tl.constexpr, even_v: tl.constexpr, precision: tl.constexpr, alike: tl.constexpr,
    masked: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, tile_minor)
    k_at, k_r, v_at, v_r, chunk, number = _minor(
        minors, entries, first, head, same, also, tile_minor, slots, alike
    )
    for i in range(count):
        live = tile_minor
        if masked:
            live = tl.load(lengths + chunk) - number * tile_minor
        some_k = _columns(k, k_at, k_r, column, on, live, dim, align, not masked, even)
        some_v = _columns(v, v_at, v_r, column, on_v, live, dim_v, align, not masked, even_v)
        scores = tl.dot(queries, some_k, input_precision=precision)
        slopes = tl.dot(grads, some_v, input_precision=precision)
        weights = tl.exp2(scores * factor - shift[:, None])
        if masked:
            seen = _visible(patterns, bits, first + i, row, column, tile_major, tile_minor)
            weights = tl.where(seen, weights, 0.0)
        slopes = (weights * (slopes - centre[:, None])).to(some_k.dtype)
        acc = tl.dot(slopes, tl.trans(some_k), acc, input_precision=precision)
        k_at, k_r, v_at, v_r, chunk, number = _minor(
            minors,
            entries,
            first + i + 1,
            head,
            same,
            also,
            tile_minor,
            slots,
            alike,
        )
    return acc


@kernel(any_value=("majors_count", "minors_count", "heads", "length"))
def dq(
    q, k, v, dout, shifts, centres, to_dq, table, minors, work, records, entries, patterns, bits,
    lengths, majors_count, minors_count, group, heads, length, scale, factor, dim, dim_v,
    same, also,
    width: tl.constexpr, width_v: tl.constexpr,
    tile_major: tl.constexpr, tile_minor: tl.constexpr, align: tl.constexpr,
    precision: tl.constexpr, even: tl.constexpr, even_v: tl.constexpr,
    alike: tl.constexpr,
):  # fmt: skip
    """dQ. A major is (q, by head, by row; dO, .., ..; dQ, .., ..; first packed row)."""
    program, b = tl.program_id(0), tl.program_id(1)
    record = records + tl.load(work + 2 * program) * 7
    h = tl.load(work + 2 * program + 1).to(tl.int64)
    top, live = tl.load(record + 1), tl.load(record + 2)
    slot = table + (b * majors_count + tl.load(record)) * 10
    minors += b * minors_count * 6
    row = tl.arange(0, tile_major)
    on, on_v = tl.arange(0, width), tl.arange(0, width_v)
    start = top.to(tl.int64)
    q_r, o_r = tl.load(slot + 2), tl.load(slot + 5)
    q_at = tl.load(slot) + h * tl.load(slot + 1) + start * q_r
    queries = _rows(q, q_at, q_r, row, on, live, dim, align, False, even)
    o_at = tl.load(slot + 3) + h * tl.load(slot + 4) + start * o_r
    grads = _rows(dout, o_at, o_r, row, on_v, live, dim_v, align, False, even_v)
    packed = (b * heads + h) * length + tl.load(slot + 9) + start + row
    shift = tl.load(shifts + packed, mask=row < live, other=float("inf"))
    centre = tl.load(centres + packed, mask=row < live, other=0.0)
    acc = tl.zeros([tile_major, width], tl.float32)
    acc = _dq_sweep(
        acc, queries, grads, shift, centre, k, v, minors, entries, patterns, bits, lengths,
        tl.load(record + 3), tl.load(record + 4), h // group, factor, row, on, on_v, dim, dim_v,
        same, also, tile_major, tile_minor, 6, align, even, even_v, precision, alike, False,
    )  # fmt: skip
    acc = _dq_sweep(
        acc, queries, grads, shift, centre, k, v, minors, entries, patterns, bits, lengths,
        tl.load(record + 5), tl.load(record + 6), h // group, factor, row, on, on_v, dim, dim_v,
        same, also, tile_major, tile_minor, 6, align, even, even_v, precision, alike, True,
    )  # fmt: skip
    d_r = tl.load(slot + 8)
    at = tl.load(slot + 6) + h * tl.load(slot + 7) + start * d_r
    at = to_dq + at + (row * d_r)[:, None] + on[None, :]
    inside = (row < live)[:, None] & (on < dim)[None, :]
    tl.store(at, (acc * scale).to(to_dq.dtype.element_ty), mask=inside)


@kernel
def _dkv_sweep(
    acc_k, acc_v, some_k, some_v, q, dout, shifts, centres, minors, entries, patterns, bits,
    lengths, first, count, head, packed, factor, row, on, on_v, dim, dim_v, same, also,
    tile_major: tl.constexpr, tile_minor: tl.constexpr, slots: tl.constexpr, align: tl.constexpr,
    even: tl.constexpr, even_v: tl.constexpr, precision: tl.constexpr, alike: tl.constexpr,
    masked: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, tile_minor)
    q_at, q_r, o_at, o_r, chunk, number = _minor(
        minors, entries, first, head, same, also, tile_minor, slots, alike
    )
    for i in range(count):
        live = tile_minor
        if masked:
            live = tl.load(lengths + chunk) - number * tile_minor
        at = packed + tl.load(minors + chunk * slots + 6) + number * tile_minor + column
        queries = _columns(q, q_at, q_r, column, on, live, dim, align, not masked, even)
        if masked:
            shift = tl.load(shifts + at, mask=column < live, other=float("inf"))
        else:
            shift = tl.load(shifts + at)
        scores = tl.dot(some_k, queries, input_precision=precision)
        grads = _rows(dout, o_at, o_r, column, on_v, live, dim_v, align, not masked, even_v)
        weights = tl.exp2(scores * factor - shift[None, :])
        if masked:
            seen = _visible(patterns, bits, first + i, row, column, tile_major, tile_minor)
            weights = tl.where(seen, weights, 0.0)
            centre = tl.load(centres + at, mask=column < live, other=0.0)
        else:
            centre = tl.load(centres + at)
        acc_v = tl.dot(weights.to(grads.dtype), grads, acc_v, input_precision=precision)
        slopes = tl.dot(some_v, tl.trans(grads), input_precision=precision)
        slopes = (weights * (slopes - centre[None, :])).to(queries.dtype)
        acc_k = tl.dot(slopes, tl.trans(queries), acc_k, input_precision=precision)
        q_at, q_r, o_at, o_r, chunk, number = _minor(
            minors,
            entries,
            first + i + 1,
            head,
            same,
            also,
            tile_minor,
            slots,
            alike,
        )
    return acc_k, acc_v


@kernel(any_value=("majors_count", "minors_count", "heads", "length"))
def dkv(
    q, k, v, dout, shifts, centres, to_dk, to_dv, table, minors, work, records, entries, patterns,
    bits, lengths, majors_count, minors_count, group, heads, length, scale, factor, dim, dim_v,
    same, also,
    width: tl.constexpr, width_v: tl.constexpr,
    tile_major: tl.constexpr, tile_minor: tl.constexpr, align: tl.constexpr,
    precision: tl.constexpr, even: tl.constexpr, even_v: tl.constexpr,
    alike: tl.constexpr,
):  # fmt: skip
    """dK and dV. A major is (k, by head, by row; v; dK; dV), a minor (q; dO; first packed row)."""
    program, b = tl.program_id(0), tl.program_id(1)
    record = records + tl.load(work + 2 * program) * (3 + 4 * group)
    g = tl.load(work + 2 * program + 1).to(tl.int64)
    top, live = tl.load(record + 1), tl.load(record + 2)
    slot = table + (b * majors_count + tl.load(record)) * 12
    minors += b * minors_count * 7
    row = tl.arange(0, tile_major)
    on, on_v = tl.arange(0, width), tl.arange(0, width_v)
    start = top.to(tl.int64)
    k_r, v_r = tl.load(slot + 2), tl.load(slot + 5)
    k_at = tl.load(slot) + g * tl.load(slot + 1) + start * k_r
    some_k = _rows(k, k_at, k_r, row, on, live, dim, align, False, even)
    v_at = tl.load(slot + 3) + g * tl.load(slot + 4) + start * v_r
    some_v = _rows(v, v_at, v_r, row, on_v, live, dim_v, align, False, even_v)
    acc_k = tl.zeros([tile_major, width], tl.float32)
    acc_v = tl.zeros([tile_major, width_v], tl.float32)
    for member in range(group):
        h = g * group + member
        packed = (b * heads + h) * length
        some = record + 3 + 4 * member
        acc_k, acc_v = _dkv_sweep(
            acc_k, acc_v, some_k, some_v, q, dout, shifts, centres, minors, entries, patterns,
            bits, lengths, tl.load(some), tl.load(some + 1), h, packed, factor, row, on, on_v,
            dim, dim_v, same, also, tile_major, tile_minor, 7, align, even, even_v, precision,
            alike, False,
        )  # fmt: skip
        acc_k, acc_v = _dkv_sweep(
            acc_k, acc_v, some_k, some_v, q, dout, shifts, centres, minors, entries, patterns,
            bits, lengths, tl.load(some + 2), tl.load(some + 3), h, packed, factor, row, on, on_v,
            dim, dim_v, same, also, tile_major, tile_minor, 7, align, even, even_v, precision,
            alike, True,
        )  # fmt: skip
    d_r, e_r = tl.load(slot + 8), tl.load(slot + 11)
    at = tl.load(slot + 6) + g * tl.load(slot + 7) + start * d_r
    inside = (row < live)[:, None]
    at = to_dk + at + (row * d_r)[:, None] + on[None, :]
    tl.store(at, (acc_k * scale).to(to_dk.dtype.element_ty), mask=inside & (on < dim)[None, :])
    at = tl.load(slot + 9) + g * tl.load(slot + 10) + start * e_r
    at = to_dv + at + (row * e_r)[:, None] + on_v[None, :]
    tl.store(at, acc_v.to(to_dv.dtype.element_ty), mask=inside & (on_v < dim_v)[None, :])
