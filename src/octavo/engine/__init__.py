"""The loop: schedule, execute, commit; the process border; the async face. Read `engine.py` first."""
