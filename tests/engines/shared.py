"""What the tests of several engines have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def torchrun(processes: int, *arguments: str, **environment: str) -> str:
    """What processes print that torchrun starts; raises with the end of it if one of them fails."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *arguments),
    ]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-6000:]}")
    return done.stdout


def tiny_llama(wide: bool = False, **changes: Any) -> Any:
    """A random Llama whose queries share keys in pairs; ``changes`` are fields of its config."""
    import torch
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 128 if wide else 32,
        "intermediate_size": 384 if wide else 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes))


def word_tokenizer(size: int, *special: str, unknown: str, **names: str | int) -> Any:
    """A tokenizer of the words w0, w1 …, each at its number; the first numbers are ``special``.

    Args:
        names: arguments of ``PreTrainedTokenizerFast``, such as ``eos_token``.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*special, *(f"w{number}" for number in range(len(special), size))]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
