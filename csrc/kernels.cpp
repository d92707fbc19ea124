#include "kernels.h"

namespace octavo {

namespace portable {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512_bf16 {
extern const Kernels kernels;
}
#endif

namespace {

struct Set {
    const char* name;
    const Kernels* kernels;
    bool usable;
};

std::vector<Set> sets() {
    std::vector<Set> all;
#if defined(__x86_64__)
    // The builtins also ask the operating system whether it saves the registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    all.push_back({"avx512_bf16", &avx512_bf16::kernels, bf16});
    all.push_back({"avx512", &avx512::kernels, avx512});
    all.push_back({"avx2", &avx2::kernels, avx2});
#endif
    all.push_back({"portable", &portable::kernels, true});
    return all;
}

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Set& set : sets())
        if (set.usable) names.push_back(set.name);
    return names;
}

const Kernels* kernels_of(const std::string& name) {
    for (const Set& set : sets())
        if (set.usable && name == set.name) return set.kernels;
    return nullptr;
}

}  // namespace octavo
