// Packing: from rows of weights as checkpoints keep them to the panels that products read (types.h: Format).
#pragma once

#include <cstdint>

#include "machine.h"

namespace octavo {

// How rows of weights lie in a checkpoint. Q4_0, Q4_1, Q8_0: GGUF's blocks of 32.
enum class Kept : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, Q4_0 = 3, Q4_1 = 4, Q8_0 = 5 };

struct Weights {
    Kept kept;
    const char* data;
    int64_t row_bytes;
    int32_t outputs, inputs;
};

struct Packing {
    Format format;
    int32_t has_minimum;    // grouped formats
    int32_t interleaved;    // rows are gates, then as many ups: panels hold 16 of each (Finish::SILU)
    int32_t panels, steps;
    int64_t panel_bytes;
};

// Sizes of what `weights` become.
Packing packing_of(Format format, bool has_minimum, bool interleaved, int outputs, int inputs);

// Packs on all threads. data: panels * panel_bytes. scales, sums: INT8 only, panels * PANEL each.
// Grouped formats take blocks of the same kind as they are, and quantise all others. Inputs must be a multiple of GROUP then.
void pack(Machine& machine, const Weights& weights, const Packing& packing, char* data, float* scales, int32_t* sums);

// Rows as they are, in `number`: [outputs, inputs].
void convert(Machine& machine, const Weights& weights, Number number, char* out);

}  // namespace octavo
