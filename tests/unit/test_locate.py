"""Names of models become paths, without a network and without loading anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelUnavailableError
from octavo.weights import pull
from octavo.weights.locate import default_served_name, locate_model, parse_hub_name

COMMIT = "5f" * 20
GGUF = b"GGUF"


def no_progress(label: str, done: int, total: int) -> None:
    assert 0 <= done <= total, label


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that hold nothing, and a hub that nobody can reach."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)


def checkpoint(folder: Path, *shards: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    for shard in shards:
        (folder / shard).write_bytes(b"x")
    return folder


# --- paths


def test_folder_and_gguf_file_are_found_by_path(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "tiny", "model.safetensors")
    file = tmp_path / "tiny.Q4.gguf"
    file.write_bytes(GGUF)
    assert locate_model(str(folder)) == folder
    assert locate_model("tiny") == folder
    assert locate_model(str(file)) == file
    assert locate_model("./tiny.Q4.gguf") == file


def test_folder_with_one_gguf_and_no_config_means_the_gguf(tmp_path: Path) -> None:
    file = tmp_path / "only" / "a.gguf"
    file.parent.mkdir()
    file.write_bytes(GGUF)
    assert locate_model("./only") == file
    (tmp_path / "only" / "b.gguf").write_bytes(GGUF)
    with pytest.raises(ModelUnavailableError, match=r"a\.gguf, b\.gguf"):
        locate_model("./only")


def test_folder_without_anything_is_left_to_the_loader(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert locate_model("empty") == tmp_path / "empty"


@pytest.mark.parametrize("name", ["/no/such/model", "./nothing", "../nothing", "~/no-such", "weights.gguf"])
def test_missing_path_is_named_at_once_and_never_looked_up_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> Path:
        raise AssertionError("went to the network")

    monkeypatch.setattr(pull, "pull", never)
    with pytest.raises(ModelUnavailableError) as caught:
        pull.locate_or_pull(name, say=print, progress=no_progress)
    assert name in str(caught.value)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelUnavailableError, match=r"notes\.txt is neither a folder nor a \.gguf file"):
        locate_model("notes.txt")


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_any_other_text_is_an_unavailable_model(name: str) -> None:
    try:
        locate_model(name)
    except ModelUnavailableError as e:
        assert str(e)
    else:
        assert Path(os.path.expanduser(name)).exists()  # noqa: PTH111


def test_a_home_that_does_not_exist_is_an_unavailable_model() -> None:
    with pytest.raises(ModelUnavailableError, match="~no-such-user/model"):
        locate_model("~no-such-user/model")


def test_close_spelling_is_suggested() -> None:
    with pytest.raises(ModelUnavailableError, match="did you mean smollm2-135m-instruct"):
        locate_model("SmolLM2-135M")


# --- names


@pytest.mark.parametrize(
    ("name", "path", "served"),
    [
        ("/m/Tiny.Q4_1.gguf", "/m/Tiny.Q4_1.gguf", "Tiny.Q4_1"),
        ("/m/tiny/", "/m/tiny", "tiny"),
        ("org/tiny", "/hub/snapshots/5f5f", "org/tiny"),
        ("smollm2-135m-instruct", "/cache/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
    ],
)
def test_served_name_is_what_the_user_would_call_the_model(name: str, path: str, served: str) -> None:
    assert default_served_name(name, Path(path)) == served


def test_served_name_of_the_current_folder_is_its_own_name(tmp_path: Path) -> None:
    assert default_served_name(".", locate_model(".")) == tmp_path.name


def test_hub_names_are_told_from_paths() -> None:
    assert str(parse_hub_name("org/name")) == "org/name"
    assert str(parse_hub_name("org/name:a.gguf")) == "org/name:a.gguf"
    assert str(parse_hub_name("org/name/a.gguf")) == "org/name:a.gguf"
    for other in (
        "name",
        "/org/name",
        "./org/name",
        "~/name",
        "org/x.gguf",
        "org/name:a.bin",
        "a/../b",
        "a b/c",
    ):
        assert parse_hub_name(other) is None, other


# --- the hub's cache


def snapshot(tmp_path: Path, repo: str = "org/tiny") -> Path:
    base = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(COMMIT)
    folder = base / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def test_complete_snapshot_of_the_hub_cache_is_found(tmp_path: Path) -> None:
    folder = checkpoint(snapshot(tmp_path), "model.safetensors")
    assert locate_model("org/tiny") == folder


def test_snapshot_that_lacks_a_shard_does_not_count(tmp_path: Path) -> None:
    folder = checkpoint(snapshot(tmp_path), "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelUnavailableError, match="octavo pull org/tiny"):
        locate_model("org/tiny")
    (folder / "model-2.safetensors").symlink_to(tmp_path / "not-downloaded-yet")
    with pytest.raises(ModelUnavailableError):
        locate_model("org/tiny")
    (tmp_path / "not-downloaded-yet").write_bytes(b"x")
    assert locate_model("org/tiny") == folder


def test_one_file_of_a_hub_repository_is_found(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    (folder / "a.gguf").write_bytes(GGUF)
    (folder / "b.gguf").write_bytes(GGUF)
    assert locate_model("org/tiny:b.gguf") == folder / "b.gguf"
    with pytest.raises(ModelUnavailableError, match="org/tiny:FILE"):
        locate_model("org/tiny")
