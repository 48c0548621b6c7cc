"""vLLM's engine for these tests: :func:`serve` runs one in a process of its own.

vLLM expects one engine in the life of a process: some modes of it leave objects behind on which the
next engine fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_models import NEW_TOKENS, Text

OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_model_len": 256,
    "block_size": 32,
    "disable_log_stats": False,
}


@dataclass
class Round:
    """What the engine did with one list of prompts."""

    texts: list[Text]
    cached: int
    """Prompt tokens that were found in the cache."""
    seconds: float


@dataclass
class Served:
    """What an engine did."""

    rounds: list[Round]
    accepted: int
    """Drafted tokens that were accepted."""
    drafted: int
    capacity: int
    """Tokens that fit into the cache."""
    coefficients: list[Any]
    """Of each filtered layer: its name, its coefficients, their dtype."""


class EngineError(RuntimeError):
    """The engine did not start, or failed; the message is the end of its log."""


def serve(
    folder: Path,
    *rounds: tuple[list[list[int]], int],
    coefficients: bool = False,
    **options: Any,
) -> Served:
    """Start an engine and let it generate greedily, all prompts of a round at once.

    Args:
        folder: the checkpoint.
        rounds: prompts, and how many tokens to generate.
        coefficients: whether to return the coefficients that the engine has.
        options: arguments of ``vllm.LLM``.
    """
    job = {
        "folder": str(folder),
        "rounds": rounds,
        "coefficients": coefficients,
        "options": {**OPTIONS, **options},
    }
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        done = subprocess.run(
            [sys.executable, __file__, answer.name],
            input=json.dumps(job),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise EngineError(done.stdout[-6000:])
        found = json.loads(Path(answer.name).read_text(encoding="utf-8"))
    found["rounds"] = [
        Round([Text(*text) for text in texts], cached, seconds)
        for texts, cached, seconds in found["rounds"]
    ]
    return Served(**found)


def everything(prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    return prompts, NEW_TOKENS


def largest_difference(texts: list[Text], expected: list[Text]) -> float:
    """Between log-probabilities; raises unless the tokens are the same."""
    for number, (text, wanted) in enumerate(zip(texts, expected, strict=True)):
        assert text.tokens == wanted.tokens, f"prompt {number}"
    return max(
        abs(a - b)
        for text, wanted in zip(texts, expected, strict=True)
        for a, b in zip(text.logprobs, wanted.logprobs, strict=True)
    )


def _main(answer: str) -> None:
    from vllm import LLM

    job = json.load(sys.stdin)
    llm = LLM(job["folder"], **job["options"])
    rounds = [_generate(llm, prompts, new) for prompts, new in job["rounds"]]
    counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    found = {
        "rounds": rounds,
        "accepted": counters.get("vllm:spec_decode_num_accepted_tokens", 0),
        "drafted": counters.get("vllm:spec_decode_num_draft_tokens", 0),
        "capacity": llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        "coefficients": llm.apply_model(_coefficients)[0] if job["coefficients"] else [],
    }
    Path(answer).write_text(json.dumps(found), encoding="utf-8")
    llm.llm_engine.engine_core.shutdown()


def _generate(llm: Any, prompts: list[list[int]], new: int) -> tuple[Any, int, float]:
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(requests, greedy, use_tqdm=False)
    seconds = time.perf_counter() - start
    texts = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        rows = output.outputs[0].logprobs
        logprobs = [row[token].logprob for row, token in zip(rows, tokens, strict=True)]
        texts.append((tokens, logprobs))
    return texts, sum(output.num_cached_tokens or 0 for output in outputs), seconds


def _coefficients(model: Any) -> list[Any]:
    from gfsa.engines.vllm.attention import ServedFilter

    filters = {id(m): m for m in model.modules() if isinstance(m, ServedFilter)}.values()
    return [
        (filter.layer, filter.coefficients.tolist(), str(filter.coefficients.dtype))
        for filter in filters
    ]


if __name__ == "__main__":
    _main(sys.argv[1])
