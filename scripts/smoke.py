"""A few commands of an installed perlclip, in an empty folder: that it was packed whole, not that it is right.

    python -m scripts.smoke            # of this environment
    python -I scripts/smoke.py         # the same without the source tree: what `make dist` runs

Offline, on the embedded backbone: fit on drawn images, predict, inspect, explain.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

FIT = ["fit", "toybox:noisy_shapes/base", "--backbone", "tiny", "--device", "cpu", "--shots", "1", "--recipe", "fast"]
COMMANDS = (
    (["--version"], "version"),
    (["methods"], "perl"),
    ([*FIT, "--no-head", "--out", "adapter"], "adapter in adapter"),
    (["predict", "adapter", "image.png", "--json"], '"label"'),
    (["inspect", "adapter"], "weights_sha256"),
    (["explain", "adapter", "image.png", "--out", "explained"], "explained"),
)


def perlclip(words: list[str], folder: Path) -> str:
    """What a command says; it must succeed."""
    start = [sys.executable, *(["-I"] if sys.flags.isolated else []), "-c", "from perlclip.cli import main; main()"]
    result = subprocess.run([*start, *words], cwd=folder, capture_output=True, text=True, timeout=600)
    if result.returncode:
        raise SystemExit(f"perlclip {' '.join(words)} failed:\n{result.stderr}")
    return result.stdout


def main() -> None:
    """All commands, one after the other."""
    from PIL import Image

    import perlclip as package

    print(package.__version__, "in", Path(package.__file__).parent)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Image.new("RGB", (64, 48), "red").save(folder / "image.png")
        for words, said in COMMANDS:
            if said not in perlclip(words, folder):
                raise SystemExit(f"perlclip {' '.join(words)} did not say {said!r}")
            print("perlclip", *words)


if __name__ == "__main__":
    main()
