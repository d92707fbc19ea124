#define OCTAVO_ISA amx
#define OCTAVO_AMX
#include "kernels/isa.inc"
