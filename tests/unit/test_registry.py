"""Names of classes that users bring: each is loaded and fits, or is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.attention.backend import BACKENDS, AttentionBackend
from octavo.errors import ConfigError
from octavo.scheduler.policies import POLICIES, FirstComeFirstServed, Policy


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fifo", "known: fcfs, priority"),
        ("no_such_module:Policy", "No module named 'no_such_module'; .*PYTHONPATH"),
        ("os:NoSuchPolicy", "NoSuchPolicy"),
        (":Policy", "cannot load"),
        ("..:Policy", "cannot load"),
        ("os:path", "without arguments"),
        ("octavo.scheduler.policies:Policy", "without arguments"),
        ("octavo.scheduler.scheduler:Scheduler", "without arguments"),
        ("json:JSONDecoder", "is no policy: it lacks ages, outranks, rank"),
        ("os:getcwd", "is no policy"),
    ],
)
def test_what_is_no_policy_is_refused_in_words(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        POLICIES.make(name, Policy)


def test_a_module_that_is_no_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_policy.py").write_text("class Policy(")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot load policy 'broken_policy:Policy'"):
        POLICIES.make("broken_policy:Policy", Policy)


def test_what_fits_is_made() -> None:
    assert isinstance(POLICIES.make("fcfs", Policy), FirstComeFirstServed)
    assert POLICIES.make("octavo.scheduler.policies:Priority", Policy).outranks
    assert BACKENDS.make("reference", AttentionBackend).name == "reference"
