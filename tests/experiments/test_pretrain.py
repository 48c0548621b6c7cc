"""The pretraining recipe on tiny texts and models."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gfsa
from gfsa_experiments.engine.step import compile_blocks, compile_model
from gfsa_experiments.runs.run import DivergedError, carry_out, read_row
from gfsa_experiments.tasks.pretrain.recipe import LanguageTask
from support.tiny_pretraining import SMALL, a_batch, a_run, built, write_corpus

pytestmark = pytest.mark.usefixtures("cache")


def interrupted_at(call: int, loss: Any) -> Any:
    """``loss``, interrupted when it is called for the so-many-th time."""
    calls = iter(range(1, call + 1))

    def counted(*arguments: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return loss(*arguments)

    return counted


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data"))


class TestModel:
    @pytest.mark.parametrize("qk_norm", ["learned", "none", "fixed", "temperature"])
    def test_queries_are_normalised_as_told(self, qk_norm: Any, data: Path) -> None:
        task = built(data, qk_norm=qk_norm)
        attention = task.model.model.layers[0].self_attn
        q = torch.randn(2, 5, 2, 16) * 7
        lengths = attention.q_norm(q).square().mean(-1)
        if qk_norm == "none":
            assert torch.equal(attention.q_norm(q), q)
            return
        torch.testing.assert_close(lengths, torch.ones_like(lengths))
        learned = sum(p.numel() for p in [*attention.q_norm.parameters()])
        assert learned == {"learned": 16, "fixed": 0, "temperature": 2}[qk_norm]
        if qk_norm == "temperature":
            with torch.no_grad():
                attention.q_norm.temperature.copy_(torch.tensor([1.0, 3.0]))
            scaled = attention.q_norm(q).square().mean(-1)
            torch.testing.assert_close(scaled, lengths * torch.tensor([1.0, 9.0]))
            task.loss(task.model, a_batch(task)).backward()
            assert attention.q_norm.temperature.grad.abs().min() > 0

    @pytest.mark.parametrize("filtered", [False, True])
    def test_the_loss_is_that_of_transformers(self, filtered: bool, data: Path) -> None:
        task = built(data)
        if filtered:
            gfsa.plug(task.model, w0=0.3, w1=0.8, wK=0.2)
        batch = a_batch(task)
        ours = task.loss(task.model, batch)
        # every row once more by transformers' own masks and loss, which shifts labels itself
        del task.model._loss_function
        ids = task.rows["train"].ids(batch)
        whole = task.model(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(ours, whole)

    @pytest.mark.parametrize("filtered", [False, True])
    @pytest.mark.parametrize("compiled", ["no", "blocks", "model"])
    def test_no_mask_is_built_and_kernels_are_causal(
        self, compiled: str, filtered: bool, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task = built(data)
        if filtered:
            gfsa.plug(task.model, w0=0.3, w1=0.8, wK=0.2)
        batch = a_batch(task)
        expected = task.loss(task.model, batch)
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph

        if compiled != "no":
            (compile_blocks if compiled == "blocks" else compile_model)(
                task.model, backend=backend, fullgraph=True
            )
        seen: list[tuple[Any, Any]] = []
        attention = torch.nn.functional.scaled_dot_product_attention

        def recorded(*args: Any, **kwargs: Any) -> Any:
            seen.append((kwargs.get("attn_mask"), kwargs.get("is_causal")))
            return attention(*args, **kwargs)

        if compiled == "no":
            monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
        torch.testing.assert_close(task.loss(task.model, batch), expected)
        for graph in graphs:
            for node in graph.graph.nodes:
                if "scaled_dot_product" in str(node.target):
                    seen.append((node.kwargs.get("attn_mask"), node.kwargs.get("is_causal")))
        assert seen
        assert set(seen) == {(None, True)}
        # one graph serves every block
        assert len(graphs) == (0 if compiled == "no" else 1)


class TestTraining:
    def test_it_learns_and_leaves_a_curve(self, data: Path, tmp_path: Path) -> None:
        run = a_run(data, tmp_path, max_steps=30, evaluations=3)
        row = carry_out(run)
        assert row.task == "techdocs qwen3-d2-w32"
        assert row.test < 4 < math.log(300)
        assert "tokens_per_second=" in row.others
        assert "bits_per_byte=" in row.others
        head, *lines = (run.folder / "curve.csv").read_text().splitlines()
        assert head == "step,tokens,seconds,valid loss"
        steps, tokens, seconds, losses = zip(
            *(map(float, line.split(",")) for line in lines), strict=True
        )
        assert steps == (10, 20, 30)
        assert tokens == tuple(step * 8 * 16 for step in steps)
        assert list(seconds) == sorted(seconds)
        assert losses[0] > losses[1] > losses[2] == row.valid

    def test_a_loss_that_never_falls_is_recorded_as_diverged(
        self, data: Path, tmp_path: Path
    ) -> None:
        run = a_run(data, tmp_path, lr=30.0, warmup=0.0, max_steps=6, clip=0.0)
        with pytest.raises(DivergedError, match=r"loss on valid is .* and was 5\.8") as caught:
            carry_out(run)
        row = caught.value.row
        assert math.isnan(row.test)
        assert row.valid is not None
        assert math.isnan(row.valid)
        assert row.steps == 6
        assert read_row(run.folder) is not None
        # the curve that shows it is kept
        assert len((run.folder / "curve.csv").read_text().splitlines()) > 1

    def test_the_start_is_remembered_by_a_checkpoint(self, data: Path, tmp_path: Path) -> None:
        """A run that had broken down before it was interrupted is recorded as such."""
        run = a_run(data, tmp_path, lr=30.0, warmup=0.0, max_steps=6, clip=0.0, checkpoint_every=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LanguageTask, "loss", interrupted_at(4, LanguageTask.loss))
            with pytest.raises(KeyboardInterrupt):
                carry_out(run)
        with pytest.raises(DivergedError, match="before the first step"):
            carry_out(dataclasses.replace(run, resume=True))

    @pytest.mark.parametrize("method", ["plain", "gfsa"])
    def test_interrupted_in_its_only_epoch_it_goes_on_from_the_last_evaluation(
        self, method: str, data: Path, tmp_path: Path, capsys: Any
    ) -> None:
        """At the defaults, which ask for no checkpoints in particular."""
        settings = {"max_steps": 0, "epochs": 1, "evaluations": 3, "log_every": 2}
        whole = a_run(data, tmp_path / "whole", method, **settings)
        row = carry_out(whole)
        cut = a_run(data, tmp_path / "cut", method, **settings)
        steps, every = row.steps, math.ceil(row.steps / 3)
        assert every > 2
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LanguageTask, "loss", interrupted_at(steps - 1, LanguageTask.loss))
            with pytest.raises(KeyboardInterrupt):
                carry_out(cut)
        # the last two are kept
        names = sorted(path.name for path in (cut.folder / "checkpoints").iterdir())
        assert names == [f"step-{every:09d}", f"step-{2 * every:09d}"]
        again = carry_out(dataclasses.replace(cut, resume=True))
        assert (again.test, again.valid, again.moved) == (row.test, row.valid, row.moved)
        assert f"resumed after step {2 * every}" in capsys.readouterr().out
        written = [one.folder / "metrics.jsonl" for one in (cut, whole)]
        assert written[0].read_bytes() == written[1].read_bytes()
        assert not (cut.folder / "checkpoints").exists()

    def test_the_last_batch_is_filled_up_and_counts_as_it_is(self, data: Path) -> None:
        task = built(data)
        with torch.no_grad():
            total, count, _ = task.predict(task.model, a_batch(task, "valid", rows=5))
            rows = task.rows["valid"]
            single = [task.predict(task.model, rows.__getitems__([index])) for index in range(5)]
        assert count == 5 * 16
        torch.testing.assert_close(total, sum(loss for loss, _, _ in single))

    def test_every_token_is_predicted_once(self, data: Path) -> None:
        rows = built(data).rows["train"]
        ids = rows.ids(rows.__getitems__(list(range(len(rows)))))
        assert torch.equal(ids[:-1, -1], ids[1:, 0])
        assert len(rows) == (len(rows._host) - 1) // 16
        assert torch.equal(ids[:, :-1].flatten(), rows._host[: len(rows) * 16].long())


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "error"),
        [
            ({"kv_heads": 3, "heads": 4}, "kv_heads must divide"),
            ({"head_dim": 15}, "even"),
            ({"vocab_size": 256}, "257, inf"),
            ({"depth": 0}, "depth must lie in .1, inf."),
            ({"evaluations": 0}, "evaluations"),
        ],
    )
    def test_sizes_that_make_no_model(self, settings: dict[str, int], error: str) -> None:
        with pytest.raises(ValueError, match=error):
            dataclasses.replace(SMALL, **settings).check()

    def test_grouped_queries(self, data: Path) -> None:
        task = built(data, kv_heads=1)
        gfsa.plug(task.model)
        loss: torch.Tensor = task.loss(task.model, a_batch(task))
        loss.backward()
        assert isinstance(task.model, nn.Module)
        assert task.model.model.layers[0].self_attn.k_proj.out_features == 16
