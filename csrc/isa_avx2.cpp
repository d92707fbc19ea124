#define OCTAVO_ISA avx2
#include "kernels/isa.inc"
