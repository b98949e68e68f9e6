"""The numbers of a table: averages over data sets, spread over seeds, and bootstrap intervals over test images.

Shapes: ... whatever is in front (seeds, draws), D data sets, M rows, N images, B bootstrap draws.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
DRAWS = 1000
BLOCK = 2_000_000  # images drawn at a time


def harmonic(base: Array, novel: Array) -> Array:
    """Harmonic mean of two accuracies; 0 where both are."""
    total = base + novel
    return 2 * base * novel / np.where(total == 0, 1, total)


Averages = Callable[[Mapping[str, Array]], dict[str, Array]]  # metric -> (..., D)  to  column -> (...)


def _base_to_novel(accuracy_D: Mapping[str, Array]) -> dict[str, Array]:
    base_D, novel_D = accuracy_D["base"], accuracy_D["novel"]
    base, novel = base_D.mean(-1), novel_D.mean(-1)
    hms = harmonic(base_D, novel_D).mean(-1)
    return {"base": base, "novel": novel, "mean of HMs": hms, "HM of means": harmonic(base, novel)}


def _transfer(accuracy_D: Mapping[str, Array]) -> dict[str, Array]:
    accuracy = accuracy_D["accuracy"]
    targets = accuracy[..., 1:]
    mean = targets.mean(-1) if targets.shape[-1] else np.full(accuracy.shape[:-1], np.nan)
    return {"source": accuracy[..., 0], "mean of targets": mean}


HALVES = ("base-to-novel", "generalised")  # protocols that train on half of the classes and test both
# Of each protocol, the averages over data sets, and the one by which methods are compared with PERL.
AVERAGES: dict[str, tuple[Averages, str]] = {
    "base-to-novel": (_base_to_novel, "mean of HMs"),
    "generalised": (_base_to_novel, "mean of HMs"),  # the same with all classes to choose from
    "cross-dataset": (_transfer, "mean of targets"),
    "domain-shift": (_transfer, "mean of targets"),
    "few-shot": (lambda accuracy_D: {shots: accuracy.mean(-1) for shots, accuracy in accuracy_D.items()}, ""),
}


def by_set(accuracy_D: Mapping[str, Array]) -> dict[str, Array]:
    """The metrics set by set; of base and novel also the harmonic mean, first."""
    if "novel" not in accuracy_D:
        return dict(accuracy_D)
    return {"HM": harmonic(accuracy_D["base"], accuracy_D["novel"]), **accuracy_D}


Spread = tuple[Array, Array | None]  # value, and its population standard deviation over seeds


def over_seeds(formula: Averages, accuracy_SD: Mapping[str, Array]) -> dict[str, Spread]:
    """`formula` of the mean over seeds, and how much it differs from seed to seed, where there are several."""
    values = formula({metric: accuracy.mean(0) for metric, accuracy in accuracy_SD.items()})
    seeds = formula(accuracy_SD)
    return {name: (value, seeds[name].std(0) if len(seeds[name]) > 1 else None) for name, value in values.items()}


def draws(name: str, images: int) -> Iterator[NDArray[np.int64]]:
    """Indices of the test images in each bootstrap draw, in blocks; they depend on nothing but the arguments."""
    rng = np.random.default_rng([DRAWS, zlib.crc32(name.encode())])
    block = max(1, BLOCK // max(1, images))
    for start in range(0, DRAWS, block):
        yield rng.integers(images, size=(min(block, DRAWS - start), images))


def resample(hits_MN: Array, name: str) -> Array:
    """Accuracy in % of M rows on every draw, (M, B), all rows on the same images: what makes differences paired."""
    images = hits_MN.shape[1]
    blocks = []
    for index_bN in draws(name, images):
        # Counting how often an image was drawn makes a block one matrix product.
        place = index_bN + images * np.arange(len(index_bN))[:, None]
        times_bN = np.bincount(place.ravel(), minlength=index_bN.size).reshape(index_bN.shape)
        blocks.append(100 * (hits_MN @ times_bN.T) / images)
    return np.concatenate(blocks, axis=1)


def interval(difference_B: Array) -> tuple[float, float] | None:
    """Percentile interval that holds 95 % of the draws."""
    if np.isnan(difference_B).any():
        return None
    low, high = np.percentile(difference_B, (2.5, 97.5))
    return float(low), float(high)
