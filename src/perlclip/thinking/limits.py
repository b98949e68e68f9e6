"""What may end the thinking before an image is settled: a budget of refinement passes, a deadline."""

import math
import time
from collections import deque
from threading import Lock
from typing import Protocol

from perlclip.errors import PerlclipError

clock = time.perf_counter
KEPT = 9  # measurements of one size
FORGOTTEN_AFTER = 100  # batches: a moment in which the machine was busy must not keep steps away for good


class Limit(Protocol):
    """Asked before every refinement step of a batch."""

    def begin(self, images: int) -> None:
        """A batch has come; its base pass is made next."""

    def made(self, images: int, step: int) -> None:
        """Step 0, the base pass, or a refinement step has just been made for so many images."""

    def grant(self, wanted: int) -> int:
        """How many of the images that want another refinement step may take it now."""


class Budget:
    """At most so many refinement passes an image in the mean of all that have come; unspent ones are carried on."""

    def __init__(self, max_mean_steps: float) -> None:
        self.max_mean_steps = max_mean_steps
        self.images = self.passes = 0
        self._lock = Lock()

    def begin(self, images: int) -> None:
        """The account grows by what the batch may spend."""
        with self._lock:
            self.images += images

    def made(self, images: int, step: int) -> None:
        """Paid for when it was granted."""

    def grant(self, wanted: int) -> int:
        """As many as the account has."""
        with self._lock:
            granted = min(wanted, max(0, math.floor(self.max_mean_steps * self.images - self.passes)))
            self.passes += granted
        return granted


class Pace:
    """How long a refinement step of so many images takes on this machine, from those made so far."""

    def __init__(self) -> None:
        self.batches = 0
        self._seconds: dict[int, deque[tuple[int, float]]] = {}
        self._lock = Lock()

    def begin(self) -> None:
        """A batch more."""
        with self._lock:
            self.batches += 1

    def note(self, images: int, seconds: float) -> None:
        """Keep a measurement."""
        with self._lock:
            self._seconds.setdefault(_size(images), deque(maxlen=KEPT)).append((self.batches, seconds))

    def estimate(self, images: int) -> float | None:
        """The slowest of the last steps of about so many images, or what the nearest sizes say."""
        with self._lock:
            known = {
                size: max(fresh)
                for size, seconds in self._seconds.items()
                if (fresh := [s for batch, s in seconds if batch >= self.batches - FORGOTTEN_AFTER])
            }
        larger = [size for size in known if size >= _size(images)]
        if larger:
            return known[min(larger)]
        return known[max(known)] * images / max(known) if known else None


def _size(images: int) -> int:
    """Counted in powers of two."""
    return 1 << (images - 1).bit_length()


class Deadline:
    """A batch's answers are wanted `max_ms` milliseconds from now; a step is made only if it should fit in.

    The base pass is always made. Before any step has been measured it stands for one: a step is `share` of its work.
    """

    def __init__(self, max_ms: float, pace: Pace, share: float) -> None:
        self.end = clock() + max_ms / 1000
        self.pace, self.share = pace, share
        self._guess = 0.0
        self._began = 0.0
        pace.begin()

    def begin(self, images: int) -> None:
        """Start the clock of the base pass."""
        self._began = clock()

    def made(self, images: int, step: int) -> None:
        """Note how long it took."""
        seconds = clock() - self._began
        if step:
            self.pace.note(images, seconds)
        else:
            self._guess = self.share * seconds / images

    def grant(self, wanted: int) -> int:
        """All, or as many as there is time for, by halves."""
        self._began = now = clock()
        while wanted:
            estimate = self.pace.estimate(wanted)
            if now + (self._guess * wanted if estimate is None else estimate) <= self.end:
                break
            wanted //= 2
        return wanted


def check_limits(max_mean_steps: float | None, max_ms: float | None) -> None:
    """Limits that can be kept."""
    if max_mean_steps is not None and not (_is_finite(max_mean_steps) and max_mean_steps >= 0):
        raise PerlclipError(f"max_mean_steps must be a finite number of at least 0, got {max_mean_steps!r}")
    if max_ms is not None and not (_is_finite(max_ms) and max_ms > 0):
        raise PerlclipError(f"max_ms must be a finite number above 0, got {max_ms!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
