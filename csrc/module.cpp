// The Python module octavo._native: arrays in, pointers to the kernels. All checks of shapes are here or in Python; the rest
// of csrc trusts what it is given. Objects keep the arrays they point into alive.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>

#include "module.h"
#include "pack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

namespace {

std::unique_ptr<Machine> make_machine(int threads, const std::string& isa) {
    const Kernels* kernels = kernels_of(isa);
    check(kernels != nullptr, "this CPU cannot run that instruction set");
    check(threads >= 1, "threads must be at least 1");
    return std::make_unique<Machine>(threads, isa, kernels);
}

// ---- matrices

std::tuple<int64_t, int64_t> packed_sizes(int format, bool has_minimum, bool interleaved, int outputs, int inputs) {
    const Packing p = packing_of(Format(format), has_minimum, interleaved, outputs, inputs);
    return {p.panels * p.panel_bytes, Format(format) == Format::INT8 ? int64_t(p.panels) * PANEL : 0};
}

Weights weights_of(int kept, const ConstBytes2& raw, int inputs) {
    const Weights w{Kept(kept), reinterpret_cast<const char*>(raw.data()), int64_t(raw.shape(1)), int32_t(raw.shape(0)), inputs};
    const int64_t group_bytes = w.kept == Kept::Q4_0 ? 18 : w.kept == Kept::Q4_1 ? 20 : 34;
    const int64_t wanted = w.kept == Kept::FLOAT32                                   ? int64_t(inputs) * 4
                           : w.kept == Kept::BFLOAT16 || w.kept == Kept::FLOAT16 ? int64_t(inputs) * 2
                                                                                     : inputs / GROUP * group_bytes;
    check(w.row_bytes == wanted, "rows have another length than their kind and inputs ask for");
    return w;
}

void pack_array(Machine& machine, int kept, const ConstBytes2& raw, int inputs, int format, bool has_minimum,
                bool interleaved, Bytes1 data, Floats1 scales, Array<int32_t, 1> sums) {
    const Weights w = weights_of(kept, raw, inputs);
    const Packing p = packing_of(Format(format), has_minimum, interleaved, w.outputs, inputs);
    check(int64_t(data.size()) == p.panels * p.panel_bytes, "data has the wrong size");
    check(p.format < Format::GROUP8 || inputs % GROUP == 0, "grouped formats need inputs in whole groups");
    check(p.format != Format::GROUP4 || has_minimum || w.kept == Kept::Q4_0, "4-bit codes without minima are only taken as is");
    check(p.format != Format::INT8 || (int64_t(scales.size()) == p.panels * PANEL && sums.size() == scales.size()),
          "scales and sums have the wrong size");
    nb::gil_scoped_release release;
    pack(machine, w, p, reinterpret_cast<char*>(data.data()), scales.data(), sums.data());
}

void convert_array(Machine& machine, int kept, const ConstBytes2& raw, int inputs, int number, Bytes1 out) {
    const Weights w = weights_of(kept, raw, inputs);
    check(int64_t(out.size()) == int64_t(w.outputs) * inputs * (Number(number) == Number::BFLOAT16 ? 2 : 4),
          "out has the wrong size");
    nb::gil_scoped_release release;
    convert(machine, w, Number(number), reinterpret_cast<char*>(out.data()));
}

PackedMatrix make_matrix(int format, bool has_minimum, bool interleaved, int outputs, int inputs, int offset,
                         ConstBytes1 data, ConstFloats1 scales, Array<const int32_t, 1> sums,
                         std::optional<ConstFloats1> bias) {
    const Packing p = packing_of(Format(format), has_minimum, interleaved, outputs, inputs);
    check(int64_t(data.size()) == p.panels * p.panel_bytes, "data has the wrong size");
    PackedMatrix m;
    m.interleaved = interleaved;
    m.matrix = {Format(format),
                interleaved ? p.panels * PANEL : outputs,
                inputs,
                p.panels,
                p.steps,
                p.panel_bytes,
                reinterpret_cast<const char*>(data.data()),
                scales.data(),
                sums.data(),
                bias ? bias->data() : nullptr,
                offset,
                has_minimum};
    if (bias) check(int(bias->size()) == m.matrix.outputs, "bias has the wrong size");
    m.data = nb::cast(data);
    m.scales = nb::cast(scales);
    m.sums = nb::cast(sums);
    if (bias) m.bias = nb::cast(*bias);
    return m;
}

// Rows of any matrix product on its own: for tests and benchmarks. number: what SILU writes.
void multiply_rows(Machine& machine, const PackedMatrix& m, const ConstFloats2& x, Floats2 out) {
    const Matrix& matrix = m.matrix;
    check(int(x.shape(1)) == matrix.inputs && x.shape(0) == out.shape(0), "x and out do not fit the matrix");
    check(int(out.shape(1)) == (m.interleaved ? matrix.outputs / 2 : matrix.outputs), "out does not fit the matrix");
    const int64_t stride = (int64_t(matrix.steps) * 4 + 63) / 64 * 64, groups = matrix.inputs / GROUP + 1;
    const int rows = int(x.shape(0));
    Buffer data(rows * stride), scales(rows * groups * 4), sums(rows * groups * 4);
    const Rows ready{data.data(), stride, reinterpret_cast<float*>(scales.data()), reinterpret_cast<int32_t*>(sums.data())};
    const int64_t of_row = matrix.format == Format::INT8 ? 1 : matrix.inputs / GROUP;
    const Product product{&matrix,
                          ready,
                          rows,
                          m.interleaved ? Finish::SILU : Finish::STORE,
                          Number::FLOAT32,
                          reinterpret_cast<char*>(out.data()),
                          int64_t(out.shape(1)) * 4};
    nb::gil_scoped_release release;
    machine.team.run([&](int thread) {
        machine.rows(rows, [&](int first, int end) {
            for (int i = first; i < end; i++)
                machine.kernels.prepare_row(x.data() + int64_t(i) * matrix.inputs, matrix.inputs, matrix.format,
                                            data.data() + i * stride, reinterpret_cast<float*>(scales.data()) + i * of_row,
                                            reinterpret_cast<int32_t*>(sums.data()) + i * of_row);
        });
        machine.product(product, thread);
    });
}

// ---- the decoder

BlockPool make_pool(Bytes1 memory, int64_t num_blocks, int num_layers, int num_kv_heads, int head_size, int block_size,
                    int number, bool quantised, bool share) {
    const int64_t number_bytes = quantised ? 1 : Number(number) == Number::BFLOAT16 ? 2 : 4;
    const int64_t head = 2 * block_size * (head_size * number_bytes + (quantised ? 4 : 0));
    const int64_t layer = head * num_kv_heads;
    check(int64_t(memory.size()) == num_blocks * layer * num_layers, "memory has the wrong size");
    BlockPool p;
    p.pool = {reinterpret_cast<char*>(memory.data()), layer * num_layers, layer, block_size, quantised, share};
    p.num_blocks = num_blocks;
    p.memory = nb::cast(memory);
    return p;
}

void copy_block(const BlockPool& from, int64_t source, BlockPool& to, int64_t target) {
    check(source >= 0 && source < from.num_blocks && target >= 0 && target < to.num_blocks, "no such block");
    check(from.pool.block_bytes == to.pool.block_bytes, "blocks of different sizes");
    std::memcpy(to.pool.data + target * to.pool.block_bytes, from.pool.data + source * from.pool.block_bytes,
                size_t(to.pool.block_bytes));
}

int32_t int_at(PyObject* tuple, Py_ssize_t i) { return int32_t(PyLong_AsLong(PyTuple_GET_ITEM(tuple, i))); }

}  // namespace

void set_items(StepItems& items, std::vector<int32_t>* token_ids, const nb::list& list, int64_t num_blocks, int block_size) {
    items.starts.clear();
    items.row_starts.assign(1, 0);
    items.table_starts.clear();
    items.blocks.clear();
    token_ids->clear();
    for (nb::handle entry : list) {
        check(PyTuple_Check(entry.ptr()) && PyTuple_GET_SIZE(entry.ptr()) == 3, "an item is (start, token ids, block ids)");
        PyObject* tokens = PyTuple_GET_ITEM(entry.ptr(), 1);
        PyObject* blocks = PyTuple_GET_ITEM(entry.ptr(), 2);
        check(PyTuple_Check(tokens) && PyTuple_Check(blocks), "token ids and block ids are tuples");
        const int32_t start = int_at(entry.ptr(), 0);
        const Py_ssize_t count = PyTuple_GET_SIZE(tokens);
        const Py_ssize_t used = (start + count + block_size - 1) / block_size;
        check(start >= 0 && count > 0 && PyTuple_GET_SIZE(blocks) >= used, "the block table is too short");
        items.starts.push_back(start);
        items.table_starts.push_back(int64_t(items.blocks.size()));
        for (Py_ssize_t i = 0; i < count; i++) token_ids->push_back(int_at(tokens, i));
        for (Py_ssize_t i = 0; i < used; i++) {
            const int32_t block = int_at(blocks, i);
            check(block >= 0 && block < num_blocks, "a block id is not in the pool");
            items.blocks.push_back(block);
        }
        items.row_starts.push_back(int32_t(token_ids->size()));
    }
    if (PyErr_Occurred()) throw nb::python_error();
}

namespace {

struct NativeDecoder {
    std::unique_ptr<Decoder> decoder;
    nb::list kept_alive;

    void forward(BlockPool& pool, const nb::list& items) {
        set_items(decoder->items, &decoder->token_ids, items, pool.num_blocks, pool.pool.block_size);
        check(decoder->num_tokens() > 0 && decoder->num_tokens() <= decoder->shape().max_tokens, "too many tokens for a step");
        for (int32_t id : decoder->token_ids) check(id >= 0 && id < decoder->shape().vocab_size, "a token id is out of range");
        nb::gil_scoped_release release;
        decoder->forward(pool.pool);
    }

    std::vector<int32_t> checked(std::vector<int32_t> rows) const {
        check(!rows.empty() && int(rows.size()) <= decoder->shape().max_tokens, "no rows, or too many");
        for (int32_t row : rows) check(row >= 0 && row < decoder->num_tokens(), "no such row in the last step");
        return rows;
    }

    void logits(const std::vector<int32_t>& wanted, Floats2 out) {
        const std::vector<int32_t> rows = checked(wanted);
        check(out.shape(0) == rows.size() && int(out.shape(1)) == decoder->shape().vocab_size, "out has the wrong shape");
        nb::gil_scoped_release release;
        decoder->logits(rows, out.data());
    }

    std::tuple<std::vector<float>, std::vector<int32_t>> best(const std::vector<int32_t>& wanted) {
        const std::vector<int32_t> rows = checked(wanted);
        std::vector<float> values(rows.size());
        std::vector<int32_t> ids(rows.size());
        {
            nb::gil_scoped_release release;
            decoder->best(rows, values.data(), ids.data());
        }
        return {values, ids};
    }
};

std::unique_ptr<NativeDecoder> make_decoder(nb::object machine, const nb::dict& shape, const nb::list& layers,
                                            ConstBytes1 embedding, ConstFloats1 norm, const PackedMatrix& head,
                                            ConstFloats1 frequencies) {
    auto number = [&](const char* key) { return nb::cast<int>(shape[key]); };
    auto real = [&](const char* key) { return float(nb::cast<double>(shape[key])); };
    const DecoderShape s{number("hidden_size"),    number("intermediate_size"), number("num_heads"),
                         number("num_kv_heads"),   number("head_size"),         number("vocab_size"),
                         real("norm_epsilon"),     real("attention_scale"),     real("soft_cap"),
                         Number(number("number")), number("max_tokens")};
    check(s.head_size % TILE == 0 && s.head_size <= 512 && s.num_heads % s.num_kv_heads == 0, "head sizes must be multiples of 16");
    check(s.num_heads / s.num_kv_heads <= MOST_QUERY_ROWS, "too many query heads for one kv head");
    check(int64_t(embedding.size()) == int64_t(s.vocab_size) * s.hidden_size * (s.number == Number::BFLOAT16 ? 2 : 4),
          "the embedding has the wrong size");
    check(int(frequencies.size()) == s.head_size / 2 && int(norm.size()) == s.hidden_size, "wrong number of frequencies");
    auto native = std::make_unique<NativeDecoder>();
    std::vector<Layer> made;
    for (nb::handle entry : layers) {
        const nb::dict layer = nb::cast<nb::dict>(entry);
        auto floats = [&](const char* key) -> const float* {
            if (layer[key].is_none()) return nullptr;
            return nb::cast<ConstFloats1>(layer[key]).data();
        };
        auto matrix = [&](const char* key) { return nb::cast<PackedMatrix&>(layer[key]).matrix; };
        made.push_back({floats("input_norm"), floats("mlp_norm"), floats("q_norm"), floats("k_norm"), matrix("qkv"),
                        matrix("output"), matrix("gate_up"), matrix("down"), nb::cast<int>(layer["window"])});
        for (const Matrix* m : {&made.back().qkv, &made.back().output, &made.back().gate_up, &made.back().down})
            check(m->format >= Format::INT8 || int(m->format) == int(s.number), "weights in another number than activations");
    }
    native->kept_alive.append(machine);
    native->kept_alive.append(layers);
    native->kept_alive.append(nb::cast(embedding));
    native->kept_alive.append(nb::cast(norm));
    native->kept_alive.append(nb::cast(head));
    native->decoder =
        std::make_unique<Decoder>(nb::cast<Machine&>(machine), s, std::move(made), reinterpret_cast<const char*>(embedding.data()),
                                  norm.data(), head.matrix, frequencies.data());
    return native;
}

// ---- attention on its own: for tests and benchmarks

}  // namespace

Attention attention_over(const BlockPool& pool, int layer, int num_heads, int num_kv_heads, int head_size, int number) {
    Attention a{};
    a.cache = {pool.pool.data + layer * pool.pool.layer_bytes,
               pool.pool.block_bytes,
               pool.pool.layer_bytes / num_kv_heads,
               pool.pool.block_size,
               head_size,
               Number(number),
               pool.pool.quantised};
    a.num_heads = num_heads;
    a.num_kv_heads = num_kv_heads;
    return a;
}

namespace {

// Writes keys and values [T, KH, D] (not rotated) into `slots` of one layer.
void write_kv(Machine& machine, BlockPool& pool, int layer, int number, ConstFloats3 keys, ConstFloats3 values,
              Array<const int64_t, 1> slots) {
    const int64_t T = keys.shape(0), KH = keys.shape(1), D = keys.shape(2);
    check(values.shape(0) == keys.shape(0) && int64_t(slots.size()) == T, "keys, values and slots do not belong together");
    std::vector<float> qkv(T * KH * D * 3), ones(T * D / 2, 1.0f), zeros(T * D / 2, 0.0f);
    std::vector<char> queries(T * KH * D * 4);
    for (int64_t t = 0; t < T; t++) {
        std::memcpy(&qkv[(t * 3 + 1) * KH * D], keys.data() + t * KH * D, KH * D * 4);
        std::memcpy(&qkv[(t * 3 + 2) * KH * D], values.data() + t * KH * D, KH * D * 4);
    }
    const Attention a = attention_over(pool, layer, int(KH), int(KH), int(D), number);
    const Rotation r{a.cache,     int(KH),      int(KH),      nullptr,    nullptr,    0.0f,
                     ones.data(), zeros.data(), slots.data(), qkv.data(), 3 * KH * D, queries.data()};
    std::vector<float> scratch(D);
    for (int64_t t = 0; t < T; t++) machine.kernels.rotate_row(r, int(t), scratch.data());
}

// Attention of queries [T, H, D] over one layer; returns how many reads of chunks were shared.
int64_t attend(Machine& machine, const BlockPool& pool, int layer, int num_kv_heads, int number, const nb::list& items,
               ConstFloats3 queries, Array<float, 3> out, float scale, int window, float soft_cap) {
    const int64_t T = queries.shape(0), H = queries.shape(1), D = queries.shape(2);
    StepItems step;
    std::vector<int32_t> token_ids, positions;
    set_items(step, &token_ids, items, pool.num_blocks, pool.pool.block_size);
    check(int64_t(token_ids.size()) == T && out.size() == queries.size(), "items, queries and out do not belong together");
    for (int i = 0; i < step.count(); i++)
        for (int row = step.row_starts[i]; row < step.row_starts[i + 1]; row++)
            positions.push_back(step.starts[i] + row - step.row_starts[i]);
    AttentionPlan plan;
    plan.make(step, pool.pool.block_size, int(H) / num_kv_heads, pool.pool.share);
    machine.reserve_scratch(int(D), H * D);
    const int64_t bytes = Number(number) == Number::BFLOAT16 ? 2 : 4;
    Buffer ready(T * H * D * bytes), result(T * H * D * bytes), partials((plan.num_partials() + 1) * H * (D + 2) * 4);
    Attention a = attention_over(pool, layer, int(H), num_kv_heads, int(D), number);
    a.scale = scale, a.window = window, a.soft_cap = soft_cap;
    a.positions = positions.data();
    a.queries = ready.data(), a.out = result.data(), a.out_stride = H * D * bytes;
    a.partials = reinterpret_cast<float*>(partials.data()), a.partial_of = plan.partial_of().data();
    const Format as = bytes == 2 ? Format::BFLOAT16 : Format::FLOAT32;
    nb::gil_scoped_release release;
    for (int64_t t = 0; t < T; t++)
        machine.kernels.prepare_row(queries.data() + t * H * D, int(H * D), as, ready.data() + t * H * D * bytes, nullptr, nullptr);
    machine.team.run([&](int thread) { machine.attention(a, plan.tasks(), plan.folded_tokens(), thread); });
    for (int64_t t = 0; t < T; t++)
        machine.kernels.widen_row(result.data() + t * H * D * bytes, int(H * D), Number(number), out.data() + t * H * D);
    return plan.shared_reads();
}

}  // namespace

}  // namespace octavo

NB_MODULE(_native, m) {
    using namespace octavo;
    m.attr("CHUNK") = CHUNK;
    m.attr("PANEL") = PANEL;
    m.attr("GROUP") = GROUP;
    m.attr("TILE") = TILE;
    m.attr("MOST_QUERY_ROWS") = MOST_QUERY_ROWS;
    m.def("instruction_sets", &instruction_sets);
    nb::class_<Machine>(m, "Machine")
        .def_prop_ro("threads", [](const Machine& machine) { return machine.team.size(); })
        .def_prop_ro("isa", [](const Machine& machine) { return machine.isa; });
    m.def("make_machine", &make_machine, "threads"_a, "isa"_a);
    nb::class_<PackedMatrix>(m, "PackedMatrix");
    m.def("packed_sizes", &packed_sizes);
    m.def("pack", &pack_array);
    m.def("convert", &convert_array);
    m.def("make_matrix", &make_matrix, nb::arg("format"), nb::arg("has_minimum"), nb::arg("interleaved"), nb::arg("outputs"),
          nb::arg("inputs"), nb::arg("offset"), nb::arg("data"), nb::arg("scales"), nb::arg("sums"), nb::arg("bias").none());
    m.def("multiply_rows", &multiply_rows);
    nb::class_<BlockPool>(m, "BlockPool");
    m.def("make_pool", &make_pool);
    m.def("copy_block", &copy_block);
    m.def("write_kv", &write_kv);
    m.def("attend", &attend);
    nb::class_<NativeDecoder>(m, "Decoder")
        .def("forward", &NativeDecoder::forward)
        .def("logits", &NativeDecoder::logits)
        .def("best", &NativeDecoder::best)
        .def_prop_ro("shared_reads", [](const NativeDecoder& d) { return d.decoder->plan().shared_reads(); });
    m.def("make_decoder", &make_decoder);
    bind_timing(m);
    bind_sampling(m);
}
