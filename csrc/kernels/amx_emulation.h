// The instructions of amx.h in software, to the letter of the manual, for the instruction set amx_emulated: a CPU with AVX-512
// then runs all that a CPU with AMX does but the instructions themselves. Slow, and for tests only.
//
// What would raise an exception (#GP, #UD) here says why and ends the process. Numbers:
//
//     bfloat16   per output, products of even and of odd inputs go to a float32 each, by fused multiply-add in the order of
//                steps; both are added, and that to the output. To nearest even; denormal numbers are 0, before and after.
//     bytes      exact, 32 bits
//
// Source: Intel, Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TILERELEASE, TDPBF16PS,
// TDPBUSD, TDPBSUD; palette 1 of CPUID leaf 1DH, and leaf 1EH.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace octavo::OCTAVO_ISA {

struct AmxState {
    bool configured;
    AmxConfig config;
    char tiles[8][AMX_ROWS][AMX_ROW_BYTES];
};
static thread_local AmxState amx_state;

static void amx_require(bool right, const char* instruction, const char* what) {
    if (right) return;
    fprintf(stderr, "amx_emulated: %s: %s\n", instruction, what);
    abort();
}

static void amx_configure(const AmxConfig& config) {
    const char* const name = "ldtilecfg";
    amx_require(config.palette <= 1, name, "#GP: no such palette");
    amx_require(config.palette == 1, name, "palette 0 is not used here");
    amx_require(config.start_row == 0, name, "a start row is not used here");
    for (char byte : config.reserved) amx_require(byte == 0, name, "#GP: reserved bytes are not 0");
    for (int t = 0; t < 16; t++) {
        const int rows = config.rows[t], bytes = config.row_bytes[t];
        amx_require(t < 8 || (rows == 0 && bytes == 0), name, "#GP: more than eight tiles");
        amx_require(rows <= AMX_ROWS && bytes <= AMX_ROW_BYTES, name, "#GP: a tile has more than 16 rows or 64 bytes a row");
        amx_require((rows == 0) == (bytes == 0), name, "#GP: a tile has rows or bytes but not both");
    }
    memset(&amx_state, 0, sizeof amx_state);
    amx_state.config = config;
    amx_state.configured = true;
}

static void amx_release() { memset(&amx_state, 0, sizeof amx_state); }

static void amx_require_tile(int tile, const char* instruction) {
    amx_require(amx_state.configured, instruction, "#UD: tiles are not configured");
    amx_require(tile >= 0 && tile < 8 && amx_state.config.rows[tile] > 0, instruction, "#UD: the tile is not configured");
}

template <int T>
static void amx_zero() {
    amx_require_tile(T, "tilezero");
    memset(amx_state.tiles[T], 0, sizeof amx_state.tiles[T]);
}

template <int T>
static void amx_load(const char* from, int64_t stride) {
    amx_zero<T>();  // rows and bytes beyond the configured ones
    for (int r = 0; r < amx_state.config.rows[T]; r++)
        memcpy(amx_state.tiles[T][r], from + r * stride, amx_state.config.row_bytes[T]);
}

template <int T>
static void amx_store(char* to, int64_t stride) {
    amx_require_tile(T, "tilestored");
    for (int r = 0; r < amx_state.config.rows[T]; r++)
        memcpy(to + r * stride, amx_state.tiles[T][r], amx_state.config.row_bytes[T]);
}

static void amx_require_dot(int sums, int rows, int panel, const char* name) {
    const AmxConfig& c = amx_state.config;
    amx_require(sums != rows && sums != panel && rows != panel, name, "#UD: a tile is named twice");
    amx_require_tile(sums, name);
    amx_require_tile(rows, name);
    amx_require_tile(panel, name);
    const int odd = (c.row_bytes[sums] | c.row_bytes[rows] | c.row_bytes[panel]) % 4;
    amx_require(odd == 0, name, "#UD: bytes a row are no multiple of 4");
    amx_require(c.row_bytes[rows] / 4 == c.rows[panel], name, "#UD: rows and panel have different steps");
    amx_require(c.rows[rows] == c.rows[sums], name, "#UD: rows and sums have different rows");
    amx_require(c.row_bytes[panel] == c.row_bytes[sums], name, "#UD: panel and sums have different outputs");
}

OCTAVO_INLINE float amx_flush(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
    memcpy(&x, &bits, 4);
    return x;
}

OCTAVO_INLINE float amx_half(const char* p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return amx_flush(from_bf16(half));
}

template <int SUMS, int ROWS, int PANELS>
static void amx_dot_bf16() {
    amx_require_dot(SUMS, ROWS, PANELS, "tdpbf16ps");
    constexpr int N = AMX_ROW_BYTES / 4;
    const AmxConfig& c = amx_state.config;
    float even[AMX_STEPS][N], odd[AMX_STEPS][N];
    for (int k = 0; k < c.rows[PANELS]; k++)
        for (int n = 0; n < N; n++) {
            even[k][n] = amx_half(amx_state.tiles[PANELS][k] + 4 * n);
            odd[k][n] = amx_half(amx_state.tiles[PANELS][k] + 4 * n + 2);
        }
    for (int m = 0; m < c.rows[SUMS]; m++) {
        float evens[N] = {}, odds[N] = {}, sums[N];
        for (int k = 0; k < c.rows[PANELS]; k++) {
            const float a = amx_half(amx_state.tiles[ROWS][m] + 4 * k), b = amx_half(amx_state.tiles[ROWS][m] + 4 * k + 2);
            for (int n = 0; n < N; n++) evens[n] = amx_flush(__builtin_fmaf(a, even[k][n], evens[n]));
            for (int n = 0; n < N; n++) odds[n] = amx_flush(__builtin_fmaf(b, odd[k][n], odds[n]));
        }
        memcpy(sums, amx_state.tiles[SUMS][m], sizeof sums);
        for (int n = 0; n < N; n++) sums[n] = amx_flush(amx_flush(sums[n]) + amx_flush(evens[n] + odds[n]));
        memcpy(amx_state.tiles[SUMS][m], sums, c.row_bytes[SUMS]);
    }
}

template <int SUMS, int ROWS, int PANELS, class RowByte, class PanelByte>
OCTAVO_INLINE void amx_dot_bytes(const char* name) {
    amx_require_dot(SUMS, ROWS, PANELS, name);
    constexpr int N = AMX_ROW_BYTES / 4;
    const AmxConfig& c = amx_state.config;
    for (int m = 0; m < c.rows[SUMS]; m++) {
        int32_t sums[N];
        memcpy(sums, amx_state.tiles[SUMS][m], sizeof sums);
        for (int k = 0; k < c.rows[PANELS]; k++)
            for (int n = 0; n < N; n++)
                for (int i = 0; i < 4; i++)
                    sums[n] += int32_t(RowByte(amx_state.tiles[ROWS][m][4 * k + i])) *
                               int32_t(PanelByte(amx_state.tiles[PANELS][k][4 * n + i]));
        memcpy(amx_state.tiles[SUMS][m], sums, c.row_bytes[SUMS]);
    }
}

template <int SUMS, int ROWS, int PANELS>
static void amx_dot_unsigned_signed() {
    amx_dot_bytes<SUMS, ROWS, PANELS, uint8_t, int8_t>("tdpbusd");
}

template <int SUMS, int ROWS, int PANELS>
static void amx_dot_signed_unsigned() {
    amx_dot_bytes<SUMS, ROWS, PANELS, int8_t, uint8_t>("tdpbsud");
}

}  // namespace octavo::OCTAVO_ISA
