"""For all tests: the same examples in every run, and threads that sleep while they wait for each other."""

from __future__ import annotations

import os

from hypothesis import settings

from octavo.engine.machine import patient_threads

# A suite that fails by chance is no proof. Random hunts are run by hand: HYPOTHESIS_PROFILE=default.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Spinning threads make a suite on a busy machine ten times as slow.
for name, value in patient_threads().items():
    os.environ.setdefault(name, value)
