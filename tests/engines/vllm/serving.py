"""vLLM's engine for these tests: start one, generate, and stop it again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiny_models import NEW_TOKENS, Text

SIXTEEN = {"max_num_seqs": 16, "max_model_len": 256, "block_size": 32, "dtype": "float32"}


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """An engine as ``vllm serve`` starts it, for token ids, in float32."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(str(folder), **{"skip_tokenizer_init": True, **SIXTEEN, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def generate(llm: Any, prompts: list[list[int]], new: int = NEW_TOKENS) -> tuple[list[Text], int]:
    """Greedy texts of all prompts at once, and how many of their tokens were in the cache."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, greedy, use_tqdm=False)
    texts = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        rows = output.outputs[0].logprobs
        texts.append(Text(tokens, [row[t].logprob for row, t in zip(rows, tokens, strict=True)]))
    return texts, sum(output.num_cached_tokens or 0 for output in outputs)


def counter(llm: Any, name: str) -> int:
    """A counter of vLLM's own metrics."""
    return sum(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}")


def largest_difference(texts: list[Text], expected: list[Text]) -> float:
    """Between log-probabilities; raises unless the tokens are the same."""
    for number, (text, wanted) in enumerate(zip(texts, expected, strict=True)):
        assert text.tokens == wanted.tokens, f"prompt {number}"
    return max(
        abs(a - b)
        for text, wanted in zip(texts, expected, strict=True)
        for a, b in zip(text.logprobs, wanted.logprobs, strict=True)
    )
