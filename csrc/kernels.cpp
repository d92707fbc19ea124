#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
namespace amx {
extern const Kernels kernels;  // if OCTAVO_HAS_AMX
}
namespace amx_emulated {
extern const Kernels kernels;
}
#endif

namespace {

struct Set {
    const char* name;
    const Kernels* kernels;
    bool usable;
    bool for_tests = false;  // not listed
};

#if defined(OCTAVO_HAS_AMX)

// Has the CPU tiles of bfloat16 and bytes, and does the operating system save them and let this process use them? A process
// must ask for that, once for all of its threads: Linux, Documentation/arch/x86/xstate.rst.
bool ask_for_amx() {
#if defined(__linux__)
    constexpr uint32_t BF16 = 1u << 22, TILE_STATE = 1u << 24, BYTES = 1u << 25, OSXSAVE = 1u << 27;
    constexpr uint32_t TILE_REGISTERS = 3u << 17;  // of XCR0: their configuration and their data
    constexpr long ASK = 0x1023, TILE_DATA = 18;   // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (BF16 | TILE_STATE | BYTES)) return false;
    uint32_t saved, high;
    asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    return (saved & TILE_REGISTERS) == TILE_REGISTERS && syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
#else
    return false;
#endif
}

#endif

std::vector<Set> sets() {
    std::vector<Set> all;
#if defined(__x86_64__)
    // The builtins also ask the operating system whether it saves the registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#if defined(OCTAVO_HAS_AMX)
    static const bool amx = ask_for_amx();
    all.push_back({"amx", &amx::kernels, bf16 && amx});
#endif
    all.push_back({"amx_emulated", &amx_emulated::kernels, bf16, true});
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
        if (set.usable && !set.for_tests) names.push_back(set.name);
    return names;
}

const Kernels* kernels_of(const std::string& name) {
    for (const Set& set : sets())
        if (set.usable && name == set.name) return set.kernels;
    return nullptr;
}

}  // namespace octavo
