"""PERL on a frozen image tower as an ONNX graph: the weights once, the K steps written out over them.

Written by hand over the tower's weights rather than traced: an adapter is not in it but comes in, with any number of
others, and every image says which it is for. The shortcuts are those of `backbone.tower`: the last block only at CLS,
queries, keys and values of the frozen rows and of each thought once.

    pixels (B, 3, S, S)  which (B)          images, and by number the adapter of each
    norm_weight norm_bias (A, D)  down_weight (A, R, D)  down_bias (A, R)  up_weight (A, R, D)  up_bias (A, D)
    classes (A, K+1, C, E)                  class embeddings of every step; of a shorter list the rest is zero
    -> logits (B, K+1, C)  embeddings (B, K+1, E)  middle (B, F), see `FrozenImages.middle`

Shapes: B images, A adapters, R rank, K steps, C classes, N rows, D width of the tower, H heads, E shared width.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import perlclip
from perlclip.backbone import Backbone
from perlclip.backbone.siglip import Probe, ProbedTower
from perlclip.backbone.tower import Block, ImageEmbedding, Tower
from perlclip.errors import PerlclipError, unknown_name
from perlclip.files import require_writable, write_files

OPSET, IR = 20, 9
LARGEST = 2**31 - 2**20  # bytes of one protocol buffer; above that the weights are a file of their own
ADAPTER = {
    "norm_weight": ("A", "D"), "norm_bias": ("A", "D"), "down_weight": ("A", "R", "D"), "down_bias": ("A", "R"),
    "up_weight": ("A", "R", "D"), "up_bias": ("A", "D"), "classes": ("A", "K", "C", "E"),
}  # fmt: skip
ONNX = "to export, pip install 'perlclip[onnx]'"
# What an activation is called in ONNX, known by what it does.
ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
QKV = tuple[str, str, str]
INT8 = ("weights", "products")
END = 2**31 - 1  # of a slice


def export_backbone(
    backbone: Backbone, path: str | Path, *, steps: int = 4, depth: int = 7, int8: str | None = None
) -> Path:
    """Write a backbone's image tower with so many steps that begin at a depth.

    `int8` is "weights", which are a quarter of the size then, or "products": also faster, and less exact.
    """
    path = Path(path)
    if int8 not in (None, *INT8):
        raise unknown_name("int8", str(int8), INT8)
    onnx = _require_onnx()
    require_writable(path.parent)
    model = _Graph(onnx, _checked(backbone, depth), depth, int8=int8).model(backbone, steps)
    if sum(weight.ByteSize() for weight in model.graph.initializer) < LARGEST:
        write_files({path: model.SerializeToString()})
    else:
        onnx.save_model(model, path, save_as_external_data=True, location=f"{path.name}.data")
    return path


def _require_onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise PerlclipError(ONNX) from error
    return onnx


def _checked(backbone: Backbone, depth: int) -> Tower:
    tower = backbone.vision
    embed = tower.embed
    if type(tower) not in (Tower, ProbedTower) or not isinstance(embed, ImageEmbedding):
        raise PerlclipError(
            f"backbone {backbone.name!r} reads its images out in a way that the ONNX file does not have"
        )
    if backbone.dtype != torch.float32 or backbone.device.type != "cpu":
        raise PerlclipError("a backbone is exported from the CPU in float32: load it so")
    if not 0 <= depth < tower.depth:
        raise PerlclipError(f"depth must be in 0..{tower.depth - 1}, got {depth}")
    return tower


class _Graph:
    """Nodes and weights as they come; every method returns the name of what it makes."""

    def __init__(self, onnx: Any, tower: Tower, depth: int, *, int8: str | None) -> None:
        self.onnx, self.tower, self.depth, self.int8 = onnx, tower, depth, int8
        self.probe = tower.head if isinstance(tower.head, Probe) else None
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.rounded: dict[str, tuple[str, str, str]] = {}  # rows in whole numbers, half their width, and [middle, 1]
        self.read: dict[str, str] = {}

    def model(self, backbone: Backbone, steps: int) -> Any:
        """The whole of it, checked."""
        helper, kinds = self.onnx.helper, self.onnx.TensorProto
        size, width, out = backbone.preprocess.size, self.tower.width, backbone.embed_dim
        known = {"K": steps + 1, "D": width, "E": out}
        inputs = {"pixels": ("B", 3, size, size), "which": ("B",)}
        inputs |= {name: tuple(known.get(letter, letter) for letter in shape) for name, shape in ADAPTER.items()}
        self.trajectory(steps, backbone.logit_scale)
        described = [
            helper.make_tensor_value_info(name, kinds.INT64 if name == "which" else kinds.FLOAT, shape)
            for name, shape in inputs.items()
        ]
        results = {
            "logits": ("B", steps + 1, "C"),
            "embeddings": ("B", steps + 1, out),
            "middle": ("B", self.tower.middle_width),
        }
        made = [helper.make_tensor_value_info(name, kinds.FLOAT, shape) for name, shape in results.items()]
        graph = helper.make_graph(self.nodes, "perl", described, made, list(self.weights.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
        model.producer_name, model.producer_version = "perlclip", perlclip.__version__
        helper.set_model_props(model, {"perlclip": json.dumps(about(backbone, steps, self.depth))})
        return model

    # ---- words ----

    def __call__(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or f"{kind}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Tensor | np.ndarray | list[int] | float, name: str = "", dtype: Any = None) -> str:
        """A weight under its name, or a number."""
        array = value.detach().numpy() if isinstance(value, Tensor) else np.asarray(value)
        array = array.astype(dtype or (np.int64 if array.dtype.kind == "i" else np.float32))
        name = name or f"constant_{array.dtype}_{array.tolist()}"
        if name not in self.weights:
            self.weights[name] = self.onnx.numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def linear(self, x: str, weight: Tensor, bias: Tensor | None, name: str) -> str:
        """x Wᵀ + b; in whole numbers only in the blocks that every step takes again, but for the last of them.

        What is rounded in the others is cheap to leave alone, as it is done once or at one row, and moves answers most.
        """
        block = name.partition(".")[0]
        if self.int8 == "products" and block.isdigit() and self.depth <= int(block) < self.tower.depth - 1:
            return self.whole(x, weight, bias, name)
        y = self("MatMul", x, self.small(weight, name) if self.int8 else self.constant(weight.T, f"{name}.weight"))
        return y if bias is None else self("Add", y, self.constant(bias, f"{name}.bias"))

    def small(self, weight: Tensor, name: str) -> str:
        """A weight from -127 to 127 by column, made floats again by a cast, which runtimes do once, when loading."""
        if name not in self.read:
            whole_DM, steps_M = _in_steps(weight)
            cast = self("Cast", self.constant(whole_DM, f"{name}.weight", np.int8), to=self.onnx.TensorProto.FLOAT)
            self.read[name] = self("Mul", cast, self.constant(steps_M, f"{name}.step"))
        return self.read[name]

    def whole(self, x: str, weight: Tensor, bias: Tensor | None, name: str) -> str:
        """x Wᵀ + b in whole numbers, x from -127 to 127 between the least and the largest of each row.

        Written as what runtimes know to replace: numbers that are rounded, read again and multiplied. Rows are brought
        to -1..1 before, so that they need no scales of their own: x = s r + m, hence x Wᵀ = s (r Wᵀ) + m Σ W.
        """
        if x not in self.rounded:
            low, high = (self(kind, x, self.constant([-1]), keepdims=1) for kind in ("ReduceMin", "ReduceMax"))
            half = self.constant(0.5)
            m = self("Mul", self("Add", low, high), half)
            span = self("Max", self("Mul", self("Sub", high, low), half), self.constant(1e-12))
            scale = self.constant(1 / 127), self.constant(np.array(128), "zero", np.uint8)
            q = self("QuantizeLinear", self("Div", self("Sub", x, m), span), *scale)
            m_1 = self("Concat", m, self("Div", span, span), axis=-1)
            self.rounded[x] = self("DequantizeLinear", q, *scale), span, m_1
        r, span, m_1 = self.rounded[x]
        whole_DM, steps_M = _in_steps(weight)
        parts = self.constant(whole_DM, f"{name}.weight", np.int8), self.constant(steps_M, f"{name}.step")
        zeros = self.constant(np.zeros(len(steps_M)), f"zeros_{len(steps_M)}", np.int8)
        # A node of its own for each product: runtimes replace it with what stands before it.
        w_DM, sums_M = self("DequantizeLinear", *parts, zeros, axis=1), (whole_DM * steps_M).sum(0)
        rest_2M = torch.stack([sums_M, torch.zeros_like(sums_M) if bias is None else bias.detach()])
        y = self("Mul", self("MatMul", r, w_DM), span)
        return self("Add", y, self("MatMul", m_1, self.constant(rest_2M, f"{name}.rest")))

    def norm(self, x: str, norm: nn.Module, name: str) -> str:
        """A layer norm; one that is none changes nothing."""
        if not isinstance(norm, nn.LayerNorm):
            return x
        scale, shift = self.constant(norm.weight, f"{name}.weight"), self.constant(norm.bias, f"{name}.bias")
        return self("LayerNormalization", x, scale, shift, axis=-1, epsilon=norm.eps)

    def rows(self, x: str, start: int, stop: int, axis: int = 1) -> str:
        """Some rows of each sequence."""
        return self("Slice", x, self.constant([start]), self.constant([stop]), self.constant([axis]))

    def unit(self, x: str, out: str = "") -> str:
        """Rows at unit length."""
        length = self("ReduceL2", x, self.constant([-1]), keepdims=1)
        return self("Div", x, self("Max", length, self.constant(1e-12)), out=out)

    def gather(self, name: str) -> str:
        """Of an adapter's tensor what is for each image."""
        return self("Gather", name, "which", axis=0)

    # ---- the tower ----

    def embed(self) -> str:
        """Pixels to rows: CLS and patches."""
        embed = self.tower.embed
        assert isinstance(embed, ImageEmbedding)
        p, width, bias = embed.patch.shape[-1], self.tower.width, embed.bias
        inputs = [self.constant(embed.patch, "patch.weight")]
        inputs += [] if bias is None else [self.constant(bias, "patch.bias")]
        x = self("Conv", "pixels", *inputs, strides=[p, p], kernel_shape=[p, p])
        x = self("Transpose", self("Reshape", x, self.constant([0, width, -1])), perm=[0, 2, 1])
        if embed.cls is not None:
            shape = self("Concat", self("Shape", "pixels", start=0, end=1), self.constant([1, width]), axis=0)
            x = self("Concat", self("Expand", self.constant(embed.cls[None, None], "cls"), shape), x, axis=1)
        x = self("Add", x, self.constant(embed.position, "position"))
        return self.norm(x, embed.norm, "pre_norm")

    def project(self, i: int, x: str) -> QKV:
        """Queries, keys and values of rows that enter block i, all (B, N, D); queries are scaled already."""
        block = self.block(i)
        y = self.norm(x, block.norm1, f"{i}.norm1")
        scale = (block.qkv.in_features // block.heads) ** -0.5
        weights, biases = block.qkv.weight.chunk(3), block.qkv.bias.chunk(3)
        made = [
            self.linear(y, weight * factor, bias * factor, f"{i}.{name}")
            for name, weight, bias, factor in zip("qkv", weights, biases, (scale, 1.0, 1.0), strict=True)
        ]
        return made[0], made[1], made[2]

    def finish(self, i: int, x: str, qkv: QKV) -> str:
        """The rest of block i at the rows x, whose queries come with keys and values of perhaps more rows."""
        block = self.block(i)
        split = self.constant([0, 0, block.heads, block.qkv.in_features // block.heads])
        q, k, v = (self("Reshape", each, split) for each in qkv)
        scores = self("MatMul", self("Transpose", q, perm=[0, 2, 1, 3]), self("Transpose", k, perm=[0, 2, 3, 1]))
        mixed = self("MatMul", self("Softmax", scores, axis=-1), self("Transpose", v, perm=[0, 2, 1, 3]))
        mixed = self(
            "Reshape", self("Transpose", mixed, perm=[0, 2, 1, 3]), self.constant([0, 0, block.qkv.in_features])
        )
        x = self("Add", x, self.linear(mixed, block.out.weight, block.out.bias, f"{i}.out"))
        y = self.linear(self.norm(x, block.norm2, f"{i}.norm2"), block.fc1.weight, block.fc1.bias, f"{i}.fc1")
        return self("Add", x, self.linear(self.activate(y, block.act), block.fc2.weight, block.fc2.bias, f"{i}.fc2"))

    def activate(self, x: str, act: Any) -> str:
        sample = torch.linspace(-4, 4, 41)
        name = next((name for name, known in ACTIVATIONS.items() if torch.allclose(act(sample), known(sample))), "")
        if name == "silu":
            return self("Mul", x, self("Sigmoid", x))
        if not name:
            raise PerlclipError("the backbone has an activation that the export does not know")
        return self("Relu", x) if name == "relu" else self("Gelu", x, approximate="tanh" if name == "tanh" else "none")

    def block(self, i: int) -> Block:
        block = self.tower.blocks[i]
        assert isinstance(block, Block)
        return block

    def pool(self, depth: int, x: str, qkv: QKV, row: int) -> str:
        """Blocks depth..L and the readout, (B, 1, D): the last block only at one row, or a probe of all from it on."""
        for i in range(depth, self.tower.depth):
            if i > depth:
                qkv = self.project(i, x)
            if i == self.tower.depth - 1 and self.probe is None:
                x, qkv = self.rows(x, row, row + 1), (self.rows(qkv[0], row, row + 1), qkv[1], qkv[2])
            x = self.finish(i, x, qkv)
            if row == 0:  # before any thought
                self.middle(x, i + 1)
        return x if self.probe is None else self.probed(self.probe, self.rows(x, row, END))

    def probed(self, probe: Probe, x: str) -> str:
        """SigLIP's pooling head: one query over the rows, then x + MLP(LN(x))."""
        (H, D), y = probe.query_HD.shape, self.norm(x, self.tower.norm, "norm")
        scores = self("MatMul", self.constant(probe.query_HD, "probe"), self("Transpose", y, perm=[0, 2, 1]))
        mixed = self("Unsqueeze", self("MatMul", self("Softmax", scores, axis=-1), y), self.constant([2]))
        values = self.constant(probe.value.weight.view(H, -1, D).transpose(1, 2), "probe.value.weight")
        mixed = self("Reshape", self("MatMul", mixed, values), self.constant([0, 1, D]))
        mixed = self("Add", mixed, self.constant(probe.value.bias, "probe.value.bias"))
        x = self.linear(mixed, probe.out.weight, probe.out.bias, "probe.out")
        y = self.linear(self.norm(x, probe.norm, "probe.norm"), probe.fc1.weight, probe.fc1.bias, "probe.fc1")
        y = self.linear(self.activate(y, probe.act), probe.fc2.weight, probe.fc2.bias, "probe.fc2")
        return self("Add", x, y)

    def middle(self, x: str, depth: int) -> None:
        """What the rows say, if that is half way up: CLS, where there is one, and the mean of the patches."""
        if depth != self.tower.middle:
            return
        starts = self.tower.starts
        parts = [self.rows(x, i, i + 1) for i in range(starts)]
        parts += [self("ReduceMean", self.rows(x, starts, END), self.constant([1]), keepdims=1)]
        whole = self("Concat", *(self.unit(part) for part in parts), axis=-1)
        scaled = self("Mul", whole, self.constant(len(parts) ** -0.5))
        self("Reshape", scaled, self.constant([0, self.tower.middle_width]), out="middle")

    # ---- PERL ----

    def think(self, h: str) -> str:
        """phi of each image's own adapter: (B, 1, D) to (B, 1, D)."""
        D = self.tower.width
        ones, zeros = self.constant(torch.ones(D), "ones"), self.constant(torch.zeros(D), "zeros")
        y = self("LayerNormalization", h, ones, zeros, axis=-1, epsilon=nn.LayerNorm(1).eps)
        own = {name: self.chosen[name] for name in ADAPTER if name != "classes"}
        y = self("Add", self("Mul", y, own["norm_weight"]), own["norm_bias"])
        y = self("Add", self("MatMul", y, own["down_weight"]), own["down_bias"])
        return self("Add", self("MatMul", self("Gelu", y), own["up_weight"]), own["up_bias"])

    def trajectory(self, steps: int, logit_scale: float) -> None:
        """All steps, all outputs."""
        depth = self.depth
        self.chosen = {name: self.gather(name) for name in ADAPTER if name != "classes"}
        for name in ("norm_weight", "norm_bias", "down_bias", "up_bias"):
            self.chosen[name] = self("Unsqueeze", self.chosen[name], self.constant([1]))
        self.chosen["down_weight"] = self("Transpose", self.chosen["down_weight"], perm=[0, 2, 1])
        s = self.embed()
        self.middle(s, 0)
        for i in range(depth):
            s = self.finish(i, s, self.project(i, s))
            self.middle(s, i + 1)
        frozen = self.project(depth, s)
        states = [self.pool(depth, s, frozen, 0)]
        thoughts: list[str] = []
        projected: list[QKV] = []
        for k in range(1, steps + 1):
            thoughts.append(self.think(states[-1]))
            projected.append(self.project(depth, thoughts[-1]))
            q, key, v = (self("Concat", *each, axis=1) for each in zip(*projected, frozen, strict=True))
            states.append(self.pool(depth, self("Concat", *thoughts, s, axis=1), (q, key, v), k))
        h = self("Concat", *states, axis=1) if steps else states[0]
        features, head = h, self.tower.head
        if isinstance(head, nn.Linear):  # a probe's state is in the shared space already
            features = self.linear(self.norm(h, self.tower.norm, "norm"), head.weight, None, "head")
        v = self.unit(features, out="embeddings")
        # Every adapter's classes with every image, of which its own are taken: copies of classes would be larger.
        classes = self("Transpose", "classes", perm=[0, 1, 3, 2])
        scores = self("MatMul", self("Transpose", v, perm=[1, 0, 2]), classes)
        own = self("Unsqueeze", "which", self.constant([1]))
        found = self("GatherND", self("Transpose", scores, perm=[2, 0, 1, 3]), own, batch_dims=1)
        self("Mul", found, self.constant(logit_scale), out="logits")


def _in_steps(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight's transpose from -127 to 127 by column, and the step of each."""
    w_DM = weight.detach().T
    steps_M = (w_DM.abs().amax(0) / 127).clamp(min=1e-12)
    return (w_DM / steps_M).round(), steps_M


def about(backbone: Backbone, steps: int, depth: int) -> dict[str, Any]:
    """What whoever runs the graph has to know: how pixels are made, and which adapters fit."""
    preprocess = backbone.preprocess
    return {
        "backbone": backbone.name,
        "fingerprint": backbone.fingerprint,
        "steps": steps,
        "depth": depth,
        "size": preprocess.size,
        "shortest_edge": preprocess.processor.size.get("shortest_edge"),  # None: both sides are made `size`
        "resample": preprocess.resample,
        "scale": preprocess.scale,
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
    }
