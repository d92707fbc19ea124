"""What a server costs before it does anything: seconds to ready and to the first token, memory, CPU when idle.

    python benchmarks/startup.py [--idle-s 20] [-- SERVE FLAGS]

Starts `octavo serve` with its defaults, as a user would, on a free port; reads /proc.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx

TICKS = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in tree(int(child)))]


def cpu_s(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def memory_mib(pid: int, field: str) -> float:
    return int(re.search(rf"{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def report_memory(label: str, pids: list[int]) -> None:
    each = ", ".join(f"{memory_mib(pid, 'VmRSS'):.0f}" for pid in pids)
    print(f"{label}: resident {sum(memory_mib(pid, 'VmRSS') for pid in pids):.0f} MiB (HTTP, engine: {each})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--idle-s", type=float, default=20)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    began = time.perf_counter()
    command = [sys.executable, "-m", "octavo.cli", "serve", "--port", "0", *options.flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = ""
        while not url:
            line = process.stdout.readline()
            assert line, "the server ended"
            print("  " + line, end="")
            found = re.match(r"ready\s+(http://\S+)/v1", line)
            url = found[1] if found else ""
        print(f"ready after {time.perf_counter() - began:.1f} s")
        client = httpx.Client(base_url=url, timeout=600)
        body = {
            "model": client.get("/v1/models").json()["data"][0]["id"],
            "prompt": "Hello, my name is",
            "max_tokens": 1,
        }
        client.post("/v1/completions", json=body).raise_for_status()
        print(f"first token after {time.perf_counter() - began:.1f} s")
        pids = tree(process.pid)
        report_memory("after the first token", pids)
        before, at = cpu_s(pids), time.perf_counter()
        time.sleep(options.idle_s)
        print(f"idle: {100 * (cpu_s(pids) - before) / (time.perf_counter() - at):.2f} % of one CPU")
        # Fill the pool: distinct prompts until every block has been written.
        total = client.get("/metrics").text
        tokens = float(re.search(r"^octavo_blocks_total (\S+)", total, re.MULTILINE)[1]) * 16
        for i in range(int(tokens // 3500) + 1):
            prompt = [1000 + i, *range(20, 3519)]
            client.post("/v1/completions", json={**body, "prompt": prompt}).raise_for_status()
        report_memory("after filling the whole pool", pids)
        print(f"peak: {sum(memory_mib(pid, 'VmHWM') for pid in pids):.0f} MiB")
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
