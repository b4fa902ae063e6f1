"""The extra `fa4`: missing, in another release, or unable; and how it is told bands, by turns."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ultraattn as ua
from ultraattn.errors import InputError, MissingExtraError
from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind
from ultraattn.runtime.dense import dense_attention
from ultraattn.runtime.kernels import Piece, check_name, choose, cudnn, fa4, fused, reference
from ultraattn.runtime.kernels.rows import KERNELS

HERE = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
PIECE = Piece(HERE, HERE, (0, 1))


@pytest.fixture
def installed(monkeypatch):
    """Sets what releases the adapter finds."""

    def has(versions):
        monkeypatch.setattr(fa4, "_installed", versions.get)
        fa4.missing.cache_clear()

    yield has
    fa4.missing.cache_clear()


def test_asked_for_and_missing_names_the_extra(installed):
    installed({})
    for ask in (check_name, lambda name: choose(HERE, PIECE, name)):
        with pytest.raises(MissingExtraError, match=r"flash-attn-4 .* pip install 'ultraattn\[fa4"):
            ask("fa4")
    check_name("auto")


def test_a_release_that_was_not_compared_is_refused(installed):
    for package in fa4.VERSIONS:
        installed({**fa4.VERSIONS, package: "0.6.3"})
        with pytest.raises(MissingExtraError, match=f"{package} .* and 0.6.3 is installed"):
            check_name("fa4")
    installed(fa4.VERSIONS)
    check_name("fa4")


def test_installed_and_unable_says_why(installed):
    installed(fa4.VERSIONS)
    with pytest.raises(InputError, match=r"'fa4' cannot serve this .*runs on CUDA"):
        choose(HERE, PIECE, "fa4")


def test_auto_takes_it_where_it_can_and_cudnn_cannot(installed, monkeypatch):
    installed(fa4.VERSIONS)
    for kernel in set(KERNELS) - {fa4, reference}:
        monkeypatch.setattr(kernel, "refusal", lambda *_: "unable")
    assert choose(HERE, PIECE).name == "reference"
    monkeypatch.setattr(fa4, "refusal", lambda *_: None)
    assert choose(HERE, PIECE).name == "fa4"
    monkeypatch.setattr(cudnn, "refusal", lambda *_: None)
    assert choose(HERE, PIECE).name == "cudnn"


def test_the_extra_pins_the_releases_that_were_compared():
    path = Path(ua.__file__).parents[2] / "pyproject.toml"
    (extra,) = re.findall(r"^fa4 = \[(.*?)^\]", path.read_text(), re.MULTILINE | re.DOTALL)
    pins = re.findall(r'"([a-z0-9-]+)\[cu13\]==([0-9a-z.]+);', extra)
    assert dict(pins) == fa4.VERSIONS


def window(rows, cols, causal=False, window_size_left=None, window_size_right=None):
    """What FlashAttention-4 computes: a window around the end-aligned diagonal."""
    right = 0 if causal else window_size_right
    end = torch.arange(rows)[:, None] + cols - rows
    keys = torch.arange(cols)
    seen = torch.ones(rows, cols, dtype=torch.bool)
    if window_size_left is not None:
        seen &= keys >= end - window_size_left
    if right is not None:
        seen &= keys <= end + right
    return seen


class Package:
    """Dense attention under the names, layouts and arguments of the package; one call at a time."""

    def __init__(self):
        self.busy = False

    def turn(self):
        assert not self.busy, "two threads at once"
        self.busy = True
        time.sleep(0.002)
        self.busy = False

    def _flash_attn_fwd(self, q, k, v, *, softmax_scale, return_lse, **band):
        self.turn()
        assert return_lse
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        seen = window(q.shape[2], k.shape[2], **band)
        out, lse = dense_attention(q, k, v, seen, scale=softmax_scale)
        return out.to(q.dtype).transpose(1, 2), lse.to(torch.float32), None

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, softmax_scale, **band):
        self.turn()
        q, k, v, out, dout = (x.transpose(1, 2).double() for x in (q, k, v, out, dout))
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = (softmax_scale * q @ wide_k.mT).masked_fill(
            ~window(q.shape[2], k.shape[2], **band), float("-inf")
        )
        p = torch.exp(scores - lse[..., None])
        ds = p * (dout @ wide_v.mT - (dout * out).sum(-1, keepdim=True)) * softmax_scale
        shape = (*k.shape[:2], group, *k.shape[2:])
        dk, dv = ((x.mT @ y).reshape(shape).sum(2) for x, y in ((ds, q), (p, dout)))
        return [x.transpose(1, 2).float() for x in (ds @ wide_k, dk, dv)]


BANDS = {
    "full": (OPEN_LO, OPEN_HI),
    "causal": (0, OPEN_HI),
    "end-aligned": (-9, OPEN_HI),
    "anti-causal": (OPEN_LO, 3),
    "window": (-4, 6),
}


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("rows", "cols"), [(20, 20), (12, 25), (25, 12)])
def test_the_adapter_around_the_package_equals_the_reference(monkeypatch, rows, cols, band):
    package = Package()
    monkeypatch.setattr(fa4, "_interface", lambda: package)
    generator = torch.Generator().manual_seed(rows)
    q, dout = (torch.randn(2, 4, rows, 64, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 2, cols, 64, generator=generator) for _ in range(2))
    piece = Piece(k, v, (0, 0, 1, 1), BlockKind.BAND, *BANDS[band])
    out, lse = fa4.forward(q, piece, 0.1)
    true_out, true_lse = reference.forward(q, piece, 0.1)
    assert torch.allclose(out, true_out, atol=1e-5)
    assert torch.allclose(lse, true_lse, atol=1e-5)
    whole = torch.logaddexp(true_lse, torch.zeros_like(true_lse))  # a part of more keys
    delta = (dout * true_out).sum(-1) * 0.7
    got = fa4.backward(dout, q, whole, delta, piece, 0.1)
    true = reference.backward(dout, q, whole, delta, piece, 0.1)
    for some, wanted in zip(got, true, strict=True):
        assert torch.allclose(some, wanted, atol=1e-5)


def test_threads_take_turns(monkeypatch):
    package = Package()
    monkeypatch.setattr(fa4, "_interface", lambda: package)
    x = torch.randn(1, 2, 8, 64)
    piece = Piece(x, x, (0, 1))
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(fa4.forward, x, piece, 0.1) for _ in range(8)]
        calls += [
            threads.submit(fa4.backward, x, x, x[..., 0].abs(), x[..., 0], piece, 0.1)
            for _ in range(8)
        ]
        for call in calls:
            call.result()


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    rows=st.integers(1, 12), cols=st.integers(1, 12),
    lo=st.one_of(st.just(OPEN_LO), st.integers(-14, 14)),
    hi=st.one_of(st.just(OPEN_HI), st.integers(-14, 14)),
)  # fmt: skip
def test_every_visible_pair_of_a_band_is_computed_once(rows, cols, lo, hi):
    keys = torch.zeros(1, 1, cols, 64)
    distance = torch.arange(rows)[:, None] - torch.arange(cols)
    count = torch.zeros(rows, cols, dtype=torch.int32)
    for part in fused._parts(fa4.OPERATOR, Piece(keys, keys, (0,), BlockKind.BAND, lo, hi), rows):
        count[part.top : part.bottom, part.left : part.right] += window(
            part.rows, part.cols, **fa4._band(part)
        ).int()
        assert all(limit is None or limit >= 0 for limit in fa4._band(part).values())
    assert torch.equal(count, ((distance >= lo) & (distance <= hi)).int())
