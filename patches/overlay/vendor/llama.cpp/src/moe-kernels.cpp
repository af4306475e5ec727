#include "moe-kernels.h"

#include <atomic>

// GCC on Windows keeps the stack aligned to 16 bytes only (GCC bug 54412): spilled vectors would fault there.
#if defined(__x86_64__) && defined(__GNUC__) && !(defined(_WIN32) && !defined(__clang__))
#define MOE_X86 1
#if !defined(__clang__) && __GNUC__ < 13
// the headers' own _mm512_undefined_*() sets this off hundreds of times (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace {

void row_dot_generic(int n, const void * x, const void * const * y, int n_cols, float * out, moe_vec_dot_t vec_dot) {
    for (int c = 0; c < n_cols; c++) {
        vec_dot(n, &out[c], 0, x, 0, y[c], 0, 1);
    }
}

#ifdef MOE_X86

// The file is compiled for the baseline: every function that touches a vector carries its target. A constant of a
// vector type at namespace scope, or a lambda, would not, so there are none.
#define MOE_AVX2          __attribute__((target("avx2,fma,f16c")))
#define MOE_AVX512        __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define MOE_INLINE        inline __attribute__((always_inline))
#define MOE_INLINE_AVX2   MOE_INLINE MOE_AVX2
#define MOE_INLINE_AVX512 MOE_INLINE MOE_AVX512
// sums live in arrays of one register per column: only unrolled loops keep them in registers
#define MOE_UNROLL        _Pragma("GCC unroll 8")

//
// block layouts, as in ggml-common.h
//

struct block_q4_0 { uint16_t d; uint8_t qs[16]; };
struct block_q8_0 { uint16_t d; int8_t qs[32]; };
struct block_q4_K { uint16_t d, dmin; uint8_t scales[12]; uint8_t qs[128]; };
struct block_q5_K { uint16_t d, dmin; uint8_t scales[12]; uint8_t qh[32]; uint8_t qs[128]; };
struct block_q6_K { uint8_t ql[128]; uint8_t qh[64]; int8_t scales[16]; uint16_t d; };
struct block_q8_K { float d; int8_t qs[256]; int16_t bsums[16]; };

static_assert(sizeof(block_q4_0) ==  18, "q4_0 layout");
static_assert(sizeof(block_q8_0) ==  34, "q8_0 layout");
static_assert(sizeof(block_q4_K) == 144, "q4_K layout");
static_assert(sizeof(block_q5_K) == 176, "q5_K layout");
static_assert(sizeof(block_q6_K) == 210, "q6_K layout");
static_assert(sizeof(block_q8_K) == 292, "q8_K layout");

//
// helpers for both instruction sets
//

// Far enough ahead to cover DRAM latency. It may run past the last row: a prefetch does not fault. For k-quants only: Q8_0
// and Q4_0 were no faster with it, or slower (the hardware sees one plain stream).
constexpr int PREFETCH_DISTANCE = 2304;

template <class Block> MOE_INLINE void prefetch_ahead(const Block * b) {
    MOE_UNROLL
    for (int line = 0; line < (int) sizeof(Block); line += 64) {
        _mm_prefetch((const char *) b + PREFETCH_DISTANCE + line, _MM_HINT_T0);
    }
}

MOE_INLINE_AVX2 __m256i load32(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }
MOE_INLINE_AVX2 __m128i load16(const void * p) { return _mm_loadu_si128((const __m128i *) p); }

MOE_INLINE_AVX2 __m128 half_to_float(uint16_t h) { return _mm_cvtph_ps(_mm_cvtsi32_si128(h)); }

// The float scales at the start of a block: d in the first lane and, in Q4_K and Q5_K, dmin in the second. Reads 8 bytes,
// fewer than any block has, which saves the way through an integer register; the other lanes are not used.
template <class Block> MOE_INLINE_AVX2 __m128 load_scales(const Block & b) {
    return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *) &b.d));
}

// The 6-bit scales of Q4_K and Q5_K: bytes 0-7 are the scales, bytes 8-15 the minima. The 12 packed bytes, as words a b c:
// scales 0-3 are the low 6 bits of a and minima 0-3 those of b; scales 4-7 have their low 4 bits in c and their high 2 bits
// on top of a, minima 4-7 in c >> 4 and on top of b. Loads 16 bytes: weights follow the scales.
MOE_INLINE_AVX2 __m128i unpack_scales(const uint8_t * packed) {
    const __m128i abc = load16(packed);
    const __m128i ab  = _mm_srlv_epi32(_mm_shuffle_epi32(abc, _MM_SHUFFLE(1, 1, 0, 0)), _mm_setr_epi32(0, 2, 0, 2));
    const __m128i c   = _mm_srlv_epi32(_mm_shuffle_epi32(abc, _MM_SHUFFLE(2, 2, 2, 2)), _mm_setr_epi32(0, 0, 0, 4));
    return _mm_or_si128(_mm_and_si128(ab, _mm_setr_epi32(0x3f3f3f3f, 0x30303030, 0x3f3f3f3f, 0x30303030)),
                        _mm_and_si128(c,  _mm_setr_epi32(0, 0x0f0f0f0f, 0, 0x0f0f0f0f)));
}

// A minimum covers 32 weights and a bsum 16, so each minimum stands twice.
MOE_INLINE_AVX2 __m256i doubled_mins(__m128i scales_and_mins) {
    return _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(scales_and_mins, scales_and_mins));
}

// Q6_K weights are q - 32: the product of this with the bsums takes the 32 away from a whole super-block.
MOE_INLINE_AVX2 __m256i q6_offset(__m256i scales) {
    return _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(scales, 5));
}

MOE_INLINE_AVX2 __m128 fold(__m256 v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }

// (0 + 1) + (2 + 3), the order of hadd below
MOE_INLINE_AVX2 float sum_lanes(__m128 v) {
    v = _mm_add_ps(v, _mm_movehdup_ps(v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehl_ps(v, v)));
}

// Expert rows are short, so the final sums count: four columns are added up together, in the order of a single one.
template <int NC> MOE_INLINE_AVX2 void store_sums(const __m128 (&v)[NC], float * out) {
    if constexpr (NC == 4) {
        _mm_storeu_ps(out, _mm_hadd_ps(_mm_hadd_ps(v[0], v[1]), _mm_hadd_ps(v[2], v[3])));
    } else {
        MOE_UNROLL
        for (int c = 0; c < NC; c++) {
            out[c] = sum_lanes(v[c]);
        }
    }
}

template <int NC> MOE_INLINE_AVX2 void store_sums(const __m256 (&v)[NC], float * out) {
    __m128 folded[NC];
    MOE_UNROLL
    for (int c = 0; c < NC; c++) {
        folded[c] = fold(v[c]);
    }
    store_sums<NC>(folded, out);
}

// 32 signed weights of a block
MOE_INLINE_AVX2 __m256i unpack(const block_q8_0 & b) { return load32(b.qs); }

MOE_INLINE_AVX2 __m256i unpack(const block_q4_0 & b) {
    const __m128i q = load16(b.qs);
    const __m256i nibbles = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(q, 4), q), _mm256_set1_epi8(0xF));
    return _mm256_sub_epi8(nibbles, _mm256_set1_epi8(8));
}

//
// AVX2
//
// Inside a super-block everything is integer and exact: unsigned weights times signed activations to 16 bits
// (at most 2 * 63 * 127), times the 16-bit scale to 32 bits.
//

// 32 unsigned weights: sub-block k (0-7) of the super-block
MOE_INLINE_AVX2 __m256i unpack_avx2(const block_q4_K & b, int k) {
    const __m256i q = load32(b.qs + 32*(k/2));
    return _mm256_and_si256(k % 2 ? _mm256_srli_epi16(q, 4) : q, _mm256_set1_epi8(0xF));
}

MOE_INLINE_AVX2 __m256i unpack_avx2(const block_q5_K & b, int k) {
    const __m256i q  = load32(b.qs + 32*(k/2));
    const __m256i lo = _mm256_and_si256(k % 2 ? _mm256_srli_epi16(q, 4) : q, _mm256_set1_epi8(0xF));
    const __m256i qh = load32(b.qh); // bit k is bit 4 of the weight
    const __m256i hi = k < 4 ? _mm256_slli_epi16(qh, 4 - k) : _mm256_srli_epi16(qh, k - 4);
    return _mm256_or_si256(lo, _mm256_and_si256(hi, _mm256_set1_epi8(0x10)));
}

MOE_INLINE_AVX2 __m256i unpack_avx2(const block_q6_K & b, int k) {
    const int half = k/4, g = k % 4;
    const __m256i q  = load32(b.ql + 64*half + 32*(g % 2));
    const __m256i lo = _mm256_and_si256(g < 2 ? q : _mm256_srli_epi16(q, 4), _mm256_set1_epi8(0xF));
    const __m256i qh = load32(b.qh + 32*half); // bits 2g and 2g + 1 are bits 4 and 5 of the weight
    const __m256i hi = g < 2 ? _mm256_slli_epi16(qh, 4 - 2*g) : _mm256_srli_epi16(qh, 2*g - 4);
    return _mm256_or_si256(lo, _mm256_and_si256(hi, _mm256_set1_epi8(0x30)));
}

MOE_INLINE_AVX2 __m256i scaled_products(__m256i q, const int8_t * y, __m256i scale) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(q, load32(y)), scale);
}

template <class Block> struct q4_q5_K_avx2 {
    template <int NC> MOE_AVX2 static void dot(int n, const Block * x, const block_q8_K * const * y, float * out) {
        __m256 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm256_setzero_ps(); }

        for (int i = 0; i < n/256; i++) {
            const Block & b = x[i];
            prefetch_ahead(&b);
            const __m128i sm     = unpack_scales(b.scales);
            const __m128i scales = _mm_cvtepu8_epi16(sm);
            const __m256i mins   = doubled_mins(sm);
            const __m128  dm     = load_scales(b);
            const __m256  d      = _mm256_broadcastss_ps(dm);
            const __m256  dmin   = _mm256_broadcastss_ps(_mm_movehdup_ps(dm));

            __m256i sum[NC];
            MOE_UNROLL
            for (int c = 0; c < NC; c++) { sum[c] = _mm256_setzero_si256(); }
            MOE_UNROLL
            for (int k = 0; k < 8; k++) {
                const __m256i q = unpack_avx2(b, k);
                const __m128i pick = _mm_set1_epi16((short) (0x0100 + 0x0202*k)); // bytes 2k, 2k + 1
                const __m256i scale = _mm256_broadcastq_epi64(_mm_shuffle_epi8(scales, pick));
                MOE_UNROLL
                for (int c = 0; c < NC; c++) {
                    sum[c] = _mm256_add_epi32(sum[c], scaled_products(q, y[c][i].qs + 32*k, scale));
                }
            }
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m256  yd   = _mm256_set1_ps(y[c][i].d);
                const __m256i msum = _mm256_madd_epi16(mins, load32(y[c][i].bsums));
                acc[c] = _mm256_fmadd_ps (_mm256_mul_ps(d,    yd), _mm256_cvtepi32_ps(sum[c]), acc[c]);
                acc[c] = _mm256_fnmadd_ps(_mm256_mul_ps(dmin, yd), _mm256_cvtepi32_ps(msum),   acc[c]);
            }
        }
        store_sums<NC>(acc, out);
    }
};

struct q6_K_avx2 {
    template <int NC> MOE_AVX2 static void dot(int n, const block_q6_K * x, const block_q8_K * const * y, float * out) {
        __m256 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm256_setzero_ps(); }

        for (int i = 0; i < n/256; i++) {
            const block_q6_K & b = x[i];
            prefetch_ahead(&b);
            const __m128i scales = load16(b.scales);
            const __m256i offset = q6_offset(_mm256_cvtepi8_epi16(scales));
            const __m256  d      = _mm256_broadcastss_ps(half_to_float(b.d));

            __m256i sum[NC];
            MOE_UNROLL
            for (int c = 0; c < NC; c++) { sum[c] = _mm256_madd_epi16(offset, load32(y[c][i].bsums)); }
            MOE_UNROLL
            for (int k = 0; k < 8; k++) {
                const __m256i q = unpack_avx2(b, k);
                // scale 2k for the first 16 weights, 2k + 1 for the others
                const __m128i pick  = _mm_set_epi64x(0x0101010101010101*(2*k + 1), 0x0101010101010101*(2*k));
                const __m256i scale = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, pick));
                MOE_UNROLL
                for (int c = 0; c < NC; c++) {
                    sum[c] = _mm256_add_epi32(sum[c], scaled_products(q, y[c][i].qs + 32*k, scale));
                }
            }
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m256 yd = _mm256_set1_ps(y[c][i].d);
                acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(d, yd), _mm256_cvtepi32_ps(sum[c]), acc[c]);
            }
        }
        store_sums<NC>(acc, out);
    }
};

template <class Block> struct q8_q4_0_avx2 {
    template <int NC> MOE_AVX2 static void dot(int n, const Block * x, const block_q8_0 * const * y, float * out) {
        const __m256i ones = _mm256_set1_epi16(1);
        __m256 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm256_setzero_ps(); }

        for (int i = 0; i < n/32; i++) {
            const __m256i q    = unpack(x[i]);
            const __m256i qabs = _mm256_abs_epi8(q);
            const __m128  d    = load_scales(x[i]);
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                // one factor has to be unsigned: the weight's sign goes to the activation (never -128: ggml rounds to +-127)
                const __m256i p = _mm256_maddubs_epi16(qabs, _mm256_sign_epi8(load32(y[c][i].qs), q));
                const __m256  s = _mm256_broadcastss_ps(_mm_mul_ss(d, load_scales(y[c][i])));
                acc[c] = _mm256_fmadd_ps(s, _mm256_cvtepi32_ps(_mm256_madd_epi16(p, ones)), acc[c]);
            }
        }
        store_sums<NC>(acc, out);
    }
};

//
// AVX-512 VNNI
//
// The same arithmetic at twice the width; vpdpwssd multiplies by the scale and adds in one instruction.
//

MOE_INLINE_AVX512 __m512i load64(const void * p) { return _mm512_loadu_si512(p); }

MOE_INLINE_AVX512 __m512i concat(__m256i lo, __m256i hi) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1);
}

// 16-bit lanes: a in the low half, b in the high half
MOE_INLINE_AVX512 __m512i halves(int a, int b) { return concat(_mm256_set1_epi16((short) a), _mm256_set1_epi16((short) b)); }

MOE_INLINE_AVX512 __m512i low_nibbles(__m512i q) { return _mm512_and_si512(q, _mm512_set1_epi8(0xF)); }

// 32 bytes in both halves: a load, where joining two registers would be a shuffle
MOE_INLINE_AVX512 __m512i load_twice(const void * p) { return _mm512_broadcast_i64x4(load32(p)); }

// lo | (hi & mask)
MOE_INLINE_AVX512 __m512i insert_bits(__m512i lo, __m512i hi, char mask) {
    return _mm512_ternarylogic_epi32(lo, hi, _mm512_set1_epi8(mask), 0xF8);
}

// 64 unsigned weights: part j (0-3) of the super-block
MOE_INLINE_AVX512 __m512i unpack_avx512(const block_q4_K & b, int j) {
    return low_nibbles(_mm512_srlv_epi16(load_twice(b.qs + 32*j), halves(0, 4)));
}

MOE_INLINE_AVX512 __m512i unpack_avx512(const block_q5_K & b, int j) {
    const __m512i lo = low_nibbles(_mm512_srlv_epi16(load_twice(b.qs + 32*j), halves(0, 4)));
    const __m512i qh = load_twice(b.qh); // bits 2j and 2j + 1 are bit 4 of the two halves
    const __m512i hi = j < 2 ? _mm512_sllv_epi16(qh, halves(4 - 2*j, 3 - 2*j)) : _mm512_srlv_epi16(qh, halves(2*j - 4, 2*j - 3));
    return insert_bits(lo, hi, 0x10);
}

MOE_INLINE_AVX512 __m512i unpack_avx512(const block_q6_K & b, int j) {
    const __m512i q  = load64(b.ql + 64*(j/2));
    const __m512i lo = low_nibbles(j % 2 ? _mm512_srli_epi16(q, 4) : q);
    const __m512i qh = load_twice(b.qh + 32*(j/2));
    // bits 4 and 5 of the two halves: bits 0-1 and 2-3 of qh for an even part, bits 4-5 and 6-7 for an odd one
    const __m512i hi = j % 2 ? _mm512_srlv_epi16(qh, halves(0, 2)) : _mm512_sllv_epi16(qh, halves(4, 2));
    return insert_bits(lo, hi, 0x30);
}

template <int NC> MOE_INLINE_AVX512 void store_sums(const __m512 (&v)[NC], float * out) {
    __m256 folded[NC];
    MOE_UNROLL
    for (int c = 0; c < NC; c++) {
        folded[c] = _mm256_add_ps(_mm512_castps512_ps256(v[c]), _mm512_extractf32x8_ps(v[c], 1));
    }
    store_sums<NC>(folded, out);
}

template <class Block> struct q4_q5_K_avx512 {
    template <int NC> MOE_AVX512 static void dot(int n, const Block * x, const block_q8_K * const * y, float * out) {
        __m512 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm512_setzero_ps(); }

        for (int i = 0; i < n/256; i++) {
            const Block & b = x[i];
            prefetch_ahead(&b);
            const __m128i sm     = unpack_scales(b.scales);
            const __m512i scales = _mm512_castsi128_si512(_mm_cvtepu8_epi16(sm));
            const __m256i mins   = doubled_mins(sm);
            const __m128  dm     = load_scales(b);
            const __m512  d      = _mm512_broadcastss_ps(dm);
            const __m512  dmin   = _mm512_broadcastss_ps(_mm_movehdup_ps(dm));

            __m512i sum[NC];
            MOE_UNROLL
            for (int c = 0; c < NC; c++) { sum[c] = _mm512_setzero_si512(); }
            MOE_UNROLL
            for (int j = 0; j < 4; j++) {
                const __m512i q = unpack_avx512(b, j);
                const __m512i scale = _mm512_permutexvar_epi16(halves(2*j, 2*j + 1), scales);
                MOE_UNROLL
                for (int c = 0; c < NC; c++) {
                    sum[c] = _mm512_dpwssd_epi32(sum[c], _mm512_maddubs_epi16(q, load64(y[c][i].qs + 64*j)), scale);
                }
            }
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m512  yd   = _mm512_set1_ps(y[c][i].d);
                const __m512i msum = _mm512_zextsi256_si512(_mm256_madd_epi16(mins, load32(y[c][i].bsums)));
                acc[c] = _mm512_fmadd_ps (_mm512_mul_ps(d,    yd), _mm512_cvtepi32_ps(sum[c]), acc[c]);
                acc[c] = _mm512_fnmadd_ps(_mm512_mul_ps(dmin, yd), _mm512_cvtepi32_ps(msum),   acc[c]);
            }
        }
        store_sums<NC>(acc, out);
    }
};

struct q6_K_avx512 {
    template <int NC> MOE_AVX512 static void dot(int n, const block_q6_K * x, const block_q8_K * const * y, float * out) {
        const __m512i groups = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm256_set_m128i(_mm_set1_epi16(1), _mm_setzero_si128())),
            _mm256_set_m128i(_mm_set1_epi16(3), _mm_set1_epi16(2)), 1);
        __m512 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm512_setzero_ps(); }

        for (int i = 0; i < n/256; i++) {
            const block_q6_K & b = x[i];
            prefetch_ahead(&b);
            const __m256i scales = _mm256_cvtepi8_epi16(load16(b.scales));
            const __m256i offset = q6_offset(scales);
            const __m512  d      = _mm512_broadcastss_ps(half_to_float(b.d));

            __m512i sum[NC];
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                sum[c] = _mm512_zextsi256_si512(_mm256_madd_epi16(offset, load32(y[c][i].bsums)));
            }
            MOE_UNROLL
            for (int j = 0; j < 4; j++) {
                const __m512i q = unpack_avx512(b, j);
                // scales 4j ... 4j + 3, one for 16 weights
                const __m512i pick  = _mm512_add_epi16(groups, _mm512_set1_epi16((short) (4*j)));
                const __m512i scale = _mm512_permutexvar_epi16(pick, _mm512_castsi256_si512(scales));
                MOE_UNROLL
                for (int c = 0; c < NC; c++) {
                    sum[c] = _mm512_dpwssd_epi32(sum[c], _mm512_maddubs_epi16(q, load64(y[c][i].qs + 64*j)), scale);
                }
            }
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m512 yd = _mm512_set1_ps(y[c][i].d);
                acc[c] = _mm512_fmadd_ps(_mm512_mul_ps(d, yd), _mm512_cvtepi32_ps(sum[c]), acc[c]);
            }
        }
        store_sums<NC>(acc, out);
    }
};

// Blocks of 32 weights have a scale each, so these stay at 256 bits: joining two blocks would cost what it saves.
template <class Block> struct q8_q4_0_avx512 {
    template <int NC> MOE_AVX512 static void dot(int n, const Block * x, const block_q8_0 * const * y, float * out) {
        const __m256i flip = _mm256_set1_epi8((char) 0x80);
        __m256 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm256_setzero_ps(); }

        for (int i = 0; i < n/32; i++) {
            const __m256i q = unpack(x[i]);
            const __m128  d = load_scales(x[i]);
            // vpdpbusd wants one factor unsigned: that is activation + 128, and -128 * weight, the same for all
            // columns, is where each sum starts
            const __m256i start = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_dpbusd_epi32(_mm256_setzero_si256(), flip, q));
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m256i p = _mm256_dpbusd_epi32(start, _mm256_xor_si256(load32(y[c][i].qs), flip), q);
                const __m256  s = _mm256_broadcastss_ps(_mm_mul_ss(d, load_scales(y[c][i])));
                acc[c] = _mm256_fmadd_ps(s, _mm256_cvtepi32_ps(p), acc[c]);
            }
        }
        store_sums<NC>(acc, out);
    }
};

template <class Kernel, class Block, class Column>
void row_dot(int n, const void * x, const void * const * y, int n_cols, float * out, moe_vec_dot_t) {
    GGML_ASSERT(n_cols >= 1 && n_cols <= MOE_MAX_COLS);
    const Block * row = (const Block *) x;
    const Column * cols[MOE_MAX_COLS];
    for (int c = 0; c < n_cols; c++) {
        cols[c] = (const Column *) y[c];
    }
    switch (n_cols) {
        case 1: Kernel::template dot<1>(n, row, cols, out); break;
        case 2: Kernel::template dot<2>(n, row, cols, out); break;
        case 3: Kernel::template dot<3>(n, row, cols, out); break;
        case 4: Kernel::template dot<4>(n, row, cols, out); break;
    }
}

moe_row_dot_t own_kernel(ggml_type type, int level) {
    const bool wide = level >= 2;
    switch (type) {
        case GGML_TYPE_Q4_0: return wide ? row_dot<q8_q4_0_avx512<block_q4_0>, block_q4_0, block_q8_0>
                                         : row_dot<q8_q4_0_avx2<block_q4_0>,   block_q4_0, block_q8_0>;
        case GGML_TYPE_Q8_0: return wide ? row_dot<q8_q4_0_avx512<block_q8_0>, block_q8_0, block_q8_0>
                                         : row_dot<q8_q4_0_avx2<block_q8_0>,   block_q8_0, block_q8_0>;
        case GGML_TYPE_Q4_K: return wide ? row_dot<q4_q5_K_avx512<block_q4_K>, block_q4_K, block_q8_K>
                                         : row_dot<q4_q5_K_avx2<block_q4_K>,   block_q4_K, block_q8_K>;
        case GGML_TYPE_Q5_K: return wide ? row_dot<q4_q5_K_avx512<block_q5_K>, block_q5_K, block_q8_K>
                                         : row_dot<q4_q5_K_avx2<block_q5_K>,   block_q5_K, block_q8_K>;
        case GGML_TYPE_Q6_K: return wide ? row_dot<q6_K_avx512, block_q6_K, block_q8_K>
                                         : row_dot<q6_K_avx2,   block_q6_K, block_q8_K>;
        default: return nullptr;
    }
}

bool cpu_has_f16c() { // not a name that every compiler's __builtin_cpu_supports knows
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

int detect_level() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !cpu_has_f16c()) {
        return 0;
    }
    const bool avx512 = __builtin_cpu_supports("avx512f")  && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    return avx512 ? 2 : 1;
}

#else

moe_row_dot_t own_kernel(ggml_type, int) { return nullptr; }
int detect_level() { return 0; }

#endif

std::atomic<int> g_isa_limit{2};

int isa_level() {
    static const int detected = detect_level();
    const int limit = g_isa_limit.load();
    return detected < limit ? detected : limit;
}

const char * isa_name(int level) {
    return level >= 2 ? "avx512-vnni" : level == 1 ? "avx2" : "none";
}

} // namespace

moe_kernel moe_kernel_for(ggml_type type, bool allow_own) {
    const int level = isa_level();
    if (allow_own && level > 0) {
        if (moe_row_dot_t fn = own_kernel(type, level)) {
            return { fn, isa_name(level), type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q5_K || type == GGML_TYPE_Q6_K };
        }
    }
    return { row_dot_generic, "ggml vec_dot", false };
}

const char * moe_kernel_isa() {
    return isa_name(isa_level());
}

int moe_kernel_set_isa_limit(int level) {
    g_isa_limit = level < 0 ? 0 : level > 2 ? 2 : level;
    return isa_level();
}
