"""Measures servers from outside, and the offline API from inside. A client: it knows no engine, no server, no tensor.

    workload.py    what is asked            arrivals.py   when it is asked
    client.py      one request, timed       load.py       many of them, closed or open loop
    outcome.py     what happened to one     timing.py     TTFT, TPOT, ITL, latency of one
    summary.py     a whole run in figures   slo.py        how many requests were good enough
    campaign.py    runs in turn, A B A B    comparison.py their ratios
    memory.py, machine.py                   where it ran and what it took
    report.py, record.py                    tables for people, JSON for programs
    offline.py     the same workload through `octavo.LLM`

Three rules: a request that failed is an error and never a fast answer; arrivals are decided beforehand, so that a slow
server does not slow its own load down; every token count is checked against what the server says.
"""
