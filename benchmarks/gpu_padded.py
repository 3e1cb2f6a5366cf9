"""Batching by hand on the GPU of benchmarks/gpu.py: whole requests in padded batches, trees level by level.

Requests are laid out before the clock runs, nobody else shares the thread, and widths and maxima are swept. The steps
of decoders and the levels of trees are captured as CUDA graphs, for a few numbers of rows each. What comes out is the
most that such a server could reach.
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

from batchmaker.arrays import Ints
from batchmaker.cli.workload import Workload
from batchmaker.lab.datasets import poisson_arrivals

Row = dict[str, Any]
Run = Callable[[Ints], Tensor]
"""Requests by their numbers -> their results on the host."""

WIDTHS: Final = (1, 5, 10, 20, 1000)
"""Steps by which lengths in a bucket may differ; the last puts all into one."""
MAXIMA: Final = (64, 128, 256, 512, 1024)
LIVE: Final = [(width, most) for width in (5, 10, 1000) for most in (64, 512)]
LOOK_S: Final = 0.25
ROWS: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Numbers of rows that are captured; a number in between is padded up, and a larger one launched as it is."""


class Captured:
    """A step over the first rows of tensors that stay where they are: CUDA graphs, and on a CPU the step itself.

    work: gets the number of rows. It reads and writes the same memory each time.
    """

    def __init__(self, work: Callable[[int], None], device: str) -> None:
        self._work = work
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if torch.device(device).type != "cuda":
            return
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries prepare themselves before the capture
            for rows in ROWS:
                work(rows)
        torch.cuda.current_stream().wait_stream(aside)
        for rows in ROWS:
            self._graphs[rows] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[rows]):
                work(rows)

    @staticmethod
    def padded(rows: int) -> int:
        """Return the number of rows as which so many are computed."""
        return next((each for each in ROWS if each >= rows), rows)

    def __call__(self, rows: int) -> None:
        """Launch the step. rows: from `padded`."""
        graph = self._graphs.get(rows)
        if graph is None:
            self._work(rows)
        else:
            graph.replay()


def padded_tokens(requests: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
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
    def run(numbers: Ints) -> Tensor:
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
    decode = copy.deepcopy(decoder).to(device).eval()
    word = torch.ones(max(MAXIMA), dtype=torch.int64, device=device)
    h, c = (torch.zeros(max(MAXIMA), hidden, dtype=kind, device=device) for _ in range(2))
    made = torch.zeros(int(words.max()), max(MAXIMA), dtype=torch.int64, device=device)
    at = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def work(rows: int) -> None:
        found = decode(word[:rows], h[:rows], c[:rows])
        for old, new in zip((word, h, c), found, strict=True):
            old[:rows] = new
        made[:, :rows].index_copy_(0, at, word[None, :rows])
        at.add_(1)

    step = Captured(work, device)

    @torch.no_grad()
    def run(numbers: Ints) -> Tensor:
        mine = lengths[numbers]
        x = embedding(torch.from_numpy(tokens[numbers, : mine.max()]).to(device))
        packed = pack_padded_sequence(x, torch.from_numpy(mine), batch_first=True, enforce_sorted=False)
        for old, new in zip((h, c), layer(packed)[1], strict=True):
            old[: len(mine)] = new[0]
        word.fill_(1)
        at.zero_()
        longest, rows = int(words[numbers].max()), step.padded(len(mine))
        for _ in range(longest):
            step(rows)
        return made[:longest, : len(mine)].T.cpu()

    return run


def trees(workload: Workload, leaf: nn.Module, inner: nn.Module, device: str) -> Run:
    """Return TreeLSTMs level by level over all trees of a batch, with the engine's cells; the roots' h."""
    leaf, inner = (copy.deepcopy(cell).to(device).eval() for cell in (leaf, inner))
    laid = [_levels(request["children"], len(request["words"])) for request in workload.requests]
    words = [np.asarray(request["words"], np.int64) for request in workload.requests]
    nodes = np.array([2 * len(each) - 1 for each in words])
    most = int(np.sort(nodes)[-max(MAXIMA) :].sum())
    with torch.no_grad():
        state = leaf(torch.zeros(1, dtype=torch.int64, device=device))
    h, c = (torch.zeros(most + 1, part.shape[1], dtype=part.dtype, device=device) for part in state)
    index = torch.full((3, max(most, *ROWS)), most, device=device)  # the last row is nobody's

    @torch.no_grad()
    def work(rows: int) -> None:
        node, left, right = index[:, :rows]
        h[node], c[node] = inner(h[left], c[left], h[right], c[right])

    level_of = Captured(work, device)

    @torch.no_grad()
    def run(numbers: Ints) -> Tensor:
        first = np.cumsum(nodes[numbers]) - nodes[numbers]
        at = np.concatenate([start + np.arange(len(words[n])) for start, n in zip(first, numbers, strict=True)])
        levels = []
        for level in range(max(len(laid[n]) for n in numbers)):
            parts = [laid[n][level] + start for start, n in zip(first, numbers, strict=True) if level < len(laid[n])]
            mine = np.concatenate(parts, 1)
            rows = level_of.padded(mine.shape[1])
            levels.append(np.pad(mine, ((0, 0), (0, rows - mine.shape[1])), constant_values=most))
        tokens = np.concatenate([words[n] for n in numbers])
        roots = first + nodes[numbers] - 1
        sent = torch.from_numpy(np.concatenate((at, tokens, roots, np.concatenate(levels, 1).ravel()))).to(device)
        place, token, root, rest = sent.split((len(at), len(tokens), len(roots), 3 * sum(x.shape[1] for x in levels)))
        h[place], c[place] = leaf(token)
        begin, whole = 0, rest.view(3, -1)
        for rows in (level.shape[1] for level in levels):
            index[:, :rows] = whole[:, begin : begin + rows]
            level_of(rows)
            begin += rows
        return h[root].cpu()

    return run


def _levels(children: Sequence[Sequence[int]], num_leaves: int) -> list[Ints]:
    """Return node, left and right child of all inner nodes of each level of a tree: [3, nodes] each."""
    level = [0] * num_leaves
    found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for node, (left, right) in enumerate(children, start=num_leaves):
        level.append(1 + max(level[left], level[right]))
        found[level[-1]].append((node, left, right))
    return [np.array(found[height], np.int64).T for height in sorted(found)]


# --- how fast --------------------------------------------------------------------------------------------------------


def buckets(lengths: NDArray[Any], width: int, most: int) -> list[Ints]:
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
