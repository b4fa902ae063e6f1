"""Measures plans beside their rivals on several GPUs, in turns on the same tensors, checked first.

Called by `benchmarks/gpu.py peers`. Three parts, each into a file that is written after every cell:

- dense: causal; beside PyTorch's context_parallel (all-gather and all-to-all, cuDNN).
- sparse: beside PyTorch's FlexAttention context parallel (keys gathered, head-tail shards).
- trace: host time a call, and the share of copy time that runs beside kernels.

One head of every candidate is compared with float64 before it is timed. The ideal is the time of
the fastest single-GPU candidate of the cell over the number of ranks.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_masks import DIM, Seen, documents, seen, truth
from torch import Tensor

import gpu
import ultraattn as ua
from ultraattn.cluster import Cluster
from ultraattn.masks import Mask
from ultraattn.runtime.kernels import fa4

NAMES = ("out", "dq", "dk", "dv")
CHUNKS = {"global_local": 16, "document": 32, "window": 16}
"""Chunks of our plans where the least number that a layout takes leaves large PARTIAL blocks, or
moves more keys than are looked at."""


@dataclasses.dataclass
class Run:
    """A candidate: `forward` gives out, `both` gives (out, dq, dk, dv); `at` are its tokens."""

    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, ...]]
    at: Tensor
    single: bool = False


class Bench:
    """One rank's group, cell by cell."""

    def __init__(self, rank: int, ranks: int, end: float, masks: list[str]) -> None:
        self.masks = masks
        self.rank, self.ranks, self.end = rank, ranks, end
        self.mesh = dist.device_mesh.init_device_mesh(gpu.DEVICE, (ranks,))
        self.alone = [dist.new_group([r]) for r in range(ranks)][rank]
        self.cluster = Cluster.load("h200")
        self.contexts: list[Any] = []

    def late(self) -> bool:
        """Whether the time is over, for all ranks alike."""
        found = torch.tensor(int(time.monotonic() > self.end), device=gpu.DEVICE)
        dist.broadcast(found, 0)
        return bool(found)

    def worst(self, values: list[float]) -> list[float]:
        """Each value on the rank where it is largest."""
        table = torch.tensor(values, device=gpu.DEVICE, dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return [round(x, 6) for x in table.tolist()]

    # Candidates

    def ours(self, mask: Mask, whole: list[Tensor], ranks: int, chunks: int | None = None) -> Run:
        """The `tile` plan over all ranks, or over one."""
        _, heads, tokens, _ = whole[0].shape
        plan = ua.plan(
            mask, seqlen=tokens, heads=heads, kv_heads=whole[1].shape[1], head_dim=DIM,
            cluster=self.cluster.resize(nodes=1, gpus_per_node=ranks), effort="fast",
            chunks=chunks,
        )  # fmt: skip
        single = ranks == 1
        place = 0 if single else self.rank
        attention = ua.Attention(
            plan, self.alone if single else None, graph=True, timeout_s=60,
            transport="nccl" if single else "symmetric",
        )  # fmt: skip
        every = torch.arange(tokens, device=gpu.DEVICE)
        at = plan.shard(every, place, dim=0)
        local = [x.transpose(1, 2)[:, at].contiguous().transpose(1, 2) for x in whole]
        found = self.autograd(attention, local, at)
        found.single = single
        return found

    def autograd(
        self, function: Callable[..., Any], local: list[Tensor], at: Tensor, grad: bool = False
    ) -> Run:
        """A function of query, key and value, by autograd.

        `grad` lets the forward pass know gradients too, so that a compiler compiles it once.
        """
        *ins, dout = local
        leaves = [x.requires_grad_() for x in ins]

        def forward() -> Tensor:
            with torch.set_grad_enabled(grad):
                return function(*leaves).detach()  # type: ignore[no-any-return]

        def both() -> tuple[Tensor, ...]:
            out = function(*leaves)
            return (out, *torch.autograd.grad(out, leaves, dout))

        return Run(forward, both, at)

    def head_tail(self, tokens: int) -> Tensor:
        """The order of tokens in which rank after rank gets a head and a tail chunk."""
        half = tokens // (2 * self.ranks)
        chunks = torch.arange(tokens, device=gpu.DEVICE).view(2 * self.ranks, half)
        order = [c for r in range(self.ranks) for c in (r, 2 * self.ranks - 1 - r)]
        return chunks[order].flatten()

    def context_parallel(self, whole: list[Tensor], method: str) -> Run:
        """PyTorch's context_parallel, cuDNN, balanced by head and tail."""
        from torch.distributed.tensor.experimental import _attention as experimental
        from torch.nn.attention import SDPBackend, sdpa_kernel

        tokens = whole[0].shape[2]
        at = self.head_tail(tokens).view(self.ranks, -1)[self.rank].clone()
        local = [x[:, :, at].contiguous() for x in whole]
        every = torch.arange(tokens, device=gpu.DEVICE)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out

        base = self.autograd(function, local, at)

        def inside(run: Callable[[], Any]) -> Callable[[], Any]:
            def wrapped() -> Any:
                experimental.set_rotate_method(method)
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return run()

            return wrapped

        if not self.contexts:  # one for both methods; its buffer shows the order of tokens
            context = experimental.context_parallel(
                self.mesh, buffers=[every], buffer_seq_dims=[0], no_restore_buffers={every}
            )
            context.__enter__()
            self.contexts.append(context)
            if not torch.equal(every, at):
                raise RuntimeError("the shards are not by head and tail")
        return Run(inside(base.forward), inside(base.both), at)

    def leave(self) -> None:
        """Leaves PyTorch's contexts."""
        while self.contexts:
            self.contexts.pop().__exit__(None, None, None)

    def flex(self, mask: Seen, whole: list[Tensor]) -> Run:
        """FlexAttention on one GPU."""
        from torch.nn.attention.flex_attention import create_block_mask

        tokens = whole[0].shape[2]
        blocks = create_block_mask(mask.rule(), None, None, tokens, tokens, device=gpu.DEVICE)
        every = torch.arange(tokens, device=gpu.DEVICE)
        found = self.autograd(
            functools.partial(compiled_flex(), block_mask=blocks), whole, every, True
        )
        return dataclasses.replace(found, single=True)

    def flex_parallel(self, mask: Seen, whole: list[Tensor]) -> Run:
        """PyTorch's FlexAttention context parallel: gathered keys and values, head-tail shards."""
        from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import (
            flex_cp_allgather,
        )
        from torch.nn.attention.flex_attention import create_block_mask

        tokens = whole[0].shape[2]
        order = self.head_tail(tokens)
        at = order.view(self.ranks, -1)[self.rank].clone()
        rule = mask.rule(at.int(), order.int())
        blocks = create_block_mask(rule, None, None, len(at), tokens, device=gpu.DEVICE)
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        flex = compiled_flex()

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = flex_cp_allgather(k.contiguous(), v.contiguous(), 2, name)
            return flex(q, k, v, block_mask=blocks)  # type: ignore[no-any-return]

        return self.autograd(function, [x[:, :, at].contiguous() for x in whole], at, True)

    def cudnn(self, whole: list[Tensor], causal: bool) -> Run:
        """cuDNN on one GPU, as a graph."""
        q, k, v, dout = whole
        n = q.shape[2]
        seed = torch.zeros((), dtype=torch.int64, device=gpu.DEVICE)
        aten, scale = torch.ops.aten, DIM**-0.5

        def forward() -> Any:
            return aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, False, scale=scale
            )

        def both() -> Any:
            out, lse, *_ = forward()
            rest = (seed, seed, None, None, None, n, n, 0.0, causal)
            return out, *aten._scaled_dot_product_cudnn_attention_backward(
                dout, q, k, v, out, lse, *rest, scale=scale
            )

        return self.graphed(lambda: forward()[0], both, n)

    def flash2(self, whole: list[Tensor], window: int, documents: list[int]) -> Run:
        """FlashAttention-2 on one GPU, as a graph: a causal window, or causal documents."""
        n = whole[0].shape[2]
        q, k, v, dout = (x.transpose(1, 2).contiguous() for x in whole)
        edges, longest = None, n
        if documents:
            q, k, v, dout = (x[0] for x in (q, k, v, dout))
            longest = max(documents)
            edges = torch.tensor([0, *documents], device=gpu.DEVICE).cumsum(0).int()
        unused = torch.zeros(2, dtype=torch.int64, device=gpu.DEVICE)
        sizes = {"scale": DIM**-0.5}
        if window:
            sizes |= {"window_size_left": window - 1, "window_size_right": 0}
        causal = not window

        def forward() -> Any:
            return torch.ops.aten._flash_attention_forward(
                q, k, v, edges, edges, longest, longest, 0.0, causal, False, **sizes
            )

        def both() -> Any:
            out, lse, *_ = forward()
            grads = torch.ops.aten._flash_attention_backward(
                dout, q, k, v, out, lse, edges, edges, longest, longest, 0.0, causal,
                unused, unused, **sizes,
            )  # fmt: skip
            return tuple(heads_first(x) for x in (out, *grads))

        return self.graphed(lambda: heads_first(forward()[0]), both, n)

    def fa4(self, whole: list[Tensor], window: int, documents: list[int]) -> Run:
        """FlashAttention-4 on one GPU, as a graph: a causal window, or causal documents."""
        from flash_attn.cute import interface

        n = whole[0].shape[2]
        q, k, v, dout = (x.transpose(1, 2).contiguous() for x in whole)
        given: dict[str, Any] = {"softmax_scale": DIM**-0.5, "causal": not window}
        if window:
            given |= {"window_size_left": window - 1, "window_size_right": 0}
        if documents:
            q, k, v, dout = (x[0] for x in (q, k, v, dout))
            edges = torch.tensor([0, *documents], device=gpu.DEVICE).cumsum(0).int()
            given |= {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
            given |= {"max_seqlen_q": max(documents), "max_seqlen_k": max(documents)}

        def forward() -> Any:
            return interface._flash_attn_fwd(q, k, v, return_lse=True, **given)

        def both() -> Any:
            out, lse, *_ = forward()
            grads = interface._flash_attn_bwd(q, k, v, out, dout, lse, **given)
            return tuple(heads_first(x) for x in (out, *grads[:3]))

        return self.graphed(lambda: heads_first(forward()[0]), both, n)

    def graphed(self, forward: Callable[[], Any], both: Callable[[], Any], tokens: int) -> Run:
        """Both passes as graphs on one GPU."""
        every = torch.arange(tokens, device=gpu.DEVICE)
        kept: dict[str, Any] = {}
        runs = {}
        for name, run in (("forward", forward), ("both", both)):

            def keep(name: str = name, run: Callable[[], Any] = run) -> None:
                kept[name] = run()

            replay = gpu.captured(keep)

            def again(name: str = name, replay: Callable[[], Any] = replay) -> Any:
                replay()
                return kept[name]

            runs[name] = again
        return Run(runs["forward"], runs["both"], every, single=True)

    # A cell

    def build(self, makers: dict[str, Callable[[], Run]], notes: dict[str, str]) -> dict[str, Run]:
        """The candidates that work on all ranks, each run once; why others do not, in `notes`."""
        found = {}
        for name, make in makers.items():
            start, why = time.perf_counter(), ""
            try:
                run = make()
                run.forward()
                run.both()
                torch.cuda.synchronize()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:300]
            if self.worst([float(bool(why))])[0]:
                notes[name] = why or "another rank failed"
                if self.rank == 0:
                    print("not measured", name, notes[name], flush=True)
                continue
            found[name] = run
            if self.rank == 0:
                print(f"  {name} made in {time.perf_counter() - start:.1f} s", flush=True)
        return found

    def errors(self, runs: dict[str, Run], true: tuple[Tensor, ...]) -> dict[str, Any]:
        """Relative errors of head 0 against float64, on the worst rank."""
        found = {}
        for name, run in runs.items():
            got = run.both()
            some = [
                float((x[0, 0].double() - y[run.at]).norm() / y[run.at].norm())
                for x, y in zip(got, true, strict=True)
            ]
            found[name] = dict(zip(NAMES, self.worst(some), strict=True))
        return found

    def turns(
        self, runs: dict[str, Callable[[], Any]], turns: int, burst: int
    ) -> dict[str, list[float]]:
        """Milliseconds on the slowest rank: in each turn a burst of every candidate."""
        for run in runs.values():
            for _ in range(4):
                run()
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(turns):
            for name, run in runs.items():
                torch.cuda.synchronize()
                dist.barrier()
                found[name] += gpu.timed(run, burst, warm=1)
        return {name: self.worst(ms) for name, ms in found.items()}

    def cell(
        self,
        cell: dict[str, Any],
        mask: Mask,
        makers: Callable[[list[Tensor], Seen], dict[str, Callable[[], Run]]],
        flop_pairs: int,
    ) -> dict[str, Any]:
        """Checks, then times, all candidates of a cell."""
        heads, kv_heads, tokens = cell["heads"], cell["kv_heads"], cell["tokens"]
        whole = [
            gpu.draw(h, tokens, DIM, i) for i, h in enumerate((heads, kv_heads, kv_heads, heads))
        ]
        on_device = seen(mask, tokens)
        notes: dict[str, str] = {}
        runs = self.build(makers(whole, on_device), notes)
        true = truth(on_device, *whole)
        errors = self.errors(runs, true)
        del true
        tflop = 4 * flop_pairs * DIM / 1e12
        turns, burst = (3, 2) if tflop > 10 else (4, 3)
        cell |= {"not_measured": notes, "errors": errors, "exact": self.exact(runs, errors)}
        for what, work in (("forward", tflop), ("forward_backward", 3.5 * tflop)):
            chosen = {
                name: run.forward if what == "forward" else run.both for name, run in runs.items()
            }
            ms = self.turns(chosen, turns, burst)
            middle = {name: statistics.median(x) for name, x in ms.items()}
            for name, x in ms.items():
                gpu.rate(work / (1 if runs[name].single else self.ranks), x)
            single = {name: middle[name] for name, run in runs.items() if run.single}
            ideal = min(single.values()) / self.ranks
            cell[what] = {
                "ms": ms,
                "median_ms": {name: round(x, 4) for name, x in middle.items()},
                "ideal_ms": round(ideal, 4),
                "ideal_of": min(single, key=lambda name: single[name]),
                "over_ideal": {
                    name: round(x / ideal, 3) for name, x in middle.items() if name not in single
                },
            }
        return cell

    def exact(self, runs: dict[str, Run], errors: dict[str, Any]) -> dict[str, bool]:
        """Whether a candidate has at most twice the least error of one GPU, and a quarter ulp."""
        slack = torch.finfo(torch.bfloat16).eps / 4
        least = {
            what: min(errors[name][what] for name, run in runs.items() if run.single)
            for what in NAMES
        }
        return {
            name: all(some[what] <= 2 * least[what] + slack for what in NAMES)
            for name, some in errors.items()
        }

    def dense(self) -> Iterator[dict[str, Any]]:
        """Causal cells beside context_parallel."""
        mask = ua.masks.causal()
        for tokens in (8192, 32768):
            cell: dict[str, Any] = {
                "mask": "causal", "tokens": tokens, "heads": 32, "kv_heads": 32
            }  # fmt: skip

            def makers(whole: list[Tensor], _: Seen) -> dict[str, Callable[[], Run]]:
                part = functools.partial
                return {
                    "cudnn, one GPU": part(self.cudnn, whole, True),
                    "ours": part(self.ours, mask, whole, self.ranks),
                    "torch all-gather": part(self.context_parallel, whole, "allgather"),
                    "torch all-to-all": part(self.context_parallel, whole, "alltoall"),
                }

            yield self.cell(dict(cell), mask, makers, 32 * tokens * (tokens + 1) // 2)
            self.leave()

    def sparse(self) -> Iterator[dict[str, Any]]:
        """Sparse cells beside FlexAttention context parallel, the most valuable first."""
        for tokens, heads in ((16384, 32), (16384, 8), (65536, 32), (65536, 8)):
            packed = documents(tokens)
            masks = {
                "window": ua.masks.sliding_window(4096),
                "document": ua.masks.document(packed),
                "strided": ua.masks.strided(),
                "global_local": ua.masks.global_local(),
                "star": ua.masks.star(),
                "streaming": ua.masks.streaming(),
            }
            for name, mask in masks.items():
                if self.masks and name not in self.masks:
                    continue
                if self.late():
                    return
                window, parts = 4096 * (name == "window"), packed if name == "document" else []

                def makers(
                    whole: list[Tensor],
                    on_device: Seen,
                    mask: Mask = mask,
                    window: int = window,
                    parts: list[int] = parts,
                    fine: int | None = CHUNKS.get(name),
                    tokens: int = tokens,
                ) -> dict[str, Callable[[], Run]]:
                    part = functools.partial
                    found: dict[str, Callable[[], Run]] = {
                        "ours": part(self.ours, mask, whole, self.ranks, fine),
                        "ours, one GPU": part(self.ours, mask, whole, 1, fine or mask.cells),
                        "flex, one GPU": part(self.flex, on_device, whole),
                        "flex context parallel": part(self.flex_parallel, on_device, whole),
                    }
                    if fine and tokens < 65536:
                        found["ours, default chunks"] = part(self.ours, mask, whole, self.ranks)
                    if window or parts:
                        found["flash2, one GPU"] = part(self.flash2, whole, window, parts)
                    if (window or parts) and fa4.missing() is None:
                        found["fa4, one GPU"] = part(self.fa4, whole, window, parts)
                    return found

                plan = ua.plan(
                    mask, seqlen=tokens, heads=heads, head_dim=DIM, effort="instant",
                    cluster=self.cluster.resize(nodes=1, gpus_per_node=self.ranks),
                )  # fmt: skip
                cell = {"mask": name, "tokens": tokens, "heads": heads, "kv_heads": heads}
                yield self.cell(cell, mask, makers, plan.problem.visible_pairs)

    def trace(self) -> Iterator[dict[str, Any]]:
        """Host time a call at 8k, copies beside kernels at 32k; causal, 32 heads."""
        mask = ua.masks.causal()
        for tokens in (8192, 32768):
            whole = [gpu.draw(32, tokens, DIM, i) for i in range(4)]
            run = self.ours(mask, whole, self.ranks)
            for one in (run.forward, run.both):
                for _ in range(5):
                    one()
            cell: dict[str, Any] = {
                "mask": "causal", "tokens": tokens, "heads": 32, "kv_heads": 32
            }  # fmt: skip
            cell["host_us"] = {
                "forward": gpu.host_us(run.forward),
                "forward_backward": gpu.host_us(run.both),
            }
            for name, one in (("forward", run.forward), ("forward_backward", run.both)):
                cell[f"{name}_overlap"] = overlap(one)
            yield cell


def heads_first(x: Tensor) -> Tensor:
    """(batch, heads, tokens, dim) of what FlashAttention-2 gives."""
    return (x if x.ndim == 4 else x[None]).transpose(1, 2)


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    """FlexAttention, compiled once for each shape."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, dynamic=False)


def overlap(run: Callable[[], Any], calls: int = 3) -> dict[str, Any]:
    """Time of copies from or to a peer in `calls` calls, and the share of it beside kernels."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        kind = event.get("cat")
        if kind in ("kernel", "gpu_memcpy"):
            name = event["name"] if kind == "gpu_memcpy" else kind
            spans.setdefault(name, []).append((event["ts"], event["ts"] + event["dur"]))
    busy = merged(spans.pop("kernel", []))
    found: dict[str, Any] = {"calls": calls, "kernel_us": round(sum(b - a for a, b in busy), 1)}
    for name, some in spans.items():
        total = sum(b - a for a, b in some)
        hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in some for c, d in busy)
        found[name] = {
            "count": len(some), "us": round(total, 1), "hidden": round(hidden / max(total, 1e-9), 4)
        }  # fmt: skip
    return found


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans as disjoint ones."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def work(
    rank: int,
    ranks: int,
    port: int,
    seconds: float,
    folder: str,
    parts: list[str],
    masks: list[str],
) -> None:
    """The parts on one rank, each cell written as it comes."""
    faulthandler.dump_traceback_later(seconds + 60, exit=True)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "nccl", init_method=address, rank=rank, world_size=ranks,
    )  # fmt: skip
    bench = Bench(rank, ranks, time.monotonic() + seconds, masks)
    for part in parts:
        cells: list[dict[str, Any]] = []
        for cell in getattr(bench, part)():
            cells.append(cell)
            if rank == 0:
                whole = {"machine": gpu.machine(), "ranks": ranks, "head_dim": DIM, "cells": cells}
                path = Path(folder) / f"gpu_{part}_{ranks}.json"
                path.write_text(json.dumps(whole, indent=1) + "\n")
                print(shown(cell), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            if bench.late():
                break
    dist.destroy_process_group()


def shown(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell in a line."""
    found = {name: x for name, x in cell.items() if not isinstance(x, dict) or "ms" not in x}
    found.pop("errors", None)
    for name in ("forward", "forward_backward"):
        if name in cell:
            found[name] = {k: x for k, x in cell[name].items() if k != "ms"}
    return found
