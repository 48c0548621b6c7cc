"""Images, graphs, speech and texts of a user's own, as the recipes read them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gfsa_experiments.data.labelled import read_labelled
from gfsa_experiments.tasks.graph.own import read_own as read_graphs
from gfsa_experiments.tasks.image.items import list_images
from gfsa_experiments.tasks.image.recipe import ImageConfig
from gfsa_experiments.tasks.image.recipe import build as build_images
from gfsa_experiments.tasks.lra.own import read_texts
from gfsa_experiments.tasks.speech.audio import header_of, read_audio
from gfsa_experiments.tasks.speech.own import letters_of
from gfsa_experiments.tasks.speech.own import read_own as read_speech
from gfsa_experiments.tasks.text.recipe import TextConfig, TextTask
from support.own_data import (
    reviews,
    ring,
    rings,
    write_npz,
    write_photos,
    write_recordings,
    write_table,
)
from support.speech import write_librispeech
from support.tiny_images import write_folder
from support.tiny_texts import save_model, sentence


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny-bert", "bert")


class TestText:
    def test_numbers_are_predicted_in_their_own_unit(self, model: Path, tmp_path: Path) -> None:
        rows = [{"text": sentence(i), "label": 300_000 + 1_000.5 * i} for i in range(40)]
        path = write_table(tmp_path / "prices.csv", rows)
        task = TextTask(TextConfig(data=str(path), model=str(model)), tmp_path)
        assert task.metric == "rmse"
        assert not task.higher_is_better
        assert task.own_data is not None
        assert task.own_data.labels.startswith("label: regression, numbers from 300000 to ")
        batch = task.first_examples(4)
        # standardised, the loss of a new head is about that of predicting the mean
        assert task.loss(task.model, batch).item() < 10
        found, labels = task.predict(task.model.eval(), batch)
        assert 250_000 < float(found.detach().mean()) < 400_000
        scores = task.score([(labels + 3.0, labels)])
        assert scores["rmse"] == pytest.approx(3.0, abs=0.1)
        assert scores["mae"] == pytest.approx(3.0, abs=0.1)
        assert scores["spearman"] == pytest.approx(100.0)
        constant = task.score([(torch.zeros(4), labels)])
        assert constant["spearman"] == 0.0

    def test_large_numbers_are_not_rounded(self, model: Path, tmp_path: Path) -> None:
        """Between two seconds of the epoch float32 has none: it rounds to 128."""
        rows = [{"text": sentence(i), "label": 1.7e9 + 3.5 * i} for i in range(40)]
        path = write_table(tmp_path / "seconds.csv", rows)
        task = TextTask(TextConfig(data=str(path), model=str(model)), tmp_path)
        batch = task.splits["train"].dataset.__getitems__(list(range(32)))  # type: ignore[attr-defined]
        assert batch["labels"].std(correction=0).item() == pytest.approx(1.0, abs=0.01)
        _, labels = task.predict(task.model.eval(), batch)
        assert set((labels - 1.7e9).round(decimals=3).tolist()) <= {3.5 * i for i in range(40)}

    def test_more_tokens_than_positions(self, tmp_path: Path) -> None:
        """A table of positions ends in an IndexError, on a GPU in an assertion of the device."""
        rows = [{"text": sentence(i, 60), "label": i % 2} for i in range(20)]
        path = write_table(tmp_path / "long.csv", rows)
        # RoBERTa's first position is that behind the padding
        for kind, positions in (("bert", 40), ("roberta", 38), ("gpt2", 32)):
            model = save_model(tmp_path / kind, kind)
            config = TextConfig(data=str(path), model=str(model))
            with pytest.raises(ValueError, match=f"{positions} tokens.* max_length={positions}"):
                TextTask(config, tmp_path)
            task = TextTask(dataclasses.replace(config, max_length=positions), tmp_path)
            loss = task.loss(task.model, task.first_examples(2))
            assert loss.isfinite()

    def test_examples_that_are_trained_on_are_counted(self, tmp_path: Path) -> None:
        rows = [{"text": sentence(i % 30), "label": i % 2} for i in range(40)]
        path = write_table(tmp_path / "twice.csv", rows)
        found = read_labelled(str(path), tmp_path, ("text",), "label")
        trained = {found.texts[row] for row in found.parts["train"]}
        for part in ("valid", "test"):
            count = sum(found.texts[row] in trained for row in found.parts[part])
            assert count
            assert f"{count} of {part}" in found.own.repeated
        assert f"{found.own.repeated}; labels:" in str(found.own)
        path = write_table(tmp_path / "once.csv", [r | {"text": i} for i, r in enumerate(rows)])
        assert not read_labelled(str(path), tmp_path, ("text",), "label").own.repeated

    def test_pairs_and_classes(self, model: Path, tmp_path: Path) -> None:
        rows = [
            {"a": sentence(i), "b": sentence(i + 9), "same": ("no", "yes", "perhaps")[i % 3]}
            for i in range(40)
        ]
        path = write_table(tmp_path / "pairs.csv", rows)
        config = TextConfig(
            data=str(path), text=("a", "b"), label_column="same", model=str(model), max_length=16
        )
        task = TextTask(config, tmp_path)
        batch = task.first_examples(4)
        assert task.model.config.num_labels == 3
        assert batch["token_type_ids"].max() == 1
        assert task.score([(torch.tensor([0, 1]), torch.tensor([0.0, 2.0]))])["accuracy"] == 50.0


class TestBytes:
    def test_long_texts_are_cut_and_counted(self, tmp_path: Path) -> None:
        path = write_table(tmp_path / "my.csv", reviews(40))
        found = read_texts(str(path), tmp_path, "review", "stars", 30)
        long = sum(len(row["review"]) > 30 for row in reviews(40))
        assert 0 < long < 40
        assert found.own.split_by.endswith(f"; {long} texts of more than 30 bytes are cut")
        assert max(int(part.lengths.max()) for part in found.parts.values()) == 30
        first = found.parts["train"][0].tobytes().decode()
        assert reviews(40)[0]["review"].startswith(first)


class TestImages:
    def test_folders_of_classes_are_split(self, tmp_path: Path) -> None:
        found = list_images(write_photos(tmp_path / "photos"))
        assert found.classes == ["kind0", "kind1", "kind2"]
        assert {part: len(files) for part, files in found.parts.items()} == {
            "train": 24,
            "valid": 3,
            "test": 3,
        }
        for part in ("valid", "test"):
            assert sorted(label for _, label in found.parts[part]) == [0, 1, 2]
        assert len({path for files in found.parts.values() for path, _ in files}) == 30
        assert "80 % train" in found.split_by

    def test_an_image_of_another_class_makes_other_data(self, tmp_path: Path) -> None:
        """The fingerprint reads few files; where all of them are is known anyway."""
        photos = write_photos(tmp_path / "photos")
        config = ImageConfig(data="photos", model="deit_tiny", depth=1, image_size=32)
        before = build_images(config, tmp_path).own_data
        first = min((photos / "kind0").iterdir())
        first.rename(photos / "kind1" / f"moved{first.suffix}")
        list_images.cache_clear()
        after = build_images(config, tmp_path).own_data
        assert before is not None
        assert after is not None
        assert before.digest != after.digest

    def test_parts_by_other_names(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {"training": 2, "dev": 1, "test": 1})
        assert set(list_images(tmp_path).parts) == {"train", "valid", "test"}
        (tmp_path / "train").mkdir()
        with pytest.raises(ValueError, match="two folders for train, train and training"):
            list_images(tmp_path, 0.2)

    def test_test_without_val(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {"train": 10, "test": 1})
        found = list_images(tmp_path)
        assert [len(found.parts[part]) for part in ("train", "valid", "test")] == [27, 3, 3]

    def test_folders_without_images(self, tmp_path: Path) -> None:
        for name in ("glue", "wikitext"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "train.tsv").touch()
        with pytest.raises(FileNotFoundError, match=r"expected the folders .* has glue/, wik"):
            list_images(tmp_path)


class TestGraphs:
    def test_npz_has_each_edge_once(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "mine.npz")
        graphs = read_graphs(str(path), tmp_path)
        assert (graphs.kind, graphs.metric, graphs.outputs) == ("regression", "mae", 1)
        assert graphs.own is not None
        assert graphs.own.splits == {"train": 24, "valid": 3, "test": 3}
        assert graphs.node_features == (3,)
        assert graphs.edge_features == (1,)
        # a triangle
        assert int(graphs.edges[0]) == 6
        ends = set(map(tuple, graphs.edge_index[:, :6].T.tolist()))
        assert ends == {(i, j) for i in range(3) for j in range(3) if i != j}

    def test_a_split_of_its_own(self, tmp_path: Path) -> None:
        split = np.arange(30) % 3
        graphs = read_graphs(str(write_npz(tmp_path / "mine.npz", split=split)), tmp_path)
        assert graphs.split.tolist() == split.tolist()
        write_npz(tmp_path / "other.npz", split=split + 1)
        with pytest.raises(ValueError, match=r"0 \(train\), 1 \(valid\) or 2 .* such as 3"):
            read_graphs(str(tmp_path / "other.npz"), tmp_path)

    @pytest.mark.parametrize(
        ("y", "labels", "metric", "outputs"),
        [
            (np.arange(30) % 3, "auto", "accuracy", 3),
            (np.arange(30) % 3, "numbers", "mae", 1),
            (np.arange(30) % 3 + 0.5, "auto", "mae", 1),
            (np.stack([np.arange(30) % 2, np.arange(30) % 3 - 1], 1), "auto", "rocauc", 2),
            (np.stack([np.arange(30) % 2, np.arange(30)], 1), "auto", "mae", 2),
        ],
    )
    def test_what_the_labels_are(
        self, y: Any, labels: Any, metric: str, outputs: int, tmp_path: Path
    ) -> None:
        graphs = read_graphs(str(write_npz(tmp_path / "mine.npz", y=y)), tmp_path, labels)
        assert (graphs.metric, graphs.outputs) == (metric, outputs)
        assert graphs.own is not None
        assert f"measured by {metric}" in graphs.own.labels
        if metric == "rocauc":
            assert torch.equal(graphs.y[:, 1].isnan(), torch.from_numpy(y[:, 1] == -1))

    @pytest.mark.parametrize("kind", [2.0, 0.7])
    def test_a_graph_without_a_label_is_left_out(self, kind: float, tmp_path: Path) -> None:
        y = np.arange(150) % 3 * kind
        y[7] = np.nan
        path = write_npz(tmp_path / "mine.npz", 150, y=y)
        with pytest.warns(UserWarning, match="1 of 150 graphs .* graph 7: a wrong label"):
            graphs = read_graphs(str(path), tmp_path)
        assert len(graphs) == 149
        assert graphs.outputs == (3 if kind == 2 else 1)
        assert bool(graphs.y.isfinite().all())
        write_npz(tmp_path / "none.npz", y=np.full(30, np.nan))
        with pytest.raises(ValueError, match="y is NaN or infinite in all 30 graphs"):
            read_graphs(str(tmp_path / "none.npz"), tmp_path)

    def test_classes_that_are_not_trained_on(self, tmp_path: Path) -> None:
        split = np.arange(30) // 10
        write_npz(tmp_path / "mine.npz", y=np.arange(30) % 3 * (split == 2), split=split)
        with pytest.raises(ValueError, match="test has labels that train lacks: 1, 2"):
            read_graphs(str(tmp_path / "mine.npz"), tmp_path)

    def test_files_of_pyg(self, tmp_path: Path) -> None:
        from torch_geometric.data import InMemoryDataset

        graphs = rings(40)
        torch.save(graphs, tmp_path / "list.pt")
        InMemoryDataset.save(graphs, str(tmp_path / "mine.pt"))
        listed, saved = (read_graphs(str(tmp_path / f"{n}.pt"), tmp_path) for n in ("list", "mine"))
        for name in ("x", "edge_index", "y", "nodes", "split"):
            assert torch.equal(getattr(listed, name), getattr(saved, name))
        (tmp_path / "set" / "processed").mkdir(parents=True)
        for part, some in (("train", graphs[:20]), ("val", graphs[20:30]), ("test", graphs[30:])):
            InMemoryDataset.save(some, str(tmp_path / f"set/processed/{part}.pt"))
        parts = read_graphs(str(tmp_path / "set"), tmp_path)
        assert parts.split.tolist() == [0] * 20 + [1] * 10 + [2] * 10
        assert parts.own is not None
        assert parts.own.split_by == "the parts that it names"

    def test_one_hot_rows_are_kinds(self, tmp_path: Path) -> None:
        graphs = [ring(4, y=torch.tensor([i % 2])) for i in range(20)]
        for graph in graphs:
            graph.x = torch.eye(5)[graph.x[:, 0] + 1]
            graph.edge_attr = torch.rand(8, 2)
        torch.save(graphs, tmp_path / "mine.pt")
        found = read_graphs(str(tmp_path / "mine.pt"), tmp_path)
        assert found.node_features == (4,)
        assert found.x[:4, 0].tolist() == [1, 2, 3, 1]
        assert found.edge_features == 2

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"n_edge": None}, "has no array n_edge; it has "),
            ({"edge": np.zeros((3, 4, 2))}, r"expected edge of shape \(edges, 2\)"),
            ({"node_feat": np.full((150, 1), -1)}, "-1 is below 0; store them as floats"),
            ({"node_feat": np.full((150, 1), 2**32)}, "4294967296 would need as many embeddings"),
            ({"edge": np.full((150, 2), 2**32)}, "an edge to a node that it does not have"),
            ({"y": np.zeros(30)}, "every label in the column y is '0'"),
        ],
    )
    def test_a_wrong_npz(self, change: dict[str, Any], error: str, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "mine.npz", **change)
        with pytest.raises(ValueError, match=error):
            read_graphs(str(path), tmp_path)

    def test_what_else_is_wrong(self, tmp_path: Path) -> None:
        (tmp_path / "text.pt").write_text("no graphs")
        torch.save({"x": torch.ones(3)}, tmp_path / "dict.pt")
        torch.save([ring(3)] * 10, tmp_path / "unlabelled.pt")
        mixed = [ring(3, y=torch.ones(1 + i % 2)) for i in range(10)]
        torch.save(mixed, tmp_path / "mixed.pt")
        for data, error in (
            ("text.pt", "is damaged, or has more in it"),
            ("dict.pt", "expected a list of PyG's Data, .* got dict"),
            ("unlabelled.pt", "graph 0: expected .* this has no y"),
            ("mixed.pt", "y of graph 0 has 1 columns, of graph 1 2"),
            ("nowhere:Class", "nowhere cannot be imported"),
            ("math:Class", "the module math has no data set Class"),
            ("math:sqrt:name", "sqrt takes no name"),
        ):
            with pytest.raises(ValueError, match=error):
                read_graphs(data, tmp_path)


class TestSpeech:
    def test_a_table_of_transcripts(self, tmp_path: Path) -> None:
        root = write_recordings(tmp_path / "recordings")
        (root / "audio" / "more.wav").write_bytes((root / "audio" / "0.wav").read_bytes())
        sets, own = read_speech("recordings", tmp_path, 0.2)
        assert own.splits == {"train": 12, "valid": 4, "test": 4}
        assert own.split_by == (
            "70 % train, 20 % valid, 10 % test, by speaker, the same in every run; 1 recordings "
            "without a transcript are not used"
        )
        assert {one.part for one in sets["test"]} == {"test"}
        (first,) = [
            one for one in (*sets["train"], *sets["valid"], *sets["test"]) if one.name == "0"
        ]
        # two channels of half a second at 8 kHz: 8,000 samples at 16 kHz, one frame per 160
        assert first.frames == 51
        features = first.features()
        assert features.shape == (51, 80)
        assert math.isclose(float(features.mean()), 0.0, abs_tol=1e-4)
        assert first.text.endswith("STRASSE")
        assert set(letters_of(sets)) > set(" YESTRA")

    def test_parts_in_librispeech_layout(self, tmp_path: Path) -> None:
        for name, count in (("train-clean-100", 12), ("dev-clean", 3), ("test-other", 4)):
            write_librispeech(tmp_path, name, count)
        _, own = read_speech("LibriSpeech", tmp_path, 0.1)
        assert own.splits == {"train": 12, "valid": 3, "test": 4}

    def test_without_speakers_the_split_is_random(self, tmp_path: Path) -> None:
        write_librispeech(tmp_path, "one", 20)
        _, own = read_speech(str(tmp_path / "LibriSpeech"), tmp_path, 0.0)
        assert own.splits == {"train": 18, "test": 2}
        assert "at random" in own.split_by

    def test_some_speakers_are_unknown(self, tmp_path: Path) -> None:
        table = write_recordings(tmp_path / "recordings") / "transcripts.tsv"
        table.write_text(table.read_text(encoding="utf-8").replace("\ts3", "\t"), encoding="utf-8")
        _, own = read_speech("recordings", tmp_path, 0.1)
        assert sum(own.splits.values()) == 20
        assert "at random" in own.split_by
        assert own.split_by.endswith("not kept apart, 4 utterances name none")

    def test_samples_that_are_no_numbers(self, tmp_path: Path) -> None:
        """Their loss would be NaN, and the run called diverged."""
        soundfile = pytest.importorskip("soundfile")
        soundfile.write(tmp_path / "a.wav", np.full(8_000, np.nan), 16_000, subtype="FLOAT")
        with pytest.raises(ValueError, match=r"a\.wav has samples that are NaN"):
            read_audio(tmp_path / "a.wav")

    @pytest.mark.parametrize(
        ("table", "error"),
        [
            ("file\ttext\n0.wav\tyes\n", r"columns path and text, .*has file, text; it begins:"),
            ("path\ttext\nno.wav\tyes\n", r"utterance no\.wav .*: it has no audio file"),
            ("path\ttext\tsplit\n0.wav\tyes\tsome\n", "expected train, valid or test .* 'some'"),
        ],
    )
    def test_a_wrong_table(self, table: str, error: str, tmp_path: Path) -> None:
        (tmp_path / "transcripts.tsv").write_text(table)
        with pytest.raises(ValueError, match=error):
            read_speech(str(tmp_path), tmp_path, 0.1)

    def test_a_folder_without_transcripts(self, tmp_path: Path) -> None:
        (tmp_path / "a.wav").touch()
        with pytest.raises(FileNotFoundError, match=r"expected transcripts\.tsv .* has a\.wav"):
            read_speech(str(tmp_path), tmp_path, 0.1)
        (tmp_path / "x.trans.txt").write_text("b some words\n")
        with pytest.raises(FileNotFoundError, match=r"there is no b\.flac .*\n  1: b some words"):
            read_speech(str(tmp_path), tmp_path, 0.0)

    @pytest.mark.parametrize("ending", ["flac", "mp3"])
    def test_a_recording_that_was_cut_off(self, ending: str, tmp_path: Path) -> None:
        """Its header promises samples that it does not have."""
        soundfile = pytest.importorskip("soundfile")
        path = tmp_path / f"a.{ending}"
        wave = 0.1 * np.random.default_rng(0).standard_normal(16_000)
        soundfile.write(path, wave, 16_000)
        info, reason = header_of(path)
        assert (info.frames, reason) == (16_000, None)
        path.write_bytes(path.read_bytes()[:-2_000])
        assert soundfile.info(path).frames == 16_000
        assert "cut off" in str(header_of(path)[1])
        if ending == "flac":
            with pytest.raises(ValueError, match=r"a\.flac is damaged: .*; replace or delete it"):
                read_audio(path)
