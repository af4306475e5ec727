// The cold lane's kernels against ggml's vec_dot.
//
//   test_moe_kernels                     correctness: 'ok' and 'FAILED' lines, exit code 1 if anything failed
//   test_moe_kernels --bench [options]   GB/s of weights by type, threads and tokens an expert, beside the read bandwidth
//
// Build (SRC = .../vendor/llama.cpp/src, GGML = .../vendor/llama.cpp/ggml, LIB = a folder with libggml-base and libggml-cpu):
//   g++ -O3 -DNDEBUG -std=c++17 -pthread -I$SRC -I$GGML/include -I$GGML/src test_moe_kernels.cpp $SRC/moe-kernels.cpp
//       -L$LIB -lggml-cpu -lggml-base -Wl,-rpath,$LIB -o test_moe_kernels
//
// Options of the benchmark, with their defaults. It pins its threads, one to a physical core as long as there are any.
//   --threads 1,4,8,16       as many of them as there are cores
//   --widths 1,2,4,8,9       tokens an expert
//   --types q4_K,q5_K,q6_K,q8_0,q4_0,iq4_xs,mxfp4,bf16,f16
//   --levels L,...           none (ggml's vec_dot), avx2, avx512-vnni, avx512-bf16; the best that the machine has
//   --prefetch 1             multiples of the kernels' own prefetch distance to try, 0 = no prefetch: 0,1,2,4
//   --row 2048 --mib 1024    weights in a row, weights in all: far more than the caches hold (1 MiB for a look at the caches)
//   --repeats 3 --ms 90      the table has medians
//   --json FILE              every repeat

#include "moe-kernels.h"

#include "ggml-cpu.h"
#include "ggml-quants.h"

#ifdef __linux__
#include <sched.h>
#endif
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

// Reads as fast as a thread can: with the baseline's 16-byte loads one thread would be slower than the kernels.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t sum_of(const uint8_t * p, size_t n) {
    uint64_t sum[32] = {}, v[32];
    for (size_t i = 0; i + sizeof(v) <= n; i += sizeof(v)) {
        memcpy(v, p + i, sizeof(v));
        for (int k = 0; k < 32; k++) { sum[k] += v[k]; }
    }
    return std::accumulate(sum, sum + 32, (uint64_t) 0);
}

namespace {

// Both sides compute each block exactly, in integers, and differ in how they round when they add blocks in float: the
// error is a few float epsilons (6e-8) of the sum of magnitudes, growing slowly with the number of blocks. Seen: 7e-7
// where all products are equal, below 2e-7 elsewhere. The smallest real mistake, one weight of 2816 off by one step,
// gives 6e-6 in Q8_0 and more in the other types (see the negative control).
constexpr double TOLERANCE = 1.5e-6;

const ggml_type TYPES[] = {
    GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4, GGML_TYPE_BF16,
    GGML_TYPE_F16, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL,
};
const char * const LEVELS[] = { "none", "avx2", "avx512-vnni", "avx512-bf16" };
constexpr int BEST = 3;

using bytes = std::vector<uint8_t>;
using floats = std::vector<float>;

std::mt19937 rng(1234);

bool is_float(ggml_type type) { return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16; }

std::vector<int> lengths(ggml_type type) {
    std::vector<int> n = { 256, 512, 768, 2048, 2816 };
    if (ggml_blck_size(type) <= 32) {
        n.insert(n.end(), { 32, 96, 2880 });
    }
    if (is_float(type)) {
        n.insert(n.end(), { 1, 15, 33, 100 });
    }
    return n;
}

//
// data
//

floats normal(int n, float scale) {
    std::normal_distribution<float> dist(0.0f, scale);
    floats v(n);
    for (float & f : v) { f = dist(rng); }
    return v;
}

floats negative(int n, float scale) {
    floats v = normal(n, scale);
    for (float & f : v) { f = -std::fabs(f) - 0.1f*scale; }
    return v;
}

// Columns that quantise to +127. Q8_K gives the first of the largest values of a block -127, whatever its sign, so equal
// values all become -127, and one value of the other sign in front turns the rest.
floats plus_127(int n) {
    floats v(n, 3.0f);
    for (int i = 0; i < n; i += 256) { v[i] = -3.0f; }
    return v;
}

// a few values a thousand times the others, as in activations of real models
floats outliers(int n, float scale) {
    floats v = normal(n, scale);
    for (int i = 0; i < n; i += 97) { v[i] *= 1000.0f; }
    return v;
}

bytes quantise_row(ggml_type type, const floats & x) {
    bytes out(ggml_row_size(type, (int64_t) x.size()));
    ggml_quantize_chunk(type, x.data(), out.data(), 0, 1, (int64_t) x.size(), nullptr);
    return out;
}

bytes quantise_column(ggml_type type, const floats & y) {
    const ggml_type dot_type = ggml_get_type_traits_cpu(type)->vec_dot_type;
    bytes out(ggml_row_size(dot_type, (int64_t) y.size()));
    ggml_get_type_traits_cpu(dot_type)->from_float(y.data(), out.data(), (int64_t) y.size());
    return out;
}

// where a block keeps its float scales
std::vector<size_t> scales_at(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q2_K: return { 80, 82 };
        case GGML_TYPE_Q3_K: return { 108 };
        case GGML_TYPE_Q6_K: return { 208 };
        case GGML_TYPE_Q4_K: case GGML_TYPE_Q5_K: case GGML_TYPE_Q4_1: case GGML_TYPE_Q5_1: return { 0, 2 };
        default: return { 0 };
    }
}

// Any bits with finite values of sane size: MXFP4 keeps a power of two, F16 and BF16 some of the exponent's bits.
void make_sane(ggml_type type, uint8_t * block) {
    if (type == GGML_TYPE_MXFP4) {
        block[0] = (uint8_t) (115 + block[0] % 8);
    } else if (type == GGML_TYPE_F16) {
        block[1] &= 0xbf; // below 2
    } else if (type == GGML_TYPE_BF16) {
        block[1] = (uint8_t) ((block[1] & 0x81) | 0x3e); // 2^-3 ... 2
    } else {
        for (size_t at : scales_at(type)) {
            const ggml_fp16_t h = ggml_fp32_to_fp16(at == 2 || at == 82 ? 0.02f : 0.01f);
            memcpy(block + at, &h, sizeof(h));
        }
    }
}

// Every bit pattern, also those that the quantiser does not write (scales of -128, minima of 63). Only the float scales
// are made sane.
bytes random_bits_row(ggml_type type, int n) {
    bytes row(ggml_row_size(type, n));
    for (uint8_t & b : row) { b = (uint8_t) rng(); }
    for (size_t at = 0; at < row.size(); at += ggml_type_size(type)) { make_sane(type, &row[at]); }
    return row;
}

// all weight bits set and every activation +-127: the largest products that the 16- and 32-bit sums have to hold
bytes all_ones_row(ggml_type type, int n) {
    bytes row(ggml_row_size(type, n), type == GGML_TYPE_Q8_0 ? 0x80 : 0xff);
    for (size_t at = 0; at < row.size(); at += ggml_type_size(type)) {
        make_sane(type, &row[at]);
        if (type == GGML_TYPE_Q6_K) { memset(&row[at + 192], 0x80, 16); }
    }
    return row;
}

// As above with all bits zero: the lowest entries of the tables (-127), zero points without weights, scales of -32.
bytes all_zeros_row(ggml_type type, int n) {
    bytes row(ggml_row_size(type, n));
    for (size_t at = 0; at < row.size(); at += ggml_type_size(type)) { make_sane(type, &row[at]); }
    return row;
}

//
// references
//

floats dequantise_row(ggml_type type, const bytes & row, int n) {
    floats v(n);
    ggml_get_type_traits(type)->to_float(row.data(), v.data(), n);
    return v;
}

floats dequantise_column(ggml_type type, const bytes & col, int n) {
    const ggml_type dot_type = ggml_get_type_traits_cpu(type)->vec_dot_type;
    floats v(n);
    if (dot_type == GGML_TYPE_Q8_K) {
        dequantize_row_q8_K((const block_q8_K *) col.data(), v.data(), n);
    } else if (dot_type == GGML_TYPE_Q8_1) { // ggml cannot: half d, half sum, 32 bytes
        for (int i = 0; i < n; i++) {
            const uint8_t * block = &col[(size_t) (i/32)*36];
            ggml_fp16_t d;
            memcpy(&d, block, sizeof(d));
            v[i] = ggml_fp16_to_fp32(d)*(float) (int8_t) block[4 + i % 32];
        }
    } else {
        return dequantise_row(dot_type, col, n);
    }
    return v;
}

struct expected {
    double ggml;      // ggml's vec_dot
    double exact;     // the same product in double
    double magnitude; // sum of |x*y|: what errors are measured against
};

expected reference(ggml_type type, int n, const bytes & row, const bytes & col) {
    float s = 0.0f;
    ggml_get_type_traits_cpu(type)->vec_dot(n, &s, 0, row.data(), 0, col.data(), 0, 1);
    const floats x = dequantise_row(type, row, n), y = dequantise_column(type, col, n);
    expected e = { s, 0.0, 0.0 };
    for (int i = 0; i < n; i++) {
        const double p = (double) x[i]*y[i];
        e.exact += p;
        e.magnitude += std::fabs(p);
    }
    return e;
}

double relative_error(double got, double want, double magnitude) {
    if (got == want) { return 0.0; }
    const double e = std::fabs(got - want)/std::max(magnitude, 1e-30);
    return std::isfinite(e) ? e : INFINITY;
}

//
// running a kernel
//

// Memory between unreadable pages: a kernel that reads past its data, or, where it lies low, before it, faults.
struct guarded {
    uint8_t * base;
    size_t size;
    uint8_t * data;

    guarded(const bytes & content, bool low) {
        const size_t page = (size_t) sysconf(_SC_PAGESIZE);
        const size_t used = (content.size() + page - 1)/page*page;
        size = used + 2*page;
        base = (uint8_t *) mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED || mprotect(base + page, used, PROT_READ | PROT_WRITE) != 0) { perror("mmap"); exit(2); }
        data = base + page + (low ? 0 : used - content.size());
        memcpy(data, content.data(), content.size());
    }
    guarded(const guarded &) = delete;
    ~guarded() { munmap(base, size); }
};

floats run(const moe_kernel & k, ggml_type type, int n, const void * row, const std::vector<const void *> & cols) {
    floats out(MOE_MAX_COLS + 1, -12345.0f); // one more than there can be: nothing may be written there
    k.fn(n, row, cols.data(), (int) cols.size(), out.data(), ggml_get_type_traits_cpu(type)->vec_dot);
    for (size_t c = cols.size(); c < out.size(); c++) {
        if (out[c] != -12345.0f) { out[0] = NAN; }
    }
    return out;
}

struct test_case {
    std::string name;
    std::function<bytes(ggml_type, int)> row;
    std::function<floats(int)> column;
};

std::vector<test_case> cases() {
    const auto row_of = [](floats (*make)(int, float), float scale) {
        return [=](ggml_type type, int n) { return quantise_row(type, make(n, scale)); };
    };
    const auto col_of = [](floats (*make)(int, float), float scale) { return [=](int n) { return make(n, scale); }; };
    return {
        { "normal",          row_of(normal, 0.02f),    col_of(normal, 1.0f)     },
        { "zero weights",    row_of(normal, 0.0f),     col_of(normal, 1.0f)     },
        { "zero columns",    row_of(normal, 0.02f),    col_of(normal, 0.0f)     },
        { "all negative",    row_of(negative, 0.02f),  col_of(negative, 1.0f)   },
        { "negative row",    row_of(negative, 0.02f),  col_of(normal, 1.0f)     },
        { "large",           row_of(normal, 1000.0f),  col_of(normal, 1000.0f)  }, // sums that Q8_1's half still holds
        { "small",           row_of(normal, 0.0001f),  col_of(normal, 0.0001f)  },
        { "outliers",        row_of(outliers, 0.02f),  col_of(outliers, 1.0f)   },
        { "random bits",     random_bits_row,          col_of(normal, 1.0f)     },
        { "all bits, +127",  all_ones_row,             plus_127 },
        { "all bits, -127",  all_ones_row,             [](int n) { return floats(n, 3.0f); } },
        { "no bits, +127",   all_zeros_row,            plus_127 },
        { "no bits, -127",   all_zeros_row,            [](int n) { return floats(n, 3.0f); } },
    };
}

struct errors { double ggml = 0.0, exact = 0.0, ggml_exact = 0.0; }; // ours to ggml, ours to exact, ggml's to exact

// one row and up to four different columns, at an edge of readable memory
void check_row(const moe_kernel & k, ggml_type type, int n, const bytes & row, const std::vector<bytes> & cols, bool low, errors & worst) {
    const guarded x(row, low);
    std::vector<std::unique_ptr<guarded>> held;
    std::vector<const void *> y;
    std::vector<expected> want;
    for (const bytes & col : cols) {
        held.push_back(std::make_unique<guarded>(col, low));
        y.push_back(held.back()->data);
        want.push_back(reference(type, n, row, col));
        const floats out = run(k, type, n, x.data, y);
        for (size_t c = 0; c < y.size(); c++) {
            const expected & w = want[c];
            worst.ggml       = std::max(worst.ggml,       relative_error(out[c], w.ggml,  w.magnitude));
            worst.exact      = std::max(worst.exact,      relative_error(out[c], w.exact, w.magnitude));
            worst.ggml_exact = std::max(worst.ggml_exact, relative_error(w.ggml, w.exact, w.magnitude));
        }
    }
}

bool report(bool ok, const std::string & what) {
    printf("%-6s %s\n", ok ? "ok" : "FAILED", what.c_str());
    return ok;
}

std::string label(ggml_type type, const char * name) {
    char s[64];
    snprintf(s, sizeof(s), "%-6s %-12s", ggml_type_name(type), name);
    return s;
}

// every case, length and number of columns for one type and instruction set
bool check_type(ggml_type type, int level) {
    const moe_kernel k = moe_kernel_for(type);
    bool ok = true;
    for (const test_case & t : cases()) {
        errors worst;
        for (int n : lengths(type)) {
            for (int repeat = 0; repeat < 3; repeat++) {
                std::vector<bytes> cols;
                for (int c = 0; c < MOE_MAX_COLS; c++) { cols.push_back(quantise_column(type, t.column(n))); }
                check_row(k, type, n, t.row(type, n), cols, repeat == 1, worst);
            }
        }
        char s[160];
        snprintf(s, sizeof(s), "%s %-15s 1-4 columns, %zu lengths: to ggml %.1e (to exact %.1e, ggml's %.1e)",
                 label(type, k.name).c_str(), t.name.c_str(), lengths(type).size(), worst.ggml, worst.exact, worst.ggml_exact);
        ok &= report(worst.ggml < TOLERANCE, s);
    }
    const char * want = level == 0 ? "ggml vec_dot" : LEVELS[type == GGML_TYPE_BF16 ? level : std::min(level, 2)];
    return ok & report(strcmp(k.name, want) == 0, label(type, k.name) + " is the kernel chosen");
}

// a byte of a block that holds weights, and a bit of it that changes one of them by a step (of the exponent, for floats)
void spoil_one_weight(ggml_type type, uint8_t * block) {
    switch (type) {
        case GGML_TYPE_F16:    block[1] ^= 0x04; break;
        case GGML_TYPE_BF16:   block[0] ^= 0x80; break;
        case GGML_TYPE_Q4_K:   block[80] ^= 1; break;
        case GGML_TYPE_Q5_K:   block[100] ^= 1; break;
        case GGML_TYPE_Q3_K:   block[40] ^= 1; break;
        case GGML_TYPE_Q2_K:   block[20] ^= 1; break;
        default:               block[10] ^= 1; break;
    }
}

// the comparison itself must see one weight that is off by one step
bool check_negative_control(ggml_type type) {
    const int n = 2816;
    const moe_kernel k = moe_kernel_for(type);
    const bytes row = quantise_row(type, normal(n, 0.02f));
    const bytes col = quantise_column(type, floats(n, 1.0f));
    bytes wrong = row;
    spoil_one_weight(type, &wrong[ggml_type_size(type)*(size_t) (n/ggml_blck_size(type)/2)]);
    const expected w = reference(type, n, row, col);
    const floats out = run(k, type, n, wrong.data(), { col.data() });
    const double e = relative_error(out[0], w.ggml, w.magnitude);
    char s[96];
    snprintf(s, sizeof(s), " one wrong weight is seen: %.1e", e);
    return report(e > 3*TOLERANCE, label(type, k.name) + s);
}

// a token's numbers must not depend on how many tokens share its expert
bool check_neighbours(ggml_type type) {
    const moe_kernel k = moe_kernel_for(type);
    bool ok = true;
    for (int n : lengths(type)) {
        const bytes row = quantise_row(type, normal(n, 0.02f));
        std::vector<bytes> cols;
        for (int c = 0; c < MOE_MAX_COLS; c++) { cols.push_back(quantise_column(type, normal(n, 1.0f))); }
        std::vector<const void *> y;
        for (const bytes & col : cols) {
            y.push_back(col.data());
            const floats together = run(k, type, n, row.data(), y);
            for (size_t c = 0; c < y.size(); c++) {
                const float alone = run(k, type, n, row.data(), { y[c] })[0];
                ok &= memcmp(&alone, &together[c], sizeof(float)) == 0;
            }
        }
    }
    return report(ok, label(type, k.name) + " a column alone and among others: bitwise equal");
}

// rows and columns may start at any address
bool check_alignment(ggml_type type) {
    const moe_kernel k = moe_kernel_for(type);
    const int n = 512;
    const bytes row = quantise_row(type, normal(n, 0.02f));
    const bytes col = quantise_column(type, normal(n, 1.0f));
    const float want = run(k, type, n, row.data(), { col.data() })[0];
    bool ok = true;
    for (size_t shift = 1; shift < 64; shift += 2) {
        bytes x(row.size() + shift), y(col.size() + shift);
        memcpy(&x[shift], row.data(), row.size());
        memcpy(&y[shift], col.data(), col.size());
        const float got = run(k, type, n, &x[shift], { &y[shift] })[0];
        ok &= memcmp(&got, &want, sizeof(float)) == 0;
    }
    return report(ok, label(type, k.name) + " at odd addresses: bitwise equal");
}

// what is no number stays none: an overflown scale must not become a plausible sum
bool check_nan(ggml_type type) {
    const moe_kernel k = moe_kernel_for(type);
    const int n = 512;
    const uint16_t nan = type == GGML_TYPE_BF16 ? 0x7fc0 : 0x7e00;
    const bytes col = quantise_column(type, normal(n, 1.0f));
    bool ok = true;
    for (size_t at : scales_at(type)) {
        bytes row = quantise_row(type, normal(n, 0.02f));
        memcpy(&row[row.size()/2/ggml_type_size(type)*ggml_type_size(type) + at], &nan, sizeof(nan));
        ok &= std::isnan(run(k, type, n, row.data(), { col.data() })[0]);
    }
    return report(ok, label(type, k.name) + " NaN in, NaN out");
}

// a type without a kernel of its own, and allow_own = false
bool check_fallback() {
    bool ok = true;
    const int n = 512;
    for (ggml_type type : { GGML_TYPE_TQ2_0, GGML_TYPE_NVFP4 }) {
        errors worst;
        const moe_kernel k = moe_kernel_for(type);
        check_row(k, type, n, quantise_row(type, normal(n, 0.02f)),
                  { quantise_column(type, normal(n, 1.0f)), quantise_column(type, normal(n, 1.0f)) }, false, worst);
        ok &= report(worst.ggml == 0.0 && strcmp(k.name, "ggml vec_dot") == 0, label(type, k.name) + " fallback, bitwise");
    }
    const moe_kernel k = moe_kernel_for(GGML_TYPE_Q4_K, false);
    return ok & report(strcmp(k.name, "ggml vec_dot") == 0, "allow_own = false takes ggml's vec_dot");
}

int test() {
    bool ok = true;
    const int best = moe_kernel_set_isa_limit(BEST);
    printf("instruction set: %s, tolerance %.1e of sum |x*y|\n", moe_kernel_isa(), TOLERANCE);
    for (int level = 0; level <= best; level++) {
        ok &= report(moe_kernel_set_isa_limit(level) == level && strcmp(moe_kernel_isa(), LEVELS[std::min(level, 2)]) == 0,
                     std::string("limit ") + LEVELS[level]);
        for (ggml_type type : TYPES) {
            if (level == 3 && type != GGML_TYPE_BF16) { continue; } // the kernels of level 2
            ok &= check_type(type, level);
            ok &= check_neighbours(type);
            ok &= level == 0 || check_alignment(type);
            ok &= level == 0 || type == GGML_TYPE_MXFP4 || check_nan(type); // MXFP4's scale is always a number
            ok &= check_negative_control(type);
        }
    }
    for (int level = best + 1; level <= BEST; level++) {
        printf("skipped %s: this machine does not have it\n", LEVELS[level]);
    }
    ok &= check_fallback();
    printf("%s\n", ok ? "all ok" : "FAILED");
    return ok ? 0 : 1;
}

//
// bench
//
// What the cold lane does, without its other work: threads take units of 16 rows of an expert from a counter, and each row
// meets the columns of `width` tokens, four at a time. Beside it, in the same buffer, threads that only sum what they read.
//

struct options {
    std::vector<int> threads, widths = { 1, 2, 4, 8, 9 }, prefetch = { 1 };
    std::vector<ggml_type> types;
    std::vector<int> levels;
    int row = 2048, mib = 1024, repeats = 3;
    double seconds = 0.09;
    std::string json;
};

[[noreturn]] void refuse(const std::string & why) {
    fprintf(stderr, "test_moe_kernels: %s\n", why.c_str());
    exit(2);
}

#ifdef __linux__

// The cores that this process may use, one of every physical core first.
std::vector<int> usable_cores() {
    std::vector<int> cores, siblings;
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) { refuse("the affinity of this process cannot be read"); }
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed)) { continue; }
        std::ifstream list("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        int first = cpu;
        if (!(list >> first)) { first = cpu; } // the siblings begin with the lowest
        const bool taken = first != cpu && std::find(cores.begin(), cores.end(), first) != cores.end();
        (taken ? siblings : cores).push_back(cpu);
    }
    cores.insert(cores.end(), siblings.begin(), siblings.end());
    return cores;
}

void pin_to(int core) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    if (sched_setaffinity(0, sizeof(one), &one) != 0) { refuse("core " + std::to_string(core) + " refuses a thread"); }
}

#else // no affinity: threads run where the system puts them

std::vector<int> usable_cores() {
    std::vector<int> cores(std::thread::hardware_concurrency());
    std::iota(cores.begin(), cores.end(), 0);
    return cores;
}

void pin_to(int) {}

#endif

void on_cores(const std::vector<int> & cores, int n_threads, const std::function<void(int)> & work) {
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads; i++) {
        threads.emplace_back([&, i] { pin_to(cores[i]); work(i); });
    }
    for (std::thread & t : threads) { t.join(); }
}

// Bytes a second that the threads get through: each takes units until the time is over. Units run around in the buffer.
double gb_per_s(const std::vector<int> & cores, int n_threads, double seconds, size_t unit_bytes, const std::function<void(size_t)> & do_unit) {
    using clock = std::chrono::steady_clock;
    std::atomic<size_t> next{0}, done{0};
    std::atomic<int> ready{0};
    std::atomic<int64_t> first{INT64_MAX}, last{0}; // ns
    on_cores(cores, n_threads, [&](int) {
        ready++;
        while (ready < n_threads) {}
        const auto start = clock::now();
        auto now = start;
        size_t mine = 0;
        while (now - start < std::chrono::duration<double>(seconds)) {
            do_unit(next.fetch_add(1, std::memory_order_relaxed));
            mine++;
            now = clock::now();
        }
        done += mine;
        const auto ns = [](clock::time_point t) { return (int64_t) std::chrono::nanoseconds(t.time_since_epoch()).count(); };
        for (int64_t seen = first; ns(start) < seen && !first.compare_exchange_weak(seen, ns(start)); ) {}
        for (int64_t seen = last;  ns(now)   > seen && !last.compare_exchange_weak(seen, ns(now)); ) {}
    });
    return (double) (done*unit_bytes)/(double) (last - first);
}

// keeps the compiler from dropping results that nobody looks at
std::atomic<uint64_t> sink{0};

// Anonymous memory, written by all threads, so that its pages lie where first touched.
struct buffer {
    size_t size;
    uint8_t * data;

    explicit buffer(size_t size) : size(size) {
        data = (uint8_t *) mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) { refuse("no memory for " + std::to_string(size >> 20) + " MiB of weights (--mib)"); }
    }
    buffer(const buffer &) = delete;
    ~buffer() { munmap(data, size); }

    // copies of `content`; bytes behind the last whole copy stay as they are
    void fill(const bytes & content, const std::vector<int> & cores) {
        const size_t n = size/content.size();
        std::atomic<size_t> next{0};
        on_cores(cores, (int) cores.size(), [&](int) {
            for (size_t i; (i = next++) < n; ) { memcpy(data + i*content.size(), content.data(), content.size()); }
        });
    }
};

constexpr int UNIT_ROWS = 16, DISTINCT_ROWS = 64;
constexpr size_t READ_UNIT = 64 << 10;

struct result {
    ggml_type type;
    moe_kernel kernel;
    int prefetch, threads, width;
    std::vector<double> rate; // GB/s, one for every repeat
    std::vector<double> read; // the same of threads that only sum, a moment before
};

double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size()/2];
}

double read_rate(const options & o, const buffer & weights, const std::vector<int> & cores, int n_threads) {
    const size_t n_units = weights.size/READ_UNIT;
    return gb_per_s(cores, n_threads, o.seconds, READ_UNIT, [&](size_t u) {
        sink.fetch_xor(sum_of(weights.data + u % n_units*READ_UNIT, READ_UNIT), std::memory_order_relaxed);
    });
}

double kernel_rate(const options & o, const buffer & weights, const std::vector<int> & cores, const result & r, const bytes & cols) {
    const size_t row = ggml_row_size(r.type, o.row), unit = row*UNIT_ROWS, n_units = weights.size/(row*DISTINCT_ROWS)*(DISTINCT_ROWS/UNIT_ROWS);
    const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(r.type);
    std::vector<const void *> y;
    for (int c = 0; c < r.width; c++) { y.push_back(cols.data() + c*ggml_row_size(traits->vec_dot_type, o.row)); }
    moe_kernel_set_prefetch(r.prefetch);
    return gb_per_s(cores, r.threads, o.seconds, unit, [&](size_t u) {
        const uint8_t * x = weights.data + u % n_units*unit;
        float out[MOE_MAX_COLS] = {}, sum = 0.0f;
        for (int i = 0; i < UNIT_ROWS; i++) {
            for (size_t c = 0; c < y.size(); c += MOE_MAX_COLS) {
                r.kernel.fn(o.row, x + i*row, &y[c], (int) std::min<size_t>(MOE_MAX_COLS, y.size() - c), out, traits->vec_dot);
                sum += out[0];
            }
        }
        sink.fetch_xor((uint64_t) (sum != 0.0f), std::memory_order_relaxed);
    });
}

// What is to be measured for a type, in the order of the table. A level that brings no other kernel is left out.
std::vector<result> plan(const options & o, ggml_type type, int n_threads) {
    std::vector<result> todo;
    for (int level : o.levels) {
        moe_kernel_set_isa_limit(level);
        const moe_kernel k = moe_kernel_for(type);
        if (std::any_of(todo.begin(), todo.end(), [&](const result & r) { return r.kernel.fn == k.fn; })) { continue; }
        for (int prefetch : k.prefetches ? o.prefetch : std::vector<int> { 1 }) {
            for (int width : o.widths) { todo.push_back({ type, k, prefetch, n_threads, width, {}, {} }); }
        }
    }
    moe_kernel_set_isa_limit(BEST);
    return todo;
}

// Every repeat measures everything once, so that a disturbance does not hit one figure alone.
std::vector<result> bench_type(const options & o, ggml_type type, buffer & weights, const std::vector<int> & cores, int n_threads) {
    bytes rows, cols; // columns lie one after the other, as in the cold lane
    for (int i = 0; i < DISTINCT_ROWS; i++) {
        const bytes row = quantise_row(type, normal(o.row, 0.02f));
        rows.insert(rows.end(), row.begin(), row.end());
    }
    for (int c = 0; c < *std::max_element(o.widths.begin(), o.widths.end()); c++) {
        const bytes col = quantise_column(type, normal(o.row, 1.0f));
        cols.insert(cols.end(), col.begin(), col.end());
    }
    weights.fill(rows, cores);
    std::vector<result> results = plan(o, type, n_threads);
    for (int repeat = 0; repeat < o.repeats; repeat++) {
        const double read = read_rate(o, weights, cores, n_threads);
        for (result & r : results) {
            r.rate.push_back(kernel_rate(o, weights, cores, r, cols));
            r.read.push_back(read);
        }
    }
    moe_kernel_set_prefetch(1);
    return results;
}

void print_lines(const options & o, const std::vector<result> & results) {
    for (size_t i = 0; i < results.size(); i += o.widths.size()) {
        const result & r = results[i];
        printf("%-6s %-12s %8s %4d %6.1f ", ggml_type_name(r.type), r.kernel.name, r.kernel.prefetches ? std::to_string(r.prefetch).c_str() : "-",
               r.threads, median(r.read));
        for (size_t w = 0; w < o.widths.size(); w++) {
            const double rate = median(results[i + w].rate);
            printf(" %6.1f %3.0f%%", rate, 100.0*rate/median(r.read));
        }
        printf("\n");
    }
    fflush(stdout);
}

// the first line of /proc/cpuinfo that names the model
std::string cpu_model() {
    std::ifstream info("/proc/cpuinfo");
    for (std::string line; std::getline(info, line); ) {
        if (line.rfind("model name", 0) == 0) { return line.substr(line.find(':') + 2); }
    }
    return "unknown";
}

void write_json(const options & o, size_t n_cores, const std::vector<result> & results) {
    const auto list = [](const std::vector<double> & values) {
        std::string s;
        for (double v : values) {
            char number[32];
            snprintf(number, sizeof(number), "%s%.3f", s.empty() ? "" : ", ", v);
            s += number;
        }
        return "[" + s + "]";
    };
    std::ofstream out(o.json);
    out << "{\"cpu\": \"" << cpu_model() << "\", \"cores\": " << n_cores << ", \"isa\": \"" << moe_kernel_isa() << "\", \"row\": " << o.row
        << ", \"mib\": " << o.mib << ", \"seconds\": " << o.seconds << ", \"unit\": \"GB/s of weights, every repeat\", \"results\": [";
    for (size_t i = 0; i < results.size(); i++) {
        const result & r = results[i];
        out << (i ? ",\n" : "\n") << "{\"type\": \"" << ggml_type_name(r.type) << "\", \"kernel\": \"" << r.kernel.name
            << "\", \"prefetch\": " << (r.kernel.prefetches ? r.prefetch : 0)
            << ", \"threads\": " << r.threads << ", \"width\": " << r.width << ", \"rate\": " << list(r.rate) << ", \"read\": " << list(r.read) << "}";
    }
    out << "\n]}\n";
    out.close();
    if (!out) { refuse("cannot write " + o.json); }
}

int bench(const options & o, const std::vector<int> & cores) {
    printf("%s, %zu cores; %d MiB of weights, rows of %d, median of %d times %g ms\n", cpu_model().c_str(), cores.size(), o.mib, o.row, o.repeats, 1000.0*o.seconds);
    printf("GB/s of weights, and the share of what as many threads read; columns are tokens an expert\n");
    printf("type   kernel       prefetch thr.   read ");
    for (int width : o.widths) { printf(" %11d", width); }
    printf("\n");
    buffer weights((size_t) o.mib << 20);
    std::vector<result> results;
    for (int n_threads : o.threads) {
        for (ggml_type type : o.types) {
            const std::vector<result> some = bench_type(o, type, weights, cores, n_threads);
            print_lines(o, some);
            results.insert(results.end(), some.begin(), some.end());
        }
    }
    if (!o.json.empty()) { write_json(o, cores.size(), results); }
    return 0;
}

//
// command line
//

std::vector<std::string> split(const std::string & list) {
    std::vector<std::string> parts;
    std::stringstream in(list);
    for (std::string part; std::getline(in, part, ','); ) { parts.push_back(part); }
    return parts;
}

int number(const std::string & text, int lowest) {
    char * end = nullptr;
    const long v = strtol(text.c_str(), &end, 10);
    if (text.empty() || *end || v < lowest || v > 1 << 20) { refuse("'" + text + "' is no whole number from " + std::to_string(lowest)); }
    return (int) v;
}

std::vector<int> numbers(const std::string & list, int lowest) {
    std::vector<int> v;
    for (const std::string & part : split(list)) { v.push_back(number(part, lowest)); }
    if (v.empty()) { refuse("a list of numbers is empty"); }
    return v;
}

std::vector<ggml_type> types_named(const std::string & list) {
    std::vector<ggml_type> found;
    for (const std::string & name : split(list)) {
        const ggml_type * t = std::find_if(std::begin(TYPES), std::end(TYPES), [&](ggml_type type) { return name == ggml_type_name(type); });
        if (t == std::end(TYPES)) { refuse("no kernel of our own for type '" + name + "'"); }
        found.push_back(*t);
    }
    return found;
}

std::vector<int> levels_named(const std::string & list) {
    const int best = moe_kernel_set_isa_limit(BEST);
    std::vector<int> found;
    for (const std::string & name : split(list)) {
        int level = 0;
        while (level <= BEST && name != LEVELS[level]) { level++; }
        if (level > best) { refuse("this machine has no '" + name + "'"); }
        found.push_back(level);
    }
    return found;
}

options parse(int argc, char ** argv, size_t n_cores) {
    options o;
    o.types.assign(TYPES, TYPES + 9);
    o.levels = { moe_kernel_set_isa_limit(BEST) };
    for (int t : { 1, 4, 8, 16 }) {
        if (t <= (int) n_cores) { o.threads.push_back(t); }
    }
    for (int i = 2; i < argc; i += 2) {
        const std::string name = argv[i];
        if (i + 1 == argc) { refuse(name + " wants a value"); }
        const std::string value = argv[i + 1];
        if      (name == "--threads")  { o.threads  = numbers(value, 1); }
        else if (name == "--widths")   { o.widths   = numbers(value, 1); }
        else if (name == "--prefetch") { o.prefetch = numbers(value, 0); }
        else if (name == "--types")    { o.types    = types_named(value); }
        else if (name == "--levels")   { o.levels   = levels_named(value); }
        else if (name == "--row")      { o.row      = number(value, 256); }
        else if (name == "--mib")      { o.mib      = number(value, 1); }
        else if (name == "--repeats")  { o.repeats  = number(value, 1); }
        else if (name == "--ms")       { o.seconds  = number(value, 1)/1000.0; }
        else if (name == "--json")     { o.json     = value; }
        else { refuse("unknown option " + name); }
    }
    if (*std::max_element(o.threads.begin(), o.threads.end()) > (int) n_cores) {
        refuse("more threads asked for than the " + std::to_string(n_cores) + " cores that this process may use");
    }
    if (o.row % 256) { refuse("--row wants a multiple of 256"); }
    if (o.mib > 4096) { refuse("--mib takes at most 4096"); }
    if ((size_t) o.mib << 20 < (size_t) o.row*2*DISTINCT_ROWS) { refuse("--mib is too small for rows of " + std::to_string(o.row)); }
    if (!o.json.empty() && !std::ofstream(o.json, std::ios::app)) { refuse("cannot write " + o.json); } // now, not after a minute
    return o;
}

} // namespace

int main(int argc, char ** argv) {
    ggml_cpu_init();
    if (argc == 1) { return test(); }
    if (strcmp(argv[1], "--bench") != 0) { refuse("it takes nothing, or --bench and its options: see the head of the source"); }
    const std::vector<int> cores = usable_cores();
    return bench(parse(argc, argv, cores.size()), cores);
}
