// Tiles of AMX, and the product of rows with a panel in them.
//
// A thread has eight tiles of at most 16 rows of 64 bytes. One instruction multiplies a tile of rows with a tile of a panel:
// 16 rows, 16 steps of four bytes, 16 outputs. Here they always stand so, and a panel (types.h) is what a tile loads as it lies:
//
//                     6      7         panel: 16 words (outputs) a row, a row for each step
//        rows   4     0      1         sums: 16 words a row
//        rows   5     2      3
//
// How many rows, and bytes of each, a tile has is set beforehand (amx_configure), so nothing is read beyond the last row, the
// last step or the last output. Every output is one sum over tiles of 16 steps in their order, the last one shorter if steps are
// no multiple of 16: the same for one row as for many, since each row of a tile is multiplied by itself.
//
// The instructions themselves are below; amx_emulation.h has the same functions in software, for machines without AMX, so that
// all that is built on them is tested everywhere. They are written as assembly, because the compilers' intrinsics want numbers
// of tiles as literals and, in GCC 12, do not say that they read memory.
//
// Sources: Intel, Software Developer's Manual, volume 1, chapter 18; Intel, Optimization Reference Manual, chapter "Intel AMX"
// (two by two tiles of sums: each loaded tile is used twice).
#pragma once

#include "../types.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

constexpr int AMX_ROWS = 16;
constexpr int AMX_STEPS = 16;
constexpr int AMX_ROW_BYTES = 64;

// As LDTILECFG reads it.
struct alignas(64) AmxConfig {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(AmxConfig) == 64);

}  // namespace octavo::OCTAVO_ISA

#if defined(OCTAVO_AMX_EMULATED)
#include "amx_emulation.h"
#else

namespace octavo::OCTAVO_ISA {

// Also zeroes all tiles.
OCTAVO_INLINE void amx_configure(const AmxConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
// Tiles cannot be used any more. The operating system need not save them when it changes threads.
OCTAVO_INLINE void amx_release() { asm volatile("tilerelease"); }

template <int T>
OCTAVO_INLINE void amx_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
}

template <int T>
OCTAVO_INLINE void amx_load(const char* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(stride) : "memory");
}

template <int T>
OCTAVO_INLINE void amx_store(char* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(stride) : "memory");
}

// sums += rows * panel.
template <int SUMS, int ROWS, int PANELS>
OCTAVO_INLINE void amx_dot_bf16() {  // pairs of bfloat16
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(PANELS));
}

template <int SUMS, int ROWS, int PANELS>
OCTAVO_INLINE void amx_dot_unsigned_signed() {  // bytes: of rows unsigned, of the panel signed
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(PANELS));
}

template <int SUMS, int ROWS, int PANELS>
OCTAVO_INLINE void amx_dot_signed_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(PANELS));
}

}  // namespace octavo::OCTAVO_ISA

#endif

namespace octavo::OCTAVO_ISA {

// rows: may be 0, then the tile cannot be used.
OCTAVO_INLINE void amx_set_tile(AmxConfig* config, int tile, int rows, int row_bytes) {
    config->rows[tile] = uint8_t(rows);
    config->row_bytes[tile] = uint16_t(rows > 0 ? row_bytes : 0);
}

// Rows, and bytes of each, of tile `first` and of the one after it.
OCTAVO_INLINE void amx_set_tiles(AmxConfig* config, int first, int rows, int row_bytes) {
    for (int tile = first; tile < first + 2; tile++) amx_set_tile(config, tile, rows, row_bytes);
}

// What the tiles of this thread are configured for, as in the picture above, while a unit of work uses them. It begins anew with
// each: between them other libraries of the process may have used the tiles of the thread.
struct AmxShape {
    int upper = 0, lower = 0, steps = 0;  // rows of tiles 0, 1, 4; of 2, 3, 5; of 6, 7

    // lower: may be 0; if the rest is as it was, the lower tiles then stay, unused.
    OCTAVO_INLINE void set(AmxShape* shape, int upper, int lower, int steps) {
        if (shape->upper == upper && shape->steps == steps && (lower == 0 || shape->lower == lower)) return;
        *shape = {upper, lower, steps};
        AmxConfig config{};
        config.palette = 1;
        amx_set_tiles(&config, 0, upper, AMX_ROW_BYTES);
        amx_set_tiles(&config, 2, lower, AMX_ROW_BYTES);
        amx_set_tile(&config, 4, upper, steps * 4);
        amx_set_tile(&config, 5, lower, steps * 4);
        amx_set_tiles(&config, 6, steps, AMX_ROW_BYTES);
        amx_configure(config);
    }
};

// How four bytes of a row and four of a panel are multiplied.
struct AmxBFloat16 {
    template <int SUMS, int ROWS, int PANELS>
    OCTAVO_INLINE void add() {
        amx_dot_bf16<SUMS, ROWS, PANELS>();
    }
};
struct AmxBytes {  // as Bytes: rows unsigned
    template <int SUMS, int ROWS, int PANELS>
    OCTAVO_INLINE void add() {
        amx_dot_unsigned_signed<SUMS, ROWS, PANELS>();
    }
};

}  // namespace octavo::OCTAVO_ISA
