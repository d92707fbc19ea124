#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace octavo {

namespace {

// Up to so many rows every thread prepares inputs for itself.
constexpr int FEW_ROWS = 4;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

}  // namespace

Decoder::Decoder(Machine& machine, const DecoderShape& shape, std::vector<Layer> layers, const char* embedding,
                 const float* norm, const Matrix& head, const float* frequencies)
    : machine_(machine),
      shape_(shape),
      layers_(std::move(layers)),
      embedding_(embedding),
      norm_(norm),
      head_(head),
      frequencies_(frequencies, frequencies + shape.head_size / 2) {
    const int64_t T = shape.max_tokens, D = shape.head_size, H = shape.num_heads, KH = shape.num_kv_heads;
    const int64_t inner = round_up(shape.intermediate_size, 64), hidden = round_up(shape.hidden_size, 64);
    machine_.reserve_scratch(shape.head_size, 2 * std::max({inner, hidden, H * D}));
    qkv_floats_ = round_up((H + 2 * KH) * D, PANEL);
    attended_stride_ = round_up(H * D * number_bytes(), 64);
    inner_stride_ = inner * number_bytes();
    residual_ = Buffer(T * shape.hidden_size * 4);
    qkv_ = Buffer(T * qkv_floats_ * 4);
    queries_ = Buffer(T * H * D * number_bytes());
    attended_ = Buffer(T * attended_stride_);
    inner_ = Buffer(T * inner_stride_);
    cosines_ = Buffer(T * D / 2 * 4);
    sines_ = Buffer(T * D / 2 * 4);
    const int64_t widest = std::max({inner, hidden, round_up(H * D, 64)});
    ready_ = ready_for(widest, T);
    for (int thread = 0; thread < machine_.team.size(); thread++) own_.push_back(ready_for(widest, FEW_ROWS));
    token_ids.reserve(T);
    positions_.reserve(T);
    slots_.reserve(T);
}

Rows Decoder::Ready::rows() const {
    return {data.data(), stride, reinterpret_cast<const float*>(scales.data()), reinterpret_cast<const int32_t*>(sums.data())};
}

Decoder::Ready Decoder::ready_for(int64_t most_inputs, int64_t most_rows) const {
    Ready ready;
    ready.data = Buffer(most_rows * most_inputs * number_bytes());  // quantised inputs take one byte each
    ready.scales = Buffer(most_rows * (most_inputs / GROUP + 1) * 4);
    ready.sums = Buffer(most_rows * (most_inputs / GROUP + 1) * 4);
    return ready;
}

int64_t Decoder::stride_for(const Matrix& m) const { return round_up(int64_t(m.steps) * 4, 64); }

void Decoder::set_positions(const Pool& pool) {
    positions_.clear();
    slots_.clear();
    for (int i = 0; i < items.count(); i++) {
        const int32_t* table = items.blocks.data() + items.table_starts[i];
        for (int row = items.row_starts[i]; row < items.row_starts[i + 1]; row++) {
            const int position = items.starts[i] + row - items.row_starts[i];
            positions_.push_back(position);
            slots_.push_back(int64_t(table[position / pool.block_size]) * pool.block_size + position % pool.block_size);
        }
    }
}

void Decoder::embed(int first, int end) {
    const int64_t row_bytes = int64_t(shape_.hidden_size) * number_bytes();
    const int half = shape_.head_size / 2;
    for (int row = first; row < end; row++) {
        machine_.kernels.widen_row(embedding_ + token_ids[row] * row_bytes, shape_.hidden_size, shape_.number, residual(row));
        machine_.kernels.angles_row(positions_[row], frequencies_.data(), half,
                                    reinterpret_cast<float*>(cosines_.data()) + int64_t(row) * half,
                                    reinterpret_cast<float*>(sines_.data()) + int64_t(row) * half);
    }
}

void Decoder::forward(const Pool& pool) {
    set_positions(pool);
    plan_.make(items, pool.block_size, shape_.num_heads / shape_.num_kv_heads, pool.share);
    partials_.grow(plan_.num_partials() * shape_.num_heads * (shape_.head_size + 2) * 4);
    machine_.team.run([&](int thread) {
        machine_.rows(num_tokens(), [&](int first, int end) { embed(first, end); });
        for (size_t i = 0; i < layers_.size(); i++) layer_phases(layers_[i], int(i), pool, thread);
    });
}

void Decoder::layer_phases(const Layer& layer, int index, const Pool& pool, int thread) {
    const Cache cache{pool.data + index * pool.layer_bytes,
                      pool.block_bytes,
                      pool.layer_bytes / shape_.num_kv_heads,
                      pool.block_size,
                      shape_.head_size,
                      shape_.number,
                      pool.quantised};
    const float* qkv = reinterpret_cast<const float*>(qkv_.data());
    Rows rows = normed(layer.input_norm, layer.qkv, nullptr, num_tokens(), thread);
    machine_.product({&layer.qkv, rows, num_tokens(), Finish::STORE, shape_.number, qkv_.data(), qkv_floats_ * 4}, thread);
    const Rotation rotation{cache,
                            shape_.num_heads,
                            shape_.num_kv_heads,
                            layer.q_norm,
                            layer.k_norm,
                            shape_.norm_epsilon,
                            reinterpret_cast<const float*>(cosines_.data()),
                            reinterpret_cast<const float*>(sines_.data()),
                            slots_.data(),
                            qkv,
                            qkv_floats_,
                            queries_.data()};
    float* scratch = reinterpret_cast<float*>(machine_.scratch[thread].data());
    machine_.rows(num_tokens(), [&](int first, int end) {
        for (int row = first; row < end; row++) machine_.kernels.rotate_row(rotation, row, scratch);
    });
    const Attention attention{cache,
                              shape_.num_heads,
                              shape_.num_kv_heads,
                              shape_.attention_scale,
                              layer.window,
                              shape_.soft_cap,
                              positions_.data(),
                              queries_.data(),
                              attended_.data(),
                              attended_stride_,
                              reinterpret_cast<float*>(partials_.data()),
                              plan_.partial_of().data()};
    machine_.attention(attention, plan_.tasks(), plan_.folded_tokens(), thread);
    add_product_of(layer.output, attended_, attended_stride_, thread);
    rows = normed(layer.mlp_norm, layer.gate_up, nullptr, num_tokens(), thread);
    machine_.product({&layer.gate_up, rows, num_tokens(), Finish::SILU, shape_.number, inner_.data(), inner_stride_}, thread);
    add_product_of(layer.down, inner_, inner_stride_, thread);
}

// `count` rows as `m` wants its inputs. row(i, floats): writes row i.
template <class Row>
Rows Decoder::prepare(const Matrix& m, int count, int thread, Row&& row) {
    const Kernels& k = machine_.kernels;
    const bool few = count <= FEW_ROWS;
    const Ready& into = few ? own_[thread] : ready_;
    Rows rows = into.rows();
    rows.stride = stride_for(m);
    const int64_t groups = m.format == Format::INT8 ? 1 : m.inputs / GROUP;
    float* scratch = reinterpret_cast<float*>(machine_.scratch[thread].data());
    auto prepare_rows = [&](int first, int end) {
        for (int i = first; i < end; i++) {
            row(i, scratch);
            k.prepare_row(scratch, m.inputs, m.format, into.data.data() + i * rows.stride,
                          reinterpret_cast<float*>(into.scales.data()) + i * groups,
                          reinterpret_cast<int32_t*>(into.sums.data()) + i * groups);
        }
    };
    if (few)
        prepare_rows(0, count);
    else
        machine_.rows(count, prepare_rows);
    return rows;
}

// The residual of `count` rows (the first, or those that `rows` names), normed for `m`.
Rows Decoder::normed(const float* weight, const Matrix& m, const int32_t* rows, int count, int thread) {
    return prepare(m, count, thread, [&](int i, float* out) {
        const Norm norm{weight, shape_.norm_epsilon};
        machine_.kernels.norm_row(residual(rows ? rows[i] : i), shape_.hidden_size, norm, out);
    });
}

// residual += m * numbers, which are turned into what m wants first unless it takes them as they are.
void Decoder::add_product_of(const Matrix& m, const Buffer& numbers, int64_t stride, int thread) {
    Rows rows{numbers.data(), stride, nullptr, nullptr};
    if (int(m.format) != int(shape_.number)) {
        rows = prepare(m, num_tokens(), thread, [&](int i, float* out) {
            machine_.kernels.widen_row(numbers.data() + i * stride, m.inputs, shape_.number, out);
        });
    }
    const int64_t out_stride = int64_t(shape_.hidden_size) * 4;
    machine_.product({&m, rows, num_tokens(), Finish::ADD, shape_.number, residual_.data(), out_stride}, thread);
}

void Decoder::head_phases(const std::vector<int32_t>& rows, Finish finish, char* out, const Best* best, int thread) {
    const Rows inputs = normed(norm_, head_, rows.data(), int(rows.size()), thread);
    const int64_t out_stride = int64_t(shape_.vocab_size) * 4;
    machine_.product({&head_, inputs, int(rows.size()), finish, shape_.number, out, out_stride}, thread, best);
}

void Decoder::logits(const std::vector<int32_t>& rows, float* out) {
    machine_.team.run(
        [&](int thread) { head_phases(rows, Finish::STORE, reinterpret_cast<char*>(out), nullptr, thread); });
}

void Decoder::best(const std::vector<int32_t>& rows, float* values, int32_t* ids) {
    const int64_t count = int64_t(rows.size()) * PANEL;
    const int threads = machine_.team.size();
    best_.grow(count * 12 * threads);
    std::vector<Best> kept;
    for (int t = 0; t < threads; t++) {
        char* at = best_.data() + count * 12 * t;
        kept.push_back({reinterpret_cast<float*>(at), reinterpret_cast<int32_t*>(at + count * 4),
                        reinterpret_cast<int32_t*>(at + count * 8)});
        std::fill_n(kept[t].values, count, -std::numeric_limits<float>::infinity());
        std::fill_n(kept[t].panels, count, 0);
        std::fill_n(kept[t].nans, count, 0);
    }
    machine_.team.run([&](int thread) { head_phases(rows, Finish::BEST, nullptr, kept.data(), thread); });
    for (size_t row = 0; row < rows.size(); row++) {
        float most = -std::numeric_limits<float>::infinity();
        int32_t id = 0;
        bool nan = false;
        for (const Best& b : kept) {
            for (int lane = 0; lane < PANEL; lane++) {
                const int64_t at = int64_t(row) * PANEL + lane;
                const int32_t candidate = b.panels[at] * PANEL + lane;
                nan |= b.nans[at] != 0;
                if (b.values[at] > most || (b.values[at] == most && candidate < id)) most = b.values[at], id = candidate;
            }
        }
        values[row] = nan ? std::numeric_limits<float>::quiet_NaN() : most;
        ids[row] = id;
    }
}

}  // namespace octavo
