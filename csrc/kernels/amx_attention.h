// The two products of attention in tiles of AMX (amx.h), for bfloat16: keys and values in vector order are panels of 16 keys,
// and of D numbers, as they lie. All rows go through tiles, for the reason given in amx_product.h.
//
// One configuration serves a unit of work, since to load one takes as long as a dozen products of tiles: it has tiles of whole
// panels (16 steps, 32 numbers of a key) and of half ones, all for the same number of rows.
//
//                     6      7         whole panels                     2      3         half panels
//        rows   4     0      1         sums                       5     0      1         sums
//
// If there are more rows than a tile has, the last tile begins so that it ends with the last row; rows that were in the one
// before come out the same again.
//
// Values are multiplied 16 keys (half a panel) at a time: two pieces of 16 keys lie together in blocks of 32 tokens or more
// only, and a row's result must be the same in blocks of any size.
//
// These are score and weigh of attention.h for bfloat16, declared there.
#pragma once

#include "amx.h"
#include "attention.h"

namespace octavo::OCTAVO_ISA {

constexpr int AMX_HALF = AMX_STEPS / 2;
static_assert(TILE == 16 && TILE / 2 == AMX_HALF);

inline AttentionState::AttentionState(Number number, int rows) : tiles(number == Number::BFLOAT16) {
    if (!tiles) return;
    const int height = rows < AMX_ROWS ? rows : AMX_ROWS;
    AmxConfig config{};
    config.palette = 1;
    amx_set_tiles(&config, 0, height, AMX_ROW_BYTES);
    amx_set_tiles(&config, 2, AMX_HALF, AMX_ROW_BYTES);
    amx_set_tile(&config, 4, height, AMX_STEPS * 4);
    amx_set_tile(&config, 5, height, AMX_HALF * 4);
    amx_set_tiles(&config, 6, AMX_STEPS, AMX_ROW_BYTES);
    amx_configure(config);
}

inline AttentionState::~AttentionState() {
    if (tiles) amx_release();
}

// Calls f(first row) for each tile of rows.
template <class F>
OCTAVO_INLINE void for_amx_rows(int rows, F&& f) {
    f(0);
    for (int first = AMX_ROWS; first < rows; first += AMX_ROWS) f(first + AMX_ROWS <= rows ? first : rows - AMX_ROWS);
}

template <>
void score<BFloat16>(const Cache& c, const Chunk& chunk, const char* queries, int rows, float* scores) {
    constexpr int64_t PANEL_BYTES = AMX_STEPS * TILE * 4, STEP_BYTES = TILE * 4, STRIDE = CHUNK * 4;
    const int steps = c.head_size / 2, whole = steps / AMX_STEPS;
    const int64_t row_bytes = int64_t(c.head_size) * 2;
    for_amx_rows(rows, [&](int first) {
        const char* row = queries + first * row_bytes;
        for (int t = 0; t < chunk.num_tiles; t += 2) {  // the second may be the one too many that a chunk has
            amx_zero<0>();
            amx_zero<1>();
            for (int k = 0; k < whole; k++) {
                amx_load<4>(row + k * AMX_STEPS * 4, row_bytes);
                amx_load<6>(chunk.keys[t] + k * PANEL_BYTES, STEP_BYTES);
                amx_dot_bf16<0, 4, 6>();
                amx_load<7>(chunk.keys[t + 1] + k * PANEL_BYTES, STEP_BYTES);
                amx_dot_bf16<1, 4, 7>();
            }
            if (steps % AMX_STEPS != 0) {
                amx_load<5>(row + whole * AMX_STEPS * 4, row_bytes);
                amx_load<2>(chunk.keys[t] + whole * PANEL_BYTES, STEP_BYTES);
                amx_dot_bf16<0, 5, 2>();
                amx_load<3>(chunk.keys[t + 1] + whole * PANEL_BYTES, STEP_BYTES);
                amx_dot_bf16<1, 5, 3>();
            }
            char* to = reinterpret_cast<char*>(scores + first * CHUNK + t * TILE);
            amx_store<0>(to, STRIDE);
            amx_store<1>(to + AMX_ROW_BYTES, STRIDE);
        }
    });
}

// weights, values: at the rows. Two vectors of 16 numbers from `vector` on, or one.
template <bool TWO>
OCTAVO_INLINE void weigh_in_tiles(const Chunk& chunk, const char* weights, int vector, int64_t row_bytes, char* values) {
    amx_zero<0>();
    if constexpr (TWO) amx_zero<1>();
    for (int t = 0; t < chunk.num_tiles; t++) {
        const char* panel = chunk.values[t] + vector * AMX_ROW_BYTES;
        amx_load<5>(weights + t * TILE * 2, CHUNK * 2);
        amx_load<2>(panel, row_bytes);
        amx_dot_bf16<0, 5, 2>();
        if constexpr (TWO) {
            amx_load<3>(panel + AMX_ROW_BYTES, row_bytes);
            amx_dot_bf16<1, 5, 3>();
        }
    }
    amx_store<0>(values + vector * AMX_ROW_BYTES, row_bytes);
    if constexpr (TWO) amx_store<1>(values + (vector + 1) * AMX_ROW_BYTES, row_bytes);
}

template <>
void weigh<BFloat16>(const Cache& c, const Chunk& chunk, const char* weights, int rows, float* values) {
    const int vectors = c.head_size / 16;
    const int64_t row_bytes = int64_t(c.head_size) * 4;
    for_amx_rows(rows, [&](int first) {
        const char* row = weights + first * CHUNK * 2;
        char* to = reinterpret_cast<char*>(values + int64_t(first) * c.head_size);
        int v = 0;
        for (; v + 2 <= vectors; v += 2) weigh_in_tiles<true>(chunk, row, v, row_bytes, to);
        if (v < vectors) weigh_in_tiles<false>(chunk, row, v, row_bytes, to);
    });
}

}  // namespace octavo::OCTAVO_ISA
