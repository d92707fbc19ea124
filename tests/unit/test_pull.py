"""What is pulled is whole or refused. pip finds wheels made here; the hub is a small server in this process."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_hub import FakeHub
from octavo.errors import ModelFileError, ModelUnavailableError
from octavo.weights import locate, pull
from octavo.weights.locate import PackagedModel, locate_model

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
