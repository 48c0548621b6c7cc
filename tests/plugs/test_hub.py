"""Filters on the Hub: the real client against a server of this machine."""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
import transformers
import yaml
from torch import Tensor, nn

import gfsa
from gfsa.lens.sources import load_source
from gfsa.plugs.hub import BEGIN, END
from gfsa.plugs.saving.pretrained import check_loaded
from support.hub_server import HubServer, Repository, hub_server
from support.saved_filters import FOLDER
from support.saved_filters import encoder as saved_encoder
from support.zoo import randomise

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(6)[None]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(tmp_path / "cache") as running:
        yield running


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def gpt2(n_layer: int = 2) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_embd": 16, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, n_layer=n_layer)).eval()


def plugged(model: Any, **arguments: Any) -> Any:
    """Filters with numbers of their own."""
    gfsa.plug(model, **arguments)
    randomise(model, scale=0.1)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


class TestFilters:
    def test_round_trip(self, server: HubServer) -> None:
        model = plugged(encoder(), K=4)
        address = gfsa.push_to_hub(model, "user/filters")
        assert address.startswith(f"{server.url}/user/filters/commit/")
        files = server.repositories["user/filters"].files()
        assert sorted(files) == ["README.md", "filters.safetensors"]
        again = encoder()
        gfsa.load(again, "user/filters")
        assert torch.equal(again(X), model(X))
        assert not torch.equal(again(X), encoder()(X))

    def test_without_a_connection_what_was_downloaded_is_there(
        self, server: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = plugged(encoder())
        gfsa.push_to_hub(model, "user/filters")
        gfsa.load(encoder(), "user/filters")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        before = len(server.requests)
        again = encoder()
        gfsa.load(again, "user/filters")
        assert torch.equal(again(X), model(X))
        assert len(server.requests) == before
        with pytest.raises(FileNotFoundError, match=r"cannot find the requested files|offline"):
            gfsa.load(encoder(), "user/others")

    def test_revisions(self, server: HubServer) -> None:
        first, second = plugged(encoder()), plugged(encoder(), layers=[1])
        gfsa.push_to_hub(first, "user/filters")
        gfsa.push_to_hub(second, "user/filters", revision="one-layer")
        for revision, model in (("main", first), ("one-layer", second)):
            again = encoder()
            gfsa.load(again, "user/filters", revision=revision)
            assert torch.equal(again(X), model(X))
        # the lines of a card load what it is beside
        cards = {
            branch: server.repositories["user/filters"].files(branch)["README.md"].decode()
            for branch in ("main", "one-layer")
        }
        assert 'gfsa.load(model, "user/filters")' in cards["main"]
        assert 'gfsa.load(model, "user/filters", revision="one-layer")' in cards["one-layer"]
        with pytest.raises(FileNotFoundError, match="user/filters at 'other'"):
            gfsa.load(encoder(), "user/filters", revision="other")

    def test_two_files_of_an_older_version(self, server: HubServer) -> None:
        repository = server.repositories["user/filters"] = Repository()
        names = ("filters.json", "filters.safetensors")
        repository.commit("main", {name: (FOLDER / "gfsa" / name).read_bytes() for name in names})
        model = saved_encoder()
        gfsa.load(model, "user/filters")
        assert len(gfsa.filters_of(model)) == 2
        # the next upload has one file, to which the other would not belong
        gfsa.push_to_hub(model, "user/filters")
        assert "filters.json" not in repository.files()

    def test_a_large_file_is_not_downloaded(self, server: HubServer) -> None:
        name = "filters.safetensors"
        gfsa.push_to_hub(plugged(encoder()), "user/filters")
        server.sizes[name] = 2**30
        with pytest.raises(ValueError, match=rf"{name} of user/filters has {2**30} bytes"):
            gfsa.load(encoder(), "user/filters")
        gets = [request for request in server.requests if request.startswith("GET")]
        assert not any(request.endswith(name) for request in gets)

    def test_a_missing_folder_is_not_looked_for_on_the_hub(
        self, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gfsa.push_to_hub(plugged(encoder()), "runs/best")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").mkdir()
        before = len(server.requests)
        with pytest.raises(FileNotFoundError, match=r"pass 'hub:runs/best'"):
            gfsa.load(encoder(), "runs/best")
        assert len(server.requests) == before
        model = encoder()
        gfsa.load(model, "hub:runs/best")
        assert gfsa.filters_of(model)
        with pytest.raises(ValueError, match="expected hub:user/name"):
            gfsa.load(encoder(), "hub:best")

    def test_a_folder_comes_before_a_repository(
        self, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        local = plugged(encoder(), layers=[2])
        gfsa.save(local, "user/filters")
        gfsa.push_to_hub(plugged(encoder()), "user/filters")
        before = len(server.requests)
        model = encoder()
        gfsa.load(model, "user/filters")
        assert torch.equal(model(X), local(X))
        assert len(server.requests) == before
        with pytest.raises(ValueError, match="user/filters is a folder"):
            gfsa.load(model, "user/filters", revision="main")

    @pytest.mark.parametrize("path", ["user/none", Path("user/none"), "none", "a/b/c", "../b"])
    def test_what_is_not_there(self, server: HubServer, path: str | Path) -> None:
        with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
            gfsa.load(encoder(), path)
        asked = any("user/none" in request for request in server.requests)
        assert asked == (path == "user/none")


class TestCard:
    def test_it_has_settings_backbone_coefficients_and_results(self, server: HubServer) -> None:
        model = plugged(encoder(), K=5, learn=("wK",))
        results = {"accuracy | test": 0.875, "note": "three seeds"}
        gfsa.push_to_hub(model, "user/filters", base_model="user/backbone", results=results)
        text = server.repositories["user/filters"].files()["README.md"].decode()
        _, metadata, body = text.split("---", 2)
        assert yaml.safe_load(metadata) == {
            "library_name": "gfsa",
            "tags": ["gfsa", "graph-filter-self-attention"],
            "base_model": "user/backbone",
        }
        assert "2 layers of `TransformerEncoder`" in body
        assert "K=5, learn=['wK']" in body
        assert 'gfsa.load(model, "user/filters")' in body
        assert "- accuracy | test: 0.875\n- note: three seeds\n" in body
        means = gfsa.filters_of(model)["layers.0.self_attn"].coefficients().mean(0)
        shown = ", ".join(f"c{power} = {mean:.4g}" for power, mean in enumerate(means))
        (line,) = [line for line in body.splitlines() if line.startswith("- `layers.0.self_attn`:")]
        assert line.endswith(shown)

    def test_what_an_owner_wrote_into_it_stays(self, server: HubServer) -> None:
        model = plugged(encoder())
        gfsa.push_to_hub(model, "user/filters", results={"accuracy": 0.5})
        repository = server.repositories["user/filters"]
        written = repository.files()["README.md"].decode()
        edited = written.replace("tags:", "license: mit\ntags:") + "\nby hand\n"
        repository.commit("main", {"README.md": edited.encode()})
        gfsa.push_to_hub(model, "user/filters", results={"accuracy": 0.75})
        text = repository.files()["README.md"].decode()
        assert text == edited.replace("- accuracy: 0.5", "- accuracy: 0.75")

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("# mine\n", "# mine\n\nSECTION\n"),
            (f"a {BEGIN} 1 {END} b {BEGIN} 2 {END} c", "a SECTION b  c"),
            (f"a {END} b {BEGIN} c", f"a {END} b {BEGIN} c\n\nSECTION\n"),
            (f"a {BEGIN} b {BEGIN} 1 {END} c", f"a {BEGIN} b SECTION c"),
        ],
        ids=["no section", "two sections", "reversed marks", "a mark alone"],
    )
    def test_text_outside_of_the_section_stays(self, server: HubServer, old: str, new: str) -> None:
        model = plugged(encoder())
        gfsa.push_to_hub(model, "user/filters")
        repository = server.repositories["user/filters"]
        _, begin, rest = repository.files()["README.md"].decode().partition(BEGIN)
        section = begin + rest.rstrip()
        repository.commit("main", {"README.md": old.encode()})
        for _ in range(2):
            gfsa.push_to_hub(model, "user/filters")
            text = repository.files()["README.md"].decode()
            assert text == new.replace("SECTION", section)

    def test_the_name_of_the_base_model(self, server: HubServer, tmp_path: Path) -> None:
        for known, expected in (("gpt/two", "gpt/two"), (str(tmp_path), None), ("", None)):
            model = plugged(gpt2())
            model.config._name_or_path = known
            gfsa.push_to_hub(model, "user/filters")
            repository = server.repositories.pop("user/filters")
            metadata = yaml.safe_load(repository.files()["README.md"].decode().split("---")[1])
            assert metadata.get("base_model") == expected


class TestWholeModel:
    def test_round_trip(self, server: HubServer) -> None:
        model = plugged(gpt2())
        gfsa.push_to_hub(model, "user/model", weights=True)
        again = gfsa.from_pretrained(transformers.AutoModelForCausalLM, "user/model").eval()
        assert torch.equal(logits(again), logits(model))
        assert not hasattr(again.config, "filters_need_gfsa_from_pretrained")
        # the filters can be had alone
        backbone = gpt2()
        gfsa.load(backbone, "user/model")
        assert torch.equal(logits(backbone), logits(model))
        card = server.repositories["user/model"].files()["README.md"].decode()
        assert 'gfsa.from_pretrained(GPT2LMHeadModel, "user/model")' in card

    @pytest.mark.parametrize("sizes", [("5GB", "20KB"), ("20KB", "5GB")])
    def test_weights_of_an_earlier_upload_are_not_loaded(
        self, sizes: tuple[str, str], server: HubServer
    ) -> None:
        """transformers prefers one file to several, vLLM several to one."""
        for size in sizes:
            model = plugged(gpt2())
            model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size=size)
            with torch.no_grad():
                model.transformer.wte.weight.mul_(1.5 if size == sizes[1] else 1.0)
            gfsa.push_to_hub(model, "user/model", weights=True)
            if size == sizes[0]:
                mine = {"model.fp16.safetensors": b"mine", "notes.md": b"mine"}
                server.repositories["user/model"].commit("main", mine)
        files = server.repositories["user/model"].files()
        assert ("model.safetensors" in files) == (sizes[1] == "5GB")
        assert ("model.safetensors.index.json" in files) == (sizes[1] == "20KB")
        assert files.keys() >= {"model.fp16.safetensors", "notes.md", "filters.safetensors"}
        again = gfsa.from_pretrained(transformers.AutoModelForCausalLM, "user/model").eval()
        assert torch.equal(logits(again), logits(model))

    def test_the_lens_sees_the_filters(self, server: HubServer) -> None:
        model = plugged(gpt2())
        gfsa.push_to_hub(model, "user/model", weights=True)
        source = load_source("user/model", untrained=False)
        assert torch.equal(logits(source.model), logits(model))
        # pickles, which have no filters
        content = io.BytesIO()
        torch.save(gpt2().state_dict(), content)
        repository = server.repositories["user/pickles"] = Repository()
        config = server.repositories["user/model"].files()["config.json"]
        files = {"config.json": config, "pytorch_model.bin": content.getvalue()}
        repository.commit("main", files)
        assert not gfsa.filters_of(load_source("user/pickles", untrained=False).model)


def lora(model: Any, modules_to_save: list[str] | None = None) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(
        target_modules=["c_attn"],
        modules_to_save=modules_to_save,
        fan_in_fan_out=True,
        init_lora_weights=False,
    )
    return peft.get_peft_model(model, config).eval()


class TestPeft:
    def adapter(self) -> Any:
        return lora(plugged(gpt2(), K=4), ["gfsa"])

    def test_a_base_without_filters_gets_those_of_the_adapter(self, tmp_path: Path) -> None:
        model = self.adapter()
        model.save_pretrained(tmp_path)
        base = gpt2()
        unfiltered = logits(base)
        again = gfsa.load_peft(base, tmp_path).eval()
        assert torch.equal(logits(again), logits(model))
        filters = gfsa.filters_of(again)
        assert {filter.K for filter in filters.values()} == {4}
        with again.disable_adapter():
            assert torch.equal(logits(again), unfiltered)
        with pytest.raises(ValueError, match=r"a base model, got a PeftModel.*load_adapter"):
            gfsa.load_peft(again, tmp_path)
        merged = again.merge_and_unload()
        torch.testing.assert_close(logits(merged), logits(model))

    def test_a_plugged_base(self, tmp_path: Path) -> None:
        model = self.adapter()
        model.save_pretrained(tmp_path)
        base = gpt2()
        gfsa.plug(base, K=4)
        again = gfsa.load_peft(base, tmp_path, is_trainable=True).eval()
        assert torch.equal(logits(again), logits(model))
        assert all(f.theta.requires_grad for f in gfsa.filters_of(again).values())

    @pytest.mark.parametrize(
        ("base", "message"),
        [
            (lambda: plugged(gpt2(), K=5), r"gfsa\.unplug\(model\) first"),
            (lambda: plugged(gpt2(), K=4, layers=[1]), r"gfsa\.unplug\(model\) first"),
            (lambda: gpt2(n_layer=1), r"h\.1\.attn"),
        ],
        ids=["other filters", "fewer filters", "fewer layers"],
    )
    def test_a_base_that_does_not_fit_is_refused_and_unchanged(
        self, base: Any, message: str, tmp_path: Path
    ) -> None:
        self.adapter().save_pretrained(tmp_path)
        model = base()
        keys = list(model.state_dict())
        with pytest.raises(ValueError, match=message):
            gfsa.load_peft(model, tmp_path)
        assert list(model.state_dict()) == keys

    def test_a_failure_of_peft_leaves_the_base_as_it_was(self, tmp_path: Path) -> None:
        self.adapter().save_pretrained(tmp_path)
        file = tmp_path / "adapter_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps({**settings, "target_modules": ["nothing"]}))
        base = gpt2()
        keys = list(base.state_dict())
        with pytest.raises(ValueError, match="No modules were targeted"):
            gfsa.load_peft(base, tmp_path)
        assert list(base.state_dict()) == keys

    def test_filters_that_peft_does_not_load_are_found_out(self, tmp_path: Path) -> None:
        model = self.adapter()
        numbers = {
            f"h.{layer}.attn.theta": filter.theta.detach().clone()
            for layer, filter in enumerate(gfsa.filters_of(model).values())
        }
        check_loaded(model, numbers, "adapter")
        numbers["h.1.attn.theta"] += 1
        with pytest.raises(ValueError, match=r"peft did not load the filter of .*h\.1\.attn"):
            check_loaded(model, numbers, "adapter")

    def test_an_adapter_without_filters(self, tmp_path: Path) -> None:
        lora(gpt2()).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="has no filters: its adapter was saved without"):
            gfsa.load_peft(gpt2(), tmp_path)

    def test_filters_in_the_working_folder_are_not_those_of_an_adapter(
        self, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lora(gpt2()).save_pretrained(tmp_path / "adapter")
        api = huggingface_hub.HfApi()
        api.create_repo("user/bare")
        api.upload_folder(repo_id="user/bare", folder_path=tmp_path / "adapter")
        gfsa.save(plugged(gpt2()), tmp_path / "here")
        monkeypatch.chdir(tmp_path / "here")
        base = gpt2()
        # the reason may be a lost connection, so it is said
        with pytest.raises(ValueError, match=r"user/bare has no filters.* read from the Hub"):
            gfsa.load_peft(base, "user/bare")
        assert not gfsa.filters_of(base)

    @pytest.mark.parametrize("subfolder", ["", "adapters/best"])
    def test_filters_beside_an_adapter(
        self, subfolder: str, server: HubServer, tmp_path: Path
    ) -> None:
        """Of a model that was plugged after get_peft_model: peft does not know its filters."""
        model = plugged(lora(gpt2()))
        folder = tmp_path / "repository" / subfolder
        model.save_pretrained(folder)
        gfsa.save(model, folder)
        if subfolder:
            api = huggingface_hub.HfApi()
            api.create_repo("user/adapter")
            api.upload_folder(repo_id="user/adapter", folder_path=tmp_path / "repository")
        else:
            gfsa.push_to_hub(model, "user/adapter", weights=True)
        where: Any = {"subfolder": subfolder} if subfolder else {}
        where["cache_dir"] = tmp_path / "elsewhere"
        for path in (tmp_path / "repository", "user/adapter"):
            again = gfsa.load_peft(gpt2(), path, **where).eval()
            assert torch.equal(logits(again), logits(model))
        # the filters are in the cache that the caller named: no further request asks for them
        server.requests.clear()
        again = gfsa.load_peft(gpt2(), "user/adapter", **where, local_files_only=True).eval()
        assert torch.equal(logits(again), logits(model))
        assert not [request for request in server.requests if "filters." in request]

    def test_on_the_hub(self, server: HubServer, recwarn: pytest.WarningsRecorder) -> None:
        model = self.adapter()
        gfsa.push_to_hub(model, "user/adapter", weights=True)
        recwarn.clear()
        again = gfsa.load_peft(gpt2(), "user/adapter").eval()
        assert torch.equal(logits(again), logits(model))
        assert not [w for w in recwarn if "filters_need" in str(w.message)]
        # whoever loads it without gfsa is warned by peft, which names the entry
        with pytest.warns(UserWarning, match=r"filters_need_gfsa_load_peft"):
            peft.PeftModel.from_pretrained(gpt2(), "user/adapter")
        with pytest.raises(FileNotFoundError, match="user/none is neither a folder"):
            gfsa.load_peft(gpt2(), "user/none")


NAMES = ("name", "a/b/c", "", 3, "a b/c")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"repository": name}, "repository must be 'user/name'") for name in NAMES),
        ({"base_model": "a\nlicense: mit"}, "base_model must be a name on the Hub"),
        ({"weights": True}, "weights=True is for .*, got a TransformerEncoder"),
        ({"model": encoder()}, "has no filters to save"),
        *(
            ({"results": results}, "results must be a dict")
            for results in (["accuracy"], {"accuracy": [1]}, {1: 2})
        ),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    given = {"model": plugged(encoder()), "repository": "user/filters"} | arguments
    with pytest.raises(TypeError if "results" in arguments else ValueError, match=message):
        gfsa.push_to_hub(**given)
