#define OCTAVO_ISA portable
#include "kernels/isa.inc"
