// What the files of bindings share: arrays, and the objects that Python holds. module.cpp is the module, module_timing.cpp
// what `octavo bench kernels` measures with.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <vector>

#include "decoder.h"

namespace octavo {

template <class T, int N>
using Array = nanobind::ndarray<T, nanobind::ndim<N>, nanobind::c_contig, nanobind::device::cpu>;
using Bytes1 = Array<uint8_t, 1>;
using Floats1 = Array<float, 1>;
using Floats2 = Array<float, 2>;
using ConstBytes1 = Array<const uint8_t, 1>;
using ConstBytes2 = Array<const uint8_t, 2>;
using ConstFloats1 = Array<const float, 1>;
using ConstFloats2 = Array<const float, 2>;
using ConstFloats3 = Array<const float, 3>;

inline void check(bool right, const char* what) {
    if (!right) throw std::invalid_argument(what);
}

struct PackedMatrix {
    Matrix matrix{};
    int interleaved = 0;
    nanobind::object data, scales, sums, bias;  // kept alive
};

struct BlockPool {
    Pool pool{};
    int64_t num_blocks = 0;
    nanobind::object memory;
};

// items: tuples of (start, token_ids, block_ids), the latter two tuples of int.
void set_items(StepItems& items, std::vector<int32_t>* token_ids, const nanobind::list& list, int64_t num_blocks,
               int block_size);

// Attention over one layer of a pool; all that depends on the step is left to the caller.
Attention attention_over(const BlockPool& pool, int layer, int num_heads, int num_kv_heads, int head_size, int number);

void bind_timing(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);

}  // namespace octavo
