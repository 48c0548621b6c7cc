"""Pretraining in small: a byte-level decoder on the source of Python's standard library."""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa.operators import AttentionOperator, Operator
from gfsa_experiments.engine.config import (
    Count,
    CountOrZero,
    Positive,
    Schedule,
    TrainConfig,
    check_multiple,
)
from gfsa_experiments.engine.measure import Work
from gfsa_experiments.engine.next_token_loss import cross_entropy
from gfsa_experiments.engine.task import Recipe
from gfsa_experiments.models.attention import SoftmaxAttention
from gfsa_experiments.tasks.pretrain.recipe import PretrainTask

BYTES = 256
# of ten shares of the modules, one to validate on and one to test on
_SHARES = 10
_HELD_OUT = {0: "valid", 1: "test"}
_PARTS = ("train", "valid", "test")


def source_folder() -> Path:
    """The folder of the standard library of the running Python."""
    return Path(sysconfig.get_path("stdlib"))


def part_of(module: str) -> str:
    """The part that a module belongs to, by its name: the same for every version of Python."""
    return _HELD_OUT.get(int(sha256(module.encode()).hexdigest(), 16) % _SHARES, "train")


@lru_cache(maxsize=2)
def read_parts(folder: Path) -> dict[str, bytes]:
    """The modules of each part (files, not packages), sorted by name, a zero byte between two."""
    found: dict[str, list[bytes]] = {name: [] for name in _PARTS}
    for path in sorted(folder.glob("*.py")):
        found[part_of(path.stem)].append(path.read_bytes())
    if not all(found.values()):
        counts = ", ".join(f"{len(modules)} in {name}" for name, modules in found.items())
        raise FileNotFoundError(
            f"expected the source of Python's standard library in {folder}, found {counts}; this "
            "Python came without it: use another one, or gfsa train pretrain --set data=FOLDER"
        )
    return {name: b"\0".join(modules) for name, modules in found.items()}


class CausalAttention(SoftmaxAttention):
    r"""Causal attention over normalised, rotated queries and keys, with a temperature per head.

    .. math:: A_h = \mathrm{softmax}_{causal}(t_h\, R\,\hat q_h\,(R\,\hat k_h)^\top / \sqrt d),
              \qquad \hat x = x / \sqrt{\operatorname{mean}(x^2) + ε}

    R rotates by position (RoPE), t is learned and one in the beginning.

    Args:
        dim: width of the tokens.
        num_heads: a divisor of ``dim``.
        block: the longest sequence.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, dim: int, num_heads: int, block: int) -> None:
        super().__init__(dim, num_heads)
        half = dim // num_heads // 2
        angles = torch.arange(block)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self.temperature = nn.Parameter(torch.ones(num_heads))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalised and rotated, and values: ``(B, H, N, d)`` each."""
        q, k, v = super().heads(x)
        q, k = (self._rotated(_normalised(part)) for part in (q, k))
        return q * self.temperature[:, None, None], k, v

    def operator(self, q: Tensor, k: Tensor, *graph: Tensor | None) -> Operator:
        # without a filter this is exactly torch's own attention
        if self.plugged is None:
            return AttentionOperator(q, k, is_causal=True, backend="sdpa")
        return AttentionOperator(q, k, is_causal=True)

    def _rotated(self, x: Tensor) -> Tensor:
        cosine, sine = self.cosine[: x.shape[-2]], self.sine[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class DecoderBlock(nn.Module):
    """``x ← x + attention(norm(x))``, then the same with an MLP four times as wide."""

    def __init__(self, width: int, heads: int, block: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = CausalAttention(width, heads, block)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        update: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + update


class ByteDecoder(nn.Module):
    """Predicts the next byte; the head has the weights of the embedding.

    Args:
        depth: attention layers.
        width: of the tokens.
        heads: attention heads per layer.
        block: the longest sequence.
        init_std: standard deviation of the random weights.
    """

    def __init__(self, depth: int, width: int, heads: int, block: int, init_std: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, block) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=init_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``(B, N, 256)`` for bytes ``(B, N)``."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


@dataclass(frozen=True, kw_only=True)
class StdlibConfig(TrainConfig):
    """Settings that were chosen on ``valid`` for the plain model; no files are needed."""

    in_label = ("depth", "width")

    depth: Count = 4
    width: Count = 64
    heads: Count = 4
    block: Count = 64
    """Bytes of a row."""
    init_std: Positive = 0.06
    """Standard deviation of the random weights."""
    evaluations: Count = 10
    """How often ``valid`` is measured."""
    eval_rows: CountOrZero = 256
    """Rows of ``valid`` that are measured, evenly spaced; 0 for all."""
    test_rows: CountOrZero = 1024
    """The same of ``test``."""

    max_steps: int = 500
    batch_size: int = 8
    eval_batch_size: int = 64
    lr: float = 4e-3
    gain_lr: float | None = 0.03
    weight_decay: float = 0.1
    beta2: float = 0.95
    schedule: Schedule = "cosine"
    warmup: float = 0.1
    min_lr: float = 0.1
    drop_last: bool = True

    def check(self) -> None:
        super().check()
        check_multiple(self, "width", "heads")
        if (self.width // self.heads) % 2:
            raise ValueError(
                f"width {self.width} and heads {self.heads} make heads of "
                f"{self.width // self.heads} numbers; RoPE needs an even size"
            )

    def unused(self) -> dict[str, str]:
        unused = super().unused()
        unused["group_by_length"] = "every row has the same length"
        unused["eval_every"] = "evaluations says how often"
        return unused

    def steps_between_evaluations(self, per_epoch: int, total: int) -> int:
        return max(1, math.ceil(total / self.evaluations))

    def sketch(self) -> nn.Module:
        with torch.device("meta"):
            return self.model()

    def model(self) -> ByteDecoder:
        """A new decoder of these sizes."""
        return ByteDecoder(self.depth, self.width, self.heads, self.block, self.init_std)

    def label(self) -> str:
        return f"stdlib decoder-d{self.depth}-w{self.width}"


class StdlibTask(PretrainTask):
    """Predict the next byte: ``bits_per_byte = mean of −log₂ p(byte | those before it)``."""

    metric = "bits_per_byte"
    falling = None

    def __init__(self, config: StdlibConfig, data_dir: Path) -> None:
        text = read_parts(source_folder())
        tokens = {part: np.frombuffer(of_part, np.uint8) for part, of_part in text.items()}
        wide = {part: of_part.astype(np.uint16) for part, of_part in tokens.items()}
        self._cut(wide, config, {"valid": config.eval_rows, "test": config.test_rows})
        self._bytes_per_token = dict.fromkeys(text, 1.0)
        self.model = config.model()
        weights = sum(p.numel() for p in self.model.parameters() if p.dim() > 1)
        # matrix products alone; causal attention is half of a square
        attention = 6.0 * config.depth * config.width * config.block
        self.work = Work(config.block, config.block * (6.0 * weights + attention))

    def example(self) -> Tensor:
        """The first rows of the validation text."""
        rows = self.rows["valid"]
        return rows.ids(rows.__getitems__(list(range(min(64, len(rows))))))[:, :-1]

    def probes(self, model: nn.Module) -> None:
        return None

    def _mean(self, model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model(ids), labels)


RECIPE = Recipe(
    name="stdlib",
    title="Pretraining in small: a byte-level decoder on Python's own source, without any files",
    config=StdlibConfig,
    build=StdlibTask,
)
