"""Images, graphs, speech and texts of a user's own, as the recipes read them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gfsa_experiments.data.own import PARTS
from gfsa_experiments.data.tables import read_labelled
from gfsa_experiments.tasks.graph.data import read_graphs
from gfsa_experiments.tasks.image import list_images
from gfsa_experiments.tasks.speech.data import letters_of, read_speech
from gfsa_experiments.tasks.texts import TextConfig, TextTask
from support.own_data import (
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

    def test_parts_by_other_names(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {"training": 2, "dev": 1, "test": 1})
        assert set(list_images(tmp_path).parts) == {"train", "valid", "test"}
        (tmp_path / "train").mkdir()
        with pytest.raises(ValueError, match="two folders for one part"):
            list_images(tmp_path, 0.2)

    def test_test_without_val(self, tmp_path: Path) -> None:
        write_folder(tmp_path, {"train": 10, "test": 1})
        found = list_images(tmp_path)
        assert [len(found.parts[part]) for part in ("train", "valid", "test")] == [27, 3, 3]


class TestGraphs:
    def test_npz_has_each_edge_once(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path / "mine.npz")
        graphs = read_graphs(str(path), tmp_path)
        assert (graphs.metric, graphs.outputs) == ("mae", 1)
        assert graphs.own is not None
        assert graphs.own.splits == {"train": 24, "valid": 3, "test": 3}
        assert graphs.node_features == (3,)
        assert graphs.edge_features == (1,)
        # a triangle
        ends = [*map(tuple, graphs.graphs[0].edge_index.T.tolist())]
        assert len(ends) == 6
        assert set(ends) == {(i, j) for i in range(3) for j in range(3) if i != j}

    def test_a_split_of_its_own(self, tmp_path: Path) -> None:
        split = np.arange(30) % 3
        graphs = read_graphs(str(write_npz(tmp_path / "mine.npz", split=split)), tmp_path)
        assert graphs.parts == {p: [*range(n, 30, 3)] for n, p in enumerate(PARTS)}
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
            unknown = [bool(graph.y[1].isnan()) for graph in graphs.graphs]
            assert unknown == (y[:, 1] == -1).tolist()

    @pytest.mark.parametrize("kind", [2.0, 0.7])
    def test_a_graph_without_a_label_is_left_out(self, kind: float, tmp_path: Path) -> None:
        y = np.arange(150) % 3 * kind
        y[7] = np.nan
        path = write_npz(tmp_path / "mine.npz", 150, y=y)
        with pytest.warns(UserWarning, match="1 of 150 graphs .* graph 7: a wrong label"):
            graphs = read_graphs(str(path), tmp_path)
        used = [row for rows in graphs.parts.values() for row in rows]
        assert sorted(used) == [row for row in range(150) if row != 7]
        assert graphs.outputs == (3 if kind == 2 else 1)
        assert all(bool(graphs.graphs[row].y.isfinite()) for row in used)
        write_npz(tmp_path / "none.npz", y=np.full(30, np.nan))
        with pytest.raises(ValueError, match="y is NaN or infinite in all 30 graphs"):
            read_graphs(str(tmp_path / "none.npz"), tmp_path)

    def test_classes_that_are_not_trained_on(self, tmp_path: Path) -> None:
        split = np.arange(30) // 10
        write_npz(tmp_path / "mine.npz", y=np.arange(30) % 3 * (split == 2), split=split)
        with pytest.raises(ValueError, match="test has labels that train lacks: 1, 2"):
            read_graphs(str(tmp_path / "mine.npz"), tmp_path)

    def test_a_list_of_pyg(self, tmp_path: Path) -> None:
        torch.save(rings(40), tmp_path / "list.pt")
        found = read_graphs(str(tmp_path / "list.pt"), tmp_path)
        assert found.own is not None
        assert found.own.splits == {"train": 32, "valid": 4, "test": 4}
        sizes = [graph.num_nodes for graph in found.graphs]
        assert sizes == [ring.num_nodes for ring in rings(40)]
        torch.save({"graphs": 1}, tmp_path / "other.pt")
        with pytest.raises(ValueError, match="expected a list of PyG's Data, got a dict"):
            read_graphs(str(tmp_path / "other.pt"), tmp_path)

    def test_reals_are_numbers(self, tmp_path: Path) -> None:
        graphs = [ring(4, y=torch.tensor([i % 2])) for i in range(20)]
        for graph in graphs:
            graph.edge_attr = torch.rand(8, 2)
        torch.save(graphs, tmp_path / "mine.pt")
        found = read_graphs(str(tmp_path / "mine.pt"), tmp_path)
        assert (found.node_features, found.edge_features) == ((3,), 2)
        assert torch.equal(found.graphs[3].edge_attr, graphs[3].edge_attr)


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

    def test_some_speakers_are_unknown(self, tmp_path: Path) -> None:
        table = write_recordings(tmp_path / "recordings") / "transcripts.tsv"
        table.write_text(table.read_text(encoding="utf-8").replace("\ts3", "\t"), encoding="utf-8")
        _, own = read_speech("recordings", tmp_path, 0.1)
        assert sum(own.splits.values()) == 20
        assert "at random" in own.split_by
        assert own.split_by.endswith("not kept apart, 4 utterances name none")
