#define OCTAVO_ISA avx512_bf16
#include "kernels/isa.inc"
