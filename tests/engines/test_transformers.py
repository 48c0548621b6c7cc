"""Continuous batching with filters of degree 1, and ``gfsa serve``: the tokens of ``generate``."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

import gfsa
from engines.shared import tiny_llama, word_tokenizer
from support.batching import (
    DECODERS,
    SECTORS,
    VOCABULARY,
    by_batching,
    by_generate,
    decoder,
    prompts,
)
from support.plugging import randomise

hf.logging.set_verbosity_error()
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

LENGTHS = (5, 11, 3, 17, 9)


@pytest.mark.parametrize("name", DECODERS)
def test_the_tokens_are_those_of_generate(name: str) -> None:
    inputs = prompts(*LENGTHS)
    for implementation in ("sdpa", "eager"):
        model = decoder(name, implementation)
        expected = by_generate(model, inputs)
        for most in (64, 8):
            assert by_batching(model, inputs, max_batch_tokens=most) == expected
        gfsa.unplug(model)
        assert by_generate(model, inputs) != expected


def test_layers_without_a_filter() -> None:
    model = decoder("gemma 3, both kinds of layers", layers=[2])
    inputs = prompts(*LENGTHS)
    assert by_batching(model, inputs, max_batch_tokens=8) == by_generate(model, inputs)


@pytest.mark.parametrize("name", ["llama, grouped queries", "gemma 3, both kinds of layers"])
def test_compiled_with_padding(name: str) -> None:
    model = decoder(name)
    inputs = prompts(5, 11)
    # since 5.19 transformers updates the cache outside of the graph, filters or not
    compiled = hf.CompileConfig(backend="aot_eager", fullgraph=not SECTORS, dynamic=True)
    found = by_batching(
        model,
        inputs,
        new=10,
        max_batch_tokens=16,
        varlen_compile_config=compiled,
        q_padding_interval_size=8,
        kv_padding_interval_size=16,
    )
    assert found == by_generate(model, inputs, new=10)


def test_what_it_costs(costs: Any) -> None:
    filtered, plain = decoder("llama"), decoder("llama")
    gfsa.unplug(plain)
    inputs = prompts(*LENGTHS)
    of = "a batch of 5 requests, 40 tokens each (degree 1)"
    costs(lambda model: by_batching(model, inputs), filtered, plain, of, rounds=7, most=2)


NEW = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random filters and a tokenizer of whole words, as they were saved."""
    path = tmp_path_factory.mktemp("served") / "plugged"
    none = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    model = tiny_llama(vocab_size=VOCABULARY, initializer_range=0.2, **none).eval()
    gfsa.plug(model, K=3)
    randomise(model, scale=0.5).save_pretrained(path)
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    words = word_tokenizer(VOCABULARY, *names.values(), unknown="<unk>", **names)
    words.save_pretrained(path)
    return path


def test_continuous_batching_of_degree_2_stops_the_start(folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "gfsa", "serve", str(folder), "--continuous-batching"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert "its filter has degree 2" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with _server([str(folder)]) as url:
        yield url


@contextmanager
def _server(arguments: Sequence[str]) -> Iterator[str]:
    """The address of a server that has started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = ["--device", "cpu", "--port", str(port)]
    server = subprocess.Popen([sys.executable, "-m", "gfsa", "serve", *arguments, *options])
    url = f"http://localhost:{port}"
    try:
        # a busy machine takes minutes to import everything
        for _ in range(1500):
            assert server.poll() is None, "the server has stopped"
            try:
                urllib.request.urlopen(f"{url}/health")
                break
            except urllib.error.URLError:
                time.sleep(0.2)
        else:
            pytest.fail("the server did not answer within five minutes")
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)


def complete(address: str, folder: Path, prompt: str) -> str:
    body = {"model": str(folder), "prompt": prompt, "max_tokens": NEW, "temperature": 0.0}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    answer: dict[str, Any] = json.loads(urllib.request.urlopen(request).read())
    text: str = answer["choices"][0]["text"]
    return text


def test_the_completions_are_those_of_generate(address: str, folder: Path) -> None:
    model = gfsa.from_pretrained(hf.AutoModelForCausalLM, folder).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    prompts = ["w3 w14 w15 w9 w26", "w5 w35"]
    filtered = [_by_generate(model, tokenizer, prompt) for prompt in prompts]
    gfsa.unplug(model)
    plain = [_by_generate(model, tokenizer, prompt) for prompt in prompts]
    assert filtered != plain
    assert [complete(address, folder, prompt).split() for prompt in prompts] == filtered


def _by_generate(model: Any, tokenizer: Any, prompt: str) -> list[str]:
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(
        input_ids=inputs["input_ids"], max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.split()


def test_a_classifier_is_refused_at_the_start_and_in_a_request(
    folder: Path, tmp_path: Path
) -> None:
    config = hf.LlamaConfig.from_pretrained(folder)
    model = hf.LlamaForSequenceClassification(config)
    gfsa.plug(model, K=3)
    model.save_pretrained(tmp_path)
    hf.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    serve = [sys.executable, "-m", "gfsa", "serve"]
    ran = subprocess.run([*serve, str(tmp_path), "--device", "cpu"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "is a LlamaForSequenceClassification, which generates no text" in ran.stderr
    assert "Traceback" not in ran.stderr
    # a server without a model of its own loads what requests name
    with _server([]) as url, pytest.raises(urllib.error.HTTPError) as refused:
        complete(url, tmp_path, "w3 w14")
    assert refused.value.code == 400
    assert "expects a causal language model" in refused.value.read().decode()
