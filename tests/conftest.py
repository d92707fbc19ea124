"""For all tests: threads that wait sleep, so that a suite on a busy machine is not ten times as slow."""

from __future__ import annotations

import os

from octavo.engine.machine import patient_threads

for name, value in patient_threads().items():
    os.environ.setdefault(name, value)
