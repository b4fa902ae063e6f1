from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraattn.errors import InputError
from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind
from ultraattn.runtime.dense import dense_attention
from ultraattn.runtime.kernels import Piece, backward_row, choose, forward_row, reference
from ultraattn.runtime.kernels import torch_cpu as flash
from ultraattn.runtime.merge import accumulate_dtype, sum_partials

KERNELS = [reference, flash]
F64 = torch.float64
INF = float("inf")
IDS = [kernel.name for kernel in KERNELS]
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=IDS)


def problem(rows, cols, heads=4, kv_heads=2, dim=16, dim_v=None, dtype=F64, batch=2, seed=0):
    """q, k, v and dout of one query chunk and one key chunk."""
    gen = torch.Generator().manual_seed(seed)
    dim_v = dim if dim_v is None else dim_v
    shapes = [(heads, rows, dim), (kv_heads, cols, dim), (kv_heads, cols, dim_v)]
    shapes.append((heads, rows, dim_v))
    return [torch.randn(batch, *s, generator=gen, dtype=F64).to(dtype) for s in shapes]


def groups(heads, kv_heads):
    return tuple(h * kv_heads // heads for h in range(heads))


def seen_by(piece, rows):
    """What a piece's definition says is visible: (1 or heads, rows, cols)."""
    if piece.kind is BlockKind.PARTIAL:
        return piece.mask
    distance = torch.arange(rows)[:, None] - torch.arange(piece.cols)
    everything = torch.ones_like(distance, dtype=torch.bool)
    if piece.kind is BlockKind.BAND:
        everything = (distance >= piece.lo) & (distance <= piece.hi)
    return everything[None] & (piece.kind is not BlockKind.EMPTY)


def truth(q, pieces, dout, scale):
    """out, lse, dq, [(dk, dv)] by float64 autograd over the concatenated pieces."""
    q64 = q.double().clone().requires_grad_()
    ks = [p.k.double().clone().requires_grad_() for p in pieces]
    vs = [p.v.double().clone().requires_grad_() for p in pieces]
    heads, rows = q.shape[1:3]
    k = torch.cat([k[:, list(p.kv_of_head)] for k, p in zip(ks, pieces, strict=True)], dim=2)
    v = torch.cat([v[:, list(p.kv_of_head)] for v, p in zip(vs, pieces, strict=True)], dim=2)
    seen = torch.cat([seen_by(p, rows).expand(heads, -1, -1) for p in pieces], dim=-1)
    scores = (scale * q64 @ k.mT).masked_fill(~seen, -INF)
    lse = scores.logsumexp(dim=-1) if scores.shape[-1] else scores.sum(-1) - INF
    alive = seen.any(dim=-1)[None, ..., None]
    out = torch.softmax(scores.masked_fill(~alive, 0.0), dim=-1).masked_fill(~alive, 0.0) @ v
    dq, *dkv = torch.autograd.grad(out, [q64, *ks, *vs], dout.double())
    pairs = list(zip(dkv[: len(ks)], dkv[len(ks) :], strict=True))
    return out.detach(), lse.detach(), dq, pairs


def error(got, want):
    """Relative error in the Frobenius norm (absolute where the truth is zero)."""
    assert got.shape == want.shape
    top = want.abs().max().item() if want.numel() else 0.0
    unit = top if top else 1.0  # squares of very small and very large numbers are not numbers
    size = (want / unit).norm().item()
    return ((got.double() - want) / unit).norm().item() / (size if size else 1.0)


def assert_exact(kernel, q, piece, dout, scale=0.3, limit=1e-12):
    out, lse, dq, [(dk, dv)] = truth(q, [piece], dout, scale)
    assert kernel.refusal(q, piece, True) is None
    got, got_lse = kernel.forward(q, piece, scale)
    assert got_lse.is_contiguous()
    assert got_lse.dtype == accumulate_dtype(q.dtype)
    assert torch.equal(got_lse == -INF, lse == -INF)
    assert error(got_lse.masked_fill(lse == -INF, 0), lse.masked_fill(lse == -INF, 0)) < limit
    assert error(got, out) < limit
    delta = (dout.double() * out).sum(-1)
    grads = kernel.backward(dout, q, lse, delta, piece, scale)
    for grad, want in zip(grads, (dq, dk, dv), strict=True):
        assert error(grad, want) < limit


# ---------------------------------------------------------------- shapes of what is visible


BANDS = [
    (0, OPEN_HI),  # causal
    (1, OPEN_HI),  # strict causal
    (-3, OPEN_HI),
    (5, OPEN_HI),
    (OPEN_LO, 0),  # inverse causal
    (OPEN_LO, -2),
    (OPEN_LO, 4),
    (0, 0),  # a diagonal
    (0, 3),  # a window
    (-4, 2),
    (3, 3),
    (-30, -2),
    (OPEN_LO, OPEN_HI),  # full
    (100, OPEN_HI),  # nothing
    (OPEN_LO, -100),
    (2, 1),
]


@every_kernel
@pytest.mark.parametrize(("rows", "cols"), [(13, 13), (9, 17), (17, 9), (1, 11), (11, 1)])
def test_every_band_is_exact_in_both_passes(kernel, rows, cols):
    q, k, v, dout = problem(rows, cols)
    for lo, hi in BANDS:
        piece = Piece(k, v, groups(4, 2), BlockKind.BAND, lo, hi)
        assert_exact(kernel, q, piece, dout)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    rows=st.integers(1, 12),
    cols=st.integers(1, 12),
    lo=st.one_of(st.just(OPEN_LO), st.integers(-14, 14)),
    hi=st.one_of(st.just(OPEN_HI), st.integers(-14, 14)),
    step=st.integers(1, 5),
)
def test_any_band_is_exact_cut_into_any_rows(rows, cols, lo, hi, step):
    q, k, v, dout = problem(rows, cols, heads=2, kv_heads=1, dim=4, batch=1)
    piece = Piece(k, v, (0, 0), BlockKind.BAND, lo, hi)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "BAND_ROWS", step)
        patch.setattr(reference, "SCORE_BYTES", 8 * cols * step)
        for kernel in KERNELS:
            assert_exact(kernel, q, piece, dout)


@every_kernel
@pytest.mark.parametrize("mask_heads", [1, 4])
@pytest.mark.parametrize("budget", [64 << 20, 2000])
def test_masks_with_dead_rows_are_exact(kernel, mask_heads, budget, monkeypatch):
    monkeypatch.setattr(flash, "MASK_BYTES", budget)
    monkeypatch.setattr(reference, "SCORE_BYTES", budget)
    q, k, v, dout = problem(11, 14)
    mask = torch.rand(mask_heads, 11, 14, generator=torch.Generator().manual_seed(3)) < 0.4
    mask[:, 2] = False
    mask[-1, 7:9] = False
    mask[0, 4, :] = True
    assert_exact(kernel, q, Piece(k, v, groups(4, 2), BlockKind.PARTIAL, mask=mask), dout)
    nothing = torch.zeros_like(mask)
    assert_exact(kernel, q, Piece(k, v, groups(4, 2), BlockKind.PARTIAL, mask=nothing), dout)


@every_kernel
def test_rows_whose_first_key_tiles_are_all_masked_are_exact(kernel):
    q, k, v, dout = problem(70, 1300, heads=1, kv_heads=1, batch=1, dim=8)
    mask = torch.zeros(1, 70, 1300, dtype=torch.bool)
    mask[:, :, 1250:] = True
    mask[:, 5] = False
    mask[:, 20:40, 3] = True
    assert_exact(kernel, q, Piece(k, v, (0,), BlockKind.PARTIAL, mask=mask), dout)


@every_kernel
def test_empty_and_full_pieces_are_exact(kernel):
    q, k, v, dout = problem(6, 9)
    assert_exact(kernel, q, Piece(k, v, groups(4, 2)), dout)
    assert_exact(kernel, q, Piece(k, v, groups(4, 2), BlockKind.EMPTY), dout)


# ---------------------------------------------------------------- heads, strides, sizes


@every_kernel
@pytest.mark.parametrize(
    ("kv_heads", "kv_of_head"),
    [
        (4, (0, 1, 2, 3)),
        (1, (0, 0, 0, 0)),
        (2, (0, 0, 0, 1)),  # a head range that splits a group
        (3, (1, 1, 2, 2)),  # some key heads are not used
        (3, (0, 1, 1, 2)),
        (3, (2, 0, 2, 1)),
        (6, (5, 5, 5, 5)),
        (1, (0,)),
        (5, (1, 2, 3)),
    ],
)
def test_any_map_from_query_heads_to_key_heads_is_exact(kernel, kv_heads, kv_of_head):
    q, k, v, dout = problem(7, 9, heads=len(kv_of_head), kv_heads=kv_heads)
    for kind, lo in ((BlockKind.FULL, OPEN_LO), (BlockKind.BAND, -1)):
        assert_exact(kernel, q, Piece(k, v, kv_of_head, kind, lo), dout)
    mask = torch.rand(len(kv_of_head), 7, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    assert_exact(kernel, q, Piece(k, v, kv_of_head, BlockKind.PARTIAL, mask=mask), dout)


def last_stride_2(x):
    return torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2]


LAYOUTS = {
    "tokens outside heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last stride 2": last_stride_2,
    "dimensions outside tokens": lambda x: x.mT.contiguous().mT,
    "batch inside": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "every second token": lambda x: torch.stack([x, x], dim=3).flatten(2, 3)[:, :, ::2],
}


@every_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_and_gradients_are_exact(kernel, layout):
    q, k, v, dout = (LAYOUTS[layout](x) for x in problem(6, 9, dim=8))
    assert_exact(kernel, q, Piece(k, v, groups(4, 2)), dout)
    assert_exact(kernel, q, Piece(k, v, groups(4, 2), BlockKind.BAND, -2, 1), dout)


@every_kernel
@pytest.mark.parametrize(
    ("batch", "heads", "rows", "cols"),
    [(0, 4, 5, 6), (2, 0, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0), (0, 0, 0, 0)],
)
def test_empty_sizes_give_empty_or_dead_results(kernel, batch, heads, rows, cols):
    q, k, v, dout = problem(rows, cols, heads=heads, kv_heads=2, batch=batch)
    mask = torch.ones(1, rows, cols, dtype=torch.bool)
    for kind in BlockKind:
        piece = Piece(k, v, groups(heads, 2), kind, 0, 3, mask)
        out, lse = kernel.forward(q, piece, 0.3)
        assert out.shape == q.shape
        assert (out == 0).all()
        assert lse.shape == q.shape[:3]
        assert (lse == -INF).all()
        grads = kernel.backward(dout, q, lse, torch.zeros_like(lse), piece, 0.3)
        for grad, given_ in zip(grads, (q, k, v), strict=True):
            assert grad.shape == given_.shape
            assert (grad == 0).all()


@pytest.mark.parametrize("dim", [1, 3, 40, 128, 257])
@every_kernel
def test_any_head_dim_is_exact(kernel, dim):
    q, k, v, dout = problem(5, 7, dim=dim)
    assert_exact(kernel, q, Piece(k, v, groups(4, 2)), dout)


@pytest.mark.parametrize("dim_v", [0, 1, 24])
def test_values_of_another_dim_are_exact_in_the_reference_and_refused_by_flash(dim_v):
    q, k, v, dout = problem(5, 7, dim=16, dim_v=dim_v)
    piece = Piece(k, v, groups(4, 2))
    assert_exact(reference, q, piece, dout)
    assert "head_dim" in (flash.refusal(q, piece, False) or "")
    assert choose(q, piece) is reference


# ---------------------------------------------------------------- numbers


@every_kernel
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
def test_the_lse_is_natural_in_every_dtype(kernel, dtype):
    q, k, v, _ = problem(33, 50, dtype=dtype)
    _, lse = kernel.forward(q, Piece(k, v, groups(4, 2)), 0.25)
    want = dense_attention(q, k, v, None, 0.25)[1]
    limit = 1e-14 if dtype == F64 else 1e-6 if dtype == torch.float32 else 1e-4
    assert lse.dtype == accumulate_dtype(dtype)
    assert error(lse, want) < limit


@every_kernel
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_logits_whose_exponentials_overflow_stay_finite(kernel, dtype):
    q, k, v, dout = problem(9, 12, dtype=dtype)
    q, k = q * 60, k * 60
    pieces = [Piece(k[:, :, s], v[:, :, s], groups(4, 2)) for s in (slice(0, 5), slice(5, 12))]
    out, lse, dq, _ = truth(q, pieces, dout, 1.0)
    assert lse.abs().max() > 1000
    got, got_lse = forward_row(q, pieces, 1.0, kernel=kernel.name)
    eps, wide_eps = torch.finfo(dtype).eps, torch.finfo(got_lse.dtype).eps
    # A score s is known to s * eps, and its exponential so to a factor of 1 + s * eps.
    assert error(got, out) < 4 * (eps + lse.abs().max().item() * wide_eps)
    assert error(got_lse, lse) < 4 * wide_eps
    delta = (dout.double() * out).sum(-1).to(got_lse.dtype)
    grad, _ = backward_row(dout, q, got_lse, delta, pieces, 1.0, kernel=kernel.name)
    # dQ cancels to nearly nothing where one key has all the weight: judged by what cancels.
    terms = dout.norm() * v.norm(dim=-1).max() * k.norm(dim=-1).max()
    assert (grad.double() - dq).norm() < (eps + lse.abs().max() * wide_eps) * terms


def test_the_scale_goes_through():
    q, k, v, _ = problem(5, 7)
    outs = [forward_row(q, [Piece(k, v, groups(4, 2))], s)[0] for s in (0.25, 0.7, 0.0)]
    assert error(outs[1], dense_attention(q, k, v, None, 0.7)[0]) < 1e-13
    assert error(outs[0], outs[1]) > 0.05
    assert error(outs[2][:, :1], v[:, :1].mean(2, keepdim=True).expand(2, 1, 5, 16)) < 1e-13


@every_kernel
def test_delta_less_the_gradient_of_the_lse_is_the_gradient_of_both(kernel):
    q, k, v, dout = problem(6, 9)
    dout[:, :, 2] = 0  # here only the LSE has a gradient
    dout[:, :, 3] *= 1e-200
    dlse = torch.randn(2, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(5))
    dlse[:, :, 4] = 0
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = 0.3 * leaves[0] @ leaves[1].repeat_interleave(2, 1).mT
    out, lse = scores.softmax(-1) @ leaves[2].repeat_interleave(2, 1), scores.logsumexp(-1)
    want = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    delta = (dout * out).sum(-1) - dlse
    got = kernel.backward(dout, q, lse.detach(), delta.detach(), Piece(k, v, groups(4, 2)), 0.3)
    for grad, expected in zip(got, want, strict=True):
        assert error(grad, expected) < 1e-12


@every_kernel
@pytest.mark.parametrize("size", [1e-300, 1e-160, 0.0, 1e150])
def test_tiny_zero_and_huge_output_gradients_keep_their_delta(kernel, size):
    q, k, v, dout = problem(6, 9)
    dout[:, :, 1::2] *= size
    half = Piece(k[:, :, :5], v[:, :, :5], groups(4, 2))
    rest = Piece(k[:, :, 5:], v[:, :, 5:], groups(4, 2))
    out, lse, dq, [(dk, _), _] = truth(q, [half, rest], dout, 0.3)
    delta = (dout * out).sum(-1)
    got_q, [(got_k, _), _] = backward_row(
        dout, q, lse, delta, [half, rest], 0.3, kernel=kernel.name
    )
    assert error(got_q[:, :, 1::2], dq[:, :, 1::2]) < 1e-12
    assert error(got_k, dk) < 1e-12


@every_kernel
def test_garbage_in_dead_rows_reaches_no_gradient(kernel):
    q, k, v, dout = problem(6, 9)
    mask = torch.ones(1, 6, 9, dtype=torch.bool)
    mask[:, 3] = False
    piece = Piece(k, v, groups(4, 2), BlockKind.PARTIAL, mask=mask)
    out, lse, dq, [(dk, dv)] = truth(q, [piece], dout, 0.3)
    delta = (dout * out).sum(-1)
    dout[:, :, 3], delta[:, :, 3] = float("nan"), float("nan")
    got = kernel.backward(dout, q, lse, delta, piece, 0.3)
    for grad, want in zip(got, (dq, dk, dv), strict=True):
        assert error(grad, want) < 1e-12
    assert (got[0][:, :, 3] == 0).all()


def whole_and_pieces(dtype, pieces, rows=96, cols=96, heads=4, kv_heads=2):
    """Gradients and outputs of one FULL call and of the same keys in several pieces."""
    q, k, v, dout = problem(rows, cols, heads, kv_heads, dim=32, dtype=dtype, batch=1)
    one = [Piece(k, v, groups(heads, kv_heads))]
    edges = [i * cols // pieces for i in range(pieces + 1)]
    spans = [slice(a, b) for a, b in pairwise(edges)]
    # A band that holds everything is not joined with its neighbours as FULL pieces are.
    many = [Piece(k[:, :, s], v[:, :, s], groups(heads, kv_heads), BlockKind.BAND) for s in spans]
    out, _, dq, [(dk, dv)] = truth(q, one, dout, 0.2)
    results = []
    for row in (one, many):
        got, lse = forward_row(q, row, 0.2)
        delta = (dout.float() * got.float()).sum(-1)
        got_q, pairs = backward_row(dout, q, lse, delta, row, 0.2)
        parts = [torch.cat([p[i] for p in pairs], dim=2) for i in (0, 1)]
        pairs_of = zip((got, got_q, *parts), (out, dq, dk, dv), strict=True)
        results.append([error(x, y) for x, y in pairs_of])
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pieces", [2, 8, 32])
def test_error_over_many_pieces_is_at_most_twice_that_of_one_call(dtype, pieces):
    one, many = whole_and_pieces(dtype, pieces)
    for single, split in zip(one, many, strict=True):
        assert split <= 2 * single + 4 * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_of_a_group_of_heads_in_16_bits_does_not_grow_with_it(dtype):
    pair, _ = whole_and_pieces(dtype, 1, heads=4, kv_heads=2)
    eight, _ = whole_and_pieces(dtype, 1, heads=16, kv_heads=2)
    assert eight[2] < 1.1 * pair[2]
    assert eight[3] < 1.1 * pair[3]


# ---------------------------------------------------------------- rows of pieces


def mixed_row(dtype=F64):
    """A query chunk over pieces of every kind, some of them side by side in one buffer."""
    q, k, v, dout = problem(8, 40, dtype=dtype)
    at = [slice(0, 7), slice(7, 12), slice(12, 20), slice(20, 28), slice(28, 31), slice(31, 40)]
    mask = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(2)) < 0.4
    heads = groups(4, 2)
    kinds = [
        {},
        {},
        {"kind": BlockKind.BAND, "lo": 0},
        {"kind": BlockKind.PARTIAL, "mask": mask},
        {"kind": BlockKind.EMPTY},
        {},
    ]
    pieces = [Piece(k[:, :, s], v[:, :, s], heads, **o) for s, o in zip(at, kinds, strict=True)]
    return q, pieces, dout


@pytest.mark.parametrize("name", ["auto", *IDS])
def test_a_row_of_mixed_pieces_is_exact(name):
    q, pieces, dout = mixed_row()
    pieces[1] = Piece(pieces[1].k.clone(), pieces[1].v.clone(), pieces[1].kv_of_head)
    out, lse, dq, pairs = truth(q, pieces, dout, 0.3)
    got, got_lse = forward_row(q, pieces, 0.3, kernel=name)
    assert error(got, out) < 1e-13
    assert error(got_lse, lse) < 1e-13
    delta = (dout * got).sum(-1)
    got_q, got_pairs = backward_row(dout, q, got_lse, delta, pieces, 0.3, kernel=name)
    assert error(got_q, dq) < 1e-12
    for got_pair, pair in zip(got_pairs, pairs, strict=True):
        for grad, want in zip(got_pair, pair, strict=True):
            assert error(grad, want) < 1e-12


def test_full_pieces_side_by_side_are_one_call_without_a_copy(monkeypatch):
    q, pieces, _ = mixed_row()
    calls = []
    inner = flash.forward
    monkeypatch.setattr(flash, "forward", lambda q, p, s: calls.append(p) or inner(q, p, s))
    forward_row(q, pieces[:2] + pieces[4:], 0.3)
    assert [(p.kind, p.cols) for p in calls] == [(BlockKind.FULL, 21)]  # 7 + 5 + 9
    calls.clear()
    forward_row(q, pieces[:2], 0.3)
    assert [p.cols for p in calls] == [12]
    assert calls[0].k.data_ptr() == pieces[0].k.data_ptr()


def test_full_pieces_are_joined_by_value_wherever_they_lie():
    q, pieces, dout = mixed_row()
    k, v = pieces[0].k, pieces[0].v
    other_heads = Piece(pieces[1].k, pieces[1].v, (1, 0, 0, 1))
    # As many query heads over other key heads, of another count.
    one_head = Piece(k[:, :1] + 1, v[:, :1] - 1, (0, 0, 0, 0))
    same_map = Piece(torch.cat([k, k], 1) + 2, torch.cat([v, v], 1), (0, 0, 1, 1))
    turned = Piece(k.mT.contiguous().mT, v.mT.contiguous().mT, groups(4, 2))
    _, whole_k, whole_v, _ = problem(8, 40)
    after, second = slice(7, 12), slice(7, 40, 2)
    begin = Piece(whole_k[:, :, :7], whole_v[:, :, :7], groups(4, 2))
    skipping = Piece(whole_k[:, :, second], whole_v[:, :, second], groups(4, 2))
    elsewhere = Piece((whole_k + 1)[:, :, after], (whole_v + 1)[:, :, after], groups(4, 2))
    for row in (
        [begin, skipping],
        [begin, elsewhere],
        [pieces[0], pieces[5]],
        [pieces[5], pieces[0]],
        [pieces[0], pieces[0]],
        [pieces[0], other_heads, pieces[5], one_head, same_map, pieces[2], turned],
    ):
        out, lse, dq, pairs = truth(q, row, dout, 0.3)
        got, got_lse = forward_row(q, row, 0.3)
        assert error(got, out) < 1e-13
        assert error(got_lse, lse) < 1e-13
        got_q, got_pairs = backward_row(dout, q, lse, (dout * out).sum(-1), row, 0.3)
        assert error(got_q, dq) < 1e-12
        for got_pair, pair in zip(got_pairs, pairs, strict=True):
            for grad, want in zip(got_pair, pair, strict=True):
                assert error(grad, want) < 1e-12


def test_a_row_without_pieces_sees_nothing():
    q, pieces, dout = mixed_row()
    for row in ([], [pieces[4]]):
        out, lse = forward_row(q, row, 0.3)
        assert (out == 0).all()
        assert out.shape == q.shape
        assert (lse == -INF).all()
        dq, pairs = backward_row(dout, q, lse, torch.zeros_like(lse), row, 0.3)
        assert (dq == 0).all()
        assert len(pairs) == len(row)
        assert all((x == 0).all() and x.shape == pieces[4].k.shape for p in pairs for x in p)
    assert forward_row(q, [], 0.3, dim_v=5)[0].shape == (2, 4, 8, 5)


@pytest.mark.parametrize("wide", [False, True])
def test_results_are_in_the_dtypes_of_their_inputs_or_wider_if_asked(wide):
    q, pieces, dout = mixed_row(torch.bfloat16)
    for row in (pieces, pieces[:1], [], [pieces[4]]):
        out, lse = forward_row(q, row, 0.3)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        delta = (dout.float() * out.float()).sum(-1)
        dq, pairs = backward_row(dout, q, lse, delta, row, 0.3, wide=wide)
        found = {x.dtype for x in (dq, *(g for p in pairs for g in p))}
        assert found <= ({torch.bfloat16, torch.float32} if wide else {torch.bfloat16})


def test_two_rows_that_share_keys_add_up_to_one_row():
    q, k, v, dout = problem(12, 9)
    heads = groups(4, 2)
    whole = Piece(k, v, heads, BlockKind.BAND, lo=-1)
    out, lse, dq, [(dk, dv)] = truth(q, [whole], dout, 0.3)
    delta = (dout * out).sum(-1)
    queries, found = [], []
    for rows, lo in ((slice(0, 5), -1), (slice(5, 12), -6)):
        piece = Piece(k, v, heads, BlockKind.BAND, lo=lo)
        args = (x[:, :, rows] for x in (dout, q, lse, delta))
        got_q, pairs = backward_row(*args, [piece], 0.3, wide=True)
        queries.append(got_q)
        found.append(pairs[0])
    assert error(torch.cat(queries, dim=2), dq) < 1e-12
    assert error(sum_partials([p[0] for p in found]), dk) < 1e-12
    assert error(sum_partials([p[1] for p in found]), dv) < 1e-12


def test_two_runs_are_bit_equal_and_inputs_stay_as_they_were():
    q, pieces, dout = mixed_row(torch.float32)
    before = [x.clone() for x in (q, dout, *(t for p in pieces for t in (p.k, p.v)))]
    runs = []
    for _ in range(2):
        out, lse = forward_row(q, pieces, 0.3, deterministic=True)
        dq, pairs = backward_row(dout, q, lse, (dout * out).sum(-1), pieces, 0.3)
        runs.append([out, lse, dq, *(g for p in pairs for g in p)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    after = [q, dout, *(t for p in pieces for t in (p.k, p.v))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---------------------------------------------------------------- bad input


def test_a_kernel_that_cannot_is_refused_with_those_that_can():
    q, k, v, _ = problem(5, 7, dim_v=8)
    piece = Piece(k, v, groups(4, 2))
    with pytest.raises(InputError, match=r"'torch_cpu' cannot.*head_dim 16, not 8.*reference"):
        forward_row(q, [piece], 0.3, kernel="torch_cpu")
    with pytest.raises(InputError, match=r"'fancy' is unknown.*auto, torch_cpu, .*reference"):
        choose(q, piece, "fancy")
    assert choose(q, Piece(k, k, groups(4, 2))) is flash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 2, 7, 8, dtype=F64)}, "keys .* for queries"),
        ({"v": torch.zeros(2, 2, 6, 16, dtype=F64)}, "values .* for queries"),
        ({"k": torch.zeros(2, 2, 7, 16)}, "expected one dtype"),
        ({"kv_of_head": (0, 0, 1)}, "kv_of_head"),
        ({"kv_of_head": (0, 0, 1, 2)}, "kv_of_head"),
        ({"kind": BlockKind.PARTIAL}, "mask None"),
        ({"kind": BlockKind.PARTIAL, "mask": torch.ones(2, 5, 7) > 0}, "mask .* of a PARTIAL"),
        ({"kind": BlockKind.PARTIAL, "mask": torch.ones(1, 5, 7)}, "torch.bool"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(change, message):
    q, k, v, _ = problem(5, 7)
    piece = Piece(**{"k": k, "v": v, "kv_of_head": groups(4, 2), **change})
    with pytest.raises(InputError, match=message):
        forward_row(q, [piece], 0.3)
