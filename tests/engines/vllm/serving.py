"""vLLM's engine for these tests: :class:`Engine` runs one in a process of its own.

vLLM expects one engine in the life of a process: some modes of it leave objects behind on which the
next engine fails. To import vLLM takes longer than to start the engine of a tiny model, so every
engine's process is forked from one that has imported vLLM and has built nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
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
_PRELOADED = ["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "gfsa.engines.vllm.models"]
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(_PRELOADED)


@dataclass
class Round:
    """What the engine did with one list of prompts."""

    texts: list[Text]
    cached: int
    """Prompt tokens that were found in the cache."""
    steps: int
    """Forward passes: 40 tokens of 16 requests, all at once, take 40."""
    seconds: float
    """Of the processor, in the engine's own process: other programs do not make it longer."""


@dataclass
class Counters:
    """What an engine counted since its start."""

    accepted: int
    """Drafted tokens that were accepted."""
    drafted: int
    capacity: int
    """Tokens that fit into the cache."""
    compiled: int
    """Operations in the graphs that torch.compile traced."""


class EngineError(RuntimeError):
    """The engine did not start, or failed; the message is the end of its log."""


class Engine:
    """An engine that serves a checkpoint, until the end of the ``with`` block.

    Args:
        folder: the checkpoint.
        options: arguments of ``vllm.LLM``.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115  (until __exit__)
        self._connection, other_end = _processes.Pipe()
        self._process = _processes.Process(
            target=_run, args=(other_end, self._log.name, str(folder), {**OPTIONS, **options})
        )
        self._process.start()
        # held by the engine's process alone: its end is seen here
        other_end.close()

    def __enter__(self) -> Engine:
        try:
            self._ask("ready")
        # an interrupted test must not leave an engine behind
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.join(60)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()
        self._log.close()

    def generate(self, prompts: list[list[int]], new: int = NEW_TOKENS) -> Round:
        """Generate ``new`` tokens greedily, all prompts at once."""
        found: Round = self._ask("generate", prompts, new)
        return found

    def counters(self) -> Counters:
        found: Counters = self._ask("counters")
        return found

    def coefficients(self) -> list[tuple[str, Any, str]]:
        """Of each filtered layer: its name, its coefficients, their dtype."""
        found: list[tuple[str, Any, str]] = self._ask("coefficients")
        return found

    def _ask(self, *question: Any) -> Any:
        try:
            self._connection.send(question)
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise EngineError(Path(self._log.name).read_text(errors="replace")[-6000:]) from None


def largest_difference(texts: list[Text], expected: list[Text]) -> float:
    """Between log-probabilities; raises unless the tokens are the same."""
    for number, (text, wanted) in enumerate(zip(texts, expected, strict=True)):
        assert text.tokens == wanted.tokens, f"prompt {number}"
    return max(
        abs(a - b)
        for text, wanted in zip(texts, expected, strict=True)
        for a, b in zip(text.logprobs, wanted.logprobs, strict=True)
    )


def _run(connection: Connection, log: str, folder: str, options: dict[str, Any]) -> None:
    """The engine's process: answers questions until the other end is closed."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        _answer(connection, folder, options)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _answer(connection: Connection, folder: str, options: dict[str, Any]) -> None:
    from vllm import LLM

    llm = LLM(folder, **options)
    answers: dict[str, Callable[..., Any]] = {
        "ready": lambda: True,
        "generate": lambda prompts, new: _generate(llm, prompts, new),
        "counters": lambda: _counters(llm),
        "coefficients": lambda: llm.apply_model(_coefficients)[0],
    }
    try:
        while True:
            try:
                name, *arguments = connection.recv()
            except EOFError:
                return
            connection.send(answers[name](*arguments))
    finally:
        llm.llm_engine.engine_core.shutdown()


def _metrics(llm: Any) -> dict[str, int]:
    """Counters by name, and of histograms how many values they have."""
    return {
        metric.name.removeprefix("vllm:"): getattr(metric, "value", getattr(metric, "count", 0))
        for metric in llm.get_metrics()
    }


def _counters(llm: Any) -> Counters:
    from torch._dynamo.utils import counters

    found, compiled = _metrics(llm), counters["stats"]
    return Counters(
        accepted=found.get("spec_decode_num_accepted_tokens", 0),
        drafted=found.get("spec_decode_num_draft_tokens", 0),
        capacity=llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        compiled=compiled["calls_captured"],
    )


def _generate(llm: Any, prompts: list[list[int]], new: int) -> Round:
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    before, start = _metrics(llm), time.process_time()
    outputs = llm.generate(requests, greedy, use_tqdm=False)
    seconds, after = time.process_time() - start, _metrics(llm)
    cached, steps = (
        after[name] - before[name] for name in ("prefix_cache_hits", "iteration_tokens_total")
    )
    texts = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        rows = output.outputs[0].logprobs
        logprobs = [row[token].logprob for row, token in zip(rows, tokens, strict=True)]
        texts.append(Text(tokens, logprobs))
    return Round(texts, cached, steps, seconds)


def _coefficients(model: Any) -> list[tuple[str, Any, str]]:
    from gfsa.engines.vllm.layers import ServedFilter

    filters = {id(m): m for m in model.modules() if isinstance(m, ServedFilter)}.values()
    return [
        (filter.layer, filter.coefficients.tolist(), str(filter.coefficients.dtype))
        for filter in filters
    ]
