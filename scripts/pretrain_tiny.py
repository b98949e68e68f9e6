"""Pre-train the embedded tiny backbones on the drawn world and write them as Hugging Face folders.

    PYTHONPATH=src python scripts/pretrain_tiny.py --out DIR --steps 4000 --batch 1024 --seed 0 --compile
    PYTHONPATH=src python scripts/pretrain_tiny.py --out DIR --family siglip --minutes 6.5 --record --save-every 60
    PYTHONPATH=src python scripts/pretrain_tiny.py --out DIR --measure FOLDER      # only the zero-shot table

Scenes are drawn, described and tokenised on the training device, batch by batch; no picture is seen twice. Beside the
model (float16, under 8 MB) it leaves log.csv, zeroshot.csv (the fifteen toybox sets) and settings.json.

Shape legend: B pairs, A attributes, T tokens, D embedding, N test pictures, K classes, C channels, H rows, W columns.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoTokenizer,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTokenizer,
    CLIPVisionConfig,
    SiglipConfig,
    SiglipModel,
)

from perlclip.backbone.accel.cuda_graphs import Compiled
from perlclip.data.toybox import (
    WORDS,
    Scenes,
    caption_words,
    captions,
    load_toybox,
    render,
    sample_scenes,
    toybox_names,
)

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
IMAGE, PATCH, CONTEXT, EMBEDDING = 64, 8, 32, 128
VISION_WIDTH, VISION_HEADS = 128, 4
TEXT_WIDTH, TEXT_HEADS = 96, 3
SIGLIP_TEXT_MLP = 336  # instead of 4 x 96: with a pooling head, twelve blocks a tower then stay below 8 MB
LOG_EVERY = 50
MAX_LOGIT_SCALE = math.log(100)
# The sigmoid loss has to find scale and bias first: at the rate of the weights, 4,000 steps moved them by 0.9 and 0.2.
SIGLIP_RATES = {"logit_scale": 5.0, "logit_bias": 20.0}
NEUTRAL = -1e4  # the logit of a pair that is neither positive nor negative


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything a run depends on besides the code."""

    steps: int
    batch: int
    seed: int
    lr: float
    weight_decay: float
    warmup: float  # share of the schedule
    minutes: float | None  # when given, the schedule runs over time instead of steps
    blocks: int  # of each tower
    compile: bool
    device: str
    family: str = "clip"
    record: bool = False
    start: str | None = None  # the folder it went on from
    save_every: float | None = None  # seconds


# ---- tokenizer: CLIP's byte-level BPE with merges that make every word of the grammar one token ----


def learn_merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Merge the most frequent pair of pieces, again and again, until every word is one piece."""
    spelled = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges = []
    while any(len(pieces) > 1 for pieces in spelled):
        counts = Counter(pair for pieces in spelled for pair in itertools.pairwise(pieces))
        best = max(counts, key=lambda pair: (counts[pair], pair))
        spelled = [_merged(pieces, best) for pieces in spelled]
        merges.append(best)
    return merges


def _merged(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        # A piece that has just been merged never equals the pair's first half, so runs merge from the left.
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def write_tokenizer(folder: Path, words: Sequence[str]) -> Any:
    """Write the tokenizer files and load them back, as any user will."""
    merges = learn_merges(words)
    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), *("".join(pair) for pair in merges), BOS, EOS]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CONTEXT)
    tokenizer.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return AutoTokenizer.from_pretrained(folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lexicon:
    """From word ids of the grammar to tokens, by look-up; padding becomes EOS, as CLIP pads."""

    token_of_word: Tensor
    bos: int
    eos: int

    @classmethod
    def of(cls, tokenizer: Any, device: str) -> Lexicon:
        """The tokenizer's ids of the grammar's words."""
        ids = [tokenizer.convert_tokens_to_ids(word + "</w>" if word else EOS) for word in WORDS]
        return cls(
            token_of_word=torch.tensor(ids, device=device), bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id
        )

    def tokens(self, words_BT: Tensor) -> Tensor:
        """Token ids (B, T + 2) of captions."""
        return F.pad(F.pad(self.token_of_word[words_BT], (1, 0), value=self.bos), (0, 1), value=self.eos)


# ---- model ----

Model = CLIPModel | SiglipModel


def build_model(tokenizer: Any, blocks: int) -> CLIPModel:
    """A randomly initialised CLIP of the tiny architecture."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        num_hidden_layers=blocks,
        num_attention_heads=TEXT_HEADS,
        max_position_embeddings=CONTEXT,
        projection_dim=EMBEDDING,
        hidden_act="quick_gelu",
        **special,
    )
    vision = CLIPVisionConfig(
        hidden_size=VISION_WIDTH,
        intermediate_size=4 * VISION_WIDTH,
        num_hidden_layers=blocks,
        num_attention_heads=VISION_HEADS,
        image_size=IMAGE,
        patch_size=PATCH,
        projection_dim=EMBEDDING,
        hidden_act="quick_gelu",
    )
    towers = {"text_config": text.to_dict(), "vision_config": vision.to_dict()}
    return CLIPModel(CLIPConfig(**towers, projection_dim=EMBEDDING))


def build_siglip(tokenizer: Any, blocks: int) -> SiglipModel:
    """The same widths in SigLIP's shape: a pooling head, no causal mask, a bias; it starts as SigLIP's authors do."""
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    shared = {"num_hidden_layers": blocks}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": TEXT_WIDTH, "intermediate_size": SIGLIP_TEXT_MLP,
        "num_attention_heads": TEXT_HEADS, "max_position_embeddings": CONTEXT, "projection_size": VISION_WIDTH,
        "pad_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    vision = {
        "hidden_size": VISION_WIDTH, "intermediate_size": 4 * VISION_WIDTH, "num_attention_heads": VISION_HEADS,
        "image_size": IMAGE, "patch_size": PATCH,
    }  # fmt: skip
    model = SiglipModel(SiglipConfig(text_config=text | special | shared, vision_config=vision | shared))
    with torch.no_grad():
        model.logit_scale.fill_(math.log(10))
        model.logit_bias.fill_(-10)
    return model


def write_preprocessor(folder: Path, family: str) -> None:
    """The family's image preprocessing at this size. By hand: the class's own file differs between releases."""
    square = {"height": IMAGE, "width": IMAGE}
    shapes = {
        "clip": {"size": {"shortest_edge": IMAGE}, "do_center_crop": True, "crop_size": square},
        "siglip": {"size": square},
    }
    config = {
        "image_processor_type": {"clip": "CLIPImageProcessor", "siglip": "SiglipImageProcessor"}[family],
        "do_resize": True,
        "resample": 3,  # bicubic
        **shapes[family],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(config, indent=2) + "\n")


def to_pixels(uint8_BCHW: Tensor) -> Tensor:
    """What the preprocessor makes of a picture of the right size."""
    return uint8_BCHW.float() * (2 / 255) - 1


def embed_images(model: Model, pixels_BCHW: Tensor) -> Tensor:
    """(B, D) unit vectors."""
    if isinstance(model, SiglipModel):
        return F.normalize(model.vision_model(pixel_values=pixels_BCHW).pooler_output, dim=-1)
    return F.normalize(model.visual_projection(model.vision_model(pixel_values=pixels_BCHW).pooler_output), dim=-1)


def embed_texts(model: Model, tokens_BT: Tensor) -> Tensor:
    """(B, D) unit vectors."""
    if isinstance(model, SiglipModel):  # whose texts fill the context
        padding = CONTEXT - tokens_BT.shape[1]
        tokens_BT = F.pad(tokens_BT, (0, padding), value=model.config.text_config.pad_token_id)
        return F.normalize(model.text_model(input_ids=tokens_BT).pooler_output, dim=-1)
    return F.normalize(model.text_projection(model.text_model(input_ids=tokens_BT).pooler_output), dim=-1)


# ---- batches and loss ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Pictures, their captions, and how captions and pictures relate."""

    pixels: Tensor  # (B, C, H, W)
    tokens: Tensor  # (B, T)
    same: Tensor  # (B, B) the two captions are word for word equal
    neutral: Tensor  # (B, B) the caption in the column is also true of the picture in the row, but not its own


def draw_batch(settings: Settings, step: int, lexicon: Lexicon) -> Batch:
    """The batch of a step: samples `step * batch ..` of the seed's endless stream."""
    start = step * settings.batch
    scenes = sample_scenes(settings.batch, settings.seed, start=start, device=settings.device)
    words_BT, mentions_BA = caption_words(scenes, settings.seed + 1, start=start)
    same_BB, neutral_BB = relations(scenes, words_BT, mentions_BA)
    pixels_BCHW = to_pixels(render(scenes, IMAGE))
    return Batch(pixels=pixels_BCHW, tokens=lexicon.tokens(words_BT), same=same_BB, neutral=neutral_BB)


def drawn_ahead(settings: Settings, lexicon: Lexicon) -> Iterator[Batch]:
    """Batch after batch; beside recorded steps each is drawn while the step before it is computed.

    Drawing waits for its own copies to the card; in a stream of its own it does not wait for the step as well.
    """
    if not (settings.record and settings.device == "cuda"):
        yield from (draw_batch(settings, step, lexicon) for step in itertools.count())
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for step in itertools.count():
        with torch.cuda.stream(side):
            batch = draw_batch(settings, step, lexicon)
        here.wait_stream(side)
        for tensor in (batch.pixels, batch.tokens, batch.same, batch.neutral):
            tensor.record_stream(here)
        yield batch


def relations(scenes: Scenes, words_BT: Tensor, mentions_BA: Tensor) -> tuple[Tensor, Tensor]:
    """Which captions are equal, and which further captions are true of a picture: "a star" is no negative of one."""
    ids_BA = scenes.ids()
    true_BB = ((ids_BA.unsqueeze(1) == ids_BA) | ~mentions_BA).all(2)
    weights_T = torch.tensor([pow(1_000_003, t + 1, 2**31) for t in range(words_BT.shape[1])], device=words_BT.device)
    key_B = (words_BT * weights_T).sum(1)
    same_BB = key_B.unsqueeze(1) == key_B
    return same_BB, true_BB & ~same_BB


def contrastive_loss(image_BD: Tensor, text_BD: Tensor, scale: Tensor, batch: Batch) -> Tensor:
    """CLIP's symmetric loss with equal captions sharing the target and merely true ones left out."""
    logits_BB = (scale * image_BD @ text_BD.T).float()
    targets_BB = batch.same.float() / batch.same.sum(1, keepdim=True)
    by_image = logits_BB.masked_fill(batch.neutral, NEUTRAL).log_softmax(1)
    by_text = logits_BB.T.masked_fill(batch.neutral.T, NEUTRAL).log_softmax(1)
    return -(targets_BB * (by_image + by_text)).sum() / (2 * len(logits_BB))


def sigmoid_loss(image_BD: Tensor, text_BD: Tensor, scale: Tensor, bias: Tensor, batch: Batch) -> Tensor:
    """SigLIP's: every pair by itself, equal captions are positives and merely true ones are left out."""
    logits_BB = (scale * image_BD @ text_BD.T + bias).float()
    signs_BB = 2 * batch.same.float() - 1
    return -(F.logsigmoid(signs_BB * logits_BB) * ~batch.neutral).sum() / len(logits_BB)


# ---- training ----


def rate(progress: float, settings: Settings) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    if progress < settings.warmup:
        return settings.lr * progress / settings.warmup
    return settings.lr * 0.5 * (1 + math.cos(math.pi * (progress - settings.warmup) / (1 - settings.warmup)))


def schedule(settings: Settings) -> Iterator[tuple[int, float]]:
    """(step, learning rate) until the steps, or the minutes, are used up."""
    began = time.monotonic()
    for step in range(settings.steps) if settings.minutes is None else range(10**9):
        spent = (time.monotonic() - began) / (60 * settings.minutes) if settings.minutes else step / settings.steps
        if spent >= 1:
            return
        yield step, rate(spent, settings)


def build_optimizer(model: Model, settings: Settings) -> torch.optim.AdamW:
    """AdamW that decays matrices but neither biases, norms nor the logit scale; `rate` is a factor of each group."""
    rates = SIGLIP_RATES if settings.family == "siglip" else {}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": settings.weight_decay, "rate": 1.0},
        {"params": [p for n, p in model.named_parameters() if p.ndim < 2 and n not in rates], "rate": 1.0},
        *({"params": [p], "rate": rates[n]} for n, p in model.named_parameters() if n in rates),
    ]
    groups = [{"weight_decay": 0.0, **group} for group in groups]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98), fused=settings.device == "cuda")


def gradients_of(model: Model, settings: Settings) -> Callable[..., Sequence[Tensor]]:
    """The loss of a batch's tensors and its gradients; recorded on request, as 3,000 kernels wait for their launch."""
    images, texts, parameters = embed_images, embed_texts, list(model.parameters())
    if settings.compile:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
        images, texts = torch.compile(images), torch.compile(texts)

    def work(pixels: Tensor, tokens: Tensor, same: Tensor, neutral: Tensor) -> Sequence[Tensor]:
        batch = Batch(pixels=pixels, tokens=tokens, same=same, neutral=neutral)
        with torch.autocast(settings.device, dtype=torch.bfloat16, enabled=settings.device == "cuda"):
            image_BD, text_BD = images(model, batch.pixels), texts(model, batch.tokens)
        pair, scale = (image_BD.float(), text_BD.float()), model.logit_scale.exp()
        if isinstance(model, SiglipModel):
            loss = sigmoid_loss(*pair, scale, model.logit_bias, batch)
        else:
            loss = contrastive_loss(*pair, scale, batch)
        # The fused optimiser wants a gradient laid out as its parameter is.
        pairs = zip(parameters, torch.autograd.grad(loss, parameters), strict=True)
        return [loss.detach(), *(g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for p, g in pairs)]

    return Compiled(work, torch.device(settings.device), "auto" if settings.record else "off")


def optimise(model: Model, lexicon: Lexicon, settings: Settings) -> Iterator[tuple[int, float, Tensor]]:
    """Train in place, yielding (step, learning rate, loss)."""
    optimizer, gradients = build_optimizer(model, settings), gradients_of(model, settings)
    batches = drawn_ahead(settings, lexicon)
    for (step, lr), batch in zip(schedule(settings), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = lr * group["rate"]
        loss, *found = gradients(batch.pixels, batch.tokens, batch.same, batch.neutral)
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=MAX_LOGIT_SCALE)
        yield step, lr, loss


def train(model: Model, lexicon: Lexicon, settings: Settings, out: Path) -> int:
    """Train in place, writing a line of the log every few steps; returns the number of steps."""
    done = 0
    marked = saved = time.monotonic()
    with (out / "log.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "loss", "lr", "images_per_s"])
        for step, lr, loss in optimise(model, lexicon, settings):
            done = step + 1
            if done % LOG_EVERY:
                continue
            value, now = loss.item(), time.monotonic()
            if settings.save_every and now - saved > settings.save_every:  # a usable state, should time run out
                save(model, out)
                saved = now
            speed = LOG_EVERY * settings.batch / (now - marked)
            marked = now
            writer.writerow([done, f"{value:.4f}", f"{lr:.2e}", f"{speed:.0f}"])
            file.flush()
            print(f"step {done:6d}  loss {value:.4f}  lr {lr:.2e}  {speed:,.0f} images/s", flush=True)
    return done


def save(model: Model, folder: Path) -> None:
    """Write the weights in float16; what is written before stays until the new file is whole."""
    fresh = folder / "fresh"
    copy.deepcopy(model).half().save_pretrained(fresh)
    (fresh / "model.safetensors").chmod(0o644)  # it is created private
    for file in fresh.iterdir():
        file.replace(folder / file.name)
    fresh.rmdir()


# ---- zero-shot table ----


def accuracies(logits_NK: Tensor, labels_N: Tensor) -> dict[str, float]:
    """Per cent correct over all classes, and within the first (base) and second (novel) half of them."""
    classes = logits_NK.shape[1]
    half = (classes + 1) // 2
    result = {}
    for name, low, high in (("all", 0, classes), ("base", 0, half), ("novel", half, classes)):
        rows_N = (labels_N >= low) & (labels_N < high)
        right = logits_NK[rows_N, low:high].argmax(1) + low == labels_N[rows_N]
        result[name] = 100 * right.float().mean().item()
    return result


@torch.inference_mode()
def zero_shot(folder: Path, device: str) -> list[dict[str, Any]]:
    """Zero-shot accuracy on the suite's test sets, of the float16 weights as they were written."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for name in toybox_names():
        test = load_toybox(name).test
        tokens_KT = tokenizer(test.prompts, padding=True, return_tensors="pt").input_ids.to(device)
        text_KD = embed_texts(model, tokens_KT)
        uint8_NCHW = torch.from_numpy(np.stack([np.asarray(image) for image in test.images])).permute(0, 3, 1, 2)
        parts = [embed_images(model, to_pixels(part.to(device))) @ text_KD.T for part in torch.split(uint8_NCHW, 256)]
        scores = accuracies(torch.cat(parts).cpu(), torch.tensor(test.labels))
        rows.append({"set": name, "classes": len(test.class_names), **{k: f"{v:.2f}" for k, v in scores.items()}})
        print("  ".join(f"{value!s:>16}" for value in rows[-1].values()), flush=True)
    return rows


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write dictionaries of equal keys as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def check_tokens(tokenizer: Any, lexicon: Lexicon, settings: Settings) -> None:
    """The look-up that trains must agree with the tokenizer that users run."""
    words_BT, _ = caption_words(sample_scenes(256, settings.seed, device=settings.device), settings.seed)
    tokens_BT = lexicon.tokens(words_BT)
    width = tokens_BT.shape[1]
    expected = tokenizer(captions(words_BT), padding="max_length", max_length=width, return_tensors="pt").input_ids
    if not torch.equal(tokens_BT.cpu(), expected):
        raise ValueError("the tokenizer splits captions unlike the grammar")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--measure", type=Path, help="measure the model in this folder instead of training one")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=float, default=0.05, help="share of the schedule")
    parser.add_argument("--minutes", type=float, help="run the schedule over so much time, instead of over steps")
    parser.add_argument("--blocks", type=int, default=12, help="of each tower; fewer for trials")
    parser.add_argument("--family", choices=("clip", "siglip"), default="clip", help="the shape of the model")
    parser.add_argument("--compile", action="store_true", help="torch.compile the towers")
    parser.add_argument("--record", action="store_true", help="forward and backward pass as a CUDA graph")
    parser.add_argument("--start", metavar="FOLDER", help="go on from these weights instead of random ones")
    parser.add_argument("--save-every", type=float, metavar="SECONDS", help="also write the weights so often")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train, write the folder, measure it."""
    arguments = vars(parse_arguments())
    out: Path = arguments.pop("out")
    measured: Path | None = arguments.pop("measure")
    settings = Settings(**arguments)
    out.mkdir(parents=True, exist_ok=True)
    if measured:
        write_table(out / "zeroshot.csv", zero_shot(measured, settings.device))
        return
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")

    tokenizer = write_tokenizer(out, [word for word in WORDS if word])
    lexicon = Lexicon.of(tokenizer, settings.device)
    check_tokens(tokenizer, lexicon, settings)
    build = build_siglip if settings.family == "siglip" else build_model
    model = build(tokenizer, settings.blocks)
    if settings.start:
        model.load_state_dict(AutoModel.from_pretrained(settings.start, dtype=torch.float32).state_dict())
    model = model.to(settings.device).train()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(tokenizer)} tokens", flush=True)

    began = time.monotonic()
    write_preprocessor(out, settings.family)
    steps = train(model, lexicon, settings, out)
    seconds = time.monotonic() - began
    save(model, out)
    write_table(out / "zeroshot.csv", zero_shot(out, settings.device))
    facts = {
        "steps_run": steps,
        "seconds": round(seconds, 1),
        "parameters": parameters,
        "vocabulary": len(tokenizer),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device_name": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
    }
    (out / "settings.json").write_text(json.dumps({**asdict(settings), **facts}, indent=2) + "\n")
    total = sum(file.stat().st_size for file in out.iterdir())
    print(f"{steps} steps in {seconds:.0f} s; {out}: {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
