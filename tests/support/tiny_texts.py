"""Tiny models with tokenizers in folders, and tiny data sets in official formats."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = (
    *("a", "man", "is", "playing", "the", "flute", "dog", "runs", "in", "park", "not"),
    *("two", "women", "are", "reading", ".", "int", "x", "=", "y", ";"),
)
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def write(path: Path, text: str, compressed: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if compressed:
        path = path.with_name(path.name + ".xz")
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def sentence(number: int, length: int = 4) -> str:
    """Some words, others for each number."""
    return " ".join(WORDS[(number * 7 + 3 * i) % len(WORDS)] for i in range(length + number % 5))


def save_tokenizer(folder: Path, pair_types: bool = True) -> int:
    """A tokenizer of whole words in the manner of BERT or RoBERTa; gives its size."""
    words = [*SPECIAL, *WORDS, "\n"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if pair_types else [])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=names,
    ).save_pretrained(folder)
    return len(words)


_ENCODER = {
    "pad_token_id": 1,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
_BART = {"d_model": 16, "max_position_embeddings": 40, "eos_token_id": 2, "bos_token_id": 0} | {
    f"{part}_{what}": size
    for part in ("encoder", "decoder")
    for what, size in {"layers": 2, "attention_heads": 2, "ffn_dim": 32}.items()
}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "eos_token_id": 2}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", _ENCODER),
    "albert": ("AlbertForMaskedLM", {**_ENCODER, "embedding_size": 8}),
    "roberta": ("RobertaModel", {**_ENCODER, "type_vocab_size": 1}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "plbart": ("PLBartModel", {**_BART, "pad_token_id": 1}),
    "t5": ("T5Model", {**_T5, "pad_token_id": 1, "decoder_start_token_id": 1}),
}


def save_model(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """A random model of ``kind`` with a tokenizer."""
    size = save_tokenizer(folder, pair_types=kind in ("bert", "albert"))
    torch.manual_seed(7)
    name, settings = _MODELS[kind]
    model_class: Any = getattr(transformers, name)
    options = {"add_pooling_layer": False} if kind == "roberta" else {}
    model = model_class(model_class.config_class(vocab_size=size, **settings), **options)
    model.to(dtype).save_pretrained(folder)
    return folder


# official header and row of each GLUE task: index, texts and label put in
_GLUE = {
    "CoLA": ("", "gj04\t{label}\t\t{a}"),
    "SST-2": ("sentence\tlabel", "{a} \t{label}"),
    "MRPC": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{label}\t1\t2\t{a}\t{b}"),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "{i}\t{i}\t{i}\t{a}\t{b}\t{label}",
    ),
    "STS-B": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "{i}\tmain\tMSRvid\t2012\t{i}\tnone\tnone\t{a}\t{b}\t{label}",
    ),
    "MNLI": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
        "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        "{i}\t1\t1c\tslate\t( a )\t( b )\t( a )\t( b )\t{a}\t{b}\tneutral\t{label}",
    ),
    "QNLI": ("index\tquestion\tsentence\tlabel", "{i}\t{a}\t{b}\t{label}"),
    "RTE": ("index\tsentence1\tsentence2\tlabel", "{i}\t{a}\t{b}\t{label}"),
}
_LABELS = {
    "STS-B": ("0.0", "2.5", "5.000"),
    "MNLI": ("entailment", "neutral", "contradiction"),
    "QNLI": ("entailment", "not_entailment"),
    "RTE": ("entailment", "not_entailment"),
}


def glue_label(folder: str, number: int) -> str:
    labels = _LABELS.get(folder, ("0", "1"))
    return labels[number % len(labels)]


def glue_rows(folder: str, count: int) -> list[str]:
    """The lines of an official file, the header first where there is one."""
    header, row = _GLUE[folder]
    lines = [
        row.format(i=i, a=sentence(i), b=sentence(i + 100), label=glue_label(folder, i))
        for i in range(count)
    ]
    return ([header] if header else []) + lines


def write_glue(root: Path, folder: str, train: int = 24, dev: int = 10) -> Path:
    """A task in the official layout."""
    devs = ("dev_matched", "dev_mismatched") if folder == "MNLI" else ("dev",)
    write(root / folder / "train.tsv", "\n".join(glue_rows(folder, train)) + "\n")
    for name in devs:
        write(root / folder / f"{name}.tsv", "\n".join(glue_rows(folder, dev)) + "\n")
    return root


def corpus(lines: int) -> str:
    """A text in the manner of WikiText: a heading, an empty line, sentences."""
    body = [f" {sentence(i, 8)} \n" for i in range(lines)]
    return "".join([" \n", " = Heading = \n", " \n", *body])


def write_devign(root: Path, train: int = 16, others: int = 6) -> Path:
    total = train + 2 * others
    entries = [
        {
            "project": "qemu",
            "commit_id": "0",
            "target": i % 2,
            "func": f"int f{i} ( x )\n{{ x = {sentence(i)} ; }}",
        }
        for i in range(total)
    ]
    write(root / "function.json", json.dumps(entries))
    write(root / "train.txt", "".join(f"{i}\n" for i in range(train)))
    write(root / "valid.txt", "".join(f"{i}\n" for i in range(train, train + others)))
    write(root / "test.txt", "".join(f"{i}\n" for i in range(train + others, total)))
    return root


def write_clones(root: Path, train: int = 16, others: int = 6, shared: bool = False) -> Path:
    """BigCloneBench: the official layout, or the sampled and compressed one."""
    functions = [
        {"func": f"void f{i} ( ) {{\r\n  {sentence(i)} ;\n}}", "idx": str(1000 + i)}
        for i in range(12)
    ]
    write(root / "data.jsonl", "".join(json.dumps(f) + "\n" for f in functions), shared)
    for part, count in (("train", train), ("valid", others), ("test", others)):
        pairs = [(1000 + i % 12, 1000 + (i * 5 + 1) % 12, i % 2) for i in range(count)]
        name = f"{part}_sampled.txt" if shared else f"{part}.txt"
        write(root / name, "".join(f"{a}\t{b}\t{label}\n" for a, b, label in pairs), shared)
    return root
