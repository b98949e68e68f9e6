"""What the speed benchmarks share: a random ViT-B/16, the clock, the memory count and the result files."""

import csv
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, SiglipConfig, SiglipModel

from perlclip.backbone import Backbone, clip, siglip
from perlclip.backbone.accel.eight import FLOAT8, INT8
from perlclip.backbone.base import place

RESULTS = Path(__file__).parent / "results"
Work = Callable[[], object]
Reading = dict[str, float]


def build(
    device: str, dtype: torch.dtype, words: Sequence[str] = (), family: str = "clip"
) -> tuple[CLIPModel | SiglipModel, Backbone]:
    """A random ViT-B/16 twice: as `transformers` has it and as we do. `words` are one token each, others spelt."""
    torch.manual_seed(0)
    vocabulary, merges = byte_vocabulary(), []
    for word in words:
        letters = [*word[:-1], f"{word[-1]}</w>"]
        for i in range(1, len(letters)):
            merges.append(("".join(letters[:i]), letters[i]))
            vocabulary.setdefault("".join(letters[: i + 1]), len(vocabulary))
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=merges)
    text = dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id)
    kinds = {
        "clip": (CLIPConfig, CLIPModel, clip, "quick_gelu"),
        "openclip": (CLIPConfig, CLIPModel, clip, "gelu"),
        "siglip": (SiglipConfig, SiglipModel, siglip, "gelu_pytorch_tanh"),
    }
    config_class, model_class, towers_of, act = kinds[family]
    config = config_class(vision_config=dict(patch_size=16, hidden_act=act), text_config=text | dict(hidden_act=act))
    model = model_class(config).requires_grad_(False).eval()
    towers = towers_of.build_towers(model.state_dict(), config)
    place(towers["vision"], towers["text"], torch.device(device), dtype)
    dtype = torch.bfloat16 if dtype in (FLOAT8, INT8) else dtype
    context = config.text_config.max_position_embeddings
    backbone = Backbone(
        name="random", logit_scale=100.0, tokenizer=tokenizer, context_length=context, preprocess=None, fingerprint="",
        family=family,
        **towers,
    )  # fmt: skip
    return model.to(device, dtype), backbone


def byte_vocabulary() -> dict[str, int]:
    """CLIP's vocabulary without merges: one token per letter."""
    letters = sorted(ByteLevel.alphabet())
    tokens = letters + [letter + "</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}


def remember(function: Callable) -> Callable:
    """Each call computed once."""
    known: dict[tuple, object] = {}

    def recall(*arguments, **options):
        key = (*(tuple(a) if isinstance(a, list) else a for a in arguments), *options.items())
        if key not in known:
            known[key] = function(*arguments, **options)
        return known[key]

    return recall


class Clock:
    """Medians and quartiles of variants run in turn, so that a machine that slows down slows all of them."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def __call__(self, variants: dict[str, Work]) -> dict[str, Reading]:
        gc.collect()
        for work in variants.values():
            work()
        return self.measure(variants)

    def measure(self, variants: dict[str, Work]) -> dict[str, Reading]:
        """The same for variants that have run before."""
        times: dict[str, list[float]] = {name: [] for name in variants}
        peaks = dict.fromkeys(variants, 0.0)
        began, rounds = time.perf_counter(), 0
        while rounds < 3 or (time.perf_counter() - began < self.seconds and rounds < 100):
            rounds += 1
            for name, work in variants.items():
                seconds, peak = self.once(work)
                times[name].append(seconds)
                peaks[name] = max(peaks[name], peak)
        return {name: self.reading(times[name], peaks[name]) for name in variants}

    def once(self, work: Work) -> tuple[float, float]:
        """Seconds and, on CUDA, MiB above what was allocated before."""
        cuda = self.device == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            resting = torch.cuda.memory_allocated()
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return seconds, (torch.cuda.max_memory_allocated() - resting) / 2**20 if cuda else 0.0

    def reading(self, times: list[float], peak: float) -> Reading:
        low, middle, high = statistics.quantiles(times, n=4)
        reading = {"ms": 1e3 * middle, "quartile_range_ms": 1e3 * (high - low), "runs": len(times)}
        return reading | ({"peak_MiB": peak} if self.device == "cuda" else {})


def kept_for_backward(step: Callable[[], torch.Tensor], frozen: set[int]) -> float:
    """MiB of distinct storages that autograd keeps, without the model's own weights."""
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in frozen:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # itself, it would hold the graph that holds it

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = step()
    del loss
    return sum(storages.values()) / 2**20


def frozen_storages(clip: CLIPModel, backbone: Backbone) -> set[int]:
    """The weights of both forms of the model, for `kept_for_backward`."""
    return {p.untyped_storage().data_ptr() for m in (clip, backbone.vision, backbone.text) for p in m.parameters()}


def gradients(loss: Callable[[], torch.Tensor], parameters: list[torch.Tensor]) -> object:
    return torch.autograd.grad(loss(), parameters)


def machine(device: str) -> str:
    return torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else f"cpu{torch.get_num_threads()}"


def file_name(benchmark: str, where: str, dtype: torch.dtype = torch.float32) -> str:
    """`methods-speed-bf16-eager-h200-pt211.csv`: the name states the conditions."""
    short = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    version = "".join(torch.__version__.split("+")[0].split(".")[:2])
    return f"{benchmark}-{short}-eager-{where}-pt{version}.csv"


def write_csv(path: Path, rows: list[dict], columns: Sequence[str] = ()) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.2f}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


class Table(list[dict]):
    """Rows that are printed and written to a file as they come, so that what ends a run loses none."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def add(self, row: dict) -> None:
        self.append(row)
        write_csv(self.path, self)
        print({name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}, flush=True)
