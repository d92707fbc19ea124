// For tests on CPUs without AMX: see kernels/amx_emulation.h.
#define OCTAVO_ISA amx_emulated
#define OCTAVO_AMX
#define OCTAVO_AMX_EMULATED
#include "kernels/isa.inc"
