// The cold lane's kernels against ggml's vec_dot.
//
//   test_moe_kernels           correctness: 'ok' and 'FAILED' lines, exit code 1 if anything failed
//   test_moe_kernels --bench   GB/s of weights by type, instruction set and columns, one thread, from DRAM
//
// Build (GGML = .../vendor/llama.cpp/ggml, LIB = a folder with libggml-base and libggml-cpu):
//   g++ -O3 -DNDEBUG -std=c++17 -I$SRC -I$GGML/include -I$GGML/src test_moe_kernels.cpp $SRC/moe-kernels.cpp
//       -L$LIB -lggml-cpu -lggml-base -Wl,-rpath,$LIB -o test_moe_kernels

#include "moe-kernels.h"

#include "ggml-cpu.h"
#include "ggml-quants.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

// Both sides compute each block exactly, in integers, and differ in how they round when they add blocks in float: the
// error is a few float epsilons (6e-8) of the sum of magnitudes, growing slowly with the number of blocks. Seen: 4e-7
// where all products have one sign, below 2e-7 elsewhere. The smallest real mistake, one weight of 2816 off by one step,
// gives 7e-6 in Q8_0 and more in the other types (see the negative control).
constexpr double TOLERANCE = 1e-6;

const ggml_type TYPES[] = { GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };
const char * const LEVELS[] = { "none", "avx2", "avx512-vnni" };

using bytes = std::vector<uint8_t>;
using floats = std::vector<float>;

std::mt19937 rng(1234);

bool is_k_quant(ggml_type type) { return ggml_blck_size(type) == 256; }

std::vector<int> lengths(ggml_type type) {
    std::vector<int> n = { 256, 512, 768, 2048, 2816 };
    if (!is_k_quant(type)) {
        n.insert(n.end(), { 32, 96, 2880 });
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

void put_half(bytes & b, size_t offset, float f) {
    const ggml_fp16_t h = ggml_fp32_to_fp16(f);
    memcpy(b.data() + offset, &h, sizeof(h));
}

// Every bit pattern, also those that the quantiser does not write (scales of -128, minima of 63). Only the float scales
// are made sane.
bytes random_bits_row(ggml_type type, int n) {
    bytes row(ggml_row_size(type, n));
    for (uint8_t & b : row) { b = (uint8_t) rng(); }
    for (size_t at = 0; at < row.size(); at += ggml_type_size(type)) {
        put_half(row, type == GGML_TYPE_Q6_K ? at + 208 : at, 0.01f);
        if (type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q5_K) {
            put_half(row, at + 2, 0.02f);
        }
    }
    return row;
}

// all weight bits set and every activation +-127: the largest products that the 16- and 32-bit sums have to hold
bytes all_ones_row(ggml_type type, int n) {
    bytes row = random_bits_row(type, n);
    const bytes scales = row;
    memset(row.data(), type == GGML_TYPE_Q8_0 ? 0x80 : 0xff, row.size());
    for (size_t at = 0; at < row.size(); at += ggml_type_size(type)) {
        const size_t d = type == GGML_TYPE_Q6_K ? 208 : 0;
        memcpy(&row[at + d], &scales[at + d], type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q5_K ? 4 : 2);
        if (type == GGML_TYPE_Q6_K) { memset(&row[at + 192], 0x80, 16); }
    }
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
    if (dot_type != GGML_TYPE_Q8_K) {
        return dequantise_row(dot_type, col, n);
    }
    floats v(n);
    dequantize_row_q8_K((const block_q8_K *) col.data(), v.data(), n);
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

// Memory that ends where an unreadable page begins: a kernel that reads past its data faults.
struct guarded {
    uint8_t * base;
    size_t size;
    uint8_t * data;

    explicit guarded(const bytes & content) {
        const size_t page = (size_t) sysconf(_SC_PAGESIZE);
        const size_t used = (content.size() + page - 1)/page*page;
        size = used + page;
        base = (uint8_t *) mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED || mprotect(base + used, page, PROT_NONE) != 0) { perror("mmap"); exit(2); }
        data = base + used - content.size();
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
        { "large",           row_of(normal, 1000.0f),  col_of(normal, 10000.0f) },
        { "small",           row_of(normal, 0.0001f),  col_of(normal, 0.0001f)  },
        { "outliers",        row_of(outliers, 0.02f),  col_of(outliers, 1.0f)   },
        { "random bits",     random_bits_row,          col_of(normal, 1.0f)     },
        { "all bits, +127",  all_ones_row,             plus_127 },
        { "all bits, -127",  all_ones_row,             [](int n) { return floats(n, 3.0f); } },
    };
}

struct errors { double ggml = 0.0, exact = 0.0, ggml_exact = 0.0; }; // ours to ggml, ours to exact, ggml's to exact

// one row and up to four different columns, at the end of readable memory
void check_row(const moe_kernel & k, ggml_type type, int n, const bytes & row, const std::vector<bytes> & cols, errors & worst) {
    const guarded x(row);
    std::vector<std::unique_ptr<guarded>> held;
    std::vector<const void *> y;
    std::vector<expected> want;
    for (const bytes & col : cols) {
        held.push_back(std::make_unique<guarded>(col));
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
    snprintf(s, sizeof(s), "%-5s %-12s", ggml_type_name(type), name);
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
                check_row(k, type, n, t.row(type, n), cols, worst);
            }
        }
        char s[160];
        snprintf(s, sizeof(s), "%s %-15s 1-4 columns, %zu lengths: to ggml %.1e (to exact %.1e, ggml's %.1e)",
                 label(type, k.name).c_str(), t.name.c_str(), lengths(type).size(), worst.ggml, worst.exact, worst.ggml_exact);
        ok &= report(worst.ggml < TOLERANCE, s);
    }
    const char * want = level == 0 ? "ggml vec_dot" : LEVELS[level];
    return ok & report(strcmp(k.name, want) == 0, label(type, k.name) + " is the kernel chosen");
}

// the comparison itself must see one weight that is off by one step
bool check_negative_control(ggml_type type) {
    const int n = 2816;
    const moe_kernel k = moe_kernel_for(type);
    const bytes row = quantise_row(type, normal(n, 0.02f));
    const bytes col = quantise_column(type, floats(n, 1.0f));
    bytes wrong = row;
    // a low bit of a weight in the middle block
    const size_t at = ggml_type_size(type)*(size_t) (n/ggml_blck_size(type)/2);
    wrong[at + (type == GGML_TYPE_Q4_K ? 80 : type == GGML_TYPE_Q5_K ? 100 : 10)] ^= 1;
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

// a type without a kernel of its own, and allow_own = false
bool check_fallback() {
    bool ok = true;
    const int n = 512;
    for (ggml_type type : { GGML_TYPE_Q2_K, GGML_TYPE_IQ4_XS, GGML_TYPE_Q5_0 }) {
        errors worst;
        const moe_kernel k = moe_kernel_for(type);
        check_row(k, type, n, quantise_row(type, normal(n, 0.02f)),
                  { quantise_column(type, normal(n, 1.0f)), quantise_column(type, normal(n, 1.0f)) }, worst);
        ok &= report(worst.ggml == 0.0 && strcmp(k.name, "ggml vec_dot") == 0, label(type, k.name) + " fallback, bitwise");
    }
    const moe_kernel k = moe_kernel_for(GGML_TYPE_Q4_K, false);
    return ok & report(strcmp(k.name, "ggml vec_dot") == 0, "allow_own = false takes ggml's vec_dot");
}

int test() {
    bool ok = true;
    const int best = moe_kernel_set_isa_limit(2);
    printf("instruction set: %s, tolerance %.0e of sum |x*y|\n", moe_kernel_isa(), TOLERANCE);
    for (int level = 0; level <= best; level++) {
        ok &= report(moe_kernel_set_isa_limit(level) == level && strcmp(moe_kernel_isa(), LEVELS[level]) == 0,
                     std::string("limit ") + LEVELS[level]);
        for (ggml_type type : TYPES) {
            ok &= check_type(type, level);
            ok &= check_neighbours(type);
            ok &= check_negative_control(type);
        }
    }
    for (int level = best + 1; level <= 2; level++) {
        printf("skipped %s: this machine does not have it\n", LEVELS[level]);
    }
    ok &= check_fallback();
    printf("%s\n", ok ? "all ok" : "FAILED");
    return ok ? 0 : 1;
}

//
// bench
//

// weights of many rows, far larger than the caches; the content repeats
bytes many_rows(ggml_type type, int n, size_t total) {
    const int distinct = 64;
    bytes some;
    for (int i = 0; i < distinct; i++) {
        const bytes row = quantise_row(type, normal(n, 0.02f));
        some.insert(some.end(), row.begin(), row.end());
    }
    bytes all;
    all.reserve(total + some.size());
    while (all.size() < total) { all.insert(all.end(), some.begin(), some.end()); }
    return all;
}

double gb_per_s(const moe_kernel & k, ggml_type type, int n, const bytes & weights, const std::vector<const void *> & cols, int passes) {
    const size_t row_size = ggml_row_size(type, n);
    const moe_vec_dot_t vec_dot = ggml_get_type_traits_cpu(type)->vec_dot;
    double best = 0.0, sink = 0.0;
    for (int pass = 0; pass < passes; pass++) { // the best pass: the machine is shared
        float out[MOE_MAX_COLS];
        const auto start = std::chrono::steady_clock::now();
        for (size_t at = 0; at < weights.size(); at += row_size) {
            k.fn(n, weights.data() + at, cols.data(), (int) cols.size(), out, vec_dot);
            sink += out[0];
        }
        const std::chrono::duration<double> s = std::chrono::steady_clock::now() - start;
        best = std::max(best, (double) weights.size()/s.count()/1e9);
    }
    if (sink == 0.5) { printf(" "); } // the results are used
    return best;
}

void bench_type(ggml_type type, int n, size_t total) {
    const bytes weights = many_rows(type, n, total);
    std::vector<bytes> cols;
    for (int c = 0; c < MOE_MAX_COLS; c++) { cols.push_back(quantise_column(type, normal(n, 1.0f))); }
    const int passes = total > (32u << 20) ? 4 : 400;
    for (int level = 0; level <= moe_kernel_set_isa_limit(2); level++) {
        moe_kernel_set_isa_limit(level);
        const moe_kernel k = moe_kernel_for(type);
        printf("%-5s n %4d %-12s", ggml_type_name(type), n, k.name);
        std::vector<const void *> y;
        for (const bytes & col : cols) {
            y.push_back(col.data());
            printf(" %7.2f", gb_per_s(k, type, n, weights, y, passes));
        }
        printf("\n");
        fflush(stdout);
    }
    moe_kernel_set_isa_limit(2);
}

int bench() {
    for (size_t total : { (size_t) 192 << 20, (size_t) 512 << 10 }) {
        printf("GB/s of weights, one thread, %zu KiB of weights; 1, 2, 3, 4 columns\n", total >> 10);
        for (int n : { 2048, 768 }) {
            for (ggml_type type : TYPES) { bench_type(type, n, total); }
        }
    }
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    ggml_cpu_init();
    return argc > 1 && strcmp(argv[1], "--bench") == 0 ? bench() : test();
}
