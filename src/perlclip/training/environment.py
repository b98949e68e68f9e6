"""Versions, machine and memory behind a result."""

import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import perlclip


def environment(device: torch.device) -> dict[str, Any]:
    """What a result was made with."""
    cuda = device.type == "cuda"
    return {
        "perlclip": perlclip.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        **_git(),
    }


@cache
def _git() -> dict[str, Any]:
    """Commit of the checkout that perlclip is run from, and whether files differ from it; nothing if installed."""

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *words]
        # Git of whoever runs this, asked in words of ours.
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # a virtual environment may lie in somebody else's checkout
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def peak_memory(device: torch.device, kept: int = 0) -> dict[str, int]:
    """Bytes: on CUDA the most that tensors took since the last call, without those kept for other runs.

    Elsewhere the most of the process so far.
    """
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"cuda_bytes": most - kept}
    if sys.platform == "win32":
        return {}
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"process_bytes": used if sys.platform == "darwin" else 1024 * used}
