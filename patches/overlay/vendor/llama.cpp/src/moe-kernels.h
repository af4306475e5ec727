#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

// Dot products of the cold lane: one weight row against up to MOE_MAX_COLS activation columns, so that a row that
// several tokens need is read and unpacked once. The instruction set is chosen at run time; no -march flag is needed.

constexpr int MOE_MAX_COLS = 4;

// the type of ggml_type_traits_cpu::vec_dot
typedef void (*moe_vec_dot_t)(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc);

// out[c] = row x . column y[c] for c < n_cols (1 ... MOE_MAX_COLS).
//   n        weights in the row, a multiple of the type's block size (256 for k-quants and IQ4_XS, 1 for F16 and BF16, else 32)
//   x        the row, at any alignment
//   y        columns quantised to the weight type's vec_dot_type, at any alignment
//   vec_dot  ggml's vec_dot of the weight type; only the "ggml vec_dot" kernel calls it
// A column's result does not depend, bit for bit, on the columns beside it.
// Nothing outside the n weights and the columns is read. Weights ahead of the row are prefetched, which cannot fault.
typedef void (*moe_row_dot_t)(int n, const void * x, const void * const * y, int n_cols, float * out, moe_vec_dot_t vec_dot);

struct moe_kernel {
    moe_row_dot_t fn;
    const char *  name; // "avx512-bf16", "avx512-vnni", "avx2" or "ggml vec_dot"
    bool prefetches;    // it fetches weights ahead of the row itself: the caller need not
};

// The kernel for a weight type on this machine. allow_own = false: always ggml's vec_dot.
moe_kernel moe_kernel_for(ggml_type type, bool allow_own = true);

// The instruction set in force: "avx512-vnni", "avx2" or "none". (BF16 alone has more where the machine has more.)
const char * moe_kernel_isa();

// For tests: allow nothing above level (0 none, 1 avx2, 2 avx512-vnni, 3 avx512-bf16 for BF16). Returns the level in force,
// which is lower if the machine cannot do more. Kernels that were handed out before stay what they are.
int moe_kernel_set_isa_limit(int level);

// For benchmarks: kernels that prefetch do so at this multiple of their distance; 0 turns it off.
void moe_kernel_set_prefetch(int multiple);
