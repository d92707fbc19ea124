// A decoder of the llama family as one call per step: from token ids to the residual of every new token, then to logits, or
// to the greatest of them, for the rows that are asked for.
//
//     embed -> layers x ( norm, qkv, rotate and write kv, attend, output +, norm, gate and up, down + ) -> norm -> head
//
// The residual is float32 throughout. Every buffer is made once, for the longest step. Each arrow is a phase of one job that
// all threads run together, so a step wakes them once.
#pragma once

#include <optional>
#include <vector>

#include "attention_plan.h"
#include "machine.h"

namespace octavo {

struct DecoderShape {
    int hidden_size, intermediate_size, num_heads, num_kv_heads, head_size, vocab_size;
    float norm_epsilon, attention_scale, soft_cap;  // soft_cap 0: none
    Number number;       // of activations
    int max_tokens;      // of a step
};

struct Layer {
    const float *input_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
    Matrix qkv, output, gate_up, down;
    int window;  // 0: none
};

// One pool of blocks for all layers: layer l of block b lies at data + b * block_bytes + l * layer_bytes.
struct Pool {
    char* data;
    int64_t block_bytes, layer_bytes;
    int32_t block_size;
    int32_t quantised;
    int32_t share;  // find shared prefixes
};

class Decoder {
public:
    Decoder(Machine& machine, const DecoderShape& shape, std::vector<Layer> layers, const char* embedding, const float* norm,
            const Matrix& head, const float* frequencies);

    // The step's sequences and tokens; filled in by the caller before each forward().
    StepItems items;
    std::vector<int32_t> token_ids;

    // Computes all layers for the tokens, writes their keys and values into the pool.
    void forward(const Pool& pool);
    // logits [rows, vocab] float32, for rows of the last forward().
    void logits(const std::vector<int32_t>& rows, float* out);
    // The greatest logit of each row and the lowest id that has it; a row with what is not a number gives NaN.
    void best(const std::vector<int32_t>& rows, float* values, int32_t* ids);

    const DecoderShape& shape() const { return shape_; }
    const AttentionPlan& plan() const { return plan_; }
    int num_tokens() const { return int(token_ids.size()); }

private:
    // Rows made ready for a matrix, in memory of their own. Of few rows each thread makes its own, which is sooner done than
    // waiting for the others.
    struct Ready {
        Buffer data, scales, sums;
        int64_t stride = 0;
        Rows rows() const;
    };
    Ready ready_for(int64_t most_inputs, int64_t most_rows) const;
    int64_t stride_for(const Matrix& m) const;

    void set_positions(const Pool& pool);
    void embed(int first, int end);
    void layer_phases(const Layer& layer, int index, const Pool& pool, int thread);
    template <class Row>
    Rows prepare(const Matrix& m, int count, int thread, Row&& row);
    Rows normed(const float* weight, const Matrix& m, const int32_t* rows, int count, int thread);
    void add_product_of(const Matrix& m, const Buffer& numbers, int64_t stride, int thread);
    void head_phases(const std::vector<int32_t>& rows, Finish finish, char* out, const Best* best, int thread);
    float* residual(int row) const { return reinterpret_cast<float*>(residual_.data()) + int64_t(row) * shape_.hidden_size; }
    int number_bytes() const { return shape_.number == Number::BFLOAT16 ? 2 : 4; }

    Machine& machine_;
    const DecoderShape shape_;
    const std::vector<Layer> layers_;
    const char* embedding_;
    const float* norm_;
    const Matrix head_;
    const std::vector<float> frequencies_;

    AttentionPlan plan_;
    std::vector<int32_t> positions_;
    std::vector<int64_t> slots_;
    Buffer residual_, qkv_, queries_, attended_, inner_, cosines_, sines_, partials_, best_;
    int64_t qkv_floats_, attended_stride_, inner_stride_;
    Ready ready_;
    std::vector<Ready> own_;  // of each thread, for few rows
};

}  // namespace octavo
