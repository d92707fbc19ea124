// The kernels of one instruction set as a table, and the choice of a table. Every set computes the same functions; sums of
// floats may differ in their last bits between sets, never within one.
#pragma once

#include <string>
#include <vector>

#include "types.h"
#include "weighing.h"

namespace octavo {

struct Kernels {
    void (*product_unit)(const Product&, int panel, int first_row, int num_rows, char* scratch, const Best&);
    void (*attention_unit)(const Attention&, const AttentionTask&, int kv_head, char* scratch);
    void (*fold_unit)(const Attention&, int token, int head, char* scratch);
    void (*norm_row)(const float* x, int n, const Norm&, float* y);
    void (*prepare_row)(const float* x, int n, Format, char* out, float* scales, int32_t* sums);
    void (*widen_row)(const char* x, int n, Number, float* y);
    void (*rotate_row)(const Rotation&, int token, float* scratch);
    void (*angles_row)(int position, const float* frequencies, int n, float* cosines, float* sines);
    int64_t (*scratch_bytes)(int head_size, int64_t row_floats);
    int64_t (*peak)(Format, int64_t rounds);            // of one core, to compare with: kernels/limits.h
    void (*read_all)(const char* data, int64_t bytes);
    SamplingKernels sampling;
};

// Names of the sets this CPU can run, the best first; the last is "portable".
std::vector<std::string> instruction_sets();

// The table of a set that instruction_sets() names, or of "amx_emulated", which tests use on CPUs with avx512_bf16 (it is slow:
// kernels/amx_emulation.h); null for others.
const Kernels* kernels_of(const std::string& name);

}  // namespace octavo
