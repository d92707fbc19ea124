// Products in tiles of AMX (amx.h): what product_unit does for bfloat16 whatever the rows, and for bytes if there are enough.
//
// bfloat16 sums in tiles are rounded in another order than in registers, so even one row goes through tiles: a row's product
// must not depend on how many rows there are. Products of bytes are exact and scaled here in the same order as in product.h, so
// both ways give the same bits, and the faster one is taken.
//
// product_unit asks set_sums_in_tiles first.
#pragma once

#include "amx.h"
#include "product.h"

namespace octavo::OCTAVO_ISA {

// Steps of a panel (32 KiB) that all rows go through before the next, so that they stay in the nearest cache.
constexpr int AMX_STEPS_AT_ONCE = 256;
// From how many rows on tiles are faster than vectors. A tile takes as long for one row as for several.
constexpr int AMX_LEAST_BYTE_ROWS = 4;
constexpr int AMX_LEAST_GROUPED_ROWS = 8;

// sums [rows, PANEL] += rows * panel for `tiles` tiles of `steps` steps, or = if `fresh`. Up to 16 rows, or 32 if LOWER.
template <class Kind, bool LOWER>
OCTAVO_INLINE void add_block_in_tiles(const char* rows, int64_t stride, const char* panel, int steps, int tiles, char* sums,
                                      bool fresh) {
    const int64_t below = AMX_ROWS * stride;
    char* const lower_sums = sums + AMX_ROWS * PITCH;
    if (fresh) {
        amx_zero<0>();
        amx_zero<1>();
        if constexpr (LOWER) amx_zero<2>();
        if constexpr (LOWER) amx_zero<3>();
    } else {
        amx_load<0>(sums, PITCH);
        amx_load<1>(sums + AMX_ROW_BYTES, PITCH);
        if constexpr (LOWER) amx_load<2>(lower_sums, PITCH);
        if constexpr (LOWER) amx_load<3>(lower_sums + AMX_ROW_BYTES, PITCH);
    }
    for (int tile = 0; tile < tiles; tile++) {
        amx_load<4>(rows, stride);
        amx_load<6>(panel, PITCH);
        Kind::template add<0, 4, 6>();
        amx_load<7>(panel + AMX_ROW_BYTES, PITCH);
        Kind::template add<1, 4, 7>();
        if constexpr (LOWER) {
            amx_load<5>(rows + below, stride);
            Kind::template add<2, 5, 6>();
            Kind::template add<3, 5, 7>();
        }
        rows += steps * 4;
        panel += steps * PITCH;
    }
    amx_store<0>(sums, PITCH);
    amx_store<1>(sums + AMX_ROW_BYTES, PITCH);
    if constexpr (LOWER) amx_store<2>(lower_sums, PITCH);
    if constexpr (LOWER) amx_store<3>(lower_sums + AMX_ROW_BYTES, PITCH);
}

template <class Kind>
static void set_product_in_tiles(const Product& p, const char* panel, int first_row, int num_rows, char* sums) {
    static_assert(PANEL * 4 == 2 * AMX_ROW_BYTES);
    const int steps = p.matrix->steps, at_once = num_rows > 2 * AMX_ROWS ? AMX_STEPS_AT_ONCE : steps;
    AmxShape shape;
    for (int step = 0, done; step < steps; step += done) {
        const int left = steps - step, of_tile = left < AMX_STEPS ? left : AMX_STEPS;
        const int tiles = (left < at_once ? left : at_once) / of_tile;
        done = tiles * of_tile;
        for (int first = 0; first < num_rows; first += 2 * AMX_ROWS) {
            const int count = num_rows - first < 2 * AMX_ROWS ? num_rows - first : 2 * AMX_ROWS;
            const int upper = count < AMX_ROWS ? count : AMX_ROWS, lower = count - upper;
            const char* rows = p.rows.data + (first_row + first) * p.rows.stride + step * 4;
            AmxShape::set(&shape, upper, lower, of_tile);
            const char* at = panel + step * PITCH;
            char* to = sums + first * PITCH;
            if (lower > 0)
                add_block_in_tiles<Kind, true>(rows, p.rows.stride, at, of_tile, tiles, to, step == 0);
            else
                add_block_in_tiles<Kind, false>(rows, p.rows.stride, at, of_tile, tiles, to, step == 0);
        }
    }
    amx_release();
}

// ---- grouped formats: a group is one tile of eight steps; its exact sums are scaled and added to the row's in vectors

// Codes of one group as bytes, [8][PANEL] words.
OCTAVO_INLINE void unpack_nibbles(const char* codes, char* bytes) {
    const vi nibble = splat_int(0x0f0f0f0f);
    for (int at = 0; at < 4 * PITCH; at += W * 4) {
        const vi both = load_int(codes + at);
        store_int(bytes + at, both & nibble);
        store_int(bytes + 4 * PITCH + at, reinterpret_cast<vi>(reinterpret_cast<vu>(both) >> 4) & nibble);
    }
}

// dots [rows, PANEL] = the group's products with up to 16 rows, by the upper or the lower tiles.
OCTAVO_INLINE void dot_group(const char* rows, int64_t stride, bool lower, char* dots) {
    if (lower) {
        amx_load<5>(rows, stride);
        amx_zero<2>();
        amx_zero<3>();
        amx_dot_signed_unsigned<2, 5, 6>();
        amx_dot_signed_unsigned<3, 5, 7>();
        amx_store<2>(dots, PITCH);
        amx_store<3>(dots + AMX_ROW_BYTES, PITCH);
    } else {
        amx_load<4>(rows, stride);
        amx_zero<0>();
        amx_zero<1>();
        amx_dot_signed_unsigned<0, 4, 6>();
        amx_dot_signed_unsigned<1, 4, 7>();
        amx_store<0>(dots, PITCH);
        amx_store<1>(dots + AMX_ROW_BYTES, PITCH);
    }
}

// What add_grouped_tile does with the sums of one group, in the same order.
OCTAVO_INLINE void add_group(const Product& p, int group, const uint16_t* scales, int first_row, int num_rows, const char* dots,
                             char* sums) {
    constexpr int NV = PANEL / W;
    const Matrix& m = *p.matrix;
    const int64_t groups = m.inputs / GROUP;
    vf scale[NV], minimum[NV];
    for (int j = 0; j < NV; j++) {
        scale[j] = load_f16(scales + j * W);
        minimum[j] = m.has_minimum ? load_f16(scales + PANEL + j * W) : vf{};
    }
    for (int i = 0; i < num_rows; i++) {
        const int64_t at = (first_row + i) * groups + group;
        const vi start = splat_int(-m.offset * p.rows.sums[at]);
        const vf row_scale = splat(p.rows.scales[at]), total = splat(p.rows.scales[at] * float(p.rows.sums[at]));
        for (int j = 0; j < NV; j++) {
            const int64_t place = i * PITCH + j * W * 4;
            const vf dot = int_to_float(load_int(dots + place) + start);
            vf sum = fma(dot * row_scale, scale[j], load(sums + place));
            if (m.has_minimum) sum = fma(total, minimum[j], sum);
            store(sums + place, sum);
        }
    }
}

template <bool FOUR>
static void set_grouped_in_tiles(const Product& p, const char* panel, int first_row, int num_rows, char* sums) {
    constexpr int STEPS = GROUP / 4;
    alignas(64) char bytes[STEPS * PITCH];
    alignas(64) char dots[2][AMX_ROWS * PITCH];  // the vectors work on one block of rows while tiles work on the next
    const int groups = p.matrix->inputs / GROUP, blocks = (num_rows + AMX_ROWS - 1) / AMX_ROWS;
    const int64_t codes_bytes = (FOUR ? 4 : 8) * PITCH;
    const int64_t group_bytes = codes_bytes + PANEL * 2 * (p.matrix->has_minimum ? 2 : 1);
    memset(sums, 0, size_t(num_rows) * PITCH);
    AmxShape shape;
    AmxShape::set(&shape, AMX_ROWS, num_rows % AMX_ROWS, STEPS);
    for (int g = 0; g < groups; g++) {
        const char* codes = panel + g * group_bytes;
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(codes + codes_bytes);
        if constexpr (FOUR) {
            unpack_nibbles(codes, bytes);
            codes = bytes;
        }
        amx_load<6>(codes, PITCH);
        amx_load<7>(codes + AMX_ROW_BYTES, PITCH);
        for (int b = 0; b <= blocks; b++) {
            const int first = b * AMX_ROWS;
            if (b < blocks) {
                const char* rows = p.rows.data + (first_row + first) * p.rows.stride + g * GROUP;
                dot_group(rows, p.rows.stride, num_rows - first < AMX_ROWS, dots[b % 2]);
            }
            if (b == 0) continue;
            const int before = first - AMX_ROWS, count = num_rows - before < AMX_ROWS ? num_rows - before : AMX_ROWS;
            add_group(p, g, scales, first_row + before, count, dots[(b - 1) % 2], sums + before * PITCH);
        }
    }
    amx_release();
}

// The sums of a unit, as floats, in `sums`; false if they are for product_unit to make.
static bool set_sums_in_tiles(const Product& p, int panel, int first_row, int num_rows, char* sums) {
    const char* data = p.matrix->data + panel * p.matrix->panel_bytes;
    const Format format = p.matrix->format;
    if (format == Format::BFLOAT16) {
        set_product_in_tiles<AmxBFloat16>(p, data, first_row, num_rows, sums);
    } else if (format == Format::INT8 && num_rows >= AMX_LEAST_BYTE_ROWS) {
        set_product_in_tiles<AmxBytes>(p, data, first_row, num_rows, sums);
        scale_bytes(p, panel, first_row, num_rows, sums);
    } else if (format == Format::GROUP8 && num_rows >= AMX_LEAST_GROUPED_ROWS) {
        set_grouped_in_tiles<false>(p, data, first_row, num_rows, sums);
    } else if (format == Format::GROUP4 && num_rows >= AMX_LEAST_GROUPED_ROWS) {
        set_grouped_in_tiles<true>(p, data, first_row, num_rows, sums);
    } else {
        return false;
    }
    return true;
}

}  // namespace octavo::OCTAVO_ISA
