#define OCTAVO_ISA avx512
#include "kernels/isa.inc"
