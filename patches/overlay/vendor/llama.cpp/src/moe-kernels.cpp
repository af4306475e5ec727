#include "moe-kernels.h"

#include <atomic>
#include <cstring>

// GCC on Windows keeps the stack aligned to 16 bytes only (GCC bug 54412): spilled vectors would fault there.
#if defined(__x86_64__) && defined(__GNUC__) && !(defined(_WIN32) && !defined(__clang__))
#define MOE_X86 1
#if !defined(__clang__) && __GNUC__ < 13
// the headers' own _mm512_undefined_*() sets this off hundreds of times (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#if defined(__clang__) || __GNUC__ >= 10
#define MOE_HAS_BF16 1
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
#define MOE_BF16          __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")))
#define MOE_INLINE        inline __attribute__((always_inline))
#define MOE_INLINE_AVX2   MOE_INLINE MOE_AVX2
#define MOE_INLINE_AVX512 MOE_INLINE MOE_AVX512
// sums live in arrays of one register per column: only unrolled loops keep them in registers
#define MOE_UNROLL        _Pragma("GCC unroll 8")

//
// block layouts, as in ggml-common.h
//

struct block_q4_0   { uint16_t d; uint8_t qs[16]; };
struct block_q4_1   { uint16_t d, m; uint8_t qs[16]; };
struct block_q5_0   { uint16_t d; uint8_t qh[4]; uint8_t qs[16]; };
struct block_q5_1   { uint16_t d, m; uint8_t qh[4]; uint8_t qs[16]; };
struct block_q8_0   { uint16_t d; int8_t qs[32]; };
struct block_q8_1   { uint16_t d, s; int8_t qs[32]; };
struct block_iq4_nl { uint16_t d; uint8_t qs[16]; };
struct block_mxfp4  { uint8_t e; uint8_t qs[16]; };
struct block_q2_K   { uint8_t scales[16]; uint8_t qs[64]; uint16_t d, dmin; };
struct block_q3_K   { uint8_t hmask[32]; uint8_t qs[64]; uint8_t scales[12]; uint16_t d; };
struct block_q4_K   { uint16_t d, dmin; uint8_t scales[12]; uint8_t qs[128]; };
struct block_q5_K   { uint16_t d, dmin; uint8_t scales[12]; uint8_t qh[32]; uint8_t qs[128]; };
struct block_q6_K   { uint8_t ql[128]; uint8_t qh[64]; int8_t scales[16]; uint16_t d; };
struct block_iq4_xs { uint16_t d, scales_h; uint8_t scales_l[4]; uint8_t qs[128]; };
struct block_q8_K   { float d; int8_t qs[256]; int16_t bsums[16]; };
struct float16      { uint16_t bits; };
struct bfloat16     { uint16_t bits; };

static_assert(sizeof(block_q4_0)   ==  18, "q4_0 layout");
static_assert(sizeof(block_q4_1)   ==  20, "q4_1 layout");
static_assert(sizeof(block_q5_0)   ==  22, "q5_0 layout");
static_assert(sizeof(block_q5_1)   ==  24, "q5_1 layout");
static_assert(sizeof(block_q8_0)   ==  34, "q8_0 layout");
static_assert(sizeof(block_q8_1)   ==  36, "q8_1 layout");
static_assert(sizeof(block_iq4_nl) ==  18, "iq4_nl layout");
static_assert(sizeof(block_mxfp4)  ==  17, "mxfp4 layout");
static_assert(sizeof(block_q2_K)   ==  84, "q2_K layout");
static_assert(sizeof(block_q3_K)   == 110, "q3_K layout");
static_assert(sizeof(block_q4_K)   == 144, "q4_K layout");
static_assert(sizeof(block_q5_K)   == 176, "q5_K layout");
static_assert(sizeof(block_q6_K)   == 210, "q6_K layout");
static_assert(sizeof(block_iq4_xs) == 136, "iq4_xs layout");
static_assert(sizeof(block_q8_K)   == 292, "q8_K layout");

//
// helpers for both instruction sets
//

// How far ahead of a block, in bytes, weights are prefetched: to L2, or over a shorter distance to L1. It may run past the last row: a
// prefetch does not fault. docs/kernels.md has what it is worth: on a Xeon up to a half, since its own prefetcher ends with each page.
constexpr int TO_L2 = 4608;
template <class Block> constexpr int PREFETCH = TO_L2;
template <> constexpr int PREFETCH<block_q2_K>   = 2304;
template <> constexpr int PREFETCH<block_q3_K>   = 2304;
template <> constexpr int PREFETCH<block_q4_K>   = 2304;
template <> constexpr int PREFETCH<block_q5_K>   = 2304;
template <> constexpr int PREFETCH<block_q6_K>   = 2304;
template <> constexpr int PREFETCH<block_iq4_xs> = 2304;

std::atomic<int> g_prefetch_multiple{1};

template <class Block> int prefetch_distance() {
    return PREFETCH<Block>*g_prefetch_multiple.load(std::memory_order_relaxed);
}

template <int N = 1, class Block> MOE_INLINE void prefetch_ahead(const Block * blocks, int distance) {
    if (distance > 0) {
        MOE_UNROLL
        for (int line = 0; line < N*(int) sizeof(Block); line += 64) {
            _mm_prefetch((const char *) blocks + distance + line, PREFETCH<Block> < TO_L2 ? _MM_HINT_T0 : _MM_HINT_T1);
        }
    }
}

MOE_INLINE_AVX2 __m256i load32(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }
MOE_INLINE_AVX2 __m128i load16(const void * p) { return _mm_loadu_si128((const __m128i *) p); }
MOE_INLINE_AVX2 __m128i load4 (const void * p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm_cvtsi32_si128(v);
}

MOE_INLINE_AVX2 __m128 half_to_float(uint16_t h) { return _mm_cvtph_ps(_mm_cvtsi32_si128(h)); }

// The float scales at the start of a block: d in the first lane and, where there is one, the minimum in the second. Reads
// 8 bytes, fewer than any block has, which saves the way through an integer register; the other lanes are not used.
template <class Block> MOE_INLINE_AVX2 __m128 load_scales(const Block & b) {
    return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *) &b.d));
}
MOE_INLINE_AVX2 __m128 load_scales(const block_q2_K & b) { return _mm_cvtph_ps(load4(&b.d)); } // they end the block

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

// 16 bytes to 32 numbers of 4 bits: the low ones first
MOE_INLINE_AVX2 __m256i nibbles(const uint8_t * qs) {
    const __m128i q = load16(qs);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(q, 4), q), _mm256_set1_epi8(0xF));
}

// weights of 4 bits that are looked up: the table of IQ4_NL and IQ4_XS, and E2M1 of MXFP4 times two
MOE_INLINE_AVX2 __m128i iq4_values() {
    return _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
}
MOE_INLINE_AVX2 __m128i mxfp4_values() {
    return _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
}

//
// super-blocks of 256 weights, for both instruction sets
//

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

// The 16 signed scales of a super-block, one for 16 weights.
MOE_INLINE_AVX2 __m128i scales_of(const block_q6_K & b) { return load16(b.scales); }
MOE_INLINE_AVX2 __m128i scales_of(const block_q2_K & b) { return _mm_and_si128(load16(b.scales), _mm_set1_epi8(0xF)); }

// Q3_K: 6 bits less 32. The 12 packed bytes, as words a b c: scales 0-3 have their low 4 bits in a, 4-7 in b, 8-11 in a >> 4,
// 12-15 in b >> 4; their high 2 bits are in c, c >> 2, c >> 4 and c >> 6. Loads 16 bytes from the weights on: the block ends soon.
MOE_INLINE_AVX2 __m128i scales_of(const block_q3_K & b) {
    const __m128i qabc = load16(b.scales - 4);
    const __m128i lo = _mm_srlv_epi32(_mm_shuffle_epi32(qabc, _MM_SHUFFLE(2, 1, 2, 1)), _mm_setr_epi32(0, 0, 4, 4));
    const __m128i hi = _mm_srlv_epi32(_mm_shuffle_epi32(qabc, _MM_SHUFFLE(3, 3, 3, 3)), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i scales = _mm_or_si128(_mm_and_si128(lo, _mm_set1_epi8(0xF)),
                                        _mm_slli_epi16(_mm_and_si128(hi, _mm_set1_epi8(3)), 4));
    return _mm_sub_epi8(scales, _mm_set1_epi8(32));
}

// What the bsums are multiplied by. Q6_K and Q3_K weights are q - 2^ZERO_SHIFT: this takes the zero point away from a whole
// super-block. Q2_K has minima instead, to be multiplied by a float scale of their own.
template <class Block> constexpr int ZERO_SHIFT = 0;
template <> constexpr int ZERO_SHIFT<block_q6_K> = 5;
template <> constexpr int ZERO_SHIFT<block_q3_K> = 2;

template <class Block> MOE_INLINE_AVX2 __m256i bsum_factors(const Block &, __m256i scales) {
    return _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(scales, ZERO_SHIFT<Block>));
}
MOE_INLINE_AVX2 __m256i bsum_factors(const block_q2_K & b, __m256i) {
    return _mm256_and_si256(_mm256_srli_epi16(_mm256_cvtepu8_epi16(load16(b.scales)), 4), _mm256_set1_epi16(0xF));
}

// IQ4_XS: 8 scales of 6 bits less 32, one for 32 weights, low 4 and high 2 bits apart
MOE_INLINE_AVX2 __m256i scales_of(const block_iq4_xs & b) {
    const __m256i lo = _mm256_srlv_epi32(_mm256_broadcastd_epi32(load4(b.scales_l)), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i hi = _mm256_srlv_epi32(_mm256_set1_epi32(b.scales_h), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    const __m256i scales = _mm256_or_si256(_mm256_and_si256(lo, _mm256_set1_epi32(0xF)),
                                           _mm256_slli_epi32(_mm256_and_si256(hi, _mm256_set1_epi32(3)), 4));
    return _mm256_sub_epi32(scales, _mm256_set1_epi32(32));
}

//
// blocks of 32 weights, for both instruction sets
//

// 32 signed weights
MOE_INLINE_AVX2 __m256i unpack(const block_q8_0 & b) { return load32(b.qs); }

MOE_INLINE_AVX2 __m256i unpack(const block_q4_0 & b) { return _mm256_sub_epi8(nibbles(b.qs), _mm256_set1_epi8(8)); }

MOE_INLINE_AVX2 __m256i unpack(const block_iq4_nl & b) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(iq4_values()), nibbles(b.qs));
}

MOE_INLINE_AVX2 __m256i unpack(const block_mxfp4 & b) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(mxfp4_values()), nibbles(b.qs));
}

// bytes of ones where the bit of a weight is set: bit i of the 32 belongs to weight i
MOE_INLINE_AVX2 __m256i spread_bits(const uint8_t * qh) {
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of  = _mm256_set1_epi64x((long long) 0x8040201008040201);
    const __m256i bytes   = _mm256_shuffle_epi8(_mm256_broadcastd_epi32(load4(qh)), byte_of);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
}

MOE_INLINE_AVX2 __m256i unpack(const block_q5_0 & b) { // the fifth bit, less 16: where it is not set, the sign bits are
    return _mm256_or_si256(nibbles(b.qs), _mm256_andnot_si256(spread_bits(b.qh), _mm256_set1_epi8((char) 0xF0)));
}

// 32 unsigned weights, of types that have a minimum
MOE_INLINE_AVX2 __m256i unpack(const block_q4_1 & b) { return nibbles(b.qs); }

MOE_INLINE_AVX2 __m256i unpack(const block_q5_1 & b) {
    return _mm256_or_si256(nibbles(b.qs), _mm256_and_si256(spread_bits(b.qh), _mm256_set1_epi8(0x10)));
}

// The float scales of M blocks (1 or 8) at once: block by block, converting and spreading them would be half of the work.
constexpr int TILE = 8;

template <int M, class Block> MOE_INLINE_AVX2 __m256 scales_of_blocks(const Block * b) {
    __m128i h = _mm_cvtsi32_si128(b[0].d);
    if constexpr (M == TILE) {
        h = _mm_insert_epi16(h, b[1].d, 1);
        h = _mm_insert_epi16(h, b[2].d, 2);
        h = _mm_insert_epi16(h, b[3].d, 3);
        h = _mm_insert_epi16(h, b[4].d, 4);
        h = _mm_insert_epi16(h, b[5].d, 5);
        h = _mm_insert_epi16(h, b[6].d, 6);
        h = _mm_insert_epi16(h, b[7].d, 7);
    }
    return _mm256_cvtph_ps(h);
}

// MXFP4: 2^(e - 127), halved since the table is doubled. Where e < 2 that is no normal float: its bits are 2^21 << e.
template <int M> MOE_INLINE_AVX2 __m256 scales_of_blocks(const block_mxfp4 * b) {
    __m128i packed = _mm_cvtsi32_si128(b[0].e);
    if constexpr (M == TILE) {
        packed = _mm_insert_epi8(packed, b[1].e, 1);
        packed = _mm_insert_epi8(packed, b[2].e, 2);
        packed = _mm_insert_epi8(packed, b[3].e, 3);
        packed = _mm_insert_epi8(packed, b[4].e, 4);
        packed = _mm_insert_epi8(packed, b[5].e, 5);
        packed = _mm_insert_epi8(packed, b[6].e, 6);
        packed = _mm_insert_epi8(packed, b[7].e, 7);
    }
    const __m256i one    = _mm256_set1_epi32(1);
    const __m256i e      = _mm256_cvtepu8_epi32(packed);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    const __m256i small  = _mm256_sllv_epi32(_mm256_set1_epi32(1 << 21), _mm256_min_epu32(e, one));
    return _mm256_castsi256_ps(_mm256_max_epi32(normal, small));
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

MOE_INLINE_AVX2 __m256i unpack_avx2(const block_q2_K & b, int k) {
    return _mm256_and_si256(_mm256_srli_epi16(load32(b.qs + 32*(k/4)), 2*(k % 4)), _mm256_set1_epi8(3));
}

MOE_INLINE_AVX2 __m256i unpack_avx2(const block_q3_K & b, int k) {
    const __m256i lo = _mm256_and_si256(_mm256_srli_epi16(load32(b.qs + 32*(k/4)), 2*(k % 4)), _mm256_set1_epi8(3));
    const __m256i qh = load32(b.hmask); // bit k is bit 2 of the weight
    const __m256i hi = k < 2 ? _mm256_slli_epi16(qh, 2 - k) : _mm256_srli_epi16(qh, k - 2);
    return _mm256_or_si256(lo, _mm256_and_si256(hi, _mm256_set1_epi8(4)));
}

MOE_INLINE_AVX2 __m256i scaled_products(__m256i q, const int8_t * y, __m256i scale) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(q, load32(y)), scale);
}

// One factor has to be unsigned: the weight's sign goes to the activation (never -128: ggml rounds to +-127).
MOE_INLINE_AVX2 __m256i signed_products(__m256i q, __m256i qabs, const int8_t * y) {
    return _mm256_maddubs_epi16(qabs, _mm256_sign_epi8(load32(y), q));
}

// Q4_K and Q5_K: 8 scales and 8 minima
template <class Block> struct k32_avx2 {
    using row    = Block;
    using column = block_q8_K;
    template <int NC> MOE_AVX2 static void dot(int n, const row * x, const column * const * y, float * out) {
        const int ahead = prefetch_distance<row>();
        __m256 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm256_setzero_ps(); }

        for (int i = 0; i < n/256; i++) {
            const row & b = x[i];
            prefetch_ahead(&b, ahead);
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
                const __m256 p    = _mm256_fnmadd_ps(dmin, _mm256_cvtepi32_ps(msum), _mm256_mul_ps(d, _mm256_cvtepi32_ps(sum[c])));
                acc[c] = _mm256_fmadd_ps(yd, p, acc[c]);
            }
        }
        store_sums<NC>(acc, out);
    }
};

// Q6_K, Q3_K and Q2_K: 16 scales; Q2_K has 16 minima too
template <class Block> struct k16_avx2 {
    using row    = Block;
    using column = block_q8_K;
    template <int NC> MOE_AVX2 static void dot(int n, const row * x, const column * const * y, float * out) {
        constexpr bool has_mins = ZERO_SHIFT<row> == 0;
        const int ahead = prefetch_distance<row>();
        __m256 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm256_setzero_ps(); }

        for (int i = 0; i < n/256; i++) {
            const row & b = x[i];
            prefetch_ahead(&b, ahead);
            const __m128i scales = scales_of(b);
            const __m256i factor = bsum_factors(b, _mm256_cvtepi8_epi16(scales));

            __m256i sum[NC];
            __m256i zero[NC]; // the part of the minima, or of the zero point
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                zero[c] = _mm256_madd_epi16(factor, load32(y[c][i].bsums));
                sum[c]  = has_mins ? _mm256_setzero_si256() : zero[c];
            }
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
            const __m128 dm   = has_mins ? load_scales(b) : half_to_float(b.d);
            const __m256 d    = _mm256_broadcastss_ps(dm);
            const __m256 dmin = _mm256_broadcastss_ps(_mm_movehdup_ps(dm));
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m256 yd = _mm256_set1_ps(y[c][i].d);
                acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(d, yd), _mm256_cvtepi32_ps(sum[c]), acc[c]);
                if constexpr (has_mins) {
                    acc[c] = _mm256_fnmadd_ps(_mm256_mul_ps(dmin, yd), _mm256_cvtepi32_ps(zero[c]), acc[c]);
                }
            }
        }
        store_sums<NC>(acc, out);
    }
};

struct iq4_xs_avx2 {
    using row    = block_iq4_xs;
    using column = block_q8_K;
    template <int NC> MOE_AVX2 static void dot(int n, const row * x, const column * const * y, float * out) {
        const int ahead = prefetch_distance<row>();
        const __m256i values = _mm256_broadcastsi128_si256(iq4_values());
        __m256 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm256_setzero_ps(); }

        for (int i = 0; i < n/256; i++) {
            const row & b = x[i];
            prefetch_ahead(&b, ahead);
            const __m256i scales = scales_of(b);
            const __m256i pairs  = _mm256_blend_epi16(scales, _mm256_slli_epi32(scales, 16), 0xAA); // each 16-bit scale twice

            __m256i sum[NC];
            MOE_UNROLL
            for (int c = 0; c < NC; c++) { sum[c] = _mm256_setzero_si256(); }
            MOE_UNROLL
            for (int k = 0; k < 8; k++) {
                const __m256i q     = _mm256_shuffle_epi8(values, nibbles(b.qs + 16*k));
                const __m256i qabs  = _mm256_abs_epi8(q);
                const __m256i scale = _mm256_permutevar8x32_epi32(pairs, _mm256_set1_epi32(k));
                MOE_UNROLL
                for (int c = 0; c < NC; c++) {
                    const __m256i p = signed_products(q, qabs, y[c][i].qs + 32*k); // at most 2 * 127 * 127
                    sum[c] = _mm256_add_epi32(sum[c], _mm256_madd_epi16(p, scale));
                }
            }
            const __m256 d = _mm256_broadcastss_ps(load_scales(b));
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m256 yd = _mm256_set1_ps(y[c][i].d);
                acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(d, yd), _mm256_cvtepi32_ps(sum[c]), acc[c]);
            }
        }
        store_sums<NC>(acc, out);
    }
};

// blocks of 32 signed weights
template <class Block> struct b32_avx2 {
    using row    = Block;
    using column = block_q8_0;
    template <int NC, int M>
    MOE_INLINE_AVX2 static void add_blocks(const row * x, const column * const * y, int i, __m256 (&acc)[NC]) {
        const __m256i ones = _mm256_set1_epi16(1);
        const __m256 d = scales_of_blocks<M>(x + i);
        float scale[NC][TILE];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { _mm256_storeu_ps(scale[c], _mm256_mul_ps(d, scales_of_blocks<M>(y[c] + i))); }
        asm("" : "+m"(scale)); // a scale is to be spread by loading it: the compiler would use two shuffles
        MOE_UNROLL
        for (int k = 0; k < M; k++) {
            const __m256i q = unpack(x[i + k]);
            const __m256i qabs = _mm256_abs_epi8(q);
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m256i p = _mm256_madd_epi16(signed_products(q, qabs, y[c][i + k].qs), ones);
                acc[c] = _mm256_fmadd_ps(_mm256_set1_ps(scale[c][k]), _mm256_cvtepi32_ps(p), acc[c]);
            }
        }
    }

    template <int NC> MOE_AVX2 static void dot(int n, const row * x, const column * const * y, float * out) {
        __m256 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm256_setzero_ps(); }
        const int ahead = prefetch_distance<row>();
        int i = 0;
        for (; i + TILE <= n/32; i += TILE) {
            prefetch_ahead<TILE>(x + i, ahead);
            add_blocks<NC, TILE>(x, y, i, acc);
        }
        for (; i < n/32; i++) {
            add_blocks<NC, 1>(x, y, i, acc);
        }
        store_sums<NC>(acc, out);
    }
};

// Q4_1 and Q5_1: 32 unsigned weights with a minimum, which the block sum of the column is multiplied by
template <class Block> struct b32_min_avx2 {
    using row    = Block;
    using column = block_q8_1;
    template <int NC> MOE_AVX2 static void dot(int n, const row * x, const column * const * y, float * out) {
        const __m256i ones = _mm256_set1_epi16(1);
        __m256 acc[NC];
        __m128 mins[NC]; // in the second lane
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm256_setzero_ps(); mins[c] = _mm_setzero_ps(); }

        const int ahead = prefetch_distance<row>();
        for (int i = 0; i < n/32; i++) {
            if (i % TILE == 0) {
                prefetch_ahead<TILE>(x + i, ahead);
            }
            const __m256i q  = unpack(x[i]);
            const __m128  dm = load_scales(x[i]);
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m256i p = _mm256_madd_epi16(_mm256_maddubs_epi16(q, load32(y[c][i].qs)), ones);
                const __m128  y_ds = load_scales(y[c][i]);
                acc[c]  = _mm256_fmadd_ps(_mm256_broadcastss_ps(_mm_mul_ps(dm, y_ds)), _mm256_cvtepi32_ps(p), acc[c]);
                mins[c] = _mm_fmadd_ps(dm, y_ds, mins[c]);
            }
        }
        store_sums<NC>(acc, out);
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { out[c] += _mm_cvtss_f32(_mm_movehdup_ps(mins[c])); }
    }
};

// 16 floats; BF16 puts the even ones first, which is right where both factors do so
MOE_INLINE_AVX2 void widen(const float16 * p, __m256 (&v)[2]) {
    v[0] = _mm256_cvtph_ps(load16(p));
    v[1] = _mm256_cvtph_ps(load16(p + 8));
}
MOE_INLINE_AVX2 void widen(const bfloat16 * p, __m256 (&v)[2]) {
    const __m256i h = load32(p);
    v[0] = _mm256_castsi256_ps(_mm256_slli_epi32(h, 16));
    v[1] = _mm256_castsi256_ps(_mm256_and_si256(h, _mm256_set1_epi32((int) 0xFFFF0000)));
}

// the last, incomplete step of a row, with zeros behind it
template <class Float, int N> struct padded {
    Float v[N];
    padded(const Float * p, int n) {
        memset(v, 0, sizeof(v));
        memcpy(v, p, n*sizeof(Float));
    }
};

template <class Float> struct float_avx2 {
    using row    = Float;
    using column = Float;
    static constexpr int STEP = 16;

    MOE_INLINE_AVX2 static void add_products(const __m256 (&weights)[2], const column * y, __m256 (&acc)[2]) {
        __m256 v[2];
        widen(y, v);
        acc[0] = _mm256_fmadd_ps(weights[0], v[0], acc[0]);
        acc[1] = _mm256_fmadd_ps(weights[1], v[1], acc[1]);
    }

    template <int NC> MOE_AVX2 static void dot(int n, const row * x, const column * const * y, float * out) {
        __m256 weights[2], acc[NC][2], sum[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c][0] = acc[c][1] = _mm256_setzero_ps(); }

        const int ahead = prefetch_distance<row>();
        int i = 0;
        for (; i + STEP <= n; i += STEP) {
            if (i % 32 == 0) {
                prefetch_ahead<32>(x + i, ahead);
            }
            widen(x + i, weights);
            MOE_UNROLL
            for (int c = 0; c < NC; c++) { add_products(weights, y[c] + i, acc[c]); }
        }
        if (i < n) {
            widen(padded<row, STEP>(x + i, n - i).v, weights);
            MOE_UNROLL
            for (int c = 0; c < NC; c++) { add_products(weights, padded<column, STEP>(y[c] + i, n - i).v, acc[c]); }
        }
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { sum[c] = _mm256_add_ps(acc[c][0], acc[c][1]); }
        store_sums<NC>(sum, out);
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

MOE_INLINE_AVX512 __m512i unpack_avx512(const block_q2_K & b, int j) {
    const int shift = 4*(j % 2);
    return _mm512_and_si512(_mm512_srlv_epi16(load_twice(b.qs + 32*(j/2)), halves(shift, shift + 2)), _mm512_set1_epi8(3));
}

MOE_INLINE_AVX512 __m512i unpack_avx512(const block_q3_K & b, int j) {
    const int shift = 4*(j % 2);
    const __m512i lo = _mm512_and_si512(_mm512_srlv_epi16(load_twice(b.qs + 32*(j/2)), halves(shift, shift + 2)), _mm512_set1_epi8(3));
    const __m512i qh = load_twice(b.hmask); // bits 2j and 2j + 1 are bit 2 of the two halves
    const __m512i hi = j < 1 ? _mm512_sllv_epi16(qh, halves(2, 1)) : _mm512_srlv_epi16(qh, halves(2*j - 2, 2*j - 1));
    return insert_bits(lo, hi, 4);
}

MOE_INLINE_AVX512 __m512i unpack_avx512(const block_iq4_xs & b, int j) { // signed
    const __m256i q = load32(b.qs + 32*j);
    const __m512i twice = _mm512_shuffle_i64x2(_mm512_castsi256_si512(q), _mm512_castsi256_si512(q), 0x50); // 16 bytes: 0 0 1 1
    const __m512i shift = _mm512_setr_epi64(0, 0, 0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004, 0x0004000400040004);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(iq4_values()), low_nibbles(_mm512_srlv_epi16(twice, shift)));
}

template <int NC> MOE_INLINE_AVX512 void store_sums(const __m512 (&v)[NC], float * out) {
    __m256 folded[NC];
    MOE_UNROLL
    for (int c = 0; c < NC; c++) {
        folded[c] = _mm256_add_ps(_mm512_castps512_ps256(v[c]), _mm512_extractf32x8_ps(v[c], 1));
    }
    store_sums<NC>(folded, out);
}

template <class Block> struct k32_avx512 {
    using row    = Block;
    using column = block_q8_K;
    template <int NC> MOE_AVX512 static void dot(int n, const row * x, const column * const * y, float * out) {
        const int ahead = prefetch_distance<row>();
        __m512 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm512_setzero_ps(); }

        for (int i = 0; i < n/256; i++) {
            const row & b = x[i];
            prefetch_ahead(&b, ahead);
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
                const __m512 p    = _mm512_fnmadd_ps(dmin, _mm512_cvtepi32_ps(msum), _mm512_mul_ps(d, _mm512_cvtepi32_ps(sum[c])));
                acc[c] = _mm512_fmadd_ps(yd, p, acc[c]);
            }
        }
        store_sums<NC>(acc, out);
    }
};

template <class Block> struct k16_avx512 {
    using row    = Block;
    using column = block_q8_K;
    template <int NC> MOE_AVX512 static void dot(int n, const row * x, const column * const * y, float * out) {
        constexpr bool has_mins = ZERO_SHIFT<row> == 0;
        const int ahead = prefetch_distance<row>();
        const __m512i groups = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm256_set_m128i(_mm_set1_epi16(1), _mm_setzero_si128())),
            _mm256_set_m128i(_mm_set1_epi16(3), _mm_set1_epi16(2)), 1);
        __m512 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm512_setzero_ps(); }

        for (int i = 0; i < n/256; i++) {
            const row & b = x[i];
            prefetch_ahead(&b, ahead);
            const __m256i scales = _mm256_cvtepi8_epi16(scales_of(b));
            const __m256i factor = bsum_factors(b, scales);

            __m512i sum[NC];
            __m512i zero[NC]; // the part of the minima, or of the zero point
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                zero[c] = _mm512_zextsi256_si512(_mm256_madd_epi16(factor, load32(y[c][i].bsums)));
                sum[c]  = has_mins ? _mm512_setzero_si512() : zero[c];
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
            const __m128 dm   = has_mins ? load_scales(b) : half_to_float(b.d);
            const __m512 d    = _mm512_broadcastss_ps(dm);
            const __m512 dmin = _mm512_broadcastss_ps(_mm_movehdup_ps(dm));
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m512 yd = _mm512_set1_ps(y[c][i].d);
                acc[c] = _mm512_fmadd_ps(_mm512_mul_ps(d, yd), _mm512_cvtepi32_ps(sum[c]), acc[c]);
                if constexpr (has_mins) {
                    acc[c] = _mm512_fnmadd_ps(_mm512_mul_ps(dmin, yd), _mm512_cvtepi32_ps(zero[c]), acc[c]);
                }
            }
        }
        store_sums<NC>(acc, out);
    }
};

// vpdpbusd wants one factor unsigned: that is activation + 128, and -128 * weight, the same for all columns, is where each
// sum starts. A sum of four products has up to 17 bits, too many for vpdpwssd, so the scales are applied in float. That is
// exact as well: 4 * 4 * 127 * 127 * 32 < 2^24.
struct iq4_xs_avx512 {
    using row    = block_iq4_xs;
    using column = block_q8_K;
    template <int NC> MOE_AVX512 static void dot(int n, const row * x, const column * const * y, float * out) {
        const int ahead = prefetch_distance<row>();
        const __m512i flip = _mm512_set1_epi8((char) 0x80);
        __m512 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm512_setzero_ps(); }

        for (int i = 0; i < n/256; i++) {
            const row & b = x[i];
            prefetch_ahead(&b, ahead);
            const __m512 scales = _mm512_castps256_ps512(_mm256_cvtepi32_ps(scales_of(b)));

            __m512 sum[NC];
            MOE_UNROLL
            for (int c = 0; c < NC; c++) { sum[c] = _mm512_setzero_ps(); }
            MOE_UNROLL
            for (int j = 0; j < 4; j++) {
                const __m512i q     = unpack_avx512(b, j);
                const __m512i pick  = concat(_mm256_set1_epi32(2*j), _mm256_set1_epi32(2*j + 1));
                const __m512  scale = _mm512_permutexvar_ps(pick, scales);
                const __m512i start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_dpbusd_epi32(_mm512_setzero_si512(), flip, q));
                MOE_UNROLL
                for (int c = 0; c < NC; c++) {
                    const __m512i p = _mm512_dpbusd_epi32(start, _mm512_xor_si512(load64(y[c][i].qs + 64*j), flip), q);
                    sum[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(p), scale, sum[c]);
                }
            }
            const __m512 d = _mm512_broadcastss_ps(load_scales(b));
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                acc[c] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(y[c][i].d)), sum[c], acc[c]);
            }
        }
        store_sums<NC>(acc, out);
    }
};

// Blocks of 32 weights have a scale each, so these stay at 256 bits: joining two blocks would cost what it saves.
template <class Block> struct b32_avx512 {
    using row    = Block;
    using column = block_q8_0;
    template <int NC, int M>
    MOE_INLINE_AVX512 static void add_blocks(const row * x, const column * const * y, int i, __m256 (&acc)[NC]) {
        const __m256i flip = _mm256_set1_epi8((char) 0x80);
        const __m256 d = scales_of_blocks<M>(x + i);
        float scale[NC][TILE];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { _mm256_storeu_ps(scale[c], _mm256_mul_ps(d, scales_of_blocks<M>(y[c] + i))); }
        asm("" : "+m"(scale)); // a scale is to be spread by loading it: the compiler would use two shuffles
        MOE_UNROLL
        for (int k = 0; k < M; k++) {
            const __m256i q = unpack(x[i + k]);
            // as in iq4_xs_avx512
            const __m256i start = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_dpbusd_epi32(_mm256_setzero_si256(), flip, q));
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m256i p = _mm256_dpbusd_epi32(start, _mm256_xor_si256(load32(y[c][i + k].qs), flip), q);
                acc[c] = _mm256_fmadd_ps(_mm256_set1_ps(scale[c][k]), _mm256_cvtepi32_ps(p), acc[c]);
            }
        }
    }

    template <int NC> MOE_AVX512 static void dot(int n, const row * x, const column * const * y, float * out) {
        __m256 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm256_setzero_ps(); }
        const int ahead = prefetch_distance<row>();
        int i = 0;
        for (; i + TILE <= n/32; i += TILE) {
            prefetch_ahead<TILE>(x + i, ahead);
            add_blocks<NC, TILE>(x, y, i, acc);
        }
        for (; i < n/32; i++) {
            add_blocks<NC, 1>(x, y, i, acc);
        }
        store_sums<NC>(acc, out);
    }
};

template <class Block> struct b32_min_avx512 {
    using row    = Block;
    using column = block_q8_1;
    template <int NC> MOE_AVX512 static void dot(int n, const row * x, const column * const * y, float * out) {
        __m256 acc[NC];
        __m128 mins[NC]; // in the second lane
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm256_setzero_ps(); mins[c] = _mm_setzero_ps(); }

        const int ahead = prefetch_distance<row>();
        for (int i = 0; i < n/32; i++) {
            if (i % TILE == 0) {
                prefetch_ahead<TILE>(x + i, ahead);
            }
            const __m256i q  = unpack(x[i]);
            const __m128  dm = load_scales(x[i]);
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                const __m256i p = _mm256_dpbusd_epi32(_mm256_setzero_si256(), q, load32(y[c][i].qs));
                const __m128  y_ds = load_scales(y[c][i]);
                acc[c]  = _mm256_fmadd_ps(_mm256_broadcastss_ps(_mm_mul_ps(dm, y_ds)), _mm256_cvtepi32_ps(p), acc[c]);
                mins[c] = _mm_fmadd_ps(dm, y_ds, mins[c]);
            }
        }
        store_sums<NC>(acc, out);
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { out[c] += _mm_cvtss_f32(_mm_movehdup_ps(mins[c])); }
    }
};

MOE_INLINE_AVX512 void widen(const float16 * p, __m512 (&v)[2]) {
    v[0] = _mm512_cvtph_ps(load32(p));
    v[1] = _mm512_cvtph_ps(load32(p + 16));
}
MOE_INLINE_AVX512 void widen(const bfloat16 * p, __m512 (&v)[2]) {
    const __m512i h = load64(p);
    v[0] = _mm512_castsi512_ps(_mm512_slli_epi32(h, 16));
    v[1] = _mm512_castsi512_ps(_mm512_and_si512(h, _mm512_set1_epi32((int) 0xFFFF0000)));
}

template <class Float> struct float_avx512 {
    using row    = Float;
    using column = Float;
    static constexpr int STEP = 32;

    MOE_INLINE_AVX512 static void add_products(const __m512 (&weights)[2], const column * y, __m512 (&acc)[2]) {
        __m512 v[2];
        widen(y, v);
        acc[0] = _mm512_fmadd_ps(weights[0], v[0], acc[0]);
        acc[1] = _mm512_fmadd_ps(weights[1], v[1], acc[1]);
    }

    template <int NC> MOE_AVX512 static void dot(int n, const row * x, const column * const * y, float * out) {
        __m512 weights[2], acc[NC][2], sum[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c][0] = acc[c][1] = _mm512_setzero_ps(); }

        const int ahead = prefetch_distance<row>();
        int i = 0;
        for (; i + STEP <= n; i += STEP) {
            prefetch_ahead<STEP>(x + i, ahead);
            widen(x + i, weights);
            MOE_UNROLL
            for (int c = 0; c < NC; c++) { add_products(weights, y[c] + i, acc[c]); }
        }
        if (i < n) {
            widen(padded<row, STEP>(x + i, n - i).v, weights);
            MOE_UNROLL
            for (int c = 0; c < NC; c++) { add_products(weights, padded<column, STEP>(y[c] + i, n - i).v, acc[c]); }
        }
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { sum[c] = _mm512_add_ps(acc[c][0], acc[c][1]); }
        store_sums<NC>(sum, out);
    }
};

#ifdef MOE_HAS_BF16

// vdpbf16ps multiplies and adds pairs; it takes denormals for zero, as ggml's own product does where it has the instruction.
// It prefetches to L2: 16 GB/s from DRAM with four columns on a Zen 4, 12 without and 12 to L1.
struct bfloat16_avx512 {
    using row    = bfloat16;
    using column = bfloat16;
    static constexpr int STEP = 32;

    template <int NC> MOE_BF16 static void dot(int n, const row * x, const column * const * y, float * out) {
        const int ahead = prefetch_distance<row>();
        __m512 acc[NC];
        MOE_UNROLL
        for (int c = 0; c < NC; c++) { acc[c] = _mm512_setzero_ps(); }

        for (int i = 0; i < n; i += STEP) {
            prefetch_ahead<STEP>(x + i, ahead);
            const __mmask32 mask = n - i < STEP ? (1u << (n - i)) - 1 : ~0u; // what it excludes is not read
            const __m512bh weights = (__m512bh) _mm512_maskz_loadu_epi16(mask, x + i);
            MOE_UNROLL
            for (int c = 0; c < NC; c++) {
                acc[c] = _mm512_dpbf16_ps(acc[c], weights, (__m512bh) _mm512_maskz_loadu_epi16(mask, y[c] + i));
            }
        }
        store_sums<NC>(acc, out);
    }
};

#endif

template <class Kernel>
void row_dot(int n, const void * x, const void * const * y, int n_cols, float * out, moe_vec_dot_t) {
    GGML_ASSERT(n_cols >= 1 && n_cols <= MOE_MAX_COLS);
    using column = typename Kernel::column;
    const auto * row = (const typename Kernel::row *) x;
    const column * cols[MOE_MAX_COLS];
    for (int c = 0; c < n_cols; c++) {
        cols[c] = (const column *) y[c];
    }
    switch (n_cols) {
        case 1: Kernel::template dot<1>(n, row, cols, out); break;
        case 2: Kernel::template dot<2>(n, row, cols, out); break;
        case 3: Kernel::template dot<3>(n, row, cols, out); break;
        case 4: Kernel::template dot<4>(n, row, cols, out); break;
    }
}

template <class Narrow, class Wide> moe_kernel choose(int level) {
    return level >= 2 ? moe_kernel { row_dot<Wide>, "avx512-vnni", true } : moe_kernel { row_dot<Narrow>, "avx2", true };
}

// fn is null where there is none for the type
moe_kernel own_kernel(ggml_type type, int level) {
#ifdef MOE_HAS_BF16
    if (type == GGML_TYPE_BF16 && level >= 3) {
        return { row_dot<bfloat16_avx512>, "avx512-bf16", true };
    }
#endif
    switch (type) {
        case GGML_TYPE_Q4_0:   return choose<b32_avx2<block_q4_0>,     b32_avx512<block_q4_0>>(level);
        case GGML_TYPE_Q4_1:   return choose<b32_min_avx2<block_q4_1>, b32_min_avx512<block_q4_1>>(level);
        case GGML_TYPE_Q5_0:   return choose<b32_avx2<block_q5_0>,     b32_avx512<block_q5_0>>(level);
        case GGML_TYPE_Q5_1:   return choose<b32_min_avx2<block_q5_1>, b32_min_avx512<block_q5_1>>(level);
        case GGML_TYPE_Q8_0:   return choose<b32_avx2<block_q8_0>,     b32_avx512<block_q8_0>>(level);
        case GGML_TYPE_IQ4_NL: return choose<b32_avx2<block_iq4_nl>,   b32_avx512<block_iq4_nl>>(level);
        case GGML_TYPE_MXFP4:  return choose<b32_avx2<block_mxfp4>,    b32_avx512<block_mxfp4>>(level);
        case GGML_TYPE_Q2_K:   return choose<k16_avx2<block_q2_K>,     k16_avx512<block_q2_K>>(level);
        case GGML_TYPE_Q3_K:   return choose<k16_avx2<block_q3_K>,     k16_avx512<block_q3_K>>(level);
        case GGML_TYPE_Q4_K:   return choose<k32_avx2<block_q4_K>,     k32_avx512<block_q4_K>>(level);
        case GGML_TYPE_Q5_K:   return choose<k32_avx2<block_q5_K>,     k32_avx512<block_q5_K>>(level);
        case GGML_TYPE_Q6_K:   return choose<k16_avx2<block_q6_K>,     k16_avx512<block_q6_K>>(level);
        case GGML_TYPE_IQ4_XS: return choose<iq4_xs_avx2,              iq4_xs_avx512>(level);
        case GGML_TYPE_F16:    return choose<float_avx2<float16>,      float_avx512<float16>>(level);
        case GGML_TYPE_BF16:   return choose<float_avx2<bfloat16>,     float_avx512<bfloat16>>(level);
        default: return { nullptr, "", false };
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
#ifdef MOE_HAS_BF16
    if (avx512 && __builtin_cpu_supports("avx512bf16")) {
        return 3;
    }
#endif
    return avx512 ? 2 : 1;
}

#else

std::atomic<int> g_prefetch_multiple{1};
moe_kernel own_kernel(ggml_type, int) { return { nullptr, "", false }; }
int detect_level() { return 0; }

#endif

std::atomic<int> g_isa_limit{3};

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
        const moe_kernel own = own_kernel(type, level);
        if (own.fn) {
            return own;
        }
    }
    return { row_dot_generic, "ggml vec_dot", false };
}

const char * moe_kernel_isa() {
    return isa_name(isa_level());
}

int moe_kernel_set_isa_limit(int level) {
    g_isa_limit = level < 0 ? 0 : level > 3 ? 3 : level;
    return isa_level();
}

void moe_kernel_set_prefetch(int multiple) {
    g_prefetch_multiple = multiple;
}
