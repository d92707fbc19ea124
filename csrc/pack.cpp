#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace octavo {

namespace {

float from_bf16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_f16(uint16_t h) {
    const uint32_t magnitude = h & 0x7fff;
    uint32_t bits = magnitude << 13;
    float f;
    if (magnitude >= 0x7c00) bits += 0x70000000;
    std::memcpy(&f, &bits, 4);
    if (magnitude < 0x7c00) f *= 0x1p112f;
    return h & 0x8000 ? -f : f;
}

// To the nearest half-precision number that is not beyond the greatest finite one.
uint16_t to_f16(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const float magnitude = std::fabs(x);
    if (!(magnitude < 65504.0f)) return sign | (magnitude != magnitude ? 0x7e00 : 0x7bff);
    if (magnitude < 0x1p-14f) return sign | uint16_t(std::nearbyint(magnitude * 0x1p24f));
    uint32_t bits;
    std::memcpy(&bits, &magnitude, 4);
    bits += 0xfff + ((bits >> 13) & 1);
    return sign | uint16_t((bits - 0x38000000) >> 13);
}

uint16_t half_at(const char* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return h;
}

int block_bytes(Kept kept) { return kept == Kept::Q4_0 ? 18 : kept == Kept::Q4_1 ? 20 : 34; }

void read_block(Kept kept, const char* block, float* out) {
    const float scale = from_f16(half_at(block));
    if (kept == Kept::Q8_0) {
        for (int i = 0; i < GROUP; i++) out[i] = scale * float(static_cast<signed char>(block[2 + i]));
        return;
    }
    const float minimum = kept == Kept::Q4_1 ? from_f16(half_at(block + 2)) : 0.0f;
    const int offset = kept == Kept::Q4_0 ? 8 : 0;
    const unsigned char* codes = reinterpret_cast<const unsigned char*>(block + (kept == Kept::Q4_1 ? 4 : 2));
    for (int i = 0; i < GROUP / 2; i++) {
        out[i] = float((codes[i] & 15) - offset) * scale + minimum;
        out[i + GROUP / 2] = float((codes[i] >> 4) - offset) * scale + minimum;
    }
}

void read_row(const Weights& w, int row, float* out) {
    const char* at = w.data + row * w.row_bytes;
    switch (w.kept) {
        case Kept::FLOAT32: std::memcpy(out, at, size_t(w.inputs) * 4); break;
        case Kept::BFLOAT16:
            for (int i = 0; i < w.inputs; i++) out[i] = from_bf16(half_at(at + 2 * i));
            break;
        case Kept::FLOAT16:
            for (int i = 0; i < w.inputs; i++) out[i] = from_f16(half_at(at + 2 * i));
            break;
        default:
            for (int g = 0; g < w.inputs / GROUP; g++) read_block(w.kept, at + g * block_bytes(w.kept), out + g * GROUP);
    }
}

// The row of the checkpoint that a lane of a panel holds; -1 if it is padding.
int row_of(const Packing& p, int outputs, int panel, int lane) {
    if (!p.interleaved) {
        const int row = panel * PANEL + lane;
        return row < outputs ? row : -1;
    }
    const int half = PANEL / 2, gates = outputs / 2, row = panel * half + lane % half;
    if (row >= gates) return -1;
    return lane < half ? row : gates + row;
}

struct Lane {  // one output's place in a panel
    char* data;
    char* word(int step) const { return data + int64_t(step) * PANEL * 4; }
};

void pack_plain(const Packing& p, const float* row, int inputs, Lane lane) {
    if (p.format == Format::FLOAT32) {
        for (int i = 0; i < inputs; i++) std::memcpy(lane.word(i), row + i, 4);
        return;
    }
    for (int i = 0; i < inputs; i++) {
        const uint16_t x = to_bf16(row[i]);
        std::memcpy(lane.word(i / 2) + i % 2 * 2, &x, 2);
    }
}

void pack_bytes(const float* row, int inputs, Lane lane, float* scale, int32_t* sum) {
    float most = 0;
    for (int i = 0; i < inputs; i++) most = std::max(most, std::fabs(row[i]));
    *scale = most / 127.0f;
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    int32_t total = 0;
    for (int i = 0; i < inputs; i++) {
        const int q = int(std::nearbyint(row[i] * inverse));
        total += q;
        lane.word(i / 4)[i % 4] = char(q);
    }
    *sum = 128 * total;
}

struct GroupPlace {
    char* codes;      // of the group, at this lane
    uint16_t* scale;
    uint16_t* minimum;
};

void put_code(Format format, const GroupPlace& at, int i, int code) {
    if (format == Format::GROUP8) {
        at.codes[i / 4 * PANEL * 4 + i % 4] = char(code);
        return;
    }
    char& byte = at.codes[i % 16 / 4 * PANEL * 4 + i % 4];
    byte = char(i < 16 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4);
}

// Blocks that are kept in the codes of the packed format, as they are.
void take_block(const Packing& p, Kept kept, const char* block, const GroupPlace& at) {
    *at.scale = half_at(block);
    if (kept == Kept::Q8_0) {
        for (int i = 0; i < GROUP; i++) put_code(p.format, at, i, static_cast<signed char>(block[2 + i]) + 128);
        return;
    }
    if (kept == Kept::Q4_1) *at.minimum = half_at(block + 2);
    const unsigned char* codes = reinterpret_cast<const unsigned char*>(block + (kept == Kept::Q4_1 ? 4 : 2));
    for (int i = 0; i < GROUP / 2; i++) {
        put_code(p.format, at, i, codes[i] & 15);
        put_code(p.format, at, i + GROUP / 2, codes[i] >> 4);
    }
}

float squared_error(const float* x, float scale, float minimum, int most) {
    float error = 0;
    for (int i = 0; i < GROUP; i++) {
        const float code = std::clamp(std::nearbyint((x[i] - minimum) / scale), 0.0f, float(most));
        const float d = x[i] - (code * scale + minimum);
        error += d * d;
    }
    return error;
}

// Without a minimum: codes around the offset of 128, the greatest magnitude at 127 from it.
void quantise_around_zero(const Packing& p, const float* x, const GroupPlace& at) {
    float most = 0;
    for (int i = 0; i < GROUP; i++) most = std::max(most, std::fabs(x[i]));
    *at.scale = to_f16(most / 127.0f);
    const float scale = from_f16(*at.scale);
    for (int i = 0; i < GROUP; i++) {
        const float code = scale > 0 ? std::clamp(std::nearbyint(x[i] / scale), -128.0f, 127.0f) : 0.0f;
        put_code(p.format, at, i, int(code) + 128);
    }
}

// Scale and minimum of a group: the range of its values, or a slightly narrower one where that leaves less error in all.
void quantise_group(const Packing& p, const float* x, const GroupPlace& at) {
    const int most = p.format == Format::GROUP4 ? 15 : 255;
    const auto [low, high] = std::minmax_element(x, x + GROUP);
    float best_error = INFINITY, scale = 0, minimum = 0;
    for (int cut = 0; cut < (p.format == Format::GROUP4 ? 6 : 1); cut++) {
        const float keep = 1.0f - 0.03f * float(cut), middle = (*low + *high) / 2;
        const uint16_t m = to_f16(middle + (*low - middle) * keep);
        const uint16_t s = to_f16((*high - *low) * keep / float(most));
        if (from_f16(s) == 0) {
            if (cut == 0) *at.scale = 0, *at.minimum = to_f16(middle), best_error = 0;
            break;
        }
        const float error = squared_error(x, from_f16(s), from_f16(m), most);
        if (error >= best_error) continue;
        best_error = error, scale = from_f16(s), minimum = from_f16(m);
        *at.scale = s, *at.minimum = m;
    }
    for (int i = 0; i < GROUP; i++) {
        const float code = scale > 0 ? std::clamp(std::nearbyint((x[i] - minimum) / scale), 0.0f, float(most)) : 0.0f;
        put_code(p.format, at, i, int(code));
    }
}

bool takes_as_is(const Packing& p, Kept kept) {
    if (p.format == Format::GROUP4) return kept == Kept::Q4_0 ? !p.has_minimum : kept == Kept::Q4_1 && p.has_minimum;
    return p.format == Format::GROUP8 && kept == Kept::Q8_0 && !p.has_minimum;
}

void pack_grouped(const Weights& w, const Packing& p, int row, char* panel, int lane, float* values) {
    const int groups = w.inputs / GROUP;
    const int64_t codes = int64_t(p.format == Format::GROUP4 ? 4 : 8) * PANEL * 4, group_bytes = p.panel_bytes / groups;
    const bool as_is = takes_as_is(p, w.kept);
    if (!as_is) read_row(w, row, values);
    for (int g = 0; g < groups; g++) {
        char* group = panel + g * group_bytes;
        uint16_t* scales = reinterpret_cast<uint16_t*>(group + codes);
        const GroupPlace at{group + lane * 4, scales + lane, scales + PANEL + lane};
        if (as_is)
            take_block(p, w.kept, w.data + row * w.row_bytes + g * block_bytes(w.kept), at);
        else
            p.has_minimum ? quantise_group(p, values + g * GROUP, at) : quantise_around_zero(p, values + g * GROUP, at);
    }
}

}  // namespace

Packing packing_of(Format format, bool has_minimum, bool interleaved, int outputs, int inputs) {
    Packing p{format, has_minimum, interleaved, 0, 0, 0};
    p.panels = interleaved ? (outputs / 2 + PANEL / 2 - 1) / (PANEL / 2) : (outputs + PANEL - 1) / PANEL;
    const int in_word = format == Format::FLOAT32 ? 1 : format == Format::BFLOAT16 ? 2 : 4;
    p.steps = (inputs + in_word - 1) / in_word;
    p.panel_bytes = int64_t(p.steps) * PANEL * 4;
    if (format == Format::GROUP8 || format == Format::GROUP4) {
        const int64_t codes = int64_t(format == Format::GROUP4 ? 4 : 8) * PANEL * 4;
        p.panel_bytes = inputs / GROUP * (codes + PANEL * 2 * (has_minimum ? 2 : 1));
    }
    return p;
}

void pack(Machine& machine, const Weights& w, const Packing& p, char* data, float* scales, int32_t* sums) {
    machine.team.run([&](int) {
        std::vector<float> values(size_t(w.inputs) + GROUP);
        machine.team.share(p.panels, [&](int panel) {
            char* at = data + panel * p.panel_bytes;
            std::memset(at, 0, size_t(p.panel_bytes));
            for (int lane = 0; lane < PANEL; lane++) {
                const int row = row_of(p, w.outputs, panel, lane), output = panel * PANEL + lane;
                if (p.format == Format::INT8) scales[output] = 0, sums[output] = 0;
                if (row < 0) continue;
                if (p.format == Format::GROUP8 || p.format == Format::GROUP4) {
                    pack_grouped(w, p, row, at, lane, values.data());
                    continue;
                }
                read_row(w, row, values.data());
                if (p.format == Format::INT8)
                    pack_bytes(values.data(), w.inputs, {at + lane * 4}, scales + output, sums + output);
                else
                    pack_plain(p, values.data(), w.inputs, {at + lane * 4});
            }
        });
    });
}

void convert(Machine& machine, const Weights& w, Number number, char* out) {
    const int64_t row_bytes = int64_t(w.inputs) * (number == Number::BFLOAT16 ? 2 : 4);
    machine.team.run([&](int) {
        std::vector<float> values(size_t(w.inputs) + GROUP);
        machine.rows(w.outputs, [&](int first, int end) {
            for (int row = first; row < end; row++) {
                read_row(w, row, values.data());
                char* to = out + row * row_bytes;
                if (number == Number::FLOAT32) {
                    std::memcpy(to, values.data(), size_t(row_bytes));
                    continue;
                }
                for (int i = 0; i < w.inputs; i++) {
                    const uint16_t x = to_bf16(values[i]);
                    std::memcpy(to + 2 * i, &x, 2);
                }
            }
        });
    });
}

}  // namespace octavo
