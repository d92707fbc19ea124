// Bindings of the choice of tokens. An array that has a value per row is checked to have as many as there are rows.
#include <cmath>

#include "module.h"
#include "sampling.h"

namespace nb = nanobind;

namespace octavo {

namespace {

using Ints1 = Array<int32_t, 1>;
using Longs1 = Array<int64_t, 1>;
using Doubles1 = Array<double, 1>;
using ConstInts1 = Array<const int32_t, 1>;
using ConstDoubles1 = Array<const double, 1>;

LogitRows rows_of(const ConstFloats2& logits) {
    check(logits.shape(1) > 0, "rows have no logits");
    return {logits.data(), int(logits.shape(0)), int(logits.shape(1))};
}

template <class... Columns>
void check_columns(const LogitRows& rows, const Columns&... columns) {
    check(((int(columns.size()) == rows.count) && ...), "there is not one value for each row");
}

// min_p: a token with less than this share of the peak's probability weighs nothing; 0 is none.
Weighing weighing_of(const LogitRows& rows, float peak, double temperature, double min_p) {
    check(std::isfinite(peak), "a peak is not finite");
    const float floor = min_p > 0 ? float(std::log(min_p)) : -std::numeric_limits<float>::infinity();
    return {peak, float(temperature), floor, weight_scale(rows.vocab_size)};
}

void choose(Chooser& chooser, const ConstFloats2& logits, const ConstFloats1& peaks, const ConstDoubles1& temperatures,
            const ConstInts1& top_k, const ConstDoubles1& top_p, const ConstDoubles1& min_p, const ConstDoubles1& uniforms,
            Ints1 tokens) {
    const LogitRows rows = rows_of(logits);
    check_columns(rows, peaks, temperatures, top_k, top_p, min_p, uniforms, tokens);
    std::vector<Draw> draws(rows.count);
    for (int i = 0; i < rows.count; i++) {
        draws[i] = {weighing_of(rows, peaks.data()[i], temperatures.data()[i], min_p.data()[i]), top_k.data()[i],
                    top_p.data()[i], uniforms.data()[i]};
        check(draws[i].weighing.temperature > 0 && draws[i].top_k > 0, "a temperature or top_k is not above 0");
        check(draws[i].top_p > 0 && draws[i].top_p <= 1, "a top_p is not above 0 and up to 1");
        check(draws[i].uniform >= 0 && draws[i].uniform < 1, "a random number is not from 0 to below 1");
    }
    nb::gil_scoped_release release;
    chooser.choose(rows, draws.data(), tokens.data());
}

void greatest(Chooser& chooser, const ConstFloats2& logits, Floats1 values, Longs1 ids) {
    const LogitRows rows = rows_of(logits);
    check_columns(rows, values, ids);
    nb::gil_scoped_release release;
    chooser.greatest(rows, values.data(), ids.data());
}

// log(sum(e^(logit - peak))) of each row; NaN where the peak is not finite, which it is not if a logit is NaN.
void log_totals(Chooser& chooser, const ConstFloats2& logits, const ConstFloats1& peaks, Doubles1 out) {
    const LogitRows rows = rows_of(logits);
    check_columns(rows, peaks, out);
    const float scale = weight_scale(rows.vocab_size);
    std::vector<Weighing> weighings;
    for (int i = 0; i < rows.count; i++)
        weighings.push_back({peaks.data()[i], 1.0f, -std::numeric_limits<float>::infinity(), scale});
    nb::gil_scoped_release release;
    chooser.totals(rows, weighings.data(), out.data());
    for (int i = 0; i < rows.count; i++) {
        const bool finite = std::isfinite(peaks.data()[i]);
        out.data()[i] = finite ? std::log(out.data()[i] / double(scale)) : std::numeric_limits<double>::quiet_NaN();
    }
}

// The weights of a row, which the other functions do not write down: for tests.
void weigh(Machine& machine, const ConstFloats1& logits, float peak, double temperature, double min_p, Doubles1 out) {
    check(logits.size() > 0 && logits.size() == out.size(), "logits and out do not belong together");
    const LogitRows rows{logits.data(), 1, int(logits.size())};
    std::vector<float> weights(logits.size() + PIECE);
    machine.kernels.sampling.weigh(rows.logits, rows.vocab_size, weighing_of(rows, peak, temperature, min_p), weights.data());
    std::copy_n(weights.data(), logits.size(), out.data());
}

}  // namespace

void bind_sampling(nb::module_& m) {
    m.def("weigh", &weigh);
    nb::class_<Chooser>(m, "Chooser")
        .def(nb::init<Machine&>(), nb::keep_alive<1, 2>())
        .def("choose", &choose)
        .def("greatest", &greatest)
        .def("log_totals", &log_totals);
}

}  // namespace octavo
