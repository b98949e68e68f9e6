"""`make dist`: build wheel and sdist, check both, and use the wheel in an empty environment, without the source tree.

    python -m scripts.dist                  # into dist/
    python -m scripts.dist --lowest         # the lowest versions that pyproject.toml allows, with the fast tests

Both need a package index. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gives builds of torch for the CPU;
without it --lowest takes PyPI's for CUDA, some 3 GB (6 GB on disk), which run without a card as well.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ("build", "twine", "check-wheel-contents")
# Without those whose numbers come from random weights, which another transformers draws in another order.
FAST = ("adapters", "data", "heads", "inference", "methods", "text", "thinking")


def run(*words: str | Path, cwd: Path = ROOT) -> None:
    """Say it, do it, stop if it fails."""
    print("+", *words, flush=True)
    subprocess.run([str(word) for word in words], cwd=cwd, check=True)


def environment(folder: Path, *wanted: str | Path, constraints: Path | None = ROOT / "constraints.txt") -> Path:
    """The Python of a new virtual environment that has these packages."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    pinned = ("-c", constraints) if constraints else ()
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pinned, *wanted)
    return python


def build(scratch: Path) -> None:
    """Wheel and sdist in dist/, checked and tried."""
    out = ROOT / "dist"
    for old in out.glob("*"):
        old.unlink()
    tools = environment(scratch / "tools", *TOOLS, constraints=None)
    run(tools, "-m", "build", "--outdir", out, ROOT)
    run(tools, "-m", "twine", "check", "--strict", *sorted(out.iterdir()))
    (wheel,) = out.glob("*.whl")
    run(tools, "-m", "check_wheel_contents", wheel)
    python = environment(scratch / "empty", "torch")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", wheel)
    run(python, "-I", ROOT / "scripts" / "smoke.py", cwd=scratch)
    run(python.parent / "perlclip", "demo", "--out", scratch / "demo", cwd=scratch)


def lowest_versions() -> list[str]:
    """`numpy==1.26` for `numpy>=1.26`."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    return [re.sub(">=", "==", line) for line in needed]


def lowest(scratch: Path) -> None:
    """The fast tests with the lowest versions."""
    python = environment(scratch / "lowest", *lowest_versions(), "pytest", "hypothesis", constraints=None)
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-e", ROOT)
    run(python, "-m", "pytest", "-m", "not slow", *(f"tests/{name}" for name in FAST))


def main() -> None:
    """Everything in a scratch folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowest", action="store_true", help="the lowest versions instead")
    with tempfile.TemporaryDirectory() as scratch:
        (lowest if parser.parse_args().lowest else build)(Path(scratch))


if __name__ == "__main__":
    main()
