"""Runs the whole matrix: `python -m tests.exactness`; goes on where an earlier run stopped.

Every case becomes one JSON line in the results file: ok, wrong (with what is), impossible (with
the library's reason) or same (as another case, whose plan is byte-equal). The exit code is 1 when
any case is wrong.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from tests.exactness.cases import Case, cost, whole
from tests.exactness.judge import run_batches
from tests.exactness.ranks import MOST_BATCH
from ultraattn.errors import InputError, UltraAttnError
from ultraattn.masks import Lengths
from ultraattn.runtime.local import LocalRanks

RUNS_OF_A_POOL = 100
"""Runs until the processes of a number of ranks are made anew."""


def main() -> int:
    """Runs what has no result yet."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.exactness")
    parser.add_argument("--results", type=Path, default=Path("out/exactness.jsonl"))
    parser.add_argument("--only", default="", help="run the cases whose name holds this text")
    parser.add_argument("--minutes", type=float, default=0, help="stop after so long; 0: never")
    parser.add_argument("--shuffle", type=int, help="take cases in the random order of this seed")
    parser.add_argument(
        "--share",
        type=share,
        default=(1, 1),
        metavar="K/N",
        help="run the K-th of N shares; shares may append to one results file side by side",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    known = read(options.results)
    cases = [case for case in whole() if options.only in case.key]
    number, shares = options.share
    dense = {dense_key(case): None for case in cases}
    mine = set(list(dense)[number - 1 :: shares])
    todo = [case for case in cases if case.key not in known and dense_key(case) in mine]
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    pools = Pools()
    groups = [
        list(group) for _, group in itertools.groupby(todo, lambda case: replace(case, batch=0))
    ]
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(groups)
    progress = Progress(len(todo), sum(map(work, todo)))
    seen: dict[tuple, str] = {}
    try:
        with options.results.open("a") as file:
            for group in groups:
                if time.monotonic() > end:
                    break
                for case, result in zip(group, judged(group, pools, seen), strict=True):
                    known[case.key] = result
                    file.write(json.dumps({"case": case.key, **result}) + "\n")
                    progress.step(case, result)
                file.flush()
    finally:
        pools.close()
    known |= read(options.results)
    return summary([known[case.key] for case in cases if case.key in known], len(cases))


def share(text: str) -> tuple[int, int]:
    """K and N of a text "K/N"."""
    number, shares = map(int, text.split("/"))
    if not 1 <= number <= shares:
        raise ValueError(text)
    return number, shares


def dense_key(case: Case) -> tuple:
    """What cases that have the same dense results have in common."""
    return case.lengths, case.mask, case.heads, case.dtype


class Pools:
    """Local ranks by their number, made anew now and then.

    In 16 bits PyTorch's CPU attention keeps about 4 MB of compiled code for each shape it meets
    (torch 2.13), in every rank, until the process ends.
    """

    def __init__(self) -> None:
        self._made: dict[int, LocalRanks] = {}
        self._runs: collections.Counter[int] = collections.Counter()

    def __call__(self, ranks: int) -> LocalRanks:
        """`ranks` processes; asked for once for each run."""
        if self._runs[ranks] >= RUNS_OF_A_POOL:
            self.drop(ranks)
        if ranks not in self._made:
            self._made[ranks] = LocalRanks(ranks)
        self._runs[ranks] += 1
        return self._made[ranks]

    def drop(self, ranks: int) -> None:
        """Ends these processes; the next run starts others."""
        self._runs[ranks] = 0
        if ranks in self._made:
            self._made.pop(ranks).close()

    def close(self) -> None:
        """Ends all."""
        for ranks in list(self._made):
            self.drop(ranks)


def judged(cases: list[Case], pools: Pools, seen: dict[tuple, str]) -> list[dict]:
    """The results of cases that differ in their batch alone."""
    started = time.monotonic()
    first = cases[0]
    try:
        mask = first.make_mask()
        mask.check(Lengths(*first.lengths), first.heads[0])
        plan = first.make_plan(mask)
    except InputError as error:
        return [{"status": "impossible", "reason": str(error)} for _ in cases]
    results: dict[Case, dict] = {}
    new = []
    for case in cases:
        twin = seen.setdefault((plan.digest, case.mask, case.batch), case.key)
        if twin == case.key:
            new.append(case)
        else:
            results[case] = {"status": "same", "as": twin}
    try:
        verdicts = run_batches(new, mask, plan, pools, MOST_BATCH) if new else []
    except UltraAttnError as error:
        # The group may be of no use any more: the next case starts another.
        pools.drop(first.ranks)
        failed = {"status": "wrong", "wrong": [f"{type(error).__name__}: {error}"]}
        return [results.get(case, failed) for case in cases]
    seconds = round((time.monotonic() - started) / max(1, len(new)), 3)
    for case, verdict in zip(new, verdicts, strict=True):
        results[case] = {
            "status": "wrong" if verdict.wrong else "ok",
            "wrong": list(verdict.wrong),
            "errors": verdict.errors.norm,
            "limits": verdict.limits.norm,
            "largest_single_errors": verdict.errors.single,
            "largest_single_limits": verdict.limits.single,
            "seconds": seconds,
        }
    return [results[case] for case in cases]


def read(path: Path) -> dict[str, dict]:
    """Results by case; a last line that was cut short is left out, wrong cases are run again."""
    known = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                result = json.loads(line)
            except json.JSONDecodeError:
                continue
            known[result.pop("case")] = result
    return {key: result for key, result in known.items() if result["status"] != "wrong"}


def work(case: Case) -> float:
    """About how long a case takes, in any unit: a share of its pairs, and a constant."""
    return cost(case) + 2e6


class Progress:
    """A line on standard error every few seconds."""

    def __init__(self, cases: int, left: float) -> None:
        self.cases, self.done, self.left, self.passed = cases, 0, left, 0.0
        self.counts: collections.Counter[str] = collections.Counter()
        self.started = self.said = time.monotonic()

    def step(self, case: Case, result: dict) -> None:
        """One case more."""
        self.done += 1
        self.passed += work(case)
        self.counts[result["status"]] += 1
        if result["status"] == "wrong":
            print(f"\nwrong: {case.key}: {'; '.join(result['wrong'])}", file=sys.stderr)
        now = time.monotonic()
        if now - self.said > 2 or self.done == self.cases:
            self.said = now
            minutes = (now - self.started) / 60 * (self.left / self.passed - 1)
            counts = ", ".join(f"{n} {status}" for status, n in sorted(self.counts.items()))
            print(
                f"\r{self.done}/{self.cases} ({counts}), about {minutes:.0f} min left: "
                f"{case.key}\x1b[K",
                end="",
                file=sys.stderr,
                flush=True,
            )


def summary(results: list[dict], cases: int) -> int:
    """Says how many cases have which result, and how close to their limits the errors came."""
    counts = collections.Counter(result["status"] for result in results)
    print(file=sys.stderr)
    for status, count in sorted(counts.items()):
        print(f"{status:>10}: {count}")
    print(f"{'not run':>10}: {cases - len(results)}")
    reasons = collections.Counter(r["reason"] for r in results if r["status"] == "impossible")
    for reason, count in reasons.most_common():
        print(f"impossible, {count} cases: {reason}")
    for name in ("out", "dq", "dk", "dv"):
        nearest = max(
            (r["errors"][name] / r["limits"][name] for r in results if "errors" in r), default=0.0
        )
        print(f"{name}: errors at most {nearest:.3f} of their limits")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
