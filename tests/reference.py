"""Numpy oracles: the published programs, and the default rule with exact thresholds.

Each oracle is a class that advances one step at a time, so one pass over the gradient
stream can feed several. Shapes: `n` coordinates, `w` workers, `B` blocks.
"""

from __future__ import annotations

import math

import numpy as np

# Steps of the recordings, and the number of them that the first tier follows.
STEPS, FIRST_STEPS = 400, 100


def gradient_stream(n, workers, steps, seed):
    """Yields the recorded stream's gradients, Float32[w, n], step by step."""
    x = np.arange(n) / n
    bump = 0.2 * np.exp(-(((x - 0.2) / 0.08) ** 2))
    profile = (0.02 + bump + 0.05 * (x > 0.7)).astype(np.float32)
    for t in range(steps):
        decay = 0.3 * (0.5 + 0.5 * math.cos(math.pi * t / steps)) + 0.05
        noise = [
            np.random.default_rng([seed, t, rank]).laplace(size=n).astype(np.float32)
            for rank in range(workers)
        ]
        yield np.stack(noise) * profile * np.float32(decay)


class Oracle:
    """Error feedback around a choice of coordinates: the base of all oracles."""

    def __init__(self, n, workers, density):
        self.n, self.w = n, workers
        self.target = max(1, math.floor(density * n))
        self.t = 0
        self.residual = np.zeros((workers, n), np.float32)

    def choose(self, acc):
        """Returns the chosen coordinates by worker: `w` ascending index arrays."""
        raise NotImplementedError

    def learn(self, chosen):
        """Adapts thresholds and bounds after the step."""

    def step(self, gradients):
        """Advances by one step; returns (chosen by worker, update Float32[n])."""
        acc = gradients + self.residual
        chosen = self.choose(acc)
        union = np.unique(np.concatenate(chosen))
        update = np.zeros(self.n, np.float32)
        update[union] = acc[:, union].mean(axis=0)
        acc[:, union] = 0
        self.residual = acc
        self.learn(chosen)
        self.t += 1
        return chosen, update

    def part_of(self, worker):
        return (self.t + worker) % self.w

    def by_part(self, chosen):
        return [chosen[(p - self.t) % self.w] for p in range(self.w)]

    def residual_l1(self):
        return float(np.abs(self.residual).sum(axis=1, dtype=np.float64).sum())


class Default(Oracle):
    """Each part sends exactly its quota; parts are balanced or even."""

    def __init__(self, n, workers, density, balanced):
        super().__init__(n, workers, density)
        self.B, self.size = block_grid(n, workers)
        quota = -(-self.target // workers)
        least = max(1, self.B // (16 * workers), -(-quota // self.size) + 1)
        self.least = least
        self.balanced = balanced and workers > 1 and workers * least <= self.B
        self.cuts = even_bounds(self.B, workers)
        self.mean = np.zeros(self.B)
        self.threshold = np.zeros(workers)

    def bounds(self):
        if not self.balanced:
            return even_bounds(self.n, self.w)
        return np.minimum(self.cuts * self.size, self.n)

    def choose(self, acc):
        bounds, chosen = self.bounds(), []
        quotas = quotas_of(self.t, self.n, self.target, self.w)
        for r in range(self.w):
            p = self.part_of(r)
            part = np.abs(acc[r, bounds[p] : bounds[p + 1]])
            kept, self.threshold[p] = fill_quota(part, quotas[p])
            chosen.append(bounds[p] + kept)
        return chosen

    def learn(self, chosen):
        if not self.balanced:
            return
        delivered = np.concatenate(chosen) // self.size
        histogram = np.bincount(delivered, minlength=self.B)
        self.mean, self.cuts = balanced_move(
            self.mean, self.cuts, self.least, self.threshold, histogram
        )


class Global(Oracle):
    """The ideal, too expensive in practice: owners share one exact global threshold."""

    def choose(self, acc):
        bounds = even_bounds(self.n, self.w)
        owned = np.zeros(self.n, np.float32)
        for r in range(self.w):
            p = self.part_of(r)
            owned[bounds[p] : bounds[p + 1]] = acc[r, bounds[p] : bounds[p + 1]]
        k = self.target
        kept = np.sort(np.argpartition(-np.abs(owned), k - 1)[:k])
        part = np.searchsorted(bounds, kept, side="right") - 1
        return [kept[part == self.part_of(r)] for r in range(self.w)]


class Published(Oracle):
    """ExDyna (`moving`) and MiCRO as in their authors' programs."""

    def __init__(self, n, workers, density, moving):
        super().__init__(n, workers, density)
        self.moving = moving
        self.threshold = 1 / (2 * math.sqrt(self.target))
        self.s = max(32, n // 1024 // 32 * 32)
        self.B = min(1024, n // self.s)
        self.blocks = np.full(workers, self.B // workers)
        self.blocks[: self.B % workers] += 1

    def bounds(self):
        if not self.moving:
            return even_bounds(self.n, self.w)
        bounds = np.concatenate([[0], np.cumsum(self.blocks) * self.s])
        bounds[-1] = self.n
        return bounds

    def choose(self, acc):
        bounds, chosen = self.bounds(), []
        for r in range(self.w):
            lo, hi = bounds[self.part_of(r)], bounds[self.part_of(r) + 1]
            over = np.abs(acc[r, lo:hi]) >= self.threshold
            chosen.append(lo + np.flatnonzero(over))
        return chosen

    def learn(self, chosen):
        counts = [len(c) for c in self.by_part(chosen)]
        if self.moving:
            self.blocks = published_move(self.blocks, counts, self.s, self.n, self.B)
        exam = sum(counts) / self.target
        if exam > 1.1:
            self.threshold *= 1.005
        elif exam > 0.909:
            self.threshold *= 1.00125
        else:
            self.threshold *= 0.995


def published_move(blocks, counts, size, n, block_count):
    """ExDyna's sequential move of single blocks between neighbouring parts."""
    blocks, c, w = np.array(blocks), list(counts), len(counts)
    total = sum(c)
    mean, per_block = total // w, size * total // n
    least = block_count / (4 * w)
    if mean == 0:
        return blocks
    for i in range(w - 1):
        a, b = c[i] / mean, c[i + 1] / mean
        if a > 1.05 and b < 0.95238:
            giver, taker = i, i + 1
        elif a < 0.95238 and b > 1.05:
            giver, taker = i + 1, i
        else:
            continue
        if blocks[giver] - 1 < least:
            continue
        blocks[giver] -= 1
        blocks[taker] += 1
        c[giver] -= per_block
        c[taker] += per_block
    return blocks


def even_bounds(n, w):
    sizes = np.full(w, n // w)
    sizes[: n % w] += 1
    return np.concatenate([[0], np.cumsum(sizes)])


def quotas_of(t, n, target, w):
    """Splits the target into `w` nearly equal shares; the larger shares rotate."""
    quotas = np.full(w, target // w)
    # The turn changes every `w` steps. Near density 1 only longer parts hold one more.
    holders = max(1, n % w) if target // w == n // w else w
    for i in range(target % w):
        quotas[(i - t // w) % holders] += 1
    return quotas


def fill_quota(magnitudes, quota):
    """Positions of the `quota` largest non-zeros, and the smallest magnitude there."""
    size = len(magnitudes)
    if quota == 0:
        return np.zeros(0, int), np.inf
    if quota >= size:
        return np.arange(size), 0.0
    kept = np.sort(np.argpartition(-magnitudes, quota - 1)[:quota])
    threshold = max(magnitudes[kept].min(), np.finfo(np.float32).tiny)
    return kept[magnitudes[kept] > 0], threshold


def block_grid(n, w):
    """(count, size) of the blocks on which balanced parts move."""
    size = 32 * max(1, -(-n // (32 * max(1024, 4 * w))))
    if -(-n // size) < 2 * w:
        size = max(1, -(-n // (4 * w)))
    return max(1, -(-n // size)), size


def balanced_move(mean, cuts, least, threshold, histogram):
    """One step of the balanced parts: (mean per block, cuts after the guard)."""
    w, count = len(cuts) - 1, len(mean)
    if not histogram.any():
        return mean, cuts
    tiny = np.finfo(np.float32).tiny
    known = np.isfinite(threshold) & (threshold > tiny)
    ratios = np.zeros(w)
    if known.any():
        logs = np.log(threshold[known].astype(np.float64))
        ratios[known] = np.clip(logs - logs.mean(), -0.5, 0.5)
        ratios[threshold <= tiny] = -0.5
    weight = np.repeat(np.exp(8 * ratios), np.diff(cuts))
    mean = 0.8 * mean + 0.2 * histogram * weight
    cumulative = np.concatenate([[0], np.cumsum(mean)])
    moved = np.array(cuts)
    for p in range(1, w):
        goal = cumulative[-1] * p / w
        above = min(max(np.searchsorted(cumulative, goal), 1), count)
        below = above - 1
        nearer = goal - cumulative[below] < cumulative[above] - goal
        moved[p] = below if nearer else above
    for p in range(1, w):
        moved[p] = max(moved[p], moved[p - 1] + least)
    for p in range(w - 1, 0, -1):
        moved[p] = min(moved[p], count - (w - p) * least)
    return mean, moved
