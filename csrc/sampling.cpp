#include "sampling.h"

#include <bit>
#include <functional>

namespace octavo {

namespace {

// How far bounds lie below what they are computed from, in units of x: far more than all roundings of x and e^x.
constexpr double MARGIN = 0.01;
// The light tokens of most rows weigh so much less, on average, than the bound that is sure.
constexpr int GUESS = 8;

// A whole number from 0 to total - 1; the minimum is for products that round up to the total.
double target_of(double uniform, double total) { return std::min(std::floor(uniform * total), total - 1); }

// The logit at which (logit - peak) / temperature is somewhat below x.
float logit_below(const Weighing& w, double x) { return float(double(w.peak) + (x - MARGIN) * double(w.temperature)); }

// What is below weighs nothing.
float weightless_bound(const Weighing& w) {
    return logit_below(w, std::max(std::log(0.5 / double(w.scale)), double(w.floor)));
}

// If no more than `most` tokens are below, they weigh less than what top-p leaves out.
float nucleus_bound(const Draw& draw, double total, int most) {
    const double part = (1 - draw.top_p) * total / most;
    return std::max(weightless_bound(draw.weighing), logit_below(draw.weighing, std::log(part / double(draw.weighing.scale))));
}

bool cuts(const Draw& draw, int vocab_size) { return draw.top_k < vocab_size; }
bool ranks(const Draw& draw, int vocab_size) { return cuts(draw, vocab_size) || draw.top_p < 1; }

}  // namespace

float weight_scale(int vocab_size) {
    return std::ldexp(1.0f, std::min(40, 52 - int(std::bit_width(unsigned(vocab_size)))));
}

void Chooser::choose(const LogitRows& rows, const Draw* draws, int32_t* tokens) {
    const SamplingKernels& k = machine_.kernels.sampling;
    const int64_t pieces = int64_t(rows.count) * rows.pieces();
    reserve_memory(rows.vocab_size);
    sums_.grow(pieces * 8);
    maxima_.grow(pieces * 4);
    over_rows(
        rows,
        [&](int row, int first, const float* logits, int count) {
            const Draw& draw = draws[row];
            if (!cuts(draw, rows.vocab_size)) k.piece_sums(logits, count, draw.weighing, sums(rows, row) + first);
            if (ranks(draw, rows.vocab_size)) k.piece_maxima(logits, count, maxima(rows, row) + first);
        },
        [&](int row, int thread) {
            const Draw& draw = draws[row];
            tokens[row] = ranks(draw, rows.vocab_size) ? ranked(rows, row, draw, memory_[thread].candidates)
                                                       : in_order(rows, row, draw);
        });
}

void Chooser::greatest(const LogitRows& rows, float* values, int64_t* ids) {
    maxima_.grow(int64_t(rows.count) * rows.pieces() * 4);
    auto first_of = [](const float* x, int count) {
        int best = 0;
        for (int i = 0; i < count && !std::isnan(x[best]); i++)
            if (x[i] > x[best] || std::isnan(x[i])) best = i;
        return best;
    };
    over_rows(
        rows,
        [&](int row, int first, const float* logits, int count) {
            machine_.kernels.sampling.piece_maxima(logits, count, maxima(rows, row) + first);
        },
        [&](int row, int) {
            const int start = first_of(maxima(rows, row), rows.pieces()) * PIECE;
            const int id = start + first_of(rows.row(row) + start, std::min(PIECE, rows.vocab_size - start));
            values[row] = rows.row(row)[id], ids[row] = id;
        });
}

void Chooser::totals(const LogitRows& rows, const Weighing* weighings, double* totals) {
    sums_.grow(int64_t(rows.count) * rows.pieces() * 8);
    over_rows(
        rows,
        [&](int row, int first, const float* logits, int count) {
            machine_.kernels.sampling.piece_sums(logits, count, weighings[row], sums(rows, row) + first);
        },
        [&](int row, int) { totals[row] = total_of(rows, row); });
}

void Chooser::reserve_memory(int vocab_size) {
    const int64_t bytes = Candidates{}.lay_out(nullptr, vocab_size);
    for (Memory& memory : memory_) {
        if (bytes > memory.bytes) memory.data = std::make_unique_for_overwrite<char[]>(size_t(bytes)), memory.bytes = bytes;
        memory.candidates.lay_out(memory.data.get(), vocab_size);
    }
}

// measure(row, first piece, logits from there, how many) for all pieces of all rows, then finish(row, thread). Rows are measured
// in parts if they are too few to keep the threads busy; else a row is finished while it is in the cache.
template <class Measure, class Finish>
void Chooser::over_rows(const LogitRows& rows, Measure&& measure, Finish&& finish) {
    if (rows.count == 0) return;
    constexpr int LEAST_PIECES = 16;
    const int threads = machine_.team.size(), pieces = rows.pieces();
    const bool whole = threads == 1 || rows.count >= 2 * threads;
    const int parts = whole ? 1 : std::clamp(4 * threads / rows.count, 1, (pieces - 1) / LEAST_PIECES + 1);
    auto measure_part = [&](int row, int part) {
        const int first = int(int64_t(pieces) * part / parts), end = int(int64_t(pieces) * (part + 1) / parts);
        const int start = first * PIECE;
        measure(row, first, rows.row(row) + start, std::min(end * PIECE, rows.vocab_size) - start);
    };
    machine_.team.run([&](int thread) {
        if (parts > 1) machine_.team.share(rows.count * parts, [&](int u) { measure_part(u / parts, u % parts); });
        machine_.team.share(rows.count, [&](int row) {
            if (parts == 1) measure_part(row, 0);
            finish(row, thread);
        });
    });
}

double* Chooser::sums(const LogitRows& rows, int row) const {
    return reinterpret_cast<double*>(sums_.data()) + int64_t(row) * rows.pieces();
}

float* Chooser::maxima(const LogitRows& rows, int row) const {
    return reinterpret_cast<float*>(maxima_.data()) + int64_t(row) * rows.pieces();
}

double Chooser::total_of(const LogitRows& rows, int row) const {
    const double* sums = this->sums(rows, row);
    double total = 0;
    for (int piece = 0; piece < rows.pieces(); piece++) total += sums[piece];
    return total;
}

int32_t Chooser::in_order(const LogitRows& rows, int row, const Draw& draw) const {
    const double* sums = this->sums(rows, row);
    const double target = target_of(draw.uniform, total_of(rows, row));
    int piece = 0;
    double weight = 0;
    for (; weight + sums[piece] <= target; piece++) weight += sums[piece];
    float weights[2 * PIECE];
    const int start = piece * PIECE;
    machine_.kernels.sampling.weigh(rows.row(row) + start, std::min(PIECE, rows.vocab_size - start), draw.weighing, weights);
    int i = 0;
    for (weight += weights[0]; weight <= target;) weight += weights[++i];
    return start + i;
}

int32_t Chooser::ranked(const LogitRows& rows, int row, const Draw& draw, const Candidates& memory) const {
    auto take = [&](Ranking& ranking, float bound) {
        ranking.take(rows.row(row), rows.vocab_size, maxima(rows, row), std::min(bound, draw.weighing.peak), draw.weighing);
    };
    Ranking ranking(machine_.kernels.sampling, memory);
    double total;
    if (cuts(draw, rows.vocab_size)) {
        take(ranking, top_k_bound(rows, row, draw, memory.values));
        total = ranking.count() > draw.top_k ? ranking.at(draw.top_k - 1).through : ranking.total();
    } else {
        total = total_of(rows, row);
        take(ranking, nucleus_bound(draw, total, std::max(1, rows.vocab_size / GUESS)));
        if (ranking.total() < draw.top_p * total) take(ranking, nucleus_bound(draw, total, rows.vocab_size));
    }
    // A token is kept while those before it do not yet hold the share: the last is the first to go beyond a whole number.
    if (draw.top_p < 1) total = ranking.beyond(std::ceil(draw.top_p * total) - 1).through;
    return ranking.beyond(target_of(draw.uniform, total)).id;
}

// As many logits as top-k keeps are at least as great as that many maxima.
float Chooser::top_k_bound(const LogitRows& rows, int row, const Draw& draw, float* scratch) const {
    const float weightless = weightless_bound(draw.weighing);
    if (draw.top_k > rows.pieces()) return weightless;
    std::copy_n(maxima(rows, row), rows.pieces(), scratch);
    std::nth_element(scratch, scratch + draw.top_k - 1, scratch + rows.pieces(), std::greater<float>());
    return std::max(weightless, scratch[draw.top_k - 1]);
}

}  // namespace octavo
