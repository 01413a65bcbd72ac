// What of the headers here no kernel changes, linked to every library.
#define CPU_RUNTIME
#include "instructions.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

extern "C" long early_copies() { return cpu_early; }
extern "C" void set_unwritten(const u8** rows, int count) { cpu_unwritten.assign(rows, rows + count); }
