"""Each kernel against the reference in float64: O, natural LSE, gradients from a global LSE."""

import pytest
import torch

from tests.gpu.cases import DEVICE, draw, error
from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind
from ultraattn.runtime.kernels import Piece, cudnn, fa4, flash2, reference, sparse, standin
from ultraattn.runtime.merge import merge_partials

SHAPES = {
    "full": (BlockKind.FULL, 300, 200, OPEN_LO, OPEN_HI),
    "one row": (BlockKind.FULL, 1, 130, OPEN_LO, OPEN_HI),
    "causal": (BlockKind.BAND, 256, 256, 0, OPEN_HI),
    "strict causal": (BlockKind.BAND, 200, 200, 1, OPEN_HI),
    "end-aligned": (BlockKind.BAND, 130, 300, -170, OPEN_HI),
    "more queries": (BlockKind.BAND, 300, 130, 0, OPEN_HI),
    "anti-causal": (BlockKind.BAND, 256, 192, OPEN_LO, 5),
    "window": (BlockKind.BAND, 260, 260, -20, 40),
    "partial": (BlockKind.PARTIAL, 150, 190, OPEN_LO, OPEN_HI),
    "partial by head": (BlockKind.PARTIAL, 150, 190, OPEN_LO, OPEN_HI),
}
CAUSAL = ("full", "one row", "causal", "strict causal", "end-aligned", "more queries")
SERVED = {
    cudnn: CAUSAL,
    flash2: (*CAUSAL, "anti-causal", "window"),
    fa4: (*CAUSAL, "anti-causal", "window"),
    sparse: tuple(SHAPES),
}
DIMS = {
    cudnn: (64, 96, 128),
    flash2: (64, 96, 128, 192, 256),
    fa4: fa4.HEAD_DIMS,
    sparse: (40, 64, 128, 256),
}


def with_marks(kernel, *values):
    marks = pytest.mark.skipif(
        kernel is fa4 and fa4.missing() is not None, reason=str(fa4.missing())
    )
    return pytest.param(kernel, *values, marks=marks)


CELLS = [
    with_marks(kernel, shape, dim)
    for kernel, shapes in SERVED.items()
    for dim in DIMS[kernel]
    for shape in shapes
]
HEADS = ((4, 4), (8, 2), (8, 1))


def piece_of(shape, seed, heads, kv_heads, dim, dim_v, dtype=torch.bfloat16):
    kind, rows, cols, lo, hi = SHAPES[shape]
    q = draw(seed, 2, heads, rows, dim, dtype)
    k, v = (
        draw(seed + 1, 2, kv_heads, cols, dim, dtype),
        draw(seed + 2, 2, kv_heads, cols, dim_v, dtype),
    )
    mask = None
    if kind is BlockKind.PARTIAL:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        tables = heads if shape == "partial by head" else 1
        mask = torch.rand(tables, rows, cols, device=DEVICE, generator=generator) > 0.6
        mask[:, 7] = False
        mask[:, 64:128, 64:128] = False
    index = tuple(head * kv_heads // heads for head in range(heads))
    return q, Piece(k, v, index, kind, lo, hi, mask)


def wide(piece):
    return Piece(
        piece.k.double(),
        piece.v.double(),
        piece.kv_of_head,
        piece.kind,
        piece.lo,
        piece.hi,
        piece.mask,
    )


def check(kernel, q, piece, scale, limit=6e-3):
    rows = q.shape[2]
    assert kernel.refusal(q, piece, False) is None
    out, lse = kernel.forward(q, piece, scale)
    true_out, true_lse = reference.forward(q.double(), wide(piece), scale)
    seen = ~true_lse.isinf()
    assert torch.equal(lse.isinf(), true_lse.isinf())
    assert bool((out[~seen] == 0).all())
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert float((lse[seen].double() - true_lse[seen]).abs().max()) < 2e-3
    assert error(out, true_out) < limit
    # Backward as a part of more keys: a larger LSE, an O of all of them, some rows blind.
    dout, whole = (
        draw(91, *out.shape[:2], rows, out.shape[3], q.dtype),
        draw(92, *out.shape[:2], rows, out.shape[3]),
    )
    delta = (dout.float() * whole.float()).sum(-1)
    more = draw(93, *out.shape[:2], rows, 1, torch.float32)[..., 0].contiguous()
    glob = torch.logaddexp(true_lse.float(), more)
    glob[:, :, rows // 3] = float("-inf")
    delta[:, :, rows // 3] = 0.0
    dout[:, :, rows // 2] = 0.0
    delta[:, :, rows // 2] = 0.0
    got = kernel.backward(dout, q, glob, delta, piece, scale)
    true = reference.backward(
        dout.double(), q.double(), glob.double(), delta.double(), wide(piece), scale
    )
    for name, some, wanted in zip(("dq", "dk", "dv"), got, true, strict=True):
        assert some.shape == wanted.shape
        assert error(some, wanted) < limit, name
    return out


@pytest.mark.parametrize(
    ("kernel", "shape", "dim"), CELLS, ids=lambda x: str(getattr(x, "name", x))
)
def test_a_kernel_equals_the_reference(kernel, shape, dim):
    for seed, (heads, kv_heads) in enumerate(HEADS):
        q, piece = piece_of(shape, 10 * seed, heads, kv_heads, dim, dim)
        check(kernel, q, piece, 0.17)


@pytest.mark.skipif(fa4.missing() is not None, reason=str(fa4.missing()))
@pytest.mark.parametrize("shape", ["full", "causal", "window"])
@pytest.mark.parametrize("dim", fa4.HEAD_DIMS)
def test_fa4_is_right_over_many_tiles_and_every_time(shape, dim):
    """A rare race of earlier versions showed in some of many calls."""
    kind, _, _, lo, hi = SHAPES[shape]
    q, dout = draw(1, 1, 8, 1900, dim), draw(2, 1, 8, 1900, dim)
    keys = draw(3, 1, 2, 1900, dim), draw(4, 1, 2, 1900, dim)
    band = (-900, 700) if shape == "window" else (lo, hi)
    piece = Piece(*keys, tuple(h // 4 for h in range(8)), kind, *band)
    out, lse = fa4.forward(q, piece, 0.1)
    true_out, true_lse = reference.forward(q.double(), wide(piece), 0.1)
    assert error(out, true_out) < 6e-3
    assert float((lse - true_lse).abs().max()) < 2e-3
    delta = (dout.double() * true_out).sum(-1)
    true = reference.backward(dout.double(), q.double(), true_lse, delta, wide(piece), 0.1)
    worst = torch.zeros(4, dtype=torch.float64, device=DEVICE)
    for _ in range(150):
        some, _ = fa4.forward(q, piece, 0.1)
        grads = fa4.backward(dout, q, lse, delta.float(), piece, 0.1)
        found = [
            (got.double() - wanted).norm() / wanted.norm()
            for got, wanted in zip((some, *grads), (true_out, *true), strict=True)
        ]
        worst = torch.maximum(worst, torch.stack(found))
    assert float(worst.max()) < 6e-3, worst


@pytest.mark.parametrize("kernel", [cudnn, sparse], ids=lambda k: k.name)
def test_values_of_another_width(kernel):
    for dim, dim_v in ((128, 64), (64, 128)):
        q, piece = piece_of("causal", 3, 4, 2, dim, dim_v)
        check(kernel, q, piece, dim**-0.5)


@pytest.mark.parametrize(
    "kernel", [with_marks(k) for k in (cudnn, flash2, fa4, sparse)], ids=lambda k: k.name
)
def test_float16_and_head_ranges_that_split_a_group(kernel):
    q, piece = piece_of("end-aligned", 4, 6, 3, 64, 64, torch.float16)
    check(
        kernel,
        q,
        Piece(piece.k, piece.v, (0, 1, 1, 1, 2, 2), piece.kind, piece.lo, piece.hi),
        0.1,
        2e-3,
    )


def test_sparse_takes_float32():
    for shape in ("window", "partial"):
        q, piece = piece_of(shape, 5, 4, 2, 64, 64, torch.float32)
        check(sparse, q, piece, 0.125, 3e-6)


def test_sparse_is_bit_equal_from_run_to_run():
    q, piece = piece_of("partial", 6, 8, 2, 128, 128)
    out, lse = sparse.forward(q, piece, 0.1)
    delta = lse * 0.1
    delta[lse.isinf()] = 0.0
    first, second = (sparse.backward(q, q, lse, delta, piece, 0.1) for _ in range(2))
    assert torch.equal(out, sparse.forward(q, piece, 0.1)[0])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "kernel", [with_marks(k) for k in (cudnn, flash2, fa4)], ids=lambda k: k.name
)
def test_what_a_kernel_cannot_serve_is_refused(kernel):
    q, piece = piece_of("full", 1, 4, 4, 64, 64)
    assert "dtype" in kernel.refusal(q.float(), piece, False)
    assert "order" in kernel.refusal(q, piece, True)
    q, piece = piece_of("partial", 1, 4, 4, 64, 64)
    assert "mask of its own" in kernel.refusal(q, piece, False)
    q, piece = piece_of("full", 1, 4, 4, 60, 60)
    assert "multiple of 8" in kernel.refusal(q, piece, False)


def test_the_stand_in_has_its_delta_in_one_pass_as_in_plain_torch():
    dout, whole = draw(1, 2, 3, 100, 96), draw(2, 2, 3, 100, 96)
    delta = (dout.float() * whole.float()).sum(-1)
    lse = delta.clone()
    lse[:, :, 5] = float("-inf")
    out, shifted = standin.stand_in(dout, delta, lse)
    plain, plain_lse = standin.stand_in(dout.cpu(), delta.cpu(), lse.cpu())
    assert error(out.cpu(), plain) < 1e-3
    assert torch.equal(shifted.cpu(), plain_lse)
    assert error((out.float() * dout.float()).sum(-1), delta) < 2e-3


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_merging_in_one_pass_equals_merging_in_plain_torch(parts):
    outs = [draw(i, 2, 4, 77, 96) for i in range(parts)]
    lses = [draw(50 + i, 2, 4, 77, 1, torch.float32)[..., 0].contiguous() * 4 for i in range(parts)]
    for index, lse in enumerate(lses):
        lse[:, :, index * 10 : 40] = float("-inf")
    outs[0][:, :, 0] = float("nan")  # a row that has seen nothing
    out, lse = merge_partials(outs, lses, torch.float32)
    wanted, wanted_lse = merge_partials(
        [x.cpu() for x in outs], [x.cpu() for x in lses], torch.float32
    )
    assert torch.equal(lse.cpu().isinf(), wanted_lse.isinf())
    assert torch.allclose(out.cpu(), wanted, atol=1e-6)
    assert torch.allclose(lse.cpu(), wanted_lse, atol=1e-5)
    target = torch.full(
        (2, 77, 4, 96), float("nan"), device=DEVICE, dtype=torch.bfloat16
    ).transpose(1, 2)
    merge_partials(outs, lses, out=target)
    assert error(target.cpu(), wanted) < 3e-3
