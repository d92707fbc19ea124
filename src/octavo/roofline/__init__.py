"""How near each kernel comes to what the machine can do at most: the roofline of Williams, Waterman and Patterson, 2009.

    limit of a kernel = the greater of    bytes it must fetch / read rate      operations / peak rate of their numbers
    ratio             = limit / time      1 is the best there can be

    workbench.py   what everything is measured on
    limits.py      what the machine can do, measured in the same run: memory, and multiplications on registers
    measured.py    one result, and how it is judged
    products.py    products of rows with packed weights, by shape, format and number of rows
    attention.py   attention over block-paged keys and values
    rows.py        norms, positions and the write into the cache, which only move data
    torch_gemm.py  torch's packed bfloat16 product at the same shapes, for comparison
    disturbance.py whether other programs took part
    report.py      the tables

Three rules. Weights, keys and values come from memory, never from a cache: there are always more of them than caches hold,
used in turn. Nothing is timed that the decoder does not do in every step (conversion of arguments, allocation). Machines are
shared: the rate of memory is taken beside each kernel, and the rest by the best of many short rounds.
"""
