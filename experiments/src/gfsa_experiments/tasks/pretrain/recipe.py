"""Pretraining: a Qwen3-type decoder from scratch on text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gfsa_experiments.data.files import cache_folder
from gfsa_experiments.data.own import digest_of, name_of
from gfsa_experiments.engine.config import (
    Bounds,
    Compile,
    Count,
    CountOrZero,
    Positive,
    Precision,
    Schedule,
    TrainConfig,
)
from gfsa_experiments.engine.measure import Work
from gfsa_experiments.engine.next_token_loss import IGNORED, NextTokenLoss
from gfsa_experiments.engine.task import OwnData, Recipe, Split, Task, as_it_is
from gfsa_experiments.tasks.pretrain.data import (
    Part,
    TokenizerChoice,
    TokenRows,
    mask_for,
    positions_in_documents,
    token_files,
)
from gfsa_experiments.tasks.pretrain.model import QKNorm, Sizes, build_decoder
from gfsa_experiments.tasks.pretrain.probes import probe

# depth, width, heads and width of the MLP; with 16,384 tokens and a tied head 5.4, 15.4, 46.9 and
# 111.7 million numbers
_SIZES = {
    "5m": (5, 192, 3, 512),
    "15m": (8, 320, 5, 896),
    "46m": (12, 512, 8, 1408),
    "110m": (12, 768, 12, 2560),
}


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainConfig):
    """One epoch of techdocs, 65,536 tokens a step."""

    in_label = ("data", "size")

    data: str = "techdocs"
    """A corpus below ``--data-dir``, the path of a file or folder of text, or ``hub:ID``."""
    text: str = "text"
    """The key of the text in JSON lines, its column in tables and on the hub."""
    tokenizer: str = "bpe"
    """``bpe``: trained on the text; or the path of a tokenizer.json."""
    vocab_size: Annotated[int, Bounds(257)] = 16_384
    """Of ``tokenizer=bpe``: every byte, the end, and more."""
    block: Count = 1024
    """Tokens of a row."""
    boundaries: bool = False
    """Attention and positions begin anew with each document of a row."""
    size: Literal["5m", "15m", "46m", "110m"] = "15m"
    """Millions of parameters; the numbers below override it."""
    depth: Count | None = None
    width: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    """Fewer than ``heads``: grouped queries; None: as many."""
    head_dim: Count = 64
    mlp: Count | None = None
    """Width inside the MLP."""
    tied: bool = True
    """The head has the weights of the embedding."""
    qk_norm: QKNorm = "learned"
    """Queries and keys: normalised with ``learned`` gains (Qwen3), ``none`` (Llama), ``fixed``:
    normalised without gains, ``temperature``: that and one learned factor per head."""
    gate: bool = False
    """A factor for each head's output, computed from the layer's input (gated attention)."""
    tokenwise: bool = False
    """c0 and c1 of each head computed from the layer's input, by maps that start at zero."""
    shift_keys: bool = False
    """Add to each key the one before it, times a factor per head that starts at zero."""
    fast_gates: bool = False
    """Weights of ``gate`` or ``tokenwise`` learn at ``gain_lr``, without decay."""
    init_std: Positive = 0.02
    """Standard deviation of the random weights."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """What tokens are kept in from layer to layer; ``bf16`` moves half the bytes."""
    evaluations: Count = 10
    """How often ``valid`` is measured."""
    eval_rows: CountOrZero = 256
    """Rows of ``valid`` that are measured, evenly spaced; 0 for all."""
    probes: CountOrZero = 0
    """Rows and random sequences on which the trained model is probed (``probes.json``)."""

    epochs: float = 1
    batch_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.1
    beta2: float = 0.95
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    min_lr: float = 0.1
    precision: Precision = "bf16"
    compile: Compile = "auto"
    drop_last: bool = True

    def check(self) -> None:
        super().check()
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if self.residual == "bf16" and self.precision != "bf16":
            raise ValueError(f"residual=bf16 needs precision=bf16, got {self.precision}")
        if self.gate and self.tokenwise:
            raise ValueError("gate and tokenwise both scale a head's output: choose one of them")
        sizes = self.sizes(self.vocab_size)
        if sizes.heads % sizes.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads, got {sizes.kv_heads} for {sizes.heads} heads"
            )

    def unused(self) -> dict[str, str]:
        unused = super().unused()
        unused["group_by_length"] = "every row has the same length"
        unused["eval_every"] = "evaluations says how often"
        if self.tokenizer != "bpe":
            unused["vocab_size"] = f"{self.tokenizer} has its own; tokenizer=bpe is trained"
        if None not in (self.depth, self.width, self.heads, self.mlp):
            unused["size"] = "depth, width, heads and mlp are all given"
        if not (self.gate or self.tokenwise):
            unused["fast_gates"] = "there are no gates without gate or tokenwise"
        return unused

    def advice(self, filter_lr: float | None) -> str:
        if filter_lr is None or self.gain_lr is not None:
            return ""
        return (
            f"filter_lr={filter_lr:g} without gain_lr: filters learn fast and the plain model's "
            "gains do not, so that filters seem to gain more than they do; --set gain_lr=0.1 for "
            "all methods"
        )

    def steps_between_evaluations(self, per_epoch: int, total: int) -> int:
        return max(1, math.ceil(total / self.evaluations))

    def sizes(self, vocabulary: int) -> Sizes:
        """The decoder for so many different tokens."""
        depth, width, heads, mlp = _SIZES[self.size]
        heads = self.heads or heads
        return Sizes(
            depth=self.depth or depth,
            width=self.width or width,
            heads=heads,
            kv_heads=self.kv_heads or heads,
            head_dim=self.head_dim,
            mlp=self.mlp or mlp,
            # rows of the embedding in a multiple of 64 suit the GPU
            vocabulary=-(-vocabulary // 64) * 64,
            block=self.block,
            tied=self.tied,
        )

    def decoder(self, vocabulary: int, end: int | None = None) -> Any:
        """A new decoder for so many different tokens."""
        sizes = self.sizes(vocabulary)
        controls = (self.gate, self.tokenwise, self.shift_keys, self.fast_gates)
        return build_decoder(sizes, end, self.qk_norm, self.init_std, *controls)

    def choice(self) -> TokenizerChoice:
        return TokenizerChoice("" if self.tokenizer == "bpe" else self.tokenizer, self.vocab_size)

    def sketch(self) -> nn.Module | None:
        try:
            import transformers  # noqa: F401
        except ModuleNotFoundError:
            return None
        with torch.device("meta"):
            model: nn.Module = self.decoder(self.vocab_size)
            return model

    def label(self) -> str:
        size = self.size if "size" not in self.unused() else f"d{self.depth}-w{self.width}"
        name = name_of(self.data)
        ours = PretrainConfig.data
        if name == ours and self.data != ours:
            # the caller's own text is not taken for ours
            name = f"data={name}"
        return f"{name} qwen3-{size}"


class PretrainTask(Task):
    """Predict the next token: ``loss = mean of −log p(token | those before it)`` in nats.

    The text of a part is one row of tokens, each document begun by a token that says so, cut into
    rows of ``block``: every token but the first is predicted once, and what is left at the end of a
    part, less than a row, never. ``bits_per_byte`` spreads the same loss over the bytes of the
    part's text, and can be compared between tokenizers.
    """

    metric = "loss"
    higher_is_better = False
    falling: str | None = "loss"

    def __init__(self, config: PretrainConfig, data_dir: Path) -> None:
        found = token_files(config.data, data_dir, config.choice(), cache_folder(), config.text)
        parts = found.meta.parts
        if config.data != PretrainConfig.data:
            self.own_data = OwnData(
                name=found.meta.name,
                source=config.data,
                splits={name: part.tokens for name, part in parts.items()},
                split_by=f"{found.split_by}; {_documents(parts, config.boundaries)}",
                unit="tokens",
                digest=digest_of(part.sha256 for part in parts.values()),
            )
        self._cut({p: found.tokens(p) for p in parts}, config, {"valid": config.eval_rows})
        self._bytes_per_token = {name: part.bytes / part.tokens for name, part in parts.items()}
        self._end = found.meta.end
        self._boundaries = config.boundaries
        self._probes, self._in_bf16 = config.probes, config.precision == "bf16"
        sizes = config.sizes(found.meta.vocabulary)
        self.work = Work(sizes.block, sizes.flops())
        model = config.decoder(found.meta.vocabulary, self._end)
        model.loss_function = NextTokenLoss(config.compile != "no")
        if config.residual == "bf16":
            model.get_input_embeddings().register_forward_hook(_in_bf16)
        self.model = model

    def _cut(self, tokens: dict[str, np.ndarray], config: Any, most: dict[str, int]) -> None:
        """The rows of each part, of some parts only ``most`` of them."""
        self.rows = {
            part: TokenRows(of_part, config.block, part, most.get(part, 0))
            for part, of_part in tokens.items()
        }
        self.splits = {part: Split(rows, as_it_is) for part, rows in self.rows.items()}
        self._eval_batch = config.eval_batch_size or config.batch_size

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        ids = self.rows[batch["part"]].ids(batch)
        return self._mean(model, ids[:, :-1], ids[:, 1:])

    def predict(self, model: nn.Module, batch: Any) -> Any:
        ids = self.rows[batch["part"]].ids(batch)
        labels = ids[:, 1:]
        lacking = self._eval_batch - len(ids)
        inputs = ids[:, :-1]
        if lacking > 0:
            # another shape would be compiled for, for the sake of one batch
            inputs = torch.cat([inputs, inputs[:1].expand(lacking, -1)])
            nothing = torch.full((lacking, labels.shape[1]), IGNORED, device=ids.device)
            labels = torch.cat([labels, nothing])
        count = ids.shape[0] * (ids.shape[1] - 1)
        size = count * self._bytes_per_token[batch["part"]]
        return self._mean(model, inputs, labels).double() * count, count, size

    def score(self, predictions: list[Any]) -> dict[str, float]:
        totals, counts, sizes = zip(*predictions, strict=True)
        total = float(sum(totals))
        loss = total / sum(counts)
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": total / math.log(2) / sum(sizes),
        }

    def example(self) -> Any:
        """The first row of the validation text."""
        ids = self.rows["valid"].ids(self.rows["valid"].__getitems__([0]))
        return {"input_ids": ids[:, :-1]}

    def probes(self, model: nn.Module) -> dict[str, Any] | None:
        if not self._probes:
            return None
        precision = torch.bfloat16 if self._in_bf16 else None
        return probe(model, self.rows["valid"], self.rows["train"], precision, self._probes)

    def identity(self, split: str, index: int) -> Any:
        """The tokens themselves; those of ``train`` are never augmented, so they count too."""
        rows = self.rows[split]
        return rows.ids(rows.__getitems__([index]))

    def _mean(self, model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        positions = mask = None
        if self._boundaries:
            positions = positions_in_documents(ids, self._end)
            mask = mask_for(model, ids, self._end)
        # masks that are handed over ready are not built: where there is none, none, traced or not,
        # and attention is causal by its kernel
        loss: Tensor = model(
            input_ids=ids,
            labels=labels,
            attention_mask={"full_attention": mask},
            position_ids=positions,
            use_cache=False,
        ).loss
        return loss


def _documents(parts: dict[str, Part], boundaries: bool) -> str:
    """``30 train, 1 valid, 1 test documents``, and of which of them boundaries change nothing."""
    said = ", ".join(f"{part.documents:,} {name}" for name, part in parts.items()) + " documents"
    alone = [name for name, part in parts.items() if part.documents == 1]
    if boundaries and alone:
        said += f"; boundaries change nothing in {', '.join(alone)}, a single document"
    return said


def _in_bf16(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Every layer adds to what the embedding gives, in its type."""
    return output.to(torch.bfloat16)


RECIPE = Recipe(
    name="pretrain",
    title="Pretraining: a Qwen3-type decoder from scratch on text",
    config=PretrainConfig,
    build=PretrainTask,
    extra="text",
)
