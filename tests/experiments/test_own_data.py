"""Data of a user's own: names, tables, labels, parts, and errors that show what is wrong."""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.data.own import PARTS, decide, digest_of, find, name_of, three_parts
from gfsa_experiments.data.tables import LabelledRows, open_table, read_labelled, usable_rows
from gfsa_experiments.runs.sweep import Request
from gfsa_experiments.tasks.pretrain.data import corpus_of
from support.hub import HubPart, fake_parts
from support.own_data import reviews, write_table

SMALL_IMAGES = {"image_size": "32", "model": "deit_tiny", "depth": "1"}


def labelled(data: Path | str, text: str = "review", label: str = "stars") -> LabelledRows:
    return read_labelled(str(data), Path("data"), (text,), label)


class TestNames:
    @pytest.mark.parametrize(
        ("data", "name"),
        [
            ("my.csv", "my"),
            ("some/where/my reviews.jsonl.gz", "my_reviews"),
            ("v1.5/photos/", "photos"),
            ("release-1.5", "release-1.5"),
            ("hub:someone/reviews", "reviews"),
            ("hub:someone/reviews:german", "reviews-german"),
        ],
    )
    def test_data_is_called_by_its_own_name(self, data: str, name: str) -> None:
        assert name_of(data) == name

    def test_what_is_hashed_of_own_data(self) -> None:
        assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])
        assert digest_of(["ab"]) == digest_of([b"ab"])
        # half of a surrogate pair, as JSON may have it
        assert digest_of([json.loads('"\\ud83d"')]) != digest_of([])

    def test_a_missing_file_names_its_neighbours(self, tmp_path: Path) -> None:
        (tmp_path / "my.csv").touch()
        with pytest.raises(FileNotFoundError, match=rf"there is no .*mi\.csv .*{tmp_path} has my"):
            find(str(tmp_path / "mi.csv"), Path("data"))

    @pytest.mark.parametrize(
        ("recipe", "settings", "label"),
        [
            ("text", {"data": "a/my.csv"}, "my bert-base-uncased"),
            ("causal_lm", {"data": "wikitext-2"}, "data=wikitext-2 gpt2"),
            ("code", {"data": "devign.csv"}, "data=devign codebert-base"),
            ("graph", {"data": "./zinc"}, "data=zinc graphormer-slim"),
            ("graph", {"data": "pyg:TUDataset:MUTAG"}, "data=TUDataset-MUTAG graphormer-slim"),
            ("speech", {"data": "./an4"}, "data=an4 transformer-d12"),
            ("image", {"data": "a/cifar10", **SMALL_IMAGES}, "folder=cifar10 deit_tiny-d1"),
            ("pretrain", {"data": "hub:someone/wiki:en"}, "wiki-en qwen3-15m"),
            ("pretrain", {"data": "techdocs.txt"}, "data=techdocs qwen3-15m"),
            ("pretrain", {"data": "release-1.5"}, "release-1.5 qwen3-15m"),
        ],
    )
    def test_rows_are_never_labelled_like_those_of_our_data(
        self, recipe: str, settings: dict[str, str], label: str
    ) -> None:
        (run,) = Request(recipe, setting=[f"{k}={v}" for k, v in settings.items()]).runs()
        assert run.key().task == label


class TestTables:
    @pytest.mark.parametrize("separator", [",", ";", "\t"])
    def test_csv_of_spreadsheets(self, separator: str, tmp_path: Path) -> None:
        head = separator.join(["review", "stars"])
        path = tmp_path / "my.csv"
        if separator == "\t":
            # a tab is rarely quoted
            row = 'a "good" one\t3'
        else:
            row = f'"good, or ""good""; at\nleast"{separator}3'
        path.write_bytes(f"\ufeff{head}\r\n{row}\r\n".encode())
        (values,) = usable_rows(path, open_table(path), ["stars", "review"], ["", ""])
        expected = 'a "good" one' if separator == "\t" else 'good, or "good"; at\nleast'
        assert values == ("3", expected)

    def test_every_format_gives_the_same_rows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = reviews(12)
        write_table(tmp_path / "a.csv", rows)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
        (tmp_path / "c.json").write_text(json.dumps(rows))
        text = "\n".join(["review\tstars", *(f"{r['review']}\t{r['stars']}" for r in rows)])
        (tmp_path / "d.tsv").write_text(text)
        columns = {name: [row[name] for row in rows] for name in ("review", "stars")}
        pd.DataFrame(rows).to_parquet(tmp_path / "e.parquet")
        fake_parts(monkeypatch, {"train": HubPart(columns)})
        names = ["a.csv", "b.jsonl.xz", "c.json", "d.tsv", "e.parquet"]
        found = [labelled(tmp_path / name) for name in names] + [labelled("hub:someone/reviews")]
        assert all(one.texts == found[0].texts for one in found)
        assert all(one.labels == found[0].labels for one in found)
        assert found[0].texts[3] == (rows[3]["review"],)

    def test_a_folder_of_parts(self, tmp_path: Path) -> None:
        for name, count in (("train", 30), ("dev", 6), ("test", 9)):
            write_table(tmp_path / f"my_{name}.csv", reviews(count))
        found = labelled(tmp_path)
        assert found.own.splits == {"train": 30, "valid": 6, "test": 9}
        assert found.own.split_by == "the parts that it names"
        write_table(tmp_path / "more.csv", reviews(3))
        read_labelled.cache_clear()
        with pytest.raises(ValueError, match=r"others that are not, more\.csv"):
            labelled(tmp_path)

    def test_a_class_that_is_not_trained_on(self, tmp_path: Path) -> None:
        write_table(tmp_path / "train.csv", reviews(30))
        write_table(tmp_path / "test.csv", [*reviews(6), {"review": "x", "stars": 7}])
        with pytest.raises(ValueError, match="test has labels that train lacks: 7"):
            labelled(tmp_path)


class TestLabels:
    @pytest.mark.parametrize(
        ("texts", "classes"),
        [
            (["yes", "no"] * 5, ("no", "yes")),
            (["10", "9", "10", "9"], ("9", "10")),
            (["1.0", "0", "1", "0.0"], ("0", "1")),
            (["0.5", "1", "2"], ()),
            ([str(i) for i in range(21)], ()),
            ([str(i % 20) for i in range(60)], tuple(map(str, range(20)))),
            (["1e3", "-2.5e-1"], ()),
        ],
    )
    def test_classes_or_numbers(self, texts: list[str], classes: tuple[str, ...]) -> None:
        found = decide(texts, "stars")
        assert found.classes == classes
        if not classes:
            assert found.values == [float(text) for text in texts]
        assert found.why.startswith("classification, " if classes else "regression, ")

    def test_the_user_may_decide(self) -> None:
        assert decide(["1", "2"] * 3, "stars", "numbers").values == [1.0, 2.0] * 3
        assert decide(["0.5", "1.5"], "stars", "classes").classes == ("0.5", "1.5")
        with pytest.raises(ValueError, match="labels=numbers, but the column stars has 'good'"):
            decide(["1", "good"], "stars", "numbers")

    @pytest.mark.parametrize("missing", ["nan", "NaN", "inf"])
    def test_what_is_missing_among_numbers_is_no_class(self, missing: str) -> None:
        with pytest.raises(ValueError, match=f"4 finite numbers and 1 other .* {missing}: correct"):
            decide(["0", "1", "1", "0", missing], "label")
        # among words it is one
        assert decide(["naan", "roti", "nan"] * 3, "bread").classes == ("naan", "nan", "roti")

    def test_a_column_that_is_no_label(self) -> None:
        numbers = [*(f"{0.5 * i}" for i in range(40)), "nan"]
        with pytest.raises(ValueError, match=r"has 40 finite numbers and 1 other labels, .* nan:"):
            decide(numbers, "label")
        with pytest.raises(ValueError, match=r"10 different values in 10 rows, such as text 0,"):
            decide([f"text {i}" for i in range(10)], "review")
        with pytest.raises(ValueError, match=r"predicts classes, .*from 0\.5 to 2; set lab"):
            decide(["0.5", "2"], "stars", only_classes=True)
        with pytest.raises(ValueError, match="every label in the column stars is '5'"):
            decide(["5"] * 4, "stars")


class TestParts:
    def test_every_class_is_in_every_part_and_nothing_twice(self) -> None:
        classes = ["rare" if i % 10 == 0 else "common" for i in range(200)]
        parts, how = three_parts({"train": range(200)}, "here", classes)
        assert [len(parts[part]) for part in PARTS] == [160, 20, 20]
        counts = [Counter(classes[row] for row in parts[part])["rare"] for part in PARTS]
        assert counts == [16, 2, 2]
        assert sorted(row for rows in parts.values() for row in rows) == list(range(200))
        assert how.startswith("80 % train, 10 % valid, 10 % test, at random, the same in every run")
        assert three_parts({"train": range(200)}, "here", classes) == (parts, how)

    def test_parts_that_are_missing(self) -> None:
        train, other = list(range(20)), [20, 21]
        parts, how = three_parts({"train": train, "test": other}, "here")
        assert (len(parts["train"]), len(parts["valid"]), parts["test"]) == (18, 2, other)
        assert set(parts["train"]) | set(parts["valid"]) == set(train)
        parts, how = three_parts({"train": train, "valid": other}, "here")
        assert parts["test"] == other
        assert "its valid is reported as test" in how
        with pytest.raises(ValueError, match="a part for test, but none to train on"):
            three_parts({"test": other}, "here")
        with pytest.raises(ValueError, match="9 examples to split, at least 10"):
            three_parts({"train": range(9)}, "here")
        with pytest.raises(ValueError, match="1 % of 20 examples of here leave nothing for valid"):
            three_parts({"train": range(20)}, "here", holdout=0.01)

    @pytest.mark.parametrize("names", ["abc", "bca", "cab"])
    def test_a_speaker_of_most_utterances_is_trained_on(self, names: str) -> None:
        speakers = [names[0]] * 90 + [names[1]] * 5 + [names[2]] * 5
        parts, _ = three_parts({"train": range(100)}, "here", groups=speakers)
        assert [len(parts[part]) for part in PARTS] == [90, 5, 5]
        named = {"train": range(95), "test": range(95, 100)}
        parts, _ = three_parts(named, "here", groups=speakers, holdout=0.0)
        assert len(parts["train"]) == 95

    def test_no_speaker_is_in_two_parts(self) -> None:
        speakers = [f"s{i % 5}" for i in range(50)]
        parts, how = three_parts({"train": range(50)}, "here", groups=speakers)
        heard = {part: {speakers[row] for row in rows} for part, rows in parts.items()}
        assert [len(heard[part]) for part in PARTS] == [3, 1, 1]
        assert not heard["train"] & (heard["valid"] | heard["test"])
        assert not heard["valid"] & heard["test"]
        assert "by speaker" in how


class TestCorpora:
    def test_any_text_file_is_text(self, tmp_path: Path) -> None:
        text = "".join(f"line {i}\n" for i in range(100))
        (tmp_path / "notes.log").write_text(text)
        found = corpus_of("notes.log", tmp_path)
        documents = found.documents()
        assert "".join("".join(documents[part]) for part in PARTS) == text
        assert found.split_by == "about the last 5 % of the text is test, the 5 % before it valid"
        (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
        with pytest.raises(ValueError, match=r"no UTF-8 text .*begins with b'\\x89PNG"):
            corpus_of("picture.png", tmp_path).documents()

    def test_files_that_are_not_read_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("".join(f"line {i}\n" for i in range(100)))
        (tmp_path / ".hidden").write_text("")
        assert "not read" not in corpus_of(".", tmp_path).split_by
        (tmp_path / "code").mkdir()
        for name in ("a.py", "b.py", "c.csv", "d.py"):
            (tmp_path / "code" / name).write_text("")
        said = corpus_of(".", tmp_path).split_by
        assert said.endswith("; not read: code/a.py, code/b.py, code/c.csv and 1 more")
        for name in ("train.txt", "valid.txt", "test.txt"):
            (tmp_path / name).write_text("text")
        assert corpus_of(".", tmp_path).split_by.endswith("code/c.csv and 2 more")

    def test_tables(self, tmp_path: Path) -> None:
        lines = ["id,text", *(f'{i},"document {i}, or so"' for i in range(100)), "100,"]
        (tmp_path / "x.csv").write_text("\n".join(lines))
        assert corpus_of("x.csv", tmp_path).documents()["test"][-1] == "document 99, or so"
        (tmp_path / "x.csv").write_text("\n".join([*lines, "101,too,many"]))
        with pytest.warns(Warning, match=r"Skipping line 103: expected 2 fields, saw 3"):
            corpus_of("x.csv", tmp_path).documents()

    def test_a_key_of_ones_own(self, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl").write_text('{"content": "a"}\n{"content": 1}\n')
        with pytest.raises(ValueError, match=r"row 2: expected a text in content, got int"):
            corpus_of("x.jsonl", tmp_path, "content").documents()


def test_a_setting_by_its_short_name() -> None:
    settings = ["data=my.csv", "label=stars"]
    (run,) = Request("text", setting=settings).runs()
    assert run.key().settings == "data=my.csv label=stars"
    assert run.command.endswith("--set data=my.csv --set label=stars")
    with pytest.raises(ValueError, match="label and label_column are one setting"):
        Request("text", setting=[*settings, "label_column=other"]).runs()


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/home/someone/my.csv", "my.csv"),
        ("~/my.csv", "my.csv"),
        ("~someone-unknown/my.csv", "my.csv"),
        ("../other/my.csv", "my.csv"),
        ("reviews/my.csv", "reviews/my.csv"),
        ("hub:someone/reviews:en", "hub:someone/reviews:en"),
    ],
)
def test_a_row_has_no_folders_of_a_machine(path: str, kept: str) -> None:
    (run,) = Request("text", setting=[f"data={path}", "model=/models/mine/bert"]).runs()
    # the label has the model's name
    assert run.key().settings == f"data={kept}"
    assert run.command.endswith(f"--set model=bert --set data={kept}")
    assert run.config.data == path  # type: ignore[attr-defined]


def test_lines_of_a_plan_with_one_folder_are_the_same_or_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.txt"
    plan.write_text("common --method plain --set data=my.csv\ntext --seeds 0-1\ntext --seeds 1-2\n")
    assert [run.config.seed for run in runs_of_plan(plan)] == [0, 1, 2]
    plan.write_text(
        "common --method plain\ntext --set data=/one/my.csv\ntext --set data=/two/my.csv\n"
    )
    with pytest.raises(ValueError, match=r"plan\.txt: two runs .*data=/one/my\.csv and data=/two"):
        runs_of_plan(plan)


@pytest.mark.parametrize(
    ("recipe", "settings", "why"),
    [
        ("speech", {"kernel": "5"}, "kernel (encoder=transformer has no use for it, branchformer"),
        ("speech", {"time_masks": "0", "time_width": "3"}, "(time_masks=0 has no use for it)"),
        ("causal_lm", {"text": "body"}, "text (it needs data=)"),
        ("code", {"data": "my.csv", "dataset": "devign"}, "dataset (data=my.csv has no use for it"),
    ],
)
def test_settings_without_effect_are_refused(
    recipe: str, settings: dict[str, str], why: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        Request(recipe, setting=[f"{k}={v}" for k, v in settings.items()]).runs()
