"""Batching by hand on the GPU of benchmarks/gpu.py: whole requests in padded batches, trees level by level.

Requests are laid out before the clock runs, nobody else shares the thread, and widths and maxima are swept. For the
LSTM what comes out is the most that such a server could reach. The steps of decoders and the levels of trees are
launched operation by operation: captured as CUDA graphs they would take less of the host, so those two could be
stronger.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from batchmaker.cli.workload import Workload
from batchmaker.lab.datasets import poisson_arrivals

Row = dict[str, Any]
Numbers = NDArray[np.int64]
Run = Callable[[Numbers], Tensor]
"""Requests by their numbers -> their results on the host."""

WIDTHS: Final = (1, 5, 10, 20, 1000)
"""Steps by which lengths in a bucket may differ; the last puts all into one."""
MAXIMA: Final = (64, 128, 256, 512, 1024)
LIVE: Final = [(width, most) for width in (5, 10, 1000) for most in (64, 512)]
LOOK_S: Final = 0.25


def padded_tokens(requests: Sequence[Sequence[int]]) -> tuple[Numbers, Numbers]:
    """Return the tokens of all requests, [requests, longest], and their lengths."""
    lengths = np.array([len(request) for request in requests])
    tokens = np.zeros((len(requests), int(lengths.max())), np.int64)
    for row, request in enumerate(requests):
        tokens[row, : lengths[row]] = request
    return tokens, lengths


def lstm(workload: Workload, hidden: int, dtype: str, device: str, *, pack: bool) -> Run:
    """Return nn.LSTM over padded or packed batches: h at each request's own last step."""
    tokens, lengths = padded_tokens(workload.requests)
    kind = getattr(torch, dtype)
    embedding = nn.Embedding(workload.vocabulary_size or 1, hidden).to(device, kind)
    layer = nn.LSTM(hidden, hidden, batch_first=True).to(device, kind).eval()

    @torch.no_grad()
    def run(numbers: Numbers) -> Tensor:
        mine = lengths[numbers]
        x: Any = embedding(torch.from_numpy(tokens[numbers, : mine.max()]).to(device))
        if pack:
            x = pack_padded_sequence(x, torch.from_numpy(mine), batch_first=True, enforce_sorted=False)
            return layer(x)[1][0][0].cpu()
        last = torch.from_numpy(np.stack((np.arange(len(mine)), mine - 1))).to(device)
        return layer(x)[0][last[0], last[1]].cpu()

    return run


def seq2seq(workload: Workload, decoder: nn.Module, hidden: int, dtype: str, device: str) -> Run:
    """Return a packed nn.LSTM for the sources, and the engine's decoder for as many words as the longest wants."""
    tokens, lengths = padded_tokens([request["source"] for request in workload.requests])
    words = np.array([request["words"] for request in workload.requests])
    kind = getattr(torch, dtype)
    embedding = nn.Embedding(workload.vocabulary_size or 1, hidden).to(device, kind)
    layer = nn.LSTM(hidden, hidden, batch_first=True).to(device, kind).eval()
    step = copy.deepcopy(decoder).to(device).eval()

    @torch.no_grad()
    def run(numbers: Numbers) -> Tensor:
        mine = lengths[numbers]
        x = embedding(torch.from_numpy(tokens[numbers, : mine.max()]).to(device))
        packed = pack_padded_sequence(x, torch.from_numpy(mine), batch_first=True, enforce_sorted=False)
        h, c = (state[0] for state in layer(packed)[1])
        word, found = torch.ones(len(mine), dtype=torch.int64, device=device), []
        for _ in range(int(words[numbers].max())):
            word, h, c = step(word, h, c)
            found.append(word)
        return torch.stack(found, 1).cpu()

    return run


def trees(workload: Workload, leaf: nn.Module, inner: nn.Module, device: str) -> Run:
    """Return TreeLSTMs level by level over all trees of a batch, with the engine's cells; the roots' h."""
    leaf, inner = (copy.deepcopy(cell).to(device).eval() for cell in (leaf, inner))
    laid = [_levels(request["children"], len(request["words"])) for request in workload.requests]
    words = [np.asarray(request["words"], np.int64) for request in workload.requests]
    nodes = np.array([2 * len(each) - 1 for each in words])

    @torch.no_grad()
    def run(numbers: Numbers) -> Tensor:
        first = np.cumsum(nodes[numbers]) - nodes[numbers]
        at = np.concatenate([start + np.arange(len(words[n])) for start, n in zip(first, numbers, strict=True)])
        placed = torch.from_numpy(np.concatenate((at, np.concatenate([words[n] for n in numbers])))).to(device)
        made_h, made_c = leaf(placed[len(at) :])
        h = made_h.new_zeros((int(nodes[numbers].sum()), made_h.shape[1]))
        c = h.clone()
        h[placed[: len(at)]], c[placed[: len(at)]] = made_h, made_c
        for level in range(max(len(laid[n]) for n in numbers)):
            parts = [laid[n][level] + start for start, n in zip(first, numbers, strict=True) if level < len(laid[n])]
            node, left, right = torch.from_numpy(np.concatenate(parts, 1)).to(device)
            h[node], c[node] = inner(h[left], c[left], h[right], c[right])
        return h[torch.from_numpy(first + nodes[numbers] - 1).to(device)].cpu()

    return run


def _levels(children: Sequence[Sequence[int]], num_leaves: int) -> list[Numbers]:
    """Return node, left and right child of all inner nodes of each level of a tree: [3, nodes] each."""
    level = [0] * num_leaves
    found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for node, (left, right) in enumerate(children, start=num_leaves):
        level.append(1 + max(level[left], level[right]))
        found[level[-1]].append((node, left, right))
    return [np.array(found[height], np.int64).T for height in sorted(found)]


# --- how fast --------------------------------------------------------------------------------------------------------


def buckets(lengths: NDArray[Any], width: int, most: int) -> list[Numbers]:
    """Return the requests of each padded batch: of lengths in one bucket of `width` steps, at most so many."""
    order = np.argsort(lengths, kind="stable")
    batches = []
    for number in np.unique((lengths - 1) // width):
        mine = order[(lengths[order] - 1) // width == number]
        batches += [mine[at : at + most] for at in range(0, len(mine), most)]
    return batches


def most_per_s(run: Run, lengths: NDArray[Any], *, widths: Sequence[int] = WIDTHS) -> Row:
    """Return the requests a second with all waiting at the best width and maximum, and what each of them gave."""
    seen: dict[str, float] = {}
    for width in widths:
        for most in MAXIMA:
            batches = buckets(lengths, width, most)
            run(batches[0])
            run(batches[-1])
            begin_s = time.perf_counter()
            for batch in batches:
                run(batch)
            seen[f"width {width}, maximum {most}"] = len(lengths) / (time.perf_counter() - begin_s)
    best = max(seen, key=seen.__getitem__)
    return {"rps": seen[best], "setting": best, "sweep": seen}


def latency(run: Run, lengths: NDArray[Any], rate_rps: float, seconds: float, seed: int) -> Row:
    """Return p50 and p90 in ms under Poisson arrivals, with the width and maximum of the lowest p90 in a short look."""
    looks = {each: live(run, lengths, rate_rps, LOOK_S, *each, seed=seed)["p90_ms"] for each in LIVE}
    best = min(looks, key=looks.__getitem__)
    found = live(run, lengths, rate_rps, seconds, *best, seed=seed)
    return {**found, "setting": f"width {best[0]}, maximum {best[1]}"}


def live(
    run: Run, lengths: NDArray[Any], rate_rps: float, seconds: float, width: int, most: int, *, seed: int
) -> Row:  # fmt: skip
    """Serve Poisson arrivals in one thread: the bucket whose first has waited longest, whatever waits in it.

    Who has no answer long after the end counts with the time so far.
    """
    due = poisson_arrivals(rate_rps, seed, seconds=seconds)
    number = np.arange(len(due)) % len(lengths)
    bucket = ((lengths[number] - 1) // width).tolist()
    done_s = np.full(len(due), np.nan)
    waiting: dict[int, deque[int]] = defaultdict(deque)
    arrived, begin_s = 0, time.perf_counter()
    while np.isnan(done_s[-1]) or any(waiting.values()):
        now_s = time.perf_counter() - begin_s
        if now_s > 2 * seconds + 0.2:
            break
        while arrived < len(due) and due[arrived] <= now_s:
            waiting[bucket[arrived]].append(arrived)
            arrived += 1
        heads = [(line[0], which) for which, line in waiting.items() if line]
        if heads:
            line = waiting[min(heads)[1]]
            batch = np.array([line.popleft() for _ in range(min(most, len(line)))])
            run(number[batch])
            done_s[batch] = time.perf_counter() - begin_s
    over_s = time.perf_counter() - begin_s
    took_ms = 1e3 * (np.where(np.isnan(done_s), over_s, done_s) - due)[len(due) // 5 :]
    p50_ms, p90_ms = np.percentile(took_ms, (50, 90)).tolist()
    return {"p50_ms": p50_ms, "p90_ms": p90_ms, "unanswered": int(np.isnan(done_s).sum())}
