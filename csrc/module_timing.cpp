// Kernels and the machine's limits, timed: what `octavo bench kernels` measures with. Nothing here serves requests.
//
// A kernel is run as the decoder runs it, in phases of one job of all threads, on inputs that are ready; what is timed is a
// round of such phases. Between rounds memory itself is timed, reading or copying: on a machine that is shared with others its
// rate may double or halve within a second. Both come back for each round.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>

#include "module.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace nb = nanobind;

namespace octavo {

namespace {

// Seconds of each round, and the rate of memory beside it in bytes per second.
using Rounds = std::pair<std::vector<double>, std::vector<double>>;

template <class Work>
double time_of(Work&& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// So many rounds as fit into `seconds`, at least three, after one that is not counted. beside(round): a rate.
template <class Round, class Beside>
Rounds time_rounds(double seconds, Round&& round, Beside&& beside) {
    Rounds each;
    round(0);
    double past = 0;
    for (int i = 1; i <= 3 || past < seconds; i++) {
        past += time_of([&] { each.second.push_back(beside(i)); });
        each.first.push_back(time_of([&] { round(i); }));
        past += each.first.back();
    }
    return each;
}

// ---- limits

// Operations per second on registers, of all threads together, in each round.
std::vector<double> peak_rates(Machine& machine, int format, double seconds) {
    constexpr int64_t TIMES = 200'000;  // about a millisecond
    std::vector<int64_t> operations(machine.team.size());
    nb::gil_scoped_release release;
    auto round = [&](int) {
        machine.team.run([&](int thread) { operations[thread] = machine.kernels.peak(Format(format), TIMES); });
    };
    std::vector<double> rates = time_rounds(seconds, round, [](int) { return 0.0; }).first;
    for (double& rate : rates) rate = double(operations[0]) * machine.team.size() / rate;
    return rates;
}

// Around the caches: a cache would first read what is then written over.
void copy_piece(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
    for (int64_t i = 0; i < bytes; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_load_si128(reinterpret_cast<const __m128i*>(from + i)));
    _mm_sfence();
#else
    std::memcpy(to, from, size_t(bytes));
#endif
}

// Memory to be read and copied for comparison. A round goes through a part of it, the next round through the next part; so a
// round is short, and some are not interrupted on a machine that does other things too.
struct Stream {
    static constexpr int64_t PIECE = 1 << 20;
    static constexpr int PIECES = 16;

    explicit Stream(int64_t bytes) : pieces(bytes / PIECE), from(pieces * PIECE), to(pieces * PIECE) {}

    const int64_t pieces;
    const Buffer from, to;

    // Bytes per second of one round, all threads together.
    double read(Machine& machine, int round) const {
        return rate(machine, round, 1, [&](int64_t at) { machine.kernels.read_all(from.data() + at, PIECE); });
    }
    double copy(Machine& machine, int round) const {
        return rate(machine, round, 2, [&](int64_t at) { copy_piece(to.data() + at, from.data() + at, PIECE); });
    }

private:
    template <class F>
    double rate(Machine& machine, int round, int times, F&& f) const {
        const double seconds = time_of([&] {
            machine.team.run([&](int) {
                machine.team.share(PIECES, [&](int i) { f((int64_t(round) * PIECES + i) % pieces * PIECE); });
            });
        });
        return double(times * PIECES * PIECE) / seconds;
    }
};

std::unique_ptr<Stream> make_stream(int64_t bytes) {
    check(bytes >= Stream::PIECE, "too few bytes");
    return std::make_unique<Stream>(bytes);
}

// ---- kernels

// Rows made ready for a matrix.
struct Prepared {
    int64_t stride, of_row;
    Buffer data, scales, sums;

    Prepared(const Matrix& m, int64_t rows)
        : stride((int64_t(m.steps) * 4 + 63) / 64 * 64),
          of_row(m.format == Format::INT8 ? 1 : m.inputs / GROUP),
          data(rows * stride),
          scales(rows * (of_row + 1) * 4),
          sums(rows * (of_row + 1) * 4) {}

    float* scales_of(int64_t row) const { return reinterpret_cast<float*>(scales.data()) + row * of_row; }
    int32_t* sums_of(int64_t row) const { return reinterpret_cast<int32_t*>(sums.data()) + row * of_row; }
    Rows rows() const { return {data.data(), stride, scales_of(0), sums_of(0)}; }
};

// Products of x [M, K] with matrices of one shape and format in turn, `per_round` of them each round: give enough of them,
// and none is in a cache when its turn comes. number: what SILU writes.
Rounds time_products(Machine& machine, const Stream& stream, const nb::list& list, const ConstFloats2& x, int number,
                     int per_round, double seconds) {
    std::vector<const PackedMatrix*> matrices;
    for (nb::handle entry : list) matrices.push_back(nb::cast<const PackedMatrix*>(entry));
    check(!matrices.empty() && per_round > 0 && x.shape(0) > 0, "nothing to multiply");
    const Matrix& first = matrices[0]->matrix;
    for (const PackedMatrix* m : matrices)
        check(m->matrix.format == first.format && m->matrix.inputs == first.inputs && m->matrix.outputs == first.outputs &&
                  m->interleaved == matrices[0]->interleaved,
              "matrices of different shapes or formats");
    check(int(x.shape(1)) == first.inputs, "x does not fit the matrices");
    const int rows = int(x.shape(0));
    const Prepared ready(first, rows);
    for (int i = 0; i < rows; i++)
        machine.kernels.prepare_row(x.data() + int64_t(i) * first.inputs, first.inputs, first.format,
                                    ready.data.data() + i * ready.stride, ready.scales_of(i), ready.sums_of(i));
    const Buffer out(int64_t(rows) * first.panels * PANEL * 4);
    const Finish finish = matrices[0]->interleaved ? Finish::SILU : Finish::STORE;
    nb::gil_scoped_release release;
    auto products = [&](int round) {
        machine.team.run([&](int thread) {
            for (int i = 0; i < per_round; i++) {
                const Matrix& m = matrices[(size_t(round) * per_round + i) % matrices.size()]->matrix;
                machine.product({&m, ready.rows(), rows, finish, Number(number), out.data(), int64_t(m.panels) * PANEL * 4}, thread);
            }
        });
    };
    return time_rounds(seconds, products, [&](int round) { return stream.read(machine, round); });
}

// Attention of queries [T, H, D] over the layers of a pool in turn, one each round.
Rounds time_attention(Machine& machine, const Stream& stream, const BlockPool& pool, int num_kv_heads, int number,
                      const nb::list& items, const ConstFloats3& queries, double seconds) {
    const int64_t T = queries.shape(0), H = queries.shape(1), D = queries.shape(2), of_row = H * D;
    StepItems step;
    std::vector<int32_t> token_ids, positions;
    set_items(step, &token_ids, items, pool.num_blocks, pool.pool.block_size);
    check(int64_t(token_ids.size()) == T && H % num_kv_heads == 0, "items and queries do not belong together");
    for (int i = 0; i < step.count(); i++)
        for (int row = step.row_starts[i]; row < step.row_starts[i + 1]; row++)
            positions.push_back(step.starts[i] + row - step.row_starts[i]);
    AttentionPlan plan;
    plan.make(step, pool.pool.block_size, int(H) / num_kv_heads, pool.pool.share);
    machine.reserve_scratch(int(D), of_row);
    const int64_t bytes = Number(number) == Number::BFLOAT16 ? 2 : 4;
    const Format as = bytes == 2 ? Format::BFLOAT16 : Format::FLOAT32;
    const Buffer ready(T * of_row * bytes), out(T * of_row * bytes), partials((plan.num_partials() + 1) * H * (D + 2) * 4);
    for (int64_t t = 0; t < T; t++)
        machine.kernels.prepare_row(queries.data() + t * of_row, int(of_row), as, ready.data() + t * of_row * bytes, nullptr, nullptr);
    const int layers = int(pool.pool.block_bytes / pool.pool.layer_bytes);
    nb::gil_scoped_release release;
    auto attend = [&](int round) {
        Attention a = attention_over(pool, round % layers, int(H), num_kv_heads, int(D), number);
        a.scale = 1.0f / 8;
        a.positions = positions.data();
        a.queries = ready.data(), a.out = out.data(), a.out_stride = of_row * bytes;
        a.partials = reinterpret_cast<float*>(partials.data()), a.partial_of = plan.partial_of().data();
        machine.team.run([&](int thread) { machine.attention(a, plan.tasks(), plan.folded_tokens(), thread); });
    };
    return time_rounds(seconds, attend, [&](int round) { return stream.read(machine, round); });
}

// Rotation of q and k, and the write of k and v into layer 0 of a pool, for qkv [T, (H + 2 KH) * D].
Rounds time_rotation(Machine& machine, const Stream& stream, BlockPool& pool, int num_heads, int num_kv_heads, int number,
                     const ConstFloats2& qkv, const Array<const int64_t, 1>& slots, double seconds) {
    const int64_t T = qkv.shape(0), D = int64_t(qkv.shape(1)) / (num_heads + 2 * num_kv_heads);
    check(int64_t(slots.size()) == T, "qkv and slots do not belong together");
    for (int64_t t = 0; t < T; t++)
        check(slots.data()[t] >= 0 && slots.data()[t] < pool.num_blocks * pool.pool.block_size, "no such slot");
    const std::vector<float> ones(T * D / 2, 1.0f), zeros(T * D / 2, 0.0f);
    const Buffer queries(T * num_heads * D * 4);
    const Attention a = attention_over(pool, 0, num_heads, num_kv_heads, int(D), number);
    const Rotation rotation{a.cache,     num_heads,    num_kv_heads, nullptr,    nullptr,       0.0f,
                            ones.data(), zeros.data(), slots.data(), qkv.data(), int64_t(qkv.shape(1)), queries.data()};
    machine.reserve_scratch(int(D), D);
    nb::gil_scoped_release release;
    auto rotate = [&](int) {
        machine.team.run([&](int thread) {
            float* scratch = reinterpret_cast<float*>(machine.scratch[thread].data());
            machine.rows(int(T), [&](int first, int end) {
                for (int row = first; row < end; row++) machine.kernels.rotate_row(rotation, row, scratch);
            });
        });
    };
    return time_rounds(seconds, rotate, [&](int round) { return stream.copy(machine, round); });
}

// The norm of rows [T, n] and their conversion to what a matrix of `format` wants.
Rounds time_norm(Machine& machine, const Stream& stream, const ConstFloats2& x, const ConstFloats1& weight, int format,
                 double seconds) {
    const int64_t T = x.shape(0), n = x.shape(1);
    check(int64_t(weight.size()) == n && n % GROUP == 0, "the weight does not fit the rows");
    Matrix next{};
    next.format = Format(format), next.inputs = int32_t(n);
    next.steps = int32_t(next.format == Format::FLOAT32 ? n : next.format == Format::BFLOAT16 ? n / 2 : n / 4);
    const Prepared ready(next, T);
    machine.reserve_scratch(64, n);
    nb::gil_scoped_release release;
    auto norm = [&](int) {
        machine.team.run([&](int thread) {
            float* scratch = reinterpret_cast<float*>(machine.scratch[thread].data());
            machine.rows(int(T), [&](int first, int end) {
                for (int i = first; i < end; i++) {
                    machine.kernels.norm_row(x.data() + i * n, int(n), Norm{weight.data(), 1e-5f}, scratch);
                    machine.kernels.prepare_row(scratch, int(n), next.format, ready.data.data() + i * ready.stride,
                                                ready.scales_of(i), ready.sums_of(i));
                }
            });
        });
    };
    return time_rounds(seconds, norm, [&](int round) { return stream.copy(machine, round); });
}

}  // namespace

void bind_timing(nb::module_& m) {
    m.def("peak_rates", &peak_rates);
    nb::class_<Stream>(m, "Stream");
    m.def("make_stream", &make_stream);
    m.def("read_rate", [](Machine& machine, const Stream& stream, int round) {
        nb::gil_scoped_release release;
        return stream.read(machine, round);
    });
    m.def("copy_rate", [](Machine& machine, const Stream& stream, int round) {
        nb::gil_scoped_release release;
        return stream.copy(machine, round);
    });
    m.def("time_products", &time_products);
    m.def("time_attention", &time_attention);
    m.def("time_rotation", &time_rotation);
    m.def("time_norm", &time_norm);
}

}  // namespace octavo
