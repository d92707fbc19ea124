"""The command line: flags become config, errors become one line and an exit code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from octavo.cli import terminal
from octavo.cli.command import _repeat_flags
from octavo.cli.main import app
from octavo.config import EngineConfig, SchedulerConfig
from octavo.server.settings import ServerSettings

Run = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    def invoke(*args: str, stdin: str = "") -> Any:
        return CliRunner().invoke(app, list(args), input=stdin)

    return invoke


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "tiny").mkdir()
    return str(tmp_path / "tiny")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerSettings, dict[str, Any]]]:
    """What `octavo serve` would have started."""
    calls: list[tuple[EngineConfig, ServerSettings, dict[str, Any]]] = []
    module = ModuleType("octavo.server.serve")

    def serve(config: EngineConfig, settings: ServerSettings, **more: Any) -> None:
        calls.append((config, settings, more))

    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo.server.serve", module)
    return calls


# --- serve


def test_bare_serve_uses_the_defaults_of_the_config(run: Run, served: list[Any], model: str) -> None:
    result = run("serve", model)
    assert result.exit_code == 0, result.output
    [(config, settings, _)] = served
    assert config.model.path == model
    assert config.model.name == "tiny"
    assert config.scheduler == SchedulerConfig()
    assert (settings.host, settings.port, settings.api_key) == ("127.0.0.1", 8000, None)


def test_every_engine_flag_reaches_the_config(run: Run, served: list[Any], model: str) -> None:
    flags = (
        "--dtype float32 --max-model-len 512 --block-size 16 --num-blocks 64 --swap-gb 0.5 --no-enable-prefix-caching"
        " --max-num-seqs 3 --max-num-batched-tokens 99 --policy priority --preemption swap --attention-backend mine:A"
        " --threads 2 --seed 7 --check"
    )
    assert run("serve", model, *flags.split()).exit_code == 0
    config = served[0][0]
    assert (config.model.dtype, config.model.max_model_len) == ("float32", 512)
    assert (config.cache.block_size, config.cache.num_blocks) == (16, 64)
    assert (config.cache.swap_bytes, config.cache.prefix_caching) == (2**29, False)
    assert config.scheduler == SchedulerConfig(
        policy="priority", preemption="swap", max_num_seqs=3, max_num_batched_tokens=99
    )
    assert (config.attention_backend, config.num_threads, config.seed, config.check) == ("mine:A", 2, 7, True)


def test_kv_cache_size_is_given_in_gib(run: Run, served: list[Any], model: str) -> None:
    assert run("serve", model, "--kv-cache-gb", "1.5").exit_code == 0
    assert served[0][0].cache.kv_cache_bytes == 3 * 2**29


@pytest.mark.parametrize(
    "flags",
    [
        "--served-model-name alpha beta",
        "--served-model-name alpha --served-model-name beta",
        "--served-model-name alpha beta --port 9000",
    ],
)
def test_served_names_may_follow_one_flag_or_repeat_it(
    run: Run, served: list[Any], model: str, flags: str
) -> None:
    result = run("serve", model, *flags.split())
    assert result.exit_code == 0, result.output
    assert served[0][1].served_model_names == ("alpha", "beta")


def test_path_that_was_swallowed_as_a_served_name_is_refused(run: Run, served: list[Any], model: str) -> None:
    result = run("serve", "--served-model-name", "alpha", model)
    assert result.exit_code == 2
    assert "put the model first" in result.stderr
    assert served == []


@given(st.lists(st.sampled_from(["a", "b", "-x", "--port", "--served-model-name"])))
def test_spreading_flags_keeps_every_value_in_order(args: list[str]) -> None:
    spread = list(_repeat_flags(args))
    flag = "--served-model-name"
    assert [arg for arg in spread if arg != flag] == [arg for arg in args if arg != flag]
    for first, second, third in zip(spread, spread[1:], spread[2:], strict=False):
        if first == flag and not second.startswith("-"):
            assert third.startswith("-")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-model-len 0", "--max-model-len is 0"),
        ("--max-model-len -5", "--max-model-len is -5"),
        ("--max-model-len abc", "--max-model-len"),
        ("--dtype int3", "float32"),
        ("--block-size 7", "--block-size is 7"),
        ("--num-blocks 0", "--num-blocks is 0"),
        ("--num-blocks 8 --kv-cache-gb 1", "leave one out"),
        ("--kv-cache-gb 0", "--kv-cache-gb is 0"),
        ("--kv-cache-gb nan", "--kv-cache-gb is nan"),
        ("--kv-cache-gb inf", "--kv-cache-gb is inf"),
        ("--swap-gb -1", "--swap-gb is -1"),
        ("--preemption none", "recompute, swap"),
        ("--max-num-seqs 0", "--max-num-seqs is 0"),
        ("--port 70000", "--port"),
        ("--drain-timeout-s -1", "--drain-timeout-s"),
        ("--drain-timeout-s nan", "--drain-timeout-s"),
        ("--log-level loud", "--log-level"),
        ("--no-such-flag", "--no-such-flag"),
    ],
)
def test_bad_option_exits_with_2_and_names_it(
    run: Run, served: list[Any], model: str, flags: str, message: str
) -> None:
    result = run("serve", model, *flags.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert served == []


def test_empty_api_key_is_refused_instead_of_opening_the_server(
    run: Run, served: list[Any], model: str
) -> None:
    result = run("serve", model, "--api-key", "")
    assert result.exit_code == 2
    assert "--api-key is empty" in result.stderr


def test_api_key_may_come_from_the_environment(
    run: Run, served: list[Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert run("serve", model).exit_code == 0
    assert served[0][1].api_key == "secret"


def test_missing_model_is_one_line_and_exit_code_1(run: Run) -> None:
    result = run("serve", "/no/such/model", "--port", "8123")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert "/no/such/model" in result.stderr


def test_error_has_a_traceback_when_debugging(run: Run) -> None:
    result = run("serve", "/no/such/model", "--log-level", "debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_bad_options_are_refused_before_anything_is_downloaded(
    run: Run, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "say", lambda _: pytest.fail("asked the hub"))
    assert run("serve", "org/name", "--block-size", "7").exit_code == 2


# --- the command as a process


def test_help_needs_no_tensor_library_and_serve_parent_neither() -> None:
    code = (
        "import sys; from octavo.cli import main, offline; import octavo.weights.pull, octavo.server.settings;"
        " slow = ('torch', 'numpy', 'transformers', 'huggingface_hub', 'rich', 'fastapi', 'aiohttp');"
        " print([m for m in slow if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "pull"])
def test_help_of_each_command_describes_its_options(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    if command != "pull":
        assert "--max-model-len" in result.stdout
        assert "KV memory" in result.stdout


def test_bare_command_shows_help_and_version_is_printed(run: Run) -> None:
    assert "serve" in run().stdout
    assert run("--version").stdout.startswith("octavo ")
