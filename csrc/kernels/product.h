// Products of rows with packed matrices: one unit of work is one panel (PANEL outputs) and a range of rows.
//
// A unit goes through the inputs in pieces that fit the nearest cache, and through the rows in tiles of registers, adding
// to sums kept beside it. So every output is one sum in the order of inputs, whatever the rows around it.
#pragma once

#include "../types.h"
#include "tile.h"

namespace octavo::OCTAVO_ISA {

constexpr int STEPS_AT_ONCE = 1024;
constexpr int64_t PITCH = PANEL * 4;

// Calls f(first, count) for tiles of rows of nearly equal height, at most `most` rows each.
template <class F>
OCTAVO_INLINE void for_row_tiles(int rows, int most, F&& f) {
    const int tiles = (rows + most - 1) / most;
    int first = 0;
    for (int t = 0; t < tiles; t++) {
        const int count = rows / tiles + (t < rows % tiles);
        f(first, count);
        first += count;
    }
}

// sums [rows, PANEL] += rows * panel for `steps` steps. `rows` and `panel` point at the first step.
template <class Kind, int MR>
static void add_tile(const char* rows, int64_t stride, const char* panel, int steps, void* sums_at) {
    constexpr int NV = Kind::NV;
    typedef typename Kind::Sum Sum;
    Sum* kept = static_cast<Sum*>(sums_at);
    for (int pass = 0; pass < PANEL / (NV * W); pass++) {
        Sum sums[MR][NV];
        const char* at[NV];
        for (int j = 0; j < NV; j++) at[j] = panel + (pass * NV + j) * W * 4;
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) sums[i][j] = kept[i * (PANEL / W) + pass * NV + j];
        multiply<Kind, MR, NV>(sums, reinterpret_cast<const uint32_t*>(rows), stride / 4, at, PITCH, steps);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) kept[i * (PANEL / W) + pass * NV + j] = sums[i][j];
    }
}

template <class Kind>
static void add_product(const Product& p, const char* panel, int first_row, int num_rows, char* sums) {
    memset(sums, 0, size_t(num_rows) * PANEL * 4);
    for (int step = 0; step < p.matrix->steps; step += STEPS_AT_ONCE) {
        const int steps = p.matrix->steps - step < STEPS_AT_ONCE ? p.matrix->steps - step : STEPS_AT_ONCE;
        for_row_tiles(num_rows, Kind::MR, [&](int first, int count) {
            const char* rows = p.rows.data + (first_row + first) * p.rows.stride + step * 4;
            with_rows<Kind::MR>(count, [&]<int MR>() {
                add_tile<Kind, MR>(rows, p.rows.stride, panel + step * PITCH, steps, sums + first * PANEL * 4);
            });
        });
    }
}

// ---- grouped formats: codes of 4 or 8 bits with a scale per group; the rows are signed bytes with a scale per group

#if defined(__AVX512VNNI__)
constexpr int GROUPED_ROWS = 6;
#elif defined(__AVX512F__)
constexpr int GROUPED_ROWS = 4;
#else
constexpr int GROUPED_ROWS = 2;
#endif

template <bool FOUR, int MR, int NV>
OCTAVO_INLINE void group_dots(vi (&dots)[MR][NV], const char* codes, const char* rows, int64_t stride) {
    const vi nibble = splat_int(0x0f0f0f0f);
#pragma GCC unroll 8
    for (int r = 0; r < (FOUR ? 4 : 8); r++) {
        vi low[NV], high[NV];
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) {
            low[j] = load_int(codes + r * PITCH + j * W * 4);
            if constexpr (FOUR) {
                high[j] = reinterpret_cast<vi>(reinterpret_cast<vu>(low[j]) >> 4) & nibble;
                low[j] &= nibble;
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            const int32_t* words = reinterpret_cast<const int32_t*>(rows + i * stride);
            const vi row = splat_int(words[r]);
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) dots[i][j] = dot_bytes(dots[i][j], low[j], row);
            if constexpr (FOUR) {
                const vi other = splat_int(words[r + 4]);
#pragma GCC unroll 8
                for (int j = 0; j < NV; j++) dots[i][j] = dot_bytes(dots[i][j], high[j], other);
            }
        }
    }
}

template <bool FOUR, int MR>
static void add_grouped_tile(const Product& p, const char* panel, int first_row, vf* kept) {
    constexpr int NV = W >= 8 ? 2 : 1;
    const Matrix& m = *p.matrix;
    const int groups = m.inputs / GROUP;
    const int64_t codes_bytes = (FOUR ? 4 : 8) * PITCH;
    const int64_t group_bytes = codes_bytes + PANEL * 2 * (m.has_minimum ? 2 : 1);
    for (int pass = 0; pass < PANEL / (NV * W); pass++) {
        vf sums[MR][NV];
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) sums[i][j] = vf{};
        for (int g = 0; g < groups; g++) {
            const char* group = panel + g * group_bytes;
            const uint16_t* scales = reinterpret_cast<const uint16_t*>(group + codes_bytes) + pass * NV * W;
            vi dots[MR][NV];
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) {
                const vi start = splat_int(-m.offset * p.rows.sums[int64_t(first_row + i) * groups + g]);
#pragma GCC unroll 8
                for (int j = 0; j < NV; j++) dots[i][j] = start;
            }
            const char* rows = p.rows.data + first_row * p.rows.stride + g * GROUP;
            group_dots<FOUR, MR, NV>(dots, group + pass * NV * W * 4, rows, p.rows.stride);
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) {
                const vf scale = splat(p.rows.scales[int64_t(first_row + i) * groups + g]);
#pragma GCC unroll 8
                for (int j = 0; j < NV; j++)
                    sums[i][j] = fma(int_to_float(dots[i][j]) * scale, load_f16(scales + j * W), sums[i][j]);
            }
            if (m.has_minimum) {
#pragma GCC unroll 8
                for (int i = 0; i < MR; i++) {
                    const int64_t at = int64_t(first_row + i) * groups + g;
                    const vf total = splat(p.rows.scales[at] * float(p.rows.sums[at]));
#pragma GCC unroll 8
                    for (int j = 0; j < NV; j++)
                        sums[i][j] = fma(total, load_f16(scales + PANEL + j * W), sums[i][j]);
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) kept[i * (PANEL / W) + pass * NV + j] = sums[i][j];
    }
}

template <bool FOUR>
static void set_grouped(const Product& p, const char* panel, int first_row, int num_rows, char* sums) {
    for_row_tiles(num_rows, GROUPED_ROWS, [&](int first, int count) {
        vf* kept = reinterpret_cast<vf*>(sums + first * PANEL * 4);
        with_rows<GROUPED_ROWS>(
            count, [&]<int MR>() { add_grouped_tile<FOUR, MR>(p, panel, first_row + first, kept); });
    });
}

// Integer sums to floats, in place.
static void scale_bytes(const Product& p, int panel, int first_row, int num_rows, char* sums) {
    for (int i = 0; i < num_rows; i++) {
        const vf row_scale = splat(p.rows.scales[first_row + i]);
        for (int j = 0; j < PANEL; j += W) {
            char* at = sums + (i * PANEL + j) * 4;
            const vi exact = load_int(at) - load_int(p.matrix->sums + panel * PANEL + j);
            store(at, int_to_float(exact) * (row_scale * load(p.matrix->scales + panel * PANEL + j)));
        }
    }
}

// ---- what becomes of a panel's sums

static void finish_rows(const Product& p, int panel, int first_row, int num_rows, const float* sums) {
    const int first = panel * PANEL;
    const int columns = p.matrix->outputs - first < PANEL ? p.matrix->outputs - first : PANEL;
    const float* bias = p.matrix->bias ? p.matrix->bias + first : nullptr;
    for (int i = 0; i < num_rows; i++, sums += PANEL) {
        float* out = reinterpret_cast<float*>(p.out + (first_row + i) * p.out_stride) + first;
        if (columns == PANEL) {
            for (int j = 0; j < PANEL; j += W) {
                vf y = load(sums + j);
                if (bias) y += load(bias + j);
                if (p.finish == Finish::ADD) y += load(out + j);
                store(out + j, y);
            }
        } else {
            for (int j = 0; j < columns; j++) {
                const float y = sums[j] + (bias ? bias[j] : 0.0f);
                out[j] = p.finish == Finish::ADD ? out[j] + y : y;
            }
        }
    }
}

static void finish_silu(const Product& p, int panel, int first_row, int num_rows, const float* sums) {
    constexpr int HALF = PANEL / 2;
    const float* bias = p.matrix->bias ? p.matrix->bias + panel * PANEL : nullptr;
    for (int i = 0; i < num_rows; i++, sums += PANEL) {
        char* row = p.out + (first_row + i) * p.out_stride;
        for (int j = 0; j < HALF; j += W) {
            vf gate = load(sums + j), up = load(sums + HALF + j);
            if (bias) gate += load(bias + j), up += load(bias + HALF + j);
            const vf y = silu(gate) * up;
            if (p.number == Number::BFLOAT16)
                store_bf16(reinterpret_cast<uint16_t*>(row) + panel * HALF + j, y);
            else
                store(reinterpret_cast<float*>(row) + panel * HALF + j, y);
        }
    }
}

// A strictly greater product takes a lane's place. A thread meets panels in ascending order, so the lower id stays.
static void finish_best(const Product& p, int panel, int first_row, int num_rows, const float* sums, const Best& best) {
    const int columns = p.matrix->outputs - panel * PANEL;
    for (int i = 0; i < num_rows; i++, sums += PANEL) {
        for (int j = 0; j < PANEL; j += W) {
            const int64_t at = int64_t(first_row + i) * PANEL + j;
            vi lane{};
            for (int l = 0; l < W; l++) lane[l] = j + l;
            const vf y = load(sums + j), kept = load(best.values + at);
            const vi inside = reinterpret_cast<vi>(lane < splat_int(columns));
            const vi greater = reinterpret_cast<vi>(y > kept) & inside;
            const vi nan = reinterpret_cast<vi>(y != y) & inside;
            store(best.values + at, bits_to_float((float_to_bits(y) & greater) | (float_to_bits(kept) & ~greater)));
            store_int(best.panels + at, (splat_int(panel) & greater) | (load_int(best.panels + at) & ~greater));
            store_int(best.nans + at, load_int(best.nans + at) | nan);
        }
    }
}

// Sets a unit's sums if the instruction set has tiles and they are for it.
#if defined(OCTAVO_AMX)
static bool set_sums_in_tiles(const Product& p, int panel, int first_row, int num_rows, char* sums);  // amx_product.h
#else
OCTAVO_INLINE bool set_sums_in_tiles(const Product&, int, int, int, char*) { return false; }
#endif

// One unit. scratch: MOST_UNIT_ROWS * PANEL floats, aligned to 64 bytes. best: of this thread, if p.finish is BEST.
static void product_unit(const Product& p, int panel, int first_row, int num_rows, char* scratch, const Best& best) {
    const char* data = p.matrix->data + panel * p.matrix->panel_bytes;
    if (!set_sums_in_tiles(p, panel, first_row, num_rows, scratch)) {
        switch (p.matrix->format) {
            case Format::FLOAT32: add_product<Float32>(p, data, first_row, num_rows, scratch); break;
            case Format::BFLOAT16: add_product<BFloat16>(p, data, first_row, num_rows, scratch); break;
            case Format::INT8:
                add_product<Bytes>(p, data, first_row, num_rows, scratch);
                scale_bytes(p, panel, first_row, num_rows, scratch);
                break;
            case Format::GROUP8: set_grouped<false>(p, data, first_row, num_rows, scratch); break;
            case Format::GROUP4: set_grouped<true>(p, data, first_row, num_rows, scratch); break;
        }
    }
    const float* sums = reinterpret_cast<const float*>(scratch);
    switch (p.finish) {
        case Finish::STORE:
        case Finish::ADD: finish_rows(p, panel, first_row, num_rows, sums); break;
        case Finish::SILU: finish_silu(p, panel, first_row, num_rows, sums); break;
        case Finish::BEST: finish_best(p, panel, first_row, num_rows, sums, best); break;
    }
}

}  // namespace octavo::OCTAVO_ISA
