"""Texts with labels: GLUE's and CodeXGLUE's files, encoding, models, metrics, and whole runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import gfsa
from gfsa_experiments.data.own import hold_out
from gfsa_experiments.runs.run import carry_out
from gfsa_experiments.tasks.text_sets import GLUE_TASKS, read_code, read_glue
from gfsa_experiments.tasks.texts import (
    CodeConfig,
    GlueConfig,
    TextConfig,
    TextTask,
    TextTaskConfig,
)
from support.hub import HubPart, fake_hub
from support.tiny_runs import tiny_run
from support.tiny_texts import (
    glue_label,
    glue_rows,
    save_model,
    sentence,
    write,
    write_clones,
    write_devign,
    write_glue,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "tiny-bert", "bert"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    for folder in ("CoLA", "STS-B", "MRPC"):
        write_glue(root, folder)
    write_devign(root / "devign")
    write_clones(root / "bigclonebench")
    return root


def glue(model: str, **settings: Any) -> GlueConfig:
    small: dict[str, Any] = {"max_steps": 3, "batch_size": 8, "pad_to_multiple": 4}
    return GlueConfig(model=model, tensorboard=False, **(small | settings))


def code(**settings: Any) -> CodeConfig:
    small: dict[str, Any] = {"model": "scratch", "depth": 2, "width": 16, "heads": 2}
    small |= {"vocab_size": 300, "max_length": 24, "pad_to_multiple": 8}
    return CodeConfig(tensorboard=False, max_steps=3, **(small | settings))


def built(config: TextTaskConfig, data: Path) -> TextTask:
    config.check()
    torch.manual_seed(config.seed)
    task = TextTask(config, data)
    task.model.eval()
    return task


def a_batch(task: TextTask, indices: tuple[int, ...] = (0, 3, 5)) -> dict[str, torch.Tensor]:
    return task.splits["train"].dataset.__getitems__(list(indices))  # type: ignore[attr-defined]


class TestFiles:
    @pytest.mark.parametrize("name", GLUE_TASKS)
    def test_official_files(self, name: str, tmp_path: Path) -> None:
        folder = GLUE_TASKS[name]["folder"]
        write_glue(tmp_path, folder, train=7, dev=5)
        found = read_glue(tmp_path, name)
        assert {part: len(rows) for part, rows in found.parts.items()} == {"train": 7, "test": 5}
        pairs = ";" in GLUE_TASKS[name]["texts"]
        expected = [(sentence(i), sentence(i + 100))[: 1 + pairs] for i in range(7)]
        assert found.texts[:7] == expected
        classes = found.labels.classes
        answers = [glue_label(folder, i) for i in range(5)]
        assert found.labels.values[7:] == [
            classes.index(a) if classes else float(a) for a in answers
        ]

    def test_one_compressed_file_a_split(self, tmp_path: Path) -> None:
        header = "question\tsentence\tlabel\n"
        write(tmp_path / "glue/qnli_train10k.tsv", header + "why ?\tso .\tentailment\n", True)
        write(tmp_path / "glue/qnli_dev.tsv", header + 'who ?\tsh"e .\tnot_entailment\n', True)
        found = read_glue(tmp_path, "qnli")
        assert found.texts == [("why ?", "so ."), ("who ?", 'sh"e .')]
        assert found.labels.values == [0, 1]

    @pytest.mark.parametrize(("name", "labels"), [("mnli-mm", [0, 1, 2]), ("stsb", [3.8, 0.0])])
    def test_without_files_the_hub_is_asked(
        self, name: str, labels: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = ("premise", "hypothesis") if "mnli" in name else ("sentence1", "sentence2")

        def load(repository: str, task: str, split: str) -> HubPart:
            texts = [f" {split} {sentence(i)}" for i in range(len(labels))]
            return HubPart({first: texts, second: texts, "label": labels})

        asked = fake_hub(monkeypatch, load)
        with pytest.warns(UserWarning, match=r"train.tsv.*Using hub:nyu-mll/glue"):
            found = read_glue(tmp_path, name)
        task, split = name.split("-")[0], "validation" + "_mismatched" * (name == "mnli-mm")
        assert asked == [("nyu-mll/glue", task, "train"), ("nyu-mll/glue", task, split)]
        assert found.texts[len(labels)][0] == f"{split} {sentence(0)}"
        assert found.labels.values == [*labels, *labels]

    def test_a_hub_that_cannot_be_reached(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load(*arguments: Any) -> Any:
            raise ConnectionError("no route to host")

        fake_hub(monkeypatch, load)
        message = r"CoLA/train.tsv.*gluebenchmark.com.*from the hub \(ConnectionError: no route"
        with pytest.raises(FileNotFoundError, match=message):
            read_glue(tmp_path, "cola")

    @pytest.mark.parametrize("row", ["1\ta", "1\ta\t\tentailment"])
    def test_bad_rows_are_counted_and_told(self, row: str, tmp_path: Path) -> None:
        write_glue(tmp_path, "RTE")
        rows = glue_rows("RTE", 200)
        write(tmp_path / "RTE/train.tsv", "\n".join([*rows[:50], row, *rows[50:]]))
        with pytest.warns(UserWarning, match="1 of 201 rows cannot be used; row 50: nothing in"):
            assert len(read_glue(tmp_path, "rte").parts["train"]) == 200
        write(tmp_path / "RTE/train.tsv", "\n".join([*rows[:50], row]))
        read_glue.cache_clear()
        with pytest.raises(ValueError, match="More than 1 % of them are bad"):
            read_glue(tmp_path, "rte")

    def test_an_unknown_label(self, tmp_path: Path) -> None:
        write_glue(tmp_path, "SST-2")
        write(tmp_path / "SST-2/train.tsv", "sentence\tlabel\nfine\t2\n")
        with pytest.raises(ValueError, match="expected one of 0, 1 as a label, got '2'"):
            read_glue(tmp_path, "sst2")

    @pytest.mark.parametrize("folder", ["", "devign", "Defect-detection/dataset"])
    def test_devign(self, folder: str, tmp_path: Path) -> None:
        write_devign(tmp_path / folder, train=8, others=3)
        found = read_code(tmp_path, "devign")
        assert [len(rows) for rows in found.parts.values()] == [8, 3, 3]
        valid = found.parts["valid"]
        assert [found.labels.values[row] for row in valid] == [0, 1, 0]
        assert found.texts[valid[0]][0].startswith("int f8 ( x )")

    @pytest.mark.parametrize("shared", [False, True])
    def test_clones(self, shared: bool, tmp_path: Path) -> None:
        write_clones(tmp_path / "bigclonebench", train=8, others=3, shared=shared)
        found = read_code(tmp_path, "bigclonebench")
        names = [tuple(text.split()[1] for text in pair) for pair in found.texts[:3]]
        assert names == [("f0", "f1"), ("f1", "f6"), ("f2", "f11")]
        assert found.labels.values[:3] == [0, 1, 0]
        path = tmp_path / "bigclonebench" / "train.txt"
        path.write_text("1001\t9999\t1\n")
        read_code.cache_clear()
        with pytest.raises(ValueError, match=r"line 1: expected the number of a function"):
            read_code(tmp_path, "bigclonebench")

    def test_code_of_the_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def load(repository: str, split: str) -> HubPart:
            pairs = {"func1": ["a", "b", "a"], "func2": ["b", f"c {split}", "a"]}
            return HubPart(**pairs, label=[True, False, True])

        asked = fake_hub(monkeypatch, load)
        with pytest.warns(UserWarning, match="Using hub:google/code_x_glue_cc_clone"):
            found = read_code(tmp_path, "bigclonebench")
        assert [split for _, split in asked] == ["train", "validation", "test"]
        assert found.texts[found.parts["test"][1]] == ("b", "c test")
        assert found.labels.values == [1, 0, 1] * 3


class TestExamples:
    def test_batches_are_padded_to_a_multiple(self, bert: str, data: Path) -> None:
        task = built(glue(bert, task="mrpc", pad_to_multiple=8), data)
        batch = a_batch(task)
        assert batch["input_ids"].shape[1] % 8 == 0
        lengths = torch.tensor(task.splits["train"].lengths)[[0, 3, 5]]
        assert torch.equal(batch["attention_mask"].sum(1), lengths)
        assert bool((batch["input_ids"][batch["attention_mask"] == 0] == 1).all())
        assert batch["token_type_ids"].max() == 1
        torch.testing.assert_close(
            task.loss(task.model, batch), task.loss(task.model, wider(batch))
        )

    def test_held_out_examples(self, bert: str, data: Path) -> None:
        task = built(glue(bert, holdout=0.25, fraction=0.5), data)
        sizes = {name: len(split) for name, split in task.splits.items()}
        assert sizes == {"train": 9, "valid": 6, "test": 10}
        assert "valid" not in built(glue(bert), data).splits
        train, held = hold_out(100, 0.1)
        assert sorted(train + held) == list(range(100))
        fewer, again = hold_out(100, 0.1, 0.5)
        assert again == held
        assert set(fewer) < set(train)

    def test_the_test_set_of_stsb_is_reported_and_dev_chooses(
        self, bert: str, data: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(FileNotFoundError, match=r"stsb_test\.tsv"):
            built(glue(bert, task="stsb", report="test"), data)
        dev = (data / "STS-B" / "dev.tsv").read_text().splitlines()
        write_glue(tmp_path, "STS-B")
        (tmp_path / "stsb_test.tsv").write_text("\n".join(dev[:4]) + "\n")
        task = built(glue(bert, task="stsb", report="test"), tmp_path)
        sizes = {name: len(split) for name, split in task.splits.items()}
        assert sizes == {"train": 24, "valid": len(dev) - 1, "test": 3}

    def test_pairs_of_functions_adjoin(self, data: Path) -> None:
        task = built(code(dataset="bigclonebench"), data)
        batch = a_batch(task, (1, 2))
        examples: Any = task.splits["train"].dataset
        assert batch["input_ids"].shape == (4, 24)
        for row, text in enumerate(examples.rows[[1, 2]].flatten()):
            length = examples.texts["length"][text]
            ids = examples.texts["ids"][text][:length]
            assert batch["input_ids"][row, :length].tolist() == ids.tolist()
            assert (ids[0], ids[-1]) == (0, 2)
        assert task.splits["train"].lengths[2] == max(  # type: ignore[index]
            examples.texts["length"][examples.rows[2]]
        )
        # each pair is judged by itself
        both = task.model(batch["input_ids"], batch["attention_mask"])
        alone = task.model(batch["input_ids"][2:], batch["attention_mask"][2:])
        torch.testing.assert_close(both[1:], alone)


def wider(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with more padding."""
    return {
        name: value
        if value.dim() == 1
        else torch.nn.functional.pad(value, (0, 8), value=int(name == "input_ids"))
        for name, value in batch.items()
    }


class TestModels:
    @pytest.mark.parametrize("task", ["stsb", "mrpc", "devign", "bigclonebench"])
    def test_a_filter_changes_nothing_to_begin_with(self, task: str, bert: str, data: Path) -> None:
        config = glue(bert, task=task) if task in GLUE_TASKS else code(dataset=task)
        plain, filtered = built(config, data), built(config, data)
        assert gfsa.plug(filtered.model).parameters == 12
        batch = a_batch(plain)
        loss = plain.loss(plain.model, batch)
        assert torch.equal(loss, filtered.loss(filtered.model, batch))
        loss.backward()
        assert all(p.grad is not None for p in plain.model.parameters())

    def test_the_seed_decides_the_head_alone(self, bert: str, data: Path) -> None:
        first, second = (built(glue(bert, seed=seed), data).model for seed in (0, 1))
        same = {n: torch.equal(p, second.state_dict()[n]) for n, p in first.state_dict().items()}
        assert {name for name, equal in same.items() if not equal} == {"classifier.weight"}

    @pytest.mark.parametrize("kind", ["roberta", "plbart", "t5"])
    def test_pretrained_models_of_code(self, kind: str, data: Path, tmp_path: Path) -> None:
        folder = str(save_model(tmp_path / kind, kind, torch.float16))
        task = built(code(dataset="bigclonebench", model=folder), data)
        assert {p.dtype for p in task.model.parameters()} == {torch.float32}
        batch = a_batch(task)
        before = task.loss(task.model, batch)
        assert len(gfsa.plug(task.model).plugged) == (2 if kind == "roberta" else 4)
        assert torch.equal(before, task.loss(task.model, batch))
        torch.testing.assert_close(before, task.loss(task.model, wider(batch)))
        if kind == "roberta":
            return
        # a decoder is read at the last end
        ids, mask = batch["input_ids"], batch["attention_mask"]
        ends = [len(row) - 1 - row[::-1].index(2) for row in ids.tolist()]
        shift = getattr(task.model.body, "_shift_right", None)
        inputs = {} if shift is None else {"decoder_input_ids": shift(ids)}
        states = task.model.body(
            input_ids=ids, attention_mask=mask, decoder_attention_mask=mask, **inputs
        )[0]
        expected = torch.stack([state[end] for state, end in zip(states, ends, strict=True)])
        torch.testing.assert_close(task.model.vectors(ids, mask), expected)


class TestMetrics:
    def test_metrics_are_those_of_glue(self, bert: str, data: Path) -> None:
        labels, found = torch.tensor([1.0, 1, 0, 0, 1]), torch.tensor([1, 0, 0, 1, 1])
        halves = [(found[:3], labels[:3]), (found[3:], labels[3:])]
        # true positives 2, false 1, true negatives 1, false 1
        scores = built(glue(bert), data).score(halves)
        assert scores["matthews"] == pytest.approx(100 * (2 * 1 - 1 * 1) / math.sqrt(3 * 3 * 2 * 2))
        scores = built(glue(bert, task="mrpc"), data).score(halves)
        assert scores == pytest.approx({"f1": 100 * 2 / 3, "accuracy": 60.0})
        similarity = built(glue(bert, task="stsb"), data)
        ordered = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.0, 2.0, 2.5])
        assert similarity.score([ordered])["spearman"] == pytest.approx(100)
        assert similarity.score([(torch.ones(3), ordered[1])])["spearman"] == 0

    def test_metrics_of_code(self, data: Path) -> None:
        found, labels = torch.tensor([1, 0, 0, 1, 1]), torch.tensor([1, 1, 0, 0, 1])
        task = built(code(), data)
        # F1 of the ones is 2/3, of the zeros 1/2
        expected = {"accuracy": 60, "f1": 200 / 3, "macro_f1": 100 * 7 / 12}
        assert task.score([(found, labels)]) == pytest.approx(expected)
        assert task.metric == "accuracy"
        assert built(code(dataset="bigclonebench"), data).metric == "f1"


def test_the_presets_have_the_papers_rate() -> None:
    assert {kind().lr for kind in (GlueConfig, TextConfig, CodeConfig)} == {2e-5}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"holdout": 1.0}, "holdout must lie in"),
        ({"max_length": 0}, "max_length must lie in .1, inf."),
        ({"report": "test"}, "report=test needs task=stsb"),
        ({"report": "test", "task": "stsb", "holdout": 0.1}, "report=test needs task=stsb"),
    ],
)
def test_settings_that_make_no_sense(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlueConfig(**setting).check()


def test_whole_runs(bert: str, data: Path, tmp_path: Path) -> None:
    for config, task, metric in (
        (glue(bert, holdout=0.25), "cola tiny-bert", "matthews"),
        (code(dataset="bigclonebench"), "bigclonebench roberta-d2-w16", "f1"),
    ):
        recipe = "glue" if isinstance(config, GlueConfig) else "code"
        rows = {
            m: carry_out(tiny_run(recipe, config, data, tmp_path / task, m, lens=m == "gfsa"))
            for m in ("plain", "gfsa")
        }
        assert (rows["plain"].task, rows["plain"].metric) == (task, metric)
        assert rows["plain"].valid is not None
        assert rows["gfsa"].added == 12
        assert rows["gfsa"].moved is not None
        assert rows["gfsa"].moved > 0
        assert len(list((tmp_path / task).rglob("lens.html"))) == 1
